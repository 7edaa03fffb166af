// The materialized family: one thread a row, everything in a fixed order. The backward kernels add
// to what dq, dk and dv hold. A dispatch computes the rows [span.begin, span.end).
#include <metal_stdlib>

#include "materialized.h"
#include "shared/buffer_indices.h"

using namespace metal;
using namespace forge;

// One query row (b, h, i): scores and their maximum, exponentials and their sum, then p and o.
kernel void attention_fwd_f32(device const float* q [[buffer(kBufferQ)]],
                              device const float* k [[buffer(kBufferK)]],
                              device const float* v [[buffer(kBufferV)]],
                              device float* o [[buffer(kBufferO)]],
                              device float* p [[buffer(kBufferP)]],
                              device float* row_max [[buffer(kBufferRowMax)]],
                              device float* row_sum [[buffer(kBufferRowSum)]],
                              device const AttnRange* ranges [[buffer(kBufferRanges)]],
                              constant AttnParams& params [[buffer(kBufferParams)]],
                              constant AttnSpan& span [[buffer(kBufferSpan)]],
                              uint thread_index [[thread_position_in_grid]]) {
  Int64 row = span.begin + Int64(thread_index);
  if (row >= span.end) return;
  RowPosition at = row_position(row, params.H, params.Tq);
  AttnRange range = ranges[at.b];
  IndexRange keys = visible_keys(attn_band(mask_options(params), range), at.t);
  Int64 kv_head = at.head / (params.H / params.Hkv);
  device const float* q_row = q + element_offset(params.q, at.b, at.t, at.head);
  device const float* k_head = k + element_offset(params.k, at.b, 0, kv_head);
  device const float* v_head = v + element_offset(params.v, at.b, 0, kv_head);
  device float* o_row = o + element_offset(params.o, at.b, at.t, at.head);
  device float* p_row = p + row * params.Tk;

  float m = -INFINITY;
  bool live = false;
  for (Int64 j = keys.begin; j < keys.end; ++j) {
    float s = dot(q_row, k_head + j * params.k.row, params.hd) * params.scale;
    if (has_softcap) s = params.softcap * attn_tanh(s / params.softcap);
    p_row[j] = s;
    m = s > m ? s : m;
    live = live || s != -INFINITY;
  }
  float base = m == -INFINITY ? 0.0f : m;
  float l = 0.0f;
  for (Int64 j = keys.begin; j < keys.end; ++j) {
    float e = attn_exp(p_row[j] - base);
    p_row[j] = e;
    l = l + e;
  }
  for (Int32 c = 0; c < params.hd; ++c) o_row[c] = 0.0f;
  float inverse = 1.0f / l;
  for (Int64 j = 0; j < params.Tk; ++j) {
    if (!live || !contains(keys, j)) {
      p_row[j] = 0.0f;
    } else {
      float weight = p_row[j] * inverse;
      p_row[j] = weight;
      add_scaled(o_row, weight, v_head + j * params.v.row, params.hd);
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
                o + element_offset(params.o, at.b, at.t, at.head), params.hd);
  if (has_dlse) d = d - dlse[row];
  d_row[row] = d;
}

// One query row: dq += sum over its keys of ds k.
kernel void attention_bwd_dq_f32(device const float* q [[buffer(kBufferQ)]],
                                 device const float* k [[buffer(kBufferK)]],
                                 device const float* v [[buffer(kBufferV)]],
                                 device const float* p [[buffer(kBufferP)]],
                                 device const float* dout [[buffer(kBufferDout)]],
                                 device const float* d_row [[buffer(kBufferDRow)]],
                                 device float* dq [[buffer(kBufferDq)]],
                                 device const AttnRange* ranges [[buffer(kBufferRanges)]],
                                 constant AttnParams& params [[buffer(kBufferParams)]],
                                 constant AttnSpan& span [[buffer(kBufferSpan)]],
                                 uint thread_index [[thread_position_in_grid]]) {
  Int64 row = span.begin + Int64(thread_index);
  if (row >= span.end) return;
  if (gives_nothing(p + row * params.Tk, params.Tk)) return;
  RowPosition at = row_position(row, params.H, params.Tq);
  AttnRange range = ranges[at.b];
  IndexRange keys = visible_keys(attn_band(mask_options(params), range), at.t);
  Int64 kv_head = at.head / (params.H / params.Hkv);
  device const float* q_row = q + element_offset(params.q, at.b, at.t, at.head);
  device const float* dout_row = dout + element_offset(params.dout, at.b, at.t, at.head);
  Scaling scaling = {params.scale, params.softcap};
  device float* dq_row = dq + element_offset(params.dq, at.b, at.t, at.head);
  for (Int64 j = keys.begin; j < keys.end; ++j) {
    device const float* k_row = k + element_offset(params.k, at.b, j, kv_head);
    device const float* v_row = v + element_offset(params.v, at.b, j, kv_head);
    float dp = dot(dout_row, v_row, params.hd);
    float ds =
        score_gradient(scaling, q_row, k_row, params.hd, p[row * params.Tk + j], dp, d_row[row]);
    add_scaled(dq_row, ds, k_row, params.hd);
  }
}

// One key row (b, hkv, j): dk += sum of ds q and dv += sum of p dout, over the queries that see it,
// of every query head in its group.
kernel void attention_bwd_dkv_f32(device const float* q [[buffer(kBufferQ)]],
                                  device const float* k [[buffer(kBufferK)]],
                                  device const float* v [[buffer(kBufferV)]],
                                  device const float* p [[buffer(kBufferP)]],
                                  device const float* dout [[buffer(kBufferDout)]],
                                  device const float* d_row [[buffer(kBufferDRow)]],
                                  device float* dk [[buffer(kBufferDk)]],
                                  device float* dv [[buffer(kBufferDv)]],
                                  device const AttnRange* ranges [[buffer(kBufferRanges)]],
                                  constant AttnParams& params [[buffer(kBufferParams)]],
                                  constant AttnSpan& span [[buffer(kBufferSpan)]],
                                  uint thread_index [[thread_position_in_grid]]) {
  Int64 row = span.begin + Int64(thread_index);
  if (row >= span.end) return;
  RowPosition at = row_position(row, params.Hkv, params.Tk);
  AttnRange range = ranges[at.b];
  IndexRange queries = visible_queries(attn_band(mask_options(params), range), at.t, params.Tq);
  Int64 rep = params.H / params.Hkv;
  device const float* k_row = k + element_offset(params.k, at.b, at.t, at.head);
  device const float* v_row = v + element_offset(params.v, at.b, at.t, at.head);
  device float* dk_row = dk + element_offset(params.dk, at.b, at.t, at.head);
  Scaling scaling = {params.scale, params.softcap};
  device float* dv_row = dv + element_offset(params.dv, at.b, at.t, at.head);
  for (Int64 h = at.head * rep; h < (at.head + 1) * rep; ++h) {
    for (Int64 i = queries.begin; i < queries.end; ++i) {
      device const float* q_row = q + element_offset(params.q, at.b, i, h);
      device const float* dout_row = dout + element_offset(params.dout, at.b, i, h);
      Int64 query_row = (at.b * params.H + h) * params.Tq + i;
      device const float* p_row = p + query_row * params.Tk;
      float weight = p_row[at.t];
      if (weight == 0.0f && gives_nothing(p_row, params.Tk)) continue;
      add_scaled(dv_row, weight, dout_row, params.hd);
      float dp = dot(dout_row, v_row, params.hd);
      float ds = score_gradient(scaling, q_row, k_row, params.hd, weight, dp, d_row[query_row]);
      add_scaled(dk_row, ds, q_row, params.hd);
    }
  }
}
