/* Rotation, the cache, and attention in pieces of a row's slots: see native.c. */

#ifndef NATIVE_ATTENTION_H
#define NATIVE_ATTENTION_H

#include "native_call.h"

static inline number *cached(const Worker *w, int layer, int side, int row, int head, int slot) {
    const Call *c = w->c;
    const size_t block = (((size_t)layer * 2 + side) * c->rows + row) * w->m->kv_heads + head;
    return c->cache + (block * c->slots + slot) * w->m->head_dim;
}

/* Normalises (where the model does) and rotates queries in place; keys and values on their way to the cache. */
static void place_heads(const Worker *w, const Layer *l, int layer) {
    const Model *m = w->m;
    const Plan *p = w->p;
    const int dims = m->head_dim, each = m->heads + 2 * m->kv_heads, wide = heads_step(m);
    int begin, end;
    share(w->c->tokens * each, w->team, &begin, &end);
    for (int item = begin; item < end; item++) {
        const int t = item / each, head = item % each;
        const int kind = head < m->heads ? 0 : head < m->heads + m->kv_heads ? 1 : 2;
        number *x = p->heads + (size_t)t * wide + head * dims;
        if (kind == 2) {
            number *to = cached(w, layer, 1, p->row[t], head - m->heads - m->kv_heads, p->slot[t]);
            memcpy(to, x, sizeof(number) * dims);
            continue;
        }
        float v[WIDEST];
        Vec squares = zeros();
        for (int i = 0; i < dims; i += 16) {
            const Vec part = load(x + i, first(dims - i));
            squares = multiply_add(part, part, squares);
            write_some(v + i, first(dims - i), part);
        }
        if (l->heads_norm) {
            const float scale = 1.0f / sqrtf(sum_of(squares) / (float)dims + m->eps);
            for (int i = 0; i < dims; i++) v[i] = v[i] * scale * l->heads_norm[head * dims + i];
        }
        const float *by = w->c->rotation + ((size_t)w->c->positions[t] * 3 + kind) * dims;
        for (int i = 0; i < dims; i += 2) {
            const float even = v[i] * by[i] - v[i + 1] * by[i + 1], odd = v[i] * by[i + 1] + v[i + 1] * by[i];
            v[i] = even, v[i + 1] = odd;
        }
        number *to = kind == 0 ? x : cached(w, layer, 0, p->row[t], head - m->heads, p->slot[t]);
        for (int i = 0; i < dims; i += 16)
            store(to + i, first(dims - i), read_some(v + i, first(dims - i)));
    }
}

static void note_queries(const Worker *w, int layer) {
    const Call *c = w->c;
    const size_t numbers = (size_t)w->m->heads * w->m->head_dim;
    for (int i = w->team.me; i < c->watched_count; i += w->team.all)
        memcpy(c->queries + ((size_t)layer * c->watched_all + c->watched_at + i) * numbers,
               w->p->heads + (size_t)c->watched[i] * heads_step(w->m), sizeof(number) * numbers);
}

/* Attention of a run of one row's tokens in one key head. Queries stand by token, those of a token by head. */

/* from: the heads of the run's first token, `apart` numbers from those of the next. */
static void pack_queries(const Worker *w, const Run *run, int kv_head, const number *from, size_t apart) {
    const int group = group_of(w->m), dims = w->m->head_dim, queries = run->tokens * group;
    for (int q = 0, step; q < queries; q++) {
        const number *x = from + (size_t)(q / group) * apart + (size_t)(kv_head * group + q % group) * dims;
        factor *to = factors_of(w->own.queries, queries, dims / PER_FACTOR, q, &step);
        put_numbers(to, step, x, dims);
    }
}

/* Cache lines to ask for in the steps of the products that come: so many in each, until none are left. Asked for all at
   once they would be waited for. */
typedef struct {
    const char *at;
    int lines, left;
} Ahead;

static Ahead ahead_of(const number *from, size_t numbers, int steps) {
    const int left = (int)((numbers * sizeof(number) + ALIGNMENT - 1) / ALIGNMENT);
    return (Ahead){(const char *)from, parts_of(left, steps > 1 ? steps : 1), left};
}

/* For a product of so many steps: where to begin to ask, and for how many lines in each. */
static inline const char *ask(Ahead *a, int steps, int *lines) {
    const char *from = a->at;
    *lines = a->left > 0 ? a->lines : 0;
    a->at += (size_t)steps * *lines * ALIGNMENT;
    a->left -= steps * *lines;
    return from;
}

/* A piece of a run's slots in one key head, while it is attended to. */
typedef struct {
    const number *keys, *values;
    int begin, held, packed;           /* the first slot; slots that hold something; blocks of keys that are packed */
    Ahead while_scoring;               /* asked for in the products that score this piece */
    Ahead around_scoring;              /* asked for while keys are packed for them, and in the mixing after them */
} Piece;

