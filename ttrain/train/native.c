/* Layers of a training step on CPUs that multiply bf16 (AVX512-BF16): attention within records, norms, gated layers, losses.

   bf16 in memory, fp32 in registers, each number read and written once where torch needs a pass for each operation. Called
   by native.py, which checks shapes and types. Results do not depend on the number of threads. Compiled at installation, for
   all x86-64 machines: which instructions a machine has is asked by `native_version`.

   Letters: B*T tokens, H heads of queries, G of keys and values, K width of a head, L tokens of a record, D width of a token,
   V entries of the vocabulary. "Pairs" are two bf16 numbers in 32 bits, which one instruction multiplies and adds. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 2 /* of the functions' arguments, as in native.py: a file that was compiled from other source is not used */

/* clang gives the bodies of parallel loops no target of their own. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 10

#include <cpuid.h>

/* VERSION where this CPU has what it takes, else 0 */
int native_version(void) {
    unsigned a, b, c, d;
    __builtin_cpu_init(); /* asks the system, too, whether it saves the registers */
    const int has_avx512 = __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq");
    return has_avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5) ? VERSION : 0; /* 5: AVX512-BF16 */
}

#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")

typedef uint16_t bf16;
typedef uint32_t pair;

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long up_to(long n, long unit) { return (n + unit - 1) / unit * unit; }

INLINE __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE __m512 load(const bf16 *p) { return widen(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void store(bf16 *p, __m512 x) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x)); }
INLINE __mmask16 first_lanes(long n) { return n >= LANES ? 0xFFFF : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }
INLINE float wide(bf16 x) {
    union { uint32_t i; float f; } bits = {(uint32_t)x << 16};
    return bits.f;
}
INLINE bf16 narrow(float x) {
    return (bf16)_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x)), 0);
}

/* 2^x by the polynomial of Cephes' exp2f: 1e-7 of its value. NaN stays NaN; below -126 it becomes 0. */
INLINE __m512 exp2_ps(__m512 x) {
    __m512 n = _mm512_roundscale_ps(x, 8), f = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(1.535336188319500e-4f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.339887440266574e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.618437357674640e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.550332471162809e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.402264791363012e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931472028550421e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}
#define LOG2E 1.4426950408889634f

INLINE __m512 sigmoid(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, exp2_ps(_mm512_mul_ps(x, _mm512_set1_ps(-LOG2E)))));
}

/* ---- losses ---- */

#define IGNORE (-100)
#define NO_MEMORY (-1) /* what functions return then; else 0 */

/* Of each row of logits [rows, V] its cross entropy in nats, 0 where the label is IGNORE. With `has_slopes` the logits become
   scale times its gradient. Without a change returns 1 + the number of a label that is no entry. */
long native_score(bf16 *logits, const int64_t *labels, long rows, long V, int has_slopes, float scale, float *losses,
                  int threads) {
    for (long row = 0; row < rows; row++)
        if (labels[row] != IGNORE && (labels[row] < 0 || labels[row] >= V)) return row + 1;
    long result = 0;
#pragma omp parallel num_threads(threads) reduction(min : result)
    {
        float *powers = aligned_alloc(64, up_to(V, LANES) * sizeof(float));
        if (!powers) result = NO_MEMORY;
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++) {
            if (!powers) continue;
            bf16 *x = logits + row * V;
            const int64_t label = labels[row];
            if (label == IGNORE) {
                losses[row] = 0;
                if (has_slopes) memset(x, 0, V * sizeof(bf16));
                continue;
            }
            const float target = wide(x[label]);
            __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
            for (long i = 0; i < V; i += LANES) {
                const __mmask16 lanes = first_lanes(V - i);
                most = _mm512_mask_max_ps(most, lanes, most, widen(_mm256_maskz_loadu_epi16(lanes, x + i)));
            }
            const float top = _mm512_reduce_max_ps(most);
            const __m512 shift = _mm512_set1_ps(top);
            for (long i = 0; i < V; i += LANES) {
                const __mmask16 lanes = first_lanes(V - i);
                const __m512 y = _mm512_sub_ps(widen(_mm256_maskz_loadu_epi16(lanes, x + i)), shift);
                const __m512 power = exp2_ps(_mm512_mul_ps(y, _mm512_set1_ps(LOG2E)));
                _mm512_store_ps(powers + i, power);
                sum = _mm512_mask_add_ps(sum, lanes, sum, power);
            }
            const float total = _mm512_reduce_add_ps(sum);
            losses[row] = top - target + logf(total);
            if (!has_slopes) continue;
            const __m512 factor = _mm512_set1_ps(scale / total);
            for (long i = 0; i < V; i += LANES) {
                const __m256i y = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_load_ps(powers + i), factor));
                _mm256_mask_storeu_epi16(x + i, first_lanes(V - i), y);
            }
            x[label] = narrow((powers[label] / total - 1.0f) * scale);
        }
        free(powers);
    }
    return result;
}

