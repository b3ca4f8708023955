// Divergence of a row of a student's logits x from a teacher's y, both multiplied by SCALE, and its gradient in x.
// x, y, d_logits [rows, COLUMNS], row i at LOGITS_AT(i), TEACHER_AT(i), D_LOGITS_AT(i); the others f32 [rows]. KIND 0:
// KL(t ‖ s), 1: KL(s ‖ t), 2: BETA·KL(t ‖ m) + REST·KL(s ‖ m), m = BETA·t + REST·s. A target of IGNORED gives 0 everywhere.
// One block per row. Forward reads a row for both sums of exponentials, and once more for the divergence. Backward may
// write over the logits: each thread reads an element before it writes the same one.
#include "types.cuh"
#include "pack.cuh"
#include "reduce.cuh"

// Finite, so that no difference of two maxima is NaN.
#define LOWEST (-3.4028235e38f)

// Logarithms of both probabilities and of the mixture's, and both probabilities.
struct Token {
  float s, t, m, p, q;
  __device__ __forceinline__ Token(float x, float y, float lse, float teacher_lse)
      : s(x * SCALE - lse), t(y * SCALE - teacher_lse) {
    p = expf(s);
    q = expf(t);
    m = KIND == 2 ? logf(BETA * q + REST * p) : t;
  }
};

__device__ __forceinline__ float expected(float p, float x) { return p > 0.0f ? p * x : 0.0f; }

// A running maximum and the sum of exponentials below it.
struct Sum {
  float top = LOWEST, sum = 0.0f;
  __device__ __forceinline__ void add(float x) {
    if (x > top) {
      sum *= expf(top - x);
      top = x;
    }
    sum += expf(x - top);
  }
  __device__ __forceinline__ float log_sum() {
    const float highest = block_max<THREADS>(top);
    return highest + logf(block_sum<THREADS>(sum * expf(top - highest)));
  }
};

#if defined(FORWARD)
extern "C" __global__ void __launch_bounds__(THREADS)
distillation(const LOGITS_T* __restrict__ logits, const TEACHER_T* __restrict__ teacher,
             const int* __restrict__ targets, float* __restrict__ divergence, float* __restrict__ entropy,
             float* __restrict__ lse, float* __restrict__ teacher_lse, float* __restrict__ mean) {
  const size_t row = blockIdx.x;
  if (targets[row] == IGNORED) {
    if (threadIdx.x == 0) divergence[row] = entropy[row] = lse[row] = teacher_lse[row] = mean[row] = 0.0f;
    return;
  }
  logits += LOGITS_AT(row);
  teacher += TEACHER_AT(row);
  Sum of_logits, of_teacher;
  for (int i = threadIdx.x * WIDTH; i < COLUMNS; i += THREADS * WIDTH) {
    const auto x = read_pack<WIDTH>(logits + i);
    const auto y = read_pack<WIDTH>(teacher + i);
#pragma unroll
    for (int lane = 0; lane < WIDTH; lane++) {
      of_logits.add(to_float(x.at[lane]) * SCALE);
      of_teacher.add(to_float(y.at[lane]) * SCALE);
    }
  }
  const float log_sum = of_logits.log_sum(), teacher_log_sum = of_teacher.log_sum();
  float from_teacher = 0.0f, from_student = 0.0f, uncertainty = 0.0f;
  for (int i = threadIdx.x * WIDTH; i < COLUMNS; i += THREADS * WIDTH) {
    const auto x = read_pack<WIDTH>(logits + i);
    const auto y = read_pack<WIDTH>(teacher + i);
#pragma unroll
    for (int lane = 0; lane < WIDTH; lane++) {
      const Token of(to_float(x.at[lane]), to_float(y.at[lane]), log_sum, teacher_log_sum);
      uncertainty += expected(of.p, -of.s);
      if (KIND == 0) {
        from_teacher += expected(of.q, of.t - of.s);
      } else {
        from_student += expected(of.p, of.s - of.m);
        if (KIND == 2) from_teacher += expected(of.q, of.t - of.m);
      }
    }
  }
  uncertainty = block_sum<THREADS>(uncertainty);
  from_teacher = block_sum<THREADS>(from_teacher);
  from_student = block_sum<THREADS>(from_student);
  if (threadIdx.x == 0) {
    divergence[row] = KIND == 0 ? from_teacher : KIND == 1 ? from_student : BETA * from_teacher + REST * from_student;
    entropy[row] = uncertainty;
    lse[row] = log_sum;
    teacher_lse[row] = teacher_log_sum;
    mean[row] = KIND == 0 ? 0.0f : KIND == 1 ? from_student : REST * from_student;
  }
}
#endif

#if defined(BACKWARD)
extern "C" __global__ void __launch_bounds__(THREADS)
distillation_backward(const LOGITS_T* logits, const TEACHER_T* __restrict__ teacher, const int* __restrict__ targets,
                      const float* __restrict__ lse, const float* __restrict__ teacher_lse,
                      const float* __restrict__ mean, const float* __restrict__ d_divergence, D_LOGITS_T* d_logits) {
  const size_t row = blockIdx.x;
  const bool ignored = targets[row] == IGNORED;
  const float log_sum = lse[row], teacher_log_sum = teacher_lse[row], middle = mean[row];
  const float d = d_divergence[row] * SCALE;
  logits += LOGITS_AT(row);
  teacher += TEACHER_AT(row);
  d_logits += D_LOGITS_AT(row);
  for (int i = threadIdx.x * WIDTH; i < COLUMNS; i += THREADS * WIDTH) {
    Pack<D_LOGITS_T, WIDTH> dx;
    if (ignored) {
#pragma unroll
      for (int lane = 0; lane < WIDTH; lane++) dx.at[lane] = from_float<D_LOGITS_T>(0.0f);
    } else {
      const auto x = read_pack<WIDTH>(logits + i);
      const auto y = read_pack<WIDTH>(teacher + i);
#pragma unroll
      for (int lane = 0; lane < WIDTH; lane++) {
        const Token of(to_float(x.at[lane]), to_float(y.at[lane]), log_sum, teacher_log_sum);
        const float weight = KIND == 2 ? REST : 1.0f;
        const float slope = KIND == 0 ? of.p - of.q : expected(of.p, weight * (of.s - of.m) - middle);
        dx.at[lane] = from_float<D_LOGITS_T>(slope * d);
      }
    }
    write_pack<WIDTH>(d_logits + i, dx);
  }
}
#endif
