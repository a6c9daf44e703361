// Weights as vectors: one class a format, all read in steps of 64 columns, and the activations in the order that each meets.
//
// A step has kParts vectors. Where the CPU multiplies pairs of bf16 (AVX512_BF16, ARM's BF16), a part is kPair weights as bf16
// and the activations are rounded to bf16; else it is LANES weights as fp32. int8 weights are exact in both. `put` stores
// kPair activations as kPutParts parts, `apart` floats apart.
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
#elif defined(HAS_TILES)
INLINE vf rounded(vf first, vf second) {
  uint16_t halves[kPair];
  for (int i = 0; i < LANES; i++) narrow(first[i], halves + i), narrow(second[i], halves + LANES + i);
  return load((const float*)halves);
}
#endif

// Weights in rows, of which those of bytes are padded to whole steps.
template <class T>
struct Stored {
  using Row = const T*;
  static constexpr bool kPadded = sizeof(T) == 1;
  static constexpr int64_t kStepBytes = sizeof(T) * kStep;
  INLINE Row row(const LinearArgs& a, int64_t n, int64_t k) { return (Row)a.w + n * (kPadded ? a.ldw : a.k) + k; }
};

// The columns behind the last whole step, of R rows copied to where zeros follow them.
template <class F, int R>
struct Tail {
  alignas(64) char bytes[R][F::kStepBytes] = {};
  typename F::Row rows[R];
  Tail(const LinearArgs& a, const typename F::Row* from) {
    for (int64_t r = 0; r < R; r++) {
      memcpy(bytes[r], from[r], a.k % kStep * sizeof(*from[r]));
      rows[r] = (typename F::Row)bytes[r];
    }
  }
};

template <DType D, bool Dot>
struct Weights;

// fp32 parts of fp32 activations.
struct Exact {
  static constexpr int kParts = kStep / LANES;
  INLINE vf add_product(vf w, vf x, vf sum) { return fma(w, x, sum); }
  static constexpr int kPutParts = 2;
  INLINE void put(float* out, int64_t apart, vf a, vf b) { store(out, a), store(out + apart, b); }
};

template <>
struct Weights<kFloat32, false> : Stored<float>, Exact {
  INLINE vf part(Row w, int64_t i, int p) { return load(w + i + p * LANES); }
};

template <>
struct Weights<kBFloat16, false> : Stored<uint16_t>, Exact {
  INLINE vf part(Row w, int64_t i, int p) {
    w += i + p / 2 * kPair;
    return p % 2 ? load_odd(w) : load_even(w);
  }
  INLINE void put(float* out, int64_t apart, vf a, vf b) {
    float t[kPair];
    store(t, a), store(t + LANES, b);
    for (int j = 0; j < LANES; j++) out[j] = t[2 * j], out[apart + j] = t[2 * j + 1];
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
struct Weights<kInt8, false> : Stored<int8_t>, Exact {
  INLINE vf part(Row w, int64_t i, int p) { return __builtin_convertvector(widened(w + i + p * LANES), vf); }
};

#if defined(HAS_BF16_DOT) || defined(HAS_TILES)
struct Rounded {
  static constexpr int kParts = kStep / kPair, kPutParts = 1;
  INLINE void put(float* out, int64_t, vf a, vf b) { store(out, rounded(a, b)); }
#ifdef HAS_BF16_DOT
  INLINE vf add_product(vf w, vf x, vf sum) { return add_bf16_product(w, x, sum); }
#endif
};
#endif

#ifdef HAS_BF16_DOT
template <>
struct Weights<kBFloat16, true> : Stored<uint16_t>, Rounded {
  INLINE vf part(Row w, int64_t i, int p) { return load((const float*)(w + i + p * kPair)); }
};

template <>
struct Weights<kInt8, true> : Stored<int8_t>, Rounded {
  INLINE vf part(Row w, int64_t i, int p) {
    using F = Weights<kInt8, false>;
    return rounded(F::part(w, i, 2 * p), F::part(w, i, 2 * p + 1));
  }
};
#endif
