// The walk of strips over keys on the tensor cores. A strip is 16 rows, a row one head of one token; heads that read the
// same keys follow one another, then comes the next token. A block has STRIPS strips and SHARERS warps for each: keys and
// values come to shared memory in tiles of TILE, the next while the present is worked on, and each of the SHARERS takes its
// part of a tile. `Keys` says where they are: key(j) and value(j) are their addresses.
// The sums of a row over a tile, and those of tiles, have one order; a tile of which a row sees nothing leaves its sums as
// they are. So a row's result follows from the keys that it sees, and from where tiles begin among them.
#pragma once
#include "tiles.cuh"

#define THREADS (32 * STRIPS * SHARERS)
#define ROWS (16 * STRIPS)
#define GROUP (HEADS / KV_HEADS)
#define ALL (TOKENS * GROUP)
#define BLOCKS ((ALL + ROWS - 1) / ROWS)
#define K_WIDE PADDED(D, 1)
#define V_WIDE PADDED(DV, 1)
#define KT (K_WIDE / 16)
#define NT (V_WIDE / 8)
#define OWN (TILE / SHARERS)
#define V_PLACE (TILE * PITCH(K_WIDE))
#define STAGE (V_PLACE + TILE * PITCH(V_WIDE))

// Rows of a head, whose addresses `at` says (any for -1), to a tile; zeros from key `end` and from column COLUMNS on.
template <int COLUMNS, int WIDE, typename At> __device__ __forceinline__ void fetch_tile(u32 tile, int first, int end, At at) {
  constexpr int CHUNKS = WIDE / 8;
#pragma unroll
  for (int i = 0; i < (TILE * CHUNKS + THREADS - 1) / THREADS; i++) {
    const int place = i * THREADS + threadIdx.x, key = place / CHUNKS, chunk = place % CHUNKS, j = first + key;
    if (TILE * CHUNKS % THREADS && place >= TILE * CHUNKS) break;
    const bool inside = j < end && chunk * 8 < COLUMNS;
    copy_async(tile + key * PITCH(WIDE) + chunk * 16, at(inside ? j : -1) + (inside ? chunk * 8 : 0), inside);
  }
}

// In units of log 2.
__device__ __forceinline__ float score(float x) {
  return HAS_CAP ? SOFT_CAP * LOG2E * tanh_by_exp(x * (SCALE / SOFT_CAP)) : x * (SCALE * LOG2E);
}
__device__ __forceinline__ float share(float top, float largest) { return top > -INF ? exp2f(top - largest) : 0.0f; }

// A lane's two rows of its strip, eight apart.
struct Strip {
  u32 queries[1][KT][4];
  // The keys that each sees: from `from` to before `to`.
  int from[2], to[2];
  // Largest score so far, sum of the exponentials below it, and the sum of the values with these weights.
  float top[2] = {-INF, -INF}, total[2] = {}, sum[1][NT][4] = {};

  // The lane's part of the queries of one of its rows.
  __device__ __forceinline__ void read_query(int half, const Q_T* at) {
#pragma unroll
    for (int c = 0; c < KT * 2; c++) {
      const int column = c * 8 + threadIdx.x % 4 * 2;
      queries[0][c / 2][half + c % 2 * 2] = column < D ? *(const u32*)(at + column) : 0;
    }
  }

