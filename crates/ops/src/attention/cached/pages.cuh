// Where a token of a sequence is in a cache [pages, PAGE, ...]: its line, counted over all pages.
#pragma once

// The position after the last key that a token sees, and the parameter that says it where that is not its own.
#ifdef LAST_KEY
#define LAST_KEYS const int *last_keys,
#define END_OF(token) (last_keys[token] + 1)
#else
#define LAST_KEYS
#define END_OF(token) (positions[token] + 1)
#endif

__device__ __forceinline__ size_t line_of(const int* table, int row, int position) {
  return (size_t)table[row * TABLE + position / PAGE] * PAGE + position % PAGE;
}
