// The upper Cholesky factor of the inverse of H [N, N] with its rows and columns in an order, in f64. It is L⁻¹ reversed, where L is the
// lower factor of H with rows and columns reversed. Kernels run in this order for every tile of the diagonal: `factor_tile`,
// `factor_panel`, `factor_rest`; then for every row of tiles: `invert_sums`, `invert_row`.
// a f64 [N, N]: the matrix, of which tiles above the diagonal are not read. inverses f64 [tiles, TILE, TILE]: of the tiles on the
// diagonal of L, zero above their diagonal and beyond N. row f64 [TILE, tiles * TILE].
#include "types.cuh"

#define LINE (TILE + 1)
#define CHUNK 16
// A thread has the numbers of a tile that are multiples of this many rows and columns after its first.
#define APART (TILE / 4)
#define WIDE ((N + TILE - 1) / TILE * TILE)
#define AT(r, c) ((u64)(r) * N + (c))

extern "C" __global__ void __launch_bounds__(THREADS)
reverse_in(const float* __restrict__ h, const int* __restrict__ order, double* __restrict__ a) {
  const int r = blockIdx.x, c = blockIdx.y * THREADS + threadIdx.x;
  if (c >= N) return;
  const int i = order[N - 1 - r], j = order[N - 1 - c];
  a[AT(r, c)] = c <= r ? (double)h[AT(max(i, j), min(i, j))] : 0.0;
}

extern "C" __global__ void __launch_bounds__(THREADS)
reverse_out(const double* __restrict__ a, float* __restrict__ u) {
  const int r = blockIdx.x, c = blockIdx.y * THREADS + threadIdx.x;
  if (c < N) u[AT(r, c)] = c >= r ? (float)a[AT(N - 1 - r, N - 1 - c)] : 0.0f;
}

// Factors a tile of the diagonal and inverts its factor.
extern "C" __global__ void __launch_bounds__(THREADS)
factor_tile(double* __restrict__ a, double* __restrict__ inverses, int tile) {
  __shared__ double s[TILE][LINE];
  __shared__ double diagonal[TILE];
  const int first = tile * TILE, width = min(TILE, N - first), thread = threadIdx.x;
  for (int i = thread; i < TILE * TILE; i += THREADS) {
    const int r = i / TILE, c = i % TILE;
    s[r][c] = r < width && c < width ? a[AT(first + r, first + c)] : 0.0;
  }
  __syncthreads();
  for (int k = 0; k < width; k++) {
    if (thread == 0) s[k][k] = sqrt(s[k][k]);
    __syncthreads();
    for (int r = k + 1 + thread; r < width; r += THREADS) s[r][k] /= s[k][k];
    __syncthreads();
    const int rest = width - k - 1;
    for (int i = thread; i < rest * rest; i += THREADS) {
      const int r = k + 1 + i / rest, c = k + 1 + i % rest;
      if (c <= r) s[r][c] -= s[r][k] * s[c][k];
    }
    __syncthreads();
  }
  // A thread for each column of the inverse, which lies in the row of that number above the diagonal.
  for (int c = thread; c < width; c += THREADS) {
    diagonal[c] = 1.0 / s[c][c];
    for (int r = c + 1; r < width; r++) {
      double sum = s[r][c] * diagonal[c];
      for (int k = c + 1; k < r; k++) sum += s[r][k] * s[c][k];
      s[c][r] = -sum / s[r][r];
    }
  }
  __syncthreads();
  double* inverse = inverses + (u64)tile * TILE * TILE;
  for (int i = thread; i < TILE * TILE; i += THREADS) {
    const int r = i / TILE, c = i % TILE;
    inverse[i] = r < width && c <= r ? (c == r ? diagonal[r] : s[c][r]) : 0.0;
    if (r < width && c <= r) a[AT(first + r, first + c)] = s[r][c];
  }
}

