// What core/validate refuses, by exception type and by the name in the message.
#include <limits>
#include <stdexcept>
#include <string>

#include "check.h"
#include "core/errors.h"
#include "core/validate.h"

namespace {

forge::Problem valid_problem() {
  forge::Problem problem;
  problem.params.B = 2;
  problem.params.Tq = 3;
  problem.params.Tk = 5;
  problem.params.H = 4;
  problem.params.Hkv = 2;
  problem.params.hd = 8;
  problem.params.window_left = -1;
  problem.params.window_right = -1;
  problem.params.scale = 1;
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
  CHECK(problem_refused("num_heads", [](P p) { p.params.H = 0; }));
  CHECK(problem_refused("num_kv_heads", [](P p) { p.params.Hkv = 0; }));
  CHECK(problem_refused("head dim", [](P p) { p.params.hd = 0; }));
  CHECK(problem_refused("4 and 3", [](P p) { p.params.Hkv = 3; }));
  CHECK(problem_refused("window left", [](P p) { p.params.window_left = -2; }));
  CHECK(problem_refused("window right", [](P p) { p.params.window_right = -2; }));
  CHECK(problem_refused("scale", [&](P p) { p.params.scale = -inf; }));
  CHECK(problem_refused("scale", [](P p) { p.params.scale = 1e300; }));
  CHECK(problem_refused("softcap", [](P p) { p.params.softcap = -1; }));
  CHECK(problem_refused("softcap", [](P p) { p.params.softcap = 1e-60; }));
  CHECK(problem_refused("ranges", [](P p) { p.ranges.pop_back(); }));
  CHECK(problem_refused("key_start", [](P p) { p.ranges[1].key_start = -1; }));
  CHECK(problem_refused("key_end", [](P p) { p.ranges[1].key_end = 6; }));
}

forge::ArrayView heads_array() {
  forge::ArrayView view;
  view.name = "q";
  view.writeable = true;
  view.shape = {2, 3, 4, 8};
  view.strides = {96, 32, 8, 1};
  return view;
}

void test_arrays() {
  const auto check = [](const forge::ArrayView& view) {
    forge::check_heads_array(view, {2, 3, 4, 8}, forge::DType::kFloat32);
  };
  check(heads_array());
  forge::ArrayView wrong = heads_array();
  wrong.shape[1] = 2;
  CHECK(refuses<std::invalid_argument>("q must have shape (2, 3, 4, 8)", [&] { check(wrong); }));
  wrong = heads_array();
  wrong.dtype = forge::DType::kFloat64;
  CHECK(refuses<forge::TypeError>("q must be float32", [&] { check(wrong); }));
  wrong = heads_array();
  wrong.strides[3] = 2;
  CHECK(refuses<std::invalid_argument>("unit stride", [&] { check(wrong); }));
  wrong = heads_array();
  wrong.writeable = false;
  CHECK(refuses<std::invalid_argument>("writeable", [&] { forge::check_output(wrong); }));
  wrong = heads_array();
  wrong.strides[1] = 0;
  CHECK(refuses<std::invalid_argument>("zero stride", [&] { forge::check_output(wrong); }));
}

void test_contiguous_arrays() {
  const auto check = [](const forge::ArrayView& view) {
    forge::check_contiguous_array(view, {2, 3, 4, 8}, forge::DType::kFloat32);
  };
  check(heads_array());
  forge::ArrayView strided = heads_array();
  strided.strides[0] = 192;
  CHECK(refuses<std::invalid_argument>("C-contiguous", [&] { check(strided); }));
}

}  // namespace

int main() {
  test_problem();
  test_arrays();
  test_contiguous_arrays();
  return test_result();
}