static Piece piece_of(const Worker *w, int layer, const Run *run, int kv_head, int at) {
    const int begin = at * PIECE;
    Piece p = {cached(w, layer, 0, run->row, kv_head, begin), cached(w, layer, 1, run->row, kv_head, begin)};
    p.begin = begin;
    p.held = least(run->slot + run->tokens - begin, PIECE);
    return p;
}

/* Slots of a piece that a query sees. */
static inline int seen_by(const Worker *w, const Run *run, const Piece *p, int query) {
    const int seen = least(run->slot + query / group_of(w->m) + 1 - p->begin, p->held);
    return seen > 0 ? seen : 0;
}

/* Scores (rows, PIECE) of the queries from q on; returns how many slots the last of them sees. */
static int score(const Worker *w, const Run *run, Piece *p, int q, int rows) {
    const Own *o = &w->own;
    const int dims = w->m->head_dim, units = head_units(w->m), seen = seen_by(w, run, p, q + rows - 1);
    const int kept = run->tokens * group_of(w->m) > rows; /* for the tiles that follow */
    for (int b = 0, lines; b * BLOCK < seen; b++) {
        unit *packed = o->keys + (size_t)(kept ? b : 0) * units * BLOCK;
        if (b == p->packed) {
            const int left = p->held - b * BLOCK;
            const number *from = p->keys + (size_t)b * BLOCK * dims;
            for (int half = 0; half < 2; half++) {
                const char *then = ask(&p->around_scoring, TURN, &lines);
                fetch(then, TURN * lines, 1);
                transpose((const unit *)(from + half * 16 * dims), (size_t)units, least(left - half * 16, 16), units,
                          packed + half * 16);
            }
            p->packed++;
        }
        const char *ahead = ask(&p->while_scoring, units, &lines);
        const factor *queries = o->queries + (size_t)q * units * FACTORS;
        by_score[rows - 1](queries, packed, units, o->scores + b * BLOCK, ahead, lines);
    }
    return seen;
}

/* Weights of the first `seen` scores, zeros up to `slots`; writes the largest score and the sum of the weights. */
static void soften(const float *scores, weight *weights, int seen, int slots, float *largest, float *all) {
    const Vec nothing = spread(-INFINITY);
    Vec most = nothing, sum = zeros();
    for (int s = 0; s < seen; s += 16)
        most = larger(most, read_or(nothing, scores + s, first(seen - s)));
    *largest = largest_of(most);
    most = spread(*largest);
    for (int s = 0; s < slots; s += 16) {
        const Mask mask = first(seen - s);
        Vec v = zeros();
        if (mask) v = keep(mask, exponential(subtract(read(scores + s), most)));
        sum = add(sum, v);
        store_weights(weights + s, v);
    }
    *all = sum_of(sum);
}

/* Joins the sums over a later piece to those over the pieces before it. */
static void join(float *record, const float *piece, int numbers) {
    if (piece[numbers] == -INFINITY) return; /* the query sees nothing of it */
    const float most = record[numbers] > piece[numbers] ? record[numbers] : piece[numbers];
    const Vec old = exponential(spread(record[numbers] - most));
    const Vec new = exponential(spread(piece[numbers] - most));
    for (int i = 0; i < numbers; i += 16) {
        const Vec kept = multiply(read(record + i), old);
        write(record + i, multiply_add(read(piece + i), new, kept));
    }
    const Vec kept = multiply(spread(record[numbers + 1]), old);
    record[numbers + 1] = first_of(multiply_add(spread(piece[numbers + 1]), new, kept));
    record[numbers] = most;
}

/* Divides by the sum of the weights, into the tile of what `out` multiplies. */
static void finish(const Worker *w, const Run *run, int kv_head, int query, const float *record) {
    const Model *m = w->m;
    const int group = group_of(m), factors = m->head_dim / PER_FACTOR, numbers = head_blocks(m) * BLOCK;
    int step;
    factor *to = factors_of(w->p->mixed, w->c->tokens, m->heads * factors, run->first + query / group, &step);
    to += (size_t)(kv_head * group + query % group) * factors * step;
    const Vec sum = spread(record[numbers + 1]);
    for (int at = 0; at < m->head_dim; at += BLOCK, to += (size_t)(BLOCK / PER_FACTOR) * step) {
        Vec left = divide(read(record + at), sum);
        Vec right = divide(read(record + at + 16), sum);
#ifdef BFLOAT16
        in_order(&left, &right);
#endif
        put_block(to, step, left, right, least(BLOCK, m->head_dim - at));
    }
}

/* Steps of all products that mix a piece, when so many rows go together. */
static inline int mixing_steps(const Model *m, int rows, int slots) {
    const int products = rows <= FEW ? parts_of(head_blocks(m), 2) : head_blocks(m);
    return products * parts_of(slots, MIXED);
}

/* One piece for all queries of a run. The first piece of several writes records, later ones join them; a piece that is
   by itself writes them. */
