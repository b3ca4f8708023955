// Cross entropy of a row of logits: lse = log Σ exp(x), loss = lse − x[target]; and its gradient
// dx = (exp(x − lse) − [i = target])·d. logits, d_logits [rows, COLUMNS], row i at LOGITS_AT(i);
// targets int [rows]; token_loss, lse, d f32 [rows]. A target of IGNORED gives 0 everywhere.
// One block per row. Forward reads a row once: every thread keeps a running maximum and the sum of
// exponentials below it, merged in a fixed order. Backward may write over the logits: each thread
// reads an element before it writes the same one. A target outside the row gives a loss of NaN.
#include "types.cuh"
#include "pack.cuh"
#include "reduce.cuh"

// Finite, so that no difference of two maxima is NaN.
#define LOWEST (-3.4028235e38f)

#if defined(FORWARD)
extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy(const LOGITS_T* __restrict__ logits, const int* __restrict__ targets, float* __restrict__ token_loss,
              float* __restrict__ lse) {
  const size_t row = blockIdx.x;
  const int target = targets[row];
  if (target == IGNORED) {
    if (threadIdx.x == 0) token_loss[row] = lse[row] = 0.0f;
    return;
  }
  logits += LOGITS_AT(row);
  float top = LOWEST, sum = 0.0f;
  for (int i = threadIdx.x * WIDTH; i < COLUMNS; i += THREADS * WIDTH) {
    const auto x = read_pack<WIDTH>(logits + i);
    float local = to_float(x.at[0]);
#pragma unroll
    for (int lane = 1; lane < WIDTH; lane++) local = fmaxf(local, to_float(x.at[lane]));
    if (local > top) {
      sum *= expf(top - local);
      top = local;
    }
#pragma unroll
    for (int lane = 0; lane < WIDTH; lane++) sum += expf(to_float(x.at[lane]) - top);
  }
  const float highest = block_max<THREADS>(top);
  const float total = block_sum<THREADS>(sum * expf(top - highest));
  if (threadIdx.x == 0) {
    const float log_sum = highest + logf(total);
    lse[row] = log_sum;
    const bool inside = target >= 0 && target < COLUMNS;
    token_loss[row] = inside ? log_sum - load(logits + target) : __int_as_float(0x7fc00000);
  }
}
#endif

#if defined(BACKWARD)
extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_backward(const LOGITS_T* logits, const int* __restrict__ targets, const float* __restrict__ lse,
                       const float* __restrict__ d_token_loss, D_LOGITS_T* d_logits) {
  const size_t row = blockIdx.x;
  const int target = targets[row];
  const float d = d_token_loss[row], log_sum = lse[row];
  logits += LOGITS_AT(row);
  d_logits += D_LOGITS_AT(row);
  for (int i = threadIdx.x * WIDTH; i < COLUMNS; i += THREADS * WIDTH) {
    Pack<D_LOGITS_T, WIDTH> dx;
    if (target == IGNORED) {
#pragma unroll
      for (int lane = 0; lane < WIDTH; lane++) dx.at[lane] = from_float<D_LOGITS_T>(0.0f);
    } else {
      const auto x = read_pack<WIDTH>(logits + i);
#pragma unroll
      for (int lane = 0; lane < WIDTH; lane++) {
        const float hit = i + lane == target ? 1.0f : 0.0f;
        dx.at[lane] = from_float<D_LOGITS_T>((expf(to_float(x.at[lane]) - log_sum) - hit) * d);
      }
    }
    write_pack<WIDTH>(d_logits + i, dx);
  }
}
#endif
