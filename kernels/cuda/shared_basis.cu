#include "portable.h"

struct BasisArguments {
    void* out;                 // (T, m), row stride out_stride
    const void* h;             // (T, slices, rank), strides h_t, h_s, 1; g where cores is null
    const float* cores;        // (K, slices, rank, rank) or null
    const void* idx;           // (T,) int32 or int64; -1: no candidate
    const void* u_t;           // (rank, m)
    int64_t out_stride, h_t, h_s;
    int32_t tokens, candidates, slices, rank, rows[3], h_type, u_type, idx_is_64;
};

ESSA_DEVICE int64_t candidate_of(const BasisArguments& p, int64_t token) {
    return p.idx_is_64 ? static_cast<const int64_t*>(p.idx)[token] : static_cast<const int32_t*>(p.idx)[token];
}

// g[t, s] = h[t, s] core^T: one thread an output.
ESSA_KERNEL(128) core_step_kernel(BasisArguments p, float* g) {
    const int64_t at = int64_t(block_x()) * 128 + thread_x();
    if (at >= int64_t(p.tokens) * p.slices * p.rank) return;
    const int j = int(at % p.rank);
    const int64_t slice = at / p.rank % p.slices, token = at / p.rank / p.slices;
    const int64_t candidate = candidate_of(p, token);
    float sum = 0.0f;
    if (candidate >= 0 && candidate < p.candidates) {
        const float* core = p.cores + (candidate * p.slices + slice) * p.rank * p.rank;
        for (int i = 0; i < p.rank; ++i)
            sum += load_any(p.h, token * p.h_t + slice * p.h_s + i, p.h_type) * core[j * p.rank + i];
    }
    g[at] = sum;
}

// out[t, slice s] += (h[t, s] core^T) U_B^T. One warp: one token, CHUNKS x 32 x 8 outputs of one slice.
// Every thread of the warp makes all of h core^T for itself: r^2 products against the r x 8 x CHUNKS that
// follow, and no second launch. A token's sum has one fixed order, whatever else is in the batch.
enum { CHUNKS = 2, WARP_COLUMNS = CHUNKS * 32 * 8 };
ESSA_HOST_DEVICE int tiles_of(int rows) { return (rows + WARP_COLUMNS - 1) / WARP_COLUMNS; }

template <int RANK, int TYPE, bool VECTOR>
ESSA_KERNEL(128) expand_kernel(BasisArguments p) {
    const int64_t token = block_x();
    // Tiles never straddle slices: q's first, then k's, then v's.
    const int tile = int(block_y()) * 4 + int(thread_x()) / 32;
    const int tiles_0 = tiles_of(p.rows[0]), tiles_1 = tiles_0 + tiles_of(p.rows[1]);
    if (tile >= tiles_1 + tiles_of(p.rows[2])) return;
    const int slice = (tile >= tiles_0) + (tile >= tiles_1);
    const int start = slice == 0 ? 0 : slice == 1 ? p.rows[0] : p.rows[0] + p.rows[1];
    const int rows = slice == 0 ? p.rows[0] : slice == 1 ? p.rows[1] : p.rows[2];
    const int first = (tile - (slice == 0 ? 0 : slice == 1 ? tiles_0 : tiles_1)) * WARP_COLUMNS;
    const int64_t m = int64_t(p.rows[0]) + p.rows[1] + p.rows[2];
    const int64_t h_at = token * p.h_t + slice * p.h_s;
    float g[RANK] = {};
    if (p.cores) {
        const int64_t candidate = candidate_of(p, token);
        if (candidate < 0 || candidate >= p.candidates) return;
        const float* core = p.cores + (candidate * p.slices + slice) * p.rank * p.rank;
        for (int i = 0; i < p.rank; ++i) {
            const float h_i = load_any(p.h, h_at + i, p.h_type);
            ESSA_UNROLL
            for (int j = 0; j < RANK; ++j) if (j < p.rank) g[j] += h_i * core[j * p.rank + i];
        }
    } else {
        ESSA_UNROLL
        for (int j = 0; j < RANK; ++j) if (j < p.rank) g[j] = load_any(p.h, h_at + j, p.h_type);
    }
    ESSA_NO_UNROLL
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int column = first + (chunk * 32 + int(thread_x()) % 32) * 8;
        if (column >= rows) return;
        const int64_t from = start + column, at = token * p.out_stride + from;
        if (VECTOR) {
            float sum[8] = {}, x[8];
            ESSA_UNROLL
            for (int j = 0; j < RANK; ++j) {
                if (j >= p.rank) break;
                if (p.u_type == FP32) load_8<FP32>(p.u_t, j * m + from, x);
                else if (p.u_type == BF16) load_8<BF16>(p.u_t, j * m + from, x);
                else load_8<FP16>(p.u_t, j * m + from, x);
                ESSA_UNROLL
                for (int i = 0; i < 8; ++i) sum[i] += g[j] * x[i];
            }
            load_8<TYPE>(p.out, at, x);
            ESSA_UNROLL
            for (int i = 0; i < 8; ++i) x[i] += sum[i];
            store_8<TYPE>(p.out, at, x);
        } else {
            ESSA_NO_UNROLL
            for (int i = 0; i < 8 && column + i < rows; ++i) {
                float sum = 0.0f;
                ESSA_UNROLL   // g lives in registers, so j must be a constant
                for (int j = 0; j < RANK; ++j) if (j < p.rank) sum += g[j] * load_any(p.u_t, j * m + from + i, p.u_type);
                store_element<TYPE>(p.out, at + i, load_element<TYPE>(p.out, at + i) + sum);
            }
        }
    }
}

