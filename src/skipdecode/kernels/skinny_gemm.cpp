// y[m, n] = epilogue(prologue(x)[m, k] * w[n, k]^T): a few rows of activations against a weight matrix, at memory speed.
//
// Weights are row-major bf16 or fp32, read once; activations and sums are fp32. A block of weight rows meets a block of
// activation rows in registers. Every output is one chain of vector FMAs in the order of k, whatever the other rows are, so
// a row's result does not depend on its batch, bit for bit.
#include <algorithm>
#include <vector>

#include <omp.h>

#include "vectors.h"

// Registers: 16 vectors before AVX-512 and on SSE, 32 on AVX-512 and Arm.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 4, kCols = 4;
#else
constexpr int kRows = 2, kCols = 4;
#endif
constexpr int kThinRows = 4;        // weight rows at a time where few activation rows leave registers free
constexpr int64_t kPanel = 32;      // activation rows packed at a time
constexpr int64_t kStripSums = 128;  // vector sums held between chunks of k (4 KB of L1 with AVX2)
constexpr int64_t kPair = 2 * LANES;

// Columns of activations, packed together for all rows, that L1 holds beside the weights that stream past them.
INLINE int64_t chunk(int64_t m) { return std::max<int64_t>(256, 6144 / m / kPair * kPair); }

enum Prologue : int32_t { kNone = 0, kRmsNorm = 1, kLayerNorm = 2, kSwiGlu = 3, kGeGluTanh = 4 };
enum Activation : int32_t { kIdentity = 0, kRelu = 1, kGeluTanh = 2 };

extern "C" {
// Mirrored field by field in native.py. With kSwiGlu and kGeGluTanh, x holds 2k columns: gate, then up.
struct LinearArgs {
  const float* x;
  const void* w;
  const float* bias;   // [n] or null
  const float* gamma;  // [k], norm prologues
  const float* beta;   // [k] or null
  float* y;
  int64_t m, n, k, ldx, ldy;
  int32_t dtype, prologue, activation, accumulate;  // accumulate: y += instead of y =
  float eps;
  int32_t padding;
};
}

namespace {

INLINE vf tanh_of(vf x) { return 1.0f - 2.0f / (exp_fast(2.0f * x) + 1.0f); }
INLINE vf gelu_tanh(vf x) { return 0.5f * x * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x))); }
INLINE vf silu(vf x) { return x / (1.0f + exp_fast(-x)); }

struct Stats { float mean, scale; };

