// A product with its low-rank addends in one pass on Hopper: D = A·op(B) + scale·Σ T_s·op(U_s), D's slice s alone for
// addend s, plus a bias of D's columns; bf16, summed in f32, rounded once. A [m, k] in rows; B [n, k], or [k, n] where
// ACROSS, and U_s likewise; T_s [m, rank]. Addends are steps of the sum before the others: zeros outside a factor make
// all steps alike. At most SLICES of them, of ranks up to 16·ADDEND_STEPS; their scale counts where SCALED.
//
// Where CODES_TYPES, A and B [n, k] are codes of eight bits with a scale each, described as pairs; their sum is scaled
// before the addends' steps, which come last then. Where PROMOTED, the tensor cores sum 128 codes at a time and the rest
// is added in f32, while they are at the next 128.
//
// Two blocks of a cluster take TALL rows each of the same WIDE columns of D, and each fetches half of B for both; where FLAT,
// WIDE columns each of the same TALL rows, and half of A. One warp fetches, two warpgroups multiply 64 rows each, STAGES
// steps of DEEP in flight. Persistent blocks walk over D in squares of about GROUP pairs of tiles, so that what is read again
// is in the L2 cache.
#include "handoff.cuh"
#include "wgmma.cuh"

#define TALL 128
#define DEEP 64
#define A_BYTES (TALL * DEEP * 2)
#define B_BYTES (WIDE * DEEP * 2)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define PIECE_BYTES (64 * 64 * 2)
#define GROUP 8
#ifndef FLAT
#define FLAT 0
#endif
// Columns of D of a cluster.
#define SPAN (FLAT ? 2 * WIDE : WIDE)
#ifdef CODES_TYPES
#define ADDENDS_FIRST 0
#else
#define ADDENDS_FIRST 1
#endif

struct Addends {
  TensorMap t[SLICES], u[SLICES];
};
// First column and number of columns of each addend, in order.
struct Slices {
  int first[SLICES], count[SLICES];
};

struct Stage {
  int index;
  u32 phase;
  __device__ __forceinline__ void next() {
    if (++index == STAGES) index = 0, phase ^= 1;
  }
};

// Pair of tiles down and tile across of number `t`.
__device__ __forceinline__ void tile_of(int t, int pairs, int across, int& pair, int& column) {
  const int group = t / (GROUP * across), rest = t % (GROUP * across), here = min(GROUP, pairs - group * GROUP);
  pair = group * GROUP + rest % here, column = rest / here;
}

// The addends on columns n … n + SPAN: from `first` to before `last`.
__device__ __forceinline__ void addends_of(const Slices& slices, int count, int n, int& first, int& last) {
  first = last = 0;
#pragma unroll
  for (int s = 0; s < SLICES; s++) {
    first += s < count && slices.first[s] + slices.count[s] <= n;
    last += s < count && slices.first[s] < n + SPAN;
  }
}

// Rows m … of A: where FLAT this block's half of them, to both blocks.
__device__ __forceinline__ void fetch_left(u32 to, const TensorMap* map, u32 barrier, int k, int m, u32 rank) {
  if (FLAT) copy_box_to_both(to + rank * (A_BYTES / 2), map, barrier, k, m + rank * (TALL / 2), 0, 0);
  else copy_box(to, map, barrier, k, m, 0, 0);
}

// Columns n … and rows k … of B: this block's half of them, to both blocks; where FLAT the block's own.
template <int ACROSS_>
__device__ __forceinline__ void fetch_right(u32 to, const TensorMap* map, u32 barrier, int k, int n, u32 rank) {
  if (FLAT && ACROSS_) copy_box(to, map, barrier, 0, k, n / 64 + rank * (WIDE / 64), 0);
  else if (FLAT) copy_box(to, map, barrier, k, n + rank * WIDE, 0, 0);
  else if (ACROSS_ && WIDE % 128)
    for (int box = rank; box < WIDE / 64; box += 2) copy_box_to_both(to + box * 128 * DEEP, map, barrier, 0, k, n / 64 + box, 0);
  else if (ACROSS_) copy_box_to_both(to + rank * (B_BYTES / 2), map, barrier, 0, k, n / 64 + rank * (WIDE / 128), 0);
  else copy_box_to_both(to + rank * (B_BYTES / 2), map, barrier, k, n + rank * (WIDE / 2), 0, 0);
}

