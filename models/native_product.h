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
    MIXED = 2,      /* slots of a step in which values are mixed */
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

/* What units are multiplied with stands in factors of 32 bits: units, or, on processors that cannot multiply bfloat16
   units, numbers that were widened to float32 once and not at every product. */
typedef uint32_t factor;
#if defined(BFLOAT16) && defined(__AVX512BF16__)
typedef number weight; /* of a slot, when values are mixed */
enum { PER_FACTOR = 2 };
#else
typedef float weight;
enum { PER_FACTOR = 1 };
#endif
enum { FACTORS = PER_UNIT / PER_FACTOR }; /* of a unit */

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

#if defined(BFLOAT16) && defined(__AVX512BF16__)
static inline void store_weights(weight *x, Vec v) { store(x, ALL, v); }
static inline Vec load_weights(const weight *x) { return load(x, ALL); }
#else
static inline void store_weights(weight *x, Vec v) { write(x, rounded(v)); }
static inline Vec load_weights(const weight *x) { return read(x); }
#endif

/* What a factor is multiplied with: 16 units, or the low (0) or high (1) number of each, widened. */
INLINE Bits part_of(Bits units, const int which) {
    if (FACTORS == 1) return units;
    return which == 0 ? left_by(units, 16) : both(units, spread_bits(0xffff0000u));
}

