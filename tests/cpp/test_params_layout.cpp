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
                                      &params.dq, &params.dk, &params.dv}) {
    strides->batch = ++count;
    strides->row = ++count;
    strides->head = ++count;
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
  std::memset(static_cast<void*>(&problem.params), 0, sizeof problem.params);
  // The integer part of both instances has one layout: fill it with distinct bytes.
  constexpr std::size_t integers = offsetof(forge::AttnParams, scale);
  static_assert(integers == offsetof(forge::AttnParamsOf<double>, scale), "same integer part");
  unsigned char bytes[integers];
  for (std::size_t at = 0; at < integers; ++at) bytes[at] = static_cast<unsigned char>(at * 7 + 1);
  std::memcpy(static_cast<void*>(&problem.params), bytes, integers);
  problem.params.scale = 0.125;
  problem.params.softcap = 50;
  const forge::AttnParams narrow = forge::params_as<float>(problem);
  CHECK(std::memcmp(&narrow, bytes, integers) == 0);
  CHECK(narrow.scale == 0.125f);
  CHECK(narrow.softcap == 50.0f);
}

}  // namespace

int main() {
  test_fields_are_consecutive();
  test_params_as_keeps_every_field();
  return test_result();
}
