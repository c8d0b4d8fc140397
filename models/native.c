/* One pass of tokens through a whole Llama-family decoder, on a CPU with AVX2 or AVX-512 (native_vector.h), in one call;
   and in another, choosing the positions of a row that its last tokens attend to most (native_choice.h).

   Compiled on the user's machine by models/native.py, once with -DBFLOAT16 and once without (then numbers are float32),
   and driven by models/packed_native.py. Names of shapes are those of the Python side.

   Bits do not depend on how many tokens, rows or threads are computed together, in either type:
   - an output of a matrix product is one sum, over the columns in their order, made by one thread;
   - attention cuts a row's slots into pieces of PIECE, sums each by itself in the order of its slots, and joins the
     pieces from the first to the last. A slot that a query does not see adds an exact zero.

   Numbers travel in "units" of 32 bits: two neighbouring bfloat16 numbers, or one float32. A matrix is stored in
   blocks of BLOCK outputs, (blocks, units of a row, BLOCK), so that every thread reads one stream of memory from
   front to back; what it is multiplied with stands in tiles of up to ROWS tokens, (factors, tokens of the tile): a
   factor is a unit, or a number of it where processors cannot multiply whole units. The same product serves the
   weights and the scores of attention, for which keys are packed into such blocks when they are read. Its mixture has
   a loop of its own, over values as the cache holds them. Choosing adds up the weights of the same scores.

   The threads are those of the OpenMP runtime that torch has loaded already, whose functions set_up is given. */

#include "native_choice.h"

/* RMSNorm of one token, into its tile. */
static void normalise(const number *from, const float *weight, int width, float eps, factor *to, int step) {
    Vec squares = zeros();
    for (int i = 0; i < width; i += 16) {
        const Vec v = load(from + i, first(width - i));
        squares = multiply_add(v, v, squares);
    }
    const Vec scale = spread(1.0f / sqrtf(sum_of(squares) / (float)width + eps));
    for (int i = 0; i < width; i += BLOCK, to += (size_t)(BLOCK / PER_FACTOR) * step) {
        Vec v[2];
        for (int half = 0; half < 2; half++) {
            const int at = i + 16 * half;
            const Mask mask = first(width - at);
            const Vec x = multiply(load(from + at, mask), scale);
            v[half] = multiply(x, read_some(weight + at, mask));
        }
        put_block(to, step, v[0], v[1], least(BLOCK, width - i));
    }
}

static void embed(const Worker *w, int t) {
    const Model *m = w->m;
    const int64_t id = w->c->ids[t];
    number *hidden = w->p->hidden + (size_t)t * m->width;
    if (m->embedding) {
        memcpy(hidden, m->embedding + (size_t)id * m->width, sizeof(number) * m->width);
        return;
    }
    const unit *from = block_at(&m->head, (int)(id / BLOCK)) + id % BLOCK;
    for (int i = 0; i < m->head.units; i++) ((unit *)hidden)[i] = from[(size_t)i * BLOCK];
}

/* Tiles of normalised tokens. Every thread normalises few tokens for itself, which costs less than to wait and to
   write into the same cache lines. */
static inline factor *normed_of(const Worker *w, int tokens) { return tokens > ROWS ? w->p->normed : w->own.normed; }

/* Normalises so many tokens: the first, or those of a list. */
static void normalise_all(const Worker *w, const float *weight, int tokens, const int32_t *list) {
    const int width = w->m->width;
    int begin = 0, end = tokens;
    if (tokens > ROWS) share(tokens, w->team, &begin, &end);
    for (int i = begin, step; i < end; i++) {
        factor *to = factors_of(normed_of(w, tokens), tokens, width / PER_FACTOR, i, &step);
        normalise(w->p->hidden + (size_t)(list ? list[i] : i) * width, weight, width, w->m->eps, to, step);
    }
    if (tokens > ROWS) meet(w->team);
}

static void make_heads(const Worker *w, const Matrix *m, const unit *then) {
    const factor *x = normed_of(w, w->c->tokens);
    const int tokens = w->c->tokens, wide = heads_step(w->m);
    int begin, end;
    share(blocks_of(m), w->team, &begin, &end);
    prepare(m, x, tokens, w->own.prepared);
    for (int b = begin; b < end; b++) {
        const unit *next = b + 1 < end ? block_at(m, b + 1) : then;
        multiply_block(m, b, x, tokens, w->own.prepared, w->own.sums, next);
        for (int t = 0; t < tokens; t++)
            for (int at = 0; at < BLOCK; at += 16)
                store(w->p->heads + (size_t)t * wide + b * BLOCK + at, ALL,
                      with_bias(w->own.sums + t * BLOCK + at, m->bias, b * BLOCK + at));
    }
}

