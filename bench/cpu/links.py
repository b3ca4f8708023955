"""What a plan says of a link between nodes, and what it takes: nodes on CPUs with a network each, whose rate is limited.

    python bench/cpu/links.py --folder FOLDER [--nodes 2 3] [--rates 5 10] [--compression none int8] [--steps 12]

The rates are in megabits a second, headers included: slow enough that a step waits for its link and for little else. A
plan gets what is left of them for the bytes of a run. A run without a limit says what a step takes besides.
Prints a row for each run: bytes that a node gets from the others and seconds that it waits for them, as
`surogate plan --machine` computes them, and the seconds by which the shortest step is longer than without a limit: what else
the machine does only makes steps longer. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))

import node_faults  # noqa: E402

#: Steps that are not counted.
WARM_UP = 2

#: Bytes that a link lets through at once: small next to what a step sends. All others wait, and none is dropped.
BURST = 2 << 10

#: Bytes of a stream among those of a link that both nodes use alike: two full segments have headers of 66 bytes each, and
#: an acknowledgement of 66.
PAYLOAD = 2 * 1448 / (2 * 1514 + 66)

SUROGATE = [sys.executable, "-m", "surogate"]


def options(folder: pathlib.Path, steps: int, compression: str) -> dict[str, object]:
    example = ROOT / "examples" / "stories"
    return {
        "run_name": "links",
        "model": str(example / "model"),
        "output_dir": str(folder / "output"),
        "lora": False,
        "torch_dtype": "float32",
        "optimizer": "adamw",
        "learning_rate": 1e-4,
        "datasets": node_faults.full_rows(folder, 120, 32),
        "validation_split_ratio": 0,
        "sequence_len": 32,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": steps,
        "save_steps": 1_000_000,
        "shard_scope": "node",
        "gradient_compression": compression,
    }


def limit(spaces: list[str], rate: float | None) -> None:
    """What each node may send, in megabits a second."""
    for space in spaces:
        shape = ["tc", "qdisc", "replace", "dev", "eth0", "root"]
        kind = ["tbf", "rate", f"{rate}mbit", "burst", str(BURST), "latency", "10s"] if rate else ["pfifo"]
        node_faults.run("ip", "netns", "exec", space, *shape, *kind)


def measured(folder: pathlib.Path, of: dict[str, object], nodes: int, spaces: list[str]) -> float:
    """The shortest step of a run, seconds."""
    folder.mkdir()
    file = folder / "run.json"
    file.write_text(json.dumps({**of, "device": "cpu", "output_dir": str(folder / "output")}))
    processes = []
    for node, space in enumerate(spaces[:nodes]):
        where = {"num_nodes": nodes, "node_rank": node, "rendezvous": "10.78.0.1:29400"}
        words = [*SUROGATE, "sft", str(file), "--quiet", *(f"--set=distributed.{name}={value}" for name, value in where.items())]
        secret = {"SUROGATE_TOKEN": "a secret of these nodes"}
        processes.append(subprocess.Popen(["ip", "netns", "exec", space, *words], env={**os.environ, **secret}))
    if codes := [code for process in processes if (code := process.wait())]:
        raise SystemExit(f"nodes ended with {codes}")
    steps = node_faults.logged(folder / "output")
    return min(float(str(step["seconds"])) for step in steps[WARM_UP:])


def planned(folder: pathlib.Path, machine: pathlib.Path, of: dict[str, object], nodes: int, rate: float) -> tuple[int, float]:
    """At bytes a second: bytes that a node gets from the others, and seconds that a step waits for them."""
    file = folder / "plan.json"
    file.write_text(json.dumps(of))
    words = [*SUROGATE, "plan", str(file), "--json", "--machine", f"{nodes}x1x{machine}@{rate / 1e9}"]
    said = subprocess.run(words, capture_output=True, text=True)
    if said.returncode:
        raise SystemExit(said.stderr)
    sizes = json.loads(said.stdout)["nodes"]["sizes"]
    alone, several = (next(size for size in sizes if size["nodes"] == count) for count in (1, nodes))
    return several["between_bytes"], several["waiting_seconds"] - alone["waiting_seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="an empty folder for the runs")
    parser.add_argument("--nodes", type=int, nargs="+", choices=range(2, node_faults.NODES + 1), default=[2, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=[5.0, 10.0])
    parser.add_argument("--compression", nargs="+", default=["none", "int8"])
    parser.add_argument("--steps", type=int, default=12)
    a = parser.parse_args()
    folder = a.folder.resolve()
    folder.mkdir(parents=True)
    machine = folder / "cpu.json"
    subprocess.run([*SUROGATE, "doctor", "--calibrate", "least", "--output", str(machine)], check=True, capture_output=True)
    print("| Nodes | Compression | Mbit/s | Bytes | Planned | Measured | Ratio |\n|---|---|---|---|---|---|---|", flush=True)
    with node_faults.networks(f"sl{os.getpid() % 100_000}n") as spaces:
        for nodes in a.nodes:
            for compression in a.compression:
                of = options(folder, a.steps, compression)
                name = f"{nodes}-{compression}"
                limit(spaces, None)
                free = measured(folder / name, of, nodes, spaces)
                for rate in a.rates:
                    limit(spaces, rate)
                    size, seconds = planned(folder, machine, of, nodes, PAYLOAD * rate * 1e6 / 8)
                    found = measured(folder / f"{name}-{rate:g}", of, nodes, spaces) - free
                    cells = f"{nodes} | {compression} | {rate:g} | {size:.0f} | {seconds:.3f} s | {found:.3f} s"
                    print(f"| {cells} | {found / seconds:.3f} |", flush=True)


if __name__ == "__main__":
    main()
