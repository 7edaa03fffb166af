// The fused backward against a float64 oracle that shares nothing with it: shapes off every tile, all
// options, strides, grouped heads, NaN and infinity, dead rows, accumulation; the same bits at any
// thread count.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "check.h"
#include "core/thread_pool.h"
#include "cpu/attention.h"

namespace {

using forge::CpuTarget;
using namespace forge_test;

constexpr float kUnset = 12345.0f;

// What the backward takes beyond q, k and v, and where it puts its results.
struct Call {
  Case c;
  Arrays in;
  Array dout;
  std::vector<float> dlse;  // empty: none
  bool accumulate = false;
};

struct Gradients {
  std::vector<float> dq, dk, dv, d_row;
};

Call make_call(const Case& c) {
  Call call{c, make_arrays(c), Array(c.B, c.Tq, c.H, c.hd), {}, false};
  call.dout.randomize(4, 1);
  return call;
}

void add_dlse(Call& call) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  call.dlse.resize(static_cast<std::size_t>(call.c.B * call.c.H * call.c.Tq));
  for (float& x : call.dlse) x = normal(random);
}

std::vector<float> start_values(std::int64_t count, bool accumulate) {
  std::vector<float> values(static_cast<std::size_t>(count), kUnset);
  if (accumulate) {
    for (std::size_t n = 0; n < values.size(); ++n) values[n] = 0.25f * static_cast<float>(n % 7) - 0.5f;
  }
  return values;
}

Gradients run(const Call& call, CpuTarget target) {
  const Case& c = call.c;
  const std::size_t rows = static_cast<std::size_t>(c.B * c.H * c.Tq);
  std::vector<float> o(rows * static_cast<std::size_t>(c.hd)), row_max(rows), row_sum(rows);
  forge::Problem problem = problem_of(c, call.in);
  auto& p = problem.params;
  p.dout = call.dout.strides();
  p.dq = {c.Tq * c.H * c.hd, c.H * c.hd, c.hd};
  p.dk = p.dv = {c.Tk * c.Hkv * c.hd, c.Hkv * c.hd, c.hd};
  forge::ForwardArrays<float> forward{};
  forward.q = call.in.q.base();
  forward.k = call.in.k.base();
  forward.v = call.in.v.base();
  forward.o = o.data();
  forward.stats = {row_max.data(), row_sum.data()};
  forge::cpu::attention_fwd(problem, forward, target);
  Gradients out;
  out.dq = start_values(c.B * c.Tq * c.H * c.hd, call.accumulate);
  out.dk = start_values(c.B * c.Tk * c.Hkv * c.hd, call.accumulate);
  out.dv = out.dk;
  out.d_row.assign(rows, kUnset);
  forge::BackwardArrays<float> arrays{};
  arrays.q = forward.q;
  arrays.k = forward.k;
  arrays.v = forward.v;
  arrays.o = o.data();
  arrays.dout = call.dout.base();
  arrays.dlse = call.dlse.empty() ? nullptr : call.dlse.data();
  arrays.stats = {row_max.data(), row_sum.data()};
  arrays.d_row = out.d_row.data();
  arrays.dq = out.dq.data();
  arrays.dk = out.dk.data();
  arrays.dv = out.dv.data();
  forge::cpu::attention_bwd(problem, arrays, call.accumulate, target);
  return out;
}

// Gradients in float64, and for each a bound on its float32 error.
struct Oracle {
  std::vector<double> dq, dk, dv, dq_error, dk_error, dv_error;
};

constexpr double kUnit = 0x1p-24;

struct OraclePair {
  double p, ds, p_error, ds_error;
};

