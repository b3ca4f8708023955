// Rotary embedding: (y1, y2) = (x1 c - x2 s, x2 c + x1 s), c and s of angle position * inv_freq, times scaling.
// x, y [BATCH, TOKENS, HEADS, COLUMNS], strided in the first three axes; positions i32 [BATCH, TOKENS];
// inv_freq f32 [PAIRS], of several axes [AXES, PAIRS] with positions [BATCH, TOKENS, AXES]; scaling f32 [1]. x1, x2 are
// columns i and PAIRS + i, or 2 i and 2 i + 1 if INTERLEAVED; columns from 2 PAIRS on are copied.
// One thread per token and WIDTH neighbouring pairs: it takes sines and cosines once and walks over the heads.
// Each thread reads its own columns before it writes them, so x and y may be the same memory.
#include "types.cuh"
#include "pack.cuh"
// Nothing that grid_dependency_synchronize() waits for may be read ahead of it.
#if FOLLOWS
#include "dependent_launch.cuh"
#define CONSTANT
#else
#define CONSTANT __restrict__
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
rope(const X_T* x, const int* CONSTANT positions, const float* CONSTANT inv_freq, const float* CONSTANT scaling,
     Y_T* y) {
#if FOLLOWS
  grid_dependency_synchronize();
#endif
  const size_t index = (size_t)blockIdx.x * THREADS + threadIdx.x;
  if (index >= (size_t)BATCH * TOKENS * WORK) return;
  const size_t token = index / WORK;
  const int i = (int)(index % WORK) * WIDTH;
  const size_t b = token / TOKENS, t = token % TOKENS;
  x += b * X_B + t * X_S;
  y += b * Y_B + t * Y_S;
#if 2 * PAIRS < COLUMNS
  if (i >= PAIRS) {
    const int first = 2 * i, last = min(first + 2 * WIDTH, COLUMNS);
    for (int h = 0; h < HEADS; h++)
      for (int c = first; c < last; c++) store(y + (size_t)h * Y_H + c, load(x + (size_t)h * X_H + c));
    return;
  }
#endif
  float s[WIDTH], c[WIDTH];
#pragma unroll
  for (int n = 0; n < WIDTH; n++) {
#ifdef AXES
    float angle = 0.0f;
#pragma unroll
    for (int a = 0; a < AXES; a++) angle += (float)positions[token * AXES + a] * inv_freq[a * PAIRS + i + n];
#else
    const float angle = (float)positions[token] * inv_freq[i + n];
#endif
    sincosf(angle, &s[n], &c[n]);
    s[n] *= INVERSE ? -scaling[0] : scaling[0];
    c[n] *= scaling[0];
  }
  // The two packs of a thread, and where in them the members of pair n are.
  const int at = INTERLEAVED ? 2 * i : i, beyond = INTERLEAVED ? at + WIDTH : PAIRS + i;
#define FIRST(n) (INTERLEAVED ? 2 * (n) : (n))
#define SECOND(n) (INTERLEAVED ? 2 * (n) + 1 : WIDTH + (n))
#pragma unroll 4
  for (int h = 0; h < HEADS; h++) {
    const Pack<X_T, WIDTH> a = read_pack<WIDTH>(x + (size_t)h * X_H + at);
    const Pack<X_T, WIDTH> b = read_pack<WIDTH>(x + (size_t)h * X_H + beyond);
    float v[2 * WIDTH], turned[2 * WIDTH];
#pragma unroll
    for (int n = 0; n < WIDTH; n++) v[n] = to_float(a.at[n]), v[WIDTH + n] = to_float(b.at[n]);
#pragma unroll
    for (int n = 0; n < WIDTH; n++) {
      turned[FIRST(n)] = v[FIRST(n)] * c[n] - v[SECOND(n)] * s[n];
      turned[SECOND(n)] = v[SECOND(n)] * c[n] + v[FIRST(n)] * s[n];
    }
    Pack<Y_T, WIDTH> first, second;
#pragma unroll
    for (int n = 0; n < WIDTH; n++) {
      first.at[n] = from_float<Y_T>(turned[n]);
      second.at[n] = from_float<Y_T>(turned[WIDTH + n]);
    }
    write_pack(y + (size_t)h * Y_H + at, first);
    write_pack(y + (size_t)h * Y_H + beyond, second);
  }
}
