#include "metal/kernels.h"

#include <algorithm>

namespace forge::metal {
namespace {

// The polynomials of exp and tanh, for each pair of a query and a key.
constexpr double kFmasPerScore = 16;

// An upper bound of the keys that a query sees, and of the queries that see a key.
double most_visible(const AttnParams& params, Int64 length) {
  const Int64 right = params.causal ? 0 : params.window_right;
  if (params.window_left < 0 || right < 0) return static_cast<double>(length);
  const double width = static_cast<double>(params.window_left) + static_cast<double>(right) + 1;
  return std::min(width, static_cast<double>(length));
}

Int64 query_rows(const AttnParams& params) { return params.B * params.H * params.Tq; }

// `products` of hd fmas for each of `pairs`.
double cost(const AttnParams& params, double pairs, int products) {
  return pairs * (products * static_cast<double>(params.hd) + kFmasPerScore);
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
  return {"attention_bwd_d_f32", switches, query_rows(params), static_cast<double>(params.hd)};
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

}  // namespace materialized

}  // namespace forge::metal
