// Products by tiles, for any number of activation rows: bytes, and weights of bf16 as they lie in rows.
//
// A product of tiles has a left side, 16 rows that lie anywhere, and a right side in words: [word, column]. W8A8's blocks of
// weights are a right side as they are; bf16 weights are the left side, and the activations are packed as the right one. So
// neither is stored twice or in another order. An output is one chain of sums in the order of k, whatever the other rows are; of
// bytes, a chain of the sums of groups.
#pragma once

#include "amx.h"
#include "wide_gemm.h"

#ifdef HAS_TILES

namespace {

constexpr int64_t kTileSums = 4 * kTile * kTile;    // of two tiles by two
constexpr int64_t kPanelBytes = 1024 * 1024;        // packed activations that stay in L2 while weights pass
constexpr int64_t kSlabStrips = 8;                  // strips of weights whose sums are held, where rows are read in parts

// A tile of an operand: where it is, and how far apart its rows are. Along k the next one is 64 bytes on of a left side, and
// 16 rows on of a right one.
struct TileSource {
  const char* at;
  int64_t stride;
};

// Lines to fetch, in runs `skip` bytes apart.
struct TileFetch {
  const char* at;
  int64_t run, skip, rest, lines;
  void lines_of_step(int64_t count) {
    for (; count && lines; count--, lines--) {
      __builtin_prefetch(at, 0, 2);
      at += 64;
      if (--rest == 0) at += skip, rest = run;
    }
  }
};

// sums[l][r] += the product of tiles l and r over `steps`, while `each` lines a step are fetched.
template <class T, int L, int R>
__attribute__((noinline)) void sums_of_tiles(const TileSource* left, const TileSource* right, int64_t steps, bool first,
                                             TileFetch& next, int64_t each, float* sums) {
  constexpr int64_t size = kTile * kTile;
  const int64_t stride = left->stride, ahead = kTile * right[0].stride, ahead1 = kTile * right[R - 1].stride;
  const char *l0 = left[0].at, *l1 = left[L - 1].at, *r0 = right[0].at, *r1 = right[R - 1].at;
  TileFetch fetch = next;
  if (first) {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  } else {
    load_tile<0>(sums, kTileRowBytes);
    if constexpr (R > 1) load_tile<1>(sums + size, kTileRowBytes);
    if constexpr (L > 1) load_tile<2>(sums + 2 * size, kTileRowBytes);
    if constexpr (L > 1 && R > 1) load_tile<3>(sums + 3 * size, kTileRowBytes);
  }
  for (; steps; steps--, l0 += kTileRowBytes, l1 += kTileRowBytes, r0 += ahead, r1 += ahead1) {
    fetch.lines_of_step(each);
    load_tile<4>(l0, stride);
    load_tile<6>(r0, right[0].stride);
    T::template add_product<0, 4, 6>();
    if constexpr (R > 1) {
      load_tile<7>(r1, right[1].stride);
      T::template add_product<1, 4, 7>();
    }
    if constexpr (L > 1) {
      load_tile<5>(l1, stride);
      T::template add_product<2, 5, 6>();
      if constexpr (R > 1) T::template add_product<3, 5, 7>();
    }
  }
  store_tile<0>(sums, kTileRowBytes);
  if constexpr (R > 1) store_tile<1>(sums + size, kTileRowBytes);
  if constexpr (L > 1) store_tile<2>(sums + 2 * size, kTileRowBytes);
  if constexpr (L > 1 && R > 1) store_tile<3>(sums + 3 * size, kTileRowBytes);
  next = fetch;
}

// Activations in rows, each with what `Bytes` puts behind it; weights in blocks.
struct TilesOfBytes {
  static constexpr bool kWeightsLeft = false;
  static constexpr int64_t kRunRows = kTile;  // weight rows that lie together, step by step
  static int64_t steps(const LinearArgs& a) { return a.ldw / kTileRowBytes; }
  static constexpr int64_t kGroupSteps = 4 * Bytes::kGroupWords / kTileRowBytes;
  static int64_t row_size(const LinearArgs& a) { return Bytes::row_size(a); }
  static int64_t group_size(const LinearArgs& a) { return kTile * row_size(a); }
  static int64_t weight_rows(const LinearArgs&, int64_t) { return kTile; }  // blocks are padded
  template <int S, int L, int R>
  INLINE void add_product() { add_product_of_bytes<S, L, R>(); }

