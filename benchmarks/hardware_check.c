/* What hardware_check.py compares specbench's own figures with: read bandwidth, and the most that the arithmetic units
 * do out of registers.  Usage: hardware_check MEBIBYTES THREADS.  Prints "name value" lines, in 1e9 per second. */
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
#endif

struct work {
    const char *name;
    void (*run)(long);
    double amount; /* of all threads together */
};
static struct work todo[6];
static int works;

static void *thread(void *argument) {
    const long id = (long)argument;
    for (int w = 0; w < works; w++)
        for (int round = -1; round < ROUNDS; round++) {
            pthread_barrier_wait(&gate);
            const double began = seconds();
            todo[w].run(id);
            pthread_barrier_wait(&gate);
            if (id == 0 && round >= 0)
                printf("%s %.3f\n", todo[w].name, todo[w].amount / 1e9 / (seconds() - began));
        }
    return NULL;
}

int main(int count, char **words_given) {
    if (count != 3)
        return 2;
    bytes = (size_t)atol(words_given[1]) << 20;
    threads = atol(words_given[2]);
    buffer = aligned_alloc(4096, bytes);
    if (!buffer || threads < 1 || threads > 1024)
        return 1;
    memset(buffer, 1, bytes);
    const double steps = (double)threads * LOOPS * CHAINS * WIDTH;
    todo[works++] = (struct work){"read:wide", read_wide, (double)bytes};
    todo[works++] = (struct work){"read:narrow", read_narrow, (double)bytes};
    todo[works++] = (struct work){"read:streams", read_streams, (double)bytes};
    todo[works++] = (struct work){"float32", multiply_add, steps / 4 * 2};
#ifdef HAS_BF16
    todo[works++] = (struct work){"bfloat16", dot_bf16, steps / 2 * 2};
#endif
#ifdef HAS_INT8
    todo[works++] = (struct work){"int8", dot_int8, steps * 2};
#endif
    pthread_t started[1024];
    pthread_barrier_init(&gate, NULL, (unsigned)threads);
    for (long id = 0; id < threads; id++)
        pthread_create(&started[id], NULL, thread, (void *)id);
    for (long id = 0; id < threads; id++)
        pthread_join(started[id], NULL);
    return 0;
}
