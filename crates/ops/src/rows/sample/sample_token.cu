// A token drawn from every row of logits [rows, COLUMNS], row i at LOGITS_AT(i): ids i32 [rows], and the logarithm of its
// probability among all tokens at the temperature: logps f32 [rows]. A row of sampling f32 [rows, 5]: temperature (0: the
// likeliest), top-k (0: all), top-p, min-p, and the number in [0, 1) whose place in the sum of the weights, in order of ids,
// is the token's.
//
// A block has a row, each of its warps a run of RUN tokens. The bounds of top-k and top-p are the key of the last token in
// falling order, found four bits at a time from sums over the tokens with the same bits before, and the number of tokens
// with that key that are kept, the first of them. All sums have a fixed order.
#include "types.cuh"
#include "pack.cuh"
#include "dependent_launch.cuh"

#define WARPS (THREADS / 32)
#define STEP (32 * WIDTH)
#define RUN ((COLUMNS + WARPS * STEP - 1) / (WARPS * STEP) * STEP)
#define EVERY 0xffffffffu

// A number of BITS bits that orders as the logit does, and the logit of it.
__device__ __forceinline__ u32 key_of(float x) {
  const u32 bits = __float_as_uint(x);
  return (bits & 0x80000000u ? ~bits : bits | 0x80000000u) >> (32 - BITS);
}

__device__ __forceinline__ float logit_of(u32 key) {
  const u32 bits = key << (32 - BITS);
  return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits & (EVERY << (32 - BITS)));
}

__device__ __forceinline__ double warp_total(double x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(EVERY, x, offset);
  return x;
}

// Calls visit(logit, id) for this lane's tokens of its warp's run.
template <typename F> __device__ __forceinline__ void visit_run(const LOGITS_T* logits, F visit) {
  const int first = (threadIdx.x >> 5) * RUN, end = min(first + RUN, COLUMNS);
#pragma unroll 2
  for (int i = first + (threadIdx.x & 31) * WIDTH; i < end; i += STEP) {
    const Pack<LOGITS_T, WIDTH> pack = read_pack<WIDTH>(logits + i);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) visit(to_float(pack.at[j]), i + j);
  }
}

struct Row {
  const LOGITS_T* logits;
  float top, scale;

  __device__ __forceinline__ float weight(float x) const { return expf((x - top) * scale); }
};

// A token in falling order of keys: its key, and the sum over all tokens with a larger one.
struct Place {
  u32 key;
  double above;
};

// The first place at which the sum of the tokens' weights, or of their number, reaches `wanted`. Keys below `least` do not
// count.
template <bool WEIGHTS>
__device__ Place reach(const Row& row, double wanted, u32 least, float* cells, double* totals) {
  Place place = {0, 0.0};
  for (int shift = BITS - 4; shift >= 0; shift -= 4) {
#pragma unroll
    for (int digit = 0; digit < 16; digit++) cells[digit * THREADS + threadIdx.x] = 0.0f;
    visit_run(row.logits, [&](float x, int) {
      const u32 key = key_of(x);
      if (key >= least && (key ^ place.key) >> shift < 16)
        cells[(key >> shift & 15) * THREADS + threadIdx.x] += WEIGHTS ? row.weight(x) : 1.0f;
    });
    __syncthreads();
    for (int digit = threadIdx.x >> 5; digit < 16; digit += WARPS) {
      double sum = 0.0;
      for (int i = threadIdx.x & 31; i < THREADS; i += 32) sum += cells[digit * THREADS + i];
      sum = warp_total(sum);
      if ((threadIdx.x & 31) == 0) totals[digit] = sum;
    }
    __syncthreads();
    // Where rounding leaves the sum below, the last digit that has tokens.
    double sum = place.above;
    u32 found = 0;
    for (int digit = 15; digit >= 0; digit--) {
      if (!(totals[digit] > 0.0)) continue;
      found = digit;
      place.above = sum;
      sum += totals[digit];
      if (sum >= wanted) break;
    }
    place.key |= found << shift;
    __syncthreads();
  }
  return place;
}

