// Table look-up y[t] = w[ids[t]] and the table's gradient dw[id] = sum of dy[t] over the tokens with that id.
// ids i32 [TOKENS]; w [ROWS, COLUMNS]; y, dy [TOKENS, COLUMNS], row i at Y_AT(i), DY_AT(i); dw f32 [ROWS, COLUMNS].
// Forward: one block per token. Gradient: `embedding_chains` links each token to the next one with the same
// id (one thread per token, ids read tile by tile), then one block per first token walks its chain and adds
// the rows in the order of the tokens: no atomics, the same bits on every run.
#include "types.cuh"

#if defined(Y_T)
extern "C" __global__ void __launch_bounds__(THREADS)
embedding(const int* __restrict__ ids, const W_T* __restrict__ w, Y_T* __restrict__ y) {
  const size_t token = blockIdx.x;
  const int id = ids[token];
  const bool known = id >= 0 && id < ROWS;
  const W_T* row = w + (known ? W_AT(id) : 0);
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS)
    store(y + Y_AT(token) + i, known ? load(row + i) : __int_as_float(0x7fc00000));
}
#endif

#if defined(CLEAR)
extern "C" __global__ void __launch_bounds__(THREADS) embedding_clear(float* __restrict__ dw) {
  for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < CLEAR; i += (size_t)gridDim.x * THREADS) dw[i] = 0.0f;
}
#endif

#if defined(PADDING)
// next[t]: the next token with the same id, -1 for none; head[t]: 1 where t is the first with its id.
extern "C" __global__ void __launch_bounds__(THREADS)
embedding_chains(const int* __restrict__ ids, int* __restrict__ next, int* __restrict__ head) {
  __shared__ int tile[THREADS];
  const int token = blockIdx.x * THREADS + threadIdx.x;
  const int id = token < TOKENS ? ids[token] : -1;
  int following = -1;
  bool first = token < TOKENS && id != PADDING;
  for (int start = 0; start < TOKENS; start += THREADS) {
    __syncthreads();
    tile[threadIdx.x] = start + threadIdx.x < TOKENS ? ids[start + threadIdx.x] : -2;
    __syncthreads();
    for (int i = 0; i < THREADS; i++) {
      const bool same = tile[i] == id;
      first = first && !(same && start + i < token);
      if (same && start + i > token && following < 0) following = start + i;
    }
  }
  if (token < TOKENS) {
    next[token] = following;
    head[token] = first;
  }
}
#endif

#if defined(DY_T)
extern "C" __global__ void __launch_bounds__(THREADS)
embedding_backward(const int* __restrict__ ids, const int* __restrict__ next, const int* __restrict__ head,
                   const DY_T* __restrict__ dy, float* __restrict__ dw) {
  const int token = blockIdx.x;
  const int id = ids[token];
  if (!head[token] || id < 0 || id >= ROWS) return;
  dw += (size_t)id * COLUMNS;
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
    float sum = ACCUMULATE ? dw[i] : 0.0f;
    for (int t = token; t >= 0; t = next[t]) sum += load(dy + DY_AT(t) + i);
    dw[i] = sum;
  }
}
#endif
