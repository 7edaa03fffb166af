// A tile's bias and mask, packed, against the arrays one element at a time: every element type,
// strides of all kinds, more and fewer keys than a vector has lanes.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "core/cpu_target.h"
#include "operand_of.h"
#include "simd_kernels.h"

namespace {

using forge::DType;
using forge::IndexRange;
using forge::Int64;
using forge::Operand;
using forge::cpu::PairArrays;
using forge::cpu::PairRow;

constexpr Int64 kRows = 32, kKeys = 150, kStride = 40;
const float kHidden = -INFINITY;

// Powers of two, which every type holds, NaN and infinities.
std::uint32_t float_bits(int kind) {
  if (kind == 0) return 0xff800000u;
  if (kind == 1) return 0x7fc00000u;
  if (kind == 2) return 0x7f800000u;
  return static_cast<std::uint32_t>(127 - 8 + kind) << 23;
}

std::uint16_t half_bits(int kind) {
  if (kind == 0) return 0xfc00;
  if (kind == 1) return 0x7e00;
  if (kind == 2) return 0x7c00;
  return static_cast<std::uint16_t>((15 - 8 + kind) << 10);
}

float value_of(int kind) {
  const std::uint32_t bits = float_bits(kind);
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Kinds, and the array that they lie in.
struct Elements {
  std::vector<int> kinds;  // [row][key]
  std::vector<std::uint8_t> bytes;
  Operand operand;
  std::vector<Int64> first;  // of each row

  int kind(Int64 row, Int64 key) const {
    return kinds[static_cast<std::size_t>(first[static_cast<std::size_t>(row)] +
                                          key * operand.strides[3])];
  }
};

struct Layout {
  Int64 row;
  Int64 key;
};

template <typename Kind>
Elements make_elements(DType dtype, Layout layout, const Kind& kind) {
  Elements e;
  const Int64 size = (kRows - 1) * std::abs(layout.row) + (kKeys - 1) * std::abs(layout.key) + 1;
  const auto bytes = static_cast<std::size_t>(forge::dtype_bytes(dtype));
  e.bytes.resize(static_cast<std::size_t>(size) * bytes);
  for (std::size_t n = 0; n < static_cast<std::size_t>(size); ++n) {
    e.kinds.push_back(kind());
    const int last = e.kinds.back();
    const std::uint32_t single = float_bits(last);
    const auto upper = static_cast<std::uint16_t>(single >> 16);
    const std::uint16_t half = half_bits(last);
    const auto byte = static_cast<std::uint8_t>(last);
    const void* from = &single;
    if (dtype == DType::kFloat16) from = &half;
    if (dtype == DType::kBFloat16) from = &upper;
    if (dtype == DType::kBool) from = &byte;
    std::memcpy(e.bytes.data() + n * bytes, from, bytes);
  }
  const Int64 back = layout.key < 0 ? (1 - kKeys) * layout.key : 0;
  for (Int64 row = 0; row < kRows; ++row) e.first.push_back(back + row * layout.row);
  e.operand.data = e.bytes.data();
  e.operand.dtype = dtype;
  e.operand.strides[3] = layout.key;
  return e;
}

Elements random_elements(DType dtype, Layout layout, unsigned seed, int kinds) {
  std::mt19937 random(seed);
  return make_elements(dtype, layout, [&] { return static_cast<int>(random() % kinds); });
}

// Null where there is none.
struct Problem {
  const Elements* bias;
  const Elements* mask;

  bool shows(Int64 row, Int64 key) const {
    if (mask != nullptr && mask->kind(row, key) == 0) return false;
    return bias == nullptr || bias->kind(row, key) != 0;
  }
  float value(Int64 row, Int64 key) const {
    if (!shows(row, key)) return kHidden;
    return bias == nullptr ? 0.0f : value_of(bias->kind(row, key));
  }
};

bool same(float a, float b) { return std::isnan(b) ? std::isnan(a) : a == b; }

void check(const Problem& problem, IndexRange keys, const std::string& name) {
  PairArrays arrays;
  std::vector<PairRow> rows(kRows, PairRow{0, 0});
  if (problem.bias != nullptr) arrays.bias = problem.bias->operand;
  if (problem.mask != nullptr) arrays.mask = problem.mask->operand;
  for (std::size_t row = 0; row < kRows; ++row) {
    if (problem.bias != nullptr) rows[row].bias = problem.bias->first[row];
    if (problem.mask != nullptr) rows[row].mask = problem.mask->first[row];
  }
  bool shows = false, needed = problem.bias != nullptr;
  for (Int64 row = 0; row < kRows; ++row) {
    for (Int64 key = keys.begin; key < keys.end; ++key) {
      shows = shows || problem.shows(row, key);
      needed = needed || !problem.shows(row, key);
    }
  }
  for (forge::CpuTarget target : forge::usable_cpu_targets()) {
    const auto count = static_cast<std::size_t>(keys.end - keys.begin);
    std::vector<float> to(count * kStride, 7);
    bool hides_all = false;
    const bool given = kernels_of(target).pack_bias(arrays, rows.data(), kRows, keys, to.data(),
                                                    kStride, hides_all);
    const char* where = forge::cpu_target_name(target);
    CHECK_MSG(hides_all == !shows, "%s %s: hides all %d", where, name.c_str(), hides_all);
    CHECK_MSG(given == needed, "%s %s: something to add %d", where, name.c_str(), given);
    if (!given || hides_all) continue;
    for (Int64 row = 0; row < kRows; ++row) {
      for (Int64 key = keys.begin; key < keys.end; ++key) {
        const float got = to[static_cast<std::size_t>((key - keys.begin) * kStride + row)];
        CHECK_MSG(same(got, problem.value(row, key)), "%s %s: row %d key %d is %g", where,
                  name.c_str(), static_cast<int>(row), static_cast<int>(key), got);
      }
    }
    for (std::size_t key = 0; key < count; ++key) {
      CHECK(to[key * kStride + kRows] == 7);  // what is not asked for is left alone
    }
  }
}

void check_all_keys(const Problem& problem, const std::string& name) {
  for (IndexRange keys : {IndexRange{0, kKeys}, {1, 2}, {3, 20}, {kKeys - 16, kKeys}}) {
    check(problem, keys, name);
  }
}

const Layout kLayouts[] = {{kKeys, 1}, {kKeys + 3, 1}, {0, 1}, {1, kRows}, {2, 0}, {5, -2}, {0, 0}};

void test_values() {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const Layout& layout : kLayouts) {
      const Elements bias = random_elements(dtype, layout, 1, 12);
      check_all_keys({&bias, nullptr}, std::string("bias of ") + forge::dtype_name(dtype));
      for (const Layout& other : kLayouts) {
        const Elements mask = random_elements(DType::kBool, other, 2, 3);
        check_all_keys({&bias, &mask}, std::string("mask and bias of ") + forge::dtype_name(dtype));
      }
    }
  }
  for (const Layout& layout : kLayouts) {
    const Elements mask = random_elements(DType::kBool, layout, 3, 2);
    check_all_keys({nullptr, &mask}, "mask");
  }
}

// Alike everywhere but for one pair, wherever it is.
void test_one_pair() {
  for (const Layout& layout : kLayouts) {
    for (int byte : {0, 1, 255}) {
      Elements mask = make_elements(DType::kBool, layout, [=] { return byte; });
      check_all_keys({nullptr, &mask}, "even mask");
      for (std::size_t at : {std::size_t{0}, mask.kinds.size() / 2, mask.kinds.size() - 1}) {
        Elements other = make_elements(DType::kBool, layout, [=] { return byte; });
        other.kinds[at] = byte == 0 ? 1 : 0;
        other.bytes[at] = byte == 0 ? 1 : 0;
        check_all_keys({nullptr, &other}, "mask with one other pair");
      }
    }
    Elements bias = make_elements(DType::kFloat32, layout, [] { return 0; });
    check_all_keys({&bias, nullptr}, "bias that hides all");
  }
}

}  // namespace

int main() {
  test_values();
  test_one_pair();
  return test_result();
}
