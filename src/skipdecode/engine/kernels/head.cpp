// The tokens that can be the most probable ones of a row, found in an 8-bit copy of the output embedding, and their logits of
// the full head.
//
// A token's score is off by no more than a bound that holds on any input (docs/theory.md). A row's state is
// rounded to 8 bits, and 15 where it is large, so that all sums are whole numbers; the logits come from the full head's own kernel.
#include <algorithm>
#include <functional>
#include <vector>

#include "amx.h"
#include "prologue.h"

extern "C" {
// Mirrored field by field in head.py.
struct LikeliestArgs {
  const LinearArgs* head;  // the full head; its x, ldx and m are those of the call
  const uint8_t* codes;    // [groups, padded k / 4, kWords, 4]: each 128 more than it stands for
  const float* scales;     // [groups * kWords], and so are the next three
  const float* errors;     // a bound on a score's error over the norm of the state,
  const float* norms;      // and over the norm of what the rounding leaves out
  const float* bias;       // or null
  const int32_t* tops;     // [m]: how many of the most probable tokens are wanted
  int64_t* best;           // [m]: the most probable token, the first of equals
  int64_t* token_ids;      // [m, most]: the tokens that can be wanted, ascending,
  float* logits;           // and their logits
  int64_t* counts;         // [m]: how many there are; -1: more than `most`, or the state has no bound
  int64_t most;
};
}

#if defined(__AVX512VNNI__) || defined(HAS_TILES)

namespace {

constexpr int64_t kWords = 64;               // of a group
constexpr int kVectors = kWords / LANES;     // of its sums with a part of a row
#ifdef HAS_TILES
constexpr int kCols = kTile / 2;  // rows of which both parts fit a tile
#else
constexpr int kCols = 6;  // rows that meet a group in registers
constexpr int kFew = 3;   // rows of which both parts fit beside each other
#endif
constexpr int64_t kPeaks = 16;
constexpr float kLargest = 1e20f, kLeast = 1e-30f, kTiny = 1e-20f;

struct State {
  float scale, norm, rest;
  int32_t sums[2];
  bool bounded;
  std::vector<int64_t> peaks;  // columns, the first of four
};

struct Place {
  int64_t word;
  float upper;
};

// Of a row: the `count` largest lower bounds that it is given, and the tokens that these left.
struct Found {
  std::vector<float> heap;  // the least first
  std::vector<Place> places;
  void add(float v) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<float>());
    heap.back() = v;
    std::push_heap(heap.begin(), heap.end(), std::greater<float>());
  }
};

// The state as the weights meet it, over `scale`: parts[0] + 128 * parts[1]. The second part is zero but at the peaks, of which
// one in kPeaks of four columns may be one, so that the scale is fine for the rest.
State read_state(const LinearArgs& a, const float* x, int8_t* parts, int64_t padded) {
  std::vector<float> met(padded), largest(padded / 4);
  activations_met(a, x, met.data());
  double squares = 0, rest = 0;
  for (int64_t i = 0; i < padded; i++) {
    squares += (double)met[i] * met[i];
    largest[i / 4] = std::max(largest[i / 4], std::fabs(met[i]));
  }
  State s{};
  const double norm = std::sqrt(squares);
  s.bounded = norm < kLargest;  // no number: false
  if (!s.bounded) return s;
  const auto usual = largest.begin() + padded / 4 / kPeaks;
  std::nth_element(largest.begin(), usual, largest.end(), std::greater<float>());
  const float most = *std::max_element(largest.begin(), usual + 1);
  if (most >= kLeast) s.scale = std::max(*usual / 127.0f, most / (127.0f * 128.0f));
  for (int64_t i = 0; i < padded; i++) {
    const int32_t q = s.scale > 0 ? (int32_t)std::lrint(met[i] / s.scale) : 0, high = std::abs(q) > 127 ? (q + 64) >> 7 : 0;
    parts[i] = q - 128 * high, parts[padded + i] = high;
    s.sums[0] += parts[i], s.sums[1] += high;
    if (high && (s.peaks.empty() || s.peaks.back() != i / 4 * 4)) s.peaks.push_back(i / 4 * 4);
    const double left = met[i] - (double)s.scale * q;
    rest += left * left;
  }
  s.norm = norm * (1 + 1e-6), s.rest = std::sqrt(rest) * (1 + 1e-6) + norm * 1e-12;
  return s;
}

#ifdef HAS_TILES

