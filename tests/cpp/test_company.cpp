// A row's bits do not depend on what else is computed in the same call: other sequences, other
// key/value heads and, in the forward, other queries; nor on how the work is shared out.
#include <vector>

#include "backward_cases.h"
#include "check.h"
#include "core/thread_pool.h"
#include "forward_checks.h"

namespace {

using namespace forge_test;

void test_queries_among_others() {
  for (std::int64_t hd : {3, 16, 64, 77, 200}) {
    for (double softcap : {0.0, 2.0}) {
      Case c;
      c.Tq = c.Tk = 333;
      c.H = 6;
      c.Hkv = 2;
      c.hd = hd;
      c.causal = true;
      c.softcap = softcap;
      check_queries(c, make_arrays(c));
      c.window_left = 150;
      check_queries(c, make_arrays(c));
    }
  }
}

// The elements of one sequence and of some heads, by themselves.
Array part_of(const Array& all, const Case& one, std::int64_t T, Row first, std::int64_t heads) {
  Array part(1, T, heads, one.hd);
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t d = 0; d < one.hd; ++d)
        part.at(0, t, h, d) = all.at(first.b, t, first.h + h, d);
  return part;
}

// One key/value head of one sequence, with its query heads, as a call of its own.
Call group_of(const Call& all, std::int64_t b, std::int64_t kv_head) {
  const std::int64_t rep = all.c.H / all.c.Hkv;
  Case one = all.c;
  one.B = one.Hkv = 1;
  one.H = rep;
  const Row queries = {b, kv_head * rep, 0}, keys = {b, kv_head, 0};
  return {one,
          {part_of(all.in.q, one, one.Tq, queries, rep),
           part_of(all.in.k, one, one.Tk, keys, 1),
           part_of(all.in.v, one, one.Tk, keys, 1),
           {},
           {},
           {}},
          part_of(all.dout, one, one.Tq, queries, rep),
          {}};
}

bool same_forward(const Call& one, const ForwardResult& alone, const Call& all,
                  const ForwardResult& together, Row first) {
  for (std::int64_t n = 0; n < one.c.H * one.c.Tq; ++n) {
    const std::int64_t h = n / one.c.Tq, i = n % one.c.Tq;
    const Row as = {first.b, first.h + h, i};
    if (!same_row(one.c, alone, {0, h, i}, all.c, together, as)) return false;
  }
  return true;
}

// Whether `heads` heads from `first` on of [B, T, all_heads, hd] are the whole of [1, T, heads,
// hd].
bool same_part(const std::vector<float>& alone, const std::vector<float>& all, const Case& one,
               std::int64_t heads, std::int64_t all_heads, Row first) {
  const std::int64_t width = heads * one.hd;
  const std::int64_t T = static_cast<std::int64_t>(alone.size()) / width;
  for (std::int64_t t = 0; t < T; ++t) {
    const std::int64_t at = ((first.b * T + t) * all_heads + first.h) * one.hd;
    if (!same_floats(alone.data() + t * width, all.data() + at, width)) return false;
  }
  return true;
}

void check_groups(const Case& c, CpuTarget target) {
  if (!takes_next_case()) return;
  const Call all = make_call(c.named("groups"));
  for (int threads : {1, 8}) {
    forge::set_num_threads(threads);
    const ForwardResult together = run_forward(c, all.in, target);
    const Gradients gradients = run(all, target);
    for (std::int64_t b : {std::int64_t{0}, c.B - 1}) {
      for (std::int64_t head : {std::int64_t{0}, c.Hkv - 1}) {
        const Call one = group_of(all, b, head);
        const std::int64_t rep = one.c.H;
        forge::set_num_threads(2);
        const Row queries = {b, head * rep, 0}, keys = {b, head, 0};
        CHECK_MSG(same_forward(one, run_forward(one.c, one.in, target), all, together, queries),
                  "%s %s: forward of sequence %d head %d, %d threads",
                  forge::cpu_target_name(target), all.c.name.c_str(), static_cast<int>(b),
                  static_cast<int>(head), threads);
        const Gradients alone = run(one, target);
        CHECK_MSG(same_part(alone.dq, gradients.dq, one.c, rep, c.H, queries) &&
                      same_part(alone.dk, gradients.dk, one.c, 1, c.Hkv, keys) &&
                      same_part(alone.dv, gradients.dv, one.c, 1, c.Hkv, keys),
                  "%s %s: gradients of sequence %d head %d, %d threads",
                  forge::cpu_target_name(target), all.c.name.c_str(), static_cast<int>(b),
                  static_cast<int>(head), threads);
      }
    }
  }
}

void test_groups_among_others() {
  for (CpuTarget target : forge::usable_cpu_targets()) {
    for (std::int64_t Tq : {1, 9, 40, 150, 400}) {
      for (std::int64_t Tk : {90, 1700}) {
        Case c;
        c.B = 3;
        c.Tq = Tq;
        c.Tk = Tk;
        c.H = 10;
        c.Hkv = 5;
        c.hd = 24;
        c.causal = true;
        check_groups(c, target);
      }
    }
    Case many;
    many.B = 40;
    many.Tq = 30;
    many.Tk = 600;
    many.H = many.Hkv = 3;
    many.hd = 136;
    many.softcap = 3;
    many.window_left = 200;
    many.window_right = 20;
    check_groups(many, target);
  }
}

}  // namespace

int main() {
  test_queries_among_others();
  test_groups_among_others();
  return test_result();
}
