#include "philox.h"

// out[k, index] for pairs of indices of candidate k; grid (pairs / 128, candidates).
ESSA_KERNEL(128) normals_kernel(double* out, const int64_t* candidates, int64_t size, int64_t out_stride,
                                uint32_t generation, uint32_t stream_word, uint64_t seed) {
    const int64_t pair = int64_t(block_x()) * 128 + thread_x();
    if (2 * pair >= size) return;
    const Block block = philox(uint32_t(pair), uint32_t(candidates[block_y()]), generation, stream_word, seed);
    double* to = out + int64_t(block_y()) * out_stride + 2 * pair;
    to[0] = inverse_normal(uniform(block.w[0], block.w[1]));
    if (2 * pair + 1 < size) to[1] = inverse_normal(uniform(block.w[2], block.w[3]));
}

ESSA_API int essa_normals(double* out, const int64_t* candidates, int64_t count, int64_t size, int64_t out_stride,
                          uint32_t generation, uint32_t stream_word, uint64_t seed, void* stream) {
    const int64_t pairs = (size + 1) / 2;
    ESSA_LAUNCH(normals_kernel, unsigned((pairs + 127) / 128), unsigned(count), 128, stream,
                out, candidates, size, out_stride, generation, stream_word, seed);
    return launch_status();
}
