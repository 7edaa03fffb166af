// What kernels compute on the software Metal device, and what it finds wrong with them.
#include <cmath>
#include <random>

#include "gpu.h"

namespace {

struct Sizes {
  std::uint32_t count;
  std::int32_t offset;
};

std::vector<float> counted(int count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) values[std::size_t(i)] = float(i);
  return values;
}

std::vector<float> random_values(int count, unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> distribution(-1, 1);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = distribution(generator);
  return values;
}

// Runs a kernel of one output, out[threads], and returns the error.
std::string run_one_output(Gpu& gpu, const char* kernel, int threads, std::vector<float>* out) {
  auto buffer = gpu.buffer(std::vector<float>(1024));
  std::string error = Run(gpu).kernel(kernel).bind(buffer, 0).go(threads, threads);
  out->assign(contents<float>(buffer), contents<float>(buffer) + threads);
  return error;
}

void test_counters() {
  PoolScope pool;
  Gpu gpu;
  auto in = gpu.buffer(counted(100)), out = gpu.buffer(std::vector<float>(100));
  softmetal_reset();
  std::string error =
      Run(gpu).kernel("scale").bind(in, 0).bind(out, 1).value(Sizes{100, 0}, 2).go(100, 32);
  CHECK(error.empty());
  for (int i = 0; i < 100; ++i) CHECK(contents<float>(out)[i] == 3.0f * float(i) + 1.0f);
  CHECK(softmetal_get("last.device_bytes_loaded") == 400);
  CHECK(softmetal_get("last.device_bytes_stored") == 400);
  CHECK(softmetal_get("last.fmas") == 100);
  CHECK(softmetal_get("most_fmas") == 100);
  CHECK(softmetal_get("threads") == 100);
  CHECK(softmetal_get("threadgroups") == 4);
  CHECK(softmetal_get("dispatches") == 1);
  CHECK(softmetal_get("command_buffers") == 1);
  CHECK(softmetal_get("nonsense") == -1);
  auto tile_out = gpu.buffer(std::vector<float>(64));
  Run(gpu).kernel("reverse").bind(in, 0).bind(tile_out, 1).go(64, 64);
  CHECK(softmetal_get("last.threadgroup_bytes_loaded") == 256);
  CHECK(softmetal_get("last.threadgroup_bytes_stored") == 256);
  CHECK(softmetal_get("last.threadgroup_barriers") == 1);
  CHECK(softmetal_get("device_bytes_loaded") == 400 + 256);
}

void test_constants_and_templates() {
  PoolScope pool;
  Gpu gpu;
  auto out = gpu.buffer(std::vector<std::int32_t>(8)),
       extra = gpu.buffer(std::vector<int>{1, 2, 3});
  for (bool doubled : {false, true}) {
    auto values = owned(MTL::FunctionConstantValues::alloc()->init());
    std::int32_t addend = 7;
    values->setConstantValue(&doubled, MTL::DataTypeBool, NS::UInteger(0));
    values->setConstantValue(&addend, MTL::DataTypeInt, NS::UInteger(3));
    auto pipeline = gpu.pipeline("specialized", values.get());
    Run run(gpu);
    run.encoder->setComputePipelineState(pipeline.get());
    run.bind(out, 0);
    if (doubled) run.bind(extra, 1);  // not needed where its constant turns it off
    CHECK(run.go(3, 3).empty());
    CHECK(contents<int>(out)[2] == (doubled ? 13 : 7));
    auto reading = gpu.pipeline("reads_disabled", values.get());
    Run disabled(gpu);
    disabled.encoder->setComputePipelineState(reading.get());
    std::string error = disabled.bind(out, 0).bind(extra, 1).go(3, 3);
    CHECK(error.empty() == doubled);
    if (!doubled) CHECK(has(error, {"extra", "turns off"}));
  }
  CHECK(Run(gpu).kernel("repeat_3_int").bind(out, 0).go(2, 2).empty());
  CHECK(contents<int>(out)[5] == 2 && contents<int>(out)[3] == 0);
  auto floats = gpu.buffer(std::vector<float>(4));
  CHECK(Run(gpu).kernel("repeat_2_float").bind(floats, 0).go(2, 2).empty());
  CHECK(contents<float>(floats)[3] == 1.0f);
}

