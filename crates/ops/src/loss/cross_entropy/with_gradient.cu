// Cross entropy of rows of logits and its gradient from one reading: lse = log Σ exp(x), loss = lse − x[target],
// dx = (exp(x − lse) − [i = target])·d. logits, d_logits bf16 [ROWS, COLUMNS], row i at LOGITS_AT(i), d_logits
// may be the logits; targets int [ROWS]; d, token_loss f32 [ROWS]. A target of IGNORED gives 0 and reads nothing.
// A cluster of CLUSTER blocks takes ROWS_EACH rows one after the other and holds a row in shared memory: a warp
// has REGION packs of its own in PIECES pieces, sums their exponentials as the copy engine brings them, meets the
// others once for the sum of the row, then replaces each piece by the next row's as soon as its gradient is
// written. Sums run in a fixed order. Clusters need sm_90 or later.
#include "types.cuh"
#include "pack.cuh"
#include "reduce.cuh"
#include "handoff.cuh"

#if __CUDA_ARCH__ >= 900
#define WARPS (THREADS / 32)
#define PACKS (COLUMNS / 8)
#define PIECE ((REGION + PIECES * 32 - 1) / (PIECES * 32) * 32)
// Finite, so that no difference of two maxima is NaN.
#define LOWEST (-3.4028235e38f)
#define LOG2_E 1.4426950408889634f

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS)
cross_entropy_with_gradient(const bf16* logits, const int* __restrict__ targets, const float* __restrict__ d_token_loss,
                    float* __restrict__ token_loss, bf16* d_logits) {
  extern __shared__ __align__(128) Pack<bf16, 8> packs[];
  __shared__ u64 arrived[WARPS][PIECES];
  // Of every warp of the cluster the largest logit and the sum of exponentials below it, for two rows.
  __shared__ float2 parts[2][CLUSTER * WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % CLUSTER;
  // The warp's region of the row, in packs.
  const int start = (rank * WARPS + warp) * REGION, count = max(min(REGION, PACKS - start), 0);
  Pack<bf16, 8>* mine = packs + warp * REGION;
  if (lane < PIECES) barrier_init(shared_address(&arrived[warp][lane]), 1);
  cluster_meet();

  const int last = min((int)(blockIdx.x / CLUSTER + 1) * ROWS_EACH, ROWS);
  const auto trained_from = [&](int row) {
    while (row < last && targets[row] == IGNORED) row++;
    return row;
  };
  const auto fetch = [&](int row, int piece) {
    const int packs_of_piece = min(count - piece * PIECE, PIECE);
    if (lane || packs_of_piece <= 0 || row >= last) return;
    const u32 barrier = shared_address(&arrived[warp][piece]);
    barrier_expect(barrier, packs_of_piece * 16);
    copy_bytes(shared_address(mine + piece * PIECE), logits + LOGITS_AT(row) + (size_t)(start + piece * PIECE) * 8,
               packs_of_piece * 16, barrier);
  };

  int row = (blockIdx.x / CLUSTER) * ROWS_EACH;
  int trained = trained_from(row);
#pragma unroll
  for (int piece = 0; piece < PIECES; piece++) fetch(trained, piece);
  for (u32 parity = 0; row < last; row++) {
    bf16* dx = d_logits + D_LOGITS_AT(row) + (size_t)start * 8;
    const bool writes_loss = rank == 0 && threadIdx.x == 0;
    if (row < trained) {
      for (int p = lane; p < count; p += 32) write_pack(dx + p * 8, Pack<bf16, 8>{});
      if (writes_loss) token_loss[row] = 0.0f;
      continue;
    }
    const int target = targets[row];
    const bool inside = target >= 0 && target < COLUMNS;
    const float hit = writes_loss && inside ? load(logits + LOGITS_AT(row) + target) : 0.0f;
    float top = LOWEST, sum = 0.0f;
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      const int end = min(count, (piece + 1) * PIECE);
      if (piece * PIECE < end) barrier_wait(shared_address(&arrived[warp][piece]), parity);
      for (int p = piece * PIECE + lane; p < end; p += 32) {
        const Pack<bf16, 8> x = mine[p];
        float local = to_float(x.at[0]);
#pragma unroll
        for (int j = 1; j < 8; j++) local = fmaxf(local, to_float(x.at[j]));
        if (local > top) {
          sum *= exp2_approx((top - local) * LOG2_E);
          top = local;
        }
        const float shift = -top * LOG2_E;
#pragma unroll
        for (int j = 0; j < 8; j++) sum += exp2_approx(fmaf(to_float(x.at[j]), LOG2_E, shift));
      }
    }
    const float of_warp = warp_max(top);
    sum = warp_sum(sum * exp2_approx((top - of_warp) * LOG2_E));
    if (lane < CLUSTER) store_at(shared_address(&parts[parity][rank * WARPS + warp]), lane, of_warp, sum);
    cluster_meet();
    float2 part[(CLUSTER * WARPS + 31) / 32];
    top = LOWEST;
#pragma unroll
    for (int n = 0; n < (CLUSTER * WARPS + 31) / 32; n++) {
      const int i = n * 32 + lane;
      part[n] = i < CLUSTER * WARPS ? parts[parity][i] : make_float2(LOWEST, 0.0f);
      top = fmaxf(top, part[n].x);
    }
    top = warp_max(top);
    sum = 0.0f;
#pragma unroll
    for (int n = 0; n < (CLUSTER * WARPS + 31) / 32; n++) sum += part[n].y * exp2_approx((part[n].x - top) * LOG2_E);
    const float lse = top + logf(warp_sum(sum));
    if (writes_loss) token_loss[row] = inside ? lse - hit : __int_as_float(0x7fc00000);

    const float d = d_token_loss[row], shift = -lse * LOG2_E;
    const int place = target / 8 - start;
    trained = trained_from(row + 1);
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      const int end = min(count, (piece + 1) * PIECE);
      for (int p = piece * PIECE + lane; p < end; p += 32) {
        const Pack<bf16, 8> x = mine[p];
        Pack<bf16, 8> out;
#pragma unroll
        for (int j = 0; j < 8; j++)
          out.at[j] = from_float<bf16>(exp2_approx(fmaf(to_float(x.at[j]), LOG2_E, shift)) * d);
        write_pack(dx + p * 8, out);
      }
      // The thread that wrote the target's place writes it again.
      if (inside && place >= piece * PIECE && place < end && place % 32 == lane) {
        const float x = load((const bf16*)mine + (target - start * 8));
        store(dx + (target - start * 8), (exp2_approx(fmaf(x, LOG2_E, shift)) - 1.0f) * d);
      }
      __syncwarp();
      fetch(trained, piece);
    }
    parity ^= 1;
  }
}
#endif