// p and ds of the visible pairs of one row; the others stay zero.
void oracle_pairs(const Call& call, std::int64_t b, std::int64_t h, std::int64_t i,
                  std::vector<OraclePair>& pairs) {
  const Case& c = call.c;
  const std::int64_t g = h / (c.H / c.Hkv);
  std::vector<double> o(static_cast<std::size_t>(c.hd));
  const OracleRow row = oracle_row(c, call.in, b, h, i, o.data());
  double d = 0, d_size = 0;
  for (std::int64_t e = 0; e < c.hd; ++e) {
    const double term = call.dout.at(b, i, h, e) * o[static_cast<std::size_t>(e)];
    d += term;
    d_size += std::fabs(call.dout.at(b, i, h, e)) * row.value_size;
  }
  if (!call.dlse.empty()) d -= call.dlse[static_cast<std::size_t>((b * c.H + h) * c.Tq + i)];
  const double roundings = std::sqrt(static_cast<double>(c.hd)) + 8;
  for (std::int64_t j = 0; j < c.Tk; ++j) {
    OraclePair& pair = pairs[static_cast<std::size_t>(j)];
    pair = {0, 0, 0, 0};
    if (!c.sees(b, i, j)) continue;
    double x = 0, dp = 0, dp_size = 0;
    for (std::int64_t e = 0; e < c.hd; ++e) {
      x += static_cast<double>(call.in.q.at(b, i, h, e)) * call.in.k.at(b, j, g, e);
      const double term = static_cast<double>(call.dout.at(b, i, h, e)) * call.in.v.at(b, j, g, e);
      dp += term;
      dp_size += std::fabs(term);
    }
    x *= c.used_scale();
    const double t = c.softcap > 0 ? std::tanh(x / c.softcap) : 0;
    const double s = c.softcap > 0 ? c.softcap * t : x;
    pair.p = std::exp(s - row.m) / row.l;
    if (pair.p * row.l < 0x1p-126) pair.p = 0;
    const double slope = 1 - t * t;
    pair.ds = pair.p * (dp - d) * slope;
    const double relative = 2 * row.score_error + (8 + std::min(88.0, row.m - s)) * kUnit;
    pair.p_error = pair.p * relative;
    const double size = dp_size + d_size + std::fabs(d);
    pair.ds_error = pair.p * ((relative + roundings * kUnit) * size + 2 * row.score_error * d_size);
    if (c.softcap > 0) pair.ds_error += pair.p * size * 6 * (kUnit + row.score_error / c.softcap);
  }
}

Oracle oracle(const Call& call) {
  const Case& c = call.c;
  Oracle r;
  r.dq.assign(static_cast<std::size_t>(c.B * c.Tq * c.H * c.hd), 0);
  r.dk.assign(static_cast<std::size_t>(c.B * c.Tk * c.Hkv * c.hd), 0);
  r.dv = r.dk_error = r.dv_error = r.dk;
  r.dq_error = r.dq;
  std::vector<OraclePair> pairs(static_cast<std::size_t>(c.Tk));
  const double scale = c.used_scale(), size = std::fabs(scale);
  const double sum = (8 + std::sqrt(static_cast<double>(c.Tk + c.Tq))) * kUnit;
  for (std::int64_t b = 0; b < c.B; ++b)
    for (std::int64_t h = 0; h < c.H; ++h)
      for (std::int64_t i = 0; i < c.Tq; ++i) {
        const std::int64_t g = h / (c.H / c.Hkv);
        oracle_pairs(call, b, h, i, pairs);
        for (std::int64_t j = 0; j < c.Tk; ++j) {
          if (!c.sees(b, i, j)) continue;
          const OraclePair& pair = pairs[static_cast<std::size_t>(j)];
          const double ds_error = size * (pair.ds_error + sum * std::fabs(pair.ds));
          for (std::int64_t e = 0; e < c.hd; ++e) {
            const std::size_t q_at = static_cast<std::size_t>(((b * c.Tq + i) * c.H + h) * c.hd + e);
            const std::size_t k_at = static_cast<std::size_t>(((b * c.Tk + j) * c.Hkv + g) * c.hd + e);
            const double q = call.in.q.at(b, i, h, e), k = call.in.k.at(b, j, g, e);
            const double dout = call.dout.at(b, i, h, e);
            r.dq[q_at] += scale * pair.ds * k;
            r.dk[k_at] += scale * pair.ds * q;
            r.dv[k_at] += pair.p * dout;
            r.dq_error[q_at] += ds_error * std::fabs(k);
            r.dk_error[k_at] += ds_error * std::fabs(q);
            r.dv_error[k_at] += (pair.p_error + sum * pair.p) * std::fabs(dout);
          }
        }
      }
  return r;
}

