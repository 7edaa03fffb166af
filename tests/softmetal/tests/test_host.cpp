// The host's side of the software Metal device: ownership, what it refuses, faults, threads.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include "gpu.h"

namespace {

struct Sizes {
  std::uint32_t count;
  std::int32_t offset;
};

std::int64_t live(const char* name) { return softmetal_get((std::string("live.") + name).c_str()); }

// Whole pages of memory of our own.
struct Pages {
  explicit Pages(std::size_t count)
      : length(count * std::size_t(sysconf(_SC_PAGESIZE))),
        at(static_cast<char*>(
            mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { munmap(at, length); }
  std::size_t length;
  char* at;
};

std::string scale(Gpu& gpu, const NS::SharedPtr<MTL::Buffer>& in,
                  const NS::SharedPtr<MTL::Buffer>& out) {
  return Run(gpu).kernel("scale").bind(in, 0).bind(out, 1).value(Sizes{4, 0}, 2).go(4, 4);
}

std::string works(Gpu& gpu) {
  return scale(gpu, gpu.buffer(std::vector<float>(4)), gpu.buffer(std::vector<float>(4)));
}

// new, alloc and copy give what the caller owns; the rest goes with the pool.
void test_ownership() {
  CHECK(softmetal_get("live") == 0);
  auto* pool = NS::AutoreleasePool::alloc()->init();
  {
    Gpu gpu;
    CHECK(gpu.error.empty());
    MTL::Buffer* buffer = gpu.device->newBuffer(64, MTL::ResourceStorageModeShared);
    CHECK(buffer->retainCount() == 1 && buffer->length() == 64);
    buffer->retain();
    buffer->release();
    CHECK(live("MTLBuffer") == 1);
    MTL::CommandBuffer* commands = gpu.queue->commandBuffer();
    CHECK(live("MTLCommandBuffer") == 1);
    MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
    auto pipeline = gpu.pipeline("small_groups");
    encoder->setComputePipelineState(pipeline.get());
    encoder->setBuffer(buffer, 0, 0);
    encoder->dispatchThreads(MTL::Size(16, 1, 1), MTL::Size(16, 1, 1));
    encoder->endEncoding();
    buffer->release();  // the command buffer keeps it until it is done
    CHECK(live("MTLBuffer") == 1);
    commands->commit();
    commands->waitUntilCompleted();
    CHECK(live("MTLBuffer") == 0);
  }
  CHECK(live("MTLCommandBuffer") == 1 && live("NSString") > 0);
  pool->release();
  CHECK(softmetal_get("live") == 0);
}

void test_pools() {
  softmetal_reset();
  auto* pool = NS::AutoreleasePool::alloc()->init();
  NS::String* inner_text;
  {
    auto* inner = NS::AutoreleasePool::alloc()->init();
    inner_text = text_of("kept")->retain();
    inner->release();
  }
  CHECK(inner_text->retainCount() == 1 && std::string(inner_text->utf8String()) == "kept");
  inner_text->release();
  auto* outer = NS::AutoreleasePool::alloc()->init();
  NS::AutoreleasePool::alloc()->init();  // goes with the one around it
  text_of("a");
  outer->release();
  CHECK(live("NSAutoreleasePool") == 1 && live("NSString") == 0);
  pool->release();
  CHECK(softmetal_get("autoreleases_without_pool") == 0);
  NS::String* leaked = nullptr;
  std::thread([&] { leaked = text_of("no pool on this thread"); }).join();
  CHECK(softmetal_get("autoreleases_without_pool") == 1);
  leaked->release();
  CHECK(softmetal_get("live") == 0);
}

void test_device() {
  PoolScope pool;
  Gpu gpu;
  CHECK(std::string(gpu.device->name()->utf8String()) == "Software Metal device");
  CHECK(gpu.device->hasUnifiedMemory() && gpu.device->maxThreadgroupMemoryLength() == 32768);
  CHECK(gpu.device->supportsFamily(MTL::GPUFamilyApple7));
  CHECK(!gpu.device->supportsFamily(MTL::GPUFamilyMac1));
  CHECK(gpu.device->maxThreadsPerThreadgroup().width == 1024);  // a struct on the stack
  auto* all = MTL::CopyAllDevices();
  CHECK(all->count() == 1 && all->object<MTL::Device>(0)->maxBufferLength() > 0);
  all->release();
  NS::OperatingSystemVersion version = NS::ProcessInfo::processInfo()->operatingSystemVersion();
  CHECK(version.majorVersion == 15);
  version.majorVersion = 26;
  CHECK(!NS::ProcessInfo::processInfo()->isOperatingSystemAtLeastVersion(version));
  auto pipeline = gpu.pipeline("small_groups");
  CHECK(pipeline->maxTotalThreadsPerThreadgroup() == 64 && pipeline->threadExecutionWidth() == 32);
  MTL::Device* nobody = nullptr;
  CHECK(nobody->maxBufferLength() == 0);  // messages to nil answer 0
}

void test_libraries() {
  PoolScope pool;
  Gpu gpu;
  auto options = owned(MTL::CompileOptions::alloc()->init());
  options->setLanguageVersion(MTL::LanguageVersion3_1);
  options->setFastMathEnabled(false);
  NS::Error* error = nullptr;
  auto library = owned(gpu.device->newLibrary(text_of(checks_source()), options.get(), &error));
  CHECK(library.get() != nullptr);
  CHECK(softmetal_get("compile.language_version") == MTL::LanguageVersion3_1);
  CHECK(softmetal_get("compile.fast_math") == 0);
  library = owned(gpu.device->newLibrary(text_of(checks_source() + " "), options.get(), &error));
  CHECK(library.get() == nullptr && error->code() == MTL::LibraryErrorCompileFailure);
  CHECK(error->domain()->isEqualToString(text_of("MTLLibraryErrorDomain")));
  CHECK(has(error->localizedDescription()->utf8String(), {"program_source", "error"}));
  // Lines that make kernels of templates may be missing, not more.
  std::string part = checks_source();
  const std::size_t line = part.find("template [[host_name(\"repeat_2_float");
  part.erase(line, part.find('\n', line) - line);
  library = owned(gpu.device->newLibrary(text_of(part), options.get(), &error));
  CHECK(library.get() != nullptr);
  CHECK(owned(library->newFunction(text_of("repeat_2_float"))).get() == nullptr);
  CHECK(owned(library->newFunction(text_of("repeat_3_int"))).get() != nullptr);
  CHECK(library->functionNames()->count() + 1 == gpu.library->functionNames()->count());
  part.erase(line - 2, 1);
  CHECK(owned(gpu.device->newLibrary(text_of(part), options.get(), &error)).get() == nullptr);
  library =
      owned(gpu.device->newLibrary(NS::URL::fileURLWithPath(text_of(CHECKS_METALLIB)), &error));
  CHECK(library.get() != nullptr);
  for (const char* path : {"/nowhere/checks.metallib", CHECKS_METAL}) {
    auto url = NS::URL::fileURLWithPath(text_of(path));
    CHECK(owned(gpu.device->newLibrary(url, &error)).get() == nullptr);
    CHECK(has(error->localizedDescription()->utf8String(), {path}));
  }
  CHECK(gpu.library->functionNames()->count() > 20);
  CHECK(!gpu.pipeline("no_such_kernel"));
  // Function constants: unset, of another type, none at all.
  auto values = owned(MTL::FunctionConstantValues::alloc()->init());
  CHECK(!gpu.pipeline("specialized", values.get()));
  CHECK(has(gpu.error, {"'doubled'", "not set"}));
  float wrong = 1;
  values->setConstantValue(&wrong, MTL::DataTypeFloat, NS::UInteger(0));
  CHECK(!gpu.pipeline("specialized", values.get()));
  CHECK(has(gpu.error, {"'doubled'", "another type"}));
  CHECK(!gpu.pipeline("specialized"));
  CHECK(has(gpu.error, {"function constants"}));
}

void test_no_copy_buffers() {
  PoolScope pool;
  Gpu gpu;
  Pages pages(3);
  auto wrap = [&](char* at, std::size_t length) {
    return owned(gpu.device->newBuffer(at, length, MTL::ResourceStorageModeShared, nullptr));
  };
  std::size_t page = pages.length / 3;
  CHECK(!wrap(pages.at + 16, page));
  CHECK(!wrap(pages.at, page + 16));
  CHECK(!wrap(pages.at, 0));
  auto buffer = wrap(pages.at, 2 * page);
  CHECK(buffer->contents() == pages.at);
  CHECK(scale(gpu, buffer, buffer).empty());
  CHECK(reinterpret_cast<float*>(pages.at)[3] == 1.0f);
  // Pages that cannot be written: reading is fine, a store is an error and no signal.
  mprotect(pages.at, page, PROT_READ);
  auto read_only = wrap(pages.at, page), output = gpu.buffer(std::vector<float>(4));
  CHECK(scale(gpu, read_only, output).empty());
  CHECK(contents<float>(output)[0] == 4.0f);
  CHECK(has(scale(gpu, output, read_only), {"store", "not writeable", "'out'"}));
  mprotect(pages.at, page, PROT_NONE);
  CHECK(!wrap(pages.at, 2 * page));
  mprotect(pages.at, page, PROT_READ | PROT_WRITE);
  // The deallocator is a block: it runs once, when the buffer goes.
  __block int freed = 0;
  const char* start = pages.at;
  auto freeing = owned(gpu.device->newBuffer(pages.at, page, MTL::ResourceStorageModeShared,
                                             ^(void* at, NS::UInteger length) {
                                               freed += at == start && length == page;
                                             }));
  CHECK(freed == 0);
  freeing.reset();
  CHECK(freed == 1);
}

// Where real Metal says nothing, or ends the process, the command buffer fails with a text.
void test_misuse() {
  PoolScope pool;
  Gpu gpu;
  auto in = gpu.buffer(std::vector<float>(64)), out = gpu.buffer(std::vector<float>(64));
  Sizes sizes{4, 0};
  softmetal_reset();
  CHECK(has(Run(gpu).bind(in, 0).go(4, 4), {"no pipeline"}));
  CHECK(has(Run(gpu).kernel("scale").bind(in, 0).value(sizes, 2).go(4, 4),
            {"kernel scale", "'out'", "index 1"}));
  CHECK(has(Run(gpu).kernel("scale").bind(in, 0).bind(out, 1).value(4, 2).go(4, 4),
            {"'sizes'", "4 bytes", "8"}));
  CHECK(has(Run(gpu).kernel("scale").bind(in, 0).bind(out, 1, 6).value(sizes, 2).go(4, 4),
            {"'out'", "offset 6"}));
  CHECK(has(Run(gpu).kernel("scale").bind(out, 0, 256).go(4, 4), {"offset 256"}));
  CHECK(has(Run(gpu).kernel("small_groups").bind(out, 0).go(64, 65), {"(65, 1, 1)", "64"}));
  CHECK(has(Run(gpu).kernel("small_groups").bind(out, 0).go(MTL::Size(9, 9, 1), MTL::Size(9, 9, 1)),
            {"(9, 9, 1)"}));
  CHECK(has(Run(gpu).kernel("small_groups").bind(out, 0).go(0, 1), {"empty grid"}));
  CHECK(has(Run(gpu).kernel("reverse_argument").bind(in, 0).bind(out, 1).go(4, 4),
            {"'tile'", "threadgroup memory"}));
  {
    Run run(gpu);
    CHECK(has(run.kernel("small_groups").bind(out, 0).finish(), {"not ended"}));
  }
  {
    Run run(gpu);
    run.encoder->endEncoding();
    run.bind(out, 0);
    CHECK(has(run.finish(), {"setBuffer", "after endEncoding"}));
  }
  {
    Run run(gpu);
    run.commands->computeCommandEncoder()->endEncoding();
    run.encoder->endEncoding();
    CHECK(has(run.finish(), {"already encoding"}));
  }
  {
    Run run(gpu);
    std::thread([&] { run.encoder->setBuffer(out.get(), 0, 0); }).join();
    run.encoder->endEncoding();
    CHECK(has(run.finish(), {"second thread"}));
  }
  {
    Gpu other;
    CHECK(has(Run(gpu).kernel("small_groups").bind(other.buffer(std::vector<float>(4)), 0).go(4, 4),
              {"another device"}));
  }
  CHECK(softmetal_get("misuses") == 15);
  CHECK(works(gpu).empty());
}

void test_command_buffers() {
  PoolScope pool;
  Gpu gpu;
  auto out = gpu.buffer(std::vector<float>(64));
  Run run(gpu);
  run.kernel("small_groups").bind(out, 0);
  run.encoder->dispatchThreadgroups(MTL::Size(2, 1, 1), MTL::Size(16, 1, 1));
  run.encoder->memoryBarrier(MTL::BarrierScopeBuffers);
  run.encoder->endEncoding();
  std::atomic<int> handled{0};
  std::string captured = "a captured string that is longer than a small one";
  run.commands->addCompletedHandler([&handled, captured](MTL::CommandBuffer* commands) {
    handled += commands->status() == MTL::CommandBufferStatusCompleted && captured.size() > 40;
  });
  CHECK(run.commands->status() == MTL::CommandBufferStatusNotEnqueued);
  CHECK(run.finish().empty());
  CHECK(handled == 1);
  CHECK(run.commands->GPUEndTime() >= run.commands->GPUStartTime());
  CHECK(run.commands->GPUStartTime() > 0);
  CHECK(contents<float>(out)[31] == 1.0f && contents<float>(out)[32] == 0.0f);
}

struct Fault {
  const char* name;
  std::int64_t value;
  std::function<bool(Gpu&)> fails;  // tries what the fault spoils
};

void test_faults() {
  PoolScope pool;
  Gpu gpu;
  NS::Error* error = nullptr;
  Pages pages(1);
  auto fails_with = [](const char* part) {
    return [part](Gpu& on) { return has(works(on), {part}); };
  };
  const Fault faults[] = {
      {"no_device", 1, [](Gpu&) { return MTL::CreateSystemDefaultDevice() == nullptr; }},
      {"nil_queue", 1, [](Gpu& on) { return on.device->newCommandQueue() == nullptr; }},
      {"nil_command_buffer", 1, [](Gpu& on) { return on.queue->commandBuffer() == nullptr; }},
      {"nil_encoder", 1,
       [](Gpu& on) { return on.queue->commandBuffer()->computeCommandEncoder() == nullptr; }},
      {"nil_buffer", 1, [](Gpu& on) { return on.device->newBuffer(16, 0) == nullptr; }},
      {"nil_no_copy_buffer", 1,
       [&](Gpu& on) {
         bool copied = on.buffer(std::vector<float>(4)).get() != nullptr;
         return copied && on.device->newBuffer(pages.at, pages.length, 0, nullptr) == nullptr;
       }},
      {"bad_source", 1,
       [&](Gpu& on) {
         return on.device->newLibrary(text_of(checks_source()), nullptr, &error) == nullptr;
       }},
      {"bad_metallib", 1,
       [&](Gpu& on) {
         auto url = NS::URL::fileURLWithPath(text_of(CHECKS_METALLIB));
         return on.device->newLibrary(url, &error) == nullptr;
       }},
      {"bad_function", 1,
       [](Gpu& on) { return on.library->newFunction(text_of("scale")) == nullptr; }},
      {"bad_pipeline", 1, [](Gpu& on) { return !on.pipeline("scale"); }},
      {"command_buffer_error", 2, fails_with("Caused GPU Timeout Error (00000002:")},
      {"command_buffer_error", 9, fails_with("Invalid Resource (00000009:")},
      {"max_buffer_length", 8, [](Gpu& on) { return on.device->newBuffer(16, 0) == nullptr; }},
      {"max_threads", 96,
       [](Gpu& on) { return on.pipeline("scale")->maxTotalThreadsPerThreadgroup() == 96; }},
  };
  for (const Fault& fault : faults) {
    softmetal_reset();
    std::int64_t before = softmetal_get("live.MTLBuffer");
    CHECK(softmetal_set(fault.name, fault.value) == 0);
    CHECK_MSG(fault.fails(gpu), "%s does not strike", fault.name);
    softmetal_reset();
    CHECK_MSG(works(gpu).empty(), "after %s", fault.name);
    CHECK(softmetal_get("live.MTLBuffer") == before);
  }
  CHECK(softmetal_set("no_such_fault", 1) == -1);
  softmetal_set("nth", 3);
  softmetal_set("command_buffer_error", 1);
  CHECK(works(gpu).empty() && works(gpu).empty());
  CHECK(!works(gpu).empty());
  CHECK(works(gpu).empty());
  softmetal_reset();
  softmetal_set("read_only", 1);
  auto wrapped = owned(gpu.device->newBuffer(pages.at, pages.length, 0, nullptr));
  CHECK(has(scale(gpu, wrapped, wrapped), {"not writeable"}));
  softmetal_reset();
}

// A lost device stays lost; a new one works.
void test_device_loss() {
  PoolScope pool;
  Gpu gpu;
  softmetal_reset();
  softmetal_set("nth", 1);
  softmetal_set("device_lost", 1);
  Run run(gpu);
  run.encoder->endEncoding();
  CHECK(has(run.finish(), {"kIOGPUCommandBufferCallbackErrorSubmissionsIgnored"}));
  CHECK(run.commands->error()->code() == MTL::CommandBufferErrorAccessRevoked);
  CHECK(run.commands->error()->domain()->isEqualToString(text_of("MTLCommandBufferErrorDomain")));
  CHECK(!works(gpu).empty());
  Gpu fresh;
  CHECK(works(fresh).empty());
  softmetal_reset();
}

// One queue, many threads: device, queue and pipeline are shared, encoders are not.
void test_threads() {
  PoolScope pool;
  Gpu gpu;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&gpu, &wrong, t] {
      for (int round = 0; round < 50; ++round) {
        PoolScope inner;
        auto in = gpu.buffer(std::vector<float>(4, float(t)));
        auto out = gpu.buffer(std::vector<float>(4));
        if (!scale(gpu, in, out).empty()) ++wrong;
        if (contents<float>(out)[3] != 3.0f * float(t) + 1.0f) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(live("MTLBuffer") == 0);
}

}  // namespace

int main() {
  test_ownership();
  test_pools();
  test_device();
  test_libraries();
  test_no_copy_buffers();
  test_misuse();
  test_command_buffers();
  test_faults();
  test_device_loss();
  test_threads();
  CHECK(softmetal_get("live") == 0);
  CHECK(softmetal_get("autoreleases_without_pool") == 0);
  return test_result();
}
