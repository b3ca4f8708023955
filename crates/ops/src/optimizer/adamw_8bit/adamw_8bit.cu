// AdamW with moments of one byte: code of a book times the largest magnitude of its block of 256
// elements (Dettmers et al. 2022). Warps walk over the blocks, eight neighbours a lane: dequantise,
//   m = β1·m + (1 − β1)g;  v = β2·v + (1 − β2)g²;  w −= lr·√c2/c1 · m/(√v + √c2·eps);  w *= 1 − lr·decay
// with the moments in f32, then requantise to the nearest code. g = gradient·scale. A negative m
// never takes the code of 0. Nothing changes when *applied is 0. Products and sums are written
// uncontracted: codes and weights are those of the CPU reference. `before` groups of four elements of the whole
// tensor come before these.
#include "types.cuh"
#include "pack.cuh"
#include "philox.cuh"
#include "reduce.cuh"

// Values that fall into one bucket agree in sign, exponent and seven bits of mantissa; the last bucket of a
// sign is the magnitude 1, the first holds everything below 2^-24. A bucket is narrower than the gaps of
// the books, so it holds at most one border between codes (else its entry is MANY): an entry is
// code << 24 | border, the code of the bucket's nearer end and the least low half of a magnitude's bits
// that belongs to the next code away from 0.
#define FIRST_BUCKET 0x3380
#define BUCKETS (0x3f80 - FIRST_BUCKET + 1)
#define NO_BORDER 0x10000u
#define MANY 0x20000u

// The code whose value is nearest; the lower one of two that are equally near.
__device__ __forceinline__ int nearest(const float* map, float x) {
  int low = 0;
#pragma unroll
  for (int half = 128; half; half >>= 1)
    if (map[low + half] <= x) low += half;
  return low < 255 && __fsub_rn(map[low + 1], x) < __fsub_rn(x, map[low]) ? low + 1 : low;
}

// A negative value never takes the code of 0.
__device__ __forceinline__ int code_of(const float* map, float x, bool negative) {
  const int c = nearest(map, x);
  return negative && map[c] >= 0.0f ? c - 1 : c;
}

#if defined(INDEX)
// Three tables: the signed book below and above 0, the unsigned one.
extern "C" __global__ void __launch_bounds__(THREADS)
index_books(const float* __restrict__ map_signed, const float* __restrict__ map_unsigned, u32* __restrict__ index) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= 3 * BUCKETS) return;
  const int table = i / BUCKETS, bucket = i % BUCKETS;
  const float* map = table == 2 ? map_unsigned : map_signed;
  const bool negative = table == 0;
  const u32 sign = negative ? 0x80000000u : 0u, top = (u32)(bucket + FIRST_BUCKET) << 16;
  const int step = negative ? -1 : 1;
  // Codes at a low half of the magnitude's bits; the first bucket reaches down to 0.
  const auto at = [&](u32 low) {
    return code_of(map, __uint_as_float(sign | (bucket == 0 && low == 0 ? 0u : top | low)), negative);
  };
  const int nearer = at(0), farther = at(0xffffu);
  u32 border = NO_BORDER;
  if (farther != nearer) {
    u32 below = 0, above = 0xffffu;
    while (above - below > 1) {
      const u32 middle = (below + above) / 2;
      if (at(middle) == nearer) below = middle;
      else above = middle;
    }
    border = farther == nearer + step && bucket ? above : MANY;
  }
  index[i] = (u32)nearer << 24 | border;
}
#else

// Out of line: the common way must fit into the instruction cache.
__device__ __noinline__ int code_of_quotient(const float* map, float x, float largest) {
  return code_of(map, largest > 0.0f ? __fdiv_rn(x, largest) : 0.0f, x < 0.0f);
}

// The code of x/largest. The quotient is taken as a product first; where that might fall on the other side
// of a border than the rounded quotient, that is divided out.
__device__ __forceinline__ int code_in(const u32* table, const float* map, float x, float largest, float inverse) {
  const bool negative = x < 0.0f;
  const bool top = fabsf(x) == largest;
  const u32 bits = top ? 0x3f800000u : __float_as_uint(fabsf(x) * inverse);
  const int bucket = min(max((int)(bits >> 16) - FIRST_BUCKET, 0), BUCKETS - 1);
  const u32 entry = table[bucket], border = entry & 0xffffffu, low = bits & 0xffffu;
  const bool clear = low - 3u < 0xfffau && (low > border ? low - border : border - low) > 2u && border != MANY;
  if (x != 0.0f && !top && !(clear && inverse > 0.0f)) return code_of_quotient(map, x, largest);
  const int moved = low >= border;
  return (int)(entry >> 24) + (negative ? -moved : moved);
}

