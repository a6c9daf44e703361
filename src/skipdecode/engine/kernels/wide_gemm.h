// Products whose pace is arithmetic's: many activation rows against a weight matrix, and bytes against bytes.
//
// A vector holds one word (an fp32 number, two of bf16, four bytes) of LANES weight rows and meets the same word of an activation
// row, so outputs come out side by side, without sums across a vector.
//
// Weights that lie in rows are turned, a strip at a time, for all activation rows. What is lane l of the narrow kernels' vector
// sum is chain l here, and chains are added in the order of `sums_of`: both give the same bits, so a row's result does not
// depend on which of them its batch took. Sums of bytes are integers, exact in any order; those of groups are added in order.
#pragma once

#include "amx.h"
#include "prologue.h"

namespace {

constexpr int64_t kWideFrom = 48;   // activation rows that repay the turning
constexpr int64_t kWideRows = 512;  // activation rows packed at a time
constexpr int64_t kLongStrip = 128 * 1024;  // bytes
// As many sums of 6 rows as registers hold.
#if defined(__aarch64__)
constexpr int kTileVectors = 4;
#else
constexpr int kTileVectors = LANES == 16 ? 3 : 2;
#endif

// acc[r][v] += the products of M activation rows and V vectors of weight rows over the words from begin to end.
template <class T, int M, int V>
INLINE void add_words(vf (&acc)[M][V], const float*& w, const float* x, int64_t ldx, int64_t begin, int64_t end, int64_t apart,
                      const char*& ahead, int64_t by) {
  for (int64_t i = begin; i < end; i++, w += T::kVectors * LANES, ahead += by) {
    vf part[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      part[v] = T::weights(load(w + v * apart));
      if (T::kFetches) __builtin_prefetch(ahead + 4 * v * apart, 0, 2);
    }
#pragma GCC unroll 8
    for (int r = 0; r < M; r++) {
      const vf word = splat_word(x + r * ldx + i);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) acc[r][v] = hold(T::add_product(part[v], word, acc[r][v]));
    }
  }
}

#ifdef __ARM_FEATURE_MATMUL_INT8
// acc[r][v]: the same of bytes, from zero on, for an even number of activation rows. An instruction multiplies 2 rows of 8 bytes
// by 2 rows of 8 bytes. Two words of 4 weight rows, zipped, are two such operands.
template <int M, int V>
INLINE void add_pairs(vf (&acc)[M][V], const float*& w, const float* x, int64_t ldx, int64_t begin, int64_t end,
                      const char*& ahead, int64_t by) {
  int32x4_t sums[M / 2][V][2] = {};  // [pair][vector][half]: of weight row and activation row, the latter in turn
  for (int64_t i = begin; i < end; i += 2, w += 2 * 4 * LANES, ahead += 2 * by)
    for (int v = 0; v < V; v++) {
      const uint32x4_t first = (uint32x4_t)load(w + v * LANES), second = (uint32x4_t)load(w + (4 + v) * LANES);
      const uint8x16_t low = (uint8x16_t)vzip1q_u32(first, second), high = (uint8x16_t)vzip2q_u32(first, second);
      __builtin_prefetch(ahead + 8 * v * LANES, 0, 2);
      for (int r = 0; r < M / 2; r++) {
        const float* at = x + 2 * r * ldx + i;
        const int8x16_t rows = vcombine_s8(vld1_s8((const int8_t*)at), vld1_s8((const int8_t*)(at + ldx)));
        sums[r][v][0] = vusmmlaq_s32(sums[r][v][0], low, rows), sums[r][v][1] = vusmmlaq_s32(sums[r][v][1], high, rows);
      }
    }
  for (int r = 0; r < M; r += 2)
    for (int v = 0; v < V; v++) {
      const int32x4x2_t rows = vuzpq_s32(sums[r / 2][v][0], sums[r / 2][v][1]);
      acc[r][v] = (vf)rows.val[0], acc[r + 1][v] = (vf)rows.val[1];
    }
}
#endif

