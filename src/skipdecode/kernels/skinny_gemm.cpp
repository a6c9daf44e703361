// y[m, n] = epilogue(prologue(x)[m, k] * w[n, k]^T): a few rows of activations against a weight matrix, at memory speed.
//
// Weights are row-major and read once for up to kPanel rows; sums are fp32. A block of weight rows meets a block of activation
// rows in registers. Every output is one chain of vector sums in the order of k, whatever the other rows are, so a row's result
// does not depend on its batch, bit for bit.
#include <algorithm>
#include <vector>

#include "weights.h"

namespace {

// A block's weight rows and most activation rows: as many sums as registers hold, of which there are 32 vectors on AVX-512 and
// Arm and 16 elsewhere. Of few activation rows, more weight rows.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 2, kCols = 8, kThinRows = 4, kThinCols = 4;
#else
constexpr int kRows = 2, kCols = 4, kThinRows = 4, kThinCols = 3;
#endif
constexpr int64_t kPanel = 2 * kCols;       // activation rows that meet a strip of weights in L1
constexpr int64_t kMostRows = 128;          // activation rows packed at a time
constexpr int64_t kStrip = LANES;           // weight rows whose sums are held
constexpr int64_t kSlabBytes = 128 * 1024;  // weights that stay in L2 while the panels pass
constexpr int64_t kChunkBytes = 24 * 1024;  // a panel's columns that stay in L1 beside the weights that stream past them
constexpr int64_t kAhead = 8192;            // bytes from what is read to what is fetched

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

// Columns [begin, end) of a row through the prologue into `out`, parts `apart` floats apart, in the order of the weights.
template <class F>
void pack(const LinearArgs& a, const float* x, float* out, int64_t apart, int64_t begin, int64_t end, Stats s) {
  for (int64_t i = begin; i < end; i += kPair, out += F::kPutParts * apart)
    F::put(out, apart, prologue(a, x, i, s), prologue(a, x, i + LANES, s));
}

// The last step's columns where they are fewer than a step, and zeros.
template <class F>
void pack_tail(const LinearArgs& a, const float* x, float* out, int64_t apart, Stats s) {
  const int64_t whole = a.k - a.k % kStep, count = a.k - whole;
  LinearArgs one = a;
  float xs[2 * kStep] = {}, gamma[kStep] = {}, beta[kStep] = {};
  memcpy(xs, x + whole, count * sizeof(float));
  if (a.prologue >= kSwiGlu) memcpy(xs + kStep, x + a.k + whole, count * sizeof(float));
  if (a.gamma) memcpy(gamma, a.gamma + whole, count * sizeof(float));
  if (a.beta) memcpy(beta, a.beta + whole, count * sizeof(float));
  one.k = kStep, one.gamma = gamma, one.beta = a.beta ? beta : nullptr;
  pack<F>(one, xs, out, apart, 0, kStep, s);
}

// sums[c * kStrip + r] += the products of R weight rows and M activation rows over k columns. x holds the activations' parts
// side by side: [step, part, row].
template <class F, int R, int M>
__attribute__((noinline)) void block(const typename F::Row* w, const float* x, vf* sums, int64_t k, bool first,
                                     const char* ahead, int64_t ldw) {
  vf acc[R][M];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < M; c++) acc[r][c] = first ? vf{} : sums[c * kStrip + r];
  for (int64_t i = 0; i < k; i += kStep, x += F::kParts * M * LANES, ahead += F::kStepBytes) {
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
        const vf v = hold(load(x + (p * M + c) * LANES));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r][c] = F::add_product(part[r], v, acc[r][c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < M; c++) sums[c * kStrip + r] = acc[r][c];
}

// The block for `cols` activation rows, Least to M.
template <class F, int R, int Least, int M>
INLINE void block_of(int64_t cols, const typename F::Row* w, const float* x, vf* sums, int64_t k, bool first, const char* ahead,
                     int64_t ldw) {
  if constexpr (M > Least) {
    if (cols < M) return block_of<F, R, Least, M - 1>(cols, w, x, sums, k, first, ahead, ldw);
  }
  block<F, R, M>(w, x, sums, k, first, ahead, ldw);
}

INLINE vf load_some(const float* p, int64_t count) {
  if (count >= LANES) return load(p);
  float t[LANES] = {};
  memcpy(t, p, count * sizeof(float));
  return load(t);
}

// Up to LANES outputs of a row, y, from n on, from their vector sums.
INLINE void write_out(const LinearArgs& a, float* y, int64_t n, int64_t count, const vf* sums) {
  vf v = sums_of(sums);
  if (a.dtype == kInt8) v *= load_some((const float*)a.scales + n, count);
  if (a.bias) v += load_some(a.bias + n, count);
  if (a.activation == kRelu) v = v > 0 ? v : vf{};
  else if (a.activation == kGeluTanh) v = gelu_tanh(v);
  if (a.accumulate) v += load_some(y, count);
  if (count >= LANES) return store(y, v);
  float t[LANES];
  store(t, v);
  memcpy(y, t, count * sizeof(float));
}

// Packed activation rows in groups, one for each block, whose weights' columns are read in chunks.
struct Panel {
  const float* x;
  int64_t m, group;                // rows, and of a group
  int64_t columns, padded, depth;  // in whole steps, with the last step's padding, of a chunk
};

// Where `block` fetches ahead: kAhead bytes on in the order of reading, a strip's chunk after chunk.
template <class F>
INLINE const char* place_ahead(const LinearArgs& a, const Panel& p, int64_t n0, int64_t b, int64_t k0, int64_t k) {
  int64_t row = b + kAhead / (k * F::kStepBytes / kStep) + 1, column = k0;
  if (row >= kStrip) {
    const bool last = k0 + k >= p.columns;
    column = last ? 0 : k0 + k;
    row -= last ? 0 : kStrip;
  }
  return (const char*)F::row(a, n0 + row, column).w;
}

// R weight rows against the panel's rows, k columns from k0.
template <class F, int R, int Least, int M>
INLINE void blocks(const LinearArgs& a, const Panel& p, const typename F::Row* w, vf* sums, int64_t k0, int64_t k,
                   const char* ahead) {
  constexpr int64_t kWidth = F::kParts * LANES;  // floats of a packed step
  for (int64_t c = 0; c < p.m; c += p.group) {
    const int64_t cols = std::min(p.group, p.m - c);
    const float* x = p.x + (p.padded * c + k0 * cols) / kStep * kWidth;
    block_of<F, R, Least, M>(cols, w, x, sums + c * kStrip, k, k0 == 0, ahead, a.ldw);
    ahead = (const char*)x;  // once is enough
  }
}

// The columns behind the last whole step, from rows copied to where zeros follow them.
template <class F, int R, int Least, int M>
void strip_tail(const LinearArgs& a, const Panel& p, int64_t n0, vf* sums) {
  const int64_t bytes = (a.k - p.columns) * F::kStepBytes / kStep;
  for (int64_t b = 0; b < kStrip; b += R) {
    alignas(64) char rows[R][F::kStepBytes] = {};
    typename F::Row w[R];
    for (int64_t r = 0; r < R; r++) {
      memcpy(rows[r], F::row(a, std::min(n0 + b + r, a.n - 1), p.columns).w, bytes);
      w[r].w = (decltype(w[r].w))rows[r];
    }
    blocks<F, R, Least, M>(a, p, w, sums + b, p.columns, kStep, rows[0]);
  }
}

// Outputs n0 to n0 + kStrip, as far as `end`.
template <class F, int R, int Least, int M>
void strip(const LinearArgs& a, const Panel& p, float* y, int64_t n0, int64_t end, vf* sums) {
  for (int64_t k0 = 0; k0 < p.columns; k0 += p.depth) {
    const int64_t k = std::min(p.depth, p.columns - k0);
    for (int64_t b = 0; b < kStrip; b += R) {
      typename F::Row w[R];
      // Past the last row, again the last one: its sums are not used.
      for (int64_t r = 0; r < R; r++) w[r] = F::row(a, std::min(n0 + b + r, a.n - 1), k0);
      blocks<F, R, Least, M>(a, p, w, sums + b, k0, k, place_ahead<F>(a, p, n0, b, k0, k));
    }
  }
  if (!F::kPadded && a.k % kStep) strip_tail<F, R, Least, M>(a, p, n0, sums);
  for (int64_t c = 0; c < p.m; c++) write_out(a, y + c * a.ldy + n0, n0, std::min(kStrip, end - n0), sums + c * kStrip);
}

// Rows x through the prologue: all threads do so, which is cheaper than a barrier and than fetching another core's lines.
template <class F>
void pack_panel(const LinearArgs& a, const Panel& p, const float* x, float* out) {
  constexpr int64_t kWidth = F::kParts * LANES;
  const int64_t whole = a.k / kStep * kStep;
  for (int64_t c = 0; c < p.m; c++) {
    const int64_t begin = c / p.group * p.group, apart = std::min(p.group, p.m - begin) * LANES;
    float* to = out + p.padded * begin / kStep * kWidth + (c - begin) * LANES;
    const float* from = x + c * a.ldx;
    const Stats stats = row_stats(a, from);
    pack<F>(a, from, to, apart, 0, whole, stats);
    if (whole < a.k) pack_tail<F>(a, from, to + whole / kStep * F::kParts * apart, apart, stats);
  }
}

// A class's kernel for a panel: thin ones for few rows.
template <class F>
void panel_strip(const LinearArgs& a, const Panel& p, float* y, int64_t n0, int64_t end, vf* sums) {
  if (p.group <= kThinCols) strip<F, kThinRows, 1, kThinCols>(a, p, y, n0, end, sums);
  else strip<F, kRows, kThinCols, kCols>(a, p, y, n0, end, sums);
}

int64_t parts_of(int64_t size, int64_t most) { return (size + most - 1) / most; }

// Up to kMostRows rows: panels of about equal size pass slabs of weights.
template <class F>
void rows(const LinearArgs& a, const float* x, float* y, int64_t m, const Team& team) {
  constexpr int64_t kWidth = F::kParts * LANES;
  const int64_t padded = parts_of(a.k, kStep) * kStep, columns = F::kPadded ? padded : a.k / kStep * kStep;
  const int64_t panels = parts_of(m, kPanel), most = parts_of(m, panels);
  const int64_t steps = columns / kStep, chunks = parts_of(steps * kWidth * 4 * most, kChunkBytes);
  const int64_t depth = std::max<int64_t>(1, parts_of(steps, std::max<int64_t>(1, chunks))) * kStep;
  static thread_local std::vector<vf> memory;
  memory.resize(kPanel * kStrip + m * padded / kStep * F::kParts);
  float* packed = (float*)(memory.data() + kPanel * kStrip);
  Panel made[kMostRows / kPanel];
  for (int64_t i = 0; i < panels; i++) {
    const int64_t rows = std::min(most, m - i * most), group = parts_of(rows, parts_of(rows, kCols));
    float* out = packed + i * most * padded / kStep * kWidth;
    made[i] = {out, rows, group, columns, padded, depth};
    pack_panel<F>(a, made[i], x + i * most * a.ldx, out);
  }
  const int64_t share = parts_of(parts_of(a.n, team.size), kThinRows) * kThinRows;
  const int64_t begin = std::min(a.n, team.id * share), end = std::min(a.n, begin + share);
  const int64_t slab = std::max<int64_t>(1, kSlabBytes / (a.ldw * kStrip)) * kStrip;
  for (int64_t n0 = begin; n0 < end; n0 += slab)
    for (int64_t i = 0; i < panels; i++)
      for (int64_t n = n0; n < std::min(end, n0 + slab); n += kStrip)
        panel_strip<F>(a, made[i], y + i * most * a.ldy, n, end, memory.data());
}

template <DType D, bool Dot>
void linear(const LinearArgs& a, const Team& team) {
  for (int64_t i = 0; i < a.m; i += kMostRows)
    rows<Weights<D, Dot>>(a, a.x + i * a.ldx, a.y + i * a.ldy, std::min(kMostRows, a.m - i), team);
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
