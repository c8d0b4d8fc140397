/* What hardware_check.py compares the figures of specbench with: read bandwidth, matrix products, and the most that the
 * arithmetic units do out of registers.  Usage: hardware_check MEBIBYTES THREADS.  Prints "name value" lines, in 1e9 per
 * second. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#define WIDTH 64
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif

typedef int64_t words __attribute__((vector_size(WIDTH)));
typedef float floats __attribute__((vector_size(WIDTH)));

enum { ROUNDS = 9, CHAINS = 12, LOOPS = 4000000 };

static size_t bytes;
static long threads;
static char *buffer;
static pthread_barrier_t gate;
static volatile double sink;

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Several ways to read from one end to the other: which is fastest depends on the prefetchers of the processor. */
#define READER(NAME, TYPE, STREAMS)                                                                                    \
    static void NAME(long id) {                                                                                        \
        const size_t each = bytes / threads, count = each / sizeof(TYPE) / 8;                                          \
        const size_t next = STREAMS ? 1 : 8, apart = STREAMS ? count : 1;                                              \
        const TYPE *p = (const TYPE *)(buffer + id * each);                                                            \
        TYPE sum[8] = {{0}};                                                                                           \
        for (size_t i = 0; i < count; i++)                                                                             \
            for (int j = 0; j < 8; j++)                                                                                \
                sum[j] += p[i * next + j * apart];                                                                     \
        for (int j = 1; j < 8; j++)                                                                                    \
            sum[0] += sum[j];                                                                                          \
        sink = (double)sum[0][0];                                                                                      \
    }
typedef int64_t half_words __attribute__((vector_size(WIDTH > 32 ? 32 : WIDTH)));
READER(read_wide, words, 0)
READER(read_narrow, half_words, 0)
READER(read_streams, words, 1)

/* From front to back, asking for what comes later: some processors do not do enough of that by themselves. */
static void read_ahead(long id) {
    const size_t each = bytes / threads, count = each / sizeof(words) / 8, ahead = 4096;
    const char *p = buffer + id * each;
    words sum[8] = {{0}};
    for (size_t i = 0; i < count; i++, p += 8 * sizeof(words))
        for (size_t j = 0; j < 8; j++) {
            __builtin_prefetch(p + ahead + j * sizeof(words));
            sum[j] += *(const words *)(p + j * sizeof(words));
        }
    for (int j = 1; j < 8; j++)
        sum[0] += sum[j];
    sink = (double)sum[0][0];
}

static void multiply_add(long id) {
    floats sum[CHAINS], x, y;
    for (int j = 0; j < WIDTH / 4; j++)
        x[j] = 0.9999999f, y[j] = 1e-9f * (id + 1);
    for (int i = 0; i < CHAINS; i++)
        sum[i] = x * (float)i;
    for (long n = 0; n < LOOPS; n++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++)
            sum[i] = sum[i] * x + y;
    }
    for (int i = 1; i < CHAINS; i++)
        sum[0] += sum[i];
    sink = sum[0][0];
}

/* A square matrix product of our own, blocked and packed as libraries do it (Goto and van de Geijn 2008): TALL rows by
 * two vectors of the result in registers, a panel of the right matrix in the first cache, a block of the left one in the
 * second. Operands are words of 32 bits, one float32, two bfloat16 or four int8 that stand next to each other along the
 * inner dimension; the right matrix is given as a layer's weight is, by output. Packing is part of the time. */
#if WIDTH == 64
enum { TALL = 12 };
#else
enum { TALL = 6 };
#endif
enum { LANES = WIDTH / 4, PANEL = 2 * LANES, DEEP = 144, HIGH = 96, LARGEST = 2304 };

static long size;
static uint32_t *left, *right;
static char *out;
static int wrong;

