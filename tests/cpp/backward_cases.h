// Calls of the fused backward for tests, and a float64 oracle that shares nothing with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "check.h"
#include "core/cpu_target.h"
#include "core/thread_pool.h"
#include "cpu/attention.h"
#include "forward_checks.h"

namespace forge_test {

using forge::CpuTarget;

constexpr float kUnset = 12345.0f;

// What the backward takes beyond q, k and v, and where it puts its results.
struct Call {
  Case c;
  Arrays in;
  Array dout;
  std::vector<float> dlse;  // empty: none
  bool accumulate = false;
  PairValues dbias = {}, dsinks = {};  // what they are to be written into, if they are wanted
};

struct Gradients {
  std::vector<float> dq, dk, dv;
  PairValues dbias, dsinks;
};

inline bool same_bits(const Gradients& a, const Gradients& b) {
  return same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv) &&
         a.dbias.bytes() == b.dbias.bytes() && a.dsinks.bytes() == b.dsinks.bytes();
}

inline Call make_call(const Case& c) {
  Call call{c, make_arrays(c), Array(c.B, c.Tq, c.H, c.value_dim()), {}};
  call.dout.randomize(4, 1);
  return call;
}

inline void add_dlse(Call& call) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  call.dlse.resize(static_cast<std::size_t>(call.c.B * call.c.H * call.c.Tq));
  for (float& x : call.dlse) x = normal(random);
}

inline std::vector<float> start_values(std::int64_t count, bool accumulate) {
  std::vector<float> values(static_cast<std::size_t>(count), kUnset);
  if (accumulate) {
    for (std::size_t n = 0; n < values.size(); ++n)
      values[n] = 0.25f * static_cast<float>(n % 7) - 0.5f;
  }
  return values;
}

// Of a gradient with free axes; every type holds them.
inline void set_start_values(PairValues& values, bool accumulate) {
  int n = 0;
  values.fill([&](auto...) {
    return accumulate ? 0.25f * static_cast<float>(n++ % 7) - 0.5f : std::nanf("");
  });
}

inline Gradients run(const Call& call, CpuTarget target) {
  const Case& c = call.c;
  ForwardResult forward = run_forward(c, call.in, target);
  forge::Problem problem = problem_of(c, call.in);
  give(problem, forge::kBufferO, forward.o);
  give(problem, forge::kBufferRowMax, forward.row_max);
  give(problem, forge::kBufferRowSum, forward.row_sum);
  Gradients out;
  out.dq = start_values(c.B * c.Tq * c.H * c.hd, call.accumulate);
  out.dk = start_values(c.B * c.Tk * c.Hkv * c.hd, call.accumulate);
  out.dv = start_values(c.B * c.Tk * c.Hkv * c.value_dim(), call.accumulate);
  out.dbias = call.dbias;
  out.dsinks = call.dsinks;
  problem.pass = forge::Pass::kBackward;
  problem.accumulate = call.accumulate;
  problem.operands[forge::kBufferDout] = call.dout.operand();
  if (!call.dlse.empty()) give(problem, forge::kBufferDlse, call.dlse);
  give(problem, forge::kBufferDq, out.dq);
  give(problem, forge::kBufferDk, out.dk);
  give(problem, forge::kBufferDv, out.dv);
  const std::pair<forge::BufferIndex, PairValues*> broadcast[] = {
      {forge::kBufferDbias, &out.dbias}, {forge::kBufferDsinks, &out.dsinks}};
  for (const auto& [slot, values] : broadcast) {
    if (!values->given()) continue;
    set_start_values(*values, call.accumulate);
    problem.operands[slot] = values->operand();
  }
  forge::cpu::attention_bwd(problem, target);
  for (const auto& [slot, values] : broadcast) {
    if (values->given()) values->read_back();
  }
  return out;
}

// Gradients in float64, and for each a bound on its float32 error.
struct Oracle {
  std::vector<double> dq, dk, dv, dq_error, dk_error, dv_error;
  std::vector<double> dbias, dbias_error, dsinks, dsinks_error;
};

constexpr double kUnit = 0x1p-24;

struct OraclePair {
  double p, ds, p_error, ds_error;
  double dbias, dbias_error;  // ds without the slope of a softcap
};

// What a row gives dsinks.
struct OracleSink {
  double gradient, error;
};

