// AdamW with moments of one byte: code of a book times the largest magnitude of its block of 256
// elements (Dettmers et al. 2022). Warps walk over the blocks, eight neighbours a lane: dequantise,
//   m = β1·m + (1 − β1)g;  v = β2·v + (1 − β2)g²;  w −= lr·√c2/c1 · m/(√v + √c2·eps);  w *= 1 − lr·decay
// with the moments in f32, then requantise to the nearest code. g = gradient·scale. A negative m
// never takes the code of 0. Nothing changes when *applied is 0. Products and sums of the moments are written
// uncontracted and their quotients rounded as divisions are: codes are those of the CPU reference, weights differ by
// the error of the hardware's root and inverse (2^-22 of the step). `before` groups of four elements of the whole
// tensor come before these.
//
// The work per element is what binds, logic and shared memory above all: what can be a floating-point product is one.
#include "types.cuh"
#include "pack.cuh"
#include "philox.cuh"

// Quotients of one bucket agree in sign, exponent and seven bits of mantissa; the last bucket of a sign is the
// magnitude 1, the first holds everything below 2^-24. A bucket is narrower than the gaps of the books, so it holds
// at most one border between codes.
#define FIRST_BUCKET 0x3380
#define BUCKETS (0x3f80 - FIRST_BUCKET + 1)
#define LEAST_QUOTIENT 5.9604645e-8f
// A code c is kept as the float 2^23 + c: its low byte.
#define SHIFT 8388608.0f
#define ZERO_OF_SIGNED 127
// Magnitudes below are multiplied by 2^64 before they divide.
#define TINY 1e-30f
#define RAISE 1.8446744e19f

// The quotients from `border` on take the upper code of a bucket, those below the one before it.
struct Bucket { float border, upper; };

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
index_books(const float* __restrict__ map_signed, const float* __restrict__ map_unsigned, Bucket* __restrict__ index) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= 3 * BUCKETS) return;
  const int table = i / BUCKETS, bucket = i % BUCKETS;
  const float* map = table == 2 ? map_unsigned : map_signed;
  const bool negative = table == 0;
  const u32 sign = negative ? 0x80000000u : 0u, top = (u32)(bucket + FIRST_BUCKET) << 16;
  // Codes at a low half of the magnitude's bits; the first bucket reaches down to 0.
  const auto at = [&](u32 low) {
    return code_of(map, __uint_as_float(sign | (bucket == 0 && low == 0 ? 0u : top | low)), negative);
  };
  const int nearer = at(0), farther = at(0xffffu);
  float border = -__int_as_float(0x7f800000);
  if (farther != nearer) {
    u32 below = 0, above = 0xffffu;
    while (above - below > 1) {
      const u32 middle = (below + above) / 2;
      if (at(middle) == nearer) below = middle;
      else above = middle;
    }
    border = __uint_as_float(sign | top | (negative ? below : above));
  }
  index[i] = Bucket{border, SHIFT + max(nearer, farther)};
}
#else

// Of magnitudes: their bits are in their order.
__device__ __forceinline__ float largest_of_warp(float x) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
}

// Divides by one magnitude, correctly rounded: a product with the rounded inverse, then its remainder (Markstein 1990).
// Neither may vanish in f32 but for 0.
struct Divisor {
  float divisor, inverse;
  __device__ __forceinline__ explicit Divisor(float by) : divisor(by), inverse(by > 0.0f ? __frcp_rn(by) : 0.0f) {}
  __device__ __forceinline__ float quotient(float x) const {
    const float first = x * inverse;
    return fmaf(fmaf(-first, divisor, x), inverse, first);
  }
};

// The code of a quotient as the low byte of the result; the tables begin at `tables`, that of its sign at `offset`
// after. 0/0 takes the code of 0.
__device__ __forceinline__ u32 code_in(const unsigned char* tables, u32 offset, float quotient) {
  const u32 bucket = __float_as_uint(fmaxf(fabsf(quotient), LEAST_QUOTIENT)) >> 16;
  const Bucket of = *reinterpret_cast<const Bucket*>(tables + (bucket * 8 + offset) - FIRST_BUCKET * 8);
  return __float_as_uint(of.upper - __saturatef((of.border - quotient) * 1e38f));
}

