// The materialized kernels, bit for bit, against the order of operations they promise: one rounding
// an operation, ascending keys, fma where the order says fma. Every CPU target must give these
// bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "core/thread_pool.h"
#include "materialized/attention.h"
#include "operand_of.h"
#include "shared/attn_math.h"

namespace {

struct Options {
  int causal = 0;
  std::int64_t left = -1, right = -1;
  float softcap = 0, scale = 0.5f;
  std::int64_t offset = 0, key_start = 0, key_end = 1 << 20;
};

// Arrays of one problem, contiguous [B, T, heads, hd].
struct Arrays {
  std::int64_t B, Tq, Tk, H, Hkv, hd;
  std::vector<float> q, k, v, dout, dlse, o, p, m, l, d, dq, dk, dv;

  Arrays(std::int64_t B_, std::int64_t Tq_, std::int64_t Tk_, std::int64_t H_, std::int64_t Hkv_,
         std::int64_t hd_)
      : B(B_), Tq(Tq_), Tk(Tk_), H(H_), Hkv(Hkv_), hd(hd_) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0, 2);
    for (auto* array : {&q, &dout, &o, &dq})
      array->resize(static_cast<std::size_t>(B * Tq * H * hd));
    for (auto* array : {&k, &v, &dk, &dv})
      array->resize(static_cast<std::size_t>(B * Tk * Hkv * hd));
    for (auto* array : {&dlse, &m, &l, &d}) array->resize(static_cast<std::size_t>(B * H * Tq));
    p.resize(static_cast<std::size_t>(B * H * Tq * Tk), -1.0f);
    for (auto* array : {&q, &k, &v, &dout, &dlse, &dq, &dk, &dv}) {
      for (float& value : *array) value = normal(random);
    }
  }

  std::size_t query(std::int64_t b, std::int64_t i, std::int64_t h) const {
    return static_cast<std::size_t>(((b * Tq + i) * H + h) * hd);
  }
  std::size_t key(std::int64_t b, std::int64_t j, std::int64_t hkv) const {
    return static_cast<std::size_t>(((b * Tk + j) * Hkv + hkv) * hd);
  }
  std::size_t row(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return static_cast<std::size_t>((b * H + h) * Tq + i);
  }
};

bool visible(const Arrays& a, const Options& opt, std::int64_t i, std::int64_t j) {
  const std::int64_t pos = i + opt.offset;
  return (opt.causal == 0 || j <= pos) && (opt.left < 0 || j >= pos - opt.left) &&
         (opt.right < 0 || j <= pos + opt.right) && j >= opt.key_start &&
         j < std::min(opt.key_end, a.Tk);
}

float chain(const float* x, const float* y, std::int64_t hd) {
  float sum = 0;
  for (std::int64_t c = 0; c < hd; ++c) sum = std::fma(x[c], y[c], sum);
  return sum;
}

void expected_forward(Arrays& a, const Options& opt) {
  for (std::int64_t b = 0; b < a.B; ++b) {
    for (std::int64_t h = 0; h < a.H; ++h) {
      for (std::int64_t i = 0; i < a.Tq; ++i) {
        const std::int64_t hkv = h / (a.H / a.Hkv);
        float* p = a.p.data() + a.row(b, h, i) * static_cast<std::size_t>(a.Tk);
        float m = -std::numeric_limits<float>::infinity(), l = 0;
        for (std::int64_t j = 0; j < a.Tk; ++j) {
          if (!visible(a, opt, i, j)) continue;
          float s = chain(&a.q[a.query(b, i, h)], &a.k[a.key(b, j, hkv)], a.hd) * opt.scale;
          if (opt.softcap > 0) s = opt.softcap * forge::attn_tanh(s / opt.softcap);
          p[j] = s;
          m = s > m ? s : m;
        }
        for (std::int64_t j = 0; j < a.Tk; ++j) {
          if (!visible(a, opt, i, j)) continue;
          p[j] = forge::attn_exp(p[j] - m);
          l = l + p[j];
        }
        float* o = &a.o[a.query(b, i, h)];
        for (std::int64_t c = 0; c < a.hd; ++c) o[c] = 0;
        for (std::int64_t j = 0; j < a.Tk; ++j) {
          if (!visible(a, opt, i, j)) {
            p[j] = 0;
            continue;
          }
          p[j] = p[j] * (1.0f / l);
          const float* v = &a.v[a.key(b, j, hkv)];
          for (std::int64_t c = 0; c < a.hd; ++c) o[c] = std::fma(p[j], v[c], o[c]);
        }
        a.m[a.row(b, h, i)] = m;
        a.l[a.row(b, h, i)] = l;
        a.d[a.row(b, h, i)] = chain(&a.dout[a.query(b, i, h)], o, a.hd) - a.dlse[a.row(b, h, i)];
      }
    }
  }
}

float expected_ds(const Arrays& a, const Options& opt, std::size_t row, std::size_t query,
                  std::size_t key, std::int64_t j) {
  const float p = a.p[row * static_cast<std::size_t>(a.Tk) + static_cast<std::size_t>(j)];
  const float dp = chain(&a.dout[query], &a.v[key], a.hd);
  float ds = (p * (dp - a.d[row])) * opt.scale;
  if (opt.softcap > 0) {
    const float x = chain(&a.q[query], &a.k[key], a.hd) * opt.scale;
    const float t = forge::attn_tanh(x / opt.softcap);
    ds = ds * std::fma(-t, t, 1.0f);
  }
  return ds;
}