// out[r * V + v]: the sums of M activation rows with V vectors of weight rows. w: [vector, chain, part] vectors, or those of a
// block of kVectors side by side: [block, part, vector]; x: M rows, `ldx` floats apart, of [chain, part] words; chains in the
// order in which they are added. `by` bytes a part of each vector or block are fetched from `ahead` on.
template <class T, int M, int V>
__attribute__((noinline)) void tile(const float* w, const float* x, int64_t ldx, int64_t parts, const char* ahead, int64_t by,
                                    vf* out) {
  const int64_t apart = T::kVectors > 1 ? LANES : T::kChains * parts * LANES;
  vf held[4][M * V];  // sums of 1, 2, 4 and 8 chains that wait for as many
  for (int order = 0; order < T::kChains; order++, x += parts) {
    vf acc[M][V] = {};
    add_words<T>(acc, w, x, ldx, 0, parts, apart, ahead, by);
    int level = 0;
    for (; order >> level & 1; level++)
#pragma GCC unroll 32
      for (int i = 0; i < M * V; i++) acc[i / V][i % V] += held[level][i];
    vf* to = order + 1 < T::kChains ? held[level] : out;
#pragma GCC unroll 32
    for (int i = 0; i < M * V; i++) to[i] = acc[i / V][i % V];
  }
}

// The same where groups of words have sums of their own, which are added in order.
template <class T, int M, int V>
__attribute__((noinline)) void tile_of_groups(const float* w, const float* x, int64_t ldx, int64_t parts, const char* ahead,
                                              int64_t by, vf* out) {
  const int64_t apart = T::kVectors > 1 ? LANES : parts * LANES;
  vf total[M][V] = {};
  for (int64_t begin = 0; begin < parts; begin += T::kGroupWords) {
    vf acc[M][V];  // GCC copies all of them in each iteration where it knows what they begin with
#pragma GCC unroll 32
    for (int i = 0; i < M * V; i++) acc[i / V][i % V] = hold(vf{});
    const int64_t end = std::min(parts, begin + T::kGroupWords);
#ifdef __ARM_FEATURE_MATMUL_INT8
    if constexpr (M > 1) add_pairs(acc, w, x, ldx, begin, end, ahead, by);
    else
#endif
    add_words<T>(acc, w, x, ldx, begin, end, apart, ahead, by);
    const float* behind = x + parts + begin / T::kGroupWords * 2;
#pragma GCC unroll 8
    for (int r = 0; r < M; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) total[r][v] = T::add_group(acc[r][v], behind + r * ldx, total[r][v]);
  }
#pragma GCC unroll 32
  for (int i = 0; i < M * V; i++) out[i] = total[i / V][i % V];
}

// Weights that lie in rows.
template <class F>
struct Turned {
  static constexpr int kChains = LANES, kVectors = 1, kRows = 6, kLeastVectors = 2, kGroupWords = 0;
  static constexpr bool kFetches = false;  // by the tile; the rows are fetched while tiles of those before them run
  static int64_t parts(const LinearArgs& a) { return parts_of(a.k, kStep) * F::kParts; }
  static int64_t row_size(const LinearArgs& a) { return kChains * parts(a); }
  INLINE vf weights(vf w) { return w; }
  INLINE vf add_product(vf w, vf x, vf sum) { return F::add_product(w, x, sum); }

  static void pack_row(const LinearArgs& a, const float* x, float* out, std::vector<vf>& scratch) {
    const int64_t count = parts(a);
    scratch.resize(count + LANES);
    pack<F>(a, x, (float*)scratch.data(), LANES);
    for (int64_t i = 0; i < count; i += LANES) {
      vf t[LANES];
      std::copy(scratch.data() + i, scratch.data() + i + LANES, t);
      turn(t);
      for (int64_t order = 0; order < LANES; order++) store_some(out + order * count + i, count - i, t[chain(order)]);
    }
  }

