// Halves through the fused kernels: what the float32 kernels give, rounded once. The conversions
// here are one number at a time and share nothing with the kernels'.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "core/cpu_target.h"
#include "core/problem.h"
#include "cpu/attention.h"
#include "operand_of.h"

namespace {

using forge::DType;

double value_of(DType dtype, std::uint16_t bits) {
  if (dtype == DType::kBFloat16) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return static_cast<double>(x);
  }
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

// The nearest half of finite x, by search: halves of one sign are ordered as their bits are.
std::uint16_t nearest(DType dtype, double x) {
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  std::uint16_t low = 0, high = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
  const double size = std::fabs(x);
  while (high - low > 1) {
    const auto middle = static_cast<std::uint16_t>((low + high) / 2);
    (value_of(dtype, middle) <= size ? low : high) = middle;
  }
  const double below = value_of(dtype, low);
  // Infinity stands where the next number would.
  const double step = low == 0 ? value_of(dtype, 1) : below - value_of(dtype, low - 1);
  const double above = std::isinf(value_of(dtype, high)) ? below + step : value_of(dtype, high);
  const double to_below = size - below, to_above = above - size;
  const bool up = to_above < to_below || (to_above == to_below && low % 2 == 1);
  return static_cast<std::uint16_t>(sign | (up ? high : low));
}

struct Halves {
  std::vector<std::uint16_t> bits;
  std::vector<float> wide;
};

Halves random_halves(DType dtype, std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Halves halves;
  for (std::int64_t n = 0; n < count; ++n) {
    halves.bits.push_back(nearest(dtype, normal(random)));
    halves.wide.push_back(static_cast<float>(value_of(dtype, halves.bits.back())));
  }
  return halves;
}

forge::Problem problem_of(std::int64_t Tq, std::int64_t Tk, int hd) {
  forge::Problem problem;
  problem.B = 1;
  problem.Tq = Tq;
  problem.Tk = Tk;
  problem.H = 2;
  problem.Hkv = 1;
  problem.hd = problem.hv = hd;
  problem.causal = true;
  problem.scale = 0.25;
  problem.ranges = {{Tk - Tq, 0, Tk}};
  return problem;
}

void give_halves(forge::Problem& problem, forge::BufferIndex slot, DType dtype,
                 std::vector<std::uint16_t>& bits) {
  static const std::vector<float> nothing;
  forge_test::give(problem, slot, nothing);
  problem.operands[slot].data = bits.data();
  problem.operands[slot].dtype = dtype;
}

std::size_t count_of_differences(DType dtype, const std::vector<std::uint16_t>& got,
                                 const std::vector<float>& want) {
  std::size_t count = 0;
  for (std::size_t n = 0; n < got.size(); ++n) {
    count += got[n] != nearest(dtype, static_cast<double>(want[n]));
  }
  return count;
}

void check_problem(DType dtype, std::int64_t Tq, std::int64_t Tk, int hd, forge::CpuTarget target) {
  const std::int64_t queries = 2 * Tq * hd, keys = Tk * hd;
  Halves q = random_halves(dtype, queries, 1), k = random_halves(dtype, keys, 2);
  Halves v = random_halves(dtype, keys, 3), dout = random_halves(dtype, queries, 4);
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  std::vector<float> o(size(queries)), m(size(2 * Tq)), l(size(2 * Tq));
  std::vector<float> dq(size(queries)), dk(size(keys)), dv(size(keys));
  std::vector<std::uint16_t> half_o(size(queries)), half_dq(size(queries)), half_dk(size(keys)),
      half_dv(size(keys));
  forge::Problem wide = problem_of(Tq, Tk, hd), half = wide;
  half.dtype = half.kv_dtype = dtype;
  const std::pair<forge::BufferIndex, Halves*> inputs[] = {{forge::kBufferQ, &q},
                                                           {forge::kBufferK, &k},
                                                           {forge::kBufferV, &v},
                                                           {forge::kBufferDout, &dout}};
  for (const auto& [slot, halves] : inputs) {
    forge_test::give(wide, slot, halves->wide);
    give_halves(half, slot, dtype, halves->bits);
  }
  for (forge::Problem* problem : {&wide, &half}) {
    forge_test::give(*problem, forge::kBufferO, o);
    forge_test::give(*problem, forge::kBufferRowMax, m);
    forge_test::give(*problem, forge::kBufferRowSum, l);
  }
  forge_test::give(wide, forge::kBufferDq, dq);
  forge_test::give(wide, forge::kBufferDk, dk);
  forge_test::give(wide, forge::kBufferDv, dv);
  give_halves(half, forge::kBufferRounded, dtype, half_o);
  give_halves(half, forge::kBufferDq, dtype, half_dq);
  give_halves(half, forge::kBufferDk, dtype, half_dk);
  give_halves(half, forge::kBufferDv, dtype, half_dv);
  for (forge::Problem* problem : {&wide, &half}) {
    problem->pass = forge::Pass::kForward;
    forge::cpu::attention_fwd(*problem, target);
    problem->pass = forge::Pass::kBackward;
    forge::cpu::attention_bwd(*problem, target);
  }
  const char* on = forge::cpu_target_name(target);
  CHECK_MSG(count_of_differences(dtype, half_o, o) == 0, "o of %s on %s", dtype_name(dtype), on);
  CHECK_MSG(count_of_differences(dtype, half_dq, dq) == 0, "dq of %s on %s", dtype_name(dtype), on);
  CHECK_MSG(count_of_differences(dtype, half_dk, dk) == 0, "dk of %s on %s", dtype_name(dtype), on);
  CHECK_MSG(count_of_differences(dtype, half_dv, dv) == 0, "dv of %s on %s", dtype_name(dtype), on);
}

// One key: o is v, whatever that is.
void check_every_half(DType dtype, std::int64_t Tq, forge::CpuTarget target) {
  constexpr int hd = 64;
  constexpr std::int64_t rows = (1 << 16) / hd;
  for (std::int64_t row = 0; row < rows; ++row) {
    std::vector<std::uint16_t> v(hd), zero(static_cast<std::size_t>(2 * Tq * hd)), o = zero;
    for (int n = 0; n < hd; ++n)
      v[static_cast<std::size_t>(n)] = static_cast<std::uint16_t>(row * hd + n);
    forge::Problem problem = problem_of(Tq, 1, hd);
    problem.dtype = problem.kv_dtype = dtype;
    problem.causal = false;
    give_halves(problem, forge::kBufferQ, dtype, zero);
    give_halves(problem, forge::kBufferK, dtype, zero);
    give_halves(problem, forge::kBufferV, dtype, v);
    give_halves(problem, forge::kBufferO, dtype, o);
    forge::cpu::attention_fwd(problem, target);
    for (std::size_t n = 0; n < o.size(); ++n) {
      const double got = value_of(dtype, o[n]), want = value_of(dtype, v[n % hd]);
      const bool same = std::isnan(want) ? std::isnan(got) : got == want;
      CHECK_MSG(same, "%s %#x on %s", dtype_name(dtype), v[n % hd], forge::cpu_target_name(target));
    }
  }
}

}  // namespace

int main() {
  for (const forge::CpuTarget target : forge::usable_cpu_targets()) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      check_problem(dtype, 37, 50, 20, target);
      check_problem(dtype, 1, 200, 33, target);
      check_problem(dtype, 150, 150, 64, target);
      for (const std::int64_t Tq : {1, 33}) check_every_half(dtype, Tq, target);
    }
  }
  return test_result();
}
