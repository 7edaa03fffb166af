// What the host divides so that no shader need.
#include <initializer_list>
#include <limits>

#include "check.h"
#include "shared/attn_grid.h"

namespace {

using forge::AttnParams;
using forge::Int32;
using forge::Int64;

forge::AttnGrid grid_of(Int32 rep, float softcap) {
  AttnParams params = {};
  params.H = rep;
  params.Hkv = 1;
  params.softcap = softcap;
  return attn_grid(params);
}

bool divides(const forge::AttnGrid& grid, Int64 x) {
  const Int32 quotient =
      forge::divided_by_rep(static_cast<Int32>(x), grid.rep_factor, grid.rep_shift);
  return quotient == x / grid.rep;
}

void test_rows_are_divided_exactly() {
  const Int64 most = std::numeric_limits<Int32>::max();
  for (Int32 rep = 1; rep <= 5000; ++rep) {
    const forge::AttnGrid grid = grid_of(rep, 0);
    for (const Int64 at : {Int64(1), Int64(1000), most / rep / 2, most / rep}) {
      const Int64 whole = at * rep;  // where the quotient steps
      CHECK(divides(grid, whole - 1) && divides(grid, whole));
    }
    CHECK(divides(grid, 0) && divides(grid, most));
  }
  for (const Int64 rep : {Int64(1) << 20, (Int64(1) << 30) - 1, most}) {
    const forge::AttnGrid grid = grid_of(static_cast<Int32>(rep), 0);
    CHECK(divides(grid, rep - 1) && divides(grid, rep) && divides(grid, most));
  }
}

void test_the_inverse_of_softcap_is_finite() {
  CHECK(grid_of(1, 0).inverse_softcap == 0);
  CHECK(grid_of(1, 20).inverse_softcap == 1.0f / 20);
  CHECK(grid_of(1, 1e-45f).inverse_softcap == std::numeric_limits<float>::max());
}

}  // namespace

int main() {
  test_rows_are_divided_exactly();
  test_the_inverse_of_softcap_is_finite();
  return test_result();
}
