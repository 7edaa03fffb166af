// The materialized family: one thread a row, everything in a fixed order. The backward kernels add
// to what dq, dk and dv hold. A dispatch computes the rows [span.begin, span.end).
#include <metal_stdlib>

#include "materialized.h"
#include "shared/buffer_indices.h"

using namespace metal;
using namespace forge;

// One query row (b, h, i): scores and their maximum, exponentials and their sum, then p and o.
kernel void attention_fwd_f32(
    device const float* q [[buffer(kBufferQ)]], device const float* k [[buffer(kBufferK)]],
    device const float* v [[buffer(kBufferV)]], device float* o [[buffer(kBufferO)]],
    device float* p [[buffer(kBufferP)]], device float* row_max [[buffer(kBufferRowMax)]],
    device float* row_sum [[buffer(kBufferRowSum)]],
    device const float* bias [[buffer(kBufferBias), function_constant(has_bias)]],
    device const uchar* mask [[buffer(kBufferMask), function_constant(has_mask)]],
    device const float* sinks [[buffer(kBufferSinks), function_constant(has_sinks)]],
    device const AttnRange* ranges [[buffer(kBufferRanges)]],
    constant AttnParams& params [[buffer(kBufferParams)]],
    constant AttnSpan& span [[buffer(kBufferSpan)]],
    uint thread_index [[thread_position_in_grid]]) {
  Int64 row = span.begin + Int64(thread_index);
  if (row >= span.end) return;
  RowPosition at = row_position(row, params.H, params.Tq);
  IndexRange keys = keys_of(params, ranges, at.b, at.t);
  Int64 kv_head = at.head / (params.H / params.Hkv);
  device const float* q_row = q + element_offset(params.q, at.b, at.t, at.head);
  device const float* k_head = k + element_offset(params.k, at.b, 0, kv_head);
  device const float* v_head = v + element_offset(params.v, at.b, 0, kv_head);
  device float* o_row = o + element_offset(params.o, at.b, at.t, at.head);
  device float* p_row = p + row * params.Tk;

  FloatPairs arrays = {q, reinterpret_cast<device const uchar*>(q)};
  if (has_bias) arrays.bias = bias;
  if (has_mask) arrays.mask = mask;

  float sink = has_sinks ? sinks[pair_offset(params.sinks, at.b, at.head, at.t, 0)] : -INFINITY;
  float m = sink;
  bool live = false;
  for (Int64 j = keys.begin; j < keys.end; ++j) {
    if (!is_pair_shown(params, arrays, at.b, at.head, at.t, j)) continue;
    float s = dot(q_row, k_head + j * params.k.row, params.hd) * params.scale;
    if (has_softcap) s = params.softcap * attn_tanh(s / params.softcap);
    if (has_bias) s = s + bias_of(params, arrays, at.b, at.head, at.t, j);
    p_row[j] = s;
    m = s > m ? s : m;
    live = live || s != -INFINITY;
  }
  float base = m == -INFINITY ? 0.0f : m;
  float l = has_sinks ? attn_exp(sink - base) : 0.0f;
  for (Int64 j = keys.begin; j < keys.end; ++j) {
    if (!is_pair_shown(params, arrays, at.b, at.head, at.t, j)) continue;
    float e = attn_exp(p_row[j] - base);
    p_row[j] = e;
    l = l + e;
  }
  for (Int32 c = 0; c < params.hv; ++c) o_row[c] = 0.0f;
  float inverse = 1.0f / l;
  for (Int64 j = 0; j < params.Tk; ++j) {
    bool seen = contains(keys, j) && is_pair_shown(params, arrays, at.b, at.head, at.t, j);
    if (!live || !seen) {
      p_row[j] = 0.0f;
    } else {
      float weight = p_row[j] * inverse;
      p_row[j] = weight;
      add_scaled(o_row, weight, v_head + j * params.v.row, params.hv);
    }
  }
  row_max[row] = m;
  row_sum[row] = l;
}

