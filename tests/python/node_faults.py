"""Random faults on three nodes of one run, and what must hold after each: the run goes on from its last checkpoint, or ends
clearly; no process remains; no step is lost, and none has other numbers than in an undisturbed run.

    python tests/python/node_faults.py --folder FOLDER --faults 200 --seed 1 [--compression int8]

Needs root and iproute2: every node has a network of its own, a bridge connects them, and node 0 writes to a small disk in
memory. `test_nodes.py` runs a short form of it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

NODES = 3

#: Seconds that nodes wait for each other.
TIMEOUT = 15

#: Seconds after a fault within which the run must have made a step: the longest silence of a link (20), the time in which nodes
#: find each other twice, and their start on a busy machine.
RECOVERED = 150.0

#: Size of the disk in memory.
DISK = 64 << 20

#: Percentages of the kinds of faults.
KINDS = {"kill": 40, "kill two": 10, "stop": 17, "cut": 15, "slow": 10, "full disk": 8}

#: Why a node may end that goes on by itself where another one is lost.
ENDS = re.compile(r"No space left on device|did not come to|cannot be reached at")

ROOT = Path(__file__).resolve().parents[2]


def run(*words: object, check: bool = True) -> int:
    return subprocess.run([str(word) for word in words], check=check, stderr=subprocess.DEVNULL).returncode


@contextlib.contextmanager
def networks(name: str) -> Iterator[list[str]]:
    """A namespace for each node, with addresses 10.78.0.1 and so on, connected by a bridge in one of their own."""
    spaces = [f"{name}{number}" for number in range(NODES)]
    middle = f"{name}m"
    try:
        for space in [middle, *spaces]:
            run("ip", "netns", "add", space)
        run("ip", "-n", middle, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", middle, "link", "set", "bridge", "up")
        for number, space in enumerate(spaces):
            run("ip", "-n", middle, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "-n", middle, "link", "set", f"port{number}", "master", "bridge", "up")
            run("ip", "-n", space, "addr", "add", f"10.78.0.{number + 1}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
        yield spaces
    finally:
        for space in [*spaces, middle]:
            run("ip", "netns", "del", space, check=False)


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[None]:
    place.mkdir()
    run("mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", place)
    try:
        yield
    finally:
        run("umount", "-l", place, check=False)


def full_rows(folder: Path, rows: int, length: int) -> list[dict[str, object]]:
    """A data set whose every document fills a row: in the order of the data the ranks of nodes have the rows of ranks of one process.

    `rows` is to be a multiple of the rows of a micro-step, so that passes end alike.
    """
    path = folder / f"rows-{rows}.jsonl"
    ids = [[3 + (row * 7919 + at * 104_729) % 500 for at in range(length)] for row in range(rows)]
    path.write_text("".join(json.dumps({"input_ids": of}) + "\n" for of in ids))
    return [{"path": str(path), "type": "tokens"}]


def options(output: Path, data: Path, **changed: object) -> dict[str, object]:
    """A run whose data are written into the folder `data`."""
    example = ROOT / "examples" / "stories"
    return {
        "run_name": "faults",
        "model": str(example / "model"),
        "output_dir": str(output),
        "device": "cpu",
        "datasets": full_rows(data, 120, 64),
        "validation_split_ratio": 0,
        "shuffle": False,
        "sequence_len": 64,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "max_steps": 1_000_000,
        "save_steps": 5,
        "save_total_limit": 2,
        "eval_steps": 1_000_000,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "lora_rank": 4,
        "resume_from_checkpoint": True,
        **changed,
    }


def shared(compression: str) -> dict[str, object]:
    """Options of what nodes send each other."""
    if compression == "none":
        # Shards of all nodes have the bits of as many ranks in one process; those of each node are equal up to rounding.
        return {"shard_scope": "world"}
    # Faults come on both sides of the end of the warm-up.
    warm_up = {"compression_warmup_steps": 40} if compression == "onebit" else {}
    return {"shard_scope": "node", "optimizer": "adamw", "gradient_compression": compression, **warm_up}


@dataclass
class Launcher:
    """Starts nodes, and starts those again that have ended."""

    folder: Path
    spaces: list[str]
    port: int = 29400
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    #: Exit codes of processes that ended, by node.
    codes: list[tuple[int, int]] = field(default_factory=list)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "surogate", "sft", str(self.folder / "run.json"), "--set=distributed.max_restarts=1000"]

    def start(self, node: int) -> None:
        inside = ["ip", "netns", "exec", self.spaces[node]]
        where = {"num_nodes": NODES, "node_rank": node, "rendezvous": f"10.78.0.1:{self.port}", "timeout": TIMEOUT}
        flags = [f"--set=distributed.{name}={value}" for name, value in where.items()]
        with self.said(node).open("ab") as log:
            self.processes[node] = subprocess.Popen(
                [*inside, *self.command(), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "SUROGATE_TOKEN": "a secret of these nodes"},
            )

    def said(self, node: int) -> Path:
        return self.folder / f"node-{node}.txt"

    def tend(self) -> None:
        for node, process in list(self.processes.items()):
            if (code := process.poll()) is not None:
                self.codes.append((node, code))
                tail = self.said(node).read_text(errors="replace")[-2000:]
                if code != -signal.SIGKILL and not (code == 1 and ENDS.search(tail)):
                    raise Broken(f"node {node} ended with {code}: {tail}")
                self.start(node)

    def end(self, number: int) -> list[int]:
        """Exit codes after a signal to all."""
        for process in self.processes.values():
            process.send_signal(number)
        try:
            return [process.wait(120) for process in self.processes.values()]
        finally:
            for process in self.processes.values():
                process.kill()


def logged(output: Path) -> list[dict[str, object]]:
    """The steps of a log, whose last line may be incomplete."""
    found = []
    for log in output.glob("log-*.json"):
        for line in log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event["event"] == "step":
                    found.append(event)
    return found


def last_step(output: Path) -> int:
    """Of the log, -1 where there is none: read from its end."""
    for log in output.glob("log-*.json"):
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            if numbers := re.findall(rb'"event":"step","step":(\d+)', file.read()):
                return int(numbers[-1])
    return -1


class Faults:
    """What is done to the nodes. Each gives the nodes that were touched, and undoes itself."""

    def __init__(self, launcher: Launcher, disk: Path, draw: random.Random) -> None:
        self.launcher, self.disk, self.draw = launcher, disk, draw

    def kill(self, count: int = 1) -> list[int]:
        nodes = self.draw.sample(range(NODES), count)
        for node in nodes:
            self.launcher.processes[node].kill()
        self.wait(self.draw.uniform(0, 2))
        return nodes

    def kill_two(self) -> list[int]:
        return self.kill(2)

    def stop(self) -> list[int]:
        node = self.draw.randrange(NODES)
        process = self.launcher.processes[node]
        process.send_signal(signal.SIGSTOP)
        # Shorter than nodes wait, or longer.
        self.wait(self.draw.choice([self.draw.uniform(0.2, 4), TIMEOUT + self.draw.uniform(1, 4)]))
        process.send_signal(signal.SIGCONT)
        return [node]

    def cut(self) -> list[int]:
        node = self.draw.randrange(NODES)
        space = self.launcher.spaces[node]
        run("ip", "-n", space, "link", "set", "eth0", "down")
        self.wait(self.draw.choice([self.draw.uniform(0.2, 4), TIMEOUT + self.draw.uniform(1, 10)]))
        run("ip", "-n", space, "link", "set", "eth0", "up")
        return [node]

    def slow(self) -> list[int]:
        node = self.draw.randrange(NODES)
        rate = self.draw.choice(["256kbit", "1mbit", "4mbit"])
        shape = ["tbf", "rate", rate, "burst", "16kbit", "latency", "300ms"]
        run("ip", "netns", "exec", self.launcher.spaces[node], "tc", "qdisc", "add", "dev", "eth0", "root", *shape)
        self.wait(self.draw.uniform(1, 6))
        run("ip", "netns", "exec", self.launcher.spaces[node], "tc", "qdisc", "del", "dev", "eth0", "root")
        return [node]

    def full_disk(self) -> list[int]:
        filler = self.disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        self.wait(self.draw.uniform(2, 6))
        filler.unlink()
        return [0]

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


class Broken(AssertionError):
    """Something that must hold does not."""


def check_recovered(launcher: Launcher, output: Path, before: int) -> float:
    """Waits for a step after the last one of before; seconds that took."""
    begun = time.monotonic()
    while last_step(output) <= before:
        if time.monotonic() > begun + RECOVERED:
            raise Broken(f"no step after {before} within {RECOVERED:.0f} s")
        launcher.tend()
        time.sleep(0.2)
    return time.monotonic() - begun


def check_processes(launcher: Launcher) -> None:
    """One process of the run on each node: none remains."""
    file = str(launcher.folder / "run.json").encode()
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            found += file in words and b"sft" in words
    # One that was just started may not be there yet.
    if found > NODES:
        raise Broken(f"{found} processes of {NODES} nodes")


def check_log(steps: list[dict[str, object]], reference: dict[int, tuple[object, object]]) -> int:
    """Every step has its number and bits, however often it was done; how often steps were done again."""
    expected, again, begun = 0, 0, 0
    for event in steps:
        number = int(str(event["step"]))
        if number > expected:
            raise Broken(f"step {number} follows {expected - 1}: steps between are lost")
        if number < expected:
            again += expected - number
            # A run goes on from a checkpoint, whose number of steps is a multiple of 5.
            if number % 5:
                raise Broken(f"the run went on at step {number}, where no checkpoint was")
            begun = number
        expected = number + 1
        if number in reference and (event["loss"], event["grad_norm"]) != reference[number]:
            raise Broken(
                f"step {number} of a run that went on at step {begun} has other numbers than in the undisturbed run, "
                f"{reference[number]}: {event}"
            )
    return again


def reference_run(folder: Path, steps: int, compression: str, spaces: list[str]) -> dict[int, tuple[object, object]]:
    """Loss and norm of the first steps of an undisturbed run: of three ranks of one process, or where sums are
    compressed, of three nodes.
    """
    folder.mkdir()
    several = compression != "none"
    of = {**shared(compression), "gpus": 1 if several else NODES, "save_steps": 1_000_000}
    (folder / "run.json").write_text(json.dumps(options(folder / "output", folder, **of)))
    launcher = Launcher(folder, spaces)
    if several:
        for node in range(NODES):
            launcher.start(node)
    else:
        words = [sys.executable, "-m", "surogate", "sft", str(folder / "run.json"), "--quiet"]
        launcher.processes[0] = subprocess.Popen(words)
    processes = launcher.processes.values()
    while last_step(folder / "output") < steps and all(process.poll() is None for process in processes):
        time.sleep(0.5)
    if set(codes := launcher.end(signal.SIGTERM)) != {143}:
        raise Broken(f"the undisturbed run ended with {codes}")
    return {int(str(of["step"])): (of["loss"], of["grad_norm"]) for of in logged(folder / "output")}


def campaign(folder: Path, faults: int, seed: int, tell: bool = True, compression: str = "none") -> dict[str, object]:
    """Runs a number of faults and returns their results. Raises `Broken`."""
    draw = random.Random(seed)
    disk = folder / "disk"
    output = disk / "output"
    (folder / "run.json").write_text(json.dumps(options(output, folder, **shared(compression))))
    kinds: collections.Counter[str] = collections.Counter()
    took: list[float] = []
    with networks(f"sg{os.getpid() % 100_000}n") as spaces, small_disk(disk):
        launcher = Launcher(folder, spaces)
        try:
            for node in range(NODES):
                launcher.start(node)
            check_recovered(launcher, output, 0)
            does = Faults(launcher, disk, draw)
            for number in range(faults):
                time.sleep(draw.uniform(0, 1.5))
                kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
                nodes = getattr(does, kind.replace(" ", "_"))()
                seconds = check_recovered(launcher, output, last_step(output))
                check_processes(launcher)
                kinds[kind] += 1
                took.append(seconds)
                if tell:
                    print(f"{number + 1:4} {kind} {nodes}: a step after {seconds:.1f} s, at {last_step(output)}", flush=True)
            codes = launcher.end(signal.SIGTERM)
        finally:
            for process in launcher.processes.values():
                process.kill()
        steps = logged(output)
        damaged = [str(path) for path in output.rglob("damaged-*")]
        said = "".join(launcher.said(node).read_text(errors="replace") for node in range(NODES))
        last = min(int(str(steps[-1]["step"])), 4000)
        reference = reference_run(folder / "reference", last, compression, spaces)
    for line, following in itertools.pairwise(said.splitlines()):
        if following.startswith("surogate: restart ") and not re.match(r"surogate: .*\bnode \d\b|surogate: the nodes were meeting", line):
            raise Broken(f"a restart whose reason names no node: {line}")
    if damaged or "is damaged" in said or "panicked" in said:
        raise Broken(f"something was damaged, or panicked: {damaged}")
    if not set(codes) <= {143, 6, 1}:
        raise Broken(f"a signal ended the nodes with {codes}")
    again = check_log(steps, reference)
    return {
        "faults": dict(kinds),
        "seed": seed,
        "compression": compression,
        "steps": int(str(steps[-1]["step"])) + 1,
        "steps_done_again": again,
        "compared": min(len(reference), int(str(steps[-1]["step"])) + 1),
        "restarts_in_process": said.count("surogate: restart "),
        "exit_codes": {str(code): count for code, count in collections.Counter(code for _, code in launcher.codes).items()},
        "seconds_to_a_step": {"median": sorted(took)[len(took) // 2], "most": max(took)},
        "end": codes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--compression", choices=["none", "int8", "topk", "onebit"], default="none", help="between nodes")
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder for what the run says")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    print(f"seed {options.seed}", flush=True)
    found = campaign(options.folder.resolve(), options.faults, options.seed, compression=options.compression)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