  // LANES weight rows from `n` on; past the last row, the last one.
  static void turn_rows(const LinearArgs& a, int64_t n, float* out) {
    const int64_t count = parts(a), padded = count / F::kParts * kStep, columns = F::kPadded ? padded : a.k / kStep * kStep;
    typename F::Row rows[LANES];
    for (int64_t r = 0; r < LANES; r++) rows[r] = F::row(a, std::min(n + r, a.n - 1), 0);
    const auto put = [&](const typename F::Row* from, int64_t k, int64_t to) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int p = 0; p < F::kParts; p++) {
        vf t[LANES];
#pragma GCC unroll 16
        for (int r = 0; r < LANES; r++) t[r] = F::part(from[r], k, p);
        turn(t);
#pragma GCC unroll 16
        for (int order = 0; order < LANES; order++)
          store(out + (order * count + to / kStep * F::kParts + p) * LANES, t[chain(order)]);
      }
    };
    for (int64_t k = 0; k < columns; k += kStep) put(rows, k, k);
    if (columns == padded) return;
    for (auto& row : rows) row += columns;
    put(Tail<F, LANES>(a, rows).rows, 0, columns);
  }

  static const float* strip(const LinearArgs& a, int64_t n, int64_t vectors, std::vector<vf>& memory) {
    memory.resize(std::max<int64_t>(memory.size(), kTileVectors * LANES * parts(a)));
    float* w = (float*)memory.data();
    for (int64_t v = 0; v < vectors; v++) turn_rows(a, n + v * LANES, w + v * LANES * parts(a) * LANES);
    return w;
  }
};

#if defined(__AVX512VNNI__) || (LANES == 8 && defined(__AVX2__)) || defined(__ARM_FEATURE_DOTPROD)
#define HAS_W8A8 1
// Bytes: weights as 128 more than they are, in blocks of 16 rows ([part, row, 4 columns], see weights.py); activations rounded
// to 127ths of the largest in their group of columns. Behind a packed row lie, for each group, its scale and what its sums have
// too much. Groups are as short as tiles allow, which are stored at the end of each (W8A8 of 0.5B, KL to bf16: one group 4.1e-3,
// groups of 512 1.8e-3, of 256 1.3e-3, of 64 0.9e-3).
struct Bytes {
  static constexpr int kVectors = 16 / LANES, kRows = 4, kLeastVectors = kVectors, kGroupWords = 64;
  static constexpr bool kFetches = true;
  static int64_t parts(const LinearArgs& a) { return a.ldw / 4; }
  static int64_t row_size(const LinearArgs& a) {
    return parts(a) + parts_of(2 * parts_of(parts(a), kGroupWords), LANES) * LANES;
  }
#if defined(HAS_TILES) || defined(__AVX512VNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
  static constexpr int32_t kTooMuch = 128;  // weights are multiplied as they lie
#else
  static constexpr int32_t kTooMuch = 0;
#endif
  INLINE vf weights(vf w) { return kTooMuch ? w : (vf)((vu)w ^ 0x80808080u); }
#if LANES == 16
  INLINE vf add_product(vf w, vf x, vf sum) { return (vf)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
  INLINE vi whole_numbers(vf v) { return (vi)_mm512_cvtps_epi32((__m512)v); }
  INLINE void put_bytes(float* out, vi codes) { _mm_storeu_si128((__m128i*)out, _mm512_cvtsepi32_epi8((__m512i)codes)); }
#elif defined(__aarch64__)
#ifdef __ARM_FEATURE_MATMUL_INT8
  INLINE vf add_product(vf w, vf x, vf sum) { return (vf)vusdotq_s32((int32x4_t)sum, (uint8x16_t)w, (int8x16_t)x); }
#else
  INLINE vf add_product(vf w, vf x, vf sum) { return (vf)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x); }
#endif
  INLINE vi whole_numbers(vf v) { return (vi)vcvtnq_s32_f32((float32x4_t)v); }
  INLINE void put_bytes(float* out, vi codes) {
    const int8x8_t bytes = vqmovn_s16(vcombine_s16(vqmovn_s32((int32x4_t)codes), vdup_n_s16(0)));
    memcpy(out, &bytes, 4);
  }
#else
  // Two products of at most 127 * 127 fit 16 bits.
  INLINE vf add_product(vf w, vf x, vf sum) {
    const __m256i signs = _mm256_sign_epi8((__m256i)w, (__m256i)x), pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)x), signs);
    return (vf)((vi)sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  INLINE vi whole_numbers(vf v) { return (vi)_mm256_cvtps_epi32((__m256)v); }
  INLINE void put_bytes(float* out, vi codes) {
    const __m256i c = (__m256i)codes;
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
    _mm_storel_epi64((__m128i*)out, _mm_packs_epi16(words, words));
  }
#endif
  // `total` and the integer sum of a group of columns, of which `behind` has what lies behind the row.
  INLINE vf add_group(vf sum, const float* behind, vf total) {
    int32_t more;
    memcpy(&more, behind + 1, 4);
    return fma(__builtin_convertvector((vi)sum - more, vf), splat(behind[0]), total);
  }

  static void pack_row(const LinearArgs& a, const float* x, float* out, std::vector<vf>& scratch) {
    const int64_t count = a.ldw / LANES;
    scratch.resize(count);
    pack<Exact>(a, x, (float*)scratch.data(), LANES);
    constexpr int64_t group = 4 * kGroupWords / LANES;
    float* behind = out + parts(a);
    for (int64_t begin = 0; begin < count; begin += group, behind += 2)
      pack_group(scratch.data() + begin, std::min(group, count - begin), out + begin * LANES / 4, behind);
  }

  static void pack_group(const vf* x, int64_t count, float* out, float* behind) {
    vf most{};
    for (int64_t i = 0; i < count; i++) most = larger(magnitude(x[i]), most);
    const float largest = std::max(1e-30f, largest_lane(most));
    vi sums{};
    for (int64_t i = 0; i < count; i++) {
      const vi codes = whole_numbers(x[i] * (127.0f / largest));
      sums += codes;
      put_bytes(out + i * LANES / 4, codes);
    }
    int32_t more = 0;
    for (int i = 0; i < LANES; i++) more += kTooMuch * sums[i];
    behind[0] = largest / 127.0f;
    memcpy(behind + 1, &more, 4);
  }

  static const float* strip(const LinearArgs& a, int64_t n, int64_t, std::vector<vf>&) {
    return (const float*)((const char*)a.w + n * a.ldw);
  }
};
#endif

