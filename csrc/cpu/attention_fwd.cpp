// The forward's schedule: which tasks there are, in which order. It depends on the problem only.
#include <algorithm>

#include "core/thread_pool.h"
#include "cpu/attention.h"
#include "cpu/forward_kernels.h"
#include "cpu/scratch.h"

namespace forge::cpu {

#if defined(__x86_64__)
namespace baseline {
extern const ForwardKernels kForwardKernels;
}
namespace avx2 {
extern const ForwardKernels kForwardKernels;
}
namespace avx512 {
extern const ForwardKernels kForwardKernels;
}
#elif defined(__aarch64__)
namespace neon {
extern const ForwardKernels kForwardKernels;
}
#else
namespace baseline {
extern const ForwardKernels kForwardKernels;
}
#endif

namespace {

const ForwardKernels& forward_kernels(CpuTarget target) {
#if defined(__x86_64__)
  if (target == CpuTarget::kAvx512) return avx512::kForwardKernels;
  if (target == CpuTarget::kAvx2) return avx2::kForwardKernels;
  return baseline::kForwardKernels;
#elif defined(__aarch64__)
  (void)target;
  return neon::kForwardKernels;
#else
  (void)target;
  return baseline::kForwardKernels;
#endif
}

// Rows a task: many, so that packing a key tile is paid for by many rows, but enough tasks to balance.
Int64 rows_a_task(const AttnParams& params, Int64 rows, Int64 row_block) {
  constexpr Int64 kWantedTasks = 32;
  const Int64 most = params.hd <= 128 ? 256 : params.hd <= 256 ? 128 : 64;
  const Int64 heads = params.B * params.Hkv;
  const Int64 wanted_tiles = (kWantedTasks + heads - 1) / heads;
  const Int64 least = std::min<Int64>(rows, 64);
  const Int64 size = std::clamp((rows + wanted_tiles - 1) / wanted_tiles, least, most);
  const Int64 tiles = (rows + size - 1) / size;
  const Int64 even = (rows + tiles - 1) / tiles;
  return (even + row_block - 1) / row_block * row_block;
}

}  // namespace

void attention_fwd(const Problem& problem, const ForwardArrays<float>& arrays, CpuTarget target) {
  const AttnParams params = params_as<float>(problem);
  if (params.B == 0 || params.Tq == 0) return;
  const ForwardKernels& kernels = forward_kernels(target);
  const ForwardCall call = {params,   params.H / params.Hkv,   arrays.q,
                            arrays.k, arrays.v,                arrays.o,
                            arrays.stats.row_max, arrays.stats.row_sum};
  const Int64 rows = call.rep * params.Tq;
  const Int64 step = rows_a_task(params, rows, kernels.row_block);
  const Int64 tiles = (rows + step - 1) / step, heads = params.B * params.Hkv;
  const std::size_t bytes = (kernels.scratch_bytes(params.hd, step) + 63) / 64 * 64;
  const int workers = static_cast<int>(std::min<Int64>(num_threads(), tiles * heads));
  const Scratch scratch(bytes * static_cast<std::size_t>(workers));
  // Last rows first: under a causal mask they see the most keys.
  parallel_for(tiles * heads, [&](Int64 index, int worker) {
    const Int64 tile = tiles - 1 - index / heads, head = index % heads;
    ForwardTask task;
    task.b = head / params.Hkv;
    task.kv_head = head % params.Hkv;
    task.band = attn_band(params, problem.ranges[static_cast<std::size_t>(task.b)]);
    task.row_begin = tile * step;
    task.row_end = std::min(rows, task.row_begin + step);
    task.key_begin = 0;
    task.key_end = params.Tk;
    task.partial = nullptr;
    kernels.run(call, task, scratch.data() + bytes * static_cast<std::size_t>(worker));
  });
}

}  // namespace forge::cpu
