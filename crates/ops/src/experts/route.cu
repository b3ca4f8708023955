// The experts of each token: s = softmax or sigmoid of logits [TOKENS, EXPERTS] in f32, the TOP_K with the largest
// s + bias (of equal ones the first), from the KEPT of GROUPS whose COUNTED (1 or 2) largest s + bias have the largest
// sums. weights f32 [TOKENS, TOP_K] = s / (NORMALISE ? sum + EPSILON : 1) * FACTOR; index i32. A warp for each token;
// lane l holds experts l, l + 32, ... Row i of the logits is at LOGITS_AT(i).
#include "types.cuh"

#define ALL 0xffffffffu
#define LEAST __int_as_float(0xff800000)  // minus infinity
#define OWN ((EXPERTS + 31) / 32)
#define WARPS (THREADS / 32)

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(ALL, x, offset);
  return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL, x, offset));
  return x;
}

#if defined(LOGITS_T)
// Scores of a token's experts; 0 beyond the last.
__device__ inline void scores(const LOGITS_T* row, int lane, float* s) {
  float most = LEAST;
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    const int e = lane + 32 * n;
    s[n] = e < EXPERTS ? load(row + e) : LEAST;
    most = fmaxf(most, s[n]);
  }
  if (SIGMOID) {
#pragma unroll
    for (int n = 0; n < OWN; n++) s[n] = 1.0f / (1.0f + expf(-s[n]));
    return;
  }
  most = warp_max(most);
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    s[n] = expf(s[n] - most);
    sum += s[n];
  }
  sum = warp_sum(sum);
#pragma unroll
  for (int n = 0; n < OWN; n++) s[n] /= sum;
}
#endif

#if defined(BIASED)
// The expert with the largest value, of equal ones the first; values of LEAST are not open.
__device__ inline int best_of(const float* values, int lane) {
  float most = LEAST;
  int at = EXPERTS;
#pragma unroll
  for (int n = 0; n < OWN; n++)
    if (values[n] > most) most = values[n], at = lane + 32 * n;
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) {
    const float other = __shfl_xor_sync(ALL, most, offset);
    const int there = __shfl_xor_sync(ALL, at, offset);
    if (other > most || (other == most && there < at)) most = other, at = there;
  }
  return at;
}

extern "C" __global__ void __launch_bounds__(THREADS)
route(const LOGITS_T* __restrict__ logits, const BIAS_T* __restrict__ bias, float* __restrict__ weights,
      int* __restrict__ index) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int token = blockIdx.x * WARPS + warp;
  if (token >= TOKENS) return;
  float s[OWN], choice[OWN];
  scores(logits + LOGITS_AT(token), lane, s);
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    const int e = lane + 32 * n;
    choice[n] = e < EXPERTS ? (BIASED ? s[n] + load(bias + e) : s[n]) : LEAST;
  }
#if KEPT < GROUPS
  __shared__ float all[WARPS][EXPERTS];
  __shared__ float sums[WARPS][GROUPS];
#pragma unroll
  for (int n = 0; n < OWN; n++)
    if (lane + 32 * n < EXPERTS) all[warp][lane + 32 * n] = choice[n];
  __syncwarp();
  for (int g = lane; g < GROUPS; g += 32) {
    float first = LEAST, second = LEAST;
    for (int i = 0; i < EXPERTS / GROUPS; i++) {
      const float x = all[warp][g * (EXPERTS / GROUPS) + i];
      if (x > first) second = first, first = x;
      else if (x > second) second = x;
    }
    sums[warp][g] = COUNTED == 1 ? first : first + second;
  }
  __syncwarp();
  for (int n = 0; n < OWN; n++) {
    const int e = lane + 32 * n, g = e / (EXPERTS / GROUPS);
    if (e >= EXPERTS) continue;
    int better = 0;
    for (int other = 0; other < GROUPS; other++)
      better += sums[warp][other] > sums[warp][g] || (sums[warp][other] == sums[warp][g] && other < g);
    if (better >= KEPT) choice[n] = LEAST;
  }
#endif
  int taken[TOP_K];
  float own[TOP_K], sum = 0.0f;
  for (int k = 0; k < TOP_K; k++) {
    const int e = best_of(choice, lane);
    float value = 0.0f;
#pragma unroll
    for (int n = 0; n < OWN; n++)
      if (lane + 32 * n == e) value = s[n], choice[n] = LEAST;
    taken[k] = e;
    own[k] = __shfl_sync(ALL, value, e % 32);
    sum += own[k];
  }
  if (lane) return;
  const float scale = FACTOR / (NORMALISE ? sum + EPSILON : 1.0f);
  for (int k = 0; k < TOP_K; k++) {
    weights[(size_t)token * TOP_K + k] = own[k] * scale;
    index[(size_t)token * TOP_K + k] = taken[k];
  }
}
#endif

