// Adds the parts that `tiles.cu` left, in their order, times SCALE: dt [ROWS, RANK] (row i at DT_AT(i, s))
// from the column tiles of slice s; db f32 [columns of s, RANK] from all chunks, added to what is there
// with ACCUMULATE. Four neighbouring elements a thread.
#include "types.cuh"
#include "pack.cuh"

#define QUADS (RANK / 4)

extern "C" __global__ void __launch_bounds__(THREADS)
low_rank_sum(const float* __restrict__ part_dt, const float* __restrict__ part_db, RESULTS) {
  DT_T* const dts[] = {DTS};
  float* const dbs[] = {DBS};
  const int firsts[] = {FIRSTS, COLUMNS};
  const int index = blockIdx.x * THREADS + threadIdx.x;
  if (index < SLICES * ROWS * QUADS) {
    const int row = index / QUADS % ROWS, quad = index % QUADS;
#pragma unroll
    for (int s = 0; s < SLICES; s++)
      if (index / QUADS / ROWS == s) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int tile = firsts[s] / WIDTH; tile < firsts[s + 1] / WIDTH; tile++) {
          const float4 x = *reinterpret_cast<const float4*>(part_dt + ((size_t)tile * ROWS + row) * RANK + quad * 4);
          sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
        Pack<DT_T, 4> out;
        out.at[0] = from_float<DT_T>(SCALE * sum.x), out.at[1] = from_float<DT_T>(SCALE * sum.y);
        out.at[2] = from_float<DT_T>(SCALE * sum.z), out.at[3] = from_float<DT_T>(SCALE * sum.w);
        write_pack(dts[s] + DT_AT(row, s) + quad * 4, out);
      }
    return;
  }
  const int at = index - SLICES * ROWS * QUADS, column = at / QUADS, quad = at % QUADS;
  if (column >= COLUMNS) return;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    const float4 x = *reinterpret_cast<const float4*>(part_db + ((size_t)chunk * COLUMNS + column) * RANK + quad * 4);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
#pragma unroll
  for (int s = 0; s < SLICES; s++)
    if (column >= firsts[s] && column < firsts[s + 1]) {
      float4* to = reinterpret_cast<float4*>(dbs[s] + (size_t)(column - firsts[s]) * RANK + quad * 4);
      float4 out = make_float4(SCALE * sum.x, SCALE * sum.y, SCALE * sum.z, SCALE * sum.w);
      if (ACCUMULATE) {
        const float4 old = *to;
        out.x += old.x, out.y += old.y, out.z += old.z, out.w += old.w;
      }
      *to = out;
    }
}
