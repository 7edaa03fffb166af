// Compiled once per target: FORGE_TARGET names the namespace, the build sets the instruction set
// and turns contraction off.
#include "materialized/kernels.h"

#include <limits>

#include "shared/attn_row.h"

namespace forge::materialized {
namespace {

// Sums go on where they lie, in the outputs: these have the type that is computed in.

template <typename Real>
FORGE_INLINE Real dot(const Real* a, const Real* b, Int32 hd) {
  Real sum = 0;
  for (Int32 d = 0; d < hd; ++d) sum = attn_fma(a[d], b[d], sum);
  return sum;
}

// y += a * x
template <typename Real>
FORGE_INLINE void add_scaled(Real* y, Real a, const Real* x, Int32 hd) {
  for (Int32 c = 0; c < hd; ++c) y[c] = attn_fma(a, x[c], y[c]);
}

// (b, head, t) of a row numbered over [B, heads, length].
struct RowPosition {
  std::int64_t b, head, t;
  RowPosition(std::int64_t row, std::int64_t heads, std::int64_t length)
      : b(row / (heads * length)), head(row / length % heads), t(row % length) {}
};

// ds of one (query, key) pair, scale and softcap included.
template <typename Real>
FORGE_INLINE Real score_gradient(const AttnParamsOf<Real>& params, const Real* q, const Real* k,
                                 Real p, Real dp, Real d_row) {
  Real ds = p * (dp - d_row) * params.scale;
  if (params.softcap > 0) {
    const Real x = dot(q, k, params.hd) * params.scale;
    const Real t = attn_tanh(x / params.softcap);
    ds = ds * attn_fma(-t, t, Real(1));
  }
  return ds;
}

template <typename Real>
void fwd(const AttnParamsOf<Real>& params, const AttnRange* ranges, const Operands& operands,
         std::int64_t begin, std::int64_t end) {
  const Int32 rep = params.H / params.Hkv;
  const HeadRows<const Real> q_rows(operands[kBufferQ]), k_rows(operands[kBufferK]),
      v_rows(operands[kBufferV]);
  const HeadRows<Real> o_rows(operands[kBufferO]);
  Real* const probs = elements<Real>(operands[kBufferP]);
  Real* const row_max = elements<Real>(operands[kBufferRowMax]);
  Real* const row_sum = elements<Real>(operands[kBufferRowSum]);
  for (std::int64_t row = begin; row < end; ++row) {
    const RowPosition at(row, params.H, params.Tq);
    const IndexRange keys = visible_keys(attn_band(params, ranges[at.b]), at.t);
    const Real* q = q_rows.at(at.b, at.t, at.head);
    const Real* k = k_rows.at(at.b, 0, at.head / rep);
    const Real* v = v_rows.at(at.b, 0, at.head / rep);
    Real* o = o_rows.at(at.b, at.t, at.head);
    Real* p = probs + row * params.Tk;

    Real m = -std::numeric_limits<Real>::infinity();
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      Real s = dot(q, k + j * k_rows.strides.row, params.hd) * params.scale;
      if (params.softcap > 0) s = params.softcap * attn_tanh(s / params.softcap);
      p[j] = s;
      m = s > m ? s : m;
    }
    Real l = 0;
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      p[j] = attn_exp(p[j] - m);
      l = l + p[j];
    }
    for (Int32 c = 0; c < params.hd; ++c) o[c] = 0;
    const Real inverse = Real(1) / l;
    for (std::int64_t j = 0; j < params.Tk; ++j) {
      if (!contains(keys, j)) {
        p[j] = 0;
        continue;
      }
      p[j] = p[j] * inverse;
      add_scaled(o, p[j], v + j * v_rows.strides.row, params.hd);
    }
    const AttnRow<Real> finished = finished_row(!is_empty(keys), m, l);
    row_max[row] = finished.m;
    row_sum[row] = finished.l;
  }
}