void test_positions() {
  PoolScope pool;
  Gpu gpu;
  auto out = gpu.buffer(std::vector<std::uint32_t>(10 * 5 * 7 * 2));
  // 5 x 7 x 2 threads in groups of 4 x 3: those at the edge are smaller.
  std::string error =
      Run(gpu).kernel("positions").bind(out, 0).go(MTL::Size(5, 7, 2), MTL::Size(4, 3, 1));
  CHECK(error.empty());
  const std::uint32_t* last = contents<std::uint32_t>(out) + 10 * (5 * 7 * 2 - 1);
  const std::uint32_t expected[] = {10604, 0, 201, 101, 0, 0, 0, 4, 0x3f800000, 2};
  for (int i = 0; i < 10; ++i) CHECK_MSG(last[i] == expected[i], "%d: %u", i, last[i]);
  const std::uint32_t* inner = contents<std::uint32_t>(out) + 10 * (2 * 5 + 3);
  CHECK(inner[1] == 203 && inner[3] == 304 && inner[4] == 11 && inner[5] == 11);
}

void test_memory() {
  PoolScope pool;
  Gpu gpu;
  auto in = gpu.buffer(counted(12)), out = gpu.buffer(std::vector<float>(4));
  CHECK(Run(gpu).kernel("vectors").bind(in, 0).bind(out, 1).go(2, 2).empty());
  // in[0] * 2 + in[1]: (0 1 2 3) * 2 + (4 5 6 7), summed; then 0 + 1 + 2 + 3
  CHECK(contents<float>(out)[0] == 12.0f + 22.0f + 1.0f);
  CHECK(contents<float>(out)[1] == 6.0f + 2.0f);
  auto numbers = gpu.buffer(std::vector<int>{1, 10});
  CHECK(Run(gpu).kernel("increments").bind(numbers, 0).go(2, 2).empty());
  CHECK(contents<int>(numbers)[0] == 7 && contents<int>(numbers)[1] == 25);
  auto exponentials = gpu.buffer(std::vector<float>(40));
  softmetal_reset();
  CHECK(Run(gpu).kernel("exponentials").bind(exponentials, 0).go(10, 10).empty());
  CHECK(softmetal_get("exps") == 20);
  for (int i = 0; i < 10; ++i) {
    float x = float(i) * 0.25f, *found = contents<float>(exponentials) + 4 * i;
    CHECK(std::abs(found[0] - std::exp(-x)) < 1e-6f && std::abs(found[1] - std::exp2(x)) < 1e-5f);
    CHECK(found[2] == std::max(x, 1.5f) && found[3] == (x > 1.0f ? 3.0f : 2.0f));
  }
}

// An access outside the bytes that the binding marks names kernel, argument, thread and index.
void test_ranges() {
  PoolScope pool;
  Gpu gpu;
  auto in = gpu.buffer(counted(64)), out = gpu.buffer(std::vector<float>(64));
  auto run = [&](Sizes sizes, NS::UInteger threads, NS::UInteger offset = 0) {
    Run each(gpu);
    each.kernel("scale").bind(in, 0).bind(out, 1, offset).value(sizes, 2);
    return each.go(threads, 32);
  };
  CHECK(run({64, 0}, 64).empty());
  CHECK(has(run({64, 1}, 64), {"kernel scale", "store", "'out'", "index 64", "(63, 0, 0)"}));
  CHECK(has(run({64, -1}, 64), {"store", "'out'", "index -1", "(0, 0, 0)"}));
  CHECK(has(run({65, -1}, 65, 4), {"load", "'in'", "index 64", "(64, 0, 0)"}));
  // Marks narrow the range. The one that starts at the offset counts, others around it do not.
  out->addDebugMarker(text_of("dq"), NS::Range(64, 64));
  out->addDebugMarker(text_of("wide"), NS::Range(0, 256));
  CHECK(run({16, 0}, 16, 64).empty());
  CHECK(has(run({17, 0}, 17, 64), {"index 16", "[0, 64)", "'dq'"}));
  CHECK(has(run({16, -1}, 16, 64), {"index -1", "'dq'"}));
  CHECK(run({17, 0}, 17, 0).empty());
  // Of two arrays that start at one place the longer one.
  out->addDebugMarker(text_of("long"), NS::Range(64, 68));
  out->addDebugMarker(text_of("short"), NS::Range(64, 32));
  CHECK(run({17, 0}, 17, 64).empty());
  CHECK(has(run({18, 0}, 18, 64), {"index 17", "[0, 68)", "'long'"}));
  out->removeAllDebugMarkers();
  CHECK(run({18, 0}, 18, 64).empty());
  std::vector<float> found;
  CHECK(
      has(run_one_output(gpu, "outside_tile", 32, &found), {"'tile'", "index 32", "threadgroup"}));
  // The device is still good.
  CHECK(run({64, 0}, 64).empty());
}

