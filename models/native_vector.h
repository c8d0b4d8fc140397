/* Vectors of sixteen numbers in 32 bits: one register of AVX-512, or two of AVX2: see native.c. */

#ifndef NATIVE_VECTOR_H
#define NATIVE_VECTOR_H

#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

enum {
    ROWS = 12,     /* tokens of a tile: two vectors of sums for each leave room for the rest in 32 registers */
    TOGETHER = 12, /* tokens up to which there is room for both vectors of a block */
    FEW = 6,       /* queries whose mixtures over two blocks of dims fit into registers */
    AT_ONCE = 12,  /* tokens for which both vectors of a block are multiplied at once */
    ALL = 0xffff,  /* of the sixteen, as a mask */
};
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define EACH_OF_FEW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)

typedef __m512 Vec;
typedef __m512i Bits;
typedef __mmask16 Mask;

/* The first `count` of the sixteen. */
INLINE Mask first(int count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (Mask)((1u << count) - 1); }

INLINE Vec zeros(void) { return _mm512_setzero_ps(); }
INLINE Vec spread(float x) { return _mm512_set1_ps(x); }
INLINE Vec read(const float *x) { return _mm512_loadu_ps(x); }
INLINE Vec read_some(const float *x, Mask mask) { return _mm512_maskz_loadu_ps(mask, x); }
INLINE Vec read_or(Vec other, const float *x, Mask mask) { return _mm512_mask_loadu_ps(other, mask, x); }
INLINE void write(float *x, Vec v) { _mm512_storeu_ps(x, v); }
INLINE void write_some(float *x, Mask mask, Vec v) { _mm512_mask_storeu_ps(x, mask, v); }
INLINE Vec keep(Mask mask, Vec v) { return _mm512_maskz_mov_ps(mask, v); }

INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
INLINE Vec subtract(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
INLINE Vec multiply(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
INLINE Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
INLINE Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
INLINE Vec multiply_add(Vec a, Vec b, Vec sum) { return _mm512_fmadd_ps(a, b, sum); }
INLINE Vec whole(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
INLINE Vec scale_by_two(Vec x, Vec times) { return _mm512_scalef_ps(x, times); }
INLINE float sum_of(Vec v) { return _mm512_reduce_add_ps(v); }
INLINE float largest_of(Vec v) { return _mm512_reduce_max_ps(v); }
INLINE float first_of(Vec v) { return _mm512_cvtss_f32(v); }

INLINE Bits no_bits(void) { return _mm512_setzero_si512(); }
INLINE Bits spread_bits(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE Bits read_bits(const void *x) { return _mm512_loadu_si512(x); }
INLINE Bits read_some_bits(const void *x, Mask mask) { return _mm512_maskz_loadu_epi32(mask, x); }
INLINE void write_bits(void *x, Bits b) { _mm512_storeu_si512(x, b); }
INLINE void write_some_bits(void *x, Mask mask, Bits b) { _mm512_mask_storeu_epi32(x, mask, b); }
INLINE Bits both(Bits a, Bits b) { return _mm512_and_si512(a, b); }
INLINE Bits both_or(Bits a, Bits b, Bits c) { return _mm512_ternarylogic_epi32(a, b, c, 0xea); }
INLINE Bits left_by(Bits b, int by) { return _mm512_slli_epi32(b, (unsigned)by); }
INLINE Bits right_by(Bits b, int by) { return _mm512_srli_epi32(b, (unsigned)by); }
INLINE Bits add_words(Bits a, Bits b) { return _mm512_add_epi64(a, b); }
INLINE uint64_t sum_of_words(Bits b) { return (uint64_t)_mm512_reduce_add_epi64(b); }
INLINE Vec as_floats(Bits b) { return _mm512_castsi512_ps(b); }
INLINE Bits as_bits(Vec v) { return _mm512_castps_si512(v); }

/* How many of the first ones are `least` or more, as signed numbers. */
INLINE int count_reaching(Bits b, Mask mask, int32_t least) {
    return __builtin_popcount(_mm512_mask_cmpge_epi32_mask(mask, b, _mm512_set1_epi32(least)));
}

/* Every `step`th of sixteen. */
INLINE Bits gather(const uint32_t *x, int step) {
    const __m512i each = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_i32gather_epi32(_mm512_mullo_epi32(_mm512_set1_epi32(step), each), x, 4);
}

/* Sixteen numbers of 16 bits, and all of them in one half of a register or the other. */
INLINE Vec widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE __m256i read_halves(const uint16_t *x, Mask mask) { return _mm256_maskz_loadu_epi16(mask, x); }
INLINE void write_halves(uint16_t *x, Mask mask, __m256i v) { _mm256_mask_storeu_epi16(x, mask, v); }
INLINE Bits side_by_side(__m256i left, __m256i right) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(left), right, 1);
}

INLINE __m256i narrow(Vec x) { /* to the nearest, to the even one of two */
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
#endif
}

/* The first `count` of 32 numbers of 16 bits. */
INLINE Bits read_32_halves(const uint16_t *x, int count) {
    return _mm512_maskz_loadu_epi16((__mmask32)(0xffffffffu >> (32 - count)), x);
}

/* Two lots of 32 halves made units of one from each; `in_order` puts their dims back. */
INLINE Bits pair_low(Bits even, Bits odd) { return _mm512_unpacklo_epi16(even, odd); }
INLINE Bits pair_high(Bits even, Bits odd) { return _mm512_unpackhi_epi16(even, odd); }
INLINE void in_order(Vec *left, Vec *right) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    const __m512 mixed = *left;
    *left = _mm512_permutex2var_ps(mixed, low, *right);
    *right = _mm512_permutex2var_ps(mixed, high, *right);
}

INLINE Bits mix_low(Bits a, Bits b) { return _mm512_unpacklo_epi32(a, b); }
INLINE Bits mix_high(Bits a, Bits b) { return _mm512_unpackhi_epi32(a, b); }
INLINE Bits mix_low_words(Bits a, Bits b) { return _mm512_unpacklo_epi64(a, b); }
INLINE Bits mix_high_words(Bits a, Bits b) { return _mm512_unpackhi_epi64(a, b); }

/* The end of `turn`: quarter l of row 4 g + u becomes quarter g of row 4 l + u. */
INLINE void turn_quarters(Bits r[16]) {
    __m512i t[16];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

#elif defined(__AVX2__) && defined(__FMA__)

enum {
    TOGETHER = 3, /* tokens for which there is room for both vectors of a block */
    FEW = 1,
    ALL = 16,
};
#ifdef BFLOAT16
/* One vector of sums for each token leaves 6 of 16 registers for the rest. With fewer, some sums would go through
   memory at every step, and wait for it. */
enum { ROWS = 5, AT_ONCE = 2 };
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4)
#else
enum { ROWS = 6, AT_ONCE = 6 };
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#endif
#define EACH_OF_FEW(DO) DO(0)

typedef struct { __m256 low, high; } Vec;
typedef struct { __m256i low, high; } Bits;
typedef int Mask; /* how many */

INLINE Mask first(int count) { return count >= 16 ? 16 : count <= 0 ? 0 : count; }
INLINE __m256i lanes_of(Mask mask, int from) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(mask - from), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE Vec zeros(void) { return (Vec){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE Vec spread(float x) { return (Vec){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Vec read(const float *x) { return (Vec){_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
INLINE void write(float *x, Vec v) { _mm256_storeu_ps(x, v.low), _mm256_storeu_ps(x + 8, v.high); }
/* By way of a copy: AMD does not promise that lanes which a mask leaves out are not touched. */
INLINE Vec read_some(const float *x, Mask mask) {
    if (mask == ALL) return read(x);
    float all[16] = {0};
    memcpy(all, x, sizeof(float) * (size_t)mask);
    return read(all);
}
INLINE void write_some(float *x, Mask mask, Vec v) {
    float all[16];
    write(mask == ALL ? x : all, v);
    if (mask != ALL) memcpy(x, all, sizeof(float) * (size_t)mask);
}
INLINE Vec choose_lanes(Vec other, Vec v, Mask mask) {
    return (Vec){_mm256_blendv_ps(other.low, v.low, _mm256_castsi256_ps(lanes_of(mask, 0))),
                 _mm256_blendv_ps(other.high, v.high, _mm256_castsi256_ps(lanes_of(mask, 8)))};
}
INLINE Vec keep(Mask mask, Vec v) { return choose_lanes(zeros(), v, mask); }
INLINE Vec read_or(Vec other, const float *x, Mask mask) { return choose_lanes(other, read_some(x, mask), mask); }

#define PAIRED(type, name, intrinsic) \
    INLINE type name(type a, type b) { return (type){intrinsic(a.low, b.low), intrinsic(a.high, b.high)}; }
PAIRED(Vec, add, _mm256_add_ps)
PAIRED(Vec, subtract, _mm256_sub_ps)
PAIRED(Vec, multiply, _mm256_mul_ps)
PAIRED(Vec, divide, _mm256_div_ps)
PAIRED(Vec, larger, _mm256_max_ps)
PAIRED(Bits, both, _mm256_and_si256)
PAIRED(Bits, either, _mm256_or_si256)
PAIRED(Bits, add_words, _mm256_add_epi64)
PAIRED(Bits, pair_low, _mm256_unpacklo_epi16)
PAIRED(Bits, pair_high, _mm256_unpackhi_epi16)
PAIRED(Bits, mix_low, _mm256_unpacklo_epi32)
PAIRED(Bits, mix_high, _mm256_unpackhi_epi32)
PAIRED(Bits, mix_low_words, _mm256_unpacklo_epi64)
PAIRED(Bits, mix_high_words, _mm256_unpackhi_epi64)

INLINE Vec multiply_add(Vec a, Vec b, Vec sum) {
    return (Vec){_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)};
}
INLINE Vec whole(Vec x) {
    enum { TO = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    return (Vec){_mm256_round_ps(x.low, TO), _mm256_round_ps(x.high, TO)};
}
INLINE __m256 power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
/* In two steps, which reach what a float can hold and beyond, from 2^-252 to 2^254. */
INLINE __m256 scale_half(__m256 x, __m256 times) {
    times = _mm256_min_ps(_mm256_max_ps(times, _mm256_set1_ps(-252.0f)), _mm256_set1_ps(254.0f));
    const __m256i n = _mm256_cvtps_epi32(times), one = _mm256_srai_epi32(n, 1), two = _mm256_sub_epi32(n, one);
    return _mm256_mul_ps(_mm256_mul_ps(x, power_of_two(one)), power_of_two(two));
}
INLINE Vec scale_by_two(Vec x, Vec times) {
    return (Vec){scale_half(x.low, times.low), scale_half(x.high, times.high)};
}
INLINE float sum_of(Vec v) {
    const __m256 eight = _mm256_add_ps(v.low, v.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float largest_of(Vec v) {
    const __m256 eight = _mm256_max_ps(v.low, v.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
INLINE float first_of(Vec v) { return _mm256_cvtss_f32(v.low); }

INLINE Bits no_bits(void) { return (Bits){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE Bits spread_bits(uint32_t x) { return (Bits){_mm256_set1_epi32((int)x), _mm256_set1_epi32((int)x)}; }
INLINE Bits read_bits(const void *x) {
    return (Bits){_mm256_loadu_si256(x), _mm256_loadu_si256((const __m256i *)x + 1)};
}
INLINE void write_bits(void *x, Bits b) {
    _mm256_storeu_si256(x, b.low), _mm256_storeu_si256((__m256i *)x + 1, b.high);
}
INLINE Bits both_or(Bits a, Bits b, Bits c) { return either(both(a, b), c); }
INLINE Bits left_by(Bits b, int by) { return (Bits){_mm256_slli_epi32(b.low, by), _mm256_slli_epi32(b.high, by)}; }
INLINE Bits right_by(Bits b, int by) { return (Bits){_mm256_srli_epi32(b.low, by), _mm256_srli_epi32(b.high, by)}; }
INLINE uint64_t sum_of_words(Bits b) {
    const __m256i four = _mm256_add_epi64(b.low, b.high);
    const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    return (uint64_t)_mm_cvtsi128_si64(two) + (uint64_t)_mm_extract_epi64(two, 1);
}
INLINE Vec as_floats(Bits b) { return (Vec){_mm256_castsi256_ps(b.low), _mm256_castsi256_ps(b.high)}; }
INLINE Bits as_bits(Vec v) { return (Bits){_mm256_castps_si256(v.low), _mm256_castps_si256(v.high)}; }
INLINE Bits read_some_bits(const void *x, Mask mask) { return as_bits(read_some(x, mask)); }
INLINE void write_some_bits(void *x, Mask mask, Bits b) { write_some(x, mask, as_floats(b)); }

INLINE int count_reaching(Bits b, Mask mask, int32_t least) {
    const __m256i below = _mm256_set1_epi32(least - 1);
    const unsigned low = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.low, below)));
    const unsigned high = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.high, below)));
    return __builtin_popcount((low | high << 8) & ((1u << mask) - 1));
}

INLINE Bits gather(const uint32_t *x, int step) {
    const __m256i places = _mm256_mullo_epi32(_mm256_set1_epi32(step), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return (Bits){_mm256_i32gather_epi32((const int *)x, places, 4),
                  _mm256_i32gather_epi32((const int *)x + 8 * step, places, 4)};
}

INLINE Vec widen(__m256i x) {
    return (Vec){_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), 16)),
                 _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)), 16))};
}
INLINE __m256i read_halves(const uint16_t *x, Mask mask) {
    if (mask == ALL) return _mm256_loadu_si256((const __m256i *)x);
    uint16_t all[16] = {0};
    memcpy(all, x, sizeof(uint16_t) * (size_t)mask);
    return _mm256_loadu_si256((const __m256i *)all);
}
INLINE void write_halves(uint16_t *x, Mask mask, __m256i v) {
    if (mask == ALL) {
        _mm256_storeu_si256((__m256i *)x, v);
        return;
    }
    uint16_t all[16];
    _mm256_storeu_si256((__m256i *)all, v);
    memcpy(x, all, sizeof(uint16_t) * (size_t)mask);
}
INLINE Bits side_by_side(__m256i left, __m256i right) { return (Bits){left, right}; }

INLINE __m256i narrow_eight(__m256 x) { /* in the low halves */
    const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_srli_epi32(up, 16);
}
INLINE __m256i narrow(Vec x) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow_eight(x.low), narrow_eight(x.high)), 0xd8);
}