#if defined(D_T)
extern "C" __global__ void __launch_bounds__(THREADS)
route_backward(const LOGITS_T* __restrict__ logits, const int* __restrict__ index, const float* __restrict__ dw,
               D_T* __restrict__ d) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int token = blockIdx.x * WARPS + warp;
  if (token >= TOKENS) return;
  float s[OWN], own[OWN];
  scores(logits + LOGITS_AT(token), lane, s);
  index += (size_t)token * TOP_K;
  dw += (size_t)token * TOP_K;
  float sum = 0.0f, along = 0.0f;
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    own[n] = 0.0f;
    const int e = lane + 32 * n;
    for (int k = 0; k < TOP_K; k++)
      if (index[k] == e) own[n] = dw[k], sum += s[n], along += dw[k] * s[n];
  }
  sum = warp_sum(sum) + EPSILON;
  along = warp_sum(along);
  const float scale = NORMALISE ? FACTOR / sum : FACTOR;
  along = NORMALISE ? along / sum : 0.0f;
  float all = 0.0f;
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    const int e = lane + 32 * n;
    bool chosen = false;
    for (int k = 0; k < TOP_K; k++) chosen |= index[k] == e;
    own[n] = chosen ? (own[n] - along) * scale : 0.0f;
    all += own[n] * s[n];
  }
  all = warp_sum(all);
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    const int e = lane + 32 * n;
    if (e < EXPERTS) store(d + D_AT(token) + e, SIGMOID ? own[n] * s[n] * (1.0f - s[n]) : s[n] * (own[n] - all));
  }
}
#endif

#if defined(PARTS)
// parts[block] = f32 [3, EXPERTS]: over TOKENS_PER_BLOCK tokens, those without that are not present, the choices of each
// expert, and the sums of its probabilities p and of -p ln p.
extern "C" __global__ void __launch_bounds__(THREADS)
expert_load_parts(const LOGITS_T* __restrict__ logits, const int* __restrict__ index, const void* __restrict__ present,
                  float* __restrict__ parts) {
  __shared__ float sums[WARPS][EXPERTS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float s[OWN], choices[OWN] = {}, probabilities[OWN] = {}, entropies[OWN] = {};
  const int first = blockIdx.x * TOKENS_PER_BLOCK, end = min(first + TOKENS_PER_BLOCK, TOKENS);
  for (int token = first + warp; token < end; token += WARPS) {
    if (MASKED && static_cast<const float*>(present)[token] == 0.0f) continue;
    scores(logits + LOGITS_AT(token), lane, s);
    float all = 0.0f;
#pragma unroll
    for (int n = 0; n < OWN; n++) all += lane + 32 * n < EXPERTS ? s[n] : 0.0f;
    all = SIGMOID ? warp_sum(all) : 1.0f;
#pragma unroll
    for (int n = 0; n < OWN; n++) {
      const float p = lane + 32 * n < EXPERTS ? s[n] / all : 0.0f;
      probabilities[n] += p;
      entropies[n] -= p > 0.0f ? p * logf(p) : 0.0f;
      for (int k = 0; k < TOP_K; k++) choices[n] += index[(size_t)token * TOP_K + k] == lane + 32 * n;
    }
  }
  for (int row = 0; row < 3; row++) {
#pragma unroll
    for (int n = 0; n < OWN; n++)
      if (lane + 32 * n < EXPERTS) sums[warp][lane + 32 * n] = row == 0 ? choices[n] : row == 1 ? probabilities[n] : entropies[n];
    __syncthreads();
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
      float sum = 0.0f;
      for (int w = 0; w < WARPS; w++) sum += sums[w][e];
      parts[((size_t)blockIdx.x * 3 + row) * EXPERTS + e] = sum;
    }
    __syncthreads();
  }
}
#endif

#if defined(TOTAL)
// load f32 [3, EXPERTS] = the sum of the BLOCKS parts, first to last.
extern "C" __global__ void __launch_bounds__(THREADS)
expert_load_total(const float* __restrict__ parts, float* __restrict__ load) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= 3 * EXPERTS) return;
  float sum = 0.0f;
  for (int block = 0; block < BLOCKS; block++) sum += parts[(size_t)block * 3 * EXPERTS + i];
  load[i] = sum;
}
#endif

#if defined(DLOGITS_T)
// dlogits = s (c - sum of s c) with c = d[1] - (1 + ln s) d[2]: the gradient of the sums of probabilities and of -s ln s,
// d f32 [3, EXPERTS]; 0 for tokens that are not present. A warp for each token.
extern "C" __global__ void __launch_bounds__(THREADS)
expert_load_backward(const LOGITS_T* __restrict__ logits, const float* __restrict__ d, const void* __restrict__ present,
                     DLOGITS_T* __restrict__ out) {
  const int lane = threadIdx.x % 32, token = blockIdx.x * WARPS + threadIdx.x / 32;
  if (token >= TOKENS) return;
  float s[OWN], c[OWN], along = 0.0f;
  scores(logits + LOGITS_AT(token), lane, s);
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    const int e = lane + 32 * n;
    c[n] = 0.0f;
    if (e < EXPERTS) c[n] = d[EXPERTS + e] - (s[n] > 0.0f ? (1.0f + logf(s[n])) * d[2 * EXPERTS + e] : 0.0f);
    if (e < EXPERTS) along += s[n] * c[n];
  }
  along = warp_sum(along);
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    const int e = lane + 32 * n;
    const bool counts = !MASKED || static_cast<const float*>(present)[token] != 0.0f;
    if (e < EXPERTS) store(out + DLOGITS_AT(token) + e, counts ? s[n] * (c[n] - along) : 0.0f);
  }
}
#endif
