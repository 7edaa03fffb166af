// MTLCommandQueue, MTLCommandBuffer, MTLComputeCommandEncoder. A queue has a thread that executes
// what is committed, in order, while the host goes on or waits.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "exec/threadgroup.h"
#include "runtime/device.h"
#include "runtime/library.h"

namespace softmetal {

std::vector<ClassObject*> command_classes();

// A dispatch with everything it refers to kept alive.
struct EncodedDispatch {
  Ref<Pipeline> pipeline;
  Dispatch dispatch;
  std::vector<Ref<Buffer>> buffers;
  std::vector<std::shared_ptr<std::vector<char>>> bytes;
  std::vector<std::shared_ptr<std::string>> labels;
};

enum class Status : std::uint64_t {
  kNotEnqueued = 0,
  kEnqueued = 1,
  kCommitted = 2,
  kScheduled = 3,
  kCompleted = 4,
  kError = 5
};

// Tells those who wait that a command buffer is done. Apart from it, so that the queue's thread can
// drop its reference first: who has waited can count on it.
struct Completion {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

class CommandBuffer : public Object {
 public:
  explicit CommandBuffer(class CommandQueue* queue);
  static ClassObject& class_of();
  ~CommandBuffer() override;
  // The first of them is the error that the command buffer fails with.
  void misused(const std::string& text);
  void fail(std::int64_t code, const std::string& text);
  void add(EncodedDispatch dispatch);
  void encoder_ended();
  void execute(Engine& engine);
  std::shared_ptr<Completion> completion() const { return completion_; }

  class ComputeEncoder* compute_encoder();
  class ComputeEncoder* compute_encoder_of(std::uint64_t dispatch_type);
  void enqueue() {}
  void commit();
  void wait_scheduled();
  void wait_completed();
  std::uint64_t status();
  Error* error();
  void add_completed_handler(void* block);
  double gpu_start() const { return gpu_start_; }
  double gpu_end() const { return gpu_end_; }
  Device* device() const;
  CommandQueue* queue() const { return queue_.get(); }
  void set_label(String* label) { label_ = Ref<String>(label); }
  String* label() const { return label_.get(); }

 private:
  bool failed();
  void run_dispatches(Engine& engine);
  void finish();

  Ref<CommandQueue> queue_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Status status_ = Status::kNotEnqueued;
  bool encoding_ = false;
  std::shared_ptr<Completion> completion_ = std::make_shared<Completion>();
  std::vector<EncodedDispatch> dispatches_;
  std::vector<void*> handlers_;
  std::int64_t error_code_ = 0;
  std::string error_text_;
  Ref<Error> error_;
  Ref<String> label_;
  double gpu_start_ = 0;
  double gpu_end_ = 0;
};

// The worker's part of a queue: it outlives the queue until it has nothing left to do.
class QueueWorker;

class CommandQueue : public Object {
 public:
  explicit CommandQueue(Device* device);
  static ClassObject& class_of();
  ~CommandQueue() override;
  void submit(CommandBuffer* buffer);
  CommandBuffer* command_buffer();
  Device* device() const { return device_.get(); }
  void set_label(String*) {}

 private:
  Ref<Device> device_;
  std::shared_ptr<QueueWorker> worker_;
};

class ComputeEncoder : public Object {
 public:
  explicit ComputeEncoder(CommandBuffer* buffer);
  static ClassObject& class_of();
  ~ComputeEncoder() override;

  void set_pipeline(Pipeline* pipeline);
  void set_buffer(Buffer* buffer, std::uint64_t offset, std::uint64_t index);
  void set_buffer_offset(std::uint64_t offset, std::uint64_t index);
  void set_bytes(const void* bytes, std::uint64_t length, std::uint64_t index);
  void set_threadgroup_memory(std::uint64_t length, std::uint64_t index);
  void dispatch_threads(Size threads, Size per_threadgroup);
  void dispatch_threadgroups(Size threadgroups, Size per_threadgroup);
  void memory_barrier(std::uint64_t scope);
  void memory_barrier_resources(Object* const* resources, std::uint64_t count);
  void end();
  Device* device() const { return buffer_->device(); }
  void set_label(String*) {}

 private:
  struct Slot {
    Ref<Buffer> buffer;
    std::shared_ptr<std::vector<char>> bytes;
    std::uint64_t offset = 0;
  };
  bool usable(const char* call, std::uint64_t index);
  std::string problem(Size threads, Size per_threadgroup) const;
  void encode(Size threads, Size per_threadgroup);
  std::string bind(const Argument& argument, EncodedDispatch* into) const;

  Ref<CommandBuffer> buffer_;
  std::thread::id owner_;
  bool ended_ = false;
  Ref<Pipeline> pipeline_;
  Slot slots_[kMaxBuffers];
  std::uint64_t threadgroup_bytes_[kMaxBuffers] = {};
};

}  // namespace softmetal
