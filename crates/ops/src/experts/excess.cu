// y[e] = EXPERTS load[e] - (sum over i of load[i]), f32 [EXPERTS], of the choices, the first row of a load f32 [3, EXPERTS].
// With ACCUMULATE added to what is there. One block.
extern "C" __global__ void __launch_bounds__(THREADS) load_excess(const float* __restrict__ load, float* __restrict__ y) {
  __shared__ float parts[THREADS / 32];
  float sum = 0.0f;
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) sum += load[e];
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) sum += parts[i];
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
    const float own = EXPERTS * load[e] - sum;
    y[e] = ACCUMULATE ? y[e] + own : own;
  }
}