template <int RANK, int TYPE, bool VECTOR>
static int launch_expand(const BasisArguments& p, void* stream) {
    int tiles = 0;
    for (int rows : p.rows) tiles += tiles_of(rows);
    ESSA_LAUNCH((expand_kernel<RANK, TYPE, VECTOR>), p.tokens, (tiles + 3) / 4, 128, stream, p);
    return launch_status();
}

ESSA_API int essa_core_step(const void* h, int64_t h_t, int64_t h_s, int32_t h_type, const float* cores,
                            const void* idx, int32_t idx_is_64, float* g, int32_t tokens, int32_t candidates,
                            int32_t slices, int32_t rank, void* stream) {
    const BasisArguments p = {nullptr, h, cores, idx, nullptr, 0, h_t, h_s,
                              tokens, candidates, slices, rank, {0, 0, 0}, h_type, FP32, idx_is_64};
    const int64_t blocks = (int64_t(tokens) * slices * rank + 127) / 128;
    ESSA_LAUNCH(core_step_kernel, unsigned(blocks), 1, 128, stream, p, g);
    return launch_status();
}

ESSA_API int essa_expand(void* out, int64_t out_stride, int32_t type, const void* h, int64_t h_t, int64_t h_s,
                         int32_t h_type, const float* cores, const void* idx, int32_t idx_is_64, const void* u_t,
                         int32_t u_type, int32_t tokens, int32_t candidates, int32_t slices, int32_t rank,
                         int32_t rows_0, int32_t rows_1, int32_t rows_2, int32_t vector, void* stream) {
    const BasisArguments p = {out, h, cores, idx, u_t, out_stride, h_t, h_s, tokens, candidates, slices, rank,
                              {rows_0, rows_1, rows_2}, h_type, u_type, idx_is_64};
    if (rank < 1 || rank > 32) return -1;
    ESSA_FOR_TYPE(type, {
        if (!vector) return launch_expand<32, TYPE, false>(p, stream);
        if (rank <= 2) return launch_expand<2, TYPE, true>(p, stream);
        if (rank <= 8) return launch_expand<8, TYPE, true>(p, stream);
        if (rank <= 16) return launch_expand<16, TYPE, true>(p, stream);
        return launch_expand<32, TYPE, true>(p, stream);
    })
    return -1;
}
