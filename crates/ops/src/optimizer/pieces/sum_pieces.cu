// Σ of PIECES rows [COUNT] of PIECE_T in their order, in f32, four elements a thread; ACCUMULATE adds the sum to what is
// there. The row `number` lies at `own`, which may be `sum`; no row has number -1. Sums are written uncontracted, as the CPU
// reference computes them.
#include "types.cuh"
#include "pack.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
sum_pieces(const PIECE_T* __restrict__ pieces, const OWN_T* own, long long number, float* sum) {
  const u64 start = ((u64)blockIdx.x * THREADS + threadIdx.x) * 4;
  if (start >= COUNT) return;
  const int count = COUNT - start < 4 ? (int)(COUNT - start) : 4;
  const auto row = [&](int piece) {
    Pack<float, 4> numbers;
    if (piece == number) {
      const auto found = read_part<4, ALIGNED>(own + start, count);
#pragma unroll
      for (int i = 0; i < 4; i++) numbers.at[i] = to_float(found.at[i]);
    } else {
      const auto found = read_part<4, ALIGNED>(pieces + piece * COUNT + start, count);
#pragma unroll
      for (int i = 0; i < 4; i++) numbers.at[i] = to_float(found.at[i]);
    }
    return numbers;
  };
  Pack<float, 4> total = row(0);
#pragma unroll
  for (int piece = 1; piece < PIECES; piece++) {
    const auto more = row(piece);
#pragma unroll
    for (int i = 0; i < 4; i++) total.at[i] = __fadd_rn(total.at[i], more.at[i]);
  }
#if ACCUMULATE
  const auto before = read_part<4, ALIGNED>(sum + start, count);
#pragma unroll
  for (int i = 0; i < 4; i++) total.at[i] = __fadd_rn(before.at[i], total.at[i]);
#endif
  write_part<4, ALIGNED>(sum + start, total, count);
}