void compare(const Call& call, const char* what, CpuTarget target, const std::vector<float>& got,
             const std::vector<double>& want, const std::vector<double>& error) {
  const std::vector<float> before =
      start_values(static_cast<std::int64_t>(got.size()), call.accumulate);
  for (std::size_t n = 0; n < got.size(); ++n) {
    const double expected = want[n] + (call.accumulate ? before[n] : 0);
    const double allowed = 2 * error[n] + 4 * kUnit * std::fabs(expected) + 1e-30;
    const bool good = std::isnan(expected)   ? std::isnan(got[n])
                      : std::isinf(expected) ? !std::isfinite(got[n])
                      : std::isfinite(allowed) ? std::fabs(got[n] - expected) <= allowed
                                               : !std::isinf(got[n]);
    CHECK_MSG(good, "%s %s: %s[%d, channel %d] is %.9g, not %.9g (%.1e allowed)",
              forge::cpu_target_name(target), call.c.name.c_str(), what,
              static_cast<int>(n / static_cast<std::size_t>(call.c.hd)),
              static_cast<int>(n % static_cast<std::size_t>(call.c.hd)), got[n], expected, allowed);
  }
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

bool same_bits(const Gradients& a, const Gradients& b) {
  return same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv) &&
         same_bits(a.d_row, b.d_row);
}

void check_call(const Call& call) {
  const Oracle want = oracle(call);
  for (CpuTarget target : forge::usable_cpu_targets()) {
    forge::set_num_threads(2);
    const Gradients got = run(call, target);
    compare(call, "dq", target, got.dq, want.dq, want.dq_error);
    compare(call, "dk", target, got.dk, want.dk, want.dk_error);
    compare(call, "dv", target, got.dv, want.dv, want.dv_error);
    for (int threads : {1, 3, 8}) {
      forge::set_num_threads(threads);
      CHECK_MSG(same_bits(got, run(call, target)), "%s %s: other bits on %d threads",
                forge::cpu_target_name(target), call.c.name.c_str(), threads);
    }
  }
}

void check_case(const Case& c) { check_call(make_call(c)); }

void test_shapes() {
  for (std::int64_t T : {1, 2, 7, 31, 33, 63, 64, 65, 127, 129, 193, 257, 400}) {
    Case c;
    c.Tq = c.Tk = T;
    c.H = 2;
    c.Hkv = 1;
    c.hd = 64;
    check_case(c.named("full"));
    c.causal = true;
    check_case(c.named("causal"));
  }
  for (std::int64_t hd :
       {1, 2, 3, 5, 6, 7, 8, 15, 16, 17, 31, 33, 40, 48, 65, 80, 96, 112, 127, 129, 257, 512}) {
    Case c;
    c.Tq = 37;
    c.Tk = 141;
    c.H = 3;
    c.Hkv = 3;
    c.hd = hd;
    c.causal = true;
    check_case(c.named("head size"));
  }
  for (std::int64_t Tq : {1, 2, 3, 5, 8, 40}) {
    for (std::int64_t Tk : {0, 1, 5, 130, 1000, 3001}) {
      Case c;
      c.Tq = Tq;
      c.Tk = Tk;
      c.H = 6;
      c.Hkv = Tk == 1000 ? 6 : 2;
      c.hd = 24;
      c.causal = true;
      check_case(c.named("Tq != Tk"));
      c.causal = false;
      check_case(c.named("Tq != Tk, full"));
    }
  }
  for (std::int64_t rep : {1, 3, 4, 8}) {
    Case c;
    c.B = 2;
    c.Tq = 75;
    c.Tk = 60;
    c.Hkv = 2;
    c.H = 2 * rep;
    c.hd = 16;
    c.causal = true;
    check_case(c.named("group"));
  }
}

