// From the document start of every token to what ragged attention reads.
//
//   in   start  i32 [ROWS, LENGTH]   where in its row the document of a token starts
//   out  lengths i32 [SLOTS]         tokens of each document, 0 for empty slots
//        offset i64 [SLOTS + 1]      first token of each document × unit, for each of up to 12 units
//
// One block: documents are counted by a scan over all tokens in order, so slot numbers follow the
// order of the tokens and never thread timing. More documents than slots, or a longer one than
// LONGEST, is a broken promise of the batch: the launch traps instead of dropping tokens.

#define THREADS 1024
#define TOKENS (ROWS * (long long)LENGTH)

struct Outputs {
  long long* offset[12];
  long long unit[12];
  int* lengths;
  int* first;  // scratch, i32 [SLOTS + 1]
};

extern "C" __global__ void documents(const int* start, Outputs out) {
  __shared__ int warp_sum[32];
  __shared__ int found;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  for (long long base = 0; base < TOKENS; base += THREADS) {
    long long token = base + threadIdx.x;
    int begins = token < TOKENS && start[token] == (int)(token % LENGTH);
    unsigned ballot = __ballot_sync(~0u, begins);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) warp_sum[warp] = __popc(ballot);
    __syncthreads();
    int slot = found + __popc(ballot & ((1u << lane) - 1));
    for (int w = 0; w < warp; ++w) slot += warp_sum[w];
    if (begins) {
      if (slot >= SLOTS) __trap();
      out.first[slot] = (int)token;
    }
    __syncthreads();
    if (threadIdx.x == 0)
      for (int w = 0; w < THREADS / 32; ++w) found += warp_sum[w];
    __syncthreads();
  }
  for (int slot = found + threadIdx.x; slot <= SLOTS; slot += THREADS) out.first[slot] = (int)TOKENS;
  __syncthreads();
  for (int slot = threadIdx.x; slot <= SLOTS; slot += THREADS) {
    long long first = out.first[slot];
    for (int u = 0; u < UNITS; ++u) out.offset[u][slot] = first * out.unit[u];
    if (slot == SLOTS) continue;
    int length = (int)(out.first[slot + 1] - first);
    if (length > LONGEST) __trap();
    out.lengths[slot] = length;
  }
}
