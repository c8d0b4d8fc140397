/* A matrix in blocks: its products, plain or in int4, and its packing: see native.c. */

#ifndef NATIVE_MATRIX_H
#define NATIVE_MATRIX_H

#include "native_product.h"

typedef struct {
    const unit *weight; /* (ceil(rows / BLOCK), units, BLOCK); in int4 (blocks, groups, record) */
    const float *bias;  /* filled up to whole blocks; or null */
    int32_t rows, units;
    int32_t group; /* int4: units of a row that share a scale and a zero point; 0 for plain numbers */
} Matrix;

/* int4: a group's record is 32 scales and 32 zero points in bfloat16, then BLOCK units for every 4 units of x, each
   with the 8 levels of an output: those of the 4 low numbers from the lowest bit on, then those of the 4 high ones. */
static inline size_t record_units(int group) { return (size_t)(1 + group / 4) * BLOCK; }

static inline int blocks_of(const Matrix *m) { return parts_of(m->rows, BLOCK); }

static inline const unit *block_at(const Matrix *m, int block) {
    const size_t units = m->group ? m->units / m->group * record_units(m->group) : (size_t)m->units * BLOCK;
    return m->weight + block * units;
}

/* The part of a matrix that a thread begins with, out of `blocks`. */
static const unit *start_of(const Matrix *m, int blocks, Team team) {
    int begin, end;
    share(blocks, team, &begin, &end);
    return block_at(m, begin);
}

#ifdef BFLOAT16
/* A tile times a block in int4, sums (rows, BLOCK). A level is read as the bfloat16 number 128 + level. The dot product
   S of these and the sum X of the group's x give what level x scale + zero stands for: scale S + (zero - 136 scale) X,
   where zero is what level 8 stands for. */

#define CLEAR_SUMS(r)                                                                               \
    if (r < rows) {                                                                                 \
        write(sums + r * BLOCK, zeros());                                                           \
        write(sums + r * BLOCK + 16, zeros());                                                      \
    }

#define BEGIN_GROUP(r) Vec left##r = zeros(), right##r = zeros();

/* Factors' counterparts: the levels of 16 outputs at `shift`, of both halves or of one. */
INLINE Bits levels_at(Bits levels, const int shift, const int which) {
    if (FACTORS == 1) return both_or(right_by(levels, shift), spread_bits(0x000f000f), spread_bits(0x43004300));
    levels = which == 0 ? left_by(levels, 16 - shift) : right_by(levels, shift);
    return both_or(levels, spread_bits(0x000f0000), spread_bits(0x43000000));
}

#define END_SIDE(sums, side, zero, scale) \
    write(sums, multiply_add(side, scale, multiply_add(zero, all, read(sums))));