void test_threadgroup_memory() {
  PoolScope pool;
  Gpu gpu;
  auto in = gpu.buffer(counted(200)), out = gpu.buffer(std::vector<float>(200));
  CHECK(Run(gpu).kernel("reverse").bind(in, 0).bind(out, 1).go(200, 128).empty());
  CHECK(contents<float>(out)[0] == 127 && contents<float>(out)[128] == 199);
  Run dynamic(gpu);
  dynamic.encoder->setThreadgroupMemoryLength(512, 0);
  CHECK(dynamic.kernel("reverse_argument").bind(in, 0).bind(out, 1).go(128, 128).empty());
  CHECK(contents<float>(out)[127] == 0 && contents<float>(out)[1] == 126);
  Run small(gpu);
  small.encoder->setThreadgroupMemoryLength(256, 0);
  CHECK(has(small.kernel("reverse_argument").bind(in, 0).bind(out, 1).go(128, 128),
            {"'tile'", "index 64"}));
  std::vector<float> found;
  CHECK(run_one_output(gpu, "two_dimensions", 4, &found).empty());
  CHECK(found[2] == (8 + 9 + 10 + 11 + 12 + 13 + 14 + 15) + (16 * 8 + 28));
  CHECK(run_one_output(gpu, "reads_nothing_written", 64, &found).empty());
  CHECK(std::isnan(found[5]));
  CHECK(has(run_one_output(gpu, "too_much_memory", 32, &found), {"32768", "'second'"}));
}

void test_races() {
  PoolScope pool;
  Gpu gpu;
  std::vector<float> found;
  CHECK(has(run_one_output(gpu, "race_write_read", 64, &found), {"data race", "'tile'"}));
  CHECK(has(run_one_output(gpu, "race_read_write", 64, &found), {"data race"}));
  CHECK(has(run_one_output(gpu, "race_write_write", 64, &found), {"data race", "stored"}));
  CHECK(has(run_one_output(gpu, "race_wrong_flags", 64, &found), {"data race"}));
  CHECK(has(run_one_output(gpu, "matrix_race", 32, &found), {"data race", "'tile'"}));
  CHECK(run_one_output(gpu, "broadcast_rounds", 64, &found).empty());
  CHECK(found[63] == 28);
  auto out = gpu.buffer(std::vector<float>(64));
  std::uint32_t near = 9, far = 32;
  CHECK(Run(gpu).kernel("simdgroup_exchange").bind(out, 0).value(near, 1).go(64, 64).empty());
  CHECK(contents<float>(out)[40] == 33 + 2);
  CHECK(has(Run(gpu).kernel("simdgroup_exchange").bind(out, 0).value(far, 1).go(64, 64),
            {"data race"}));
}

