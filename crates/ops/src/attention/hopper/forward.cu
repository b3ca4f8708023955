// Attention on Hopper, bf16 or f16, heads of up to 256 columns:
//   o_i = sum_j p_ij v_j, p_ij = exp(s_ij - lse_i), s_ij = SCALE q_i.k_j, or SOFT_CAP tanh(SCALE q_i.k_j / SOFT_CAP),
//   over the keys j of interval i (see keys_of); lse_i = log(sum_j exp(s_ij) [+ exp(sink of the head)]).
// q, o [BATCH, TOKENS, HEADS, D | DV], k, v [BATCH, TOKENS, KV_HEADS, D | DV], strided in the first three axes; lse f32
// [BATCH, HEADS, TOKENS].
// An item is QUERIES queries of HEADS_PER_BLOCK heads that share a key head: WARPGROUPS times 64 rows, of which each
// warpgroup owns 64. It visits tiles of KEYS keys from the last that a row sees to the first. Blocks stay and draw items
// by ticket; one warp looks up what the rows of the next item see, one thread feeds the copy engine. A warpgroup
// multiplies a tile's scores before it multiplies the weights of the tile before; where all of them visit the same tiles
// they take turns at it, so that one's exponentials fall into the other's products.
// H200, TFLOP/s over the pairs seen: heads of 128, 8192 tokens 619; of 64, 4096 tokens 407 to 430; of 256, 4096 tokens 509;
// documents of about 200 tokens 233, 158, 188.
#include "queries.cuh"
#include "types.cuh"

#ifndef SINK_T
#define SINK_T float
#endif

// Shared memory, in bytes from its aligned start; q's tile of a warpgroup takes o in the end.
#define WIDEST (WIDE > WIDE_V ? WIDE : WIDE_V)
#define Q_TILE (WIDEST * 128)
#define Q_STAGE (WARPGROUPS * Q_TILE)
#define K_STAGE (KEYS * WIDE * 2)
#define V_STAGE (KEYS * WIDE_V * 2)
#define AT_Q 0
#define AT_K (AT_Q + Q_STAGES * Q_STAGE)
#define AT_V (AT_K + STAGES * K_STAGE)

// exp of a tile's scores, for the two rows of a thread; `factor` is what sums so far are to be multiplied by.
__device__ __forceinline__ void soften(float (&s)[KEYS / 2], float (&greatest)[2], float (&sum)[2], float (&factor)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float top = greatest[r];
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) top = fmaxf(top, s[i / 2 * 4 + 2 * r + i % 2]);
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const float shift = top == -INFINITE ? 0.0f : top * TO_LOG2;
    factor[r] = exp2_approximate(fmaf(greatest[r], TO_LOG2, -shift));
    greatest[r] = top;
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
      float& x = s[i / 2 * 4 + 2 * r + i % 2];
      x = exp2_approximate(fmaf(x, TO_LOG2, -shift));
      part += x;
    }
    sum[r] = fmaf(sum[r], factor[r], part);
  }
}