#define END_GROUP(r)                                                                                \
    if (r < rows) {                                                                                 \
        const Vec all = spread(x_sums[r]);                                                          \
        if (sides & LEFT) END_SIDE(sums + r * BLOCK, left##r, left_zero, left_scale)                \
        if (sides & RIGHT) END_SIDE(sums + r * BLOCK + 16, right##r, right_zero, right_scale)       \
    }

/* One group's record, for one vector of outputs or for both. */
INLINE void multiply_group(
    const int rows, const int sides, const factor *x, const float *x_sums, const unit *w, int group, float *sums) {
    const Vec back = spread(-136.0f);
    const number *facts = (const number *)w;
    EACH_ROW(BEGIN_GROUP)
    w += BLOCK;
    for (int at = 0; at < group; at += 4, w += BLOCK) {
        const Bits levels = read_bits(w), more = read_bits(w + 16);
#pragma GCC unroll 4
        for (int shift = 0; shift < 16; shift += 4, x += FACTORS * rows)
#pragma GCC unroll 2
            for (int which = 0; which < FACTORS; which++)
                EACH_TURN(rows, sides) {
                    const Bits left = levels_at(levels, shift, which), right = levels_at(more, shift, which);
                    EACH_ROW(STEP_ROW)
                    END_TURN(rows, sides)
                }
    }
    const Vec left_scale = load(facts, ALL), right_scale = load(facts + 16, ALL);
    const Vec left_zero = multiply_add(left_scale, back, load(facts + 32, ALL));
    const Vec right_zero = multiply_add(right_scale, back, load(facts + 48, ALL));
    EACH_ROW(END_GROUP)
}

INLINE void multiply_int4(
    const int rows, const factor *x, const float *x_sums, const unit *w, int groups, int group, float *sums,
    const char *ahead, int lines) {
    EACH_ROW(CLEAR_SUMS)
    for (int g = 0; g < groups; g++, x += group * FACTORS * rows, x_sums += rows, w += record_units(group)) {
        fetch(ahead, lines, 0);
        ahead += (size_t)lines * ALIGNMENT;
        if (rows <= TOGETHER) {
            multiply_group(rows, LEFT | RIGHT, x, x_sums, w, group, sums);
        } else {
            multiply_group(rows, LEFT, x, x_sums, w, group, sums);
            multiply_group(rows, RIGHT, x, x_sums, w, group, sums);
        }
    }
}

typedef void Int4Tile(const factor *x, const float *x_sums, const unit *w, int groups, int group, float *sums,
                      const char *ahead, int lines);

#define MAKE_INT4(r)                                                                                         \
    static void int4_##r(const factor *x, const float *x_sums, const unit *w, int groups, int group,         \
                         float *sums, const char *ahead, int lines) {                                        \
        multiply_int4(r + 1, x, x_sums, w, groups, group, sums, ahead, lines);                               \
    }
EACH_ROW(MAKE_INT4)
#define NAME_INT4(r) int4_##r,
static Int4Tile *const by_int4[ROWS] = {EACH_ROW(NAME_INT4)};

/* The sum of every group of every token, tile by tile (groups, tokens of the tile). */
static void sum_groups(const factor *x, int tokens, int units, int group, float *to) {
    const int groups = units / group;
    for (int tile = 0; tile < parts_of(tokens, ROWS); tile++) {
        const int begin = tile_begin(tokens, tile), rows = tile_begin(tokens, tile + 1) - begin;
        const factor *from = x + (size_t)begin * units * FACTORS;
        for (int g = 0; g < groups; g++)
            for (int r = 0; r < rows; r++) {
                Vec sum = zeros();
                for (int at = g * group; at < (g + 1) * group; at += 16) {
                    const factor *each = from + (size_t)at * FACTORS * rows + r;
                    const Bits low = gather(each, FACTORS * rows);
                    const Bits high = FACTORS == 2 ? gather(each + rows, FACTORS * rows) : low;
                    sum = add(sum, as_floats(FACTORS == 2 ? low : left_by(low, 16)));
                    sum = add(sum, as_floats(both(high, spread_bits(0xffff0000u))));
                }
                to[(size_t)begin * groups + g * rows + r] = sum_of(sum);
            }
    }
}
#endif

/* What the blocks of a matrix in int4 need to know of x, at `to`: every thread makes it for itself. */
static void prepare(const Matrix *m, const factor *x, int tokens, float *to) {
#ifdef BFLOAT16
    if (m->group) sum_groups(x, tokens, m->units, m->group, to);
#else
    (void)m, (void)x, (void)tokens, (void)to;
#endif
}

/* All tokens times one block: sums (tokens, BLOCK).

   prepared: from `prepare`.
   next: what this thread reads after the block. */
static void multiply_block(
    const Matrix *m, int block, const factor *x, int tokens, const float *prepared, float *sums, const unit *next) {
    const int units = m->units, tiles = parts_of(tokens, ROWS);
    const unit *w = block_at(m, block);
    if (tokens < FETCHING) next = NULL;
#ifdef BFLOAT16
    if (m->group) {
        const int groups = units / m->group;
        const int of_group = (int)(record_units(m->group) * sizeof(unit) / ALIGNMENT);
        const int lines = parts_of(of_group, tiles);
        const char *ahead = (const char *)next;
        int left = ahead ? groups * of_group : 0;
        for (int tile = 0; tile < tiles; tile++) {
            const int begin = tile_begin(tokens, tile), rows = tile_begin(tokens, tile + 1) - begin;
            by_int4[rows - 1](x + (size_t)begin * units * FACTORS, prepared + (size_t)begin * groups, w, groups,
                              m->group, sums + (size_t)begin * BLOCK, ahead, left > 0 ? lines : 0);
            left -= groups * lines;
            ahead += (size_t)groups * lines * ALIGNMENT;
        }
        return;
    }
#else
    (void)prepared;
#endif
    const int parts = parts_of(units, CHUNK);
    for (int part = 0; part < parts; part++) {
        const int at = (int)((int64_t)units * part / parts), end = (int)((int64_t)units * (part + 1) / parts);
        const int pauses = parts_of(end - at, PAUSE), lines = parts_of(2 * PAUSE, tiles);
        const unit *following = part + 1 < parts && next ? w + (size_t)end * BLOCK : next;
        const char *ahead = (const char *)following;
        int left = ahead ? pauses * 2 * PAUSE : 0; /* lines of the next part, taken to be as long as this one */
        for (int tile = 0; tile < tiles; tile++) {
            const int begin = tile_begin(tokens, tile), rows = tile_begin(tokens, tile + 1) - begin;
            const factor *from = x + ((size_t)begin * units + (size_t)at * rows) * FACTORS;
            by_tile[rows - 1](from, w + (size_t)at * BLOCK, end - at, sums + (size_t)begin * BLOCK, BLOCK, part == 0,
                              ahead, left > 0 ? lines : 0);
            left -= pauses * lines;
            ahead += (size_t)pauses * lines * ALIGNMENT;
        }
    }
}

static inline Vec with_bias(const float *sums, const float *bias, int at) {
    const Vec v = read(sums);
    return bias ? add(v, read(bias + at)) : v;
}

/* Sixteen rows of units turned on their side: row u of `to`, BLOCK apart, gets unit u of every row. Missing rows are
   zeros. */
static void transpose(const unit *from, size_t step, int rows, int units, unit *to) {
    for (int at = 0; at < units; at += 16) {
        const Mask mask = first(units - at);
        Bits r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) r[i] = i < rows ? read_some_bits(from + i * step + at, mask) : no_bits();
        turn(r);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            if (at + i < units) write_bits(to + (size_t)(at + i) * BLOCK, r[i]);
    }
}

/* Packing weights. */

typedef struct {
    const number *from; /* (rows, units) */
    unit *to;
    int rows, units, threads;
} Packing;

static void pack_work(void *data) {
    const Packing *p = data;
    int begin, end;
    share(2 * parts_of(p->rows, BLOCK), join_team(p->threads), &begin, &end);
    for (int half = begin; half < end; half++) {
        unit *to = p->to + (size_t)(half / 2) * p->units * BLOCK + half % 2 * 16;
        transpose((const unit *)p->from + (size_t)half * 16 * p->units, (size_t)p->units,
                  least(16, p->rows - half * 16), p->units, to);
    }
}

/* From (rows, units) to (ceil(rows / BLOCK), units, BLOCK), with zeros where rows are missing. */
void pack(const number *from, unit *to, int rows, int units, int threads) {
    Packing packing = {from, to, rows, units, threads};
    run_team(pack_work, &packing, threads);
}

/* Asks for large pages, which the streams through the weights are quicker over. */
void hint(char *memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
    const size_t page = 1 << 21, offset = (page - (uintptr_t)memory % page) % page;
    if (bytes >= offset + page) madvise(memory + offset, (bytes - offset) / page * page, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

#endif
