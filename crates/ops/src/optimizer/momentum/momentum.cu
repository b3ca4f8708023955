// m = MOMENTUM·m + REST·(gradient·scale), f32 [COUNT]; nothing changes when *applied is 0. Four neighbours a
// thread. Products and sums are written uncontracted: the bits are those of the CPU reference.
#include "types.cuh"
#include "pack.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
momentum(const float* __restrict__ gradient, const float* __restrict__ gradient_scale,
         const float* __restrict__ applied, float* __restrict__ first) {
  const u64 start = ((u64)blockIdx.x * THREADS + threadIdx.x) * 4;
  if (*applied == 0.0f || start >= COUNT) return;
  const int count = COUNT - start < 4 ? (int)(COUNT - start) : 4;
  const float scale = *gradient_scale;
  const auto g = read_part<4, ALIGNED>(gradient + start, count);
  auto m = read_part<4, ALIGNED>(first + start, count);
#pragma unroll
  for (int i = 0; i < 4; i++)
    m.at[i] = __fadd_rn(__fmul_rn(MOMENTUM, m.at[i]), __fmul_rn(REST, __fmul_rn(g.at[i], scale)));
  write_part<4, ALIGNED>(first + start, m, count);
}
