// The factor of a product of numbers, from a factor for each of them: f32(f32(SCALE * a) * b); and after it the factor of
// the present result. Read by the library's product that follows on the stream.
extern "C" __global__ void factor(float* __restrict__ both, const float* __restrict__ a, const float* __restrict__ b) {
  both[0] = __fmul_rn(__fmul_rn(SCALE, *a), *b);
  both[1] = BETA;
}
