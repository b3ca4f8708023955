// Sums over documents and the way back. documents i32 [COUNT]: the number of each token's document, below 0 for none; the
// tokens of a document are consecutive. Entry p of a sum belongs to the document EVERY·p + AT.

extern "C" __global__ void __launch_bounds__(THREADS)
clear_sums(const float* x, const int* documents, float* __restrict__ sums) {
  const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
  if (i < COUNT) sums[i] = 0.0f;
}

// A warp looks at one token; that of the first token of a document adds up the document.
extern "C" __global__ void __launch_bounds__(THREADS)
document_sum(const float* __restrict__ x, const int* __restrict__ documents, float* __restrict__ sums) {
  const size_t first = ((size_t)blockIdx.x * THREADS + threadIdx.x) / 32;
  const int lane = threadIdx.x & 31;
  if (first >= COUNT) return;
  const int document = documents[first];
  if (document < 0 || document % EVERY != AT || (first > 0 && documents[first - 1] == document)) return;
  float sum = 0.0f;
  for (size_t begin = first; begin < COUNT; begin += 32) {
    const size_t i = begin + lane;
    const bool inside = i < COUNT && documents[i] == document;
    if (inside) sum += x[i];
    if (!__all_sync(0xffffffffu, inside)) break;
  }
  for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (lane == 0 && document / EVERY < COUNT) sums[document / EVERY] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
document_spread(const float* __restrict__ sums, const int* __restrict__ documents, float* __restrict__ x) {
  const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
  if (i >= COUNT) return;
  const int document = documents[i];
  const bool counts = document >= 0 && document % EVERY == AT && document / EVERY < COUNT;
  x[i] = counts ? sums[document / EVERY] : 0.0f;
}
