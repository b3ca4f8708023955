// What adapters get back, from one reading of dy: per slice s of its columns dt = dy_s·b (sums over the
// slice's columns) and db = dy_sᵀ·t (sums over rows), of
// bf16 or f16, NUMBER, with f32 accumulation.
// dy [ROWS, …], row i at DY_AT(i); t [ROWS, RANK], row i at T_AT(i, s); b [columns of s, RANK], dense. Slice s
// begins at column STARTS[s] of dy; the slices' columns, put side by side, are COLUMNS, s from FIRSTS[s] on.
// A block takes CHUNK rows of WIDTH columns of one slice, TALL rows at a time; 4 warps. It leaves
//   part_dt f32 [COLUMNS / WIDTH, ROWS, RANK] and part_db f32 [chunks, COLUMNS, RANK],
// which `sum.cu` adds in order. Tiles wait in shared memory as rows of 16-byte pieces, each piece moved by
// its row so that eight rows of one column lie in different banks; rows of the factors, too, whose pieces are a power of
// two, and which are shorter than the 128 bytes of all banks (rank 64 had eight rows in one bank: 0.45 TB/s).
#include "mma.cuh"

#define TALL 64
#define STAGES 3
#define WARPS 4
#define PIECES (WIDTH / 8)
#define OWN (WIDTH / WARPS / 16)
#define RANKS (RANK / 8)
#define DY_BYTES (TALL * WIDTH * 2)
#define T_BYTES (TALL * RANK * 2)

__device__ __forceinline__ u32 piece(int row, int p) { return (u32)(row * PIECES + (p ^ (row & 7))) * 16; }

// Of a factor, in bytes.
__device__ __forceinline__ u32 factor_piece(int row, int p) {
  const int moved = (RANKS & (RANKS - 1)) || RANKS > 8 ? p : p ^ (row * RANKS / 8 & (RANKS - 1));
  return (u32)(row * RANKS + moved) * 16;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
low_rank_tiles(const NUMBER* __restrict__ dy, FACTORS, float* __restrict__ part_dt, float* __restrict__ part_db) {
  extern __shared__ __align__(128) unsigned char shared[];
  const NUMBER* const ts[] = {TS};
  const NUMBER* const bs[] = {BS};
  const int firsts[] = {FIRSTS}, starts[] = {STARTS};
  const int column = blockIdx.x * WIDTH;
  int slice = 0;
#pragma unroll
  for (int s = 1; s < SLICES; s++)
    if (column >= firsts[s]) slice = s;
  const NUMBER *t = ts[0], *b = bs[0];
  int first = firsts[0], from = starts[0];
#pragma unroll
  for (int s = 1; s < SLICES; s++)
    if (s == slice) t = ts[s], b = bs[s], first = firsts[s], from = starts[s];
  b += (size_t)(column - first) * RANK;
  dy += from + column - first;
  const int start = blockIdx.y * CHUNK, stop = min(start + CHUNK, ROWS);
  const int steps = (stop - start + TALL - 1) / TALL;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 base = shared_address(shared), b_at = base, tiles = base + WIDTH * RANK * 2;

  for (int i = threadIdx.x; i < WIDTH * RANKS; i += 32 * WARPS)
    copy_async(b_at + factor_piece(i / RANKS, i % RANKS), b + i * 8, true);
  const auto fetch = [&](int step) {
    if (step < steps) {
      const u32 to = tiles + step % STAGES * (DY_BYTES + T_BYTES);
      const int row0 = start + step * TALL;
      for (int i = threadIdx.x; i < TALL * PIECES; i += 32 * WARPS) {
        const int row = i / PIECES, p = i % PIECES;
        const bool inside = row0 + row < stop;
        copy_async(to + piece(row, p), dy + DY_AT(inside ? row0 + row : start) + p * 8, inside);
      }
      for (int i = threadIdx.x; i < TALL * RANKS; i += 32 * WARPS) {
        const int row = i / RANKS;
        const bool inside = row0 + row < stop;
        copy_async(to + DY_BYTES + factor_piece(row, i % RANKS), t + T_AT(inside ? row0 + row : start, slice) + i % RANKS * 8,
                   inside);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(i);

  float db[OWN][RANKS][4] = {};
  for (int step = 0; step < steps; step++) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    fetch(step + STAGES - 1);
    const u32 at = tiles + step % STAGES * (DY_BYTES + T_BYTES), t_at = at + DY_BYTES;
    // dt: this warp's 16 rows against all columns of the tile.
    float dt[RANKS][4] = {};
#pragma unroll 4
    for (int k = 0; k < WIDTH / 16; k++) {
      u32 a[4];
      load_matrices(a, at + piece(warp * 16 + lane % 16, k * 2 + lane / 16));
#pragma unroll
      for (int n = 0; n < RANKS; n++) {
        u32 b0, b1;
        load_transposed(b0, b1, b_at + factor_piece(k * 16 + lane % 16, n));
        mma_of<NUMBER>(dt[n], a, b0, b1);
      }
    }
    const int row = start + step * TALL + warp * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < RANKS; n++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (row + half * 8 < stop) {
          float* to = part_dt + ((size_t)blockIdx.x * ROWS + row + half * 8) * RANK + n * 8 + lane % 4 * 2;
          *reinterpret_cast<float2*>(to) = make_float2(dt[n][half * 2], dt[n][half * 2 + 1]);
        }
    // db: all rows of the tile against this warp's columns.
#pragma unroll
    for (int k = 0; k < TALL / 16; k++) {
      u32 ts0[RANKS], ts1[RANKS];
#pragma unroll
      for (int n = 0; n < RANKS; n++)
        load_transposed(ts0[n], ts1[n], t_at + factor_piece(k * 16 + lane % 16, n));
#pragma unroll
      for (int m = 0; m < OWN; m++) {
        // The transpose of a 16×16 block of dy: lanes give rows of the matrices in the order that
        // mma wants of the transposed block.
        u32 a[4];
        load_transposed(a, at + piece(k * 16 + lane / 16 * 8 + lane % 8, (warp * OWN + m) * 2 + lane / 8 % 2));
#pragma unroll
        for (int n = 0; n < RANKS; n++) mma_of<NUMBER>(db[m][n], a, ts0[n], ts1[n]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < OWN; m++)
#pragma unroll
    for (int n = 0; n < RANKS; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int c = column + (warp * OWN + m) * 16 + lane / 4 + half * 8;
        float* to = part_db + ((size_t)blockIdx.y * COLUMNS + c) * RANK + n * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(db[m][n][half * 2], db[m][n][half * 2 + 1]);
      }
}
