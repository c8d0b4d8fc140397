/* What Python passes, and where everything of a call stands in its scratch memory: see native.c. */

#ifndef NATIVE_CALL_H
#define NATIVE_CALL_H

#include "native_matrix.h"

/* The order of the fields is that of the ctypes structures in native.py and packed_native.py. */

typedef struct {
    const float *norm;
    Matrix qkv; /* outputs: queries, keys, values, by head, with the numbers that rotate together side by side */
    const float *heads_norm; /* (heads + kv_heads, head_dim), or null */
    Matrix out;
    const float *mlp_norm;
    Matrix gate_up, down; /* gate_up: all gates, then all ups */
} Layer;

typedef struct {
    const Layer *layers;
    const number *embedding; /* (vocabulary, width); or null where it is the head, which is then not kept twice */
    const float *final_norm;
    Matrix head;
    int32_t layer_count, width, inner, heads, kv_heads, head_dim;
    float eps;
} Model;

typedef struct {
    const int64_t *ids, *positions; /* (tokens) */
    const float *rotation; /* (positions, 3, head_dim): complex factors of queries, keys and values */
    const int32_t *spans;  /* (span_count, 3): row, slot of the first token, tokens */
    number *cache;         /* (layers, 2, rows, kv_heads, slots, head_dim) */
    const int32_t *wanted; /* (wanted_count): tokens whose logits or states are */
    float *logits;         /* (wanted_count, rows of the head); or null */
    number *states;        /* (wanted_count, width), what the head multiplies; or null */
    const int64_t *watched; /* (watched_count): tokens whose queries are noted */
    number *queries;        /* (layers, watched_all, heads, head_dim); this call writes from watched_at on */
    char *scratch;
    int32_t tokens, span_count, rows, slots, wanted_count, watched_count, watched_all, watched_at, threads;
} Call;

/* Where everything of a call stands in its scratch memory. */

typedef struct { /* adjacent tokens of a row, which attend together */
    int32_t row, slot, tokens, first;
} Run;

typedef struct {
    number *hidden, *heads;         /* (tokens, width); (tokens, outputs of qkv in whole blocks) */
    factor *normed, *mixed, *gated; /* tiles of what qkv and gate_up (above ROWS tokens), out, and down multiply */
    int32_t *row, *slot, *next;     /* (tokens), (tokens), (layers): the next task of a layer's attention */
    Run *runs;
    float *partial; /* (runs x kv_heads, pieces, most queries of a run, record) where pieces are shared out */
    char *own;      /* (threads, own_bytes) */
    size_t own_bytes, bytes;
    int run_count, pieces, most, shared;
} Plan;

typedef struct {
    float *sums, *more;      /* (tokens, BLOCK) */
    float *prepared;         /* of what a matrix in int4 multiplies, see prepare */
    factor *normed;          /* tiles of what qkv and gate_up multiply, of up to ROWS tokens */
    factor *queries;         /* tiles of a run's queries */
    unit *keys;              /* a piece's, (blocks of slots, units of a head, BLOCK) */
    float *scores, *running; /* (ROWS, PIECE); (queries of a run, record) */
    float *one;              /* (ROWS, record) */
    weight *weights;         /* (ROWS, PIECE) */
} Own;

static inline int group_of(const Model *m) { return m->heads / m->kv_heads; }
static inline int head_units(const Model *m) { return m->head_dim / PER_UNIT; }
static inline int head_blocks(const Model *m) { return parts_of(m->head_dim, BLOCK); }
static inline int heads_step(const Model *m) { return blocks_of(&m->layers->qkv) * BLOCK; }

/* Floats of a query's sum over slots: its numbers in whole blocks, then the largest score and the sum of weights. */
static inline int record_of(const Model *m) { return head_blocks(m) * BLOCK + 16; }

