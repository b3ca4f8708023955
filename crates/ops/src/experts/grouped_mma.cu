// The products of `grouped.cu` on tensor cores, from sm_80 on: 16-bit numbers of one type, NUMBER, extents and strides that
// are multiples of 8.
// A block has a tile of 128 by 128, each of 8 warps 64 by 32 of it; STAGES steps of 32 terms are in flight. A tile lies in
// shared memory as it does in global memory: along the sum (128 rows of 32), or across it (32 rows of 128); their pitches
// keep the 8 rows that a matrix instruction reads in different banks. Codes of eight bits become bf16 on their way to shared
// memory: every number that a code stands for is one.
#include "mma.cuh"
#if CODES
#include "codes.cuh"
#endif

#define TILE 128
#define STEP 32
#define STAGES 3
#define ALONG_PITCH 80
#define ACROSS_PITCH 272
#define TILE_BYTES (TILE * ALONG_PITCH)

__device__ __forceinline__ void place(u32 to, const NUMBER* at, bool inside) { copy_async(to, at, inside); }

#if CODES
template <typename Code> __device__ __forceinline__ void place(u32 to, const Code* at, bool inside) {
  union { uint2 all; Code each[8]; } of;
  of.all = inside ? *(const uint2*)at : make_uint2(0, 0);
  u32 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i++) pairs[i] = pair(load(of.each + 2 * i), load(of.each + 2 * i + 1));
  store_shared_16(to, pairs);
}
#endif

// 512 pieces of 8 numbers; `from(row, column, inside)` says where a piece lies and whether it does.
template <bool TURNED, typename From> __device__ __forceinline__ void fetch(u32 to, From from) {
#pragma unroll
  for (int i = threadIdx.x; i < TILE * STEP / 8; i += THREADS) {
    const int row = TURNED ? i / 16 : i / 4, piece = TURNED ? i % 16 : i % 4;
    bool inside;
    const auto at = from(row, piece * 8, inside);
    place(to + row * (TURNED ? ACROSS_PITCH : ALONG_PITCH) + piece * 16, at, inside);
  }
}

// Rows m … m + 16 and terms k … k + 16 of a left tile.
template <bool TURNED> __device__ __forceinline__ void left(u32 (&a)[4], u32 tile, int m, int k) {
  const int lane = threadIdx.x % 32;
  if (TURNED) load_transposed(a, tile + (k + lane / 16 * 8 + lane % 8) * ACROSS_PITCH + (m + lane / 8 % 2 * 8) * 2);
  else load_matrices(a, tile + (m + lane % 16) * ALONG_PITCH + (k + lane / 16 * 8) * 2);
}

// Columns n … n + 16 and terms k … k + 16 of a right tile: two pairs of registers.
template <bool TURNED> __device__ __forceinline__ void right(u32 (&b)[4], u32 tile, int n, int k) {
  const int lane = threadIdx.x % 32;
  if (TURNED) load_transposed(b, tile + (k + lane / 8 % 2 * 8 + lane % 8) * ACROSS_PITCH + (n + lane / 16 * 8) * 2);
  else load_matrices(b, tile + (n + lane / 16 * 8 + lane % 8) * ALONG_PITCH + (k + lane / 8 % 2 * 8) * 2);
}

// The sum over `terms`, whose tiles `fetch_step(to, first)` fetches: the left one, and the right one TILE_BYTES after it.
template <bool LEFT_ACROSS, bool RIGHT_ACROSS, typename Fetch>
__device__ __forceinline__ void products(float (&sum)[4][4][4], int terms, Fetch fetch_step) {
  extern __shared__ __align__(16) unsigned char memory[];
  const u32 base = shared_address(memory);
  const int steps = (terms + STEP - 1) / STEP, m0 = threadIdx.x / 128 * 64, n0 = threadIdx.x / 32 % 4 * 32;
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < steps) fetch_step(base + s * 2 * TILE_BYTES, s * STEP);
    commit_copies();
  }
  for (int s = 0; s < steps; s++) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    const int next = s + STAGES - 1;
    if (next < steps) fetch_step(base + next % STAGES * 2 * TILE_BYTES, next * STEP);
    commit_copies();
    const u32 tile = base + s % STAGES * 2 * TILE_BYTES;
#pragma unroll
    for (int k = 0; k < STEP; k += 16) {
      u32 a[4][4], b[2][4];
#pragma unroll
      for (int i = 0; i < 4; i++) left<LEFT_ACROSS>(a[i], tile, m0 + 16 * i, k);
#pragma unroll
      for (int j = 0; j < 2; j++) right<RIGHT_ACROSS>(b[j], tile + TILE_BYTES, n0 + 16 * j, k);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) mma_of<NUMBER>(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
}

