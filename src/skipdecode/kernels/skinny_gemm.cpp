// y[m, n] = epilogue(prologue(x)[m, k] * w[n, k]^T): a few rows of activations against a weight matrix, at memory speed.
//
// Weights are row-major and read once for up to kPanel rows; sums are fp32. A block of weight rows meets a block of activation
// rows in registers. Every output is one chain of vector sums in the order of k, whatever the other rows are, so a row's result
// does not depend on its batch, bit for bit.
#include <algorithm>
#include <vector>

#include "weights.h"

namespace {

// Registers: 16 vectors before AVX-512 and on SSE, 32 on AVX-512 and Arm.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 4;
#else
constexpr int kRows = 2;
#endif
constexpr int kCols = 4;
constexpr int kThinRows = 4;          // weight rows at a time where few activation rows leave registers free
constexpr int64_t kPanel = 32;        // activation rows packed at a time
constexpr int64_t kStripSums = 512;   // vector sums held between chunks of k
constexpr int64_t kMostStrip = 64;    // weight rows of a strip
constexpr int64_t kChunkFloats = 6144;  // packed activations that stay in L1 beside the weights that stream past them
constexpr int64_t kLeastSteps = 4;    // of a chunk
constexpr int64_t kAhead = 8192;      // bytes from what is read to what is fetched

INLINE vf tanh_of(vf x) { return 1.0f - 2.0f / (exp_fast(2.0f * x) + 1.0f); }
INLINE vf gelu_tanh(vf x) { return 0.5f * x * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x))); }
INLINE vf silu(vf x) { return x / (1.0f + exp_fast(-x)); }

struct Stats { float mean, scale; };

Stats row_stats(const LinearArgs& a, const float* x) {
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

// Columns [begin, end) of a row through the prologue into `out`, in the order in which the weights come.
template <class F>
void pack(const LinearArgs& a, const float* x, float* out, int64_t begin, int64_t end, Stats s) {
  for (int64_t i = begin; i < end; i += kPair) out = F::put(out, prologue(a, x, i, s), prologue(a, x, i + LANES, s));
}

// The last step's columns where they are fewer than a step, and zeros.
template <class F>
void pack_tail(const LinearArgs& a, const float* x, float* out, Stats s) {
  const int64_t whole = a.k - a.k % kStep, count = a.k - whole;
  LinearArgs one = a;
  float xs[2 * kStep] = {}, gamma[kStep] = {}, beta[kStep] = {};
  memcpy(xs, x + whole, count * sizeof(float));
  if (a.prologue >= kSwiGlu) memcpy(xs + kStep, x + a.k + whole, count * sizeof(float));
  if (a.gamma) memcpy(gamma, a.gamma + whole, count * sizeof(float));
  if (a.beta) memcpy(beta, a.beta + whole, count * sizeof(float));
  one.k = kStep, one.gamma = gamma, one.beta = a.beta ? beta : nullptr;
  pack<F>(one, xs, out, 0, kStep, s);
}

// sums[c * lds + r] += the products of R weight rows and M activation rows over k columns.
template <class F, int R, int M>
__attribute__((noinline)) void block(const typename F::Row* w, const float* x, int64_t ldx, vf* sums, int64_t lds, int64_t k,
                                     bool first, const char* ahead, int64_t ldw) {
  vf acc[R][M];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < M; c++) acc[r][c] = first ? vf{} : sums[c * lds + r];
  for (int64_t i = 0; i < k; i += kStep, x += F::kParts * LANES, ahead += F::kStepBytes) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int64_t b = 0; b < F::kStepBytes; b += 64) __builtin_prefetch(ahead + r * ldw + b);
