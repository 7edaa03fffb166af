#include "runtime/device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "runtime/blocks.h"
#include "runtime/classes.h"
#include "runtime/command.h"
#include "runtime/control.h"
#include "runtime/library.h"
#include "runtime/pages.h"

#define SOFTMETAL_EXPORT extern "C" __attribute__((visibility("default")))

namespace softmetal {

namespace {

// A device is asked for anew after it was lost, so each request makes one.
Device* make_device() {
  if (fault_strikes(Setting::kNoDevice) || !processor_runs_kernels()) return nullptr;
  return new Device;
}

constexpr std::int64_t kFamilyApple1 = 1001;
constexpr std::int64_t kFamilyApple8 = 1008;
constexpr std::int64_t kFamilyMetal3 = 5001;

}  // namespace

ClassObject& Device::class_of() {
  static ClassObject& of =
      (new ClassObject("MTLDevice"))
          ->method<&Device::name>("name")
          .method<&Device::max_buffer_length>("maxBufferLength")
          .method<&Device::max_threadgroup_memory>("maxThreadgroupMemoryLength")
          .method<&Device::max_threads>("maxThreadsPerThreadgroup")
          .method<&Device::supports_family>("supportsFamily:")
          .method<&Device::yes>("hasUnifiedMemory")
          .method<&Device::no>("isRemovable")
          .method<&Device::no>("isHeadless")
          .method<&Device::no>("isLowPower")
          .method<&Device::working_set>("recommendedMaxWorkingSetSize")
          .method<&Device::registry_id>("registryID")
          .method<&Device::new_buffer>("newBufferWithLength:options:")
          .method<&Device::new_buffer_with_bytes>("newBufferWithBytes:length:options:")
          .method<&Device::new_buffer_no_copy>(
              "newBufferWithBytesNoCopy:length:options:deallocator:")
          .method<&Device::new_library_source>("newLibraryWithSource:options:error:")
          .method<&Device::new_library_url>("newLibraryWithURL:error:")
          .method<&Device::new_library_file>("newLibraryWithFile:error:")
          .method<&Device::new_pipeline>("newComputePipelineStateWithFunction:error:")
          .method<&Device::new_queue>("newCommandQueue")
          .method<&Device::new_queue_of>("newCommandQueueWithMaxCommandBufferCount:");
  return of;
}

String* Device::name() { return autoreleased(new String("Software Metal device")); }

std::uint64_t Device::max_buffer_length() const {
  return std::uint64_t(setting(Setting::kMaxBufferLength));
}

bool Device::supports_family(std::int64_t family) const {
  return (family >= kFamilyApple1 && family <= kFamilyApple8) || family == kFamilyMetal3;
}

Buffer* Device::new_buffer(std::uint64_t length, std::uint64_t) {
  if (fault_strikes(Setting::kNilBuffer) || length == 0 || length > max_buffer_length()) {
    return nullptr;
  }
  std::uint64_t page = page_bytes();
  std::uint64_t whole = (length + page - 1) / page * page;
  auto* bytes = static_cast<char*>(std::aligned_alloc(page, whole));
  if (bytes == nullptr) return nullptr;
  std::memset(bytes, 0xff, whole);  // NaN: what nobody wrote shows
  return new Buffer(this, bytes, length, true);
}

Buffer* Device::new_buffer_with_bytes(const void* bytes, std::uint64_t length,
                                      std::uint64_t options) {
  Buffer* buffer = new_buffer(length, options);
  if (buffer != nullptr) std::memcpy(buffer->contents(), bytes, length);
  return buffer;
}

Buffer* Device::new_buffer_no_copy(void* bytes, std::uint64_t length, std::uint64_t,
                                   void* deallocator) {
  if (fault_strikes(Setting::kNilBuffer) || fault_strikes(Setting::kNilNoCopyBuffer)) {
    return nullptr;
  }
  std::uint64_t page = page_bytes();
  bool whole_pages = reinterpret_cast<std::uintptr_t>(bytes) % page == 0 && length % page == 0;
  if (!whole_pages || length == 0 || length > max_buffer_length()) return nullptr;
  PageAccess access = page_access(bytes, length);
  if (access == PageAccess::kNone) return nullptr;
  auto* buffer = new Buffer(this, static_cast<char*>(bytes), length, false);
  if (access == PageAccess::kReadOnly || setting(Setting::kReadOnly) != 0) buffer->set_read_only();
  buffer->set_deallocator(deallocator);
  count(Event::kNoCopyBuffers);
  return buffer;
}

CommandQueue* Device::new_queue() {
  return fault_strikes(Setting::kNilQueue) ? nullptr : new CommandQueue(this);
}
CommandQueue* Device::new_queue_of(std::uint64_t) { return new_queue(); }

Buffer::Buffer(Device* device, char* bytes, std::uint64_t length, bool owned)
    : Object(class_of()), device_(device), bytes_(bytes), length_(length), owned_(owned) {}

Buffer::~Buffer() {
  if (owned_) std::free(bytes_);
  if (deallocator_ != nullptr) {
    call_block<void*, std::uint64_t>(deallocator_, bytes_, length_);
    _Block_release(deallocator_);
  }
}

ClassObject& Buffer::class_of() {
  static ClassObject& of = (new ClassObject("MTLBuffer"))
                               ->method<&Buffer::contents>("contents")
                               .method<&Buffer::length>("length")
                               .method<&Buffer::length>("allocatedSize")
                               .method<&Buffer::gpu_address>("gpuAddress")
                               .method<&Buffer::add_mark>("addDebugMarker:range:")
                               .method<&Buffer::remove_marks>("removeAllDebugMarkers")
                               .method<&Buffer::did_modify>("didModifyRange:")
                               .method<&Buffer::storage_mode>("storageMode")
                               .method<&Buffer::device>("device")
                               .method<&Buffer::set_label>("setLabel:")
                               .method<&Buffer::label>("label");
  return of;
}

void Buffer::set_deallocator(void* block) {
  deallocator_ = block == nullptr ? nullptr : _Block_copy(block);
}

void Buffer::add_mark(String* name, Range range) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (range.location > length_ || range.length > length_ - range.location) {
    count(Event::kMisuses);
    return;
  }
  marks_.push_back({name->text(), range});
}
void Buffer::remove_marks() {
  std::lock_guard<std::mutex> lock(mutex_);
  marks_.clear();
}

