// simdgroup_matrix: 8x8 elements spread over 32 lanes, two adjacent elements of one row in each.
#pragma once

#include "softmetal/memory.h"
#include "softmetal/simd.h"
#include "softmetal/types.h"

namespace softmetal {

constexpr int kMatrixSize = 8;

// Apple's layout. Lane l holds (matrix_row, matrix_column) and its right neighbour.
constexpr uint32_t matrix_row(uint32_t lane) { return (lane / 4 & 4) + lane / 2 % 4; }
constexpr uint32_t matrix_column(uint32_t lane) { return 2 * ((lane / 4 & 2) + lane % 2); }

template <typename T>
struct Fragment {
  metal::vec<T, 2> elements;
};

template <typename T>
struct WholeMatrix {
  T at[kMatrixSize][kMatrixSize];
  void gather(Thread* first, int operand) {
#pragma unroll
    for (uint32_t lane = 0; lane < kSimdWidth; ++lane) {
      const auto* from = (const Fragment<T>*)first[lane].operands[operand];
      at[matrix_row(lane)][matrix_column(lane)] = from->elements.x;
      at[matrix_row(lane)][matrix_column(lane) + 1] = from->elements.y;
    }
  }
  void scatter(Thread* first, int operand) const {
#pragma unroll
    for (uint32_t lane = 0; lane < kSimdWidth; ++lane) {
      auto* to = (Fragment<T>*)first[lane].operands[operand];
      to->elements.x = at[matrix_row(lane)][matrix_column(lane)];
      to->elements.y = at[matrix_row(lane)][matrix_column(lane) + 1];
    }
  }
};

inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// The language does not say in which order a product's sums are taken: one row of c + a b for each
// order that a device may have. All rows of a dispatch have the same one.
enum ProductOrder : uint32_t {
  kAscending,
  kDescending,
  kSumLast,
  kEvenAndOdd,
  kPairs,
  kOneRounding
};

template <typename T>
inline void add_row(T a, const T* b, T* row) {
  for (int j = 0; j < kMatrixSize; ++j) row[j] = multiply_add(a, b[j], row[j]);
}

template <typename T, ProductOrder kOrder>
inline void multiply_row(const T* a, const WholeMatrix<T>& b, T* c) {
  constexpr int n = kMatrixSize;
  T rows[n] = {};
  if (kOrder == kAscending) {
    for (int k = 0; k < n; ++k) add_row(a[k], b.at[k], c);
  } else if (kOrder == kDescending) {
    for (int k = n - 1; k >= 0; --k) add_row(a[k], b.at[k], c);
  } else if (kOrder == kSumLast) {
    for (int k = 0; k < n; ++k) add_row(a[k], b.at[k], rows);
    for (int j = 0; j < n; ++j) c[j] = c[j] + rows[j];
  } else if (kOrder == kEvenAndOdd) {
    for (int k = 0; k < n; k += 2) add_row(a[k], b.at[k], c);
    for (int k = 1; k < n; k += 2) add_row(a[k], b.at[k], rows);
    for (int j = 0; j < n; ++j) c[j] = c[j] + rows[j];
  } else if (kOrder == kPairs) {
    for (int j = 0; j < n; ++j) {
      T pairs[n / 2];
      for (int k = 0; k < n; k += 2) {
        pairs[k / 2] = multiply_add(a[k + 1], b.at[k + 1][j], a[k] * b.at[k][j]);
      }
      c[j] = c[j] + ((pairs[0] + pairs[1]) + (pairs[2] + pairs[3]));
    }
  } else {
    double sums[n];
    for (int j = 0; j < n; ++j) sums[j] = double(c[j]);
    for (int k = 0; k < n; ++k) {
      for (int j = 0; j < n; ++j) sums[j] = sums[j] + double(a[k]) * double(b.at[k][j]);
    }
    for (int j = 0; j < n; ++j) c[j] = T(sums[j]);
  }
}

template <typename T, ProductOrder kOrder>
inline void multiply_rows(const WholeMatrix<T>& a, const WholeMatrix<T>& b, WholeMatrix<T>& d) {
  for (int i = 0; i < kMatrixSize; ++i) multiply_row<T, kOrder>(a.at[i], b, d.at[i]);
}

// operands[0] = operands[1] * operands[2] + operands[3] for all lanes.
template <typename T>
void multiply_whole(Thread* first, uint32_t mask) {
  if (mask != 0xffffffffu) fault_text("simdgroup_multiply needs all 32 lanes of a simdgroup", 0);
  WholeMatrix<T> a, b, d;
  a.gather(first, 1);
  b.gather(first, 2);
  d.gather(first, 3);
  switch (launch->freedom.product_order) {
    case kAscending:
      multiply_rows<T, kAscending>(a, b, d);
      break;
    case kDescending:
      multiply_rows<T, kDescending>(a, b, d);
      break;
    case kSumLast:
      multiply_rows<T, kSumLast>(a, b, d);
      break;
    case kEvenAndOdd:
      multiply_rows<T, kEvenAndOdd>(a, b, d);
      break;
    case kPairs:
      multiply_rows<T, kPairs>(a, b, d);
      break;
    default:
      multiply_rows<T, kOneRounding>(a, b, d);
      break;
  }
  d.scatter(first, 0);
  counters.matrix_products += 1;
  counters.fmas += kMatrixSize * kMatrixSize * kMatrixSize;
}

template <typename T>
inline void multiply_fragments(Fragment<T>& d, Fragment<T>& a, Fragment<T>& b, Fragment<T>& c,
                               int line) {
  Thread* self = current;
  self->operands[0] = &d;
  self->operands[1] = &a;
  self->operands[2] = &b;
  self->operands[3] = &c;
  simd_wait(SimdOperation::kMatrix, line, multiply_whole<T>);
}

}  // namespace softmetal

