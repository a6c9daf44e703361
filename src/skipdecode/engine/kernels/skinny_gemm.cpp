// y[m, n] = epilogue(prologue(x)[m, k] * w[n, k]^T): a few rows of activations against a weight matrix, at memory speed.
//
// Weights are row-major and read once for up to kMostRows rows; sums are fp32. A block of weight rows meets a block of activation
// rows in registers. Every output is one chain of vector sums in the order of k, whatever the other rows are, so a row's result
// does not depend on its batch, bit for bit. Many rows, and products of bytes, are in wide_gemm.h; products by tiles in amx_gemm.h.
#include <algorithm>
#include <vector>

#include "amx_gemm.h"
#include "prologue.h"
#include "wide_gemm.h"

namespace {

// A block's weight rows and most activation rows: as many sums as registers hold, of which there are 32 vectors on AVX-512 and
// Arm and 16 elsewhere. Up to kThinMost activation rows memory sets the pace; less so for weights that are unpacked, of which
// more rows hide the work.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 2, kCols = 8, kThinRows = 2, kThinCols = 8, kThinMost = 4, kUnpackedRows = 4, kUnpackedCols = 4;
#else
constexpr int kRows = 2, kCols = 4, kThinRows = 4, kThinCols = 3, kThinMost = 6, kUnpackedRows = 4, kUnpackedCols = 3;
#endif
constexpr int64_t kPanel = 2 * kCols;       // activation rows that meet a strip of weights in L1, if that holds them
constexpr int64_t kMostRows = 128;          // activation rows packed at a time
constexpr int64_t kStrip = LANES;           // weight rows whose sums are held
constexpr int64_t kSlabBytes = 128 * 1024;  // weights that stay in L2 while the panels pass
constexpr int64_t kChunkBytes = 24 * 1024;  // a panel's columns that stay in L1 beside the weights that stream past them
constexpr int64_t kAhead = 8192;            // bytes from what is read to what is fetched, all streams together
constexpr int64_t kAheadOfOne = 1024;       // the same for one activation row, which reads as fast as memory gives
constexpr int kToL1 = 3, kToL2 = 2;         // where to; few misses of L1 are under way at a time, so several rows fetch to L2

// sums[c * kStrip + r * Apart] += the products of R weight rows and M activation rows over k columns. x holds the activations'
// parts side by side: [step, part, row].
template <class F, int R, int M, int Apart>
__attribute__((noinline)) void block(const typename F::Row* w, const float* x, vf* sums, int64_t k, bool first,
                                     const char* ahead, int64_t apart) {
  vf acc[R][M];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < M; c++) acc[r][c] = first ? vf{} : sums[c * kStrip + r * Apart];
  for (int64_t i = 0; i < k; i += kStep, x += F::kParts * M * LANES, ahead += F::kStepBytes) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int64_t b = 0; b < F::kStepBytes; b += 64) __builtin_prefetch(ahead + r * apart + b, 0, M == 1 ? kToL1 : kToL2);
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
    for (int c = 0; c < M; c++) sums[c * kStrip + r * Apart] = acc[r][c];
}

// The block for `cols` activation rows, at most M.
template <class F, int R, int M, int Apart>
INLINE void block_of(int64_t cols, const typename F::Row* w, const float* x, vf* sums, int64_t k, bool first, const char* ahead,
                     int64_t apart) {
  if constexpr (M > 1) {
    if (cols < M) return block_of<F, R, M - 1, Apart>(cols, w, x, sums, k, first, ahead, apart);
  }
  block<F, R, M, Apart>(w, x, sums, k, first, ahead, apart);
}

// Packed activation rows in groups, one for each block, whose weights' columns are read in chunks.
struct Panel {
  const float* x;
  int64_t m, group;                // rows, and of a group
  int64_t columns, padded, depth;  // in whole steps, with the last step's padding, of a chunk
  int64_t slab;                    // weight rows of a slab, if this panel is to fetch the next one; else 0
};

// How blocks take R weight rows from a thread's, begin to end. Of few activation rows, memory sets the pace: the rows lie far
// apart, each in a stream of its own that the CPU's prefetchers know. Of more, they are neighbours.
template <class F, int Rows, int Cols, bool Streams>
struct RowBlocks {
  using Format = F;
  static constexpr int R = Rows, M = Cols, Apart = Streams ? kPanel * kStrip : 1;
  int64_t begin, end;
  int64_t apart() const { return Streams ? parts_of(end - begin, R) : 1; }
  int64_t lines() const { return Streams ? apart() : end - begin; }
};

template <class F>
using Thin = RowBlocks<F, F::kPadded ? kUnpackedRows : kThinRows, F::kPadded ? kUnpackedCols : kThinCols, true>;
template <class F>
using Wide = RowBlocks<F, kRows, kCols, false>;

