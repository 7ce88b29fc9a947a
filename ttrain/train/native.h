/* The kernels of native.c, by the instructions and the kind of number that its macros name: see there. */

INLINE VECTOR NAME(sigmoid)(VECTOR x) { return DIV(SET(1), ADD(SET(1), EXP2(MUL(x, SET(-LOG2E))))); }

/* ---- losses ---- */

/* Of each row of logits [rows, V] its cross entropy in nats, 0 where the label is IGNORE. With `has_slopes` the logits
   become scale times its gradient. Without a change returns 1 + the number of a label that is no entry. */
long NAME(score)(number *logits, const int64_t *labels, long rows, long V, int has_slopes, float scale, float *losses,
                 int threads) {
    for (long row = 0; row < rows; row++)
        if (labels[row] != IGNORE && (labels[row] < 0 || labels[row] >= V)) return row + 1;
    long result = 0;
#pragma omp parallel num_threads(threads) reduction(min : result)
    {
        float *powers = aligned_alloc(64, up_to(V * sizeof(float), 64));
        if (!powers) result = NO_MEMORY;
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++) {
            if (!powers) continue;
            number *x = logits + row * V;
            const int64_t label = labels[row];
            if (label == IGNORE) {
                losses[row] = 0;
                if (has_slopes) memset(x, 0, V * sizeof(number));
                continue;
            }
            const float target = WIDE(x[label]);
            VECTOR most = SET(-INFINITY), sum = SET(0);
            for (long i = 0; i < V; i += LANES) {
                most = MAX(most, LOWEST_AFTER(LOAD_FIRST(x + i, V - i), V - i));
            }
            const float top = TOP(most);
            const VECTOR shift = SET(top);
            for (long i = 0; i < V; i += LANES) {
                const VECTOR y = SUB(LOAD_FIRST(x + i, V - i), shift);
                const VECTOR power = EXP2(MUL(y, SET(LOG2E)));
                STOREF(powers + i, power);
                sum = ADD(sum, FIRST(power, V - i));
            }
            const float total = SUM(sum);
            losses[row] = top - target + logf(total);
            if (!has_slopes) continue;
            const VECTOR factor = SET(scale / total);
            for (long i = 0; i < V; i += LANES) STORE_FIRST(x + i, MUL(LOADF(powers + i), factor), V - i);
            x[label] = NARROW((powers[label] / total - 1.0f) * scale);
        }
        free(powers);
    }
    return result;
}

/* ---- gated layers ---- */

/* out = silu(gate) up */
void NAME(gated)(const number *gate, const number *up, number *out, long count, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long i = 0; i < count; i += LANES) {
        const VECTOR g = LOAD(gate + i);
        STORE(out + i, MUL(MUL(g, NAME(sigmoid)(g)), LOAD(up + i)));
    }
}

/* silu(gate) up again, and the gradients of gate and up from that of it */
void NAME(gated_slopes)(const number *grad, const number *gate, const number *up, number *out, number *of_gate,
                        number *of_up, long count, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long i = 0; i < count; i += LANES) {
        const VECTOR g = LOAD(gate + i), u = LOAD(up + i), d = LOAD(grad + i), s = NAME(sigmoid)(g), silu = MUL(g, s);
        const VECTOR one = SET(1.0f), slope = MUL(s, FMA(g, SUB(one, s), one));
        STORE(out + i, MUL(silu, u));
        STORE(of_up + i, MUL(d, silu));
        STORE(of_gate + i, MUL(MUL(d, u), slope));
    }
}

/* ---- norms ---- */

/* out = weight x scale, where scale, one for each row, is 1 / rms(x), or is given */
void NAME(norm)(const float *x, const float *weight, float epsilon, float *scales, int is_given, number *out, long rows,
                long D, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long row = 0; row < rows; row++) {
        const float *from = x + row * D;
        if (!is_given) {
            VECTOR sum = SET(0);
            for (long i = 0; i < D; i += LANES) sum = FMA(LOADF(from + i), LOADF(from + i), sum);
            scales[row] = 1.0f / sqrtf(SUM(sum) / D + epsilon);
        }
        const VECTOR scale = SET(scales[row]);
        for (long i = 0; i < D; i += LANES) STORE(out + row * D + i, MUL(MUL(LOADF(from + i), scale), LOADF(weight + i)));
    }
}

