// Attention on Hopper, bf16 or f16, heads of up to 256 columns:
//   o_i = sum_j p_ij v_j, p_ij = exp(s_ij - lse_i), s_ij = SCALE q_i.k_j, or SOFT_CAP tanh(SCALE q_i.k_j / SOFT_CAP),
//   over the keys j of interval i (see keys_of); lse_i = log(sum_j exp(s_ij) [+ exp(sink of the head)]).
// q, o [BATCH, TOKENS, HEADS, D | DV], k, v [BATCH, TOKENS, KV_HEADS, D | DV], strided in the first three axes; lse f32
// [BATCH, HEADS, TOKENS].
// An item is QUERIES queries of HEADS_PER_BLOCK heads that share a key head: WARPGROUPS times 64 rows, of which each
// warpgroup owns 64. It visits tiles of KEYS keys from the last that a row sees to the first. Blocks stay and draw
// items by ticket; one warp looks up what the rows of the next item see, one thread feeds the copy engine. A warpgroup
// multiplies a tile's scores before it multiplies the weights of the tile before; where all of them visit the same
// tiles they take turns at it, so that one's exponentials fall into the other's products.
// H200, TFLOP/s over the pairs seen: heads of 128, 8192 tokens 619; of 64, 4096 tokens 407 to 430; of 256, 4096 tokens
// 509; documents of about 200 tokens 233, 158, 188.
#include "queries.cuh"
#include "types.cuh"

#ifndef SINK_T
#define SINK_T float
#endif

// Shared memory, in bytes from its aligned start; q's tile of a warpgroup takes o in the end.
#define WIDEST (WIDE > WIDE_V ? WIDE : WIDE_V)
#define Q_TILE (WIDEST * 128)
#define Q_STAGE (WARPGROUPS * Q_TILE)
#define AT_Q 0
#define AT_K (AT_Q + Q_STAGES * Q_STAGE)
#define AT_V (AT_K + STAGES * K_STAGE)

// exp of a tile's scores, for the two rows of a thread; `factor` is what sums so far are to be multiplied by.
__device__ __forceinline__ void soften(float (&s)[KEYS / 2], float (&greatest)[2], float (&sum)[2],
                                       float (&factor)[2]) {
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
__device__ __forceinline__ void restrict_scores(float (&s)[KEYS / 2], int key, const Sight& sight) {
#if HAS_CAP
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) s[i] = capped(s[i]);
#endif
  if (sight.partly(key)) hide(s, key, sight);
}

