// The contract of csrc/shared/attn_math.h over float32: every 97th float, or every one with an
// argument "all", or every n-th with an argument n.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "check.h"
#include "shared/attn_math.h"

namespace {

float float_at(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Size of one unit in the last place of a float32 next to `exact`.
double ulp_of(double exact) {
  int exponent;
  std::frexp(exact, &exponent);
  return std::ldexp(1.0, (exponent < -125 ? -125 : exponent) - 24);
}

double exp_error(float x) {
  const float got = forge::attn_exp(x);
  if (x < -87.33f) return got == 0 ? 0 : 1e9;
  const double exact = std::exp(static_cast<double>(x));
  if (exact > std::numeric_limits<float>::max()) return std::isinf(got) ? 0 : 1e9;
  return std::fabs(got - exact) / ulp_of(exact);
}

double tanh_error(float x) {
  const float got = forge::attn_tanh(x);
  const double exact = std::tanh(static_cast<double>(x));
  return std::fabs(got - exact) / ulp_of(exact);
}

void test_every(std::uint64_t step) {
  double worst_exp = 0, worst_tanh = 0;
  for (std::uint64_t bits = 0; bits < (1ull << 32); bits += step) {
    const float x = float_at(static_cast<std::uint32_t>(bits));
    if (std::isnan(x)) {
      CHECK(std::isnan(forge::attn_exp(x)));
      CHECK(std::isnan(forge::attn_tanh(x)));
      continue;
    }
    worst_exp = std::fmax(worst_exp, exp_error(x));
    worst_tanh = std::fmax(worst_tanh, tanh_error(x));
    CHECK(forge::attn_tanh(-x) == -forge::attn_tanh(x));
  }
  std::printf("worst error: exp %.3f ulp, tanh %.3f ulp\n", worst_exp, worst_tanh);
  CHECK(worst_exp <= 2);
  CHECK(worst_tanh <= 2);
}

void test_ends() {
  const float inf = std::numeric_limits<float>::infinity();
  CHECK(forge::attn_exp(0.0f) == 1.0f);
  CHECK(forge::attn_exp(-inf) == 0.0f);
  CHECK(std::isinf(forge::attn_exp(inf)));
  CHECK(std::isfinite(forge::attn_exp(88.72f)));
  CHECK(forge::attn_exp(-87.34f) == 0.0f);
  CHECK(forge::attn_tanh(inf) == 1.0f);
  CHECK(forge::attn_tanh(-inf) == -1.0f);
  const float tiny = std::numeric_limits<float>::denorm_min();
  CHECK(forge::attn_tanh(tiny) == tiny);
  CHECK(std::signbit(forge::attn_tanh(-0.0f)));
}

}  // namespace

int main(int argc, char** argv) {
  test_ends();
  std::uint64_t step = 97;
  if (argc > 1) step = std::strcmp(argv[1], "all") == 0 ? 1 : std::strtoull(argv[1], nullptr, 10);
  test_every(step > 0 ? step : 97);
  return test_result();
}
