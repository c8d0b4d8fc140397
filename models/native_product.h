/* Types, threads, numbers, and the product of a tile of tokens with a block of outputs: see native.c. */

#ifndef NATIVE_PRODUCT_H
#define NATIVE_PRODUCT_H

#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "this processor lacks AVX-512 (F, BW, DQ and VL)"
#endif

enum {
    ROWS = 12,      /* tokens of a tile: two vectors of sums for each leave room for the rest in 32 registers */
    BLOCK = 32,     /* outputs of a block */
    CHUNK = 512,    /* units of a block's rows that are used by all tiles before the next: 64 KiB, a part of the L2 */
    PIECE = 256,    /* slots whose attention is computed by itself */
    QUERIES = 64,   /* tokens of a row that attend together: more would not add to the reuse of keys and values */
    WIDEST = 256,   /* head_dim */
    PAUSE = 2,      /* steps of a product with weights between two requests for memory that is needed later */
    TURN = 4,       /* steps for which it asks for memory while it turns 16 keys */
    FEW = 6,        /* queries whose mixtures over two blocks of dims fit into registers */
    ALIGNMENT = 64, /* bytes */
    STRETCH = 512,  /* bytes of memory that is read to see how fast it is */
#ifdef __AVX512BF16__
    FETCHING = 6,   /* tokens from which on arithmetic leaves time to ask for what is read next; below, processors do */
#else
    FETCHING = 1,   /* older ones do not do enough of it: 13 to 25 % of a pass with 1 to 5 tokens on a Xeon of 2017 */
#endif
};

typedef uint32_t unit;
#ifdef BFLOAT16
typedef uint16_t number;
enum { PER_UNIT = 2 };
#else
typedef float number;
enum { PER_UNIT = 1 };
#endif

/* The OpenMP runtime. */

static struct {
    void (*parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);
    void (*barrier)(void);
    int (*thread)(void);
    int (*threads)(void);
} omp;

void set_up(void *parallel, void *barrier, void *thread, void *threads) {
    *(void **)&omp.parallel = parallel;
    *(void **)&omp.barrier = barrier;
    *(void **)&omp.thread = thread;
    *(void **)&omp.threads = threads;
}

typedef struct {
    int me, all;
} Team;

static void run_team(void (*work)(void *), void *data, int threads) {
    if (threads > 1)
        omp.parallel(work, data, (unsigned)threads, 0);
    else
        work(data);
}

/* The team may be smaller than what was asked for. */
static Team join_team(int threads) {
    return threads > 1 ? (Team){omp.thread(), omp.threads()} : (Team){0, 1};
}

static inline void meet(Team team) {
    if (team.all > 1) omp.barrier();
}

static inline void share(int count, Team team, int *begin, int *end) {
    *begin = (int)((int64_t)count * team.me / team.all);
    *end = (int)((int64_t)count * (team.me + 1) / team.all);
}

/* Numbers. */

static inline __mmask16 first(int count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

static inline int least(int a, int b) { return a < b ? a : b; }

static inline int parts_of(int count, int size) { return (count + size - 1) / size; }

#ifdef BFLOAT16
static inline __m512 widen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

static inline __m256i narrow(__m512 x) { /* to the nearest, to the even one of two */
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
#endif
}

static inline __m512 load(const number *x, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, x)); }
static inline void store(number *x, __mmask16 mask, __m512 v) { _mm256_mask_storeu_epi16(x, mask, narrow(v)); }
static inline __m512 rounded(__m512 x) { return widen(narrow(x)); }
#else
static inline __m512 load(const number *x, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x); }
static inline void store(number *x, __mmask16 mask, __m512 v) { _mm512_mask_storeu_ps(x, mask, v); }
static inline __m512 rounded(__m512 x) { return x; }
#endif

/* sum + w x, of 16 units; the two products of a bfloat16 unit one after the other. */
static inline __m512 dot(__m512 sum, __m512i w, __m512i x) {
#if !defined(BFLOAT16)
    return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), sum);
#elif defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
#else
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    sum = _mm512_fmadd_ps(
        _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), sum);
    return _mm512_fmadd_ps(
        _mm512_castsi512_ps(_mm512_and_si512(w, high)), _mm512_castsi512_ps(_mm512_and_si512(x, high)), sum);
#endif
}

/* e^x, to about two units in the last place; exactly 1 at 0, and 0 at -110 and below. */
static inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-110.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), f);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* Tiles of tokens: as few as ROWS allows, of sizes that differ by one at most. */

static inline int tile_begin(int tokens, int tile) {
    return (int)((int64_t)tokens * tile / parts_of(tokens, ROWS));
}