/* ---- gated layers ---- */

/* out = silu(gate) up */
void native_gated(const bf16 *gate, const bf16 *up, bf16 *out, long count, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long i = 0; i < count; i += LANES) {
        const __m512 g = load(gate + i);
        store(out + i, _mm512_mul_ps(_mm512_mul_ps(g, sigmoid(g)), load(up + i)));
    }
}

/* silu(gate) up again, and the gradients of gate and up from that of it */
void native_gated_slopes(const bf16 *grad, const bf16 *gate, const bf16 *up, bf16 *out, bf16 *of_gate, bf16 *of_up, long count,
                         int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long i = 0; i < count; i += LANES) {
        const __m512 g = load(gate + i), u = load(up + i), d = load(grad + i), s = sigmoid(g), silu = _mm512_mul_ps(g, s);
        const __m512 one = _mm512_set1_ps(1.0f), slope = _mm512_mul_ps(s, _mm512_fmadd_ps(g, _mm512_sub_ps(one, s), one));
        store(out + i, _mm512_mul_ps(silu, u));
        store(of_up + i, _mm512_mul_ps(d, silu));
        store(of_gate + i, _mm512_mul_ps(_mm512_mul_ps(d, u), slope));
    }
}

/* ---- norms ---- */

/* out = weight x scale, where scale, one for each row, is 1 / rms(x), or is given */
void native_norm(const float *x, const float *weight, float epsilon, float *scales, int is_given, bf16 *out, long rows, long D,
                 int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long row = 0; row < rows; row++) {
        const float *from = x + row * D;
        if (!is_given) {
            __m512 sum = _mm512_setzero_ps();
            for (long i = 0; i < D; i += LANES) sum = _mm512_fmadd_ps(_mm512_loadu_ps(from + i), _mm512_loadu_ps(from + i), sum);
            scales[row] = 1.0f / sqrtf(_mm512_reduce_add_ps(sum) / D + epsilon);
        }
        const __m512 scale = _mm512_set1_ps(scales[row]);
        for (long i = 0; i < D; i += LANES)
            store(out + row * D + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(from + i), scale), _mm512_loadu_ps(weight + i)));
    }
}

#define NORM_ROWS 64 /* whose gradients of the weight make one row of `of_weight` */

void native_norm_slopes(const bf16 *grad, const float *x, const float *weight, const float *scales, float *of_x,
                        float *of_weight, long rows, long D, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long part = 0; part < (rows + NORM_ROWS - 1) / NORM_ROWS; part++) {
        float *sums = of_weight + part * D;
        memset(sums, 0, D * sizeof(float));
        for (long row = part * NORM_ROWS; row < least(rows, (part + 1) * NORM_ROWS); row++) {
            const bf16 *g = grad + row * D;
            const float *from = x + row * D;
            const __m512 scale = _mm512_set1_ps(scales[row]);
            __m512 dot = _mm512_setzero_ps();
            for (long i = 0; i < D; i += LANES) {
                const __m512 product = _mm512_mul_ps(load(g + i), _mm512_mul_ps(_mm512_loadu_ps(from + i), scale));
                dot = _mm512_fmadd_ps(product, _mm512_loadu_ps(weight + i), dot);
                _mm512_storeu_ps(sums + i, _mm512_add_ps(_mm512_loadu_ps(sums + i), product));
            }
            const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(dot) / D * scales[row]);
            for (long i = 0; i < D; i += LANES) {
                const __m512 y = _mm512_mul_ps(load(g + i), _mm512_loadu_ps(weight + i));
                _mm512_storeu_ps(of_x + row * D + i,
                                 _mm512_mul_ps(_mm512_fnmadd_ps(_mm512_loadu_ps(from + i), mean, y), scale));
            }
        }
    }
}