  static void pack_group(const LinearArgs& a, const float* x, int64_t rows, float* out, std::vector<vf>& scratch) {
    for (int64_t r = 0; r < rows; r++) Bytes::pack_row(a, x + r * a.ldx, out + r * row_size(a), scratch);
  }
  static TileSource weights(const LinearArgs& a, int64_t n, int64_t step) {
    return {(const char*)a.w + n * a.ldw + step * kTileBytes, kTileRowBytes};
  }
  static TileSource activations(const LinearArgs& a, const float* group, int64_t, int64_t step) {
    return {(const char*)group + step * kTileRowBytes, 4 * row_size(a)};
  }
  // sums += the integers of the group of columns at `step`.
  static void add_group(const LinearArgs& a, const float* integers, const float* group, int64_t rows, int64_t step, float* sums) {
    const float* behind = group + Bytes::parts(a) + step / kGroupSteps * 2;
    for (int64_t r = 0; r < rows; r++, behind += row_size(a))
      for (int64_t i = r * kTile; i < (r + 1) * kTile; i += LANES)
        store(sums + i, Bytes::add_group(load(integers + i), behind, step ? load(sums + i) : vf{}));
  }
  static void put(const LinearArgs& a, const float* sums, int64_t rows, int64_t n, float* y) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < kTile && n + i < a.n; i += LANES)
        write(a, y + r * a.ldy, n + i, std::min<int64_t>(LANES, a.n - n - i), load(sums + r * kTile + i));
  }
};

// Activations rounded to bf16, two to a word: [word, row].
struct TilesOfBf16 {
  static constexpr bool kWeightsLeft = true;
  static constexpr int64_t kRunRows = 1, kGroupSteps = 1, kColumns = kTileRowBytes / 2;  // columns of a step
  static int64_t steps(const LinearArgs& a) { return parts_of(a.k, kColumns); }
  static int64_t whole(const LinearArgs& a) { return a.k / kColumns; }
  static int64_t words(const LinearArgs& a) { return parts_of(a.k, kStep) * kStep / 2; }
  static int64_t group_size(const LinearArgs& a) { return kTile * words(a); }
  static int64_t weight_rows(const LinearArgs& a, int64_t n) { return std::min(kTile, a.n - n); }
  template <int S, int L, int R>
  INLINE void add_product() { add_product_of_bf16<S, L, R>(); }

  // Vectors are stored at full length; what is too much of one lies where the next words come.
  static void pack_group(const LinearArgs& a, const float* x, int64_t rows, float* out, std::vector<vf>& scratch) {
    if (rows == 1) return pack<Rounded>(a, x, out, LANES);
    constexpr int64_t parts = kTile / LANES;
    const int64_t count = words(a);
    scratch.resize(kTile * count / LANES);
    float* in = (float*)scratch.data();
    for (int64_t r = 0; r < rows; r++) pack<Rounded>(a, x + r * a.ldx, in + r * count, LANES);
    for (int64_t i = 0; i < count; i += LANES) {
      vf t[kTile];
      for (int64_t p = 0; p < parts; p++) {
        for (int64_t r = 0; r < LANES; r++) t[p * LANES + r] = load(in + (p * LANES + r) * count + i);
        turn(t + p * LANES);
      }
      for (int64_t j = 0; j < LANES; j++)
        for (int64_t p = 0; p < parts; p++) store(out + (i + j) * rows + p * LANES, t[p * LANES + j]);
    }
  }
  static TileSource weights(const LinearArgs& a, int64_t n, int64_t step) {
    return {(const char*)a.w + n * a.ldw + step * kTileRowBytes, a.ldw};
  }
  static TileSource activations(const LinearArgs&, const float* group, int64_t rows, int64_t step) {
    return {(const char*)(group + step * kTile * rows), 4 * rows};
  }
  static void put(const LinearArgs& a, const float* sums, int64_t rows, int64_t n, float* y) {
    for (int64_t i = 0; i < kTile && n + i < a.n; i += LANES)
      for (int64_t c = 0; c < rows; c += LANES) {
        vf t[LANES];
        for (int64_t r = 0; r < LANES; r++) t[r] = load(sums + (i + r) * kTile + c);
        turn(t);
        for (int64_t r = 0; r < std::min<int64_t>(LANES, rows - c); r++)
          write(a, y + (c + r) * a.ldy, n + i, std::min<int64_t>(LANES, a.n - n - i), t[r]);
      }
  }
};

