// Hopper's asynchronous products: tiles in shared memory as the tensor cores read them, and the products of one
// warpgroup. sm_90a only.
// A tile of R rows of 64 bf16 lies in 128-byte rows, the 16-byte chunk c of row r at chunk c ^ (r & 7) (the
// 128-byte swizzle); its address is a multiple of 1024. Wider tiles are halves of 64 columns behind one another.
#pragma once
typedef unsigned int u32;
typedef unsigned long long u64;

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

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)

// d [64, 64] (+)= a [64, 16] b [16, 64], both from shared memory; *_ROWS: the tile's rows are summed over.
template <int A_ROWS, int B_ROWS>
__device__ __forceinline__ void product_64x64(float (&d)[32], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, %35, %36;\n}\n"
      : F16(d, 0), F16(d, 16)
      : "l"(a), "l"(b), "r"(add), "n"(A_ROWS), "n"(B_ROWS));
}

// d [64, 128] += a [64, 16] b [16, 128], a in registers, b's rows summed over.
__device__ __forceinline__ void product_64x128(float (&d)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
      "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
      : F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
// d [64, n] (+)= a [64, 16] b [16, n], both from shared memory, a's columns summed over; B_ROWS: b's rows are.
template <int B_ROWS> __device__ __forceinline__ void product_64x256(float (&d)[128], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
      "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "
      "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, "
      "%120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, add, 1, 1, 0, %131;\n}\n"
      : F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48), F16(d, 64), F16(d, 80), F16(d, 96), F16(d, 112)
      : "l"(a), "l"(b), "r"(add), "n"(B_ROWS));
}
template <int B_ROWS> __device__ __forceinline__ void product_64x128(float (&d)[64], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
      "%60, %61, %62, %63}, "
      "%64, %65, add, 1, 1, 0, %67;\n}\n"
      : F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48)
      : "l"(a), "l"(b), "r"(add), "n"(B_ROWS));
}
#undef F4
#undef F16

// Ordinary stores of this thread to shared memory become visible to products behind the next barrier.
__device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8x8 matrices of bf16 pairs from a warp's registers; lane l names the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ u32 bf16_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
