// Gradients of causal attention, every row one document, bf16, heads of 128, on Hopper:
//   p_ij = exp(SCALE q_i.k_j - lse_i) for j <= i, ds_ij = p_ij (do_i.v_j - delta_i), delta_i = do_i.o_i
//   dq_i = SCALE sum_j ds_ij k_j, dk_j = SCALE sum_i ds_ij q_i, dv_j = sum_i p_ij do_i
// q, do, dq [BATCH, TOKENS, HEADS, 128], k, v, dk, dv [BATCH, TOKENS, KV_HEADS, 128], strided in the first three
// axes; lse and delta by `attention_statistics`.
// A block owns a tile of 128 keys of one key head: it holds their k and v in shared memory and the sums of dk and dv in
// registers while it walks over the blocks of 64 queries that see them, for every query head that shares the keys. Two
// groups of four warps own 64 keys each; one thread feeds them through the copy engine. Scores are computed with the
// keys as rows, so that p and ds already lie in registers as the products for dv and dk take them.
// dq of a block of queries is summed over the tiles of keys in f32 in global memory, in an order that does not depend
// on timing: each tile waits for its turn. So two runs give the same bits, without storing all scores.
// One H200, alone: 16 heads sharing 8, 2 x 2048 tokens 0.22 ms (389 TFLOP/s), 8 x 2048 0.89 ms; 32 sharing 8, 1 x 8192
// 437 TFLOP/s. In a step of Qwen3-0.6B 0.22 and 1.03 ms, where cuDNN's deterministic plan took 0.30 and 1.13.
#include "types.cuh"

// Other architectures get an empty unit: lowering asks for this kernel on sm_90a only.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "handoff.cuh"
#include "wgmma.cuh"

#define QUERIES 64
#define KEYS 128
#define BLOCKS_PER_TILE (KEYS / QUERIES)
#define Q_BLOCKS ((TOKENS + QUERIES - 1) / QUERIES)
#define K_TILES ((TOKENS + KEYS - 1) / KEYS)
#define GROUP (HEADS / KV_HEADS)
#define LOG2E 1.4426950408889634f

#define CONSUMERS 256
#define OTHERS 128  // the thread that feeds, the thread that keeps the turns, idle warps
#define STAGES 2
#define HALF_Q (QUERIES * 128)
#define HALF_K (KEYS * 128)
#define DS_TILE (KEYS * QUERIES * 2)
// Shared memory, in bytes from its aligned start.
#define AT_K 0
#define AT_V (AT_K + 2 * HALF_K)
#define AT_Q (AT_V + 2 * HALF_K)
#define AT_DO (AT_Q + STAGES * 2 * HALF_Q)
#define AT_DS (AT_DO + STAGES * 2 * HALF_Q)
#define AT_STATISTICS (AT_DS + 2 * DS_TILE)

// Leading tiles of a key head run side by side; each SM holds one block.
#define LEADERS ((K_TILES + 1) / 2 < 8 ? (K_TILES + 1) / 2 : 8)

// The blocks of queries that a tile visits, the last first, and its turn at each: the leaders start two blocks apart,
// so that one with a greater number is ahead; in later heads it is ahead because it has fewer blocks. All others come
// behind the leaders in their order. A turn therefore is rarely waited for.
struct Walk {
  int tile, blocks, head, step;
  __device__ Walk(int tile) : tile(tile), blocks(Q_BLOCKS - tile * BLOCKS_PER_TILE), head(0), step(0) {}
  __device__ int from_end() const {
    const int u = step + (head == 0 && tile < LEADERS ? 2 * tile : 0);
    return u < blocks ? u : u - blocks;
  }
  __device__ int block() const { return Q_BLOCKS - 1 - from_end(); }
  __device__ int turn() const {
    if (tile >= LEADERS) return tile;
    const int u = from_end(), greatest = min(LEADERS - 1, block() / BLOCKS_PER_TILE);
    const int ahead = head ? greatest : min(u / 2, greatest);
    return tile <= ahead ? ahead - tile : ahead + 1 + greatest - tile;
  }
  __device__ bool more() const { return head < GROUP; }
  __device__ void next() {
    if (++step == blocks) step = 0, head++;
  }
};

__device__ __forceinline__ int turn_at(const int* turn) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(turn) : "memory");
  return value;
}
__device__ __forceinline__ void set_turn(int* turn, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(value) : "memory");
}
__device__ __forceinline__ void add_to(float4* sum, const float* x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sum), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
}
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rows [first, first + ROWS) of one head into a tile.
template <int ROWS>
__device__ __forceinline__ void fetch(u32 tile, const TensorMap* map, u32 barrier, int b, int first, int head) {
  copy_box(tile, map, barrier, 0, head, first, b);
  copy_box(tile + ROWS * 128, map, barrier, 64, head, first, b);
}

