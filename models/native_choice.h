/* Which positions of a row its last tokens attend to most, per layer and key head: see sparse_select.py. */

#ifndef NATIVE_CHOICE_H
#define NATIVE_CHOICE_H

#include "native_attention.h"

/* The order of the fields is that of the ctypes structure in packed_native.py. The tokens are those of the call's one
   span, the last ones of its row. */
typedef struct {
    const number *queries; /* (layers, tokens, heads, head_dim), rotated and scaled */
    int64_t *chosen;       /* (layers, kv_heads, budget), ascending */
    int32_t budget, window, pooled;
} Choice;

/* Memory of a thread. Weights stand by piece, then query; `largest` are the largest scores, then what weights are
   multiplied with. */
typedef struct {
    weight *weights;       /* (pieces, queries, PIECE) */
    float *largest, *sums; /* (pieces, queries in whole vectors) */
    float *received, *pooled; /* by slot, in whole pieces; `received` has a margin of zeros on both sides */
} Room;

typedef struct {
    Job job;
    const Choice *choice;
    char *memory;
    size_t each; /* bytes of a thread's room */
    int32_t next;
} Choosing;

static Room room_of(const Plan *p, const Choice *c, char *at, char **end) {
    const size_t slots = (size_t)p->pieces * PIECE, vectors = (size_t)p->pieces * parts_of(p->most, 16) * 16;
    Room r;
    r.weights = TAKE(weight, slots * p->most);
    r.largest = TAKE(float, vectors);
    r.sums = TAKE(float, vectors);
    r.received = TAKE(float, slots + 2 * (size_t)c->pooled);
    r.pooled = TAKE(float, slots);
    *end = at;
    return r;
}

/* Of every query, what its weights in each piece are to be multiplied with, in the place of the largest scores. */
static void weigh_pieces(const Room *r, int pieces, int queries) {
    const int step = parts_of(queries, 16) * 16;
    for (int q = 0; q < queries; q += 16) {
        Vec most = spread(-INFINITY), sum = zeros();
        for (int at = 0; at < pieces; at++) most = larger(most, read(r->largest + at * step + q));
        for (int at = 0; at < pieces; at++) {
            float *own = r->largest + at * step + q;
            const Vec times = exponential(subtract(read(own), most));
            sum = multiply_add(times, read(r->sums + at * step + q), sum);
            write(own, times);
        }
        for (int at = 0; at < pieces; at++) {
            float *own = r->largest + at * step + q;
            write(own, divide(read(own), sum));
        }
    }
}

/* Adds to `received` what the slots of a row get from the queries of a run in one key head. */
static void receive(
    const Worker *w, int layer, const Run *run, int kv_head, const Choice *c, const Room *r, float *received) {
    const Model *m = w->m;
    const int queries = run->tokens * group_of(m), tiles = parts_of(queries, ROWS), step = parts_of(queries, 16) * 16;
    const int pieces = parts_of(run->slot + run->tokens, PIECE);
    const size_t apart = (size_t)m->heads * m->head_dim;
    pack_queries(w, run, kv_head, c->queries + ((size_t)layer * w->c->tokens + run->first) * apart, apart);
    for (int at = 0; at < pieces; at++) {
        Piece piece = piece_of(w, layer, run, kv_head, at);
        const int scoring = tiles * parts_of(piece.held, BLOCK) * head_units(m);
        if (at + 1 < pieces) {
            const Piece then = piece_of(w, layer, run, kv_head, at + 1);
            piece.while_scoring = ahead_of(then.keys, (size_t)then.held * m->head_dim, scoring);
        }
        for (int tile = 0; tile < tiles; tile++) {
            const int q = tile_begin(queries, tile), rows = tile_begin(queries, tile + 1) - q;
            score(w, run, &piece, q, rows);
            for (int i = 0; i < rows; i++)
                soften(w->own.scores + i * PIECE, r->weights + ((size_t)at * queries + q + i) * PIECE,
                       seen_by(w, run, &piece, q + i), parts_of(piece.held, 16) * 16, r->largest + at * step + q + i,
                       r->sums + at * step + q + i);
        }
    }
    weigh_pieces(r, pieces, queries);
    for (int at = 0; at < pieces; at++) {
        const int held = least(run->slot + run->tokens - at * PIECE, PIECE);
        for (int s = 0; s < held; s += 64) { /* four vectors, since a single sum would wait for itself */
            const weight *from = r->weights + (size_t)at * queries * PIECE + s;
            Vec sums[4];
            for (int i = 0; i < 4; i++) sums[i] = zeros();
            for (int q = 0; q < queries; q++, from += PIECE) {
                const Vec times = spread(r->largest[at * step + q]);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) sums[i] = multiply_add(load_weights(from + 16 * i), times, sums[i]);
            }
            float *to = received + at * PIECE + s;
            for (int i = 0; i < 4; i++, to += 16) {
                const Mask mask = first(held - s - 16 * i);
                write_some(to, mask, add(read_some(to, mask), sums[i]));
            }
        }
    }
}

