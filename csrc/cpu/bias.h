// The bias and the mask of a tile's pairs as one: float32, -inf where either hides a pair, laid as
// the scores that it is added to, [key][row]. Also the sinks.
#pragma once

#include <type_traits>

#include "cpu/pack.h"
#include "cpu/rows.h"
#include "cpu/scores.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

// What pack_bias found of a tile.
struct BiasTile {
  const Real* at;  // null: there is nothing to add, and nothing is hidden
  bool hides_all;  // `at` may then hold anything
};

// The elements of kLanes rows with some keys, from the first key on.
template <typename Stored>
struct PairLanes {
  const Stored* rows[kLanes];
  Int64 key_stride;
  int keys;
  bool same;  // one row for all lanes
};

template <typename Stored>
FORGE_INLINE PairLanes<Stored> lanes_of(const Operand& operand, const PairRow* rows,
                                        Int64 PairRow::* place, IndexRange keys) {
  PairLanes<Stored> lanes;
  lanes.key_stride = operand.strides[3];
  lanes.keys = static_cast<int>(keys.end - keys.begin);
  lanes.same = true;
  for (int i = 0; i < kLanes; ++i) {
    lanes.rows[i] =
        static_cast<const Stored*>(operand.data) + rows[i].*place + keys.begin * lanes.key_stride;
    lanes.same = lanes.same && rows[i].*place == rows[0].*place;
  }
  return lanes;
}

// put(key, vector) for each key.
template <typename Stored, typename Put>
FORGE_INLINE void for_keys(const PairLanes<Stored>& lanes, const Put& put) {
  if (lanes.same) {
    for (int key = 0; key < lanes.keys; ++key) {
      put(key, broadcast(element_at(lanes.rows[0] + key * lanes.key_stride)));
    }
  } else if (lanes.key_stride == 1) {
    for_lanes(lanes.rows, lanes.keys, [&](Int64 key, Vec x) __attribute__((always_inline)) {
      if (key < lanes.keys) put(key, x);
    });
  } else {
    for (int key = 0; key < lanes.keys; ++key) {
      Vec x;
      for (int i = 0; i < kLanes; ++i) x[i] = element_at(lanes.rows[i] + key * lanes.key_stride);
      put(key, x);
    }
  }
}

// Whether a mask shows some pair, and whether it hides some.
struct MaskSeen {
  bool shows;
  bool hides;
};

// Of kLanes rows, added to what is known of others.
FORGE_INLINE MaskSeen scan_mask(const PairLanes<Shown>& lanes, MaskSeen seen) {
  typedef std::uint8_t Bytes __attribute__((vector_size(kVecBytes)));
  Bytes shown{}, hidden{};
  for (int i = 0; i < kLanes; ++i) {
    const Shown* row = lanes.rows[i];
    if (i > 0 && row == lanes.rows[i - 1]) continue;
    const auto add = [&](int key) __attribute__((always_inline)) {
      Bytes bytes;
      std::memcpy(&bytes, row + key, sizeof bytes);
      shown |= bytes;
      hidden |= (Bytes)(bytes == 0);
    };
    int key = 0;
    if (lanes.key_stride == 1 && lanes.keys >= kVecBytes) {
      for (; key + kVecBytes <= lanes.keys; key += kVecBytes) add(key);
      if (key < lanes.keys) add(lanes.keys - kVecBytes);
      key = lanes.keys;
    }
    for (; key < lanes.keys; ++key) {
      const bool here = row[key * lanes.key_stride].byte != 0;
      seen.shows = seen.shows || here;
      seen.hides = seen.hides || !here;
    }
  }
  seen.shows = seen.shows || any((IntVec)shown != 0);
  seen.hides = seen.hides || any((IntVec)hidden != 0);
  return seen;
}

// Ends early once both are true.
FORGE_NOINLINE MaskSeen scan_mask(const Operand& mask, const PairRow* rows, Int64 count,
                                  IndexRange keys) {
  MaskSeen seen = {false, false};
  for (Int64 row = 0; row < count && !(seen.shows && seen.hides); row += kLanes) {
    seen = scan_mask(lanes_of<Shown>(mask, rows + row, &PairRow::mask, keys), seen);
  }
  return seen;
}

