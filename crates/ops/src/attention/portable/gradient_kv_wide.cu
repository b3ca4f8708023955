// As gradient_kv.cu, for heads whose dk and dv do not fit the registers of the warps that own the keys.
// A block of WARPS warps owns ROWS keys. SCORE_STRIPS * SCORE_PARTS warps compute the scores of a block of QUERIES
// queries, each those of its keys with its queries, and hand p and ds to all through shared memory; PARTS warps
// share a strip of keys in the sums of dk and dv, each with its part of the columns. With one stage the next do lands
// during the product for dk, and the next q behind it.
#include "tiles.cuh"
#include "queries.cuh"

#define THREADS (WARPS * 32)
#define PD PADDED(D, PARTS)
#define PDV PADDED(DV, PARTS)
#define STRIPS (WARPS / PARTS)
#define MT (ROWS / 16 / STRIPS)
#define K_COLUMNS (PD / PARTS)
#define V_COLUMNS (PDV / PARTS)
#define SCORE_MT (ROWS / 16 / SCORE_STRIPS)
#define SCORE_NT (QUERIES / 8 / SCORE_PARTS)
#define P_PITCH PITCH(QUERIES)
#define GROUP (HEADS / KV_HEADS)
// Shared memory in bytes.
#define AT_V (ROWS * PITCH(PD))
#define AT_P (AT_V + ROWS * PITCH(PDV))
#define AT_DS (AT_P + ROWS * P_PITCH)
#define AT_TILES (AT_DS + ROWS * P_PITCH)
#define IN_STAGE_DO (QUERIES * PITCH(PD))
#define IN_STAGE_RECORDS (IN_STAGE_DO + QUERIES * PITCH(PDV))
#define STAGE (IN_STAGE_RECORDS + QUERIES * 16)

