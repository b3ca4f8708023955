// The order of kernels on a stream, kept by the kernel itself: one that calls follow() may be launched while the one in
// front of it still runs. What it does before reads nothing that a kernel of the same entry writes, and writes nothing
// but registers and shared memory. Before sm_90 the launch keeps the order, and this is nothing.
#pragma once

// Waits until everything in front has ended and is visible. The kernel behind may be launched from here on: it waits here too.
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
