// exp2, exp and tanh of whole vectors, without libm. Contract, tested over every float:
//   exp2_of_nonpositive(x)  x <= 0 or NaN. At most 2 ulp of 2^x; exactly 1 at 0; 0 from -126.5 down
//                           (no result under 0.7 of the smallest normal float); NaN only from NaN.
//   exp_of_nonpositive(t)   t <= 0 or NaN. exp2 of t * log2(e), the product not rounded where there
//                           is fma: at most 2 + |t| / 4 ulp of exp(t) (without fma 2 + 1.5 |t|);
//                           exactly 1 at 0; 0 below -87.69, at will from -87.68; NaN only from NaN.
//   tanh(x)                 At most 2 ulp; odd; +-1 at +-inf; x itself for tiny x, zeros too;
//                           NaN only from NaN.
#pragma once

#include "cpu/simd.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

constexpr Real kLog2E = 1.44269504f;

// 1.5 * 2^23 + 127: added to a number of [-127, 0], it leaves the nearest integer n in the low
// bits, as the exponent field of 2^n; 2^-127 reads as zero.
constexpr Real kRoundToExponent = 12583039.0f;

// 2^(r + n) for |r| <= 1/2; shifted is n + kRoundToExponent.
FORGE_INLINE Vec exp2_of_parts(Vec r, Vec shifted) {
  // 2^r = 1 + r * p(r), the one exact.
  Vec p;
  if (kHasFma) {  // minimax in ulps of the result: 1.05
    p = broadcast(0.0013225707225501537f);
    p = fma(p, r, broadcast(0.009671762585639954f));
    p = fma(p, r, broadcast(0.05550891533493996f));
    p = fma(p, r, broadcast(0.24022236466407776f));
    p = fma(p, r, broadcast(0.693146824836731f));
  } else {  // 0.03 ulp, to make up for the roundings
    p = broadcast(0.00015353361959569156f);
    p = fma(p, r, broadcast(0.0013398873852565885f));
    p = fma(p, r, broadcast(0.00961843691766262f));
    p = fma(p, r, broadcast(0.055503323674201965f));
    p = fma(p, r, broadcast(0.24022647738456726f));
    p = fma(p, r, broadcast(0.6931471824645996f));
  }
  p = fma(p, r, broadcast(1.0f));
  return p * from_bits(bits_of(shifted) << 23);
}

FORGE_INLINE Vec exp2_of_nonpositive(Vec x) {
  const Vec clamped = max(broadcast(-127.0f), x);  // keeps NaN
  const Vec shifted = clamped + broadcast(kRoundToExponent);
  return exp2_of_parts(clamped - (shifted - broadcast(kRoundToExponent)), shifted);
}

FORGE_INLINE Vec exp_of_nonpositive(Vec t) {
  const Vec clamped = max(broadcast(-88.0f), t);  // keeps NaN
  const Vec shifted = fma(clamped, broadcast(kLog2E), broadcast(kRoundToExponent));
  const Vec n = shifted - broadcast(kRoundToExponent);
  return exp2_of_parts(fma(clamped, broadcast(kLog2E), -n), shifted);
}

FORGE_INLINE Vec tanh(Vec x) {
  const Vec a = abs(x);
  // a >= 0.625: 1 - 2 e / (1 + e), e = exp(-2a)
  const Vec e = exp_of_nonpositive(a * broadcast(-2.0f));
  const Vec large = broadcast(1.0f) - (e + e) / (broadcast(1.0f) + e);
  // below: (tanh(a) - a) / a^3 in u = a^2, minimax, 5e-9 relative to tanh
  const Vec u = a * a;
  Vec p = broadcast(-0.00570498034f);
  p = fma(p, u, broadcast(0.0206390787f));
  p = fma(p, u, broadcast(-0.0537397116f));
  p = fma(p, u, broadcast(0.133314416f));
  p = fma(p, u, broadcast(-0.333332807f));
  const Vec small = fma(a * u, p, a);
  return copy_sign(select(a < broadcast(0.625f), small, large), x);
}

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
