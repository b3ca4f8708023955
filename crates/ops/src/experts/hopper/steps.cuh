// Steps of a sum on their way through shared memory: STAGES of them between the warp that fetches and the HALVES warpgroups
// that multiply, in all CLUSTER blocks of a cluster, which fetch for one another.
#pragma once

struct Stages {
  u32 base, barriers, bytes;
  int index;
  u32 phase;
  __device__ __forceinline__ u32 full() const { return barriers + 8 * index; }
  __device__ __forceinline__ u32 empty() const { return barriers + 8 * (STAGES + index); }
  __device__ __forceinline__ u32 memory() const { return base + index * bytes; }
  __device__ __forceinline__ void next() {
    if (++index == STAGES) index = 0, phase ^= 1;
  }
};

// Makes the barriers: one arrival fills a stage, all warpgroups of all blocks empty it.
__device__ __forceinline__ Stages begin(unsigned char* raw, u64* barriers, u32 bytes) {
  const u32 base = (shared_address(raw) + 1023) & ~1023u, first = shared_address(barriers);
  if (threadIdx.x == 0)
    for (int s = 0; s < STAGES; s++) barrier_init(first + 8 * s, 1), barrier_init(first + 8 * (STAGES + s), HALVES * CLUSTER);
  cluster_meet();
  return {base, first, bytes, 0, 0};
}

// What a warpgroup needs to walk through the stages.
struct Walk {
  Stages at;
  // The next stage is full after this.
  __device__ __forceinline__ void wait() { barrier_wait(at.full(), at.phase); }
  // Waits for the next stage, and goes on to the one after it; its memory.
  __device__ __forceinline__ u32 take() {
    wait();
    const u32 from = at.memory();
    at.next();
    return from;
  }
  // Releases the stage `back` before the next one to the producers of all blocks; 1 is the one that was taken last.
  __device__ __forceinline__ void release(int back) const {
    const int index = at.index < back ? at.index + STAGES - back : at.index - back, thread = threadIdx.x % 128;
    if (thread < CLUSTER) barrier_arrive_at(at.barriers + 8 * (STAGES + index), thread);
  }
};

// Four 8x8 matrices of bf16 pairs from a warp's registers, each transposed; addresses as for `store_matrices`.
__device__ __forceinline__ void store_matrices_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ uint4 read_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void write_shared(u32 address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void clear_shared(u32 address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}
