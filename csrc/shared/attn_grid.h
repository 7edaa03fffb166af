// What a dispatch of a fused kernel computes: threadgroup (x, y, z) has tile x, key/value head y
// and sequence z, counted from here; and what the host has divided, so that no GPU need.
#pragma once

#include "shared/attn_params.h"

namespace forge {

struct AttnGrid {
  Int32 tile;
  Int32 head;
  Int32 batch;
  Int32 rep;         // query heads a key/value head
  Int64 rep_factor;  // x / rep = (x * rep_factor) >> rep_shift for every x from 0 to 2^31 - 1
  Int32 rep_shift;
  float inverse_softcap;  // 1 / softcap; 0: off
};

// x / rep.
FORGE_INLINE Int32 divided_by_rep(Int32 x, Int64 factor, Int32 shift) {
  return (Int32)((x * factor) >> shift);
}

#ifndef __METAL_VERSION__
static_assert(sizeof(AttnGrid) == 32, "layout shared with the shaders");
static_assert(offsetof(AttnGrid, rep_factor) == 16, "layout shared with the shaders");
static_assert(offsetof(AttnGrid, inverse_softcap) == 28, "layout shared with the shaders");

// Of the whole problem. With 2^(bits - 1) < rep <= 2^bits the factor is 2^(31 + bits) / rep,
// rounded up: it is too large by less than rep / 2^(31 + bits) <= 2^-31, which moves no quotient.
inline AttnGrid attn_grid(const AttnParams& params) {
  AttnGrid grid = {};
  grid.rep = params.H / params.Hkv;
  Int32 bits = 0;
  while ((Int64(1) << bits) < grid.rep) ++bits;
  grid.rep_shift = 31 + bits;
  grid.rep_factor = ((Int64(1) << grid.rep_shift) + grid.rep - 1) / grid.rep;
  // That of a subnormal number may be infinite, and 0 times it NaN.
  const float most = 3.40282347e38f;
  const float inverse = 1 / params.softcap;
  grid.inverse_softcap = params.softcap > 0 ? (inverse < most ? inverse : most) : 0;
  return grid;
}
#endif

}  // namespace forge
