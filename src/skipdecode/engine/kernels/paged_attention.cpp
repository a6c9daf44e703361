// Attention of token rows over paged keys and values: positions and norms, append, attend.
//
// A row is one token of one sequence (a slot): a decode step has one row per sequence, a prompt has one row per token. All
// rows of a call append before any attends, and each attends to its own positions 0..p, so prompts and decoding share this
// code and a row's result does not depend on what else is in the call. On AVX-512 the rows of a prompt attend in blocks, to the
// same bits.
//
// pages[id]: [2 (keys, values), kv_heads, page_tokens, dim], bf16 or fp32.
#include <algorithm>
#include <vector>

#include "weights.h"

namespace {

template <class T>
INLINE T* page_of(const AttentionArgs& a, int64_t slot, int64_t position, int64_t kind, int64_t head) {
  const int64_t id = a.table[slot * a.table_width + position / a.page_tokens];
  const int64_t rows = (id * 2 + kind) * a.kv_heads + head;
  return (T*)a.pages + rows * a.page_tokens * a.dim;
}

void norm(const AttentionArgs& a, float* x, const float* gamma, int64_t columns) {
  float square = 0;
  for (int64_t i = 0; i < columns; i++) square += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(square / columns + a.eps);
  for (int64_t i = 0; i < columns; i++) x[i] = gamma[i] * (x[i] * scale);
}

void turn_head(const AttentionArgs& a, float* x, int64_t position) {
  if (!a.cos) return;
  const int64_t half = a.rotated / 2;
  const float *__restrict c = a.cos + position * half, *__restrict s = a.sin + position * half;
  const auto turn = [&](float& low, float& high, int64_t i) __attribute__((always_inline)) {
    const float first = low, second = high;
    low = first * c[i] - second * s[i];
    high = second * c[i] + first * s[i];
  };
  float *__restrict low = x, *__restrict high = x + half;
  for (int64_t i = 0; !a.pairs && i < half; i++) turn(low[i], high[i], i);
  for (int64_t i = 0; a.pairs && i < half; i++) turn(x[2 * i], x[2 * i + 1], i);
}

// Norms and rotates `heads` heads at `position`.
void rotate(const AttentionArgs& a, float* x, int64_t heads, const float* gamma, int64_t position) {
  if (gamma && a.norm == kWide) norm(a, x, gamma, heads * a.dim);
  for (int64_t h = 0; h < heads; h++, x += a.dim) {
    if (gamma && a.norm == kBeforeRotation) norm(a, x, gamma, a.dim);
    turn_head(a, x, position);
    if (gamma && a.norm == kAfterRotation) norm(a, x, gamma, a.dim);
  }
}

// Scores from products with keys.
INLINE vf scaled(const AttentionArgs& a, vf product) {
  const vf score = product * a.scale;
  return a.cap ? a.cap * tanh_of(score / a.cap) : score;
}

template <class T>
void append(const AttentionArgs& a, int64_t row) {
  const int64_t slot = a.slots[row], position = a.positions[row];
  float* x = a.qkv + row * (a.heads + 2 * a.kv_heads) * a.dim;
  rotate(a, x, a.heads, a.q_gamma, position);
  for (int64_t i = 0; a.q_scale && i < a.heads * a.dim; i++) x[i] *= a.q_scale[position];
  rotate(a, x + a.heads * a.dim, a.kv_heads, a.k_gamma, position);
  for (int64_t h = 0; h < 2 * a.kv_heads; h++) {  // heads of keys, then of values
    const float* from = x + (a.heads + h) * a.dim;
    T* to = page_of<T>(a, slot, position, h / a.kv_heads, h % a.kv_heads) + position % a.page_tokens * a.dim;
    for (int64_t i = 0; i < a.dim; i++) narrow(from[i], to + i);
  }
}

// Keys of type T are the weights of queries: in bf16 where the CPU multiplies that, else in fp32.
#ifdef HAS_BF16_DOT
template <class T>
using Keys = Weights<sizeof(T) == 2 ? kBFloat16 : kFloat32, sizeof(T) == 2>;
#else
template <class T>
using Keys = Weights<sizeof(T) == 2 ? kBFloat16 : kFloat32, false>;
#endif

template <class T>
void pack_query(const float* from, float* to, int64_t dim, int64_t whole) {
  std::copy(from + whole, from + dim, to + whole);
  for (int64_t i = 0; i < whole; i += kPair) Keys<T>::put(to + i, LANES, load(from + i), load(from + i + LANES));
}

// Lane sums of the product with one key.
template <class T>
INLINE vf product(const float* q, const T* k, int64_t whole) {
  using F = Keys<T>;
  vf sums[2] = {};
  for (int64_t i = 0; i < whole; i += kPair)
#pragma GCC unroll 2
    for (int p = 0; p < F::kPutParts; p++) sums[p] = F::add_product(F::part(k, i, p), load(q + i + p * LANES), sums[p]);
  return F::kPutParts == 2 ? sums[0] + sums[1] : sums[0];
}

// Scores of `count` keys that lie one after another, LANES at a time.
template <class T>
INLINE void score(const AttentionArgs& a, float* scores, const float* q, const T* k, int64_t count, int64_t whole) {
  const int64_t dim = a.dim;
  for (int64_t t = 0; t < count; t += LANES) {
    const int64_t here = std::min<int64_t>(LANES, count - t);
    vf products[LANES];
    // Past the last key, again the last one: its score is overwritten.
    for (int64_t j = 0; j < LANES; j++) products[j] = product(q, k + (t + std::min(j, here - 1)) * dim, whole);
    vf s = sums_of(products);
    if (whole < dim)
      for (int64_t j = 0; j < here; j++)
        for (int64_t i = whole; i < dim; i++) s[j] += q[i] * widen(k[(t + j) * dim + i]);
    store(scores + t, scaled(a, s));
  }
}

// acc[g] += the sum of `count` values, weighted by p[g], for G query heads and P pairs of vectors at a time. Two sums each, of
// values in turn: enough independent ones to hide the latency of an FMA, and the same for every G and P.
template <class T, int G, int P>
INLINE void add_scaled_block(float* acc, int64_t ldacc, const float* p, int64_t ldp, const T* v, int64_t count, int64_t dim) {
  vf even[2][G][P] = {}, odd[2][G][P] = {};
  const auto add = [&](int u, int64_t t) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int j = 0; j < P; j++) {
      const vf low = load_even(v + t * dim + j * kPair), high = load_odd(v + t * dim + j * kPair);
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) {
        const vf weight = splat(p[g * ldp + t]);
        even[u][g][j] = fma(low, weight, even[u][g][j]);
        odd[u][g][j] = fma(high, weight, odd[u][g][j]);
      }
    }
  };
  int64_t t = 0;
  for (; t + 2 <= count; t += 2) add(0, t), add(1, t + 1);
  if (t < count) add(0, t);