Stats row_stats(const LinearArgs& a, const float* x) {
  if (a.prologue != kRmsNorm && a.prologue != kLayerNorm) return {0.0f, 1.0f};
  vf s{}, q{};
  float tail = 0, tail_q = 0;
  int64_t i = 0, whole = a.k - a.k % LANES;
  float mean = 0;
  if (a.prologue == kLayerNorm) {
    for (i = 0; i < whole; i += LANES) s += load(x + i);
    for (; i < a.k; i++) tail += x[i];
    mean = (sum(s) + tail) / a.k;
  }
  for (i = 0; i < whole; i += LANES) {
    vf d = load(x + i) - mean;
    q += d * d;
  }
  for (; i < a.k; i++) tail_q += (x[i] - mean) * (x[i] - mean);
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

// Columns [begin, end) of a row through the prologue into `out`, in the order in which the weights unpack.
void pack(const LinearArgs& a, const float* x, float* out, int64_t begin, int64_t end, Stats s) {
  for (int64_t i = begin; i < end; i += kPair, out += kPair) {
    float t[kPair];
    store(t, prologue(a, x, i, s));
    store(t + LANES, prologue(a, x, i + LANES, s));
    if (a.dtype == kFloat32) {
      memcpy(out, t, sizeof t);
    } else {
      for (int j = 0; j < LANES; j++) out[j] = t[2 * j], out[LANES + j] = t[2 * j + 1];
    }
  }
}

template <class W, int R, int M>
__attribute__((noinline)) void block(const W* w, int64_t ldw, const float* x, int64_t ldx, vf* sums, int64_t k, bool first,
                                     const W* ahead) {
  vf acc[R][M];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < M; c++) acc[r][c] = first ? vf{} : sums[r * M + c];
  for (int64_t i = 0; i < k; i += kPair) {
    {
      vf half[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        __builtin_prefetch(ahead + r * ldw + i);
        half[r] = load_even(w + r * ldw + i);
      }
#pragma GCC unroll 8
      for (int c = 0; c < M; c++) {
        vf v = hold(load(x + c * ldx + i));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r][c] = fma(half[r], v, acc[r][c]);
      }
    }

    {
      vf half[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) half[r] = load_odd(w + r * ldw + i);
#pragma GCC unroll 8
      for (int c = 0; c < M; c++) {
        vf v = hold(load(x + c * ldx + i + LANES));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r][c] = fma(half[r], v, acc[r][c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < M; c++) sums[r * M + c] = acc[r][c];
}

// The block for `cols` activation rows (1 to M).
template <class W, int R, int M>
INLINE void block_of(int64_t cols, const W* w, int64_t ldw, const float* x, int64_t ldx, vf* sums, int64_t k, bool first,
                     const W* ahead) {
  if constexpr (M > 1) {
    if (cols < M) return block_of<W, R, M - 1>(cols, w, ldw, x, ldx, sums, k, first, ahead);
  }
  block<W, R, M>(w, ldw, x, ldx, sums, k, first, ahead);
}

// Out of line: one copy, so that its roundings are the same wherever it is called.
__attribute__((noinline)) float gelu_of(float v) { return gelu_tanh(splat(v))[0]; }

INLINE float finish(const LinearArgs& a, float v, int64_t n) {
  if (a.bias) v += a.bias[n];
  if (a.activation == kRelu) return v > 0 ? v : 0;
  return a.activation == kGeluTanh ? gelu_of(v) : v;
}

// Outputs n, n + apart, … of R weight rows from their sums, which lie in groups of M activation rows.
template <class W, int R, int M>
INLINE void write_out(const LinearArgs& a, const float* x, float* y, int64_t m, int64_t n, int64_t apart, const vf* sums) {
  const int64_t whole = a.k - a.k % kPair;
  for (int64_t c0 = 0; c0 < m; c0 += M) {
    const int64_t cols = std::min<int64_t>(M, m - c0);
    for (int64_t c = c0; c < c0 + cols; c++) {
      for (int64_t r = 0; r < R; r++) {
        float v = whole ? sum(sums[c0 * R + r * cols + c - c0]) : 0.0f;
        const int64_t row = n + r * apart;
        for (int64_t i = whole; i < a.k; i++) v += widen(((const W*)a.w)[row * a.k + i]) * x[whole * m + c * kPair + i - whole];
        v = finish(a, v, row);
        float* out = y + c * a.ldy + row;
        *out = a.accumulate ? *out + v : v;
      }
    }
  }
}

// `blocks` blocks of weight rows {n, n + apart, …} from n0, against m packed activation rows, in chunks of k whose
// activations stay in L1. The rows of a block lie far apart, so that each continues a stream that the CPU's prefetcher knows.
template <class W, int R, int M>
void strip(const LinearArgs& a, const float* x, float* y, int64_t m, int64_t n0, int64_t blocks, int64_t apart, vf* sums) {
  const int64_t whole = a.k - a.k % kPair, depth = chunk(m);
  const W* w = (const W*)a.w + n0 * a.k;
  for (int64_t k0 = 0; k0 < whole; k0 += depth) {
    const int64_t k = std::min(depth, whole - k0);
    for (int64_t b = 0; b < blocks; b++) {
      const W* at = w + b * a.k + k0;
      // What the next block reads, or, after the last block of a chunk, what the next chunk starts with.
      const W* ahead = b + 1 == blocks && k0 + k < whole ? w + k0 + k : at + a.k;
      for (int64_t c = 0; c < m; c += M)
        block_of<W, R, M>(std::min<int64_t>(M, m - c), at, apart * a.k, x + k0 * m + c * k, k, sums + (b * m + c) * R, k,
                          k0 == 0, ahead);
    }
  }
  for (int64_t b = 0; b < blocks; b++) write_out<W, R, M>(a, x, y, m, n0 + b, apart, sums + b * m * R);
}

// The part of the last columns that fill no pair: through the prologue one by one, in their own order.
void pack_tail(const LinearArgs& a, const float* x, float* out, Stats s) {
  const int64_t whole = a.k - a.k % kPair;
  LinearArgs one = a;
  float xs[2 * kPair] = {}, gamma[kPair] = {}, beta[kPair] = {}, t[kPair];
  for (int64_t i = whole; i < a.k; i++) {
    xs[i - whole] = x[i];
    if (a.prologue >= kSwiGlu) xs[kPair + i - whole] = x[a.k + i];
    if (a.gamma) gamma[i - whole] = a.gamma[i];
    if (a.beta) beta[i - whole] = a.beta[i];
  }
  one.k = kPair, one.gamma = gamma, one.beta = a.beta ? beta : nullptr;
  store(t, prologue(one, xs, 0, s));
  store(t + LANES, prologue(one, xs, LANES, s));
  memcpy(out, t, (a.k - whole) * sizeof(float));
}

template <class W, int R, int M>
void panel(const LinearArgs& a, const float* x, float* y, int64_t m) {
  const int64_t whole = a.k - a.k % kPair, depth = chunk(m);
#pragma omp parallel
  {
    // Every thread packs for itself: cheaper than a barrier, and than fetching another core's lines.
    static thread_local std::vector<float> buffer;
    buffer.resize(m * (a.k + kPair) + 16);
    // Vectors that straddle cache lines load at half speed.
    float* packed = (float*)(((uintptr_t)buffer.data() + 63) & ~(uintptr_t)63);
    for (int64_t c = 0; c < m; c++) {
      const float* from = x + c * a.ldx;
      const Stats stats = row_stats(a, from);
      for (int64_t k0 = 0; k0 < whole; k0 += depth) {
        const int64_t end = std::min(whole, k0 + depth);
        pack(a, from, packed + k0 * m + c * (end - k0), k0, end, stats);
      }
      if (whole < a.k) pack_tail(a, from, packed + whole * m + c * kPair, stats);
    }
    const int64_t threads = omp_get_num_threads(), id = omp_get_thread_num();
    const int64_t share = a.n / (R * threads), height = std::max<int64_t>(1, kStripSums / (R * m));
    vf sums[kStripSums + R * kPanel];
    for (int64_t b = 0; b < share; b += height)
      strip<W, R, M>(a, packed, y, m, id * share * R + b, std::min(height, share - b), share, sums);
    for (int64_t n = share * R * threads + id; n < a.n; n += threads) strip<W, 1, M>(a, packed, y, m, n, 1, 0, sums);
  }
}

template <class W>
void linear(const LinearArgs& a) {
  for (int64_t i = 0; i < a.m; i += kPanel) {
    const int64_t m = std::min(kPanel, a.m - i);
    if (m < kCols) panel<W, kThinRows, kCols - 1>(a, a.x + i * a.ldx, a.y + i * a.ldy, m);
    else panel<W, kRows, kCols>(a, a.x + i * a.ldx, a.y + i * a.ldy, m);
  }
}

}  // namespace

extern "C" void skipdecode_linear(const LinearArgs* a) {
  if (a->dtype == kBFloat16) linear<uint16_t>(*a);
  else linear<float>(*a);
}
