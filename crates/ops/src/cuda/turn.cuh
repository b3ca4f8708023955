// Blocks that wait for one another: a number in global memory that says whose turn it is. What was written before a
// turn is passed on is seen by who reads it.
#pragma once

__device__ __forceinline__ int turn_at(const int* turn) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(turn) : "memory");
  return value;
}
__device__ __forceinline__ void set_turn(int* turn, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(value) : "memory");
}