#define PRODUCT(NAME, GROUP, WORTH, LANE, WORD, VEC, SUM, SPLAT, DOT)                                                  \
    static void NAME##_tile(const WORD *a, const WORD *b, SUM *c, long stride) {                                       \
        SUM sum[TALL][2];                                                                                              \
        _Pragma("GCC unroll 12") for (int i = 0; i < TALL; i++) {                                                      \
            sum[i][0] = c[i * stride];                                                                                 \
            sum[i][1] = c[i * stride + 1];                                                                             \
        }                                                                                                              \
        for (int k = 0; k < DEEP; k++, a += TALL, b += PANEL) {                                                        \
            const VEC first = *(const VEC *)b, second = *(const VEC *)(b + LANES);                                     \
            _Pragma("GCC unroll 12") for (int i = 0; i < TALL; i++) {                                                  \
                const VEC x = SPLAT(a[i]);                                                                             \
                sum[i][0] = DOT(sum[i][0], x, first);                                                                  \
                sum[i][1] = DOT(sum[i][1], x, second);                                                                 \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 12") for (int i = 0; i < TALL; i++) {                                                      \
            c[i * stride] = sum[i][0];                                                                                 \
            c[i * stride + 1] = sum[i][1];                                                                             \
        }                                                                                                              \
    }                                                                                                                  \
    static void NAME(long id) {                                                                                        \
        const long words = size / GROUP, panels = size / PANEL, stride = size / LANES;                                 \
        const long from = id * panels / threads, to = (id + 1) * panels / threads;                                     \
        const WORD *a = (const WORD *)left, *b = (const WORD *)right;                                                  \
        WORD *block = aligned_alloc(64, sizeof(WORD) * HIGH * DEEP);                                                   \
        WORD *panel = aligned_alloc(64, sizeof(WORD) * (to - from) * PANEL * DEEP);                                    \
        for (long row = 0; row < size; row++)                                                                          \
            memset((SUM *)out + row * stride + 2 * from, 0, (to - from) * 2 * sizeof(SUM));                            \
        for (long deep = 0; deep < words; deep += DEEP) {                                                              \
            for (long p = from; p < to; p++)                                                                           \
                for (long j = 0; j < PANEL; j++)                                                                       \
                    for (long k = 0; k < DEEP; k++)                                                                    \
                        panel[((p - from) * DEEP + k) * PANEL + j] = b[(p * PANEL + j) * words + deep + k];            \
            for (long high = 0; high < size; high += HIGH) {                                                           \
                for (long s = 0; s < HIGH; s += TALL)                                                                  \
                    for (long i = 0; i < TALL; i++)                                                                    \
                        for (long k = 0; k < DEEP; k++)                                                                \
                            block[s * DEEP + k * TALL + i] = a[(high + s + i) * words + deep + k];                     \
                for (long p = from; p < to; p++)                                                                       \
                    for (long s = 0; s < HIGH; s += TALL)                                                              \
                        NAME##_tile(block + s * DEEP, panel + (p - from) * DEEP * PANEL,                               \
                                    (SUM *)out + (high + s) * stride + 2 * p, stride);                                 \
            }                                                                                                          \
        }                                                                                                              \
        if (id == 0 && ((LANE *)out)[0] != (LANE)(WORTH * words))                                                      \
            wrong = 1;                                                                                                 \
        free(block);                                                                                                   \
        free(panel);                                                                                                   \
    }

#define SPLAT_FLOAT(x) ((x) - (floats){0}) /* + would have to turn -0 into 0 */
#define MULTIPLY_ADD(sum, x, y) ((sum) + (x) * (y))
PRODUCT(product_float32, 1, 1, float, float, floats, floats, SPLAT_FLOAT, MULTIPLY_ADD)

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define HAS_BF16 1
static void dot_bf16(long id) {
    __m512 sum[CHAINS];
    __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f80 + (short)id);
    for (int i = 0; i < CHAINS; i++)
        sum[i] = _mm512_set1_ps((float)i);
    for (long n = 0; n < LOOPS; n++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++)
            sum[i] = _mm512_dpbf16_ps(sum[i], x, x);
    }
    for (int i = 1; i < CHAINS; i++)
        sum[0] = _mm512_add_ps(sum[0], sum[i]);
    sink = _mm512_reduce_add_ps(sum[0]);
}

#define SPLAT_WORD(x) _mm512_set1_epi32((int)(x))
#define DOT_BF16(sum, x, y) _mm512_dpbf16_ps(sum, (__m512bh)(x), (__m512bh)(y))
PRODUCT(product_bf16, 2, 1, float, uint32_t, __m512i, __m512, SPLAT_WORD, DOT_BF16)
#endif

