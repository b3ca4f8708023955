// Codes of a tile of TILE rows by TILE columns, turned: a thread has 16 neighbours of each of four rows, then 16 of each
// of four columns. Bytes change places in registers, four by four, and go through shared memory as words of four rows of
// one column. The words of a column are moved by four for every 16 columns, so that a warp writes and reads all banks.
// Needs THREADS, which is TILE / 4 · TILE / 16.
#pragma once
#include "types.cuh"

#define TILE 128
#define LINE (TILE / 4)

__device__ __forceinline__ u32 word_of(int column, int four) { return column * LINE + ((four + column / 16 * 4) & (LINE - 1)); }

// Four rows of a thread, from row 4·fours of the tile on and column 16·chunk.
__device__ __forceinline__ void put_rows(u32* tile, const uint4 (&rows)[4], int fours, int chunk) {
  union { uint4 all; u32 words[4]; } row[4] = {{rows[0]}, {rows[1]}, {rows[2]}, {rows[3]}};
#pragma unroll
  for (int w = 0; w < 4; w++) {
    const u32 a = row[0].words[w], b = row[1].words[w], c = row[2].words[w], d = row[3].words[w];
    const u32 low[2] = {__byte_perm(a, b, 0x5140), __byte_perm(c, d, 0x5140)};
    const u32 high[2] = {__byte_perm(a, b, 0x7362), __byte_perm(c, d, 0x7362)};
    u32* to = tile + word_of(chunk * 16, fours) + 4 * w * LINE;
    to[0 * LINE] = __byte_perm(low[0], low[1], 0x5410);
    to[1 * LINE] = __byte_perm(low[0], low[1], 0x7632);
    to[2 * LINE] = __byte_perm(high[0], high[1], 0x5410);
    to[3 * LINE] = __byte_perm(high[0], high[1], 0x7632);
  }
}

// Stores `columns` columns of the tile, `rows` codes of each, as rows from `to` on with a stride of `pitch` codes.
__device__ __forceinline__ void write_columns(const u32* tile, unsigned char* to, size_t pitch, int columns, int rows) {
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const int place = threadIdx.x + n * THREADS, column = place / (TILE / 16), first_row = place % (TILE / 16) * 16;
    if (column < columns && first_row < rows)
      *(uint4*)(to + column * pitch + first_row) = *(const uint4*)(tile + word_of(column, first_row / 4));
  }
}
