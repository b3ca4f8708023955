// The COUNT largest of a row of logits in falling order, equal ones by their places, with the logarithms of their
// probabilities after all were multiplied by SCALE. logits [rows, COLUMNS], row i at LOGITS_AT(i); logps f32, ids int
// [rows, COUNT]; where the target is IGNORED, 0 and −1. One block per row.
//
// The logit of the last place is found in four passes, eight bits of its key each, from counts of the keys with the
// same bits before; then those above it are collected, those equal to it from the left, and sorted. SLOTS ≥ COUNT is a
// power of two.
#include "types.cuh"
#include "pack.cuh"
#include "reduce.cuh"

// Finite, so that no difference of two maxima is NaN.
#define LOWEST (-3.4028235e38f)
#define WARPS (THREADS / 32)

// A number that orders as the float does.
__device__ __forceinline__ u32 key_of(float x) {
  const u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float float_of(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

extern "C" __global__ void __launch_bounds__(THREADS)
top_logps(const LOGITS_T* __restrict__ logits, const int* __restrict__ targets, float* __restrict__ logps,
          int* __restrict__ ids) {
  __shared__ u64 kept[SLOTS];
  __shared__ u32 counts[256];
  __shared__ u32 warps[WARPS];
  __shared__ u32 prefix, wanted, taken;
  const size_t row = blockIdx.x;
  logits += LOGITS_AT(row);
  logps += row * COUNT;
  ids += row * COUNT;
  if (targets[row] == IGNORED) {
    for (int i = threadIdx.x; i < COUNT; i += THREADS) {
      logps[i] = 0.0f;
      ids[i] = -1;
    }
    return;
  }
  float top = LOWEST, sum = 0.0f;
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
    const float x = to_float(logits[i]) * SCALE;
    if (x > top) {
      sum *= expf(top - x);
      top = x;
    }
    sum += expf(x - top);
  }
  const float highest = block_max<THREADS>(top);
  const float log_sum = highest + logf(block_sum<THREADS>(sum * expf(top - highest)));

  if (threadIdx.x == 0) {
    prefix = 0;
    wanted = COUNT;
    taken = 0;
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += THREADS) counts[i] = 0;
    __syncthreads();
    const u32 before = prefix, above = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
      const u32 key = key_of(to_float(logits[i]));
      if ((key & above) == before) atomicAdd(&counts[(key >> shift) & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = 255;
      while (digit > 0 && counts[digit] < wanted) wanted -= counts[digit--];
      prefix = before | (u32)digit << shift;
    }
    __syncthreads();
  }
  // Now `prefix` is the key of the last place, of which `wanted` are taken.
  const u32 last = prefix, equal = wanted;
  for (int i = threadIdx.x; i < SLOTS; i += THREADS) kept[i] = 0;
  __syncthreads();
  u32 found = 0;
  for (int begin = 0; begin < COLUMNS; begin += THREADS) {
    const int i = begin + threadIdx.x;
    const u32 key = i < COLUMNS ? key_of(to_float(logits[i])) : 0;
    const u64 entry = (u64)key << 32 | (0xffffffffu - (u32)i);
    if (i < COLUMNS && key > last) kept[atomicAdd(&taken, 1u)] = entry;
    const bool is_equal = i < COLUMNS && key == last;
    if (found < equal) {
      const u32 votes = __ballot_sync(0xffffffffu, is_equal);
      const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
      if (lane == 0) warps[warp] = __popc(votes);
      __syncthreads();
      u32 place = found + __popc(votes & ((1u << lane) - 1));
      for (int w = 0; w < WARPS; w++) {
        if (w < warp) place += warps[w];
        found += warps[w];
      }
      // From the end: those above the last key come first.
      if (is_equal && place < equal) kept[COUNT - 1 - place] = entry;
      __syncthreads();
    }
  }
  __syncthreads();
  // In falling order, by sorting networks of pairs.
  for (int size = 2; size <= SLOTS; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      for (int i = threadIdx.x; i < SLOTS; i += THREADS) {
        const int other = i ^ stride;
        if (other > i) {
          const bool falls = (i & size) == 0;
          const u64 a = kept[i], b = kept[other];
          if ((a < b) == falls) {
            kept[i] = b;
            kept[other] = a;
          }
        }
      }
      __syncthreads();
    }
  }
  for (int i = threadIdx.x; i < COUNT; i += THREADS) {
    logps[i] = float_of((u32)(kept[i] >> 32)) * SCALE - log_sum;
    ids[i] = (int)(0xffffffffu - (u32)kept[i]);
  }
}