// p and ds of the visible pairs of one row; the others stay zero.
inline OracleSink oracle_pairs(const Call& call, std::int64_t b, std::int64_t h, std::int64_t i,
                               std::vector<OraclePair>& pairs) {
  const Case& c = call.c;
  const std::int64_t g = h / (c.H / c.Hkv);
  const std::int64_t hv = c.value_dim();
  std::vector<double> o(static_cast<std::size_t>(hv));
  const OracleRow row = oracle_row(c, call.in, b, h, i, o.data());
  double d = 0, d_size = 0;
  for (std::int64_t e = 0; row.live && e < hv; ++e) {
    const double term = call.dout.at(b, i, h, e) * o[static_cast<std::size_t>(e)];
    d += term;
    d_size += std::fabs(call.dout.at(b, i, h, e)) * row.value_size;
  }
  if (!call.dlse.empty()) d -= call.dlse[static_cast<std::size_t>((b * c.H + h) * c.Tq + i)];
  const double roundings = std::sqrt(static_cast<double>(std::max(c.hd, hv))) + 8;
  for (std::int64_t j = 0; j < c.Tk; ++j) {
    OraclePair& pair = pairs[static_cast<std::size_t>(j)];
    pair = {0, 0, 0, 0, 0, 0};
    if (!row.live || !c.sees(b, i, j) || !call.in.shows(b, h, i, j)) continue;
    double x = 0, dp = 0, dp_size = 0;
    for (std::int64_t e = 0; e < c.hd; ++e) {
      x += static_cast<double>(call.in.q.at(b, i, h, e)) * call.in.k.at(b, j, g, e);
    }
    for (std::int64_t e = 0; e < hv; ++e) {
      const double term = static_cast<double>(call.dout.at(b, i, h, e)) * call.in.v.at(b, j, g, e);
      dp += term;
      dp_size += std::fabs(term);
    }
    x *= c.used_scale();
    const double t = c.softcap > 0 ? std::tanh(x / c.softcap) : 0;
    double s = c.softcap > 0 ? c.softcap * t : x;
    if (call.in.bias.given()) s += call.in.bias.at(b, h, i, j);
    pair.p = std::exp(s - row.m) / row.l;
    if (pair.p * row.l < 0x1p-126) pair.p = 0;
    const double slope = 1 - t * t;
    pair.dbias = pair.p * (dp - d);
    pair.ds = pair.dbias * slope;
    const double relative = 2 * row.score_error + (8 + std::min(88.0, row.m - s)) * kUnit;
    pair.p_error = pair.p * relative;
    const double size = dp_size + d_size + std::fabs(d);
    pair.ds_error = pair.p * ((relative + roundings * kUnit) * size + 2 * row.score_error * d_size);
    pair.dbias_error = pair.ds_error;
    if (c.softcap > 0) pair.ds_error += pair.p * size * 6 * (kUnit + row.score_error / c.softcap);
  }
  const double sink = call.in.sinks.given() ? call.in.sinks.at(b, h, i) : -INFINITY;
  if (sink == -INFINITY) return {0, 0};
  const double p = std::exp(sink - row.m) / row.l;
  const double relative = 2 * row.score_error + (8 + roundings + row.m - sink) * kUnit;
  return {-p * d, p * (relative * (d_size + std::fabs(d)) + 2 * row.score_error * d_size)};
}

// Where (b, h, i, j) is among the elements of an array that may lack axes.
inline std::size_t place_in(const PairValues::Sizes& shape, const PairValues::Sizes& at) {
  std::int64_t place = 0;
  for (std::size_t axis = 0; axis < 4; ++axis) {
    place = place * shape[axis] + std::min(at[axis], shape[axis] - 1);
  }
  return static_cast<std::size_t>(place);
}

inline std::size_t elements_of(const PairValues& values) {
  const PairValues::Sizes& shape = values.shape();
  return static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]);
}

inline Oracle oracle(const Call& call) {
  const Case& c = call.c;
  Oracle r;
  r.dq.assign(static_cast<std::size_t>(c.B * c.Tq * c.H * c.hd), 0);
  r.dk.assign(static_cast<std::size_t>(c.B * c.Tk * c.Hkv * c.hd), 0);
  const std::int64_t hv = c.value_dim();
  r.dk_error = r.dk;
  r.dv.assign(static_cast<std::size_t>(c.B * c.Tk * c.Hkv * hv), 0);
  r.dv_error = r.dv;
  r.dq_error = r.dq;
  r.dbias.assign(elements_of(call.dbias), 0);
  r.dsinks.assign(elements_of(call.dsinks), 0);
  r.dbias_error = r.dbias;
  r.dsinks_error = r.dsinks;
  std::vector<OraclePair> pairs(static_cast<std::size_t>(c.Tk));
  const double scale = c.used_scale(), size = std::fabs(scale);
  const double sum = (8 + std::sqrt(static_cast<double>(c.Tk + c.Tq))) * kUnit;
  for (std::int64_t b = 0; b < c.B; ++b)
    for (std::int64_t h = 0; h < c.H; ++h)
      for (std::int64_t i = 0; i < c.Tq; ++i) {
        const std::int64_t g = h / (c.H / c.Hkv);
        const OracleSink sink = oracle_pairs(call, b, h, i, pairs);
        if (call.dsinks.given()) {
          const std::size_t at = place_in(call.dsinks.shape(), {b, h, i, 0});
          r.dsinks[at] += sink.gradient;
          r.dsinks_error[at] += sink.error + sum * std::fabs(sink.gradient);
        }
        for (std::int64_t j = 0; j < c.Tk; ++j) {
          if (!c.sees(b, i, j) || !call.in.shows(b, h, i, j)) continue;
          const OraclePair& pair = pairs[static_cast<std::size_t>(j)];
          const double ds_error = size * (pair.ds_error + sum * std::fabs(pair.ds));
          if (call.dbias.given()) {
            const std::size_t at = place_in(call.dbias.shape(), {b, h, i, j});
            r.dbias[at] += pair.dbias;
            r.dbias_error[at] += pair.dbias_error + sum * std::fabs(pair.dbias);
          }
          for (std::int64_t e = 0; e < hv; ++e) {
            const std::size_t v_at =
                static_cast<std::size_t>(((b * c.Tk + j) * c.Hkv + g) * hv + e);
            const double dout = call.dout.at(b, i, h, e);
            r.dv[v_at] += pair.p * dout;
            r.dv_error[v_at] += (pair.p_error + sum * pair.p) * std::fabs(dout);
          }
          for (std::int64_t e = 0; e < c.hd; ++e) {
            const std::size_t q_at =
                static_cast<std::size_t>(((b * c.Tq + i) * c.H + h) * c.hd + e);
            const std::size_t k_at =
                static_cast<std::size_t>(((b * c.Tk + j) * c.Hkv + g) * c.hd + e);
            const double q = call.in.q.at(b, i, h, e), k = call.in.k.at(b, j, g, e);
            r.dq[q_at] += scale * pair.ds * k;
            r.dk[k_at] += scale * pair.ds * q;
            r.dq_error[q_at] += ds_error * std::fabs(k);
            r.dk_error[k_at] += ds_error * std::fabs(q);
          }
        }
      }
  return r;
}

