// KL divergence of a row of logits x, multiplied by SCALE, from COUNT tokens of a teacher with their log-probabilities,
// and its gradient in x. x, d_logits [rows, COLUMNS], row i at LOGITS_AT(i), D_LOGITS_AT(i); ids int, logps f32
// [rows, COUNT]; the others [rows]. TAIL: all other tokens are one class of at least LEAST; else both distributions are
// renormalized. An id below 0 is none; one outside of the row gives NaN. A target of IGNORED gives 0 everywhere.
// One block per row. Forward reads a row once: every thread keeps a running maximum, the sum of exponentials below it and
// that of the same times their exponents. Backward may write over the logits: those of the tokens are kept before.
#include "types.cuh"
#include "pack.cuh"
#include "reduce.cuh"

// Finite, so that no difference of two maxima is NaN.
#define LOWEST (-3.4028235e38f)

__device__ __forceinline__ float expected(float p, float x) { return p > 0.0f ? p * x : 0.0f; }

// The logit of a token, multiplied.
__device__ __forceinline__ float logit_of(const LOGITS_T* logits, int id) {
  return id < COLUMNS ? load(logits + id) * SCALE : __int_as_float(0x7fc00000);
}

// What the tokens come to: log Σ of both probabilities, and Σ q·(ln q − ln p).
struct Kept {
  float student, teacher, cross;
  bool none;

  // `scaled`: the tokens' logits, of which each thread reads those that it has written.
  __device__ __forceinline__ Kept(const float* scaled, const int* ids, const float* logps, float lse) {
    float top = LOWEST, top_teacher = LOWEST, sum = 0.0f, sum_teacher = 0.0f;
    cross = 0.0f;
    for (int i = threadIdx.x; i < COUNT; i += THREADS) {
      if (ids[i] < 0) continue;
      top = fmaxf(top, scaled[i] - lse);
      top_teacher = fmaxf(top_teacher, logps[i]);
    }
    top = block_max<THREADS>(top);
    top_teacher = block_max<THREADS>(top_teacher);
    for (int i = threadIdx.x; i < COUNT; i += THREADS) {
      if (ids[i] < 0) continue;
      const float p = scaled[i] - lse, q = logps[i];
      sum += expf(p - top);
      sum_teacher += expf(q - top_teacher);
      cross += expected(expf(q), q - p);
    }
    sum = block_sum<THREADS>(sum);
    sum_teacher = block_sum<THREADS>(sum_teacher);
    cross = block_sum<THREADS>(cross);
    none = sum_teacher == 0.0f;
    student = top + logf(sum);
    teacher = top_teacher + logf(sum_teacher);
  }

  static __device__ __forceinline__ float others(float log_sum) {
    const float rest = 1.0f - expf(log_sum);
    // A comparison keeps NaN, where a maximum would not.
    return rest < LEAST ? LEAST : rest;
  }

  __device__ __forceinline__ float divergence() const {
    if (none) return 0.0f;
    if (!TAIL) return cross / expf(teacher) - teacher + student;
    const float of_student = others(student), of_teacher = others(teacher);
    return cross + of_teacher * (logf(of_teacher) - logf(of_student));
  }
};

