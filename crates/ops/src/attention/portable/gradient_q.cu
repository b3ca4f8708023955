// Gradient of attention to q by m16n8k16: dq_i = SCALE sum_j ds_ij k_j, ds_ij = p_ij (do_i.v_j - delta_i), p_ij =
// exp(s_ij - lse_i) recomputed; with a cap ds_ij is multiplied by 1 - (s_ij / SOFT_CAP)^2.
// Tensors as in forward.cu; records by attention_records.
// For heads above 256, whose gradients gradients.cu cannot make all at once.
// A block owns ROWS = STRIPS * MT * 16 queries of one head and walks over the tiles of KEYS keys that any of them
// sees; PARTS = 2 warps share MT * 16 queries, each with its part of the columns.
#include "tiles.cuh"

#define ROWS (STRIPS * MT * 16)
#define THREADS (STRIPS * PARTS * 32)
#define PD PADDED(D, PARTS)
#define PDV PADDED(DV, PARTS)
#define K_COLUMNS (PD / PARTS)
#define V_COLUMNS (PDV / PARTS)
#define NT (KEYS / 8)
#define Q_BLOCKS ((TOKENS + ROWS - 1) / ROWS)
#define GROUP (HEADS / KV_HEADS)
// Shared memory in bytes.
#define AT_DO (ROWS * PITCH(PD))
#define AT_K (AT_DO + ROWS * PITCH(PDV))
#define AT_V (AT_K + KEYS * PITCH(PD))
#define AT_PARTNER (AT_V + KEYS * PITCH(PDV))

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_gradient_q(const ELEMENT* __restrict__ q, const ELEMENT* __restrict__ k, const ELEMENT* __restrict__ v,
                     const ELEMENT* __restrict__ d_o, const float4* __restrict__ records,
                     const int* __restrict__ last_queries, ELEMENT* __restrict__ dq) {
  extern __shared__ __align__(16) unsigned char memory[];
  const u32 at = shared_address(memory);
  const int bh = blockIdx.x % (BATCH * HEADS), block = Q_BLOCKS - 1 - blockIdx.x / (BATCH * HEADS);
  const int b = bh / HEADS, h = bh % HEADS, first_row = block * ROWS, end_row = min(first_row + ROWS, TOKENS);
  q += (size_t)b * Q_B + (size_t)h * Q_H;
  d_o += (size_t)b * DO_B + (size_t)h * DO_H;
  k += (size_t)b * K_B + (size_t)(h / GROUP) * K_H;
  v += (size_t)b * V_B + (size_t)(h / GROUP) * V_H;
  records += (size_t)bh * TOKENS;
  last_queries += b * TOKENS;
  fetch<ROWS, D, PD, THREADS>(at, q, Q_S, first_row);
  fetch<ROWS, DV, PDV, THREADS>(at + AT_DO, d_o, DO_S, first_row);
  commit_copies();
  const int start = __float_as_int(records[first_row].z), end = __float_as_int(records[end_row - 1].w) + 1;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, strip = warp / PARTS, part = warp % PARTS;
  const int own_row = first_row + strip * MT * 16, my_row = own_row + lane / 4;
  const u32 my_q = at + strip * MT * 16 * PITCH(PD) + part * K_COLUMNS * 2 + left_lane(PITCH(PD));
  const u32 my_do = at + AT_DO + strip * MT * 16 * PITCH(PDV) + part * V_COLUMNS * 2 + left_lane(PITCH(PDV));
  const u32 my_k = at + AT_K + part * K_COLUMNS * 2, my_v = at + AT_V + part * V_COLUMNS * 2 + right_lane(PITCH(PDV));
  constexpr int SIZE = MT * NT * 128;
  float* of_s = (float*)(memory + AT_PARTNER) + strip * PARTS * 2 * SIZE;
  float* of_dp = of_s + PARTS * SIZE;
  float of_lse[MT][2], of_delta[MT][2], sum[MT][K_COLUMNS / 8][4] = {};
#pragma unroll
  for (int i = 0; i < MT * 2; i++) {
    const float4 record = records[min(my_row + i * 8, TOKENS - 1)];
    of_lse[i / 2][i % 2] = record.x, of_delta[i / 2][i % 2] = record.y;
  }
  // What all rows of the warp see, and what none sees.
  const float4 upper = records[min(own_row, TOKENS - 1)], lower = records[min(own_row + MT * 16 - 1, TOKENS - 1)];
  const int all_from = __float_as_int(lower.z), all_to = __float_as_int(upper.w);
  const int any_from = __float_as_int(upper.z), any_to = __float_as_int(lower.w);

  init_partial_barriers();
  for (int key = start; (key = next_tile<KEYS>(last_queries, key, end, first_row)) < end; key += KEYS) {
    __syncthreads();
    fetch<KEYS, D, PD, THREADS>(at + AT_K, k, K_S, key);
    fetch<KEYS, DV, PDV, THREADS>(at + AT_V, v, V_S, key);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    if (key > any_to || key + KEYS <= any_from) continue;
    float s[MT][NT][4] = {}, dp[MT][NT][4] = {};
    scores<MT, NT, K_COLUMNS / 16, PITCH(PD), PITCH(PD)>(s, my_q, my_k + right_lane(PITCH(PD)));
    scores<MT, NT, V_COLUMNS / 16, PITCH(PDV), PITCH(PDV)>(dp, my_do, my_v);
    add_partner<MT, NT, PARTS * 32>(s, of_s + part * SIZE, of_s + (1 - part) * SIZE, 1 + strip);
    add_partner<MT, NT, PARTS * 32>(dp, of_dp + part * SIZE, of_dp + (1 - part) * SIZE, 1 + strip);
    int until[NT * 2];
    const bool all = keys_of_lane<NT>(until, last_queries, key, own_row + MT * 16);
    const bool whole = all && key >= all_from && key + KEYS - 1 <= all_to;
#pragma unroll
    for (int i = 0; i < MT * 2; i++) {
      int from = 0, to = TOKENS;
      if (!whole) {
        const float4 record = records[min(my_row + i * 8, TOKENS - 1)];
        from = __float_as_int(record.z), to = __float_as_int(record.w);
      }
#pragma unroll
      for (int n = 0; n < NT * 2; n++) {
        float& x = s[i / 2][n / 2][i % 2 * 2 + n % 2];
        const float slope = weight(x, of_lse[i / 2][i % 2]);
        const int j = key + n / 2 * 8 + lane % 4 * 2 + n % 2;
        if (!whole && (j < from || j > to || (BRANCHES && until[n] < my_row + i * 8))) x = 0.0f;
        x *= dp[i / 2][n / 2][i % 2 * 2 + n % 2] - of_delta[i / 2][i % 2];
        if (HAS_CAP) x *= slope;
      }
    }
    weighted_rows<MT, K_COLUMNS / 8, NT, PITCH(PD)>(sum, s, my_k + left_lane(PITCH(PD)));
  }
  write_rows<MT, K_COLUMNS / 8, D>(dq + (size_t)b * DQ_B + (size_t)h * DQ_H, DQ_S, own_row, part * K_COLUMNS, sum,
                                   SCALE);
}
