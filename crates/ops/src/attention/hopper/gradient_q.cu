// Gradient of attention with respect to q on Hopper:
//   dq_i = SCALE sum_j ds_ij k_j, ds_ij = p_ij (do_i.v_j - delta_i) [times 1 - (s_ij / SOFT_CAP)^2],
//   p_ij = exp(s_ij - lse_i) over the keys of interval i, delta_i = do_i.o_i; see the forward pass for s.
// q, dq [BATCH, TOKENS, HEADS, D], d_o [BATCH, TOKENS, HEADS, DV], k, v [BATCH, TOKENS, KV_HEADS, D | DV], strided in
// the first three axes; statistics (lse log2(e), delta) by `attention_statistics`.
// Work is divided as in the forward pass: a warpgroup owns 64 rows and walks over the tiles of keys that they see. The
// scores of a tile and do.v are multiplied before ds of the tile before is multiplied with its keys, which stay in
// shared memory for both. Nothing is summed across blocks, so the same bits come out in every run, at the price of
// scores that are computed a second time for dk and dv.
// H200, with dk and dv: heads of 256, 2 x 4096 tokens 317 TFLOP/s; documents of about 200 tokens 162 (128), 138 (64),
// 123.
#include "queries.cuh"

// Shared memory, in bytes from its aligned start; q's tile of a warpgroup takes dq in the end.
#define Q_TILE (WIDE * 128)
#define DO_TILE (WIDE_V * 128)
#define Q_STAGE (WARPGROUPS * (Q_TILE + DO_TILE))
#define AT_Q 0
#define AT_K (AT_Q + Q_STAGES * Q_STAGE)
#define AT_V (AT_K + STAGES * K_STAGE)

// Weights of a tile of keys from its scores, those outside the rows' intervals zero. With a cap only what `incline`
// needs is kept: the weights are taken from the scores there.
__device__ __forceinline__ void weigh(float (&s)[KEYS / 2], int key, const Sight& sight,
                                      const float2 (&of_row)[2]) {
#if HAS_CAP
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) s[i] = capped(s[i]);
#endif
  if (sight.partly(key)) hide(s, key, sight);
#if !HAS_CAP
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) s[i] = exp2_approximate(fmaf(s[i], TO_LOG2, -of_row[i / 2 % 2].x));
#endif
}

// ds from what `weigh` leaves and do.v.
__device__ __forceinline__ void incline(float (&s)[KEYS / 2], const float (&dp)[KEYS / 2], const float2 (&of_row)[2]) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) {
    const float d = dp[i] - of_row[i / 2 % 2].y;
#if HAS_CAP
    // A hidden score is minus infinity: its weight is zero, its slope must not be infinite.
    const float share = fmaxf(s[i], -1.0f);
    s[i] = exp2_approximate(fmaf(s[i], TO_LOG2, -of_row[i / 2 % 2].x)) * d * fmaf(-share, share, 1.0f);
#else
    s[i] *= d;
#endif
  }
}

