// What Metal leaves open, as settings of the device choose it: each finds a kernel that relies on
// more.
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <set>

#include "gpu.h"

namespace {

constexpr int kSeeds = 12;
constexpr float kLeast = std::numeric_limits<float>::min();  // that is not subnormal

// Runs a kernel with a buffer of `out` and, where it is not 0, a width; returns the error.
std::string run(Gpu& gpu, const char* kernel, NS::UInteger threads, std::vector<float>* out,
                std::uint32_t width = 0) {
  auto buffer = gpu.buffer(*out);
  Run each(gpu);
  each.kernel(kernel).bind(buffer, 0);
  if (width != 0) each.value(width, 1);
  std::string error = each.go(threads, 64);
  std::memcpy(out->data(), contents<float>(buffer), out->size() * sizeof(float));
  return error;
}

void test_order_of_simdgroups() {
  PoolScope pool;
  Gpu gpu;
  const std::vector<float> right(64, 1.0f);
  int found = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    softmetal_set("seed", seed);
    std::vector<float> out(64, -1.0f);
    CHECK(run(gpu, "simdgroups_in_order", 64, &out).empty());
    if (seed == 0) CHECK(out == right);
    found += out != right;
  }
  CHECK_MSG(found >= 2 && found <= kSeeds - 2, "%d of %d", found, kSeeds);
  softmetal_reset();
}

// The group that runs first is the one that is told of.
void test_order_of_threadgroups() {
  PoolScope pool;
  Gpu gpu;
  std::set<std::string> errors;
  for (int seed = 0; seed < kSeeds; ++seed) {
    softmetal_set("seed", seed);
    std::vector<float> out(64);
    std::string error = run(gpu, "every_group_fails", 64 * 50, &out);
    CHECK(has(error, {"outside the range", seed == 0 ? "thread (0, 0, 0)" : "thread"}));
    CHECK(run(gpu, "every_group_fails", 64 * 50, &out) == error);
    errors.insert(error);
  }
  CHECK(errors.size() > kSeeds / 2);
  softmetal_reset();
}

// Every row of a product is summed in the same order, and the order is the seed's.
void test_order_of_sums() {
  PoolScope pool;
  Gpu gpu;
  std::mt19937 generator(7);
  std::uniform_real_distribution<float> distribution(-1, 1);
  std::vector<float> a(64), b(64), c(64);
  for (std::size_t i = 0; i < 64; ++i) {
    a[i] = i < 8 ? distribution(generator) : a[i - 8];  // equal rows
    b[i] = distribution(generator);
    c[i] = i < 8 ? distribution(generator) : c[i - 8];
  }
  std::set<std::vector<float>> results;
  for (int seed = 0; seed < kSeeds; ++seed) {
    softmetal_set("seed", seed);
    auto out = gpu.buffer(c);
    Run each(gpu);
    each.kernel("product").bind(gpu.buffer(a), 0).bind(gpu.buffer(b), 1).bind(out, 2);
    CHECK(each.value(std::uint32_t(8), 3).go(32, 32).empty());
    const float* found = contents<float>(out);
    for (std::size_t j = 0; j < 8; ++j) {
      double sum = double(c[j]);
      for (std::size_t k = 0; k < 8; ++k) sum += double(a[k]) * double(b[8 * k + j]);
      CHECK(std::abs(double(found[j]) - sum) < 1e-6);
      for (std::size_t i = 1; i < 8; ++i) CHECK(found[8 * i + j] == found[j]);
    }
    results.emplace(found, found + 8);
  }
  CHECK_MSG(results.size() == 6, "%d orders", int(results.size()));
  softmetal_reset();
}

double ulps(float found, double exact) {
  int exponent;
  std::frexp(exact, &exponent);
  return std::abs(double(found) - exact) / std::ldexp(1.0, exponent - 24);
}

void test_exponentials() {
  PoolScope pool;
  Gpu gpu;
  const NS::UInteger count = 600;
  for (int seed = 0; seed < 4; ++seed) {
    softmetal_set("seed", seed);
    auto out = gpu.buffer(std::vector<float>(4 * count));
    CHECK(Run(gpu).kernel("exponentials").bind(out, 0).go(count, 64).empty());
    double most = 0;
    for (NS::UInteger i = 0; i < count; ++i) {
      const double x = double(i) * 0.25;
      const float exp = contents<float>(out)[4 * i], exp2 = contents<float>(out)[4 * i + 1];
      if (i == 0) CHECK(exp == 1.0f && exp2 == 1.0f);
      if (x >= 128) CHECK(std::isinf(exp2));
      if (x < 80) most = std::max(most, ulps(exp, std::exp(-x)));
      if (x < 127) most = std::max(most, ulps(exp2, std::exp2(x)));
    }
    CHECK_MSG(seed == 0 ? most < 1 : most > 3 && most <= 4, "seed %d: %g ulp", seed, most);
  }
  softmetal_reset();
}

void test_subnormals() {
  PoolScope pool;
  Gpu gpu;
  const float given[] = {1.0f, kLeast, kLeast / 2, -kLeast};
  for (bool flush : {false, true}) {
    softmetal_set("flush_subnormals", flush);
    for (float factor : {0.5f, 4.0f}) {
      auto in = gpu.buffer(std::vector<float>(given, given + 4));
      auto out = gpu.buffer(std::vector<float>(4));
      Run each(gpu);
      each.kernel("products_with").bind(in, 0).bind(out, 1).value(factor, 2);
      CHECK(each.go(4, 4).empty());
      for (int i = 0; i < 4; ++i) {
        const float value = given[i] * factor;
        const bool lost = flush && (std::abs(given[i]) < kLeast || std::abs(value) < kLeast);
        CHECK(contents<float>(out)[i] == (lost ? 0 : value));
      }
    }
  }
  softmetal_reset();
}

