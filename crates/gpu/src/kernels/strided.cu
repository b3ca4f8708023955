// Copies between layouts or types, and zeroing with gaps: y[i] = x[i] for every index i of up to
// six axes. One thread per element, axes innermost last, so neighbours read and write neighbours
// where the layouts allow it. Dense copies and fills of one type never come here; dense ones that change the
// type go through dense_copy, since six divisions an element take longer than its bytes (0.46 TB/s on an H200).
// FROM and TO are storage types; where they differ both are floats of number.cuh. Copies of one type whose runs are
// aligned are in words of 16 bytes.

#include "number.cuh"

struct Layout {
  long long count;
  long long extent[6];
  long long from[6];
  long long to[6];
};

template <class A> __device__ __forceinline__ void convert(A x, A& y) { y = x; }
template <class A, class B> __device__ __forceinline__ void convert(A x, B& y) { from_f32(to_f32(x), y); }

extern "C" __global__ void strided_copy(TO* to, const FROM* from, Layout l) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= l.count) return;
  long long source = 0, target = 0;
#pragma unroll
  for (int axis = 5; axis >= 0; --axis) {
    long long at = i % l.extent[axis];
    i /= l.extent[axis];
    source += at * l.from[axis];
    target += at * l.to[axis];
  }
  convert(from[source], to[target]);
}

// Neighbouring elements of one thread.
#define RUN 8
template <class T> struct alignas(sizeof(T) * RUN < 16 ? sizeof(T) * RUN : 16) Run { T at[RUN]; };

extern "C" __global__ void dense_copy(TO* to, const FROM* from, long long count) {
  const long long first = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * RUN;
  if (first + RUN <= count && ((unsigned long long)to | (unsigned long long)from) % 16 == 0) {
    const Run<FROM> x = *reinterpret_cast<const Run<FROM>*>(from + first);
    Run<TO> y;
#pragma unroll
    for (int i = 0; i < RUN; i++) convert(x.at[i], y.at[i]);
    *reinterpret_cast<Run<TO>*>(to + first) = y;
  } else {
    for (long long i = first; i < count && i < first + RUN; i++) convert(from[i], to[i]);
  }
}

extern "C" __global__ void strided_zero(TO* to, Layout l) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= l.count) return;
  long long target = 0;
#pragma unroll
  for (int axis = 5; axis >= 0; --axis) {
    target += i % l.extent[axis] * l.to[axis];
    i /= l.extent[axis];
  }
  to[target] = TO{};
}
