// A convolution of each channel over the tokens of its sequence, whose last WIDTH tokens are kept: that at position p of the
// sequence in slot s in kept[s, p % WIDTH]. x, y [batch, TOKENS, CHANNELS], row r of X at X_AT(r); w [CHANNELS, WIDTH], the last
// column for the token itself; positions i32 [batch, TOKENS], below 0 for padding; slots i32 [batch]; kept [slots, WIDTH,
// CHANNELS], dense.
//   cached_conv: y[t] = sum of w[WIDTH-1-j] x[t-j] for j <= positions[t]. A block has THREADS channels, a thread one, of
//     STRIP tokens of one row (blockIdx.y, .z). Where a row is one strip, its tokens are kept here, too.
//   cached_conv_keep: the last tokens of a row (blockIdx.z), of THREADS channels.
#include "types.cuh"
#include "dependent_launch.cuh"

#define EACH_TAP _Pragma("unroll") for (int j = 0; j < WIDTH; j++)

// The last WIDTH tokens of a row that are none of padding.
__device__ __forceinline__ void keep(const X_T* x, const int* positions, const int* slots, KEPT_T* kept, int c) {
  const size_t row = (size_t)blockIdx.z * TOKENS;
  const int first = positions[row];
  if (first < 0) return;
  int count = 1;  // tokens of the row, found between `count` and `end`
  for (int end = TOKENS; count < end;) {
    const int middle = (count + end + 1) / 2;
    if (positions[row + middle - 1] < 0) end = middle - 1;
    else count = middle;
  }
  KEPT_T* to = kept + (size_t)slots[blockIdx.z] * WIDTH * CHANNELS + c;
  EACH_TAP if (j < count) {
    const int t = count - 1 - j;
    store(to + (size_t)((first + t) % WIDTH) * CHANNELS, load(x + X_AT(row + t) + c));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
cached_conv(const X_T* __restrict__ x, const W_T* __restrict__ w, const int* __restrict__ positions,
            const int* __restrict__ slots, Y_T* __restrict__ y, KEPT_T* kept) {
  const int c = blockIdx.x * THREADS + threadIdx.x, first = blockIdx.y * STRIP;
  const size_t row = (size_t)blockIdx.z * TOKENS;
  grid_dependency_synchronize();
  if (c >= CHANNELS) return;
  const int end = min(first + STRIP, TOKENS), begin = positions[row + first];
  float tap[WIDTH], held[WIDTH];  // held[j]: the token j in front
  EACH_TAP {
    tap[j] = load(w + (size_t)c * WIDTH + WIDTH - 1 - j);
    held[j] = 0.0f;
    if (j == 0 || begin < j) continue;
    if (first >= j) held[j] = load(x + X_AT(row + first - j) + c);
    else held[j] = load(kept + ((size_t)slots[blockIdx.z] * WIDTH + (begin - j) % WIDTH) * CHANNELS + c);
  }
  for (int t = first; t < end; t++) {
    held[0] = load(x + X_AT(row + t) + c);
    const int position = positions[row + t];
    float sum = 0.0f;
#pragma unroll
    for (int j = WIDTH - 1; j >= 0; j--)
      if (j <= position) sum += tap[j] * held[j];
    store(y + Y_AT(row + t) + c, sum);
#pragma unroll
    for (int j = WIDTH - 1; j > 0; j--) held[j] = held[j - 1];
  }
  if (TOKENS <= STRIP) keep(x, positions, slots, kept, c);
}

extern "C" __global__ void __launch_bounds__(THREADS)
cached_conv_keep(const X_T* __restrict__ x, const int* __restrict__ positions, const int* __restrict__ slots, KEPT_T* kept) {
  const int c = blockIdx.x * THREADS + threadIdx.x;
  grid_dependency_synchronize();
  if (c < CHANNELS) keep(x, positions, slots, kept, c);
}
