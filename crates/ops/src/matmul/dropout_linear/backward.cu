// Back through `forward.cu`, from one reading of x and one making of its mask: da f32 [RANK, COLUMNS] (+)=
// SCALE·dtᵀ·(x where kept), and with INPUT dx = base + SCALE·(dt·a where kept). bf16 products summed in f32.
// dt [ROWS, RANK], x, base, dx [ROWS, COLUMNS], row i at DT_AT(i) …; a [RANK, COLUMNS], dense.
// A block takes CHUNK rows of WIDTH columns, 16 rows of 8·EACH columns a warp and step. Both products are transposed: a
// lane holds EACH neighbouring columns of the rows 2q, 2q + 1, 2q + 8, 2q + 9 (q = lane % 4) of x, base and dx alike.
// What a warp will need waits in its own part of shared memory, STAGES steps at a time.
// It comes through the first cache: 4096 rows of 3072 columns at rank 16 take 31.9 us on an H200, past it 45.2.
// A block leaves its part of da in `parts` f32 [chunks, RANK, COLUMNS]; `dropout_linear_sum` adds them in order.
#include "mma.cuh"
#include "mask.cuh"

#define SIDES (WIDTH / 8 / EACH)
#define HIGH (WARPS / SIDES)
#define STEPS ((RANK + 15) / 16)
#define WORDS (EACH / 2)
#define RANKS (RANK / 8)
// Every 16 rows are there.
#define WHOLE (ROWS % 16 == 0)
// 16-byte places of a row of dt: zeros fill the last product, one more keeps rows in different banks.
#define PLACES (STEPS * 2 + 1)
// Of a stage: 4 rows a lane of x and of base, then dt.
#define RUN (EACH * 2)
#define ROW_BYTES (32 * RUN)
#define DT_FROM ((4 + INPUT * 4) * ROW_BYTES)
#define STAGE (DT_FROM + 16 * PLACES * 16)

// EACH neighbouring elements.
struct alignas(RUN) Run { u32 pair[WORDS]; };

