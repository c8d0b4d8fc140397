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

#define CLEAR_SUMS(r)                                                    \
    if (r < rows) {                                                      \
        _mm512_storeu_ps(sums + r * BLOCK, _mm512_setzero_ps());         \
        _mm512_storeu_ps(sums + r * BLOCK + 16, _mm512_setzero_ps());    \
    }

#define BEGIN_GROUP(r) __m512 left##r = _mm512_setzero_ps(), right##r = _mm512_setzero_ps();

#define STEP_GROUP(r)                                                    \
    if (r < rows) {                                                      \
        const __m512i both = _mm512_set1_epi32((int)x[r]);               \
        left##r = dot(left##r, left, both);                              \
        right##r = dot(right##r, right, both);                           \
    }

#define DECODE(shift)                                                                                                 \
    {                                                                                                                 \
        const __m512i left = _mm512_ternarylogic_epi32(_mm512_srli_epi32(levels, shift), nibbles, offset, 0xea);      \
        const __m512i right = _mm512_ternarylogic_epi32(_mm512_srli_epi32(more, shift), nibbles, offset, 0xea);       \
        EACH_ROW(STEP_GROUP)                                                                                          \
        x += rows;                                                                                                    \
    }

#define END_GROUP(r)                                                                                  \
    if (r < rows) {                                                                                   \
        const __m512 all = _mm512_set1_ps(x_sums[r]);                                                 \
        float *sum = sums + r * BLOCK;                                                                \
        const __m512 l = _mm512_fmadd_ps(left_zero, all, _mm512_loadu_ps(sum));                       \
        const __m512 h = _mm512_fmadd_ps(right_zero, all, _mm512_loadu_ps(sum + 16));                 \
        _mm512_storeu_ps(sum, _mm512_fmadd_ps(left##r, left_scale, l));                               \
        _mm512_storeu_ps(sum + 16, _mm512_fmadd_ps(right##r, right_scale, h));                        \
    }

static inline __attribute__((always_inline)) void multiply_int4(
    const int rows, const unit *x, const float *x_sums, const unit *w, int groups, int group, float *sums,
    const char *ahead, int lines) {
    const __m512i nibbles = _mm512_set1_epi32(0x000f000f), offset = _mm512_set1_epi32(0x43004300);
    const __m512 back = _mm512_set1_ps(-136.0f);
    EACH_ROW(CLEAR_SUMS)
    for (int g = 0; g < groups; g++, x_sums += rows) {
        for (int line = 0; line < lines; line++, ahead += ALIGNMENT) _mm_prefetch(ahead, _MM_HINT_T1);
        const number *facts = (const number *)w;
        const __m512 left_scale = load(facts, 0xffff), right_scale = load(facts + 16, 0xffff);
        const __m512 left_zero = _mm512_fmadd_ps(left_scale, back, load(facts + 32, 0xffff));
        const __m512 right_zero = _mm512_fmadd_ps(right_scale, back, load(facts + 48, 0xffff));
        w += BLOCK;
        EACH_ROW(BEGIN_GROUP)
        for (int at = 0; at < group; at += 4, w += BLOCK) {
            const __m512i levels = _mm512_loadu_si512(w), more = _mm512_loadu_si512(w + 16);
            DECODE(0) DECODE(4) DECODE(8) DECODE(12)
        }
        EACH_ROW(END_GROUP)
    }
}

typedef void Int4Tile(const unit *x, const float *x_sums, const unit *w, int groups, int group, float *sums,
                      const char *ahead, int lines);

#define MAKE_INT4(r)                                                                                         \
    static void int4_##r(const unit *x, const float *x_sums, const unit *w, int groups, int group,           \
                         float *sums, const char *ahead, int lines) {                                        \
        multiply_int4(r + 1, x, x_sums, w, groups, group, sums, ahead, lines);                               \
    }
EACH_ROW(MAKE_INT4)
#define NAME_INT4(r) int4_##r,
static Int4Tile *const by_int4[ROWS] = {EACH_ROW(NAME_INT4)};

/* The sum of every group of every token, tile by tile (groups, tokens of the tile). */
static void sum_groups(const unit *x, int tokens, int units, int group, float *to) {
    const int groups = units / group;
    for (int tile = 0; tile < parts_of(tokens, ROWS); tile++) {
        const int begin = tile_begin(tokens, tile), rows = tile_begin(tokens, tile + 1) - begin;
        const __m512i each = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i places = _mm512_mullo_epi32(_mm512_set1_epi32(rows), each);
        const unit *from = x + (size_t)begin * units;
        for (int g = 0; g < groups; g++)
            for (int r = 0; r < rows; r++) {
                __m512 sum = _mm512_setzero_ps();
                for (int at = g * group; at < (g + 1) * group; at += 16) {
                    const __m512i v = _mm512_i32gather_epi32(places, from + (size_t)at * rows + r, 4);
                    const __m512i high = _mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000u));
                    sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)));
                    sum = _mm512_add_ps(sum, _mm512_castsi512_ps(high));
                }
                to[(size_t)begin * groups + g * rows + r] = _mm512_reduce_add_ps(sum);
            }
    }
}
#endif

/* What the blocks of a matrix in int4 need to know of x, at `to`: every thread makes it for itself. */
static void prepare(const Matrix *m, const unit *x, int tokens, float *to) {
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
    const Matrix *m, int block, const unit *x, int tokens, const float *prepared, float *sums, const unit *next) {
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
            by_int4[rows - 1](x + (size_t)begin * units, prepared + (size_t)begin * groups, w, groups, m->group,
                              sums + (size_t)begin * BLOCK, ahead, left > 0 ? lines : 0);
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
            by_tile[rows - 1](x + (size_t)begin * units + (size_t)at * rows, w + (size_t)at * BLOCK, end - at,
                              sums + (size_t)begin * BLOCK, BLOCK, part == 0, ahead, left > 0 ? lines : 0);
            left -= pauses * lines;
            ahead += (size_t)pauses * lines * ALIGNMENT;
        }
    }
}

static inline __m512 with_bias(const float *sums, const float *bias, int at) {
    const __m512 v = _mm512_loadu_ps(sums);
    return bias ? _mm512_add_ps(v, _mm512_loadu_ps(bias + at)) : v;
}

/* Sixteen rows of units turned on their side: row u of `to`, BLOCK apart, gets unit u of every row. Missing rows are
   zeros. */
static void transpose(const unit *from, size_t step, int rows, int units, unit *to) {
    for (int at = 0; at < units; at += 16) {
        const __mmask16 mask = first(units - at);
        __m512i r[16], t[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            r[i] = i < rows ? _mm512_maskz_loadu_epi32(mask, from + i * step + at) : _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2) {
            t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4) {
            r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
            r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
            r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
            r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
        }
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
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            if (at + i < units) _mm512_storeu_si512(to + (size_t)(at + i) * BLOCK, r[i]);
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
