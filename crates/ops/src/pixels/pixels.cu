// y[row, i] = values[c, x[row, p, c]]: numbers of pixels of 8 bits. x [ROWS, PIXELS, 3] bytes, values [3, 256], y [ROWS, COLUMNS],
// row i at Y_AT(i), COLUMNS = 3·FRAMES·PIXELS. Where CHANNEL_LAST, i counts channels first, else pixels, frames, channels: all
// frames are the same. A block has the table in shared memory; each thread writes WIDTH numbers of a row.
#include "types.cuh"
#include "pack.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
pixels(const unsigned char* __restrict__ x, const float* __restrict__ values, Y_T* y) {
  __shared__ float table[3 * 256];
  for (int at = threadIdx.x; at < 3 * 256; at += THREADS) table[at] = values[at];
  __syncthreads();
  const u64 first = ((u64)blockIdx.x * THREADS + threadIdx.x) * WIDTH;
  if (first >= (u64)ROWS * COLUMNS) return;
  const u64 row = first / COLUMNS;
  const int column = (int)(first % COLUMNS);
  const unsigned char* of = x + row * (3 * PIXELS);
  Pack<Y_T, WIDTH> to;
#pragma unroll
  for (int lane = 0; lane < WIDTH; lane++) {
    const int i = column + lane;
    const int channel = CHANNEL_LAST ? i % 3 : i / (FRAMES * PIXELS);
    const int pixel = CHANNEL_LAST ? i / 3 : i % PIXELS;
    to.at[lane] = from_float<Y_T>(table[channel * 256 + of[3 * pixel + channel]]);
  }
  write_pack<WIDTH>(y + Y_AT(row) + column, to);
}