/* ---- attention ---- */

#define ROWS 4  /* rows of a product in registers */
#define VECTORS 4 /* of 16 columns */
#define QUERIES 32 /* of a block of the forward pass */
#define BLOCK_QUERIES 64 /* of the backward pass */
#define BLOCK_KEYS 32

INLINE void product_tile(const pair *a, long row_step, long pair_step, const pair *b, long b_step, float *c, long c_step,
                         long pairs, const int vectors, int adds) {
    __m512 sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = adds ? _mm512_loadu_ps(c + r * c_step + v * LANES) : _mm512_setzero_ps();
    for (long p = 0; p < pairs; p++) {
        __m512bh columns[VECTORS];
        for (int v = 0; v < vectors; v++) columns[v] = (__m512bh)_mm512_loadu_si512(b + p * b_step + v * LANES);
        for (int r = 0; r < ROWS; r++) {
            const __m512bh row = (__m512bh)_mm512_set1_epi32((int)a[r * row_step + p * pair_step]);
            for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], row, columns[v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++) _mm512_storeu_ps(c + r * c_step + v * LANES, sums[r][v]);
}

/* c[rows, columns] (+)= a b, summed over pairs; rows in steps of 4, columns of 16 */
static void product(const pair *a, long row_step, long pair_step, const pair *b, long b_step, float *c, long c_step, long rows,
                    long columns, long pairs, int adds) {
    for (long j = 0; j < columns; j += VECTORS * LANES)
        for (long i = 0; i < rows; i += ROWS) {
            const pair *a_i = a + i * row_step, *b_j = b + j;
            float *c_ij = c + i * c_step + j;
            switch (least(VECTORS, (columns - j) / LANES)) {
            case 4: product_tile(a_i, row_step, pair_step, b_j, b_step, c_ij, c_step, pairs, 4, adds); break;
            case 3: product_tile(a_i, row_step, pair_step, b_j, b_step, c_ij, c_step, pairs, 3, adds); break;
            case 2: product_tile(a_i, row_step, pair_step, b_j, b_step, c_ij, c_step, pairs, 2, adds); break;
            default: product_tile(a_i, row_step, pair_step, b_j, b_step, c_ij, c_step, pairs, 1, adds);
            }
        }
}

/* rows [L, K] as pairs [L/2, K] of numbers below each other */
static void interleave(const bf16 *rows, pair *out, long L, long K) {
    for (long i = 0; i < L; i += 2)
        for (long j = 0; j < K; j += LANES) {
            const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(rows + i * K + j)));
            const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(rows + (i + 1) * K + j)));
            _mm512_storeu_si512(out + i / 2 * K + j, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
}

/* the first 16 multiples of a number */
INLINE __m512i multiples(long number) {
    return _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32((int)number));
}

/* rows of pairs [L, K/2] as [K/2, L] */
static void transpose(const bf16 *rows, pair *out, long L, long K) {
    const pair *from = (const pair *)rows;
    const long P = K / 2;
    const __m512i steps = multiples(P);
    for (long i = 0; i < L; i += LANES)
        for (long p = 0; p < P; p++) _mm512_storeu_si512(out + p * L + i, _mm512_i32gather_epi32(steps, (const int *)(from + i * P + p), 4));
}

typedef struct {
    const bf16 *states; /* [B*T, heads, K] */
    const float *weight; /* of their norm, or NULL */
    float epsilon;
    long heads;
} States;

