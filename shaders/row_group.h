// The query rows of a threadgroup, and which keys they see, in 32 bits: the host refuses longer
// sequences.
#pragma once

#include "constants.h"
#include "mask_options.h"
#include "shared/attn_grid.h"
#include "staging.h"

namespace forge {

// An IndexRange in 32 bits.
struct Range {
  Int32 begin;
  Int32 end;
};

METAL_FUNC bool is_empty(Range range) { return range.begin >= range.end; }
METAL_FUNC bool contains(Range range, Int32 x) { return x >= range.begin && x < range.end; }

// AttnBand in 32 bits: a shift beyond all lengths is as good as a longer one.
struct Band {
  Int32 begin_shift;
  Int32 end_shift;
  Int32 key_begin;
  Int32 key_end;
};

METAL_FUNC Int32 shift_of(Int64 shift) {
  Int64 most = kMaxFusedLength;
  return Int32(shift < -most ? -most : shift > most ? most : shift);
}

METAL_FUNC Band band_of(constant AttnParams& params, AttnRange range) {
  // What the pipeline was compiled without is a constant.
  MaskOptions options = mask_options(params);
  if (!has_window) options.window_left = -1;
  if (!has_window) options.window_right = -1;
  options.causal = has_causal ? 1 : 0;
  AttnBand wide = attn_band(options, range);
  Band band;
  band.begin_shift = shift_of(wide.begin_shift);
  band.end_shift = shift_of(wide.end_shift);
  band.key_begin = Int32(wide.key_begin);
  band.key_end = Int32(wide.key_end);
  return band;
}

// The keys that query i sees, within [key_begin, key_end]; both ends move with i, never backwards.
// An end that no option moves is the same for all queries, and the compiler knows.
METAL_FUNC Range visible_keys(Band band, Int32 i) {
  Range keys;
  keys.begin = band.key_begin;
  keys.end = band.key_end;
  if (has_window) keys.begin = smaller(larger(i + band.begin_shift, band.key_begin), band.key_end);
  if (has_window || has_causal) {
    keys.end = larger(smaller(i + band.end_shift, band.key_end), band.key_begin);
  }
  return keys;
}

// The queries among [0, Tq) that see key j; [Tq, Tq) where none does.
METAL_FUNC Range visible_queries(Band band, Int32 j, Int32 Tq) {
  Range queries;
  queries.begin = has_window || has_causal ? larger(j - band.end_shift + 1, 0) : 0;
  queries.end = has_window ? smaller(j - band.begin_shift + 1, Tq) : Tq;
  if (j < band.key_begin || j >= band.key_end) queries.begin = Tq;
  return queries;
}

// Whether single pairs may be hidden among the keys that a row sees.
METAL_FUNC bool hides_pairs() { return has_bias || has_mask; }

// The range of query i of sequence b: its own, or the sequence's.
METAL_FUNC AttnRange range_of(constant AttnParams& params, device const AttnRange* ranges, Int32 b,
                              Int32 i) {
  Int64 at = Int64(uint(b));
  return ranges[has_runs ? at * params.Tq + uint(i) : at];
}

// The band of a sequence whose queries share a range; where each has its own, nobody asks.
METAL_FUNC Band band_of_sequence(constant AttnParams& params, device const AttnRange* ranges,
                                 Int32 b) {
  Band band = {0, 0, 0, 0};
  if (!has_runs) band = band_of(params, ranges[b]);
  return band;
}

// The query rows of a kv head's group. Row r is query r / rep of the group's head r % rep: all
// heads of the group share the keys, and neighbouring rows see nearly the same ones.
struct RowGroup {
  Int32 b;
  Int32 kv_head;
  Int32 end;  // rows: rep * Tq
  Int32 rep;
  Int64 rep_factor;
  Int32 rep_shift;
  Band band;  // of sequence b, where its queries share a range
};

METAL_FUNC RowGroup row_group(constant AttnParams& params, constant AttnGrid& grid,
                              device const AttnRange* ranges, uint3 at) {
  RowGroup rows;
  rows.b = grid.batch + Int32(at.z);
  rows.kv_head = grid.head + Int32(at.y);
  rows.rep = grid.rep;
  rows.end = grid.rep * Int32(params.Tq);
  rows.rep_factor = grid.rep_factor;
  rows.rep_shift = grid.rep_shift;
  rows.band = band_of_sequence(params, ranges, rows.b);
  return rows;
}

METAL_FUNC Int32 query_of(RowGroup rows, Int32 r) {
  return divided_by_rep(r, rows.rep_factor, rows.rep_shift);
}

// A row's place in the arrays.
struct RowPlace {
  Int32 query;
  Int32 head;
};

METAL_FUNC RowPlace row_place(RowGroup rows, Int32 r) {
  RowPlace place;
  place.query = query_of(rows, r);
  place.head = rows.kv_head * rows.rep + r - place.query * rows.rep;
  return place;
}

// Position in [B, H, Tq].
METAL_FUNC Int64 stat_index(constant AttnParams& params, Int32 b, Int32 head, Int32 query) {
  return (Int64(uint(b)) * params.H + uint(head)) * params.Tq + uint(query);
}

// The keys that query i sees.
METAL_FUNC Range keys_of_query(constant AttnParams& params, device const AttnRange* ranges,
                               RowGroup rows, Int32 i) {
  if (has_runs) return visible_keys(band_of(params, range_of(params, ranges, rows.b, i)), i);
  return visible_keys(rows.band, i);
}

// The shortest range that holds those of all lanes.
METAL_FUNC Range hull_of_lanes(Range own) {
  bool none = is_empty(own);
  Int32 begin = none ? Int32(kMaxFusedLength) : own.begin;
  Int32 end = none ? 0 : own.end;
  for (ushort other = 1; other < kSimdgroupWidth; other *= 2) {
    begin = smaller(begin, metal::simd_shuffle_xor(begin, other));
    end = larger(end, metal::simd_shuffle_xor(end, other));
  }
  Range all;
  all.begin = smaller(begin, end);
  all.end = end;
  return all;
}

// The keys that any of the rows [first, first + count) sees, of 32 at most. No rows see no keys.
METAL_FUNC Range keys_of_rows(constant AttnParams& params, device const AttnRange* ranges,
                              RowGroup rows, Int32 first, Int32 count, uint lane) {
  if (has_runs) {
    Int32 r = first + Int32(lane) % count;
    Range own = keys_of_query(params, ranges, rows, query_of(rows, smaller(r, rows.end - 1)));
    if (r >= rows.end) own.end = own.begin;
    return hull_of_lanes(own);
  }
  Range top = visible_keys(rows.band, query_of(rows, first));
  Range bottom = visible_keys(rows.band, query_of(rows, smaller(first + count, rows.end) - 1));
  Range seen;
  seen.begin = top.begin;
  seen.end = first < rows.end ? bottom.end : top.begin;
  return seen;
}

// The keys that the rows of a tile see: any of its 32, any of a block of 8, and the lane's in it.
struct TileSights {
  Range tile;
  Range block;
  Range own;
};

METAL_FUNC TileSights sights_of_tile(constant AttnParams& params, device const AttnRange* ranges,
                                     RowGroup rows, Int32 first, Int32 block, Lane at, uint lane) {
  Int32 first_of_block = first + block * kBlockSize;
  TileSights sights;
  if (has_runs) {  // each range is read once
    Int32 r = first + Int32(lane);
    Range seen = keys_of_query(params, ranges, rows, query_of(rows, smaller(r, rows.end - 1)));
    ushort own = ushort(block * kBlockSize + at.row);
    sights.own.begin = metal::simd_shuffle(seen.begin, own);
    sights.own.end = metal::simd_shuffle(seen.end, own);
    if (r >= rows.end) seen.end = seen.begin;
    sights.tile = hull_of_lanes(seen);
    if (Int32(lane) / kBlockSize != block) seen.end = seen.begin;
    sights.block = hull_of_lanes(seen);
    return sights;
  }
  Int32 last = smaller(first_of_block + at.row, rows.end - 1);
  sights.tile = keys_of_rows(params, ranges, rows, first, kQueryRows, lane);
  sights.block = keys_of_rows(params, ranges, rows, first_of_block, kBlockSize, lane);
  sights.own = visible_keys(rows.band, query_of(rows, last));
  return sights;
}

// The queries that see any of the keys [first, first + count).
METAL_FUNC Range queries_of_keys(Band band, Int32 Tq, Int32 first, Int32 count) {
  Int32 from = larger(first, band.key_begin);
  Int32 to = smaller(first + count, band.key_end) - 1;
  Range seen;
  seen.begin = from <= to ? visible_queries(band, from, Tq).begin : Tq;
  seen.end = visible_queries(band, to, Tq).end;
  return seen;
}

}  // namespace forge
