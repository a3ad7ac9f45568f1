// One source, two compilers. nvcc builds the kernels for GPUs; a plain C++ compiler builds the same
// text as loops over blocks and threads, so that its arithmetic can be tested without a GPU. That
// works because no kernel here needs a barrier or shared memory: a thread is a function of its
// indices. Only the few primitives below differ between the two.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define ESSA_DEVICE __device__ __forceinline__
#define ESSA_HOST_DEVICE __host__ __device__ __forceinline__
// Three blocks a multiprocessor: told so, ptxas spends registers instead of spilling a few of them.
#define ESSA_KERNEL(threads) __global__ void __launch_bounds__(threads, 384 / (threads) > 1 ? 384 / (threads) : 1)
#define ESSA_UNROLL _Pragma("unroll")
#define ESSA_NO_UNROLL _Pragma("unroll 1")
#define ESSA_LAUNCH(kernel, grid_x, grid_y, threads, stream, ...) \
    kernel<<<dim3(grid_x, grid_y), threads, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)

ESSA_DEVICE unsigned block_x() { return blockIdx.x; }
ESSA_DEVICE unsigned block_y() { return blockIdx.y; }
ESSA_DEVICE unsigned thread_x() { return threadIdx.x; }
ESSA_DEVICE unsigned blocks_x() { return gridDim.x; }

inline int launch_status() { return static_cast<int>(cudaGetLastError()); }

// An address from a table; saying that it is global memory spares the generic load and store.
ESSA_DEVICE void* global_pointer(int64_t address) {
    void* pointer = reinterpret_cast<void*>(address);
    __builtin_assume(__isGlobal(pointer));
    return pointer;
}

struct alignas(16) Vector4 { uint32_t x, y, z, w; };
ESSA_DEVICE void store_vector(void* to, Vector4 v) { *static_cast<Vector4*>(to) = v; }
ESSA_DEVICE Vector4 load_vector(const void* from) { return *static_cast<const Vector4*>(from); }
ESSA_DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
ESSA_DEVICE uint32_t float_to_bits(float x) { return __float_as_uint(x); }
ESSA_DEVICE double bits_to_double(int64_t bits) { return __longlong_as_double(bits); }
ESSA_DEVICE int64_t double_to_bits(double x) { return __double_as_longlong(x); }

// Rounding to nearest even is asked for by name, never left to a default.
ESSA_DEVICE uint16_t to_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
ESSA_DEVICE uint16_t to_fp16(float x) { return __half_as_ushort(__float2half_rn(x)); }
ESSA_DEVICE float from_fp16(uint16_t x) { return __half2float(__ushort_as_half(x)); }

ESSA_DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }

// float64 operations that the compiler may not fuse into multiply-add.
ESSA_DEVICE double mul(double a, double b) { return __dmul_rn(a, b); }
ESSA_DEVICE double add(double a, double b) { return __dadd_rn(a, b); }
ESSA_DEVICE double sub(double a, double b) { return __dadd_rn(a, -b); }
ESSA_DEVICE double divide(double a, double b) { return __ddiv_rn(a, b); }
ESSA_DEVICE double square_root(double a) { return __dsqrt_rn(a); }

// Adds every thread's value to *total: one atomic a warp. Integer addition commutes, so the result
// does not depend on the order. All threads of the block must call it.
ESSA_DEVICE void add_to_total(uint64_t* total, uint64_t value) {
    ESSA_UNROLL
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_down_sync(0xFFFFFFFFu, value, offset);
    if ((threadIdx.x & 31) == 0) atomicAdd(reinterpret_cast<unsigned long long*>(total), value);
}

#else  // a plain C++ compiler, -ffp-contract=off

#include <cmath>

#define ESSA_DEVICE static inline
#define ESSA_HOST_DEVICE static inline
#define ESSA_KERNEL(threads) static void
#define ESSA_UNROLL
#define ESSA_NO_UNROLL

struct HostIndex { unsigned block_x, block_y, thread_x, blocks_x; };
static thread_local HostIndex host_index;
#define ESSA_LAUNCH(kernel, grid_x, grid_y, threads, stream, ...)                       \
    do {                                                                                \
        (void)(stream);                                                                 \
        host_index.blocks_x = (grid_x);                                                 \
        for (unsigned by = 0; by < unsigned(grid_y); ++by)                              \
            for (unsigned bx = 0; bx < unsigned(grid_x); ++bx)                          \
                for (unsigned tx = 0; tx < unsigned(threads); ++tx) {                   \
                    host_index.block_x = bx; host_index.block_y = by;                   \
                    host_index.thread_x = tx;                                           \
                    kernel(__VA_ARGS__);                                                \
                }                                                                       \
    } while (0)

static inline unsigned block_x() { return host_index.block_x; }
static inline unsigned block_y() { return host_index.block_y; }
static inline unsigned thread_x() { return host_index.thread_x; }
static inline unsigned blocks_x() { return host_index.blocks_x; }
static inline int launch_status() { return 0; }
static inline void* global_pointer(int64_t address) { return reinterpret_cast<void*>(address); }

struct Vector4 { uint32_t x, y, z, w; };
static inline void store_vector(void* to, Vector4 v) { std::memcpy(to, &v, 16); }
static inline Vector4 load_vector(const void* from) { Vector4 v; std::memcpy(&v, from, 16); return v; }
static inline float bits_to_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline uint32_t float_to_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
static inline double bits_to_double(int64_t bits) { double x; std::memcpy(&x, &bits, 8); return x; }
static inline int64_t double_to_bits(double x) { int64_t bits; std::memcpy(&bits, &x, 8); return bits; }

