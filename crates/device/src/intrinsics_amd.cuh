// `intrinsics.cuh` of AMD GPUs: the functions of the one of NVIDIA's GPUs, with the same arguments and results. Compiled and
// run in an emulator of instructions; never run on a GPU. Fragments of products are distributed as m16n8k16 of NVIDIA's
// tensor cores has them, which is right everywhere and fast nowhere.
#pragma once
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u32 u32x4 __attribute__((ext_vector_type(4)));

// Matrix units of MI300 multiply codes of eight bits without negative zero, whose code is their NaN.
#ifdef __gfx942__
#define HAS_FNUZ_CODES
#endif

// Conversions. 16-bit numbers as their bits; rounded to nearest even, NaN stays NaN.
__device__ __forceinline__ float f16_to_f32(u16 x) { return (float)__builtin_bit_cast(_Float16, x); }
__device__ __forceinline__ u16 f32_to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
__device__ __forceinline__ u16 f32_to_f16(float x) { return __builtin_bit_cast(u16, (_Float16)x); }
__device__ __forceinline__ u32 bf16_pair(float low, float high) { return f32_to_bf16(low) | (u32)f32_to_bf16(high) << 16; }
__device__ __forceinline__ u32 f16_pair(float low, float high) { return f32_to_f16(low) | (u32)f32_to_f16(high) << 16; }

// Approximate functions, within a few units of the last place.
__device__ __forceinline__ float exp2_approx(float x) { return __builtin_amdgcn_exp2f(x); }
__device__ __forceinline__ float rcp_approx(float x) { return __builtin_amdgcn_rcpf(x); }
__device__ __forceinline__ float sqrt_approx(float x) { return __builtin_amdgcn_sqrtf(x); }

// NaN if either argument is.
__device__ __forceinline__ float min_nan(float a, float b) { return a != a ? a : b != b ? b : fminf(a, b); }
__device__ __forceinline__ float max_nan(float a, float b) { return a != a ? a : b != b ? b : fmaxf(a, b); }

__device__ __forceinline__ u64 multiply_wide(u32 a, u32 b) { return (u64)a * b; }