static void attend_piece(const Worker *w, const Run *run, Piece *p, int joins, float *records) {
    const Model *m = w->m;
    const Own *o = &w->own;
    const int dims = m->head_dim, record = record_of(m), numbers = record - 16;
    const int queries = run->tokens * group_of(m), tiles = parts_of(queries, ROWS);
    for (int tile = 0; tile < tiles; tile++) {
        const int q = tile_begin(queries, tile), rows = tile_begin(queries, tile + 1) - q;
        const int seen = score(w, run, p, q, rows), steps = parts_of(seen, MIXED);
        float *to = joins ? o->one : records + (size_t)q * record;
        for (int r = 0; r < rows; r++) {
            float *facts = to + (size_t)r * record + numbers;
            soften(o->scores + r * PIECE, o->weights + r * PIECE, seen_by(w, run, p, q + r),
                   parts_of(seen, BLOCK) * BLOCK, facts, facts + 1);
        }
        for (int at = 0, lines; at < dims; at += BLOCK) {
            const char *ahead = ask(&p->around_scoring, steps, &lines);
            const int pair = rows <= FEW && at + 2 * BLOCK <= dims, count = least(BLOCK, dims - at);
            Mix *const mix = pair ? by_pair[rows - 1] : by_block[rows - 1];
            mix(count, (const factor *)o->weights, p->values + at, dims, seen,
                to + at, record, ahead, lines);
            at += pair ? BLOCK : 0;
        }
        for (int r = 0; joins && r < rows; r++)
            join(records + (size_t)(q + r) * record, to + (size_t)r * record, numbers);
    }
}

/* What a thread takes at a time: all pieces of a run in one key head, or one of them where they are shared out. */
typedef struct {
    const Run *run;
    int pair, kv_head, piece, end;
} Task;

static int take_task(const Worker *w, int layer, Task *task) {
    const Plan *p = w->p;
    const int heads = w->m->kv_heads, each = p->shared ? p->pieces : 1, all = p->run_count * heads * each;
    for (int number; (number = __atomic_fetch_add(p->next + layer, 1, __ATOMIC_RELAXED)) < all;) {
        const int pair = number / each, piece = number % each;
        const Run *run = p->runs + pair / heads;
        const int pieces = parts_of(run->slot + run->tokens, PIECE);
        if (piece < pieces) {
            *task = (Task){run, pair, pair % heads, piece, p->shared ? piece + 1 : pieces};
            return 1;
        }
    }
    return 0;
}

/* Tasks are taken as threads become free, the next one shortly before, so that its keys can be asked for. */
static void attend(const Worker *w, int layer) {
    const Model *m = w->m;
    const Plan *p = w->p;
    const int record = record_of(m), group = group_of(m), dims = m->head_dim, step = heads_step(m);
    Task next;
    for (int more = take_task(w, layer, &next); more;) {
        const Task task = next;
        const Run *run = task.run;
        const int queries = run->tokens * group, tiles = parts_of(queries, ROWS), rows = parts_of(queries, tiles);
        pack_queries(w, run, task.kv_head, p->heads + (size_t)run->first * step, (size_t)step);
        Piece piece = piece_of(w, layer, run, task.kv_head, task.piece), then = piece;
        for (int at = task.piece; at < task.end; at++, piece = then) {
            const int last = at + 1 == task.end;
            if (last) more = take_task(w, layer, &next);
            if (!last) then = piece_of(w, layer, run, task.kv_head, at + 1);
            if (last && more) then = piece_of(w, layer, next.run, next.kv_head, next.piece);
            const int scoring = parts_of(piece.held, BLOCK) * head_units(m);
            const int turning = parts_of(piece.held, BLOCK) * 2 * TURN, mixing = mixing_steps(m, rows, piece.held);
            piece.while_scoring = ahead_of(piece.values, (size_t)piece.held * dims, scoring);
            if (!last || more)
                piece.around_scoring = ahead_of(then.keys, (size_t)then.held * dims, turning + tiles * mixing);
            float *records = p->shared ? p->partial + ((size_t)task.pair * p->pieces + at) * p->most * record
                                       : w->own.running;
            attend_piece(w, run, &piece, !p->shared && at > 0, records);
        }
        for (int q = 0; !p->shared && q < queries; q++)
            finish(w, run, task.kv_head, q, w->own.running + (size_t)q * record);
    }
    if (!p->shared) return;
    meet(w->team);
    int begin, end;
    share(p->run_count * m->kv_heads * p->most, w->team, &begin, &end);
    for (int item = begin; item < end; item++) {
        const int pair = item / p->most, q = item % p->most;
        const Run *run = p->runs + pair / m->kv_heads;
        if (q >= run->tokens * group) continue;
        const size_t apart = (size_t)p->most * record;
        float *records = p->partial + (size_t)pair * p->pieces * apart + (size_t)q * record;
        for (int piece = 1; piece < parts_of(run->slot + run->tokens, PIECE); piece++)
            join(records, records + piece * apart, record - 16);
        finish(w, run, pair % m->kv_heads, q, records);
    }
}

#endif
