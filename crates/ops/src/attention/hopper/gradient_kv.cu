// Gradients of attention with respect to k and v on Hopper:
//   dk_j = SCALE sum_i ds_ij q_i, dv_j = sum_i p_ij do_i, over the queries i whose interval holds j and over the query
// heads that share the key head; p and ds as in the gradient with respect to q.
// q [BATCH, TOKENS, HEADS, D], d_o [BATCH, TOKENS, HEADS, DV], k, dk, v, dv [BATCH, TOKENS, KV_HEADS, D | DV], strided
// in the first three axes; statistics and intervals by `attention_statistics`.
// A warpgroup owns 64 keys and holds the sums of dk and dv in registers while its block walks over the steps that see
// the tile. Scores are computed with the keys as rows, so that p and ds already are in registers as the products for dv
// and dk take them.
#include "weights.cuh"

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
attention_gradient_kv(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                      const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap d_o,
                      const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv,
                      const float* __restrict__ statistics, const int2* __restrict__ intervals,
                      int* __restrict__ drawing) {
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) u64 words[BARRIERS];
  __shared__ Item items[2];
  const u32 at = (shared_address(memory) + 1023) & ~1023u;
  const Barriers on = make_barriers<GROUPS + 1, GROUPS, 4 * GROUPS>(shared_address(words));
  if (threadIdx.x < 128) {
    few_registers<GROUPS>();
    if (threadIdx.x / 32 == 1) look_up(items, on, intervals, drawing);
    if (threadIdx.x == 0) feed(items, at, on, &q, &k, &v, &d_o, statistics, intervals);
    return;
  }

  many_registers<GROUPS>();
  const int mine = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  Place<2> slot = {0, 0};
  Place<KV_STAGES> of_keys = {0, 0};
  Place<STAGES> of_step = {0, 0};
  while (true) {
    barrier_wait(on.known + 8 * slot.stage, slot.parity);
    const Item& item = items[slot.stage];
    if (item.b < 0) break;
    const int b = item.b, kv_head = item.kv_head, first_key = item.key + mine * 64, blocks = item.blocks;
    const int begin = item.begin[mine], end = item.end[mine];
    const int warp_key = first_key + warp * 16, key = warp_key + lane / 4;
    meet<128>(5 + mine);
    if (thread == 0) barrier_arrive(on.forgotten + 8 * slot.stage);
    slot.advance();

    const u32 my_k = at + AT_KV + of_keys.stage * KV_STAGE + mine * K_ROWS;
    const u32 my_v = at + AT_KV + of_keys.stage * KV_STAGE + GROUPS * K_ROWS + mine * V_ROWS;
    float dk_sum[WIDE / 2], dv_sum[WIDE_V / 2];
    clear(dk_sum), clear(dv_sum);
    barrier_wait(on.keys_ready + 8 * of_keys.stage, of_keys.parity);

    for (int left = GROUP * blocks - 1; left >= 0; left--) {
      const int block = left / GROUP;
      barrier_wait(on.ready + 8 * of_step.stage, of_step.parity);
      if (block >= begin && block < end) {
        const u32 q_tile = at + AT_STEPS + of_step.stage * STEP, do_tile = q_tile + K_ROWS;
        const OfQueries of = of_queries(memory + (at - shared_address(memory)) + AT_ROWS + of_step.stage * ROWS_STAGE);
        float s[32], dp[32];
        u32 p[16], ds[16];
        products_begin();
        scores<D, 64>(s, my_k, q_tile);
        products_commit();
        scores<DV, 64>(dp, my_v, do_tile);
        products_commit();
        const bool partly = partly_seen(of, warp_key);
        products_wait<!HAS_CAP>();
        if (HAS_CAP) bend(s, dp, of);
        weigh(s, p, of, key, partly);
        products_begin();
        weighted_rows<64, WIDE_V>(dv_sum, p, do_tile);
        products_commit();
        if (!HAS_CAP) products_wait<1>();
        incline(ds, s, dp, of);
        products_begin();
        weighted_rows<64, WIDE>(dk_sum, ds, q_tile);
        products_commit();
        products_wait<0>();
      }
      // Every warp for itself: the statistics were read by its own loads.
      __syncwarp();
      if (lane == 0) barrier_arrive(on.taken + 8 * of_step.stage);
      of_step.advance();
    }
    store_gradients(dk_sum, dv_sum, my_k, my_v, &dk, &dv, b, first_key, kv_head, 5 + mine,
                    on.keys_taken + 8 * of_keys.stage);
    of_keys.advance();
  }
  if (thread == 0) stores_done();
}
