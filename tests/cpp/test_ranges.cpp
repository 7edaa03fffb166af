// Half-open ranges, and how a row ends.
#include <cmath>

#include "check.h"
#include "shared/attn_row.h"
#include "shared/index_range.h"

namespace {

using forge::IndexRange;

bool same(IndexRange a, IndexRange b) { return a.begin == b.begin && a.end == b.end; }

void test_ranges_are_half_open() {
  CHECK(forge::is_empty(forge::nothing()) && forge::is_empty({3, 3}) && forge::is_empty({4, 3}));
  CHECK(!forge::is_empty({3, 4}));
  CHECK(forge::contains({3, 5}, 3) && forge::contains({3, 5}, 4) && !forge::contains({3, 5}, 5));
  CHECK(same(forge::overlap({0, 5}, {3, 9}), {3, 5}));
  CHECK(forge::is_empty(forge::overlap({0, 3}, {3, 9})));
  CHECK(same(forge::hull({0, 2}, {5, 7}), {0, 7}));
  CHECK(same(forge::hull({9, 9}, {5, 7}), {5, 7}) && same(forge::hull({5, 7}, {0, 0}), {5, 7}));
  CHECK(forge::ceil_div(0, 4) == 0 && forge::ceil_div(1, 4) == 1 && forge::ceil_div(8, 4) == 2);
  CHECK(forge::round_up(9, 4) == 12 && forge::round_up(8, 4) == 8);
}

template <typename Real>
void test_row_ends() {
  const Real infinity = HUGE_VAL;
  const auto usual = forge::finished_row(true, Real(2), Real(3));
  CHECK(usual.live && usual.m == 2 && usual.l == 3);
  const auto dead = forge::finished_row(false, Real(2), Real(3));  // whatever was summed up
  CHECK(!dead.live && dead.m == -infinity && dead.l == 0);
  CHECK(!forge::finished_row(true, -infinity, Real(0)).live);
  const auto spoilt = forge::finished_row(true, Real(2), Real(NAN));
  CHECK(spoilt.live && spoilt.m == 2 && std::isnan(spoilt.l));
}

}  // namespace

int main() {
  test_ranges_are_half_open();
  test_row_ends<float>();
  test_row_ends<double>();
  return test_result();
}