// Rounded rows of a warp to a tile at the lane's place.
template <int MT_, int NT> __device__ __forceinline__ void put(unsigned char* tile, const float (&x)[MT_][NT][4]) {
#pragma unroll
  for (int i = 0; i < MT_ * NT * 2; i++) {
    const int m = i / (NT * 2), n = i / 2 % NT, half = i % 2;
    *(u32*)(tile + (m * 16 + half * 8) * P_PITCH + n * 16) = pair_of(ELEMENT(), x[m][n][2 * half], x[m][n][2 * half + 1]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_gradient_kv(const ELEMENT* __restrict__ q, const ELEMENT* __restrict__ k, const ELEMENT* __restrict__ v,
                      const ELEMENT* __restrict__ d_o, const float4* __restrict__ records, ELEMENT* __restrict__ dk,
                      ELEMENT* __restrict__ dv) {
  extern __shared__ __align__(16) unsigned char memory[];
  const u32 at = shared_address(memory);
  const int pair = blockIdx.x % (BATCH * KV_HEADS), first_key = blockIdx.x / (BATCH * KV_HEADS) * ROWS;
  const int b = pair / KV_HEADS, kv_head = pair % KV_HEADS;
  fetch<ROWS, D, PD, THREADS>(at, k + (size_t)b * K_B + (size_t)kv_head * K_H, K_S, first_key);
  fetch<ROWS, DV, PDV, THREADS>(at + AT_V, v + (size_t)b * V_B + (size_t)kv_head * V_H, V_S, first_key);
  const int2 seen = queries_of<THREADS>(records + (size_t)b * HEADS * TOKENS, first_key, min(first_key + ROWS, TOKENS) - 1);
  const int blocks = (seen.y - seen.x + QUERIES - 1) / QUERIES;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int own = warp / PARTS * MT * 16, part = warp % PARTS;
  const int score_row = warp / SCORE_PARTS * SCORE_MT * 16, score_column = warp % SCORE_PARTS * SCORE_NT * 8;
  const u32 left = AT_P + own * P_PITCH + left_lane(P_PITCH), tiles = at + AT_TILES;
  unsigned char* my_p = memory + AT_P + (score_row + lane / 4) * P_PITCH + (score_column + lane % 4 * 2) * 2;
  float dk_sum[MT][K_COLUMNS / 8][4] = {}, dv_sum[MT][V_COLUMNS / 8][4] = {};
  auto fetch_q = [&](u32 stage, int head, int query) {
    const int h = kv_head * GROUP + head;
    fetch<QUERIES, D, PD, THREADS>(stage, q + (size_t)b * Q_B + (size_t)h * Q_H, Q_S, query);
    fetch_records<QUERIES>(stage + IN_STAGE_RECORDS, records + (size_t)(b * HEADS + h) * TOKENS, query);
  };
  auto fetch_do = [&](u32 stage, int head, int query) {
    const int h = kv_head * GROUP + head;
    fetch<QUERIES, DV, PDV, THREADS>(stage + IN_STAGE_DO, d_o + (size_t)b * DO_B + (size_t)h * DO_H, DO_S, query);
  };
  fetch_q(tiles, 0, seen.x);
  fetch_do(tiles, 0, seen.x);
  commit_copies();

  int stage = 0, head = 0, query = seen.x;
  for (int left_over = GROUP * blocks; left_over > 0; left_over--) {
    int next_head = head, next_query = query + QUERIES;
    if (next_query >= seen.y) next_query = seen.x, next_head++;
    wait_copies<0>();
    __syncthreads();
    const u32 q_tile = tiles + stage * STAGE, do_tile = q_tile + IN_STAGE_DO;
    const float4* of_queries = (const float4*)(memory + AT_TILES + stage * STAGE + IN_STAGE_RECORDS);
    if (STAGES == 2) {
      stage = 1 - stage;
      if (left_over > 1) fetch_q(tiles + stage * STAGE, next_head, next_query), fetch_do(tiles + stage * STAGE, next_head, next_query);
      commit_copies();
    }
    if (warp < SCORE_STRIPS * SCORE_PARTS) {
      float s[SCORE_MT][SCORE_NT][4] = {}, dp[SCORE_MT][SCORE_NT][4] = {};
      scores<SCORE_MT, SCORE_NT, PD / 16, PITCH(PD), PITCH(PD)>(
          s, at + score_row * PITCH(PD) + left_lane(PITCH(PD)), q_tile + score_column * PITCH(PD) + right_lane(PITCH(PD)));
      scores<SCORE_MT, SCORE_NT, PDV / 16, PITCH(PDV), PITCH(PDV)>(
          dp, at + AT_V + score_row * PITCH(PDV) + left_lane(PITCH(PDV)),
          do_tile + score_column * PITCH(PDV) + right_lane(PITCH(PDV)));
      const int last = min(QUERIES, TOKENS - query) - 1;
      const bool whole = __float_as_int(of_queries[last].z) <= first_key &&
                         __float_as_int(of_queries[0].w) >= first_key + ROWS - 1;
      weights_of_queries(s, dp, of_queries + score_column, first_key + score_row + lane / 4, whole);
      put(my_p, s);
      put(my_p + (AT_DS - AT_P), dp);
    }
    __syncthreads();
    weighted_rows<MT, V_COLUMNS / 8, QUERIES / 8, P_PITCH, PITCH(PDV)>(
        dv_sum, at + left, do_tile + part * V_COLUMNS * 2 + left_lane(PITCH(PDV)));
    if (STAGES == 1) {
      __syncthreads();
      if (left_over > 1) fetch_do(tiles, next_head, next_query);
      commit_copies();
    }
    weighted_rows<MT, K_COLUMNS / 8, QUERIES / 8, P_PITCH, PITCH(PD)>(
        dk_sum, at + left + (AT_DS - AT_P), q_tile + part * K_COLUMNS * 2 + left_lane(PITCH(PD)));
    if (STAGES == 1) {
      __syncthreads();
      if (left_over > 1) fetch_q(tiles, next_head, next_query);
      commit_copies();
    }
    head = next_head, query = next_query;
  }
  write_rows<MT, K_COLUMNS / 8, D>(dk + (size_t)b * DK_B + (size_t)kv_head * DK_H, DK_S, first_key + own,
                                   part * K_COLUMNS, dk_sum, SCALE);
  write_rows<MT, V_COLUMNS / 8, DV>(dv + (size_t)b * DV_B + (size_t)kv_head * DV_H, DV_S, first_key + own,
                                    part * V_COLUMNS, dv_sum, 1.0f);
}