// The sums of a group's tokens with both parts of M rows, while `by` bytes a step of 4 columns of the next group are fetched.
void group_sums(const uint8_t* codes, const int8_t* parts, int64_t padded, int64_t rows, const State* states,
                const uint8_t* ahead, int64_t by, vi (*sums)[2][kVectors]) {
  TileShapes shapes;
  for (int t = 0; t < 5; t++) shapes.set(t, 2 * rows, kTile);
  shapes.set(5, kTile, kTile);
  Tiles tiles;
  tiles.shape(shapes);
  zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  for (int64_t i = 0; i < padded; i += kTileRowBytes, ahead += by * kTile) {
    for (int64_t b = 0; b < by * kTile; b += 64) __builtin_prefetch(ahead + b, 0, 2);
    load_tile<4>(parts + i, padded);
    const uint8_t* words = codes + i * kWords;
    load_tile<5>(words, 4 * kWords), add_product_of_bytes<0, 4, 5>();
    load_tile<5>(words + 64, 4 * kWords), add_product_of_bytes<1, 4, 5>();
    load_tile<5>(words + 128, 4 * kWords), add_product_of_bytes<2, 4, 5>();
    load_tile<5>(words + 192, 4 * kWords), add_product_of_bytes<3, 4, 5>();
  }
  alignas(64) int32_t made[kTile][kWords];
  store_tile<0>(made[0], 4 * kWords), store_tile<1>(made[0] + 16, 4 * kWords);
  store_tile<2>(made[0] + 32, 4 * kWords), store_tile<3>(made[0] + 48, 4 * kWords);
  for (int64_t r = 0; r < 2 * rows; r++)
    for (int v = 0; v < kVectors; v++)
      sums[r / 2][r % 2][v] = (vi)load((const float*)made[r] + v * LANES) - 128 * states[r / 2].sums[r % 2];
}

#else

INLINE __m512i four(const int8_t* codes) { return (__m512i)splat_word((const float*)codes); }

// The sums of a group's tokens with P parts of M rows, while `by` bytes a step of the next group are fetched from `ahead` on.
template <int M, int P>
INLINE void group_sums(const uint8_t* codes, const int8_t* parts, int64_t padded, const State* states, const uint8_t* ahead,
                       int64_t by, vi (*sums)[2][kVectors]) {
  __m512i acc[M][P][4];
#pragma GCC unroll 8
  for (int c = 0; c < M; c++)
#pragma GCC unroll 2
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) acc[c][p][r] = _mm512_set1_epi32(-128 * states[c].sums[p]);
  for (int64_t i = 0; i < padded; i += 4, codes += 4 * kWords, ahead += by) {
    for (int64_t b = 0; b < by; b += 64) __builtin_prefetch(ahead + b, 0, 2);
    __m512i w[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) w[r] = _mm512_loadu_si512(codes + 64 * r);
#pragma GCC unroll 8
    for (int c = 0; c < M; c++)
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) {
        const __m512i x = four(parts + (2 * c + p) * padded + i);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) acc[c][p][r] = _mm512_dpbusd_epi32(acc[c][p][r], w[r], x);
      }
  }
#pragma GCC unroll 8
  for (int c = 0; c < M; c++)
#pragma GCC unroll 2
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) sums[c][p][r] = (vi)acc[c][p][r];
}

// The sums with a row's second part, from the peaks alone.
INLINE void peak_sums(const uint8_t* codes, const int8_t* part, const State& s, vi* sums) {
  for (int r = 0; r < 4; r++) sums[r] = (vi)_mm512_set1_epi32(-128 * s.sums[1]);
  for (const int64_t i : s.peaks)
    for (int r = 0; r < 4; r++)
      sums[r] = (vi)_mm512_dpbusd_epi32((__m512i)sums[r], _mm512_loadu_si512(codes + i * kWords + 64 * r), four(part + i));
}

#endif

// The tokens of a group that a row can want by the lower bounds so far; theirs are added.
void bound(const LikeliestArgs& a, int64_t first, const vi (*sums)[kVectors], const State& s, Found& found) {
  for (int r = 0; r < kVectors; r++) {
    const int64_t n = first + r * LANES, count = std::min<int64_t>(LANES, a.head->n - n);
    if (count <= 0) return;
    const vf scale = load(a.scales + n) * s.scale, usual = __builtin_convertvector(sums[0][r], vf) * scale;
    vf score = fma(__builtin_convertvector(sums[1][r], vf), scale * 128.0f, usual);
    vf slack = magnitude(usual) + magnitude(score);
    if (a.bias) {
      const vf bias = load(a.bias + n);
      slack += magnitude(bias), score += bias;
    }
    const vf off = (load(a.errors + n) * s.norm + load(a.norms + n) * s.rest) * (1 + 0x1p-18f) + slack * 0x1p-20f + kTiny;
    const vf upper = score + off, lower = score - off;
    uint32_t stay = lanes_at_least(upper, splat(found.heap[0])) & ((1u << count) - 1);
    for (; stay; stay &= stay - 1) {
      const int i = __builtin_ctz(stay);
      found.places.push_back({n + i, upper[i]});
      if (lower[i] > found.heap[0]) found.add(lower[i]);
    }
  }
}

