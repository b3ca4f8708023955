// Causal attention inside documents, f32 arithmetic, any element type, D up to 256:
//   o_i = sum_j p_ij v_j, p_ij = exp(s_ij - lse_i), s_ij = SCALE q_i.k_j over start_i <= j <= i (and j > i - WINDOW)
//   ds_ij = p_ij (do_i.v_j - delta_i) SCALE, delta_i = sum_j p_ij do_i.v_j / sum_j p_ij; dq_i = sum_j ds_ij k_j; dk_j = sum_i ds_ij q_i; dv_j = sum_i p_ij do_i
// q, o, do, dq [BATCH, TOKENS, HEADS, D], k, v, dk, dv [BATCH, TOKENS, KV_HEADS, D], strided in the first three
// axes; lse, delta f32 [BATCH, HEADS, TOKENS] (lse read with strides LSE_H, LSE_S: a library may have written it by
// token); starts i32 [BATCH, TOKENS], rising along a row.
// A block owns ROWS = WARPS * PER_WARP consecutive queries (dk, dv: keys) of one head and walks over the tiles of
// 32 tokens of the other side that any of them sees. For scores a lane stands for one token of the tile; for the
// weighted sums it stands for columns lane, lane + 32, ... Every sum has one owner and a fixed order: no atomics.
// The plain way of doing it: for f32 runs and heads that the library does not take; bf16 goes to the library.
#include "types.cuh"
#include "reduce.cuh"

#define THREADS (WARPS * 32)
#define ROWS (WARPS * PER_WARP)
#define CHUNKS ((D + 31) / 32)
#define PITCH (D + 1)
#define LSE_AT(b, h, i) ((size_t)(b) * HEADS * TOKENS + (size_t)(h) * LSE_H + (size_t)(i) * LSE_S)
#define INF __int_as_float(0x7f800000)

// Rows [first, first + count) of one head to shared memory, zero beyond the last token.
template <int PITCH_, typename T>
__device__ __forceinline__ void fetch(float* to, const T* from, size_t stride, int first, int count) {
  for (int i = threadIdx.x; i < count * D; i += THREADS) {
    const int row = i / D, column = i % D;
    to[row * PITCH_ + column] = first + row < TOKENS ? load(from + (first + row) * stride + column) : 0.0f;
  }
}

// out[r] = row r of this warp's rows . the lane's row of the tile
__device__ __forceinline__ void dots(const float* rows, const float* tile, float (&out)[PER_WARP]) {
  const float* mine = tile + (threadIdx.x & 31) * PITCH;
#pragma unroll
  for (int r = 0; r < PER_WARP; r++) out[r] = 0.0f;
#pragma unroll 8
  for (int c = 0; c < D; c++) {
    const float x = mine[c];
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) out[r] = fmaf(rows[r * D + c], x, out[r]);
  }
}

// sum[r][c] += sum over the tile of weight[r] (held by the token's lane) * the token's column
__device__ __forceinline__ void add_weighted(float (&sum)[PER_WARP][CHUNKS], const float (&weight)[PER_WARP],
                                             const float* tile) {
  const int lane = threadIdx.x & 31;
  for (int j = 0; j < 32; j++) {
    float x[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) x[c] = lane + 32 * c < D ? tile[j * PITCH + lane + 32 * c] : 0.0f;
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
      const float w = __shfl_sync(0xffffffffu, weight[r], j);
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) sum[r][c] = fmaf(w, x[c], sum[r][c]);
    }
  }
}

template <typename T>
__device__ __forceinline__ void put(T* to, const float (&row)[CHUNKS], float factor) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int column = (threadIdx.x & 31) + 32 * c;
    if (column < D) store(to + column, row[c] * factor);
  }
}

// The first key that query i sees; TOKENS (none) beyond the row.
__device__ __forceinline__ int first_key(const int* starts, int i) {
  if (i >= TOKENS) return TOKENS;
  return WINDOW ? max(starts[i], i + 1 - WINDOW) : starts[i];
}

