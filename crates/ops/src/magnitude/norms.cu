// n[o] = |w[o] + SCALE·b[o]·a|, the norm over the K inputs of an adapted weight. w [N, K] (or [K, N] if TRANSPOSED) with row
// i at W_AT(i), a [R, K], b [N, R]; f32 throughout. A block takes ROWS outputs and all inputs: a thread has each THREADS-th
// input, reads its column of a once for all ROWS, and the factors of b from shared memory. So a is read N / ROWS times, from
// the cache, and w once.
#include "types.cuh"

__device__ __forceinline__ float weight(const W_T* __restrict__ w, int output, int k) {
#if TRANSPOSED
  return load(w + W_AT(k) + output);
#else
  return load(w + W_AT(output) + k);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
adapted_norms(const W_T* __restrict__ w, const A_T* __restrict__ a, const B_T* __restrict__ b, float* __restrict__ n) {
  __shared__ float factors[RANK][ROWS];
  const int first = blockIdx.x * ROWS;
  for (int i = threadIdx.x; i < RANK * ROWS; i += THREADS) {
    const int output = first + i % ROWS;
    factors[i / ROWS][i % ROWS] = output < N ? SCALE * load(b + B_AT(output) + i / ROWS) : 0.0f;
  }
  __syncthreads();
  float squares[ROWS] = {};
  for (int k = threadIdx.x; k < K; k += THREADS) {
    float delta[ROWS] = {};
    for (int r = 0; r < RANK; r++) {
      const float of_a = load(a + A_AT(r) + k);
#pragma unroll
      for (int row = 0; row < ROWS; row++) delta[row] = fmaf(factors[r][row], of_a, delta[row]);
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      const float sum = (first + row < N ? weight(w, first + row, k) : 0.0f) + delta[row];
      squares[row] = fmaf(sum, sum, squares[row]);
    }
  }
  __shared__ float parts[THREADS / 32][ROWS];
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    float sum = squares[row];
#pragma unroll
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][row] = sum;
  }
  __syncthreads();
  if (threadIdx.x < ROWS && first + threadIdx.x < N) {
    float sum = 0.0f;
    for (int warp = 0; warp < THREADS / 32; warp++) sum += parts[warp][threadIdx.x];
    n[first + threadIdx.x] = sqrtf(sum);
  }
}
