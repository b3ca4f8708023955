// Where a token of a sequence is in a cache [pages, PAGE, ...]: its line, counted over all pages.
#pragma once

__device__ __forceinline__ size_t line_of(const int* table, int row, int position) {
  return (size_t)table[row * TABLE + position / PAGE] * PAGE + position % PAGE;
}
