// Tensor-core products of 16-bit tiles in shared memory, accumulated in f32: m16n8k16 and what feeds it. Numbers are bf16
// where a name does not say otherwise.
#pragma once
#include "types.cuh"

// d += a·b: a is 16×16 by rows, b 16×8 by columns, d 16×8: lane l holds d[l/4 (+8)][2(l%4) (+1)].
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of numbers of type T_.
template <typename T_> __device__ __forceinline__ void mma_of(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <> __device__ __forceinline__ void mma_of<bf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(d, a, b0, b1); }
template <> __device__ __forceinline__ void mma_of<f16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8×8 matrices, each lane giving the address of a row of 16 bytes: lanes 8i … 8i + 7 of matrix i.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ void load_transposed(u32& r0, u32& r1, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(at) : "memory");
}

// Two numbers rounded to bf16, the first in the low half.
__device__ __forceinline__ u32 pair(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// The same, rounded to T_.
template <typename T_> __device__ __forceinline__ u32 pair_of(float low, float high);
template <> __device__ __forceinline__ u32 pair_of<bf16>(float low, float high) { return pair(low, high); }
template <> __device__ __forceinline__ u32 pair_of<f16>(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes from global to shared memory behind the thread's back; zeros where `inside` is false.
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
// The same for BYTES_ = 4, 8 or 16 through the first cache, which joins what neighbouring lanes want of several rows.
template <int BYTES_> __device__ __forceinline__ void copy_few_async(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES_), "r"(inside ? BYTES_ : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most LEFT_ of the groups that were committed last are still in flight.
template <int LEFT_> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT_) : "memory");
}
