// Chunks of 64 tokens on tensor cores: tiles of bf16 in shared memory, their products, and decays between the tokens of a chunk.
// A row of a tile has 8 more numbers than columns, so that the 8 rows that a matrix instruction reads are in different banks.
#pragma once
#include "mma.cuh"

#define GROUP (HEADS / KEY_HEADS)
#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < count; i++)
#define KP (DK + 8)     // pitches of tiles of keys, of values and of weights between tokens
#define VP (DV + 8)
#define WP (CHUNK + 8)

// acc[j] += rows m0 … m0 + 16 of A times columns n0 + 8 j … of B over K terms. A is kept as [m][k], turned as [k][m]; B as
// [n][k], turned as [k][n].
template <int K, bool A_TURNED, bool B_TURNED, int COUNT>
__device__ __forceinline__ void product(float (&acc)[COUNT][4], const bf16* a, int a_pitch, int m0, const bf16* b, int b_pitch, int n0) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    u32 left[4];
    if (A_TURNED) load_transposed(left, shared_address(a + (k + lane / 16 * 8 + lane % 8) * a_pitch + m0 + lane / 8 % 2 * 8));
    else load_matrices(left, shared_address(a + (m0 + lane % 16) * a_pitch + k + lane / 16 * 8));
#pragma unroll
    for (int j = 0; j < COUNT; j += 2) {
      u32 right[4];
      const int n = n0 + 8 * j;
      if (B_TURNED) load_transposed(right, shared_address(b + (k + lane / 8 % 2 * 8 + lane % 8) * b_pitch + n + lane / 16 * 8));
      else load_matrices(right, shared_address(b + (n + lane / 16 * 8 + lane % 8) * b_pitch + k + lane / 8 % 2 * 8));
      mma(acc[j], left, right[0], right[1]);
      mma(acc[j + 1], left, right[2], right[3]);
    }
  }
}

template <int COUNT> __device__ __forceinline__ void clear(float (&acc)[COUNT][4]) {
  EACH(j, COUNT) EACH(i, 4) acc[j][i] = 0.0f;
}

// Every pair of neighbours of a product: `give(row, column, first, second)`, which may change them.
template <int COUNT, typename Give> __device__ __forceinline__ void each(float (&acc)[COUNT][4], int m0, int n0, Give give) {
  const int lane = threadIdx.x % 32;
  EACH(j, COUNT) EACH(h, 2) give(m0 + 8 * h + lane / 4, n0 + 8 * j + lane % 4 * 2, acc[j][2 * h], acc[j][2 * h + 1]);
}

__device__ __forceinline__ void put(bf16* to, float first, float second) { *(u32*)to = pair(first, second); }
__device__ __forceinline__ float2 get(const bf16* from) { return make_float2(to_float(from[0]), to_float(from[1])); }

// `rows` rows of `WIDTH_` numbers; zeros from row `count` on. `from(row)`: the first number of a row.
template <int WIDTH_, typename From>
__device__ __forceinline__ void fetch(bf16* tile, int rows, int count, From from) {
  for (int i = threadIdx.x; i < rows * (WIDTH_ / 8); i += blockDim.x) {
    const int row = i / (WIDTH_ / 8), at = i % (WIDTH_ / 8) * 8;
    copy_async(shared_address(tile + row * (WIDTH_ + 8) + at), from(row < count ? row : 0) + at, row < count);
  }
}

__device__ __forceinline__ void fetched() {
  commit_copies();
  wait_copies<0>();
  __syncthreads();
}

// The tokens of a chunk of a row. With CACHED, `starts` are positions in the row's sequence, below 0 for padding, which is after all
// tokens: every thread of a block takes part.
__device__ __forceinline__ int tokens_of(const int* starts, int b, int chunk) {
  const int begin = chunk * CHUNK, count = min(CHUNK, TOKENS - begin);
#if defined(CACHED)
  const int t = threadIdx.x;
  return __syncthreads_count(t < count && starts[(size_t)b * TOKENS + begin + t] >= 0);
#else
  return count;
#endif
}

// Of the tokens of a chunk of a head: sums of the logarithms of decays since the chunk or the token's document began, the first
// token of its document in the chunk, what is left of the state before the chunk, what of the token's own part is left after
// the chunk, and the share of corrections. Decays below e^-100 are as good as none, and differences of sums stay exact.
struct Gates {
  float sum[CHUNK], from_start[CHUNK], to_end[CHUNK], rate[CHUNK];
  int first[CHUNK];
};

#define LEAST_LOGARITHM -100.0f

__device__ __forceinline__ void read_gates(Gates& gates, const G_T* g, const BETA_T* beta, const int* starts, int b, int h, int chunk) {
  const int begin = chunk * CHUNK, count = tokens_of(starts, b, chunk), t = threadIdx.x;
  bool goes_on = false;
  float x = 0.0f;
  __syncthreads();
  if (t < CHUNK) {
#if defined(CACHED)  // padding goes on with what is left of the state
    const int start = -starts[(size_t)b * TOKENS] - begin;
#else
    const int start = t < count ? starts[(size_t)b * TOKENS + begin + t] - begin : t;
#endif
    goes_on = start < 0;
    gates.first[t] = max(start, 0);
    gates.rate[t] = t < count ? load(beta + BETA_AT(b, begin + t, h)) : 0.0f;
    x = t < count && start != t ? fmaxf(load(g + G_AT(b, begin + t, h)), LEAST_LOGARITHM) : 0.0f;
    gates.sum[t] = x;
  }
  EACH(step, 6) {
    __syncthreads();
    const int before = t - (1 << step);
    const float other = t < CHUNK && before >= gates.first[t] ? gates.sum[before] : 0.0f;
    __syncthreads();
    if (t < CHUNK) gates.sum[t] = x += other;
  }
  __syncthreads();
  if (t < CHUNK) {
    gates.from_start[t] = goes_on ? expf(x) : 0.0f;
    gates.to_end[t] = t < count && gates.first[count - 1] <= t ? expf(gates.sum[count - 1] - x) : 0.0f;
  }
  __syncthreads();
}

// The decay from token s to token t, 0 where another document begins between them.
__device__ __forceinline__ float decay(const Gates& gates, int t, int s) {
  return s <= t && s >= gates.first[t] ? expf(gates.sum[t] - gates.sum[s]) : 0.0f;
}

// Where a head's tokens, chunks, states and weights between tokens begin in what the kernels hand one another.
#define AT_TOKEN(columns) ((((size_t)b * HEADS + h) * CHUNKS + chunk) * CHUNK * (columns))
#define AT_STATE ((((size_t)b * HEADS + h) * CHUNKS + chunk) * DK * DV)
