"""Files of images to batches of patches: images per second of one core, and of all with batches made ahead.

    images.py FOLDER [--times 3]

FOLDER holds images of about one size, JPEG or PNG. Batches have eight of them, as Qwen3-VL reads them: decoded,
resized to whole blocks of 32 pixels, and cut into patches. One core: all images divided by the CPU time of the process.
Needs cargo; the median is what counts.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics

from figures import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--times", type=int, default=3)
    a = parser.parse_args()
    folder = {"SUROGATE_FIGURE_IMAGES": str(a.folder.absolute())}
    alone = [measure("laying_out_images", RAYON_NUM_THREADS="1", **folder) for _ in range(a.times)]
    ahead = [measure("laying_out_images", SUROGATE_FIGURE_AHEAD="4", **folder) for _ in range(a.times)]
    of_core = statistics.median(of["images_per_core_second"] for of in alone)
    of_all = statistics.median(of["images_per_second"] for of in ahead)
    count, cores = alone[0]["images"], os.cpu_count()
    print(f"{count} images: {of_core:.1f} images/s of a core, {of_all:.1f} images/s with {cores} cores")


if __name__ == "__main__":
    main()
