"""Two GPUs by every way that bytes can take between them, in one process and as two nodes: the same numbers, rates, and what
is left when a node dies.

    python bench/device/transports.py --only check    # 20 steps: losses and norms against one GPU, and of other options
    python bench/device/transports.py --only speed    # LoRA 0.6B, thousands of tokens a second
    python bench/device/transports.py --only lost     # kill -9 and SIGSTOP of node 1
    python bench/device/transports.py --device cpu --only check,lost   # does it work: ranks of the CPU

Nodes are processes of this host that see a GPU each. Deliberately unknown here: how a step works.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import one_run  # noqa: E402
import shaped  # noqa: E402
from rows import write_data  # noqa: E402

STORIES = HERE.parents[1] / "examples" / "stories"
STEPS = 20
# Tokens of a row.
ROW = 256
FP8 = {"recipe": "fp8_hybrid", "torch_dtype": "bfloat16"}

# Name, options, environment, nodes.
WAYS: list[tuple[str, dict[str, Any], dict[str, str], int]] = [
    ("peers", {"gpus": 2}, {}, 1),
    ("nccl", {"gpus": 2, "memcpy_all_gather": False, "memcpy_send_recv": False}, {}, 1),
    ("host", {"gpus": 2}, {"SUROGATE_PEER_ACCESS": "0"}, 1),
    ("nodes", {}, {}, 2),
    ("nodes-sockets", {}, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, 2),
]
# For a way that fails: is it the graph, or that calls return early?
AGAIN: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("without graphs", {"use_cuda_graphs": False}, {}),
    ("blocking", {}, {"NCCL_COMM_BLOCKING": "1"}),
]


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Run:
    """The processes of a run, which write to files in its folder."""

    def __init__(self, run: pathlib.Path, nodes: int, environment: dict[str, str], device: str, timeout: int = 120) -> None:
        self.output = run.parent / "output"
        self.printed = [run.parent / f"node-{node}.txt" for node in range(nodes)]
        self.processes = []
        meeting = f"--set=distributed.rendezvous=127.0.0.1:{port()}"
        for node, printed in enumerate(self.printed):
            words = [sys.executable, "-m", "surogate", "sft", str(run), "--quiet"]
            own = os.environ | environment
            if nodes > 1:
                words += [f"--set=distributed.num_nodes={nodes}", f"--set=distributed.node_rank={node}", meeting]
                words += [f"--set=distributed.timeout={timeout}"]
                own |= {"CUDA_VISIBLE_DEVICES": str(node)} if device == "cuda" else {}
            with printed.open("wb") as output:
                self.processes.append(subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=own))

    def text(self) -> str:
        return " || ".join(printed.read_text(errors="replace")[-1500:].strip() for printed in self.printed)

    def steps(self) -> list[dict[str, Any]]:
        return [event for event in one_run.events(self.output) if event["event"] == "step"]

    def ended(self, seconds: float) -> list[int | None]:
        """Exit codes; none where a process had to be killed."""
        deadline = time.time() + seconds
        codes: list[int | None] = []
        for process in self.processes:
            try:
                codes.append(process.wait(max(deadline - time.time(), 0.1)))
            except subprocess.TimeoutExpired:
                codes.append(None)
        self.kill()
        return codes

    def until(self, steps: int, seconds: float) -> bool:
        deadline = time.time() + seconds
        while time.time() < deadline and all(process.poll() is None for process in self.processes):
            if len(self.steps()) >= steps:
                return True
            time.sleep(0.2)
        return False

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def stories(name: str, options: dict[str, Any], a: Any) -> pathlib.Path:
    """The shipped model with all weights, in full rows without anything drawn: rows that nodes deal like ranks."""
    folder = a.out / name
    folder.mkdir(parents=True)
    vocabulary = json.loads((STORIES / "model" / "config.json").read_text())["vocab_size"]
    write_data(folder / "data.jsonl", False, ROW, ROW * 8 * STEPS, vocabulary)
    values = {
        "run_name": "transports",
        "model": str(STORIES / "model"),
        "output_dir": str(folder / "output"),
        "device": a.device,
        "datasets": [{"path": str(folder / "data.jsonl"), "type": "tokens"}],
        "validation_split_ratio": 0,
        "shuffle": False,
        "torch_dtype": "float32",
        "sequence_len": ROW,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "max_steps": STEPS,
        "shard_scope": "world",
        "save_steps": 1_000_000,
        "learning_rate": 1e-3,
        "optimizer": "adamw",
        "lora": False,
    }
    path = folder / "run.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in (values | options).items()))
    return path


def trajectory(name: str, options: dict[str, Any], environment: dict[str, str], nodes: int, a: Any) -> list[list[float]] | None:
    """Losses and norms of all steps; none, with what was printed, where the run failed."""
    began = time.time()
    run = Run(stories(name, options, a), nodes, environment, a.device)
    codes = run.ended(a.limit)
    steps = run.steps()
    if codes[0] != 0 or len(steps) < STEPS:
        print(f"| {name} | FAILED: {codes}, {len(steps)} steps: {run.text()} |", flush=True)
        return None
    notes = [line for line in run.printed[0].read_text(errors="replace").splitlines() if "NCCL" in line or "host memory" in line]
    print(f"  {name}: {time.time() - began:.1f} s {' '.join(notes)}", flush=True)
    return [[step["loss"], step["grad_norm"]] for step in steps]


def apart(a: list[list[float]], b: list[list[float]]) -> float:
    """The largest relative difference."""
    return max(abs(x - y) / abs(y) for one, two in zip(a, b) for x, y in zip(one, two))


def check(a: Any) -> int:
    failed = 0
    one = trajectory("one", {"gradient_accumulation_steps": 8}, {}, 1, a)
    if one is None:
        return 1
    first: list[list[float]] | None = None
    ways = [way for way in WAYS if a.device == "cuda" or way[0] in ("peers", "nodes")]
    for level in (1, 3):
        for name, options, environment, nodes in ways:
            named = f"{name}-{level}"
            found = trajectory(named, options | {"zero_level": level}, environment, nodes, a)
            if found is None:
                failed += 1
                for how, more, variables in AGAIN if "peers" not in name and level == 1 else []:
                    again = trajectory(f"{named} {how}", options | {"zero_level": level} | more, environment | variables, nodes, a)
                    if again is not None:
                        print(f"| {named} {how} | {apart(again, one):.2e} of one GPU |", flush=True)
                continue
            first = found if name == "peers" or first is None else first
            far, same = apart(found, one), found == first
            failed += far > 1e-5 or not same
            print(f"| {named} | {far:.2e} of one GPU | {'the bits of peers' if same else 'OTHER BITS'} |", flush=True)
    return failed + others(a)


# What has to have the bits of the run before it: name, GPUs, options.
OTHERS: list[list[tuple[str, int, dict[str, Any]]]] = [
    [(f"level-{level}", 2, {"zero_level": level}), (f"offload-{level}", 2, {"zero_level": level, "offload_grads": True})]
    for level in (1, 3)
] + [[("fp8-2", 2, {"zero_level": 2} | FP8), ("fp8-3", 2, {"zero_level": 3} | FP8), ("fp8-one", 1, FP8)]]


def others(a: Any) -> int:
    """Gradients on the host and sharded weights in codes have the bits of runs without; two stages those of one GPU."""
    failed = 0
    for group in OTHERS:
        # A CPU has no other memory.
        group = [of for of in group if a.device == "cuda" or "offload_grads" not in of[2]]
        first: list[list[float]] | None = None
        for name, gpus, options in group:
            found = trajectory(name, options | {"gpus": gpus, "gradient_accumulation_steps": 8 // gpus}, {}, 1, a)
            if found is None:
                failed += 1
                continue
            first = first or found
            # Sums over ranks and micro-steps have another order.
            failed += found != first and gpus > 1
            print(f"| {name} | {apart(found, first):.2e} of {group[0][0]}, last loss {found[-1][0]:.5f} |", flush=True)
    model = a.out / "untied"
    model.mkdir()
    shutil.copytree(STORIES / "model", model, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": False, "num_hidden_layers": 5}
    (model / "config.json").write_text(json.dumps(config))
    options = {"model": str(model), "init": "random", "max_grad_norm": 0}
    found = [
        trajectory(f"stages-{gpus}", options | {"gpus": gpus, "pipeline_parallel_size": gpus}, {}, 1, a) for gpus in (1, 2)
    ]
    if found[0] is None or found[1] is None:
        return failed + 1
    losses = [[loss for loss, _ in of] for of in found if of]
    same = losses[0] == losses[1]
    print(f"| stages | {apart(found[1], found[0]):.2e} of one GPU, losses {'the same' if same else 'OTHERS'} |", flush=True)
    return failed + (not same)


def speed(a: Any) -> int:
    failed = 0
    for name, options, environment, nodes in [("one", {}, {}, 1), *WAYS]:
        own = {"gpus": 1} if nodes > 1 or name == "one" else options
        path = shaped.write(f"lora-{name}", "qwen3-0.6b", "lora", own, a)
        began, before = time.time(), one_run.used_bytes()
        run = Run(path, nodes, environment, a.device)
        most, wanted = 0, a.warm_up + a.seconds
        while time.time() - began < a.limit and all(process.poll() is None for process in run.processes):
            time.sleep(1.0)
            most = max(most, one_run.used_bytes() or 0)
            steps = run.steps()
            if steps and one_run.when(steps[-1]) - one_run.when(steps[0]) > wanted:
                break
        for process in run.processes:
            process.send_signal(signal.SIGINT)
        run.ended(8)
        try:
            found = one_run.measured(one_run.events(run.output), began, a.warm_up)
        except (IndexError, StopIteration, ValueError, ZeroDivisionError):
            failed += 1
            print(f"| {name} | FAILED: {run.text()} |", flush=True)
            continue
        found |= {"name": name, "used": most, "used_before": before}
        with (a.out / "transports.jsonl").open("a") as record:
            record.write(json.dumps(found) + "\n")
        print(f"| {name} | {shaped.cells(found, '')} started in {found['to_step_1']:.1f} s", flush=True)
    return failed


def lost(a: Any) -> int:
    failed = 0
    for name, number, timeout in (("killed", signal.SIGKILL, 120), ("stopped", signal.SIGSTOP, 12)):
        path = stories(name, {"max_steps": 1_000_000}, a)
        run = Run(path, 2, {}, a.device, timeout)
        if not run.until(5, a.limit):
            print(f"| {name} | FAILED before: {run.text()} |", flush=True)
            run.kill()
            failed += 1
            continue
        began = time.time()
        run.processes[1].send_signal(number)
        try:
            code: int | None = run.processes[0].wait(60)
        except subprocess.TimeoutExpired:
            code = None
        after = time.time() - began
        run.kill()
        last_lines = run.printed[0].read_text(errors="replace").strip().splitlines()[-3:]
        failed += code != 6
        print(f"| {name} | node 0 ended with {code} after {after:.1f} s | {' / '.join(last_lines)} |", flush=True)
    return failed


def main() -> int:
    a = shaped.parser(__doc__, "transports", limit=60.0).parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    parts = {"check": check, "lost": lost, "speed": speed}
    return min(1, sum(part(a) for name, part in parts.items() if shaped.wanted(name, a)))


if __name__ == "__main__":
    raise SystemExit(main())