/* Where the units of a token begin in tiles of `units` each, and how far apart they stand. */
static inline unit *units_of(unit *tiles, int tokens, int units, int token, int *step) {
    int tile = (int)((int64_t)token * parts_of(tokens, ROWS) / tokens);
    if (tile_begin(tokens, tile + 1) <= token) tile++;
    const int begin = tile_begin(tokens, tile);
    *step = tile_begin(tokens, tile + 1) - begin;
    return tiles + (size_t)begin * units + (token - begin);
}

static inline void put(unit *to, int step, __m512i units, int count) {
    if (step == 1) {
        _mm512_mask_storeu_epi32(to, first(count), units);
        return;
    }
    unit each[16];
    _mm512_storeu_si512(each, units);
    for (int i = 0; i < count && i < 16; i++) to[(size_t)i * step] = each[i];
}

/* Writes up to BLOCK adjacent numbers of a token into its tile. */
static inline void put_block(unit *to, int step, __m512 left, __m512 right, int count) {
#ifdef BFLOAT16
    put(to, step, _mm512_inserti64x4(_mm512_castsi256_si512(narrow(left)), narrow(right), 1), parts_of(count, 2));
#else
    put(to, step, _mm512_castps_si512(left), count);
    if (count > 16) put(to + (size_t)16 * step, step, _mm512_castps_si512(right), count - 16);
#endif
}

/* The product of a tile with a block: sums (rows, BLOCK) of `units` steps, begun at zero or continued.

   Meanwhile it asks for memory that is needed next, `lines` cache lines from `ahead` on for every `pause` steps, into
   the L1 where it is `near`: keys and values are needed soon, and best asked for a few at a time. */

static inline __attribute__((always_inline)) void fetch(const char *from, int lines, const int near) {
    for (const char *end = from + (size_t)lines * ALIGNMENT; from < end; from += ALIGNMENT) {
        if (near) _mm_prefetch(from, _MM_HINT_T0);
        else _mm_prefetch(from, _MM_HINT_T1);
    }
}

#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)

#define BEGIN_ROW(r)                                                       \
    __m512 left##r = _mm512_setzero_ps(), right##r = _mm512_setzero_ps();  \
    if (r < rows && !fresh) {                                              \
        left##r = _mm512_loadu_ps(sums + r * sums_step);                   \
        right##r = _mm512_loadu_ps(sums + r * sums_step + 16);             \
    }

#define STEP_ROW(r)                                                        \
    if (r < rows) {                                                        \
        const __m512i both = _mm512_set1_epi32((int)x[r]);                 \
        left##r = dot(left##r, left, both);                                \
        right##r = dot(right##r, right, both);                             \
    }

#define END_ROW(r)                                                         \
    if (r < rows) {                                                        \
        _mm512_storeu_ps(sums + r * sums_step, left##r);                   \
        _mm512_storeu_ps(sums + r * sums_step + 16, right##r);             \
    }

static inline __attribute__((always_inline)) void multiply_tile(
    const int rows, const int pause, const int near, const unit *x, const unit *w, int units, float *sums,
    ptrdiff_t sums_step, int fresh, const char *ahead, int lines) {
    EACH_ROW(BEGIN_ROW)
    for (int at = 0; at < units; ahead += (size_t)lines * ALIGNMENT) {
        fetch(ahead, lines, near);
        for (const int end = least(at + pause, units); at < end; at++, x += rows, w += BLOCK) {
            const __m512i left = _mm512_loadu_si512(w), right = _mm512_loadu_si512(w + 16);
            EACH_ROW(STEP_ROW)
        }
    }
    EACH_ROW(END_ROW)
}

typedef void Tile(const unit *x, const unit *w, int units, float *sums, ptrdiff_t sums_step, int fresh,
                  const char *ahead, int lines);
typedef void Score(const unit *x, const unit *w, int units, float *sums, const char *ahead, int lines);

/* For every number of rows: of weights, and of keys, whose scores stand PIECE numbers apart and begin at zero. */
#define MAKE_TILES(r)                                                                                           \
    static void tile_##r(const unit *x, const unit *w, int units, float *sums, ptrdiff_t sums_step, int fresh,  \
                         const char *ahead, int lines) {                                                        \
        multiply_tile(r + 1, r + 1 < FETCHING ? CHUNK : PAUSE, 0, x, w, units, sums, sums_step, fresh, ahead,   \
                      lines);                                                                                   \
    }                                                                                                           \
    static void score_##r(const unit *x, const unit *w, int units, float *sums, const char *ahead, int lines) { \
        multiply_tile(r + 1, 1, 1, x, w, units, sums, PIECE, 1, ahead, lines);                                  \
    }
EACH_ROW(MAKE_TILES)
#define NAME_TILE(r) tile_##r,
#define NAME_SCORE(r) score_##r,
static Tile *const by_tile[ROWS] = {EACH_ROW(NAME_TILE)};
static Score *const by_score[ROWS] = {EACH_ROW(NAME_SCORE)};