// Where the block at row `n` fetches ahead: on in its rows' streams, or, of a row that is read in chunks, in the next rows. A
// panel that finds its slab in L2 fetches the next one there.
template <class T>
INLINE const char* place_ahead(const LinearArgs& a, const Panel& p, int64_t n, int64_t k0, int64_t k) {
  const char* at = (const char*)T::Format::row(a, n, k0);
  if (p.slab) return at + p.slab * a.ldw;
  if (T::Apart > 1) return at + (k * T::Format::kStepBytes / kStep < a.ldw ? a.ldw : (p.m == 1 ? kAheadOfOne : kAhead) / T::R);
  return at + (kAhead / (T::R * k * T::Format::kStepBytes / kStep) + 1) * T::R * a.ldw;
}

// R weight rows against the panel's rows, k columns from k0.
template <class T>
INLINE void blocks(const LinearArgs& a, const Panel& p, const T& t, const typename T::Format::Row* w, vf* sums, int64_t k0,
                   int64_t k, const char* ahead) {
  constexpr int64_t kWidth = T::Format::kParts * LANES;  // floats of a packed step
  int64_t apart = t.apart() * a.ldw;
  for (int64_t c = 0; c < p.m; c += p.group) {
    const int64_t cols = std::min(p.group, p.m - c);
    const float* x = p.x + (p.padded * c + k0 * cols) / kStep * kWidth;
    block_of<typename T::Format, T::R, T::M, T::Apart>(cols, w, x, sums + c * kStrip, k, k0 == 0, ahead, apart);
    ahead = (const char*)x, apart = 0;  // once is enough
  }
}

// The columns behind the last whole step.
template <class T>
void tail_blocks(const LinearArgs& a, const Panel& p, const T& t, const typename T::Format::Row* w, vf* sums) {
  blocks(a, p, t, Tail<typename T::Format, T::R>(a, w).rows, sums, p.columns, kStep, (const char*)p.x);
}

// Outputs of kStrip lines from `line` on, as far as there are.
template <class T>
void strip(const LinearArgs& a, const Panel& p, float* y, const T& t, int64_t line, vf* sums) {
  using F = typename T::Format;
  constexpr int64_t step = T::Apart > 1 ? 1 : T::R;
  const int64_t count = std::min(kStrip, t.lines() - line);
  for (int64_t k0 = 0, k; k0 < p.padded; k0 += k) {
    // What is behind the whole steps of rows that are not padded comes last, as a chunk of its own.
    const bool tail = k0 == p.columns;
    k = tail ? kStep : std::min(p.depth, p.columns - k0);
    for (int64_t b = 0; b < count; b += step) {
      typename F::Row w[T::R];
      const int64_t n = t.begin + line + b;
      // Past the last row, again the last one: its sums are not used.
      for (int64_t r = 0; r < T::R; r++) w[r] = F::row(a, std::min(n + r * t.apart(), a.n - 1), k0);
      if (tail) tail_blocks(a, p, t, w, sums + b);
      else blocks(a, p, t, w, sums + b, k0, k, place_ahead<T>(a, p, n, k0, k));
    }
  }
  for (int64_t r = 0; r < (T::Apart > 1 ? T::R : 1); r++) {
    const int64_t n = t.begin + line + r * t.apart(), outputs = std::min(count, t.end - n);
    for (int64_t c = 0; c < p.m && outputs > 0; c++)
      write(a, y + c * a.ldy, n, outputs, sums_of(sums + r * T::Apart + c * kStrip));
  }
}

// Rows x through the prologue.
template <class F>
void pack_panel(const LinearArgs& a, const Panel& p, const float* x, float* out) {
  for (int64_t c = 0; c < p.m; c++) {
    const int64_t begin = c / p.group * p.group, apart = std::min(p.group, p.m - begin) * LANES;
    pack<F>(a, x + c * a.ldx, out + p.padded * begin / kStep * F::kParts * LANES + (c - begin) * LANES, apart);
  }
}

// Panels pass the weights slab by slab; a single one needs no slabs.
template <class T>
void pass(const LinearArgs& a, const Panel* panels, int64_t count, float* y, int64_t begin, int64_t end, vf* sums) {
  const int64_t slab = count == 1 ? a.n : std::max<int64_t>(1, kSlabBytes / (a.ldw * kStrip)) * kStrip;
  for (int64_t n0 = begin; n0 < end; n0 += slab) {
    const T rows{n0, std::min(end, n0 + slab)};
    float* to = y;
    for (int64_t i = 0; i < count; to += panels[i++].m * a.ldy) {
      Panel panel = panels[i];
      panel.slab = i == 1 ? slab : 0;
      for (int64_t line = 0; line < rows.lines(); line += kStrip) strip(a, panel, to, rows, line, sums);
    }
  }
}

