// Gradients of attention to k and v, and with TURNS also to q, by m16n8k16: dk_j = SCALE sum_i ds_ij q_i, dv_j = sum_i
// p_ij do_i over the queries that see key j, of all heads that share it; p, ds and dq as in gradient_q.cu. Tensors as
// in forward.cu; records by attention_records.
// A block of WARPS warps owns ROWS keys of one key head and walks over the blocks of QUERIES queries that see any of
// them. SCORE_STRIPS * SCORE_PARTS warps compute scores, with the keys as rows, each those of its keys with its
// queries; PARTS warps share a strip of keys in the sums of dk and dv, each with its part of the columns. Where a warp
// owns its keys alone (SCORE_PARTS = PARTS = 1), p and ds already are in registers as the products take them; otherwise
// they go through shared memory, and the next do lands during the product for dk, the next q during that for dq.
// With TURNS dq of a block of queries is summed over the tiles of keys in f32 in global memory, the tiles in ascending
// order, each waiting for its turn: the same bits in every run. All tiles walk from the last query to the first and
// blocks start in the tiles' order, so that a tile waits for tiles that run already, and soon follows them at a
// distance. The heads that share a key are the inner loop, and a turn is for TURN_HEADS of them (a divisor).
// H200, divided and compiled as for sm_80: heads of 128, 8 x 2048 tokens 247 TFLOP/s, 1 x 8192 275, 1 x 32768 290; of
// 64, 4 x 4096 263; of 256, 2 x 4096 202; of 512 with gradient_q.cu 116; documents of about 200 tokens 120, 113, 98.
#include "tiles.cuh"
#include "queries.cuh"
#include "semaphore.cuh"

#define THREADS (WARPS * 32)
#define PD PADDED(D, PARTS)
#define PDV PADDED(DV, PARTS)
#define IN_REGISTERS (SCORE_PARTS == 1 && PARTS == 1)
#define MT (ROWS / 16 * PARTS / WARPS)
#define K_COLUMNS (PD / PARTS)
#define V_COLUMNS (PDV / PARTS)
#define SCORE_MT (ROWS / 16 / SCORE_STRIPS)
#define SCORE_NT (QUERIES / 8 / SCORE_PARTS)
#define P_PITCH PITCH(QUERIES)
#define GROUP (HEADS / KV_HEADS)
#define Q_BLOCKS ((TOKENS + QUERIES - 1) / QUERIES)
// dq: DQ_STRIPS rows of warps.
#define DQ_MT (QUERIES / 16 / DQ_STRIPS)
#define DQ_COLUMNS (PD * DQ_STRIPS / WARPS)
// Shared memory in bytes.
#define AT_V (ROWS * PITCH(PD))
#define AT_DS (AT_V + ROWS * PITCH(PDV))
#define AT_P (AT_DS + ROWS * P_PITCH)
#define AT_Q (AT_P + (IN_REGISTERS ? 0 : ROWS * P_PITCH))
#define AT_DO (AT_Q + QUERIES * PITCH(PD))
#define AT_RECORDS (AT_DO + QUERIES * PITCH(PDV))

static_assert(QUERIES / 8 / SCORE_PARTS % 2 == 0, "ldmatrix takes two groups of queries at once");
static_assert(TURNS || !IN_REGISTERS, "one barrier stands between the products of a step and the next q and do");
static_assert(!TURNS || (DQ_COLUMNS % 8 == 0 && PD * DQ_STRIPS % WARPS == 0), "warps share dq's columns in eights");

// Rounded rows of a warp to a tile at the lane's place.
template <int MT_, int NT> __device__ __forceinline__ void put(unsigned char* tile, const float (&x)[MT_][NT][4]) {
#pragma unroll
  for (int i = 0; i < MT_ * NT * 2; i++) {
    const int m = i / (NT * 2), n = i / 2 % NT, half = i % 2;
    const float* two = x[m][n] + 2 * half;
    *(u32*)(tile + (m * 16 + half * 8) * P_PITCH + n * 16) = pair_of(ELEMENT(), two[0], two[1]);
  }
}

