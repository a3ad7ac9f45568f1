#include "portable.h"

// Adds the sum over i of mix(words[i] + (i + 1) golden) mod 2^64 to *total.
ESSA_KERNEL(256) checksum_kernel(const uint64_t* words, int64_t count, uint64_t* total) {
    uint64_t sum = 0;
    for (int64_t i = int64_t(block_x()) * 256 + thread_x(); i < count; i += int64_t(blocks_x()) * 256) {
        uint64_t x = words[i] + uint64_t(i + 1) * 0x9E3779B97F4A7C15ull;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
        sum += x ^ (x >> 31);
    }
    add_to_total(total, sum);
}

ESSA_API int essa_checksum(const uint64_t* words, int64_t count, uint64_t* total, void* stream) {
    const int64_t blocks = (count + 255) / 256;
    ESSA_LAUNCH(checksum_kernel, unsigned(blocks < 2048 ? blocks : 2048), 1, 256, stream, words, count, total);
    return launch_status();
}
