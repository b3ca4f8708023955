"""Several processes train one model: the files of as many ranks in one process, and a clear end of all when one ends.

Processes of this machine that meet on its loopback. What nodes compare and refuse is in `crates/train/tests/it/nodes.rs`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import node_faults
import pytest

pytestmark = pytest.mark.xdist_group("wall-clock")

ROOT = Path(__file__).parents[2]

#: Random moments at which a node is killed; more with SUROGATE_KILLS.
KILLS = int(os.environ.get("SUROGATE_KILLS", "3"))


def options(output: Path, **changed: object) -> dict[str, object]:
    example = ROOT / "examples" / "stories"
    return {
        "run_name": "nodes",
        "model": str(example / "model"),
        "output_dir": str(output),
        "device": "cpu",
        "datasets": node_faults.full_rows(output.parent, 60, 32),
        "validation_datasets": node_faults.full_rows(output.parent, 12, 32),
        "shuffle": False,
        "sequence_len": 32,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "max_steps": 8,
        "save_steps": 3,
        "eval_steps": 4,
        "learning_rate": 5e-3,
        "lora_rank": 4,
        # With shards of each node, the blocks of squares are others than those of one process.
        "shard_scope": "world",
        "resume_from_checkpoint": True,
        **changed,
    }


def written(folder: Path, **changed: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    path.write_text(json.dumps(options(folder / "output", **changed)))
    return path


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Process(subprocess.Popen[str]):
    """A run that prints into a file: an unread pipe would stop it after 64 KiB."""

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        self.printed = tempfile.TemporaryFile("w+")
        super().__init__(words, stdout=self.printed, stderr=subprocess.STDOUT, text=True, env=env)

    def text(self, seconds: float) -> str:
        """All that it printed, once it has ended."""
        self.wait(seconds)
        self.printed.seek(0)
        return self.printed.read()


def start(path: Path, *flags: str, inside: str = "", **variables: str) -> Process:
    words = [*(["ip", "netns", "exec", inside] if inside else []), sys.executable, "-m", "surogate", "sft", str(path), *flags]
    known = {name: value for name, value in os.environ.items() if not name.startswith("SUROGATE_TOKEN")}
    return Process(words, {**known, **variables})


def nodes(path: Path, count: int, timeout: int = 60) -> list[Process]:
    meeting = f"--set=distributed.rendezvous=127.0.0.1:{port()}"
    of = [f"--set=distributed.num_nodes={count}", meeting, f"--set=distributed.timeout={timeout}"]
    return [start(path, *of, f"--set=distributed.node_rank={node}") for node in range(count)]


def until_steps(output: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (list(output.glob("log-*.json")) and steps(output)):
        time.sleep(0.1)


def ended(processes: list[Process], seconds: float = 120) -> list[tuple[int, str]]:
    """Exit codes and texts. A process that remains is a failure."""
    found = []
    try:
        for process in processes:
            text = process.text(seconds)
            found.append((process.returncode, text))
    finally:
        for process in processes:
            process.kill()
    return found


def tensors(folder: Path) -> dict[str, bytes]:
    files = sorted(folder.glob("checkpoint-*/*.safetensors")) + sorted(folder.glob("adapter/*.safetensors"))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def steps(output: Path) -> list[dict[str, float]]:
    (log,) = output.glob("log-*.json")
    # A last line that is being written is left for later.
    events = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    names = ("step", "loss", "grad_norm", "tokens")
    return [{name: event[name] for name in names} for event in events if event["event"] == "step"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two ranks in one process."""
    folder = tmp_path_factory.mktemp("one")
    ((code, text),) = ended([start(written(folder, gpus=2))])
    assert code == 0, text
    return folder / "output"


def test_two_processes_write_what_one_with_two_ranks_does(tmp_path: Path, one_process: Path) -> None:
    found = ended(nodes(written(tmp_path), 2))
    assert [code for code, _ in found] == [0, 0], found
    assert tensors(tmp_path / "output") == tensors(one_process)
    assert tensors(one_process)
    assert steps(tmp_path / "output") == steps(one_process)
    leader, follower = (text for _, text in found)
    assert "Node 0 is connected to node 1" in leader and "Result: " in leader
    assert "follows node 0" in follower and "Result: " not in follower and "Report: " not in follower


