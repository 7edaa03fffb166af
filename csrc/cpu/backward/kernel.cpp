// The backward's kernels, compiled once per CPU target.
#include "cpu/backward/bias_tile.h"
#include "cpu/backward/pack.h"
#include "cpu/backward/store.h"
#include "cpu/backward/tile.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

void scores(const BackwardProblem& problem, const BackwardBlock& block) {
  with_score_map(problem.params, [&](const auto& plain) {
    with_bias(plain, block.bias, [&](const auto& map) {
      if (block.edge) {
        score_tile<true>(block, map);
      } else {
        score_tile<false>(block, map);
      }
    });
  });
}

void key_gradients(const BackwardProblem& problem, const BackwardBlock& block, bool follows) {
  const BackwardTiling& tiling = block.tiling;
  const auto sink = [&](const GradientSum& sum, Real alpha) {
    Real* at = sum.data + element_offset(sum.strides, block.b, block.tile_begin, block.kv_head);
    return Sink{at, sum.strides.row, block.tile_keys, sum.channels, alpha, follows || sum.add};
  };
  const Sink to_dv = sink(problem.dv, 1), to_dk = sink(problem.dk, problem.params.scale);
  for_panels<kChannelVecs>(tiling.value_channels / kLanes,
                           KeyGradient{block, block.p, block.dout_rows, to_dv});
  for_panels<kChannelVecs>(tiling.channels / kLanes,
                           KeyGradient{block, block.ds, block.q_rows, to_dk});
}

void row_gradients(const BackwardBlock& block) {
  for_panels<kChannelVecs>(block.tiling.channels / kLanes, RowGradient{block});
}

}  // namespace

extern const BackwardKernels kBackwardKernels = {
    kLanes,         kMaxTileRows,  load_rows, find_tile, load_keys,  scores,        key_gradients,
    bias_gradients, row_gradients, store_dq,  store_key, sink_terms, store_elements};

}  // namespace forge::cpu::FORGE_TARGET
