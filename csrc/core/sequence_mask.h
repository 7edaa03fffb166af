// Which keys the queries of one sequence see, whether they share a range or have one each.
#pragma once

#include "core/problem.h"

namespace forge {

class SequenceMask {
 public:
  SequenceMask() = default;

  // `ranges` are the problem's, and outlive this.
  template <typename Real>
  SequenceMask(const AttnParamsOf<Real>& params, const AttnRange* ranges, Int64 b)
      : options_{params.Tk, params.window_left, params.window_right, params.causal},
        runs_(params.runs ? ranges + b * params.Tq : nullptr),
        band_(params.runs ? AttnBand{} : attn_band(options_, ranges[b])) {}

  IndexRange keys(Int64 query) const {
    if (runs_ == nullptr) return visible_keys(band_, query);
    return visible_keys(attn_band(options_, runs_[query]), query);
  }

  // Whether both ends of what a query sees move with it and never backwards.
  bool ascends() const { return runs_ == nullptr; }

  // The queries among [0, Tq) between the first and the last that see key j: all of them see it
  // where the mask ascends.
  IndexRange queries(Int64 j, Int64 Tq) const {
    if (runs_ == nullptr) return visible_queries(band_, j, Tq);
    IndexRange found = nothing();
    for (Int64 i = 0; i < Tq; ++i) {
      if (contains(keys(i), j)) found = hull(found, {i, i + 1});
    }
    return found;
  }

 private:
  struct Options {
    Int64 Tk, window_left, window_right;
    Int32 causal;
  };

  Options options_{};
  const AttnRange* runs_ = nullptr;
  AttnBand band_{};
};

}  // namespace forge
