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
        __m512 squares = _mm512_setzero_ps();
        for (int i = 0; i < dims; i += 16) {
            const __m512 part = load(x + i, first(dims - i));
            squares = _mm512_fmadd_ps(part, part, squares);
            _mm512_mask_storeu_ps(v + i, first(dims - i), part);
        }
        if (l->heads_norm) {
            const float scale = 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)dims + m->eps);
            for (int i = 0; i < dims; i++) v[i] = v[i] * scale * l->heads_norm[head * dims + i];
        }
        const float *by = w->c->rotation + ((size_t)w->c->positions[t] * 3 + kind) * dims;
        for (int i = 0; i < dims; i += 2) {
            const float even = v[i] * by[i] - v[i + 1] * by[i + 1], odd = v[i] * by[i + 1] + v[i + 1] * by[i];
            v[i] = even, v[i + 1] = odd;
        }
        number *to = kind == 0 ? x : cached(w, layer, 0, p->row[t], head - m->heads, p->slot[t]);
        for (int i = 0; i < dims; i += 16)
            store(to + i, first(dims - i), _mm512_maskz_loadu_ps(first(dims - i), v + i));
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

static void pack_queries(const Worker *w, const Run *run, int kv_head) {
    const int group = group_of(w->m), units = head_units(w->m), queries = run->tokens * group;
    for (int q = 0, step; q < queries; q++) {
        const size_t head = (size_t)kv_head * group + q % group;
        const unit *from =
            (const unit *)(w->p->heads + (size_t)(run->first + q / group) * heads_step(w->m) + head * w->m->head_dim);
        unit *to = units_of(w->own.queries, queries, units, q, &step);
        for (int i = 0; i < units; i++) to[(size_t)i * step] = from[i];
    }
}

/* Some dims of a piece's values: (slots, BLOCK) units. In bfloat16 two slots make a unit, and dims stand in the order
   in which `finish` expects them. */
static void pack_values(const number *values, int dims, int block, int slots, unit *to) {
    const int at = block * BLOCK, count = least(BLOCK, dims - at);
    for (int s = 0; s < parts_of(slots, BLOCK) * BLOCK; s += PER_UNIT, to += BLOCK) {
        const number *x = values + (size_t)s * dims + at;
#ifdef BFLOAT16
        const __mmask32 mask = count == BLOCK ? 0xffffffffu : (1u << count) - 1;
        const __m512i even = _mm512_maskz_loadu_epi16(s < slots ? mask : 0, x);
        const __m512i odd = _mm512_maskz_loadu_epi16(s + 1 < slots ? mask : 0, x + dims);
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(even, odd));
        _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi16(even, odd));
#else
        _mm512_storeu_ps(to, load(x, s < slots ? first(count) : 0));
        _mm512_storeu_ps(to + 16, load(x + 16, s < slots ? first(count - 16) : 0));
#endif
    }
}

static void ask_for(const number *from, size_t numbers) {
    const char *at = (const char *)from, *end = (const char *)(from + numbers);
    for (; at < end; at += ALIGNMENT) _mm_prefetch(at, _MM_HINT_T1);
}

/* Weights of the first `seen` scores, zeros up to `slots`; writes the largest score and the sum of the weights. */
static void soften(const float *scores, number *weights, int seen, int slots, float *facts) {
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    __m512 most = nothing, sum = _mm512_setzero_ps();
    for (int s = 0; s < seen; s += 16)
        most = _mm512_max_ps(most, _mm512_mask_loadu_ps(nothing, first(seen - s), scores + s));
    facts[0] = _mm512_reduce_max_ps(most);
    most = _mm512_set1_ps(facts[0]);
    for (int s = 0; s < slots; s += 16) {
        const __mmask16 mask = first(seen - s);
        __m512 v = _mm512_setzero_ps();
        if (mask) v = _mm512_maskz_mov_ps(mask, exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + s), most)));
        sum = _mm512_add_ps(sum, v);
        store(weights + s, 0xffff, v);
    }
    facts[1] = _mm512_reduce_add_ps(sum);
}

/* Joins the sums over a later piece to those over the pieces before it. */
static void join(float *record, const float *piece, int numbers) {
    if (piece[numbers] == -INFINITY) return; /* the query sees nothing of it */
    const float most = record[numbers] > piece[numbers] ? record[numbers] : piece[numbers];
    const __m512 old = exponential(_mm512_set1_ps(record[numbers] - most));
    const __m512 new = exponential(_mm512_set1_ps(piece[numbers] - most));
    for (int i = 0; i < numbers; i += 16) {
        const __m512 kept = _mm512_mul_ps(_mm512_loadu_ps(record + i), old);
        _mm512_storeu_ps(record + i, _mm512_fmadd_ps(_mm512_loadu_ps(piece + i), new, kept));
    }
    const __m512 kept = _mm512_mul_ps(_mm512_set1_ps(record[numbers + 1]), old);
    record[numbers + 1] = _mm512_cvtss_f32(_mm512_fmadd_ps(_mm512_set1_ps(piece[numbers + 1]), new, kept));
    record[numbers] = most;
}

/* Divides by the sum of the weights, into the tile of what `out` multiplies. */
static void finish(const Worker *w, const Run *run, int kv_head, int query, const float *record) {
    const Model *m = w->m;
    const int group = group_of(m), units = head_units(m), numbers = head_blocks(m) * BLOCK;
    int step;
    unit *to = units_of(w->p->mixed, w->c->tokens, m->heads * units, run->first + query / group, &step);
    to += (size_t)(kv_head * group + query % group) * units * step;
    const __m512 sum = _mm512_set1_ps(record[numbers + 1]);
    for (int at = 0; at < m->head_dim; at += BLOCK, to += (size_t)(BLOCK / PER_UNIT) * step) {
        __m512 left = _mm512_div_ps(_mm512_loadu_ps(record + at), sum);
        __m512 right = _mm512_div_ps(_mm512_loadu_ps(record + at + 16), sum);
#ifdef BFLOAT16
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        const __m512 mixed = left;
        left = _mm512_permutex2var_ps(mixed, low, right);
        right = _mm512_permutex2var_ps(mixed, high, right);
#endif
        put_block(to, step, left, right, least(BLOCK, m->head_dim - at));
    }
}

