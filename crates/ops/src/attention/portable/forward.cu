// Attention by m16n8k16: o_i = sum_j p_ij v_j, p_ij = exp(s_ij - lse_i), s_ij = SCALE q_i.k_j (or SOFT_CAP
// tanh(SCALE q_i.k_j / SOFT_CAP)) over the keys that query i sees; lse_i = log(sum_j exp(s_ij)), with
// HAS_SINK of that sum and exp(sink) of the head.
// q, o [BATCH, TOKENS, HEADS, D | DV], k, v [BATCH, TOKENS, KV_HEADS, D | DV], strided in the first three axes in
// steps of 16 bytes; starts, last_keys i32 [BATCH, TOKENS], non-decreasing along a row; lse f32 [BATCH, HEADS, TOKENS].
// A block owns ROWS = STRIPS * MT * 16 queries of one head and walks over the tiles of KEYS keys that any of them
// sees; the blocks with the most keys of a causal row start first. A warp owns MT * 16 queries; of heads above 256 two
// warps share them (PARTS), each with its part of the columns, and keep q in registers. The next tile of k lands during
// the product with v, v during the scores.
// The greatest score of a row, by which its weights are scaled, is renewed only when it grows by more than 2^8: sums
// stay far from overflow, and rounding is relative.
// H200, divided and compiled as for sm_80, TFLOP/s over the pairs seen: heads of 128, 8 x 2048 tokens 311; of 64, 4 x
// 4096 tokens 307; of 256, 2 x 4096 249; of 512, 4096 204; documents of about 200 tokens 144, 126, 127 (128, 64, 256).
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
#define HOLD (PARTS > 1)
#define LARGEST_GROWTH 8.0f
// Shared memory in bytes.
#define AT_K (ROWS * PITCH(PD))
#define AT_V (AT_K + KEYS * PITCH(PD))
#define AT_BOUNDS (AT_V + KEYS * PITCH(PDV))
#define AT_PARTNER (AT_BOUNDS + ROWS * 8)

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_forward(const ELEMENT* __restrict__ q, const ELEMENT* __restrict__ k, const ELEMENT* __restrict__ v,
                  const int* __restrict__ starts, const int* __restrict__ last_keys, const SINK_T* __restrict__ sink,
                  ELEMENT* __restrict__ o, float* __restrict__ lse) {
  extern __shared__ __align__(16) unsigned char memory[];
  const u32 at = shared_address(memory);
  int2* bounds = (int2*)(memory + AT_BOUNDS);
  const int bh = blockIdx.x % (BATCH * HEADS), block = Q_BLOCKS - 1 - blockIdx.x / (BATCH * HEADS);
  const int b = bh / HEADS, h = bh % HEADS, first_row = block * ROWS, end_row = min(first_row + ROWS, TOKENS);
  q += (size_t)b * Q_B + (size_t)h * Q_H;
  k += (size_t)b * K_B + (size_t)(h / GROUP) * K_H;
  v += (size_t)b * V_B + (size_t)(h / GROUP) * V_H;
  starts += b * TOKENS;
  last_keys += b * TOKENS;
  const int end = last_seen(last_keys, end_row - 1) + 1;
  const int start = next_tile<KEYS>(last_keys, first_seen(starts, first_row), end, first_row);
  fetch<ROWS, D, PD, THREADS>(at, q, Q_S, first_row);
  fetch<KEYS, D, PD, THREADS>(at + AT_K, k, K_S, start);
  commit_copies();
#if PARTS > 1
  init_partial_barriers();
#endif
  for (int i = threadIdx.x; i < ROWS; i += THREADS) {
    const int row = min(first_row + i, TOKENS - 1);
    bounds[i] = make_int2(first_seen(starts, row), last_seen(last_keys, row));
  }

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, strip = warp / PARTS, part = warp % PARTS;
  const int own = strip * MT * 16;
  const u32 my_q = at + own * PITCH(PD) + part * K_COLUMNS * 2 + left_lane(PITCH(PD));
  const u32 my_k = at + AT_K + part * K_COLUMNS * 2 + right_lane(PITCH(PD));
  const u32 my_v = at + AT_V + part * V_COLUMNS * 2 + left_lane(PITCH(PDV));
  float greatest[MT][2], total[MT][2], sum[MT][V_COLUMNS / 8][4] = {};
#pragma unroll
  for (int m = 0; m < MT; m++) greatest[m][0] = greatest[m][1] = -INF, total[m][0] = total[m][1] = 0.0f;
#if HOLD
  u32 q_held[MT][K_COLUMNS / 16][4];
  wait_copies<0>();
  __syncthreads();
  hold<MT, K_COLUMNS / 16, PITCH(PD)>(q_held, my_q);
#endif

  for (int key = start, next; key < end; key = next) {
    wait_copies<0>();
    __syncthreads();
    fetch<KEYS, DV, PDV, THREADS>(at + AT_V, v, V_S, key);
    commit_copies();
    next = next_tile<KEYS>(last_keys, key + KEYS, end, first_row);
    const int2 upper = bounds[own], lower = bounds[own + MT * 16 - 1];
    const bool seen = key <= lower.y && key + KEYS > upper.x;
    float s[MT][NT][4] = {};
    if (seen) {
#if HOLD
      scores<MT, NT, K_COLUMNS / 16, PITCH(PD)>(s, q_held, my_k);
#else
      scores<MT, NT, K_COLUMNS / 16, PITCH(PD), PITCH(PD)>(s, my_q, my_k);
#endif
#if PARTS > 1
      float* partner = (float*)(memory + AT_PARTNER) + strip * PARTS * (MT * NT * 128);
      add_partner<MT, NT, PARTS * 32>(s, partner + part * (MT * NT * 128), partner + (1 - part) * (MT * NT * 128),
                                      1 + strip);
#endif
      if (!RAW_SCORES) {
#pragma unroll
        for (int i = 0; i < MT * NT * 4; i++) {
          float& x = s[i / (NT * 4)][i / 4 % NT][i % 4];
          x = HAS_CAP ? SOFT_CAP * LOG2E * tanh_by_exp(x * (SCALE / SOFT_CAP)) : x * (SCALE * LOG2E);
        }
      }
      int until[NT * 2];
      const bool all = keys_of_lane<NT>(until, last_keys, key, first_row + own + MT * 16);
      if (key < lower.x || key + KEYS - 1 > upper.y || !all) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int row = own + m * 16 + half * 8 + lane / 4;
            const int2 keys = bounds[row];
#pragma unroll
            for (int i = 0; i < NT * 2; i++) {
              const int j = key + i / 2 * 8 + lane % 4 * 2 + i % 2;
              if (j < keys.x || j > keys.y || (BRANCHES && until[i] < first_row + row)) s[m][i / 2][2 * half + i % 2] = -INF;
            }
          }
      }
      float tops[MT][2];
      bool grown = false;
#pragma unroll
      for (int i = 0; i < MT * 2; i++) {
        float& most = tops[i / 2][i % 2];
        most = greatest[i / 2][i % 2];
#pragma unroll
        for (int n = 0; n < NT; n++)
          most = fmaxf(most, fmaxf(s[i / 2][n][i % 2 * 2], s[i / 2][n][i % 2 * 2 + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        grown |= (most - greatest[i / 2][i % 2]) * FACTOR > LARGEST_GROWTH;
      }
      if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
        for (int i = 0; i < MT * 2; i++) {
          const float most = tops[i / 2][i % 2];
          const float keep = most > -INF ? exp2_approx((greatest[i / 2][i % 2] - most) * FACTOR) : 0.0f;
          greatest[i / 2][i % 2] = most;
          total[i / 2][i % 2] *= keep;
#pragma unroll
          for (int n = 0; n < V_COLUMNS / 8; n++)
            sum[i / 2][n][i % 2 * 2] *= keep, sum[i / 2][n][i % 2 * 2 + 1] *= keep;
        }
      }
#pragma unroll
      for (int i = 0; i < MT * 2; i++) {
        const float most = greatest[i / 2][i % 2] > -INF ? greatest[i / 2][i % 2] * FACTOR : 0.0f;
#pragma unroll
        for (int n = 0; n < NT * 2; n++) {
          float& x = s[i / 2][n / 2][i % 2 * 2 + n % 2];
          x = exp2_approx(fmaf(x, FACTOR, -most));
          total[i / 2][i % 2] += x;
        }
      }
    }
    wait_copies<0>();
    __syncthreads();
    if (next < end) fetch<KEYS, D, PD, THREADS>(at + AT_K, k, K_S, next);
    commit_copies();
    if (seen) weighted_rows<MT, V_COLUMNS / 8, NT, PITCH(PDV)>(sum, s, my_v);
  }

#pragma unroll
  for (int i = 0; i < MT * 2; i++) {
    float all = total[i / 2][i % 2], most = greatest[i / 2][i % 2] * FACTOR, keep = 1.0f;
    all += __shfl_xor_sync(0xffffffffu, all, 1);
    all += __shfl_xor_sync(0xffffffffu, all, 2);
#if HAS_SINK
    const float other = load(sink + h) * LOG2E, both = fmaxf(most, other);
    keep = exp2_approx(most - both);
    all = all * keep + exp2_approx(other - both);
    most = both;
#endif
    const int row = first_row + own + i / 2 * 16 + i % 2 * 8 + lane / 4;
    if (part == 0 && lane % 4 == 0 && row < TOKENS)
      lse[(size_t)bh * TOKENS + row] = (most + log2f(all)) * LN2;
    const float factor = keep / all;
#pragma unroll
    for (int n = 0; n < V_COLUMNS / 8; n++)
      sum[i / 2][n][i % 2 * 2] *= factor, sum[i / 2][n][i % 2 * 2 + 1] *= factor;
  }
  write_rows<MT, V_COLUMNS / 8, DV>(o + (size_t)b * O_B + (size_t)h * O_H, O_S, first_row + own, part * V_COLUMNS, sum,
                                    1.0f);
}
