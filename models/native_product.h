/* Types, threads, numbers, and the product of a tile of tokens with a block of outputs: see native.c. */

#ifndef NATIVE_PRODUCT_H
#define NATIVE_PRODUCT_H

#include "native_vector.h"

enum {
    BLOCK = 32,     /* outputs of a block */
    LEFT = 1,       /* one vector of a block's outputs, */
    RIGHT = 2,      /* and the other */
    STRIP = 64,     /* units after which the two take turns, where they are computed by themselves */
    CHUNK = 512,    /* units of a block's rows that are used by all tiles before the next: 64 KiB, a part of the L2 */
    PIECE = 256,    /* slots whose attention is computed by itself */
    QUERIES = 64,   /* tokens of a row that attend together: more would not add to the reuse of keys and values */
    WIDEST = 256,   /* head_dim */
    PAUSE = 2,      /* steps of a product with weights between two requests for memory that is needed later */
    TURN = 4,       /* steps for which it asks for memory while it turns 16 keys */
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

static inline int least(int a, int b) { return a < b ? a : b; }

static inline int parts_of(int count, int size) { return (count + size - 1) / size; }

#ifdef BFLOAT16
static inline Vec load(const number *x, Mask mask) { return widen(read_halves(x, mask)); }
static inline void store(number *x, Mask mask, Vec v) { write_halves(x, mask, narrow(v)); }
static inline Vec rounded(Vec x) { return widen(narrow(x)); }
#else
static inline Vec load(const number *x, Mask mask) { return read_some(x, mask); }
static inline void store(number *x, Mask mask, Vec v) { write_some(x, mask, v); }
static inline Vec rounded(Vec x) { return x; }
#endif

/* sum + w x, of 16 units; the two products of a bfloat16 unit one after the other. */
static inline Vec dot(Vec sum, Bits w, Bits x) {
#if !defined(BFLOAT16)
    return multiply_add(as_floats(w), as_floats(x), sum);
#elif defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
#else
    const Bits high = spread_bits(0xffff0000u);
    sum = multiply_add(as_floats(left_by(w, 16)), as_floats(left_by(x, 16)), sum);
    return multiply_add(as_floats(both(w, high)), as_floats(both(x, high)), sum);
#endif
}

/* e^x, to about two units in the last place; exactly 1 at 0, and 0 at -110 and below. */
static inline Vec exponential(Vec x) {
    x = larger(x, spread(-110.0f));
    const Vec n = whole(multiply(x, spread(1.44269504f)));
    Vec f = multiply_add(n, spread(-0.693359375f), x);
    f = multiply_add(n, spread(2.12194440e-4f), f);
    Vec p = spread(1.0f / 720);
    p = multiply_add(p, f, spread(1.0f / 120));
    p = multiply_add(p, f, spread(1.0f / 24));
    p = multiply_add(p, f, spread(1.0f / 6));
    p = multiply_add(p, f, spread(0.5f));
    p = multiply_add(p, f, spread(1.0f));
    p = multiply_add(p, f, spread(1.0f));
    return scale_by_two(p, n);
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

static inline void put(unit *to, int step, Bits units, int count) {
    if (step == 1) {
        write_some_bits(to, first(count), units);
        return;
    }
    unit each[16];
    write_bits(each, units);
    for (int i = 0; i < count && i < 16; i++) to[(size_t)i * step] = each[i];
}

/* Writes up to BLOCK adjacent numbers of a token into its tile. */
static inline void put_block(unit *to, int step, Vec left, Vec right, int count) {
#ifdef BFLOAT16
    put(to, step, side_by_side(narrow(left), narrow(right)), parts_of(count, 2));
#else
    put(to, step, as_bits(left), count);
    if (count > 16) put(to + (size_t)16 * step, step, as_bits(right), count - 16);
#endif
}

/* The product of a tile with a block: sums (rows, BLOCK) of `units` steps, begun at zero or continued.

   Meanwhile it asks for memory that is needed next, `lines` cache lines from `ahead` on for every `pause` steps, into
   the L1 where it is `near`: keys and values are needed soon, and best asked for a few at a time. */

INLINE void fetch(const char *from, int lines, const int near) {
    for (const char *end = from + (size_t)lines * ALIGNMENT; from < end; from += ALIGNMENT) {
        if (near) _mm_prefetch(from, _MM_HINT_T0);
        else _mm_prefetch(from, _MM_HINT_T1);
    }
}

#define BEGIN_ROW(r)                                                                                \
    Vec left##r = zeros(), right##r = zeros();                                                      \
    if (r < rows && !fresh) {                                                                       \
        if (sides & LEFT) left##r = read(sums + r * sums_step);                                     \
        if (sides & RIGHT) right##r = read(sums + r * sums_step + 16);                              \
    }

#define STEP_ROW(r)                                                                                 \
    if (r < rows) {                                                                                 \
        const Bits each = spread_bits(x[r]);                                                        \
        if (sides & LEFT) left##r = dot(left##r, left, each);                                       \
        if (sides & RIGHT) right##r = dot(right##r, right, each);                                   \
    }

#define END_ROW(r)                                                                                  \
    if (r < rows) {                                                                                 \
        if (sides & LEFT) write(sums + r * sums_step, left##r);                                     \
        if (sides & RIGHT) write(sums + r * sums_step + 16, right##r);                              \
    }

INLINE const char *multiply_sides(
    const int rows, const int sides, const int pause, const int near, const unit *x, const unit *w, int units,
    float *sums, ptrdiff_t sums_step, int fresh, const char *ahead, int lines) {
    EACH_ROW(BEGIN_ROW)
    for (int at = 0; at < units; ahead += (size_t)lines * ALIGNMENT) {
        fetch(ahead, lines, near);
        for (const int end = least(at + pause, units); at < end; at++, x += rows, w += BLOCK) {
            const Bits left = read_bits(w), right = read_bits(w + 16);
            EACH_ROW(STEP_ROW)
        }
    }
    EACH_ROW(END_ROW)
    return ahead;
}

INLINE void multiply_tile(
    const int rows, const int pause, const int near, const unit *x, const unit *w, int units, float *sums,
    ptrdiff_t sums_step, int fresh, const char *ahead, int lines) {
    if (rows <= TOGETHER) {
        multiply_sides(rows, LEFT | RIGHT, pause, near, x, w, units, sums, sums_step, fresh, ahead, lines);
        return;
    }
    for (int at = 0; at < units; at += STRIP, x += STRIP * rows, w += STRIP * BLOCK, fresh = 0) {
        const int count = least(STRIP, units - at);
        ahead = multiply_sides(rows, LEFT, pause, near, x, w, count, sums, sums_step, fresh, ahead, lines);
        multiply_sides(rows, RIGHT, pause, near, x, w, count, sums, sums_step, fresh, ahead, 0);
    }
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
   values: (slots, dims), of which the first `count` are read. */

INLINE void load_values(const number *values, int dims, int both, int count, Bits *left, Bits *right) {
#ifdef BFLOAT16
    const Bits even = read_32_halves(values, count);
    const Bits odd = both ? read_32_halves(values + dims, count) : no_bits();
    *left = pair_low(even, odd);
    *right = pair_high(even, odd);
#else
    (void)dims, (void)both;
    *left = read_some_bits(values, first(count));
    *right = read_some_bits(values + 16, first(count - 16));
#endif
}

#define BEGIN_MIX(r) Vec left##r = zeros(), right##r = zeros(), more##r = zeros(), last##r = zeros();

#define STEP_MIX(r)                                                                                 \
    if (r < rows) {                                                                                 \
        const Bits each = spread_bits(weights[r * (PIECE / PER_UNIT)]);                             \
        if (sides & LEFT) left##r = dot(left##r, left, each);                                       \
        if (sides & RIGHT) right##r = dot(right##r, right, each);                                   \
        if (blocks == 2) {                                                                          \
            more##r = dot(more##r, more, each);                                                     \
            last##r = dot(last##r, last, each);                                                     \
        }                                                                                           \
    }

#define END_MIX(r)                                                                                  \
    if (r < rows) {                                                                                 \
        if (sides & LEFT) write(sums + r * sums_step, left##r);                                     \
        if (sides & RIGHT) write(sums + r * sums_step + 16, right##r);                              \
        if (blocks == 2) {                                                                          \
            write(sums + r * sums_step + 32, more##r);                                              \
            write(sums + r * sums_step + 48, last##r);                                              \
        }                                                                                           \
    }

INLINE void mix_sides(
    const int rows, const int blocks, const int sides, int count, const unit *weights, const number *values, int dims,
    int slots, float *sums, ptrdiff_t sums_step, const char *ahead, int lines) {
    EACH_ROW(BEGIN_MIX)
    for (int slot = 0; slot < slots; slot += PER_UNIT, ahead += (size_t)lines * ALIGNMENT) {
        Bits left, right, more, last;
        fetch(ahead, lines, 1);
        load_values(values, dims, slot + 1 < slots, count, &left, &right);
        if (blocks == 2) load_values(values + BLOCK, dims, slot + 1 < slots, count, &more, &last);
        EACH_ROW(STEP_MIX)
        weights++;
        values += (size_t)PER_UNIT * dims;
    }
    EACH_ROW(END_MIX)
}

INLINE void mix_tile(
    const int rows, const int blocks, int count, const unit *weights, const number *values, int dims, int slots,
    float *sums, ptrdiff_t sums_step, const char *ahead, int lines) {
    if (rows <= TOGETHER) {
        mix_sides(rows, blocks, LEFT | RIGHT, count, weights, values, dims, slots, sums, sums_step, ahead, lines);
        return;
    }
    mix_sides(rows, blocks, LEFT, count, weights, values, dims, slots, sums, sums_step, ahead, lines);
    mix_sides(rows, blocks, RIGHT, count, weights, values, dims, slots, sums, sums_step, ahead, 0);
}

typedef void Mix(int count, const unit *weights, const number *values, int dims, int slots, float *sums,
                 ptrdiff_t sums_step, const char *ahead, int lines);

#define MAKE_MIX(r)                                                                                                \
    static void mix_##r(int count, const unit *weights, const number *values, int dims, int slots,            \
                        float *sums, ptrdiff_t sums_step, const char *ahead, int lines) {                          \
        mix_tile(r + 1, 1, count, weights, values, dims, slots, sums, sums_step, ahead, lines);                     \
    }
EACH_ROW(MAKE_MIX)
#define NAME_MIX(r) mix_##r,
static Mix *const by_block[ROWS] = {EACH_ROW(NAME_MIX)};

#define MAKE_PAIR(r)                                                                                               \
    static void pair_##r(int count, const unit *weights, const number *values, int dims, int slots,           \
                         float *sums, ptrdiff_t sums_step, const char *ahead, int lines) {                         \
        (void)count;                                                                                               \
        mix_tile(r + 1, 2, BLOCK, weights, values, dims, slots, sums, sums_step, ahead, lines);              \
    }
EACH_OF_FEW(MAKE_PAIR)
#define NAME_PAIR(r) pair_##r,
static Mix *const by_pair[FEW] = {EACH_OF_FEW(NAME_PAIR)};

#endif
