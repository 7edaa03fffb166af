// Which rows and keys a number stands for. The rows of a kv head are the query rows of its whole
// group, queries outside and heads inside: row r is query r / rep of the group's head r % rep. Rows
// that follow each other see nearly the same keys, and in packed arrays they follow each other in
// memory.
#pragma once

#include "core/problem.h"

namespace forge::cpu {

// kv head number `index` of all sequences.
struct KvHead {
  Int64 b;
  Int64 head;
};

FORGE_INLINE KvHead kv_head_at(const AttnParams& params, Int64 index) {
  return {index / params.Hkv, index % params.Hkv};
}

FORGE_INLINE Int64 kv_heads(const AttnParams& params) { return params.B * params.Hkv; }

FORGE_INLINE Int64 group_size(const AttnParams& params) { return params.H / params.Hkv; }

// Of the head sizes, the one that tiles of keys and values are cut by.
FORGE_INLINE Int64 widest_head(const AttnParams& params) { return larger(params.hd, params.hv); }

FORGE_INLINE Int64 rows_of_group(const AttnParams& params) {
  return params.Tq * group_size(params);
}

FORGE_INLINE Int64 query_of_row(const AttnParams& params, Int64 row) {
  return row / group_size(params);
}

// A key counted from the first of a tile, held within the tile.
FORGE_INLINE int key_in_tile(Int64 key, Int64 tile_begin, Int64 tile_keys) {
  return static_cast<int>(larger(0, smaller(key - tile_begin, tile_keys)));
}

// The query and the query head of a row; next() walks on without a division.
struct RowCursor {
  Int64 query;
  Int64 head;
  Int64 first_head;
  Int64 end_head;

  FORGE_MEMBER void next() {
    if (++head < end_head) return;
    head = first_head;
    ++query;
  }
};

FORGE_INLINE RowCursor row_cursor(const AttnParams& params, Int64 kv_head, Int64 row) {
  const Int64 rep = group_size(params), first = kv_head * rep;
  return {row / rep, first + row % rep, first, first + rep};
}

// The arrays that hold something of each pair of a query row and a key; without data: not given.
struct PairArrays {
  Operand bias;
  Operand mask;

  bool given() const { return bias.data != nullptr || mask.data != nullptr; }
};

// Where a row's pairs lie in them: elements up to the one with key 0.
struct PairRow {
  Int64 bias;
  Int64 mask;
};

FORGE_INLINE PairRow pair_row(const PairArrays& arrays, Int64 b, Int64 head, Int64 query) {
  const auto at = [=](const Operand& operand) {
    const auto& strides = operand.strides;
    return b * strides[0] + head * strides[1] + query * strides[2];
  };
  return {at(arrays.bias), at(arrays.mask)};
}

// The keys that some of the rows [begin, end) see: both ends move with the query.
FORGE_INLINE IndexRange keys_of_rows(const AttnParams& params, const AttnBand& band,
                                     IndexRange rows) {
  IndexRange keys = nothing();
  if (is_empty(rows)) return keys;
  for (Int64 i = query_of_row(params, rows.begin); i <= query_of_row(params, rows.end - 1); ++i) {
    keys = hull(keys, visible_keys(band, i));
  }
  return keys;
}

}  // namespace forge::cpu
