// Gradients of attention with respect to k and v on Hopper, as in gradient_kv.cu, for heads whose sums of dk and dv do
// not fit into one warpgroup's registers together: a block owns 64 keys, one warpgroup computes the weights and sums
// dv, the other computes do.v and sums dk. The weights go from the first to the second through shared memory in f32,
// each thread's to the thread of the same place.
#include "weights.cuh"

#define AT_WEIGHTS (AT_ROWS + STAGES * ROWS_STAGE)
#define WEIGHTS_TAKEN 1
#define WEIGHTS_READY 2

extern "C" __global__ void __launch_bounds__(384, 1)
attention_gradient_kv(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                      const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap d_o,
                      const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv,
                      const float* __restrict__ statistics, const int2* __restrict__ intervals,
                      int* __restrict__ drawing) {
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) u64 words[BARRIERS];
  __shared__ Item items[2];
  const u32 at = (shared_address(memory) + 1023) & ~1023u;
  const Barriers on = make_barriers<3, 2, 8>(shared_address(words));
  if (threadIdx.x < 128) {
    few_registers<2>();
    if (threadIdx.x / 32 == 1) look_up(items, on, intervals, drawing);
    if (threadIdx.x == 0) feed(items, at, on, &q, &k, &v, &d_o, statistics, intervals);
    return;
  }

  many_registers<2>();
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const bool weighs = threadIdx.x < 256;
  unsigned char* aligned = memory + (at - shared_address(memory));
  float4* weights = (float4*)(aligned + AT_WEIGHTS) + thread;
  Place<2> slot = {0, 0};
  Place<KV_STAGES> of_keys = {0, 0};
  Place<STAGES> of_step = {0, 0};
  int before = 0;
  while (true) {
    barrier_wait(on.known + 8 * slot.stage, slot.parity);
    const Item& item = items[slot.stage];
    if (item.b < 0) break;
    const int b = item.b, kv_head = item.kv_head, first_key = item.key, steps = GROUP * item.blocks;
    const int warp_key = first_key + warp * 16, key = warp_key + lane / 4;
    meet<128>(weighs ? 5 : 6);
    if (thread == 0) barrier_arrive(on.forgotten + 8 * slot.stage);
    slot.advance();

    const u32 k_tile = at + AT_KV + of_keys.stage * KV_STAGE, v_tile = k_tile + K_ROWS;
    barrier_wait(on.keys_ready + 8 * of_keys.stage, of_keys.parity);
    if (weighs) {
      float sum[WIDE_V / 2], s[32];
      u32 p[16];
      clear(sum);
      for (int step = 0; step < steps; step++) {
        const u32 q_tile = at + AT_STEPS + of_step.stage * STEP, do_tile = q_tile + K_ROWS;
        const OfQueries of = of_queries(aligned + AT_ROWS + of_step.stage * ROWS_STAGE);
        barrier_wait(on.ready + 8 * of_step.stage, of_step.parity);
        products_begin();
        scores<D, 64>(s, k_tile, q_tile);
        products_commit();
        products_wait<1>();
        if (step > 0 && lane == 0) barrier_arrive(on.taken + 8 * before);
        products_wait<0>();
        float slope[32];
        if (HAS_CAP) {
#pragma unroll
          for (int i = 0; i < 32; i++) s[i] = capped(s[i]), slope[i] = fmaf(-s[i], s[i], 1.0f);
        }
        weigh(s, p, of, key, partly_seen(of, warp_key));
#pragma unroll
        for (int i = 0; i < 32; i++) slope[i] = HAS_CAP ? s[i] * slope[i] : s[i];
        meet<256>(WEIGHTS_TAKEN);
#pragma unroll
        for (int i = 0; i < 8; i++)
          weights[i * 128] = make_float4(slope[4 * i], slope[4 * i + 1], slope[4 * i + 2], slope[4 * i + 3]);
        asm volatile("bar.arrive %0, 256;" ::"n"(WEIGHTS_READY) : "memory");
        products_begin();
        weighted_rows<64, WIDE_V>(sum, p, do_tile);
        products_commit();
        before = of_step.stage;
        of_step.advance();
      }
      products_wait<0>();
      if (lane == 0) barrier_arrive(on.taken + 8 * before);
      meet<256>(3);
      lay_rows<WIDE_V>(v_tile, sum, 1.0f, 1.0f);
    } else {
      float sum[WIDE / 2], dp[32];
      u32 ds[16];
      clear(sum);
      for (int step = 0; step < steps; step++) {
        const u32 q_tile = at + AT_STEPS + of_step.stage * STEP, do_tile = q_tile + K_ROWS;
        const OfQueries of = of_queries(aligned + AT_ROWS + of_step.stage * ROWS_STAGE);
        asm volatile("bar.arrive %0, 256;" ::"n"(WEIGHTS_TAKEN) : "memory");
        barrier_wait(on.ready + 8 * of_step.stage, of_step.parity);
        products_begin();
        scores<DV, 64>(dp, v_tile, do_tile);
        products_commit();
        products_wait<1>();
        if (step > 0 && lane == 0) barrier_arrive(on.taken + 8 * before);
        products_wait<0>();
        meet<256>(WEIGHTS_READY);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const float4 p = weights[i * 128];
          const float2 delta = of.delta[i * 4];
          ds[2 * i] = pair(p.x * (dp[4 * i] - delta.x), p.y * (dp[4 * i + 1] - delta.y));
          ds[2 * i + 1] = pair(p.z * (dp[4 * i + 2] - delta.x), p.w * (dp[4 * i + 3] - delta.y));
        }
        products_begin();
        weighted_rows<64, WIDE>(sum, ds, q_tile);
        products_commit();
        before = of_step.stage;
        of_step.advance();
      }
      products_wait<0>();
      if (lane == 0) barrier_arrive(on.taken + 8 * before);
      meet<256>(3);
      lay_rows<WIDE>(k_tile, sum, SCALE, SCALE);
    }
    publish_to_products();
    meet<128>(weighs ? 5 : 6);
    if (thread == 0) {
      if (weighs) store_rows<WIDE_V>(v_tile, &dv, b, first_key, kv_head);
      else store_rows<WIDE>(k_tile, &dk, b, first_key, kv_head);
      stores_read<0>();
      barrier_arrive(on.keys_taken + 8 * of_keys.stage);
    }
    of_keys.advance();
  }
  if (thread == 0) stores_done();
}
