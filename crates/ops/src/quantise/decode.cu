// The numbers that codes stand for, EACH of them with a scale. A thread has 16 neighbours, which PACKS says lie on boundaries of
// 16 and share a scale, or of a block's 4096 every THREADS-th. Memory-bound.
#include "types.cuh"
#include "codes.cuh"
#include "pack.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
decode(const u8* __restrict__ codes, const float* __restrict__ scale, X_T* __restrict__ x) {
#ifdef PACKS
  const size_t at = ((size_t)blockIdx.x * THREADS + threadIdx.x) * 16;
  if (at >= COUNT) return;
  const auto of = read_pack<16>(codes + at);
  const float times = scale[at / EACH];
  constexpr int VECTOR = 16 / sizeof(X_T);
#pragma unroll
  for (int i = 0; i < 16; i += VECTOR) {
    Pack<X_T, VECTOR> to;
#pragma unroll
    for (int j = 0; j < VECTOR; j++) store(to.at + j, number_of(of.at[i + j]) * times);
    write_pack(x + at + i, to);
  }
#else
  const size_t first = (size_t)blockIdx.x * (16 * THREADS);
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const size_t at = first + i * THREADS + threadIdx.x;
    if (at < COUNT) store(x + at, number_of(codes[at]) * scale[at / EACH]);
  }
#endif
}
