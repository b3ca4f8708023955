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