void test_memory_of_other_threadgroups() {
  PoolScope pool;
  Gpu gpu;
  std::vector<float> out(256);
  CHECK(has(run(gpu, "all_store_one", 128, &out),
            {"'out'", "byte offset 20", "threadgroup 1 stores what threadgroup 0 stored"}));
  CHECK(run(gpu, "all_store_one", 64, &out).empty());
  CHECK(has(run(gpu, "stores_then_loads", 256, &out), {"loads what threadgroup 0 stored"}));
  CHECK(run(gpu, "stores_then_loads", 64, &out).empty());
  CHECK(has(run(gpu, "loads_then_stores", 128, &out),
            {"threadgroup 1 stores what threadgroup 0 loaded"}));
  CHECK(run(gpu, "loads_then_stores", 64, &out).empty());
  auto shorts = gpu.buffer(std::vector<std::int16_t>(99));
  CHECK(Run(gpu).kernel("halves_in_one_word").bind(shorts, 0).go(99, 33).empty());
  // Two arguments on the same memory: an element of its own is a thread's to overwrite.
  struct {
    std::uint32_t count;
    std::int32_t offset;
  } sizes = {127, 0};
  auto both = gpu.buffer(std::vector<float>(128));
  auto in_place = [&] {
    return Run(gpu).kernel("scale").bind(both, 0).bind(both, 1).value(sizes, 2).go(127, 32);
  };
  CHECK(in_place().empty());
  sizes.offset = 1;
  CHECK(has(in_place(), {"threadgroup 1", "what threadgroup 0 stored"}));
}

void test_new_buffers_hold_nothing() {
  PoolScope pool;
  Gpu gpu;
  auto buffer = owned(gpu.device->newBuffer(400, MTL::ResourceStorageModeShared));
  for (int i = 0; i < 100; ++i) CHECK(std::isnan(contents<float>(buffer)[i]));
}

// Threads that are at one line by different ways are not together. Ways of whole simdgroups may
// differ, those to a barrier not.
void test_ways() {
  PoolScope pool;
  Gpu gpu;
  std::vector<float> out(64);
  for (const char* kernel : {"by_two_branches", "in_a_later_round", "after_the_loop"}) {
    CHECK_MSG(has(run(gpu, kernel, 64, &out, 2), {"different ways", "line"}), "%s", kernel);
    CHECK_MSG(run(gpu, kernel, 64, &out, 32).empty(), "%s", kernel);
  }
  CHECK(has(run(gpu, "barriers_by_two_branches", 64, &out), {"different ways", "barrier"}));
  CHECK(run(gpu, "barriers_by_two_branches", 32, &out).empty());
}

void test_pages() {
  PoolScope pool;
  Gpu gpu;
  const NS::UInteger page = 16384;
  char* memory = static_cast<char*>(std::aligned_alloc(page, 2 * page));
  auto wraps = [&](char* at, NS::UInteger bytes) {
    return bool(owned(gpu.device->newBuffer(at, bytes, MTL::ResourceStorageModeShared, nullptr)));
  };
  const long before = sysconf(_SC_PAGESIZE);
  CHECK(before < long(page) && wraps(memory + before, NS::UInteger(before)));
  softmetal_set("page_bytes", page);
  CHECK(sysconf(_SC_PAGESIZE) == long(page) && sysconf(_SC_NPROCESSORS_ONLN) > 0);
  CHECK(wraps(memory, page));
  CHECK(!wraps(memory, NS::UInteger(before)) && !wraps(memory + before, page));
  softmetal_reset();
  CHECK(sysconf(_SC_PAGESIZE) == before);
  std::free(memory);
}

void test_threadgroups_of_command_buffers() {
  PoolScope pool;
  Gpu gpu;
  softmetal_reset();
  CHECK(softmetal_get("fewest_threadgroups") == 0 && softmetal_get("most_threadgroups") == 0);
  std::vector<float> out(320);
  for (NS::UInteger groups : {3, 2, 5}) {
    CHECK(run(gpu, "halves_in_one_word", 64 * groups, &out).empty());
  }
  CHECK(softmetal_get("fewest_threadgroups") == 2 && softmetal_get("most_threadgroups") == 5);
}

void test_settings_of_the_environment() {
  setenv("SOFTMETAL_SETTINGS", "seed=3 page_bytes=16384", 1);
  softmetal_reset();
  CHECK(softmetal_get("seed") == 3 && softmetal_get("page_bytes") == 16384);
  softmetal_set("seed", 4);
  softmetal_reset();
  CHECK(softmetal_get("seed") == 3);
  unsetenv("SOFTMETAL_SETTINGS");
  softmetal_reset();
  CHECK(softmetal_get("seed") == 0 && softmetal_get("page_bytes") == 0);
}

}  // namespace

int main() {
  test_order_of_simdgroups();
  test_order_of_threadgroups();
  test_order_of_sums();
  test_exponentials();
  test_subnormals();
  test_memory_of_other_threadgroups();
  test_new_buffers_hold_nothing();
  test_ways();
  test_pages();
  test_threadgroups_of_command_buffers();
  test_settings_of_the_environment();
  CHECK(softmetal_get("live") == 0);
  return test_result();
}
