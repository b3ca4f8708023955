// Handing data from some warps of a block to others: barriers in shared memory, and the copy engine. sm_90 and later.
#pragma once
#include "types.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Returns when the phase of the given parity has completed.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra.uni over;\n"
      "bra.uni again;\nover:\n}" ::"r"(barrier), "r"(parity)
      : "memory");
}
// Barrier number `id` for `THREADS_` threads of the block.
template <int THREADS_> __device__ __forceinline__ void meet(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS_) : "memory");
}

// A description of a tensor for the copy engine, made by the driver.
struct alignas(64) TensorMap { u64 words[16]; };

// The barrier's phase also waits for `bytes` of copies.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// A box of a tensor of four axes, from the given place on (innermost axis first); zeros where it leaves the tensor.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
          "r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
// `bytes` (a multiple of 16) of neighbouring memory.
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