/* The product with `out` or `down`, added to the hidden states. */
static void add_product(const Worker *w, const Matrix *m, const factor *x, const unit *then) {
    const int tokens = w->c->tokens, width = w->m->width;
    int begin, end;
    share(blocks_of(m), w->team, &begin, &end);
    prepare(m, x, tokens, w->own.prepared);
    for (int b = begin; b < end; b++) {
        const unit *next = b + 1 < end ? block_at(m, b + 1) : then;
        multiply_block(m, b, x, tokens, w->own.prepared, w->own.sums, next);
        for (int t = 0; t < tokens; t++)
            for (int at = 0; at < BLOCK; at += 16) {
                const Mask mask = first(width - b * BLOCK - at);
                number *hidden = w->p->hidden + (size_t)t * width + b * BLOCK + at;
                const Vec v = rounded(with_bias(w->own.sums + t * BLOCK + at, m->bias, b * BLOCK + at));
                if (mask) store(hidden, mask, add(load(hidden, mask), v));
            }
    }
}

/* SiLU of the gates times the ups, into tiles. A block of gates and its block of ups are computed together. */
static void make_gated(const Worker *w, const Matrix *m, const unit *then) {
    const factor *x = normed_of(w, w->c->tokens);
    const int tokens = w->c->tokens, inner = w->m->inner, blocks = inner / BLOCK;
    const Vec one = spread(1.0f), zero = zeros();
    int begin, end;
    share(blocks, w->team, &begin, &end);
    prepare(m, x, tokens, w->own.prepared);
    for (int b = begin; b < end; b++) {
        multiply_block(m, b, x, tokens, w->own.prepared, w->own.sums, block_at(m, blocks + b));
        const unit *next = b + 1 < end ? block_at(m, b + 1) : then;
        multiply_block(m, blocks + b, x, tokens, w->own.prepared, w->own.more, next);
        for (int t = 0, step; t < tokens; t++) {
            Vec v[2];
            for (int half = 0; half < 2; half++) {
                const int at = 16 * half;
                const Vec gate = rounded(with_bias(w->own.sums + t * BLOCK + at, m->bias, b * BLOCK + at));
                const Vec up = rounded(with_bias(w->own.more + t * BLOCK + at, m->bias, inner + b * BLOCK + at));
                const Vec silu = divide(gate, add(one, exponential(subtract(zero, gate))));
                v[half] = multiply(rounded(silu), up);
            }
            factor *to = factors_of(w->p->gated, tokens, inner / PER_FACTOR, t, &step);
            put_block(to + (size_t)b * (BLOCK / PER_FACTOR) * step, step, v[0], v[1], BLOCK);
        }
    }
}

static void make_logits(const Worker *w) {
    const Matrix *m = &w->m->head;
    const int tokens = w->c->wanted_count;
    const factor *x = normed_of(w, tokens);
    int begin, end;
    share(blocks_of(m), w->team, &begin, &end);
    prepare(m, x, tokens, w->own.prepared);
    for (int b = begin; b < end; b++) {
        const unit *next = b + 1 < end ? block_at(m, b + 1) : NULL;
        multiply_block(m, b, x, tokens, w->own.prepared, w->own.sums, next);
        for (int t = 0; t < tokens; t++)
            for (int at = 0; at < BLOCK; at += 16) {
                const Vec v = with_bias(w->own.sums + t * BLOCK + at, m->bias, b * BLOCK + at);
                write_some(w->c->logits + (size_t)t * m->rows + b * BLOCK + at,
                                      first(m->rows - b * BLOCK - at), rounded(v));
            }
    }
}

static void pass_work(void *data) {
    const Worker worker = worker_of(data), *w = &worker;
    const Model *m = w->m;
    const Call *c = w->c;
    for (int t = w->team.me; t < c->tokens; t += w->team.all) embed(w, t);
    meet(w->team);
    for (int layer = 0; layer < m->layer_count; layer++) {
        const Layer *l = m->layers + layer;
        const Matrix *after = layer + 1 < m->layer_count ? &l[1].qkv : &m->head;
        normalise_all(w, l->norm, c->tokens, NULL);
        make_heads(w, &l->qkv, start_of(&l->out, blocks_of(&l->out), w->team));
        meet(w->team);
        place_heads(w, l, layer);
        meet(w->team);
        note_queries(w, layer);
        attend(w, layer);
        meet(w->team);
        add_product(w, &l->out, w->p->mixed, start_of(&l->gate_up, m->inner / BLOCK, w->team));
        meet(w->team);
        normalise_all(w, l->mlp_norm, c->tokens, NULL);
        make_gated(w, &l->gate_up, start_of(&l->down, blocks_of(&l->down), w->team));
        meet(w->team);
        add_product(w, &l->down, w->p->gated, start_of(after, blocks_of(after), w->team));
        meet(w->team);
    }
    if (c->logits && c->wanted_count) {
        normalise_all(w, m->final_norm, c->wanted_count, c->wanted);
        make_logits(w);
    }
    for (int i = w->team.me; c->states && i < c->wanted_count; i += w->team.all) {
        normalise(w->p->hidden + (size_t)c->wanted[i] * m->width, m->final_norm, m->width, m->eps, w->own.normed, 1);
        take_numbers(w->own.normed, 1, c->states + (size_t)i * m->width, m->width);
    }
}

/* Bytes that a call needs at `scratch`, aligned to ALIGNMENT; the scratch itself may be null. */
size_t scratch_bytes(const Model *model, const Call *call) { return plan_call(model, call).bytes; }

