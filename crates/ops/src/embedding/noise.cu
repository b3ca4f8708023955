// NEFTune (Jain et al. 2023): y = x + ALPHA/sqrt(L·COLUMNS)·(2u − 1), L the tokens of the row's document, u the unit number at
// the element's place. x, y [ROWS, COLUMNS], row i at X_AT(i), are the batch from its element `first` on, with which a row begins;
// `start` [·, TOKENS] holds for every token of the batch the place
// in its row at which its document starts, which does not fall along a row. The random sequence is that of the micro-step.
// Each thread takes the four elements of one block of random words, and looks for the end of a document once for each row
// that these are in: log2(TOKENS) reads, which neighbours share.
#include "types.cuh"
#include "pack.cuh"
#include "philox.cuh"

__device__ __forceinline__ float bound_of(const int* __restrict__ start, u64 row) {
  const int* of = start + row / TOKENS * TOKENS;
  const int place = (int)(row % TOKENS), begin = of[place];
  int low = place + 1, high = TOKENS;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (of[middle] > begin) high = middle;
    else low = middle + 1;
  }
  return __fdiv_rn(ALPHA, __fsqrt_rn((float)((u64)(low - begin) * COLUMNS)));
}

extern "C" __global__ void __launch_bounds__(THREADS)
embedding_noise(const X_T* x, const int* __restrict__ start, const int* __restrict__ micro_step, Y_T* y, long long first) {
  const u64 block = (u64)first / 4 + (u64)blockIdx.x * THREADS + threadIdx.x;
  if (block * 4 >= first + COUNT) return;
  const Philox dice = philox_words(SEED, PURPOSE_EMBEDDING_NOISE, 0u, (u32)*micro_step, block);
  u64 known = ~0ull;
  float bound = 0.0f;
#pragma unroll
  for (int part = 0; part < 4; part += WIDTH) {
    if (block * 4 + part < (u64)first) continue;
    const u64 index = block * 4 + part - (u64)first;
    if (index >= COUNT) return;
    const u64 row = index / COLUMNS, column = index % COLUMNS;
    if (row != known) bound = bound_of(start, (u64)first / COLUMNS + (known = row));
    const auto from = read_pack<WIDTH>(x + X_AT(row) + column);
    Pack<Y_T, WIDTH> to;
#pragma unroll
    for (int lane = 0; lane < WIDTH; lane++) {
      const float side = __fsub_rn(__fmul_rn(2.0f, unit(dice.word[part + lane])), 1.0f);
      to.at[lane] = from_float<Y_T>(__fadd_rn(to_float(from.at[lane]), __fmul_rn(bound, side)));
    }
    write_pack<WIDTH>(y + Y_AT(row) + column, to);
  }
}
