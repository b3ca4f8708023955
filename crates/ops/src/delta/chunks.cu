// Gradients of the gated delta rule within chunks of CHUNK tokens, f32; names as in recurrence.cu. With S the state in front
// of the chunk, dS the gradient of that after it, G(t, s) the decay from token s to token t of one document (0 for others),
// G(t) that from the chunk's start, G(s, end) that to its end, u = beta miss the correction and n = -beta d_correction:
//   dq_t = scale (sum over s <= t of G(t, s) (do_t.u_s) k_s + G(t) S do_t)
//   dk_t = sum over s < t of G(t, s) (n_t.u_s) k_s + G(t) S n_t                       (what reads the state)
//        + sum over s > t of G(s, t) (n_s.u_t) k_s + sum over s >= t of G(s, t) (do_s.u_t) scale q_s + G(t, end) dS u_t
//   dbeta_t = d_correction_t.miss_t
//   dg_t = sum over s >= t of its document in the chunk of (q_s.dq_s + reading dk_s.k_s - writing dk_s.k_s), and dS.S_end
//     where the document goes on; a decay scales all that was written before t and is read after it.
// With ADDITIVE nothing reads the state but o: the terms of n are absent, and miss = v.
// A block has a chunk (blockIdx.x) of a key head (.y) of a row (.z) and goes through the heads that share it, in order;
// 16 x 16 threads have 4 tokens and every 16th column each. Fixed order: the same bits on every run. 5.9 ms for
// 8192 tokens of 32 heads of 128, 16 key heads, on an H200.
#include "types.cuh"

#define GROUP (HEADS / KEY_HEADS)
#define TURNS ((DK + 15) / 16)
#define WIDE (TURNS * 16 > CHUNK ? TURNS * 16 : CHUNK)
#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < count; i++)

struct Tiles {
  float a[16][CHUNK + 1], b[16][WIDE];
};

// acc[i][j] += sum over x < depth of a(4 ty + i, x) b(x, tx + 16 j)
template <int COUNT, typename A, typename B>
__device__ __forceinline__ void add_product(float (&acc)[4][COUNT], Tiles& tiles, int depth, A a, B b) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  for (int first = 0; first < depth; first += 16) {
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * CHUNK; i += 256) {
      const int x = first + i % 16;
      tiles.a[i % 16][i / 16] = x < depth ? a(i / 16, x) : 0.0f;
    }
    for (int i = threadIdx.x; i < 16 * COUNT * 16; i += 256) {
      const int x = first + i / (COUNT * 16);
      tiles.b[i / (COUNT * 16)][i % (COUNT * 16)] = x < depth ? b(x, i % (COUNT * 16)) : 0.0f;
    }
    __syncthreads();
    EACH(x, 16) EACH(i, 4) EACH(j, COUNT) acc[i][j] += tiles.a[x][ty * 4 + i] * tiles.b[x][tx + 16 * j];
  }
}

template <int COUNT> __device__ __forceinline__ void clear(float (&acc)[4][COUNT]) {
  EACH(i, 4) EACH(j, COUNT) acc[i][j] = 0.0f;
}

// The sum over the 16 threads that share a token.
__device__ __forceinline__ float over_columns(float x) {
  EACH(step, 4) x += __shfl_xor_sync(0xffffffffu, x, 8 >> step);
  return x;
}

typedef float Square[CHUNK][CHUNK + 1];

// w[t][s] = G(t, s) (x_t.u_s), 0 for s = t but with `own`.
template <typename X, typename U>
__device__ __forceinline__ void weigh(Square& w, const Square& decay, Tiles& tiles, X x, U u, bool own) {
  float product[4][CHUNK / 16];
  clear(product);
  add_product(product, tiles, DV, x, [&](int d, int s) { return u(s, d); });
  EACH(i, 4) EACH(j, CHUNK / 16) {
    const int t = threadIdx.x / 16 * 4 + i, s = threadIdx.x % 16 + 16 * j;
    w[t][s] = s == t && !own ? 0.0f : decay[t][s] * product[i][j];
  }
  __syncthreads();
}

// d_gate += sign (part . x), token by token; sum += part; part = 0.
template <typename X>
__device__ __forceinline__ void take(float (&part)[4][TURNS], float (&sum)[4][TURNS], float* d_gate, X x, float sign) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  EACH(i, 4) {
    float along = 0.0f;
    EACH(j, TURNS) along += part[i][j] * x(ty * 4 + i, tx + 16 * j), sum[i][j] += part[i][j];
    along = over_columns(along);
    if (tx == 0) d_gate[ty * 4 + i] += sign * along;
  }
  clear(part);
}

