// Objects, classes and message sending: as much of the Objective-C runtime as metal-cpp uses.
// Methods are C++ member functions; a class maps selectors to them.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>

struct objc_selector;

namespace softmetal {

using Selector = const objc_selector*;
using Method = void (*)();

Selector selector(const std::string& name);
const std::string& selector_name(Selector selector);

class ClassObject;

// Pointers to objects are handed out as they are, so this is the first base of everything.
class Object {
 public:
  explicit Object(ClassObject& of);
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  Object* retain();
  void release();
  Object* autorelease();
  std::uint64_t retain_count() const;
  ClassObject& class_object() const { return class_; }
  // nullptr if there is none.
  virtual Method find_method(Selector selector) const;

 protected:
  virtual ~Object();

 private:
  ClassObject& class_;
  std::atomic<std::int64_t> references_{1};
};

template <auto kMember>
struct Thunk;
template <typename T, typename R, typename... Args, R (T::*kMember)(Args...)>
struct Thunk<kMember> {
  static R call(T* self, Selector, Args... args) { return (self->*kMember)(args...); }
};
template <typename T, typename R, typename... Args, R (T::*kMember)(Args...) const>
struct Thunk<kMember> {
  static R call(T* self, Selector, Args... args) { return (self->*kMember)(args...); }
};
template <typename R, typename... Args, R (*kFunction)(Args...)>
struct Thunk<kFunction> {
  static R call(Object*, Selector, Args... args) { return kFunction(args...); }
};

// A class is an object too: messages to it find class methods.
class ClassObject : public Object {
 public:
  explicit ClassObject(const char* name);
  const std::string& name() const { return name_; }

  template <auto kMember>
  ClassObject& method(const char* name) {
    instance_methods_[selector(name)] = reinterpret_cast<Method>(&Thunk<kMember>::call);
    return *this;
  }
  template <auto kFunction>
  ClassObject& class_method(const char* name) {
    class_methods_[selector(name)] = reinterpret_cast<Method>(&Thunk<kFunction>::call);
    return *this;
  }
  Method find_instance_method(Selector selector) const;
  Method find_method(Selector selector) const override;

  std::atomic<std::int64_t> live{0};

 private:
  std::string name_;
  std::unordered_map<Selector, Method> instance_methods_;
  std::unordered_map<Selector, Method> class_methods_;
};

// Makes every class known; the first look-up calls it, which may be before main.
ClassObject* look_up_class(const std::string& name);
// Objects alive, of one class or of all ("").
std::int64_t live_objects(const std::string& class_name);
std::int64_t autoreleases_without_pool();
void reset_autoreleases_without_pool();

// Keeps a reference.
template <typename T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(T* object) : object_(object) {
    if (object_ != nullptr) object_->retain();
  }
  Ref(const Ref& other) : Ref(other.object_) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    if (object_ != nullptr) object_->release();
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  T* object_ = nullptr;
};

template <typename T>
T* autoreleased(T* object) {
  object->autorelease();
  return object;
}

}  // namespace softmetal
