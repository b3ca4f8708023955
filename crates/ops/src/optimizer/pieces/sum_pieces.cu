// Σ of PIECES rows [COUNT] of PIECE_T in their order, in f32, four elements a thread; ACCUMULATE adds the sum to what is
// there. Sums are written uncontracted, as the CPU reference computes them.
#include "types.cuh"
#include "pack.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
sum_pieces(const PIECE_T* __restrict__ pieces, float* __restrict__ sum) {
  const u64 start = ((u64)blockIdx.x * THREADS + threadIdx.x) * 4;
  if (start >= COUNT) return;
  const int count = COUNT - start < 4 ? (int)(COUNT - start) : 4;
  const auto first = read_part<4, ALIGNED>(pieces + start, count);
  Pack<float, 4> total;
#pragma unroll
  for (int i = 0; i < 4; i++) total.at[i] = to_float(first.at[i]);
#pragma unroll
  for (int piece = 1; piece < PIECES; piece++) {
    const auto more = read_part<4, ALIGNED>(pieces + piece * COUNT + start, count);
#pragma unroll
    for (int i = 0; i < 4; i++) total.at[i] = __fadd_rn(total.at[i], to_float(more.at[i]));
  }
#if ACCUMULATE
  const auto before = read_part<4, ALIGNED>(sum + start, count);
#pragma unroll
  for (int i = 0; i < 4; i++) total.at[i] = __fadd_rn(before.at[i], total.at[i]);
#endif
  write_part<4, ALIGNED>(sum + start, total, count);
}