__device__ __forceinline__ float masked(float x, u32 mask) { return __uint_as_float(__float_as_uint(x) & mask); }

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
dropout_linear_backward(const bf16* __restrict__ dt, const bf16* __restrict__ x, const int* __restrict__ micro_step,
#if INPUT
                        const bf16* __restrict__ a, const bf16* __restrict__ base,
#endif
#if INPUT
                        bf16* __restrict__ dx,
#endif
                        float* __restrict__ parts, u32 stream) {
  // The stages, then the factors of a lane. After the loop the stages' memory holds the warps' sums of 16 rows of da.
  extern __shared__ __align__(16) unsigned char shared[];
  uint4* const factors = reinterpret_cast<uint4*>(shared + WARPS * STAGES * STAGE);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int side = warp % SIDES, column = blockIdx.x * WIDTH + side * 8 * EACH + group * EACH;
  const int start = blockIdx.y * CHUNK + warp / SIDES * 16, stop = min((int)(blockIdx.y + 1) * CHUNK, ROWS);
  const u32 step = (u32)*micro_step;
  unsigned char* const own = shared + warp * STAGES * STAGE;
  const u32 ring = shared_address(own);
  const auto row_of = [&](int r) { return quad * 2 + r % 2 + r / 2 * 8; };

  const auto fetch = [&](int n) {
    const int row0 = start + n * HIGH * 16;
    const u32 to = ring + n % STAGES * STAGE;
    if (row0 < stop) {
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const int row = row0 + row_of(r);
        const bool inside = WHOLE || row < stop;
        copy_few_async<RUN>(to + r * ROW_BYTES + lane * RUN, x + X_AT(row) + column, inside);
#if INPUT
        copy_few_async<RUN>(to + (4 + r) * ROW_BYTES + lane * RUN, base + BASE_AT(row) + column, inside);
#endif
      }
      for (int i = lane; i < 16 * RANKS; i += 32) {
        const int row = row0 + i / RANKS;
        copy_async(to + DT_FROM + (i / RANKS * PLACES + i % RANKS) * 16, dt + DT_AT(row) + i % RANKS * 8, WHOLE || row < stop);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int n = 0; n < STAGES - 1; n++) fetch(n);
  if (RANKS % 2)
    for (int i = lane; i < STAGES * 16; i += 32)
      *reinterpret_cast<uint4*>(own + i / 16 * STAGE + DT_FROM + (i % 16 * PLACES + RANKS) * 16) = make_uint4(0, 0, 0, 0);
#if INPUT
  // The columns of product w are distributed as 2w, 2w + 1 of every lane's run.
  for (int i = threadIdx.x; i < SIDES * WORDS * STEPS * 32; i += 32 * WARPS) {
    const int l = i % 32, k = i / 32 % STEPS, w = i / 32 / STEPS % WORDS, s = i / 32 / STEPS / WORDS;
    const bf16* from = a + blockIdx.x * WIDTH + s * 8 * EACH + l / 4 * EACH + w * 2;
    u32 words[4];
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const int r = k * 16 + part / 2 * 8 + l % 4 * 2;
      const bf16* at = from + (size_t)r * COLUMNS + part % 2;
      words[part] = k * 16 + part / 2 * 8 < RANK ? at[0].bits | (u32)at[COLUMNS].bits << 16 : 0;
    }
    factors[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
#endif
  __syncthreads();

  float sum[STEPS][EACH][4] = {};
  for (int n = 0; start + n * HIGH * 16 < stop; n++) {
    const int row0 = start + n * HIGH * 16;
    wait_copies<STAGES - 2>();
    __syncwarp();
    fetch(n + STAGES - 1);
    const unsigned char* now = own + n % STAGES * STAGE;
    const u32 dt_at = ring + n % STAGES * STAGE + DT_FROM + ((lane / 16 * 8 + lane % 8) * PLACES + lane / 8 % 2) * 16;
#if INPUT
    float low_rank[WORDS][2][4] = {};
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      u32 rows[4];
      load_matrices(rows, dt_at + k * 32);
#pragma unroll
      for (int w = 0; w < WORDS; w++) {
        const uint4 f = factors[((side * WORDS + w) * STEPS + k) * 32 + lane];
        const u32 factor[4] = {f.x, f.y, f.z, f.w};
        mma(low_rank[w][0], factor, rows[0], rows[1]);
        mma(low_rank[w][1], factor, rows[2], rows[3]);
      }
    }
#endif
    // All rows at once: a word of random bits is a long chain of products.
    Run kept[4], out[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const int row = row0 + row_of(r);
      kept[r] = *reinterpret_cast<const Run*>(now + r * ROW_BYTES + lane * RUN);
#if INPUT
      out[r] = *reinterpret_cast<const Run*>(now + (4 + r) * ROW_BYTES + lane * RUN);
#endif
#pragma unroll
      for (int four = 0; four < EACH / 4; four++) {
        const Mask mask = mask_of(stream, step, ((u32)row * COLUMNS + column) / 4 + four);
#pragma unroll
        for (int w = four * 2; w < four * 2 + 2; w++) {
          const u32 left = mask.of[w % 2 * 2], right = mask.of[w % 2 * 2 + 1];
          kept[r].pair[w] &= low_halves(left, right);
#if INPUT
          const float one = __uint_as_float(out[r].pair[w] << 16), two = __uint_as_float(out[r].pair[w] & 0xffff0000u);
          out[r].pair[w] = pair(fmaf(SCALE, masked(low_rank[w][r / 2][r % 2], left), one),
                             fmaf(SCALE, masked(low_rank[w][r / 2][r % 2 + 2], right), two));
#endif
        }
      }
    }
#if INPUT
#pragma unroll
    for (int r = 0; r < 4; r++)
      if (const int row = row0 + row_of(r); WHOLE || row < stop) *reinterpret_cast<Run*>(dx + DX_AT(row) + column) = out[r];
#endif
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      u32 across[4];
      load_transposed(across, dt_at + k * 32);
#pragma unroll
      for (int w = 0; w < WORDS; w++) {
        mma(sum[k][w * 2], across, low_halves(kept[0].pair[w], kept[1].pair[w]), low_halves(kept[2].pair[w], kept[3].pair[w]));
        mma(sum[k][w * 2 + 1], across, high_halves(kept[0].pair[w], kept[1].pair[w]), high_halves(kept[2].pair[w], kept[3].pair[w]));
      }
    }
  }

  wait_copies<0>();
  float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int k = 0; k < STEPS; k++) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < EACH; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[((warp * 16 + group + i / 2 * 8) * 8 + quad * 2 + i % 2) * EACH + j] = sum[k][j][i];
    __syncthreads();
    for (int at = threadIdx.x; at < 16 * WIDTH; at += 32 * WARPS) {
      const int r = at / WIDTH, c = at % WIDTH;
      float all = 0.0f;
#pragma unroll
      for (int above = 0; above < HIGH; above++) all += sums[((above * SIDES + c / (8 * EACH)) * 16 + r) * 8 * EACH + c % (8 * EACH)];
      if (k * 16 + r < RANK) parts[((size_t)blockIdx.y * RANK + k * 16 + r) * COLUMNS + blockIdx.x * WIDTH + c] = all;
    }
  }
}