#if defined(FORWARD)
extern "C" __global__ void __launch_bounds__(THREADS)
attention_forward(const Q_T* __restrict__ q, const K_T* __restrict__ k, const V_T* __restrict__ v,
                  const int* __restrict__ starts, O_T* __restrict__ o, float* __restrict__ lse) {
  __shared__ float q_rows[ROWS * D];
  __shared__ float tile[32 * PITCH];
  const int h = blockIdx.y, b = blockIdx.z, kv = h / (HEADS / KV_HEADS), lane = threadIdx.x & 31;
  const int own = (threadIdx.x / 32) * PER_WARP, first = blockIdx.x * ROWS, last = min(first + ROWS, TOKENS) - 1;
  q += (size_t)b * Q_B + (size_t)h * Q_H;
  k += (size_t)b * K_B + (size_t)kv * K_H;
  v += (size_t)b * V_B + (size_t)kv * V_H;
  starts += (size_t)b * TOKENS;
  fetch<D>(q_rows, q, Q_S, first, ROWS);
  int from[PER_WARP];
  float largest[PER_WARP], total[PER_WARP], sum[PER_WARP][CHUNKS] = {};
#pragma unroll
  for (int r = 0; r < PER_WARP; r++) {
    from[r] = first_key(starts, first + own + r);
    largest[r] = -INF;
    total[r] = 0.0f;
  }
  for (int start = first_key(starts, first) & ~31; start <= last; start += 32) {
    __syncthreads();
    fetch<PITCH>(tile, k, K_S, start, 32);
    __syncthreads();
    float p[PER_WARP];
    dots(q_rows + own * D, tile, p);
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
      const bool visible = start + lane >= from[r] && start + lane <= first + own + r;
      const float score = visible ? p[r] * SCALE : -INF;
      const float next = fmaxf(largest[r], warp_max(score));
      p[r] = visible ? expf(score - next) : 0.0f;
      const float keep = largest[r] > -INF ? expf(largest[r] - next) : 0.0f;
      total[r] = total[r] * keep + warp_sum(p[r]);
      largest[r] = next;
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) sum[r][c] *= keep;
    }
    __syncthreads();
    fetch<PITCH>(tile, v, V_S, start, 32);
    __syncthreads();
    add_weighted(sum, p, tile);
  }
#pragma unroll
  for (int r = 0; r < PER_WARP; r++) {
    const int i = first + own + r;
    if (i >= TOKENS) continue;
    put(o + (size_t)b * O_B + (size_t)i * O_S + (size_t)h * O_H, sum[r], 1.0f / total[r]);
    if (lane == 0) lse[LSE_AT(b, h, i)] = largest[r] + logf(total[r]);
  }
}
#endif

#if defined(BACKWARD_Q)
// dq, and delta for the kernel below. Delta is do.o by another way, which in f32 loses less: lse is rounded, so that
// the p do not sum to 1, and only their own mean makes the ds of a row sum to 0. It costs a walk over the keys before
// the walk that sums dq.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_q(const Q_T* __restrict__ q, const K_T* __restrict__ k, const V_T* __restrict__ v,
                     const float* __restrict__ lse, const DO_T* __restrict__ d_o, const int* __restrict__ starts,
                     float* __restrict__ delta, DQ_T* __restrict__ dq) {
  __shared__ float q_rows[ROWS * D];
  __shared__ float do_rows[ROWS * D];
  __shared__ float tile[32 * PITCH];
  const int h = blockIdx.y, b = blockIdx.z, kv = h / (HEADS / KV_HEADS), lane = threadIdx.x & 31;
  const int own = (threadIdx.x / 32) * PER_WARP, first = blockIdx.x * ROWS, last = min(first + ROWS, TOKENS) - 1;
  const size_t line = ((size_t)b * HEADS + h) * TOKENS;
  k += (size_t)b * K_B + (size_t)kv * K_H;
  v += (size_t)b * V_B + (size_t)kv * V_H;
  starts += (size_t)b * TOKENS;
  fetch<D>(q_rows, q + (size_t)b * Q_B + (size_t)h * Q_H, Q_S, first, ROWS);
  fetch<D>(do_rows, d_o + (size_t)b * DO_B + (size_t)h * DO_H, DO_S, first, ROWS);
  __syncthreads();
  int from[PER_WARP];
  float row_lse[PER_WARP], row_delta[PER_WARP] = {}, total[PER_WARP] = {}, sum[PER_WARP][CHUNKS] = {};
#pragma unroll
  for (int r = 0; r < PER_WARP; r++) {
    const int i = first + own + r;
    from[r] = first_key(starts, i);
    row_lse[r] = i < TOKENS ? lse[LSE_AT(b, h, i)] : 0.0f;
  }
  float p[PER_WARP], dp[PER_WARP];
  // p and do.v of the tile's keys; leaves k in the tile.
  const auto weights = [&](int start) {
    __syncthreads();
    fetch<PITCH>(tile, v, V_S, start, 32);
    __syncthreads();
    dots(do_rows + own * D, tile, dp);
    __syncthreads();
    fetch<PITCH>(tile, k, K_S, start, 32);
    __syncthreads();
    dots(q_rows + own * D, tile, p);
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
      const bool visible = start + lane >= from[r] && start + lane <= first + own + r;
      p[r] = visible ? expf(p[r] * SCALE - row_lse[r]) : 0.0f;
    }
  };
  const int begin = first_key(starts, first) & ~31;
  for (int start = begin; start <= last; start += 32) {
    weights(start);
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
      row_delta[r] = fmaf(p[r], dp[r], row_delta[r]);
      total[r] += p[r];
    }
  }
