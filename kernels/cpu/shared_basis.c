/* The shared basis on a CPU: out[t] += (h[t] core[t]^T) U_B^T, in one pass over out.
 *
 * Plain dense products do the same in half a dozen operations; at a few dozen tokens a step their start-up costs
 * more than their arithmetic. Written with the vector types of GCC and Clang, and compiled for each instruction set
 * named in CLONES. A token's sum has one order, so its bits do not depend on the batch or on the number of threads.
 */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16, MAX_RANK = 32 };
enum { FLOAT32, BFLOAT16 };
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float eight __attribute__((vector_size(32)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t half __attribute__((vector_size(2 * LANES)));

INLINE vec widen(half x) { return (vec)(__builtin_convertvector(x, bits) << 16); }

INLINE half narrow(vec x) {   /* to nearest, ties to even; a NaN stays one */
    bits b = (bits)x, rounded = b + 0x7fff + ((b >> 16) & 1), nan = (bits)(x != x);
    return __builtin_convertvector(((rounded & ~nan) | (nan & 0x7fc00000)) >> 16, half);
}

INLINE float value(const void *row, int64_t at, int type) {
    if (type == FLOAT32) return ((const float *)row)[at];
    uint32_t b = (uint32_t)((const uint16_t *)row)[at] << 16;
    float f;
    memcpy(&f, &b, 4);
    return f;
}

/* row[j] += sum, for `count` <= LANES columns. */
INLINE void add(void *row, int64_t j, vec sum, int count, int type) {
    if (type == BFLOAT16) {
        uint16_t *p = (uint16_t *)row + j;
        half x = {0};
        memcpy(&x, p, count * 2);
        x = narrow(widen(x) + sum);
        memcpy(p, &x, count * 2);
    } else {
        float *p = (float *)row + j;
        vec x = {0};
        memcpy(&x, p, count * 4);
        x += sum;
        memcpy(p, &x, count * 4);
    }
}

/* rows 0 .. n - 1 += g[i] u over `columns` columns; u is (rank, ldu), readable to a multiple of LANES. */
INLINE void expand(void *const *row, int n, const float *g, const float *u, int64_t ldu, int64_t columns, int rank,
                   int type) {
    int64_t j = 0;
    for (; j < columns; j += LANES) {
        vec sum[2] = {{0}, {0}};
        for (int b = 0; b < rank; b++) {
            vec x;
            memcpy(&x, u + b * ldu + j, sizeof x);
            for (int i = 0; i < n; i++) sum[i] += g[i * MAX_RANK + b] * x;
        }
        for (int i = 0; i < n; i++) {
            if (columns - j >= LANES) add(row[i], j, sum[i], LANES, type);
            else add(row[i], j, sum[i], (int)(columns - j), type);
        }
    }
}

/* g[a] = sum_b h[b] core_t[b][a] */
INLINE void core_step(float *g, const void *h, int64_t at, const float *core_t, int rank, int type) {
    int a = 0;
    for (; a + 8 <= rank; a += 8) {
        eight sum = {0}, x;
        for (int b = 0; b < rank; b++) {
            memcpy(&x, core_t + b * rank + a, sizeof x);
            sum += value(h, at + b, type) * x;
        }
        memcpy(g + a, &sum, sizeof sum);
    }
    for (; a < rank; a++) {
        g[a] = 0;
        for (int b = 0; b < rank; b++) g[a] += value(h, at + b, type) * core_t[b * rank + a];
    }
}

/* What stays the same from call to call. */
struct layer {
    const float *cores;      /* (candidates, slices, rank, rank), each core transposed */
    const int64_t *index;    /* each token's candidate; a negative one leaves its token alone */
    const float *u;          /* (rank, ldu): U_B^T, each slice padded to a multiple of LANES columns */
    const int64_t *rows;     /* output columns of each slice */
    int64_t ldu, ldh, ldo;   /* values from one row to the next: of u, h, out */
    int32_t slices, rank, type;
};

INLINE void tokens_of(const struct layer *l, int64_t from, int64_t to, char *out, const void *h, int rank, int type) {
    const int size = type == BFLOAT16 ? 2 : 4;
    for (int64_t t = from; t < to; t += 2) {   /* two tokens share each load of u */
        int n = 0;
        int64_t token[2];
        for (int64_t i = t; i < to && i < t + 2; i++)
            if (l->index[i] >= 0) token[n++] = i;
        int64_t column = 0, padded = 0;
        for (int s = 0; s < l->slices; s++) {
            float g[2 * MAX_RANK];
            void *row[2];
            for (int i = 0; i < n; i++) {
                const float *core_t = l->cores + (l->index[token[i]] * l->slices + s) * rank * rank;
                core_step(g + i * MAX_RANK, h, token[i] * l->ldh + s * rank, core_t, rank, type);
                row[i] = out + (token[i] * l->ldo + column) * size;
            }
            if (n == 2) expand(row, 2, g, l->u + padded, l->ldu, l->rows[s], rank, type);
            else if (n == 1) expand(row, 1, g, l->u + padded, l->ldu, l->rows[s], rank, type);
            column += l->rows[s];
            padded += (l->rows[s] + LANES - 1) / LANES * LANES;
        }
    }
}

CLONES
static void chunk(const struct layer *l, int64_t from, int64_t to, char *out, const void *h) {
    if (l->type == BFLOAT16 && l->rank == 8) tokens_of(l, from, to, out, h, 8, BFLOAT16);
    else if (l->type == BFLOAT16 && l->rank == 16) tokens_of(l, from, to, out, h, 16, BFLOAT16);
    else if (l->type == BFLOAT16) tokens_of(l, from, to, out, h, l->rank, BFLOAT16);
    else tokens_of(l, from, to, out, h, l->rank, FLOAT32);
}

/* out: (tokens, ldo); h: (tokens, ldh), the slices' rank values side by side in front. Both are of l->type. */
void essa_shared_basis(const struct layer *l, void *out, const void *h, int64_t tokens) {
    enum { CHUNK = 8 };
#pragma omp parallel for schedule(static) if (tokens > CHUNK)
    for (int64_t t = 0; t < tokens; t += CHUNK) chunk(l, t, t + CHUNK < tokens ? t + CHUNK : tokens, out, h);
}