typedef struct {
    const float *cos, *sin; /* [B*T, K], or NULL */
    const int64_t *starts, *lengths; /* of the records */
    long records, longest, K;
    float scale;
    int threads;
} Records;

/* y = R (weight x / rms(x)) of one token, the pairs half a head apart, for [L, K] rows of out; zeros up to `padded` rows */
static void rotate(const States *s, const Records *r, long start, long L, long padded, long head, bf16 *out) {
    const long K = r->K, half = K / 2;
    for (long i = 0; i < L; i++) {
        const bf16 *x = s->states + ((start + i) * s->heads + head) * K;
        float scale = 1;
        if (s->weight) {
            __m512 sum = _mm512_setzero_ps();
            for (long j = 0; j < K; j += LANES) sum = _mm512_fmadd_ps(load(x + j), load(x + j), sum);
            scale = 1.0f / sqrtf(_mm512_reduce_add_ps(sum) / K + s->epsilon);
        }
        const __m512 scales = _mm512_set1_ps(scale);
        for (long j = 0; j < half; j += LANES) {
            __m512 a = load(x + j), b = load(x + half + j);
            if (s->weight) {
                a = _mm512_mul_ps(_mm512_mul_ps(a, scales), _mm512_loadu_ps(s->weight + j));
                b = _mm512_mul_ps(_mm512_mul_ps(b, scales), _mm512_loadu_ps(s->weight + half + j));
            }
            if (r->cos) {
                const float *cos = r->cos + (start + i) * K, *sin = r->sin + (start + i) * K;
                const __m512 turned = _mm512_fnmadd_ps(b, _mm512_loadu_ps(sin + j), _mm512_mul_ps(a, _mm512_loadu_ps(cos + j)));
                b = _mm512_fmadd_ps(a, _mm512_loadu_ps(sin + half + j), _mm512_mul_ps(b, _mm512_loadu_ps(cos + half + j)));
                a = turned;
            }
            store(out + i * K + j, a);
            store(out + i * K + half + j, b);
        }
    }
    memset(out + L * K, 0, (padded - L) * K * sizeof(bf16));
}

/* Gradients of the states of one head of a record from `factor` times the gradients of what `rotate` made of them, [L, K],
   which are overwritten; those of the weight are added to `of_weight`. */
static void rotate_slopes(const States *s, const Records *r, long start, long L, long head, float *grad, float factor, bf16 *out,
                          float *of_weight) {
    const long K = r->K, half = K / 2;
    const __m512 factors = _mm512_set1_ps(factor);
    for (long i = 0; i < L; i++) {
        const long at = ((start + i) * s->heads + head) * K;
        const bf16 *x = s->states + at;
        float *g = grad + i * K;
        __m512 squares = _mm512_setzero_ps(), dot = _mm512_setzero_ps();
        for (long j = 0; j < half; j += LANES) {
            __m512 a = _mm512_mul_ps(_mm512_loadu_ps(g + j), factors), b = _mm512_mul_ps(_mm512_loadu_ps(g + half + j), factors);
            if (r->cos) {
                const float *cos = r->cos + (start + i) * K, *sin = r->sin + (start + i) * K;
                const __m512 turned = _mm512_fmadd_ps(b, _mm512_loadu_ps(sin + half + j), _mm512_mul_ps(a, _mm512_loadu_ps(cos + j)));
                b = _mm512_fnmadd_ps(a, _mm512_loadu_ps(sin + j), _mm512_mul_ps(b, _mm512_loadu_ps(cos + half + j)));
                a = turned;
            }
            _mm512_storeu_ps(g + j, a);
            _mm512_storeu_ps(g + half + j, b);
        }
        if (!s->weight) {
            for (long j = 0; j < K; j += LANES) store(out + at + j, _mm512_loadu_ps(g + j));
            continue;
        }
        for (long j = 0; j < K; j += LANES) squares = _mm512_fmadd_ps(load(x + j), load(x + j), squares);
        const float scale = 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / K + s->epsilon);
        const __m512 scales = _mm512_set1_ps(scale);
        for (long j = 0; j < K; j += LANES) {
            const __m512 product = _mm512_mul_ps(_mm512_loadu_ps(g + j), _mm512_mul_ps(load(x + j), scales));
            dot = _mm512_fmadd_ps(product, _mm512_loadu_ps(s->weight + j), dot);
            _mm512_storeu_ps(of_weight + j, _mm512_add_ps(_mm512_loadu_ps(of_weight + j), product));
        }
        const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(dot) / K * scale);
        for (long j = 0; j < K; j += LANES) {
            const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(g + j), _mm512_loadu_ps(s->weight + j));
            store(out + at + j, _mm512_mul_ps(_mm512_fnmadd_ps(load(x + j), mean, y), scales));
        }
    }
}