// Of few rows memory sets the pace, so both parts pass with the weights. Several passes fetch the next group as they go.
template <int M>
void group(const LikeliestArgs& a, int64_t index, const int8_t* parts, int64_t padded, const State* states, int64_t pass,
           int64_t passes, Found* found) {
  vi sums[M][2][kVectors];
  const int64_t size = kWords * padded, by = passes == 1 ? 0 : 4 * kWords / passes;
  const uint8_t *codes = a.codes + index * size, *ahead = codes + size + pass * by * padded / 4;
#ifdef HAS_TILES
  group_sums(codes, parts, padded, M, states, ahead, by, sums);
#else
  constexpr int P = M <= kFew ? 2 : 1;
  group_sums<M, P>(codes, parts, padded, states, ahead, by, sums);
  for (int c = 0; c < M && P == 1; c++) peak_sums(codes, parts + (2 * c + 1) * padded, states[c], sums[c][1]);
#endif
  for (int c = 0; c < M; c++) bound(a, index * kWords, sums[c], states[c], found[c]);
}

template <int M, class... Args>
void group_of(int64_t rows, Args... args) {
  if constexpr (M < kCols) {
    if (rows > M) return group_of<M + 1>(rows, args...);
  }
  group<M>(args...);
}

// The tokens of a row whose upper bound is not below `least`, and their logits: `kWords` rows of the weight at a time.
void decide(const LikeliestArgs& a, int64_t row, float least, const Found* found, int64_t of) {
  int64_t* token_ids = a.token_ids + row * a.most;
  float* logits = a.logits + row * a.most;
  int64_t count = 0;
  for (int64_t i = 0; i < of; i++)
    for (const Place& place : found[i * a.head->m].places) {
      if (place.upper < least) continue;
      if (count == a.most) return;
      token_ids[count++] = place.word;
    }
  Barrier barrier;
  std::vector<float> memory;
  LinearArgs some = *a.head;
  std::vector<char> rows(std::min(count, kWords) * some.ldw);
  float bias[kWords];
  some.x += row * some.ldx, some.m = 1, some.accumulate = 0, some.w = rows.data();
  if (some.bias) some.bias = bias;
  for (int64_t i = 0; i < count; i += kWords) {
    some.n = std::min(count - i, kWords), some.y = logits + i;
    for (int64_t j = 0; j < some.n; j++) {
      memcpy(rows.data() + j * some.ldw, (const char*)a.head->w + token_ids[i + j] * some.ldw, some.ldw);
      if (some.bias) bias[j] = a.head->bias[token_ids[i + j]];
    }
    linear_share(some, Team{0, 1, &barrier, &memory});
  }
  a.best[row] = token_ids[std::max_element(logits, logits + count) - logits], a.counts[row] = count;
}

}  // namespace

extern "C" void skipdecode_likeliest(const LikeliestArgs* given) {
  const LikeliestArgs& a = *given;
  const LinearArgs& head = *a.head;
  const int64_t m = head.m, padded = (head.k + kStep - 1) / kStep * kStep, groups = (head.n + kWords - 1) / kWords;
  const int64_t passes = parts_of(m, kCols);
  std::vector<State> states(m);
  std::vector<int8_t> parts(2 * m * padded);
  std::vector<Found> found;  // [thread, row]
  on_team([&](const Team& team) {
    if (team.id == 0) found.resize(m * team.size);
    for (int64_t row = team.id; row < m; row += team.size)
      states[row] = read_state(head, head.x + row * head.ldx, parts.data() + 2 * row * padded, padded);
    team.wait();
    Found* mine = found.data() + m * team.id;
    for (int64_t row = 0; row < m; row++) mine[row].heap.assign(a.tops[row], -INFINITY);
    for (int64_t index = groups * team.id / team.size, end = groups * (team.id + 1) / team.size; index < end; index++)
      for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t row = m * pass / passes, rows = m * (pass + 1) / passes - row;
        group_of<1>(rows, a, index, parts.data() + 2 * row * padded, padded, states.data() + row, pass, passes, mine + row);
      }
    team.wait();
    for (int64_t row = team.id; row < m; row += team.size) {
      a.counts[row] = -1;
      if (!states[row].bounded) continue;
      std::vector<float> all;
      for (size_t i = row; i < found.size(); i += m) all.insert(all.end(), found[i].heap.begin(), found[i].heap.end());
      const auto place = all.begin() + a.tops[row] - 1;
      std::nth_element(all.begin(), place, all.end(), std::greater<float>());
      decide(a, row, *place, found.data() + row, team.size);
    }
  });
}

#endif