// One query row: d_row = dout . o - dlse.
kernel void attention_bwd_d_f32(device const float* o [[buffer(kBufferO)]],
                                device const float* dout [[buffer(kBufferDout)]],
                                device const float* dlse
                                [[buffer(kBufferDlse), function_constant(has_dlse)]],
                                device float* d_row [[buffer(kBufferDRow)]],
                                constant AttnParams& params [[buffer(kBufferParams)]],
                                constant AttnSpan& span [[buffer(kBufferSpan)]],
                                uint thread_index [[thread_position_in_grid]]) {
  Int64 row = span.begin + Int64(thread_index);
  if (row >= span.end) return;
  RowPosition at = row_position(row, params.H, params.Tq);
  float d = dot(dout + element_offset(params.dout, at.b, at.t, at.head),
                o + element_offset(params.o, at.b, at.t, at.head), params.hv);
  if (has_dlse) d = d - dlse[row];
  d_row[row] = d;
}

// One query row: dq += sum over its keys of ds k.
kernel void attention_bwd_dq_f32(
    device const float* q [[buffer(kBufferQ)]], device const float* k [[buffer(kBufferK)]],
    device const float* v [[buffer(kBufferV)]], device const float* p [[buffer(kBufferP)]],
    device const float* dout [[buffer(kBufferDout)]],
    device const float* d_row [[buffer(kBufferDRow)]], device float* dq [[buffer(kBufferDq)]],
    device const float* bias [[buffer(kBufferBias), function_constant(has_bias)]],
    device const uchar* mask [[buffer(kBufferMask), function_constant(has_mask)]],
    device const AttnRange* ranges [[buffer(kBufferRanges)]],
    constant AttnParams& params [[buffer(kBufferParams)]],
    constant AttnSpan& span [[buffer(kBufferSpan)]],
    uint thread_index [[thread_position_in_grid]]) {
  Int64 row = span.begin + Int64(thread_index);
  if (row >= span.end) return;
  if (gives_nothing(p + row * params.Tk, params.Tk)) return;
  RowPosition at = row_position(row, params.H, params.Tq);
  IndexRange keys = keys_of(params, ranges, at.b, at.t);
  Int64 kv_head = at.head / (params.H / params.Hkv);
  device const float* q_row = q + element_offset(params.q, at.b, at.t, at.head);
  device const float* dout_row = dout + element_offset(params.dout, at.b, at.t, at.head);
  Scaling scaling = {params.scale, params.softcap};
  device float* dq_row = dq + element_offset(params.dq, at.b, at.t, at.head);
  FloatPairs arrays = {q, reinterpret_cast<device const uchar*>(q)};
  if (has_bias) arrays.bias = bias;
  if (has_mask) arrays.mask = mask;
  for (Int64 j = keys.begin; j < keys.end; ++j) {
    if (!is_pair_shown(params, arrays, at.b, at.head, at.t, j)) continue;
    device const float* k_row = k + element_offset(params.k, at.b, j, kv_head);
    device const float* v_row = v + element_offset(params.v, at.b, j, kv_head);
    float dp = dot(dout_row, v_row, params.hv);
    float ds =
        score_gradient(scaling, q_row, k_row, params.hd, p[row * params.Tk + j], dp, d_row[row]);
    add_scaled(dq_row, ds, k_row, params.hd);
  }
}

