#include <cstring>

#include "runtime/command.h"
#include "runtime/control.h"

namespace softmetal {

namespace {

std::string text_of(Size size) {
  return "(" + std::to_string(size.width) + ", " + std::to_string(size.height) + ", " +
         std::to_string(size.depth) + ")";
}
bool has_zero(Size size) { return size.width == 0 || size.height == 0 || size.depth == 0; }
bool above(Size size, std::uint64_t most) {
  return size.width > most || size.height > most || size.depth > most;
}
Position position(Size size) {
  return {std::uint32_t(size.width), std::uint32_t(size.height), std::uint32_t(size.depth)};
}
std::uint64_t divide_up(std::uint64_t a, std::uint64_t b) { return (a + b - 1) / b; }

constexpr std::uint64_t kMostBytes = 4096;  // of setBytes

void choose_freedom(Dispatch* dispatch) {
  dispatch->seed = std::uint32_t(setting(Setting::kSeed));
  dispatch->flushes_subnormals = setting(Setting::kFlushSubnormals) != 0;
  dispatch->launch.freedom = {dispatch->seed * 0x85ebca6bu, dispatch->seed % kProductOrders};
}

}  // namespace

ComputeEncoder::ComputeEncoder(CommandBuffer* buffer)
    : Object(class_of()), buffer_(buffer), owner_(std::this_thread::get_id()) {}

ComputeEncoder::~ComputeEncoder() {
  if (!ended_) buffer_->misused("a command encoder was released without endEncoding");
}

ClassObject& ComputeEncoder::class_of() {
  static ClassObject& of =
      (new ClassObject("MTLComputeCommandEncoder"))
          ->method<&ComputeEncoder::set_pipeline>("setComputePipelineState:")
          .method<&ComputeEncoder::set_buffer>("setBuffer:offset:atIndex:")
          .method<&ComputeEncoder::set_buffer_offset>("setBufferOffset:atIndex:")
          .method<&ComputeEncoder::set_bytes>("setBytes:length:atIndex:")
          .method<&ComputeEncoder::set_threadgroup_memory>("setThreadgroupMemoryLength:atIndex:")
          .method<&ComputeEncoder::dispatch_threads>("dispatchThreads:threadsPerThreadgroup:")
          .method<&ComputeEncoder::dispatch_threadgroups>(
              "dispatchThreadgroups:threadsPerThreadgroup:")
          .method<&ComputeEncoder::memory_barrier>("memoryBarrierWithScope:")
          .method<&ComputeEncoder::memory_barrier_resources>("memoryBarrierWithResources:count:")
          .method<&ComputeEncoder::end>("endEncoding")
          .method<&ComputeEncoder::device>("device")
          .method<&ComputeEncoder::set_label>("setLabel:");
  return of;
}

// Encoders belong to the thread that made them, and to the time before endEncoding.
bool ComputeEncoder::usable(const char* call, std::uint64_t index) {
  std::string wrong;
  if (ended_)
    wrong = " after endEncoding";
  else if (owner_ != std::this_thread::get_id())
    wrong = " from a second thread";
  else if (index >= std::uint64_t(kMaxBuffers))
    wrong = ", index " + std::to_string(index) + " of 31";
  if (wrong.empty()) return true;
  buffer_->misused(std::string(call) + wrong);
  return false;
}

void ComputeEncoder::set_pipeline(Pipeline* pipeline) {
  if (!usable("setComputePipelineState", 0)) return;
  if (pipeline == nullptr) {
    buffer_->misused("setComputePipelineState: the pipeline is nil");
    return;
  }
  pipeline_ = Ref<Pipeline>(pipeline);
}

void ComputeEncoder::set_buffer(Buffer* buffer, std::uint64_t offset, std::uint64_t index) {
  if (!usable("setBuffer", index)) return;
  if (buffer != nullptr && offset >= buffer->length()) {
    buffer_->misused("setBuffer at index " + std::to_string(index) + ": offset " +
                     std::to_string(offset) + " is not inside the buffer of " +
                     std::to_string(buffer->length()) + " bytes");
    return;
  }
  slots_[index] = {Ref<Buffer>(buffer), nullptr, offset};
}

void ComputeEncoder::set_buffer_offset(std::uint64_t offset, std::uint64_t index) {
  if (!usable("setBufferOffset", index)) return;
  Ref<Buffer> buffer = slots_[index].buffer;
  if (!buffer) {
    buffer_->misused("setBufferOffset at index " + std::to_string(index) + ": no buffer is set");
    return;
  }
  set_buffer(buffer.get(), offset, index);
}

void ComputeEncoder::set_bytes(const void* bytes, std::uint64_t length, std::uint64_t index) {
  if (!usable("setBytes", index)) return;
  if (bytes == nullptr || length == 0 || length > kMostBytes) {
    buffer_->misused("setBytes takes 1 to 4096 bytes, got " + std::to_string(length));
    return;
  }
  const char* from = static_cast<const char*>(bytes);
  slots_[index] = {{}, std::make_shared<std::vector<char>>(from, from + length), 0};
}

void ComputeEncoder::set_threadgroup_memory(std::uint64_t length, std::uint64_t index) {
  if (!usable("setThreadgroupMemoryLength", index)) return;
  if (length % 16 != 0) {
    buffer_->misused("setThreadgroupMemoryLength: " + std::to_string(length) +
                     " is no multiple of 16");
    return;
  }
  threadgroup_bytes_[index] = length;
}

// What is wrong with a dispatch, "" if nothing is.
std::string ComputeEncoder::problem(Size threads, Size per_threadgroup) const {
  if (!pipeline_) return "no pipeline is set";
  if (pipeline_->device() != buffer_->device()) return "the pipeline belongs to another device";
  if (has_zero(threads) || has_zero(per_threadgroup)) {
    return "an empty grid " + text_of(threads) + " or threadgroup " + text_of(per_threadgroup);
  }
  std::uint64_t most = pipeline_->max_threads();
  if (above(per_threadgroup, most) ||
      per_threadgroup.width * per_threadgroup.height * per_threadgroup.depth > most) {
    return "a threadgroup of " + text_of(per_threadgroup) + " threads, the pipeline allows " +
           std::to_string(most);
  }
  if (above(threads, 0xffffffffu)) {
    return "a grid of " + text_of(threads) + " threads does not fit 32 bits";
  }
  std::uint64_t memory = 0;
  for (std::uint64_t bytes : threadgroup_bytes_) memory += bytes;
  if (memory > std::uint64_t(kMaxThreadgroupBytes)) {
    return std::to_string(memory) + " bytes of threadgroup memory, the device has 32768";
  }
  return "";
}

// Binds what the argument table holds for one argument of the kernel; says what is wrong.
std::string ComputeEncoder::bind(const Argument& argument, EncodedDispatch* into) const {
  std::string name = std::string("argument '") + argument.name + "'";
  if (argument.kind == ArgumentKind::kBuiltin) return "";
  int index = argument.index;
  Launch& table = into->dispatch.launch;
  if (argument.kind == ArgumentKind::kThreadgroup) {
    if (threadgroup_bytes_[index] == 0) {
      return name + ": no threadgroup memory is set at index " + std::to_string(index);
    }
    into->dispatch.threadgroup_argument_bytes[index] = threadgroup_bytes_[index];
    table.threadgroup_arguments[index].argument = argument.name;
    return "";
  }
  Binding& binding = table.buffers[index];
  if (argument.enabled_by != nullptr && !pipeline_->enabled(argument.enabled_by)) {
    binding = {nullptr,
               nullptr,
               nullptr,
               nullptr,
               nullptr,
               argument.name,
               "an argument that its function constant turns off",
               nullptr};
    return "";
  }
  const Slot& slot = slots_[index];
  if (!slot.buffer && !slot.bytes) {
    return name + ": nothing is bound at index " + std::to_string(index);
  }
  std::uint64_t room;
  if (slot.bytes) {
    const char* begin = slot.bytes->data();
    room = slot.bytes->size();
    binding = {begin, begin + room, begin, begin, begin, argument.name, "bytes", nullptr};
    into->bytes.push_back(slot.bytes);
  } else {
    Buffer* buffer = slot.buffer.get();
    if (buffer->device() != buffer_->device()) return name + ": a buffer of another device";
    Mark mark = buffer->mark_at(slot.offset);
    auto label = std::make_shared<std::string>("'" + mark.name + "'");
    const char* begin = buffer->contents() + mark.range.location;
    const char* end = begin + mark.range.length;
    const char* store_end = buffer->read_only() ? begin : end;
    binding = {
        begin,          end,    begin, store_end, buffer->contents() + slot.offset, argument.name,
        label->c_str(), nullptr};
    room = std::uint64_t(end - binding.base);
    into->buffers.push_back(slot.buffer);
    into->labels.push_back(std::move(label));
  }
  if (room < argument.least_bytes) {
    return name + ": " + std::to_string(room) + " bytes are bound, the shader reads " +
           std::to_string(argument.least_bytes);
  }
  if (slot.buffer && slot.offset % argument.alignment != 0) {
    return name + ": offset " + std::to_string(slot.offset) + " is no multiple of " +
           std::to_string(argument.alignment);
  }
  return "";
}

void ComputeEncoder::encode(Size threads, Size per_threadgroup) {
  std::string wrong = problem(threads, per_threadgroup);
  EncodedDispatch encoded;
  if (wrong.empty()) {
    const Kernel* kernel = pipeline_->kernel();
    encoded.pipeline = pipeline_;
    encoded.dispatch.kernel = kernel;
    choose_freedom(&encoded.dispatch);
    Launch& table = encoded.dispatch.launch;
    table.threads_per_grid = position(threads);
    table.threads_per_threadgroup = position(per_threadgroup);
    table.threadgroups_per_grid = position({divide_up(threads.width, per_threadgroup.width),
                                            divide_up(threads.height, per_threadgroup.height),
                                            divide_up(threads.depth, per_threadgroup.depth)});
    for (int i = 0; i < kernel->argument_count && wrong.empty(); ++i) {
      wrong = bind(kernel->arguments[i], &encoded);
    }
    if (!wrong.empty()) wrong = std::string("kernel ") + kernel->name + ": " + wrong;
  }
  if (!wrong.empty()) {
    buffer_->misused("dispatch: " + wrong);
    return;
  }
  const Position groups = encoded.dispatch.launch.threadgroups_per_grid;
  count(Event::kDispatches);
  count(Event::kThreads, std::int64_t(threads.width * threads.height * threads.depth));
  count(Event::kThreadgroups, std::int64_t(groups.x) * groups.y * groups.z);
  buffer_->add(std::move(encoded));
}

void ComputeEncoder::dispatch_threads(Size threads, Size per_threadgroup) {
  if (usable("dispatchThreads", 0)) encode(threads, per_threadgroup);
}
void ComputeEncoder::dispatch_threadgroups(Size threadgroups, Size per_threadgroup) {
  if (!usable("dispatchThreadgroups", 0)) return;
  encode({threadgroups.width * per_threadgroup.width, threadgroups.height * per_threadgroup.height,
          threadgroups.depth * per_threadgroup.depth},
         per_threadgroup);
}

// Dispatches run one after another here.
void ComputeEncoder::memory_barrier(std::uint64_t) { usable("memoryBarrier", 0); }
void ComputeEncoder::memory_barrier_resources(Object* const*, std::uint64_t) {
  usable("memoryBarrier", 0);
}

void ComputeEncoder::end() {
  if (!usable("endEncoding", 0)) return;
  ended_ = true;
  // The command buffer holds what it needs; the encoder may stay in a pool for long.
  for (Slot& slot : slots_) slot = Slot();
  pipeline_ = Ref<Pipeline>();
  buffer_->encoder_ended();
}

}  // namespace softmetal