/* How many of the numbers, none of which is negative, are as large as the one of these bits. */
static int count_from(const float *x, int count, uint32_t bits) {
    const Bits sign = spread_bits(0x7fffffff);
    int found = 0;
    for (int i = 0; i < count; i += 16) {
        const Mask mask = first(count - i);
        found += count_reaching(both(read_some_bits(x + i, mask), sign), mask, (int32_t)bits);
    }
    return found;
}

/* The places of the `wanted` largest of `count` numbers, ascending; of equal ones the first. */
static void choose_largest(const float *x, int count, int wanted, int64_t *places) {
    uint32_t bound = 0; /* the largest bits that `wanted` numbers reach */
    for (uint32_t bit = 1u << 30; bit; bit >>= 1)
        if (count_from(x, count, bound | bit) >= wanted) bound |= bit;
    int spare = wanted - count_from(x, count, bound + 1);
    for (int i = 0, found = 0; i < count && found < wanted; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof(bits));
        bits &= 0x7fffffff;
        if (bits > bound || (bits == bound && spare-- > 0)) places[found++] = i;
    }
}

static void choose_work(void *data) {
    Choosing *all = data;
    const Worker worker = worker_of(&all->job), *w = &worker;
    const Plan *p = w->p;
    const Choice *c = all->choice;
    const int32_t *span = w->c->spans;
    const int known = span[1] + span[2], earlier = known - c->window, heads = w->m->kv_heads;
    char *end;
    const Room room = room_of(p, c, all->memory + all->each * w->team.me, &end);
    float *received = room.received + c->pooled;
    for (int task; (task = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED)) < w->m->layer_count * heads;) {
        memset(room.received, 0, sizeof(float) * ((size_t)p->pieces * PIECE + 2 * (size_t)c->pooled));
        for (int i = 0; i < p->run_count; i++)
            receive(w, task / heads, p->runs + i, task % heads, c, &room, received);
        memset(received + earlier, 0, sizeof(float) * (size_t)c->window);
        memset(room.pooled, 0, sizeof(float) * (size_t)earlier);
        for (int near = -(c->pooled / 2); near <= c->pooled / 2; near++)
            for (int s = 0; s < earlier; s++) room.pooled[s] += received[s + near];
        int64_t *chosen = c->chosen + (size_t)task * c->budget;
        choose_largest(room.pooled, earlier, c->budget - c->window, chosen);
        for (int i = 0; i < c->window; i++) chosen[c->budget - c->window + i] = earlier + i;
    }
}

/* Chooses `budget` positions of a row for every layer and key head: those that its last tokens attend to most, summed
   over these and over `pooled` neighbours, and the last `window`. Returns 0, or 1 where memory is short. */
int choose(const Model *model, const Call *call, const Choice *choice) {
    Plan plan = plan_call(model, call);
    fill_plan(model, call, &plan);
    Choosing all = {{model, call, &plan}, choice, NULL, 0, 0};
    char *end;
    room_of(&plan, choice, NULL, &end);
    all.each = (size_t)(end - (char *)NULL);
    all.memory = aligned_alloc(ALIGNMENT, all.each * (size_t)call->threads);
    if (!all.memory) return 1;
    run_team(choose_work, &all, call->threads);
    free(all.memory);
    return 0;
}

#endif
