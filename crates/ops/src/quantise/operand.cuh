// Where units of four bits expect the E4M3 scale of 16 elements of a row: tiles of 128 rows by 4 blocks, 512 bytes each, those
// of the same rows one after another; in a tile rows 32 apart are neighbours.
#pragma once

__device__ __forceinline__ u64 scale_at(u64 row, u32 block, u32 blocks) {
  const u64 tile = row / 128 * ((blocks + 3) / 4) + block / 4;
  return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}
