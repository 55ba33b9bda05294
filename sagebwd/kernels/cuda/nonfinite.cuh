// NaN or infinity in gives NaN out: a sum that overflowed to infinity says that an input was not finite.
#pragma once

#include "ptx.cuh"

#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ float infinite_to_nan(float x) {
    return fabsf(x) == INFINITE ? __int_as_float(0x7fffffff) : x;
}
