// The largest of PIECES numbers of each column of [PIECES, COUNT], none of them negative: as bits they are ordered like their
// values, and one that is not finite is larger than all that are.
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) max_pieces(const u32* __restrict__ pieces, u32* __restrict__ largest) {
  const u32 at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= COUNT) return;
  u32 most = pieces[at];
  for (int piece = 1; piece < PIECES; piece++) most = max(most, pieces[piece * COUNT + at]);
  largest[at] = most;
}
