// A convolution of each channel over the tokens of its document, and its gradients. x, y [batch, TOKENS, CHANNELS], row r of
// X at X_AT(r); w [CHANNELS, WIDTH], the last column for the token itself; starts i32 [batch, TOKENS]. A block has THREADS
// channels, a thread one, of STRIP tokens of one row (blockIdx.y, .z), whose last or next WIDTH values it holds in registers.
//   causal_conv: y[t] = sum of w[WIDTH-1-j] x[t-j] for t-j >= starts[t].
//   causal_conv_backward: the same of what comes after: y[t] = sum of w[WIDTH-1-j] x[t+j] for starts[t+j] <= t.
//   causal_conv_weight_partial: partial[strip, c, WIDTH-1-j] = sum over the strip of y[t] x[t-j]; `sum_partials` adds the
//     strips. Fixed order: the same bits on every run.
#include "types.cuh"

#define EACH_TAP _Pragma("unroll") for (int j = 0; j < WIDTH; j++)

#if defined(W_T)
__device__ __forceinline__ void taps_of(const W_T* __restrict__ w, int c, float* tap) {
  EACH_TAP tap[j] = load(w + (size_t)c * WIDTH + WIDTH - 1 - j);
}

extern "C" __global__ void __launch_bounds__(THREADS)
causal_conv(const X_T* __restrict__ x, const W_T* __restrict__ w, const int* __restrict__ starts, Y_T* __restrict__ y) {
  const int c = blockIdx.x * THREADS + threadIdx.x, first = blockIdx.y * STRIP;
  const size_t row = (size_t)blockIdx.z * TOKENS;
  if (c >= CHANNELS) return;
  float tap[WIDTH], held[WIDTH];  // held[j] = x[t - j]
  taps_of(w, c, tap);
  EACH_TAP held[j] = j && first - j >= 0 ? load(x + X_AT(row + first - j) + c) : 0.0f;
  const int end = min(first + STRIP, TOKENS);
  for (int t = first; t < end; t++) {
    held[0] = load(x + X_AT(row + t) + c);
    const int seen = t - starts[row + t];
    float sum = 0.0f;
#pragma unroll
    for (int j = WIDTH - 1; j >= 0; j--)
      if (j <= seen) sum += tap[j] * held[j];
    store(y + Y_AT(row + t) + c, sum);
#pragma unroll
    for (int j = WIDTH - 1; j > 0; j--) held[j] = held[j - 1];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
causal_conv_backward(const X_T* __restrict__ x, const W_T* __restrict__ w, const int* __restrict__ starts,
                     Y_T* __restrict__ y) {
  const int c = blockIdx.x * THREADS + threadIdx.x, first = blockIdx.y * STRIP;
  const size_t row = (size_t)blockIdx.z * TOKENS;
  if (c >= CHANNELS) return;
  float tap[WIDTH], held[WIDTH];  // held[j] = x[t + j]
  taps_of(w, c, tap);
  const int end = min(first + STRIP, TOKENS);
  EACH_TAP held[j] = j && end - 1 + j < TOKENS ? load(x + X_AT(row + end - 1 + j) + c) : 0.0f;
  for (int t = end - 1; t >= first; t--) {
    held[0] = load(x + X_AT(row + t) + c);
    float sum = 0.0f;
    EACH_TAP if (t + j < TOKENS && starts[row + t + j] <= t) sum += tap[j] * held[j];
    store(y + Y_AT(row + t) + c, sum);
#pragma unroll
    for (int j = WIDTH - 1; j > 0; j--) held[j] = held[j - 1];
  }
}
#else
extern "C" __global__ void __launch_bounds__(THREADS)
causal_conv_weight_partial(const X_T* __restrict__ x, const Y_T* __restrict__ y, const int* __restrict__ starts,
                           float* __restrict__ partial) {
  const int c = blockIdx.x * THREADS + threadIdx.x, first = blockIdx.y * STRIP;
  const size_t row = (size_t)blockIdx.z * TOKENS;
  if (c >= CHANNELS) return;
  float sum[WIDTH], held[WIDTH];  // held[j] = x[t - j]
  EACH_TAP sum[j] = 0.0f;
  EACH_TAP held[j] = j && first - j >= 0 ? load(x + X_AT(row + first - j) + c) : 0.0f;
  const int end = min(first + STRIP, TOKENS);
  for (int t = first; t < end; t++) {
    held[0] = load(x + X_AT(row + t) + c);
    const float dy = load(y + Y_AT(row + t) + c);
    const int seen = t - starts[row + t];
    EACH_TAP if (j <= seen) sum[j] += dy * held[j];
#pragma unroll
    for (int j = WIDTH - 1; j > 0; j--) held[j] = held[j - 1];
  }
  const size_t part = (size_t)blockIdx.z * gridDim.y + blockIdx.y;
  EACH_TAP partial[(part * CHANNELS + c) * WIDTH + WIDTH - 1 - j] = sum[j];
}
#endif