// The step behind the whole ones, of up to two tiles of weight rows copied to where zeros follow them.
struct TileTail {
  alignas(64) char rows[2 * kTile][kTileRowBytes] = {};
  TileTail(const LinearArgs& a, int64_t n, int64_t count) {
    const int64_t bytes = a.ldw % kTileRowBytes;
    for (int64_t r = 0; r < count; r++) memcpy(rows[r], (const char*)a.w + (n + r + 1) * a.ldw - bytes, bytes);
  }
};

// A strip of weights, two tiles of rows at most, against a pair of groups of activation rows.
template <class T>
struct TileBlock {
  int64_t n, tiles;          // weights: first row, tiles
  const float* x;            // packed groups
  int64_t rows;              // of all groups from here on
  int64_t groups() const { return rows > kTile ? 2 : 1; }
  int64_t rows_of(int64_t group) const { return std::min(kTile, rows - group * kTile); }

  TileShapes shapes(const LinearArgs& a) const {
    TileShapes made;
    for (int i = 0; i < 2; i++) {
      const int64_t weights = T::weight_rows(a, n + (i < tiles ? i : 0) * kTile), inputs = rows_of(i < groups() ? i : 0);
      const int64_t left = T::kWeightsLeft ? weights : inputs;
      for (int s : {2 * i, 2 * i + 1}) made.rows[s] = left;
      made.set(4 + i, left, kTile);
      const int64_t columns = T::kWeightsLeft ? inputs : kTile;
      for (int s : {i, i + 2}) made.row_bytes[s] = 4 * columns;
      made.set(6 + i, kTile, columns);
    }
    return made;
  }

  void add(const LinearArgs& a, int64_t step, int64_t steps, TileFetch& next, int64_t each, float* sums) const {
    if constexpr (T::kGroupSteps > 1) {
      for (const int64_t end = step + steps; step < end; step += T::kGroupSteps)
        add_group(a, step, std::min(T::kGroupSteps, end - step), next, each, sums);
    } else {
      add_in_order(a, step, steps, next, each, sums);
    }
  }

  void add_in_order(const LinearArgs& a, int64_t step, int64_t steps, TileFetch& next, int64_t each, float* sums) const {
    const int64_t whole = std::min(steps, T::whole(a) - step);
    TileSource weights[2], inputs[2];
    for (int64_t i = 0; i < 2; i++) {
      weights[i] = T::weights(a, n + i * kTile, step);
      inputs[i] = T::activations(a, x + i * T::group_size(a), rows_of(i), step);
    }
    if (whole) add(weights, inputs, whole, step == 0, next, each, sums);
    if (whole == steps) return;
    const TileTail tail(a, n, std::min(tiles * kTile, a.n - n));
    for (int64_t i = 0; i < 2; i++) {
      weights[i] = {tail.rows[i * kTile], kTileRowBytes};
      inputs[i].at += whole * kTile * inputs[i].stride;  // on the right side
    }
    add(weights, inputs, 1, step + whole == 0, next, each, sums);
  }

  void add_group(const LinearArgs& a, int64_t step, int64_t steps, TileFetch& next, int64_t each, float* sums) const {
    alignas(64) float integers[kTileSums];
    TileSource weights[2], inputs[2];
    for (int64_t i = 0; i < 2; i++) {
      weights[i] = T::weights(a, n + i * kTile, step);
      inputs[i] = T::activations(a, x + i * T::group_size(a), rows_of(i), step);
    }
    add(weights, inputs, steps, true, next, each, integers);
    for (int64_t w = 0; w < tiles; w++)
      for (int64_t g = 0; g < groups(); g++) {
        const int64_t at = (2 * g + w) * kTile * kTile;
        T::add_group(a, integers + at, x + g * T::group_size(a), rows_of(g), step, sums + at);
      }
  }

  void add(const TileSource* weights, const TileSource* inputs, int64_t steps, bool first, TileFetch& next, int64_t each,
           float* sums) const {
    const TileSource *left = T::kWeightsLeft ? weights : inputs, *right = T::kWeightsLeft ? inputs : weights;
    const bool two_left = (T::kWeightsLeft ? tiles : groups()) > 1, two_right = (T::kWeightsLeft ? groups() : tiles) > 1;
    const auto sums_of = two_left ? two_right ? sums_of_tiles<T, 2, 2> : sums_of_tiles<T, 2, 1>
                                  : two_right ? sums_of_tiles<T, 1, 2> : sums_of_tiles<T, 1, 1>;
    sums_of(left, right, steps, first, next, each, sums);
  }