void expected_backward(Arrays& a, const Options& opt) {
  const std::int64_t rep = a.H / a.Hkv;
  for (std::int64_t b = 0; b < a.B; ++b) {
    for (std::int64_t h = 0; h < a.H; ++h) {
      // dk and dv see the heads of a group, then the queries, in ascending order: so does this
      // loop.
      for (std::int64_t i = 0; i < a.Tq; ++i) {
        for (std::int64_t j = 0; j < a.Tk; ++j) {
          if (!visible(a, opt, i, j)) continue;
          const std::size_t query = a.query(b, i, h), key = a.key(b, j, h / rep);
          const std::size_t row = a.row(b, h, i);
          const float ds = expected_ds(a, opt, row, query, key, j);
          const float p = a.p[row * static_cast<std::size_t>(a.Tk) + static_cast<std::size_t>(j)];
          for (std::size_t c = 0; c < static_cast<std::size_t>(a.hd); ++c) {
            a.dq[query + c] = std::fma(ds, a.k[key + c], a.dq[query + c]);
            a.dk[key + c] = std::fma(ds, a.q[query + c], a.dk[key + c]);
            a.dv[key + c] = std::fma(p, a.dout[query + c], a.dv[key + c]);
          }
        }
      }
    }
  }
}

forge::Problem problem_of(const Arrays& a, const Options& opt) {
  forge::Problem problem;
  problem.family = forge::Family::kMaterialized;
  problem.B = a.B;
  problem.Tq = a.Tq;
  problem.Tk = a.Tk;
  problem.window_left = opt.left;
  problem.window_right = opt.right;
  problem.H = static_cast<forge::Int32>(a.H);
  problem.Hkv = static_cast<forge::Int32>(a.Hkv);
  problem.hd = problem.hv = static_cast<forge::Int32>(a.hd);
  problem.causal = opt.causal != 0;
  problem.scale = opt.scale;
  problem.softcap = opt.softcap;
  problem.ranges.assign(static_cast<std::size_t>(a.B),
                        {opt.offset, opt.key_start, std::min(opt.key_end, a.Tk)});
  return problem;
}

void run(Arrays& a, const Options& opt, forge::CpuTarget target) {
  forge::Problem problem = problem_of(a, opt);
  const std::pair<forge::BufferIndex, const std::vector<float>*> given[] = {
      {forge::kBufferQ, &a.q},      {forge::kBufferK, &a.k},       {forge::kBufferV, &a.v},
      {forge::kBufferO, &a.o},      {forge::kBufferP, &a.p},       {forge::kBufferRowMax, &a.m},
      {forge::kBufferRowSum, &a.l}, {forge::kBufferDout, &a.dout}, {forge::kBufferDlse, &a.dlse},
      {forge::kBufferDRow, &a.d},   {forge::kBufferDq, &a.dq},     {forge::kBufferDk, &a.dk},
      {forge::kBufferDv, &a.dv}};
  for (const auto& [slot, values] : given) forge_test::give(problem, slot, *values);
  for (const forge::Pass pass :
       {forge::Pass::kForward, forge::Pass::kBwdD, forge::Pass::kBwdDq, forge::Pass::kBwdDkv}) {
    problem.pass = pass;
    forge::materialized::run(problem, target);
  }
}

void check_case(const Arrays& inputs, const Options& opt) {
  Arrays expected = inputs;
  expected_forward(expected, opt);
  expected_backward(expected, opt);
  for (const forge::CpuTarget target : forge::usable_cpu_targets()) {
    for (const int threads : {1, 3}) {
      forge::set_num_threads(threads);
      Arrays got = inputs;
      run(got, opt, target);
      const char* name = forge::cpu_target_name(target);
      CHECK_MSG(got.o == expected.o, "o on %s", name);
      CHECK_MSG(got.p == expected.p, "p on %s", name);
      CHECK_MSG(got.m == expected.m, "row_max on %s", name);
      CHECK_MSG(got.l == expected.l, "row_sum on %s", name);
      CHECK_MSG(got.d == expected.d, "d_row on %s", name);
      CHECK_MSG(got.dq == expected.dq, "dq on %s", name);
      CHECK_MSG(got.dk == expected.dk, "dk on %s", name);
      CHECK_MSG(got.dv == expected.dv, "dv on %s", name);
    }
  }
}

}  // namespace

int main() {
  const Arrays square(2, 9, 9, 6, 2, 5);
  const Arrays wide(1, 4, 11, 3, 3, 8);
  const Arrays tall(1, 11, 4, 4, 1, 1);
  for (const Arrays* arrays : {&square, &wide, &tall}) {
    const std::int64_t offset = arrays->Tk - arrays->Tq;
    for (const int causal : {0, 1}) {
      for (const float softcap : {0.0f, 3.0f}) {
        check_case(*arrays, {causal, -1, -1, softcap, 0.5f, offset});
        check_case(*arrays, {causal, 2, -1, softcap, 0.5f, offset});
        check_case(*arrays, {causal, 1, 2, softcap, -0.25f, offset});
        check_case(*arrays, {causal, 0, 0, softcap, 0.0f, 0});
        check_case(*arrays, {causal, -1, -1, softcap, 0.5f, offset, 1, 3});
        check_case(*arrays, {causal, 3, -1, softcap, 0.5f, -2});
      }
    }
  }
  return test_result();
}