#: Node n has rows n, n + 2, …; with one pair to a micro-batch, or two answers of a pair, ranks of one process have the same.
ONE_PAIR = {"per_device_train_batch_size": 1, "sample_packing": False}


@pytest.mark.parametrize(
    ("task", "more"),
    [("dpo", ONE_PAIR), ("kto", {"lora": False, "optimizer": "adamw"}), ("kto", {}), ("orpo", ONE_PAIR)],
)
def test_answers_are_compared_on_two_nodes_as_on_two_ranks(task: str, more: dict[str, object], tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"Once {i}", "chosen": " upon a time" * (1 + i % 2), "rejected": " the end"} for i in range(24)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [{"path": str(pairs), "type": "preference"}]
    changed = {
        "task": task, "datasets": sets, "validation_datasets": sets, "sequence_len": 64, "max_steps": 3, "eval_steps": 3,
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "resume_from_checkpoint": False, **more,
    }  # fmt: skip
    one = written(tmp_path / "one", **changed)
    (code, text) = ended([start(one, "--set=gpus=2")])[0]
    assert code == 0, text
    two = written(tmp_path / "two", **changed)
    for code, text in ended(nodes(two, 2)):
        assert code == 0, text
    assert steps(two.parent / "output") == steps(one.parent / "output")
    assert len(steps(one.parent / "output")) == 3
    assert evaluations(two.parent / "output") == evaluations(one.parent / "output")
    assert tensors(two.parent / "output") == tensors(one.parent / "output")


def evaluations(output: Path) -> list[dict[str, float]]:
    (log,) = output.glob("log-*.json")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    kept = [{key: of for key, of in event.items() if "/" in key or key == "loss"} for event in events if event["event"] == "evaluation"]
    assert kept and all(any("/" in key for key in of) for of in kept)
    return kept


def test_gradients_between_nodes_may_be_compressed(tmp_path: Path) -> None:
    curves = {}
    for compression in ("none", "int8", "topk", "onebit"):
        path = written(tmp_path / compression, shard_scope="node", optimizer="adamw", gradient_compression=compression)
        found = ended(nodes(path, 2))
        assert [code for code, _ in found] == [0, 0], found
        curves[compression] = [step["loss"] for step in steps(path.parent / "output")]
    # The first loss is that of the model as it was.
    assert len({curve[0] for curve in curves.values()}) == 1 and curves["none"][1:] != curves["int8"][1:] != curves["topk"][1:]
    assert curves["int8"] == pytest.approx(curves["none"], rel=1e-2)
    # A fifth of the steps, rounded up, is the warm-up; what the first update after it did shows a step later.
    assert curves["onebit"][:3] == curves["none"][:3] and curves["onebit"][3:] != curves["none"][3:]
    # Errors of `int8` and `onebit` have the same sizes.
    for before, compression in (("topk", "int8"), ("int8", "onebit")):
        changed = {"optimizer": "adamw", "gradient_compression": compression, "max_steps": 10}
        path = written(tmp_path / before, shard_scope="node", **changed)
        found = ended(nodes(path, 2))
        assert [code for code, _ in found] == [0, 0], found
        assert "what compression had left of gradients is dropped" in found[0][1], found
    path = written(tmp_path / "onebit", shard_scope="node", optimizer="adamw", gradient_compression="int8", max_steps=10)
    found = ended(nodes(path, 2))
    assert found[0][0] == 2 and "second moments stay as they were after 2 updates" in found[0][1], found


def test_processes_of_torchrun_on_a_host_share_one_packing(tmp_path: Path) -> None:
    text = str(ROOT / "examples" / "stories" / "data" / "shakespeare.txt")
    packed = {"datasets": [{"path": text, "type": "text", "samples": 60}], "validation_datasets": None, "shuffle": True}
    one, several = (written(tmp_path / name, per_device_train_batch_size=2, **packed) for name in ("one", "several"))
    ((code, text),) = ended([start(one, "--set=gpus=2")])
    assert code == 0, text
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port())}
    places = [{"RANK": str(node), **common} for node in (0, 1)]
    found = ended([start(several, "--set=distributed.num_nodes=2", **of) for of in places])
    assert [code for code, _ in found] == [0, 0], found
    assert tensors(several.parent / "output") == tensors(one.parent / "output") != {}
    assert steps(several.parent / "output") == steps(one.parent / "output")


