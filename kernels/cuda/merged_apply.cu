#include "philox.h"

// Fields of a row of the table.
enum { WEIGHT, PRISTINE, STRIDE, PRISTINE_STRIDE, ROWS, COLUMNS, FIRST_ROW, FIRST_COLUMN, FIELDS };
enum { ROUNDING_STREAM = 0x5EED };   // fourth counter word; the search's streams are 0, 1, 2

// left = U_B C, kept transposed (rank, total_rows): one thread a row.
ESSA_KERNEL(256) left_kernel(const int32_t* tiles, const int64_t* table, const float* u_t, const float* cores,
                             float* left, int64_t total_rows, int rank, int tile_rows) {
    const int target = tiles[2 * block_x()];
    const int64_t* entry = table + int64_t(target) * FIELDS;
    for (int local = int(thread_x()); local < tile_rows; local += 256) {
        const int64_t row = int64_t(tiles[2 * block_x() + 1]) + local;
        if (row >= entry[ROWS]) return;
        const float* core = cores + int64_t(target) * rank * rank;
        for (int j = 0; j < rank; ++j) {
            float sum = 0.0f;
            for (int i = 0; i < rank; ++i) sum += u_t[i * total_rows + entry[FIRST_ROW] + row] * core[i * rank + j];
            left[j * total_rows + entry[FIRST_ROW] + row] = sum;
        }
    }
}

ESSA_DEVICE uint16_t to_bf16_stochastic(float x, uint32_t noise) {
    return x != x ? 0x7FC0 : uint16_t((float_to_bits(x) + noise) >> 16);
}

struct MergeArguments {
    const int32_t* tiles;      // (n, 3): target, first row, first column
    const int64_t* table;      // (P, 8)
    const float* left;         // (rank, total_rows)
    const float* v_t;          // (rank, total_columns)
    int64_t total_rows, total_columns;
    uint64_t seed;
    int32_t rank, tile_rows, tile_columns;
};

// W = round(W_0 + left V_A^T), one tile a block; a thread makes 8 columns of COPIES rows at a time.
template <int TYPE, bool STOCHASTIC, bool VECTOR>
ESSA_KERNEL(128) merged_kernel(MergeArguments p) {
    enum { COPIES = 4 };
    const int32_t* tile = p.tiles + 3 * int64_t(block_x());
    const int64_t* entry = p.table + int64_t(tile[0]) * FIELDS;
    const int rows = int(entry[ROWS]), columns = int(entry[COLUMNS]);
    const int64_t stride = entry[STRIDE], pristine_stride = entry[PRISTINE_STRIDE];
    const float* left_0 = p.left + entry[FIRST_ROW];
    const float* v_0 = p.v_t + entry[FIRST_COLUMN];
    const int chunks = p.tile_columns / 8, lanes = 128 / chunks;
    const int column = tile[2] + int(thread_x()) % chunks * 8;
    if (column >= columns) return;
    const int row_end = tile[1] + p.tile_rows < rows ? tile[1] + p.tile_rows : rows;
    void* weight = global_pointer(entry[WEIGHT]);
    const void* pristine = global_pointer(entry[PRISTINE]);

    for (int row_0 = tile[1] + int(thread_x()) / chunks; row_0 < row_end; row_0 += lanes * COPIES) {
        float w[COPIES][8], update[COPIES][8] = {};
        ESSA_UNROLL
        for (int c = 0; c < COPIES; ++c) {               // all loads first: they are what takes time
            const int row = row_0 + c * lanes;
            const int64_t at = row * pristine_stride + column;
            if (VECTOR) {
                if (row < row_end) load_8<TYPE>(pristine, at, w[c]);
            } else {
                ESSA_UNROLL
                for (int i = 0; i < 8; ++i)
                    w[c][i] = row < row_end && column + i < columns ? load_element<TYPE>(pristine, at + i) : 0.0f;
            }
        }
        for (int j = 0; j < p.rank; ++j) {
            float v[8];
            load_8<FP32>(v_0, j * p.total_columns + column, v);   // padded to 8 columns a target, so always in bounds
            ESSA_UNROLL
            for (int c = 0; c < COPIES; ++c) {
                const int row = row_0 + c * lanes;
                const float left = row < row_end ? left_0[j * p.total_rows + row] : 0.0f;
                ESSA_UNROLL
                for (int i = 0; i < 8; ++i) update[c][i] += left * v[i];
            }
        }
        ESSA_UNROLL
        for (int c = 0; c < COPIES; ++c) {
            const int row = row_0 + c * lanes;
            if (row >= row_end) break;
            const int64_t at = row * stride + column;
            ESSA_UNROLL
            for (int i = 0; i < 8; ++i) w[c][i] += update[c][i];
            if (STOCHASTIC) {
                // Eight weights share a block: weight i takes halfword i, low half of a word first.
                const Block noise = philox(uint32_t(column / 8), uint32_t(row), uint32_t(tile[0]), ROUNDING_STREAM, p.seed);
                uint16_t bits[8];
                ESSA_UNROLL
                for (int i = 0; i < 8; ++i)
                    bits[i] = to_bf16_stochastic(w[c][i], i % 2 ? noise.w[i / 2] >> 16 : noise.w[i / 2] & 0xFFFFu);
                uint16_t* to = static_cast<uint16_t*>(weight) + at;
                if (VECTOR) {
                    store_vector(to, {bits[0] | uint32_t(bits[1]) << 16, bits[2] | uint32_t(bits[3]) << 16,
                                      bits[4] | uint32_t(bits[5]) << 16, bits[6] | uint32_t(bits[7]) << 16});
                } else {
                    ESSA_UNROLL
                    for (int i = 0; i < 8; ++i) if (column + i < columns) to[i] = bits[i];
                }
            } else if (VECTOR) {
                store_8<TYPE>(weight, at, w[c]);
            } else {
                ESSA_UNROLL
                for (int i = 0; i < 8; ++i) if (column + i < columns) store_element<TYPE>(weight, at + i, w[c][i]);
            }
        }
    }
}

template <int TYPE, bool STOCHASTIC>
static int launch_merged(const MergeArguments& p, int tiles, int vector, void* stream) {
    if (vector) ESSA_LAUNCH((merged_kernel<TYPE, STOCHASTIC, true>), tiles, 1, 128, stream, p);
    else ESSA_LAUNCH((merged_kernel<TYPE, STOCHASTIC, false>), tiles, 1, 128, stream, p);
    return launch_status();
}

ESSA_API int essa_merged_apply(const int32_t* row_tiles, int32_t row_tile_count, int32_t left_rows,
                               const int32_t* tiles, int32_t tile_count, int32_t tile_rows, int32_t tile_columns,
                               const int64_t* table, const float* u_t, int64_t total_rows, const float* v_t,
                               int64_t total_columns, const float* cores, float* left, int32_t rank, int32_t type,
                               int32_t stochastic, uint64_t seed, int32_t vector, void* stream) {
    ESSA_LAUNCH(left_kernel, row_tile_count, 1, 256, stream,
                row_tiles, table, u_t, cores, left, total_rows, rank, left_rows);
    const int status = launch_status();
    if (status) return status;
    const MergeArguments p = {tiles, table, left, v_t, total_rows, total_columns, seed, rank, tile_rows, tile_columns};
    if (stochastic) return type == BF16 ? launch_merged<BF16, true>(p, tile_count, vector, stream) : -1;
    ESSA_FOR_TYPE(type, return (launch_merged<TYPE, false>(p, tile_count, vector, stream)))
    return -1;
}
