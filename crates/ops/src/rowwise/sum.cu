// Sums over rows from the parts that blocks left, in a fixed order: sum = Σ partial, or sum + it. partial f32 [PARTS,
// COLUMNS]; sum f32 [COLUMNS]. 32 columns and 32 strands of parts per block.
typedef unsigned long long size;

extern "C" __global__ void __launch_bounds__(1024)
sum_partials(const float* __restrict__ partial, float* __restrict__ sum) {
  __shared__ float sums[32][32];
  const int lane = threadIdx.x % 32, strand = threadIdx.x / 32;
  const int column = blockIdx.x * 32 + lane;
  float part_sum = 0.0f;
  if (column < COLUMNS)
#pragma unroll 4
    for (int part = strand; part < PARTS; part += 32) part_sum += partial[(size)part * COLUMNS + column];
  sums[strand][lane] = part_sum;
  __syncthreads();
  if (strand == 0 && column < COLUMNS) {
    float total = 0.0f;
#pragma unroll
    for (int s = 0; s < 32; s++) total += sums[s][lane];
    sum[column] = ACCUMULATE ? sum[column] + total : total;
  }
}