namespace metal {

template <typename T, int kColumns, int kRows>
struct simdgroup_matrix {
  static_assert(kColumns == 8 && kRows == 8, "Metal has 8x8 simdgroup matrices only");
  softmetal::Fragment<T> fragment;
  simdgroup_matrix() = default;
  // A matrix with `diagonal` on its diagonal.
  explicit simdgroup_matrix(T diagonal) {
    uint lane = softmetal::current->lane;
    uint row = softmetal::matrix_row(lane), column = softmetal::matrix_column(lane);
    fragment.elements.x = row == column ? diagonal : T(0);
    fragment.elements.y = row == column + 1 ? diagonal : T(0);
  }
  vec<T, 2>& thread_elements() { return fragment.elements; }
  const vec<T, 2>& thread_elements() const { return fragment.elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

template <typename T, int kColumns, int kRows>
inline simdgroup_matrix<T, kColumns, kRows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, kColumns, kRows> matrix;
  matrix.fragment.elements = vec<T, 2>(value);
  return matrix;
}
template <typename T, int kColumns, int kRows>
inline simdgroup_matrix<T, kColumns, kRows> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, kColumns, kRows>(value);
}

}  // namespace metal

namespace softmetal {

// Where element (row, column) of a matrix lies from the pointer.
struct MatrixPlace {
  int64_t row_step;
  int64_t column_step;
  int64_t start;
  MatrixPlace(ulong elements_per_row, ulong2 origin, bool transpose, int line)
      : row_step(transpose ? 1 : int64_t(elements_per_row)),
        column_step(transpose ? int64_t(elements_per_row) : 1),
        start(int64_t(origin.y * elements_per_row + origin.x)) {
    if (transpose && (origin.x != 0 || origin.y != 0)) {
      fault_text("an origin with a transposed matrix: Metal does not say which index is which",
                 line);
    }
  }
  int64_t of(uint32_t lane, int second) const {
    return start + matrix_row(lane) * row_step + (matrix_column(lane) + second) * column_step;
  }
};

template <typename T, typename P>
inline void load_fragment(Fragment<T>& to, P from, const MatrixPlace& place) {
  uint32_t lane = current->lane;
  to.elements.x = from[place.of(lane, 0)];
  to.elements.y = from[place.of(lane, 1)];
}
template <typename T, typename P>
inline void store_fragment(const Fragment<T>& from, P to, const MatrixPlace& place) {
  uint32_t lane = current->lane;
  to[place.of(lane, 0)] = from.elements.x;
  to[place.of(lane, 1)] = from.elements.y;
}

}  // namespace softmetal

namespace metal {

template <typename T, typename Space>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& to, softmetal::Pointer<Space, const T> from,
                           ulong elements_per_row = 8, ulong2 origin = ulong2(0),
                           bool transpose = false, int line = __builtin_LINE()) {
  softmetal::load_fragment(to.fragment, from,
                           softmetal::MatrixPlace(elements_per_row, origin, transpose, line));
}
template <typename T, typename Space>
inline void simdgroup_store(simdgroup_matrix<T, 8, 8> from, softmetal::Pointer<Space, T> to,
                            ulong elements_per_row = 8, ulong2 origin = ulong2(0),
                            bool transpose = false, int line = __builtin_LINE()) {
  softmetal::store_fragment(from.fragment, to,
                            softmetal::MatrixPlace(elements_per_row, origin, transpose, line));
}

template <typename T>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<T, 8, 8>& d, simdgroup_matrix<T, 8, 8> a,
                                          simdgroup_matrix<T, 8, 8> b, simdgroup_matrix<T, 8, 8> c,
                                          int line = __builtin_LINE()) {
  softmetal::multiply_fragments(d.fragment, a.fragment, b.fragment, c.fragment, line);
}
template <typename T>
inline void simdgroup_multiply(simdgroup_matrix<T, 8, 8>& d, simdgroup_matrix<T, 8, 8> a,
                               simdgroup_matrix<T, 8, 8> b, int line = __builtin_LINE()) {
  auto zero = make_filled_simdgroup_matrix<T, 8, 8>(T(0));
  softmetal::multiply_fragments(d.fragment, a.fragment, b.fragment, zero.fragment, line);
}

}  // namespace metal
