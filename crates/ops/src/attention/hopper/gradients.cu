// Gradients of attention on Hopper in one pass, for heads of up to 128 columns:
//   p_ij = exp(s_ij - lse_i), ds_ij = p_ij (do_i.v_j - delta_i) [times 1 - (s_ij / SOFT_CAP)^2], delta_i = do_i.o_i
//   dq_i = SCALE sum_j ds_ij k_j, dk_j = SCALE sum_i ds_ij q_i, dv_j = sum_i p_ij do_i; see the forward pass for s.
// q, dq [BATCH, TOKENS, HEADS, D], d_o [BATCH, TOKENS, HEADS, DV], k, dk, v, dv [BATCH, TOKENS, KV_HEADS, D | DV], strided in
// the first three axes; statistics and intervals by `attention_statistics`.
// A block owns a tile of 128 keys of one key head: it holds their k and v in shared memory and the sums of dk and dv in
// registers while it walks over the steps that see them. Two warpgroups own 64 keys each. Scores are computed with the
// keys as rows, so that p and ds already lie in registers as the products for dv and dk take them; ds goes through
// shared memory for dq, of which each warpgroup multiplies half of the columns.
// dq of a step's queries is summed over the tiles of keys in f32 in global memory, in the order of the tiles: so two runs
// give the same bits without storing all scores. Consumers leave their part in shared memory; two threads, one for every
// other step, wait for the tile's turn and let the copy engine add it. The last tile of a step writes dq itself. Tiles
// walk from the last block of queries to the first, and tickets go up with the tiles: a tile trails the one before it by a
// step, and waits for none that is not yet under way.
// H200: heads of 128, 8 x 2048 tokens 400 TFLOP/s, 1 x 8192 462, 1 x 32768 524; of 64, 4 x 4096 352.
#define BLOCK_ALIGNMENT 64
#define TILE 128
#include "keys.cuh"

#define Q_BLOCKS ((TOKENS + 63) / 64)
#define DS_BYTES (TILE * 128)
#define PART_BYTES (64 * WIDE * 4)
#define AT_DS (AT_ROWS + STAGES * ROWS_STAGE)
#define AT_PARTS (AT_DS + DS_BYTES)
#define MINE (WIDE / 2)  // columns of dq of a warpgroup
#define READERS 5        // of an item: consumers, the copies' thread, the turns' threads

__device__ __forceinline__ int turn_at(const int* turn) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(turn) : "memory");
  return value;
}
__device__ __forceinline__ void set_turn(int* turn, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(value) : "memory");
}
// A part of dq from shared memory to the sums: as the first, or added.
__device__ __forceinline__ void give(float4* sums, u32 part, bool first) {
  if (first)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(sums), "r"(part), "n"(PART_BYTES)
                 : "memory");
  else
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(sums), "r"(part),
                 "n"(PART_BYTES)
                 : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// The life of the thread that keeps the turns of every other step.
