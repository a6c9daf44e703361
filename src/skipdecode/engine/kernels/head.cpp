// The tokens that can be the most probable ones of a row, found in an 8-bit copy of the output embedding, and their logits of
// the full head.
//
// A token's score is off by no more than a bound that holds on any input (docs/theory.md). A row's state is cut into two parts of
// 8 bits, so that all sums are whole numbers and exact; the logits come from the full head's own kernel, one token at a time.
#include <algorithm>
#include <functional>
#include <vector>

#include <omp.h>

#include "prologue.h"

extern "C" {
// Mirrored field by field in head.py.
struct LikeliestArgs {
  const LinearArgs* head;  // the full head; its x, ldx and m are those of the call
  const uint8_t* codes;    // [groups, padded k / 4, kWords, 4]: each 128 more than it stands for
  const float* scales;     // [groups * kWords], and so are the next three
  const float* errors;     // a bound on a score's error over the norm of the state,
  const float* norms;      // and over the norm of what the state's two parts leave out
  const float* bias;       // or null
  const int32_t* tops;     // [m]: how many of the most probable tokens are wanted
  float* upper;            // [m, n]: room
  int64_t* best;           // [m]: the most probable token, the first of equals
  int64_t* words;          // [m, most]: the tokens that can be wanted, ascending,
  float* logits;           // and their logits
  int64_t* counts;         // [m]: how many there are; -1: more than `most`, or the state has no bound
  int64_t most;
};
}

#if defined(__AVX512VNNI__)

namespace {

constexpr int64_t kWords = 64;  // of a group: four vectors of sums for each part of a row
constexpr int kCols = 3;        // rows that meet a group in registers
constexpr float kLargest = 1e20f, kLeast = 1e-30f, kTiny = 1e-20f;

struct State {
  double scale;
  float norm, rest;
  int32_t sums[2];
  bool bounded;
};

// The `count` largest of the numbers that it is given.
struct Largest {
  std::vector<float> heap;  // the least first
  void add(float v) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<float>());
    heap.back() = v;
    std::push_heap(heap.begin(), heap.end(), std::greater<float>());
  }
};

// The state as the weights meet it, over `scale`: 128 * parts[0] + parts[1].
State read_state(const LinearArgs& a, const float* x, int8_t* parts, int64_t padded) {
  std::vector<float> met(a.k);
  activations_met(a, x, met.data());
  double squares = 0, rest = 0;
  float most = 0;
  for (const float v : met) squares += (double)v * v, most = std::max(most, std::fabs(v));
  State s{};
  const double norm = std::sqrt(squares);
  s.bounded = norm < kLargest;  // no number: false
  s.scale = s.bounded && most >= kLeast ? most / (127.0 * 128.0) : 0;
  for (int64_t i = 0; i < a.k; i++) {
    const int32_t q = s.scale > 0 ? (int32_t)std::lrint(met[i] / s.scale) : 0, high = (q + 64) >> 7, low = q - 128 * high;
    parts[i] = high, parts[padded + i] = low;
    s.sums[0] += high, s.sums[1] += low;
    const double left = met[i] - s.scale * q;
    rest += left * left;
  }
  s.norm = norm * (1 + 1e-6), s.rest = std::sqrt(rest) * (1 + 1e-6) + norm * 1e-12;
  return s;
}

// The sums of a group's tokens with the parts of M rows.
template <int M>
INLINE void group_sums(const uint8_t* codes, const int8_t* parts, int64_t padded, const State* states, __m512i (*sums)[2][4]) {
  __m512i acc[M][2][4];
#pragma GCC unroll 8
  for (int c = 0; c < M; c++)
#pragma GCC unroll 2
    for (int p = 0; p < 2; p++)
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) acc[c][p][r] = _mm512_set1_epi32(-128 * states[c].sums[p]);
  for (int64_t i = 0; i < padded; i += 4, codes += 4 * kWords) {
    __m512i w[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) w[r] = _mm512_loadu_si512(codes + 64 * r);
#pragma GCC unroll 8
    for (int c = 0; c < M; c++)
#pragma GCC unroll 2
      for (int p = 0; p < 2; p++) {
        int32_t four;
        memcpy(&four, parts + (2 * c + p) * padded + i, 4);
        const __m512i x = _mm512_set1_epi32(four);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) acc[c][p][r] = _mm512_dpbusd_epi32(acc[c][p][r], w[r], x);
      }
  }
#pragma GCC unroll 8
  for (int c = 0; c < M; c++)
#pragma GCC unroll 2
    for (int p = 0; p < 2; p++)
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) sums[c][p][r] = acc[c][p][r];
}

INLINE __m256 half_scores(__m256i high, __m256i low, const float* scales, double by) {
  const __m512d whole = _mm512_fmadd_pd(_mm512_cvtepi32_pd(high), _mm512_set1_pd(128), _mm512_cvtepi32_pd(low));
  return _mm512_cvtpd_ps(whole * (_mm512_cvtps_pd(_mm256_loadu_ps(scales)) * by));
}

INLINE vf magnitude(vf v) { return bits((vu)v & 0x7fffffffu); }