extern "C" __global__ void __launch_bounds__(256)
gated_delta_chunks(const Q_T* __restrict__ q, const K_T* __restrict__ k, const G_T* __restrict__ g,
                   const BETA_T* __restrict__ beta, const int* __restrict__ starts, const DO_T* __restrict__ d_o,
                   const float* __restrict__ states, const float* __restrict__ d_states, const float* __restrict__ miss,
                   const float* __restrict__ d_correction, DQ_T* __restrict__ dq, DK_OUT_T* __restrict__ dk,
                   DG_T* __restrict__ dg, DBETA_T* __restrict__ dbeta) {
  __shared__ Tiles tiles;
  __shared__ Square w, decay;  // decay[t][s] = G(t, s)
  __shared__ float from_start[CHUNK], gate[CHUNK], rate[CHUNK], d_gate[CHUNK], parts[8];
  __shared__ int start[CHUNK];
  const int chunk = blockIdx.x, key_head = blockIdx.y, b = blockIdx.z;
  const int first = chunk * CHUNK, count = min(CHUNK, TOKENS - first);
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16, id = threadIdx.x;
  float sum_q[4][TURNS], sum_k[4][TURNS], part[4][TURNS];
  clear(sum_q);
  clear(sum_k);
  if (id < CHUNK) start[id] = id < count ? starts[(size_t)b * TOKENS + first + id] - first : id;

  for (int h = key_head * GROUP; h < (key_head + 1) * GROUP; h++) {
    const size_t at_state = (((size_t)b * HEADS + h) * CHUNKS + chunk) * DK * DV;
    const float *state = states + at_state, *d_state = d_states + at_state;
    const size_t at_token = (((size_t)b * HEADS + h) * TOKENS + first) * DV;
    const float *missed = miss + at_token, *d_corrected = d_correction + at_token;
    __syncthreads();
    if (id < CHUNK) {
      gate[id] = id < count ? load(g + G_AT(b, first + id, h)) : 0.0f;
      rate[id] = id < count ? load(beta + BETA_AT(b, first + id, h)) : 0.0f;
      d_gate[id] = 0.0f;
    }
    __syncthreads();
    if (id < CHUNK) {  // sums of logarithms from s on, so that those of far tokens are not differences of large ones
      float sum = 0.0f;
      for (int t = 0; t < CHUNK; t++) {
        if (t > id) sum += gate[t];
        decay[t][id] = t >= id && t < count && start[t] <= id ? expf(sum) : 0.0f;
      }
      sum = 0.0f;
      for (int t = 0; t <= id; t++) sum += gate[t];
      from_start[id] = id < count && start[id] < 0 ? expf(sum) : 0.0f;
    }
    __syncthreads();

    const auto correction = [&](int t, int d) { return t < count ? rate[t] * missed[(size_t)t * DV + d] : 0.0f; };
#if !ADDITIVE
    const auto reading = [&](int t, int d) { return t < count ? -rate[t] * d_corrected[(size_t)t * DV + d] : 0.0f; };
#endif
    const auto d_out = [&](int t, int d) { return t < count ? load(d_o + DO_AT(b, first + t, h) + d) : 0.0f; };
    const auto key = [&](int t, int d) { return t < count && d < DK ? load(k + K_AT(b, first + t, key_head) + d) : 0.0f; };
    const auto query = [&](int t, int d) {
      return t < count && d < DK ? SCALE * load(q + Q_AT(b, first + t, key_head) + d) : 0.0f;
    };
    const auto state_t = [&](int d, int i) { return i < DK ? state[(size_t)i * DV + d] : 0.0f; };
    const auto d_state_t = [&](int d, int i) { return i < DK ? d_state[(size_t)i * DV + d] : 0.0f; };
    const auto weight = [&](int t, int s) { return w[t][s]; };
    const auto weight_t = [&](int t, int s) { return w[s][t]; };
    clear(part);
    weigh(w, decay, tiles, d_out, correction, true);
    add_product(part, tiles, CHUNK, weight, key);
    add_product(part, tiles, DV, [&](int t, int d) { return from_start[t] * d_out(t, d); }, state_t);
    take(part, sum_q, d_gate, query, 1.0f);
    add_product(part, tiles, CHUNK, weight_t, query);
#if !ADDITIVE
    weigh(w, decay, tiles, reading, correction, false);
    add_product(part, tiles, CHUNK, weight_t, key);
#endif
    add_product(part, tiles, DV, [&](int t, int d) { return decay[count - 1][t] * correction(t, d); }, d_state_t);
    take(part, sum_k, d_gate, key, -1.0f);
#if !ADDITIVE
    add_product(part, tiles, CHUNK, weight, key);
    add_product(part, tiles, DV, [&](int t, int d) { return from_start[t] * reading(t, d); }, state_t);
    take(part, sum_k, d_gate, key, 1.0f);
#endif

    // dS.S_end: the state after the chunk is that before the next.
    float along = 0.0f;
    if (chunk + 1 < CHUNKS)
      for (int i = id; i < DK * DV; i += 256) along += d_state[i] * state[(size_t)DK * DV + i];
    EACH(step, 5) along += __shfl_xor_sync(0xffffffffu, along, 16 >> step);
    if (id % 32 == 0) parts[id / 32] = along;
    float own = 0.0f;  // four threads for a token
    if (id / 4 < count)
      for (int d = id % 4; d < DV; d += 4)
        own += missed[(size_t)(id / 4) * DV + d] * d_corrected[(size_t)(id / 4) * DV + d];
    own += __shfl_xor_sync(0xffffffffu, own, 1);
    own += __shfl_xor_sync(0xffffffffu, own, 2);
    if (id % 4 == 0 && id / 4 < count) store(dbeta + DBETA_AT(b, first + id / 4, h), own);
    __syncthreads();
    if (id < count) {
      float sum = 0.0f;
      for (int s = id; s < count && start[s] <= id; s++) sum += d_gate[s];
      if (start[count - 1] <= id) EACH(i, 8) sum += parts[i];
      store(dg + DG_AT(b, first + id, h), start[id] == id ? 0.0f : sum);
    }
  }

  EACH(i, 4) EACH(j, TURNS) {
    const int t = ty * 4 + i, d = tx + 16 * j;
    if (t < count && d < DK) {
      store(dq + DQ_AT(b, first + t, key_head) + d, SCALE * sum_q[i][j]);
      store(dk + DK_OUT_AT(b, first + t, key_head) + d, sum_k[i][j]);
    }
  }
}
