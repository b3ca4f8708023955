// RMS normalisation of the heads and their rotation in one pass over memory, and the way back:
//   rmsnorm_rope: y = rotation(x·r·w), r = 1/sqrt(mean(x²) + EPS);
//   rope_rmsnorm_backward: d = rotation(dy), dx = r·(d·w − x·r²·mean(d·w·x)); with PARTIAL also Σ d·x·r.
// x, y, dx, dy [BATCH, TOKENS, HEADS_1, 2 PAIRS], strided in the first three axes; w [2 PAIRS]; r f32
// [BATCH·TOKENS·HEADS_1]; positions i32 [BATCH·TOKENS]; inv_freq f32 [PAIRS]; scaling f32 [1]; partial f32
// [gridDim.x, 2 PAIRS]. With HEADS_2 the same for a second tensor of heads of the same tokens: queries and keys.
// A block takes TOGETHER tokens with all their heads: it reads, then makes sines and cosines once for all heads,
// then works. LANES = PAIRS / 8 lanes hold a head, each 8 columns of the first half and the 8 of the second half
// that turn with them. The value between the two operations is rounded as if stored, and sums run as in rmsnorm.cu:
// the bits are those of the pair. On an H200, 16 and 8 heads of 128: 4096 tokens 3.1 TB/s forward, 3.7 backward, 2.3
// with PARTIAL and its sums; 16,384 tokens 3.8, 4.2 and 3.2.
#include "types.cuh"
#include "pack.cuh"
// Nothing that grid_dependency_synchronize() waits for may be read ahead of it.
#if FOLLOWS
#include "dependent_launch.cuh"
#define CONSTANT
#else
#define CONSTANT __restrict__
#endif

#if OFFSET
#define WEIGHT(w) (1.0f + to_float(w))
#else
#define WEIGHT(w) to_float(w)
#endif

#define COLUMNS (2 * PAIRS)
#define LANES (PAIRS / 8)
#define HEADS (HEADS_1 + HEADS_2)
#define ALL (BATCH * TOKENS)
// Heads that a group of lanes takes of a block's tokens.
#define EACH (TOGETHER * HEADS * LANES / THREADS)

__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int offset = LANES / 2; offset; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

struct Turns { float c[TOGETHER][PAIRS], s[TOGETHER][PAIRS]; };

// Sines and cosines of the tokens from `first` on.
__device__ __forceinline__ void make_turns(Turns& turns, int first, const int* positions, const float* inv_freq,
                                           float factor) {
  for (int i = threadIdx.x; i < TOGETHER * PAIRS; i += THREADS) {
    float s, c;
    const int token = min(first + i / PAIRS, ALL - 1);
#ifdef AXES
    float angle = 0.0f;
#pragma unroll
    for (int a = 0; a < AXES; a++) angle += (float)positions[token * AXES + a] * inv_freq[a * PAIRS + i % PAIRS];
#else
    const float angle = (float)positions[token] * inv_freq[i % PAIRS];
#endif
    sincosf(angle, &s, &c);
    turns.s[i / PAIRS][i % PAIRS] = s * (INVERSE ? -factor : factor);
    turns.c[i / PAIRS][i % PAIRS] = c * factor;
  }
}

// One head of a token: where a group of lanes works.
struct Place {
  int local, head, column;
  size_t token, b, t;
  bool inside, second;
  __device__ __forceinline__ Place(int first, int e) {
    const int group = threadIdx.x / LANES + e * (THREADS / LANES);
    local = group / HEADS;
    head = group % HEADS;
    second = head >= HEADS_1;
    if (second) head -= HEADS_1;
    inside = first + local < ALL;
    token = min(first + local, ALL - 1);
    b = token / TOKENS;
    t = token % TOKENS;
    column = threadIdx.x % LANES * 8;
  }
  // Of one value for each head.
  __device__ __forceinline__ size_t statistic() const { return token * (second ? HEADS_2 : HEADS_1) + head; }
};

