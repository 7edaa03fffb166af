#include "runtime/command.h"

#include <chrono>

#include "runtime/blocks.h"
#include "runtime/control.h"
#include "runtime/errors.h"

namespace softmetal {

namespace {

double now() {
  std::chrono::duration<double> time = std::chrono::steady_clock::now().time_since_epoch();
  return time.count();
}

// What Metal says for an error that a test injects.
std::string injected_text(std::int64_t code) {
  switch (code) {
    case kErrorTimeout:
      return "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)";
    case kErrorPageFault:
      return "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)";
    case kErrorOutOfMemory:
      return "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)";
    case kErrorInvalidResource:
      return "Invalid Resource (00000009:kIOGPUCommandBufferCallbackErrorInvalidResource)";
    default:
      return "Internal Error (0000000" + std::to_string(code) + ":Internal Error)";
  }
}

constexpr char kLostText[] =
    "Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)";

}  // namespace

// Executes command buffers in the order of their commits. The thread starts with the first one and
// ends when the queue is gone and nothing is left.
class QueueWorker : public std::enable_shared_from_this<QueueWorker> {
 public:
  void submit(CommandBuffer* buffer) {
    std::lock_guard<std::mutex> lock(mutex_);
    pending_.push_back(buffer);  // with a reference of its own
    if (!started_) {
      started_ = true;
      std::thread([self = shared_from_this()] { self->run(); }).detach();
    }
    changed_.notify_all();
  }
  void close() {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    // Wait for the thread to be gone, unless it is the one that drops the queue.
    if (started_ && thread_ != std::this_thread::get_id()) {
      changed_.wait(lock, [this] { return finished_; });
    }
  }

 private:
  void run() {
    Engine engine;
    std::unique_lock<std::mutex> lock(mutex_);
    thread_ = std::this_thread::get_id();
    for (;;) {
      changed_.wait(lock, [this] { return closed_ || !pending_.empty(); });
      if (pending_.empty()) break;
      CommandBuffer* buffer = pending_.front();
      pending_.pop_front();
      lock.unlock();
      std::shared_ptr<Completion> completion = buffer->completion();
      buffer->execute(engine);
      buffer->release();
      {
        std::lock_guard<std::mutex> announcing(completion->mutex);
        completion->done = true;
      }
      completion->changed.notify_all();
      completion.reset();
      lock.lock();
    }
    finished_ = true;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<CommandBuffer*> pending_;
  std::thread::id thread_;
  bool started_ = false;
  bool closed_ = false;
  bool finished_ = false;
};

CommandQueue::CommandQueue(Device* device)
    : Object(class_of()), device_(device), worker_(std::make_shared<QueueWorker>()) {}
CommandQueue::~CommandQueue() { worker_->close(); }

ClassObject& CommandQueue::class_of() {
  static ClassObject& of = (new ClassObject("MTLCommandQueue"))
                               ->method<&CommandQueue::command_buffer>("commandBuffer")
                               .method<&CommandQueue::device>("device")
                               .method<&CommandQueue::set_label>("setLabel:");
  return of;
}

CommandBuffer* CommandQueue::command_buffer() {
  if (fault_strikes(Setting::kNilCommandBuffer)) return nullptr;
  return autoreleased(new CommandBuffer(this));
}
void CommandQueue::submit(CommandBuffer* buffer) {
  buffer->retain();
  worker_->submit(buffer);
}

CommandBuffer::CommandBuffer(CommandQueue* queue) : Object(class_of()), queue_(queue) {}
CommandBuffer::~CommandBuffer() {
  for (void* handler : handlers_) _Block_release(handler);
}

ClassObject& CommandBuffer::class_of() {
  static ClassObject& of =
      (new ClassObject("MTLCommandBuffer"))
          ->method<&CommandBuffer::compute_encoder>("computeCommandEncoder")
          .method<&CommandBuffer::compute_encoder_of>("computeCommandEncoderWithDispatchType:")
          .method<&CommandBuffer::enqueue>("enqueue")
          .method<&CommandBuffer::commit>("commit")
          .method<&CommandBuffer::wait_scheduled>("waitUntilScheduled")
          .method<&CommandBuffer::wait_completed>("waitUntilCompleted")
          .method<&CommandBuffer::status>("status")
          .method<&CommandBuffer::error>("error")
          .method<&CommandBuffer::add_completed_handler>("addCompletedHandler:")
          .method<&CommandBuffer::gpu_start>("GPUStartTime")
          .method<&CommandBuffer::gpu_end>("GPUEndTime")
          .method<&CommandBuffer::gpu_start>("kernelStartTime")
          .method<&CommandBuffer::gpu_end>("kernelEndTime")
          .method<&CommandBuffer::device>("device")
          .method<&CommandBuffer::queue>("commandQueue")
          .method<&CommandBuffer::set_label>("setLabel:")
          .method<&CommandBuffer::label>("label");
  return of;
}

Device* CommandBuffer::device() const { return queue_->device(); }

void CommandBuffer::fail(std::int64_t code, const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_code_ != 0) return;
  error_code_ = code;
  error_text_ = text;
}

void CommandBuffer::misused(const std::string& text) {
  count(Event::kMisuses);
  fail(kErrorInternal, text);
}

void CommandBuffer::add(EncodedDispatch dispatch) {
  std::lock_guard<std::mutex> lock(mutex_);
  dispatches_.push_back(std::move(dispatch));
}

void CommandBuffer::encoder_ended() {
  std::lock_guard<std::mutex> lock(mutex_);
  encoding_ = false;
}

ComputeEncoder* CommandBuffer::compute_encoder() {
  if (fault_strikes(Setting::kNilEncoder)) return nullptr;
  bool encoding, committed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    encoding = std::exchange(encoding_, true);
    committed = status_ != Status::kNotEnqueued;
  }
  if (encoding) misused("A command encoder is already encoding to this command buffer");
  if (committed) misused("a command encoder was asked for after commit");
  return autoreleased(new ComputeEncoder(this));
}
ComputeEncoder* CommandBuffer::compute_encoder_of(std::uint64_t) { return compute_encoder(); }

