// Barriers, and functions that act across the 32 threads of a simdgroup.
#pragma once

#include "softmetal/launch.h"
#include "softmetal/types.h"

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
};
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  softmetal::threadgroup_barrier_wait((uint(flags) & uint(mem_flags::mem_threadgroup)) != 0, line);
}
inline void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  bool orders = (uint(flags) & uint(mem_flags::mem_threadgroup)) != 0;
  softmetal::simd_wait(
      orders ? softmetal::SimdOperation::kMemoryBarrier : softmetal::SimdOperation::kBarrier, line,
      nullptr);
}

}  // namespace metal

namespace softmetal {

template <typename Space, typename T>
struct Reference;
template <typename T>
constexpr bool kIsReference = false;
template <typename Space, typename T>
constexpr bool kIsReference<Reference<Space, T>> = true;

// Gives this thread's value to the others and takes theirs. Two buffers: nobody can be two
// operations ahead, so a value stays until all have read it.
template <typename T>
struct Exchange {
  static_assert(sizeof(T) <= sizeof(current->values[0]), "the value is too large for a shuffle");
  static_assert(!kIsReference<T>, "load the element into a variable before it is shuffled");
  Thread* first;
  uint32_t parity;
  uint32_t mask;
  int line;

  Exchange(T value, SimdOperation operation, int at) : line(at) {
    Thread* self = current;
    first = self - self->lane;
    parity = self->operations++ & 1;
    __builtin_memcpy(self->values[parity], &value, sizeof value);
    mask = simd_wait(operation, at, nullptr);
  }
  T value_of(uint32_t lane) const {
    if (lane >= kSimdWidth || !(mask >> lane & 1)) {
      fault_text("a simdgroup function reads a lane that is not active", line);
    }
    T value;
    __builtin_memcpy(&value, first[lane].values[parity], sizeof value);
    return value;
  }
  template <typename F>
  T reduce(F f) const {
    uint32_t lane = uint32_t(__builtin_ctz(mask));
    T result = value_of(lane);
    while (++lane < kSimdWidth) {
      if (mask >> lane & 1) result = f(result, value_of(lane));
    }
    return result;
  }
};

template <typename T>
inline T shuffled(T value, uint32_t from, int line) {
  return Exchange<T>(value, SimdOperation::kShuffle, line).value_of(from);
}

}  // namespace softmetal

namespace metal {

template <typename T>
inline T simd_shuffle(T value, ushort lane, int line = __builtin_LINE()) {
  return softmetal::shuffled(value, lane, line);
}
template <typename T>
inline T simd_broadcast(T value, ushort lane, int line = __builtin_LINE()) {
  return softmetal::shuffled(value, lane, line);
}
template <typename T>
inline T simd_broadcast_first(T value, int line = __builtin_LINE()) {
  softmetal::Exchange<T> all(value, softmetal::SimdOperation::kShuffle, line);
  return all.value_of(uint32_t(__builtin_ctz(all.mask)));
}
template <typename T>
inline T simd_shuffle_xor(T value, ushort mask, int line = __builtin_LINE()) {
  return softmetal::shuffled(value, softmetal::current->lane ^ mask, line);
}
// Lanes that would read past an end keep their own value.
template <typename T>
inline T simd_shuffle_down(T value, ushort delta, int line = __builtin_LINE()) {
  uint32_t from = softmetal::current->lane + delta;
  return softmetal::shuffled(value, from < 32 ? from : softmetal::current->lane, line);
}
template <typename T>
inline T simd_shuffle_up(T value, ushort delta, int line = __builtin_LINE()) {
  uint32_t lane = softmetal::current->lane;
  return softmetal::shuffled(value, lane >= delta ? lane - delta : lane, line);
}

#define SOFTMETAL_REDUCTION(name, expression)                                     \
  template <typename T>                                                           \
  inline T name(T value, int line = __builtin_LINE()) {                           \
    return softmetal::Exchange<T>(value, softmetal::SimdOperation::kReduce, line) \
        .reduce([](T a, T b) -> T { return expression; });                        \
  }
SOFTMETAL_REDUCTION(simd_sum, a + b)
SOFTMETAL_REDUCTION(simd_product, a* b)
SOFTMETAL_REDUCTION(simd_max, max(a, b))
SOFTMETAL_REDUCTION(simd_min, min(a, b))
SOFTMETAL_REDUCTION(simd_and, a& b)
SOFTMETAL_REDUCTION(simd_or, a | b)
#undef SOFTMETAL_REDUCTION

inline bool simd_any(bool value, int line = __builtin_LINE()) {
  return softmetal::Exchange<bool>(value, softmetal::SimdOperation::kReduce, line)
      .reduce([](bool a, bool b) { return a || b; });
}
inline bool simd_all(bool value, int line = __builtin_LINE()) {
  return softmetal::Exchange<bool>(value, softmetal::SimdOperation::kReduce, line)
      .reduce([](bool a, bool b) { return a && b; });
}

}  // namespace metal
