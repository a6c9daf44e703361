// Attention of token rows over paged keys and values: positions and norms, append, attend.
//
// A row is one token of one sequence (a slot): a decode step has one row per sequence, a prompt has one row per token. All
// rows of a call append before any attends, and each attends to its own positions 0..p, so prompts and decoding share this
// code and a row's result does not depend on what else is in the call.
//
// pages[id]: [2 (keys, values), kv_heads, page_tokens, dim], bf16 or fp32.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "vectors.h"

constexpr int64_t kPair = 2 * LANES;

namespace {

struct Place {
  int64_t slot, position;
};

template <class T>
INLINE T* page_of(const AttentionArgs& a, Place p, int64_t position, int64_t kind, int64_t head) {
  const int64_t id = a.table[p.slot * a.table_width + position / a.page_tokens];
  const int64_t rows = (id * 2 + kind) * a.kv_heads + head;
  return (T*)a.pages + rows * a.page_tokens * a.dim;
}

void rotate(const AttentionArgs& a, float* x, const float* gamma, int64_t position) {
  const int64_t half = a.dim / 2;
  if (gamma) {
    float square = 0;
    for (int64_t i = 0; i < a.dim; i++) square += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(square / a.dim + a.eps);
    for (int64_t i = 0; i < a.dim; i++) x[i] = gamma[i] * (x[i] * scale);
  }
  if (!a.cos) return;
  const float *__restrict c = a.cos + position * half, *__restrict s = a.sin + position * half;
  float *__restrict low = x, *__restrict high = x + half;
  for (int64_t i = 0; i < half; i++) {
    const float first = low[i], second = high[i];
    low[i] = first * c[i] - second * s[i];
    high[i] = second * c[i] + first * s[i];
  }
}

template <class T>
void append(const AttentionArgs& a, int64_t row) {
  const Place p{a.slots[row], a.positions[row]};
  float* x = a.qkv + row * (a.heads + 2 * a.kv_heads) * a.dim;
  for (int64_t h = 0; h < a.heads; h++) rotate(a, x + h * a.dim, a.q_gamma, p.position);
  for (int64_t h = 0; h < a.kv_heads; h++) {
    float* k = x + (a.heads + h) * a.dim;
    const float* v = k + a.kv_heads * a.dim;
    rotate(a, k, a.k_gamma, p.position);
    const int64_t at = p.position % a.page_tokens * a.dim;
    T* to_k = page_of<T>(a, p, p.position, 0, h) + at;
    T* to_v = page_of<T>(a, p, p.position, 1, h) + at;
    for (int64_t i = 0; i < a.dim; i++) narrow(k[i], to_k + i);
    for (int64_t i = 0; i < a.dim; i++) narrow(v[i], to_v + i);
  }
}

// In the order in which stored keys and values unpack (see vectors.h), and back.
template <class T>
INLINE int64_t unpacked(int64_t i, int64_t whole) {
  if (sizeof(T) == 4 || i >= whole) return i;
  const int64_t j = i % kPair;
  return i - j + (j < LANES ? 2 * j : 2 * (j - LANES) + 1);
}

template <class T>
INLINE float dot(const float* q, const T* k, int64_t dim, int64_t whole) {
  vf even{}, odd{};
  for (int64_t i = 0; i < whole; i += kPair) {
    even = fma(load_even(k + i), load(q + i), even);
    odd = fma(load_odd(k + i), load(q + i + LANES), odd);
  }
  float s = sum(even + odd);
  for (int64_t i = whole; i < dim; i++) s += q[i] * widen(k[i]);
  return s;
}

// P pairs of vectors at a time: enough independent sums to hide the latency of an FMA.
template <class T, int P>
INLINE void add_scaled_block(float* acc, const float* p, const T* v, int64_t count, int64_t dim) {
  vf even[P], odd[P];
#pragma GCC unroll 8
  for (int j = 0; j < P; j++) even[j] = load(acc + j * kPair), odd[j] = load(acc + j * kPair + LANES);
  for (int64_t t = 0; t < count; t++, v += dim) {
    const vf weight = splat(p[t]);
#pragma GCC unroll 8
    for (int j = 0; j < P; j++) {
      even[j] = fma(load_even(v + j * kPair), weight, even[j]);
      odd[j] = fma(load_odd(v + j * kPair), weight, odd[j]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < P; j++) store(acc + j * kPair, even[j]), store(acc + j * kPair + LANES, odd[j]);
}

template <class T>
INLINE void add_scaled(float* acc, const float* p, const T* v, int64_t count, int64_t dim, int64_t whole) {
  int64_t i = 0;
  for (; i + 4 * kPair <= whole; i += 4 * kPair) add_scaled_block<T, 4>(acc + i, p, v + i, count, dim);
  for (; i < whole; i += kPair) add_scaled_block<T, 1>(acc + i, p, v + i, count, dim);
  for (; i < dim; i++)
    for (int64_t t = 0; t < count; t++) acc[i] += p[t] * widen(v[t * dim + i]);
}

// Scores to weights that sum to one; `s` has room for one vector past `count`.
void softmax(float* s, int64_t count) {
  float most = s[0];
  for (int64_t i = 1; i < count; i++) most = std::max(most, s[i]);
  for (int64_t i = count; i < count + LANES; i++) s[i] = -1e30f;
  vf total{};
  for (int64_t i = 0; i < count; i += LANES) {
    const vf e = exp_fast(load(s + i) - most);
    store(s + i, e);
    total += e;
  }
  const float inverse = 1.0f / sum(total);
  for (int64_t i = 0; i < count; i += LANES) store(s + i, load(s + i) * inverse);
}

// The query heads of one key head, for one row.
template <class T>
void attend(const AttentionArgs& a, int64_t row, int64_t head, std::vector<float>& scratch) {
  const Place p{a.slots[row], a.positions[row]};
  const int64_t group = a.heads / a.kv_heads, dim = a.dim, whole = dim - dim % kPair;
  const int64_t end = p.position + 1, begin = a.window ? std::max<int64_t>(0, end - a.window) : 0;
  const int64_t count = end - begin, stride = count + LANES;
  const int64_t width = (dim + LANES - 1) / LANES * LANES;
  scratch.assign(group * (stride + 2 * width) + LANES, 0.0f);
  float *scores = scratch.data(), *q = scores + group * stride, *acc = q + group * width;
  const float* from = a.qkv + (row * (a.heads + 2 * a.kv_heads) + head * group) * dim;
  for (int64_t g = 0; g < group; g++)
    for (int64_t i = 0; i < dim; i++) q[g * width + i] = a.scale * from[g * dim + unpacked<T>(i, whole)];
  for (int64_t t = begin; t < end;) {
    const int64_t offset = t % a.page_tokens, here = std::min(a.page_tokens - offset, end - t);
    const T* k = page_of<T>(a, p, t, 0, head) + offset * dim;
    for (int64_t j = 0; j < here; j++)
      for (int64_t g = 0; g < group; g++) scores[g * stride + t - begin + j] = dot(q + g * width, k + j * dim, dim, whole);
    t += here;
  }
  for (int64_t g = 0; g < group; g++) softmax(scores + g * stride, count);
  for (int64_t t = begin; t < end;) {
    const int64_t offset = t % a.page_tokens, here = std::min(a.page_tokens - offset, end - t);
    const T* v = page_of<T>(a, p, t, 1, head) + offset * dim;
    for (int64_t g = 0; g < group; g++) add_scaled(acc + g * width, scores + g * stride + t - begin, v, here, dim, whole);
    t += here;
  }
  float* to = a.out + (row * a.heads + head * group) * dim;
  for (int64_t g = 0; g < group; g++)
    for (int64_t i = 0; i < dim; i++) to[g * dim + unpacked<T>(i, whole)] = acc[g * width + i];
}

}  // namespace

void append_share(const AttentionArgs& a, const Team& team) {
  for (int64_t row = team.id; row < a.n; row += team.size) {
    if (a.dtype == kBFloat16) append<uint16_t>(a, row);
    else append<float>(a, row);
  }
}

void attend_share(const AttentionArgs& a, const Team& team) {
  static thread_local std::vector<float> scratch;
  for (int64_t task = team.id; task < a.n * a.kv_heads; task += team.size) {
    if (a.dtype == kBFloat16) attend<uint16_t>(a, task / a.kv_heads, task % a.kv_heads, scratch);
    else attend<float>(a, task / a.kv_heads, task % a.kv_heads, scratch);
  }
}