// The place's first element in a strided tensor.
#if HEADS_2
#define AT(N, at) \
  ((at).column + ((at).second ? (at).b * N##_B2 + (at).t * N##_S2 + (size_t)(at).head * N##_H2 \
                              : (at).b * N##_B1 + (at).t * N##_S1 + (size_t)(at).head * N##_H1))
#define OF(at, one, two) ((at).second ? two : one)
#else
#define AT(N, at) ((at).column + (at).b * N##_B1 + (at).t * N##_S1 + (size_t)(at).head * N##_H1)
#define OF(at, one, two) (one)
#endif

#if defined(Y_T)
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
rmsnorm_rope(const X_T* CONSTANT x1, const W_T* CONSTANT w1,
#if HEADS_2
             const X_T* CONSTANT x2, const W_T* CONSTANT w2,
#endif
             const int* CONSTANT positions, const float* CONSTANT inv_freq, const float* CONSTANT scaling,
             float* __restrict__ r1, Y_T* __restrict__ y1
#if HEADS_2
             , float* __restrict__ r2, Y_T* __restrict__ y2
#endif
) {
#if FOLLOWS
  grid_dependency_synchronize();
#endif
  __shared__ __align__(16) Turns turns;
  const int first = blockIdx.x * TOGETHER;
  Pack<X_T, 8> as[EACH], bs[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const Place at(first, e);
    const X_T* from = OF(at, x1, x2) + AT(X, at);
    as[e] = read_pack<8>(from);
    bs[e] = read_pack<8>(from + PAIRS);
  }
  make_turns(turns, first, positions, inv_freq, scaling[0]);
  __syncthreads();
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const Place at(first, e);
    const W_T* w = OF(at, w1, w2) + at.column;
    const Pack<W_T, 8> wa = read_pack<8>(w), wb = read_pack<8>(w + PAIRS);
    const Pack<X_T, 8>&a = as[e], &b = bs[e];
    float squares_a = 0.0f, squares_b = 0.0f;
#pragma unroll
    for (int n = 0; n < 8; n++) {
      squares_a = fmaf(to_float(a.at[n]), to_float(a.at[n]), squares_a);
      squares_b = fmaf(to_float(b.at[n]), to_float(b.at[n]), squares_b);
    }
    const float scale = rsqrtf(group_sum(squares_a + squares_b) * (1.0f / COLUMNS) + EPS);
    const float *c = turns.c[at.local] + at.column, *s = turns.s[at.local] + at.column;
    Pack<Y_T, 8> ya, yb;
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float normed_a = to_float(from_float<X_T>(to_float(a.at[n]) * scale * WEIGHT(wa.at[n])));
      const float normed_b = to_float(from_float<X_T>(to_float(b.at[n]) * scale * WEIGHT(wb.at[n])));
      ya.at[n] = from_float<Y_T>(normed_a * c[n] - normed_b * s[n]);
      yb.at[n] = from_float<Y_T>(normed_b * c[n] + normed_a * s[n]);
    }
    if (at.inside) {
      Y_T* to = OF(at, y1, y2) + AT(Y, at);
      write_pack(to, ya);
      write_pack(to + PAIRS, yb);
      if (at.column == 0) OF(at, r1, r2)[at.statistic()] = scale;
    }
  }
}
#endif

