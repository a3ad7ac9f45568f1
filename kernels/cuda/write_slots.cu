#include "portable.h"

// Fields of a row of the table.
enum { ADDRESS, SLOT_STRIDE, ROW_STRIDE, ROWS, FIRST_ROW, SLOTS, FIELDS };

struct SlotArguments {
    const int64_t* table;      // (P, 6)
    const int32_t* tiles;      // (n, 2): target, first row
    const float* u_t;          // (rank, total_rows)
    const float* m;            // (P, rank, width), the scale folded in, zero columns beyond the rank
    const float* s_a;          // (P, width)
    const float* s_b;          // (P, rank)
    const float* d_a;          // (K, P, rank), strides a_k, a_p, 1
    const float* d_b;
    const int64_t* slot_ids;   // (K,)
    int64_t a_k, a_p, b_k, b_p, total_rows;
    int32_t candidates, rank, width, tile_rows, group;
};

// One block: a tile of rows of one target for a group of candidates. A thread holds COPIES rows of U_B
// in registers and makes 8 columns (one 16-byte store in 16-bit types) of each for every candidate.
template <int RANK, int COPIES, int TYPE, bool VECTOR>
ESSA_KERNEL(128) write_slots_kernel(SlotArguments p) {
    const int target = p.tiles[2 * block_x()];
    const int64_t* entry = p.table + int64_t(target) * FIELDS;
    const int chunks = VECTOR ? p.width / 8 : 1;              // threads that share a row
    const int chunk = int(thread_x()) % chunks;
    const int lanes = 128 / chunks;                           // rows a pass
    const int first = p.tiles[2 * block_x() + 1];
    const int rows = int(entry[ROWS]);
    const int64_t slot_stride = entry[SLOT_STRIDE], row_stride = entry[ROW_STRIDE], slots = entry[SLOTS];
    const int columns = VECTOR ? 8 : p.width;                 // without vectors one thread makes a whole row
    void* base = global_pointer(entry[ADDRESS]);
    const int k_first = int(block_y()) * p.group;
    const int k_last = k_first + p.group < p.candidates ? k_first + p.group : p.candidates;

    for (int pass = 0; pass < p.tile_rows; pass += lanes * COPIES) {
        float u[COPIES][RANK];
        int row[COPIES];
        ESSA_UNROLL
        for (int c = 0; c < COPIES; ++c) {
            row[c] = first + pass + c * lanes + int(thread_x()) / chunks;
            if (pass + c * lanes + int(thread_x()) / chunks >= p.tile_rows) row[c] = rows;
            ESSA_UNROLL
            for (int i = 0; i < RANK; ++i)
                u[c][i] = i < p.rank && row[c] < rows
                    ? p.u_t[int64_t(i) * p.total_rows + entry[FIRST_ROW] + row[c]] : 0.0f;
        }
        ESSA_NO_UNROLL
        for (int k = k_first; k < k_last; ++k) {
            const int64_t slot = p.slot_ids[k];
            if (slot < 0 || slot >= slots) continue;   // skip this candidate, never a stray write
            const float* d_a = p.d_a + k * p.a_k + target * p.a_p;
            const float* d_b = p.d_b + k * p.b_k + target * p.b_p;
            ESSA_NO_UNROLL
            for (int column = chunk * 8; column < chunk * 8 + columns; column += 8) {
                float value[COPIES][8] = {};
                ESSA_UNROLL
                for (int i = 0; i < RANK; ++i) {
                    if (i >= p.rank) break;
                    const float b = p.s_b[target * p.rank + i] + d_b[i];
                    const float* m = p.m + (int64_t(target) * p.rank + i) * p.width + column;
                    float m_i[8];
                    if (VECTOR) {
                        load_8<FP32>(m, 0, m_i);
                    } else {
                        ESSA_UNROLL
                        for (int j = 0; j < 8; ++j) m_i[j] = column + j < p.width ? m[j] : 0.0f;
                    }
                    ESSA_UNROLL
                    for (int c = 0; c < COPIES; ++c) {
                        const float ub = u[c][i] * b;
                        ESSA_UNROLL
                        for (int j = 0; j < 8; ++j) value[c][j] += ub * m_i[j];
                    }
                }
                float a[8];
                ESSA_UNROLL
                for (int j = 0; j < 8; ++j) {
                    const int at = column + j;
                    a[j] = at < p.width ? p.s_a[target * p.width + at] + (at < p.rank ? d_a[at] : 0.0f) : 0.0f;
                }
                ESSA_UNROLL
                for (int c = 0; c < COPIES; ++c) {
                    if (row[c] >= rows) continue;
                    ESSA_UNROLL
                    for (int j = 0; j < 8; ++j) value[c][j] *= a[j];
                    const int64_t at = slot * slot_stride + row[c] * row_stride + column;
                    if (VECTOR) {
                        store_8<TYPE>(base, at, value[c]);
                    } else {
                        ESSA_UNROLL
                        for (int j = 0; j < 8; ++j)
                            if (column + j < p.width) store_element<TYPE>(base, at + j, value[c][j]);
                    }
                }
            }
        }
    }
}

template <int RANK, int TYPE, bool VECTOR>
static int launch_write_slots(const SlotArguments& p, int tiles, void* stream) {
    constexpr int COPIES = VECTOR ? 2 : 1;   // rows a thread holds: reuses each load of M, and fits without spilling
    ESSA_LAUNCH((write_slots_kernel<RANK, COPIES, TYPE, VECTOR>), tiles, (p.candidates + p.group - 1) / p.group, 128,
                stream, p);
    return launch_status();
}

ESSA_API int essa_write_slots(const int64_t* table, const int32_t* tiles, int32_t tile_count, const float* u_t,
                              int64_t total_rows, const float* m, const float* s_a, const float* s_b,
                              const float* d_a, int64_t a_k, int64_t a_p, const float* d_b, int64_t b_k, int64_t b_p,
                              const int64_t* slot_ids, int32_t candidates, int32_t rank, int32_t width,
                              int32_t tile_rows, int32_t group, int32_t type, int32_t vector, void* stream) {
    const SlotArguments p = {table, tiles, u_t, m, s_a, s_b, d_a, d_b, slot_ids, a_k, a_p, b_k, b_p, total_rows,
                             candidates, rank, width, tile_rows, group};
    if (rank < 1 || rank > 32) return -1;
    ESSA_FOR_TYPE(type, {
        if (!vector && rank <= 2) return launch_write_slots<2, TYPE, false>(p, tile_count, stream);
        if (!vector) return launch_write_slots<32, TYPE, false>(p, tile_count, stream);
        if (rank <= 2) return launch_write_slots<2, TYPE, true>(p, tile_count, stream);
        if (rank <= 8) return launch_write_slots<8, TYPE, true>(p, tile_count, stream);
        if (rank <= 16) return launch_write_slots<16, TYPE, true>(p, tile_count, stream);
        return launch_write_slots<32, TYPE, true>(p, tile_count, stream);
    })
    return -1;
}
