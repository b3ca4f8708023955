// Gradient of attention with respect to q on Hopper:
//   dq_i = SCALE sum_j ds_ij k_j, ds_ij = p_ij (do_i.v_j - delta_i) [times 1 - (s_ij / SOFT_CAP)^2],
//   p_ij = exp(s_ij - lse_i) over the keys of interval i, delta_i = do_i.o_i; see the forward pass for s.
// q, dq [BATCH, TOKENS, HEADS, D], d_o [BATCH, TOKENS, HEADS, DV], k, v [BATCH, TOKENS, KV_HEADS, D | DV], strided in the
// first three axes; statistics (lse log2(e), delta) by `attention_statistics`.
// Work is divided as in the forward pass: a warpgroup owns 64 rows and walks over the tiles of keys that they see. The
// scores of a tile and do.v are multiplied before ds of the tile before is multiplied with its keys, which stay in shared
// memory for both. Nothing is summed across blocks, so the same bits come out in every run, at the price of scores
// that are computed a second time for dk and dv.
// H200, with dk and dv: heads of 256, 2 x 4096 tokens 317 TFLOP/s; documents of about 200 tokens 162 (128), 138 (64), 123.
#include "queries.cuh"

// Shared memory, in bytes from its aligned start; q's tile of a warpgroup takes dq in the end.
#define Q_TILE (WIDE * 128)
#define DO_TILE (WIDE_V * 128)
#define Q_STAGE (WARPGROUPS * (Q_TILE + DO_TILE))
#define K_STAGE (KEYS * WIDE * 2)
#define V_STAGE (KEYS * WIDE_V * 2)
#define AT_Q 0
#define AT_K (AT_Q + Q_STAGES * Q_STAGE)
#define AT_V (AT_K + STAGES * K_STAGE)

