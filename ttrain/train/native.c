/* Layers of a training step on x86-64: attention within records, norms, gated layers, losses, and Muon's matrices.

   Numbers in memory are bf16 (CPUs with AVX512-BF16) or fp32 (AVX2, AVX-512), in registers fp32, each read and written once
   where torch needs a pass for each operation. Called by native.py, which checks shapes and types. Results do not depend on
   the number of threads. Compiled at installation for all of these CPUs: `native_kinds` asks which one it is. native.h has
   the kernels, and is included once for each of them.

   Letters: B*T tokens, H heads of queries, G of keys and values, K width of a head, L tokens of a record, D width of a
   token, V entries of the vocabulary. A unit is 32 bits, two numbers in bf16 and one in fp32: one instruction multiplies and
   adds a register full of them. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 5 /* of arguments and results, as in native.py: a file that was compiled from other source is not used */

int native_version(void) { return VERSION; }

/* clang gives the bodies of parallel loops no target of their own. */
#if !defined(__x86_64__) || !defined(__GNUC__) || defined(__clang__) || __GNUC__ < 10

int native_kinds(void) { return 0; }

#else

#include <cpuid.h>
#include <immintrin.h>
#include <omp.h>

/* Sum of 1 for fp32 by AVX2, 2 for fp32 by AVX-512 and 4 for bf16, as far as this CPU has them. */
int native_kinds(void) {
    unsigned a, b, c, d;
    __builtin_cpu_init(); /* asks the system, too, whether it saves the registers */
    const int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq");
    const int has_bf16 = has_avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);
    return has_avx2 + 2 * has_avx512 + 4 * has_bf16;
}

#define INLINE static inline __attribute__((always_inline))
#define LOG2E 1.4426950408889634f
#define IGNORE (-100)
#define NO_MEMORY (-1)          /* what functions return then; else 0 */
#define NORM_ROWS 64            /* whose gradients of the weight make one row of `of_weight` */
#define ROWS 4                  /* rows of a product in registers */
#define PANEL (VECTORS * LANES) /* columns of a product's second factor that are beside each other in the cache */
#define DEPTH 64                /* units of these columns */
#define MOST_ALONE (1L << 20)   /* numbers of a matrix on which one thread works, with 10 bytes for each */
#define QUERIES 32              /* of a block of the forward pass of attention */
#define BLOCK_QUERIES 64        /* of the backward pass */
#define BLOCK_KEYS 32

typedef uint32_t unit;

typedef struct {
    const void *states;  /* [B*T, heads, K] */
    const float *weight; /* of their norm, or NULL */
    float epsilon;
    long heads;
} States;

typedef struct {
    const float *cos, *sin;          /* [B*T, K], or NULL */
    const int64_t *starts, *lengths; /* of the records */
    const int32_t *branches;         /* [B*T], or NULL: a token sees in its record branch 0 and its own alone */
    long records, longest, K;
    float scale;
    int threads;
} Records;

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long up_to(long n, long unit) { return (n + unit - 1) / unit * unit; }

/* The branches of a record's tokens, beyond its end 0; NULL where it has none. */
static const int32_t *branches_of(const Records *r, long start, long L, long padded, int32_t *copy) {
    if (!r->branches) return NULL;
    memcpy(copy, r->branches + start, L * sizeof(int32_t));
    memset(copy + L, 0, (padded - L) * sizeof(int32_t));
    return copy;
}

typedef struct {
    long thread, threads; /* its number among those that work together, and how many these are */
} Team;

static void meet(Team team) {
    if (team.threads > 1) {
#pragma omp barrier
    }
}

static void *take(char **memory, long bytes) {
    void *taken = *memory;
    *memory += up_to(bytes, 64);
    return taken;
}

/* 2^x for |x - n| <= 0.5 by the polynomial of Cephes' exp2f: 1e-7 of its value */
#define POLYNOMIAL(SET, FMA, f)                                                                                             \
    FMA(FMA(FMA(FMA(FMA(FMA(SET(1.535336188319500e-4f), f, SET(1.339887440266574e-3f)), f, SET(9.618437357674640e-3f)), f,  \
                    SET(5.550332471162809e-2f)),                                                                            \
                f, SET(2.402264791363012e-1f)),                                                                             \
            f, SET(6.931472028550421e-1f)),                                                                                 \
        f, SET(1.0f))