// x [64 keys, 64 queries] = 64 rows of a tile of keys times a block of queries, over the head's columns.
__device__ __forceinline__ void scores(float (&x)[32], u32 keys, u32 queries) {
#pragma unroll
  for (int c = 0; c < 8; c++)
    product<0, 0>(x, columns_summed(keys + c / 4 * HALF_K + c % 4 * 32),
                        columns_summed(queries + c / 4 * HALF_Q + c % 4 * 32), c);
}

// sum [64 keys, 128] += x [64 keys, 64 queries] times a block of queries.
__device__ __forceinline__ void weighted_rows(float (&sum)[64], const u32 (&x)[16], u32 queries) {
#pragma unroll
  for (int c = 0; c < 4; c++)
    product(sum, x[4 * c], x[4 * c + 1], x[4 * c + 2], x[4 * c + 3], rows_summed(queries + c * 2048, HALF_Q));
}

// 64 rows of 128 as a group of four warps holds them, to rows [first, ...) of a head.
__device__ __forceinline__ void write_rows(bf16* head, size_t stride, int first, const float (&x)[64], float factor) {
  const int lane = threadIdx.x % 32, row = first + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const int at = row + i % 2 * 8;
    bf16* to = head + at * stride + i / 2 * 8 + lane % 4 * 2;
    if (at < TOKENS) *(u32*)to = bf16_pair(x[2 * i] * factor, x[2 * i + 1] * factor);
  }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + OTHERS, 1)