void NAME(norm_slopes)(const number *grad, const float *x, const float *weight, const float *scales, float *of_x,
                       float *of_weight, long rows, long D, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long part = 0; part < (rows + NORM_ROWS - 1) / NORM_ROWS; part++) {
        float *sums = of_weight + part * D;
        memset(sums, 0, D * sizeof(float));
        for (long row = part * NORM_ROWS; row < least(rows, (part + 1) * NORM_ROWS); row++) {
            const number *g = grad + row * D;
            const float *from = x + row * D;
            const VECTOR scale = SET(scales[row]);
            VECTOR dot = SET(0);
            for (long i = 0; i < D; i += LANES) {
                const VECTOR product = MUL(LOAD(g + i), MUL(LOADF(from + i), scale));
                dot = FMA(product, LOADF(weight + i), dot);
                STOREF(sums + i, ADD(LOADF(sums + i), product));
            }
            const VECTOR mean = SET(SUM(dot) / D * scales[row]);
            for (long i = 0; i < D; i += LANES) {
                const VECTOR y = MUL(LOAD(g + i), LOADF(weight + i));
                STOREF(of_x + row * D + i, MUL(FNMA(LOADF(from + i), mean, y), scale));
            }
        }
    }
}

/* ---- products ---- */

INLINE void NAME(product_tile)(const unit *a, long row_step, long unit_step, const unit *b, long b_step, float *c,
                               long c_step, long units, const int vectors, int adds) {
    VECTOR sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = adds ? LOADF(c + r * c_step + v * LANES) : SET(0);
    for (long p = 0; p < units; p++) {
        UNITS columns[VECTORS];
        for (int v = 0; v < vectors; v++) columns[v] = LOAD_UNITS(b + p * b_step + v * LANES);
        for (int r = 0; r < ROWS; r++) {
            const UNITS row = REPEAT(a[r * row_step + p * unit_step]);
            for (int v = 0; v < vectors; v++) sums[r][v] = MULTIPLY_ADD(sums[r][v], row, columns[v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++) STOREF(c + r * c_step + v * LANES, sums[r][v]);
}

/* c[rows, columns] (+)= a b, summed over units; rows in steps of ROWS, columns of LANES */
static void NAME(product)(const unit *a, long row_step, long unit_step, const unit *b, long b_step, float *c, long c_step,
                          long rows, long columns, long units, int adds) {
    for (long j = 0; j < columns; j += VECTORS * LANES)
        for (long i = 0; i < rows; i += ROWS) {
            const unit *a_i = a + i * row_step, *b_j = b + j;
            float *c_ij = c + i * c_step + j;
            switch (least(VECTORS, (columns - j) / LANES)) {
#if VECTORS == 4
            case 4: NAME(product_tile)(a_i, row_step, unit_step, b_j, b_step, c_ij, c_step, units, 4, adds); break;
            case 3: NAME(product_tile)(a_i, row_step, unit_step, b_j, b_step, c_ij, c_step, units, 3, adds); break;
#endif
            case 2: NAME(product_tile)(a_i, row_step, unit_step, b_j, b_step, c_ij, c_step, units, 2, adds); break;
            default: NAME(product_tile)(a_i, row_step, unit_step, b_j, b_step, c_ij, c_step, units, 1, adds);
            }
        }
}

/* rows [L, K], `step` numbers apart, as units [L/UNIT, K] of numbers below each other */
static void NAME(interleave)(const number *rows, long step, unit *out, long L, long K) {
    for (long i = 0; i < L; i += UNIT)
        for (long j = 0; j < K; j += LANES)
            INTERLEAVE(out + i / UNIT * K + j, rows + i * step + j, rows + (i + UNIT - 1) * step + j);
}

/* rows of units [L, P], `step` units apart, as [P, L] */
INLINE void NAME(transpose)(const unit *rows, long step, unit *out, long L, long P) {
    const INTS steps = MULTIPLES(step);
    for (long i = 0; i < L; i += LANES)
        for (long p = 0; p < P; p++) STORE_INTS(out + p * L + i, GATHER(steps, rows + i * step + p));
}

/* ---- attention ---- */

/* y = R (weight x / rms(x)) of one token, the pairs half a head apart, for [L, K] rows of out; zeros up to `padded` rows */
static void NAME(rotate)(const States *s, const Records *r, long start, long L, long padded, long head, number *out) {
    const long K = r->K, half = K / 2;
    for (long i = 0; i < L; i++) {
        const number *x = (const number *)s->states + ((start + i) * s->heads + head) * K;
        float scale = 1;
        if (s->weight) {
            VECTOR sum = SET(0);
            for (long j = 0; j < K; j += LANES) sum = FMA(LOAD(x + j), LOAD(x + j), sum);
            scale = 1.0f / sqrtf(SUM(sum) / K + s->epsilon);
        }
        const VECTOR scales = SET(scale);
        for (long j = 0; j < half; j += LANES) {
            VECTOR a = LOAD(x + j), b = LOAD(x + half + j);
            if (s->weight) {
                a = MUL(MUL(a, scales), LOADF(s->weight + j));
                b = MUL(MUL(b, scales), LOADF(s->weight + half + j));
            }
            if (r->cos) {
                const float *cos = r->cos + (start + i) * K, *sin = r->sin + (start + i) * K;
                const VECTOR turned = FNMA(b, LOADF(sin + j), MUL(a, LOADF(cos + j)));
                b = FMA(a, LOADF(sin + half + j), MUL(b, LOADF(cos + half + j)));
                a = turned;
            }
            STORE(out + i * K + j, a);
            STORE(out + i * K + half + j, b);
        }
    }
    memset(out + L * K, 0, (padded - L) * K * sizeof(number));
}

/* Gradients of the states of one head of a record from `factor` times the gradients of what `rotate` made of them, [L, K],
   which are overwritten; those of the weight are added to `of_weight`. */
static void NAME(rotate_slopes)(const States *s, const Records *r, long start, long L, long head, float *grad, float factor,
                                number *out, float *of_weight) {
    const long K = r->K, half = K / 2;
    const VECTOR factors = SET(factor);
    for (long i = 0; i < L; i++) {
        const long at = ((start + i) * s->heads + head) * K;
        const number *x = (const number *)s->states + at;
        float *g = grad + i * K;
        VECTOR squares = SET(0), dot = SET(0);
        for (long j = 0; j < half; j += LANES) {
            VECTOR a = MUL(LOADF(g + j), factors), b = MUL(LOADF(g + half + j), factors);
            if (r->cos) {
                const float *cos = r->cos + (start + i) * K, *sin = r->sin + (start + i) * K;
                const VECTOR turned = FMA(b, LOADF(sin + half + j), MUL(a, LOADF(cos + j)));
                b = FNMA(a, LOADF(sin + j), MUL(b, LOADF(cos + half + j)));
                a = turned;
            }
            STOREF(g + j, a);
            STOREF(g + half + j, b);
        }
        if (!s->weight) {
            for (long j = 0; j < K; j += LANES) STORE(out + at + j, LOADF(g + j));
            continue;
        }
        for (long j = 0; j < K; j += LANES) squares = FMA(LOAD(x + j), LOAD(x + j), squares);
        const float scale = 1.0f / sqrtf(SUM(squares) / K + s->epsilon);
        const VECTOR scales = SET(scale);
        for (long j = 0; j < K; j += LANES) {
            const VECTOR product = MUL(LOADF(g + j), MUL(LOAD(x + j), scales));
            dot = FMA(product, LOADF(s->weight + j), dot);
            STOREF(of_weight + j, ADD(LOADF(of_weight + j), product));
        }
        const VECTOR mean = SET(SUM(dot) / K * scale);
        for (long j = 0; j < K; j += LANES) {
            const VECTOR y = MUL(LOADF(g + j), LOADF(s->weight + j));
            STORE(out + at + j, MUL(FNMA(LOAD(x + j), mean, y), scales));
        }
    }
}

/* out [B*T, H, K]: of each record softmax(scale Q K^T) V, causal; tops [B*T, H]: the largest Q K^T of a query; logs: log2 of
   the sum of its exponentials beside that of the largest one, kept apart so that large scores lose no digits */
long NAME(attention)(const States *q, const States *k, const States *v, const Records *r, number *out, float *tops,
                     float *logs) {
    const long K = r->K, H = q->heads, G = k->heads, R = H / G, most = up_to(r->longest, BLOCK_QUERIES);
    long result = 0;
#pragma omp parallel num_threads(r->threads) reduction(min : result)
    {
        char *memory = aligned_alloc(64, 3 * up_to(most * K * SIZE, 64) + 2 * up_to(QUERIES * K * 4, 64) +
                                             up_to(QUERIES * most * 4, 64) + up_to(QUERIES * most * SIZE, 64) +
                                             up_to(most * 4, 64)),
             *next = memory;
        number *rows = take(&next, most * K * SIZE), *query = take(&next, QUERIES * K * SIZE);
        unit *keys = take(&next, most * K * SIZE), *values = take(&next, most * K * SIZE);
        float *scores = take(&next, QUERIES * most * 4), *mixed = take(&next, QUERIES * K * 4);
        number *weights = take(&next, QUERIES * most * SIZE);
        int32_t *copy = take(&next, most * 4);
        if (!memory) result = NO_MEMORY;
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < r->records * G; task++) {
            if (!memory) continue;
            const long start = r->starts[task / G], L = r->lengths[task / G], group = task % G, padded = up_to(L, QUERIES);
            const int32_t *branches = branches_of(r, start, L, padded, copy);
            NAME(rotate)(k, r, start, L, padded, group, rows);
            NAME(transpose)((unit *)rows, K / UNIT, keys, padded, K / UNIT);
            for (long i = 0; i < L; i++)
                memcpy(rows + i * K, (const number *)v->states + ((start + i) * G + group) * K, K * sizeof(number));
            memset(rows + L * K, 0, (padded - L) * K * sizeof(number));
            NAME(interleave)(rows, K, values, padded, K);
            for (long head = group * R; head < (group + 1) * R; head++)
                for (long first = 0; first < L; first += QUERIES) {
                    const long count = least(QUERIES, L - first), height = up_to(count, ROWS),
                               S = up_to(first + count, LANES);
                    NAME(rotate)(q, r, start + first, count, height, head, query);
                    NAME(product)((unit *)query, K / UNIT, 1, keys, padded, scores, S, height, S, K / UNIT, 0);
                    float inverse[QUERIES];
                    for (long i = 0; i < height; i++) {
                        const long seen = first + i + 1;
                        float *row = scores + i * S;
                        VECTOR most_lanes = SET(-INFINITY), sum = SET(0);
                        for (long j = 0; branches && j < seen; j += LANES) {
                            const int32_t *keys_of = branches + j;
                            STOREF(row + j,
                                   LOWEST_UNLESS(LOADF(row + j), SAME(keys_of, 0) | SAME(keys_of, branches[seen - 1])));
                        }
                        for (long j = 0; j < seen; j += LANES)
                            most_lanes = MAX(most_lanes, LOWEST_AFTER(LOADF(row + j), seen - j));
                        const VECTOR factor = SET(r->scale * LOG2E);
                        const float top = TOP(most_lanes);
                        for (long j = 0; j < S; j += LANES) {
                            const VECTOR power = FIRST(EXP2(MUL(SUB(LOADF(row + j), SET(top)), factor)), seen - j);
                            sum = ADD(sum, power);
                            STORE(weights + i * S + j, power);
                        }
                        const float total = SUM(sum);
                        inverse[i] = 1.0f / total;
                        if (i >= count) continue;
                        tops[(start + first + i) * H + head] = top;
                        logs[(start + first + i) * H + head] = log2f(total);
                    }
                    NAME(product)((unit *)weights, S / UNIT, 1, values, K, mixed, K, height, K, S / UNIT, 0);
                    for (long i = 0; i < count; i++)
                        for (long j = 0; j < K; j += LANES)
                            STORE(out + ((start + first + i) * H + head) * K + j,
                                  MUL(LOADF(mixed + i * K + j), SET(inverse[i])));
                }
        }
        free(memory);
    }
    return result;
}

/* One block of weights and their gradients, BLOCK_KEYS by BLOCK_QUERIES, in the forms that products read. */
INLINE void NAME(block_slopes)(const float *scores, const float *of_weights, const float *tops, const float *logs,
                               const float *deltas, const int32_t *branches, float factor, long first_query, long first_key,
                               number *weights, number *slopes, unit *slopes_below) {
    const VECTOR factors = SET(factor);
    for (long j = 0; j < BLOCK_KEYS; j += UNIT)
        for (long i = 0; i < BLOCK_QUERIES; i += LANES) {
            for (long n = j; n < j + UNIT; n++) {
                const long at = n * BLOCK_QUERIES + i,
                           unseen = first_key + n - first_query - i; /* queries before this key */
                VECTOR power = AFTER(EXP2(FMS(SUB(LOADF(scores + at), LOADF(tops + i)), factors, LOADF(logs + i))), unseen);
                if (branches && branches[first_key + n])
                    power = ONLY(power, SAME(branches + first_query + i, branches[first_key + n]));
                STORE(weights + at, power);
                const VECTOR slope = MUL(power, SUB(LOADF(of_weights + at), LOADF(deltas + i)));
                STORE(slopes + at, slope);
            }
            const number *row = slopes + j * BLOCK_QUERIES + i;
            INTERLEAVE(slopes_below + j / UNIT * BLOCK_QUERIES + i, row, row + (UNIT - 1) * BLOCK_QUERIES);
        }
}

/* Gradients of queries, keys and values from that of `out`; `of_weights` [records * G, 2, K]: of both norms' weights */
long NAME(attention_slopes)(const States *q, const States *k, const States *v, const Records *r, const number *out,
                            const float *tops, const float *logs, const number *grad, number *of_q, number *of_k,
                            number *of_v, float *of_weights) {
    const long K = r->K, H = q->heads, G = k->heads, R = H / G, most = up_to(r->longest, BLOCK_QUERIES);
    const float factor = r->scale * LOG2E;
    long result = 0;
#pragma omp parallel num_threads(r->threads) reduction(min : result)
    {
        char *memory = aligned_alloc(64, 8 * up_to(most * K * SIZE, 64) + 2 * up_to(most * K * 4, 64) +
                                             up_to(BLOCK_QUERIES * K * 4, 64) + 4 * up_to(most * 4, 64) +
                                             5 * up_to(BLOCK_KEYS * BLOCK_QUERIES * 4, 64)),
             *next = memory;
        number *rows = take(&next, most * K * SIZE), *key = take(&next, most * K * SIZE),
               *value = take(&next, most * K * SIZE);
        unit *keys_below = take(&next, most * K * SIZE);
        unit *queries = take(&next, most * K * SIZE), *queries_below = take(&next, most * K * SIZE);
        unit *grads = take(&next, most * K * SIZE), *grads_below = take(&next, most * K * SIZE);
        float *sums_k = take(&next, most * K * 4), *sums_v = take(&next, most * K * 4),
              *sums_q = take(&next, BLOCK_QUERIES * K * 4);
        float *top_rows = take(&next, most * 4), *log_rows = take(&next, most * 4), *deltas = take(&next, most * 4);
        float *scores = take(&next, BLOCK_KEYS * BLOCK_QUERIES * 4), *products = take(&next, BLOCK_KEYS * BLOCK_QUERIES * 4);
        number *weights = take(&next, BLOCK_KEYS * BLOCK_QUERIES * SIZE),
               *slopes = take(&next, BLOCK_KEYS * BLOCK_QUERIES * SIZE);
        unit *slopes_below = take(&next, BLOCK_KEYS * BLOCK_QUERIES * SIZE);
        int32_t *copy = take(&next, most * 4);
        if (!memory) result = NO_MEMORY;
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < r->records * G; task++) {
            if (!memory) continue;
            const long start = r->starts[task / G], L = r->lengths[task / G], group = task % G,
                       padded = up_to(L, BLOCK_QUERIES);
            const int32_t *branches = branches_of(r, start, L, padded, copy);
            float *of_weight = of_weights + task * 2 * K;
            memset(of_weight, 0, 2 * K * sizeof(float));
            NAME(rotate)(k, r, start, L, padded, group, key);
            NAME(interleave)(key, K, keys_below, padded, K);
            for (long i = 0; i < L; i++)
                memcpy(value + i * K, (const number *)v->states + ((start + i) * G + group) * K, K * sizeof(number));
            memset(value + L * K, 0, (padded - L) * K * sizeof(number));
            memset(sums_k, 0, padded * K * sizeof(float));
            memset(sums_v, 0, padded * K * sizeof(float));
            for (long head = group * R; head < (group + 1) * R; head++) {
                NAME(rotate)(q, r, start, L, padded, head, rows);
                NAME(transpose)((unit *)rows, K / UNIT, queries, padded, K / UNIT);
                NAME(interleave)(rows, K, queries_below, padded, K);
                for (long i = 0; i < L; i++) {
                    const long at = ((start + i) * H + head) * K;
                    VECTOR dot = SET(0);
                    for (long j = 0; j < K; j += LANES) dot = FMA(LOAD(grad + at + j), LOAD(out + at + j), dot);
                    memcpy(rows + i * K, grad + at, K * sizeof(number));
                    deltas[i] = SUM(dot);
                    top_rows[i] = tops[(start + i) * H + head];
                    log_rows[i] = logs[(start + i) * H + head];
                }
                memset(rows + L * K, 0, (padded - L) * K * sizeof(number));
                memset(deltas + L, 0, (padded - L) * sizeof(float));
                memset(top_rows + L, 0, (padded - L) * sizeof(float));
                memset(log_rows + L, 0, (padded - L) * sizeof(float));
                NAME(transpose)((unit *)rows, K / UNIT, grads, padded, K / UNIT);
                NAME(interleave)(rows, K, grads_below, padded, K);
                for (long first = 0; first < L; first += BLOCK_QUERIES) {
                    const long below = first / UNIT * K;
                    for (long at = 0; at < least(L, first + BLOCK_QUERIES); at += BLOCK_KEYS) {
                        NAME(product)((unit *)(key + at * K), K / UNIT, 1, queries + first, padded, scores, BLOCK_QUERIES,
                                      BLOCK_KEYS, BLOCK_QUERIES, K / UNIT, 0);
                        NAME(product)((unit *)(value + at * K), K / UNIT, 1, grads + first, padded, products, BLOCK_QUERIES,
                                      BLOCK_KEYS, BLOCK_QUERIES, K / UNIT, 0);
                        NAME(block_slopes)(scores, products, top_rows + first, log_rows + first, deltas + first, branches,
                                           factor, first, at, weights, slopes, slopes_below);
                        NAME(product)((unit *)weights, BLOCK_QUERIES / UNIT, 1, grads_below + below, K, sums_v + at * K, K,
                                      BLOCK_KEYS, K, BLOCK_QUERIES / UNIT, 1);
                        NAME(product)((unit *)slopes, BLOCK_QUERIES / UNIT, 1, queries_below + below, K, sums_k + at * K, K,
                                      BLOCK_KEYS, K, BLOCK_QUERIES / UNIT, 1);
                        NAME(product)(slopes_below, 1, BLOCK_QUERIES, keys_below + at / UNIT * K, K, sums_q, K,
                                      BLOCK_QUERIES, K, BLOCK_KEYS / UNIT, at > 0);
                    }
                    NAME(rotate_slopes)(q, r, start + first, least(BLOCK_QUERIES, L - first), head, sums_q, r->scale, of_q,
                                        of_weight);
                }
            }
            NAME(rotate_slopes)(k, r, start, L, group, sums_k, r->scale, of_k, of_weight + K);
            for (long i = 0; i < L; i++)
                for (long j = 0; j < K; j += LANES)
                    STORE(of_v + ((start + i) * G + group) * K + j, LOADF(sums_v + i * K + j));
        }
        free(memory);
    }
    return result;
}

/* ---- Muon ---- */

/* c [rows, columns] = a b, of a [rows, K] and b [K, columns], or where `turned` a b^T with b [columns, K]; with `lower`, of
   a product that is symmetric, only what lies below the diagonal, and blocks on it. This thread's part of the columns. */
static void NAME(multiply)(const number *a, const number *b, int turned, float *c, long rows, long columns, long K,
                           int lower, unit *panel, Team team) {
    for (long j = team.thread * PANEL; j < columns; j += team.threads * PANEL)
        for (long k = 0; k < K; k += DEPTH * UNIT) {
            const long width = least(PANEL, columns - j), depth = least(DEPTH, (K - k) / UNIT);
            if (turned)
                NAME(transpose)((unit *)(b + j * K + k), K / UNIT, panel, width, depth);
            else
                NAME(interleave)(b + k * columns + j, columns, panel, depth * UNIT, width);
            const long first = lower ? j : 0;
            NAME(product)((unit *)(a + first * K + k), K / UNIT, 1, panel, width, c + first * columns + j, columns,
                          rows - first, width, depth, k > 0);
        }
}

/* What `multiply` left out of a symmetric matrix, for this thread's rows; out = f squares + g first + h second for all of
   these, where a factor of 0 stands for a matrix that is not there. */
static void NAME(complete)(float *squares, number *out, long M, float f, const number *first, float g, const number *second,
                           float h, Team team) {
    const INTS steps = MULTIPLES(M);
    for (long i = team.thread * LANES; i < M; i += team.threads * LANES)
        for (long j = 0; j < M; j += LANES)
            for (long row = i; row < i + LANES; row++) { /* what one row gathers is in the cache for the others */
                const long at = row * M + j;
                if (j >= (row / PANEL + 1) * PANEL) STORE_INTS(squares + at, GATHER(steps, squares + j * M + row));
                VECTOR others = g == 0 ? SET(0) : MUL(SET(g), LOAD(first + at));
                if (h != 0) others = FMA(SET(h), LOAD(second + at), others);
                STORE(out + at, FMA(SET(f), LOADF(squares + at), others));
            }
}

/* x <- p(G) x with G = x x^T and p(G) = a + b G + c G G, `steps` times, from x = matrix / norm(matrix), or of a tall matrix
   its transpose. Where G is much smaller than x, three and then two steps are made of G alone, G <- p(G) G p(G), before the
   product of their p(G) multiplies x; with five, errors of bf16 end at several times x. All threads of a team share the
   memory, and have a panel each. `combined` and `single` are such a product and one p(G), without their multiples of 1. */
static void NAME(orthogonal_matrix)(const float *matrix, float *out, long A, long B, const float *coefficients, int steps,
                                    float epsilon, char *memory, unit *panel, Team team) {
    const int tall = A > B;
    const float a = coefficients[0], b = coefficients[1], c = coefficients[2];
    const long M = least(A, B), N = A + B - M, size = A * B, part = up_to((size + team.threads - 1) / team.threads, LANES),
               start = team.thread * part, end = least(size, start + part);
    number *x = take(&memory, size * SIZE), *gram = take(&memory, M * M * SIZE), *combined = take(&memory, M * M * SIZE),
           *single = take(&memory, M * M * SIZE), *mixed = take(&memory, M * M * SIZE);
    float *squares = take(&memory, M * M * 4), *sums = tall ? take(&memory, size * 4) : out;
    VECTOR total = SET(0);
    for (long i = 0; i < size; i += LANES) total = FMA(LOADF(matrix + i), LOADF(matrix + i), total);
    const float norm = sqrtf(SUM(total)), inverse = 1.0f / (norm < epsilon ? epsilon : norm);
    if (tall && team.thread == 0) NAME(transpose)((const unit *)matrix, B, (unit *)sums, A, B);
    meet(team);
    for (long i = start; i < end; i += LANES) STORE(x + i, MUL(LOADF((tall ? sums : matrix) + i), SET(inverse)));
#define SYMMETRIC(f, left, right, K, turned, out, ...)                                                                      \
    do {                                                                                                                    \
        meet(team);                                                                                                         \
        NAME(multiply)(left, right, turned, squares, M, M, K, 1, panel, team);                                              \
        meet(team);                                                                                                         \
        NAME(complete)(squares, out, M, f, __VA_ARGS__, team);                                                              \
    } while (0)
    for (int step = 0, count; step < steps; step += count) {
        count = 2 * N < 3 * M ? 1 : least(step ? 2 : 3, steps - step);
        SYMMETRIC(1, x, x, N, 1, gram, gram, 0, gram, 0);
        SYMMETRIC(c, gram, gram, M, 0, combined, gram, b, gram, 0); /* p(G) - a */
        float factor = a;
        for (int i = 1; i < count; i++) {
            const number *last = i == 1 ? combined : single;
            SYMMETRIC(1, last, gram, M, 0, mixed, gram, a, gram, 0);
            SYMMETRIC(1, last, mixed, M, 0, gram, mixed, a, gram, 0);
            SYMMETRIC(c, gram, gram, M, 0, single, gram, b, gram, 0);
            SYMMETRIC(1, combined, single, M, 0, combined, combined, a, single, factor);
            factor *= a;
        }
        meet(team);
        NAME(multiply)(combined, x, 0, sums, M, N, M, 0, panel, team);
        meet(team);
        for (long i = start; i < end; i += LANES) {
            const VECTOR y = FMA(SET(factor), LOAD(x + i), LOADF(sums + i));
            STORE(x + i, y);
            if (step + count == steps) STOREF(sums + i, y);
        }
    }
#undef SYMMETRIC
    meet(team);
    if (tall && team.thread == 0) NAME(transpose)((const unit *)sums, A, (unit *)out, B, A);
    meet(team);
}

/* Each matrix [A, B] made orthogonal: by one thread each, or where these are too few or large by all threads together. */
long NAME(orthogonal)(const float *matrices, float *out, long count, long A, long B, float a, float b, float c, int steps,
                      float epsilon, int threads) {
    const float coefficients[] = {a, b, c};
    const long M = least(A, B), size = A * B;
    const long bytes = up_to(size * SIZE, 64) + 4 * up_to(M * M * SIZE, 64) + up_to(M * M * 4, 64) + up_to(size * 4, 64);
    const int together = count < threads || size > MOST_ALONE;
    char *shared = together ? aligned_alloc(64, bytes) : NULL;
    long result = together && !shared ? NO_MEMORY : 0;
#pragma omp parallel num_threads(threads) reduction(min : result)
    {
        unit panel[PANEL * DEPTH] __attribute__((aligned(64)));
        char *memory = together ? shared : aligned_alloc(64, bytes);
        if (!memory) result = NO_MEMORY;
        if (together && memory) {
            const Team team = {omp_get_thread_num(), omp_get_num_threads()};
            for (long i = 0; i < count; i++)
                NAME(orthogonal_matrix)(matrices + i * size, out + i * size, A, B, coefficients, steps, epsilon, memory,
                                        panel, team);
        } else if (!together) {
#pragma omp for schedule(dynamic, 1)
            for (long i = 0; i < count; i++)
                if (memory)
                    NAME(orthogonal_matrix)(matrices + i * size, out + i * size, A, B, coefficients, steps, epsilon, memory,
                                            panel, (Team){0, 1});
            free(memory);
        }
    }
    free(shared);
    return result;
}