INLINE Bits read_32_halves(const uint16_t *x, int count) {
    return (Bits){read_halves(x, first(count)), read_halves(x + 16, first(count - 16))};
}
INLINE void in_order(Vec *left, Vec *right) {
    const Vec mixed = *left;
    *left = (Vec){_mm256_permute2f128_ps(mixed.low, right->low, 0x20),
                  _mm256_permute2f128_ps(mixed.low, right->low, 0x31)};
    *right = (Vec){_mm256_permute2f128_ps(mixed.high, right->high, 0x20),
                   _mm256_permute2f128_ps(mixed.high, right->high, 0x31)};
}

INLINE void turn_quarters(Bits r[16]) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; u++) {
        const Bits a = r[u], b = r[4 + u], c = r[8 + u], d = r[12 + u];
        r[u] = (Bits){_mm256_permute2x128_si256(a.low, b.low, 0x20), _mm256_permute2x128_si256(c.low, d.low, 0x20)};
        r[4 + u] = (Bits){_mm256_permute2x128_si256(a.low, b.low, 0x31), _mm256_permute2x128_si256(c.low, d.low, 0x31)};
        r[8 + u] = (Bits){_mm256_permute2x128_si256(a.high, b.high, 0x20),
                          _mm256_permute2x128_si256(c.high, d.high, 0x20)};
        r[12 + u] = (Bits){_mm256_permute2x128_si256(a.high, b.high, 0x31),
                           _mm256_permute2x128_si256(c.high, d.high, 0x31)};
    }
}

#else
#error "this processor has neither AVX-512 (F, BW, DQ and VL) nor AVX2 with FMA"
#endif

/* Sixteen rows of sixteen turned on their side. */
INLINE void turn(Bits r[16]) {
    Bits t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = mix_low(r[i], r[i + 1]);
        t[i + 1] = mix_high(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = mix_low_words(t[i], t[i + 2]);
        r[i + 1] = mix_high_words(t[i], t[i + 2]);
        r[i + 2] = mix_low_words(t[i + 1], t[i + 3]);
        r[i + 3] = mix_high_words(t[i + 1], t[i + 3]);
    }
    turn_quarters(r);
}

#endif
