// Weights as vectors: one class a format, all read in steps of 64 columns, and the activations in the order that each meets.
//
// A step has kParts vectors. Where the CPU multiplies pairs of bf16 (AVX512_BF16, ARM's BF16), a part is kPair weights as bf16
// and the activations are rounded to bf16; else it is LANES weights as fp32. int8 weights are exact in both. `put` stores
// kPair activations as kPutParts parts, `apart` floats apart; `activation` finds one of a row's.
#pragma once

#include "amx.h"
#include "kernels.h"
#include "vectors.h"

constexpr int64_t kStep = 64;
constexpr int64_t kPair = 2 * LANES;

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_BF16_DOT 1
INLINE vf add_bf16_product(vf a, vf b, vf sum) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
INLINE vf rounded(vf first, vf second) { return (vf)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_BF16_DOT 1
// bfmmla multiplies pairs of rows and adds in another order. A row's bits must not depend on its batch, so bfdot serves all.
INLINE vf add_bf16_product(vf a, vf b, vf sum) { return (vf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b); }
INLINE vf rounded(vf first, vf second) {
  return (vf)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)first), (float32x4_t)second);
}
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

#if defined(HAS_BF16_DOT) || defined(HAS_TILES)
struct Rounded {
  static constexpr int kParts = kStep / kPair, kPutParts = 1;
#ifdef HAS_BF16_DOT
  INLINE vf add_product(vf w, vf x, vf sum) { return add_bf16_product(w, x, sum); }
  INLINE void put(float* out, int64_t, vf a, vf b) { store(out, rounded(a, b)); }
#else
  INLINE void put(float* out, int64_t, vf a, vf b) {
    uint16_t halves[kPair];
    for (int i = 0; i < LANES; i++) narrow(a[i], halves + i), narrow(b[i], halves + LANES + i);
    memcpy(out, halves, sizeof(halves));
  }
#endif
  INLINE float activation(const float* packed, int64_t i) {
    uint16_t half;
    memcpy(&half, (const char*)packed + 2 * i, 2);
    return widen(half);
  }
};
#endif

#ifdef HAS_BF16_DOT
template <>
struct Weights<kBFloat16, true> : Rounded {
  static constexpr bool kPadded = false;
  static constexpr int64_t kStepBytes = 2 * kStep;
  using Row = Weights<kBFloat16, false>::Row;
  INLINE Row row(const LinearArgs& a, int64_t n, int64_t k) { return Weights<kBFloat16, false>::row(a, n, k); }
  INLINE vf part(Row r, int64_t i, int p) { return load((const float*)(r.w + i + p * kPair)); }
};

template <>
struct Weights<kInt8, true> : Rounded {
  static constexpr bool kPadded = true;
  static constexpr int64_t kStepBytes = kStep;
  using Row = Weights<kInt8, false>::Row;
  INLINE Row row(const LinearArgs& a, int64_t n, int64_t k) { return Weights<kInt8, false>::row(a, n, k); }
  INLINE vf part(Row r, int64_t i, int p) {
    using F = Weights<kInt8, false>;
    return rounded(F::part(r, i, 2 * p), F::part(r, i, 2 * p + 1));
  }
};
#endif
