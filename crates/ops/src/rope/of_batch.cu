// Rotary frequencies by the length of the batch: n = largest of COUNT positions + 1. Up to ORIGINAL the table
// SHORT; beyond it the table LONG, or powers of the base THETA·(FACTOR·n/ORIGINAL − FACTOR + 1)^GROWTH.
// One block: positions are few. Powers in f64 and rounded, as the CPU's reference has them.
static __device__ const float short_table[PAIRS] = {SHORT};
#ifdef LONG
static __device__ const float long_table[PAIRS] = {LONG};
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
rope_frequencies_of_batch(const int* __restrict__ positions, float* __restrict__ inv_freq,
                          float* __restrict__ scaling) {
  __shared__ int parts[THREADS / 32];
  int last = -1;
  for (size_t i = threadIdx.x; i < COUNT; i += THREADS) last = max(last, positions[i]);
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) last = max(last, __shfl_xor_sync(0xffffffffu, last, offset));
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = last;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) last = max(last, parts[i]);
  const int length = last + 1;
  for (int i = threadIdx.x; i < PAIRS; i += THREADS) {
    float value = short_table[i];
    if (length > ORIGINAL) {
#ifdef LONG
      value = long_table[i];
#else
      const float stretch = __fsub_rn(__fdiv_rn(__fmul_rn(FACTOR, (float)length), (float)ORIGINAL), FACTOR - 1.0f);
      const float base = __fmul_rn(THETA, (float)pow((double)stretch, (double)GROWTH));
      value = __fdiv_rn(1.0f, (float)pow((double)base, (double)__fdiv_rn((float)(2 * i), (float)(2 * PAIRS))));
#endif
    }
    inv_freq[i] = value;
  }
  if (threadIdx.x == 0) *scaling = SCALING;
}
