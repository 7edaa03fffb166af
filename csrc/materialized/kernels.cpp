// Compiled once per target: FORGE_TARGET names the namespace, the build sets the instruction set
// and turns contraction off.
#include "materialized/kernels.h"

#include <limits>

#include "core/sequence_mask.h"
#include "shared/attn_math.h"

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

// An array whose axes are those of [B, H, Tq, Tk] or 1.
template <typename Element>
struct SomePairs {
  Element* data;  // null: not given
  std::array<Int64, 4> strides;

  explicit SomePairs(const Operand& operand)
      : data(static_cast<Element*>(operand.data)), strides(operand.strides) {}
  FORGE_MEMBER Element& at(Int64 b, Int64 h, Int64 i, Int64 j) const {
    return data[b * strides[0] + h * strides[1] + i * strides[2] + j * strides[3]];
  }
};

// What bias and mask make of the pairs that the key ranges leave visible.
template <typename Real>
struct PairOptions {
  SomePairs<const Real> bias;
  SomePairs<const bool> mask;

  explicit PairOptions(const Operands& operands)
      : bias(operands[kBufferBias]), mask(operands[kBufferMask]) {}
  FORGE_MEMBER bool sees(Int64 b, Int64 h, Int64 i, Int64 j) const {
    if (mask.data != nullptr && !mask.at(b, h, i, j)) return false;
    return bias.data == nullptr || bias.at(b, h, i, j) != -std::numeric_limits<Real>::infinity();
  }
};

// Whether a row has a weight of zero for every key: it is dead, or its sink took everything.
template <typename Real>
FORGE_INLINE bool gives_nothing(const Real* probs, Int64 Tk) {
  for (Int64 j = 0; j < Tk; ++j) {
    if (probs[j] != 0) return false;  // or NaN
  }
  return true;
}

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
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  const Int32 rep = params.H / params.Hkv;
  const HeadRows<const Real> q_rows(operands[kBufferQ]), k_rows(operands[kBufferK]),
      v_rows(operands[kBufferV]);
  const HeadRows<Real> o_rows(operands[kBufferO]);
  const PairOptions<Real> pairs(operands);
  const SomePairs<const Real> sinks(operands[kBufferSinks]);
  Real* const probs = elements<Real>(operands[kBufferP]);
  Real* const row_max = elements<Real>(operands[kBufferRowMax]);
  Real* const row_sum = elements<Real>(operands[kBufferRowSum]);
  for (std::int64_t row = begin; row < end; ++row) {
    const RowPosition at(row, params.H, params.Tq);
    const IndexRange keys = SequenceMask(params, ranges, at.b).keys(at.t);
    const auto sees = [&](Int64 j) {
      return contains(keys, j) && pairs.sees(at.b, at.head, at.t, j);
    };
    const Real* q = q_rows.at(at.b, at.t, at.head);
    const Real* k = k_rows.at(at.b, 0, at.head / rep);
    const Real* v = v_rows.at(at.b, 0, at.head / rep);
    Real* o = o_rows.at(at.b, at.t, at.head);
    Real* p = probs + row * params.Tk;

    const Real sink = sinks.data == nullptr ? -kInfinity : sinks.at(at.b, at.head, at.t, 0);
    Real m = sink;
    bool live = false;
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      if (!sees(j)) continue;
      Real s = dot(q, k + j * k_rows.strides.row, params.hd) * params.scale;
      if (params.softcap > 0) s = params.softcap * attn_tanh(s / params.softcap);
      if (pairs.bias.data != nullptr) s = s + pairs.bias.at(at.b, at.head, at.t, j);
      p[j] = s;
      m = s > m ? s : m;
      live = live || s != -kInfinity;
    }
    const Real base = m == -kInfinity ? Real(0) : m;
    Real l = attn_exp(sink - base);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      if (!sees(j)) continue;
      p[j] = attn_exp(p[j] - base);
      l = l + p[j];
    }
    for (Int32 c = 0; c < params.hv; ++c) o[c] = 0;
    const Real inverse = Real(1) / l;
    for (std::int64_t j = 0; j < params.Tk; ++j) {
      if (!live || !sees(j)) {
        p[j] = 0;
        continue;
      }
      p[j] = p[j] * inverse;
      add_scaled(o, p[j], v + j * v_rows.strides.row, params.hv);
    }
    row_max[row] = m;
    row_sum[row] = l;
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
    Real d = dot(dout.at(at.b, at.t, at.head), o.at(at.b, at.t, at.head), params.hv);
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
  const PairOptions<Real> pairs(operands);
  for (std::int64_t row = begin; row < end; ++row) {
    const RowPosition at(row, params.H, params.Tq);
    if (gives_nothing(probs + row * params.Tk, params.Tk)) continue;
    const IndexRange keys = SequenceMask(params, ranges, at.b).keys(at.t);
    const Real* q = q_rows.at(at.b, at.t, at.head);
    const Real* dout = dout_rows.at(at.b, at.t, at.head);
    Real* dq = dq_rows.at(at.b, at.t, at.head);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      if (!pairs.sees(at.b, at.head, at.t, j)) continue;
      const Real* k = k_rows.at(at.b, j, at.head / rep);
      const Real* v = v_rows.at(at.b, j, at.head / rep);
      const Real dp = dot(dout, v, params.hv);
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
  const PairOptions<Real> pairs(operands);
  for (std::int64_t row = begin; row < end; ++row) {
    const RowPosition at(row, params.Hkv, params.Tk);
    const SequenceMask mask(params, ranges, at.b);
    const IndexRange queries = mask.queries(at.t, params.Tq);
    const Real* k = k_rows.at(at.b, at.t, at.head);
    const Real* v = v_rows.at(at.b, at.t, at.head);
    Real* dk = dk_rows.at(at.b, at.t, at.head);
    Real* dv = dv_rows.at(at.b, at.t, at.head);
    for (std::int64_t h = at.head * rep; h < (at.head + 1) * rep; ++h) {
      for (std::int64_t i = queries.begin; i < queries.end; ++i) {
        if (!contains(mask.keys(i), at.t) || !pairs.sees(at.b, h, i, at.t)) continue;
        const Real* q = q_rows.at(at.b, i, h);
        const Real* dout = dout_rows.at(at.b, i, h);
        const std::int64_t query_row = row_index(params, at.b, h, i);
        const Real p = probs[query_row * params.Tk + at.t];
        if (p == 0 && gives_nothing(probs + query_row * params.Tk, params.Tk)) continue;
        add_scaled(dv, p, dout, params.hv);
        const Real dp = dot(dout, v, params.hv);
        add_scaled(dk, score_gradient(params, q, k, p, dp, d_row[query_row]), q, params.hd);
      }
    }
  }
}

