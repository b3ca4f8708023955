// Products with a matrix for each group of rows; row i of a tensor X is at X_AT(i), offsets i32 [GROUPS + 1] say where the
// rows of a group begin.
//   grouped_linear: y[r, n] = sum over k of x[r, k] w[g][n, k] (w[g][k, n] if TRANSPOSED), and with R the sum over R of
//     t[r, j] b[g][n, j] (b[g][j, n] if ACROSS) added to it. Block (t, c) has the t-th tile
//     of TILE rows when those of all groups are counted one group after the other, and TILE columns; there are at most
//     rows/TILE + GROUPS tiles, and blocks beyond the last do nothing: nothing about the groups is known to the host.
//     If CODES, x and w are codes of eight bits; if SCALED, the first sum is multiplied with the scale of x and that of w[g].
//   grouped_weight_gradient: dw[g] = a' b over the rows of the group, dw f32 [GROUPS, M, K] dense; a block per tile and group.
//     If SCALED, the sums are multiplied with the scales of a and b.
// For every type and shape: f32 sums in the order of k (of rows), 4 x 4 results per thread, tiles through shared memory.
#include "types.cuh"
#if CODES
#include "codes.cuh"
#endif

#define STEP 16
#define EACH (TILE / 16)

// Adds the products of a tile's rows, left(row, k), and columns, right(column, k), both within `terms`.
template <bool TURNED, typename Left, typename Right>
__device__ __forceinline__ void multiply(float (&sum)[EACH][EACH], int terms, Left left_at, Right right_at) {
  __shared__ float left[STEP][TILE + 1], right[STEP][TILE + 1];
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  for (int k0 = 0; k0 < terms; k0 += STEP) {
    for (int i = threadIdx.x; i < TILE * STEP; i += THREADS) {
      const int k = i % STEP, r = i / STEP;
      left[k][r] = k0 + k < terms ? left_at(r, k0 + k) : 0.0f;
    }
    for (int i = threadIdx.x; i < TILE * STEP; i += THREADS) {
      const int k = TURNED ? i / TILE : i % STEP, n = TURNED ? i % TILE : i / STEP;
      right[k][n] = k0 + k < terms ? right_at(n, k0 + k) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < STEP; k++) {
      float a[EACH], b[EACH];
#pragma unroll
      for (int i = 0; i < EACH; i++) a[i] = left[k][ty + 16 * i], b[i] = right[k][tx + 16 * i];
#pragma unroll
      for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) sum[i][j] += a[i] * b[j];
    }
    __syncthreads();
  }
}

#if defined(X_T)
extern "C" __global__ void __launch_bounds__(THREADS)
grouped_linear(const X_T* __restrict__ x, const W_T* __restrict__ w, const int* __restrict__ offsets,
#if SCALED
               const float* __restrict__ scale_x, const float* __restrict__ scale_w,
#endif
#if R
               const T_T* __restrict__ t, const B_T* __restrict__ b,
#endif
               Y_T* __restrict__ y) {
  int tile = blockIdx.x, group = 0, first = 0, end = 0;
  for (; group < GROUPS; group++) {
    first = offsets[group];
    end = offsets[group + 1];
    const int own = (end - first + TILE - 1) / TILE;
    if (tile < own) break;
    tile -= own;
  }
  if (group == GROUPS) return;
  first += tile * TILE;
  const int n0 = blockIdx.y * TILE, tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  float sum[EACH][EACH] = {};
  multiply<TRANSPOSED>(
      sum, K, [&](int r, int k) { return first + r < end ? load(x + X_AT(first + r) + k) : 0.0f; },
      [&](int n, int k) {
        if (n0 + n >= N) return 0.0f;
        return TRANSPOSED ? load(w + W_AT((size_t)group * K + k) + n0 + n) : load(w + W_AT((size_t)group * N + n0 + n) + k);
      });
#if SCALED
  const float scale = *scale_x * scale_w[group];
#pragma unroll
  for (int i = 0; i < EACH * EACH; i++) sum[i / EACH][i % EACH] *= scale;
#endif
#if R
  multiply<ACROSS>(
      sum, R, [&](int r, int k) { return first + r < end ? load(t + T_AT(first + r) + k) : 0.0f; },
      [&](int n, int k) {
        if (n0 + n >= N) return 0.0f;
        return ACROSS ? load(b + B_AT((size_t)group * R + k) + n0 + n) : load(b + B_AT((size_t)group * N + n0 + n) + k);
      });
#endif
#pragma unroll
  for (int i = 0; i < EACH; i++)
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int r = first + ty + 16 * i, n = n0 + tx + 16 * j;
      if (r < end && n < N) store(y + Y_AT(r) + n, sum[i][j]);
    }
}
#endif

#if defined(A_T)
extern "C" __global__ void __launch_bounds__(THREADS)
grouped_weight_gradient(const A_T* __restrict__ a, const B_T* __restrict__ b, const int* __restrict__ offsets,
#if SCALED
                        const float* __restrict__ scale_a, const float* __restrict__ scale_b,
#endif
                        float* __restrict__ dw) {
  __shared__ float left[STEP][TILE + 1], right[STEP][TILE + 1];
  const int group = blockIdx.z, first = offsets[group], end = offsets[group + 1];
  const int m0 = blockIdx.x * TILE, k0 = blockIdx.y * TILE, tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  float sum[EACH][EACH] = {};
  for (int r0 = first; r0 < end; r0 += STEP) {
    for (int i = threadIdx.x; i < TILE * STEP; i += THREADS) {
      const int c = i % TILE, r = i / TILE;
      left[r][c] = r0 + r < end && m0 + c < M ? load(a + A_AT(r0 + r) + m0 + c) : 0.0f;
      right[r][c] = r0 + r < end && k0 + c < K ? load(b + B_AT(r0 + r) + k0 + c) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < STEP; r++) {
      float u[EACH], v[EACH];
#pragma unroll
      for (int i = 0; i < EACH; i++) u[i] = left[r][ty + 16 * i], v[i] = right[r][tx + 16 * i];
#pragma unroll
      for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) sum[i][j] += u[i] * v[j];
    }
    __syncthreads();
  }
#if SCALED
  const float scale = *scale_a * *scale_b;
#pragma unroll
  for (int i = 0; i < EACH * EACH; i++) sum[i / EACH][i % EACH] *= scale;
#endif
#pragma unroll
  for (int i = 0; i < EACH; i++)
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int m = m0 + ty + 16 * i, k = k0 + tx + 16 * j;
      if (m >= M || k >= K) continue;
      float* at = dw + ((size_t)group * M + m) * K + k;
      *at = ACCUMULATE ? *at + sum[i][j] : sum[i][j];
    }
}
#endif