// A thread's life: feeds the copy engine, item by item: q and d_o, then each tile's keys and values.
__device__ __forceinline__ void feed(const Item (&items)[2], u32 at, const Barriers& on, const TensorMap* q,
                                     const TensorMap* k, const TensorMap* v, const TensorMap* d_o) {
  Place<2> slot = {0, 0};
  Place<Q_STAGES> of_q = {0, 1};
  Place<STAGES> of_k = {0, 1};
  Place<V_STAGES> of_v = {0, 1};
  while (true) {
    barrier_wait(on.known + 8 * slot.stage, slot.parity);
    const Item item = items[slot.stage];
    barrier_arrive(on.forgotten + 8 * slot.stage);
    slot.advance();
    if (item.b < 0) return;
    const u32 to = at + AT_Q + of_q.stage * Q_STAGE, barrier = on.q_ready + 8 * of_q.stage;
    barrier_wait(on.q_taken + 8 * of_q.stage, of_q.parity);
    barrier_expect(barrier, Q_STAGE);
    for (int w = 0; w < WARPGROUPS; w++) {
      const int query = item.query + w / HEADS_PER_BLOCK * 64, head = item.head + w % HEADS_PER_BLOCK;
      fetch<64, WIDE>(to + w * Q_TILE, q, barrier, item.b, query, head);
      fetch<64, WIDE_V>(to + WARPGROUPS * Q_TILE + w * DO_TILE, d_o, barrier, item.b, query, head);
    }
    of_q.advance();
    for (int tile = item.tiles - 1; tile >= 0; tile--) {
      const int key = item.key + tile * KEYS;
      const u32 k_ready = on.k_ready + 8 * of_k.stage, v_ready = on.v_ready + 8 * of_v.stage;
      barrier_wait(on.k_taken + 8 * of_k.stage, of_k.parity);
      barrier_expect(k_ready, K_STAGE);
      fetch<KEYS, WIDE>(at + AT_K + of_k.stage * K_STAGE, k, k_ready, item.b, key, item.kv_head);
      barrier_wait(on.v_taken + 8 * of_v.stage, of_v.parity);
      barrier_expect(v_ready, V_STAGE);
      fetch<KEYS, WIDE_V>(at + AT_V + of_v.stage * V_STAGE, v, v_ready, item.b, key, item.kv_head);
      of_k.advance(), of_v.advance();
    }
  }
}

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1)
attention_gradient_q(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                     const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap d_o,
                     const __grid_constant__ TensorMap dq, const int* __restrict__ document_start,
                     const int* __restrict__ last_key, const float* __restrict__ statistics,
                     int* __restrict__ drawing) {
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) u64 words[BARRIERS];
  __shared__ Item items[2];
  __shared__ int2 intervals[2][QUERIES];
  __shared__ float2 of_rows[2 * WARPGROUPS * 64];
  const u32 at = (shared_address(memory) + 1023) & ~1023u;
  const Barriers on = make_barriers(words);
  if (threadIdx.x < 128) {
    few_registers<WARPGROUPS>();
    if (threadIdx.x / 32 == 1)
      look_up(items, intervals, of_rows, on.known, on.forgotten, document_start, last_key, statistics, drawing);
    if (threadIdx.x == 0) feed(items, at, on, &q, &k, &v, &d_o);
    return;
  }

  many_registers<WARPGROUPS>();
  const int mine = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
  const int my_rows = mine / HEADS_PER_BLOCK * 64;
  Place<2> slot = {0, 0};
  Place<Q_STAGES> of_q = {0, 0};
  Place<STAGES> of_k = {0, 0};
  Place<V_STAGES> of_v = {0, 0};
  begin_turns(mine);
  while (true) {
    barrier_wait(on.known + 8 * slot.stage, slot.parity);
    const Item item = items[slot.stage];
    if (item.b < 0) break;
    const Sight sight = sight_of(intervals[slot.stage] + my_rows, item.key);
    const float2* mine_of_rows = of_rows + (slot.stage * WARPGROUPS + mine) * 64 + thread / 32 * 16 + thread % 32 / 4;
    const float2 of_row[2] = {mine_of_rows[0], mine_of_rows[8]};
    meet<128>(5 + mine);
    if (thread == 0) barrier_arrive(on.forgotten + 8 * slot.stage);
    slot.advance();

    const u32 q_tile = at + AT_Q + of_q.stage * Q_STAGE + mine * Q_TILE;
    const u32 do_tile = at + AT_Q + of_q.stage * Q_STAGE + WARPGROUPS * Q_TILE + mine * DO_TILE;
    float sum[WIDE / 2], s[KEYS / 2], dp[KEYS / 2];
    u32 ds[KEYS / 4];
    clear(sum);
    pass_by(item.tiles - 1, sight.end, of_k, of_v, on);
    int tile = sight.end - 1, before;
    barrier_wait(on.q_ready + 8 * of_q.stage, of_q.parity);
    int key = item.key + tile * KEYS;
    barrier_wait(on.k_ready + 8 * of_k.stage, of_k.parity);
    barrier_wait(on.v_ready + 8 * of_v.stage, of_v.parity);
    products_begin();
    scores<D, KEYS>(s, q_tile, at + AT_K + of_k.stage * K_STAGE);
    scores<DV, KEYS>(dp, do_tile, at + AT_V + of_v.stage * V_STAGE);
    products_commit();
    products_wait<0>();
    if (thread == 0) barrier_arrive(on.v_taken + 8 * of_v.stage);
    weigh(s, key, sight, of_row);
    incline(s, dp, of_row);
    round_pairs(ds, s);
    before = of_k.stage;
    of_k.advance(), of_v.advance();
    for (tile--; tile >= sight.begin; tile--) {
      barrier_wait(on.k_ready + 8 * of_k.stage, of_k.parity);
      barrier_wait(on.v_ready + 8 * of_v.stage, of_v.parity);
      take_turn(mine);
      products_begin();
      scores<D, KEYS>(s, q_tile, at + AT_K + of_k.stage * K_STAGE);
      products_commit();
      scores<DV, KEYS>(dp, do_tile, at + AT_V + of_v.stage * V_STAGE);
      products_commit();
      weighted_rows<KEYS, WIDE>(sum, ds, at + AT_K + before * K_STAGE);
      products_commit();
      pass_turn(mine);
      key -= KEYS;
      products_wait<2>();
      weigh(s, key, sight, of_row);
      products_wait<1>();
      if (thread == 0) barrier_arrive(on.v_taken + 8 * of_v.stage);
      incline(s, dp, of_row);
      products_wait<0>();
      if (thread == 0) barrier_arrive(on.k_taken + 8 * before);
      round_pairs(ds, s);
      before = of_k.stage;
      of_k.advance(), of_v.advance();
    }
    products_begin();
    weighted_rows<KEYS, WIDE>(sum, ds, at + AT_K + before * K_STAGE);
    products_commit();
    products_wait<0>();
    if (thread == 0) barrier_arrive(on.k_taken + 8 * before);
    lay_rows<WIDE>(q_tile, sum, SCALE, SCALE);
    publish_to_products();
    meet<128>(5 + mine);
    if (thread == 0) {
      store_rows<WIDE>(q_tile, &dq, item.b, item.query + my_rows, item.head + mine % HEADS_PER_BLOCK);
      stores_read<0>();
      barrier_arrive(on.q_taken + 8 * of_q.stage);
    }
    pass_by(tile, 0, of_k, of_v, on);
    of_q.advance();
  }
  if (thread == 0) stores_done();
}
