// The struct that C++ and the shaders share has no padding and keeps its fields' places: a shader
// reads it by offset. (Sizes are static_asserts in the header.)
#include <cstring>
#include <vector>

#include "check.h"
#include "core/problem.h"

namespace {

void test_fields_are_consecutive() {
  // Writing 1, 2, 3, ... through the fields must fill the memory in that order.
  forge::AttnParams params{};
  std::int64_t count = 0;
  for (forge::Int64* field :
       {&params.B, &params.Tq, &params.Tk, &params.window_left, &params.window_right}) {
    *field = ++count;
  }
  for (forge::AttnStrides* strides : {&params.q, &params.k, &params.v, &params.o, &params.dout,
                                      &params.dq, &params.dk, &params.dv, &params.rounded}) {
    strides->batch = ++count;
    strides->row = ++count;
    strides->head = ++count;
    strides->first = ++count;
  }
  for (forge::AttnPairStrides* strides :
       {&params.bias, &params.mask, &params.sinks, &params.dbias, &params.dsinks}) {
    strides->batch = ++count;
    strides->head = ++count;
    strides->row = ++count;
    strides->key = ++count;
    strides->first = ++count;
  }
  std::vector<std::int64_t> words(static_cast<std::size_t>(count));
  std::memcpy(words.data(), &params, words.size() * sizeof words[0]);
  for (std::int64_t word = 0; word < count; ++word) {
    CHECK(words[static_cast<std::size_t>(word)] == word + 1);
  }
}

void test_params_as_keeps_every_field() {
  forge::Problem problem;
  problem.B = 1;
  problem.Tq = 2;
  problem.Tk = 3;
  problem.window_left = 4;
  problem.window_right = 5;
  forge::AttnParams expected{1,  2,  3,  4,  5, {}, {}, {}, {}, {}, {},    {}, {},     {}, {},
                             {}, {}, {}, {}, 6, 7,  8,  9,  1,  1,  2 | 8, 4,  0.125f, 50};
  std::int64_t count = 100;
  for (const forge::OperandInfo& info : forge::operand_table()) {
    forge::AttnStrides* strides = forge::strides_in(expected, info.slot);
    const bool heads = info.axes == forge::Axes::kQueryHeads ||
                       info.axes == forge::Axes::kOutputHeads ||
                       info.axes == forge::Axes::kKeyHeads || info.axes == forge::Axes::kValueHeads;
    CHECK((strides != nullptr) == heads);
    forge::AttnPairStrides* pairs = forge::pair_strides_in(expected, info.slot);
    CHECK((pairs != nullptr) ==
          (info.axes == forge::Axes::kSomePairs || info.axes == forge::Axes::kSomeRows));
    if (pairs != nullptr) {
      *pairs = {count, count + 1, count + 2, count + 3, 0};
      problem.operands[info.slot].strides = {count, count + 1, count + 2, count + 3};
      count += 4;
    }
    if (strides == nullptr) continue;
    *strides = {count, count + 1, count + 2, 0};
    problem.operands[info.slot].strides = {count, count + 1, count + 2, 1};
    count += 3;
  }
  problem.operands[forge::kBufferDbias].ndim = 4;
  problem.operands[forge::kBufferDbias].shape = {1, 6, 1, 3};
  problem.operands[forge::kBufferDsinks].ndim = 3;
  problem.operands[forge::kBufferDsinks].shape = {1, 1, 2, 0};
  problem.H = 6;
  problem.Hkv = 7;
  problem.hd = 8;
  problem.hv = 9;
  problem.runs = true;
  problem.causal = true;
  problem.scale = 0.125;
  problem.softcap = 50;
  const forge::AttnParams params = forge::params_as<float>(problem);
  CHECK(std::memcmp(&params, &expected, sizeof params) == 0);
}

}  // namespace

int main() {
  test_fields_are_consecutive();
  test_params_as_keeps_every_field();
  return test_result();
}