// Fetches a part of the weight rows that come next, so that all of them are there when the last part was asked for.
INLINE void fetch_part(const LinearArgs& a, int64_t n, int64_t rows, int64_t part, int64_t next, int64_t of) {
  const char* begin = (const char*)a.w + n * a.ldw;
  const int64_t lines = std::max<int64_t>(0, std::min(rows, a.n - n)) * a.ldw / 64;
  for (int64_t i = lines * part / of; i < lines * next / of; i++) __builtin_prefetch(begin + i * 64, 0, 2);
}

// How a team shares a product out: so many threads side by side over the blocks of weight rows, the others over the activation rows.
INLINE int64_t threads_across(int64_t blocks, int64_t tiles, int64_t size) {
  int64_t best = size, least = INT64_MAX;
  for (int64_t across = size; across > 0; across--) {
    const int64_t down = size / across, work = parts_of(blocks, across) * parts_of(tiles, down);
    if (size % across == 0 && work < least) best = across, least = work;
  }
  return best;
}

// Where a tile's outputs are: of the activation rows y and the packed ones x, `rows` of them, and of the weight rows from n on,
// `vectors` of which the matrix has; and what it fetches.
struct Corner {
  const float *w, *x;
  float* y;
  int64_t n, rows, vectors, by;
  const char* ahead;
};