// An element against the value it should have.
inline void compare_element(const Call& call, const std::string& what, CpuTarget target, float got,
                            double expected, double allowed) {
  const bool good = std::isnan(expected)     ? std::isnan(got)
                    : std::isinf(expected)   ? !std::isfinite(got)
                    : std::isfinite(allowed) ? std::fabs(got - expected) <= allowed
                                             : !std::isinf(got);
  CHECK_MSG(good, "%s %s: %s is %.9g, not %.9g (%.1e allowed)", forge::cpu_target_name(target),
            call.c.name.c_str(), what.c_str(), got, expected, allowed);
}

inline double allowed_error(double error, double expected) {
  return 2 * error + 4 * kUnit * std::fabs(expected) + 1e-30;
}

inline void compare(const Call& call, const char* what, CpuTarget target,
                    const std::vector<float>& got, const std::vector<double>& want,
                    const std::vector<double>& error) {
  const std::vector<float> before =
      start_values(static_cast<std::int64_t>(got.size()), call.accumulate);
  for (std::size_t n = 0; n < got.size(); ++n) {
    const double expected = want[n] + (call.accumulate ? before[n] : 0);
    compare_element(call, what + ("[" + std::to_string(n) + "]"), target, got[n], expected,
                    allowed_error(error[n], expected));
  }
}

// A half is rounded once more, to `half` of its value or of the smallest normal number.
inline void compare(const Call& call, const char* what, CpuTarget target, const PairValues& got,
                    const std::vector<double>& want, const std::vector<double>& error) {
  if (!got.given()) return;
  PairValues before = got;
  set_start_values(before, call.accumulate);
  const double half = got.dtype() == forge::DType::kFloat16    ? 0x1p-11
                      : got.dtype() == forge::DType::kBFloat16 ? 0x1p-8
                                                               : 0;
  PairValues copy = got;
  std::size_t n = 0;
  copy.fill([&](std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
    const double expected = want[n] + (call.accumulate ? before.at(b, h, i, j) : 0);
    const double allowed = allowed_error(error[n], expected);
    compare_element(call, what + ("[" + std::to_string(n) + "]"), target, got.at(b, h, i, j),
                    expected, allowed + half * (std::fabs(expected) + allowed + 0x1p-14));
    ++n;
    return 0.0f;
  });
}

// On every target against the oracle, and the same bits at any number of threads.
inline void check_call(const Call& call) {
  if (!takes_next_case()) return;
  const Oracle want = oracle(call);
  for (CpuTarget target : forge::usable_cpu_targets()) {
    forge::set_num_threads(2);
    const Gradients got = run(call, target);
    compare(call, "dq", target, got.dq, want.dq, want.dq_error);
    compare(call, "dk", target, got.dk, want.dk, want.dk_error);
    compare(call, "dv", target, got.dv, want.dv, want.dv_error);
    compare(call, "dbias", target, got.dbias, want.dbias, want.dbias_error);
    compare(call, "dsinks", target, got.dsinks, want.dsinks, want.dsinks_error);
    for (int threads : {1, 3, 8}) {
      forge::set_num_threads(threads);
      CHECK_MSG(same_bits(got, run(call, target)), "%s %s: other bits on %d threads",
                forge::cpu_target_name(target), call.c.name.c_str(), threads);
    }
  }
}

}  // namespace forge_test