/* sum + w x, of 16 factors. */
INLINE Vec dot(Vec sum, Bits w, Bits x) {
#if defined(BFLOAT16) && defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
#else
    return multiply_add(as_floats(w), as_floats(x), sum);
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

/* Where the factors of a token begin in tiles of `factors` each, and how far apart they stand. */
static inline factor *factors_of(factor *tiles, int tokens, int factors, int token, int *step) {
    int tile = (int)((int64_t)token * parts_of(tokens, ROWS) / tokens);
    if (tile_begin(tokens, tile + 1) <= token) tile++;
    const int begin = tile_begin(tokens, tile);
    *step = tile_begin(tokens, tile + 1) - begin;
    return tiles + (size_t)begin * factors + (token - begin);
}

static inline void put(factor *to, int step, Bits factors, int count) {
    if (step == 1) {
        write_some_bits(to, first(count), factors);
        return;
    }
    factor each[16];
    write_bits(each, factors);
    for (int i = 0; i < count && i < 16; i++) to[(size_t)i * step] = each[i];
}

/* Writes up to BLOCK adjacent numbers of a token into its tile. */
static inline void put_block(factor *to, int step, Vec left, Vec right, int count) {
    if (PER_FACTOR == 2) {
        put(to, step, side_by_side(narrow(left), narrow(right)), parts_of(count, 2));
        return;
    }
    put(to, step, as_bits(rounded(left)), count);
    if (count > 16) put(to + (size_t)16 * step, step, as_bits(rounded(right)), count - 16);
}

/* Puts numbers as they are into a token's tile. */
static inline void put_numbers(factor *to, int step, const number *x, int count) {
#ifdef BFLOAT16
    for (int i = 0; i < count; i += PER_FACTOR, to += step)
        *to = PER_FACTOR == 2 ? x[i] | (factor)x[i + 1] << 16 : (factor)x[i] << 16;
#else
    for (int i = 0; i < count; i++, to += step) memcpy(to, x + i, sizeof(factor));
#endif
}

/* The same numbers taken back. */
static inline void take_numbers(const factor *from, int step, number *x, int count) {
#ifdef BFLOAT16
    for (int i = 0; i < count; i += PER_FACTOR, from += step) {
        if (PER_FACTOR == 2) x[i] = (number)*from, x[i + 1] = (number)(*from >> 16);
        else x[i] = (number)(*from >> 16);
    }
#else
    for (int i = 0; i < count; i++, from += step) memcpy(x + i, from, sizeof(factor));
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

/* The sides of a block whose sums are added to `now`: all of them, or one after the other, with nothing that is read
   for the one kept for the other. */
#define IN_TURNS(rows, sides) (rows > AT_ONCE && (sides) == (LEFT | RIGHT))
#define EACH_TURN(rows, sides)                                                                      \
    for (int side = IN_TURNS(rows, sides) ? LEFT : LEFT | RIGHT, now;                               \
         now = side & (sides), side <= (IN_TURNS(rows, sides) ? RIGHT : LEFT | RIGHT); side++)
#define END_TURN(rows, sides) \
    if (IN_TURNS(rows, sides)) __asm__ volatile("" ::: "memory");

#define BEGIN_ROW(r)                                                                                \
    Vec left##r = zeros(), right##r = zeros();                                                      \
    if (r < rows && !fresh) {                                                                       \
        if (sides & LEFT) left##r = read(sums + r * sums_step);                                     \
        if (sides & RIGHT) right##r = read(sums + r * sums_step + 16);                              \
    }

#define STEP_ROW(r)                                                                                 \
    if (r < rows) {                                                                                 \
        const Bits each = spread_bits(x[which * rows + r]);                                         \
        if (now & LEFT) left##r = dot(left##r, left, each);                                         \
        if (now & RIGHT) right##r = dot(right##r, right, each);                                     \
    }

#define END_ROW(r)                                                                                  \
    if (r < rows) {                                                                                 \
        if (sides & LEFT) write(sums + r * sums_step, left##r);                                     \
        if (sides & RIGHT) write(sums + r * sums_step + 16, right##r);                              \
    }

INLINE const char *multiply_sides(
    const int rows, const int sides, const int pause, const int near, const factor *x, const unit *w, int units,
    float *sums, ptrdiff_t sums_step, int fresh, const char *ahead, int lines) {
    EACH_ROW(BEGIN_ROW)
    for (int at = 0; at < units; ahead += (size_t)lines * ALIGNMENT) {
        fetch(ahead, lines, near);
        for (const int end = least(at + pause, units); at < end; at++, x += FACTORS * rows, w += BLOCK)
#pragma GCC unroll 2
            for (int which = 0; which < FACTORS; which++)
                EACH_TURN(rows, sides) {
                    const Bits left = part_of(read_bits(w), which), right = part_of(read_bits(w + 16), which);
                    EACH_ROW(STEP_ROW)
                    END_TURN(rows, sides)
                }
    }
    EACH_ROW(END_ROW)
    return ahead;
}

INLINE void multiply_tile(
    const int rows, const int pause, const int near, const factor *x, const unit *w, int units, float *sums,
    ptrdiff_t sums_step, int fresh, const char *ahead, int lines) {
    if (rows <= TOGETHER) {
        multiply_sides(rows, LEFT | RIGHT, pause, near, x, w, units, sums, sums_step, fresh, ahead, lines);
        return;
    }
    for (int at = 0; at < units; at += STRIP, x += STRIP * FACTORS * rows, w += STRIP * BLOCK, fresh = 0) {
        const int count = least(STRIP, units - at);
        const int then = lines / 2, now = lines - then;
        ahead = multiply_sides(rows, LEFT, pause, near, x, w, count, sums, sums_step, fresh, ahead, now);
        if (then) ahead = multiply_sides(rows, RIGHT, pause, near, x, w, count, sums, sums_step, fresh, ahead, then);
        else multiply_sides(rows, RIGHT, pause, near, x, w, count, sums, sums_step, fresh, ahead, 0); /* is quicker */
    }
}

typedef void Tile(const factor *x, const unit *w, int units, float *sums, ptrdiff_t sums_step, int fresh,
                  const char *ahead, int lines);
typedef void Score(const factor *x, const unit *w, int units, float *sums, const char *ahead, int lines);

/* For every number of rows: of weights, and of keys, whose scores stand PIECE numbers apart and begin at zero. */
#define MAKE_TILES(r)                                                                                           \
    static void tile_##r(const factor *x, const unit *w, int units, float *sums, ptrdiff_t sums_step,           \
                         int fresh, const char *ahead, int lines) {                                             \
        multiply_tile(r + 1, r + 1 < FETCHING ? CHUNK : PAUSE, 0, x, w, units, sums, sums_step, fresh, ahead,   \
                      lines);                                                                                   \
    }                                                                                                           \
    static void score_##r(const factor *x, const unit *w, int units, float *sums, const char *ahead,            \
                          int lines) {                                                                          \
        multiply_tile(r + 1, 1, 1, x, w, units, sums, PIECE, 1, ahead, lines);                                  \
    }
EACH_ROW(MAKE_TILES)
#define NAME_TILE(r) tile_##r,
#define NAME_SCORE(r) score_##r,
static Tile *const by_tile[ROWS] = {EACH_ROW(NAME_TILE)};
static Score *const by_score[ROWS] = {EACH_ROW(NAME_SCORE)};

/* The mixture of a piece's values in one block of dims, or in two: sums (rows, BLOCK or 2 BLOCK) of weights times
   values, over the slots in their order. Meanwhile it asks for memory, as scores do.

   Where two slots share a factor, so do their numbers here. In bfloat16 dims stand in the order in which `finish`
   expects them.

   weights: rows that stand PIECE weights apart, zero where a row does not see the last of the slots.
   values: (slots, dims), of which the first `count` are read. */

INLINE void load_values(const number *values, int dims, int both, int count, Bits *left, Bits *right) {
#ifdef BFLOAT16
    const Bits last = read_32_halves(PER_FACTOR == 2 && both ? values + dims : values, count);
    const Bits even = PER_FACTOR == 2 ? read_32_halves(values, count) : no_bits();
    const Bits odd = PER_FACTOR == 2 && !both ? no_bits() : last;
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
        const Bits each = spread_bits(weights[r * (PIECE / PER_FACTOR)]);                           \
        if (now & LEFT) left##r = dot(left##r, left, each);                                         \
        if (now & RIGHT) right##r = dot(right##r, right, each);                                     \
        if (now & LEFT && blocks == 2) more##r = dot(more##r, more, each);                          \
        if (now & RIGHT && blocks == 2) last##r = dot(last##r, last, each);                         \
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
    const int rows, const int blocks, const int sides, int count, const factor *weights, const number *values, int dims,
    int slots, float *sums, ptrdiff_t sums_step, const char *ahead, int lines) {
    EACH_ROW(BEGIN_MIX)
    for (int slot = 0; slot < slots; ahead += (size_t)lines * ALIGNMENT) {
        fetch(ahead, lines, 1);
        for (const int end = least(slot + MIXED, slots); slot < end; slot += PER_FACTOR) {
            EACH_TURN(rows, sides) {
                Bits left, right, more, last;
                load_values(values, dims, slot + 1 < slots, count, &left, &right);
                if (blocks == 2) load_values(values + BLOCK, dims, slot + 1 < slots, count, &more, &last);
                EACH_ROW(STEP_MIX)
                END_TURN(rows, sides)
            }
            weights++;
            values += (size_t)PER_FACTOR * dims;
        }
    }
    EACH_ROW(END_MIX)
}

INLINE void mix_tile(
    const int rows, const int blocks, int count, const factor *weights, const number *values, int dims, int slots,
    float *sums, ptrdiff_t sums_step, const char *ahead, int lines) {
    if (rows <= TOGETHER) {
        mix_sides(rows, blocks, LEFT | RIGHT, count, weights, values, dims, slots, sums, sums_step, ahead, lines);
        return;
    }
    mix_sides(rows, blocks, LEFT, count, weights, values, dims, slots, sums, sums_step, ahead, lines);
    mix_sides(rows, blocks, RIGHT, count, weights, values, dims, slots, sums, sums_step, ahead, 0);
}

typedef void Mix(int count, const factor *weights, const number *values, int dims, int slots, float *sums,
                 ptrdiff_t sums_step, const char *ahead, int lines);

#define MAKE_MIX(r)                                                                                                \
    static void mix_##r(int count, const factor *weights, const number *values, int dims, int slots,               \
                        float *sums, ptrdiff_t sums_step, const char *ahead, int lines) {                          \
        if (count == BLOCK)                                                                                        \
            mix_tile(r + 1, 1, BLOCK, weights, values, dims, slots, sums, sums_step, ahead, lines);                \
        else                                                                                                       \
            mix_tile(r + 1, 1, count, weights, values, dims, slots, sums, sums_step, ahead, lines);                \
    }
EACH_ROW(MAKE_MIX)
#define NAME_MIX(r) mix_##r,
static Mix *const by_block[ROWS] = {EACH_ROW(NAME_MIX)};

#define MAKE_PAIR(r)                                                                                               \
    static void pair_##r(int count, const factor *weights, const number *values, int dims, int slots,              \
                         float *sums, ptrdiff_t sums_step, const char *ahead, int lines) {                         \
        (void)count;                                                                                               \
        mix_tile(r + 1, 2, BLOCK, weights, values, dims, slots, sums, sums_step, ahead, lines);                    \
    }
EACH_OF_FEW(MAKE_PAIR)
#define NAME_PAIR(r) pair_##r,
static Mix *const by_pair[FEW] = {EACH_OF_FEW(NAME_PAIR)};

#endif