#if defined(FORWARD)
extern "C" __global__ void __launch_bounds__(THREADS)
distillation_top(const LOGITS_T* __restrict__ logits, const int* __restrict__ ids, const float* __restrict__ logps,
                 const int* __restrict__ targets, float* __restrict__ divergence, float* __restrict__ entropy,
                 float* __restrict__ lse) {
  __shared__ float scaled[COUNT];
  const size_t row = blockIdx.x;
  if (targets[row] == IGNORED) {
    if (threadIdx.x == 0) divergence[row] = entropy[row] = lse[row] = 0.0f;
    return;
  }
  logits += LOGITS_AT(row);
  ids += row * COUNT;
  logps += row * COUNT;
  float top = LOWEST, sum = 0.0f, weighted = 0.0f;
  for (int i = threadIdx.x * WIDTH; i < COLUMNS; i += THREADS * WIDTH) {
    const auto x = read_pack<WIDTH>(logits + i);
#pragma unroll
    for (int lane = 0; lane < WIDTH; lane++) {
      const float value = to_float(x.at[lane]) * SCALE;
      if (value > top) {
        const float down = expf(top - value);
        weighted = down > 0.0f ? down * (weighted + (top - value) * sum) : 0.0f;
        sum *= down;
        top = value;
      }
      const float e = expf(value - top);
      sum += e;
      weighted += expected(e, value - top);
    }
  }
  const float highest = block_max<THREADS>(top), down = expf(top - highest);
  weighted = block_sum<THREADS>(down > 0.0f ? down * (weighted + (top - highest) * sum) : 0.0f);
  const float total = block_sum<THREADS>(sum * down);
  const float log_sum = highest + logf(total);
  for (int i = threadIdx.x; i < COUNT; i += THREADS) scaled[i] = ids[i] < 0 ? 0.0f : logit_of(logits, ids[i]);
  const Kept kept(scaled, ids, logps, log_sum);
  if (threadIdx.x == 0) {
    divergence[row] = kept.divergence();
    entropy[row] = logf(total) - weighted / total;
    lse[row] = log_sum;
  }
}
#endif

#if defined(BACKWARD)
extern "C" __global__ void __launch_bounds__(THREADS)
distillation_top_backward(const LOGITS_T* logits, const int* __restrict__ ids, const float* __restrict__ logps,
                          const int* __restrict__ targets, const float* __restrict__ lse,
                          const float* __restrict__ d_divergence, D_LOGITS_T* d_logits) {
  __shared__ float scaled[COUNT];
  const size_t row = blockIdx.x;
  logits += LOGITS_AT(row);
  d_logits += D_LOGITS_AT(row);
  ids += row * COUNT;
  logps += row * COUNT;
  const bool ignored = targets[row] == IGNORED;
  const float log_sum = lse[row], d = d_divergence[row] * SCALE;
  // Factors of the student's probability for the tokens and for all others, and of the teacher's.
  float own = 0.0f, other = 0.0f, of_teacher = 0.0f;
  if (!ignored) {
    for (int i = threadIdx.x; i < COUNT; i += THREADS) scaled[i] = ids[i] < 0 ? 0.0f : logit_of(logits, ids[i]);
    const Kept kept(scaled, ids, logps, log_sum);
    if (!kept.none && TAIL) {
      const float rest = Kept::others(kept.student), rest_teacher = Kept::others(kept.teacher);
      const float moved = rest > LEAST ? rest_teacher : 0.0f;
      own = expf(kept.teacher) + moved;
      other = own - moved / rest;
      of_teacher = 1.0f;
    } else if (!kept.none) {
      own = expf(-kept.student);
      of_teacher = expf(-kept.teacher);
    }
  }
  // All have read the tokens' logits.
  __syncthreads();
  for (int i = threadIdx.x * WIDTH; i < COLUMNS; i += THREADS * WIDTH) {
    Pack<D_LOGITS_T, WIDTH> dx;
    if (ignored) {
#pragma unroll
      for (int lane = 0; lane < WIDTH; lane++) dx.at[lane] = from_float<D_LOGITS_T>(0.0f);
    } else {
      const auto x = read_pack<WIDTH>(logits + i);
#pragma unroll
      for (int lane = 0; lane < WIDTH; lane++) {
        dx.at[lane] = from_float<D_LOGITS_T>(expf(to_float(x.at[lane]) * SCALE - log_sum) * other * d);
      }
    }
    write_pack<WIDTH>(d_logits + i, dx);
  }
  if (ignored) return;
  __syncthreads();
  for (int i = threadIdx.x; i < COUNT; i += THREADS) {
    const int id = ids[i];
    if (id < 0 || id >= COLUMNS) continue;
    const float p = expf(scaled[i] - log_sum) * own - expf(logps[i]) * of_teacher;
    d_logits[id] = from_float<D_LOGITS_T>(p * d);
  }
}
#endif
