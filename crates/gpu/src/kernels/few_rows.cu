// A product of few rows: D = SCALE·A·Bᵀ (+ bias) (+ ADDEND_SCALE·Σ T_s·op(U_s) on the columns of slice s) (+ D), summed in
// f32 and rounded once. A [ROWS, K], B [N, K], D [ROWS, N] by A_ROW, B_ROW, D_ROW; T_s [ROWS, RANK], U_s [count, RANK], or
// [RANK, count] where U_ACROSS. Reading B takes the time, so nothing but B is waited for: a warp takes COLUMNS columns of D
// and one of PARTS parts of K; its lanes read TURN packs of VECTOR elements of each column at once, the next TURN before the
// present is multiplied, and the first before the kernel in front has ended where B is a WEIGHT, which no kernel of the
// entry writes. The parts are added in their order: the same bits on every run.
#include "number.cuh"
#include "dependent_launch.cuh"

#define WARPS 8
#define GROUPS (WARPS / PARTS)
#define STEP (32 * VECTOR)
#define STEPS ((K + STEP - 1) / STEP)
#define TURNS ((STEPS + PARTS * TURN - 1) / (PARTS * TURN))
#define RESULTS (ROWS * COLUMNS)

template <class T, int SIZE> struct alignas(sizeof(T) * SIZE < 16 ? sizeof(T) * SIZE : 16) Pack { T at[SIZE]; };

// What is read once does not stay in the first cache.
template <class T, int SIZE> __device__ __forceinline__ Pack<T, SIZE> read_once(const T* p) {
  Pack<T, SIZE> x;
  if constexpr (sizeof(x) == 16) {
    u32(&word)[4] = reinterpret_cast<u32(&)[4]>(x);
    load_16_once(word, p);
  } else {
    x = *reinterpret_cast<const Pack<T, SIZE>*>(p);
  }
  return x;
}

typedef Pack<B_T, VECTOR> Weights[TURN][COLUMNS];

__device__ __forceinline__ int column_of(int part, int turn, int i) {
  return (turn * PARTS * TURN + i * PARTS + part) * STEP + threadIdx.x % 32 * VECTOR;
}

__device__ __forceinline__ void fetch(Weights& to, const B_T* b, int n, int part, int turn) {
#pragma unroll
  for (int i = 0; i < TURN; i++) {
    const int k = column_of(part, turn, i);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      to[i][c] = {};
      if (k < K && n + c < N) to[i][c] = read_once<B_T, VECTOR>(b + (size_t)(n + c) * B_ROW + k);
    }
  }
}

__device__ __forceinline__ void multiply(float (&sum)[ROWS][COLUMNS], const Weights& w, const A_T* a, int part, int turn) {
#pragma unroll
  for (int i = 0; i < TURN; i++) {
    const int k = column_of(part, turn, i);
    if (k >= K) continue;
    float x[ROWS][VECTOR];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const Pack<A_T, VECTOR> pack = *reinterpret_cast<const Pack<A_T, VECTOR>*>(a + (size_t)r * A_ROW + k);
#pragma unroll
      for (int j = 0; j < VECTOR; j++) x[r][j] = to_f32(pack.at[j]);
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int j = 0; j < VECTOR; j++) {
        const float weight = to_f32(w[i][c].at[j]);
#pragma unroll
        for (int r = 0; r < ROWS; r++) sum[r][c] = fmaf(weight, x[r][j], sum[r][c]);
      }
  }
}

#if SLICES
// What the addends add to an element.
__device__ __forceinline__ float addends(int row, int n, FACTORS) {
  const T_T* const ts[] = {TS};
  const U_T* const us[] = {US};
  constexpr int firsts[] = {FIRSTS}, counts[] = {COUNTS}, ranks[] = {RANKS}, t_rows[] = {T_ROWS}, u_rows[] = {U_ROWS};
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < SLICES; s++) {
    const int m = n - firsts[s];
    if (m < 0 || m >= counts[s]) continue;
#pragma unroll 8
    for (int i = 0; i < ranks[s]; i++)
      sum = fmaf(to_f32(ts[s][(size_t)row * t_rows[s] + i]),
                 to_f32(us[s][U_ACROSS ? (size_t)i * u_rows[s] + m : (size_t)m * u_rows[s] + i]), sum);
  }
  return ADDEND_SCALE * sum;
}
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) few_rows(const A_T* a, const B_T* b, D_T* d
#if HAS_BIAS
                                                                  , const BIAS_T* bias
#endif
#if SLICES
                                                                  , FACTORS
#endif
) {
  __shared__ float parts[WARPS][RESULTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % PARTS;
  const int first = (blockIdx.x * GROUPS + warp / PARTS) * COLUMNS;
  Weights now, next;
  float sum[ROWS][COLUMNS] = {};
#if WEIGHT
  trigger_launch_completion();
  fetch(now, b, first, part, 0);
  grid_dependency_synchronize();
#else
  grid_dependency_synchronize();
  fetch(now, b, first, part, 0);
#endif
#pragma unroll 2
  for (int turn = 0; turn < TURNS; turn++) {
    if (turn + 1 < TURNS) fetch(next, b, first, part, turn + 1);
    multiply(sum, now, a, part, turn);
#pragma unroll
    for (int i = 0; i < TURN * COLUMNS; i++) now[i / COLUMNS][i % COLUMNS] = next[i / COLUMNS][i % COLUMNS];
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
      for (int offset = 16; offset; offset >>= 1) sum[r][c] += __shfl_xor_sync(0xffffffffu, sum[r][c], offset);
      if (lane == 0) parts[warp][r * COLUMNS + c] = sum[r][c];
    }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUPS * RESULTS; i += 32 * WARPS) {
    const int group = i / RESULTS, row = i % RESULTS / COLUMNS, n = (blockIdx.x * GROUPS + group) * COLUMNS + i % COLUMNS;
    if (n >= N) continue;
    float x = 0.0f;
#pragma unroll
    for (int p = 0; p < PARTS; p++) x += parts[group * PARTS + p][i % RESULTS];
    x *= SCALE;
#if HAS_BIAS
    x += to_f32(bias[n]);
#endif
#if SLICES
    x += addends(row, n, TUS);
#endif
    D_T* to = d + (size_t)row * D_ROW + n;
    if (ACCUMULATE) x += to_f32(*to);
    from_f32(x, *to);
  }
}
