// dsinks: a pass of its own over the rows, since it needs neither keys nor values.
#pragma once

#include <memory>

#include "core/stop.h"
#include "cpu/backward/axis_sums.h"

namespace forge::cpu {

class SinkGradient {
 public:
  // Takes its memory, if dsinks is asked for.
  explicit SinkGradient(const BackwardProblem& problem)
      : problem_(problem),
        rows_(problem.arrays.dsinks.data ? problem.params.B * problem.params.H * problem.params.Tq
                                         : 0),
        terms_(new float[static_cast<std::size_t>(rows_)]) {}

  void run(const BackwardKernels& kernels) const {
    if (rows_ == 0) return;
    const AttnParams& params = problem_.params;
    float* const terms = terms_.get();
    parallel_for(params.B * params.H, [&](std::int64_t index, int) {
      if (stop_requested()) return;
      kernels.sink_terms(problem_, index / params.H, index % params.H, terms + index * params.Tq);
    });
    const Operand& dsinks = problem_.arrays.dsinks;
    const SomeAxes to = {dsinks,
                         {dsinks.shape[0], dsinks.shape[1], dsinks.shape[2]},
                         {dsinks.strides[0], dsinks.strides[1], dsinks.strides[2]}};
    add_up_axes(kernels, terms, {params.B, params.H, params.Tq}, to, problem_.accumulate);
  }

 private:
  const BackwardProblem& problem_;
  const Int64 rows_;
  const std::unique_ptr<float[]> terms_;  // [B, H, Tq]
};

}  // namespace forge::cpu
