// Calls of the fused backward for tests, and a float64 oracle that shares nothing with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "attention_cases.h"
#include "check.h"
#include "core/cpu_target.h"
#include "cpu/attention.h"

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
};

struct Gradients {
  std::vector<float> dq, dk, dv;
};

inline Call make_call(const Case& c) {
  Call call{c, make_arrays(c), Array(c.B, c.Tq, c.H, c.hd), {}, false};
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
  out.dv = out.dk;
  problem.pass = forge::Pass::kBackward;
  problem.accumulate = call.accumulate;
  problem.operands[forge::kBufferDout] = call.dout.operand();
  if (!call.dlse.empty()) give(problem, forge::kBufferDlse, call.dlse);
  give(problem, forge::kBufferDq, out.dq);
  give(problem, forge::kBufferDk, out.dk);
  give(problem, forge::kBufferDv, out.dv);
  forge::cpu::attention_bwd(problem, target);
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
inline void oracle_pairs(const Call& call, std::int64_t b, std::int64_t h, std::int64_t i,
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

inline Oracle oracle(const Call& call) {
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
            const std::size_t q_at =
                static_cast<std::size_t>(((b * c.Tq + i) * c.H + h) * c.hd + e);
            const std::size_t k_at =
                static_cast<std::size_t>(((b * c.Tk + j) * c.Hkv + g) * c.hd + e);
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

inline void compare(const Call& call, const char* what, CpuTarget target,
                    const std::vector<float>& got, const std::vector<double>& want,
                    const std::vector<double>& error) {
  const std::vector<float> before =
      start_values(static_cast<std::int64_t>(got.size()), call.accumulate);
  for (std::size_t n = 0; n < got.size(); ++n) {
    const double expected = want[n] + (call.accumulate ? before[n] : 0);
    const double allowed = 2 * error[n] + 4 * kUnit * std::fabs(expected) + 1e-30;
    const bool good = std::isnan(expected)     ? std::isnan(got[n])
                      : std::isinf(expected)   ? !std::isfinite(got[n])
                      : std::isfinite(allowed) ? std::fabs(got[n] - expected) <= allowed
                                               : !std::isinf(got[n]);
    CHECK_MSG(good, "%s %s: %s[%d, channel %d] is %.9g, not %.9g (%.1e allowed)",
              forge::cpu_target_name(target), call.c.name.c_str(), what,
              static_cast<int>(n / static_cast<std::size_t>(call.c.hd)),
              static_cast<int>(n % static_cast<std::size_t>(call.c.hd)), got[n], expected, allowed);
  }
}

}  // namespace forge_test
