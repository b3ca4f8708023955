// dk and dv of a tile of keys whose query heads two blocks share: the one that is ready first leaves its sums, the other adds
// them to its own. A sum of two is the same in either order, so two runs give the same bits.
#pragma once
#include "semaphore.cuh"

#define SHARE_PIECES ((WIDE + WIDE_V) / 8)  // float4 of a thread

// Exchanges the sums of a warpgroup, whose barrier is `id`: true if they are now those of both blocks, false if they were
// left in `place` for the other. `ready` counts who came and says that the sums lie there; `before` is in shared memory.
__device__ __forceinline__ bool joined(float (&dk)[WIDE / 2], float (&dv)[WIDE_V / 2], float4* place, int* ready, int* before,
                                       int id) {
  const int thread = threadIdx.x % 128;
  if (thread == 0) *before = atomicAdd(ready, 1);
  meet<128>(id);
  float4* const piece = place + thread;
  if (*before == 0) {
#pragma unroll
    for (int i = 0; i < WIDE / 8; i++)
      piece[i * 128] = make_float4(dk[4 * i], dk[4 * i + 1], dk[4 * i + 2], dk[4 * i + 3]);
#pragma unroll
    for (int i = 0; i < WIDE_V / 8; i++)
      piece[(WIDE / 8 + i) * 128] = make_float4(dv[4 * i], dv[4 * i + 1], dv[4 * i + 2], dv[4 * i + 3]);
    __threadfence();
    meet<128>(id);
    if (thread == 0) set_semaphore(ready + 1, 1);
    return false;
  }
  if (thread == 0)
    while (!semaphore_value(ready + 1)) {}
  meet<128>(id);
#pragma unroll
  for (int i = 0; i < WIDE / 8; i++) {
    const float4 other = __ldcg(piece + i * 128);
    dk[4 * i] += other.x, dk[4 * i + 1] += other.y, dk[4 * i + 2] += other.z, dk[4 * i + 3] += other.w;
  }
#pragma unroll
  for (int i = 0; i < WIDE_V / 8; i++) {
    const float4 other = __ldcg(piece + (WIDE / 8 + i) * 128);
    dv[4 * i] += other.x, dv[4 * i + 1] += other.y, dv[4 * i + 2] += other.z, dv[4 * i + 3] += other.w;
  }
  return true;
}