#pragma GCC unroll 8
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int j = 0; j < P; j++) {
      float* to = acc + g * ldacc + j * kPair;
      store(to, load(to) + (even[0][g][j] + even[1][g][j]));
      store(to + LANES, load(to + LANES) + (odd[0][g][j] + odd[1][g][j]));
    }
}

// Out of line: one copy, so that its roundings are the same wherever it is called.
template <class T>
__attribute__((noinline)) void add_scaled_tail(float* acc, const float* p, const T* v, int64_t count, int64_t dim, int64_t i) {
  for (; i < dim; i++)
    for (int64_t t = 0; t < count; t++) acc[i] += p[t] * widen(v[t * dim + i]);
}

template <class T, int G, int P>
INLINE void add_scaled(float* acc, int64_t ldacc, const float* p, int64_t ldp, const T* v, int64_t count, int64_t dim,
                       int64_t whole) {
  int64_t i = 0;
  for (; i + P * kPair <= whole; i += P * kPair) add_scaled_block<T, G, P>(acc + i, ldacc, p, ldp, v + i, count, dim);
  for (; i < whole; i += kPair) add_scaled_block<T, G, 1>(acc + i, ldacc, p, ldp, v + i, count, dim);
  for (int64_t g = 0; g < G && i < dim; g++) add_scaled_tail(acc + g * ldacc, p + g * ldp, v, count, dim, i);
}

