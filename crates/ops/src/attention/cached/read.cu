// Attention of new tokens over the pages of their sequences:
//   o = sum_j p_j v_j / sum_j p_j, p_j = exp(s_j - max s), s_j = SCALE q.k_j (or SOFT_CAP tanh of it / SOFT_CAP), over
//   first <= j <= p, p = positions[b, t], first = 0 or p + 1 - WINDOW, or with LAST_KEY up to last_keys[b, t] >= p; a
//   sink joins the sum of the p_j alone.
// q [B, TOKENS, HEADS, D] strided; caches [pages, PAGE, KV_HEADS, D or DV]; positions i32 [B, TOKENS], below 0 for
// padding; table i32 [B, TABLE] -> o [B, TOKENS, HEADS, DV], or with SPLITS > 1 for every part of the keys
// [token, HEADS, SPLITS, DV + 2]: sums, largest score, sum of the p_j; merge.cu puts the parts together.
// A block has one part of one token's keys and SHARE query heads that read the same keys, so each is loaded once for
// all of them. Teams of LANES threads take key after key, VECTOR columns of it in one access of 16 bytes; what the
// teams found is put together in their order: no atomics, the same bits on every run. Memory decides: a key and its
// value are 512 bytes at D = 128 in bf16, their products 2 * SHARE * 256 operations.
#include "types.cuh"
#include "pack.cuh"
#include "pages.cuh"
#include "dependent_launch.cuh"

#define TEAMS (THREADS / LANES)
#define INF __int_as_float(0x7f800000)

#if SPLITS > 1
#define RESULT_T float
#else
#define RESULT_T O_T
#endif

// What each team, and at last the block, has of each of its heads: sums, largest score, sum of the exponentials.
__shared__ float found[TEAMS][SHARE][DV + 2];

__device__ __forceinline__ float weight(float top, float largest) { return top > -INF ? expf(top - largest) : 0.0f; }

extern "C" __global__ void __launch_bounds__(THREADS)
cached_attention(const Q_T* q, const KEY_T* keys, const VALUE_T* values, const int* positions, const int* table,
                 LAST_KEYS const SINK_T* sinks, RESULT_T* result) {
  grid_dependency_synchronize();
  const int token = blockIdx.z, row = token / TOKENS, head = blockIdx.y * SHARE, kv = head / (HEADS / KV_HEADS);
  const int lane = threadIdx.x % LANES, team = threadIdx.x / LANES;
  const int end_of_all = max(END_OF(token), 0), first = WINDOW ? max(positions[token] + 1 - WINDOW, 0) : 0;
  const int part = (end_of_all - first + SPLITS - 1) / SPLITS, begin = first + (int)blockIdx.x * part;
  const int end = min(begin + part, end_of_all);
  q += (size_t)row * Q_B + (size_t)(token % TOKENS) * Q_S + (size_t)head * Q_H;
  float query[SHARE][K_CHUNKS * VECTOR], sum[SHARE][V_CHUNKS * VECTOR] = {}, top[SHARE], total[SHARE];
#pragma unroll
  for (int g = 0; g < SHARE; g++) {
    top[g] = -INF;
    total[g] = 0.0f;
#pragma unroll
    for (int i = 0; i < K_CHUNKS * VECTOR; i++) {
      const int column = ((i / VECTOR) * LANES + lane) * VECTOR + i % VECTOR;
      query[g][i] = column < D ? load(q + (size_t)g * Q_H + column) : 0.0f;
    }
  }
  // All teams of a warp go round equally often: they shuffle together.
#pragma unroll 2
  for (int base = begin; base < end; base += TEAMS) {
    const int j = base + team;
    const bool live = j < end;
    const size_t line = live ? line_of(table, row, j) * KV_HEADS + kv : 0;
    Pack<KEY_T, VECTOR> key[K_CHUNKS];
    Pack<VALUE_T, VECTOR> value[V_CHUNKS];
#pragma unroll
    for (int c = 0; c < K_CHUNKS; c++) {
      const int column = (c * LANES + lane) * VECTOR;
      key[c] = {};
      if (live && column < D) key[c] = read_pack<VECTOR>(keys + line * D + column);
    }
#pragma unroll
    for (int c = 0; c < V_CHUNKS; c++) {
      const int column = (c * LANES + lane) * VECTOR;
      value[c] = {};
      if (live && column < DV) value[c] = read_pack<VECTOR>(values + line * DV + column);
    }
#pragma unroll
    for (int g = 0; g < SHARE; g++) {
      float s = 0.0f;
#pragma unroll
      for (int i = 0; i < K_CHUNKS * VECTOR; i++) s = fmaf(query[g][i], to_float(key[i / VECTOR].at[i % VECTOR]), s);
#pragma unroll
      for (int offset = LANES / 2; offset; offset >>= 1) s += __shfl_xor_sync(0xffffffffu, s, offset);
      s *= SCALE;
      if (HAS_CAP) s = SOFT_CAP * tanhf(s / SOFT_CAP);
      const float next = live ? fmaxf(top[g], s) : top[g], keep = weight(top[g], next);
      const float p = live ? expf(s - next) : 0.0f;
      top[g] = next;
      total[g] = total[g] * keep + p;
#pragma unroll
      for (int i = 0; i < V_CHUNKS * VECTOR; i++)
        sum[g][i] = fmaf(p, to_float(value[i / VECTOR].at[i % VECTOR]), sum[g][i] * keep);
    }
  }
#pragma unroll
  for (int g = 0; g < SHARE; g++) {
#pragma unroll
    for (int i = 0; i < V_CHUNKS * VECTOR; i++) {
      const int column = ((i / VECTOR) * LANES + lane) * VECTOR + i % VECTOR;
      if (column < DV) found[team][g][column] = sum[g][i];
    }
    if (lane == 0) {
      found[team][g][DV] = top[g];
      found[team][g][DV + 1] = total[g];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < SHARE * DV; i += THREADS) {
    const int g = i / DV, column = i % DV;
    float largest = SPLITS == 1 && HAS_SINK ? load(sinks + head + g) : -INF;
    for (int other = 0; other < TEAMS; other++) largest = fmaxf(largest, found[other][g][DV]);
    float all = SPLITS == 1 && HAS_SINK ? 1.0f : 0.0f, mine = 0.0f;
    if (SPLITS == 1 && HAS_SINK) all = expf(load(sinks + head + g) - largest);
    for (int other = 0; other < TEAMS; other++) {
      const float share = weight(found[other][g][DV], largest);
      all = fmaf(found[other][g][DV + 1], share, all);
      mine = fmaf(found[other][g][column], share, mine);
    }
#if SPLITS > 1
    float* to = result + (((size_t)token * HEADS + head + g) * SPLITS + blockIdx.x) * (DV + 2);
    to[column] = mine;
    if (column == 0) {
      to[DV] = largest;
      to[DV + 1] = all;
    }
#else
    O_T* to = result + (size_t)row * O_B + (size_t)(token % TOKENS) * O_S + (size_t)(head + g) * O_H;
    store(to + column, end_of_all ? mine / all : 0.0f);
#endif
  }
}
