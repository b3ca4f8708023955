// What kernels whose blocks own keys make of a step: weights and their slopes from the scores of a warpgroup's 64 keys,
// keys as rows, so that both already are in registers as the products for dv and dk take them; and dk and dv to memory.
#pragma once
#include "keys.cuh"

// A step's statistics and intervals as a thread reads them.
struct OfQueries {
  const float2 *lse, *delta;
  const int4* intervals;
};
__device__ __forceinline__ OfQueries of_queries(const unsigned char* rows) {
  const float2* lse = (const float2*)rows + threadIdx.x % 4;
  return {lse, lse + 32, (const int4*)(rows + 512)};
}
// Whether a query of a step does not see all 16 keys of a warp.
__device__ __forceinline__ bool partly_seen(const OfQueries& of, int warp_key) {
  return of.intervals[31].z > warp_key || of.intervals[0].y < warp_key + 15;
}

// With a cap: scores become what `capped` gives, do.v becomes ds without its weight.
__device__ __forceinline__ void bend(float (&s)[32], float (&dp)[32], const OfQueries& of) {
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const float2 delta = of.delta[i / 4 * 4];
    s[i] = capped(s[i]);
    dp[i] = (dp[i] - (i % 2 ? delta.y : delta.x)) * fmaf(-s[i], s[i], 1.0f);
  }
}
// Scores become weights, those of queries that do not see a key zero; p: rounded.
__device__ __forceinline__ void weigh(float (&s)[32], u32 (&p)[16], const OfQueries& of, int key, bool partly) {
  if (partly) hide(s, key, of.intervals);
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const float2 lse = of.lse[i / 4 * 4];
    s[i] = exp2_approximate(fmaf(s[i], TO_LOG2, i % 2 ? -lse.y : -lse.x));
  }
#pragma unroll
  for (int i = 0; i < 16; i++) p[i] = pair(s[2 * i], s[2 * i + 1]);
}
// ds from weights and do.v.
__device__ __forceinline__ void incline(u32 (&ds)[16], const float (&s)[32], const float (&dp)[32],
                                        const OfQueries& of) {
#pragma unroll
  for (int i = 0; i < 16; i++) {
#if HAS_CAP
    ds[i] = pair(s[2 * i] * dp[2 * i], s[2 * i + 1] * dp[2 * i + 1]);
#else
    const float2 delta = of.delta[i / 2 * 4];
    ds[i] = pair(s[2 * i] * (dp[2 * i] - delta.x), s[2 * i + 1] * (dp[2 * i + 1] - delta.y));
#endif
  }
}

// dk and dv of a warpgroup's keys through the tiles of k and v, which no one reads any more. `id` names the barrier of
// the warpgroup; one thread says when the tiles are free again.
__device__ __forceinline__ void store_gradients(const float (&dk_sum)[WIDE / 2], const float (&dv_sum)[WIDE_V / 2],
                                                u32 k_tile, u32 v_tile, const TensorMap* dk, const TensorMap* dv, int b,
                                                int key, int kv_head, int id, u32 keys_taken) {
  lay_rows<WIDE_V>(v_tile, dv_sum, 1.0f, 1.0f);
  lay_rows<WIDE>(k_tile, dk_sum, SCALE, SCALE);
  publish_to_products();
  meet<128>(id);
  if (threadIdx.x % 128 == 0) {
    store_rows<WIDE_V>(v_tile, dv, b, key, kv_head);
    store_rows<WIDE>(k_tile, dk, b, key, kv_head);
    stores_read<0>();
    barrier_arrive(keys_taken);
  }
}
