#include "runtime/object.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "runtime/classes.h"

#define SOFTMETAL_EXPORT extern "C" __attribute__((visibility("default")))

struct objc_selector {
  std::string name;
};

namespace softmetal {

namespace {

std::atomic<std::int64_t> unpooled{0};

struct ClassList {
  std::mutex mutex;
  std::unordered_map<std::string, ClassObject*> by_name;
};
// Never destroyed: messages are sent until the process ends.
ClassList& class_list() {
  static ClassList& list = *new ClassList;
  return list;
}

// One pool: what it releases when it goes.
class AutoreleasePool : public Object {
 public:
  AutoreleasePool() : Object(class_of()) {}
  static ClassObject& class_of();
  static AutoreleasePool* make() { return new AutoreleasePool; }
  AutoreleasePool* init();
  void drain();
  void add(Object* object) { objects_.push_back(object); }

 private:
  std::vector<Object*> objects_;
};

thread_local std::vector<AutoreleasePool*> pools;

ClassObject& AutoreleasePool::class_of() {
  static ClassObject& of = (new ClassObject("NSAutoreleasePool"))
                               ->class_method<&AutoreleasePool::make>("alloc")
                               .method<&AutoreleasePool::init>("init")
                               .method<&AutoreleasePool::drain>("drain")
                               .method<&AutoreleasePool::drain>("release")
                               .method<&AutoreleasePool::add>("addObject:");
  return of;
}

AutoreleasePool* AutoreleasePool::init() {
  pools.push_back(this);
  return this;
}

// Pools nest: those made after this one go with it.
void AutoreleasePool::drain() {
  for (;;) {
    if (pools.empty()) return;
    AutoreleasePool* last = pools.back();
    std::vector<Object*> objects;
    do {
      objects.swap(last->objects_);
      for (Object* object : objects) object->release();
      objects.clear();
    } while (!last->objects_.empty());
    pools.pop_back();
    bool found = last == this;
    last->Object::release();
    if (found) return;
  }
}

bool responds_to(Object* self, Selector, Selector asked) {
  return self->find_method(asked) != nullptr;
}
void* no_method_signature(Object*, Selector, Selector) { return nullptr; }
std::uint64_t hash(Object* self, Selector) { return reinterpret_cast<std::uintptr_t>(self); }
bool is_equal(Object* self, Selector, Object* other) { return self == other; }
Object* retain(Object* self, Selector) { return self->retain(); }
void release(Object* self, Selector) { self->release(); }
Object* autorelease(Object* self, Selector) { return self->autorelease(); }
std::uint64_t retain_count(Object* self, Selector) { return self->retain_count(); }
Object* init(Object* self, Selector) { return self; }

// What every object understands.
Method common_method(Selector asked) {
  static const std::unordered_map<Selector, Method>& methods =
      *new std::unordered_map<Selector, Method>{
          {selector("retain"), reinterpret_cast<Method>(&retain)},
          {selector("release"), reinterpret_cast<Method>(&release)},
          {selector("autorelease"), reinterpret_cast<Method>(&autorelease)},
          {selector("retainCount"), reinterpret_cast<Method>(&retain_count)},
          {selector("init"), reinterpret_cast<Method>(&init)},
          {selector("hash"), reinterpret_cast<Method>(&hash)},
          {selector("isEqual:"), reinterpret_cast<Method>(&is_equal)},
          {selector("respondsToSelector:"), reinterpret_cast<Method>(&responds_to)},
          {selector("methodSignatureForSelector:"), reinterpret_cast<Method>(&no_method_signature)},
      };
  auto found = methods.find(asked);
  return found == methods.end() ? nullptr : found->second;
}

}  // namespace

Selector selector(const std::string& name) {
  static std::mutex& mutex = *new std::mutex;
  static auto& selectors = *new std::unordered_map<std::string, const objc_selector*>;
  std::lock_guard<std::mutex> lock(mutex);
  const objc_selector*& entry = selectors[name];
  if (entry == nullptr) entry = new objc_selector{name};
  return entry;
}

const std::string& selector_name(Selector of) { return of->name; }

Object::Object(ClassObject& of) : class_(of) {
  if (static_cast<Object*>(&of) != this) ++of.live;
}
Object::~Object() { --class_.live; }

Object* Object::retain() {
  references_.fetch_add(1, std::memory_order_relaxed);
  return this;
}
void Object::release() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}
Object* Object::autorelease() {
  if (pools.empty()) {
    ++unpooled;  // as with the real one: it leaks
  } else {
    pools.back()->add(this);
  }
  return this;
}
std::uint64_t Object::retain_count() const { return std::uint64_t(references_.load()); }

Method Object::find_method(Selector asked) const {
  Method found = class_.find_instance_method(asked);
  return found != nullptr ? found : common_method(asked);
}

ClassObject::ClassObject(const char* name) : Object(*this), name_(name) {}

Method ClassObject::find_instance_method(Selector asked) const {
  auto found = instance_methods_.find(asked);
  return found == instance_methods_.end() ? nullptr : found->second;
}
Method ClassObject::find_method(Selector asked) const {
  auto found = class_methods_.find(asked);
  return found == class_methods_.end() ? common_method(asked) : found->second;
}

ClassObject* look_up_class(const std::string& name) {
  ClassList& list = class_list();
  std::lock_guard<std::mutex> lock(list.mutex);
  if (list.by_name.empty()) {
    std::vector<ClassObject*> all = foundation_classes();
    for (ClassObject* of : metal_classes()) all.push_back(of);
    all.push_back(&AutoreleasePool::class_of());
    for (ClassObject* of : all) list.by_name[of->name()] = of;
  }
  auto found = list.by_name.find(name);
  return found == list.by_name.end() ? nullptr : found->second;
}

std::int64_t live_objects(const std::string& class_name) {
  if (!class_name.empty()) {
    ClassObject* of = look_up_class(class_name);
    return of == nullptr ? -1 : of->live.load();
  }
  look_up_class("");
  std::int64_t sum = 0;
  std::lock_guard<std::mutex> lock(class_list().mutex);
  for (const auto& entry : class_list().by_name) sum += entry.second->live.load();
  return sum;
}

std::int64_t autoreleases_without_pool() { return unpooled.load(); }
void reset_autoreleases_without_pool() { unpooled = 0; }

}  // namespace softmetal

SOFTMETAL_EXPORT void* objc_lookUpClass(const char* name) { return softmetal::look_up_class(name); }
SOFTMETAL_EXPORT void* objc_getClass(const char* name) { return softmetal::look_up_class(name); }
// metal-cpp only keeps the answer.
SOFTMETAL_EXPORT void* objc_getProtocol(const char*) { return nullptr; }
SOFTMETAL_EXPORT const objc_selector* sel_registerName(const char* name) {
  return softmetal::selector(name);
}

// Called by the trampoline.
extern "C" __attribute__((visibility("hidden"), used)) softmetal::Method softmetal_find_method(
    softmetal::Object* self, softmetal::Selector asked) {
  softmetal::Method found = self->find_method(asked);
  if (found == nullptr) {
    // The real runtime raises an exception that nobody catches.
    std::fprintf(stderr, "softmetal: %s does not answer to '%s'\n",
                 self->class_object().name().c_str(), softmetal::selector_name(asked).c_str());
    std::abort();
  }
  return found;
}
