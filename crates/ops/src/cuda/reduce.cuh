// Sums and maxima over a block in a fixed order: the same bits on every run.
#pragma once

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// The result reaches every thread. May be called again at once: the first barrier protects the buffer.
template <int THREADS_> __device__ __forceinline__ float block_sum(float x) {
  __shared__ float parts[THREADS_ / 32];
  x = warp_sum(x);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = x;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < THREADS_ / 32; i++) total += parts[i];
  return total;
}

template <int THREADS_> __device__ __forceinline__ float block_max(float x) {
  __shared__ float parts[THREADS_ / 32];
  x = warp_max(x);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = x;
  __syncthreads();
  float total = parts[0];
#pragma unroll
  for (int i = 1; i < THREADS_ / 32; i++) total = fmaxf(total, parts[i]);
  return total;
}