def test_torchrun_and_slurm_and_jobs_give_the_places(tmp_path: Path) -> None:
    at = port()
    by_torchrun = [{"RANK": str(node), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(at)} for node in (0, 1)]
    at = port()
    by_slurm = [{"SLURM_PROCID": str(node), "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": str(at)} for node in (0, 1)]
    by_job = [{"JOB_COMPLETION_INDEX": str(node)} for node in (0, 1)]
    meeting = f"--set=distributed.rendezvous=localhost:{port()}"
    for name, places, flags in [("a", by_torchrun, []), ("b", by_slurm, []), ("c", by_job, [meeting])]:
        path = written(tmp_path / name, max_steps=1)
        found = ended([start(path, "--set=distributed.num_nodes=2", *flags, **of) for of in places])
        assert [code for code, _ in found] == [0, 0], found
    ((code, text),) = ended([start(written(tmp_path / "d", max_steps=1), **by_torchrun[0])])
    assert code == 2 and "2 processes were started" in text, text


def test_a_killed_node_ends_the_other_which_names_it_and_the_run_goes_on(tmp_path: Path, one_process: Path) -> None:
    seed = int(os.environ.get("SUROGATE_KILL_SEED", time.time_ns() % 1_000_000))
    print(f"SUROGATE_KILL_SEED={seed}")
    draw = random.Random(seed)
    path = written(tmp_path)
    for _ in range(KILLS):
        processes = nodes(path, 2, timeout=15)
        victim = draw.randrange(2)
        time.sleep(draw.uniform(1.0, 5.0))
        processes[victim].send_signal(signal.SIGKILL)
        begun = time.monotonic()
        found = ended(processes, 60)
        survivor, text = found[1 - victim]
        # It may have been done before.
        if survivor == 0 or found[victim][0] == 0:
            continue
        assert survivor == 6 and f"node {victim}" in text, text
        # One that had not come yet is waited for.
        met = "is connected to" in text
        assert time.monotonic() - begun < (10 if met else 45), text
    found = ended(nodes(path, 2))
    assert [code for code, _ in found] == [0, 0], found
    assert tensors(tmp_path / "output") == tensors(one_process)


@pytest.mark.parametrize("compression", ["none", "onebit"])
def test_random_faults_lose_no_step(tmp_path: Path, compression: str) -> None:
    """A short form of `node_faults.py`; longer with SUROGATE_NODE_FAULTS."""
    if os.geteuid() != 0 or not shutil.which("ip") or subprocess.run(["ip", "netns", "add", f"try{os.getpid()}"]).returncode:
        pytest.skip("namespaces need root, iproute2 and a system that makes them")
    subprocess.run(["ip", "netns", "del", f"try{os.getpid()}"], check=True)
    seed = int(os.environ.get("SUROGATE_KILL_SEED", time.time_ns() % 1_000_000))
    faults = int(os.environ.get("SUROGATE_NODE_FAULTS", "6" if os.environ.get("SUROGATE_TEST_ALL") else "2"))
    found = node_faults.campaign(tmp_path, faults, seed, compression=compression)
    assert found["compared"] == found["steps"], found