// The elements of an array along an axis of `extent`: element `at`, or all where it has but one.
FORGE_INLINE IndexRange summed(Int64 own, Int64 at, Int64 extent) {
  return own == 1 ? index_range(0, extent) : index_range(at, at + 1);
}

// Rows are those of dbias: what is summed for them goes by ascending b, h, i and j.
template <typename Real>
void bwd_dbias(const AttnParamsOf<Real>& params, const AttnRange* ranges, const Operands& operands,
               std::int64_t begin, std::int64_t end) {
  const Int32 rep = params.H / params.Hkv;
  const HeadRows<const Real> v_rows(operands[kBufferV]), dout_rows(operands[kBufferDout]);
  const Real* const probs = elements<const Real>(operands[kBufferP]);
  const Real* const d_row = elements<const Real>(operands[kBufferDRow]);
  const PairOptions<Real> pairs(operands);
  const SomePairs<Real> dbias(operands[kBufferDbias]);
  const auto& shape = operands[kBufferDbias].shape;
  for (std::int64_t row = begin; row < end; ++row) {
    const RowPosition own(row, shape[1], shape[2]);
    const IndexRange bs = summed(shape[0], own.b, params.B),
                     hs = summed(shape[1], own.head, params.H),
                     is = summed(shape[2], own.t, params.Tq);
    for (std::int64_t b = bs.begin; b < bs.end; ++b) {
      const SequenceMask mask(params, ranges, b);
      for (std::int64_t h = hs.begin; h < hs.end; ++h) {
        for (std::int64_t i = is.begin; i < is.end; ++i) {
          const std::int64_t query_row = row_index(params, b, h, i);
          const Real* p = probs + query_row * params.Tk;
          if (gives_nothing(p, params.Tk)) continue;
          const IndexRange keys = mask.keys(i);
          for (std::int64_t j = keys.begin; j < keys.end; ++j) {
            if (!pairs.sees(b, h, i, j)) continue;
            const Real dp = dot(dout_rows.at(b, i, h), v_rows.at(b, j, h / rep), params.hv);
            Real& sum = dbias.at(own.b, own.head, own.t, j);
            sum = attn_fma(p[j], dp - d_row[query_row], sum);
          }
        }
      }
    }
  }
}

// Rows are those of dsinks.
template <typename Real>
void bwd_dsinks(const AttnParamsOf<Real>& params, const AttnRange*, const Operands& operands,
                std::int64_t begin, std::int64_t end) {
  const Real* const probs = elements<const Real>(operands[kBufferP]);
  const Real* const d_row = elements<const Real>(operands[kBufferDRow]);
  const Real* const dlse = elements<const Real>(operands[kBufferDlse]);
  const Real* const row_max = elements<const Real>(operands[kBufferRowMax]);
  const Real* const row_sum = elements<const Real>(operands[kBufferRowSum]);
  const SomePairs<const Real> sinks(operands[kBufferSinks]);
  const SomePairs<Real> dsinks(operands[kBufferDsinks]);
  const auto& shape = operands[kBufferDsinks].shape;
  for (std::int64_t row = begin; row < end; ++row) {
    const RowPosition own(row, shape[1], shape[2]);
    const IndexRange bs = summed(shape[0], own.b, params.B),
                     hs = summed(shape[1], own.head, params.H),
                     is = summed(shape[2], own.t, params.Tq);
    Real& sum = dsinks.at(own.b, own.head, own.t, 0);
    for (std::int64_t b = bs.begin; b < bs.end; ++b) {
      for (std::int64_t h = hs.begin; h < hs.end; ++h) {
        for (std::int64_t i = is.begin; i < is.end; ++i) {
          const std::int64_t at = row_index(params, b, h, i);
          const Real sink = sinks.at(b, h, i, 0);
          if (sink == -std::numeric_limits<Real>::infinity()) continue;
          Real d = d_row[at];
          if (gives_nothing(probs + at * params.Tk, params.Tk)) {
            d = dlse == nullptr ? Real(0) : -dlse[at];
          }
          sum = attn_fma(-(attn_exp(sink - row_max[at]) / row_sum[at]), d, sum);
        }
      }
    }
  }
}

}  // namespace

namespace FORGE_TARGET {
extern const Kernels<float> kKernelsF32;
extern const Kernels<double> kKernelsF64;
const Kernels<float> kKernelsF32 = {fwd<float>,     bwd_d<float>,     bwd_dq<float>,
                                    bwd_dkv<float>, bwd_dbias<float>, bwd_dsinks<float>};
const Kernels<double> kKernelsF64 = {fwd<double>,     bwd_d<double>,     bwd_dq<double>,
                                     bwd_dkv<double>, bwd_dbias<double>, bwd_dsinks<double>};
}  // namespace FORGE_TARGET

}  // namespace forge::materialized