static void *take(char **memory, long bytes) {
    void *taken = *memory;
    *memory += up_to(bytes, 64);
    return taken;
}

/* out [B*T, H, K]: of each record softmax(scale Q K^T) V, causal; tops [B*T, H]: the largest Q K^T of a query; logs: log2 of
   the sum of its exponentials beside that of the largest one, kept apart so that large scores lose no digits */
long native_attention(const States *q, const States *k, const States *v, const Records *r, bf16 *out, float *tops, float *logs) {
    const long K = r->K, H = q->heads, G = k->heads, R = H / G, most = up_to(r->longest, BLOCK_QUERIES);
    long result = 0;
#pragma omp parallel num_threads(r->threads) reduction(min : result)
    {
        char *memory = aligned_alloc(64, 2 * up_to(most * K * 2, 64) + up_to(most * K * 2, 64) + 2 * up_to(QUERIES * K * 4, 64) +
                                             up_to(QUERIES * most * 4, 64) + up_to(QUERIES * most * 2, 64)), *next = memory;
        bf16 *rows = take(&next, most * K * 2), *query = take(&next, QUERIES * K * 2);
        pair *keys = take(&next, most * K * 2), *values = take(&next, most * K * 2);
        float *scores = take(&next, QUERIES * most * 4), *mixed = take(&next, QUERIES * K * 4);
        bf16 *weights = take(&next, QUERIES * most * 2);
        if (!memory) result = NO_MEMORY;
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < r->records * G; task++) {
            if (!memory) continue;
            const long start = r->starts[task / G], L = r->lengths[task / G], group = task % G, padded = up_to(L, QUERIES);
            rotate(k, r, start, L, padded, group, rows);
            transpose(rows, keys, padded, K);
            for (long i = 0; i < L; i++) memcpy(rows + i * K, v->states + ((start + i) * G + group) * K, K * sizeof(bf16));
            memset(rows + L * K, 0, (padded - L) * K * sizeof(bf16));
            interleave(rows, values, padded, K);
            for (long head = group * R; head < (group + 1) * R; head++)
                for (long first = 0; first < L; first += QUERIES) {
                    const long count = least(QUERIES, L - first), height = up_to(count, ROWS), S = up_to(first + count, LANES);
                    rotate(q, r, start + first, count, height, head, query);
                    product((pair *)query, K / 2, 1, keys, padded, scores, S, height, S, K / 2, 0);
                    float inverse[QUERIES];
                    for (long i = 0; i < height; i++) {
                        const long seen = first + i + 1;
                        float *row = scores + i * S;
                        __m512 most_lanes = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
                        for (long j = 0; j < seen; j += LANES)
                            most_lanes = _mm512_mask_max_ps(most_lanes, first_lanes(seen - j), most_lanes, _mm512_loadu_ps(row + j));
                        const __m512 factor = _mm512_set1_ps(r->scale * LOG2E);
                        const float top = _mm512_reduce_max_ps(most_lanes);
                        for (long j = 0; j < S; j += LANES) {
                            const __mmask16 lanes = first_lanes(seen - j);
                            const __m512 power = _mm512_maskz_mov_ps(
                                lanes, exp2_ps(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(row + j), _mm512_set1_ps(top)), factor)));
                            sum = _mm512_add_ps(sum, power);
                            store(weights + i * S + j, power);
                        }
                        const float total = _mm512_reduce_add_ps(sum);
                        inverse[i] = 1.0f / total;
                        if (i >= count) continue;
                        tops[(start + first + i) * H + head] = top;
                        logs[(start + first + i) * H + head] = log2f(total);
                    }
                    product((pair *)weights, S / 2, 1, values, K, mixed, K, height, K, S / 2, 0);
                    for (long i = 0; i < count; i++)
                        for (long j = 0; j < K; j += LANES)
                            store(out + ((start + first + i) * H + head) * K + j,
                                  _mm512_mul_ps(_mm512_loadu_ps(mixed + i * K + j), _mm512_set1_ps(inverse[i])));
                }
        }
        free(memory);
    }
    return result;
}

