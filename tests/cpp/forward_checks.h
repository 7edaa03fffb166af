// What a forward is checked by: the float64 oracle, other numbers of threads, other queries beside.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "attention_cases.h"
#include "check.h"
#include "core/thread_pool.h"

namespace forge_test {

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

inline bool both_nan_or_near(float got, double want, double tolerance) {
  if (std::isnan(want)) return std::isnan(got);
  if (std::isinf(want)) return got == want;
  return std::fabs(got - want) <= tolerance;
}

// Against float64, within what a plain float32 evaluation allows itself.
inline void check_against_oracle(const Case& c, const Arrays& arrays, const ForwardResult& got,
                                 forge::CpuTarget target) {
  const char* name = forge::cpu_target_name(target);
  const std::int64_t hv = c.value_dim();
  std::vector<double> o(static_cast<std::size_t>(hv));
  for (std::int64_t b = 0; b < c.B; ++b) {
    for (std::int64_t h = 0; h < c.H; ++h) {
      for (std::int64_t i = 0; i < c.Tq; ++i) {
        const OracleRow row = oracle_row(c, arrays, b, h, i, o.data());
        const std::size_t at = static_cast<std::size_t>((b * c.H + h) * c.Tq + i);
        if (!row.live) {
          CHECK_MSG(both_nan_or_near(got.row_max[at], row.m, 0) && got.row_sum[at] == row.l,
                    "%s %s: dead row %d has %g and %g", name, c.name.c_str(), static_cast<int>(i),
                    got.row_max[at], got.row_sum[at]);
        } else if (std::isfinite(row.m) && std::isfinite(row.l)) {
          const double lse = got.row_max[at] + std::log(got.row_sum[at]);
          CHECK_MSG(std::fabs(lse - (row.m + std::log(row.l))) <= row.score_error + 2e-6,
                    "%s %s: lse of row %d is %.9g, not %.9g", name, c.name.c_str(),
                    static_cast<int>(i), lse, row.m + std::log(row.l));
        }
        const float* o_got = got.o.data() + ((b * c.Tq + i) * c.H + h) * hv;
        for (std::int64_t d = 0; d < hv; ++d) {
          const double tolerance = (2 * row.score_error + 4e-6) * row.value_size;
          CHECK_MSG(both_nan_or_near(o_got[d], o[static_cast<std::size_t>(d)], tolerance),
                    "%s %s: o[%d, %d, %d, %d] is %.9g, not %.9g (%.1e allowed)", name,
                    c.name.c_str(), static_cast<int>(b), static_cast<int>(i), static_cast<int>(h),
                    static_cast<int>(d), o_got[d], o[static_cast<std::size_t>(d)], tolerance);
        }
      }
    }
  }
}

inline void check_case(const Case& c, const Arrays& arrays) {
  if (!takes_next_case()) return;
  for (forge::CpuTarget target : forge::usable_cpu_targets()) {
    forge::set_num_threads(2);
    const ForwardResult got = run_forward(c, arrays, target);
    check_against_oracle(c, arrays, got, target);
    for (int threads : {1, 3, 8}) {
      forge::set_num_threads(threads);
      const ForwardResult again = run_forward(c, arrays, target);
      CHECK_MSG(same_bits(got.o, again.o) && same_bits(got.row_max, again.row_max) &&
                    same_bits(got.row_sum, again.row_sum),
                "%s %s: other bits on %d threads", forge::cpu_target_name(target), c.name.c_str(),
                threads);
    }
  }
}

inline void check_case(const Case& c) { check_case(c, make_arrays(c)); }

inline bool same_floats(const float* a, const float* b, std::int64_t count) {
  return std::memcmp(a, b, static_cast<std::size_t>(count) * sizeof(float)) == 0;
}

// A row's own sequence, head and number.
struct Row {
  std::int64_t b, h, i;
};

// Whether a row of a call is, bit for bit, a row of another call.
inline bool same_row(const Case& c, const ForwardResult& got, Row row, const Case& of,
                     const ForwardResult& want, Row as) {
  const std::int64_t stat = (row.b * c.H + row.h) * c.Tq + row.i;
  const std::int64_t stat_as = (as.b * of.H + as.h) * of.Tq + as.i;
  const std::int64_t o = ((row.b * c.Tq + row.i) * c.H + row.h) * c.value_dim();
  const std::int64_t o_as = ((as.b * of.Tq + as.i) * of.H + as.h) * of.value_dim();
  return same_floats(got.row_max.data() + stat, want.row_max.data() + stat_as, 1) &&
         same_floats(got.row_sum.data() + stat, want.row_sum.data() + stat_as, 1) &&
         same_floats(got.o.data() + o, want.o.data() + o_as, c.value_dim());
}

// The last queries of a call, as a call of their own.
inline Case last_queries(const Case& c, std::int64_t Tq) {
  Case last = c.named("queries");
  const std::int64_t first = c.Tq - Tq;
  last.Tq = Tq;
  last.runs.clear();
  for (std::int64_t n = 0; n < c.B * Tq && !c.runs.empty(); ++n) {
    forge::AttnRange own = c.range(n / Tq, first + n % Tq);
    own.query_offset += first;
    last.runs.push_back(own);
  }
  return last;
}

// The last queries by themselves (keys in lanes, keys split among tasks) and among all (rows in
// lanes, every tile and edge).
inline void check_queries(const Case& c, const Arrays& arrays) {
  if (!takes_next_case()) return;
  for (forge::CpuTarget target : forge::usable_cpu_targets()) {
    forge::set_num_threads(1);
    const ForwardResult whole = run_forward(c, arrays, target);
    for (std::int64_t Tq : {1, 2, 5, 20, 100}) {
      if (Tq > c.Tq) continue;
      const Case last = last_queries(c, Tq);
      const std::int64_t first = c.Tq - Tq;
      const Arrays some = {arrays.q.rows_from(first),
                           arrays.k,
                           arrays.v,
                           arrays.bias.rows_from(first),
                           arrays.mask.rows_from(first),
                           arrays.sinks.rows_from(first)};
      for (int threads : {1, 8}) {
        forge::set_num_threads(threads);
        const ForwardResult part = run_forward(last, some, target);
        for (std::int64_t n = 0; n < c.B * c.H * Tq; ++n) {
          const std::int64_t b = n / (c.H * Tq), h = n / Tq % c.H, i = n % Tq;
          CHECK_MSG(same_row(last, part, {b, h, i}, c, whole, {b, h, first + i}),
                    "%s %s: head %d row %d", forge::cpu_target_name(target), last.name.c_str(),
                    static_cast<int>(h), static_cast<int>(i));
        }
      }
    }
  }
}

// Each key/value head of each sequence by itself and among the others.
inline void check_groups_alone(const Case& c, const Arrays& arrays) {
  if (!takes_next_case()) return;
  const std::int64_t rep = c.H / c.Hkv;
  for (forge::CpuTarget target : forge::usable_cpu_targets()) {
    forge::set_num_threads(8);
    const ForwardResult all = run_forward(c, arrays, target);
    forge::set_num_threads(2);
    for (std::int64_t n = 0; n < c.B * c.Hkv; ++n) {
      const std::int64_t b = n / c.Hkv, g = n % c.Hkv, first = g * rep;
      Case one = c.named("alone");
      one.B = one.Hkv = 1;
      one.H = rep;
      one.runs.clear();
      for (std::int64_t i = 0; i < c.Tq && !c.runs.empty(); ++i) one.runs.push_back(c.range(b, i));
      const Arrays part = {arrays.q.part(b, first, rep),    arrays.k.part(b, g, 1),
                           arrays.v.part(b, g, 1),          arrays.bias.part(b, first, rep),
                           arrays.mask.part(b, first, rep), arrays.sinks.part(b, first, rep)};
      const ForwardResult alone = run_forward(one, part, target);
      for (std::int64_t r = 0; r < rep * c.Tq; ++r) {
        const std::int64_t h = r / c.Tq, i = r % c.Tq;
        CHECK_MSG(same_row(one, alone, {0, h, i}, c, all, {b, first + h, i}),
                  "%s %s: sequence %d head %d row %d", forge::cpu_target_name(target),
                  one.name.c_str(), static_cast<int>(b), static_cast<int>(first + h),
                  static_cast<int>(i));
      }
    }
  }
}

}  // namespace forge_test
