"""Reading cached rows: tokens per second of one core, packed and batched, and the memory that it takes.

    from_cache.py [--tokens 536870912] [--times 3]

Writes a cache of that many tokens (2 GiB of ids; lengths log-normal around 300), then deals one shuffled epoch into
packed batches of 8 x 2048 in one thread, from scratch each time. Time is the CPU time of that thread, memory what the
process grows by at most. Needs cargo; the median is what counts.
"""

from __future__ import annotations

import argparse
import statistics

from figures import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 29)
    parser.add_argument("--times", type=int, default=3)
    a = parser.parse_args()
    rounds = []
    for number in range(a.times):
        rounds.append(measure("reading_kept_rows", SUROGATE_FIGURE_TOKENS=str(a.tokens)))
        of = rounds[-1]
        print(
            f"{number + 1}: {of['tokens_per_second'] / 1e6:.1f} M tokens/s, {of['memory_bytes'] / 2**20:.0f} MiB more "
            f"memory, opened in {of['opening_seconds']:.2f} s, rows {100 * of['fill']:.2f} % full, "
            f"cache of {of['cache_bytes'] / 2**30:.2f} GiB, {of['documents']} documents",
            flush=True,
        )
    rates = [of["tokens_per_second"] / 1e6 for of in rounds]
    grown = max(of["memory_bytes"] for of in rounds) / 2**20
    print(f"median {statistics.median(rates):.1f} M tokens/s (least {min(rates):.1f}), at most {grown:.0f} MiB more")


if __name__ == "__main__":
    main()
