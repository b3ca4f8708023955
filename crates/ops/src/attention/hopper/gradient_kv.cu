// Gradients of attention with respect to k and v on Hopper:
//   dk_j = SCALE sum_i ds_ij q_i, dv_j = sum_i p_ij do_i, over the queries i whose interval holds j and over the query
// heads that share the key head; p and ds as in the gradient with respect to q.
// q [BATCH, TOKENS, HEADS, D], d_o [BATCH, TOKENS, HEADS, DV], k, dk, v, dv [BATCH, TOKENS, KV_HEADS, D | DV], strided in
// the first three axes; statistics and intervals by `attention_statistics`.
// A warpgroup owns 64 keys and holds the sums of dk and dv in registers while its block walks over the steps that see the
// tile. Scores are computed with the keys as rows, so that p and ds already lie in registers as the products for dv and
// dk take them.
#include "keys.cuh"

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
attention_gradient_kv(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                      const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap d_o,
                      const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv,
                      const float* __restrict__ statistics, const int2* __restrict__ intervals,
                      int* __restrict__ ticket) {
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) u64 barriers[4 + 2 * KV_STAGES + 2 * STAGES];
  __shared__ Item items[2];
  const u32 at = (shared_address(memory) + 1023) & ~1023u;
  const u32 known = shared_address(barriers), forgotten = known + 16, keys_ready = forgotten + 16,
            keys_taken = keys_ready + 8 * KV_STAGES, ready = keys_taken + 8 * KV_STAGES, taken = ready + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) barrier_init(known + 8 * i, 1), barrier_init(forgotten + 8 * i, GROUPS + 1);
    for (int i = 0; i < KV_STAGES; i++) barrier_init(keys_ready + 8 * i, 1), barrier_init(keys_taken + 8 * i, GROUPS);
    for (int i = 0; i < STAGES; i++) barrier_init(ready + 8 * i, 1), barrier_init(taken + 8 * i, 4 * GROUPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (threadIdx.x < 128) {
#if GROUPS == 3
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#endif
    if (threadIdx.x / 32 == 1) look_up(items, known, forgotten, intervals, ticket);
    if (threadIdx.x == 0)
      feed(items, at, known, forgotten, keys_ready, keys_taken, ready, taken, &q, &k, &v, &d_o, statistics, intervals);
    return;
  }

#if GROUPS == 3
  asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
#else
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
#endif
  const int mine = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  int slot = 0, keys_stage = 0, stage = 0;
  u32 known_parity = 0, keys_parity = 0, parity = 0;
  while (true) {
    barrier_wait(known + 8 * slot, known_parity);
    const Item& item = items[slot];
    if (item.b < 0) break;
    const int b = item.b, kv_head = item.kv_head, first_key = item.key + mine * 64, blocks = item.blocks;
    const int begin = item.begin[mine], end = item.end[mine], warp_key = first_key + warp * 16, key = warp_key + lane / 4;
    asm volatile("bar.sync %0, 128;" ::"r"(5 + mine) : "memory");
    if (thread == 0) barrier_arrive(forgotten + 8 * slot);
    slot ^= 1, known_parity ^= slot == 0;

    const u32 my_k = at + AT_KV + keys_stage * KV_STAGE + mine * K_ROWS;
    const u32 my_v = at + AT_KV + keys_stage * KV_STAGE + GROUPS * K_ROWS + mine * V_ROWS;
    float dk_sum[WIDE / 2], dv_sum[WIDE_V / 2];
#pragma unroll
    for (int i = 0; i < WIDE / 2; i++) dk_sum[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDE_V / 2; i++) dv_sum[i] = 0.0f;
    barrier_wait(keys_ready + 8 * keys_stage, keys_parity);

    for (int left = GROUP * blocks - 1; left >= 0; left--) {
      const int block = left / GROUP;
      barrier_wait(ready + 8 * stage, parity);
      if (block >= begin && block < end) {
        const u32 q_tile = at + AT_STEPS + stage * STEP, do_tile = q_tile + K_ROWS;
        const unsigned char* rows = memory + (at - shared_address(memory)) + AT_ROWS + stage * ROWS_STAGE;
        const float2 *lse_of = (const float2*)rows + lane % 4, *delta_of = lse_of + 32;
        const int4* intervals_of = (const int4*)(rows + 512);
        float s[32], dp[32];
        u32 p[16], ds[16];
        products_begin();
        scores<D, 64>(s, my_k, q_tile);
        products_commit();
        scores<DV, 64>(dp, my_v, do_tile);
        products_commit();
        const bool partly = intervals_of[31].z > warp_key || intervals_of[0].y < warp_key + 15;
#if HAS_CAP
        products_wait<0>();
#pragma unroll
        for (int i = 0; i < 32; i++) {
          const float2 delta = delta_of[i / 4 * 4];
          s[i] = capped(s[i]);
          dp[i] = (dp[i] - (i % 2 ? delta.y : delta.x)) * fmaf(-s[i], s[i], 1.0f);
        }
#else
        products_wait<1>();
#endif
        if (partly) hide(s, key, intervals_of);
#pragma unroll
        for (int i = 0; i < 32; i++) {
          const float2 lse = lse_of[i / 4 * 4];
          s[i] = exp2_approximate(fmaf(s[i], TO_LOG2, i % 2 ? -lse.y : -lse.x));
        }
#pragma unroll
        for (int i = 0; i < 16; i++) p[i] = pair(s[2 * i], s[2 * i + 1]);
        products_begin();
        weighted_rows<64, WIDE_V>(dv_sum, p, do_tile);
        products_commit();
#if HAS_CAP
#pragma unroll
        for (int i = 0; i < 16; i++) ds[i] = pair(s[2 * i] * dp[2 * i], s[2 * i + 1] * dp[2 * i + 1]);
#else
        products_wait<1>();
#pragma unroll
        for (int i = 0; i < 16; i++) {
          const float2 delta = delta_of[i / 2 * 4];
          ds[i] = pair(s[2 * i] * (dp[2 * i] - delta.x), s[2 * i + 1] * (dp[2 * i + 1] - delta.y));
        }
#endif
        products_begin();
        weighted_rows<64, WIDE>(dk_sum, ds, q_tile);
        products_commit();
        products_wait<0>();
      }
      // Every warp for itself: the statistics were read by its own loads.
      __syncwarp();
      if (lane == 0) barrier_arrive(taken + 8 * stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    lay_rows<WIDE_V>(my_v, dv_sum, 1.0f, 1.0f);
    lay_rows<WIDE>(my_k, dk_sum, SCALE, SCALE);
    publish_to_products();
    asm volatile("bar.sync %0, 128;" ::"r"(5 + mine) : "memory");
    if (thread == 0) {
      store_rows<WIDE_V>(my_v, &dv, b, first_key, kv_head);
      store_rows<WIDE>(my_k, &dk, b, first_key, kv_head);
      stores_read<0>();
      barrier_arrive(keys_taken + 8 * keys_stage);
    }
    if (++keys_stage == KV_STAGES) keys_stage = 0, keys_parity ^= 1;
  }
  if (thread == 0) stores_done();
}
