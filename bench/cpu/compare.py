"""Training steps of this engine and of PyTorch (eager, with PEFT) on one CPU, alternately: A B A B …

    compare.py MODEL_FOLDER [--peer PYTHON] [--only lora-f32 …] [--steps 8] [--batch 1] [--sequence 512] [--threads 2]
               [--record]

PYTHON is an interpreter with torch, transformers and peft. Both sides stay loaded and take one step each alternately, on
the same rows; the first steps are not counted. The ratio of a pair of neighbouring steps is free of what slows the
machine for longer than a step: the median over the pairs is what counts, the quartiles say how sure it is. With
`--record` the table is added to `bench/results/`, in the file of this CPU.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import re
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
WORK = ["lora-f32", "full-f32", "lora-bf16", "full-bf16"]
WARM_UP = 2
COLUMNS = [
    "date", "commit", "cpu", "threads", "model", "work", "precision", "batch", "seq_len", "tokens_per_second",
    "peer_tokens_per_second", "ratio", "ratio_low", "ratio_high", "cpu_seconds_ratio", "steps", "versions",
]  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--peer", default=sys.executable, help="interpreter of the other side")
    parser.add_argument("--only", nargs="+", choices=WORK, default=WORK)
    for name, value in {"steps": 8, "batch": 1, "sequence": 512, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--record", action="store_true")
    return parser.parse_args()


class Side:
    """A loaded trainer in its own process."""

    def __init__(self, python: str, name: str, a: argparse.Namespace, work: str) -> None:
        task, precision = work.split("-")
        numbers = [str(n) for n in (a.batch, a.sequence, a.threads)]
        command = [python, str(HERE / "side.py"), name, str(a.folder), task, precision, *numbers]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self.what = self.read()
        self.steps: list[tuple[float, float, float]] = []

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self.process.args))} has ended; run it by hand to see why")
        return line.strip()

    def step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        wall, processor, loss = (float(word) for word in self.read().split())
        self.steps.append((wall, processor, loss))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def cpu_name() -> str:
    flags = pathlib.Path("/proc/cpuinfo").read_text()
    found = re.search(r"model name\s*:\s*(.*)", flags)
    extra = " avx512_bf16" if "avx512_bf16" in flags else ""
    return (found[1].strip() if found else "cpu") + extra


def commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def compare(a: argparse.Namespace, work: str) -> dict[str, str]:
    sides = [Side(sys.executable, "surogate", a, work), Side(a.peer, "torch", a, work)]
    for _ in range(WARM_UP + a.steps):
        for side in sides:
            side.step()
    for side in sides:
        side.close()
    (ours, peer) = (side.steps[WARM_UP:] for side in sides)
    ratios = [b[0] / a[0] for a, b in zip(ours, peer, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    tokens = a.batch * a.sequence
    rate = [tokens / statistics.median(step[0] for step in side) for side in (ours, peer)]
    losses = [side.steps[0][2] for side in sides]
    print(
        f"{work:10} {rate[0]:7.1f} tok/s  torch {rate[1]:7.1f}  ratio {statistics.median(ratios):.2f} "
        f"({low:.2f}–{high:.2f})  first loss {losses[0]:.4f} / {losses[1]:.4f}",
        flush=True,
    )
    task, precision = work.split("-")
    processor = statistics.median(b[1] / a[1] for a, b in zip(ours, peer, strict=True))
    values = [
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", commit(), cpu_name(), a.threads, a.folder.resolve().name,
        task, precision, a.batch, a.sequence, f"{rate[0]:.1f}", f"{rate[1]:.1f}", f"{statistics.median(ratios):.3f}",
        f"{low:.3f}", f"{high:.3f}", f"{processor:.3f}", a.steps, "; ".join(side.what for side in sides),
    ]  # fmt: skip
    return dict(zip(COLUMNS, map(str, values), strict=True))


def record(table: list[dict[str, str]]) -> pathlib.Path:
    name = re.sub(r"[^a-z0-9]+", "-", table[0]["cpu"].lower()).strip("-")
    path = HERE.parent / "results" / f"{name}.csv"
    head = "" if path.exists() else ",".join(COLUMNS) + "\n"
    lines = "".join(",".join(row[column] for column in COLUMNS) + "\n" for row in table)
    with path.open("a") as file:
        file.write(head + lines)
    return path


def main() -> None:
    a = arguments()
    print(f"{cpu_name()}, {a.threads} threads, {a.folder.resolve().name}, batch {a.batch} × {a.sequence}", flush=True)
    table = [compare(a, work) for work in a.only]
    if a.record:
        print(record(table))


if __name__ == "__main__":
    main()
