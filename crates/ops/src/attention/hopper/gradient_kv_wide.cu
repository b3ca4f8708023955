// Gradients of attention with respect to k and v on Hopper, as in gradient_kv.cu, for heads whose sums of dk and dv do not
// fit into one warpgroup's registers together: a block owns 64 keys, one warpgroup computes the weights and sums dv, the
// other computes do.v and sums dk. The weights go from the first to the second through shared memory in f32, each
// thread's to the thread of the same place.
#include "keys.cuh"

#define AT_WEIGHTS (AT_ROWS + STAGES * ROWS_STAGE)
#define WEIGHTS_TAKEN 1
#define WEIGHTS_READY 2

extern "C" __global__ void __launch_bounds__(384, 1)
attention_gradient_kv(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                      const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap d_o,
                      const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv,
                      const float* __restrict__ statistics, const int2* __restrict__ intervals,
                      int* __restrict__ ticket) {
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) u64 barriers[4 + 2 * KV_STAGES + 2 * STAGES];
  __shared__ Item items[2];
  const u32 at = (shared_address(memory) + 1023) & ~1023u;
  const u32 known = shared_address(barriers), forgotten = known + 16, keys_ready = forgotten + 16,
            keys_taken = keys_ready + 8 * KV_STAGES, ready = keys_taken + 8 * KV_STAGES, taken = ready + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) barrier_init(known + 8 * i, 1), barrier_init(forgotten + 8 * i, 3);
    for (int i = 0; i < KV_STAGES; i++) barrier_init(keys_ready + 8 * i, 1), barrier_init(keys_taken + 8 * i, 2);
    for (int i = 0; i < STAGES; i++) barrier_init(ready + 8 * i, 1), barrier_init(taken + 8 * i, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x / 32 == 1) look_up(items, known, forgotten, intervals, ticket);
    if (threadIdx.x == 0)
      feed(items, at, known, forgotten, keys_ready, keys_taken, ready, taken, &q, &k, &v, &d_o, statistics, intervals);
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const bool weighs = threadIdx.x < 256;
  unsigned char* aligned = memory + (at - shared_address(memory));
  float4* weights = (float4*)(aligned + AT_WEIGHTS) + thread;
  int slot = 0, keys_stage = 0, stage = 0, before = 0;
  u32 known_parity = 0, keys_parity = 0, parity = 0;
  while (true) {
    barrier_wait(known + 8 * slot, known_parity);
    const Item& item = items[slot];
    if (item.b < 0) break;
    const int b = item.b, kv_head = item.kv_head, first_key = item.key, steps = GROUP * item.blocks;
    const int warp_key = first_key + warp * 16, key = warp_key + lane / 4;
    asm volatile("bar.sync %0, 128;" ::"r"(weighs ? 5 : 6) : "memory");
    if (thread == 0) barrier_arrive(forgotten + 8 * slot);
    slot ^= 1, known_parity ^= slot == 0;

    const u32 k_tile = at + AT_KV + keys_stage * KV_STAGE, v_tile = k_tile + K_ROWS;
    barrier_wait(keys_ready + 8 * keys_stage, keys_parity);
    if (weighs) {
      float sum[WIDE_V / 2], s[32];
      u32 p[16];
#pragma unroll
      for (int i = 0; i < WIDE_V / 2; i++) sum[i] = 0.0f;
      for (int step = 0; step < steps; step++) {
        const u32 q_tile = at + AT_STEPS + stage * STEP, do_tile = q_tile + K_ROWS;
        const unsigned char* rows = aligned + AT_ROWS + stage * ROWS_STAGE;
        const float2* lse_of = (const float2*)rows + lane % 4;
        const int4* intervals_of = (const int4*)(rows + 512);
        barrier_wait(ready + 8 * stage, parity);
        products_begin();
        scores<D, 64>(s, k_tile, q_tile);
        products_commit();
        products_wait<1>();
        if (step > 0 && lane == 0) barrier_arrive(taken + 8 * before);
        products_wait<0>();
#if HAS_CAP
#pragma unroll
        for (int i = 0; i < 32; i++) s[i] = capped(s[i]);
#endif
        if (intervals_of[31].z > warp_key || intervals_of[0].y < warp_key + 15) hide(s, key, intervals_of);
        float slope[32];
#pragma unroll
        for (int i = 0; i < 32; i++) {
          const float2 lse = lse_of[i / 4 * 4];
#if HAS_CAP
          const float share = fmaxf(s[i], -1.0f);
#endif
          s[i] = exp2_approximate(fmaf(s[i], TO_LOG2, i % 2 ? -lse.y : -lse.x));
#if HAS_CAP
          slope[i] = s[i] * fmaf(-share, share, 1.0f);
#else
          slope[i] = s[i];
#endif
        }
        meet<256>(WEIGHTS_TAKEN);
#pragma unroll
        for (int i = 0; i < 8; i++)
          weights[i * 128] = make_float4(slope[4 * i], slope[4 * i + 1], slope[4 * i + 2], slope[4 * i + 3]);
        asm volatile("bar.arrive %0, 256;" ::"n"(WEIGHTS_READY) : "memory");
#pragma unroll
        for (int i = 0; i < 16; i++) p[i] = pair(s[2 * i], s[2 * i + 1]);
        products_begin();
        weighted_rows<64, WIDE_V>(sum, p, do_tile);
        products_commit();
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      products_wait<0>();
      if (lane == 0) barrier_arrive(taken + 8 * before);
      meet<256>(3);
      lay_rows<WIDE_V>(v_tile, sum, 1.0f, 1.0f);
    } else {
      float sum[WIDE / 2], dp[32];
      u32 ds[16];
#pragma unroll
      for (int i = 0; i < WIDE / 2; i++) sum[i] = 0.0f;
      for (int step = 0; step < steps; step++) {
        const u32 q_tile = at + AT_STEPS + stage * STEP, do_tile = q_tile + K_ROWS;
        const float2* delta_of = (const float2*)(aligned + AT_ROWS + stage * ROWS_STAGE + 256) + lane % 4;
        asm volatile("bar.arrive %0, 256;" ::"n"(WEIGHTS_TAKEN) : "memory");
        barrier_wait(ready + 8 * stage, parity);
        products_begin();
        scores<DV, 64>(dp, v_tile, do_tile);
        products_commit();
        products_wait<1>();
        if (step > 0 && lane == 0) barrier_arrive(taken + 8 * before);
        products_wait<0>();
        meet<256>(WEIGHTS_READY);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const float4 p = weights[i * 128];
          const float2 delta = delta_of[i * 4];
          ds[2 * i] = pair(p.x * (dp[4 * i] - delta.x), p.y * (dp[4 * i + 1] - delta.y));
          ds[2 * i + 1] = pair(p.z * (dp[4 * i + 2] - delta.x), p.w * (dp[4 * i + 3] - delta.y));
        }
        products_begin();
        weighted_rows<64, WIDE>(sum, ds, q_tile);
        products_commit();
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      products_wait<0>();
      if (lane == 0) barrier_arrive(taken + 8 * before);
      meet<256>(3);
      lay_rows<WIDE>(k_tile, sum, SCALE, SCALE);
    }
    publish_to_products();
    asm volatile("bar.sync %0, 128;" ::"r"(weighs ? 5 : 6) : "memory");
    if (thread == 0) {
      if (weighs) store_rows<WIDE_V>(v_tile, &dv, b, first_key, kv_head);
      else store_rows<WIDE>(k_tile, &dk, b, first_key, kv_head);
      stores_read<0>();
      barrier_arrive(keys_taken + 8 * keys_stage);
    }
    if (++keys_stage == KV_STAGES) keys_stage = 0, keys_parity ^= 1;
  }
  if (thread == 0) stores_done();
}
