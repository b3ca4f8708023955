// Attention of whole rows in the order of sums of `cached_strips` where that is ALIGNED: a query's result has the bits that
// a token generated after the same keys has. o_i = sum_j p_ij v_j, p_ij = exp(s_ij - lse_i) over the keys that query i sees,
// lse_i the log of the sum of the exponentials, the sink's among them.
// q, o [BATCH, TOKENS, HEADS, D | DV], k, v [BATCH, TOKENS, KV_HEADS, D | DV], strided in the first three axes in steps of
// 16 bytes; starts, last_queries i32 [BATCH, TOKENS] (see portable/tiles.cuh); lse f32 [BATCH, HEADS, TOKENS].
// A block has the strips of ROWS rows. Its tokens are taken in groups that see the same keys but for the last ones: those of
// one document, with BRANCHES of one branch. The keys of a group are numbered as its last token sees them, across the
// branches that it does not see, and tiles begin at multiples of TILE of these numbers.
#include "strips.cuh"

// Keys of a group in stretches without gaps: the row's token at the beginning of each, and the number of its first key.
// A prompt and an answer are two.
#define STRETCHES 32

struct Keys {
  const ELEMENT *keys, *values;
  const int *tokens, *numbers;
  int count;

  __device__ __forceinline__ size_t token(int j) const {
    int at = 0;
#if BRANCHES
    while (at + 1 < count && numbers[at + 1] <= j) at++;
#endif
    return j < 0 ? 0 : tokens[at] + (j - numbers[at]);
  }
  __device__ __forceinline__ const ELEMENT* key(int j) const { return keys + token(j) * K_S; }
  __device__ __forceinline__ const ELEMENT* value(int j) const { return values + token(j) * V_S; }
};

// Finds the stretches of keys that token `last` sees from `start` on; returns how many, and the number of all keys. A barrier.
__device__ __forceinline__ int2 stretches_of(int start, int last, const int* last_queries, int* tokens, int* numbers) {
#if BRANCHES
  __shared__ int hidden;
  int count = 0, length = 0, begin = start;
  while (begin <= last) {
    // The next token that `last` does not see, of which all that its branch holds is skipped.
    int end = last + 1;
    for (int from = begin; from < end; from += THREADS) {
      __syncthreads();
      if (threadIdx.x == 0) hidden = end;
      __syncthreads();
      const int j = from + threadIdx.x;
      if (j < end && last_queries[j] < last) atomicMin(&hidden, j);
      __syncthreads();
      if (hidden < end) end = hidden;
    }
    if (end > begin) {
      if (count == STRETCHES) __trap();
      if (threadIdx.x == 0) tokens[count] = begin, numbers[count] = length;
      count++, length += end - begin;
    }
    begin = end <= last ? last_queries[end] + 1 : end;
  }
  __syncthreads();
  return make_int2(count, length);
#else
  __syncthreads();
  if (threadIdx.x == 0) tokens[0] = start, numbers[0] = 0;
  __syncthreads();
  return make_int2(1, last + 1 - start);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_invariant(const ELEMENT* __restrict__ q, const ELEMENT* __restrict__ k, const ELEMENT* __restrict__ v,
                    const int* __restrict__ starts, const int* __restrict__ last_queries, const SINK_T* __restrict__ sinks,
                    ELEMENT* __restrict__ o, float* __restrict__ lse) {
  extern __shared__ __align__(16) unsigned char raw[];
  __shared__ int tokens[STRETCHES], numbers[STRETCHES];
  const int row = blockIdx.x / BLOCKS, kv = blockIdx.y;
  // The last tokens of a document see the most keys: they begin first.
  const int first_row = (BLOCKS - 1 - (int)(blockIdx.x % BLOCKS)) * ROWS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, strip = warp / SHARERS, sharer = warp % SHARERS;
  const int end_token = (min(first_row + ROWS, ALL) - 1) / GROUP + 1;
  starts += (size_t)row * TOKENS;
  last_queries += (size_t)row * TOKENS;
  k += (size_t)row * K_B + (size_t)kv * K_H;
  v += (size_t)row * V_B + (size_t)kv * V_H;
  Strip mine;
  int own[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int here = first_row + strip * 16 + half * 8 + lane / 4, clamped = min(here, ALL - 1);
    own[half] = here < ALL ? here / GROUP : TOKENS;
    mine.read_query(half, q + (size_t)row * Q_B + (size_t)(clamped / GROUP) * Q_S + (size_t)(kv * GROUP + clamped % GROUP) * Q_H);
  }
  for (int first = first_row / GROUP, last; first < end_token; first = last + 1) {
    const auto joins = [&](int token) {
      return starts[token] == starts[first] && (!BRANCHES || last_queries[token - 1] >= token);
    };
    for (last = first; last + 1 < end_token && joins(last + 1);) last++;
    const int2 of = stretches_of(starts[first], last, last_queries, tokens, numbers);
    const int seen = of.y - (last - first);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const bool inside = own[half] >= first && own[half] <= last;
      mine.to[half] = inside ? of.y - (last - own[half]) : 0;
      mine.from[half] = inside && WINDOW ? max(mine.to[half] - WINDOW, 0) : 0;
    }
    const int begin = WINDOW ? max(seen - WINDOW, 0) / TILE * TILE : 0;
    Walk<Keys> walk = {{k, v, tokens, numbers, of.x}, shared_address(raw), begin, of.y};
    walk.start();
    walk.run(mine, sharer);
  }
  float* found = (float*)raw;
  publish(found, mine, strip, sharer);
  for (int i = threadIdx.x; i < ROWS * DV; i += THREADS) {
    const int local = i / DV, column = i % DV, here = first_row + local;
    if (here >= ALL) break;
    const int token = here / GROUP, head = kv * GROUP + here % GROUP;
    const Sums sums = sums_of_row(found, local, column, HAS_SINK ? load(sinks + head) * LOG2E : -INF);
    store(o + (size_t)row * O_B + (size_t)token * O_S + (size_t)head * O_H + column, sums.column / sums.all);
    if (column == 0) lse[((size_t)row * HEADS + head) * TOKENS + token] = (sums.largest + log2f(sums.all)) * LN2;
  }
}