// The same for `heads` query heads, G at a time as far as there are, then fewer.
template <class T, int G>
INLINE void add_values(float* acc, int64_t ldacc, const float* p, int64_t ldp, const T* v, int64_t count, int64_t dim,
                       int64_t whole, int64_t heads) {
  for (; heads >= G; heads -= G, acc += G * ldacc, p += G * ldp)
    add_scaled<T, G, G == 1 ? 2 : 1>(acc, ldacc, p, ldp, v, count, dim, whole);
  if constexpr (G > 1) add_values<T, G == 6 ? 3 : G - 1>(acc, ldacc, p, ldp, v, count, dim, whole, heads);
}

// Scores to weights that sum to one; `s` has room for one vector past `count`.
void softmax(float* s, int64_t count) {
  for (int64_t i = count; i < count + LANES; i++) s[i] = -1e30f;
  vf most = load(s), total{};
  for (int64_t i = LANES; i < count; i += LANES) most = larger(load(s + i), most);
  const float peak = largest_lane(most);
  for (int64_t i = 0; i < count; i += LANES) {
    const vf e = exp_fast(load(s + i) - peak);
    store(s + i, e);
    total += e;
  }
  const float inverse = 1.0f / sum(total);
  for (int64_t i = 0; i < count; i += LANES) store(s + i, load(s + i) * inverse);
}

// Calls work(position, count, keys or values) for every run of positions [begin, end) that lie in one page, and fetches the
// next page meanwhile.
template <class T, class Work>
INLINE void each_page(const AttentionArgs& a, int64_t slot, int64_t kind, int64_t head, int64_t begin, int64_t end, Work work) {
  for (int64_t t = begin; t < end;) {
    const int64_t offset = t % a.page_tokens, here = std::min(a.page_tokens - offset, end - t);
    if (t + here < end) {
      const char* next = (const char*)page_of<T>(a, slot, t + here, kind, head);
      for (int64_t i = 0; i < a.page_tokens * a.dim * (int64_t)sizeof(T); i += 64) __builtin_prefetch(next + i, 0, 2);
    }
    work(t, here, page_of<T>(a, slot, t, kind, head) + offset * a.dim);
    t += here;
  }
}

// From the order in which stored values unpack (see vectors.h).
template <class T>
void unpack(const float* from, float* to, int64_t dim, int64_t whole) {
  std::copy(from + whole, from + dim, to + whole);
  if (sizeof(T) == 4) return (void)std::copy(from, from + whole, to);
  for (int64_t i = 0; i < whole; i += kPair)
    for (int64_t j = 0; j < LANES; j++) to[i + 2 * j] = from[i + j], to[i + 2 * j + 1] = from[i + LANES + j];
}

// Query heads [first, first + heads) of one row, which share a key head.
template <class T>
void attend(const AttentionArgs& a, int64_t row, int64_t first, int64_t heads, std::vector<float>& scratch) {
  const int64_t slot = a.slots[row], head = first / (a.heads / a.kv_heads), dim = a.dim, whole = dim - dim % kPair;
  const int64_t end = a.positions[row] + 1, begin = a.window ? std::max<int64_t>(0, end - a.window) : 0;
  const int64_t count = end - begin, stride = count + 2 * LANES;
  const int64_t width = (dim + LANES - 1) / LANES * LANES;
  scratch.resize(heads * (stride + 2 * width));
  float *scores = scratch.data(), *q = scores + heads * stride, *acc = q + heads * width;
  std::fill(acc, acc + heads * width, 0.0f);
  const float* from = a.qkv + (row * (a.heads + 2 * a.kv_heads) + first) * dim;
  for (int64_t g = 0; g < heads; g++) pack_query<T>(from + g * dim, q + g * width, dim, whole);
  each_page<T>(a, slot, 0, head, begin, end, [&](int64_t t, int64_t here, const T* k) {
    for (int64_t g = 0; g < heads; g++) score(a, scores + g * stride + t - begin, q + g * width, k, here, whole);
  });
  for (int64_t g = 0; g < heads; g++) softmax(scores + g * stride, count);
  each_page<T>(a, slot, 1, head, begin, end, [&](int64_t t, int64_t here, const T* v) {
    add_values<T, 3>(acc, width, scores + t - begin, stride, v, here, dim, whole, heads);
  });
  float* to = a.out + (row * a.heads + first) * dim;
  for (int64_t g = 0; g < heads; g++) unpack<T>(acc + g * width, to + g * dim, dim, whole);
}

