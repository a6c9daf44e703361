// AMX: eight tiles of up to 16 rows of 64 bytes, behind the functions that everything else uses them by. Without the hardware,
// SKIPDECODE_EMULATE_TILES compiles the same functions in plain C++, as Intel's manual defines the instructions.
//
// Shapes belong to a thread, and tiles cost a thread's switch as long as they are in use: whoever shapes them, releases them.
#pragma once

#include "vectors.h"

#if defined(SKIPDECODE_EMULATE_TILES) || (defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__))
#define HAS_TILES 1

constexpr int64_t kTile = 16;            // rows of a tile, and its columns of 4 bytes
constexpr int64_t kTileRowBytes = 64;    // what a product takes of a row: one step of it
constexpr int64_t kTileBytes = kTile * kTileRowBytes;

// What LDTILECFG reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int64_t count, int64_t columns) { rows[tile] = count, row_bytes[tile] = 4 * columns; }
  bool operator==(const TileShapes& other) const { return !memcmp(this, &other, sizeof(other)); }
};

#ifdef SKIPDECODE_EMULATE_TILES

struct EmulatedTiles {
  TileShapes shapes;
  uint32_t words[8][kTile][kTile];
};
static thread_local EmulatedTiles emulated;

// The hardware raises a signal too.
INLINE void needed(bool right) {
  if (!right) __builtin_trap();
}

INLINE void shape_tiles(const TileShapes& shapes) { emulated.shapes = shapes, memset(emulated.words, 0, sizeof(emulated.words)); }
INLINE void release_tiles() { emulated.shapes = TileShapes(); }

// Product: S += L * R, where a row of R holds as many columns of 4 bytes as a row of S, and there is one for each 4 bytes of L.
template <int S, int L, int R>
INLINE void check_product() {
  const TileShapes& is = emulated.shapes;
  needed(is.rows[S] && is.rows[S] == is.rows[L] && is.row_bytes[S] == is.row_bytes[R] && is.row_bytes[L] == 4 * is.rows[R]);
}

template <int T>
INLINE void zero_tile() {
  needed(emulated.shapes.rows[T]);
  memset(emulated.words[T], 0, kTileBytes);
}

template <int T>
INLINE void load_tile(const void* from, int64_t stride) {
  zero_tile<T>();
  for (int64_t r = 0; r < emulated.shapes.rows[T]; r++)
    memcpy(emulated.words[T][r], (const char*)from + r * stride, emulated.shapes.row_bytes[T]);
}

template <int T>
INLINE void store_tile(void* to, int64_t stride) {
  needed(emulated.shapes.rows[T]);
  for (int64_t r = 0; r < emulated.shapes.rows[T]; r++)
    memcpy((char*)to + r * stride, emulated.words[T][r], emulated.shapes.row_bytes[T]);
}

template <int S, int L, int R>
INLINE void add_product_of_bytes() {
  check_product<S, L, R>();
  for (int64_t m = 0; m < emulated.shapes.rows[S]; m++)
    for (int64_t k = 0; k < emulated.shapes.rows[R]; k++)
      for (int64_t n = 0; n < kTile; n++) {
        const uint32_t left = emulated.words[L][m][k], right = emulated.words[R][k][n];
        for (int shift = 0; shift < 32; shift += 8)
          emulated.words[S][m][n] += (int32_t)(int8_t)(left >> shift) * (int32_t)(uint8_t)(right >> shift);
      }
}

template <int S, int L, int R>
INLINE void add_product_of_bf16() {
  check_product<S, L, R>();
  for (int64_t m = 0; m < emulated.shapes.rows[S]; m++) {
    float even[kTile] = {}, odd[kTile] = {}, sums[kTile];
    for (int64_t k = 0; k < emulated.shapes.rows[R]; k++)
      for (int64_t n = 0; n < kTile; n++) {
        const uint32_t left = emulated.words[L][m][k], right = emulated.words[R][k][n];
        even[n] += widen((uint16_t)left) * widen((uint16_t)right);
        odd[n] += widen((uint16_t)(left >> 16)) * widen((uint16_t)(right >> 16));
      }
    memcpy(sums, emulated.words[S][m], sizeof(sums));
    for (int64_t n = 0; n < kTile; n++) sums[n] += even[n] + odd[n];
    memcpy(emulated.words[S][m], sums, sizeof(sums));
  }
}

#else

// Spelled out, because a compiler's intrinsics take no template argument for a tile, and older ones do not say that memory is read.
INLINE void shape_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
INLINE void release_tiles() { asm volatile("tilerelease"); }

template <int T>
INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int T>
INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
INLINE void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

template <int S, int L, int R>
INLINE void add_product_of_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(S), "i"(L), "i"(R));
}

template <int S, int L, int R>
INLINE void add_product_of_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(S), "i"(L), "i"(R));
}

#endif

// This thread's tiles, as long as it is in scope.
class Tiles {
 public:
  ~Tiles() { release_tiles(); }
  void shape(const TileShapes& wanted) {
    if (!(wanted == shapes_)) shape_tiles(shapes_ = wanted);
  }

 private:
  TileShapes shapes_;
};
#endif