// Gives every pair of neighbours of a row of the tile: `give(row, column, first, second)`.
template <typename Give> __device__ __forceinline__ void results(const float (&sum)[4][4][4], Give give) {
  const int lane = threadIdx.x % 32, m0 = threadIdx.x / 128 * 64, n0 = threadIdx.x / 32 % 4 * 32;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        give(m0 + 16 * i + 8 * h + lane / 4, n0 + 8 * j + lane % 4 * 2, sum[i][j][2 * h], sum[i][j][2 * h + 1]);
}

#if defined(X_T)
extern "C" __global__ void __launch_bounds__(THREADS)
grouped_linear(const X_T* __restrict__ x, const W_T* __restrict__ w, const int* __restrict__ offsets,
#if SCALED
               const float* __restrict__ scale_x, const float* __restrict__ scale_w,
#endif
#if R
               const NUMBER* __restrict__ t, const NUMBER* __restrict__ b,
#endif
               NUMBER* __restrict__ y) {
  int tile = blockIdx.y, group = 0, first = 0, end = 0;
  for (; group < GROUPS; group++) {
    first = offsets[group];
    end = offsets[group + 1];
    const int own = (end - first + TILE - 1) / TILE;
    if (tile < own) break;
    tile -= own;
  }
  if (group == GROUPS) return;
  first += tile * TILE;
  const int n0 = blockIdx.x * TILE;
  float sum[4][4][4] = {};
  products<false, TRANSPOSED>(sum, K, [&](u32 to, int k0) {
    fetch<false>(to, [&](int row, int k, bool& inside) {
      inside = first + row < end && k0 + k < K;
      return inside ? x + X_AT(first + row) + k0 + k : x;
    });
    fetch<TRANSPOSED>(to + TILE_BYTES, [&](int row, int column, bool& inside) {
      const int k = k0 + (TRANSPOSED ? row : column), n = n0 + (TRANSPOSED ? column : row);
      inside = k < K && n < N;
      if (!inside) return w;
      return TRANSPOSED ? w + W_AT((size_t)group * K + k) + n : w + W_AT((size_t)group * N + n) + k;
    });
  });
#if SCALED
  const float scale = *scale_x * scale_w[group];
#pragma unroll
  for (int i = 0; i < 64; i++) sum[i / 16][i / 4 % 4][i % 4] *= scale;
#endif
#if R
  __syncthreads();
  products<false, ACROSS>(sum, R, [&](u32 to, int k0) {
    fetch<false>(to, [&](int row, int k, bool& inside) {
      inside = first + row < end && k0 + k < R;
      return inside ? t + T_AT(first + row) + k0 + k : t;
    });
    fetch<ACROSS>(to + TILE_BYTES, [&](int row, int column, bool& inside) {
      const int k = k0 + (ACROSS ? row : column), n = n0 + (ACROSS ? column : row);
      inside = k < R && n < N;
      if (!inside) return b;
      return ACROSS ? b + B_AT((size_t)group * R + k) + n : b + B_AT((size_t)group * N + n) + k;
    });
  });
#endif
  results(sum, [&](int row, int column, float low, float high) {
    if (first + row < end && n0 + column < N) *(u32*)(y + Y_AT(first + row) + n0 + column) = pair_of<NUMBER>(low, high);
  });
}
#endif

#if defined(A_T)
extern "C" __global__ void __launch_bounds__(THREADS)
grouped_weight_gradient(const NUMBER* __restrict__ a, const NUMBER* __restrict__ b, const int* __restrict__ offsets,
#if SCALED
                        const float* __restrict__ scale_a, const float* __restrict__ scale_b,
#endif
                        float* __restrict__ dw) {
  const int group = blockIdx.z, first = offsets[group], end = offsets[group + 1];
  const int m0 = blockIdx.x * TILE, k0 = blockIdx.y * TILE;
  float sum[4][4][4] = {};
  products<true, true>(sum, end - first, [&](u32 to, int r0) {
    fetch<true>(to, [&](int row, int m, bool& inside) {
      inside = first + r0 + row < end && m0 + m < M;
      return inside ? a + A_AT(first + r0 + row) + m0 + m : a;
    });
    fetch<true>(to + TILE_BYTES, [&](int row, int k, bool& inside) {
      inside = first + r0 + row < end && k0 + k < K;
      return inside ? b + B_AT(first + r0 + row) + k0 + k : b;
    });
  });
#if SCALED
  const float scale = *scale_a * *scale_b;
#pragma unroll
  for (int i = 0; i < 64; i++) sum[i / 16][i / 4 % 4][i % 4] *= scale;
#endif
  results(sum, [&](int row, int column, float low, float high) {
    if (m0 + row >= M || k0 + column >= K) return;
    float2* at = (float2*)(dw + ((size_t)group * M + m0 + row) * K + k0 + column);
    const float2 before = ACCUMULATE ? *at : make_float2(0.0f, 0.0f);
    *at = make_float2(before.x + low, before.y + high);
  });
}
#endif
