// Programmatic dependent launch: a kernel that calls grid_dependency_synchronize() may be launched while the one before it
// on the stream still runs. Before that call it reads nothing that a kernel of the same entry writes, and writes nothing
// but registers and shared memory. Before sm_90 the launch keeps the order, and these functions do nothing.
#pragma once

// Lets the next kernel be launched as soon as all blocks of this one have come here: it waits for the end of this one.
__device__ __forceinline__ void trigger_launch_completion() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until all earlier kernels of the stream have ended and their writes are visible.
__device__ __forceinline__ void grid_dependency_synchronize() {
  trigger_launch_completion();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
