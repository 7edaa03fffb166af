// The backward's kernels, compiled once per CPU target.
#include "cpu/backward/pack.h"
#include "cpu/backward/tile.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

void scores(const BackwardProblem& problem, const BackwardBlock& block) {
  if (block.tiling.capped) {
    if (block.edge)
      score_tile<true, true>(problem, block);
    else
      score_tile<false, true>(problem, block);
  } else {
    if (block.edge)
      score_tile<true, false>(problem, block);
    else
      score_tile<false, false>(problem, block);
  }
}

void key_gradients(const BackwardProblem& problem, const BackwardBlock& block, bool add) {
  const AttnParams& params = problem.params;
  const Int64 vecs = block.tiling.channels / kLanes, keys = block.tile_keys;
  const Int64 first = block.tile_begin;
  Real* dv = problem.arrays.dv + element_offset(params.dv, block.b, first, block.kv_head);
  Real* dk = problem.arrays.dk + element_offset(params.dk, block.b, first, block.kv_head);
  const Sink to_dv{dv, params.dv.row, keys, params.hd, 1, add};
  const Sink to_dk{dk, params.dk.row, keys, params.hd, params.scale, add};
  for_panels<kChannelVecs>(vecs, KeyGradient{block, block.p, block.dout_rows, to_dv});
  for_panels<kChannelVecs>(vecs, KeyGradient{block, block.ds, block.q_rows, to_dk});
}

void row_gradients(const BackwardBlock& block) {
  for_panels<kChannelVecs>(block.tiling.channels / kLanes, RowGradient{block});
}

}  // namespace

extern const BackwardKernels kBackwardKernels = {kLanes,        kRowVecs * kLanes, kMaxTileRows,
                                                 load_rows,     load_keys,         scores,
                                                 key_gradients, row_gradients,     store_dq};

}  // namespace forge::cpu::FORGE_TARGET
