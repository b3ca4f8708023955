// Attention of new tokens over the pages of their sequences on the tensor cores (see read.cu for what is computed and for
// the shapes). A strip is 16 rows, a row one head of one token; heads that read the same keys follow one another, then
// comes the next token. A block has STRIPS strips and SHARERS warps for each: keys and values come to shared memory in
// tiles of TILE, the next while the present is worked on, and each of the SHARERS takes its part of a tile. So a prompt
// reads keys once for 16 STRIPS rows, and a single token keeps all warps busy with one strip. Sums of the SHARERS, and of
// SPLITS parts of the keys (merge.cu), are put together in their order.
#include "tiles.cuh"
#include "pages.cuh"
#include "dependent_launch.cuh"

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

#if SPLITS > 1
#define RESULT_T float
#else
#define RESULT_T O_T
#endif

// Keys (or values) [first, first + TILE) of a head to a tile; zeros from `end` and from column COLUMNS on.
template <int COLUMNS, int WIDE>
__device__ __forceinline__ void fetch_tile(u32 tile, const ELEMENT* cache, const int* table, int row, int kv, int first,
                                           int end) {
  constexpr int CHUNKS = WIDE / 8;
#pragma unroll
  for (int i = 0; i < (TILE * CHUNKS + THREADS - 1) / THREADS; i++) {
    const int at = i * THREADS + threadIdx.x, key = at / CHUNKS, chunk = at % CHUNKS, j = first + key;
    if (TILE * CHUNKS % THREADS && at >= TILE * CHUNKS) break;
    const bool inside = j < end && chunk * 8 < COLUMNS;
    const size_t line = inside ? line_of(table, row, j) * KV_HEADS + kv : 0;
    copy_async(tile + key * PITCH(WIDE) + chunk * 16, cache + line * COLUMNS + (inside ? chunk * 8 : 0), inside);
  }
}

// In units of log 2.
__device__ __forceinline__ float score(float x) {
  return HAS_CAP ? SOFT_CAP * LOG2E * tanh_by_exp(x * (SCALE / SOFT_CAP)) : x * (SCALE * LOG2E);
}
__device__ __forceinline__ float share(float top, float largest) { return top > -INF ? exp2f(top - largest) : 0.0f; }

extern "C" __global__ void __launch_bounds__(THREADS)
cached_strips(const Q_T* q, const KEY_T* keys, const VALUE_T* values, const int* positions, const int* table,
              LAST_KEYS const SINK_T* sinks, RESULT_T* result) {
  extern __shared__ __align__(16) unsigned char raw[];
  __shared__ int range[2];
  const u32 base = shared_address(raw);
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
  const int last = range[1], first = min(range[0], last);
  const int part = ((last - first + SPLITS - 1) / SPLITS + TILE - 1) / TILE * TILE;
  const int begin = first + (int)blockIdx.x * part, end = min(begin + part, last);
  const int count = end > begin ? (end - begin + TILE - 1) / TILE : 0;
  const auto fetch = [&](int t) {
    const u32 to = base + t % 2 * STAGE;
    fetch_tile<D, K_WIDE>(to, keys, table, row, kv, begin + t * TILE, end);
    fetch_tile<DV, V_WIDE>(to + V_PLACE, values, table, row, kv, begin + t * TILE, end);
  };
  if (count > 0) fetch(0);
  commit_copies();
  // A lane has two rows of its strip, eight apart: the keys that each sees, and its part of the queries.
  int from[2], to[2];
  u32 held[1][KT][4];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int mine = first_row + strip * 16 + half * 8 + lane / 4, clamped = min(mine, ALL - 1), token = clamped / GROUP;
    to[half] = mine < ALL ? END_OF(token) : 0;
    from[half] = WINDOW ? max(positions[token] + 1 - WINDOW, 0) : 0;
    const Q_T* at = q + (size_t)row * Q_B + (size_t)token * Q_S + (size_t)(kv * GROUP + clamped % GROUP) * Q_H;
#pragma unroll
    for (int c = 0; c < KT * 2; c++) {
      const int column = c * 8 + lane % 4 * 2;
      held[0][c / 2][half + c % 2 * 2] = column < D ? *(const u32*)(at + column) : 0;
    }
  }
  float sum[1][NT][4] = {}, top[2] = {-INF, -INF}, total[2] = {};
  for (int t = 0; t < count; t++) {
    if (t + 1 < count) fetch(t + 1);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
    const u32 stage = base + t % 2 * STAGE;
    float x[1][OWN / 8][4] = {};
    scores<1, OWN / 8, KT, PITCH(K_WIDE)>(x, held, stage + sharer * OWN * PITCH(K_WIDE) + right_lane(PITCH(K_WIDE)));
    const int j = begin + t * TILE + sharer * OWN + lane % 4 * 2;
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
    weighted_rows<1, NT, OWN / 8, PITCH(V_WIDE)>(
        sum, x, stage + V_PLACE + sharer * OWN * PITCH(V_WIDE) + left_lane(PITCH(V_WIDE)));
    __syncthreads();
  }
  // What each warp found of its rows, in the place of the tiles: sums, largest score, sum of the exponentials.
  float* found = (float*)raw;
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int offset = 1; offset < 4; offset <<= 1) total[half] += __shfl_xor_sync(0xffffffffu, total[half], offset);
    float* mine = found + (size_t)(sharer * ROWS + strip * 16 + half * 8 + lane / 4) * (DV + 2);
#pragma unroll
    for (int i = 0; i < NT * 2; i++) {
      const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (column < DV) mine[column] = sum[0][i / 2][2 * half + i % 2];
    }
    if (lane % 4 == 0) mine[DV] = top[half], mine[DV + 1] = total[half];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * DV; i += THREADS) {
    const int local = i / DV, column = i % DV, here = first_row + local;
    if (here >= ALL) break;
    const int token = here / GROUP, head = kv * GROUP + here % GROUP;
    const bool has_sink = SPLITS == 1 && HAS_SINK;
    const float sink = has_sink ? load(sinks + head) * LOG2E : -INF;
    float largest = sink, mine = 0.0f;
#pragma unroll
    for (int s = 0; s < SHARERS; s++) largest = fmaxf(largest, found[(s * ROWS + local) * (DV + 2) + DV]);
    float all = has_sink ? exp2f(sink - largest) : 0.0f;
#pragma unroll
    for (int s = 0; s < SHARERS; s++) {
      const float* one = found + (s * ROWS + local) * (DV + 2);
      const float weight = share(one[DV], largest);
      all = fmaf(one[DV + 1], weight, all);
      mine = fmaf(one[column], weight, mine);
    }
#if SPLITS > 1
    float* at = result + ((((size_t)row * TOKENS + token) * HEADS + head) * SPLITS + blockIdx.x) * (DV + 2);
    at[column] = mine;
    if (column == 0) at[DV] = largest * LN2, at[DV + 1] = all;
#else
    O_T* at = result + (size_t)row * O_B + (size_t)token * O_S + (size_t)head * O_H;
    store(at + column, positions[token] < 0 ? 0.0f : mine / all);
#endif
  }
}
