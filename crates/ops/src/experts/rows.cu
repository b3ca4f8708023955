// Rows of tokens in the order of their groups, and back. A choice is (token, number below EACH); order i32 [CHOICES] gives
// the choice at a place, places the place of a choice. Row i of a tensor X is at X_AT(i); weights f32 [CHOICES].
//   to_groups: a block copies the row of one place.   from_groups: a block adds the rows of one token, first choice first.
//   group_weight_gradient: a block gives one scalar product, summed in a fixed order.
// An access is VECTOR elements.
#include "types.cuh"
#include "pack.cuh"

#if defined(TO_T)
extern "C" __global__ void __launch_bounds__(THREADS)
to_groups(const TO_T* __restrict__ x, const int* __restrict__ order, const void* __restrict__ weights,
          Y_T* __restrict__ y) {
  const int place = blockIdx.x, choice = order[place];
  const TO_T* row = x + TO_AT(choice / EACH);
  Y_T* out = y + Y_AT(place);
  const float weight = WEIGHTED ? static_cast<const float*>(weights)[choice] : 1.0f;
  for (int i = threadIdx.x * VECTOR; i < COLUMNS; i += THREADS * VECTOR) {
    const auto from = read_pack<VECTOR>(row + i);
    Pack<Y_T, VECTOR> to;
#pragma unroll
    for (int v = 0; v < VECTOR; v++) store(to.at + v, WEIGHTED ? weight * load(from.at + v) : load(from.at + v));
    write_pack<VECTOR>(out + i, to);
  }
}
#endif

#if defined(FROM_T)
extern "C" __global__ void __launch_bounds__(THREADS)
from_groups(const FROM_T* __restrict__ x, const int* __restrict__ places, const void* __restrict__ weights,
            Y_T* __restrict__ y) {
  const int token = blockIdx.x;
  for (int i = threadIdx.x * VECTOR; i < COLUMNS; i += THREADS * VECTOR) {
    float sum[VECTOR] = {};
#pragma unroll 8
    for (int j = 0; j < EACH; j++) {
      const int choice = token * EACH + j;
      const auto from = read_pack<VECTOR>(x + FROM_AT(places[choice]) + i);
      const float weight = WEIGHTED ? static_cast<const float*>(weights)[choice] : 1.0f;
#pragma unroll
      for (int v = 0; v < VECTOR; v++) sum[v] += WEIGHTED ? weight * load(from.at + v) : load(from.at + v);
    }
    Pack<Y_T, VECTOR> to;
#pragma unroll
    for (int v = 0; v < VECTOR; v++) store(to.at + v, sum[v]);
    write_pack<VECTOR>(y + Y_AT(token) + i, to);
  }
}
#endif

#if defined(DOT_T)
extern "C" __global__ void __launch_bounds__(THREADS)
group_weight_gradient(const DOT_T* __restrict__ x, const int* __restrict__ places, const DY_T* __restrict__ dy,
                      float* __restrict__ d) {
  __shared__ float parts[THREADS / 32];
  const int choice = blockIdx.x;
  const DOT_T* row = x + DOT_AT(places[choice]);
  const DY_T* other = dy + DY_AT(choice / EACH);
  float sum = 0.0f;
  for (int i = threadIdx.x * VECTOR; i < COLUMNS; i += THREADS * VECTOR) {
    const auto a = read_pack<VECTOR>(row + i);
    const auto b = read_pack<VECTOR>(other + i);
#pragma unroll
    for (int v = 0; v < VECTOR; v++) sum += load(a.at + v) * load(b.at + v);
  }
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < THREADS / 32; i++) sum += parts[i];
  d[choice] = sum;
}
#endif