// Up to kMostRows rows: panels of about equal size pass slabs of weights.
template <class F>
void rows(const LinearArgs& a, const float* x, float* y, int64_t m, const Team& team) {
  constexpr int64_t kWidth = F::kParts * LANES;
  const int64_t padded = parts_of(a.k, kStep) * kStep, columns = F::kPadded ? padded : a.k / kStep * kStep;
  const int64_t width = padded / kStep * kWidth;  // floats of a packed row
  const int64_t fit = width * 4 * kPanel <= kChunkBytes ? kPanel : kCols;
  const int64_t panels = parts_of(m, fit), most = parts_of(m, panels);
  const int64_t steps = columns / kStep, chunks = parts_of(steps * kWidth * 4 * most, kChunkBytes);
  const int64_t depth = std::max<int64_t>(1, parts_of(steps, std::max<int64_t>(1, chunks))) * kStep;
  // More rows than a thin block takes meet their weights twice, unless that means to unpack them twice.
  const bool thin = m <= (F::kPadded ? kUnpackedCols : kThinMost);
  const int64_t cols = thin ? Thin<F>::M : kCols;
  static thread_local std::vector<vf> own, sums;
  sums.resize(kPanel * kStrip * Thin<F>::R);
  const auto panel = [&](int64_t i, const float* packed) {
    const int64_t rows = std::min(most, m - i * most), group = parts_of(rows, parts_of(rows, cols));
    return Panel{packed + i * most * width, rows, group, columns, padded, depth, 0};
  };
  const float* packed = packed_rows(team, m, panels, m * width, own, [&](int64_t i, float* out) {
    pack_panel<F>(a, panel(i, out), x + i * most * a.ldx, out + i * most * width);
  });
  Panel all[kMostRows / kCols];
  for (int64_t i = 0; i < panels; i++) all[i] = panel(i, packed);
  const int64_t each = parts_of(parts_of(a.n, team.size), Thin<F>::R) * Thin<F>::R;
  const int64_t begin = std::min(a.n, team.id * each), end = std::min(a.n, begin + each);
  if (thin) pass<Thin<F>>(a, all, panels, y, begin, end, sums.data());
  else pass<Wide<F>>(a, all, panels, y, begin, end, sums.data());
}

template <DType D, bool Dot>
void linear(const LinearArgs& a, const Team& team) {
  if (a.m >= kWideFrom) return in_chunks(wide_rows<Turned<Weights<D, Dot>>>, a, team);
  for (int64_t i = 0; i < a.m; i += kMostRows)
    rows<Weights<D, Dot>>(a, a.x + i * a.ldx, a.y + i * a.ldy, std::min(kMostRows, a.m - i), team);
}

}  // namespace

void activations_met(const LinearArgs& a, const float* x, float* out) {
#if defined(HAS_BF16_DOT) || defined(HAS_TILES)
  if (a.round && a.dtype == kBFloat16) {
    std::vector<uint16_t> halves(parts_of(a.k, kStep) * kStep);
    pack<Rounded>(a, x, (float*)halves.data(), LANES);
    for (size_t i = 0; i < halves.size(); i++) out[i] = widen(halves[i]);
    return;
  }
#endif
  pack<Exact>(a, x, out, LANES);
}

void add_normed_share(const LinearArgs& a, const Team& team) {
  const int64_t whole = a.k - a.k % LANES;
  for (int64_t c = team.id; c < a.m; c += team.size) {
    const float* x = a.x + c * a.ldx;
    float* y = a.y + c * a.ldy;
    const Stats s = row_stats(a, x);
    for (int64_t i = 0; i < whole; i += LANES) store(y + i, load(y + i) + prologue(a, x, i, s));
    for (int64_t i = whole; i < a.k; i++) y[i] += a.gamma[i] * (x[i] * s.scale);
  }
}

void linear_share(const LinearArgs& a, const Team& team) {
#ifdef HAS_TILES
  if (a.dtype == kW8A8) return in_chunks(rows_by_tiles<TilesOfBytes>, a, team);
  if (a.round && a.dtype == kBFloat16) return in_chunks(rows_by_tiles<TilesOfBf16>, a, team);
#elif defined(HAS_W8A8)
  if (a.dtype == kW8A8) return in_chunks(wide_rows<Bytes>, a, team);
#endif
#ifdef HAS_BF16_DOT
  if (a.round && a.dtype == kBFloat16) return linear<kBFloat16, true>(a, team);
  if (a.round && a.dtype == kInt8) return linear<kInt8, true>(a, team);
#endif
  switch (a.dtype) {
    case kBFloat16: return linear<kBFloat16, false>(a, team);
    case kInt8: return linear<kInt8, false>(a, team);
    default: return linear<kFloat32, false>(a, team);
  }
}

// What products are made with, the best first.
extern "C" const char* skipdecode_instructions() {
#if defined(SKIPDECODE_EMULATE_TILES)
  return "emulated AMX";
#elif defined(HAS_TILES)
  return "AMX";
#elif defined(__aarch64__) && defined(HAS_BF16_DOT) && defined(__ARM_FEATURE_MATMUL_INT8)
  return "ARM with i8mm and bf16";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "ARM with dotprod";
#elif defined(HAS_BF16_DOT)
  return "AVX-512 with bf16";
#elif defined(__AVX512VNNI__)
  return "AVX-512 with VNNI";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "vectors of 128 bits";
#endif
}

extern "C" int32_t skipdecode_multiplies_bytes() {
#if defined(HAS_W8A8)
  return 1;
#else
  return 0;
#endif
}
