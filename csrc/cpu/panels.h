// Register tiles and how a line of vectors is cut into panels for them.
#pragma once

#include "cpu/simd.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

// Vectors of a panel of rows (scores): narrow, since a panel takes every key that one of its rows
// sees.
constexpr int kRowVecs = 2;
// Vectors of a panel of channels (gradients).
constexpr int kChannelVecs = kVectorRegisters == 32 ? 4 : 2;

// Broadcast rows of a register tile of Vecs vectors: as many accumulators as leave room for the
// vectors and for one broadcast.
template <int Vecs>
constexpr int tile_rows() {
  constexpr int accumulators = kVectorRegisters == 32 ? 24 : (kHasFma ? 12 : 8);
  return Vecs == 1 ? accumulators / 2 : accumulators / Vecs;
}
constexpr int kMaxTileRows = kVectorRegisters == 32 ? 12 : 6;

// The panel at vector `at` of `vecs`, none wider than `widest`: two middling ones rather than a
// whole one and a single vector, whose register tile would wait for its loads.
FORGE_INLINE int panel_vecs(Int64 at, Int64 vecs, int widest) {
  const Int64 left = vecs - at;
  if (left == widest + 1) return (widest + 2) / 2;
  return static_cast<int>(left < widest ? left : widest);
}

// Calls body.run<Vecs>(at, ...) panel by panel.
template <int Widest, typename Body>
FORGE_INLINE void for_panels(Int64 vecs, const Body& body) {
  for (Int64 at = 0; at < vecs;) {
    const int width = panel_vecs(at, vecs, Widest);
    if (width == 1) body.template run<1>(at);
    if (width == 2) body.template run<2>(at);
    if constexpr (Widest >= 3) {
      if (width == 3) body.template run<3>(at);
    }
    if constexpr (Widest >= 4) {
      if (width == 4) body.template run<4>(at);
    }
    at += width;
  }
}

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
