// Gradients of attention to k and v by m16n8k16: dk_j = SCALE sum_i ds_ij q_i, dv_j = sum_i p_ij do_i, p and ds as in
// gradient_q.cu, over the queries that see key j, of all heads that share it. Tensors as in forward.cu.
// A block owns ROWS = STRIPS * MT * 16 keys of one key head and walks over the blocks of QUERIES queries that see any
// of them, in STAGES buffers. A warp owns MT * 16 keys: scores are computed with the keys as rows, so that p and ds
// already lie in registers as the products for dv and dk take them. For heads of up to 128; wider ones: gradient_kv_wide.cu.
#include "tiles.cuh"
#include "queries.cuh"

#define ROWS (STRIPS * MT * 16)
#define THREADS (STRIPS * 32)
#define PD PADDED(D, 1)
#define PDV PADDED(DV, 1)
#define NT (QUERIES / 8)
#define K_TILES ((TOKENS + ROWS - 1) / ROWS)
#define GROUP (HEADS / KV_HEADS)
// Shared memory in bytes.
#define AT_V (ROWS * PITCH(PD))
#define AT_TILES (HOLD ? 0 : AT_V + ROWS * PITCH(PDV))
#define IN_STAGE_DO (QUERIES * PITCH(PD))
#define IN_STAGE_RECORDS (IN_STAGE_DO + QUERIES * PITCH(PDV))
#define STAGE (IN_STAGE_RECORDS + QUERIES * 16)

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
  commit_copies();
  const int2 seen = queries_of<THREADS>(records + (size_t)b * HEADS * TOKENS, first_key, min(first_key + ROWS, TOKENS) - 1);
  const int blocks = (seen.y - seen.x + QUERIES - 1) / QUERIES;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = first_key + warp * MT * 16;
  const u32 my_k = at + warp * MT * 16 * PITCH(PD) + left_lane(PITCH(PD));
  const u32 my_v = at + AT_V + warp * MT * 16 * PITCH(PDV) + left_lane(PITCH(PDV));
  const u32 tiles = at + AT_TILES;
  float dk_sum[MT][PD / 8][4] = {}, dv_sum[MT][PDV / 8][4] = {};
#if HOLD
  u32 k_held[MT][PD / 16][4], v_held[MT][PDV / 16][4];
  wait_copies<0>();
  __syncthreads();
  hold<MT, PD / 16, PITCH(PD)>(k_held, my_k);
  hold<MT, PDV / 16, PITCH(PDV)>(v_held, my_v);
  __syncthreads();
#endif
  auto fetch_block = [&](u32 stage, int head, int query) {
    const int h = kv_head * GROUP + head;
    fetch<QUERIES, D, PD, THREADS>(stage, q + (size_t)b * Q_B + (size_t)h * Q_H, Q_S, query);
    fetch<QUERIES, DV, PDV, THREADS>(stage + IN_STAGE_DO, d_o + (size_t)b * DO_B + (size_t)h * DO_H, DO_S, query);
    fetch_records<QUERIES>(stage + IN_STAGE_RECORDS, records + (size_t)(b * HEADS + h) * TOKENS, query);
  };
  if (STAGES == 2) fetch_block(tiles, 0, seen.x);
  commit_copies();

  int stage = 0, head = 0, query = seen.x;
  for (int left = GROUP * blocks; left > 0; left--) {
    int next_head = head, next_query = query + QUERIES;
    if (next_query >= seen.y) next_query = seen.x, next_head++;
    if (STAGES == 1) {
      __syncthreads();
      fetch_block(tiles, head, query);
      commit_copies();
    }
    wait_copies<0>();
    __syncthreads();
    if (STAGES == 2) {
      if (left > 1) fetch_block(tiles + (1 - stage) * STAGE, next_head, next_query);
      commit_copies();
    }
    const u32 q_tile = tiles + stage * STAGE, do_tile = q_tile + IN_STAGE_DO;
    const float4* of_queries = (const float4*)(memory + AT_TILES + stage * STAGE + IN_STAGE_RECORDS);
    if (STAGES == 2) stage = 1 - stage;
    const int last = min(QUERIES, TOKENS - query) - 1;
    const bool whole = __float_as_int(of_queries[last].z) <= own && __float_as_int(of_queries[0].w) >= own + MT * 16 - 1;
    const bool any = __float_as_int(of_queries[last].w) >= own && __float_as_int(of_queries[0].z) < own + MT * 16;
    head = next_head, query = next_query;
    if (!any) continue;

    float s[MT][NT][4] = {}, dp[MT][NT][4] = {};
#if HOLD
    scores<MT, NT, PD / 16, PITCH(PD)>(s, k_held, q_tile + right_lane(PITCH(PD)));
    scores<MT, NT, PDV / 16, PITCH(PDV)>(dp, v_held, do_tile + right_lane(PITCH(PDV)));
#else
    scores<MT, NT, PD / 16, PITCH(PD), PITCH(PD)>(s, my_k, q_tile + right_lane(PITCH(PD)));
    scores<MT, NT, PDV / 16, PITCH(PDV), PITCH(PDV)>(dp, my_v, do_tile + right_lane(PITCH(PDV)));
#endif
    weights_of_queries(s, dp, of_queries, own + lane / 4, whole);
    weighted_rows<MT, PDV / 8, NT, PITCH(PDV)>(dv_sum, s, do_tile + left_lane(PITCH(PDV)));
    weighted_rows<MT, PD / 8, NT, PITCH(PD)>(dk_sum, dp, q_tile + left_lane(PITCH(PD)));
  }
  write_rows<MT, PD / 8, D>(dk + (size_t)b * DK_B + (size_t)kv_head * DK_H, DK_S, own, 0, dk_sum, SCALE);
  write_rows<MT, PDV / 8, DV>(dv + (size_t)b * DV_B + (size_t)kv_head * DV_H, DV_S, own, 0, dv_sum, 1.0f);
}