// Threads that do not come together are an error, never a hang.
void test_convergence() {
  PoolScope pool;
  Gpu gpu;
  std::vector<float> found;
  CHECK(has(run_one_output(gpu, "divergent_barrier", 64, &found),
            {"kernel divergent_barrier", "line", "40 of 64 threads", "24 had returned"}));
  CHECK(has(run_one_output(gpu, "different_barriers", 64, &found), {"different barriers"}));
  CHECK(has(run_one_output(gpu, "divergent_shuffle", 32, &found), {"different simdgroup"}));
  CHECK(has(run_one_output(gpu, "reads_inactive", 32, &found), {"not active"}));
  CHECK(has(run_one_output(gpu, "partial_product", 20, &found), {"simdgroup"}));
  auto out = gpu.buffer(std::vector<float>(64));
  std::uint32_t count = 20;
  CHECK(Run(gpu).kernel("early_return").bind(out, 0).value(count, 1).go(32, 32).empty());
  CHECK(contents<float>(out)[3] == 190);
}

void test_shuffles() {
  PoolScope pool;
  Gpu gpu;
  auto out = gpu.buffer(std::vector<float>(12 * 64));
  CHECK(Run(gpu).kernel("shuffles").bind(out, 0).go(64, 64).empty());
  for (int t = 0; t < 64; ++t) {
    int lane = t % 32, first = t - lane;
    const float expected[] = {
        float(first + lane * 5 % 32),
        float(first + (lane ^ 8)),
        float(lane + 3 < 32 ? t + 3 : t),
        float(lane >= 4 ? t - 4 : t),
        float(first + 7),
        float(32 * first + 496),
        float(first + 31),
        float(first),
        1.0f,
        0.0f,
        float(first),
        float(2 * (t ^ 1)),
    };
    for (int i = 0; i < 12; ++i) {
      float value = contents<float>(out)[12 * t + i];
      CHECK_MSG(value == expected[i], "thread %d, value %d: %g, not %g", t, i, double(value),
                double(expected[i]));
    }
  }
}

void test_lane_layout() {
  PoolScope pool;
  Gpu gpu;
  auto in = gpu.buffer(counted(64)), out = gpu.buffer(std::vector<float>(64));
  CHECK(Run(gpu).kernel("lane_layout").bind(in, 0).bind(out, 1).go(32, 32).empty());
  // Lane 0 to 31: the row, and the first of two columns, as Apple's GPUs spread a matrix.
  const int rows[] = {0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3,
                      4, 4, 5, 5, 6, 6, 7, 7, 4, 4, 5, 5, 6, 6, 7, 7};
  const int columns[] = {0, 2, 0, 2, 0, 2, 0, 2, 4, 6, 4, 6, 4, 6, 4, 6,
                         0, 2, 0, 2, 0, 2, 0, 2, 4, 6, 4, 6, 4, 6, 4, 6};
  for (int lane = 0; lane < 32; ++lane) {
    CHECK(contents<float>(out)[2 * lane] == float(8 * rows[lane] + columns[lane]));
    CHECK(contents<float>(out)[2 * lane + 1] == float(8 * rows[lane] + columns[lane] + 1));
  }
  CHECK(Run(gpu).kernel("matrix_from_lanes").bind(out, 0).go(32, 32).empty());
  for (int lane = 0; lane < 32; ++lane) {
    CHECK(contents<float>(out)[8 * rows[lane] + columns[lane]] == float(2 * lane));
  }
}

void test_products() {
  PoolScope pool;
  Gpu gpu;
  const int stride = 11, tiles = 4;
  std::vector<float> a = random_values(tiles * 8 * stride, 1), b = random_values(int(a.size()), 2);
  std::vector<float> c = random_values(int(a.size()), 3);
  auto out = gpu.buffer(c);
  softmetal_reset();
  Run run(gpu);
  run.kernel("product").bind(gpu.buffer(a), 0).bind(gpu.buffer(b), 1).bind(out, 2);
  CHECK(run.value(std::uint32_t(stride), 3).go(128, 64).empty());
  CHECK(softmetal_get("matrix_products") == tiles);
  CHECK(softmetal_get("fmas") == tiles * 512);
  for (int tile = 0; tile < tiles; ++tile) {
    for (int i = 0; i < 8; ++i) {
      for (int j = 0; j < stride; ++j) {
        std::size_t start = std::size_t(tile * 8 * stride),
                    at = start + std::size_t(i * stride + j);
        float sum = c[at];
        for (std::size_t k = 0; k < 8 && j < 8; ++k) {
          sum = std::fma(a[start + std::size_t(i * stride) + k],
                         b[start + k * stride + std::size_t(j)], sum);
        }
        CHECK(contents<float>(out)[at] == sum);
      }
    }
  }
}

