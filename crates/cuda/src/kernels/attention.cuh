// What the plain attention kernels share: layouts, which keys a query sees, dot products.
// NUMBER is the storage type, HEAD_DIM and GROUPS (query heads per key head) are constants,
// WINDOW counts the keys that a query sees including itself.

#include "number.cuh"

#define PER_LANE ((HEAD_DIM + 31) / 32)
#define WARPS 4
#define NOTHING __int_as_float(0xff800000)  // −∞: a score that is not there

// [B, T, heads, HEAD_DIM]; strides in elements, HEAD_DIM dense.
struct View {
  NUMBER* base;
  long long row, token, head;
  __device__ __forceinline__ NUMBER* at(int b, int t, int h) const { return base + b * row + t * token + h * head; }
};

struct Extents {
  int length, heads;
  float scale;
  const int* start;                          // [B, length]: where in its row the document of a token starts
  long long lse_row, lse_head, lse_token;    // strides of the log-sum-exp
  __device__ __forceinline__ long long lse_at(int b, int h, int t) const {
    return b * lse_row + h * lse_head + t * lse_token;
  }
};

__device__ __forceinline__ int first_key(const Extents& e, int b, int query) {
  int start = e.start[(long long)b * e.length + query];
  return max(start, query - (WINDOW - 1));
}

// One vector of HEAD_DIM values into shared memory, by one warp.
__device__ __forceinline__ void load(float* shared, const NUMBER* x, int lane) {
  for (int d = lane; d < HEAD_DIM; d += 32) shared[d] = to_f32(x[d]);
}

__device__ __forceinline__ float dot(const float* shared, const NUMBER* x) {
  float sum = 0.f;
#pragma unroll 8
  for (int d = 0; d < HEAD_DIM; ++d) sum = fmaf(shared[d], to_f32(x[d]), sum);
  return sum;
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
  for (int mask = 16; mask; mask >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}