  void put(const LinearArgs& a, const float* sums, float* y) const {
    for (int64_t w = 0; w < tiles; w++)
      for (int64_t g = 0; g < groups(); g++) {
        const float* of = sums + (T::kWeightsLeft ? 2 * w + g : 2 * g + w) * kTile * kTile;
        T::put(a, of, rows_of(g), n + w * kTile, y + g * kTile * a.ldy);
      }
  }
};

// The lines of `steps` steps of the weights of `tiles` tiles of rows.
template <class T>
TileFetch fetch_of_tiles(const LinearArgs& a, int64_t n, int64_t tiles, int64_t step, int64_t steps) {
  const int64_t rows = std::min(tiles * kTile, parts_of(a.n - n, T::kRunRows) * T::kRunRows), run = steps * T::kRunRows;
  return {T::weights(a, n, step).at, run, T::kRunRows * a.ldw - run * kTileRowBytes, run, run * rows / T::kRunRows};
}

// Up to kWideRows rows. Where the packed activations of a thread are too many for L2, weights are read in parts of their rows, a
// slab of strips at a time.
template <class T>
void rows_by_tiles(const LinearArgs& a, const float* x, float* y, int64_t m, const Team& team) {
  static thread_local std::vector<vf> memory, own, held;
  const int64_t size = T::group_size(a), groups = parts_of(m, kTile), blocks = parts_of(a.n, kTile);
  const float* packed = packed_rows(team, m, groups, groups * size, own, [&](int64_t g, float* out) {
    T::pack_group(a, x + g * kTile * a.ldx, std::min(kTile, m - g * kTile), out + g * size, memory);
  });
  const int64_t across = threads_across(blocks, groups, team.size), down = team.size / across, mine = team.id % across;
  const int64_t begin = blocks * mine / across, count = blocks * (mine + 1) / across - begin, strips = parts_of(count, 2);
  const int64_t first = groups * (team.id / across) / down, last = groups * (team.id / across + 1) / down;
  const int64_t steps = T::steps(a), parts = parts_of((last - first) * kTile * steps * kTileRowBytes, kPanelBytes);
  const int64_t pairs = parts_of(last - first, 2), slab = parts > 1 ? kSlabStrips : 1;
  if (!pairs || !strips) return;
  const int64_t depth = parts_of(parts_of(steps, parts), T::kGroupSteps) * T::kGroupSteps;
  held.resize(parts_of((parts > 1 ? slab * pairs : 1) * kTileSums, LANES));
  const auto block_at = [&](int64_t strip) { return begin + count * strip / strips; };
  const auto fetch_at = [&](int64_t strip, int64_t step) {
    return fetch_of_tiles<T>(a, block_at(strip) * kTile, block_at(strip + 1) - block_at(strip), step, std::min(depth, steps - step));
  };
  TileFetch next = fetch_at(0, 0);
  next.lines_of_step(next.lines);
  Tiles tiles;
  for (int64_t s0 = 0; s0 < strips; s0 += slab)
    for (int64_t step = 0; step < steps; step += depth)
      for (int64_t s = s0, end = std::min(strips, s0 + slab); s < end; s++) {
        const bool finished = step + depth >= steps;
        if (s + 1 < end) next = fetch_at(s + 1, step);
        else if (!finished) next = fetch_at(s0, step + depth);
        else if (end < strips) next = fetch_at(end, 0);
        const int64_t now = std::min(depth, steps - step), each = parts_of(next.lines, pairs * now);
        for (int64_t pair = 0; pair < pairs; pair++) {
          const int64_t group = first + 2 * pair, row = group * kTile;
          const TileBlock<T> block{block_at(s) * kTile, block_at(s + 1) - block_at(s), packed + group * size,
                                   std::min(m, last * kTile) - row};
          float* sums = (float*)held.data() + (parts > 1 ? (s - s0) * pairs + pair : 0) * kTileSums;
          tiles.shape(block.shapes(a));
          block.add(a, step, now, next, each, sums);
          if (finished) block.put(a, sums, y + row * a.ldy);
        }
      }
}

}  // namespace
#endif