// Weights of a tile of keys from its scores, those outside the rows' intervals zero. With a cap only what `incline` needs
// is kept: the weights are taken from the scores there.
__device__ __forceinline__ void weigh(float (&s)[KEYS / 2], int key, bool partly, const int (&first)[2],
                                      const int (&last)[2], const float2 (&of_row)[2]) {
#if HAS_CAP
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) s[i] = capped(s[i]);
#endif
  if (partly) hide(s, key, first, last);
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

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1)
attention_gradient_q(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                     const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap d_o,
                     const __grid_constant__ TensorMap dq, const int* __restrict__ document_start,
                     const int* __restrict__ last_key, const float* __restrict__ statistics,
                     int* __restrict__ ticket) {
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) u64 barriers[4 + 2 * Q_STAGES + 2 * STAGES + 2 * V_STAGES];
  __shared__ Item items[2];
  __shared__ int2 intervals[2][QUERIES];
  __shared__ float2 of_rows[2 * WARPGROUPS * 64];
  const u32 at = (shared_address(memory) + 1023) & ~1023u;
  const u32 known = shared_address(barriers), forgotten = known + 16, q_ready = forgotten + 16,
            q_taken = q_ready + 8 * Q_STAGES, k_ready = q_taken + 8 * Q_STAGES, k_taken = k_ready + 8 * STAGES,
            v_ready = k_taken + 8 * STAGES, v_taken = v_ready + 8 * V_STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) barrier_init(known + 8 * i, 1), barrier_init(forgotten + 8 * i, WARPGROUPS + 1);
    for (int i = 0; i < Q_STAGES; i++) barrier_init(q_ready + 8 * i, 1), barrier_init(q_taken + 8 * i, WARPGROUPS);
    for (int i = 0; i < STAGES; i++) barrier_init(k_ready + 8 * i, 1), barrier_init(k_taken + 8 * i, WARPGROUPS);
    for (int i = 0; i < V_STAGES; i++) barrier_init(v_ready + 8 * i, 1), barrier_init(v_taken + 8 * i, WARPGROUPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;

  if (threadIdx.x < 128) {
#if WARPGROUPS == 3
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#endif
    if (threadIdx.x / 32 == 1)
      look_up(items, intervals, of_rows, known, forgotten, document_start, last_key, statistics, ticket);
    if (threadIdx.x == 0) {
      int slot = 0, q_stage = 0, stage = 0, v_stage = 0;
      u32 parity = 0, q_parity = 1, k_parity = 1, v_parity = 1;
      while (true) {
        barrier_wait(known + 8 * slot, parity);
        const Item item = items[slot];
        barrier_arrive(forgotten + 8 * slot);
        slot ^= 1, parity ^= slot == 0;
        if (item.b < 0) break;
        const u32 to = at + AT_Q + q_stage * Q_STAGE, barrier = q_ready + 8 * q_stage;
        barrier_wait(q_taken + 8 * q_stage, q_parity);
        barrier_expect(barrier, Q_STAGE);
        for (int w = 0; w < WARPGROUPS; w++) {
          const int query = item.query + w / HEADS_PER_BLOCK * 64, head = item.head + w % HEADS_PER_BLOCK;
          fetch<64, WIDE>(to + w * Q_TILE, &q, barrier, item.b, query, head);
          fetch<64, WIDE_V>(to + WARPGROUPS * Q_TILE + w * DO_TILE, &d_o, barrier, item.b, query, head);
        }
        if (++q_stage == Q_STAGES) q_stage = 0, q_parity ^= 1;
        for (int tile = item.tiles - 1; tile >= 0; tile--) {
          const int key = item.key + tile * KEYS;
          barrier_wait(k_taken + 8 * stage, k_parity);
          barrier_expect(k_ready + 8 * stage, K_STAGE);
          fetch<KEYS, WIDE>(at + AT_K + stage * K_STAGE, &k, k_ready + 8 * stage, item.b, key, item.kv_head);
          if (++stage == STAGES) stage = 0, k_parity ^= 1;
          barrier_wait(v_taken + 8 * v_stage, v_parity);
          barrier_expect(v_ready + 8 * v_stage, V_STAGE);
          fetch<KEYS, WIDE_V>(at + AT_V + v_stage * V_STAGE, &v, v_ready + 8 * v_stage, item.b, key, item.kv_head);
          if (++v_stage == V_STAGES) v_stage = 0, v_parity ^= 1;
        }
      }
    }
    return;
  }

#if WARPGROUPS == 3
  asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
#else
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
#endif
  const int mine = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32;
  const int my_rows = mine / HEADS_PER_BLOCK * 64, in_rows = warp * 16 + lane / 4;
  int slot = 0, q_stage = 0, stage = 0, v_stage = 0;
  u32 known_parity = 0, q_parity = 0, parity = 0, v_parity = 0;
#if TURNS
  if (mine == WARPGROUPS - 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
#endif
  while (true) {
    barrier_wait(known + 8 * slot, known_parity);
    const Item item = items[slot];
    if (item.b < 0) break;
    const int2* rows = intervals[slot] + my_rows;
    const int first[2] = {rows[in_rows].x, rows[in_rows + 8].x}, last[2] = {rows[in_rows].y, rows[in_rows + 8].y};
    const float2* mine_of_rows = of_rows + (slot * WARPGROUPS + mine) * 64 + in_rows;
    const float2 of_row[2] = {mine_of_rows[0], mine_of_rows[8]};
    // Tiles that a row of this warpgroup sees, and keys that all rows of this warp see.
    const int end = (rows[63].y - item.key) / KEYS + 1, begin = (rows[0].x - item.key) / KEYS;
    const int all_from = rows[warp * 16 + 15].x, all_to = rows[warp * 16].y - (KEYS - 1);
    asm volatile("bar.sync %0, 128;" ::"r"(5 + mine) : "memory");
    if (thread == 0) barrier_arrive(forgotten + 8 * slot);
    slot ^= 1, known_parity ^= slot == 0;

    const u32 q_tile = at + AT_Q + q_stage * Q_STAGE + mine * Q_TILE;
    const u32 do_tile = at + AT_Q + q_stage * Q_STAGE + WARPGROUPS * Q_TILE + mine * DO_TILE;
    float sum[WIDE / 2], s[KEYS / 2], dp[KEYS / 2];
    u32 ds[KEYS / 4];
#pragma unroll
    for (int i = 0; i < WIDE / 2; i++) sum[i] = 0.0f;
    int tile = item.tiles - 1, before;
    for (; tile >= end; tile--) {
      barrier_wait(k_ready + 8 * stage, parity);
      barrier_wait(v_ready + 8 * v_stage, v_parity);
      if (thread == 0) barrier_arrive(k_taken + 8 * stage), barrier_arrive(v_taken + 8 * v_stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
      if (++v_stage == V_STAGES) v_stage = 0, v_parity ^= 1;
    }
    barrier_wait(q_ready + 8 * q_stage, q_parity);
    int key = item.key + tile * KEYS;
    barrier_wait(k_ready + 8 * stage, parity);
    barrier_wait(v_ready + 8 * v_stage, v_parity);
    products_begin();
    scores<D, KEYS>(s, q_tile, at + AT_K + stage * K_STAGE);
    scores<DV, KEYS>(dp, do_tile, at + AT_V + v_stage * V_STAGE);
    products_commit();
    products_wait<0>();
    if (thread == 0) barrier_arrive(v_taken + 8 * v_stage);
    weigh(s, key, key < all_from || key > all_to, first, last, of_row);
    incline(s, dp, of_row);
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) ds[i] = pair(s[2 * i], s[2 * i + 1]);
    before = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
    if (++v_stage == V_STAGES) v_stage = 0, v_parity ^= 1;
    for (tile--; tile >= begin; tile--) {
      barrier_wait(k_ready + 8 * stage, parity);
      barrier_wait(v_ready + 8 * v_stage, v_parity);
#if TURNS
      asm volatile("bar.sync %0, 256;" ::"r"(1 + mine) : "memory");
#endif
      products_begin();
      scores<D, KEYS>(s, q_tile, at + AT_K + stage * K_STAGE);
      products_commit();
      scores<DV, KEYS>(dp, do_tile, at + AT_V + v_stage * V_STAGE);
      products_commit();
      weighted_rows<KEYS, WIDE>(sum, ds, at + AT_K + before * K_STAGE);
      products_commit();
#if TURNS
      asm volatile("bar.arrive %0, 256;" ::"r"(1 + (mine + 1) % WARPGROUPS) : "memory");
#endif
      key -= KEYS;
      products_wait<2>();
      weigh(s, key, key < all_from || key > all_to, first, last, of_row);
      products_wait<1>();
      if (thread == 0) barrier_arrive(v_taken + 8 * v_stage);
      incline(s, dp, of_row);
      products_wait<0>();
      if (thread == 0) barrier_arrive(k_taken + 8 * before);
#pragma unroll
      for (int i = 0; i < KEYS / 4; i++) ds[i] = pair(s[2 * i], s[2 * i + 1]);
      before = stage;
      if (++stage == STAGES) stage = 0, parity ^= 1;
      if (++v_stage == V_STAGES) v_stage = 0, v_parity ^= 1;
    }
    products_begin();
    weighted_rows<KEYS, WIDE>(sum, ds, at + AT_K + before * K_STAGE);
    products_commit();
    products_wait<0>();
    if (thread == 0) barrier_arrive(k_taken + 8 * before);
    lay_rows<WIDE>(q_tile, sum, SCALE, SCALE);
    publish_to_products();
    asm volatile("bar.sync %0, 128;" ::"r"(5 + mine) : "memory");
    if (thread == 0) {
      store_rows<WIDE>(q_tile, &dq, item.b, item.query + my_rows, item.head + mine % HEADS_PER_BLOCK);
      stores_read<0>();
      barrier_arrive(q_taken + 8 * q_stage);
    }
    for (; tile >= 0; tile--) {
      barrier_wait(k_ready + 8 * stage, parity);
      barrier_wait(v_ready + 8 * v_stage, v_parity);
      if (thread == 0) barrier_arrive(k_taken + 8 * stage), barrier_arrive(v_taken + 8 * v_stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
      if (++v_stage == V_STAGES) v_stage = 0, v_parity ^= 1;
    }
    if (++q_stage == Q_STAGES) q_stage = 0, q_parity ^= 1;
  }
  if (thread == 0) stores_done();
}
