// Gradients of attention on Hopper in one pass, for heads of up to 128 columns:
//   p_ij = exp(s_ij - lse_i), ds_ij = p_ij (do_i.v_j - delta_i) [times 1 - (s_ij / SOFT_CAP)^2], delta_i = do_i.o_i
//   dq_i = SCALE sum_j ds_ij k_j, dk_j = SCALE sum_i ds_ij q_i, dv_j = sum_i p_ij do_i; see the forward pass for s.
// q, dq [BATCH, TOKENS, HEADS, D], d_o [BATCH, TOKENS, HEADS, DV], k, dk, v, dv [BATCH, TOKENS, KV_HEADS, D | DV],
// strided in the first three axes; statistics and intervals by `attention_statistics`.
// A block owns a tile of 128 keys of one key head: it holds their k and v in shared memory and the sums of dk and dv in
// registers while it walks over the steps that see them. Two warpgroups own 64 keys each. Scores are computed with the
// keys as rows, so that p and ds already are in registers as the products for dv and dk take them; ds goes through
// shared memory for dq, of which each warpgroup multiplies half of the columns. The next step's scores are multiplied
// before a step's dq is handed over; with wide heads registers then suffice only if dk takes ds from shared memory,
// too.
// dq of a step's queries is summed over the tiles of keys in f32 in global memory, in the order of the tiles: so two
// runs give the same bits without storing all scores. Consumers leave their part in shared memory; two threads, one for
// every other step, wait for the tile's turn and let the copy engine add it. The last tile of a step writes dq itself.
// Tiles walk from the last block of queries to the first, and tickets go up with the tiles: a tile trails the one
// before it by a step, and waits for none that is not yet in flight.
// Where key heads are few, two blocks have half of the query heads of a key head each (SHARES): `shares.cuh`.
// H200: heads of 128, 8 x 2048 tokens 400 TFLOP/s, 1 x 8192 462, 1 x 32768 524; of 64, 4 x 4096 352.
#define BLOCK_ALIGNMENT 64
#define TILE 128
#include "turns.cuh"
#include "weights.cuh"
#include "shares.cuh"

#define DS_BYTES (TILE * 128)
#define AT_DS (AT_ROWS + STAGES * ROWS_STAGE)
#define AT_PARTS (AT_DS + DS_BYTES)
#define MINE (WIDE / 2)                   // columns of dq of a warpgroup
#define NARROW (WIDE + WIDE_V <= 128)     // registers suffice for more products in flight
#define READERS 5                         // of an item: consumers, the copies' thread, the turns' threads