static inline uint16_t to_bf16(float x) {
    const uint32_t bits = float_to_bits(x);
    if (x != x) return 0x7FFF;  // what the GPU's conversion gives
    return uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
static inline uint16_t to_fp16(float x) {
    const uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000u;
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return 0x7FFF;
    if (magnitude >= 0x477FF000u) return uint16_t(sign | 0x7C00u);   // rounds to infinity
    if (magnitude < 0x38800000u) {                                   // subnormal: multiples of 2^-24
        const float scaled = bits_to_float(magnitude) * 16777216.0f; // exact
        return uint16_t(sign | uint32_t(std::nearbyint(scaled)));
    }
    magnitude += 0xFFFu + ((magnitude >> 13) & 1u);
    return uint16_t(sign | ((magnitude - 0x38000000u) >> 13));
}
static inline float from_fp16(uint16_t x) {
    const uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = x >> 10 & 31, mantissa = x & 0x3FFu;
    if (exponent == 0) return bits_to_float(sign | float_to_bits(float(mantissa) * (1.0f / 16777216.0f)));
    if (exponent == 31) return bits_to_float(sign | 0x7F800000u | mantissa << 13);
    return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
}
static inline uint32_t multiply_high(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
static inline double mul(double a, double b) { return a * b; }
static inline double add(double a, double b) { return a + b; }
static inline double sub(double a, double b) { return a - b; }
static inline double divide(double a, double b) { return a / b; }
static inline double square_root(double a) { return std::sqrt(a); }
static inline void add_to_total(uint64_t* total, uint64_t value) { *total += value; }

#endif

// Element types, by number across the C interface.
enum ElementType { FP32 = 0, FP16 = 1, BF16 = 2 };

ESSA_DEVICE float from_bf16(uint16_t x) { return bits_to_float(uint32_t(x) << 16); }

template <int TYPE> ESSA_DEVICE float load_element(const void* data, int64_t at) {
    if (TYPE == FP32) return static_cast<const float*>(data)[at];
    const uint16_t bits = static_cast<const uint16_t*>(data)[at];
    return TYPE == BF16 ? from_bf16(bits) : from_fp16(bits);
}

// The type is the same for all threads, so this branch costs nothing that matters.
ESSA_DEVICE float load_any(const void* data, int64_t at, int type) {
    return type == FP32 ? load_element<FP32>(data, at)
                        : type == BF16 ? load_element<BF16>(data, at) : load_element<FP16>(data, at);
}

template <int TYPE> ESSA_DEVICE void store_element(void* data, int64_t at, float x) {
    if (TYPE == FP32) static_cast<float*>(data)[at] = x;
    else static_cast<uint16_t*>(data)[at] = TYPE == BF16 ? to_bf16(x) : to_fp16(x);
}

template <int TYPE> ESSA_DEVICE uint32_t pack(float low, float high) {
    return TYPE == BF16 ? uint32_t(to_bf16(low)) | uint32_t(to_bf16(high)) << 16
                        : uint32_t(to_fp16(low)) | uint32_t(to_fp16(high)) << 16;
}

// Eight consecutive elements; `at` is a multiple of 8 and data is 16-byte aligned.
template <int TYPE> ESSA_DEVICE void store_8(void* data, int64_t at, const float* x) {
    if (TYPE == FP32) {
        float* to = static_cast<float*>(data) + at;
        store_vector(to, {float_to_bits(x[0]), float_to_bits(x[1]), float_to_bits(x[2]), float_to_bits(x[3])});
        store_vector(to + 4, {float_to_bits(x[4]), float_to_bits(x[5]), float_to_bits(x[6]), float_to_bits(x[7])});
    } else {
        store_vector(static_cast<uint16_t*>(data) + at, {pack<TYPE>(x[0], x[1]), pack<TYPE>(x[2], x[3]),
                                                         pack<TYPE>(x[4], x[5]), pack<TYPE>(x[6], x[7])});
    }
}

template <int TYPE> ESSA_DEVICE void load_8(const void* data, int64_t at, float* x) {
    if (TYPE == FP32) {
        const float* from = static_cast<const float*>(data) + at;
        const Vector4 a = load_vector(from), b = load_vector(from + 4);
        const uint32_t bits[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        ESSA_UNROLL
        for (int i = 0; i < 8; ++i) x[i] = bits_to_float(bits[i]);
    } else {
        const Vector4 v = load_vector(static_cast<const uint16_t*>(data) + at);
        const uint32_t bits[4] = {v.x, v.y, v.z, v.w};
        ESSA_UNROLL
        for (int i = 0; i < 4; ++i) {
            const uint16_t low = uint16_t(bits[i] & 0xFFFFu), high = uint16_t(bits[i] >> 16);
            x[2 * i] = TYPE == BF16 ? from_bf16(low) : from_fp16(low);
            x[2 * i + 1] = TYPE == BF16 ? from_bf16(high) : from_fp16(high);
        }
    }
}

// Runs a statement with a constant TYPE for a type given by number.
#define ESSA_FOR_TYPE(number, ...)                                    \
    switch (number) {                                                 \
        case FP32: { constexpr int TYPE = FP32; __VA_ARGS__; break; } \
        case FP16: { constexpr int TYPE = FP16; __VA_ARGS__; break; } \
        case BF16: { constexpr int TYPE = BF16; __VA_ARGS__; break; } \
        default: break;                                               \
    }

#define ESSA_API extern "C" __attribute__((visibility("default")))
