#include "metal/kernels.h"

#include <algorithm>

#include "shared/fused_tiling.h"

namespace forge::metal {
namespace {

// The polynomials of exp and tanh, for each pair of a query and a key.
constexpr double kFmasPerScore = 16;

// An upper bound of the keys that a query sees, and of the queries that see a key. Queries with
// positions of their own may all be near one key.
double most_visible(const AttnParams& params, Int64 length) {
  if (params.runs != 0 && length != params.Tk) return static_cast<double>(length);
  const Int64 right = params.causal ? 0 : params.window_right;
  if (params.window_left < 0 || right < 0) return static_cast<double>(length);
  const double width = static_cast<double>(params.window_left) + static_cast<double>(right) + 1;
  return std::min(width, static_cast<double>(length));
}

Int64 query_rows(const AttnParams& params) { return params.B * params.H * params.Tq; }

// `products` of hd or hv fmas for each of `pairs`.
double cost(const AttnParams& params, double pairs, int products) {
  const double channels = std::max(params.hd, params.hv);
  return pairs * (products * channels + kFmasPerScore);
}

// The extent of an axis of dbias or dsinks, and how many elements each of its own is summed over.
struct SummedAxis {
  Int64 extent;
  Int64 summed;
};

SummedAxis summed_axis(Int32 axes, AttnPairAxes axis, Int64 length) {
  if ((axes & axis) != 0) return {length, 1};
  return {1, length};
}

Switches switches_of(const AttnParams& params) {
  Switches switches;
  switches.has_softcap = params.softcap > 0;
  return switches;
}

}  // namespace

namespace materialized {

Kernel fwd(const AttnParams& params) {
  return {"attention_fwd_f32", switches_of(params), query_rows(params),
          cost(params, most_visible(params, params.Tk), 2)};
}

Kernel bwd_d(const AttnParams& params, bool has_dlse) {
  Switches switches = switches_of(params);
  switches.has_dlse = has_dlse;
  return {"attention_bwd_d_f32", switches, query_rows(params), static_cast<double>(params.hv)};
}

Kernel bwd_dq(const AttnParams& params) {
  return {"attention_bwd_dq_f32", switches_of(params), query_rows(params),
          cost(params, most_visible(params, params.Tk), 3)};
}

Kernel bwd_dkv(const AttnParams& params) {
  const double queries = most_visible(params, params.Tq) * (params.H / params.Hkv);
  return {"attention_bwd_dkv_f32", switches_of(params), params.B * params.Hkv * params.Tk,
          cost(params, queries, 4)};
}

Kernel bwd_dbias(const AttnParams& params) {
  const SummedAxis b = summed_axis(params.dbias_axes, kBatchAxis, params.B),
                   h = summed_axis(params.dbias_axes, kHeadAxis, params.H),
                   i = summed_axis(params.dbias_axes, kRowAxis, params.Tq);
  const double rows = static_cast<double>(b.summed) * h.summed * i.summed;
  return {"attention_bwd_dbias_f32", switches_of(params), b.extent * h.extent * i.extent,
          rows * cost(params, most_visible(params, params.Tk), 1)};
}

Kernel bwd_dsinks(const AttnParams& params, bool has_dlse) {
  Switches switches = switches_of(params);
  switches.has_dlse = has_dlse;
  const SummedAxis b = summed_axis(params.dsinks_axes, kBatchAxis, params.B),
                   h = summed_axis(params.dsinks_axes, kHeadAxis, params.H),
                   i = summed_axis(params.dsinks_axes, kRowAxis, params.Tq);
  const double rows = static_cast<double>(b.summed) * h.summed * i.summed;
  return {"attention_bwd_dsinks_f32", switches, b.extent * h.extent * i.extent,
          rows * (kFmasPerScore + static_cast<double>(params.Tk))};
}

}  // namespace materialized

namespace fused {
namespace {

FusedTiling tiling_of(const AttnParams& params) {
  return fused_tiling(kAnyGpu, std::max(params.hd, params.hv));
}

std::string instance(const char* kernel, const AttnParams& params) {
  return std::string(kernel) + "_hd" + std::to_string(tiling_of(params).head_dim);
}

Switches fused_switches(const AttnParams& params, bool accumulate = false) {
  Switches switches = switches_of(params);
  switches.has_causal = params.causal != 0;
  switches.has_window = params.window_left >= 0 || params.window_right >= 0;
  switches.accumulate = accumulate;
  const Int32 head_dim = tiling_of(params).head_dim;
  switches.is_whole = params.hd == head_dim && params.hv == head_dim;
  return switches;
}

Int64 blocks_of(Int64 length) { return (length + kBlockSize - 1) / kBlockSize; }

// Query rows of each group of heads that share a key/value head.
Int64 group_rows(const AttnParams& params) { return params.H / params.Hkv * params.Tq; }

// `products` for each row of a tile and each of the `length` rows on the other side that it may
// meet.
double tile_cost(const AttnParams& params, Int64 length, int products) {
  const double reach =
      std::min(most_visible(params, length) + kQueryRows, static_cast<double>(length));
  return kQueryRows * reach *
         (products * static_cast<double>(tiling_of(params).head_dim) + kFmasPerScore);
}

}  // namespace

bool is_decode(const AttnParams& params) {
  return params.Tq <= kMaxDecodeQueries && decode_splits(params.Tk) > 1;
}

Int64 decode_partial_size(const AttnParams& params) {
  return query_rows(params) * decode_splits(params.Tk) * decode_partial_floats(params.hv);
}

Kernel fwd(const AttnParams& params) {
  return {instance("attention_fused_fwd", params),
          fused_switches(params),
          tiles_of(group_rows(params)),
          tile_cost(params, params.Tk, 2),
          forward_simdgroups(tiling_of(params)) * kSimdgroupWidth,
          params.Hkv,
          params.B};
}

Kernel decode(const AttnParams& params) {
  const Int64 row_blocks = (group_rows(params) + kBlockSize - 1) / kBlockSize;
  const Int64 units = row_blocks * decode_splits(params.Tk);
  return {instance("attention_decode", params),
          fused_switches(params),
          (units + kDecodeSimdgroups - 1) / kDecodeSimdgroups,
          kDecodeSimdgroups * tile_cost(params, kSplitKeys, 2) / (kQueryRows / kBlockSize),
          kDecodeSimdgroups * kSimdgroupWidth,
          params.Hkv,
          params.B};
}

Kernel decode_combine(const AttnParams& params) {
  return {"attention_decode_combine",
          fused_switches(params),
          params.Tq,
          static_cast<double>(decode_splits(params.Tk)) * params.hv,
          kSimdgroupWidth,
          params.H,
          params.B};
}

Kernel bwd_d(const AttnParams& params, bool has_dlse) {
  Switches switches = fused_switches(params);
  switches.has_dlse = has_dlse;
  return {"attention_fused_bwd_d",
          switches,
          tiles_of(params.Tq),
          static_cast<double>(kQueryRows) * params.hv,
          kQueryRows / kBlockSize * kSimdgroupWidth,
          params.H,
          params.B};
}

Kernel bwd_dq(const AttnParams& params, bool accumulate) {
  return {instance("attention_fused_bwd_dq", params),
          fused_switches(params, accumulate),
          tiles_of(group_rows(params)),
          tile_cost(params, params.Tk, 3),
          dq_simdgroups(tiling_of(params)) * kSimdgroupWidth,
          params.Hkv,
          params.B};
}

Kernel bwd_dkv(const AttnParams& params, bool accumulate) {
  return {instance("attention_fused_bwd_dkv", params),
          fused_switches(params, accumulate),
          key_tiles_of(tiling_of(params), params.Tk),
          tile_cost(params, params.Tq, 4) * tiling_of(params).dkv_keys / kQueryRows *
              (params.H / params.Hkv),
          dkv_simdgroups(tiling_of(params)) * kSimdgroupWidth,
          params.Hkv,
          params.B};
}

Kernel bwd_dbias(const AttnParams& params, bool accumulate) {
  const SummedAxis b = summed_axis(params.dbias_axes, kBatchAxis, params.B),
                   h = summed_axis(params.dbias_axes, kHeadAxis, params.H),
                   i = summed_axis(params.dbias_axes, kRowAxis, blocks_of(params.Tq)),
                   j = summed_axis(params.dbias_axes, kKeyAxis, blocks_of(params.Tk));
  const Int64 units = i.extent * j.extent;
  const double blocks = static_cast<double>(b.summed) * h.summed * i.summed * j.summed;
  return {instance("attention_fused_bwd_dbias", params),
          fused_switches(params, accumulate),
          (units + kDbiasSimdgroups - 1) / kDbiasSimdgroups,
          kDbiasSimdgroups * blocks * cost(params, kBlockSize * kBlockSize, 2),
          kDbiasSimdgroups * kSimdgroupWidth,
          h.extent,
          b.extent};
}

Kernel bwd_dsinks(const AttnParams& params, bool accumulate) {
  const SummedAxis b = summed_axis(params.dsinks_axes, kBatchAxis, params.B),
                   h = summed_axis(params.dsinks_axes, kHeadAxis, params.H),
                   i = summed_axis(params.dsinks_axes, kRowAxis, params.Tq);
  return {"attention_fused_bwd_dsinks",
          fused_switches(params, accumulate),
          i.extent,
          static_cast<double>(b.summed) * h.summed * i.summed * kFmasPerScore,
          kSimdgroupWidth,
          h.extent,
          b.extent};
}

}  // namespace fused

}  // namespace forge::metal