// One key row (b, hkv, j): dk += sum of ds q and dv += sum of p dout, over the queries that see it,
// of every query head in its group.
kernel void attention_bwd_dkv_f32(
    device const float* q [[buffer(kBufferQ)]], device const float* k [[buffer(kBufferK)]],
    device const float* v [[buffer(kBufferV)]], device const float* p [[buffer(kBufferP)]],
    device const float* dout [[buffer(kBufferDout)]],
    device const float* d_row [[buffer(kBufferDRow)]], device float* dk [[buffer(kBufferDk)]],
    device float* dv [[buffer(kBufferDv)]],
    device const float* bias [[buffer(kBufferBias), function_constant(has_bias)]],
    device const uchar* mask [[buffer(kBufferMask), function_constant(has_mask)]],
    device const AttnRange* ranges [[buffer(kBufferRanges)]],
    constant AttnParams& params [[buffer(kBufferParams)]],
    constant AttnSpan& span [[buffer(kBufferSpan)]],
    uint thread_index [[thread_position_in_grid]]) {
  Int64 row = span.begin + Int64(thread_index);
  if (row >= span.end) return;
  RowPosition at = row_position(row, params.Hkv, params.Tk);
  IndexRange queries = index_range(0, params.Tq);
  if (!has_runs) {
    queries = visible_queries(attn_band(mask_options(params), ranges[at.b]), at.t, params.Tq);
  }
  FloatPairs arrays = {q, reinterpret_cast<device const uchar*>(q)};
  if (has_bias) arrays.bias = bias;
  if (has_mask) arrays.mask = mask;
  Int64 rep = params.H / params.Hkv;
  device const float* k_row = k + element_offset(params.k, at.b, at.t, at.head);
  device const float* v_row = v + element_offset(params.v, at.b, at.t, at.head);
  device float* dk_row = dk + element_offset(params.dk, at.b, at.t, at.head);
  Scaling scaling = {params.scale, params.softcap};
  device float* dv_row = dv + element_offset(params.dv, at.b, at.t, at.head);
  for (Int64 h = at.head * rep; h < (at.head + 1) * rep; ++h) {
    for (Int64 i = queries.begin; i < queries.end; ++i) {
      if (has_runs && !contains(keys_of(params, ranges, at.b, i), at.t)) continue;
      if (!is_pair_shown(params, arrays, at.b, h, i, at.t)) continue;
      device const float* q_row = q + element_offset(params.q, at.b, i, h);
      device const float* dout_row = dout + element_offset(params.dout, at.b, i, h);
      Int64 query_row = (at.b * params.H + h) * params.Tq + i;
      device const float* p_row = p + query_row * params.Tk;
      float weight = p_row[at.t];
      if (weight == 0.0f && gives_nothing(p_row, params.Tk)) continue;
      add_scaled(dv_row, weight, dout_row, params.hv);
      float dp = dot(dout_row, v_row, params.hv);
      float ds = score_gradient(scaling, q_row, k_row, params.hd, weight, dp, d_row[query_row]);
      add_scaled(dk_row, ds, q_row, params.hd);
    }
  }
}

