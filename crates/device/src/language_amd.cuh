// The functions of CUDA C++ that kernels use and HIP lacks or has otherwise, for AMD GPUs. Compiled before every text, after
// the header that hiprtc puts first. A warp is 32 lanes: on GPUs with waves of 64 it is one half of a wave, and shuffles and
// votes stay inside of it. All lanes of a warp take part in them, so that masks are not read.
#pragma once

#if defined(__GFX9__)
#define WAVE_LANES 64
#else
#define WAVE_LANES 32
#endif

// The thread's place in its warp.
__device__ __forceinline__ unsigned warp_lane() { return __lane_id() % 32; }

#define __shfl_sync(mask, x, lane) __shfl((x), (lane), 32)
#define __shfl_xor_sync(mask, x, by) __shfl_xor((x), (by), 32)
#define __shfl_up_sync(mask, x, by) __shfl_up((x), (by), 32)
#define __ballot_sync(mask, holds) warp_ballot(holds)
#define __any_sync(mask, holds) (warp_ballot(holds) != 0)
#define __all_sync(mask, holds) (warp_ballot(!(holds)) == 0)
#define __reduce_max_sync(mask, x) warp_reduce_max(x)
#define __reduce_add_sync(mask, x) warp_reduce_add(x)
#define __syncwarp(...) warp_fence()

__device__ __forceinline__ unsigned warp_ballot(bool holds) {
  const unsigned long long wave = __ballot(holds);
  return WAVE_LANES == 64 && __lane_id() >= 32 ? (unsigned)(wave >> 32) : (unsigned)wave;
}
__device__ __forceinline__ unsigned warp_reduce_max(unsigned x) {
#pragma unroll
  for (int by = 16; by; by >>= 1) {
    const unsigned other = __shfl_xor(x, by, 32);
    x = other > x ? other : x;
  }
  return x;
}
__device__ __forceinline__ unsigned warp_reduce_add(unsigned x) {
#pragma unroll
  for (int by = 16; by; by >>= 1) x += __shfl_xor(x, by, 32);
  return x;
}
// Lanes of a wave run together: the compiler has to keep accesses on their side, and nothing else.
__device__ __forceinline__ void warp_fence() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// HIP has these as plain operations, which the compiler contracts with their neighbours, and an approximate root.
__device__ __forceinline__ float rounded_product(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}
__device__ __forceinline__ float rounded_sum(float a, float b) {
#pragma clang fp contract(off)
  return a + b;
}
__device__ __forceinline__ float rounded_difference(float a, float b) {
#pragma clang fp contract(off)
  return a - b;
}
#define __fmul_rn rounded_product
#define __fadd_rn rounded_sum
#define __fsub_rn rounded_difference
#define __fsqrt_rn sqrtf

// Accesses by the second cache alone.
__device__ __forceinline__ float __ldcg(const float* p) {
  return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ __forceinline__ void __stcg(float* p, float x) {
  __hip_atomic_store(p, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