// sums += a·b over k of `depth`, for a tile of TILE by TILE; a thread has 4 by 4 numbers of it. `a_at(r, k)`, `b_at(k, c)`: numbers,
// zero where there are none. TURNED_: neighbours in memory of b differ in k. The product is in f64, in the order of k.
template <bool TURNED_, typename A_, typename B_>
__device__ __forceinline__ void product(double (&sums)[4][4], int depth, A_ a_at, B_ b_at) {
  __shared__ double a[CHUNK][LINE], b[CHUNK][LINE];
  const int thread = threadIdx.x, down = thread / APART, right = thread % APART;
  for (int first = 0; first < depth; first += CHUNK) {
    __syncthreads();
    for (int i = thread; i < TILE * CHUNK; i += THREADS) {
      a[i % CHUNK][i / CHUNK] = first + i % CHUNK < depth ? a_at(i / CHUNK, first + i % CHUNK) : 0.0;
      const int k = TURNED_ ? i % CHUNK : i / TILE, c = TURNED_ ? i / CHUNK : i % TILE;
      b[k][c] = first + k < depth ? b_at(first + k, c) : 0.0;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < CHUNK; k++) {
      double x[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        x[i] = a[k][down + i * APART];
        y[i] = b[k][right + i * APART];
      }
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] += x[i] * y[j];
    }
  }
}

// The rows below a tile of the diagonal, times the transpose of its inverse.
extern "C" __global__ void __launch_bounds__(THREADS)
factor_panel(double* __restrict__ a, const double* __restrict__ inverses, int tile) {
  const int first = tile * TILE, top = first + TILE + blockIdx.x * TILE;
  const double* inverse = inverses + (u64)tile * TILE * TILE;
  double sums[4][4] = {};
  product<true>(sums, TILE, [&](int r, int k) { return top + r < N ? a[AT(top + r, first + k)] : 0.0; },
                [&](int k, int c) { return inverse[c * TILE + k]; });
  const int down = threadIdx.x / APART, right = threadIdx.x % APART;
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++)
      if (top + down + i * APART < N) a[AT(top + down + i * APART, first + right + j * APART)] = sums[i][j];
}

// What is right of and below a tile of the diagonal, less the product of the rows of its panel.
extern "C" __global__ void __launch_bounds__(THREADS)
factor_rest(double* __restrict__ a, int tile) {
  if (blockIdx.x > blockIdx.y) return;
  const int first = tile * TILE, top = first + TILE + blockIdx.y * TILE, left = first + TILE + blockIdx.x * TILE;
  double sums[4][4] = {};
  product<true>(sums, TILE, [&](int r, int k) { return top + r < N ? a[AT(top + r, first + k)] : 0.0; },
                [&](int k, int c) { return left + c < N ? a[AT(left + c, first + k)] : 0.0; });
  const int down = threadIdx.x / APART, right = threadIdx.x % APART;
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++)
      if (top + down + i * APART < N && left + right + j * APART < N) a[AT(top + down + i * APART, left + right + j * APART)] -= sums[i][j];
}

// A row of tiles of L left of the diagonal, times the rows of L⁻¹ above it.
extern "C" __global__ void __launch_bounds__(THREADS)
invert_sums(const double* __restrict__ a, double* __restrict__ row, int tile) {
  const int top = tile * TILE, left = blockIdx.x * TILE;
  double sums[4][4] = {};
  product<false>(sums, top - left, [&](int r, int k) { return top + r < N ? a[AT(top + r, left + k)] : 0.0; },
                 [&](int k, int c) { return a[AT(left + k, left + c)]; });
  const int down = threadIdx.x / APART, right = threadIdx.x % APART;
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) row[(u64)(down + i * APART) * WIDE + left + right + j * APART] = sums[i][j];
}

// The row of tiles of L⁻¹: −(the inverse of the tile of the diagonal)·(these sums), and that inverse.
extern "C" __global__ void __launch_bounds__(THREADS)
invert_row(double* __restrict__ a, const double* __restrict__ inverses, const double* __restrict__ row, int tile) {
  const int top = tile * TILE, left = blockIdx.x * TILE;
  const double* inverse = inverses + (u64)tile * TILE * TILE;
  const int down = threadIdx.x / APART, right = threadIdx.x % APART;
  double sums[4][4] = {};
  if (left < top) {
    product<false>(sums, TILE, [&](int r, int k) { return inverse[r * TILE + k]; },
                   [&](int k, int c) { return -row[(u64)k * WIDE + left + c]; });
  } else {
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 4; j++) sums[i][j] = inverse[(down + i * APART) * TILE + right + j * APART];
  }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++)
      if (top + down + i * APART < N && left + right + j * APART < N) a[AT(top + down + i * APART, left + right + j * APART)] = sums[i][j];
}