void test_transposed() {
  PoolScope pool;
  Gpu gpu;
  std::vector<float> a = random_values(64, 4), b = random_values(64, 5);
  auto out = gpu.buffer(std::vector<float>(64));
  Run run(gpu);
  run.kernel("transposed_product").bind(gpu.buffer(a), 0).bind(gpu.buffer(b), 1).bind(out, 2);
  CHECK(run.go(32, 32).empty());
  for (std::size_t i = 0; i < 8; ++i) {
    for (std::size_t j = 0; j < 8; ++j) {
      float sum = 0;
      for (std::size_t k = 0; k < 8; ++k) sum = std::fma(a[k * 8 + i], b[k * 8 + j], sum);
      // It is stored transposed.
      CHECK(contents<float>(out)[j * 8 + i] == sum + 2);
    }
  }
  auto in = gpu.buffer(counted(220));
  CHECK(Run(gpu).kernel("origins").bind(in, 0).bind(out, 1).go(32, 32).empty());
  for (int i = 0; i < 64; ++i) {
    CHECK(contents<float>(out)[i] == float((2 + i / 8) * 20 + 3 + i % 8));
  }
  CHECK(has(Run(gpu).kernel("transposed_origin").bind(in, 0).bind(out, 1).go(32, 32), {"origin"}));
}

// Every half is a float of its own, subnormal or not, flushed or not; floats are rounded to the
// nearest half, ties to even.
void test_halves() {
  PoolScope pool;
  Gpu gpu;
  std::vector<std::uint16_t> bits(1 << 16);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = std::uint16_t(i);
  auto in = gpu.buffer(bits), out = gpu.buffer(std::vector<std::uint16_t>(bits.size()));
  auto wide = gpu.buffer(std::vector<float>(bits.size()));
  for (int flush : {0, 1}) {
    softmetal_set("flush_subnormals", flush);
    Run run(gpu);
    CHECK(run.kernel("widen_and_round")
              .bind(in, 0)
              .bind(wide, 1)
              .bind(out, 2)
              .go(1 << 16, 64)
              .empty());
    for (std::size_t i = 0; i < bits.size(); ++i) {
      const int exponent = int(i >> 10 & 31), digits = int(i & 1023);
      float value =
          std::ldexp(float(exponent ? digits + 1024 : digits), std::max(exponent, 1) - 25);
      if (exponent == 31) value = digits ? NAN : INFINITY;
      const float found = std::fabs(contents<float>(wide)[i]);
      CHECK(std::isnan(value) ? std::isnan(found) : found == value);
      CHECK(std::isnan(value) || contents<std::uint16_t>(out)[i] == i);
    }
  }
  softmetal_reset();
  auto floats =
      gpu.buffer(std::vector<float>{2049, 2051, 65519, 65520, 0x1.8p-24f, 0x1p-25f, -1, 3});
  auto rounded = gpu.buffer(std::vector<std::uint16_t>(8));
  CHECK(Run(gpu).kernel("round_to_half").bind(floats, 0).bind(rounded, 1).go(2, 2).empty());
  const std::uint16_t expected[] = {0x6800, 0x6802, 0x7bff, 0x7c00, 2, 0, 0xbc00, 0x4200};
  for (int i = 0; i < 8; ++i) CHECK(contents<std::uint16_t>(rounded)[i] == expected[i]);
  CHECK(has(Run(gpu).kernel("four_bytes_on").bind(in, 0).bind(wide, 1).go(1, 1),
            {"load", "not aligned", "'in'", "8 bytes"}));
}

}  // namespace

int main() {
  test_counters();
  test_constants_and_templates();
  test_positions();
  test_memory();
  test_ranges();
  test_threadgroup_memory();
  test_races();
  test_convergence();
  test_shuffles();
  test_lane_layout();
  test_products();
  test_transposed();
  test_halves();
  CHECK(softmetal_get("live") == 0);
  CHECK(softmetal_get("autoreleases_without_pool") == 0);
  return test_result();
}
