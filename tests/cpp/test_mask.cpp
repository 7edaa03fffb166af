// visible_keys and visible_queries against the definition, in arithmetic that cannot overflow.
#include <cstdint>
#include <limits>
#include <utility>

#include "check.h"
#include "shared/attn_mask.h"

namespace {

using Wide = __int128;
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();

struct MaskCase {
  std::int64_t Tq, Tk, left, right;
  int causal;
  forge::AttnRange range;
};

bool visible(const MaskCase& mask, std::int64_t i, std::int64_t j) {
  const Wide pos = static_cast<Wide>(i) + mask.range.query_offset;
  if (mask.causal != 0 && j > pos) return false;
  if (mask.left >= 0 && j < pos - mask.left) return false;
  if (mask.right >= 0 && j > pos + mask.right) return false;
  return j >= mask.range.key_start && j < mask.range.key_end;
}

void check_case(const MaskCase& mask) {
  forge::AttnParams params{};
  params.Tq = mask.Tq;
  params.Tk = mask.Tk;
  params.window_left = mask.left;
  params.window_right = mask.right;
  params.causal = mask.causal;
  const forge::AttnBand band = forge::attn_band(params, mask.range);
  forge::IndexRange before{0, 0};
  for (std::int64_t i = 0; i < mask.Tq; ++i) {
    const forge::IndexRange keys = forge::visible_keys(band, i);
    for (std::int64_t j = 0; j < mask.Tk; ++j) {
      CHECK(forge::contains(keys, j) == visible(mask, i, j));
    }
    // Ends of dead rows are tame as well, and neither ever moves back.
    CHECK(keys.begin >= 0 && keys.begin <= keys.end && keys.end <= mask.Tk);
    CHECK(keys.begin >= before.begin && keys.end >= before.end);
    before = keys;
  }
  for (std::int64_t j = 0; j < mask.Tk; ++j) {
    const forge::IndexRange queries = forge::visible_queries(band, j, mask.Tq);
    for (std::int64_t i = 0; i < mask.Tq; ++i) {
      CHECK(forge::contains(queries, i) == visible(mask, i, j));
    }
    if (!forge::is_empty(queries)) CHECK(queries.begin >= 0 && queries.end <= mask.Tq);
  }
}

void test_all_small_masks() {
  for (const auto& [Tq, Tk] : {std::pair<int, int>{1, 1}, {3, 5}, {5, 3}, {7, 7}}) {
    for (const std::int64_t left : {-1, 0, 1, 2, 6, 9}) {
      for (const std::int64_t right : {-1, 0, 1, 3, 9}) {
        for (const int causal : {0, 1}) {
          for (const std::int64_t offset : {Tk - Tq, 0, -2, 4, -9, 9}) {
            check_case({Tq, Tk, left, right, causal, {offset, 0, Tk}});
            check_case({Tq, Tk, left, right, causal, {offset, 1, Tk - 1}});
            check_case({Tq, Tk, left, right, causal, {offset, Tk, 0}});
          }
        }
      }
    }
  }
}

void test_ends_of_int64_do_not_overflow() {
  for (const std::int64_t left : {std::int64_t{-1}, std::int64_t{0}, kMax - 3, kMax}) {
    for (const std::int64_t right : {std::int64_t{-1}, std::int64_t{0}, kMax - 3, kMax}) {
      for (const std::int64_t offset : {kMin, kMin + 2, std::int64_t{0}, kMax - 2, kMax}) {
        for (const int causal : {0, 1}) {
          check_case({4, 6, left, right, causal, {offset, 0, 6}});
          check_case({4, 6, left, right, causal, {offset, 5, 6}});
          check_case({4, 6, left, right, causal, {offset, 6, 0}});
        }
      }
    }
  }
}

}  // namespace

int main() {
  test_all_small_masks();
  test_ends_of_int64_do_not_overflow();
  return test_result();
}