#if LANES == 16
// Rows of one text in a run meet its keys together. A vector holds one word of 16 keys and meets the same word of a query; what
// is lane l of a row's vector sum is chain l here, and all is added in the same order: a row's result is the same either way.
constexpr int64_t kRunFrom = 8;      // rows that repay the turning of the keys
constexpr int64_t kBlockHeads = 12;  // query heads of a block, at least those of a row that share a key head

template <class T>
struct Run {
  static constexpr int kPairs = Keys<T>::kPutParts;  // vectors of 32 numbers of a key, that are chains of their own
  static constexpr bool kServes = kPairs == 1 || sizeof(T) == 4;

  // Words [word, key] of 16 keys from position t on; past the last key, again the last one.
  static void turn_keys(const AttentionArgs& a, int64_t slot, int64_t head, int64_t t, int64_t end, float* out) {
    const float* keys[16];
    for (int64_t i = 0; i < 16; i++) {
      const int64_t at = std::min(t + i, end - 1);
      keys[i] = (const float*)(page_of<T>(a, slot, at, 0, head) + at % a.page_tokens * a.dim);
    }
    for (int64_t w = 0; w < a.dim / 32 * kPairs; w++) {
      vf words[16];
      for (int i = 0; i < 16; i++) words[i] = load(keys[i] + w * 16);
      turn(words);
      for (int i = 0; i < 16; i++) store(out + (w * 16 + i) * 16, words[i]);
    }
  }

  // out[2 * i + j]: of N queries, the sums of chains [Order, Order + 2^Level) with 16 keys of two blocks, `apart` floats apart.
  template <int N, int Level, int Order = 0>
  INLINE void sums(const float* k, int64_t apart, const float* q, int64_t width, int64_t steps, vf* out) {
    if constexpr (Level > 0) {
      vf more[2 * N];
      sums<N, Level - 1, Order>(k, apart, q, width, steps, out);
      sums<N, Level - 1, Order + (1 << (Level - 1))>(k, apart, q, width, steps, more);
#pragma GCC unroll 8
      for (int i = 0; i < 2 * N; i++) out[i] += more[i];
    } else {
      vf acc[kPairs][2 * N] = {};
      for (int64_t s = 0; s < steps; s++)
#pragma GCC unroll 2
        for (int c = 0; c < kPairs; c++) {
          const float* at = k + ((s * kPairs + c) * 16 + chain(Order)) * 16;
          const vf low = load(at), high = load(at + apart);
#pragma GCC unroll 4
          for (int i = 0; i < N; i++) {
            const vf word = splat_word(q + i * width + s * kPair + c * LANES + chain(Order));
            acc[c][2 * i] = Keys<T>::add_product(low, word, acc[c][2 * i]);
            acc[c][2 * i + 1] = Keys<T>::add_product(high, word, acc[c][2 * i + 1]);
          }
        }
#pragma GCC unroll 8
      for (int i = 0; i < 2 * N; i++) out[i] = kPairs == 2 ? acc[0][i] + acc[kPairs - 1][i] : acc[0][i];
    }
  }

  template <int N>
  __attribute__((noinline)) static void score(float* scores, int64_t stride, const float* q, const float* k, const AttentionArgs& a) {
    vf found[2 * N];
    sums<N, 4>(k, a.dim / 2 * kPairs * 16, q, a.dim, a.dim / 32, found);
    for (int i = 0; i < N; i++) store(scores + i * stride, scaled(a, found[2 * i])), store(scores + i * stride + 16, scaled(a, found[2 * i + 1]));
  }