static char *take(char **at, size_t bytes) {
    char *begin = *at;
    *at = begin + (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return begin;
}

#define TAKE(type, count) ((type *)take(&at, sizeof(type) * (size_t)(count)))

static Own own_of(const Model *m, int tokens, int most, char *at, char **end) {
    const int units = head_units(m), inner = m->inner / PER_UNIT, width = m->width / PER_UNIT;
    int widest = m->heads * units > inner ? m->heads * units : inner;
    widest = widest > width ? widest : width;
    Own o;
    o.sums = TAKE(float, tokens * BLOCK);
    o.more = TAKE(float, tokens * BLOCK);
    o.prepared = TAKE(float, tokens * widest / 16);
    o.normed = TAKE(factor, least(tokens, ROWS) * m->width / PER_FACTOR);
    o.queries = TAKE(factor, most * units * FACTORS);
    o.keys = TAKE(unit, PIECE * units);
    o.scores = TAKE(float, ROWS * PIECE);
    o.running = TAKE(float, most * record_of(m));
    o.one = TAKE(float, ROWS * record_of(m));
    o.weights = TAKE(weight, ROWS * PIECE);
    *end = at;
    return o;
}

static Plan plan_call(const Model *m, const Call *c) {
    enum { MOST_PARTIAL = 1 << 22 }; /* floats; above, there are tasks enough for all threads anyway */
    Plan p = {0};
    const int tokens = c->tokens;
    for (int s = 0; s < c->span_count; s++) {
        const int32_t *span = c->spans + 3 * s;
        p.run_count += parts_of(span[2], QUERIES);
        p.most = p.most > least(span[2], QUERIES) ? p.most : least(span[2], QUERIES);
        if (p.pieces < parts_of(span[1] + span[2], PIECE)) p.pieces = parts_of(span[1] + span[2], PIECE);
    }
    p.most *= group_of(m);
    const size_t pairs = (size_t)p.run_count * m->kv_heads, partial = pairs * p.pieces * p.most * record_of(m);
    p.shared = c->threads > 1 && p.pieces > 1 && pairs < 4 * (size_t)c->threads && partial <= MOST_PARTIAL;

    char *at = c->scratch;
    p.hidden = TAKE(number, tokens * m->width);
    p.heads = TAKE(number, (size_t)tokens * heads_step(m));
    p.normed = TAKE(factor, tokens * (m->width / PER_FACTOR));
    p.mixed = TAKE(factor, (size_t)tokens * m->heads * m->head_dim / PER_FACTOR);
    p.gated = TAKE(factor, (size_t)tokens * (m->inner / PER_FACTOR));
    p.row = TAKE(int32_t, tokens);
    p.slot = TAKE(int32_t, tokens);
    p.next = TAKE(int32_t, m->layer_count);
    p.runs = TAKE(Run, p.run_count);
    p.partial = TAKE(float, p.shared ? partial : 0);
    char *end;
    own_of(m, tokens, p.most, at, &end);
    p.own_bytes = (size_t)(end - at);
    p.own = take(&at, p.own_bytes * c->threads);
    p.bytes = (size_t)(at - c->scratch);
    return p;
}

static void fill_plan(const Model *m, const Call *c, Plan *p) {
    int token = 0;
    Run *run = p->runs;
    for (int s = 0; s < c->span_count; s++) {
        const int row = c->spans[3 * s], slot = c->spans[3 * s + 1], tokens = c->spans[3 * s + 2];
        for (int i = 0; i < tokens; i += QUERIES, run++)
            *run = (Run){row, slot + i, least(QUERIES, tokens - i), token + i};
        for (int i = 0; i < tokens; i++, token++) p->row[token] = row, p->slot[token] = slot + i;
    }
    memset(p->next, 0, sizeof(int32_t) * m->layer_count);
}

typedef struct {
    const Model *model;
    const Call *call;
    const Plan *plan;
} Job;

typedef struct {
    const Model *m;
    const Call *c;
    const Plan *p;
    Team team;
    Own own;
} Worker;

static Worker worker_of(const Job *job) {
    Worker w = {job->model, job->call, job->plan, join_team(job->call->threads), {0}};
    char *end;
    w.own = own_of(w.m, w.c->tokens, w.p->most, w.p->own + w.p->own_bytes * w.team.me, &end);
    return w;
}

#endif
