// The largest magnitudes of a step enter the histories; the factors of the next step follow. One block: a warp has the
// history of one quantiser at a time, a few MB at most.
#include "types.cuh"
#include "codes.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
amax_history(const float* __restrict__ limits, const int* __restrict__ tops, u32* __restrict__ amax,
             float* __restrict__ history, float* __restrict__ factors, int* __restrict__ steps,
             float* __restrict__ clipped, float* __restrict__ squares) {
  int bad = 0, over = 0;
  for (int q = threadIdx.x; q < COUNT; q += THREADS) {
    bad |= amax[q] >= 0x7f800000u;
    over += factors[q] > 0.0f && __uint_as_float(amax[q]) * factors[q] > limits[q];
  }
  if (__syncthreads_or(bad)) {
    for (int q = threadIdx.x; q < COUNT; q += THREADS) amax[q] = 0;
    if (threadIdx.x == 0) {
      *squares = __uint_as_float(0x7fffffffu);
      *clipped = __uint_as_float(0x7fffffffu);
    }
    return;
  }
  __shared__ int total, done;
  if (threadIdx.x == 0) {
    total = 0;
    done = *steps == 0x7fffffff ? *steps : *steps + 1;
    *steps = done;
  }
  __syncthreads();
  if (over) atomicAdd(&total, over);
#if WINDOW > 0
  const int lane = threadIdx.x & 31;
  for (int q = threadIdx.x >> 5; q < COUNT; q += THREADS / 32) {
    float* row = history + (size_t)q * WINDOW;
    const u32 now = amax[q];
    u32 most = 0;
    int entries = 0;
    for (int i = lane; i < WINDOW; i += 32) entries += row[i] > 0.0f;
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) entries += __shfl_xor_sync(0xffffffffu, entries, offset);
    if (now && entries == WINDOW) {
      // Everything moves one place: a warp reads before it writes.
      for (int first = 0; first < WINDOW; first += 32) {
        const int i = first + lane;
        const float next = i + 1 < WINDOW ? row[i + 1] : __uint_as_float(now);
        __syncwarp();
        if (i < WINDOW) row[i] = next;
        __syncwarp();
      }
    } else if (now && lane == 0) {
      row[entries] = __uint_as_float(now);
    }
    __syncwarp();
    for (int i = lane; i < WINDOW; i += 32) {
      const u32 entry = __float_as_uint(row[i]);
      most = most > entry ? most : entry;
    }
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) {
      const u32 other = __shfl_xor_sync(0xffffffffu, most, offset);
      most = most > other ? most : other;
    }
    if (lane == 0) factors[q] = most ? power_for(most, tops[q]) : done < OWN_STEPS ? 0.0f : 1.0f;
  }
#endif
  __syncthreads();
  for (int q = threadIdx.x; q < COUNT; q += THREADS) amax[q] = 0;
  if (threadIdx.x == 0) *clipped = (float)total;
}