/* The mixture of a piece's values in one block of dims, or in two: sums (rows, BLOCK or 2 BLOCK) of weights times
   values, over the slots in their order. Meanwhile it asks for memory, as scores do.

   In bfloat16 two slots make a unit, and dims stand in the order in which `finish` expects them.

   weights: rows that stand PIECE numbers apart, zero where a row does not see the last of the slots.
   values: (slots, dims), of which those in `mask` are read. */

static inline __attribute__((always_inline)) void load_values(
    const number *values, int dims, int both, __mmask32 mask, __m512i *left, __m512i *right) {
#ifdef BFLOAT16
    const __m512i even = _mm512_maskz_loadu_epi16(mask, values);
    const __m512i odd = both ? _mm512_maskz_loadu_epi16(mask, values + dims) : _mm512_setzero_si512();
    *left = _mm512_unpacklo_epi16(even, odd);
    *right = _mm512_unpackhi_epi16(even, odd);
#else
    (void)dims, (void)both;
    *left = _mm512_maskz_loadu_epi32((__mmask16)mask, values);
    *right = _mm512_maskz_loadu_epi32((__mmask16)(mask >> 16), values + 16);
#endif
}

#define BEGIN_MIX(r)                                                       \
    __m512 left##r = _mm512_setzero_ps(), right##r = _mm512_setzero_ps();  \
    __m512 more##r = _mm512_setzero_ps(), last##r = _mm512_setzero_ps();

#define STEP_MIX(r)                                                                    \
    if (r < rows) {                                                                    \
        const __m512i both = _mm512_set1_epi32((int)weights[r * (PIECE / PER_UNIT)]);  \
        left##r = dot(left##r, left, both);                                            \
        right##r = dot(right##r, right, both);                                         \
        if (blocks == 2) {                                                             \
            more##r = dot(more##r, more, both);                                        \
            last##r = dot(last##r, last, both);                                        \
        }                                                                              \
    }

#define END_MIX(r)                                                  \
    if (r < rows) {                                                 \
        _mm512_storeu_ps(sums + r * sums_step, left##r);            \
        _mm512_storeu_ps(sums + r * sums_step + 16, right##r);      \
        if (blocks == 2) {                                          \
            _mm512_storeu_ps(sums + r * sums_step + 32, more##r);   \
            _mm512_storeu_ps(sums + r * sums_step + 48, last##r);   \
        }                                                           \
    }

static inline __attribute__((always_inline)) void mix_tile(
    const int rows, const int blocks, __mmask32 mask, const unit *weights, const number *values, int dims, int slots,
    float *sums, ptrdiff_t sums_step, const char *ahead, int lines) {
    EACH_ROW(BEGIN_MIX)
    for (int slot = 0; slot < slots; slot += PER_UNIT, ahead += (size_t)lines * ALIGNMENT) {
        __m512i left, right, more, last;
        fetch(ahead, lines, 1);
        load_values(values, dims, slot + 1 < slots, mask, &left, &right);
        if (blocks == 2) load_values(values + BLOCK, dims, slot + 1 < slots, mask, &more, &last);
        EACH_ROW(STEP_MIX)
        weights++;
        values += (size_t)PER_UNIT * dims;
    }
    EACH_ROW(END_MIX)
}

typedef void Mix(__mmask32 mask, const unit *weights, const number *values, int dims, int slots, float *sums,
                 ptrdiff_t sums_step, const char *ahead, int lines);

#define MAKE_MIX(r)                                                                                                \
    static void mix_##r(__mmask32 mask, const unit *weights, const number *values, int dims, int slots,            \
                        float *sums, ptrdiff_t sums_step, const char *ahead, int lines) {                          \
        mix_tile(r + 1, 1, mask, weights, values, dims, slots, sums, sums_step, ahead, lines);                     \
    }
EACH_ROW(MAKE_MIX)
#define NAME_MIX(r) mix_##r,
static Mix *const by_block[ROWS] = {EACH_ROW(NAME_MIX)};

#define EACH_OF_FEW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define MAKE_PAIR(r)                                                                                               \
    static void pair_##r(__mmask32 mask, const unit *weights, const number *values, int dims, int slots,           \
                         float *sums, ptrdiff_t sums_step, const char *ahead, int lines) {                         \
        (void)mask;                                                                                                \
        mix_tile(r + 1, 2, 0xffffffffu, weights, values, dims, slots, sums, sums_step, ahead, lines);              \
    }
EACH_OF_FEW(MAKE_PAIR)
#define NAME_PAIR(r) pair_##r,
static Mix *const by_pair[FEW] = {EACH_OF_FEW(NAME_PAIR)};

#endif