// Scores of a tile that starts at `key`: capped, those outside the rows' intervals gone.
__device__ __forceinline__ void restrict_scores(float (&s)[KEYS / 2], int key, bool partly, const int (&first)[2],
                                                const int (&last)[2]) {
#if HAS_CAP
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) s[i] = capped(s[i]);
#endif
  if (partly) hide(s, key, first, last);
}

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1)
attention_forward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                  const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o,
                  const int* __restrict__ document_start, const int* __restrict__ last_key,
                  const SINK_T* __restrict__ sink, float* __restrict__ lse, int* __restrict__ ticket) {
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) u64 barriers[4 + 2 * Q_STAGES + 4 * STAGES];
  __shared__ Item items[2];
  __shared__ int2 intervals[2][QUERIES];
  const u32 at = (shared_address(memory) + 1023) & ~1023u;
  const u32 known = shared_address(barriers), forgotten = known + 16, q_ready = forgotten + 16,
            q_taken = q_ready + 8 * Q_STAGES, k_ready = q_taken + 8 * Q_STAGES, k_taken = k_ready + 8 * STAGES,
            v_ready = k_taken + 8 * STAGES, v_taken = v_ready + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) barrier_init(known + 8 * i, 1), barrier_init(forgotten + 8 * i, WARPGROUPS + 1);
    for (int i = 0; i < Q_STAGES; i++) barrier_init(q_ready + 8 * i, 1), barrier_init(q_taken + 8 * i, WARPGROUPS);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(k_ready + 8 * i, 1), barrier_init(k_taken + 8 * i, WARPGROUPS);
      barrier_init(v_ready + 8 * i, 1), barrier_init(v_taken + 8 * i, WARPGROUPS);
    }
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
    if (threadIdx.x / 32 == 1) {
      look_up(items, intervals, nullptr, known, forgotten, document_start, last_key, nullptr, ticket);
    }
    if (threadIdx.x == 0) {
      int slot = 0, q_stage = 0, k_stage = 0, v_stage = 0;
      u32 parity = 0, q_parity = 1, k_parity = 1, v_parity = 1;
      while (true) {
        barrier_wait(known + 8 * slot, parity);
        const Item item = items[slot];
        barrier_arrive(forgotten + 8 * slot);
        slot ^= 1, parity ^= slot == 0;
        if (item.b < 0) break;
        const u32 to = at + AT_Q + q_stage * Q_STAGE, barrier = q_ready + 8 * q_stage;
        barrier_wait(q_taken + 8 * q_stage, q_parity);
        barrier_expect(barrier, WARPGROUPS * WIDE * 128);
        for (int w = 0; w < WARPGROUPS; w++)
          fetch<64, WIDE>(to + w * Q_TILE, &q, barrier, item.b, item.query + w / HEADS_PER_BLOCK * 64,
                          item.head + w % HEADS_PER_BLOCK);
        if (++q_stage == Q_STAGES) q_stage = 0, q_parity ^= 1;
        // The keys of a tile, then the values of the tile before.
        for (int tile = item.tiles - 1; tile >= -1; tile--) {
          if (tile >= 0) {
            barrier_wait(k_taken + 8 * k_stage, k_parity);
            barrier_expect(k_ready + 8 * k_stage, K_STAGE);
            fetch<KEYS, WIDE>(at + AT_K + k_stage * K_STAGE, &k, k_ready + 8 * k_stage, item.b, item.key + tile * KEYS,
                              item.kv_head);
            if (++k_stage == STAGES) k_stage = 0, k_parity ^= 1;
          }
          if (tile < item.tiles - 1) {
            barrier_wait(v_taken + 8 * v_stage, v_parity);
            barrier_expect(v_ready + 8 * v_stage, V_STAGE);
            fetch<KEYS, WIDE_V>(at + AT_V + v_stage * V_STAGE, &v, v_ready + 8 * v_stage, item.b,
                                item.key + (tile + 1) * KEYS, item.kv_head);
            if (++v_stage == STAGES) v_stage = 0, v_parity ^= 1;
          }
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
  const int my_rows = mine / HEADS_PER_BLOCK * 64, my_row = my_rows + warp * 16 + lane / 4;
  int slot = 0, q_stage = 0, stage = 0, v_stage = 0;
  u32 known_parity = 0, q_parity = 0, parity = 0, v_parity = 0;
#if TURNS
  if (mine == WARPGROUPS - 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
#endif
  while (true) {
    barrier_wait(known + 8 * slot, known_parity);
    const Item item = items[slot];
    if (item.b < 0) break;
    const int2* rows = intervals[slot];
    const int2 upper = rows[my_row], lower = rows[my_row + 8];
    const int first[2] = {upper.x, lower.x}, last[2] = {upper.y, lower.y};
    // Tiles that a row of this warpgroup sees, and keys that all rows of this warp see.
    const int end = (rows[my_rows + 63].y - item.key) / KEYS + 1, begin = (rows[my_rows].x - item.key) / KEYS;
    const int all_from = rows[my_rows + warp * 16 + 15].x, all_to = rows[my_rows + warp * 16].y - (KEYS - 1);
    __syncwarp();
    asm volatile("bar.sync %0, 128;" ::"r"(5 + mine) : "memory");
    if (thread == 0) barrier_arrive(forgotten + 8 * slot);
    slot ^= 1, known_parity ^= slot == 0;

    const u32 q_tile = at + AT_Q + q_stage * Q_STAGE + mine * Q_TILE;
    float output[WIDE_V / 2], s[KEYS / 2], greatest[2] = {-INFINITE, -INFINITE}, sum[2] = {0.0f, 0.0f}, factor[2];
    u32 p[KEYS / 4];
#pragma unroll
    for (int i = 0; i < WIDE_V / 2; i++) output[i] = 0.0f;

    int tile = item.tiles - 1;
    for (; tile >= end; tile--) {
      barrier_wait(k_ready + 8 * stage, parity);
      barrier_wait(v_ready + 8 * stage, parity);
      if (thread == 0) barrier_arrive(k_taken + 8 * stage), barrier_arrive(v_taken + 8 * stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    v_stage = stage, v_parity = parity;
    barrier_wait(q_ready + 8 * q_stage, q_parity);
    barrier_wait(k_ready + 8 * stage, parity);
    products_begin();
    scores<D, KEYS>(s, q_tile, at + AT_K + stage * K_STAGE);
    products_commit();
    products_wait<0>();
    if (thread == 0) barrier_arrive(k_taken + 8 * stage);
    if (++stage == STAGES) stage = 0, parity ^= 1;
    int key = item.key + tile * KEYS;
    restrict_scores(s, key, key < all_from || key > all_to, first, last);
    soften(s, greatest, sum, factor);
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i] = pair(s[2 * i], s[2 * i + 1]);

    for (tile--; tile >= begin; tile--) {
      barrier_wait(k_ready + 8 * stage, parity);
#if TURNS
      asm volatile("bar.sync %0, 256;" ::"r"(1 + mine) : "memory");
#endif
      products_begin();
      scores<D, KEYS>(s, q_tile, at + AT_K + stage * K_STAGE);
      products_commit();
      barrier_wait(v_ready + 8 * v_stage, v_parity);
      products_begin();
      weighted_rows<KEYS, WIDE_V>(output, p, at + AT_V + v_stage * V_STAGE);
      products_commit();
#if TURNS
      asm volatile("bar.arrive %0, 256;" ::"r"(1 + (mine + 1) % WARPGROUPS) : "memory");
#endif
      products_wait<1>();
      if (thread == 0) barrier_arrive(k_taken + 8 * stage);
      key -= KEYS;
      restrict_scores(s, key, key < all_from || key > all_to, first, last);
      soften(s, greatest, sum, factor);
      products_wait<0>();
      if (thread == 0) barrier_arrive(v_taken + 8 * v_stage);
#pragma unroll
      for (int i = 0; i < WIDE_V / 2; i++) output[i] *= factor[i / 2 % 2];
#pragma unroll
      for (int i = 0; i < KEYS / 4; i++) p[i] = pair(s[2 * i], s[2 * i + 1]);
      v_stage = stage, v_parity = parity;
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    barrier_wait(v_ready + 8 * v_stage, v_parity);
    products_begin();
    weighted_rows<KEYS, WIDE_V>(output, p, at + AT_V + v_stage * V_STAGE);
    products_commit();

    const int head = item.head + mine % HEADS_PER_BLOCK;
    float share[2], row_lse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float total = sum[r], top = greatest[r] * TO_LOG2, scale = 1.0f;
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
#if HAS_SINK
      const float of_sink = to_float(sink[head]) * LOG2E, higher = fmaxf(top, of_sink);
      scale = exp2_approximate(top - higher), top = higher;
      total = fmaf(total, scale, exp2_approximate(of_sink - higher));
#endif
      share[r] = scale / total;
      row_lse[r] = (top + log2f(total)) * LN2;
    }
    products_wait<0>();
    if (thread == 0) barrier_arrive(v_taken + 8 * v_stage);
    lay_rows<WIDE_V>(q_tile, output, share[0], share[1]);
    publish_to_products();
    asm volatile("bar.sync %0, 128;" ::"r"(5 + mine) : "memory");
    if (thread == 0) store_rows<WIDE_V>(q_tile, &o, item.b, item.query + my_rows, head);
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int query = item.query + my_row + r * 8;
        if (query < TOKENS) lse[(size_t)(item.b * HEADS + head) * TOKENS + query] = row_lse[r];
      }
    }
    if (thread == 0) {
      stores_read<0>();
      barrier_arrive(q_taken + 8 * q_stage);
    }
    for (; tile >= 0; tile--) {
      barrier_wait(k_ready + 8 * stage, parity);
      barrier_wait(v_ready + 8 * stage, parity);
      if (thread == 0) barrier_arrive(k_taken + 8 * stage), barrier_arrive(v_taken + 8 * stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    if (++q_stage == Q_STAGES) q_stage = 0, q_parity ^= 1;
  }
  if (thread == 0) stores_done();
}
