// Pointers into the address spaces device, constant and threadgroup: they hold every access to the
// range of the argument they came from, count it, and give references that tell loads from stores.
// `thread` pointers are plain pointers.
#pragma once

#include "softmetal/launch.h"
#include "softmetal/race.h"

namespace softmetal {

template <typename T>
inline bool wrong(const char* begin, const char* end, const T* address) {
  uintptr_t at = (uintptr_t)address;
  return (at < (uintptr_t)begin) | (at + sizeof(T) > (uintptr_t)end) | (at % alignof(T) != 0);
}

template <typename T>
inline void check_load(const Binding* binding, const T* address) {
  if (__builtin_expect(wrong(binding->begin, binding->end, address), 0)) {
    fault_access(binding, address, sizeof(T), alignof(T), false);
  }
}
template <typename T>
inline void check_store(const Binding* binding, const T* address) {
  if (__builtin_expect(wrong(binding->store_begin, binding->store_end, (const T*)address), 0)) {
    fault_access(binding, address, sizeof(T), alignof(T), true);
  }
}

struct DeviceSpace {
  template <typename T>
  static T load(const Binding* binding, const T* address) {
    check_load(binding, address);
    if (binding->shadow != nullptr) check_device_load<sizeof(T)>(binding, address);
    counters.device_bytes_loaded += sizeof(T);
    return *address;
  }
  template <typename T>
  static void store(const Binding* binding, T* address, T value) {
    check_store(binding, address);
    check_device_store<sizeof(T)>(binding, address);
    counters.device_bytes_stored += sizeof(T);
    *address = value;
  }
};

struct ConstantSpace {
  template <typename T>
  static T load(const Binding* binding, const T* address) {
    check_load(binding, address);
    return *address;
  }
};

struct ThreadgroupSpace {
  template <typename T>
  static T load(const Binding* binding, const T* address) {
    check_load(binding, address);
    check_threadgroup_load<sizeof(T)>(binding, address);
    counters.threadgroup_bytes_loaded += sizeof(T);
    return *address;
  }
  template <typename T>
  static void store(const Binding* binding, T* address, T value) {
    check_store(binding, address);
    check_threadgroup_store<sizeof(T)>(binding, address);
    counters.threadgroup_bytes_stored += sizeof(T);
    *address = value;
  }
};

template <typename T>
inline T* advance(T* address, int64_t count) {
  // As integers: a pointer may stand anywhere as long as it is not used.
  return (T*)((uintptr_t)address + (uintptr_t)count * sizeof(T));
}

// What the type of an expression decays to when it initializes an `auto` variable.
template <typename T>
inline T value_of(T value) {
  return value;
}

template <typename Space, typename T>
struct Pointer;

template <typename Space, typename T>
struct Reference {
  T* address;
  const Binding* binding;

  Reference(T* at, const Binding* of) : address(at), binding(of) {}
  // Not copied: a variable that holds one would see later stores.
  Reference(const Reference&) = delete;

  operator T() const { return Space::load(binding, (const T*)address); }
  Pointer<Space, T> operator&() const { return Pointer<Space, T>(address, binding); }
  const Reference& operator=(T value) const {
    Space::store(binding, address, value);
    return *this;
  }
  // Assigns the value, not the reference.
  const Reference& operator=(const Reference& other) const { return *this = T(other); }
  const Reference& operator+=(T value) const { return *this = T(*this) + value; }
  const Reference& operator-=(T value) const { return *this = T(*this) - value; }
  const Reference& operator*=(T value) const { return *this = T(*this) * value; }
  const Reference& operator/=(T value) const { return *this = T(*this) / value; }
};

template <typename Space, typename T>
inline T value_of(const Reference<Space, T>& reference) {
  return reference;
}

template <typename T>
struct Held {
  T value;
  const T* operator->() const { return &value; }
};

template <typename Space, typename T>
struct Pointer<Space, const T> {
  T* address;
  const Binding* binding;

