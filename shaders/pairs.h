// The options that shape the scores of single pairs and rows: bias, mask and sinks. Which of them
// there are is known when a pipeline is made.
#pragma once

#include "fused.h"

namespace forge {

// What a kernel is given of them; where an option is not there its memory is never read.
struct PairArrays {
  Source bias;
  device const uchar* mask;
};

// Those of one query row: of key j at j times the step.
struct PairRow {
  Source bias;
  Int64 bias_step;
  device const uchar* mask;
  Int64 mask_step;
};

METAL_FUNC Int64 offset_of(AttnPairStrides strides, Int32 b, Int32 h, Int32 i) {
  return pair_offset(strides, Int64(uint(b)), Int64(uint(h)), Int64(uint(i)), 0);
}

METAL_FUNC PairRow pair_row(constant AttnParams& params, PairArrays arrays, Int32 b, Int32 h,
                            Int32 i) {
  PairRow row = {arrays.bias, 0, arrays.mask, 0};
  if (has_bias) {
    row.bias = after(arrays.bias, offset_of(params.bias, b, h, i));
    row.bias_step = params.bias.key;
  }
  if (has_mask) {
    row.mask = arrays.mask + offset_of(params.mask, b, h, i);
    row.mask_step = params.mask.key;
  }
  return row;
}

METAL_FUNC float bias_at(PairRow row, Int32 key) {
  return read_one(after(row.bias, key * row.bias_step));
}

// Whether a row that sees the keys `seen` sees this one of them: mask and bias may hide it.
METAL_FUNC bool is_shown(PairRow row, Range seen, Int32 key) {
  bool shown = contains(seen, key);
  if (has_mask && shown) shown = row.mask[key * row.mask_step] != 0;
  if (has_bias && shown) shown = bias_at(row, key) != -INFINITY;
  return shown;
}

// The lane's two pairs of a block: which of them are seen, as bits, and what is added to the scores
// of these.
struct PairBlock {
  uint bits;
  Block bias;
};

METAL_FUNC PairBlock pair_block(PairRow row, Range seen, Int32 key) {
  bool x = is_shown(row, seen, key);
  bool y = is_shown(row, seen, key + 1);
  PairBlock pairs;
  pairs.bits = (x ? 1u : 0u) | (y ? 2u : 0u);
  pairs.bias = Block(0.0f, 0.0f);
  if (has_bias) pairs.bias = Block(x ? bias_at(row, key) : 0.0f, y ? bias_at(row, key + 1) : 0.0f);
  return pairs;
}

METAL_FUNC Block where_shown(uint bits, Block x, float hidden) {
  return Block((bits & 1u) != 0 ? x.x : hidden, (bits & 2u) != 0 ? x.y : hidden);
}

// The sink of a row, -inf where it has none.
METAL_FUNC float sink_of(constant AttnParams& params, Source sinks, Int32 b, Int32 h, Int32 i) {
  return read_one(after(sinks, offset_of(params.sinks, b, h, i)));
}

}  // namespace forge