#if defined(DX_T)
// What a lane reads of a head before it works on it.
struct Read {
  Pack<DY_T, 8> dya, dyb;
  Pack<X_T, 8> xa, xb;
  float scale;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
rope_rmsnorm_backward(const DY_T* __restrict__ dy1, const X_T* __restrict__ x1, const W_T* __restrict__ w1,
                      const float* __restrict__ r1,
#if HEADS_2
                      const DY_T* __restrict__ dy2, const X_T* __restrict__ x2, const W_T* __restrict__ w2,
                      const float* __restrict__ r2,
#endif
                      const int* __restrict__ positions, const float* __restrict__ inv_freq,
                      const float* __restrict__ scaling, DX_T* __restrict__ dx1
#if HEADS_2
                      , DX_T* __restrict__ dx2
#endif
#if PARTIAL
                      , float* __restrict__ partial
#endif
) {
  // Two of them, so that one barrier a step is enough.
  __shared__ __align__(16) Turns turns[1 + PARTIAL];
#if PARTIAL
  float sums_a[8] = {}, sums_b[8] = {};
#endif
#if PARTIAL
  for (int step = 0, first = blockIdx.x * TOGETHER; first < ALL; step ^= 1, first += gridDim.x * TOGETHER)
#else
  const int step = 0, first = blockIdx.x * TOGETHER;
#endif
  {
    Read reads[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const Place at(first, e);
      const DY_T* dy = OF(at, dy1, dy2) + AT(DY, at);
      const X_T* x = OF(at, x1, x2) + AT(X, at);
      reads[e] = {read_pack<8>(dy), read_pack<8>(dy + PAIRS), read_pack<8>(x), read_pack<8>(x + PAIRS),
                  OF(at, r1, r2)[at.statistic()]};
    }
    make_turns(turns[step], first, positions, inv_freq, scaling[0]);
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const Place at(first, e);
      const Read& read = reads[e];
      const W_T* w = OF(at, w1, w2) + at.column;
      const Pack<W_T, 8> wa = read_pack<8>(w), wb = read_pack<8>(w + PAIRS);
      const float *c = turns[step].c[at.local] + at.column, *s = turns[step].s[at.local] + at.column;
      float da[8], db[8], sum_a = 0.0f, sum_b = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const float a = to_float(read.dya.at[n]), b = to_float(read.dyb.at[n]);
        da[n] = to_float(from_float<DY_T>(a * c[n] - b * s[n]));
        db[n] = to_float(from_float<DY_T>(b * c[n] + a * s[n]));
        sum_a = fmaf(da[n] * WEIGHT(wa.at[n]), to_float(read.xa.at[n]), sum_a);
        sum_b = fmaf(db[n] * WEIGHT(wb.at[n]), to_float(read.xb.at[n]), sum_b);
      }
      const float mean = group_sum(sum_a + sum_b) * (1.0f / COLUMNS) * read.scale * read.scale;
      Pack<DX_T, 8> dxa, dxb;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        dxa.at[n] = from_float<DX_T>(read.scale * (da[n] * WEIGHT(wa.at[n]) - to_float(read.xa.at[n]) * mean));
        dxb.at[n] = from_float<DX_T>(read.scale * (db[n] * WEIGHT(wb.at[n]) - to_float(read.xb.at[n]) * mean));
      }
      if (at.inside) {
        DX_T* to = OF(at, dx1, dx2) + AT(DX, at);
        write_pack(to, dxa);
        write_pack(to + PAIRS, dxb);
#if PARTIAL
#pragma unroll
        for (int n = 0; n < 8; n++) {
          sums_a[n] = fmaf(da[n] * to_float(read.xa.at[n]), read.scale, sums_a[n]);
          sums_b[n] = fmaf(db[n] * to_float(read.xb.at[n]), read.scale, sums_b[n]);
        }
#endif
      }
    }
  }
#if PARTIAL
  // A group has the same head throughout. The groups of a warp one after the other, then the warps.
  __shared__ float total[2][COLUMNS];
  for (int i = threadIdx.x; i < 2 * COLUMNS; i += THREADS) total[i / COLUMNS][i % COLUMNS] = 0.0f;
  const Place at(0, 0);
  for (int warp = 0; warp < THREADS / 32; warp++) {
    __syncthreads();
    for (int group = 0; group < 32 / LANES && threadIdx.x / 32 == warp; group++, __syncwarp())
      if (threadIdx.x % 32 / LANES == group)
#pragma unroll
        for (int n = 0; n < 8; n++) {
          total[at.second][at.column + n] += sums_a[n];
          total[at.second][PAIRS + at.column + n] += sums_b[n];
        }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < (HEADS_2 ? 2 : 1) * COLUMNS; i += THREADS)
    partial[((size_t)(i / COLUMNS) * gridDim.x + blockIdx.x) * COLUMNS + i % COLUMNS] = total[i / COLUMNS][i % COLUMNS];
#endif
}
#endif
