// Handing data from some warps of a block to others: barriers in shared memory, and the copy engine. sm_90 and later.
#pragma once
#include "intrinsics.cuh"

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
// As copy_box, to the same place in both blocks of a cluster of two; each block's barrier counts the bytes.
__device__ __forceinline__ void copy_box_to_both(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"((u16)3)
      : "memory");
}
// A box from shared memory to a tensor, in a group of its own; what leaves the tensor is not stored.
__device__ __forceinline__ void store_box(const TensorMap* map, u32 from, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// The same, added to what the tensor holds, which is f32: one addition of each element, rounded to nearest.
__device__ __forceinline__ void add_box(const TensorMap* map, u32 from, int x, int y, int z, int w) {
  asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Returns when all but `LEFT` of this thread's groups of stores have read shared memory.
template <int LEFT> __device__ __forceinline__ void stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// This block's number in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of the cluster meet; barriers that were made before are seen by all after it.
__device__ __forceinline__ void cluster_meet() {
  asm volatile(
      "fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Arrives at the barrier in the same place of a block of the cluster. Orders nothing beyond it: what is handed over
// is read and written by products and the copy engine alone. (With the scope of a cluster each arrival costs 0.9 µs.)
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 block) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier), "r"(block)
      : "memory");
}
// Writes two numbers to the place of `address` in the shared memory of a block of the cluster.
__device__ __forceinline__ void store_at(u32 address, u32 block, float a, float b) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.v2.f32 [there], {%2, %3};\n}"
      ::"r"(address), "r"(block), "f"(a), "f"(b) : "memory");
}
