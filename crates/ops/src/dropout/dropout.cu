// Dropout: y = x/(1 − P) where kept, else 0; kept where the unit number at the element's place is at
// least P. x, y [rows, COLUMNS], row i at X_AT(i), COUNT elements. The random sequence is that of the
// micro-step, its position the element's index in the tensor's logical order, counted from `first`: layouts change
// nothing. Each thread takes the four elements of one block of random words; WIDTH 4 promises that `first` begins a block.
#include "types.cuh"
#include "pack.cuh"
#include "philox.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
dropout(const X_T* x, const int* __restrict__ micro_step, Y_T* y, long long first) {
  const u64 block = (u64)first / 4 + (u64)blockIdx.x * THREADS + threadIdx.x;
  if (block * 4 >= first + COUNT) return;
  const Philox dice = philox_words(SEED, PURPOSE_DROPOUT, STREAM, (u32)*micro_step, block);
#pragma unroll
  for (int part = 0; part < 4; part += WIDTH) {
    if (block * 4 + part < (u64)first) continue;
    const u64 index = block * 4 + part - (u64)first;
    if (index >= COUNT) return;
    const u64 row = index / COLUMNS, column = index % COLUMNS;
    const auto from = read_pack<WIDTH>(x + X_AT(row) + column);
    Pack<Y_T, WIDTH> to;
#pragma unroll
    for (int lane = 0; lane < WIDTH; lane++) {
      const bool kept = unit(dice.word[part + lane]) >= P;
      to.at[lane] = from_float<Y_T>(kept ? __fmul_rn(to_float(from.at[lane]), SCALE) : 0.0f);
    }
    write_pack<WIDTH>(y + Y_AT(row) + column, to);
  }
}