// Steps of 16 terms of bf16 in a stage's 64, from the first on.
template <int STEPS, int ACROSS_>
__device__ __forceinline__ void multiply(float (&sum)[WIDE / 2], u32 a, u32 b, int& add) {
#pragma unroll
  for (int k = 0; k < STEPS; k++, add = 1) {
    const u64 right = ACROSS_ ? rows_summed(b + k * 2048, 64 * DEEP * 2) : columns_summed(b + k * 32);
    product<0, ACROSS_>(sum, columns_summed(a + k * 32), right, add);
  }
}

// What a warpgroup needs to walk through the stages.
struct Walk {
  Stage at;
  u32 base, full;
  int half, thread;
  // Waits for the next stage, and goes on to the one after it; its two tiles.
  __device__ __forceinline__ void take(u32& a, u32& b) {
    barrier_wait(full + 8 * at.index, at.phase);
    const u32 from = base + at.index * STAGE_BYTES;
    at.next();
    a = from + half * (A_BYTES / 2), b = from + A_BYTES;
  }
  // Releases the stage `back` before the next one to both blocks' fetching warps; 1 is the one that was taken last.
  __device__ __forceinline__ void release(int back) {
    const int index = at.index < back ? at.index + STAGES - back : at.index - back;
    if (thread < 2) barrier_arrive_at(full + 8 * (STAGES + index), thread);
  }
};

__device__ __forceinline__ void addends_summed(Walk& walk, float (&sum)[WIDE / 2], int count, int& add) {
  for (; count > 0; count--) {
    u32 a, b;
    walk.take(a, b);
    products_begin();
    multiply<ADDEND_STEPS, ACROSS>(sum, a, b, add);
    products_commit();
    products_wait<0>();
    walk.release(1);
  }
}

#ifdef CODES_TYPES
// Begins the sum of the next 128 codes, from 0 on where not `add`.
__device__ __forceinline__ void begin_codes(Walk& walk, float (&sum)[WIDE / 2], int add) {
  u32 a, b;
  walk.take(a, b);
  products_begin();
#pragma unroll
  for (int k = 0; k < 4; k++) product_of_codes(sum, columns_summed(a + k * 32), columns_summed(b + k * 32), add || k > 0);
  products_commit();
}
#endif

__device__ __forceinline__ void added(float (&sum)[WIDE / 2], const float (&more)[WIDE / 2]) {
#pragma unroll
  for (int i = 0; i < WIDE / 2; i++) sum[i] += more[i];
}

__device__ __forceinline__ void terms_summed(Walk& walk, float (&sum)[WIDE / 2], int steps, int& add) {
#ifdef CODES_TYPES
#pragma unroll
  for (int i = 0; i < WIDE / 2; i++) sum[i] = 0.0f;
#endif
#if PROMOTED
  // Wide tiles leave no registers for a third sum.
  int k = 0;
  for (; WIDE == 128 && k + 1 < steps; k += 2) {
    float even[WIDE / 2], odd[WIDE / 2];
    begin_codes(walk, even, 0);
    begin_codes(walk, odd, 0);
    products_wait<1>();
    walk.release(2);
    added(sum, even);
    products_wait<0>();
    walk.release(1);
    added(sum, odd);
  }
  for (; k < steps; k++) {
    float part[WIDE / 2];
    begin_codes(walk, part, 0);
    products_wait<0>();
    walk.release(1);
    added(sum, part);
  }
#else
  for (int k = 0; k < steps; k++) {
#ifdef CODES_TYPES
    begin_codes(walk, sum, 1);
#else
    u32 a, b;
    walk.take(a, b);
    products_begin();
    multiply<DEEP / 16, ACROSS>(sum, a, b, add);
    products_commit();
#endif
    products_wait<1>();
    if (k > 0) walk.release(2);
  }
  products_wait<0>();
  walk.release(1);
#endif
  add = 1;
}