// The sum of the weights of tokens with a larger key than `key` over the warps' runs, and the number of those with the same.
__device__ __forceinline__ void sum_runs(const Row& row, u32 key, float least, double* sums, u32* ties) {
  float sum = 0.0f;
  u32 count = 0;
  visit_run(row.logits, [&](float x, int) {
    const u32 own = key_of(x);
    const float weight = row.weight(x);
    if (own > key && !(weight < least)) sum += weight;
    count += own == key;
  });
  const double total = warp_total(sum);
  count = __reduce_add_sync(EVERY, count);
  if ((threadIdx.x & 31) == 0) {
    sums[threadIdx.x >> 5] = total;
    ties[threadIdx.x >> 5] = count;
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
sample_token(const LOGITS_T* logits, const float* sampling, int* ids, float* logps) {
  __shared__ float cells[16 * THREADS];
  __shared__ double totals[16], sums[WARPS];
  __shared__ float tops[WARPS];
  __shared__ int firsts[WARPS];
  __shared__ u32 ties[WARPS];
  grid_dependency_synchronize();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  sampling += (size_t)blockIdx.x * 5;
  const float temperature = sampling[0], top_p = sampling[2], min_p = sampling[3], number = sampling[4];
  const u32 top_k = (u32)sampling[1];
  Row row = {logits + LOGITS_AT(blockIdx.x), 0.0f, temperature > 0.0f ? 1.0f / temperature : 1.0f};

  float best = -__int_as_float(0x7f800000);
  int first = COLUMNS;
  visit_run(row.logits, [&](float x, int id) {
    if (x > best) best = x, first = id;
  });
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) {
    const float other = __shfl_xor_sync(EVERY, best, offset);
    const int there = __shfl_xor_sync(EVERY, first, offset);
    if (other > best || (other == best && there < first)) best = other, first = there;
  }
  if (lane == 0) tops[warp] = best, firsts[warp] = first;
  __syncthreads();
  best = tops[0], first = firsts[0];
#pragma unroll
  for (int w = 1; w < WARPS; w++)
    if (tops[w] > best) best = tops[w], first = firsts[w];
  row.top = best;
  first = first < COLUMNS ? first : 0;

  // The keys of numbers are above 0: all of them count.
  sum_runs(row, 0, 0.0f, sums, ties);
  double total = 0.0;
  for (int w = 0; w < WARPS; w++) total += sums[w];
  const float log_total = (float)log(total);
  if (temperature == 0.0f) {
    if (threadIdx.x == 0) ids[blockIdx.x] = first, logps[blockIdx.x] = -log_total;
    return;
  }

  u32 key = 0, kept = 0;
  float tie = 0.0f;
  if ((top_k > 0 && top_k < COLUMNS) || top_p < 1.0f || min_p > 0.0f) {
    double all = total;
    if (top_k > 0 && top_k < COLUMNS) {
      const Place last = reach<false>(row, top_k, 0, cells, totals);
      key = last.key;
      kept = top_k - (u32)last.above;
      tie = row.weight(logit_of(key));
      if (top_p < 1.0f) {
        sum_runs(row, key, 0.0f, sums, ties);
        all = (double)kept * tie;
        for (int w = 0; w < WARPS; w++) all += sums[w];
        __syncthreads();
      }
    }
    if (top_p < 1.0f) {
      const double wanted = (double)top_p * all;
      const Place last = reach<true>(row, wanted, key, cells, totals);
      tie = row.weight(logit_of(last.key));
      const double needed = fmax(1.0, ceil((wanted - last.above) / tie));
      kept = last.key > key ? (u32)fmin(needed, (double)COLUMNS) : (u32)fmin(needed, (double)kept);
      key = last.key;
    }
    sum_runs(row, key, min_p, sums, ties);
    if (!(tie >= min_p)) kept = 0;
  } else {
    if (lane == 0) ties[warp] = 0;
    __syncthreads();
  }

  // The run in whose stretch of the sum the number lies; what rounding leaves over belongs to the last that has a weight.
  double sum = 0.0;
  u32 seen = 0;
  for (int w = 0; w < WARPS; w++) {
    sum += sums[w] + (double)min(ties[w], kept - min(seen, kept)) * tie;
    seen += ties[w];
  }
  double rest = number * sum, left = 0.0;
  int chosen = -1;
  u32 before = 0;
  seen = 0;
  for (int w = 0; w < WARPS; w++) {
    const double own = sums[w] + (double)min(ties[w], kept - min(seen, kept)) * tie;
    if (own > 0.0) {
      chosen = w, before = seen, left = rest;
      if (rest < own) break;
    }
    rest -= own;
    seen += ties[w];
  }
  if (chosen < 0) {
    if (threadIdx.x == 0) ids[blockIdx.x] = first, logps[blockIdx.x] = -log_total;
    return;
  }
  if (warp != chosen) return;

  int last = -1, found = -1;
  const int end = min((warp + 1) * RUN, COLUMNS);
  for (int begin = warp * RUN; begin < end && found < 0; begin += STEP) {
    const int i = begin + lane * WIDTH;
    float weights[WIDTH];
    u32 equal = 0;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) weights[j] = 0.0f;
    if (i < end) {
      const Pack<LOGITS_T, WIDTH> pack = read_pack<WIDTH>(row.logits + i);
#pragma unroll
      for (int j = 0; j < WIDTH; j++) {
        const float x = to_float(pack.at[j]);
        const u32 own = key_of(x);
        const float weight = row.weight(x);
        // −1 marks a token with the last key until it is known whether it is kept.
        if (own > key && !(weight < min_p)) weights[j] = weight;
        if (own == key && kept > 0) weights[j] = -1.0f, equal++;
      }
    }
    u32 place = equal;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const u32 other = __shfl_up_sync(EVERY, place, offset);
      if (lane >= offset) place += other;
    }
    u32 rank = before + place - equal;
    before += __shfl_sync(EVERY, place, 31);
    double own = 0.0;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      if (weights[j] < 0.0f) weights[j] = rank++ < kept ? tie : 0.0f;
      own += weights[j];
      if (weights[j] > 0.0f) last = i + j;
    }
    double until = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const double other = __shfl_up_sync(EVERY, until, offset);
      if (lane >= offset) until += other;
    }
    const u32 beyond = __ballot_sync(EVERY, left < until);
    if (beyond) {
      const int owner = __ffs(beyond) - 1;
      if (lane == owner) {
        double here = left - (until - own);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
          if (weights[j] > 0.0f && (found < 0 || here >= 0.0)) found = i + j, here -= weights[j];
        }
      }
      found = __shfl_sync(EVERY, found, owner);
    }
    left -= __shfl_sync(EVERY, until, 31);
  }
  if (found < 0) found = __reduce_max_sync(EVERY, last);
  if (lane == 0) {
    ids[blockIdx.x] = found;
    logps[blockIdx.x] = (to_float(row.logits[found]) - row.top) * row.scale - log_total;
  }
}
