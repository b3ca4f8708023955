// The table's gradient of a look-up: dw[id] = sum of dy[t] over the tokens t with that id, in the order of the tokens.
// ids i32 [TOKENS]; dy [TOKENS, COLUMNS], row i at DY_AT(i); dw f32 [ROWS, COLUMNS]. No atomics: the same bits on
// every run. Four passes, all but the last over ids alone:
//   embedding_rank: every token is compared with all others: how many with its id come before it, how many there are;
//                   the first of them signs for its id.
//   embedding_starts: where the tokens of an id begin in an order by ids, for the first of each (one block).
//   embedding_order: tokens to their places in that order.
//   embedding_backward: a block for each first token adds the rows of its id.
// rank, total, start, order i32 [TOKENS]; first i32 [ROWS], only of ids that are there. On an H200, 16,384 tokens of
// 1024 columns: 106 µs for nearly as many ids (1.5 TB/s), 138 µs where one id has 513 of them.
#include "types.cuh"
#include "pack.cuh"

#if defined(CLEAR)
extern "C" __global__ void __launch_bounds__(THREADS) embedding_clear(float* __restrict__ dw) {
  for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < CLEAR; i += (size_t)gridDim.x * THREADS) dw[i] = 0.0f;
}
#endif

#if defined(STRANDS)
#define OWN (THREADS / STRANDS)
#define TILE 2048
// A block ranks OWN tokens; STRANDS threads of each token share the tiles.
extern "C" __global__ void __launch_bounds__(THREADS)
embedding_rank(const int* __restrict__ ids, int* __restrict__ rank, int* __restrict__ total, int* __restrict__ first) {
  __shared__ __align__(16) int tile[TILE];
  __shared__ int before[STRANDS][OWN], all[STRANDS][OWN];
  const int own = threadIdx.x % OWN, strand = threadIdx.x / OWN;
  const int begin = blockIdx.x * OWN, token = begin + own;
  const int id = token < TOKENS ? ids[token] : -1;
  int earlier = 0, count = 0;
  for (int start = 0; start < TOKENS; start += TILE) {
    __syncthreads();
    for (int i = threadIdx.x; i < TILE; i += THREADS) tile[i] = start + i < TOKENS ? ids[start + i] : -2;
    __syncthreads();
    const int part = TILE / STRANDS, from = strand * part;
    int same = 0;
#pragma unroll 8
    for (int i = 0; i < part; i += 4) {
      const int4 four = *reinterpret_cast<const int4*>(tile + from + i);
      same += (four.x == id) + (four.y == id) + (four.z == id) + (four.w == id);
    }
    count += same;
    if (start + from + part <= begin) {
      earlier += same;
    } else if (start + from < begin + OWN) {
      for (int i = from; i < from + part; i++) earlier += tile[i] == id && start + i < token;
    }
  }
  before[strand][own] = earlier;
  all[strand][own] = count;
  __syncthreads();
  if (strand || token >= TOKENS) return;
  for (int s = 1; s < STRANDS; s++) {
    earlier += before[s][own];
    count += all[s][own];
  }
  rank[token] = earlier;
  total[token] = count;
  if (earlier == 0 && id >= 0 && id < ROWS) first[id] = token;
}
#endif

#if defined(SCAN)
// A warp has a run of neighbouring tokens: it adds up their counts, then numbers them after those of the warps before.
#define RUN ((TOKENS + 1023) / 1024 * 32)
extern "C" __global__ void __launch_bounds__(1024)
embedding_starts(const int* __restrict__ rank, const int* __restrict__ total, int* __restrict__ start) {
  __shared__ int warps[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int from = warp * RUN + lane, to = min((warp + 1) * RUN, TOKENS);
  int sum = 0;
#pragma unroll 8
  for (int i = from; i < to; i += 32) sum += rank[i] ? 0 : total[i];
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (lane == 0) warps[warp] = sum;
  __syncthreads();
  int at = 0;
  for (int before = 0; before < warp; before++) at += warps[before];
#pragma unroll 4
  for (int i = from; i - lane < to; i += 32) {
    const int own = i < to && rank[i] == 0 ? total[i] : 0;
    int upto = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const int left = __shfl_up_sync(0xffffffffu, upto, offset);
      if (lane >= offset) upto += left;
    }
    if (i < to) start[i] = at + upto - own;
    at += __shfl_sync(0xffffffffu, upto, 31);
  }
}
#endif

#if defined(ORDER)
extern "C" __global__ void __launch_bounds__(THREADS)
embedding_order(const int* __restrict__ ids, const int* __restrict__ rank, const int* __restrict__ start,
                const int* __restrict__ first, int* __restrict__ order) {
  const int token = blockIdx.x * THREADS + threadIdx.x;
  if (token >= TOKENS) return;
  const int id = ids[token];
  if (id >= 0 && id < ROWS) order[start[first[id]] + rank[token]] = token;
}
#endif

#if defined(DY_T)
// Rows that are read before the first is added.
#define AHEAD 8
extern "C" __global__ void __launch_bounds__(THREADS)
embedding_backward(const int* __restrict__ ids, const int* __restrict__ rank, const int* __restrict__ total,
                   const int* __restrict__ start, const int* __restrict__ order, const DY_T* __restrict__ dy,
                   float* __restrict__ dw) {
  const int token = blockIdx.x, id = ids[token];
  if (rank[token] || id == PADDING || id < 0 || id >= ROWS) return;
  const int count = total[token];
  const int* tokens = order + start[token];
  dw += (size_t)id * COLUMNS;
  for (int column = threadIdx.x * WIDTH; column < COLUMNS; column += THREADS * WIDTH) {
    Pack<float, WIDTH> sum = {};
    if (ACCUMULATE) sum = read_pack<WIDTH>(dw + column);
    for (int n = 0; n < count; n += AHEAD) {
      Pack<DY_T, WIDTH> rows[AHEAD];
#pragma unroll
      for (int k = 0; k < AHEAD; k++)
        if (n + k < count) rows[k] = read_pack<WIDTH>(dy + DY_AT(tokens[n + k]) + column);
#pragma unroll
      for (int k = 0; k < AHEAD; k++)
        if (n + k < count)
#pragma unroll
          for (int j = 0; j < WIDTH; j++) sum.at[j] += to_float(rows[k].at[j]);
    }
    write_pack(dw + column, sum);
  }
}
#endif
