// A few neighbouring elements as one memory access of up to 16 bytes.
#pragma once

template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack { T at[N]; };

// The caller promises the alignment of Pack<T, N>.
template <int N, typename T> __device__ __forceinline__ Pack<T, N> read_pack(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}

template <int N, typename T> __device__ __forceinline__ void write_pack(T* p, const Pack<T, N>& x) {
  *reinterpret_cast<Pack<T, N>*>(p) = x;
}

// The first `count` of N elements; the rest is zero. One access when all are wanted and ALIGNED_ holds.
template <int N, bool ALIGNED_, typename T> __device__ __forceinline__ Pack<T, N> read_part(const T* p, int count) {
  if (ALIGNED_ && count >= N) return read_pack<N>(p);
  Pack<T, N> x = {};
#pragma unroll
  for (int i = 0; i < N; i++)
    if (i < count) x.at[i] = p[i];
  return x;
}

template <int N, bool ALIGNED_, typename T>
__device__ __forceinline__ void write_part(T* p, const Pack<T, N>& x, int count) {
  if (ALIGNED_ && count >= N) return write_pack<N>(p, x);
#pragma unroll
  for (int i = 0; i < N; i++)
    if (i < count) p[i] = x.at[i];
}