/* One piece for all queries of a run. The first piece of several writes records, later ones join them; a piece that is
   by itself writes them. */
static void attend_piece(
    const Worker *w, const Run *run, const number *keys, const number *values, int piece, int joins, float *records) {
    const Model *m = w->m;
    const Own *o = &w->own;
    const int group = group_of(m), dims = m->head_dim, units = head_units(m), record = record_of(m);
    const int numbers = record - 16, queries = run->tokens * group, tiles = parts_of(queries, ROWS);
    const int begin = piece * PIECE, held = least(run->slot + run->tokens - begin, PIECE);
    int keys_packed = 0, values_packed = 0;
    keys += (size_t)begin * dims, values += (size_t)begin * dims;
    for (int tile = 0; tile < tiles; tile++) {
        const int q = tile_begin(queries, tile), rows = tile_begin(queries, tile + 1) - q;
        const int seen = least(run->slot + (q + rows - 1) / group + 1 - begin, held);
        const int blocks = seen > 0 ? parts_of(seen, BLOCK) : 0;
        float *to = joins ? o->one : records + (size_t)q * record;
        for (int b = 0; b < blocks; b++) {
            unit *packed = o->keys + (size_t)b * units * BLOCK;
            if (b == keys_packed) {
                const int left = held - b * BLOCK;
                const number *from = keys + (size_t)b * BLOCK * dims;
                ask_for(values + (size_t)b * BLOCK * dims, (size_t)least(BLOCK, left) * dims);
                transpose((const unit *)from, (size_t)units, least(left, 16), units, packed);
                transpose((const unit *)(from + 16 * dims), (size_t)units, least(left - 16, 16), units, packed + 16);
                keys_packed++;
            }
            by_tile[rows - 1](o->queries + (size_t)q * units, packed, units, o->scores + b * BLOCK, PIECE, 1, NULL, 0);
        }
        for (int r = 0; r < rows; r++) {
            const int own = run->slot + (q + r) / group + 1 - begin;
            soften(o->scores + r * PIECE, o->weights + r * PIECE, own < 0 ? 0 : least(own, held), blocks * BLOCK,
                   to + (size_t)r * record + numbers);
        }
        for (int d = 0; d < head_blocks(m); d++) {
            unit *packed = o->values + (size_t)d * (PIECE / PER_UNIT) * BLOCK;
            if (blocks && d == values_packed) {
                if (d == 0 && held == PIECE) {
                    const int more = least(run->slot + run->tokens - begin - PIECE, PIECE);
                    ask_for(keys + (size_t)PIECE * dims, (size_t)(more > 0 ? more : 0) * dims);
                }
                pack_values(values, dims, d, held, packed);
                values_packed++;
            }
            by_piece[rows - 1]((const unit *)o->weights, packed, blocks * (BLOCK / PER_UNIT), to + d * BLOCK, record, 1,
                               NULL, 0);
        }
        for (int r = 0; joins && r < rows; r++)
            join(records + (size_t)(q + r) * record, to + (size_t)r * record, numbers);
    }
}

/* Tasks are taken as threads become free: a run in one key head, or one piece of it where there are few of them. */
static void attend(const Worker *w, int layer) {
    const Model *m = w->m;
    const Plan *p = w->p;
    const int record = record_of(m), group = group_of(m);
    const int total = p->run_count * m->kv_heads * (p->shared ? p->pieces : 1);
    for (int task; (task = __atomic_fetch_add(p->next + layer, 1, __ATOMIC_RELAXED)) < total;) {
        const int pair = p->shared ? task / p->pieces : task, kv_head = pair % m->kv_heads;
        const Run *run = p->runs + pair / m->kv_heads;
        const int pieces = parts_of(run->slot + run->tokens, PIECE);
        const number *keys = cached(w, layer, 0, run->row, kv_head, 0);
        const number *values = cached(w, layer, 1, run->row, kv_head, 0);
        if (p->shared) {
            if (task % p->pieces >= pieces) continue;
            pack_queries(w, run, kv_head);
            attend_piece(w, run, keys, values, task % p->pieces, 0, p->partial + (size_t)task * p->most * record);
            continue;
        }
        pack_queries(w, run, kv_head);
        for (int piece = 0; piece < pieces; piece++)
            attend_piece(w, run, keys, values, piece, piece > 0, w->own.running);
        for (int q = 0; q < run->tokens * group; q++) finish(w, run, kv_head, q, w->own.running + (size_t)q * record);
    }
    if (!p->shared) return;
    meet(w->team);
    int begin, end;
    share(p->run_count * m->kv_heads * p->most, w->team, &begin, &end);
    for (int item = begin; item < end; item++) {
        const int pair = item / p->most, q = item % p->most;
        const Run *run = p->runs + pair / m->kv_heads;
        if (q >= run->tokens * group) continue;
        const size_t step = (size_t)p->most * record;
        float *records = p->partial + (size_t)pair * p->pieces * step + (size_t)q * record;
        for (int piece = 1; piece < parts_of(run->slot + run->tokens, PIECE); piece++)
            join(records, records + piece * step, record - 16);
        finish(w, run, pair % m->kv_heads, q, records);
    }
}

#endif
