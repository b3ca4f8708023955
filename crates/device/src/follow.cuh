// The order of kernels on a stream, kept by the kernel itself: one that calls follow() may be launched while the one in
// front of it still runs. What it does before reads nothing that a kernel of the same entry writes, and writes nothing
// but registers and shared memory. Before sm_90 the launch keeps the order, and this is nothing.
#pragma once

// The kernel behind may be launched as soon as all blocks of this one have come here: it waits for the end of this one.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until everything in front has ended and is visible.
__device__ __forceinline__ void follow() {
  let_next_begin();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
