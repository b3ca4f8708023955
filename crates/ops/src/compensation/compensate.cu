// GPTQ of W [N, K]: the columns in an order, TILE at once; each column's error is made up for in the columns after it.
// u f32 [K, K]: the upper factor, in that order. order i32 [K]. scales, zeros f32: one for each block of BLOCK_ROWS by BLOCK_COLUMNS of W,
// ACROSS in a row. work f32 [N, K]: W with its columns in order, changed on the way. y f32 [N, K]: each number when its code is chosen.
// A block of threads has ROWS rows, LANES threads a row.
#include "types.cuh"
#include "forms.cuh"

#define EACH (TILE / LANES)
#ifndef ZEROS
#define ZEROS
#define ZERO_OF(block) 0.0f
#else
#define ZERO_OF(block) zeros[block]
#endif

extern "C" __global__ void __launch_bounds__(ROWS * LANES)
in_order(const float* __restrict__ w, const int* __restrict__ order, float* __restrict__ work) {
  const u64 row = blockIdx.x;
  const int place = blockIdx.y * (ROWS * LANES) + threadIdx.x;
  if (place < K) work[row * K + place] = w[row * K + order[place]];
}

extern "C" __global__ void __launch_bounds__(ROWS * LANES)
compensate(const float* __restrict__ u, const int* __restrict__ order, const float* __restrict__ scales ZEROS, float* __restrict__ work,
           float* __restrict__ y) {
  // A tile of u, and the errors of the tile's columns.
  __shared__ float factors[TILE][TILE + 1];
  __shared__ float errors[ROWS][TILE + 1];
  const int own = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const u64 row = (u64)blockIdx.x * ROWS + own;
  const bool is_there = row < N;
  float* line = work + row * K;
  for (int first = 0; first < K; first += TILE) {
    const int width = min(TILE, K - first);
    __syncthreads();
    for (int i = threadIdx.x; i < TILE * TILE; i += ROWS * LANES) {
      const int r = i / TILE, c = i % TILE;
      factors[r][c] = r < width && c < width ? u[(u64)(first + r) * K + first + c] : 0.0f;
    }
    // Columns lane, lane + LANES, … of the tile.
    float x[EACH];
    Scale of[EACH];
    int column[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int place = i * LANES + lane;
      const bool is_used = is_there && place < width;
      column[i] = is_used ? order[first + place] : 0;
      const u64 block = is_used ? row / BLOCK_ROWS * ACROSS + column[i] / BLOCK_COLUMNS : 0;
      x[i] = is_used ? line[first + place] : 0.0f;
      of[i].factor = scales[block];
      of[i].zero = ZERO_OF(block);
      of[i].global = 1.0f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      for (int l = 0; l < LANES; l++) {
        const int place = i * LANES + l;
        float error = 0.0f;
        if (lane == l && place < width) {
          if (is_there) y[row * K + column[i]] = x[i];
          error = __fdiv_rn(x[i] - value_of(x[i], of[i]), factors[place][place]);
        }
        error = __shfl_sync(0xffffffffu, error, (threadIdx.x & 31) / LANES * LANES + l);
        if (lane == l) errors[own][place] = error;
#pragma unroll
        for (int j = i; j < EACH; j++) {
          if (j * LANES + lane > place) x[j] -= error * factors[place][j * LANES + lane];
        }
      }
    }
    for (int next = first + TILE; next < K; next += TILE) {
      __syncthreads();
      for (int i = threadIdx.x; i < TILE * TILE; i += ROWS * LANES) {
        const int r = i / TILE, c = i % TILE;
        factors[r][c] = next + c < K ? u[(u64)(first + r) * K + next + c] : 0.0f;
      }
      __syncthreads();
      float sums[EACH] = {};
#pragma unroll 8
      for (int k = 0; k < TILE; k++) {
        const float error = errors[own][k];
#pragma unroll
        for (int i = 0; i < EACH; i++) sums[i] += error * factors[k][i * LANES + lane];
      }
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int place = next + i * LANES + lane;
        if (is_there && place < K) line[place] -= sums[i];
      }
    }
  }
}