  // Adds the keys from `first` on of a tile.
  __device__ __forceinline__ void add(u32 keys, u32 values, int first) {
    float x[1][OWN / 8][4] = {};
    scores<1, OWN / 8, KT, PITCH(K_WIDE)>(x, queries, keys + right_lane(PITCH(K_WIDE)));
    const int j = first + threadIdx.x % 4 * 2;
    float next[2] = {top[0], top[1]};
#pragma unroll
    for (int i = 0; i < OWN / 2; i++) {
      const int key = j + i / 4 * 8 + i % 2, half = i % 4 / 2;
      float& s = x[0][i / 4][i % 4];
      s = key >= from[half] && key < to[half] ? score(s) : -INF;
      next[half] = fmaxf(next[half], s);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int offset = 1; offset < 4; offset <<= 1)
        next[half] = fmaxf(next[half], __shfl_xor_sync(0xffffffffu, next[half], offset));
      const float largest = next[half] > -INF ? next[half] : 0.0f, keep = exp2_approx(top[half] - largest);
      top[half] = next[half];
      total[half] *= keep;
#pragma unroll
      for (int n = 0; n < NT; n++) sum[0][n][2 * half] *= keep, sum[0][n][2 * half + 1] *= keep;
#pragma unroll
      for (int i = 0; i < OWN / 4; i++) {
        float& s = x[0][i / 2][2 * half + i % 2];
        s = exp2_approx(s - largest);
        total[half] += s;
      }
    }
    weighted_rows<1, NT, OWN / 8, PITCH(V_WIDE)>(sum, x, values + left_lane(PITCH(V_WIDE)));
  }
};

// Two stages of shared memory from `base` on, and the tiles of the keys from `begin` to before `end`.
template <typename Keys> struct Walk {
  Keys keys;
  u32 base;
  int begin, end;

  __device__ __forceinline__ void fetch(int t) {
    const u32 to = base + t % 2 * STAGE;
    fetch_tile<D, K_WIDE>(to, begin + t * TILE, end, [&](int j) { return keys.key(j); });
    fetch_tile<DV, V_WIDE>(to + V_PLACE, begin + t * TILE, end, [&](int j) { return keys.value(j); });
  }
  // Begins to fetch the first tile.
  __device__ __forceinline__ void start() {
    if (begin < end) fetch(0);
    commit_copies();
  }
  __device__ __forceinline__ void run(Strip& strip, int sharer) {
    const int count = end > begin ? (end - begin + TILE - 1) / TILE : 0;
    for (int t = 0; t < count; t++) {
      if (t + 1 < count) fetch(t + 1);
      commit_copies();
      wait_copies<1>();
      __syncthreads();
      const u32 stage = base + t % 2 * STAGE;
      strip.add(stage + sharer * OWN * PITCH(K_WIDE), stage + V_PLACE + sharer * OWN * PITCH(V_WIDE),
                begin + t * TILE + sharer * OWN);
      __syncthreads();
    }
  }
};

// Sums of a row, in the place of the tiles: DV of values, largest score, sum of the exponentials. Of each warp that shares
// a strip, at sharer * ROWS + row.
__device__ __forceinline__ float* sums_of(float* found, int sharer, int local) {
  return found + (size_t)(sharer * ROWS + local) * (DV + 2);
}
__device__ __forceinline__ void publish(float* found, Strip& of, int strip, int sharer) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int offset = 1; offset < 4; offset <<= 1) of.total[half] += __shfl_xor_sync(0xffffffffu, of.total[half], offset);
    float* mine = sums_of(found, sharer, strip * 16 + half * 8 + lane / 4);
#pragma unroll
    for (int i = 0; i < NT * 2; i++) {
      const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (column < DV) mine[column] = of.sum[0][i / 2][2 * half + i % 2];
    }
    if (lane % 4 == 0) mine[DV] = of.top[half], mine[DV + 1] = of.total[half];
  }
  __syncthreads();
}

// The largest score of a row, of its sink too where that is above -INF; the sum of the exponentials below it; and the sum
// of a column.
struct Sums { float largest, all, column; };

__device__ __forceinline__ Sums sums_of_row(float* found, int local, int column, float sink) {
  Sums of = {sink, 0.0f, 0.0f};
#pragma unroll
  for (int s = 0; s < SHARERS; s++) of.largest = fmaxf(of.largest, sums_of(found, s, local)[DV]);
  of.all = share(sink, of.largest);
#pragma unroll
  for (int s = 0; s < SHARERS; s++) {
    const float* one = sums_of(found, s, local);
    const float weight = share(one[DV], of.largest);
    of.all = fmaf(one[DV + 1], weight, of.all);
    of.column = fmaf(one[column], weight, of.column);
  }
  return of;
}
