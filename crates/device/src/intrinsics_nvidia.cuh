// Instructions that CUDA C++ has no function for, as functions: `intrinsics.cuh` of NVIDIA GPUs, sm_80 and later. The one of
// another vendor has the same functions; a kernel that includes it knows no vendor. The `sm_90` instructions are in
// `handoff.cuh` and `wgmma.cuh`.
#pragma once
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Conversions. 16-bit numbers as their bits; rounded to nearest even, NaN stays NaN.
__device__ __forceinline__ float f16_to_f32(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ u16 f32_to_bf16(float x) {
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u16 f32_to_f16(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
// Two numbers, the first in the low half.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ u32 f16_pair(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
// Two codes of eight bits, saturated, the first in the low byte; only where HAS_FP8_CONVERSION is defined.
#if __CUDA_ARCH__ >= 890
#define HAS_FP8_CONVERSION
__device__ __forceinline__ u16 e4m3_pair(float low, float high) {
  u16 y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ u16 e5m2_pair(float low, float high) {
  u16 y;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}
#endif

// Approximate functions, within a few units of the last place; subnormal arguments and results become 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// NaN if either argument is.
__device__ __forceinline__ float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// Both halves of a product. NVRTC gives a product of 64 bits an addition more.
__device__ __forceinline__ u64 multiply_wide(u32 a, u32 b) {
  u64 y;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(y) : "r"(a), "r"(b));
  return y;
}

// Global memory. `load_acquire` and `store_release` order the accesses of other blocks; relaxed accesses order nothing.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ __forceinline__ int load_acquire(const int* p) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(int* p, int x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ int load_relaxed(const int* p) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void add_relaxed(float* p, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}
// 16 bytes in one access; `load_16_once` leaves the first cache to others.
__device__ __forceinline__ void store_16(void* p, const u32 (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
__device__ __forceinline__ void load_16_once(u32 (&x)[4], const void* p) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(p));
}

// Shared memory, by addresses of 32 bits.
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ uint4 load_shared_16(u32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ void store_shared_16(u32 at, const u32 (&x)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// Asynchronous copies from global to shared memory; zeros where `inside` is false. 16 bytes, or BYTES_ = 4, 8 or 16 through
// L1, which coalesces what neighboring lanes read of several rows.
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
template <int BYTES_> __device__ __forceinline__ void copy_few_async(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES_), "r"(inside ? BYTES_ : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most LEFT_ of the groups that were committed last are still in flight.
template <int LEFT_> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT_) : "memory");
}

// A barrier of THREADS_ threads, neighbouring warps of the block; ids are 1 to 15. All threads of the block have called
// `init_partial_barriers` and met before.
__device__ __forceinline__ void init_partial_barriers() {}
template <int THREADS_> __device__ __forceinline__ void partial_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS_) : "memory");
}

// d += a·b: a is 16×16 by rows, b 16×8 by columns, d 16×8: lane l holds d[l/4 (+8)][2(l%4) (+1)]. By whole warps. `ordered`
// ones stay in the order of the text.
#define PRODUCT_OF_TILES(NAME, TYPE, ...) \
  __device__ __forceinline__ void NAME(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { \
    asm __VA_ARGS__("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
                    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); \
  }
PRODUCT_OF_TILES(mma_bf16, "bf16")
PRODUCT_OF_TILES(mma_f16, "f16")
PRODUCT_OF_TILES(mma_bf16_ordered, "bf16", volatile)
PRODUCT_OF_TILES(mma_f16_ordered, "f16", volatile)
#undef PRODUCT_OF_TILES

// 8×8 matrices of 16-bit numbers, each lane giving the address of a row of 16 bytes: lanes 8i … 8i + 7 of matrix i. Lane l gets
// numbers 2(l%4) and 2(l%4) + 1 of row l/4. By whole warps.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
// The same, each matrix transposed: four, and two.
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_transposed(u32& r0, u32& r1, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(at) : "memory");
}
