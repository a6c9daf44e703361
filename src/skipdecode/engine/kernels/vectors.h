// Short vectors for every CPU through the compiler's vector extension (GCC 9+, Clang).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
// The same vectors at any address and over any type.
typedef float vf_any __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

// a * b + c in one rounding where the CPU can. Spelled out because compilers contract `a * b + c` in some places and not in
// others (GCC avoids chains of them on some CPUs), and a sum must not depend on which copy of a loop it ran in.
INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// `v` in a register: without this, compilers fold one load into every use of it and the load ports become the limit.
INLINE vf hold(vf v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

INLINE vf load(const float* p) { return *(const vf_any*)p; }
INLINE void store(float* p, vf v) { *(vf_any*)p = v; }
INLINE vf splat(float v) { return vf{} + v; }
INLINE vf magnitude(vf v) { return (vf)((vu)v & 0x7fffffffu); }

// 2 * LANES numbers from `p`. bf16 pairs lie as (even, odd) halves of 32-bit words, so a shift gives the even ones and a mask
// the odd ones; what meets them is packed in the same order.
INLINE vf load_even(const uint16_t* p) { return (vf)(*(const vu_any*)p << 16); }
INLINE vf load_odd(const uint16_t* p) { return (vf)(*(const vu_any*)p & 0xffff0000u); }
INLINE vf load_even(const float* p) { return load(p); }
INLINE vf load_odd(const float* p) { return load(p + LANES); }

INLINE float widen(uint16_t v) {
  uint32_t u = (uint32_t)v << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
INLINE float widen(float v) { return v; }

// Round to nearest even, as torch does.
INLINE void narrow(float v, float* out) { *out = v; }
INLINE void narrow(float v, uint16_t* out) {
  uint32_t u;
  memcpy(&u, &v, 4);
  *out = v != v ? 0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#if LANES >= 8
// A bit for each lane where a >= b.
INLINE uint32_t lanes_at_least(vf a, vf b) {
#if LANES == 16
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GE_OQ));
#endif
}
#endif

INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
INLINE float largest_lane(vf v) {
  float most = v[0];
  for (int l = 1; l < LANES; l++) most = v[l] > most ? v[l] : most;
  return most;
}

INLINE float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX__)
  __m128 q = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
#elif defined(__aarch64__)
  return vaddvq_f32((float32x4_t)v);
#else
  return (v[0] + v[1]) + (v[2] + v[3]);
#endif
}

#if LANES == 16
template <int C>
INLINE vf add_halves(vf a, vf b) {
  return (vf)_mm512_shuffle_f32x4((__m512)a, (__m512)b, C == 0 ? 0x44 : 0x88) +
         (vf)_mm512_shuffle_f32x4((__m512)a, (__m512)b, C == 0 ? 0xee : 0xdd);
}
#endif

// The sums of LANES vectors: element i is that of v[i], always added in the same order.
INLINE vf sums_of(const vf* v) {
#if LANES == 16
  vf t[4];
  for (int i = 0; i < 4; i++) {
    // Blocks of four lanes: those of v[i], v[i + 4], v[i + 8], v[i + 12].
    t[i] = add_halves<1>(add_halves<0>(v[i], v[i + 4]), add_halves<0>(v[i + 8], v[i + 12]));
  }
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps((__m512)t[0], (__m512)t[2]), _mm512_unpackhi_ps((__m512)t[0], (__m512)t[2]));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps((__m512)t[1], (__m512)t[3]), _mm512_unpackhi_ps((__m512)t[1], (__m512)t[3]));
  return (vf)_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
#else
  vf s;
  for (int i = 0; i < LANES; i++) s[i] = sum(v[i]);
  return s;
#endif
}

// The lane that `sums_of` adds as the order-th, in pairs, pairs of pairs and so on: its bits backwards where halves are added.
constexpr int64_t chain(int64_t order) {
  if (LANES == 4) return order;
  return LANES == 16 ? order >> 3 | (order >> 1 & 2) | (order << 1 & 4) | (order << 3 & 8) : order >> 2 | (order & 2) | (order << 2 & 4);
}

// A word (an fp32 number, two of bf16, four bytes) in every lane.
INLINE vf splat_word(const float* p) {
#if LANES == 16
  return hold((vf)_mm512_broadcastss_ps(_mm_load_ss(p)));
#elif LANES == 8
  return hold((vf)_mm256_broadcast_ss(p));
#else
  uint32_t word;
  memcpy(&word, p, 4);
  return hold((vf)(vu{} + word));
#endif
}

