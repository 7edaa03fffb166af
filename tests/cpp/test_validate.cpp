// What core/validate refuses, by exception type and by the name in the message.
#include <limits>
#include <set>
#include <stdexcept>
#include <string>

#include "check.h"
#include "core/errors.h"
#include "core/validate.h"
#include "operand_of.h"

namespace {

forge::Problem valid_problem() {
  forge::Problem problem;
  problem.B = 2;
  problem.Tq = 3;
  problem.Tk = 5;
  problem.H = 4;
  problem.Hkv = 2;
  problem.hd = problem.hv = 8;
  problem.window_left = -1;
  problem.window_right = -1;
  problem.scale = 1;
  problem.ranges = {{2, 0, 5}, {2, 0, 5}};
  return problem;
}

template <typename Error, typename Action>
bool refuses(const std::string& text, Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return std::string(error.what()).find(text) != std::string::npos;
  }
  return false;
}

template <typename Change>
bool problem_refused(const std::string& text, Change&& change) {
  forge::Problem problem = valid_problem();
  change(problem);
  return refuses<std::invalid_argument>(text, [&] { forge::check_problem(problem); });
}

void test_problem() {
  forge::check_problem(valid_problem());
  using P = forge::Problem&;
  const double inf = std::numeric_limits<double>::infinity();
  CHECK(problem_refused("num_heads", [](P p) { p.H = 0; }));
  CHECK(problem_refused("num_kv_heads", [](P p) { p.Hkv = 0; }));
  CHECK(problem_refused("head dim", [](P p) { p.hd = 0; }));
  CHECK(problem_refused("4 and 3", [](P p) { p.Hkv = 3; }));
  CHECK(problem_refused("window left", [](P p) { p.window_left = -2; }));
  CHECK(problem_refused("window right", [](P p) { p.window_right = -2; }));
  CHECK(problem_refused("scale", [&](P p) { p.scale = -inf; }));
  CHECK(problem_refused("scale", [](P p) { p.scale = 1e300; }));
  CHECK(problem_refused("softcap", [](P p) { p.softcap = -1; }));
  CHECK(problem_refused("softcap", [](P p) { p.softcap = 1e-60; }));
  CHECK(problem_refused("ranges", [](P p) { p.ranges.pop_back(); }));
  CHECK(problem_refused("key_start", [](P p) { p.ranges[1].key_start = -1; }));
  CHECK(problem_refused("key_end", [](P p) { p.ranges[1].key_end = 6; }));
}

// Whether the forward of the valid problem refuses the changed operand in these words.
template <typename Error, typename Change>
bool operand_refused(forge::BufferIndex slot, const std::string& text, Change&& change) {
  const float unread = 0;
  forge::Problem problem = valid_problem();
  problem.operands[forge::kBufferQ] = forge_test::contiguous(&unread, {2, 3, 4, 8});
  problem.operands[forge::kBufferO] = forge_test::contiguous(&unread, {2, 3, 4, 8});
  problem.operands[forge::kBufferRowMax] = forge_test::contiguous(&unread, {2, 4, 3});
  forge::check_operand(forge_test::info_of(slot), problem);
  change(problem.operands[slot]);
  return refuses<Error>(text, [&] { forge::check_operand(forge_test::info_of(slot), problem); });
}

void test_operands() {
  using O = forge::Operand&;
  using Invalid = std::invalid_argument;
  const auto q = forge::kBufferQ, o = forge::kBufferO, row_max = forge::kBufferRowMax;
  CHECK(operand_refused<Invalid>(q, "q must have shape (2, 3, 4, 8), got (2, 2, 4, 8)",
                                 [](O x) { x.shape[1] = 2; }));
  CHECK(operand_refused<Invalid>(q, "q must have shape (2, 3, 4, 8), got (2, 3, 4)",
                                 [](O x) { x.ndim = 3; }));
  CHECK(operand_refused<forge::TypeError>(q, "q must be float32, got float64",
                                          [](O x) { x.dtype = forge::DType::kFloat64; }));
  CHECK(operand_refused<Invalid>(q, "q must have a last axis of unit stride",
                                 [](O x) { x.strides[3] = 2; }));
  CHECK(operand_refused<Invalid>(o, "o must be writeable", [](O x) { x.writeable = false; }));
  CHECK(operand_refused<Invalid>(o, "o must have no zero stride, got one on axis 1",
                                 [](O x) { x.strides[1] = 0; }));
  CHECK(operand_refused<Invalid>(row_max, "row_max must be C-contiguous",
                                 [](O x) { x.strides[0] = 24; }));
}

// o once more, in halves: only beside an o of float32.
void test_rounded() {
  const float unread = 0;
  forge::Problem problem = valid_problem();
  problem.dtype = problem.kv_dtype = forge::DType::kFloat16;
  forge::Operand& o = problem.operands[forge::kBufferO];
  forge::Operand& rounded = problem.operands[forge::kBufferRounded];
  o = rounded = forge_test::contiguous(&unread, {2, 3, 4, 8});
  rounded.dtype = forge::DType::kFloat16;
  const auto refused = [&](const char* text) {
    return refuses<std::invalid_argument>(
        text, [&] { forge::check_operand(forge_test::info_of(forge::kBufferRounded), problem); });
  };
  forge::check_operand(forge_test::info_of(forge::kBufferRounded), problem);
  o.dtype = forge::DType::kFloat16;
  CHECK(refused("beside a float32 o, got float16 beside float16"));
  o.dtype = rounded.dtype = forge::DType::kFloat32;
  CHECK(refused("beside a float32 o, got float32 beside float32"));
}

// Names and slots are said once.
void test_table() {
  std::set<std::string> names;
  std::set<int> slots;
  for (const forge::OperandInfo& info : forge::operand_table()) {
    names.insert(info.name);
    slots.insert(info.slot);
  }
  CHECK(names.size() == forge::kOperands);
  CHECK(slots.size() == forge::kOperands);
}

}  // namespace

int main() {
  test_problem();
  test_operands();
  test_rounded();
  test_table();
  return test_result();
}
