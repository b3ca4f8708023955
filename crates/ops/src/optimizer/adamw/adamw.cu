// AdamW (Loshchilov & Hutter 2019) as PyTorch computes it, with decay before the step:
//   w *= 1 − lr·decay;  m += (g − m)(1 − β1);  v = β2·v + (1 − β2)g²;  w −= lr/c1 · m/(√v/√c2 + eps)
// with lr = learning_rate·RATE, g = gradient·scale. gradient, m, v f32 [COUNT], w WEIGHT_T [COUNT]. Nothing changes when
// *applied is 0. Each thread takes four neighbours: one block of random words rounds their weights.
// FROZEN: gradient is the m of this step, v stays, where v is 0 so is m, and m/(...) is between -BOUND and BOUND. `before` such blocks of the whole tensor come before these. Products and sums are written uncontracted:
// the bits are those of the CPU reference.
#include "types.cuh"
#include "pack.cuh"
#include "philox.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
adamw(const float* __restrict__ gradient, const float* __restrict__ learning_rate,
      const float* __restrict__ correction1, const float* __restrict__ correction2,
      const float* __restrict__ gradient_scale, const float* __restrict__ applied, const int* __restrict__ step,
      WEIGHT_T* __restrict__ weight, float* __restrict__ first, float* __restrict__ second, const u64 before) {
  const u64 block = (u64)blockIdx.x * THREADS + threadIdx.x, start = block * 4;
  if (*applied == 0.0f || start >= COUNT) return;
  const int count = COUNT - start < 4 ? (int)(COUNT - start) : 4;
  const auto g = read_part<4, ALIGNED>(gradient + start, count);
  auto w = read_part<4, ALIGNED>(weight + start, count);
  auto m = read_part<4, ALIGNED>(first + start, count);
  auto v = read_part<4, ALIGNED>(second + start, count);
  const float rate = __fmul_rn(*learning_rate, RATE), root = sqrtf(*correction2);
#if !FROZEN
  const float scale = *gradient_scale;
#endif
  const float kept = __fsub_rn(1.0f, __fmul_rn(rate, WEIGHT_DECAY)), size = __fdiv_rn(rate, *correction1);
#if STOCHASTIC
  const Philox dice = philox_words(SEED, PURPOSE_STOCHASTIC_ROUNDING, STREAM, (u32)*step, before + block);
#endif
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if FROZEN
    m.at[i] = v.at[i] > 0.0f ? g.at[i] : 0.0f;
#else
    const float gi = __fmul_rn(g.at[i], scale);
    m.at[i] = __fadd_rn(m.at[i], __fmul_rn(__fsub_rn(gi, m.at[i]), REST1));
    v.at[i] = __fadd_rn(__fmul_rn(BETA2, v.at[i]), __fmul_rn(REST2, __fmul_rn(gi, gi)));
#endif
    const float below = __fadd_rn(__fdiv_rn(sqrtf(v.at[i]), root), EPSILON);
    const float decayed = __fmul_rn(to_float(w.at[i]), kept);
    float ratio = __fdiv_rn(m.at[i], below);
#if FROZEN
    ratio = fmaxf(fminf(ratio, BOUND), -BOUND);
#endif
    const float next = __fsub_rn(decayed, __fmul_rn(size, ratio));
#if STOCHASTIC
    w.at[i] = stochastic_bf16(next, dice.word[i]);
#else
    w.at[i] = from_float<WEIGHT_T>(next);
#endif
  }
  write_part<4, ALIGNED>(weight + start, w, count);
  write_part<4, ALIGNED>(first + start, m, count);
#if !FROZEN
  write_part<4, ALIGNED>(second + start, v, count);
#endif
}
