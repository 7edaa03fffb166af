// How a kernel is called: each parameter is made from the launch and the current thread, by its
// type.
#pragma once

#include "softmetal/memory.h"
#include "softmetal/types.h"

namespace softmetal {

enum class Builtin {
  kNone,
  kThreadPositionInGrid,
  kThreadPositionInThreadgroup,
  kThreadIndexInThreadgroup,
  kThreadgroupPositionInGrid,
  kThreadIndexInSimdgroup,
  kSimdgroupIndexInThreadgroup,
  kSimdgroupsPerThreadgroup,
  kThreadsPerSimdgroup,
  kThreadsPerThreadgroup,
  kDispatchThreadsPerThreadgroup,
  kThreadgroupsPerGrid,
  kThreadsPerGrid,
};

inline Position builtin_position(Builtin builtin) {
  const Thread& self = *current;
  switch (builtin) {
    case Builtin::kThreadPositionInGrid:
      return self.in_grid;
    case Builtin::kThreadPositionInThreadgroup:
      return self.in_threadgroup;
    case Builtin::kThreadIndexInThreadgroup:
      return {self.index, 0, 0};
    case Builtin::kThreadgroupPositionInGrid:
      return self.threadgroup;
    case Builtin::kThreadIndexInSimdgroup:
      return {self.lane, 0, 0};
    case Builtin::kSimdgroupIndexInThreadgroup:
      return {self.simdgroup, 0, 0};
    case Builtin::kSimdgroupsPerThreadgroup:
      return {self.simdgroups, 0, 0};
    case Builtin::kThreadsPerSimdgroup:
      return {uint32_t(kSimdWidth), 0, 0};
    case Builtin::kThreadsPerThreadgroup:
      return self.threadgroup_size;
    case Builtin::kDispatchThreadsPerThreadgroup:
      return launch->threads_per_threadgroup;
    case Builtin::kThreadgroupsPerGrid:
      return launch->threadgroups_per_grid;
    case Builtin::kThreadsPerGrid:
      return launch->threads_per_grid;
    case Builtin::kNone:
      break;
  }
  return {0, 0, 0};
}

// What a parameter is made from: a slot of the argument table or a built-in value.
struct Source {
  int slot;
  Builtin builtin;
};

template <typename T>
struct Parameter {  // a scalar built-in
  static constexpr size_t least_bytes = 0;
  static constexpr size_t alignment = 1;
  static T make(Source source) { return T(builtin_position(source.builtin).x); }
};
template <typename T>
struct Parameter<metal::vec<T, 2>> : Parameter<T> {
  static metal::vec<T, 2> make(Source source) {
    Position at = builtin_position(source.builtin);
    return metal::vec<T, 2>(T(at.x), T(at.y));
  }
};
template <typename T>
struct Parameter<metal::vec<T, 3>> : Parameter<T> {
  static metal::vec<T, 3> make(Source source) {
    Position at = builtin_position(source.builtin);
    return metal::vec<T, 3>(T(at.x), T(at.y), T(at.z));
  }
};
template <typename Space, typename T>
struct Parameter<Pointer<Space, T>> {
  static constexpr size_t least_bytes = 0;
  static constexpr size_t alignment = alignof(T);
  static Pointer<Space, T> make(Source source) {
    const Binding& binding = launch->buffers[source.slot];
    return Pointer<Space, T>((T*)binding.base, &binding);
  }
};
template <typename Space, typename T>
struct Parameter<Pointer<Space, const T>> {
  static constexpr size_t least_bytes = 0;
  static constexpr size_t alignment = alignof(T);
  static Pointer<Space, const T> make(Source source) {
    const Binding& binding = launch->buffers[source.slot];
    return Pointer<Space, const T>((T*)binding.base, &binding);
  }
};
template <typename T>
struct Parameter<Pointer<ThreadgroupSpace, T>> : Parameter<Pointer<DeviceSpace, T>> {
  static Pointer<ThreadgroupSpace, T> make(Source source) {
    const Binding& binding = launch->threadgroup_arguments[source.slot];
    return Pointer<ThreadgroupSpace, T>((T*)binding.base, &binding);
  }
};
// A `constant T&`: held whole by its binding, which is checked when it is bound.
template <typename T>
struct Parameter<const T&> {
  static constexpr size_t least_bytes = sizeof(T);
  static constexpr size_t alignment = alignof(T);
  static const T& make(Source source) { return *(const T*)launch->buffers[source.slot].base; }
};

template <int... kIndices>
struct Indices {};
template <int kCount, int... kIndices>
struct MakeIndices : MakeIndices<kCount - 1, kCount - 1, kIndices...> {};
template <int... kIndices>
struct MakeIndices<0, kIndices...> {
  typedef Indices<kIndices...> type;
};

template <typename F>
struct Signature;
template <typename... Ts>
struct Signature<void(Ts...)> {
  static constexpr int kCount = sizeof...(Ts);
  static constexpr size_t least_bytes[] = {Parameter<Ts>::least_bytes..., 0};
  static constexpr size_t alignments[] = {Parameter<Ts>::alignment..., 1};
  template <int... kIndices>
  static void call(void (*function)(Ts...), const Source* sources, Indices<kIndices...>) {
    function(Parameter<Ts>::make(sources[kIndices])...);
  }
};

template <typename F, F* kFunction, const Source* kSources>
void run_kernel() {
  Signature<F>::call(kFunction, kSources, typename MakeIndices<Signature<F>::kCount>::type());
}

}  // namespace softmetal
