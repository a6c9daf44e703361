// Rows of activations on their way to the weights: a norm or a gate, then the order in which the weights come; and outputs on
// their way to memory.
#pragma once

#include <algorithm>

#include "weights.h"

INLINE vf gelu_tanh(vf x) { return 0.5f * x * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x))); }
INLINE vf xielu(vf x, const float* c) {
  return c[2] * x + (x > 0 ? c[0] * x * x : c[1] * (exp_fast(x) - 1.0f - x));
}
INLINE vf silu(vf x) { return x / (1.0f + exp_fast(-x)); }

struct Stats { float mean, scale; };

static Stats row_stats(const LinearArgs& a, const float* x) {
  if (a.prologue != kRmsNorm && a.prologue != kLayerNorm) return {0.0f, 1.0f};
  vf s{}, q{};
  float tail = 0, tail_q = 0, mean = 0;
  const int64_t whole = a.k - a.k % LANES;
  if (a.prologue == kLayerNorm) {
    for (int64_t i = 0; i < whole; i += LANES) s += load(x + i);
    for (int64_t i = whole; i < a.k; i++) tail += x[i];
    mean = (sum(s) + tail) / a.k;
  }
  for (int64_t i = 0; i < whole; i += LANES) {
    const vf d = load(x + i) - mean;
    q += d * d;
  }
  for (int64_t i = whole; i < a.k; i++) tail_q += (x[i] - mean) * (x[i] - mean);
  return {mean, 1.0f / std::sqrt((sum(q) + tail_q) / a.k + a.eps)};
}

INLINE vf prologue(const LinearArgs& a, const float* x, int64_t i, Stats s) {
  vf v = load(x + i);
  switch (a.prologue) {
    case kRmsNorm: return load(a.gamma + i) * (v * s.scale);
    case kLayerNorm: v = (v - s.mean) * s.scale * load(a.gamma + i); return a.beta ? v + load(a.beta + i) : v;
    case kSwiGlu: return silu(v) * load(x + a.k + i);
    case kGeGluTanh: return gelu_tanh(v) * load(x + a.k + i);
    default: return v;
  }
}

// Whole steps of a row through the prologue into `out`, parts `apart` floats apart, in the order of the weights; their end.
template <class F>
INLINE float* pack_steps(const LinearArgs& a, const float* x, float* out, int64_t apart, int64_t columns, Stats s) {
  for (int64_t i = 0; i < columns; i += kPair, out += F::kPutParts * apart)
    F::put(out, apart, prologue(a, x, i, s), prologue(a, x, i + LANES, s));
  return out;
}

// A row through the prologue, and zeros to the end of its last step. One copy, so that its roundings are the same everywhere.
template <class F>
__attribute__((noinline)) void pack(const LinearArgs& a, const float* x, float* out, int64_t apart) {
  const Stats s = row_stats(a, x);
  const int64_t count = a.k % kStep, whole = a.k - count;
  out = pack_steps<F>(a, x, out, apart, whole, s);
  if (!count) return;
  LinearArgs one = a;
  float xs[2 * kStep] = {}, gamma[kStep] = {}, beta[kStep] = {};
  memcpy(xs, x + whole, count * sizeof(float));
  if (a.prologue >= kSwiGlu) memcpy(xs + kStep, x + a.k + whole, count * sizeof(float));
  if (a.gamma) memcpy(gamma, a.gamma + whole, count * sizeof(float));
  if (a.beta) memcpy(beta, a.beta + whole, count * sizeof(float));
  one.k = kStep, one.gamma = gamma, one.beta = a.beta ? beta : nullptr;
  pack_steps<F>(one, xs, out, apart, kStep, s);
}

INLINE int64_t parts_of(int64_t size, int64_t most) { return (size + most - 1) / most; }

constexpr int64_t kShareFrom = 32;  // activation rows that threads pack for each other

// The `floats` numbers that pack(i, numbers) makes of m activation rows, for each i below `count`. Of few rows, each thread packs
// all for itself, which is cheaper than a barrier and than fetching another core's lines.
template <class Pack>
float* packed_rows(const Team& team, int64_t m, int64_t count, int64_t floats, std::vector<vf>& own, Pack pack) {
  const bool share = team.size > 1 && m >= kShareFrom;
  if (!share) own.resize(parts_of(floats, LANES));
  float* out = share ? team.shared(floats) : (float*)own.data();
  for (int64_t i = share ? team.id : 0; i < count; i += share ? team.size : 1) pack(i, out);
  if (share) team.wait();
  return out;
}

INLINE vf load_some(const float* p, int64_t count) {
  if (count >= LANES) return load(p);
  float t[LANES] = {};
  memcpy(t, p, count * sizeof(float));
  return load(t);
}

INLINE void store_some(float* p, int64_t count, vf v) {
  if (count >= LANES) return store(p, v);
  float t[LANES];
  store(t, v);
  memcpy(p, t, count * sizeof(float));
}

// Up to LANES outputs of the row `y`, from n on.
INLINE void write(const LinearArgs& a, float* y, int64_t n, int64_t count, vf v) {
  if (a.dtype == kInt8 || a.dtype == kW8A8) v *= load_some((const float*)a.scales + n, count);
  if (a.bias) v += load_some(a.bias + n, count);
  if (a.activation == kRelu) v = v > 0 ? v : vf{};
  else if (a.activation == kGeluTanh) v = gelu_tanh(v);
  else if (a.activation == kReluSquared) v = v > 0 ? v * v : vf{};
  else if (a.activation == kXielu) v = xielu(v, a.constants);
  if (a.accumulate) v += load_some(y + n, count);
  store_some(y + n, count, v);
}
