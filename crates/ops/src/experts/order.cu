// A stable counting sort of choices by group: index i32 [CHOICES] -> order, places i32 [CHOICES], offsets i32 [GROUPS + 1].
// Three kernels: blocks count the choices of their CHUNK by group (counts i32 [CHUNKS, GROUPS]); one block turns the counts
// into the places where each chunk's choices of a group begin; blocks place their choices, each after those of its group
// before it. Sums of whole numbers only: the same on every run.
#include "types.cuh"

// The chunks in segments, so that the one block has a thread for each group of each.
#define SEGMENTS (GROUPS < THREADS ? THREADS / GROUPS : 1)
#define LENGTH ((CHUNKS + SEGMENTS - 1) / SEGMENTS)

extern "C" __global__ void __launch_bounds__(THREADS)
group_count(const int* __restrict__ index, int* __restrict__ counts) {
  __shared__ int own[GROUPS];
  for (int g = threadIdx.x; g < GROUPS; g += THREADS) own[g] = 0;
  __syncthreads();
  const int choice = blockIdx.x * CHUNK + threadIdx.x;
  if (choice < CHOICES) atomicAdd(&own[index[choice]], 1);
  __syncthreads();
  for (int g = threadIdx.x; g < GROUPS; g += THREADS) counts[(size_t)blockIdx.x * GROUPS + g] = own[g];
}

extern "C" __global__ void __launch_bounds__(THREADS)
group_starts(int* __restrict__ counts, int* __restrict__ offsets) {
  __shared__ int starts[GROUPS + 1], parts[SEGMENTS * GROUPS];
  // The choices of a group in a segment of the chunks.
  for (int i = threadIdx.x; i < SEGMENTS * GROUPS; i += THREADS) {
    const int from = i / GROUPS * LENGTH, to = min(from + LENGTH, CHUNKS);
    int sum = 0;
#pragma unroll 8
    for (int c = from; c < to; c++) sum += counts[(size_t)c * GROUPS + i % GROUPS];
    parts[i] = sum;
  }
  __syncthreads();
  for (int g = threadIdx.x; g < GROUPS; g += THREADS) {
    int sum = 0;
    for (int s = 0; s < SEGMENTS; s++) sum += parts[s * GROUPS + g];
    starts[g + 1] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    starts[0] = 0;
    for (int g = 0; g < GROUPS; g++) starts[g + 1] += starts[g];
  }
  __syncthreads();
  for (int g = threadIdx.x; g <= GROUPS; g += THREADS) offsets[g] = starts[g];
  for (int i = threadIdx.x; i < SEGMENTS * GROUPS; i += THREADS) {
    const int g = i % GROUPS, from = i / GROUPS * LENGTH, to = min(from + LENGTH, CHUNKS);
    int at = starts[g];
    for (int s = 0; s < i / GROUPS; s++) at += parts[s * GROUPS + g];
    // Read ahead of what is written: the compiler cannot know that they differ.
    for (int c = from; c < to; c += 8) {
      int own[8];
#pragma unroll
      for (int j = 0; j < 8; j++) own[j] = c + j < to ? counts[(size_t)(c + j) * GROUPS + g] : 0;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        if (c + j < to) counts[(size_t)(c + j) * GROUPS + g] = at;
        at += own[j];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
group_places(const int* __restrict__ index, const int* __restrict__ starts, int* __restrict__ order,
             int* __restrict__ places) {
  __shared__ int groups[CHUNK];
  const int choice = blockIdx.x * CHUNK + threadIdx.x;
  const int group = choice < CHOICES ? index[choice] : -1;
  groups[threadIdx.x] = group;
  __syncthreads();
  if (choice >= CHOICES) return;
  int before = 0;
  for (int i = 0; i < (int)threadIdx.x; i++) before += groups[i] == group;
  const int place = starts[(size_t)blockIdx.x * GROUPS + group] + before;
  order[place] = choice;
  places[choice] = place;
}