// A pair of results of stochastic_bf16, for finite numbers alone.
__device__ __forceinline__ u32 raised(float x, float y, u32 dice_x, u32 dice_y) {
  return __byte_perm(__float_as_uint(x) + (dice_x & 0xffffu), __float_as_uint(y) + (dice_y & 0xffffu), 0x7632);
}

// What is read of eight neighbours.
struct Part {
  Pack<float, 8> gradient;
  Pack<WEIGHT_T, 8> weight;
  uint2 codes1, codes2;
  float scale1, scale2;
};

__device__ __forceinline__ u32 byte_of(uint2 codes, int i) { return ((i < 4 ? codes.x : codes.y) >> i % 4 * 8) & 0xffu; }
__device__ __forceinline__ u32 four_bytes(u32 a, u32 b, u32 c, u32 d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
// The first `count` of eight codes, `outside` for the others.
__device__ __forceinline__ uint2 read_codes(const unsigned char* p, int count, u32 outside) {
  if (ALIGNED && count >= 8) return *reinterpret_cast<const uint2*>(p);
  u32 at[8];
#pragma unroll
  for (int i = 0; i < 8; i++) at[i] = i < count ? p[i] : outside;
  return uint2{four_bytes(at[0], at[1], at[2], at[3]), four_bytes(at[4], at[5], at[6], at[7])};
}
__device__ __forceinline__ void write_codes(unsigned char* p, uint2 codes, int count) {
  if (ALIGNED && count >= 8) *reinterpret_cast<uint2*>(p) = codes;
  else {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (i < count) p[i] = (unsigned char)byte_of(codes, i);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
adamw_8bit(const float* __restrict__ gradient, const float* __restrict__ learning_rate,
           const float* __restrict__ correction1, const float* __restrict__ correction2,
           const float* __restrict__ gradient_scale, const float* __restrict__ applied, const int* __restrict__ step,
           const float* __restrict__ map_signed, const float* __restrict__ map_unsigned, WEIGHT_T* weight,
           unsigned char* first, unsigned char* second, float* first_scale, float* second_scale,
           const Bucket* __restrict__ index, const u64 before) {
#ifdef INDEX_IN_MEMORY
  // A block has no shared memory for the tables: they stay in the caches.
  const unsigned char* const tables = reinterpret_cast<const unsigned char*>(index);
#else
  extern __shared__ __align__(16) unsigned char tables[];
#endif
  __shared__ float book1[256], book2[256];
  if (*applied == 0.0f) return;
  for (int i = threadIdx.x; i < 256; i += THREADS) {
    book1[i] = map_signed[i];
    book2[i] = map_unsigned[i];
  }
#ifndef INDEX_IN_MEMORY
  for (int i = threadIdx.x; i < 3 * BUCKETS; i += THREADS) reinterpret_cast<Bucket*>(tables)[i] = index[i];
#endif
  __syncthreads();
  const float scale = *gradient_scale;
  const float rate = __fmul_rn(*learning_rate, RATE), root = sqrtf(*correction2);
  const float size = __fdiv_rn(__fmul_rn(rate, root), *correction1), least = __fmul_rn(root, EPSILON);
  const float kept = __fsub_rn(1.0f, __fmul_rn(rate, WEIGHT_DECAY));
  const u32 moment = (u32)*step;
  const int lane = threadIdx.x & 31;
  const auto count_at = [&](u64 start) { return start >= COUNT ? 0 : COUNT - start < 8 ? (int)(COUNT - start) : 8; };
  const auto read = [&](u64 block) {
    const u64 start = block * 256 + lane * 8;
    const int count = count_at(start);
    return Part{read_part<8, ALIGNED>(gradient + start, count), read_part<8, ALIGNED>(weight + start, count),
                read_codes(first + start, count, ZERO_OF_SIGNED), read_codes(second + start, count, 0),
                first_scale[block], second_scale[block]};
  };
  const u64 stride = (u64)gridDim.x * (THREADS / 32);
  u64 block = (u64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  if (block * 256 >= COUNT) return;
  Part next = read(block);
  for (; block * 256 < COUNT; block += stride) {
    Part now = next;
    if ((block + stride) * 256 < COUNT) next = read(block + stride);
    const u64 start = block * 256 + lane * 8;
    float m[8], v[8], largest1 = 0.0f, largest2 = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float g = __fmul_rn(now.gradient.at[i], scale);
      const float m0 = __fmul_rn(book1[byte_of(now.codes1, i)], now.scale1);
      const float v0 = __fmul_rn(book2[byte_of(now.codes2, i)], now.scale2);
      m[i] = __fadd_rn(__fmul_rn(BETA1, m0), __fmul_rn(REST1, g));
      v[i] = __fadd_rn(__fmul_rn(BETA2, v0), __fmul_rn(REST2, __fmul_rn(g, g)));
      largest1 = fmaxf(largest1, fabsf(m[i]));
      largest2 = fmaxf(largest2, v[i]);
    }
    largest1 = largest_of_warp(largest1);
    largest2 = largest_of_warp(largest2);
    float moved[8], finite = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float moving = __fmul_rn(m[i], rcp_approx(__fadd_rn(sqrt_approx(v[i]), least)));
      moved[i] = __fmul_rn(__fsub_rn(to_float(now.weight.at[i]), __fmul_rn(size, moving)), kept);
      finite = fmaf(moved[i], 0.0f, finite);
    }
#if STOCHASTIC
    u32 pairs[4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const Philox dice = philox_words(SEED, PURPOSE_STOCHASTIC_ROUNDING, STREAM, moment, before + start / 4 + half);
#pragma unroll
      for (int j = 0; j < 4; j += 2)
        pairs[half * 2 + j / 2] = raised(moved[half * 4 + j], moved[half * 4 + j + 1], dice.word[j], dice.word[j + 1]);
    }
    // Sums of bits must not turn what is not a number into one.
    if (finite != 0.0f) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const u32 rounded = (u32)from_float<bf16>(moved[i]).bits << i % 2 * 16, other = 0xffff0000u >> i % 2 * 16;
        if (moved[i] * 0.0f != 0.0f) pairs[i / 2] = (pairs[i / 2] & other) | rounded;
      }
    }
#else
#pragma unroll
    for (int i = 0; i < 8; i++) now.weight.at[i] = from_float<WEIGHT_T>(moved[i]);
#endif
    // Vanishing magnitudes have no inverse; powers of two change no quotient.
    const float raise1 = largest1 < TINY ? RAISE : 1.0f, raise2 = largest2 < TINY ? RAISE : 1.0f;
    if (raise1 * raise2 != 1.0f) {
#pragma unroll
      for (int i = 0; i < 8; i++) m[i] *= raise1, v[i] *= raise2;
    }
    const Divisor of1(largest1 * raise1), of2(largest2 * raise2);
    u32 code1[8], code2[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      // 0 has no sign here.
      const u32 sign = __float_as_uint(__fadd_rn(m[i], 0.0f)) >> 31;
      code1[i] = code_in(tables, (1 - sign) * (BUCKETS * 8), of1.quotient(m[i]));
      code2[i] = code_in(tables, 2 * BUCKETS * 8, of2.quotient(v[i]));
    }
    const int count = count_at(start);
    const auto eight = [](const u32 (&c)[8]) {
      return uint2{four_bytes(c[0], c[1], c[2], c[3]), four_bytes(c[4], c[5], c[6], c[7])};
    };
#if STOCHASTIC
    // The compiler takes a store of a pack apart.
    if (ALIGNED && count >= 8) store_16(weight + start, pairs);
    else {
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (i < count) weight[start + i] = bf16{(u16)(pairs[i / 2] >> i % 2 * 16)};
    }
#else
    write_part<8, ALIGNED>(weight + start, now.weight, count);
#endif
    write_codes(first + start, eight(code1), count);
    write_codes(second + start, eight(code2), count);
    if (lane == 0) {
      first_scale[block] = largest1;
      second_scale[block] = largest2;
    }
  }
}
#endif