template <class T, int M, int V = kTileVectors>
INLINE void tile_of(const LinearArgs& a, const Corner& at) {
  if constexpr (V > T::kLeastVectors) {
    if (at.vectors < V) return tile_of<T, M, V - 1>(a, at);
  }
  const int64_t parts = T::parts(a), ldx = T::row_size(a);
  const int64_t rows = std::min<int64_t>(M, at.rows);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t v = 0; v < at.vectors; v++) __builtin_prefetch(at.y + r * a.ldy + at.n + v * LANES, 1);
  vf sums[M * V];
  if constexpr (T::kGroupWords > 0) tile_of_groups<T, M, V>(at.w, at.x, ldx, parts, at.ahead, at.by, sums);
  else tile<T, M, V>(at.w, at.x, ldx, parts, at.ahead, at.by, sums);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t v = 0; v < at.vectors; v++) {
      const int64_t n = at.n + v * LANES;
      write(a, at.y + r * a.ldy, n, std::min<int64_t>(LANES, a.n - n), sums[r * V + v]);
    }
}

// The activation rows of the next tile where so many are left: what in the end leaves the fewest over.
template <class T>
INLINE int64_t tile_rows(int64_t left) {
  if (T::kRows == 4) return std::min<int64_t>(left, 4) == 3 ? 4 : std::min<int64_t>(left, 4);
  return left % 6 == 0 || left % 6 == 5 ? 6 : 4;
}

// Up to kWideRows rows.
template <class T>
void wide_rows(const LinearArgs& a, const float* x, float* y, int64_t m, const Team& team) {
  static thread_local std::vector<vf> memory, rows;
  constexpr int64_t kBlock = T::kVectors * LANES;  // weight rows
  const int64_t size = T::row_size(a), blocks = parts_of(a.n, kBlock);
  const float* packed = packed_rows(team, m, m, (m + T::kRows) * size, rows, [&](int64_t c, float* out) {
    T::pack_row(a, x + c * a.ldx, out + c * size, memory);
  });
  const int64_t across = threads_across(blocks, parts_of(m, T::kRows), team.size), down = team.size / across;
  const int64_t mine = team.id % across, begin = blocks * mine / across, count = blocks * (mine + 1) / across - begin;
  const int64_t first = m * (team.id / across) / down, last = m * (team.id / across + 1) / down;
  const int64_t strips = parts_of(count, kTileVectors / T::kVectors);
  for (int64_t s = 0; s < strips; s++) {
    const int64_t from = begin + count * s / strips, width = (begin + count * (s + 1) / strips - from) * T::kVectors;
    const int64_t n = from * kBlock, vectors = std::min(width, parts_of(a.n - n, LANES));
    const float* w = T::strip(a, n, std::max<int64_t>(width, T::kLeastVectors), memory);
    for (int64_t c = first, next; c < last; c = next) {
      const int64_t left = last - c, rows = tile_rows<T>(left);
      next = std::min(last, c + rows);
      if (!T::kFetches) fetch_part(a, n + width * LANES, kTileVectors * LANES, c - first, next - first, last - first);
      // Tiles fetch the next strip in equal shares. A single tile of long rows leaves that to the CPU, which follows their streams.
      const bool alone = last - first <= rows && width * LANES * a.ldw > kLongStrip;
      const int64_t ahead = alone ? 0 : width * LANES * a.ldw + kBlock * a.ldw * (c - first) / (last - first);
      const int64_t by = alone ? 0 : kBlock * 4 * (next - c) / (last - first);
      const Corner at{w, packed + c * size, y + c * a.ldy, n, left, vectors, by, (const char*)w + ahead};
      if (rows == 4) tile_of<T, 4>(a, at);
      else if constexpr (T::kRows == 6) tile_of<T, 6>(a, at);
      else if (rows == 2) tile_of<T, 2>(a, at);
      else tile_of<T, 1>(a, at);
    }
  }
}

// A function of up to kWideRows rows on all of them.
template <class Rows>
void in_chunks(Rows rows, const LinearArgs& a, const Team& team) {
  const int64_t chunks = parts_of(a.m, kWideRows);
  for (int64_t i = 0; i < chunks; i++) {
    const int64_t begin = a.m * i / chunks, end = a.m * (i + 1) / chunks;
    rows(a, a.x + begin * a.ldx, a.y + begin * a.ldy, end - begin, team);
  }
}

}  // namespace
