// Keys and values of new tokens to their lines of the caches:
//   key_cache[line(b, p)] = k[b, t], value_cache[line(b, p)] = v[b, t], p = positions[b, t]; p < 0 is padding.
// k [B, TOKENS, KV_HEADS, D], v the same with DV columns, strided in the first three axes; positions i32 [B, TOKENS];
// table i32 [B, TABLE]; caches [pages, PAGE, KV_HEADS, D or DV], dense. A block copies one token.
#include "types.cuh"
#include "pages.cuh"
#include "dependent_launch.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
cache_write(const K_T* k, const V_T* v, const int* positions, const int* table, CACHE_T* keys, CACHE_T* values) {
  grid_dependency_synchronize();
  const int row = blockIdx.x / TOKENS, t = blockIdx.x % TOKENS, position = positions[blockIdx.x];
  if (position < 0) return;
  const size_t line = line_of(table, row, position) * KV_HEADS;
  k += (size_t)row * K_B + (size_t)t * K_S;
  v += (size_t)row * V_B + (size_t)t * V_S;
  for (int i = threadIdx.x; i < KV_HEADS * D; i += THREADS)
    store(keys + line * D + i, load(k + (size_t)(i / D) * K_H + i % D));
  for (int i = threadIdx.x; i < KV_HEADS * DV; i += THREADS)
    store(values + line * DV + i, load(v + (size_t)(i / DV) * V_H + i % DV));
}