template <typename Real>
void bwd_d(const AttnParamsOf<Real>& params, const AttnRange*, const Operands& operands,
           std::int64_t begin, std::int64_t end) {
  const HeadRows<const Real> dout(operands[kBufferDout]), o(operands[kBufferO]);
  const Real* const dlse = elements<const Real>(operands[kBufferDlse]);
  Real* const d_row = elements<Real>(operands[kBufferDRow]);
  for (std::int64_t row = begin; row < end; ++row) {
    const RowPosition at(row, params.H, params.Tq);
    Real d = dot(dout.at(at.b, at.t, at.head), o.at(at.b, at.t, at.head), params.hd);
    if (dlse != nullptr) d = d - dlse[row];
    d_row[row] = d;
  }
}

template <typename Real>
void bwd_dq(const AttnParamsOf<Real>& params, const AttnRange* ranges, const Operands& operands,
            std::int64_t begin, std::int64_t end) {
  const Int32 rep = params.H / params.Hkv;
  const HeadRows<const Real> q_rows(operands[kBufferQ]), k_rows(operands[kBufferK]),
      v_rows(operands[kBufferV]), dout_rows(operands[kBufferDout]);
  const Real* const probs = elements<const Real>(operands[kBufferP]);
  const Real* const d_row = elements<const Real>(operands[kBufferDRow]);
  const HeadRows<Real> dq_rows(operands[kBufferDq]);
  for (std::int64_t row = begin; row < end; ++row) {
    const RowPosition at(row, params.H, params.Tq);
    const IndexRange keys = visible_keys(attn_band(params, ranges[at.b]), at.t);
    const Real* q = q_rows.at(at.b, at.t, at.head);
    const Real* dout = dout_rows.at(at.b, at.t, at.head);
    Real* dq = dq_rows.at(at.b, at.t, at.head);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      const Real* k = k_rows.at(at.b, j, at.head / rep);
      const Real* v = v_rows.at(at.b, j, at.head / rep);
      const Real dp = dot(dout, v, params.hd);
      const Real p = probs[row * params.Tk + j];
      add_scaled(dq, score_gradient(params, q, k, p, dp, d_row[row]), k, params.hd);
    }
  }
}

template <typename Real>
void bwd_dkv(const AttnParamsOf<Real>& params, const AttnRange* ranges, const Operands& operands,
             std::int64_t begin, std::int64_t end) {
  const Int32 rep = params.H / params.Hkv;
  const HeadRows<const Real> q_rows(operands[kBufferQ]), k_rows(operands[kBufferK]),
      v_rows(operands[kBufferV]), dout_rows(operands[kBufferDout]);
  const Real* const probs = elements<const Real>(operands[kBufferP]);
  const Real* const d_row = elements<const Real>(operands[kBufferDRow]);
  const HeadRows<Real> dk_rows(operands[kBufferDk]), dv_rows(operands[kBufferDv]);
  for (std::int64_t row = begin; row < end; ++row) {
    const RowPosition at(row, params.Hkv, params.Tk);
    const IndexRange queries = visible_queries(attn_band(params, ranges[at.b]), at.t, params.Tq);
    const Real* k = k_rows.at(at.b, at.t, at.head);
    const Real* v = v_rows.at(at.b, at.t, at.head);
    Real* dk = dk_rows.at(at.b, at.t, at.head);
    Real* dv = dv_rows.at(at.b, at.t, at.head);
    for (std::int64_t h = at.head * rep; h < (at.head + 1) * rep; ++h) {
      for (std::int64_t i = queries.begin; i < queries.end; ++i) {
        const Real* q = q_rows.at(at.b, i, h);
        const Real* dout = dout_rows.at(at.b, i, h);
        const std::int64_t query_row = row_index(params, at.b, h, i);
        const Real p = probs[query_row * params.Tk + at.t];
        add_scaled(dv, p, dout, params.hd);
        const Real dp = dot(dout, v, params.hd);
        add_scaled(dk, score_gradient(params, q, k, p, dp, d_row[query_row]), q, params.hd);
      }
    }
  }
}

}  // namespace

namespace FORGE_TARGET {
extern const Kernels<float> kKernelsF32;
extern const Kernels<double> kKernelsF64;
const Kernels<float> kKernelsF32 = {fwd<float>, bwd_d<float>, bwd_dq<float>, bwd_dkv<float>};
const Kernels<double> kKernelsF64 = {fwd<double>, bwd_d<double>, bwd_dq<double>, bwd_dkv<double>};
}  // namespace FORGE_TARGET

}  // namespace forge::materialized
