// The next loss scale: half of it after a step whose gradients are not finite, twice after GROWTH_INTERVAL steps in a
// row whose gradients are. A scale that would be infinite stays. One thread: four numbers.
extern "C" __global__ void next_loss_scale(const float* __restrict__ applied, float* __restrict__ scale,
                                           int* __restrict__ count, float* __restrict__ used) {
  const float before = *scale;
  const int fine = *applied != 0.0f ? *count + 1 : 0;
  const bool grows = fine >= GROWTH_INTERVAL;
  const float grown = before * 2.0f;
  *used = before;
  *scale = fine == 0 ? before * 0.5f : grows && isfinite(grown) ? grown : before;
  *count = grows ? 0 : fine;
}