// Global memory. `load_acquire` and `store_release` order the accesses of other blocks; relaxed accesses order nothing.
__device__ __forceinline__ void prefetch_l2(const void* p) { __builtin_prefetch(p); }
__device__ __forceinline__ int load_acquire(const int* p) {
  return __hip_atomic_load(p, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ __forceinline__ void store_release(int* p, int x) {
  __hip_atomic_store(p, x, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ __forceinline__ int load_relaxed(const int* p) {
  return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ __forceinline__ void add_relaxed(float* p, float x) {
  __hip_atomic_fetch_add(p, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
// 16 bytes in one access; `load_16_once` leaves the caches to others.
__device__ __forceinline__ void store_16(void* p, const u32 (&x)[4]) { *(u32x4*)p = u32x4{x[0], x[1], x[2], x[3]}; }
__device__ __forceinline__ void load_16_once(u32 (&x)[4], const void* p) {
  const u32x4 y = __builtin_nontemporal_load((const u32x4*)p);
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = y[i];
}

// Shared memory, by addresses of 32 bits: those of its address space.
template <typename T_> __device__ __forceinline__ __attribute__((address_space(3))) T_* in_shared(u32 at) {
  return (__attribute__((address_space(3))) T_*)at;
}
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)(__attribute__((address_space(3))) const void*)p; }
__device__ __forceinline__ uint4 load_shared_16(u32 at) {
  const u32x4 x = *in_shared<u32x4>(at);
  return make_uint4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void store_shared_16(u32 at, const u32 (&x)[4]) {
  *in_shared<u32x4>(at) = u32x4{x[0], x[1], x[2], x[3]};
}

// Copies from global to shared memory: done in place, by loads and stores, so that none is ever in flight.
template <int BYTES_> __device__ __forceinline__ void copy_few_async(u32 to, const void* from, bool inside) {
  typedef u32 Words __attribute__((ext_vector_type(BYTES_ / 4)));
  Words x = 0;
  if (inside) x = *(const Words*)from;
  *in_shared<Words>(to) = x;
}
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool inside) { copy_few_async<16>(to, from, inside); }
__device__ __forceinline__ void commit_copies() {}
template <int LEFT_> __device__ __forceinline__ void wait_copies() {}

// A barrier of THREADS_ threads, neighbouring warps of the block; ids are 1 to 15. All threads of the block have called
// `init_partial_barriers` and met before. The threads are one wave, which meets by itself, or several: these count in shared
// memory how often a wave has come, and wait for the last of them.
__device__ __forceinline__ u32* partial_barrier_counts() {
  __shared__ u32 counts[16];
  return counts;
}
__device__ __forceinline__ void init_partial_barriers() {
  if (threadIdx.x < 16) partial_barrier_counts()[threadIdx.x] = 0;
}
template <int THREADS_> __device__ __forceinline__ void partial_barrier(int id) {
  constexpr int WAVES = THREADS_ / WAVE_LANES;
  static_assert(WAVES <= 1 || THREADS_ % WAVE_LANES == 0, "a wave is at one barrier");
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_wave_barrier();
  if constexpr (WAVES > 1) {
    if (__lane_id() == 0) {
      u32* count = partial_barrier_counts() + id;
      const u32 come = __hip_atomic_fetch_add(count, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
      const u32 last = (come / WAVES + 1) * WAVES;
      while ((int)(__hip_atomic_load(count, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP) - last) < 0)
        __builtin_amdgcn_s_sleep(1);
    }
    __builtin_amdgcn_wave_barrier();
  }
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// The numbers of a pair as f32.
template <bool F16_> __device__ __forceinline__ float low_of(u32 pair) {
  if constexpr (F16_) return f16_to_f32((u16)pair);
  else return __uint_as_float(pair << 16);
}
template <bool F16_> __device__ __forceinline__ float high_of(u32 pair) { return low_of<F16_>(pair >> 16); }

// The product of a tile of 16×16 numbers by rows and one of 16×8 by columns, added to one of 16×8: lane l holds rows l/4 and
// l/4 + 8 of columns 2(l%4) and 2(l%4) + 1. By whole warps. A call, not inlined: kernels have hundreds of them.
typedef float f32x4 __attribute__((ext_vector_type(4)));
#if defined(__GFX11__)
typedef float f32x8 __attribute__((ext_vector_type(8)));
typedef short s16x16 __attribute__((ext_vector_type(16)));
typedef _Float16 f16x16 __attribute__((ext_vector_type(16)));
// By one instruction for 16 columns, the latter eight of them again the first: lane l has row l%16 of a and column l%16 of b
// in pairs along the sum; register v of the result is row 2v + l/16 of column l%16.
template <bool F16_> __device__ __attribute__((noinline)) f32x4 product_of_pairs(f32x4 d, u32x4 a, u32 b0, u32 b1) {
  const u32 l = warp_lane(), row = l % 16;
  u32 left[8], right[8];
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const int from = row % 8 * 4 + k % 4;
    const u32 upper = __shfl(a[k / 4 * 2], from, 32), lower = __shfl(a[k / 4 * 2 + 1], from, 32);
    left[k] = row < 8 ? upper : lower;
    right[k] = __shfl(k < 4 ? b0 : b1, from, 32);
  }
  f32x8 y = 0.0f;
  if constexpr (F16_)
    y = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(__builtin_bit_cast(f16x16, left), __builtin_bit_cast(f16x16, right), y);
  else
    y = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(__builtin_bit_cast(s16x16, left), __builtin_bit_cast(s16x16, right), y);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 of = l / 4 + i / 2 * 8, from = of % 2 * 16 + l % 4 * 2 + i % 2;
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < 8; v++) {
      const float x = __shfl(y[v], from, 32);
      sum = v == of / 2 ? x : sum;
    }
    d[i] += sum;
  }
  return d;
}
#else
// By products of pairs of the lanes that hold them.
template <bool F16_> __device__ __attribute__((noinline)) f32x4 product_of_pairs(f32x4 d, u32x4 a, u32 b0, u32 b1) {
  const u32 l = warp_lane();
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const int from = l / 4 * 4 + k % 4;
    const u32 upper = __shfl(a[k / 4 * 2], from, 32), lower = __shfl(a[k / 4 * 2 + 1], from, 32);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 b = __shfl(k < 4 ? b0 : b1, (l % 4 * 2 + j) * 4 + k % 4, 32);
      d[j] = fmaf(high_of<F16_>(upper), high_of<F16_>(b), fmaf(low_of<F16_>(upper), low_of<F16_>(b), d[j]));
      d[2 + j] = fmaf(high_of<F16_>(lower), high_of<F16_>(b), fmaf(low_of<F16_>(lower), low_of<F16_>(b), d[2 + j]));
    }
  }
  return d;
}
#endif
template <bool F16_> __device__ __forceinline__ void mma_of_pairs(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const f32x4 y = product_of_pairs<F16_>(f32x4{d[0], d[1], d[2], d[3]}, u32x4{a[0], a[1], a[2], a[3]}, b0, b1);
#pragma unroll
  for (int i = 0; i < 4; i++) d[i] = y[i];
}
// d += a·b, of numbers of a type.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_of_pairs<false>(d, a, b0, b1); }
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_of_pairs<true>(d, a, b0, b1); }
#define mma_bf16_ordered mma_bf16
#define mma_f16_ordered mma_f16

// 8×8 matrices of 16-bit numbers, each lane giving the address of a row of 16 bytes: lanes 8i … 8i + 7 of matrix i. Lane l gets
// numbers 2(l%4) and 2(l%4) + 1 of row l/4. By whole warps.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 at) {
#pragma unroll
  for (int i = 0; i < 4; i++) r[i] = *in_shared<u32>(__shfl(at, 8 * i + warp_lane() / 4, 32) + warp_lane() % 4 * 4);
}
// The same, each matrix transposed: four, and two.
__device__ __forceinline__ u32 transposed_pair(u32 at, int matrix) {
  const u32 from = 8 * matrix + warp_lane() % 4 * 2, column = warp_lane() / 4 * 2;
  const u16 low = *in_shared<u16>(__shfl(at, from, 32) + column), high = *in_shared<u16>(__shfl(at, from + 1, 32) + column);
  return low | (u32)high << 16;
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 at) {
#pragma unroll
  for (int i = 0; i < 4; i++) r[i] = transposed_pair(at, i);
}
__device__ __forceinline__ void load_transposed(u32& r0, u32& r1, u32 at) {
  r0 = transposed_pair(at, 0), r1 = transposed_pair(at, 1);
}
