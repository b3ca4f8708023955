// A semaphore between blocks: a number in global memory with the turn of the block that goes on. Writes before a release
// are visible after an acquire that reads its value.
#pragma once
#include "intrinsics.cuh"

__device__ __forceinline__ int semaphore_value(const int* turn) { return load_acquire(turn); }
__device__ __forceinline__ void set_semaphore(int* turn, int value) { store_release(turn, value); }
