// The queries that see a tile of keys, and what the gradients to k and v need of them.
#pragma once
#include "tiles.cuh"

// How many of the positions [from, to) precede the first one that fails, by all threads of a block. A first look at
// the next 8 * THREADS_ positions finds short documents and windows at once.
template <int THREADS_, typename Holds> __device__ __forceinline__ int first_failing(int from, int to, Holds holds) {
  int end = min(to, from + 8 * THREADS_);
  for (;;) {
    const int limit = end;
    while (from < end) {
      const int step = (end - from + THREADS_ - 1) / THREADS_, i = from + (threadIdx.x + 1) * step - 1;
      from += __syncthreads_count(i < end && holds(i)) * step;
      end = min(end, from + step - 1);
    }
    if (from < limit || limit == to) return from;
    end = to;
  }
}
// The interval [x, y) of queries of a row that see any of the keys first ... last; `records` of one of its heads.
template <int THREADS_>
__device__ __forceinline__ int2 queries_of(const float4* records, int first, int last) {
  int from = BIDIRECTIONAL ? 0 : first;
  if (HAS_LAST) from = first_failing<THREADS_>(0, first, [&](int i) { return __float_as_int(records[i].w) < first; });
  const int to = first_failing<THREADS_>(from, TOKENS, [&](int i) { return __float_as_int(records[i].z) <= last; });
  return make_int2(from, to);
}

// Records of QUERIES_ queries; zeros beyond the row: their q and do are zero, so their weights do no harm.
template <int QUERIES_> __device__ __forceinline__ void fetch_records(u32 to, const float4* records, int query) {
  for (int i = threadIdx.x; i < QUERIES_; i += blockDim.x)
    copy_async(to + i * 16, records + query + i, query + i < TOKENS);
}

// The last query that branches let see any of the ROWS_ keys from `key` on, the same in every thread.
template <int ROWS_> __device__ __forceinline__ int last_query_of(const int* last_queries, int key) {
  if (!BRANCHES) return TOKENS;
  int found = 0;
  for (int j = key + threadIdx.x % 32; j < min(key + ROWS_, TOKENS); j += 32) found = max(found, last_queries[j]);
  for (int offset = 16; offset; offset >>= 1) found = max(found, __shfl_xor_sync(0xffffffffu, found, offset));
  return found;
}

// Scores of keys (rows: `key` is the lane's first) and queries become weights, products do.v become ds; `until` is the
// last query that sees each of the lane's keys, `query` the first of the queries.
template <int MT_, int NT_>
__device__ __forceinline__ void weights_of_queries(float (&s)[MT_][NT_][4], float (&dp)[MT_][NT_][4],
                                                   const float4* of_queries, int key, bool whole,
                                                   const int (&until)[MT_ * 2], int query) {
#pragma unroll
  for (int n = 0; n < NT_; n++)
#pragma unroll
    for (int column = 0; column < 2; column++) {
      const float4* record = of_queries + n * 8 + threadIdx.x % 4 * 2 + column;
      const float2 row = *(const float2*)record;
      int from = 0, to = TOKENS;
      if (!whole) {
        const int2 keys = *((const int2*)record + 1);
        from = keys.x, to = keys.y;
      }
#pragma unroll
      for (int i = 0; i < MT_ * 2; i++) {
        float& x = s[i / 2][n][i % 2 * 2 + column];
        float& y = dp[i / 2][n][i % 2 * 2 + column];
        const float slope = weight(x, row.x);
        const int i_of_query = query + n * 8 + threadIdx.x % 4 * 2 + column;
        if (!whole && (key + i * 8 < from || key + i * 8 > to || (BRANCHES && until[i] < i_of_query))) x = 0.0f;
        y = x * (y - row.y);
        if (HAS_CAP) y *= slope;
      }
    }
}