extern "C" __global__ void __launch_bounds__(384, 1)
attention_gradients(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                    const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap d_o,
                    const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv, u16* __restrict__ dq,
                    const float* __restrict__ statistics, const int2* __restrict__ intervals,
                    float4* __restrict__ dq_sums, int* __restrict__ drawing, int* __restrict__ turn_counts,
                    float4* __restrict__ sums_of_shares, int* __restrict__ ready_shares) {
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) u64 words[BARRIERS + 8];
  __shared__ Item items[2];
  __shared__ int before[2];
  const u32 at = (shared_address(memory) + 1023) & ~1023u;
  const Turns turns = make_turns(shared_address(words + BARRIERS), 8);
  const u32 ds_taken = shared_address(words + BARRIERS + 6), ds_ready = ds_taken + 8;
  if (threadIdx.x == 0) barrier_init(ds_taken, 2), barrier_init(ds_ready, 8);
  const Barriers on = make_barriers<READERS, 2, 2>(shared_address(words));

  if (threadIdx.x < 128) {
    few_registers<2>();
    const int role = threadIdx.x / 32;
    if (role == 1) look_up(items, on, intervals, drawing);
    if (threadIdx.x == 0) feed(items, at, on, &q, &k, &v, &d_o, statistics, intervals);
    if (role >= 2 && threadIdx.x % 32 == 0)
      keep_turns(items, role - 2, on, turns, at + AT_PARTS + (role - 2) * PART_BYTES, intervals, dq_sums, turn_counts);
    return;
  }

  many_registers<2>();
  const int mine = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  unsigned char* aligned = memory + (at - shared_address(memory));
  const u32 ds_tile = at + AT_DS;
  const int stored_row = mine * 64 + warp * 16 + lane % 16;
  Place<2> slot = {0, 0};
  Place<KV_STAGES> of_keys = {0, 0};
  Place<STAGES> of_step = {0, 0};
  int which = 0;
  u32 taken_parity = 1, ready_parity = 0, emptied_parity = 3, turn_parity = 0;
  while (true) {
    barrier_wait(on.known + 8 * slot.stage, slot.parity);
    const Item& item = items[slot.stage];
    if (item.b < 0) break;
    const int b = item.b, kv_head = item.kv_head, head = item.head, tile = item.key / TILE;
    const int blocks = item.blocks, first_query = item.query;
    const int first_key = item.key + mine * 64, warp_key = first_key + warp * 16, key = warp_key + lane / 4;
    meet<128>(5 + mine);
    if (thread == 0) barrier_arrive(on.forgotten + 8 * slot.stage);
    slot.advance();

    const u32 k_tile = at + AT_KV + of_keys.stage * KV_STAGE;
    const u32 my_k = k_tile + mine * K_ROWS, my_v = k_tile + 2 * K_ROWS + mine * V_ROWS;
    // This warpgroup's columns of all keys of the tile.
    const u32 my_columns = k_tile + (WIDE == 128 ? mine * HALF : mine * 64);
    float dk_sum[WIDE / 2], dv_sum[WIDE_V / 2], s[32], dp[32];
    clear(dk_sum), clear(dv_sum);
    barrier_wait(on.keys_ready + 8 * of_keys.stage, of_keys.parity);

    // A step's scores, and with narrow heads do.v, are multiplied before dq of the step before is handed over.
    const auto multiply = [&](int stage) {
      const u32 q_tile = at + AT_STEPS + stage * STEP;
      products_begin();
      scores<D, 64>(s, my_k, q_tile);
      products_commit();
#if NARROW
      scores<DV, 64>(dp, my_v, q_tile + K_ROWS);
      products_commit();
#endif
    };
    barrier_wait(on.ready + 8 * of_step.stage, of_step.parity);
    multiply(of_step.stage);
    products_wait<0>();
    for (int left = EACH * blocks - 1; left >= 0; left--) {
      const int stage = of_step.stage;
      const u32 q_tile = at + AT_STEPS + stage * STEP, do_tile = q_tile + K_ROWS;
      const OfQueries of = of_queries(aligned + AT_ROWS + stage * ROWS_STAGE);
      const bool partly = partly_seen(of, warp_key);
      const bool first = of.intervals[0].x / TILE == tile, last = of.intervals[31].w / TILE == tile;
      u32 p[16], ds[16];
#if !NARROW
      products_begin();
      scores<DV, 64>(dp, my_v, do_tile);
      products_commit();
      if (HAS_CAP) products_wait<0>();
#endif
      if (HAS_CAP) bend(s, dp, of);
      weigh(s, p, of, key, partly);
      products_begin();
      weighted_rows<64, WIDE_V>(dv_sum, p, do_tile);
      products_commit();
      if (!NARROW && !HAS_CAP) products_wait<1>();
      incline(ds, s, dp, of);
      barrier_wait(ds_taken, taken_parity);
      taken_parity ^= 1;
#pragma unroll
      for (int j = 0; j < 8; j += 2)
        store_matrices(ds_tile + swizzled(stored_row, j + lane / 16), ds[2 * j], ds[2 * j + 1], ds[2 * j + 2],
                       ds[2 * j + 3]);
      publish_to_products();
      __syncwarp();
      if (lane == 0) barrier_arrive(ds_ready);

#if NARROW
      products_begin();
      weighted_rows<64, WIDE>(dk_sum, ds, q_tile);
      products_commit();
#endif
      of_step.advance();
      // No step follows the last one of an item: the result of this product is not read then.
      if (left > 0) barrier_wait(on.ready + 8 * of_step.stage, of_step.parity);
      multiply(of_step.stage);
      barrier_wait(ds_ready, ready_parity);
      ready_parity ^= 1;
      float part[MINE / 2];
      products_begin();
#pragma unroll
      for (int c = 0; c < TILE / 16; c++)
        product<1, 1>(part, rows_summed(ds_tile + c * 2048, DS_BYTES),
                      rows_summed(my_columns + c / 4 * K_ROWS + c % 4 * 2048, HALF), c);
      products_commit();
#if !NARROW
#pragma unroll
      for (int c = 0; c < 4; c++)
        product<0, 1>(dk_sum, columns_summed(ds_tile + mine * HALF + c * 32), rows_summed(q_tile + c * 2048, HALF), 1);
      products_commit();
#endif
      products_wait<!NARROW>();
      if (NARROW && thread == 0) barrier_arrive(ds_taken), barrier_arrive(on.taken + 8 * stage);

      const int query = first_query + left / EACH * 64, h = head + EACH - 1 - left % EACH;
      if (!last) {
        barrier_wait(turns.emptied + 8 * which, emptied_parity >> which & 1);
        emptied_parity ^= 1 << which;
        float4* to = (float4*)(aligned + AT_PARTS + which * PART_BYTES + mine * (PART_BYTES / 2)) + thread;
#pragma unroll
        for (int i = 0; i < MINE / 8; i++)
          to[i * 128] = make_float4(part[4 * i], part[4 * i + 1], part[4 * i + 2], part[4 * i + 3]);
        publish_to_products();
        __syncwarp();
        if (lane == 0) barrier_arrive(turns.filled + 8 * which);
      } else {
        const float4* sums = dq_sums + ((size_t)(b * HEADS + h) * Q_BLOCKS + query / 64) * (PART_BYTES / 16) +
                             mine * (PART_BYTES / 32) + thread;
        float4 sum[MINE / 8] = {};
        barrier_wait(turns.ours + 8 * which, turn_parity >> which & 1);
        turn_parity ^= 1 << which;
        if (lane == 0) barrier_arrive(turns.filled + 8 * which);
        if (!first) {
#pragma unroll
          for (int i = 0; i < MINE / 8; i++) sum[i] = __ldcg(sums + i * 128);
        }
        const int row = query + warp * 16 + lane / 4;
        u16* to = dq + (size_t)b * DQ_B + (size_t)h * DQ_H + mine * MINE + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < MINE / 8; i++) {
          const float* x = part + 4 * i;
          const u32 upper = pair((sum[i].x + x[0]) * SCALE, (sum[i].y + x[1]) * SCALE);
          const u32 lower = pair((sum[i].z + x[2]) * SCALE, (sum[i].w + x[3]) * SCALE);
          const bool inside = mine * MINE + i * 8 < D;
          if (inside && row < TOKENS) *(u32*)(to + (size_t)row * DQ_S + i * 8) = upper;
          if (inside && row + 8 < TOKENS) *(u32*)(to + (size_t)(row + 8) * DQ_S + i * 8) = lower;
        }
      }
      which ^= 1;
      products_wait<0>();
      if (!NARROW && thread == 0) barrier_arrive(ds_taken), barrier_arrive(on.taken + 8 * stage);
    }
    meet<256>(2);
    if (SHARES == 2) {
      const int place = ((b * KV_HEADS + kv_head) * K_TILES + tile) * 2 + mine;
      const bool all = joined(dk_sum, dv_sum, sums_of_shares + (size_t)place * SHARE_PIECES * 128, ready_shares + place * 2,
                              before + mine, 5 + mine);
      if (!all) {
        if (thread == 0) barrier_arrive(on.keys_taken + 8 * of_keys.stage);
        of_keys.advance();
        continue;
      }
    }
    store_gradients(dk_sum, dv_sum, my_k, my_v, &dk, &dv, b, first_key, kv_head, 5 + mine,
                    on.keys_taken + 8 * of_keys.stage);
    of_keys.advance();
  }
  if (thread == 0) stores_done();
}