// Upper bounds of a group's tokens in one row, and its largest lower bounds.
void bound(const LikeliestArgs& a, int64_t first, const __m512i (*sums)[4], const State& s, float* upper, Largest& lower) {
  for (int r = 0; r < 4; r++) {
    const int64_t n = first + r * LANES, count = std::min<int64_t>(LANES, a.head->n - n);
    if (count <= 0) return;
    const __m512i high = sums[0][r], low = sums[1][r];
    const __m256 one = half_scores(_mm512_castsi512_si256(high), _mm512_castsi512_si256(low), a.scales + n, s.scale);
    const __m256 two = half_scores(_mm512_extracti64x4_epi64(high, 1), _mm512_extracti64x4_epi64(low, 1), a.scales + n + 8, s.scale);
    vf score = (vf)_mm512_insertf32x8(_mm512_castps256_ps512(one), two, 1);
    vf slack = magnitude(score);
    if (a.bias) {
      const vf bias = load(a.bias + n);
      slack += magnitude(bias), score += bias;
    }
    const vf off = (load(a.errors + n) * s.norm + load(a.norms + n) * s.rest) * (1 + 0x1p-18f) + slack * 0x1p-20f + kTiny;
    const __mmask16 valid = (1u << count) - 1;
    _mm512_mask_storeu_ps(upper + n, valid, (__m512)(score + off));
    const vf under = score - off;
    __mmask16 more = _mm512_mask_cmp_ps_mask(valid, (__m512)under, _mm512_set1_ps(lower.heap[0]), _CMP_GT_OQ);
    for (; more; more &= more - 1)
      if (const float v = under[__builtin_ctz(more)]; v > lower.heap[0]) lower.add(v);
  }
}

template <int M>
void group(const LikeliestArgs& a, int64_t index, const int8_t* parts, int64_t padded, const State* states, float* upper,
           Largest* lower) {
  __m512i sums[M][2][4];
  group_sums<M>(a.codes + index * kWords * padded, parts, padded, states, sums);
  for (int c = 0; c < M; c++) bound(a, index * kWords, sums[c], states[c], upper + c * a.head->n, lower[c]);
}

// The tokens of a row whose upper bound is not below `least`, and their logits.
void decide(const LikeliestArgs& a, int64_t row, float least) {
  const float* upper = a.upper + row * a.head->n;
  int64_t* words = a.words + row * a.most;
  float* logits = a.logits + row * a.most;
  int64_t count = 0;
  for (int64_t n = 0; n < a.head->n; n += LANES) {
    const __mmask16 valid = (1u << std::min<int64_t>(LANES, a.head->n - n)) - 1;
    __mmask16 stay = _mm512_mask_cmp_ps_mask(valid, _mm512_maskz_loadu_ps(valid, upper + n), _mm512_set1_ps(least), _CMP_GE_OQ);
    for (; stay; stay &= stay - 1) {
      if (count == a.most) return;
      words[count++] = n + __builtin_ctz(stay);
    }
  }
  Barrier barrier;
  std::vector<float> memory;
  LinearArgs one = *a.head;
  one.x += row * one.ldx, one.m = one.n = 1, one.accumulate = 0;
  int64_t best = 0;
  for (int64_t i = 0; i < count; i++) {
    one.w = (const char*)a.head->w + words[i] * one.ldw;
    if (a.head->bias) one.bias = a.head->bias + words[i];
    one.y = logits + i;
    linear_share(one, Team{0, 1, &barrier, &memory});
    if (logits[i] > logits[best]) best = i;
  }
  a.best[row] = words[best], a.counts[row] = count;
}

}  // namespace

extern "C" void skipdecode_likeliest(const LikeliestArgs* given) {
  const LikeliestArgs& a = *given;
  const LinearArgs& head = *a.head;
  const int64_t m = head.m, padded = (head.k + kStep - 1) / kStep * kStep, groups = (head.n + kWords - 1) / kWords;
  std::vector<State> states(m);
  std::vector<int8_t> parts(2 * m * padded);
  std::vector<Largest> lower(m * omp_get_max_threads());
  for (size_t i = 0; i < lower.size(); i++) lower[i].heap.assign(a.tops[i % m], -INFINITY);
#pragma omp parallel
  {
    Largest* mine = lower.data() + m * omp_get_thread_num();
#pragma omp for
    for (int64_t row = 0; row < m; row++) states[row] = read_state(head, head.x + row * head.ldx, parts.data() + 2 * row * padded, padded);
#pragma omp for schedule(static)
    for (int64_t index = 0; index < groups; index++)
      for (int64_t row = 0, rows; row < m; row += rows) {
        rows = std::min<int64_t>(kCols, m - row);
        const auto run = rows == 3 ? group<3> : rows == 2 ? group<2> : group<1>;
        run(a, index, parts.data() + 2 * row * padded, padded, states.data() + row, a.upper + row * head.n, mine + row);
      }
#pragma omp for
    for (int64_t row = 0; row < m; row++) {
      a.counts[row] = -1;
      if (!states[row].bounded) continue;
      std::vector<float> all;
      for (size_t i = row; i < lower.size(); i += m) all.insert(all.end(), lower[i].heap.begin(), lower[i].heap.end());
      const auto place = all.begin() + a.tops[row] - 1;
      std::nth_element(all.begin(), place, all.end(), std::greater<float>());
      decide(a, row, *place);
    }
  }
}

#endif
