// The step of NorMuon on gridDim.y matrices [ROWS, COLUMNS]: direction O dense, weights WEIGHT_STRIDE and means
// MEANS_STRIDE apart.
//   v = β2·v + (1−β2)·mean(O²) of each row;  Ô = O/(√v + eps);  w −= lr·SCALE/‖Ô‖·Ô, decayed before
// with lr = learning_rate·RATE, SCALE = scale·√(mn). First one block a row, then one block a matrix, then four elements a thread. No atomics:
// sums in a fixed order. Products and sums of the step are written uncontracted, as the CPU reference computes them.
#include "types.cuh"
#include "reduce.cuh"
#include "pack.cuh"
#include "philox.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
normuon_rows(const DIRECTION_T* __restrict__ direction, const float* __restrict__ applied, float* __restrict__ means,
             float* __restrict__ inverse, float* __restrict__ squares) {
  if (*applied == 0.0f) return;
  const u32 row = blockIdx.x;
  const u64 index = (u64)blockIdx.y * ROWS + row;
  const DIRECTION_T* o = direction + index * COLUMNS;
  float sum = 0.0f;
  for (u32 i = threadIdx.x; i < COLUMNS; i += THREADS) {
    const float x = load(o + i);
    sum = fmaf(x, x, sum);
  }
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x) return;
  float* mean = means + blockIdx.y * MEANS_STRIDE + row;
  const float v = __fadd_rn(__fmul_rn(BETA2, *mean), __fmul_rn(REST2, __fdiv_rn(sum, (float)COLUMNS)));
  const float part = __fdiv_rn(1.0f, __fadd_rn(sqrtf(v), EPSILON));
  *mean = v;
  inverse[index] = part;
  squares[index] = __fmul_rn(__fmul_rn(sum, part), part);
}

extern "C" __global__ void __launch_bounds__(THREADS)
normuon_factors(const float* __restrict__ squares, const float* __restrict__ learning_rate,
                float* __restrict__ factors) {
  squares += (u64)blockIdx.y * ROWS;
  float sum = 0.0f;
  for (u32 i = threadIdx.x; i < ROWS; i += THREADS) sum += squares[i];
  const float norm = sqrtf(block_sum<THREADS>(sum));
  if (threadIdx.x == 0) factors[blockIdx.y] = norm == 0.0f ? 0.0f : __fdiv_rn(__fmul_rn(__fmul_rn(*learning_rate, RATE), SCALE), norm);
}

extern "C" __global__ void __launch_bounds__(THREADS)
normuon_step(const DIRECTION_T* __restrict__ direction, const float* __restrict__ learning_rate,
             const float* __restrict__ applied, const int* __restrict__ step, const float* __restrict__ inverse,
             const float* __restrict__ factors, WEIGHT_T* __restrict__ weight, const u64 before) {
  const u32 block = blockIdx.x * THREADS + threadIdx.x, start = block * 4;
  if (*applied == 0.0f || start >= ELEMENTS) return;
  const int count = ELEMENTS - start < 4 ? (int)(ELEMENTS - start) : 4;
  weight += blockIdx.y * WEIGHT_STRIDE + start;
  const auto o = read_part<4, ALIGNED>(direction + (u64)blockIdx.y * ELEMENTS + start, count);
  auto w = read_part<4, ALIGNED>(weight, count);
  const float factor = factors[blockIdx.y], kept = __fsub_rn(1.0f, __fmul_rn(__fmul_rn(*learning_rate, RATE), WEIGHT_DECAY));
  inverse += (u64)blockIdx.y * ROWS;
#if STOCHASTIC
  // Every matrix has blocks of random words of its own.
  const u64 words = (u64)before + (u64)blockIdx.y * ((ELEMENTS + 3) / 4) + block;
  const Philox dice = philox_words(SEED, PURPOSE_STOCHASTIC_ROUNDING, STREAM, (u32)*step, words);
#endif
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (i >= count) continue;
    const float x = __fmul_rn(to_float(o.at[i]), inverse[(start + i) / COLUMNS]), old = to_float(w.at[i]);
    const bool decays = !CAUTIOUS || __fmul_rn(x, old) >= 0.0f;
    const float next = __fsub_rn(decays ? __fmul_rn(old, kept) : old, __fmul_rn(factor, x));
#if STOCHASTIC
    w.at[i] = stochastic_bf16(next, dice.word[i]);
#else
    w.at[i] = from_float<WEIGHT_T>(next);
#endif
  }
  write_part<4, ALIGNED>(weight, w, count);
}
