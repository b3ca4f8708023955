// Attention of new tokens over the pages of their sequences on the tensor cores (see read.cu for what is computed and for
// the shapes, strips.cuh for how). A prompt reads keys once for 16 STRIPS rows, and a single token keeps all warps busy with
// one strip. Sums of the SHARERS, and of SPLITS parts of the keys (merge.cu), are put together in their order. Where ALIGNED,
// tiles begin at multiples of TILE, whatever a window hides.
#include "strips.cuh"
#include "pages.cuh"
#include "dependent_launch.cuh"

#if SPLITS > 1
#define RESULT_T float
#else
#define RESULT_T O_T
#endif

struct Pages {
  const KEY_T* keys;
  const VALUE_T* values;
  const int* table;
  int row, kv;

  __device__ __forceinline__ size_t line(int j) const { return j < 0 ? 0 : line_of(table, row, j) * KV_HEADS + kv; }
  __device__ __forceinline__ const KEY_T* key(int j) const { return keys + line(j) * D; }
  __device__ __forceinline__ const VALUE_T* value(int j) const { return values + line(j) * DV; }
};

extern "C" __global__ void __launch_bounds__(THREADS)
cached_strips(const Q_T* q, const KEY_T* keys, const VALUE_T* values, const int* positions, const int* table,
              LAST_KEYS const SINK_T* sinks, RESULT_T* result) {
  extern __shared__ __align__(16) unsigned char raw[];
  __shared__ int range[2];
  const int row = blockIdx.z / BLOCKS, kv = blockIdx.y;
  // The last tokens of a prompt see the most keys: they begin first.
  const int first_row = (BLOCKS - 1 - (int)(blockIdx.z % BLOCKS)) * ROWS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, strip = warp / SHARERS, sharer = warp % SHARERS;
  if (threadIdx.x == 0) range[0] = 0x7fffffff, range[1] = 0;
  grid_dependency_synchronize();
  __syncthreads();
  positions += (size_t)row * TOKENS;
#ifdef LAST_KEY
  last_keys += (size_t)row * TOKENS;
#endif
  for (int i = threadIdx.x; i < ROWS && first_row + i < ALL; i += THREADS) {
    const int p = positions[(first_row + i) / GROUP];
    if (p < 0) continue;
    atomicMin(range, WINDOW ? max(p + 1 - WINDOW, 0) : 0);
    atomicMax(range + 1, END_OF((first_row + i) / GROUP));
  }
  __syncthreads();
  const int last = range[1], seen = min(range[0], last), first = ALIGNED ? seen / TILE * TILE : seen;
  const int part = ((last - first + SPLITS - 1) / SPLITS + TILE - 1) / TILE * TILE;
  const int begin = first + (int)blockIdx.x * part, end = min(begin + part, last);
  Walk<Pages> walk = {{keys, values, table, row, kv}, shared_address(raw), begin, end};
  walk.start();
  Strip mine;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int here = first_row + strip * 16 + half * 8 + lane / 4, clamped = min(here, ALL - 1), token = clamped / GROUP;
    mine.to[half] = here < ALL ? END_OF(token) : 0;
    mine.from[half] = WINDOW ? max(positions[token] + 1 - WINDOW, 0) : 0;
    mine.read_query(half, q + (size_t)row * Q_B + (size_t)token * Q_S + (size_t)(kv * GROUP + clamped % GROUP) * Q_H);
  }
  walk.run(mine, sharer);
  float* found = (float*)raw;
  publish(found, mine, strip, sharer);
  for (int i = threadIdx.x; i < ROWS * DV; i += THREADS) {
    const int local = i / DV, column = i % DV, here = first_row + local;
    if (here >= ALL) break;
    const int token = here / GROUP, head = kv * GROUP + here % GROUP;
    const float sink = SPLITS == 1 && HAS_SINK ? load(sinks + head) * LOG2E : -INF;
    const Sums sums = sums_of_row(found, local, column, sink);
#if SPLITS > 1
    float* at = result + ((((size_t)row * TOKENS + token) * HEADS + head) * SPLITS + blockIdx.x) * (DV + 2);
    at[column] = sums.column;
    if (column == 0) at[DV] = sums.largest * LN2, at[DV + 1] = sums.all;
#else
    O_T* at = result + (size_t)row * O_B + (size_t)token * O_S + (size_t)head * O_H;
    store(at + column, positions[token] < 0 ? 0.0f : sums.column / sums.all);
#endif
  }
}