#: Long enough that a process is killed before the end.
LONGER = {"max_steps": 60, "save_steps": 10}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A longer run of two ranks in one process."""
    path = written(tmp_path_factory.mktemp("straight"), **LONGER)
    ((code, text),) = ended([start(path, "--set=gpus=2")])
    assert code == 0, text
    return path.parent / "output"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_goes_on_by_itself_when_a_lost_node_comes_back(tmp_path: Path, straight: Path, victim: int) -> None:
    broken = written(tmp_path, **LONGER)
    meeting = f"--set=distributed.rendezvous=127.0.0.1:{port()}"
    flags = ["--set=distributed.num_nodes=2", meeting, "--set=distributed.timeout=60", "--set=distributed.max_restarts=1"]
    processes = [start(broken, *flags, f"--set=distributed.node_rank={node}") for node in range(2)]
    until_steps(broken.parent / "output")
    processes[victim].kill()
    processes[victim].wait()
    processes[victim] = start(broken, *flags, f"--set=distributed.node_rank={victim}")
    found = ended(processes)
    assert [code for code, _ in found] == [0, 0], found
    survivor = found[1 - victim][1]
    assert f"ended by node {victim}: " in survivor and "restart 1 of 1" in survivor, survivor
    assert tensors(broken.parent / "output") == tensors(straight)


def test_a_signal_to_any_node_saves_and_ends_all(tmp_path: Path) -> None:
    path = written(tmp_path, max_steps=100_000, save_steps=100_000, eval_steps=100_000)
    processes = nodes(path, 2)
    output = tmp_path / "output"
    until_steps(output)
    processes[1].send_signal(signal.SIGTERM)
    (leader, text), (follower, _) = ended(processes, 60)
    assert (leader, follower) == (143, 143), text
    assert "saving a checkpoint" in text and list(output.glob("checkpoint-*")), text


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_node_that_hangs_is_named_after_the_time_that_is_given(tmp_path: Path, stopped: int) -> None:
    path = written(tmp_path, max_steps=100_000, save_steps=100_000, eval_steps=100_000)
    processes = nodes(path, 2, timeout=20)
    until_steps(tmp_path / "output")
    processes[stopped].send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    ((code, text),) = ended([processes[1 - stopped]], 60)
    processes[stopped].send_signal(signal.SIGCONT)
    ((own, words),) = ended([processes[stopped]], 60)
    assert own == 6, f"it was given up, which is no failure of its own: {words}"
    assert code == 6 and f"node {stopped}: " in text and " for 2" in text, text
    assert 15 < time.monotonic() - begun < 50


@pytest.fixture
def link() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link between them: 10.77.0.1 and 10.77.0.2."""
    names = (f"sg{os.getpid()}a", f"sg{os.getpid()}b")
    ends = (f"v{os.getpid()}a", f"v{os.getpid()}b")
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("namespaces need root and iproute2")
    made = [subprocess.run(["ip", "netns", "add", name], check=False).returncode for name in names]
    try:
        if any(made):
            pytest.skip("this system makes no network namespaces")
        subprocess.run(["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]], check=True)
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            subprocess.run(["ip", "link", "set", end, "netns", name], check=True)
            subprocess.run(["ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", end, "up"], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def test_a_cut_link_ends_both_sides_in_half_a_minute(tmp_path: Path, link: tuple[str, str]) -> None:
    path = written(tmp_path, max_steps=100_000, save_steps=100_000, eval_steps=100_000)
    meeting = ["--set=distributed.num_nodes=2", "--set=distributed.rendezvous=10.77.0.1:29400"]
    secret = {"SUROGATE_TOKEN": "a secret of the run"}
    processes = [
        start(path, *meeting, f"--set=distributed.node_rank={node}", inside=inside, **secret)
        for node, inside in enumerate(link)
    ]
    until_steps(tmp_path / "output")
    subprocess.run(["ip", "-n", link[0], "link", "set", f"v{os.getpid()}a", "down"], check=True)
    begun = time.monotonic()
    found = ended(processes, 90)
    assert time.monotonic() - begun < 45
    for node, (code, text) in enumerate(found):
        assert code == 6 and f"node {1 - node}: nothing comes through to it (10.77.0.{2 - node}:" in text, text


def test_a_stranger_is_refused_and_so_is_every_gpu_of_a_node(tmp_path: Path) -> None:
    path = written(tmp_path, max_steps=1)
    meeting = [f"--set=distributed.rendezvous=127.0.0.1:{port()}", "--set=distributed.num_nodes=2"]
    leader = start(path, *meeting, "--set=distributed.node_rank=0", SUROGATE_TOKEN="a secret of the run")
    stranger = start(path, *meeting, "--set=distributed.node_rank=1", SUROGATE_TOKEN="another, as long as it")
    ((code, text),) = ended([stranger])
    assert code == 1 and "refuses node 1: the token is not that of the run" in text, text
    assert "a secret" not in text
    node = start(path, *meeting, "--set=distributed.node_rank=1", SUROGATE_TOKEN="a secret of the run")
    found = ended([leader, node])
    assert [code for code, _ in found] == [0, 0], found
    ((code, text),) = ended([start(path, *meeting, "--set=device=cuda", "--set=gpus=0")])
    assert code == 2 and "`gpus: 0` is every visible GPU, but all nodes have as many" in text, text
    far = ["--set=distributed.num_nodes=2", "--set=distributed.rendezvous=10.1.2.3:1", "--set=distributed.node_rank=1"]
    ((code, text),) = ended([start(path, *far)])
    assert code == 2 and "SUROGATE_TOKEN is not set" in text, text