  Pointer() = default;
  Pointer(T* at, const Binding* of) : address(at), binding(of) {}
  template <typename U>
  explicit Pointer(Pointer<Space, U> other) : Pointer((T*)other.address, other.binding) {}

  T operator[](int64_t i) const { return Space::load(binding, (const T*)advance(address, i)); }
  T operator*() const { return Space::load(binding, (const T*)address); }
  Held<T> operator->() const { return Held<T>{**this}; }
  Pointer operator+(int64_t count) const { return Pointer(advance(address, count), binding); }
  Pointer operator-(int64_t count) const { return Pointer(advance(address, -count), binding); }
  Pointer& operator+=(int64_t count) { return *this = *this + count; }
  Pointer& operator-=(int64_t count) { return *this = *this - count; }
  Pointer& operator++() { return *this += 1; }
  int64_t operator-(Pointer other) const {
    return int64_t((uintptr_t)address - (uintptr_t)other.address) / int64_t(sizeof(T));
  }
  bool operator==(Pointer other) const { return address == other.address; }
  bool operator!=(Pointer other) const { return address != other.address; }
};

// Derived from the pointer to const, so that it converts to it, in template arguments too.
template <typename Space, typename T>
struct Pointer : Pointer<Space, const T> {
  using Const = Pointer<Space, const T>;

  Pointer() = default;
  Pointer(T* at, const Binding* of) : Const(at, of) {}
  template <typename U>
  explicit Pointer(Pointer<Space, U> other) : Pointer((T*)other.address, other.binding) {}

  Reference<Space, T> operator[](int64_t i) const {
    return Reference<Space, T>(advance(this->address, i), this->binding);
  }
  Reference<Space, T> operator*() const { return (*this)[0]; }
  Pointer operator+(int64_t count) const {
    return Pointer(advance(this->address, count), this->binding);
  }
  Pointer operator-(int64_t count) const {
    return Pointer(advance(this->address, -count), this->binding);
  }
  int64_t operator-(Const other) const { return Const(*this) - other; }
  Pointer& operator+=(int64_t count) { return *this = *this + count; }
  Pointer& operator-=(int64_t count) { return *this = *this - count; }
  Pointer& operator++() { return *this += 1; }
};

template <typename T>
using device_ptr = Pointer<DeviceSpace, T>;
template <typename T>
using constant_ptr = Pointer<ConstantSpace, const T>;
template <typename T>
using threadgroup_ptr = Pointer<ThreadgroupSpace, T>;
template <typename T>
using device_ref = Reference<DeviceSpace, T>;
template <typename T>
using threadgroup_ref = Reference<ThreadgroupSpace, T>;

template <typename To, typename From>
inline To pointer_cast(From from) {
  return To(from);
}

// A `threadgroup` array that a kernel declares: behaves as the pointer it decays to.
template <typename T, size_t... kSizes>
struct ThreadgroupArray;

template <typename T, size_t kSize>
struct ThreadgroupArray<T, kSize> : threadgroup_ptr<T> {
  ThreadgroupArray(int id, const char* name) {
    this->binding = threadgroup_array_binding(id, kSize * sizeof(T), alignof(T), name);
    this->address = (T*)this->binding->base;
  }
};

template <typename T, size_t kRows, size_t kColumns>
struct ThreadgroupArray<T, kRows, kColumns> {
  threadgroup_ptr<T> start;
  ThreadgroupArray(int id, const char* name)
      : start(ThreadgroupArray<T, kRows * kColumns>(id, name)) {}
  threadgroup_ptr<T> operator[](int64_t i) const { return start + i * int64_t(kColumns); }
};

template <typename T>
inline threadgroup_ref<T> threadgroup_scalar(int id, const char* name) {
  return *ThreadgroupArray<T, 1>(id, name);
}

}  // namespace softmetal