// to[key][row] = the bias. Returns whether it shows some pair.
template <typename Stored>
FORGE_NOINLINE bool pack_bias_lanes(const PairLanes<Stored>& lanes, Real* to, Int64 stride) {
  IntVec shown{};
  for_keys(lanes, [&](Int64 key, Vec x) __attribute__((always_inline)) {
    store(to + key * stride, x);
    shown |= ~hides(x);
  });
  return any(shown);
}

// to[key][row] becomes -inf where the mask hides it, or, where there is no bias, is set to that or
// zero.
FORGE_NOINLINE bool pack_mask_lanes(const PairLanes<Shown>& lanes, bool biased, Real* to,
                                    Int64 stride) {
  if (!biased) return pack_bias_lanes(lanes, to, stride);
  IntVec shown{};
  for_keys(lanes, [&](Int64 key, Vec x) __attribute__((always_inline)) {
    x = select(hides(x), x, load(to + key * stride));
    store(to + key * stride, x);
    shown |= ~hides(x);
  });
  return any(shown);
}

// The pairs of `count` rows, a multiple of kLanes, with the keys of the sequence [keys.begin,
// keys.end): to[key][row], keys `stride` elements apart. A mask that shows them all is left out.
FORGE_INLINE BiasTile pack_bias(const PairArrays& arrays, const PairRow* rows, Int64 count,
                                IndexRange keys, Real* to, Int64 stride) {
  const bool biased = arrays.bias.data != nullptr;
  bool masked = arrays.mask.data != nullptr;
  if (masked) {
    const MaskSeen seen = scan_mask(arrays.mask, rows, count, keys);
    if (!seen.shows) return {to, true};
    masked = seen.hides;
  }
  if (!biased && !masked) return {nullptr, false};
  bool shows = false;
  for (Int64 row = 0; row < count; row += kLanes) {
    bool here = false;
    if (biased) {
      here = with_elements(arrays.bias, [&](const auto* bias) {
        using Stored = std::remove_const_t<std::remove_pointer_t<decltype(bias)>>;
        const auto lanes = lanes_of<Stored>(arrays.bias, rows + row, &PairRow::bias, keys);
        return pack_bias_lanes(lanes, to + row, stride);
      });
    }
    if (masked) {
      const auto lanes = lanes_of<Shown>(arrays.mask, rows + row, &PairRow::mask, keys);
      here = pack_mask_lanes(lanes, biased, to + row, stride);
    }
    shows = shows || here;
  }
  return {to, !shows};
}

// Of one row with some keys: a vector of the array's elements, widened.
template <typename Stored>
FORGE_INLINE Vec load_pairs_of(const Operand& operand, Int64 row, Int64 key, Int64 keys) {
  const Int64 stride = operand.strides[3];
  const Stored* from = static_cast<const Stored*>(operand.data) + row + key * stride;
  if (stride == 1) return load_within(from, 0, keys);
  Vec x{};
  for (int i = 0; i < kLanes && i < keys; ++i) x[i] = element_at(from + i * stride);
  return x;
}

// The same as pack_bias of one row, keys in lanes: to[key], whole vectors. Returns whether it shows
// some pair.
FORGE_INLINE bool pack_bias_row(const PairArrays& arrays, const PairRow& row, IndexRange keys,
                                Real* to) {
  bool shows = false;
  for (Int64 key = keys.begin; key < keys.end; key += kLanes, to += kLanes) {
    const Int64 left = keys.end - key;
    Vec x{};
    if (arrays.bias.data) {
      x = with_elements(arrays.bias, [&](const auto* bias) {
        using Stored = std::remove_const_t<std::remove_pointer_t<decltype(bias)>>;
        return load_pairs_of<Stored>(arrays.bias, row.bias, key, left);
      });
    }
    if (arrays.mask.data) {
      const Vec mask = load_pairs_of<Shown>(arrays.mask, row.mask, key, left);
      x = select(hides(mask), mask, x);
    }
    store(to, x);
    shows =
        shows || any(~hides(x) & (lane_numbers() < static_cast<RealBits>(smaller(left, kLanes))));
  }
  return shows;
}

// A row's sink; -inf: none.
FORGE_INLINE Real sink_of(const Operand& sinks, Int64 b, Int64 head, Int64 query) {
  if (sinks.data == nullptr) return -__builtin_inff();
  const Int64 at = b * sinks.strides[0] + head * sinks.strides[1] + query * sinks.strides[2];
  return with_elements(sinks, [&](const auto* first) { return element_at(first + at); });
}

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