/* One block of weights and their gradients, keys [BLOCK_KEYS] by queries [BLOCK_QUERIES], in the forms that products read. */
INLINE void block_slopes(const float *scores, const float *of_weights, const float *tops, const float *logs, const float *deltas, float factor,
                         long first_query, long first_key, bf16 *weights, bf16 *slopes, pair *slopes_below) {
    const __m512 factors = _mm512_set1_ps(factor);
    const __m512i queries = multiples(1);
    for (long j = 0; j < BLOCK_KEYS; j += 2)
        for (long i = 0; i < BLOCK_QUERIES; i += LANES) {
            __m512 both[2];
            for (int n = 0; n < 2; n++) {
                const long at = (j + n) * BLOCK_QUERIES + i;
                const __mmask16 seen = _mm512_cmpge_epi32_mask(
                    _mm512_add_epi32(queries, _mm512_set1_epi32((int)(first_query + i))), _mm512_set1_epi32((int)(first_key + j + n)));
                const __m512 power = _mm512_maskz_mov_ps(
                    seen, exp2_ps(_mm512_fmsub_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + at), _mm512_loadu_ps(tops + i)), factors,
                                                  _mm512_loadu_ps(logs + i))));
                store(weights + at, power);
                both[n] = _mm512_maskz_mul_ps(seen, power, _mm512_sub_ps(_mm512_loadu_ps(of_weights + at), _mm512_loadu_ps(deltas + i)));
                store(slopes + at, both[n]);
            }
            const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(both[0]));
            const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(both[1]));
            _mm512_storeu_si512(slopes_below + j / 2 * BLOCK_QUERIES + i, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
}