#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
#define HAS_INT8 1
static void dot_int8(long id) {
    __m512i sum[CHAINS], x = _mm512_set1_epi8((char)(id + 1));
    for (int i = 0; i < CHAINS; i++)
        sum[i] = _mm512_set1_epi32(i);
    for (long n = 0; n < LOOPS; n++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++)
            sum[i] = _mm512_dpbusd_epi32(sum[i], x, x);
    }
    for (int i = 1; i < CHAINS; i++)
        sum[0] = _mm512_add_epi32(sum[0], sum[i]);
    sink = _mm512_reduce_add_epi32(sum[0]);
}

#ifndef SPLAT_WORD
#define SPLAT_WORD(x) _mm512_set1_epi32((int)(x))
#endif
PRODUCT(product_int8, 4, -12415, int32_t, uint32_t, __m512i, __m512i, SPLAT_WORD, _mm512_dpbusd_epi32)
#endif

struct work {
    const char *name;
    void (*run)(long);
    double amount; /* of all threads together */
    long size;     /* of a product */
};
static struct work todo[32];
static int works;

static void *thread(void *argument) {
    const long id = (long)argument;
    for (int w = 0; w < works; w++)
        for (int round = -1; round < ROUNDS; round++) {
            if (id == 0)
                size = todo[w].size;
            pthread_barrier_wait(&gate);
            const double began = seconds();
            todo[w].run(id);
            pthread_barrier_wait(&gate);
            if (id == 0 && round >= 0)
                printf("%s %.3f\n", todo[w].name, todo[w].amount / 1e9 / (seconds() - began));
        }
    return NULL;
}

static void product(const char *name, void (*run)(long), long of_size) {
    todo[works++] = (struct work){name, run, 2.0 * of_size * of_size * of_size, of_size};
}

int main(int count, char **words_given) {
    if (count != 3)
        return 2;
    bytes = (size_t)atol(words_given[1]) << 20;
    threads = atol(words_given[2]);
    buffer = aligned_alloc(4096, bytes);
    left = aligned_alloc(4096, (size_t)LARGEST * LARGEST * 4);
    right = aligned_alloc(4096, (size_t)LARGEST * LARGEST * 4);
    out = aligned_alloc(4096, (size_t)LARGEST * LARGEST * 4);
    if (!buffer || !left || !right || !out || threads < 1 || threads > 1024)
        return 1;
    memset(buffer, 1, bytes);
    for (long i = 0; i < (long)LARGEST * LARGEST; i++)
        left[i] = right[i] = 0x3f800000; /* 1.0; as bfloat16 0 and 1 */
    const double steps = (double)threads * LOOPS * CHAINS * WIDTH;
    todo[works++] = (struct work){"read:wide", read_wide, (double)bytes, 0};
    todo[works++] = (struct work){"read:narrow", read_narrow, (double)bytes, 0};
    todo[works++] = (struct work){"read:ahead", read_ahead, (double)bytes, 0};
    todo[works++] = (struct work){"read:streams", read_streams, (double)bytes, 0};
    todo[works++] = (struct work){"float32-registers", multiply_add, steps / 4 * 2, 0};
    product("float32-product:1152", product_float32, 1152);
    product("float32-product:2304", product_float32, 2304);
#ifdef HAS_BF16
    todo[works++] = (struct work){"bfloat16-registers", dot_bf16, steps / 2 * 2, 0};
    product("bfloat16-product:1152", product_bf16, 1152);
    product("bfloat16-product:2304", product_bf16, 2304);
#endif
#ifdef HAS_INT8
    todo[works++] = (struct work){"int8-registers", dot_int8, steps * 2, 0};
    product("int8-product:1152", product_int8, 1152);
    product("int8-product:2304", product_int8, 2304);
#endif
    pthread_t started[1024];
    pthread_barrier_init(&gate, NULL, (unsigned)threads);
    for (long id = 0; id < threads; id++)
        pthread_create(&started[id], NULL, thread, (void *)id);
    for (long id = 0; id < threads; id++)
        pthread_join(started[id], NULL);
    if (wrong)
        fprintf(stderr, "hardware_check: a product came out wrong\n");
    return wrong;
}