/* ---- AVX-512 ---- */

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")

INLINE __mmask16 first_lanes(long n) { return n >= 16 ? 0xFFFF : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }
INLINE __m512 exp2_512(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, 8), f = _mm512_sub_ps(x, n);
    return _mm512_scalef_ps(POLYNOMIAL(_mm512_set1_ps, _mm512_fmadd_ps, f), n);
}
INLINE __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE float wide(uint16_t x) {
    const union {
        uint32_t i;
        float f;
    } bits = {(uint32_t)x << 16};
    return bits.f;
}

#define VECTOR __m512
#define INTS __m512i
#define LANES 16
#define VECTORS 4 /* of a row of a product in registers */
#define SET _mm512_set1_ps
#define LOADF _mm512_loadu_ps
#define STOREF _mm512_storeu_ps
#define ADD _mm512_add_ps
#define SUB _mm512_sub_ps
#define MUL _mm512_mul_ps
#define DIV _mm512_div_ps
#define FMA _mm512_fmadd_ps
#define FMS _mm512_fmsub_ps
#define FNMA _mm512_fnmadd_ps
#define MAX _mm512_max_ps
#define SUM _mm512_reduce_add_ps
#define TOP _mm512_reduce_max_ps
#define EXP2 exp2_512
#define FIRST(x, n) _mm512_maskz_mov_ps(first_lanes(n), x) /* the others 0 */
#define AFTER(x, n) _mm512_maskz_mov_ps((__mmask16)~first_lanes(n), x)
#define LOWEST_AFTER(x, n) _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), first_lanes(n), x)
#define SAME(p, n) _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(p), _mm512_set1_epi32(n))
#define ONLY(x, mask) _mm512_maskz_mov_ps(mask, x)
#define LOWEST_UNLESS(x, mask) _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), mask, x)
#define MULTIPLES(n)                                                                                                        \
    _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32((int)(n)))
#define GATHER(steps, from) _mm512_i32gather_epi32(steps, (const int *)(from), 4)
#define STORE_INTS _mm512_storeu_si512

#define NAME(function) native_##function##_bf16
#define number uint16_t
#define SIZE 2
#define UNIT 2
#define UNITS __m512bh
#define LOAD(p) widen(_mm256_loadu_si256((const __m256i *)(p)))
#define STORE(p, x) _mm256_storeu_si256((__m256i *)(p), (__m256i)_mm512_cvtneps_pbh(x))
#define LOAD_FIRST(p, n) widen(_mm256_maskz_loadu_epi16(first_lanes(n), p))
#define STORE_FIRST(p, x, n) _mm256_mask_storeu_epi16(p, first_lanes(n), (__m256i)_mm512_cvtneps_pbh(x))
#define WIDE wide
#define NARROW(x) (number) _mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x)), 0)
#define LOAD_UNITS(p) (UNITS) _mm512_loadu_si512(p)
#define REPEAT(unit) (UNITS) _mm512_set1_epi32((int)(unit))
#define MULTIPLY_ADD _mm512_dpbf16_ps
#define LOAD_INTS(p) _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p)))
#define INTERLEAVE(out, first, second)                                                                                      \
    _mm512_storeu_si512(out, _mm512_or_si512(LOAD_INTS(first), _mm512_slli_epi32(LOAD_INTS(second), 16)))
#include "native.h"
#undef NAME
#undef number
#undef SIZE
#undef UNIT
#undef UNITS
#undef LOAD
#undef STORE
#undef LOAD_FIRST
#undef STORE_FIRST
#undef WIDE
#undef NARROW
#undef LOAD_UNITS
#undef REPEAT
#undef MULTIPLY_ADD
#undef INTERLEAVE

