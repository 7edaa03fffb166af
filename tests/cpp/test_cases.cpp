// Problems whose answers come from other projects, replayed through the backends as the Python
// package calls them: both kernel families, every CPU target of this machine. Reads what
// tests/export_cases.py wrote; an argument "materialized" or "fused" leaves the other family out.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "core/cpu_target.h"
#include "dispatch/backend.h"
#include "operand_of.h"

namespace {

constexpr std::int64_t kVersion = 1;
constexpr float kUnwritten = std::numeric_limits<float>::quiet_NaN();

class Reader {
 public:
  explicit Reader(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot open " + path);
    bytes_.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  template <typename T>
  std::vector<T> array(std::int64_t length) {
    const std::size_t size = static_cast<std::size_t>(length) * sizeof(T);
    if (length < 0 || size > bytes_.size() - at_) throw std::runtime_error("the file is cut short");
    std::vector<T> values(static_cast<std::size_t>(length));
    if (size > 0) std::memcpy(values.data(), bytes_.data() + at_, size);
    at_ += size;
    return values;
  }
  template <typename T>
  T value() {
    return array<T>(1).front();
  }
  std::string text(std::int64_t length) {
    const std::vector<char> characters = array<char>(length);
    return {characters.begin(), characters.end()};
  }
  std::string name() { return text(value<std::int64_t>()); }
  bool at_end() const { return at_ == bytes_.size(); }

 private:
  std::vector<char> bytes_;
  std::size_t at_ = 0;
};

struct Answer {
  std::string name;
  double tolerance;
  std::vector<double> values;
};

struct Case {
  std::string name;
  forge::Problem problem;
  std::vector<std::uint8_t> ignored;  // [B, Tq]
  std::vector<float> q, k, v, dout;
  std::vector<Answer> answers;

  std::int64_t query_size() const { return problem.B * problem.Tq * problem.H * problem.hd; }
  std::int64_t key_size() const { return problem.B * problem.Tk * problem.Hkv * problem.hd; }
  std::int64_t rows() const { return problem.B * problem.H * problem.Tq; }
};

Case read_case(Reader& reader) {
  Case result;
  result.name = reader.name();
  forge::Problem& problem = result.problem;
  const auto sizes = reader.array<std::int64_t>(9);
  problem.B = sizes[0];
  problem.Tq = sizes[1];
  problem.Tk = sizes[2];
  problem.H = static_cast<forge::Int32>(sizes[3]);
  problem.Hkv = static_cast<forge::Int32>(sizes[4]);
  problem.hd = problem.hv = static_cast<forge::Int32>(sizes[5]);
  problem.causal = sizes[6] != 0;
  problem.window_left = sizes[7];
  problem.window_right = sizes[8];
  problem.scale = reader.value<double>();
  problem.softcap = reader.value<double>();
  for (std::int64_t b = 0; b < problem.B; ++b) {
    const auto range = reader.array<std::int64_t>(3);
    problem.ranges.push_back({range[0], range[1], range[2]});
  }
  result.ignored = reader.array<std::uint8_t>(problem.B * problem.Tq);
  result.q = reader.array<float>(result.query_size());
  result.k = reader.array<float>(result.key_size());
  result.v = reader.array<float>(result.key_size());
  result.dout = reader.array<float>(result.query_size());
  const auto answers = reader.value<std::int64_t>();
  for (std::int64_t i = 0; i < answers; ++i) {
    Answer answer;
    answer.name = reader.name();
    answer.tolerance = reader.value<double>();
    answer.values = reader.array<double>(reader.value<std::int64_t>());
    result.answers.push_back(std::move(answer));
  }
  return result;
}

std::vector<Case> read_cases(const std::string& path) {
  Reader reader(path);
  if (reader.text(8) != "FORGECAS" || reader.value<std::int64_t>() != kVersion) {
    throw std::runtime_error(path + " is not a file of cases of version 1");
  }
  std::vector<Case> cases;
  const auto count = reader.value<std::int64_t>();
  for (std::int64_t i = 0; i < count; ++i) cases.push_back(read_case(reader));
  if (!reader.at_end()) throw std::runtime_error(path + " goes on after the last case");
  return cases;
}

// What one family computed on one target. Unwritten elements stay NaN and fail every comparison.
struct Result {
  std::string family;  // the family that ran
  std::vector<float> out, probs, row_max, row_sum, lse, dq, dk, dv;

