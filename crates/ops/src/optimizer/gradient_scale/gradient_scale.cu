// From Σ g² and Σ weights: W = Σ weights, times the loss scale where there is one; norm = sqrt(PARTS·Σ g²)/W, scale =
// min(1, MAX_NORM/(norm + 1e-6))/W; scale and applied are 0 when the norm is not finite. One thread: five numbers.
extern "C" __global__ void gradient_scale(const float* __restrict__ sum_squares, const float* __restrict__ weight_sum,
#if SCALED_LOSS
                                          const float* __restrict__ loss_scale,
#endif
                                          float* __restrict__ norm, float* __restrict__ scale,
                                          float* __restrict__ applied) {
#if SCALED_LOSS
  const float weight = *weight_sum * *loss_scale;
#else
  const float weight = *weight_sum;
#endif
  const float n = sqrtf(*sum_squares * PARTS) / weight;
  const bool fine = isfinite(n);
  const float coefficient = MAX_NORM > 0.0f ? fminf(1.0f, MAX_NORM / (n + 1e-6f)) : 1.0f;
  *norm = n;
  *scale = fine ? coefficient / weight : 0.0f;
  *applied = fine ? 1.0f : 0.0f;
}