// Tiny and vanishing magnitudes have no usable inverse.
__device__ __forceinline__ float inverse_of(float largest) { return largest > 1e-30f ? 1.0f / largest : 0.0f; }

extern "C" __global__ void __launch_bounds__(THREADS, 3)
adamw_8bit(const float* __restrict__ gradient, const float* __restrict__ learning_rate,
           const float* __restrict__ correction1, const float* __restrict__ correction2,
           const float* __restrict__ gradient_scale, const float* __restrict__ applied, const int* __restrict__ step,
           const float* __restrict__ map_signed, const float* __restrict__ map_unsigned, WEIGHT_T* __restrict__ weight,
           unsigned char* __restrict__ first, unsigned char* __restrict__ second, float* __restrict__ first_scale,
           float* __restrict__ second_scale, const u32* __restrict__ index, const u64 before) {
  __shared__ float book1[256], book2[256];
  __shared__ u32 tables[3 * BUCKETS];
  if (*applied == 0.0f) return;
  for (int i = threadIdx.x; i < 256; i += THREADS) {
    book1[i] = map_signed[i];
    book2[i] = map_unsigned[i];
  }
  for (int i = threadIdx.x; i < 3 * BUCKETS; i += THREADS) tables[i] = index[i];
  __syncthreads();
  const float scale = *gradient_scale;
  const float rate = *learning_rate, root = sqrtf(*correction2);
  const float size = __fdiv_rn(__fmul_rn(rate, root), *correction1), least = __fmul_rn(root, EPSILON);
  const float kept = __fsub_rn(1.0f, __fmul_rn(rate, WEIGHT_DECAY));
  for (u64 block = (u64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; block * 256 < COUNT;
       block += (u64)gridDim.x * (THREADS / 32)) {
    const u64 start = block * 256 + (threadIdx.x & 31) * 8;
    const int count = start >= COUNT ? 0 : COUNT - start < 8 ? (int)(COUNT - start) : 8;
    const auto g = read_part<8, ALIGNED>(gradient + start, count);
    auto w = read_part<8, ALIGNED>(weight + start, count);
    auto code1 = read_part<8, ALIGNED>(first + start, count);
    auto code2 = read_part<8, ALIGNED>(second + start, count);
    const float old1 = first_scale[block], old2 = second_scale[block];
    float m[8], v[8], largest1 = 0.0f, largest2 = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const bool inside = i < count;
      const float gi = __fmul_rn(g.at[i], scale);
      const float m0 = __fmul_rn(book1[code1.at[i]], old1), v0 = __fmul_rn(book2[code2.at[i]], old2);
      m[i] = inside ? __fadd_rn(__fmul_rn(BETA1, m0), __fmul_rn(REST1, gi)) : 0.0f;
      v[i] = inside ? __fadd_rn(__fmul_rn(BETA2, v0), __fmul_rn(REST2, __fmul_rn(gi, gi))) : 0.0f;
      largest1 = fmaxf(largest1, fabsf(m[i]));
      largest2 = fmaxf(largest2, v[i]);
    }
    largest1 = warp_max(largest1);
    largest2 = warp_max(largest2);
    const float inverse1 = inverse_of(largest1), inverse2 = inverse_of(largest2);
#pragma unroll
    for (int half = 0; half < 2; half++) {
#if STOCHASTIC
      const Philox dice = philox_words(SEED, PURPOSE_STOCHASTIC_ROUNDING, STREAM, (u32)*step, before + start / 4 + half);
#endif
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int i = half * 4 + j;
        const float below = __fadd_rn(sqrtf(v[i]), least);
        const float moved = __fsub_rn(to_float(w.at[i]), __fmul_rn(size, __fdiv_rn(m[i], below)));
        const float next = __fmul_rn(moved, kept);
#if STOCHASTIC
        w.at[i] = stochastic_bf16(next, dice.word[j]);
#else
        w.at[i] = from_float<WEIGHT_T>(next);
#endif
        code1.at[i] = (unsigned char)code_in(tables + (m[i] < 0.0f ? 0 : BUCKETS), book1, m[i], largest1, inverse1);
        code2.at[i] = (unsigned char)code_in(tables + 2 * BUCKETS, book2, v[i], largest2, inverse2);
      }
    }
    write_part<8, ALIGNED>(weight + start, w, count);
    write_part<8, ALIGNED>(first + start, code1, count);
    write_part<8, ALIGNED>(second + start, code2, count);
    if ((threadIdx.x & 31) == 0) {
      first_scale[block] = largest1;
      second_scale[block] = largest2;
    }
  }
}
#endif
