// MTLDevice and what it makes that is not a command: buffers, libraries, functions, pipelines.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/foundation.h"
#include "softmetal/launch.h"

namespace softmetal {

struct Size {
  std::uint64_t width, height, depth;
};
struct Range {
  std::uint64_t location, length;
};

class Device : public Object {
 public:
  Device() : Object(class_of()) {}
  static ClassObject& class_of();
  bool lost() const { return lost_.load(); }
  void lose() { lost_ = true; }

  String* name();
  std::uint64_t max_buffer_length() const;
  std::uint64_t max_threadgroup_memory() const { return kMaxThreadgroupBytes; }
  Size max_threads() const { return {kMaxThreads, kMaxThreads, kMaxThreads}; }
  bool supports_family(std::int64_t family) const;
  bool yes() const { return true; }
  bool no() const { return false; }
  std::uint64_t working_set() const { return max_buffer_length(); }
  std::uint64_t registry_id() const { return 1; }

  class Buffer* new_buffer(std::uint64_t length, std::uint64_t options);
  class Buffer* new_buffer_with_bytes(const void* bytes, std::uint64_t length,
                                      std::uint64_t options);
  class Buffer* new_buffer_no_copy(void* bytes, std::uint64_t length, std::uint64_t options,
                                   void* deallocator);
  class Library* new_library_source(String* source, class CompileOptions* options, Error** error);
  class Library* new_library_url(Url* url, Error** error);
  class Library* new_library_file(String* path, Error** error);
  class Pipeline* new_pipeline(class Function* function, Error** error);
  class CommandQueue* new_queue();
  class CommandQueue* new_queue_of(std::uint64_t most_command_buffers);

 private:
  class Library* load_metallib(const std::string& path, Error** error);
  std::atomic<bool> lost_{false};
};

// Bytes that some argument owns, as the host named them.
struct Mark {
  std::string name;
  Range range;
};

class Buffer : public Object {
 public:
  Buffer(Device* device, char* bytes, std::uint64_t length, bool owned);
  static ClassObject& class_of();
  ~Buffer() override;
  void set_deallocator(void* block);
  void set_read_only() { read_only_ = true; }
  bool read_only() const { return read_only_; }
  Device* device() const { return device_.get(); }
  // The mark that an argument bound at this offset is held to; the whole buffer without one.
  Mark mark_at(std::uint64_t offset) const;

  char* contents() const { return bytes_; }
  std::uint64_t length() const { return length_; }
  std::uint64_t gpu_address() const { return reinterpret_cast<std::uintptr_t>(bytes_); }
  void add_mark(String* name, Range range);
  void remove_marks();
  void did_modify(Range) {}
  std::uint64_t storage_mode() const { return 0; }
  void set_label(String* label) { label_ = Ref<String>(label); }
  String* label() const { return label_.get(); }

 private:
  Ref<Device> device_;
  char* bytes_;
  std::uint64_t length_;
  bool owned_;
  bool read_only_ = false;
  void* deallocator_ = nullptr;
  Ref<String> label_;
  mutable std::mutex mutex_;  // of the marks
  std::vector<Mark> marks_;
};

class CompileOptions : public Object {
 public:
  CompileOptions() : Object(class_of()) {}
  static ClassObject& class_of();
  static CompileOptions* make() { return new CompileOptions; }
  void set_language_version(std::uint64_t version) { language_version_ = version; }
  std::uint64_t language_version() const { return language_version_; }
  void set_fast_math(bool on) { fast_math_ = on; }
  bool fast_math() const { return fast_math_; }
  void set_math_mode(std::int64_t mode) { math_mode_ = mode; }
  std::int64_t math_mode() const { return math_mode_; }
  void set_math_functions(std::int64_t functions) { math_functions_ = functions; }
  std::int64_t math_functions() const { return math_functions_; }

 private:
  std::uint64_t language_version_ = 0;
  bool fast_math_ = true;  // Metal's default
  std::int64_t math_mode_ = 2;
  std::int64_t math_functions_ = 0;
};

}  // namespace softmetal