/* Gradients of queries, keys and values from that of `out`; `of_weights` [records * G, 2, K]: of the weights of both norms */
long native_attention_slopes(const States *q, const States *k, const States *v, const Records *r, const bf16 *out,
                             const float *tops, const float *logs, const bf16 *grad, bf16 *of_q, bf16 *of_k, bf16 *of_v, float *of_weights) {
    const long K = r->K, H = q->heads, G = k->heads, R = H / G, most = up_to(r->longest, BLOCK_QUERIES);
    const float factor = r->scale * LOG2E;
    long result = 0;
#pragma omp parallel num_threads(r->threads) reduction(min : result)
    {
        char *memory = aligned_alloc(64, 8 * up_to(most * K * 2, 64) + 2 * up_to(most * K * 4, 64) + up_to(BLOCK_QUERIES * K * 4, 64) +
                                             3 * up_to(most * 4, 64) + 5 * up_to(BLOCK_KEYS * BLOCK_QUERIES * 4, 64)), *next = memory;
        bf16 *rows = take(&next, most * K * 2), *key = take(&next, most * K * 2), *value = take(&next, most * K * 2);
        pair *keys_below = take(&next, most * K * 2);
        pair *queries = take(&next, most * K * 2), *queries_below = take(&next, most * K * 2);
        pair *grads = take(&next, most * K * 2), *grads_below = take(&next, most * K * 2);
        float *sums_k = take(&next, most * K * 4), *sums_v = take(&next, most * K * 4), *sums_q = take(&next, BLOCK_QUERIES * K * 4);
        float *top_rows = take(&next, most * 4), *log_rows = take(&next, most * 4), *deltas = take(&next, most * 4);
        float *scores = take(&next, BLOCK_KEYS * BLOCK_QUERIES * 4), *products = take(&next, BLOCK_KEYS * BLOCK_QUERIES * 4);
        bf16 *weights = take(&next, BLOCK_KEYS * BLOCK_QUERIES * 2), *slopes = take(&next, BLOCK_KEYS * BLOCK_QUERIES * 2);
        pair *slopes_below = take(&next, BLOCK_KEYS * BLOCK_QUERIES * 2);
        if (!memory) result = NO_MEMORY;
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < r->records * G; task++) {
            if (!memory) continue;
            const long start = r->starts[task / G], L = r->lengths[task / G], group = task % G, padded = up_to(L, BLOCK_QUERIES);
            float *of_weight = of_weights + task * 2 * K;
            memset(of_weight, 0, 2 * K * sizeof(float));
            rotate(k, r, start, L, padded, group, key);
            interleave(key, keys_below, padded, K);
            for (long i = 0; i < L; i++) memcpy(value + i * K, v->states + ((start + i) * G + group) * K, K * sizeof(bf16));
            memset(value + L * K, 0, (padded - L) * K * sizeof(bf16));
            memset(sums_k, 0, padded * K * sizeof(float));
            memset(sums_v, 0, padded * K * sizeof(float));
            for (long head = group * R; head < (group + 1) * R; head++) {
                rotate(q, r, start, L, padded, head, rows);
                transpose(rows, queries, padded, K);
                interleave(rows, queries_below, padded, K);
                for (long i = 0; i < L; i++) {
                    const long at = ((start + i) * H + head) * K;
                    __m512 dot = _mm512_setzero_ps();
                    for (long j = 0; j < K; j += LANES) dot = _mm512_fmadd_ps(load(grad + at + j), load(out + at + j), dot);
                    memcpy(rows + i * K, grad + at, K * sizeof(bf16));
                    deltas[i] = _mm512_reduce_add_ps(dot);
                    top_rows[i] = tops[(start + i) * H + head];
                    log_rows[i] = logs[(start + i) * H + head];
                }
                memset(rows + L * K, 0, (padded - L) * K * sizeof(bf16));
                memset(deltas + L, 0, (padded - L) * sizeof(float));
                memset(top_rows + L, 0, (padded - L) * sizeof(float));
                memset(log_rows + L, 0, (padded - L) * sizeof(float));
                transpose(rows, grads, padded, K);
                interleave(rows, grads_below, padded, K);
                for (long first = 0; first < L; first += BLOCK_QUERIES) {
                    const long below = first / 2 * K;
                    for (long at = 0; at < least(L, first + BLOCK_QUERIES); at += BLOCK_KEYS) {
                        product((pair *)(key + at * K), K / 2, 1, queries + first, padded, scores, BLOCK_QUERIES, BLOCK_KEYS,
                                BLOCK_QUERIES, K / 2, 0);
                        product((pair *)(value + at * K), K / 2, 1, grads + first, padded, products, BLOCK_QUERIES, BLOCK_KEYS,
                                BLOCK_QUERIES, K / 2, 0);
                        block_slopes(scores, products, top_rows + first, log_rows + first, deltas + first, factor, first, at, weights, slopes,
                                     slopes_below);
                        product((pair *)weights, BLOCK_QUERIES / 2, 1, grads_below + below, K, sums_v + at * K, K, BLOCK_KEYS, K,
                                BLOCK_QUERIES / 2, 1);
                        product((pair *)slopes, BLOCK_QUERIES / 2, 1, queries_below + below, K, sums_k + at * K, K, BLOCK_KEYS, K,
                                BLOCK_QUERIES / 2, 1);
                        product(slopes_below, 1, BLOCK_QUERIES, keys_below + at / 2 * K, K, sums_q, K, BLOCK_QUERIES, K,
                                BLOCK_KEYS / 2, at > 0);
                    }
                    rotate_slopes(q, r, start + first, least(BLOCK_QUERIES, L - first), head, sums_q, r->scale, of_q, of_weight);
                }
            }
            rotate_slopes(k, r, start, L, group, sums_k, r->scale, of_k, of_weight + K);
            for (long i = 0; i < L; i++)
                for (long j = 0; j < K; j += LANES)
                    store(of_v + ((start + i) * G + group) * K + j, _mm512_loadu_ps(sums_v + i * K + j));
        }
        free(memory);
    }
    return result;
}