  // Query heads of `rows` rows from `row` on that share key head `head`; `keys` are turned.
  static void attend(const AttentionArgs& a, const float* keys, int64_t row, int64_t rows, int64_t head, std::vector<float>& scratch) {
    const int64_t dim = a.dim, group = a.heads / a.kv_heads, queries = rows * group;
    const int64_t least = a.positions[row] + 1, most = a.positions[row] + rows, stride = most + 4 * LANES;
    scratch.resize(queries * (stride + 2 * dim));
    float *scores = scratch.data(), *q = scores + queries * stride, *acc = q + queries * dim;
    std::fill(acc, acc + queries * dim, 0.0f);
    const auto heads_of = [&](const float* of, int64_t width, int64_t i) {
      return (float*)of + ((row + i / group) * width + head * group + i % group) * dim;
    };
    for (int64_t i = 0; i < queries; i++) pack_query<T>(heads_of(a.qkv, a.heads + 2 * a.kv_heads, i), q + i * dim, dim, dim);
    for (int64_t t = 0; t < most; t += 32) {
      const float* k = keys + t * dim / 2 * kPairs;
      int64_t i = 0;
      for (; i + 3 <= queries; i += 3) score<3>(scores + i * stride + t, stride, q + i * dim, k, a);
      for (; i < queries; i++) score<1>(scores + i * stride + t, stride, q + i * dim, k, a);
    }
    for (int64_t i = 0; i < queries; i++) softmax(scores + i * stride, least + i / group);
    for (int64_t t = 0; t < most; t += a.page_tokens) {
      const T* v = page_of<T>(a, a.slots[row], t, 1, head);
      // Rows that see the whole page together, those that end in it one by one.
      const bool whole = t + a.page_tokens <= least;
      for (int64_t r = 0; r < (whole ? 1 : rows); r++) {
        const int64_t here = std::min(a.page_tokens, least + r - t), i = r * group;
        if (here <= 0) continue;
        add_values<T, 6>(acc + i * dim, dim, scores + i * stride + t, stride, v, here, dim, dim, whole ? queries : group);
      }
    }
    for (int64_t i = 0; i < queries; i++) unpack<T>(acc + i * dim, heads_of(a.out, a.heads, i), dim, dim);
  }

  // This thread's share of the run of `count` rows from `row` on; `task` numbers blocks of all runs.
  static void share(const AttentionArgs& a, const Team& team, int64_t row, int64_t count, int64_t& task, std::vector<float>& scratch) {
    static thread_local std::vector<float> keys;
    const int64_t end = a.positions[row] + count, blocks = (end + 31) / 32 * 2, block = a.dim / 2 * kPairs * 16;
    const int64_t rows = std::max<int64_t>(1, kBlockHeads / (a.heads / a.kv_heads));
    for (int64_t head = 0; head < a.kv_heads; head++) {
      bool turned = false;
      for (int64_t r = 0; r < count; r += rows) {
        if (task++ % team.size != team.id) continue;
        if (!turned) {
          keys.resize(blocks * block);
          for (int64_t b = 0; b < blocks; b++) turn_keys(a, a.slots[row], head, b * 16, end, keys.data() + b * block);
        }
        turned = true;
        attend(a, keys.data(), row + r, std::min(rows, count - r), head, scratch);
      }
    }
  }
};
#endif

// Rows [row, row + result) are neighbours of one text.
int64_t run_from(const AttentionArgs& a, int64_t row) {
  int64_t next = row + 1;
  while (next < a.n && a.slots[next] == a.slots[row] && a.positions[next] == a.positions[next - 1] + 1) next++;
  return next - row;
}

template <class T>
void attend_rows(const AttentionArgs& a, const Team& team) {
  static thread_local std::vector<float> scratch;
  // Few rows: heads one by one, so that every thread gets as much as the others.
  const int64_t heads = a.n * a.kv_heads < 4 * team.size ? 1 : a.heads / a.kv_heads;
  int64_t task = 0;
  for (int64_t row = 0, count; row < a.n; row += count) {
    count = run_from(a, row);
#if LANES == 16
    const bool seen = !a.window || a.positions[row] + count <= a.window;
    if (Run<T>::kServes && count >= kRunFrom && seen && a.dim % 32 == 0) {
      Run<T>::share(a, team, row, count, task, scratch);
      continue;
    }
#endif
    for (int64_t r = row; r < row + count; r++)
      for (int64_t first = 0; first < a.heads; first += heads)
        if (task++ % team.size == team.id) attend<T>(a, r, first, heads, scratch);
  }
}

}  // namespace

void append_share(const AttentionArgs& a, const Team& team) {
  for (int64_t row = team.id; row < a.n; row += team.size) {
    if (a.dtype == kBFloat16) append<uint16_t>(a, row);
    else append<float>(a, row);
  }
}

void attend_share(const AttentionArgs& a, const Team& team) {
  if (a.dtype == kBFloat16) attend_rows<uint16_t>(a, team);
  else attend_rows<float>(a, team);
}
