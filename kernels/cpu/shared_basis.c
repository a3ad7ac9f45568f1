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
    for (int a = 0; a < rank; a++) g[a] = 0;
    for (int b = 0; b < rank; b++) {
        float x = value(h, at + b, type);
        for (int a = 0; a < rank; a++) g[a] += x * core_t[b * rank + a];
    }
}

INLINE void tokens_of(int64_t from, int64_t to, char *out, int64_t ldo, const void *h, int64_t ldh, const float *cores,
                      int64_t ldc, const int64_t *idx, const float *u, int64_t ldu, int slices, int rank,
                      const int64_t *rows, int type) {
    const int size = type == BFLOAT16 ? 2 : 4;
    for (int64_t t = from; t < to; t += 2) {   /* two tokens share each load of u */
        int n = 0;
        int64_t token[2];
        for (int64_t i = t; i < to && i < t + 2; i++)
            if (idx[i] >= 0) token[n++] = i;
        int64_t column = 0, padded = 0;
        for (int s = 0; s < slices; s++) {
            float g[2 * MAX_RANK];
            void *row[2];
            for (int i = 0; i < n; i++) {
                core_step(g + i * MAX_RANK, h, token[i] * ldh + s * rank,
                          cores + idx[token[i]] * ldc + s * rank * rank, rank, type);
                row[i] = out + (token[i] * ldo + column) * size;
            }
            if (n == 2) expand(row, 2, g, u + padded, ldu, rows[s], rank, type);
            else if (n == 1) expand(row, 1, g, u + padded, ldu, rows[s], rank, type);
            column += rows[s];
            padded += (rows[s] + LANES - 1) / LANES * LANES;
        }
    }
}

CLONES
static void chunk(int64_t from, int64_t to, char *out, int64_t ldo, const void *h, int64_t ldh, const float *cores,
                  int64_t ldc, const int64_t *idx, const float *u, int64_t ldu, int slices, int rank,
                  const int64_t *rows, int type) {
#define CALL(RANK, TYPE) tokens_of(from, to, out, ldo, h, ldh, cores, ldc, idx, u, ldu, slices, RANK, rows, TYPE)
    if (type == BFLOAT16 && rank == 8) CALL(8, BFLOAT16);
    else if (type == BFLOAT16 && rank == 16) CALL(16, BFLOAT16);
    else if (type == BFLOAT16) CALL(rank, BFLOAT16);
    else CALL(rank, FLOAT32);
#undef CALL
}

/* out: (tokens, ldo); h: (tokens, ldh), slices x rank values in front; cores: row idx[t], of ldc values, starts with
 * this layer's (slices, rank, rank), each transposed; u: (rank, ldu) float32, rows[s] columns a slice, each slice
 * padded to a multiple of LANES. A negative idx[t] leaves its token alone. out and h are of `type`, all else float32. */
void essa_shared_basis(void *out, int64_t ldo, const void *h, int64_t ldh, const float *cores, int64_t ldc,
                       const int64_t *idx, const float *u, int64_t ldu, int64_t tokens, int slices, int rank,
                       const int64_t *rows, int type) {
    enum { CHUNK = 8 };
#pragma omp parallel for schedule(static) if (tokens > CHUNK)
    for (int64_t t = 0; t < tokens; t += CHUNK)
        chunk(t, t + CHUNK < tokens ? t + CHUNK : tokens, out, ldo, h, ldh, cores, ldc, idx, u, ldu, slices, rank,
              rows, type);
}