__device__ __forceinline__ void keep_turns(const Item (&items)[2], int which, u32 known, u32 forgotten, u32 filled,
                                           u32 emptied, u32 our_turn, u32 part, const int2* intervals, float4* dq_sums,
                                           int* turns) {
  int slot = 0, step = 0;
  u32 parity = 0, filled_parity = 0;
  while (true) {
    barrier_wait(known + 8 * slot, parity);
    const Item& item = items[slot];
    const int b = item.b, kv_head = item.kv_head, tile = item.key / TILE, first_block = item.query / 64, blocks = item.blocks;
    barrier_arrive(forgotten + 8 * slot);
    slot ^= 1, parity ^= slot == 0;
    if (b < 0) return;
    for (int block = first_block + blocks - 1; block >= first_block; block--) {
      const int2* rows = intervals + b * PADDED + block * 64;
      const int turn = tile - rows[0].x / TILE;
      const bool last = rows[63].y / TILE == tile;
      for (int h = kv_head * GROUP; h < (kv_head + 1) * GROUP; h++) {
        if (step++ % 2 != which) continue;
        const size_t at = (size_t)(b * HEADS + h) * Q_BLOCKS + block;
        if (!last) barrier_wait(filled, filled_parity);
        if (turn > 0)
          while (turn_at(turns + at) < turn) {}
        asm volatile("fence.proxy.async;" ::: "memory");
        if (last) {
          barrier_arrive(our_turn);
          barrier_wait(filled, filled_parity);
        }
        filled_parity ^= 1;
        if (last) continue;
        give(dq_sums + at * (PART_BYTES / 16), part, turn == 0);
        stores_read<0>();
        barrier_arrive(emptied);
        stores_done();
        asm volatile("fence.proxy.async;" ::: "memory");
        __threadfence();
        set_turn(turns + at, turn + 1);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
attention_gradients(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                    const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap d_o,
                    const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv, u16* __restrict__ dq,
                    const float* __restrict__ statistics, const int2* __restrict__ intervals,
                    float4* __restrict__ dq_sums, int* __restrict__ ticket, int* __restrict__ turns) {
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) u64 barriers[4 + 2 * KV_STAGES + 2 * STAGES + 7];
  __shared__ Item items[2];
  const u32 at = (shared_address(memory) + 1023) & ~1023u;
  const u32 known = shared_address(barriers), forgotten = known + 16, keys_ready = forgotten + 16,
            keys_taken = keys_ready + 8 * KV_STAGES, ready = keys_taken + 8 * KV_STAGES, taken = ready + 8 * STAGES;
  const u32 filled = taken + 8 * STAGES, emptied = filled + 16, our_turn = emptied + 16, ds_taken = our_turn + 16;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      barrier_init(known + 8 * i, 1), barrier_init(forgotten + 8 * i, READERS);
      barrier_init(filled + 8 * i, 8), barrier_init(emptied + 8 * i, 1), barrier_init(our_turn + 8 * i, 1);
    }
    barrier_init(ds_taken, 2);
    for (int i = 0; i < KV_STAGES; i++) barrier_init(keys_ready + 8 * i, 1), barrier_init(keys_taken + 8 * i, 2);
    for (int i = 0; i < STAGES; i++) barrier_init(ready + 8 * i, 1), barrier_init(taken + 8 * i, 2);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    const int role = threadIdx.x / 32;
    if (role == 1) look_up(items, known, forgotten, intervals, ticket);
    if (threadIdx.x == 0)
      feed(items, at, known, forgotten, keys_ready, keys_taken, ready, taken, &q, &k, &v, &d_o, statistics, intervals);
    if (role >= 2 && threadIdx.x % 32 == 0)
      keep_turns(items, role - 2, known, forgotten, filled + 8 * (role - 2), emptied + 8 * (role - 2),
                 our_turn + 8 * (role - 2), at + AT_PARTS + (role - 2) * PART_BYTES, intervals, dq_sums, turns);
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  const int mine = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  unsigned char* aligned = memory + (at - shared_address(memory));
  const u32 ds_tile = at + AT_DS;
  const int stored_row = mine * 64 + warp * 16 + lane % 16;
  int slot = 0, keys_stage = 0, stage = 0, which = 0;
  u32 known_parity = 0, keys_parity = 0, parity = 0, ds_parity = 1, emptied_parity = 3, turn_parity = 0;
  while (true) {
    barrier_wait(known + 8 * slot, known_parity);
    const Item& item = items[slot];
    if (item.b < 0) break;
    const int b = item.b, kv_head = item.kv_head, tile = item.key / TILE, blocks = item.blocks, first_query = item.query;
    const int first_key = item.key + mine * 64, warp_key = first_key + warp * 16, key = warp_key + lane / 4;
    asm volatile("bar.sync %0, 128;" ::"r"(5 + mine) : "memory");
    if (thread == 0) barrier_arrive(forgotten + 8 * slot);
    slot ^= 1, known_parity ^= slot == 0;

    const u32 k_tile = at + AT_KV + keys_stage * KV_STAGE;
    const u32 my_k = k_tile + mine * K_ROWS, my_v = k_tile + 2 * K_ROWS + mine * V_ROWS;
    // This warpgroup's columns of all keys of the tile.
    const u32 my_columns = k_tile + (WIDE == 128 ? mine * HALF : mine * 64);
    float dk_sum[WIDE / 2], dv_sum[WIDE_V / 2];
#pragma unroll
    for (int i = 0; i < WIDE / 2; i++) dk_sum[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDE_V / 2; i++) dv_sum[i] = 0.0f;
    barrier_wait(keys_ready + 8 * keys_stage, keys_parity);

    for (int left = GROUP * blocks - 1; left >= 0; left--) {
      const u32 q_tile = at + AT_STEPS + stage * STEP, do_tile = q_tile + K_ROWS;
      const unsigned char* rows = aligned + AT_ROWS + stage * ROWS_STAGE;
      const float2 *lse_of = (const float2*)rows + lane % 4, *delta_of = lse_of + 32;
      const int4* intervals_of = (const int4*)(rows + 512);
      barrier_wait(ready + 8 * stage, parity);
      float s[32], dp[32];
      u32 p[16], ds[16];
      products_begin();
      scores<D, 64>(s, my_k, q_tile);
      products_commit();
      scores<DV, 64>(dp, my_v, do_tile);
      products_commit();
      const bool partly = intervals_of[31].z > warp_key || intervals_of[0].y < warp_key + 15;
      const bool first = intervals_of[0].x / TILE == tile, last = intervals_of[31].w / TILE == tile;
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
      barrier_wait(ds_taken, ds_parity);
#pragma unroll
      for (int j = 0; j < 8; j += 2)
        store_matrices(ds_tile + swizzled(stored_row, j + lane / 16), ds[2 * j], ds[2 * j + 1], ds[2 * j + 2],
                       ds[2 * j + 3]);
      publish_to_products();
      meet<256>(1);
      ds_parity ^= 1;

      float part[MINE / 2];
      products_begin();
#pragma unroll
      for (int c = 0; c < TILE / 16; c++)
        product<1, 1>(part, rows_summed(ds_tile + c * 2048, DS_BYTES),
                      rows_summed(my_columns + c / 4 * K_ROWS + c % 4 * 2048, HALF), c);
      products_commit();
      weighted_rows<64, WIDE>(dk_sum, ds, q_tile);
      products_commit();

      const int query = first_query + left / GROUP * 64, h = kv_head * GROUP + GROUP - 1 - left % GROUP;
      if (!last) {
        barrier_wait(emptied + 8 * which, emptied_parity >> which & 1);
        emptied_parity ^= 1 << which;
        products_wait<1>();
        if (thread == 0) barrier_arrive(ds_taken);
        float4* to = (float4*)(aligned + AT_PARTS + which * PART_BYTES + mine * (PART_BYTES / 2)) + thread;
#pragma unroll
        for (int i = 0; i < MINE / 8; i++)
          to[i * 128] = make_float4(part[4 * i], part[4 * i + 1], part[4 * i + 2], part[4 * i + 3]);
        publish_to_products();
        __syncwarp();
        if (lane == 0) barrier_arrive(filled + 8 * which);
      } else {
        const float4* sums =
            dq_sums + ((size_t)(b * HEADS + h) * Q_BLOCKS + query / 64) * (PART_BYTES / 16) + mine * (PART_BYTES / 32) + thread;
        float4 sum[MINE / 8] = {};
        barrier_wait(our_turn + 8 * which, turn_parity >> which & 1);
        turn_parity ^= 1 << which;
        if (lane == 0) barrier_arrive(filled + 8 * which);
        if (!first) {
#pragma unroll
          for (int i = 0; i < MINE / 8; i++) sum[i] = __ldcg(sums + i * 128);
        }
        products_wait<1>();
        if (thread == 0) barrier_arrive(ds_taken);
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
      if (thread == 0) barrier_arrive(taken + 8 * stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    meet<256>(2);
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
