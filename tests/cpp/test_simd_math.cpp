// exp2, exp and tanh against float64 over the float range: every 97th float, or every one with an
// argument ("all", or a stride). Also the transposes and partial loads of each target.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "check.h"
#include "core/cpu_target.h"
#include "simd_kernels.h"

namespace {

float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// |got - want| in units of the float grid at want.
double ulps(float got, double want) {
  int exponent;
  std::frexp(want, &exponent);
  const double ulp = std::ldexp(1.0, (exponent < -125 ? -125 : exponent) - 24);
  return std::fabs(got - want) / ulp;
}

struct Worst {
  double ulps = 0;
  float at = 0;
  void add(double error, float x) {
    if (!(error <= ulps)) ulps = error, at = x;
  }
};

using Function = void (*)(const float*, float*, std::int64_t);

// Calls visit(x, f(x)) for every stride-th float of the bit patterns [from, to].
template <typename Visit>
void sweep(Function function, std::uint64_t from, std::uint64_t to, std::uint64_t stride,
           Visit visit) {
  constexpr int kBlock = 4096;
  std::vector<float> x(kBlock), y(kBlock);
  for (std::uint64_t bits = from; bits <= to;) {
    int n = 0;
    for (; n < kBlock && bits <= to; bits += stride)
      x[n++] = float_of(static_cast<std::uint32_t>(bits));
    for (int i = n; i < kBlock; ++i) x[i] = 0;
    function(x.data(), y.data(), kBlock);
    for (int i = 0; i < n; ++i) visit(x[i], y[i]);
  }
}

void test_functions(const SimdKernels& kernels, bool has_fma, std::uint64_t stride) {
  Worst exp2_worst, exp_worst, tanh_worst;
  auto check_exp2 = [&](float x, float y) {
    if (std::isnan(x)) {
      CHECK_MSG(std::isnan(y), "%s exp2(nan) is %g", kernels.name, y);
    } else if (x <= -126.5f) {
      CHECK_MSG(y == 0, "%s exp2(%g) is %g", kernels.name, x, y);
    } else {
      exp2_worst.add(ulps(y, std::exp2(static_cast<double>(x))), x);
    }
  };
  auto check_exp = [&](float x, float y) {
    if (std::isnan(x)) {
      CHECK_MSG(std::isnan(y), "%s exp(nan) is %g", kernels.name, y);
    } else if (x < -87.69f) {
      CHECK_MSG(y == 0, "%s exp(%g) is %g", kernels.name, x, y);
    } else if (x > -87.68f) {
      const double allowed = 2 - x * (has_fma ? 0.25 : 1.5);
      exp_worst.add(ulps(y, std::exp(static_cast<double>(x))) / allowed, x);
    }
  };
  auto check_tanh = [&](float x, float y) {
    if (std::isnan(x)) {
      CHECK_MSG(std::isnan(y), "%s tanh(nan) is %g", kernels.name, y);
    } else {
      tanh_worst.add(ulps(y, std::tanh(static_cast<double>(x))), x);
      CHECK_MSG(std::signbit(x) == std::signbit(y), "%s tanh(%g) is %g", kernels.name, x, y);
      if (std::isinf(x)) CHECK(std::fabs(y) == 1);
      if (std::fabs(x) < 1e-4f) CHECK_MSG(x == y, "%s tanh(%g) is %g", kernels.name, x, y);
    }
  };
  // -0 to -inf, then NaNs of both signs, then all of tanh.
  sweep(kernels.exp2_of_nonpositive, 0x80000000u, 0xffffffffu, stride, check_exp2);
  sweep(kernels.exp2_of_nonpositive, 0x7f800001u, 0x7fffffffu, stride, check_exp2);
  sweep(kernels.exp_of_nonpositive, 0x80000000u, 0xffffffffu, stride, check_exp);
  sweep(kernels.exp_of_nonpositive, 0x7f800001u, 0x7fffffffu, stride, check_exp);
  sweep(kernels.tanh, 0, 0xffffffffu, stride, check_tanh);
  sweep(kernels.tanh, 0x80000000u, 0x80000000u, 1, check_tanh);  // -0
  sweep(kernels.tanh, 0x7f800000u, 0x7f800000u, 1, check_tanh);
  sweep(kernels.tanh, 0xff800000u, 0xff800000u, 1, check_tanh);
  std::printf("%s: exp2 %.3f ulp at %g, tanh %.3f ulp at %g, exp %.3f of its bound at %g\n",
              kernels.name, exp2_worst.ulps, exp2_worst.at, tanh_worst.ulps, tanh_worst.at,
              exp_worst.ulps, exp_worst.at);
  CHECK(exp2_worst.ulps <= 2);
  CHECK(exp_worst.ulps <= 1);
  CHECK(tanh_worst.ulps <= 2);
  float zeros[64] = {}, ones[64];
  for (Function function : {kernels.exp2_of_nonpositive, kernels.exp_of_nonpositive}) {
    function(zeros, ones, kernels.lanes);
    CHECK(ones[0] == 1);
  }
}

void test_moves(const SimdKernels& kernels) {
  const int lanes = kernels.lanes;
  std::vector<float> from(lanes * lanes), to(lanes * lanes);
  for (int i = 0; i < lanes * lanes; ++i) from[i] = static_cast<float>(i);
  kernels.transpose(from.data(), to.data());
  for (int i = 0; i < lanes; ++i) {
    for (int j = 0; j < lanes; ++j) CHECK(to[i * lanes + j] == from[j * lanes + i]);
  }
  for (int n = 0; n <= lanes; ++n) {
    std::vector<float> copy(n + 1, -1.0f);
    std::vector<float> exact(from.begin(),
                             from.begin() + n);  // a sanitizer sees reads past the end
    kernels.copy_partial(exact.data(), copy.data(), n);
    for (int i = 0; i < n; ++i) CHECK(copy[i] == from[i]);
    CHECK(copy[n] == -1.0f);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t stride = 97;
  if (argc > 1) stride = std::strcmp(argv[1], "all") == 0 ? 1 : std::strtoull(argv[1], nullptr, 10);
  for (forge::CpuTarget target : forge::usable_cpu_targets()) {
    const SimdKernels& kernels = kernels_of(target);
    CHECK(std::strcmp(kernels.name, forge::cpu_target_name(target)) == 0);
    test_functions(kernels, target != forge::CpuTarget::kBaseline, stride > 0 ? stride : 97);
    test_moves(kernels);
  }
  return test_result();
}