__device__ __forceinline__ void scaled(float (&sum)[WIDE / 2], float factor) {
#pragma unroll
  for (int i = 0; i < WIDE / 2; i++) sum[i] *= factor;
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap d,
        const __grid_constant__ Addends addends, const __grid_constant__ Slices slices, int addend_count,
        float scale, const u32* bias, int width, int pairs, int across, int steps
#ifdef CODES_TYPES
        , const float* scale_a, const float* scale_b
#endif
) {
  extern __shared__ unsigned char raw[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const u32 base = (shared_address(raw) + 1023) & ~1023u, out = base + STAGES * STAGE_BYTES;
  const u32 full = shared_address(barriers), empty = full + 8 * STAGES, rank = cluster_rank();
  const int warpgroup = threadIdx.x / 128, tiles = pairs * across;
  if (threadIdx.x == 0)
    for (int s = 0; s < STAGES; s++) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, 4);
  cluster_meet();
  Stage at = {0, 0};
  if (warpgroup == 0) {
    release_registers<40>();
    if (threadIdx.x == 0) {
      for (int t = blockIdx.x / 2; t < tiles; t += gridDim.x / 2) {
        int pair, column, s, last;
        tile_of(t, pairs, across, pair, column);
        const int m = (FLAT ? pair : pair * 2 + rank) * TALL, n = column * SPAN;
        addends_of(slices, addend_count, n, s, last);
        const auto fetch_addends = [&] {
          for (; s < last; s++, at.next()) {
            barrier_wait(empty + 8 * at.index, at.phase ^ 1);
            const u32 to = base + at.index * STAGE_BYTES, barrier = full + 8 * at.index;
            barrier_expect(barrier, STAGE_BYTES);
            fetch_left(to, &addends.t[s], barrier, 0, m, rank);
            fetch_right<ACROSS>(to + A_BYTES, &addends.u[s], barrier, 0, n - slices.first[s], rank);
          }
        };
        if (ADDENDS_FIRST) fetch_addends();
        for (int k = 0; k < steps; k++, at.next()) {
          barrier_wait(empty + 8 * at.index, at.phase ^ 1);
          const u32 to = base + at.index * STAGE_BYTES, barrier = full + 8 * at.index;
          barrier_expect(barrier, STAGE_BYTES);
          fetch_left(to, &a, barrier, k * DEEP, m, rank);
          fetch_right<ACROSS && ADDENDS_FIRST>(to + A_BYTES, &b, barrier, k * DEEP, n, rank);
        }
        if (!ADDENDS_FIRST) fetch_addends();
      }
    }
  } else {
    take_registers<232>();
    const int half = warpgroup - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 mine = out + half * 2 * PIECE_BYTES;
    float sum[WIDE / 2];
    Walk walk = {at, base, full, half, thread};
    for (int t = blockIdx.x / 2; t < tiles; t += gridDim.x / 2) {
      int pair, column, s, last, add = 0;
      tile_of(t, pairs, across, pair, column);
      const int m = (FLAT ? pair : pair * 2 + rank) * TALL + half * 64, n = column * SPAN + (FLAT ? rank * WIDE : 0);
      addends_of(slices, addend_count, column * SPAN, s, last);
#ifdef CODES_TYPES
      terms_summed(walk, sum, steps, add);
      scaled(sum, *scale_a);
      scaled(sum, SCALED ? *scale_b / scale : *scale_b);
      addends_summed(walk, sum, last - s, add);
      if (SCALED) scaled(sum, scale);
#else
      addends_summed(walk, sum, last - s, add);
      if (SCALED) scaled(sum, scale);
      terms_summed(walk, sum, steps, add);
#endif
#pragma unroll
      for (int piece = 0; piece < WIDE / 64; piece++) {
        const u32 to = mine + piece % 2 * PIECE_BYTES;
        if (bias) {
#pragma unroll
          for (int j = 0; j < 8; j++) {
            const int first = n + piece * 64 + j * 8 + lane % 4 * 2;
            const u32 both = first < width ? bias[first / 2] : 0;
            float* x = sum + piece * 32 + j * 4;
            x[0] += __uint_as_float(both << 16), x[1] += __uint_as_float(both & 0xffff0000u);
            x[2] += __uint_as_float(both << 16), x[3] += __uint_as_float(both & 0xffff0000u);
          }
        }
        if (thread == 0) stores_read<1>();
        meet<128>(1 + half);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          const float* x = sum + piece * 32 + j * 4;
          store_matrices(to + swizzled(warp * 16 + lane % 16, j + lane / 16), bf16_pair(x[0], x[1]),
                         bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7]));
        }
        publish_to_products();
        meet<128>(1 + half);
        if (thread == 0) store_box(&d, to, n + piece * 64, m, 0, 0);
      }
    }
    if (thread == 0) stores_done();
  }
  // A block stays until its neighbour has taken all that comes from it.
  cluster_meet();
}