// One row (b, h, i) of dbias: dbias += sum of p (dp - d) over what its axes of 1 stand for, by
// ascending b, h, i and j.
kernel void attention_bwd_dbias_f32(device const float* v [[buffer(kBufferV)]],
                                    device const float* p [[buffer(kBufferP)]],
                                    device const float* dout [[buffer(kBufferDout)]],
                                    device const float* d_row [[buffer(kBufferDRow)]],
                                    device const float* bias
                                    [[buffer(kBufferBias), function_constant(has_bias)]],
                                    device const uchar* mask
                                    [[buffer(kBufferMask), function_constant(has_mask)]],
                                    device float* dbias [[buffer(kBufferDbias)]],
                                    device const AttnRange* ranges [[buffer(kBufferRanges)]],
                                    constant AttnParams& params [[buffer(kBufferParams)]],
                                    constant AttnSpan& span [[buffer(kBufferSpan)]],
                                    uint thread_index [[thread_position_in_grid]]) {
  Int64 row = span.begin + Int64(thread_index);
  if (row >= span.end) return;
  bool has_heads = (params.dbias_axes & kHeadAxis) != 0;
  bool has_rows = (params.dbias_axes & kRowAxis) != 0;
  RowPosition own = row_position(row, has_heads ? params.H : 1, has_rows ? params.Tq : 1);
  IndexRange bs = summed_axis((params.dbias_axes & kBatchAxis) != 0, own.b, params.B);
  IndexRange hs = summed_axis(has_heads, own.head, params.H);
  IndexRange is = summed_axis(has_rows, own.t, params.Tq);
  Int64 rep = params.H / params.Hkv;
  FloatPairs arrays = {v, reinterpret_cast<device const uchar*>(v)};
  if (has_bias) arrays.bias = bias;
  if (has_mask) arrays.mask = mask;
  for (Int64 b = bs.begin; b < bs.end; ++b) {
    for (Int64 h = hs.begin; h < hs.end; ++h) {
      for (Int64 i = is.begin; i < is.end; ++i) {
        Int64 query_row = (b * params.H + h) * params.Tq + i;
        device const float* p_row = p + query_row * params.Tk;
        if (gives_nothing(p_row, params.Tk)) continue;
        device const float* dout_row = dout + element_offset(params.dout, b, i, h);
        IndexRange keys = keys_of(params, ranges, b, i);
        for (Int64 j = keys.begin; j < keys.end; ++j) {
          if (!is_pair_shown(params, arrays, b, h, i, j)) continue;
          float dp = dot(dout_row, v + element_offset(params.v, b, j, h / rep), params.hv);
          Int64 to = pair_offset(params.dbias, own.b, own.head, own.t, j);
          dbias[to] = attn_fma(p_row[j], dp - d_row[query_row], dbias[to]);
        }
      }
    }
  }
}

// One row (b, h, i) of dsinks: dsinks += -sum of p_sink d, likewise.
kernel void attention_bwd_dsinks_f32(device const float* p [[buffer(kBufferP)]],
                                     device const float* row_max [[buffer(kBufferRowMax)]],
                                     device const float* row_sum [[buffer(kBufferRowSum)]],
                                     device const float* dlse
                                     [[buffer(kBufferDlse), function_constant(has_dlse)]],
                                     device const float* d_row [[buffer(kBufferDRow)]],
                                     device const float* sinks [[buffer(kBufferSinks)]],
                                     device float* dsinks [[buffer(kBufferDsinks)]],
                                     constant AttnParams& params [[buffer(kBufferParams)]],
                                     constant AttnSpan& span [[buffer(kBufferSpan)]],
                                     uint thread_index [[thread_position_in_grid]]) {
  Int64 row = span.begin + Int64(thread_index);
  if (row >= span.end) return;
  bool has_heads = (params.dsinks_axes & kHeadAxis) != 0;
  bool has_rows = (params.dsinks_axes & kRowAxis) != 0;
  RowPosition own = row_position(row, has_heads ? params.H : 1, has_rows ? params.Tq : 1);
  IndexRange bs = summed_axis((params.dsinks_axes & kBatchAxis) != 0, own.b, params.B);
  IndexRange hs = summed_axis(has_heads, own.head, params.H);
  IndexRange is = summed_axis(has_rows, own.t, params.Tq);
  device float* to = dsinks + pair_offset(params.dsinks, own.b, own.head, own.t, 0);
  float sum = *to;
  for (Int64 b = bs.begin; b < bs.end; ++b) {
    for (Int64 h = hs.begin; h < hs.end; ++h) {
      for (Int64 i = is.begin; i < is.end; ++i) {
        Int64 at = (b * params.H + h) * params.Tq + i;
        float sink = sinks[pair_offset(params.sinks, b, h, i, 0)];
        if (sink == -INFINITY) continue;
        float d = d_row[at];
        if (gives_nothing(p + at * params.Tk, params.Tk)) d = has_dlse ? -dlse[at] : 0.0f;
        sum = attn_fma(-(attn_exp(sink - row_max[at]) / row_sum[at]), d, sum);
      }
    }
  }
  *to = sum;
}
