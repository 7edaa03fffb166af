// Biases, masks and sinks for tests: a number for each (b, h, i, j), or (b, h, i), with axes of 1,
// any strides and any element type.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "core/problem.h"

namespace forge_test {

class PairValues {
 public:
  using Sizes = std::array<std::int64_t, 4>;

  PairValues() = default;  // not given

  // Layouts: 0: C-contiguous; 1: the last axis outside the one before it; 2: all axes backwards,
  // with gaps; 3: heads inside queries.
  PairValues(const Sizes& shape, forge::DType dtype, int layout = 0, int ndim = 4)
      : shape_(shape), dtype_(dtype), ndim_(ndim) {
    std::array<std::size_t, 4> order = {3, 2, 1, 0};  // innermost first
    if (layout == 1) order = {2, 3, 1, 0};
    if (layout == 3) order = {3, 1, 2, 0};
    std::int64_t step = layout == 2 ? 2 : 1;
    for (std::size_t axis : order) {
      strides_[axis] = layout == 2 ? -step : step;
      if (layout == 2) origin_ += (shape[axis] - 1) * step;
      step *= shape[axis];
      if (shape[axis] == 1) strides_[axis] = 0;
    }
    values_.assign(static_cast<std::size_t>(step), std::nanf(""));
    bytes_.assign(values_.size() * static_cast<std::size_t>(forge::dtype_bytes(dtype)), 0xff);
  }

  bool given() const { return ndim_ > 0; }
  const Sizes& shape() const { return shape_; }
  forge::DType dtype() const { return dtype_; }
  const std::vector<std::uint8_t>& bytes() const { return bytes_; }

  float at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j = 0) const {
    return values_[place(b, h, i, j)];
  }

  void set(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j, float x) {
    const std::size_t at = place(b, h, i, j);
    values_[at] = x;
    const std::uint32_t single = bits_of(x);
    const auto upper = static_cast<std::uint16_t>(single >> 16);
    const std::uint16_t half = half_of(x);
    const std::uint8_t byte = x != 0;
    const void* from = &single;
    if (dtype_ == forge::DType::kFloat16) from = &half;
    if (dtype_ == forge::DType::kBFloat16) from = &upper;
    if (dtype_ == forge::DType::kBool) from = &byte;
    const auto size = static_cast<std::size_t>(forge::dtype_bytes(dtype_));
    std::memcpy(bytes_.data() + at * size, from, size);
  }

  template <typename Value>
  void fill(const Value& value) {
    for (std::int64_t b = 0; b < shape_[0]; ++b)
      for (std::int64_t h = 0; h < shape_[1]; ++h)
        for (std::int64_t i = 0; i < shape_[2]; ++i)
          for (std::int64_t j = 0; j < shape_[3]; ++j) set(b, h, i, j, value(b, h, i, j));
  }

  // Multiples of 1/8, which every type holds; `hidden` of eight are -inf. Of a mask: are 0.
  void randomize(unsigned seed, unsigned hidden) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    fill([&](auto...) {
      const bool hide = random() % 8 < hidden;
      if (dtype_ == forge::DType::kBool) return hide ? 0.0f : 1.0f;
      return hide ? -INFINITY : std::round(normal(random) * 8) / 8;
    });
  }

  // What a call has written into the operand's memory.
  void read_back() {
    const auto size = static_cast<std::size_t>(forge::dtype_bytes(dtype_));
    for (std::size_t n = 0; n < values_.size(); ++n) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, bytes_.data() + n * size, size);
      if (dtype_ == forge::DType::kBFloat16) bits <<= 16;
      if (dtype_ == forge::DType::kFloat16) {
        values_[n] = value_of_half(bits);
      } else {
        std::memcpy(&values_[n], &bits, sizeof bits);
      }
    }
  }

  forge::Operand operand() const {
    forge::Operand operand;
    const auto size = static_cast<std::int64_t>(forge::dtype_bytes(dtype_));
    operand.data = const_cast<std::uint8_t*>(bytes_.data()) + origin_ * size;
    operand.dtype = dtype_;
    operand.writeable = true;
    operand.ndim = ndim_;
    operand.shape = shape_;
    operand.strides = strides_;
    return operand;
  }

  // Of the queries [first, ...) alone.
  PairValues rows_from(std::int64_t first) const {
    PairValues copy = *this;
    if (!given() || shape_[2] == 1) return copy;
    copy.shape_[2] -= first;
    copy.origin_ += first * strides_[2];
    return copy;
  }

  // Of one sequence and some query heads alone.
  PairValues part(std::int64_t b, std::int64_t head, std::int64_t heads) const {
    PairValues copy = *this;
    copy.origin_ += b * strides_[0] + head * strides_[1];
    copy.shape_[0] = std::min(shape_[0], std::int64_t{1});
    copy.shape_[1] = std::min(shape_[1], heads);
    return copy;
  }

 private:
  std::size_t place(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return static_cast<std::size_t>(origin_ + b * strides_[0] + h * strides_[1] + i * strides_[2] +
                                    j * strides_[3]);
  }

  static std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
  }

  static float value_of_half(std::uint32_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float sign = bits >> 15 ? -1.0f : 1.0f;
    if (exponent == 31) return fraction != 0 ? std::nanf("") : sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
    return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  }

  // Of numbers that float16 holds, from its smallest normal one up.
  static std::uint16_t half_of(float x) {
    const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return 0x7e00;
    if (std::isinf(x)) return static_cast<std::uint16_t>(sign | 0x7c00);
    if (x == 0) return sign;
    int exponent;
    const float fraction = std::frexp(std::fabs(x), &exponent);  // [1/2, 1)
    const int digits = static_cast<int>(fraction * 2048) - 1024;
    return static_cast<std::uint16_t>(sign | (exponent + 14) << 10 | digits);
  }

  Sizes shape_{}, strides_{};
  std::int64_t origin_ = 0;
  forge::DType dtype_ = forge::DType::kFloat32;
  int ndim_ = 0;
  std::vector<float> values_;
  std::vector<std::uint8_t> bytes_;
};

}  // namespace forge_test