  const std::vector<float>& named(const std::string& name) const {
    if (name == "out") return out;
    if (name == "probs") return probs;
    if (name == "lse") return lse;
    if (name == "dq") return dq;
    if (name == "dk") return dk;
    if (name == "dv") return dv;
    throw std::runtime_error("unknown array '" + name + "'");
  }
};

Result run(const Case& given, forge::Family family, const std::string& target) {
  forge::Problem problem = given.problem;
  problem.family = family;
  const auto sized = [](std::int64_t size) {
    return std::vector<float>(static_cast<std::size_t>(size), kUnwritten);
  };
  Result result;
  for (auto* array : {&result.out, &result.dq}) *array = sized(given.query_size());
  for (auto* array : {&result.dk, &result.dv}) *array = sized(given.key_size());
  for (auto* array : {&result.row_max, &result.row_sum, &result.lse}) {
    *array = sized(given.rows());
  }
  const bool keeps_probs = family == forge::Family::kMaterialized;
  if (keeps_probs) result.probs = sized(given.rows() * problem.Tk);

  const std::pair<forge::BufferIndex, const std::vector<float>*> operands[] = {
      {forge::kBufferQ, &given.q},
      {forge::kBufferK, &given.k},
      {forge::kBufferV, &given.v},
      {forge::kBufferO, &result.out},
      {forge::kBufferP, &result.probs},
      {forge::kBufferRowMax, &result.row_max},
      {forge::kBufferRowSum, &result.row_sum},
      {forge::kBufferDout, &given.dout},
      {forge::kBufferDq, &result.dq},
      {forge::kBufferDk, &result.dk},
      {forge::kBufferDv, &result.dv}};
  for (const auto& [slot, values] : operands) forge_test::give(problem, slot, *values);
  const forge::Backend* backend = forge::choose_backend(problem, "cpu").backend;
  result.family = backend->run(problem, target).kernel;
  for (std::size_t row = 0; row < result.lse.size(); ++row) {
    result.lse[row] = result.row_max[row] + std::log(result.row_sum[row]);
  }

  problem.pass = forge::Pass::kBackward;
  backend->run(problem, target);
  return result;
}

// Whether element `i` of the array belongs to a query row that its project gives no meaning to.
bool is_ignored(const Case& given, const std::string& name, std::size_t i) {
  if (name == "dk" || name == "dv") return false;
  const forge::Problem& problem = given.problem;
  const auto at = static_cast<std::int64_t>(i);
  std::int64_t row;  // over [B, Tq]
  if (name == "lse" || name == "probs") {
    const std::int64_t query = name == "lse" ? at : at / problem.Tk;  // over [B, H, Tq]
    row = query / (problem.H * problem.Tq) * problem.Tq + query % problem.Tq;
  } else {
    row = at / (problem.H * problem.hd);
  }
  return given.ignored[static_cast<std::size_t>(row)] != 0;
}

void check_answer(const Case& given, const Answer& answer, const Result& result,
                  const std::string& where) {
  const std::vector<float>& got = result.named(answer.name);
  // A fixed order of operations may cost half as much again as a plain float32 implementation.
  const double bound = (result.family == "materialized" ? 1.5 : 1.0) * answer.tolerance;
  CHECK_MSG(got.size() == answer.values.size(), "%s: size of %s", where.c_str(),
            answer.name.c_str());
  double worst = 0;
  for (std::size_t i = 0; i < std::min(got.size(), answer.values.size()); ++i) {
    if (is_ignored(given, answer.name, i)) continue;
    const double want = answer.values[i];
    const double value = static_cast<double>(got[i]);
    if (value == want) continue;  // infinities too
    const double error = std::abs(value - want);
    worst = error >= worst || std::isnan(error) ? error : worst;
    if (std::isnan(worst)) break;
  }
  CHECK_MSG(worst <= bound, "%s: %s is off by %g, allowed are %g", where.c_str(),
            answer.name.c_str(), worst, bound);
}

std::size_t replay(const std::vector<Case>& cases, forge::Family family) {
  std::size_t compared = 0;
  for (const forge::CpuTarget cpu_target : forge::usable_cpu_targets()) {
    const std::string target = forge::cpu_target_name(cpu_target);
    std::string ran;
    for (const Case& given : cases) {
      const Result result = run(given, family, target);
      ran = result.family;
      const std::string where = given.name + ", " + forge::family_name(family) + " on " + target;
      for (const Answer& answer : given.answers) {
        if (answer.name == "probs" && family == forge::Family::kFused) continue;  // keeps none
        check_answer(given, answer, result, where);
        ++compared;
      }
    }
    std::printf("%zu cases, kernel='%s' on %s: the %s kernels ran\n", cases.size(),
                forge::family_name(family), target.c_str(), ran.c_str());
  }
  return compared;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2 || count > 3) {
    std::fprintf(stderr, "usage: test_cases FILE [materialized|fused]\n");
    return 2;
  }
  const std::string only = count == 3 ? arguments[2] : "";
  try {
    const std::vector<Case> cases = read_cases(arguments[1]);
    CHECK(cases.size() == 107);
    std::size_t compared = 0;
    for (const forge::Family family : {forge::Family::kMaterialized, forge::Family::kFused}) {
      if (only.empty() || only == forge::family_name(family)) compared += replay(cases, family);
    }
    std::printf("%zu arrays compared\n", compared);
    CHECK(compared > 0);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return test_result();
}
