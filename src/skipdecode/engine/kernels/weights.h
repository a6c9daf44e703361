// Weights as vectors: one class a format, all read in steps of 64 columns, and the activations in the order that each meets.
//
// A step has kParts vectors. Where the CPU multiplies pairs of bf16 (AVX512_BF16), a part is 32 weights as bf16 and the
// activations are rounded to bf16; else it is LANES weights as fp32. int8 and int4 weights are exact in both. `put` stores
// kPair activations as kPutParts parts, `apart` floats apart; `activation` finds one of a row's.
#pragma once

#include "kernels.h"
#include "vectors.h"

constexpr int64_t kStep = 64;
constexpr int64_t kPair = 2 * LANES;

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_BF16_DOT 1
#endif

template <DType D, bool Dot>
struct Weights;

// fp32 parts of fp32 activations.
struct Exact {
  static constexpr int kParts = kStep / LANES;
  INLINE vf add_product(vf w, vf x, vf sum) { return fma(w, x, sum); }
  static constexpr int kPutParts = 2;
  INLINE void put(float* out, int64_t apart, vf a, vf b) { store(out, a), store(out + apart, b); }
  INLINE float activation(const float* packed, int64_t i) { return packed[i]; }
};

template <>
struct Weights<kFloat32, false> : Exact {
  static constexpr bool kPadded = false;
  static constexpr int64_t kStepBytes = 4 * kStep;
  struct Row { const float* w; };
  INLINE Row row(const LinearArgs& a, int64_t n, int64_t k) { return {(const float*)a.w + n * a.k + k}; }
  INLINE vf part(Row r, int64_t i, int p) { return load(r.w + i + p * LANES); }
};

template <>
struct Weights<kBFloat16, false> : Exact {
  static constexpr bool kPadded = false;
  static constexpr int64_t kStepBytes = 2 * kStep;
  struct Row { const uint16_t* w; };
  INLINE Row row(const LinearArgs& a, int64_t n, int64_t k) { return {(const uint16_t*)a.w + n * a.k + k}; }
  INLINE vf part(Row r, int64_t i, int p) {
    const uint16_t* w = r.w + i + p / 2 * kPair;
    return p % 2 ? load_odd(w) : load_even(w);
  }
  INLINE void put(float* out, int64_t apart, vf a, vf b) {
    float t[kPair];
    store(t, a), store(t + LANES, b);
    for (int j = 0; j < LANES; j++) out[j] = t[2 * j], out[apart + j] = t[2 * j + 1];
  }
  INLINE float activation(const float* packed, int64_t i) {
    return packed[i / kPair * kPair + i % 2 * LANES + i % kPair / 2];
  }
};

typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

// LANES signed bytes. Spelled out where GCC would take them one by one.
INLINE vi widened(const void* p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return __builtin_convertvector(*(const bytes*)p, vi);
#endif
}

template <>
struct Weights<kInt8, false> : Exact {
  static constexpr bool kPadded = true;
  static constexpr int64_t kStepBytes = kStep;
  struct Row { const int8_t* w; };
  INLINE Row row(const LinearArgs& a, int64_t n, int64_t k) { return {(const int8_t*)a.w + n * a.ldw + k}; }
  INLINE vf part(Row r, int64_t i, int p) {
    return __builtin_convertvector(widened(r.w + i + p * LANES), vf);
  }
};

// A step is 32 bytes: columns 0 to 31 in the low halves, 32 to 63 in the high ones. 32 columns share a word: scale and offset
// (see quantize.py).
template <>
struct Weights<kInt4, false> : Exact {
  static constexpr bool kPadded = true;
  static constexpr int64_t kStepBytes = kStep / 2;
  struct Row { const uint8_t* w; const int32_t* words; };
  INLINE Row row(const LinearArgs& a, int64_t n, int64_t k) {
    return {(const uint8_t*)a.w + n * a.ldw + k / 2, (const int32_t*)a.scales + (n * a.ldw * 2 + k) / 32};
  }
  INLINE vf part(Row r, int64_t i, int p) {
    const int high = p * LANES / 32;
    const vu word = vu{} + (uint32_t)r.words[i / 32 + high];
    const vf codes = __builtin_convertvector(widened(r.w + i / 2 + p * LANES % 32) >> (4 * high) & 15, vf);
    return bits((vu)fma(codes, bits(word << 16), bits(word)) & 0xffff0000u);
  }
};

#ifdef HAS_BF16_DOT
struct Rounded {
  static constexpr int kParts = kStep / 32;
  INLINE vf add_product(vf w, vf x, vf sum) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x); }
  static constexpr int kPutParts = 1;
  INLINE void put(float* out, int64_t, vf a, vf b) { store(out, (vf)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a)); }
  INLINE float activation(const float* packed, int64_t i) {
    uint16_t half;
    memcpy(&half, (const char*)packed + 2 * i, 2);
    return widen(half);
  }
};

template <>
struct Weights<kBFloat16, true> : Rounded {
  static constexpr bool kPadded = false;
  static constexpr int64_t kStepBytes = 2 * kStep;
  using Row = Weights<kBFloat16, false>::Row;
  INLINE Row row(const LinearArgs& a, int64_t n, int64_t k) { return Weights<kBFloat16, false>::row(a, n, k); }
  INLINE vf part(Row r, int64_t i, int p) { return load((const float*)(r.w + i + p * 32)); }
};

template <>
struct Weights<kInt8, true> : Rounded {
  static constexpr bool kPadded = true;
  static constexpr int64_t kStepBytes = kStep;
  using Row = Weights<kInt8, false>::Row;
  INLINE Row row(const LinearArgs& a, int64_t n, int64_t k) { return Weights<kInt8, false>::row(a, n, k); }
  INLINE vf part(Row r, int64_t i, int p) {
    using F = Weights<kInt8, false>;
    return (vf)_mm512_cvtne2ps_pbh((__m512)F::part(r, i, 2 * p + 1), (__m512)F::part(r, i, 2 * p));
  }
};

// A group's 16 possible weights make a table, whose upper halves of 32 bits the halves of the bytes look up.
template <>
struct Weights<kInt4, true> : Rounded {
  static constexpr bool kPadded = true;
  static constexpr int64_t kStepBytes = kStep / 2;
  using Row = Weights<kInt4, false>::Row;
  INLINE Row row(const LinearArgs& a, int64_t n, int64_t k) { return Weights<kInt4, false>::row(a, n, k); }
  INLINE vf part(Row r, int64_t i, int p) {
    const __m512 steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i word = _mm512_set1_epi32(r.words[i / 32 + p]);
    const __m512 table = _mm512_fmadd_ps(steps, (__m512)_mm512_slli_epi32(word, 16), (__m512)word);
    const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(r.w + i / 2)));
    const __m512i twice = p ? _mm512_srli_epi16(codes, 3) : _mm512_add_epi16(codes, codes);
    return (vf)_mm512_permutexvar_epi16(_mm512_or_si512(twice, _mm512_set1_epi16(1)), (__m512i)table);
  }
};
#endif