// Marks may overlap: arrays sliced from one array do. The one that starts at the offset is meant,
// the longest where several do: which one a binding is of, nobody says.
Mark Buffer::mark_at(std::uint64_t offset) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Mark* best = nullptr;
  for (const Mark& mark : marks_) {
    std::uint64_t into = offset - mark.range.location;
    if (offset < mark.range.location || (into != 0 && into >= mark.range.length)) continue;
    const bool is_longer = best != nullptr && mark.range.length >= best->range.length;
    if (best == nullptr || best->range.location != offset || (into == 0 && is_longer)) best = &mark;
  }
  if (best != nullptr) return *best;
  return {label_ ? label_->text() : "the whole buffer", {0, length_}};
}

ClassObject& CompileOptions::class_of() {
  static ClassObject& of =
      (new ClassObject("MTLCompileOptions"))
          ->class_method<&CompileOptions::make>("alloc")
          .method<&CompileOptions::set_language_version>("setLanguageVersion:")
          .method<&CompileOptions::language_version>("languageVersion")
          .method<&CompileOptions::set_fast_math>("setFastMathEnabled:")
          .method<&CompileOptions::fast_math>("fastMathEnabled")
          .method<&CompileOptions::set_math_functions>("setMathFloatingPointFunctions:")
          .method<&CompileOptions::math_functions>("mathFloatingPointFunctions")
          .method<&CompileOptions::set_math_mode>("setMathMode:")
          .method<&CompileOptions::math_mode>("mathMode");
  return of;
}

std::vector<ClassObject*> metal_classes() {
  std::vector<ClassObject*> all = {&Device::class_of(), &Buffer::class_of(),
                                   &CompileOptions::class_of()};
  for (ClassObject* of : library_classes()) all.push_back(of);
  for (ClassObject* of : command_classes()) all.push_back(of);
  return all;
}

}  // namespace softmetal

SOFTMETAL_EXPORT softmetal::Device* MTLCreateSystemDefaultDevice() {
  return softmetal::make_device();
}

SOFTMETAL_EXPORT softmetal::Array* MTLCopyAllDevices() {
  std::vector<softmetal::Ref<softmetal::Object>> devices;
  if (softmetal::Device* device = softmetal::make_device()) {
    devices.push_back(softmetal::adopted<softmetal::Object>(device));
  }
  return new softmetal::Array(std::move(devices));
}

// Devices neither come nor go here, so an observer never hears anything; its token is nil.
SOFTMETAL_EXPORT softmetal::Array* MTLCopyAllDevicesWithObserver(softmetal::Object** observer,
                                                                 void*) {
  if (observer != nullptr) *observer = nullptr;
  return MTLCopyAllDevices();
}
SOFTMETAL_EXPORT void MTLRemoveDeviceObserver(const softmetal::Object*) {}