attention_gradients(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                    const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap d_o,
                    const float2* __restrict__ statistics, float4* __restrict__ dq_sums, int* __restrict__ turns,
                    bf16* __restrict__ dq, bf16* __restrict__ dk, bf16* __restrict__ dv) {
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES + 3];
  __shared__ int ticket;
  __shared__ int4 steps[STAGES];  // head, block, turn
  const u32 at = (shared_address(memory) + 1023) & ~1023u;
  const u32 keys_ready = shared_address(barriers), our_turn = keys_ready + 8, added = our_turn + 8, ready = added + 8,
            taken = ready + 8 * STAGES;
  if (threadIdx.x == 0) {
    barrier_init(keys_ready, 1);
    barrier_init(our_turn, 1);
    barrier_init(added, CONSUMERS);
    for (int s = 0; s < STAGES; s++) {
      barrier_init(ready + 8 * s, 1);
      barrier_init(taken + 8 * s, CONSUMERS / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    ticket = atomicAdd(turns, 1);
  }
  __syncthreads();
  // Tickets follow the order in which blocks start. The leaders of one key head, which wait for one another, have
  // neighbouring ones; every other tile has a later ticket than all that it waits for. So no wait is for ever.
  const int pairs = BATCH * KV_HEADS;
  const bool leads = ticket < pairs * LEADERS;
  const int tile = leads ? ticket % LEADERS : ticket / pairs, pair = leads ? ticket / LEADERS : ticket % pairs;
  const int b = pair / KV_HEADS, kv_head = pair % KV_HEADS;

  if (threadIdx.x < OTHERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 32) {
      u32 parity = 0;
      for (Walk walk(tile); walk.more(); walk.next(), parity ^= 1) {
        int* turn = turns + 1 + (b * HEADS + kv_head * GROUP + walk.head) * Q_BLOCKS + walk.block();
        const int ours = walk.turn();
        while (turn_at(turn) < ours) {}
        barrier_arrive(our_turn);
        barrier_wait(added, parity);
        __threadfence();
        set_turn(turn, ours + 1);
      }
    }
    if (threadIdx.x != 0) return;
    barrier_expect(keys_ready, 4 * HALF_K);
    fetch<KEYS>(at + AT_K, &k, keys_ready, b, tile * KEYS, kv_head);
    fetch<KEYS>(at + AT_V, &v, keys_ready, b, tile * KEYS, kv_head);
    int stage = 0;
    u32 parity = 1;
    for (Walk walk(tile); walk.more(); walk.next()) {
      const int h = kv_head * GROUP + walk.head, block = walk.block();
      const float2* rows = statistics + ((size_t)(b * HEADS + h) * Q_BLOCKS + block) * QUERIES;
      const u32 barrier = ready + 8 * stage;
      barrier_wait(taken + 8 * stage, parity);
      steps[stage] = make_int4(h, block, walk.turn(), 0);
      barrier_expect(barrier, 4 * HALF_Q + QUERIES * 8);
      fetch<QUERIES>(at + AT_Q + stage * 2 * HALF_Q, &q, barrier, b, block * QUERIES, h);
      fetch<QUERIES>(at + AT_DO + stage * 2 * HALF_Q, &d_o, barrier, b, block * QUERIES, h);
      copy_bytes(at + AT_STATISTICS + stage * (QUERIES * 8), rows, QUERIES * 8, barrier);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32;
  const int group = threadIdx.x / 128 - 1;  // of four warps: owns keys [64 group, 64 group + 64) of the tile
  const int first_key = tile * KEYS + group * 64, key = first_key + warp * 16 + lane / 4;
  const int stored_row = group * 64 + warp * 16 + lane % 16;
  const u32 my_k = at + AT_K + group * 64 * 128, my_v = my_k + AT_V, my_columns_of_k = at + AT_K + group * HALF_K;
  float dk_sum[64], dv_sum[64];
#pragma unroll
  for (int i = 0; i < 64; i++) dk_sum[i] = dv_sum[i] = 0.0f;
  int stage = 0, buffer = 0;
  u32 parity = 0, turn_parity = 0;
  barrier_wait(keys_ready, 0);

  for (int left = GROUP * (Q_BLOCKS - tile * BLOCKS_PER_TILE); left > 0; left--) {
    const u32 q_tile = at + AT_Q + stage * 2 * HALF_Q, do_tile = at + AT_DO + stage * 2 * HALF_Q;
    barrier_wait(ready + 8 * stage, parity);
    float s[32], dp[32];
    products_begin();
    scores(s, my_k, q_tile);
    products_commit();
    scores(dp, my_v, do_tile);
    products_commit();
    products_wait<1>();

    const int h = steps[stage].x, block = steps[stage].y, ours = steps[stage].z;
    const float4* of_queries = (const float4*)(memory + (at - shared_address(memory)) + AT_STATISTICS) + stage * (QUERIES / 2);
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const float4 two = of_queries[i / 4 * 4 + lane % 4];
      s[i] = exp2_approximate(fmaf(s[i], SCALE * LOG2E, i % 2 ? -two.z : -two.x));
    }
    if (block / BLOCKS_PER_TILE == tile) {
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (key + i / 2 % 2 * 8 > block * QUERIES + i / 4 * 8 + lane % 4 * 2 + i % 2) s[i] = 0.0f;
    }
    u32 p[16], ds[16];
#pragma unroll
    for (int i = 0; i < 16; i++) p[i] = bf16_pair(s[2 * i], s[2 * i + 1]);
    products_begin();
    weighted_rows(dv_sum, p, do_tile);
    products_commit();
    products_wait<1>();
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const float4 two = of_queries[i / 2 * 4 + lane % 4];
      ds[i] = bf16_pair(s[2 * i] * (dp[2 * i] - two.y), s[2 * i + 1] * (dp[2 * i + 1] - two.w));
    }
    const u32 ds_tile = at + AT_DS + buffer * DS_TILE;
#pragma unroll
    for (int j = 0; j < 8; j += 2)
      store_matrices(ds_tile + swizzled(stored_row, j + lane / 16), ds[2 * j], ds[2 * j + 1], ds[2 * j + 2],
                     ds[2 * j + 3]);
    publish_to_products();
    meet<CONSUMERS>(1);

    // dq [64 queries, 64 columns]: this group's half of the columns, from all keys of the tile.
    float dq_part[32];
    products_begin();
#pragma unroll
    for (int c = 0; c < 8; c++)
      product<1, 1>(dq_part, rows_summed(ds_tile + c * 2048, DS_TILE),
                          rows_summed(my_columns_of_k + c * 2048, HALF_K), c);
    products_commit();
    weighted_rows(dk_sum, ds, q_tile);
    products_commit();

    float4* sums = dq_sums + ((size_t)((b * HEADS + h) * Q_BLOCKS + block) * 2 + group) * (QUERIES * 16) + thread;
    barrier_wait(our_turn, turn_parity);
    if (ours < block / BLOCKS_PER_TILE) {
      products_wait<1>();
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float* x = dq_part + 4 * i;
        if (ours > 0) add_to(sums + i * 128, x);
        else __stcg(sums + i * 128, make_float4(x[0], x[1], x[2], x[3]));
      }
    } else {
      float4 sum[8] = {};
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (ours > 0) sum[i] = __ldcg(sums + i * 128);
      products_wait<1>();
      bf16* rows = dq + (size_t)b * DQ_B + (size_t)h * DQ_H + group * 64 + lane % 4 * 2;
      const int query = block * QUERIES + warp * 16 + lane / 4;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float* x = dq_part + 4 * i;
        const u32 upper = bf16_pair((sum[i].x + x[0]) * SCALE, (sum[i].y + x[1]) * SCALE);
        const u32 lower = bf16_pair((sum[i].z + x[2]) * SCALE, (sum[i].w + x[3]) * SCALE);
        if (query < TOKENS) *(u32*)(rows + (size_t)query * DQ_S + i * 8) = upper;
        if (query + 8 < TOKENS) *(u32*)(rows + (size_t)(query + 8) * DQ_S + i * 8) = lower;
      }
    }
    barrier_arrive(added);
    products_wait<0>();
    if (lane == 0) barrier_arrive(taken + 8 * stage);
    turn_parity ^= 1;
    buffer ^= 1;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  write_rows(dk + (size_t)b * DK_B + (size_t)kv_head * DK_H, DK_S, first_key, dk_sum, SCALE);
  write_rows(dv + (size_t)b * DV_B + (size_t)kv_head * DV_H, DV_S, first_key, dv_sum, 1.0f);
}
#endif
