// AdamW with moments of one byte: code of a book times the largest magnitude of its block of 256
// elements (Dettmers et al. 2022). Warps walk over the blocks, eight neighbours a lane: dequantise,
//   m = β1·m + (1 − β1)g;  v = β2·v + (1 − β2)g²;  w −= lr·√c2/c1 · m/(√v + √c2·eps);  w *= 1 − lr·decay
// with the moments in f32, then requantise to the nearest code. g = gradient·scale. A negative m
// never takes the code of 0. Nothing changes when *applied is 0. Products and sums are written
// uncontracted: codes and weights are those of the CPU reference.
#include "types.cuh"
#include "pack.cuh"
#include "philox.cuh"
#include "reduce.cuh"

// Values that fall into one bucket agree in sign, exponent and seven bits of mantissa; the last bucket of
// a sign is the magnitude 1, the first holds everything below 2^-24. A bucket is narrower than the gaps
// of the books, so few of them hold a border between two codes.
#define FIRST_BUCKET 0x3380
#define BUCKETS (0x3f80 - FIRST_BUCKET + 1)

// The code whose value is nearest; the lower one of two that are equally near. `low` is not above it.
__device__ __forceinline__ int nearest_from(const float* map, float x, int low) {
  while (low < 255 && __fsub_rn(map[low + 1], x) < __fsub_rn(x, map[low])) low++;
  return low;
}

__device__ __forceinline__ int bucket(float x) {
  const int top = (int)((__float_as_uint(x) & 0x7fffffffu) >> 16) - FIRST_BUCKET;
  return min(max(top, 0), BUCKETS - 1);
}

// For each bucket the code of its least value: the walk to the nearest code starts there.
__device__ __forceinline__ void index_book(const float* map, unsigned char* starts, bool negative) {
  for (int i = threadIdx.x; i < BUCKETS; i += THREADS) {
    const u32 edge = negative ? i + FIRST_BUCKET + 1 : i == 0 ? 0 : i + FIRST_BUCKET;
    const float least = __uint_as_float(edge << 16 | (negative ? 0x80000000u : 0u));
    int low = 0;
    for (int half = 128; half; half >>= 1)
      if (map[low + half] <= least) low += half;
    starts[i] = (unsigned char)nearest_from(map, least, low);
  }
}

__device__ __forceinline__ float relative(float x, float largest) { return largest > 0.0f ? __fdiv_rn(x, largest) : 0.0f; }

extern "C" __global__ void __launch_bounds__(THREADS)
adamw_8bit(const float* __restrict__ gradient, const float* __restrict__ learning_rate,
           const float* __restrict__ correction1, const float* __restrict__ correction2,
           const float* __restrict__ gradient_scale, const float* __restrict__ applied, const int* __restrict__ step,
           const float* __restrict__ map_signed, const float* __restrict__ map_unsigned, WEIGHT_T* __restrict__ weight,
           unsigned char* __restrict__ first, unsigned char* __restrict__ second, float* __restrict__ first_scale,
           float* __restrict__ second_scale) {
  __shared__ float book1[256], book2[256];
  __shared__ unsigned char below0[BUCKETS], above0[BUCKETS], starts2[BUCKETS];
  if (*applied == 0.0f) return;
  for (int i = threadIdx.x; i < 256; i += THREADS) {
    book1[i] = map_signed[i];
    book2[i] = map_unsigned[i];
  }
  __syncthreads();
  index_book(book1, below0, true);
  index_book(book1, above0, false);
  index_book(book2, starts2, false);
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
#pragma unroll
    for (int half = 0; half < 2; half++) {
#if STOCHASTIC
      const Philox dice = philox_words(SEED, PURPOSE_STOCHASTIC_ROUNDING, STREAM, (u32)*step, start / 4 + half);
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
        const float x1 = relative(m[i], largest1), x2 = relative(v[i], largest2);
        int c = nearest_from(book1, x1, x1 < 0.0f ? below0[bucket(x1)] : above0[bucket(x1)]);
        if (m[i] < 0.0f && book1[c] >= 0.0f) c -= 1;
        code1.at[i] = (unsigned char)c;
        code2.at[i] = (unsigned char)nearest_from(book2, x2, starts2[bucket(x2)]);
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
