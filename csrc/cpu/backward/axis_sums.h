// Gradients of arrays that are broadcast: what each row or key of each head gave, added up over the
// axes that the array lacks.
#pragma once

#include <array>

#include "core/thread_pool.h"
#include "cpu/backward/kernel.h"

namespace forge::cpu {

// A [B|1, H|1, T|1] array.
struct SomeAxes {
  Operand array;
  std::array<Int64, 3> shape;
  std::array<Int64, 3> strides;
};

// `sums` are [B, H, T]; each result is a sum in double over ascending b, then h, then t, rounded
// once.
inline void add_up_axes(const BackwardKernels& kernels, const float* sums,
                        const std::array<Int64, 3>& extent, const SomeAxes& to, bool accumulate) {
  const Int64 H = extent[1], T = extent[2];
  const auto ends = [&](std::size_t axis, Int64 at) -> IndexRange {
    return to.shape[axis] == 1 ? IndexRange{0, extent[axis]} : IndexRange{at, at + 1};
  };
  parallel_for(to.shape[0] * to.shape[1], [&](std::int64_t index, int) {
    const Int64 b_at = index / to.shape[1], h_at = index % to.shape[1];
    char* const first = static_cast<char*>(to.array.data) +
                        (b_at * to.strides[0] + h_at * to.strides[1]) * dtype_bytes(to.array.dtype);
    constexpr Int64 kMost = 64;
    for (Int64 begin = 0; begin < to.shape[2]; begin += kMost) {
      const Int64 count = smaller(kMost, to.shape[2] - begin);
      double total[kMost] = {};
      for (Int64 b = ends(0, b_at).begin; b < ends(0, b_at).end; ++b) {
        for (Int64 h = ends(1, h_at).begin; h < ends(1, h_at).end; ++h) {
          const float* row = sums + (b * H + h) * T;
          if (to.shape[2] == 1) {
            for (Int64 t = 0; t < T; ++t) total[0] += row[t];
          } else {
            for (Int64 n = 0; n < count; ++n) total[n] += row[begin + n];
          }
        }
      }
      float rounded[kMost];
      for (Int64 n = 0; n < count; ++n) rounded[n] = static_cast<float>(total[n]);
      const StridedElements at = {first + begin * to.strides[2] * dtype_bytes(to.array.dtype),
                                  to.array.dtype, to.strides[2]};
      kernels.store_elements(at, rounded, count, accumulate);
    }
  });
}

}  // namespace forge::cpu