void test_options() {
  for (int bits = 0; bits < 64; ++bits) {
    Case c;
    c.B = 2;
    c.Tq = 70;
    c.Tk = 90;
    c.H = 4;
    c.Hkv = 2;
    c.hd = 20;
    c.causal = bits & 1;
    if (bits & 2) c.window_left = 17;
    if (bits & 4) c.window_right = 9;
    if (bits & 8) c.softcap = 1.5;
    if (bits & 16) c.offsets = {-30, 60};
    if (bits & 32) c.key_start = {3, 20}, c.key_end = {41, 90};
    c.scale = bits % 3 == 0 ? -0.7 : 0.4;
    Call call = make_call(c.named("options"));
    call.accumulate = bits % 5 == 0;
    if (bits % 3 == 0) add_dlse(call);
    check_call(call);
    call.c.Tq = 3;
    call = make_call(call.c.named("options, few queries"));
    if (bits % 3 == 1) add_dlse(call);
    call.accumulate = bits % 2 == 0;
    check_call(call);
  }
  for (std::int64_t left : {0, 1, 46, 47, 48, 62, 63, 64, 95, 96, 131}) {
    Case c;
    c.Tq = c.Tk = 500;
    c.hd = 4;
    c.causal = true;
    c.window_left = left;
    check_case(c.named("window"));
  }
}

void test_extreme_scores() {
  Case c;
  c.Tq = c.Tk = 200;
  c.H = 4;
  c.Hkv = 2;
  c.hd = 16;
  c.causal = true;
  for (float size : {20.0f, 1e2f, 1e4f}) {
    c.q_size = size;
    check_case(c.named("large scores"));
    c.softcap = 30;
    check_case(c.named("large scores, capped"));
    c.softcap = 0;
  }
  for (float q : {1e9f, -1e9f}) {
    c.hd = 1;
    c.scale = 1;
    Call call = make_call(c.named("equal huge scores"));
    call.in.q.fill(q);
    call.in.k.fill(1);
    check_call(call);
  }
}

void test_strides() {
  for (int layout = 0; layout < kLayouts; ++layout) {
    for (int which = 0; which < 4; ++which) {
      for (std::int64_t Tq : {2, 45}) {
        Case c;
        c.B = 2;
        c.Tq = Tq;
        c.Tk = 45;
        c.H = 4;
        c.Hkv = 2;
        c.hd = 19;
        c.causal = true;
        Call call = make_call(c.named("strides"));
        Array* arrays[] = {&call.in.q, &call.in.k, &call.in.v, &call.dout};
        arrays[which]->relayout(layout);
        check_call(call);
      }
    }
  }
}

// Which elements differ in their bits.
std::vector<bool> changed(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<bool> result(a.size());
  for (std::size_t n = 0; n < a.size(); ++n) result[n] = std::memcmp(&a[n], &b[n], 4) != 0;
  return result;
}

Case window_case(std::int64_t Tq) {
  Case c;
  c.Tq = Tq;
  c.Tk = 150;
  c.H = 2;
  c.Hkv = 1;
  c.hd = 12;
  c.causal = true;
  c.window_left = 70;
  return c;
}

