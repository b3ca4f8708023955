"""Files of images to batches of patches: images per second of one core, and of all with batches made ahead.

    images.py FOLDER [--times 3]

FOLDER holds images of about one size, JPEG or PNG. Batches have eight of them, as Qwen3-VL reads them: decoded,
resized to whole blocks of 32 pixels, patches in f32. One core: all images divided by the CPU time of the process.
Needs cargo; the median is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEST = [
    "cargo",
    "test",
    "--quiet",
    "--release",
    "-p",
    "data",
    "--lib",
    "laying_out_images",
    "--",
    "--ignored",
    "--nocapture",
]


def measure(folder: pathlib.Path, **variables: str) -> dict[str, float]:
    """One round in a process of its own."""
    reported = subprocess.run(
        TEST, cwd=ROOT, check=True, text=True, capture_output=True,
        env={**os.environ, "SUROGATE_FIGURE_IMAGES": str(folder.absolute()), **variables},
    )  # fmt: skip
    line = next(line for line in reported.stdout.splitlines() if line.startswith("FIGURES "))
    return json.loads(line.removeprefix("FIGURES "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--times", type=int, default=3)
    a = parser.parse_args()
    alone = [measure(a.folder, RAYON_NUM_THREADS="1") for _ in range(a.times)]
    ahead = [measure(a.folder, SUROGATE_FIGURE_AHEAD="4") for _ in range(a.times)]
    of_core = statistics.median(of["images_per_core_second"] for of in alone)
    of_all = statistics.median(of["images_per_second"] for of in ahead)
    count, cores = alone[0]["images"], os.cpu_count()
    print(f"{count} images: {of_core:.1f} images/s of a core, {of_all:.1f} images/s with {cores} cores")


if __name__ == "__main__":
    main()
