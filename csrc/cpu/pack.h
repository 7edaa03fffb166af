// Copies between rows in the arrays' own strides and the layouts that the kernels read.
#pragma once

#include "cpu/key_tiles.h"
#include "cpu/stored.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

// Rows of one head lie too far apart for hardware prefetchers.
constexpr int kRowsAhead = 16;

template <typename Stored>
FORGE_INLINE void prefetch_row(const Stored* row, Int64 n) {
  constexpr Int64 kLine = 64 / sizeof(Stored);
  for (Int64 d = 0; d < n; d += kLine) __builtin_prefetch(row + d, 0, 2);
}

// kLanes rows of n elements become n vectors, d by d: put(d, vector). Up to kLanes - 1 vectors past
// them are put too.
template <typename Stored, typename Put>
FORGE_INLINE void for_lanes(const Stored* const (&rows)[kLanes], Int64 n, const Put& put) {
  Int64 d = 0;
  for (; d + 4 <= n; d += 4) {
    // Gathered in parts of four: half the shuffles of a transpose of whole vectors.
    Vec block[4];
    FORGE_UNROLL
    for (int i = 0; i < 4; ++i) block[i] = load_quads(rows + i, d);
    transpose_quads(block[0], block[1], block[2], block[3]);
    FORGE_UNROLL
    for (int i = 0; i < 4; ++i) put(d + i, block[i]);
  }
  if (d < n) {
    Vec block[kLanes];
    FORGE_UNROLL
    for (int i = 0; i < kLanes; ++i) block[i] = load_within(rows[i], d, n);
    transpose(block);
    FORGE_UNROLL
    for (int i = 0; i < kLanes; ++i) put(d + i, block[i]);
  }
}

// The same, stored `stride` elements apart.
template <typename Stored>
FORGE_INLINE void rows_to_lanes(const Stored* const (&rows)[kLanes], Int64 n, Real* lanes,
                                Int64 stride) {
  for_lanes(rows, n,
            [=](Int64 d, Vec x) __attribute__((always_inline)) { store(lanes + d * stride, x); });
}

// The way back, each row finished with its lane of `factor`; `zeroed` lanes give zeros whatever
// they hold.
template <typename Stored>
FORGE_INLINE void lanes_to_rows(const Real* lanes, Int64 stride, Int64 n, Vec factor, IntVec zeroed,
                                Stored* const (&rows)[kLanes]) {
  for (Int64 d = 0; d < n; d += kLanes) {
    Vec block[kLanes];
    FORGE_UNROLL
    for (int i = 0; i < kLanes; ++i) {
      block[i] = select(zeroed, Vec{}, finished_sum(load(lanes + (d + i) * stride), factor));
    }
    transpose(block);
    FORGE_UNROLL
    for (int i = 0; i < kLanes; ++i) {
      if (rows[i]) store_within(rows[i], d, n, block[i]);
    }
  }
}

// `count` rows of n elements, one after the other at `to_stride`; then zero rows up to `padded`.
template <typename Stored>
FORGE_INLINE void copy_rows(const Stored* from, Int64 from_stride, Int64 n, int count, int padded,
                            Real* to, Int64 to_stride) {
  for (int row = 0; row < count; ++row) {
    prefetch_row(from + (row + kRowsAhead) * from_stride, row + kRowsAhead < count ? n : 0);
    for (Int64 d = 0; d < n; d += kLanes) {
      store(to + row * to_stride + d, load_within(from + row * from_stride, d, n));
    }
  }
  for (int row = count; row < padded; ++row) {
    for (Int64 d = 0; d < n; d += kLanes) store(to + row * to_stride + d, Vec{});
  }
}

// One row's part of the panels. Returns 0 * x summed: NaN if any x is not finite.
template <int Width, typename Stored>
FORGE_INLINE Vec row_to_panels(const Stored* row, Int64 n, Real* to, Int64 panel_stride, Vec zero) {
  constexpr int kPanels = kLanes >= 2 * Width ? 2 : 1;  // filled by one vector
  for (Int64 d = 0; d < n; d += kPanels * Width, to += kPanels * panel_stride) {
    FORGE_UNROLL
    for (int part = 0; part < Width; part += kLanes) {
      const Vec x = load_within(row, d + part, n);
      zero = fma(x, Vec{}, zero);
      store(to + part, x);
      if (kPanels == 2 && d + Width < n) store_high_half(to + panel_stride, x);
    }
  }
  return zero;
}

// Panels of Width columns, each holding its part of every row, row after row; panels lie
// panel_stride elements apart, which leaves kLanes of slack. Returns whether every element is
// finite.
template <int Width, typename Stored>
FORGE_INLINE bool rows_to_panels(const Stored* from, Int64 from_stride, Int64 n, int count,
                                 Real* to, Int64 panel_stride) {
  // Each store runs into the next row's place, which is written later. Two sums, for their latency.
  Vec zero_even{}, zero_odd{};
  for (int row = 0; row < count; row += 2) {
    const Stored* source = from + row * from_stride;
    prefetch_row(source + kRowsAhead * from_stride, row + kRowsAhead < count ? n : 0);
    prefetch_row(source + (kRowsAhead + 1) * from_stride, row + kRowsAhead + 1 < count ? n : 0);
    zero_even = row_to_panels<Width>(source, n, to + row * Width, panel_stride, zero_even);
    if (row + 1 == count) break;
    zero_odd = row_to_panels<Width>(source + from_stride, n, to + (row + 1) * Width, panel_stride,
                                    zero_odd);
  }
  return !any((zero_even != zero_even) | (zero_odd != zero_odd));
}

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