// A bad row of k or v changes gradients only where somebody who sees it reaches.
void test_reach_of_key(const Call& clean, const Call& bad, std::int64_t key) {
  const Case& c = clean.c;
  for (CpuTarget target : forge::usable_cpu_targets()) {
    const Gradients a = run(clean, target), b = run(bad, target);
    const std::vector<bool> dq = changed(a.dq, b.dq), dk = changed(a.dk, b.dk);
    for (std::int64_t i = 0; i < c.Tq; ++i) {
      if (c.sees(0, i, key)) continue;
      for (std::int64_t e = 0; e < c.H * c.hd; ++e) {
        CHECK_MSG(!dq[static_cast<std::size_t>(i * c.H * c.hd + e)],
                  "%s %s: key %d reaches dq of row %d", forge::cpu_target_name(target),
                  bad.c.name.c_str(), static_cast<int>(key), static_cast<int>(i));
      }
    }
    for (std::int64_t j = 0; j < c.Tk; ++j) {
      bool shared = false;
      for (std::int64_t i = 0; i < c.Tq; ++i) shared |= c.sees(0, i, j) && c.sees(0, i, key);
      for (std::int64_t e = 0; e < c.hd && !shared; ++e) {
        CHECK_MSG(!dk[static_cast<std::size_t>(j * c.hd + e)], "%s %s: key %d reaches dk of key %d",
                  forge::cpu_target_name(target), bad.c.name.c_str(), static_cast<int>(key),
                  static_cast<int>(j));
      }
    }
  }
}

void test_reach_of_row(const Call& clean, const Call& bad, std::int64_t row) {
  const Case& c = clean.c;
  for (CpuTarget target : forge::usable_cpu_targets()) {
    const Gradients a = run(clean, target), b = run(bad, target);
    const std::vector<bool> dq = changed(a.dq, b.dq), dk = changed(a.dk, b.dk),
                            dv = changed(a.dv, b.dv);
    for (std::int64_t n = 0; n < c.Tq * c.H * c.hd; ++n) {
      if (n / (c.H * c.hd) != row) CHECK(!dq[static_cast<std::size_t>(n)]);
    }
    for (std::int64_t n = 0; n < c.Tk * c.hd; ++n) {
      if (c.sees(0, row, n / c.hd)) continue;
      CHECK_MSG(!dk[static_cast<std::size_t>(n)] && !dv[static_cast<std::size_t>(n)],
                "%s %s: row %d reaches key %d", forge::cpu_target_name(target), bad.c.name.c_str(),
                static_cast<int>(row), static_cast<int>(n / c.hd));
    }
  }
}

void test_non_finite() {
  for (std::int64_t Tq : {4, 150}) {
    for (float bad : {NAN, INFINITY, -INFINITY}) {
      for (std::int64_t row : {0, 5, 60, 149}) {
        const Call clean = make_call(window_case(Tq));
        Call call = make_call(window_case(Tq).named("non-finite v"));
        call.in.v.at(0, row, 0, 3) = bad;
        check_call(call);
        test_reach_of_key(clean, call, row);
        call = make_call(window_case(Tq).named("non-finite k"));
        call.in.k.at(0, row, 0, 3) = bad;
        if (std::isnan(bad)) check_call(call);
        test_reach_of_key(clean, call, row);
        call = make_call(window_case(Tq).named("non-finite q"));
        call.in.q.at(0, row % Tq, 1, 3) = bad;
        if (std::isnan(bad)) check_call(call);
        test_reach_of_row(clean, call, row % Tq);
        call = make_call(window_case(Tq).named("non-finite do"));
        call.dout.at(0, row % Tq, 1, 3) = bad;
        if (std::isnan(bad)) check_call(call);
        test_reach_of_row(clean, call, row % Tq);
      }
    }
  }
}