#pragma GCC unroll 16
    for (int p = 0; p < F::kParts; p++) {
      vf part[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) part[r] = F::part(w[r], i, p);
#pragma GCC unroll 8
      for (int c = 0; c < M; c++) {
        const vf v = hold(load(x + c * ldx + p * LANES));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r][c] = F::add_product(part[r], v, acc[r][c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < M; c++) sums[c * lds + r] = acc[r][c];
}

// The block for `cols` activation rows (1 to M).
template <class F, int R, int M>
INLINE void block_of(int64_t cols, const typename F::Row* w, const float* x, int64_t ldx, vf* sums, int64_t lds, int64_t k,
                     bool first, const char* ahead, int64_t ldw) {
  if constexpr (M > 1) {
    if (cols < M) return block_of<F, R, M - 1>(cols, w, x, ldx, sums, lds, k, first, ahead, ldw);
  }
  block<F, R, M>(w, x, ldx, sums, lds, k, first, ahead, ldw);
}

INLINE vf load_some(const float* p, int64_t count) {
  if (count >= LANES) return load(p);
  float t[LANES] = {};
  memcpy(t, p, count * sizeof(float));
  return load(t);
}

// Up to LANES outputs n, n + 1, … of a row from their vector sums.
INLINE void write_out(const LinearArgs& a, float* y, int64_t n, int64_t count, const vf* sums) {
  vf v = sums_of(sums);
  if (a.dtype == kInt8) v *= load_some((const float*)a.scales + n, count);
  if (a.bias) v += load_some(a.bias + n, count);
  if (a.activation == kRelu) v = v > 0 ? v : vf{};
  else if (a.activation == kGeluTanh) v = gelu_tanh(v);
  if (a.accumulate) v += load_some(y + n, count);
  if (count >= LANES) return store(y + n, v);
  float t[LANES];
  store(t, v);
  memcpy(y + n, t, count * sizeof(float));
}

// A panel of m packed activation rows, in chunks of `depth` columns, in each the rows one after another.
struct Panel {
  const float* x;
  int64_t m, columns, depth;  // columns: whole steps
};

// Where `block` fetches ahead: kAhead bytes on in the order of reading, a strip's chunk after chunk.
template <class F>
INLINE const char* place_ahead(const LinearArgs& a, const Panel& p, int64_t n0, int64_t height, int64_t b, int64_t k0, int64_t k) {
  int64_t row = b + kAhead / (k * F::kStepBytes / kStep) + 1, column = k0;
  if (row >= height) {
    const bool last = k0 + k >= p.columns;
    column = last ? 0 : k0 + k;
    row -= last ? 0 : height;
  }
  return (const char*)F::row(a, n0 + row, column).w;
}

// The columns behind the last whole step, from rows copied to where zeros follow them.
template <class F, int R, int M>
void strip_tail(const LinearArgs& a, const Panel& p, int64_t n0, int64_t height, vf* sums, int64_t lds) {
  constexpr int64_t kWidth = F::kParts * LANES;
  const int64_t size = F::kStepBytes / kStep, bytes = (a.k - p.columns) * size;
  for (int64_t b = 0; b < height; b += R) {
    alignas(64) char rows[R][F::kStepBytes] = {};
    typename F::Row w[R];
    for (int64_t r = 0; r < R; r++) {
      memcpy(rows[r], F::row(a, std::min(n0 + b + r, a.n - 1), p.columns).w, bytes);
      w[r].w = (decltype(w[r].w))rows[r];
    }
    for (int64_t c = 0; c < p.m; c += M)
      block_of<F, R, M>(std::min<int64_t>(M, p.m - c), w, p.x + (p.columns / kStep * p.m + c) * kWidth, kWidth,
                        sums + c * lds + b, lds, kStep, p.columns == 0, rows[0], 0);
  }
}

// Outputs n0 to n0 + height.
template <class F, int R, int M>
void strip(const LinearArgs& a, const Panel& p, float* y, int64_t n0, int64_t height, vf* sums) {
  constexpr int64_t kWidth = F::kParts * LANES;  // floats of a packed step
  const int64_t lds = (height + LANES - 1) / LANES * LANES;
  for (int64_t k0 = 0; k0 < p.columns; k0 += p.depth) {
    const int64_t k = std::min(p.depth, p.columns - k0);
    for (int64_t b = 0; b < height; b += R) {
      typename F::Row w[R];
      // Past the last row, again the last one: its sums are not used.
      for (int64_t r = 0; r < R; r++) w[r] = F::row(a, std::min(n0 + b + r, a.n - 1), k0);
      const char* ahead = place_ahead<F>(a, p, n0, height, b, k0, k);
      for (int64_t c = 0; c < p.m; c += M)
        block_of<F, R, M>(std::min<int64_t>(M, p.m - c), w, p.x + (k0 * p.m + c * k) / kStep * kWidth, k / kStep * kWidth,
                          sums + c * lds + b, lds, k, k0 == 0, ahead, a.ldw);
    }
  }
  if constexpr (!F::kPadded) {
    if (a.k % kStep) strip_tail<F, R, M>(a, p, n0, height, sums, lds);
  }
  for (int64_t c = 0; c < p.m; c++)
    for (int64_t b = 0; b < height; b += LANES)
      write_out(a, y + c * a.ldy, n0 + b, std::min<int64_t>(LANES, height - b), sums + c * lds + b);
}

template <class F, int R, int M>
void panel(const LinearArgs& a, const float* x, float* y, int64_t m, const Team& team) {
  constexpr int64_t kWidth = F::kParts * LANES;
  const int64_t whole = a.k / kStep, steps = (a.k + kStep - 1) / kStep;
  const int64_t full = F::kPadded ? steps : whole;
  const int64_t chunks = std::max<int64_t>(1, (full * kWidth * m + kChunkFloats - 1) / kChunkFloats);
  const int64_t depth = std::max<int64_t>(kLeastSteps, (full + chunks - 1) / chunks) * kStep;
  // Every thread packs for itself: cheaper than a barrier, and than fetching another core's lines.
  static thread_local std::vector<vf> memory;
  const int64_t most_sums = kStripSums + m * LANES;
  memory.resize(m * steps * F::kParts + most_sums);
  float* packed = (float*)(memory.data() + most_sums);
  for (int64_t c = 0; c < m; c++) {
    const float* from = x + c * a.ldx;
    const Stats stats = row_stats(a, from);
    for (int64_t k0 = 0; k0 < full * kStep; k0 += depth) {
      const int64_t k = std::min(depth, full * kStep - k0);
      float* to = packed + (k0 * m + c * k) / kStep * kWidth;
      pack<F>(a, from, to, k0, std::min(k0 + k, whole * kStep), stats);
      if (F::kPadded && whole < full && k0 + k == full * kStep) pack_tail<F>(a, from, to + (k / kStep - 1) * kWidth, stats);
    }
    if (!F::kPadded && whole < steps) pack_tail<F>(a, from, packed + (whole * m + c) * kWidth, stats);
  }
  const Panel p{packed, m, full * kStep, depth};
  const int64_t share = (a.n + team.size * R - 1) / (team.size * R) * R;
  const int64_t begin = std::min(a.n, team.id * share), end = std::min(a.n, begin + share);
  const int64_t height = std::min(kMostStrip, std::max<int64_t>(1, kStripSums / m / LANES) * LANES);
  for (int64_t n = begin; n < end; n += height) strip<F, R, M>(a, p, y, n, std::min(height, end - n), memory.data());
}

template <DType D, bool Dot>
void linear(const LinearArgs& a, const Team& team) {
  for (int64_t i = 0; i < a.m; i += kPanel) {
    const int64_t m = std::min(kPanel, a.m - i);
    const float* x = a.x + i * a.ldx;
    float* y = a.y + i * a.ldy;
    if (m < kCols) panel<Weights<D, Dot>, kThinRows, kCols - 1>(a, x, y, m, team);
    else panel<Weights<D, Dot>, kRows, kCols>(a, x, y, m, team);
  }
}

}  // namespace

void linear_share(const LinearArgs& a, const Team& team) {
#ifdef HAS_BF16_DOT
  if (a.round && a.dtype == kBFloat16) return linear<kBFloat16, true>(a, team);
  if (a.round && a.dtype == kInt8) return linear<kInt8, true>(a, team);
  if (a.round && a.dtype == kInt4) return linear<kInt4, true>(a, team);
#endif
  switch (a.dtype) {
    case kBFloat16: return linear<kBFloat16, false>(a, team);
    case kInt8: return linear<kInt8, false>(a, team);
    case kInt4: return linear<kInt4, false>(a, team);
    default: return linear<kFloat32, false>(a, team);
  }
}
