// A semaphore between blocks: a number in global memory with the turn of the block that goes on. Writes before a release
// are visible after an acquire that reads its value.
#pragma once

__device__ __forceinline__ int semaphore_value(const int* turn) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(turn) : "memory");
  return value;
}
__device__ __forceinline__ void set_semaphore(int* turn, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(value) : "memory");
}
