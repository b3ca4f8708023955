// A product of few columns on the tensor cores, D = A·Bᵀ plus a bias of D's columns; bf16, summed in f32, rounded once. A
// [ROWS, K], B [N, K], D [ROWS, N], N up to 64; rows A_ROW, B_ROW and D_ROW elements apart, those of A and B in steps of 16
// bytes, K a multiple of 8.
// A block has 16 rows, each of its WARPS an equal stretch of K, and their sums are added in one order: the bits of a row do not
// depend on ROWS. A lane reads eight terms of a row at once, 32 a row and step; which of the instruction's terms they are is the
// same for A and B.
#include "number.cuh"
#include "dependent_launch.cuh"

#define WARPS 16
#define HALF (WARPS / 2)
#define STEP 32
#define STEPS ((K + STEP - 1) / STEP)
#define EACH ((STEPS + WARPS - 1) / WARPS)
#define TILES ((N + 7) / 8)

// The lane's places of a tile of 16 rows and 8 columns.
template <typename Visit> __device__ __forceinline__ void visit(int lane, Visit visit) {
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) visit(n, i, lane / 4 + i / 2 * 8, n * 8 + lane % 4 * 2 + i % 2);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
thin(const bf16* __restrict__ a, const bf16* __restrict__ b, bf16* __restrict__ d, const bf16* __restrict__ bias) {
  __shared__ float found[HALF][16][TILES * 8 + 1];
  grid_dependency_synchronize();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = blockIdx.x * 16, row = first_row + lane / 4;
  const auto read = [](const bf16* from, bool inside) {
    return inside ? __ldg((const uint4*)from) : make_uint4(0, 0, 0, 0);
  };
  float sum[TILES][4] = {};
#pragma unroll 4
  for (int step = warp * EACH; step < min((warp + 1) * EACH, STEPS); step++) {
    const int k = step * STEP + lane % 4 * 8;
    const uint4 upper = read(a + (size_t)row * A_ROW + k, k < K && row < ROWS);
    const uint4 lower = read(a + (size_t)(row + 8) * A_ROW + k, k < K && row + 8 < ROWS);
    const u32 first[4] = {upper.x, lower.x, upper.y, lower.y}, second[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const int column = n * 8 + lane / 4;
      const uint4 right = read(b + (size_t)column * B_ROW + k, k < K && column < N);
      mma_bf16(sum[n], first, right.x, right.y);
      mma_bf16(sum[n], second, right.z, right.w);
    }
  }
  if (warp >= HALF) visit(lane, [&](int n, int i, int r, int column) { found[warp - HALF][r][column] = sum[n][i]; });
  __syncthreads();
  if (warp < HALF) visit(lane, [&](int n, int i, int r, int column) { found[warp][r][column] += sum[n][i]; });
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * N; i += WARPS * 32) {
    const int local = i / N, column = i % N;
    if (first_row + local >= ROWS) break;
    float all = HAS_BIAS ? to_f32(bias[column]) : 0.0f;
#pragma unroll
    for (int w = 0; w < HALF; w++) all += found[w][local][column];
    from_f32(all, d[(size_t)(first_row + local) * D_ROW + column]);
  }
}