#define number float
#define SIZE 4
#define UNIT 1
#define LOAD LOADF
#define STORE STOREF
#define WIDE(x) (x)
#define NARROW(x) (x)
#define LOAD_UNITS(p) LOADF((const float *)(p))
#define REPEAT(unit) SET(*(const float *)&(unit))
#define MULTIPLY_ADD(sum, a, b) FMA(a, b, sum)
#define INTERLEAVE(out, first, second) ((void)(second), STOREF((float *)(out), LOADF(first)))

#define NAME(function) native_##function##_fp32_avx512
#define UNITS __m512
#define LOAD_FIRST(p, n) _mm512_maskz_loadu_ps(first_lanes(n), p)
#define STORE_FIRST(p, x, n) _mm512_mask_storeu_ps(p, first_lanes(n), x)
#include "native.h"
#undef NAME
#undef UNITS
#undef LOAD_FIRST
#undef STORE_FIRST

#undef VECTOR
#undef INTS
#undef LANES
#undef VECTORS
#undef SET
#undef LOADF
#undef STOREF
#undef ADD
#undef SUB
#undef MUL
#undef DIV
#undef FMA
#undef FMS
#undef FNMA
#undef MAX
#undef SUM
#undef TOP
#undef EXP2
#undef FIRST
#undef AFTER
#undef LOWEST_AFTER
#undef SAME
#undef ONLY
#undef LOWEST_UNLESS
#undef MULTIPLES
#undef GATHER
#undef STORE_INTS

#pragma GCC pop_options

/* ---- AVX2 ---- */

#pragma GCC push_options
#pragma GCC target("avx2,fma")

INLINE __m256i lanes_256(long n) { /* all bits of the first n, which may be negative, are set */
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(n < 8 ? n : 8)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE __m256 exp2_256(__m256 x) {
    x = _mm256_min_ps(_mm256_set1_ps(128), _mm256_max_ps(_mm256_set1_ps(-127), x)); /* in this order NaN stays NaN */
    const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm256_sub_ps(x, n);
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(POLYNOMIAL(_mm256_set1_ps, _mm256_fmadd_ps, f), _mm256_castsi256_ps(power));
}
INLINE float sum_256(__m256 x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
INLINE float top_256(__m256 x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

#define VECTOR __m256
#define INTS __m256i
#define LANES 8
#define VECTORS 2
#define SET _mm256_set1_ps
#define LOADF _mm256_loadu_ps
#define STOREF _mm256_storeu_ps
#define ADD _mm256_add_ps
#define SUB _mm256_sub_ps
#define MUL _mm256_mul_ps
#define DIV _mm256_div_ps
#define FMA _mm256_fmadd_ps
#define FMS _mm256_fmsub_ps
#define FNMA _mm256_fnmadd_ps
#define MAX _mm256_max_ps
#define SUM sum_256
#define TOP top_256
#define EXP2 exp2_256
#define FIRST(x, n) _mm256_and_ps(x, _mm256_castsi256_ps(lanes_256(n)))
#define AFTER(x, n) _mm256_andnot_ps(_mm256_castsi256_ps(lanes_256(n)), x)
#define LOWEST_AFTER(x, n) _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), x, _mm256_castsi256_ps(lanes_256(n)))
#define SAME(p, n) _mm256_cmpeq_epi32(_mm256_loadu_si256((const __m256i *)(p)), _mm256_set1_epi32(n))
#define ONLY(x, mask) _mm256_and_ps(x, _mm256_castsi256_ps(mask))
#define LOWEST_UNLESS(x, mask) _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), x, _mm256_castsi256_ps(mask))
#define MULTIPLES(n) _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32((int)(n)))
#define GATHER(steps, from) _mm256_i32gather_epi32((const int *)(from), steps, 4)
#define STORE_INTS(p, x) _mm256_storeu_si256((__m256i *)(p), x)

#define NAME(function) native_##function##_fp32_avx2
#define UNITS __m256
#define LOAD_FIRST(p, n) _mm256_maskload_ps(p, lanes_256(n))
#define STORE_FIRST(p, x, n) _mm256_maskstore_ps(p, lanes_256(n), x)
#include "native.h"

#pragma GCC pop_options

#endif