void forward(const Model *model, const Call *call) {
    Plan plan = plan_call(model, call);
    fill_plan(model, call, &plan);
    Job job = {model, call, &plan};
    run_team(pass_work, &job, call->threads);
}

/* The parts by themselves, for checks and measurements. */

typedef struct {
    const Matrix *matrix;
    const factor *x;
    float *sums, *to; /* (threads, tokens, BLOCK + units / 16); (tokens, rows) */
    int tokens, threads;
} Product;

static void product_work(void *data) {
    const Product *p = data;
    const Matrix *m = p->matrix;
    const Team team = join_team(p->threads);
    float *sums = p->sums + (size_t)team.me * p->tokens * (BLOCK + m->units / 16), *prepared = sums + p->tokens * BLOCK;
    int begin, end;
    share(blocks_of(m), team, &begin, &end);
    prepare(m, p->x, p->tokens, prepared);
    for (int b = begin; b < end; b++) {
        const unit *next = b + 1 < end ? block_at(m, b + 1) : NULL;
        multiply_block(m, b, p->x, p->tokens, prepared, sums, next);
        for (int t = 0; t < p->tokens; t++)
            for (int at = 0; at < BLOCK; at += 16)
                write_some(p->to + (size_t)t * m->rows + b * BLOCK + at, first(m->rows - b * BLOCK - at),
                                      rounded(with_bias(sums + t * BLOCK + at, m->bias, b * BLOCK + at)));
    }
}

/* x (tokens, numbers) times a matrix, rounded to a number: (tokens, rows). Returns 0, or 1 where memory is short. */
int product(const Matrix *matrix, const number *x, float *to, int tokens, int threads) {
    const int numbers = matrix->units * PER_UNIT, factors = matrix->units * FACTORS;
    factor *tiles = malloc(sizeof(factor) * tokens * factors);
    float *sums = malloc(sizeof(float) * threads * tokens * (BLOCK + matrix->units / 16));
    const int failed = !tiles || !sums;
    if (!failed) {
        for (int t = 0, step; t < tokens; t++) {
            factor *token = factors_of(tiles, tokens, factors, t, &step);
            put_numbers(token, step, x + (size_t)t * numbers, numbers);
        }
        Product job = {matrix, tiles, sums, to, tokens, threads};
        run_team(product_work, &job, threads);
    }
    free(tiles);
    free(sums);
    return failed;
}

typedef struct {
    const char *from;
    int64_t bytes;
    uint64_t *sums; /* (threads, 8) */
    int ahead, threads;
} Reading;

static void read_work(void *data) {
    const Reading *p = data;
    const Team team = join_team(p->threads);
    int begin, end;
    share((int)(p->bytes / STRETCH), team, &begin, &end);
    Bits sums[STRETCH / 64];
    for (int i = 0; i < STRETCH / 64; i++) sums[i] = no_bits();
    for (int s = begin; s < end; s++) {
        const char *at = p->from + (int64_t)s * STRETCH;
        for (int i = 0; i < STRETCH / 64; i++, at += 64) {
            if (p->ahead) _mm_prefetch(at + p->ahead, _MM_HINT_T0);
            sums[i] = add_words(sums[i], read_bits(at));
        }
    }
    for (int i = 0; i < STRETCH / 64; i++) p->sums[8 * team.me] += sum_of_words(sums[i]);
}

/* Reads whole stretches of memory from front to back, asking for what lies `ahead` bytes behind, 0 for not asking.
   Returns the sum of its words of 64 bits. */
uint64_t read_through(const char *from, int64_t bytes, int ahead, int threads) {
    uint64_t sums[8 * threads], sum = 0;
    memset(sums, 0, sizeof sums);
    Reading job = {from, bytes, sums, ahead, threads};
    run_team(read_work, &job, threads);
    for (int t = 0; t < threads; t++) sum += sums[8 * t];
    return sum;
}

static void attention_work(void *data) {
    const Worker worker = worker_of(data), *w = &worker;
    place_heads(w, w->m->layers, 0);
    meet(w->team);
    attend(w, 0);
}

/* Attention of the first layer: heads (tokens, heads + 2 kv_heads, head_dim), not yet rotated, to (tokens, heads x
   head_dim). Rotates, writes keys and values to the cache and attends, as a pass does. */
void attention(const Model *model, const Call *call, const number *heads, number *to) {
    Plan plan = plan_call(model, call);
    fill_plan(model, call, &plan);
    const int numbers = (model->heads + 2 * model->kv_heads) * model->head_dim;
    for (int t = 0; t < call->tokens; t++)
        memcpy(plan.heads + (size_t)t * heads_step(model), heads + (size_t)t * numbers, sizeof(number) * numbers);
    Job job = {model, call, &plan};
    run_team(attention_work, &job, call->threads);
    const int width = model->heads * model->head_dim;
    for (int t = 0, step; t < call->tokens; t++) {
        const factor *from = factors_of(plan.mixed, call->tokens, width / PER_FACTOR, t, &step);
        take_numbers(from, step, to + (size_t)t * width, width);
    }
}
