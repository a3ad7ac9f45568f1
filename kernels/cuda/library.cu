// What the Python side asks a built library: which source it was made from, whether it was made for a
// GPU, and the text of an error.
#include "portable.h"

#ifndef ESSA_SOURCE_DIGEST
#define ESSA_SOURCE_DIGEST "unknown"
#endif

ESSA_API const char* essa_source_digest() { return ESSA_SOURCE_DIGEST; }

#ifdef __CUDACC__
ESSA_API int essa_for_gpu() { return 1; }
ESSA_API const char* essa_error(int status) {
    return status < 0 ? "argument out of range" : cudaGetErrorString(static_cast<cudaError_t>(status));
}
#else
ESSA_API int essa_for_gpu() { return 0; }
ESSA_API const char* essa_error(int) { return "argument out of range"; }
#endif
