// gradient = KEPT·m + REST·(gradient·scale), or 0 where v is 0, f32 [COUNT]; NaN when *applied is 0. Four neighbours a
// thread. Products and sums are written uncontracted: the bits are those of the CPU reference.
#include "types.cuh"
#include "pack.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
momentum_part(const float* __restrict__ first, const float* __restrict__ second,
              const float* __restrict__ gradient_scale, const float* __restrict__ applied,
              float* __restrict__ gradient) {
  const u64 start = ((u64)blockIdx.x * THREADS + threadIdx.x) * 4;
  if (start >= COUNT) return;
  const int count = COUNT - start < 4 ? (int)(COUNT - start) : 4;
  const bool is_applied = *applied != 0.0f;
  const float scale = *gradient_scale, nan = __int_as_float(0x7fc00000);
  const auto m = read_part<4, ALIGNED>(first + start, count);
  const auto v = read_part<4, ALIGNED>(second + start, count);
  auto g = read_part<4, ALIGNED>(gradient + start, count);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float part = __fadd_rn(__fmul_rn(KEPT, m.at[i]), __fmul_rn(REST, __fmul_rn(g.at[i], scale)));
    g.at[i] = !is_applied ? nan : v.at[i] > 0.0f ? part : 0.0f;
  }
  write_part<4, ALIGNED>(gradient + start, g, count);
}