#if LANES == 4
// 4 x 4 words in place.
INLINE void turn(vf* t) {
  const vf s[4] = {t[0], t[1], t[2], t[3]};
  for (int c = 0; c < 4; c++) t[c] = vf{s[0][c], s[1][c], s[2][c], s[3][c]};
}
#elif LANES == 8
// 8 x 8 words in place.
INLINE void turn(vf* t) {
  vf u[8];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    const __m256 a = _mm256_unpacklo_ps((__m256)t[i], (__m256)t[i + 1]), b = _mm256_unpackhi_ps((__m256)t[i], (__m256)t[i + 1]);
    const __m256 c = _mm256_unpacklo_ps((__m256)t[i + 2], (__m256)t[i + 3]);
    const __m256 d = _mm256_unpackhi_ps((__m256)t[i + 2], (__m256)t[i + 3]);
    u[i] = (vf)_mm256_shuffle_ps(a, c, 0x44), u[i + 1] = (vf)_mm256_shuffle_ps(a, c, 0xee);
    u[i + 2] = (vf)_mm256_shuffle_ps(b, d, 0x44), u[i + 3] = (vf)_mm256_shuffle_ps(b, d, 0xee);
  }
  // u[i + c]: words c and c + 4 of rows i to i + 3, a half each.
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    t[c] = (vf)_mm256_permute2f128_ps((__m256)u[c], (__m256)u[4 + c], 0x20);
    t[c + 4] = (vf)_mm256_permute2f128_ps((__m256)u[c], (__m256)u[4 + c], 0x31);
  }
}
#elif LANES == 16
// 16 x 16 words in place.
INLINE void turn(vf* t) {
  vf u[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    const __m512 a = _mm512_unpacklo_ps((__m512)t[i], (__m512)t[i + 1]), b = _mm512_unpackhi_ps((__m512)t[i], (__m512)t[i + 1]);
    const __m512 c = _mm512_unpacklo_ps((__m512)t[i + 2], (__m512)t[i + 3]);
    const __m512 d = _mm512_unpackhi_ps((__m512)t[i + 2], (__m512)t[i + 3]);
    u[i] = (vf)_mm512_unpacklo_pd((__m512d)a, (__m512d)c), u[i + 1] = (vf)_mm512_unpackhi_pd((__m512d)a, (__m512d)c);
    u[i + 2] = (vf)_mm512_unpacklo_pd((__m512d)b, (__m512d)d), u[i + 3] = (vf)_mm512_unpackhi_pd((__m512d)b, (__m512d)d);
  }
  // u[i + c]: words c, c + 4, c + 8, c + 12 of rows i to i + 3, a block of four lanes each.
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512 a = (__m512)u[c], b = (__m512)u[4 + c], x = (__m512)u[8 + c], y = (__m512)u[12 + c];
    const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x88), ab2 = _mm512_shuffle_f32x4(a, b, 0xdd);
    const __m512 xy = _mm512_shuffle_f32x4(x, y, 0x88), xy2 = _mm512_shuffle_f32x4(x, y, 0xdd);
    t[c] = (vf)_mm512_shuffle_f32x4(ab, xy, 0x88), t[c + 8] = (vf)_mm512_shuffle_f32x4(ab, xy, 0xdd);
    t[c + 4] = (vf)_mm512_shuffle_f32x4(ab2, xy2, 0x88), t[c + 12] = (vf)_mm512_shuffle_f32x4(ab2, xy2, 0xdd);
  }
}
#endif

// exp to about 2 ulp for x <= 88; below -87 it returns 0.
INLINE vf exp_fast(vf x) {
  vi tiny = x < splat(-87.0f);
  x = tiny ? splat(-87.0f) : x;
  x = x > splat(88.0f) ? splat(88.0f) : x;
  vf z = x * 1.44269504088896341f;
  vf shifted = z + 12582912.0f;  // 1.5 * 2^23: the sum's low bits hold round(z)
  vi n = (vi)shifted - 0x4b400000;
  vf r = shifted - 12582912.0f;
  vf f = (x - r * 0.693359375f) + r * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  vf y = p * f * f + f + 1.0f;
  y = y * (vf)((n + 127) << 23);
  return tiny ? vf{} : y;
}

INLINE vf tanh_of(vf x) { return 1.0f - 2.0f / (exp_fast(2.0f * x) + 1.0f); }