// A thread's life: feeds the copy engine, item by item: queries, then the keys of each tile and the values of the tile
// before.
__device__ __forceinline__ void feed(const Item (&items)[2], u32 at, const Barriers& on, const TensorMap* q,
                                     const TensorMap* k, const TensorMap* v) {
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
    barrier_expect(barrier, WARPGROUPS * WIDE * 128);
    for (int w = 0; w < WARPGROUPS; w++)
      fetch<64, WIDE>(to + w * Q_TILE, q, barrier, item.b, item.query + w / HEADS_PER_BLOCK * 64,
                      item.head + w % HEADS_PER_BLOCK);
    of_q.advance();
    for (int tile = item.tiles - 1; tile >= -1; tile--) {
      if (tile >= 0) {
        const u32 ready = on.k_ready + 8 * of_k.stage;
        barrier_wait(on.k_taken + 8 * of_k.stage, of_k.parity);
        barrier_expect(ready, K_STAGE);
        fetch<KEYS, WIDE>(at + AT_K + of_k.stage * K_STAGE, k, ready, item.b, item.key + tile * KEYS, item.kv_head);
        of_k.advance();
      }
      if (tile < item.tiles - 1) {
        const u32 ready = on.v_ready + 8 * of_v.stage;
        barrier_wait(on.v_taken + 8 * of_v.stage, of_v.parity);
        barrier_expect(ready, V_STAGE);
        fetch<KEYS, WIDE_V>(at + AT_V + of_v.stage * V_STAGE, v, ready, item.b, item.key + (tile + 1) * KEYS,
                            item.kv_head);
        of_v.advance();
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1)
attention_forward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                  const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o,
                  const int* __restrict__ document_start, const int* __restrict__ last_key,
                  const SINK_T* __restrict__ sink, float* __restrict__ lse, int* __restrict__ ticket) {
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) u64 words[BARRIERS];
  __shared__ Item items[2];
  __shared__ int2 intervals[2][QUERIES];
  const u32 at = (shared_address(memory) + 1023) & ~1023u;
  const Barriers on = make_barriers(words);
  if (threadIdx.x < 128) {
    few_registers<WARPGROUPS>();
    if (threadIdx.x / 32 == 1)
      look_up(items, intervals, nullptr, on.known, on.forgotten, document_start, last_key, nullptr, ticket);
    if (threadIdx.x == 0) feed(items, at, on, &q, &k, &v);
    return;
  }

  many_registers<WARPGROUPS>();
  const int mine = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, lane = thread % 32;
  const int my_rows = mine / HEADS_PER_BLOCK * 64, my_row = my_rows + thread / 32 * 16 + lane / 4;
  Place<2> slot = {0, 0};
  Place<Q_STAGES> of_q = {0, 0};
  Place<STAGES> of_k = {0, 0};
  Place<V_STAGES> of_v = {0, 0};
  begin_turns(mine);
  while (true) {
    barrier_wait(on.known + 8 * slot.stage, slot.parity);
    const Item item = items[slot.stage];
    if (item.b < 0) break;
    Sight sight = sight_of(intervals[slot.stage] + my_rows, item.key);
    if (JOINT) sight.begin = 0, sight.end = item.tiles;
    meet<128>(5 + mine);
    if (thread == 0) barrier_arrive(on.forgotten + 8 * slot.stage);
    slot.advance();

    const u32 q_tile = at + AT_Q + of_q.stage * Q_STAGE + mine * Q_TILE;
    float output[COLUMNS_V / 2], s[KEYS / 2], greatest[2] = {-INFINITE, -INFINITE}, sum[2] = {0.0f, 0.0f}, factor[2];
    u32 p[KEYS / 4];
    clear(output);
    pass_by(item.tiles - 1, sight.end, of_k, of_v, on);
    int tile = sight.end - 1;
    barrier_wait(on.q_ready + 8 * of_q.stage, of_q.parity);
    barrier_wait(on.k_ready + 8 * of_k.stage, of_k.parity);
    products_begin();
    scores<D, KEYS>(s, q_tile, at + AT_K + of_k.stage * K_STAGE);
    products_commit();
    products_wait<0>();
    if (thread == 0) barrier_arrive(on.k_taken + 8 * of_k.stage);
    of_k.advance();
    int key = item.key + tile * KEYS;
    restrict_scores(s, key, sight);
    soften(s, greatest, sum, factor);
    round_pairs(p, s);
    for (tile--; tile >= sight.begin; tile--) {
      barrier_wait(on.k_ready + 8 * of_k.stage, of_k.parity);
      take_turn(mine);
      products_begin();
      scores<D, KEYS>(s, q_tile, at + AT_K + of_k.stage * K_STAGE);
      products_commit();
      barrier_wait(on.v_ready + 8 * of_v.stage, of_v.parity);
      products_begin();
      weighted_rows<KEYS, COLUMNS_V>(output, p, at + AT_V + of_v.stage * V_STAGE);
      products_commit();
      pass_turn(mine);
      products_wait<1>();
      if (thread == 0) barrier_arrive(on.k_taken + 8 * of_k.stage);
      key -= KEYS;
      restrict_scores(s, key, sight);
      soften(s, greatest, sum, factor);
      products_wait<0>();
      if (thread == 0) barrier_arrive(on.v_taken + 8 * of_v.stage);
#pragma unroll
      for (int i = 0; i < COLUMNS_V / 2; i++) output[i] *= factor[i / 2 % 2];
      round_pairs(p, s);
      of_k.advance(), of_v.advance();
    }
    barrier_wait(on.v_ready + 8 * of_v.stage, of_v.parity);
    products_begin();
    weighted_rows<KEYS, COLUMNS_V>(output, p, at + AT_V + of_v.stage * V_STAGE);
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
    if (thread == 0) barrier_arrive(on.v_taken + 8 * of_v.stage);
    of_v.advance();
    lay_rows<COLUMNS_V>(q_tile, output, share[0], share[1]);
    publish_to_products();
    meet<128>(5 + mine);
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
      barrier_arrive(on.q_taken + 8 * of_q.stage);
    }
    pass_by(tile, 0, of_k, of_v, on);
    of_q.advance();
  }
  if (thread == 0) stores_done();
}
