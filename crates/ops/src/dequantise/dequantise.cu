// y = the values of a packed tensor: a code's value times its block's scale, and for E4M3 scales times the tensor's where
// WHOLE, each product rounded to f32, then to the type of y. Planes of `packed` in bytes from its start: CODES_AT,
// SCALES_AT, OUTER_AT, TENSOR_AT; y is dense, COUNT elements. Tensors lie one after another, MEMBER_BYTES and
// COUNT apart: each is a row of the grid.
// BLOCK_OF(i) is the block of element i; BLOCK_WHOLE: WIDTH neighbours share one. BITS 4 or 8, CODE 0 NF4, 1 E2M1,
// 2 E4M3, 3 E5M2; SCALES 0 f32, 1 powers of two, 2 E4M3, 3 a code book's values times OUTER_BLOCK-wise f32, plus an f32.
// A thread takes ROUNDS packs of WIDTH neighbours, THREADS packs apart, and reads all their codes first. The sixteen
// values of four bits lie in sixteen banks of shared memory: lanes that look up different ones do not wait.
#include "types.cuh"
#include "pack.cuh"

typedef unsigned char u8;

// The value of an E4M3 code: exponent and mantissa in their places of an f32, whose bias is 120 more; exact.
__device__ __forceinline__ float e4m3(u32 code) {
  const float magnitude = __uint_as_float((code & 0x7f) << 20) * __uint_as_float((127 + 120) << 23);
  const u32 bits = (code & 0x7f) == 0x7f ? 0x7fc00000u : __float_as_uint(magnitude);
  return __uint_as_float(bits | (code & 0x80) << 24);
}

// The same of E5M2, which is the upper half of an f16.
__device__ __forceinline__ float e5m2(u32 code) { return to_float(f16{(u16)(code << 8)}); }

#if CODE == 0
__device__ const float VALUES[16] = {-1.0f, -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f,
    -0.091050036f, 0.0f, 0.0795803f, 0.1609302f, 0.2461123f, 0.33791524f, 0.44070983f, 0.562617f, 0.72295684f, 1.0f};
#elif CODE == 1
__device__ const float VALUES[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
dequantise(const u8* __restrict__ packed, Y_T* __restrict__ y) {
  packed += blockIdx.y * MEMBER_BYTES;
  y += blockIdx.y * COUNT;
#if BITS == 4
  __shared__ float values[16];
  if (threadIdx.x < 16) values[threadIdx.x] = VALUES[threadIdx.x];
#endif
#if SCALES == 3 || SCALES == 2 && WHOLE
  const float* of_tensor = reinterpret_cast<const float*>(packed + TENSOR_AT);
#endif
#if SCALES == 3
  __shared__ float book[256];
  for (int i = threadIdx.x; i < 256; i += THREADS) book[i] = of_tensor[1 + i];
#endif
#if BITS == 4 || SCALES == 3
  __syncthreads();
#endif
  auto scale_of = [&](u64 block) -> float {
#if SCALES == 0
    return reinterpret_cast<const float*>(packed + SCALES_AT)[block];
#elif SCALES == 1
    const u32 code = packed[SCALES_AT + block];
    return __uint_as_float(code == 0xff ? 0x7fc00000u : code == 0 ? 0x00400000u : code << 23);
#elif SCALES == 2
    return e4m3(packed[SCALES_AT + block]);
#else
    const float outer = reinterpret_cast<const float*>(packed + OUTER_AT)[block / OUTER_BLOCK];
    return __fadd_rn(__fmul_rn(book[packed[SCALES_AT + block]], outer), of_tensor[0]);
#endif
  };
#if SCALES == 2 && WHOLE
  const float last = of_tensor[0];
#endif

  constexpr int BYTES = WIDTH * BITS / 8;
  const u64 first = ((u64)blockIdx.x * THREADS * ROUNDS + threadIdx.x) * WIDTH;
  Pack<u8, BYTES> codes[ROUNDS];
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    const u64 index = first + (u64)round * THREADS * WIDTH;
    // After the last code its plane goes on to a multiple of 256 bytes, where another plane follows.
    if (index < COUNT) codes[round] = read_pack<BYTES>(packed + CODES_AT + index * BITS / 8);
  }
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    const u64 index = first + (u64)round * THREADS * WIDTH;
    if (index >= COUNT) return;
#if BLOCK_WHOLE
    const float scale = scale_of(BLOCK_OF(index));
#endif
    Pack<Y_T, WIDTH> to = {};
#pragma unroll
    for (int lane = 0; lane < WIDTH; lane++) {
#if !BLOCK_WHOLE
      if (index + lane >= COUNT) break;
      const float scale = scale_of(BLOCK_OF(index + lane));
#endif
#if BITS == 4
      const u32 pair = codes[round].at[lane / 2];
      const float value = values[(lane % 2 == 0) == (CODE == 0) ? pair >> 4 : pair & 15];
#elif CODE == 2
      const float value = e4m3(codes[round].at[lane]);
#else
      const float value = e5m2(codes[round].at[lane]);
#endif
      float scaled = __fmul_rn(value, scale);
#if SCALES == 2 && WHOLE
      scaled = __fmul_rn(scaled, last);
#endif
      to.at[lane] = from_float<Y_T>(scaled);
    }
    write_part<WIDTH, true>(y + index, to, (int)(COUNT - index < WIDTH ? COUNT - index : WIDTH));
  }
}