/* ---- Muon ---- */

/* Of each matrix [A, B] `steps` Newton-Schulz steps in bf16, from x / norm(x): x <- a x + (b G + c G G) x with G = x x^T, or
   where A > B with the smaller G = x^T x on the other side. */
long native_orthogonal(const float *matrices, float *out, long count, long A, long B, float a, float b, float c, int steps,
                       float epsilon, int threads) {
    const int tall = A > B;
    const long M = tall ? B : A;
    long result = 0;
#pragma omp parallel num_threads(threads) reduction(min : result)
    {
        char *memory = aligned_alloc(64, 3 * up_to(A * B * 2, 64) + 2 * up_to(M * M * 2, 64) + up_to(M * M * 4, 64)),
             *next = memory;
        bf16 *x = take(&next, A * B * 2), *gram = take(&next, M * M * 2);
        pair *x_turned = take(&next, A * B * 2), *x_below = take(&next, A * B * 2), *gram_below = take(&next, M * M * 2);
        float *squares = take(&next, M * M * 4);
        if (!memory) result = NO_MEMORY;
#pragma omp for schedule(dynamic, 1)
        for (long number = 0; number < count; number++) {
            if (!memory) continue;
            const float *from = matrices + number * A * B;
            float *sums = out + number * A * B;
            __m512 total = _mm512_setzero_ps();
            for (long i = 0; i < A * B; i += LANES) total = _mm512_fmadd_ps(_mm512_loadu_ps(from + i), _mm512_loadu_ps(from + i), total);
            const float norm = sqrtf(_mm512_reduce_add_ps(total)), inverse = 1.0f / (norm < epsilon ? epsilon : norm);
            for (long i = 0; i < A * B; i += LANES) store(x + i, _mm512_mul_ps(_mm512_loadu_ps(from + i), _mm512_set1_ps(inverse)));
            for (int step = 0; step < steps; step++) {
                interleave(x, x_below, A, B);
                if (tall) {
                    product(x_below, 1, B, x_below, B, squares, M, M, M, A / 2, 0);
                } else {
                    transpose(x, x_turned, A, B);
                    product((pair *)x, B / 2, 1, x_turned, M, squares, M, M, M, B / 2, 0);
                }
                for (long i = 0; i < M * M; i += LANES) store(gram + i, _mm512_loadu_ps(squares + i));
                interleave(gram, gram_below, M, M);
                product((pair *)gram, M / 2, 1, gram_below, M, squares, M, M, M, M / 2, 0);
                for (long i = 0; i < M * M; i += LANES)
                    store(gram + i, _mm512_fmadd_ps(_mm512_set1_ps(c), _mm512_loadu_ps(squares + i),
                                                    _mm512_mul_ps(_mm512_set1_ps(b), load(gram + i))));
                if (tall) {
                    interleave(gram, gram_below, M, M);
                    product((pair *)x, B / 2, 1, gram_below, M, sums, B, A, B, M / 2, 0);
                } else {
                    product((pair *)gram, M / 2, 1, x_below, B, sums, B, A, B, M / 2, 0);
                }
                for (long i = 0; i < A * B; i += LANES) {
                    const __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(a), load(x + i), _mm512_loadu_ps(sums + i));
                    store(x + i, y);
                    _mm512_storeu_ps(sums + i, y);
                }
            }
        }
        free(memory);
    }
    return result;
}

#pragma GCC pop_options

#else

int native_version(void) { return 0; }

#endif
