// Hopper's asynchronous products: tiles in shared memory as the tensor cores read them, and the products of one
// warpgroup. sm_90a only.
// A tile of R rows of 64 bf16 is in 128-byte rows, the 16-byte chunk c of row r at chunk c ^ (r & 7) (the
// 128-byte swizzle); its address is a multiple of 1024. Wider tiles are halves of 64 columns one after another.
#pragma once
#include "intrinsics.cuh"

// The warpgroup has COUNT_ registers a thread from here on: fewer than before, or more, which it waits for.
template <int COUNT_> __device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT_));
}
template <int COUNT_> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT_));
}

// Byte offset of a 16-byte chunk inside a half of 64 columns.
__device__ __forceinline__ u32 swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// A tile whose rows are the free index and whose columns are summed over; `address` may start inside a row, in
// steps of 32 bytes (16 elements).
__device__ __forceinline__ u64 columns_summed(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// A tile whose rows are summed over; `half` is the distance in bytes from one half of its columns to the next.
__device__ __forceinline__ u64 rows_summed(u32 address, u32 half) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(half >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `PENDING` committed groups are unfinished.
template <int PENDING> __device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Element types of the products; bf16 unless the source says otherwise before it includes this.
#ifndef PRODUCT_TYPES
#define PRODUCT_TYPES "f32.bf16.bf16"
#endif

// The first operands of the instruction: the registers of the sum, which also name the constraints below.
#define SUM_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUM_16 SUM_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUM_24 SUM_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SUM_32 SUM_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SUM_40 SUM_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SUM_48 SUM_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SUM_56 SUM_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define SUM_64 SUM_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define SUM_72 SUM_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define SUM_80 SUM_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define SUM_88 SUM_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define SUM_96 SUM_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define SUM_104 SUM_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define SUM_112 SUM_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define SUM_120 SUM_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define SUM_128 SUM_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define F8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                 "+f"(d[i + 6]), "+f"(d[i + 7])
#define F16(d, i) F8(d, i), F8(d, i + 8)
#define F32(d, i) F16(d, i), F16(d, i + 16)
#define F64(d, i) F32(d, i), F32(d, i + 32)

// d [64, N] (+)= a [64, 16] b [16, N], both from shared memory; *_ROWS: the tile's rows are summed over.
#define PRODUCT(N, SUM, A, B, ADD, AT, BT, ...) \
  template <int A_ROWS, int B_ROWS> __device__ __forceinline__ void product(float (&d)[N / 2], u64 a, u64 b, int add) { \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16." PRODUCT_TYPES " {" SUM "}, %" #A ", %" #B \
                 ", add, 1, 1, %" #AT ", %" #BT ";\n}\n" \
                 : __VA_ARGS__ \
                 : "l"(a), "l"(b), "r"(add), "n"(A_ROWS), "n"(B_ROWS)); \
  }
PRODUCT(16, SUM_8, 8, 9, 10, 11, 12, F8(d, 0))
PRODUCT(32, SUM_16, 16, 17, 18, 19, 20, F16(d, 0))
PRODUCT(48, SUM_24, 24, 25, 26, 27, 28, F16(d, 0), F8(d, 16))
PRODUCT(64, SUM_32, 32, 33, 34, 35, 36, F32(d, 0))
PRODUCT(80, SUM_40, 40, 41, 42, 43, 44, F32(d, 0), F8(d, 32))
PRODUCT(96, SUM_48, 48, 49, 50, 51, 52, F32(d, 0), F16(d, 32))
PRODUCT(112, SUM_56, 56, 57, 58, 59, 60, F32(d, 0), F16(d, 32), F8(d, 48))
PRODUCT(128, SUM_64, 64, 65, 66, 67, 68, F64(d, 0))
PRODUCT(144, SUM_72, 72, 73, 74, 75, 76, F64(d, 0), F8(d, 64))
PRODUCT(160, SUM_80, 80, 81, 82, 83, 84, F64(d, 0), F16(d, 64))
PRODUCT(176, SUM_88, 88, 89, 90, 91, 92, F64(d, 0), F16(d, 64), F8(d, 80))
PRODUCT(192, SUM_96, 96, 97, 98, 99, 100, F64(d, 0), F32(d, 64))
PRODUCT(208, SUM_104, 104, 105, 106, 107, 108, F64(d, 0), F32(d, 64), F8(d, 96))
PRODUCT(224, SUM_112, 112, 113, 114, 115, 116, F64(d, 0), F32(d, 64), F16(d, 96))
PRODUCT(240, SUM_120, 120, 121, 122, 123, 124, F64(d, 0), F32(d, 64), F16(d, 96), F8(d, 112))
PRODUCT(256, SUM_128, 128, 129, 130, 131, 132, F64(d, 0), F64(d, 64))

// d [64, N] (+)= a [64, 32] b [32, N] of codes of eight bits, both from shared memory, in rows that are summed over. A sum
// keeps fewer bits than f32 has on the way.
#ifdef CODES_TYPES
#define PRODUCT_OF_CODES(N, SUM, A, B, ADD, ...) \
  __device__ __forceinline__ void product_of_codes(float (&d)[N / 2], u64 a, u64 b, int add) { \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32." CODES_TYPES " {" SUM "}, %" #A ", %" #B \
                 ", add, 1, 1;\n}\n" \
                 : __VA_ARGS__ \
                 : "l"(a), "l"(b), "r"(add)); \
  }
PRODUCT_OF_CODES(16, SUM_8, 8, 9, 10, F8(d, 0))
PRODUCT_OF_CODES(32, SUM_16, 16, 17, 18, F16(d, 0))
PRODUCT_OF_CODES(48, SUM_24, 24, 25, 26, F16(d, 0), F8(d, 16))
PRODUCT_OF_CODES(64, SUM_32, 32, 33, 34, F32(d, 0))
PRODUCT_OF_CODES(80, SUM_40, 40, 41, 42, F32(d, 0), F8(d, 32))
PRODUCT_OF_CODES(96, SUM_48, 48, 49, 50, F32(d, 0), F16(d, 32))
PRODUCT_OF_CODES(112, SUM_56, 56, 57, 58, F32(d, 0), F16(d, 32), F8(d, 48))
PRODUCT_OF_CODES(128, SUM_64, 64, 65, 66, F64(d, 0))
PRODUCT_OF_CODES(144, SUM_72, 72, 73, 74, F64(d, 0), F8(d, 64))
PRODUCT_OF_CODES(160, SUM_80, 80, 81, 82, F64(d, 0), F16(d, 64))
PRODUCT_OF_CODES(176, SUM_88, 88, 89, 90, F64(d, 0), F16(d, 64), F8(d, 80))
PRODUCT_OF_CODES(192, SUM_96, 96, 97, 98, F64(d, 0), F32(d, 64))
PRODUCT_OF_CODES(208, SUM_104, 104, 105, 106, F64(d, 0), F32(d, 64), F8(d, 96))
PRODUCT_OF_CODES(224, SUM_112, 112, 113, 114, F64(d, 0), F32(d, 64), F16(d, 96))
PRODUCT_OF_CODES(240, SUM_120, 120, 121, 122, F64(d, 0), F32(d, 64), F16(d, 96), F8(d, 112))
PRODUCT_OF_CODES(256, SUM_128, 128, 129, 130, F64(d, 0), F64(d, 64))
#undef PRODUCT_OF_CODES
#endif

// d [64, N] += a [64, 16] b [16, N], a in registers, b's rows summed over.
#define PRODUCT_OF_REGISTERS(N, SUM, A0, A1, A2, A3, B, ...) \
  __device__ __forceinline__ void product(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16." PRODUCT_TYPES " {" SUM "}, {%" #A0 ", %" #A1 ", %" #A2 \
                 ", %" #A3 "}, %" #B ", 1, 1, 1, 1;\n" \
                 : __VA_ARGS__ \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)); \
  }
PRODUCT_OF_REGISTERS(64, SUM_32, 32, 33, 34, 35, 36, F32(d, 0))
PRODUCT_OF_REGISTERS(80, SUM_40, 40, 41, 42, 43, 44, F32(d, 0), F8(d, 32))
PRODUCT_OF_REGISTERS(96, SUM_48, 48, 49, 50, 51, 52, F32(d, 0), F16(d, 32))
PRODUCT_OF_REGISTERS(112, SUM_56, 56, 57, 58, 59, 60, F32(d, 0), F16(d, 32), F8(d, 48))
PRODUCT_OF_REGISTERS(128, SUM_64, 64, 65, 66, 67, 68, F64(d, 0))
PRODUCT_OF_REGISTERS(192, SUM_96, 96, 97, 98, 99, 100, F64(d, 0), F32(d, 64))
PRODUCT_OF_REGISTERS(256, SUM_128, 128, 129, 130, 131, 132, F64(d, 0), F64(d, 64))
#undef PRODUCT
#undef PRODUCT_OF_REGISTERS
#undef F8
#undef F16
#undef F32
#undef F64

// Ordinary stores of this thread to shared memory become visible to products after the next barrier.
__device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8x8 matrices of bf16 pairs from a warp's registers; lane l names the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