// Without waiting for older accesses. That suffices to continue, since the sums are written and read in the second
// cache alone, by instructions after the barrier that follows; it saves 2 % of the pass.
__device__ __forceinline__ int early_turn(const int* turn) { return load_relaxed(turn); }

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_gradients(const ELEMENT* __restrict__ q, const ELEMENT* __restrict__ k, const ELEMENT* __restrict__ v,
                    const ELEMENT* __restrict__ d_o, const float4* __restrict__ records,
                    const int* __restrict__ last_queries, float* __restrict__ dq_sums, int* __restrict__ turns,
                    ELEMENT* __restrict__ dq, ELEMENT* __restrict__ dk, ELEMENT* __restrict__ dv) {
  extern __shared__ __align__(16) unsigned char memory[];
  const u32 at = shared_address(memory);
  int number = blockIdx.x;
#if TURNS
  // Tickets follow the order in which blocks start: whatever a tile waits for has started.
  if (threadIdx.x == 0) *(int*)memory = atomicAdd(turns, 1);
  __syncthreads();
  number = *(int*)memory;
  __syncthreads();
#endif
  const int pair = number % (BATCH * KV_HEADS), tile = number / (BATCH * KV_HEADS), first_key = tile * ROWS;
  const int b = pair / KV_HEADS, kv_head = pair % KV_HEADS;
  q += (size_t)b * Q_B + (size_t)kv_head * GROUP * Q_H;
  d_o += (size_t)b * DO_B + (size_t)kv_head * GROUP * DO_H;
  records += (size_t)(b * HEADS + kv_head * GROUP) * TOKENS;
  fetch<ROWS, D, PD, THREADS>(at, k + (size_t)b * K_B + (size_t)kv_head * K_H, K_S, first_key);
  fetch<ROWS, DV, PDV, THREADS>(at + AT_V, v + (size_t)b * V_B + (size_t)kv_head * V_H, V_S, first_key);
  const int2 seen = queries_of<THREADS>(records, first_key, min(first_key + ROWS, TOKENS) - 1);
  last_queries += b * TOKENS;
  const int until_tile = last_query_of<ROWS>(last_queries, first_key);
  // Every tile has its turn at all blocks between, those of other branches too.
  const int end_query = TURNS ? seen.y : min(seen.y, until_tile + 1);
  const int first_block = seen.x / QUERIES, last_block = (end_query - 1) / QUERIES;
  turns += 1 + pair * Q_BLOCKS * (GROUP / TURN_HEADS);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int own = warp / PARTS * MT * 16, part = warp % PARTS;
  const int score_row = warp / SCORE_PARTS * SCORE_MT * 16, score_column = warp % SCORE_PARTS * SCORE_NT * 8;
  const float4* of_queries = (const float4*)(memory + AT_RECORDS);
  const u32 in_scores = (score_row + lane / 4) * P_PITCH + (score_column + lane % 4 * 2) * 2;
  int until[SCORE_MT * 2];
#pragma unroll
  for (int i = 0; i < SCORE_MT * 2; i++) {
    const int j = first_key + score_row + lane / 4 + i * 8;
    until[i] = BRANCHES && j < TOKENS ? last_queries[j] : TOKENS;
  }
  float dk_sum[MT][K_COLUMNS / 8][4] = {}, dv_sum[MT][V_COLUMNS / 8][4] = {};
  auto fetch_q = [&](int head, int block) {
    fetch<QUERIES, D, PD, THREADS>(at + AT_Q, q + (size_t)head * Q_H, Q_S, block * QUERIES);
    fetch_records<QUERIES>(at + AT_RECORDS, records + (size_t)head * TOKENS, block * QUERIES);
  };
  auto fetch_do = [&](int head, int block) {
    fetch<QUERIES, DV, PDV, THREADS>(at + AT_DO, d_o + (size_t)head * DO_H, DO_S, block * QUERIES);
  };
  fetch_q(0, last_block);
  fetch_do(0, last_block);
  commit_copies();

  const int steps = GROUP * (last_block - first_block + 1);
  int head = 0, block = last_block;
  for (int left = steps; left > 0; left--) {
    const int next_head = head + 1 < GROUP ? head + 1 : 0, next_block = next_head ? block : block - 1;
    wait_copies<0>();
    __syncthreads();
#if TURNS
    // Passes on what the block added to the sums of the last queries, after the barrier that every step has.
    const int handed = (block + 1) * (GROUP / TURN_HEADS) - 1 - head / TURN_HEADS;
    int turn = 0;
    if (head % TURN_HEADS == 0) {
      if (threadIdx.x == 0 && left < steps) set_semaphore(turns + handed + 1, tile + 1);
      if (threadIdx.x == THREADS - 32) turn = early_turn(turns + handed);
    }
#endif
    const int last = min(QUERIES, TOKENS - block * QUERIES) - 1;
    const int from = __float_as_int(of_queries[0].z), from_last = __float_as_int(of_queries[last].z);
    const int to = __float_as_int(of_queries[0].w), to_last = __float_as_int(of_queries[last].w);
    const bool hidden = BRANCHES && block * QUERIES > until_tile;
    if (!hidden && (SCORE_STRIPS * SCORE_PARTS == WARPS || warp < SCORE_STRIPS * SCORE_PARTS)) {
      const int key = first_key + score_row;
      float s[SCORE_MT][SCORE_NT][4] = {}, dp[SCORE_MT][SCORE_NT][4] = {};
      if (key <= to_last && key + SCORE_MT * 16 > from) {
        scores<SCORE_MT, SCORE_NT, PD / 16, PITCH(PD), PITCH(PD)>(
            s, at + score_row * PITCH(PD) + left_lane(PITCH(PD)),
            at + AT_Q + score_column * PITCH(PD) + right_lane(PITCH(PD)));
        scores<SCORE_MT, SCORE_NT, PDV / 16, PITCH(PDV), PITCH(PDV)>(
            dp, at + AT_V + score_row * PITCH(PDV) + left_lane(PITCH(PDV)),
            at + AT_DO + score_column * PITCH(PDV) + right_lane(PITCH(PDV)));
        const int query = block * QUERIES + score_column;
        bool all = true;
#pragma unroll
        for (int i = 0; i < SCORE_MT * 2; i++) all &= until[i] >= query + SCORE_NT * 8 - 1;
        all = !BRANCHES || __all_sync(0xffffffffu, all);
        weights_of_queries(s, dp, of_queries + score_column, key + lane / 4,
                           all && from_last <= key && to >= key + SCORE_MT * 16 - 1, until, query);
      }
      put(memory + AT_DS + in_scores, dp);
#if IN_REGISTERS
      if (key <= to_last && key + SCORE_MT * 16 > from) {
        weighted_rows<MT, V_COLUMNS / 8, SCORE_NT, PITCH(PDV)>(dv_sum, s, at + AT_DO + left_lane(PITCH(PDV)));
        weighted_rows<MT, K_COLUMNS / 8, SCORE_NT, PITCH(PD)>(dk_sum, dp, at + AT_Q + left_lane(PITCH(PD)));
      }
#else
      put(memory + AT_P + in_scores, s);
#endif
    }
    __syncthreads();
#if !IN_REGISTERS
    if (!hidden) weighted_rows<MT, V_COLUMNS / 8, QUERIES / 8, P_PITCH, PITCH(PDV)>(
        dv_sum, at + AT_P + own * P_PITCH + left_lane(P_PITCH),
        at + AT_DO + part * V_COLUMNS * 2 + left_lane(PITCH(PDV)));
    __syncthreads();
#endif
    if (left > 1) fetch_do(next_head, next_block);
    commit_copies();
#if !IN_REGISTERS
    if (!hidden) weighted_rows<MT, K_COLUMNS / 8, QUERIES / 8, P_PITCH, PITCH(PD)>(
        dk_sum, at + AT_DS + own * P_PITCH + left_lane(P_PITCH),
        at + AT_Q + part * K_COLUMNS * 2 + left_lane(PITCH(PD)));
    __syncthreads();
#endif
    if (left > 1) fetch_q(next_head, next_block);
    commit_copies();
#if TURNS
    const int ours = tile - from / ROWS;
    const int dq_row = warp % DQ_STRIPS * DQ_MT * 16, dq_column = warp / DQ_STRIPS * DQ_COLUMNS;
    float part_of_dq[DQ_MT][DQ_COLUMNS / 8][4] = {};
    if (!hidden) weighted_columns<DQ_MT, DQ_COLUMNS / 8, ROWS / 8, P_PITCH, PITCH(PD)>(
        part_of_dq, at + AT_DS + dq_row * 2 + right_lane(P_PITCH), at + dq_column * 2 + left_lane(PITCH(PD)));
    constexpr int COUNT = DQ_MT * DQ_COLUMNS / 2;
    const size_t of_head = (size_t)(b * HEADS + kv_head * GROUP + head) * Q_BLOCKS;
    float* sums = dq_sums + (of_head + block) * (COUNT * THREADS) + threadIdx.x;
    if (ours > 0 && head % TURN_HEADS == 0) {
      if (threadIdx.x == THREADS - 32)
        while (turn < tile) turn = semaphore_value(turns + handed);
      __syncthreads();
    }
    if (hidden) {
      // Nothing to add; the tile of the last query's own key, which writes the sum, is never hidden.
    } else if (tile < to_last / ROWS) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        const float x = part_of_dq[i / (DQ_COLUMNS / 2)][i / 4 % (DQ_COLUMNS / 8)][i % 4];
        if (ours > 0) add_relaxed(sums + i * THREADS, x);
        else __stcg(sums + i * THREADS, x);
      }
    } else {
      if (ours > 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
          part_of_dq[i / (DQ_COLUMNS / 2)][i / 4 % (DQ_COLUMNS / 8)][i % 4] += __ldcg(sums + i * THREADS);
      }
      write_rows<DQ_MT, DQ_COLUMNS / 8, D>(dq + (size_t)b * DQ_B + (size_t)(kv_head * GROUP + head) * DQ_H, DQ_S,
                                           block * QUERIES + dq_row, dq_column, part_of_dq, SCALE);
    }
#endif
    head = next_head, block = next_block;
  }
#if TURNS
  __syncthreads();
  if (threadIdx.x == 0) set_semaphore(turns + first_block * (GROUP / TURN_HEADS), tile + 1);
#endif
  write_rows<MT, K_COLUMNS / 8, D>(dk + (size_t)b * DK_B + (size_t)kv_head * DK_H, DK_S, first_key + own,
                                   part * K_COLUMNS, dk_sum, SCALE);
  write_rows<MT, V_COLUMNS / 8, DV>(dv + (size_t)b * DV_B + (size_t)kv_head * DV_H, DV_S, first_key + own,
                                    part * V_COLUMNS, dv_sum, 1.0f);
}