void CommandBuffer::commit() {
  bool encoding, again;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    encoding = encoding_;
    again = status_ != Status::kNotEnqueued;
    if (!again) status_ = Status::kCommitted;
  }
  if (again) {
    misused("commit of a command buffer that was committed");
    return;
  }
  if (encoding) misused("commit of a command buffer with an encoder that was not ended");
  count(Event::kCommandBuffers);
  queue_->submit(this);
}

bool CommandBuffer::failed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_code_ != 0;
}

// On the queue's thread.
void CommandBuffer::execute(Engine& engine) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    status_ = Status::kScheduled;
    gpu_start_ = now();
  }
  changed_.notify_all();
  if (fault_strikes(Setting::kDeviceLost)) device()->lose();
  std::int64_t injected = setting(Setting::kCommandBufferError);
  if (device()->lost()) {
    fail(kErrorAccessRevoked, kLostText);
  } else if (fault_strikes(Setting::kCommandBufferError)) {
    fail(injected, injected_text(injected));
  }
  if (!failed()) run_dispatches(engine);
  finish();
}

void CommandBuffer::run_dispatches(Engine& engine) {
  std::uint64_t fmas = 0, threadgroups = 0;
  for (const EncodedDispatch& encoded : dispatches_) {
    encoded.pipeline->install_constants();
    Counters counted;
    Failure failure = engine.run(encoded.dispatch, &counted);
    fmas += counted.fmas;
    const Position groups = encoded.dispatch.launch.threadgroups_per_grid;
    threadgroups += std::uint64_t(groups.x) * groups.y * groups.z;
    record_dispatch(counted);
    if (failure) {
      fail(failure.access ? kErrorPageFault : kErrorInternal, failure.text);
      break;
    }
  }
  record_command_buffer(fmas, threadgroups);
}

void CommandBuffer::finish() {
  dispatches_.clear();  // drops what they kept alive, before the host hears of it
  std::vector<void*> handlers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    gpu_end_ = now();
    status_ = error_code_ != 0 ? Status::kError : Status::kCompleted;
    if (error_code_ != 0) {
      error_ = adopted(new Error(command_buffer_error_domain(), error_code_, error_text_));
    }
    handlers.swap(handlers_);
  }
  for (void* handler : handlers) {
    call_block<CommandBuffer*>(handler, this);
    _Block_release(handler);
  }
}

void CommandBuffer::wait_scheduled() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (status_ == Status::kNotEnqueued) {
    lock.unlock();
    misused("waitUntilScheduled before commit");
    return;
  }
  changed_.wait(lock, [this] { return status_ >= Status::kScheduled; });
}

// Returns after the completed handlers have.
void CommandBuffer::wait_completed() {
  if (status() == std::uint64_t(Status::kNotEnqueued)) {
    misused("waitUntilCompleted before commit");
    return;
  }
  std::unique_lock<std::mutex> lock(completion_->mutex);
  completion_->changed.wait(lock, [this] { return completion_->done; });
}

std::uint64_t CommandBuffer::status() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::uint64_t(status_);
}
Error* CommandBuffer::error() {
  std::lock_guard<std::mutex> lock(mutex_);
  return status_ == Status::kError ? error_.get() : nullptr;
}

void CommandBuffer::add_completed_handler(void* block) {
  bool late;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    late = status_ != Status::kNotEnqueued;
    if (!late) handlers_.push_back(_Block_copy(block));
  }
  if (late) misused("addCompletedHandler after commit");
}

std::vector<ClassObject*> command_classes() {
  return {&CommandQueue::class_of(), &CommandBuffer::class_of(), &ComputeEncoder::class_of()};
}

}  // namespace softmetal