#pragma unroll
  for (int r = 0; r < PER_WARP; r++) {
    const int i = first + own + r;
    row_delta[r] = warp_sum(row_delta[r]) / warp_sum(total[r]);
    if (i < TOKENS && lane == 0) delta[line + i] = row_delta[r];
  }
  for (int start = begin; start <= last; start += 32) {
    weights(start);
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) p[r] *= (dp[r] - row_delta[r]) * SCALE;
    add_weighted(sum, p, tile);
  }
#pragma unroll
  for (int r = 0; r < PER_WARP; r++) {
    const int i = first + own + r;
    if (i < TOKENS) put(dq + (size_t)b * DQ_B + (size_t)i * DQ_S + (size_t)h * DQ_H, sum[r], 1.0f);
  }
}
#endif

#if defined(BACKWARD_KV)
extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_kv(const Q_T* __restrict__ q, const K_T* __restrict__ k, const V_T* __restrict__ v,
                      const float* __restrict__ lse, const DO_T* __restrict__ d_o, const int* __restrict__ starts,
                      const float* __restrict__ delta, DK_T* __restrict__ dk, DV_T* __restrict__ dv) {
  __shared__ float k_rows[ROWS * D];
  __shared__ float v_rows[ROWS * D];
  __shared__ float tile[32 * PITCH];
  const int kv = blockIdx.y, b = blockIdx.z, lane = threadIdx.x & 31;
  const int own = (threadIdx.x / 32) * PER_WARP, first = blockIdx.x * ROWS, last = min(first + ROWS, TOKENS) - 1;
  starts += (size_t)b * TOKENS;
  fetch<D>(k_rows, k + (size_t)b * K_B + (size_t)kv * K_H, K_S, first, ROWS);
  fetch<D>(v_rows, v + (size_t)b * V_B + (size_t)kv * V_H, V_S, first, ROWS);
  float dk_sum[PER_WARP][CHUNKS] = {}, dv_sum[PER_WARP][CHUNKS] = {};
  for (int h = kv * (HEADS / KV_HEADS); h < (kv + 1) * (HEADS / KV_HEADS); h++) {
    const Q_T* q_head = q + (size_t)b * Q_B + (size_t)h * Q_H;
    const DO_T* do_head = d_o + (size_t)b * DO_B + (size_t)h * DO_H;
    const size_t line = ((size_t)b * HEADS + h) * TOKENS;
    for (int start = first & ~31; start < TOKENS && first_key(starts, start) <= last; start += 32) {
      const int i = start + lane, from = first_key(starts, i);
      const float i_lse = i < TOKENS ? lse[LSE_AT(b, h, i)] : 0.0f, i_delta = i < TOKENS ? delta[line + i] : 0.0f;
      float p[PER_WARP], ds[PER_WARP], dp[PER_WARP];
      __syncthreads();
      fetch<PITCH>(tile, do_head, DO_S, start, 32);
      __syncthreads();
      dots(v_rows + own * D, tile, dp);
      __syncthreads();
      fetch<PITCH>(tile, q_head, Q_S, start, 32);
      __syncthreads();
      dots(k_rows + own * D, tile, p);
#pragma unroll
      for (int r = 0; r < PER_WARP; r++) {
        const bool visible = first + own + r >= from && first + own + r <= i;
        p[r] = visible ? expf(p[r] * SCALE - i_lse) : 0.0f;
        ds[r] = p[r] * (dp[r] - i_delta) * SCALE;
      }
      add_weighted(dk_sum, ds, tile);
      __syncthreads();
      fetch<PITCH>(tile, do_head, DO_S, start, 32);
      __syncthreads();
      add_weighted(dv_sum, p, tile);
    }
  }
#pragma unroll
  for (int r = 0; r < PER_WARP; r++) {
    const int j = first + own + r;
    if (j >= TOKENS) continue;
    put(dk + (size_t)b * DK_B + (size_t)j * DK_S + (size_t)kv * DK_H, dk_sum[r], 1.0f);
    put(dv + (size_t)b * DV_B + (size_t)j * DV_S + (size_t)kv * DV_H, dv_sum[r], 1.0f);
  }
}
#endif