// Rows that see nothing leave no trace, whatever they hold.
void test_dead_rows() {
  for (std::int64_t Tq : {30, 300}) {
    for (bool accumulate : {false, true}) {
      Case c;
      c.Tq = Tq;
      c.Tk = 20;
      c.H = 2;
      c.Hkv = 1;
      c.hd = 8;
      c.causal = true;
      Call clean = make_call(c.named("dead rows"));
      clean.accumulate = accumulate;
      add_dlse(clean);
      check_call(clean);
      Call call = clean;
      for (std::int64_t i = 0; i < Tq - c.Tk; ++i) {
        call.in.q.at(0, i, 1, 2) = NAN;
        call.dout.at(0, i, 0, 5) = NAN;
        call.dlse[static_cast<std::size_t>(Tq + i)] = NAN;
      }
      for (CpuTarget target : forge::usable_cpu_targets()) {
        CHECK_MSG(same_bits(run(clean, target), run(call, target)), "%s: a dead row leaves a trace",
                  forge::cpu_target_name(target));
      }
    }
  }
  // (b) of the public case: dv counts the live rows.
  Case c;
  c.Tq = 5;
  c.Tk = 2;
  c.H = 2;
  c.Hkv = 1;
  c.hd = 4;
  c.causal = true;
  Call call = make_call(c.named("dead rows of zeros"));
  call.in.q.fill(0);
  call.in.k.fill(0);
  call.dout.fill(1);
  for (std::int64_t i = 0; i < 3; ++i)
    for (std::int64_t h = 0; h < 2; ++h)
      for (std::int64_t e = 0; e < 4; ++e) call.dout.at(0, i, h, e) = NAN;
  for (CpuTarget target : forge::usable_cpu_targets()) {
    const Gradients got = run(call, target);
    for (std::size_t e = 0; e < 4; ++e) {
      CHECK(got.dv[e] == 3.0f);
      CHECK(got.dv[4 + e] == 1.0f);
    }
    for (float x : got.dq) CHECK(std::isfinite(x));
  }
}

// Keys that nobody sees get exact zeros, or keep what they hold.
void test_unseen_keys() {
  for (bool accumulate : {false, true}) {
    Case c;
    c.B = 2;
    c.Tq = 40;
    c.Tk = 300;
    c.hd = 10;
    c.causal = true;
    c.offsets = {100, 20};
    c.window_left = 9;
    Call call = make_call(c.named("unseen keys"));
    call.accumulate = accumulate;
    check_call(call);
    const std::vector<float> before = start_values(c.B * c.Tk * c.hd, accumulate);
    for (CpuTarget target : forge::usable_cpu_targets()) {
      const Gradients got = run(call, target);
      for (std::int64_t n = 0; n < c.B * c.Tk * c.hd; ++n) {
        const std::int64_t b = n / (c.Tk * c.hd), j = n / c.hd % c.Tk;
        bool seen = false;
        for (std::int64_t i = 0; i < c.Tq; ++i) seen |= c.sees(b, i, j);
        const std::size_t at = static_cast<std::size_t>(n);
        const float want = accumulate ? before[at] : 0.0f;
        if (!seen) CHECK(got.dk[at] == want && got.dv[at] == want);
      }
    }
  }
}

// With scores of one hot key in a hundred, p comes out as exactly 1 / l only if s - m is exactly 0, that
// is if the backward's scores are the forward's, bit for bit: then dv of a query's only key is its do.
void test_scores_match_forward() {
  for (std::int64_t hd : {1, 7, 64, 100, 128}) {
    for (double softcap : {0.0, 3.0}) {
      Case c;
      c.Tq = c.Tk = 333;
      c.H = 3;
      c.Hkv = 1;
      c.hd = hd;
      c.q_size = 10;
      c.causal = true;
      c.window_left = 0;  // one key a query: p must be exactly 1
      c.softcap = softcap;
      Call call = make_call(c.named("one key a query"));
      for (CpuTarget target : forge::usable_cpu_targets()) {
        const Gradients got = run(call, target);
        for (std::int64_t i = 0; i < c.Tq; ++i) {
          for (std::int64_t e = 0; e < hd; ++e) {
            float sum = 0;
            for (std::int64_t h = 0; h < c.H; ++h) sum += call.dout.at(0, i, h, e);
            CHECK_MSG(got.dv[static_cast<std::size_t>(i * hd + e)] == sum, "%s %s: row %d",
                      forge::cpu_target_name(target), c.name.c_str(), static_cast<int>(i));
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  test_shapes();
  test_options();
  test_extreme_scores();
  test_strides();
  test_non_finite();
  test_dead_rows();
  test_unseen_keys();
  test_scores_match_forward();
  return test_result();
}
