"""Nodes that Ray starts: what as many ranks of one process write, and a clear end or a new start when one is lost.

A cluster of three "machines", which are Ray's nodes on this one, for the whole file.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from surogate.errors import ConfigError, RunError
from surogate.launch import cluster as launch_cluster
from surogate.launch import ends as launch_ends
from surogate.launch.cluster import Machine
from surogate.launch.ends import End
from surogate.launch.node import Node, Start
from test_nodes import Process, ended, start, steps, tensors, until_steps, written

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.ray]

pytest.importorskip("ray", reason="Ray has no wheel for this Python")

MACHINES = 3
STORE = 80 << 20
MANY = {"max_steps": 100_000, "save_steps": 100_000, "eval_steps": 100_000}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """The cluster, and its address for those who look for one."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(MACHINES - 1):
            made.add_node(num_cpus=2, object_store_memory=STORE)
        made.wait_for_nodes()
        yield made
    finally:
        made.shutdown()


def on_ray(cluster: Any, path: Path, *flags: str, count: int = MACHINES) -> Process:
    return start(path, f"--set=distributed.num_nodes={count}", *flags, RAY_ADDRESS=cluster.address)


def processes_of(path: Path) -> dict[int, int]:
    """The nodes whose results go next to a file of options: number and process."""
    output = str(path.parent)
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        rank = [word.rpartition("=")[2] for word in words if word.startswith("--set=distributed.node_rank=")]
        if rank and f"--set=data_cache={output}" in words:
            found[int(rank[0])] = int(process.name)
    return found


def named(path: Path) -> str:
    """An option by which the processes of a run are known."""
    return f"--set=data_cache={path.parent}"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of three ranks in one process."""
    folder = tmp_path_factory.mktemp("one")
    ((code, text),) = ended([start(written(folder, gpus=MACHINES))])
    assert code == 0, text
    return folder / "output"


def test_machines_of_a_cluster_write_what_one_process_with_as_many_ranks_does(
    tmp_path: Path, ray: Any, one_process: Path
) -> None:
    ((code, text),) = ended([on_ray(ray, written(tmp_path))])
    assert code == 0, text
    assert tensors(tmp_path / "output") == tensors(one_process)
    assert steps(tmp_path / "output") == steps(one_process)
    head = ["Starting distributed training with 3 nodes...", "Nodes: 3", "Ranks per node: 1", "Total ranks: 3"]
    assert "\n".join([*head, "Tokens per step: 384", "Max steps: 8", ""]) in text
    assert re.search(r"\nStep 0/8 \| Loss: \d+\.\d{4} \| Norm: [\d.]+ \| LR: 5\.00e-03 \| \d+\.\d\ds \| \d+ tok/s", text), text
    assert "Ray: node 0 is " in text and "Result: " in text


class LateRay:
    """Ray on a machine that is too busy for its first attempts."""

    def __init__(self, late: int, reason: str = "The current node timed out during startup.") -> None:
        self.late, self.reason, self.tries = late, reason, 0

    def init(self, **_: object) -> None:
        self.tries += 1
        if self.tries <= self.late:
            raise Exception(self.reason)

    def shutdown(self) -> None:
        pass


def test_a_late_start_of_ray_is_tried_again_and_its_errors_have_no_traceback() -> None:
    late = LateRay(2)
    launch_cluster._connect(late, "local", {})
    assert late.tries == 3
    for ray, address, tries in [
        (LateRay(3), "local", 3),
        (LateRay(1), "auto", 1),
        (LateRay(1, "no such folder"), "local", 1),
    ]:
        with pytest.raises(RunError, match=f"Ray .*: {re.escape(ray.reason)}"):
            launch_cluster._connect(ray, address, {})
        assert ray.tries == tries


def test_a_cluster_of_this_machine_alone_is_started_for_a_run(tmp_path: Path) -> None:
    path = written(tmp_path, max_steps=2, distributed={"ray_address": "local", "num_nodes": 2})
    ((code, text),) = ended([start(path, "--quiet")], 300)
    assert (code, text) == (0, "")
    assert (tmp_path / "output" / "adapter").is_dir()


def test_too_few_machines_are_said_before_anything_starts(tmp_path: Path, ray: Any) -> None:
    ((code, text),) = ended([on_ray(ray, written(tmp_path), count=MACHINES + 1)])
    assert code == 1 and "`distributed.num_nodes: 4` needs as many machines with a CPU" in text, text
    assert text.count(" (") >= MACHINES and "ray start --address" in text, text
    assert not (tmp_path / "output").exists()


def test_an_error_of_one_node_is_that_of_the_run(tmp_path: Path, ray: Any) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    ((code, text),) = ended([on_ray(ray, written(tmp_path, datasets=[{"path": str(empty), "type": "text"}]))])
    assert code == 4 and re.search(r"surogate: node \d, .*: no token of 1 rows is trained", text), text
    # Once for the run, and once more where the leader heard of it from another node first.
    assert text.count("no token of") <= 2, text


def test_a_signal_saves_and_ends_all(tmp_path: Path, ray: Any) -> None:
    path = written(tmp_path, **MANY)
    leader = on_ray(ray, path, named(path))
    until_steps(tmp_path / "output")
    assert sorted(processes_of(path)) == [0, 1, 2]
    leader.send_signal(signal.SIGTERM)
    ((code, text),) = ended([leader], 60)
    assert code == 143 and "saving a checkpoint" in text, text
    assert list((tmp_path / "output").glob("checkpoint-*")) and not processes_of(path)


@pytest.mark.long
def test_a_lost_node_is_started_again_as_often_as_the_options_say(tmp_path: Path, ray: Any) -> None:
    straight, broken = (written(tmp_path / name, max_steps=120, save_steps=10) for name in ("straight", "broken"))
    ((code, text),) = ended([start(straight, f"--set=gpus={MACHINES}")])
    assert code == 0, text
    leader = on_ray(ray, broken, named(broken), "--set=distributed.max_restarts=1")
    until_steps(broken.parent / "output")
    os.kill(processes_of(broken)[1], signal.SIGKILL)
    ((code, text),) = ended([leader])
    assert code == 0 and "was killed by signal 9" in text and "restart 1 of 1" in text, text
    assert steps(broken.parent / "output")[-1] == steps(straight.parent / "output")[-1]
    results = [tensors(path.parent / "output") for path in (straight, broken)]
    assert results[0] == results[1]


def test_without_restarts_a_lost_node_ends_the_run_by_name(tmp_path: Path, ray: Any) -> None:
    path = written(tmp_path, **MANY)
    leader = on_ray(ray, path, named(path))
    until_steps(tmp_path / "output")
    os.kill(processes_of(path)[2], signal.SIGKILL)
    ((code, text),) = ended([leader], 60)
    assert code == 6 and re.search(r"surogate: node 2, .*: its process was killed by signal 9", text), text
    assert not processes_of(path)


def until_count(output: Path, count: int, process: Process) -> None:
    """Waits for a number of steps, while the run takes some."""
    done, deadline = -1, 0.0
    while (now := len(steps(output))) < count:
        if now > done:
            done, deadline = now, time.monotonic() + 120
        assert process.poll() is None and time.monotonic() < deadline, f"{now} of {count} steps are done"
        time.sleep(0.2)


def test_a_machine_that_joins_is_used_and_the_losses_stay_in_their_band(tmp_path: Path, ray: Any) -> None:
    ray.remove_node(next(iter(ray.worker_nodes)))
    ray.wait_for_nodes()
    # Six rows a step, ten steps an epoch.
    more = {**MANY, "save_steps": 25, "save_total_limit": 2, "gradient_accumulation_steps": 3, "warmup_steps": 10}
    straight, grown = (written(tmp_path / name, **more) for name in ("straight", "grown"))
    leader = on_ray(ray, grown, named(grown), "--set=distributed.max_nodes=3", count=2)
    output = grown.parent / "output"
    until_steps(output)
    ray.add_node(num_cpus=2, object_store_memory=STORE)
    (log,) = output.glob("log-*.json")
    deadline = time.monotonic() + 180
    while '"event":"resume"' not in log.read_text():
        assert leader.poll() is None and time.monotonic() < deadline, "the run does not grow"
        time.sleep(0.2)
    until_count(output, len(steps(output)) + 50, leader)
    leader.send_signal(signal.SIGTERM)
    ((code, text),) = ended([leader], 60)
    assert code == 143 and "Nodes: 3\n" in text and "restart 1" not in text and not processes_of(grown), text
    (place,) = map(int, re.findall(r"^a further node: going on with 3 nodes from checkpoint step (\d+)$", text, re.MULTILINE))
    found = steps(output)
    undisturbed = start(straight, "--set=gpus=2")
    until_steps(straight.parent / "output")
    until_count(straight.parent / "output", len(found), undisturbed)
    undisturbed.send_signal(signal.SIGTERM)
    ((code, text),) = ended([undisturbed])
    assert code == 143, text
    expected = steps(straight.parent / "output")[: len(found)]
    assert place > 0 and place % 25 == 0 and found[:place] == expected[:place]
    assert [step["step"] for step in found] == [step["step"] for step in expected], "no step is lost, and none is done twice"
    assert {step["tokens"] for step in found} == {step["tokens"] for step in expected}
    epochs = [[sum(step["loss"] for step in of[at : at + 10]) / 10 for at in range(0, len(of) - 9, 10)] for of in (found, expected)]
    assert epochs[0] == pytest.approx(epochs[1], rel=0.05)


@pytest.mark.long
def test_a_run_goes_on_with_the_machines_that_are_left(tmp_path: Path, ray: Any) -> None:
    """Last: the cluster has a machine less after it."""
    path = written(tmp_path, max_steps=120, save_steps=10)
    flags = ["--set=distributed.max_restarts=1", "--set=distributed.min_nodes=1", "--set=distributed.timeout=15"]
    leader = on_ray(ray, path, named(path), *flags)
    until_steps(tmp_path / "output")
    ray.remove_node(next(iter(ray.worker_nodes)), False)
    ((code, text),) = ended([leader])
    assert code == 0 and "restart 1 of 1" in text and "Nodes: 2\n" in text, text
    numbers = [step["step"] for step in steps(tmp_path / "output")]
    assert numbers[-1] == 119 and not processes_of(path)


MACHINE = [Machine(str(number), f"10.0.0.{number}", f"m{number}", 8, 0) for number in range(3)]


@pytest.mark.parametrize(
    ("ends", "code", "text"),
    [
        ({0: (0, ""), 1: (6, "late")}, 0, ""),
        ({0: (143, ""), 1: (1, "late")}, 143, ""),
        ({0: (6, "the run was ended by node 1: gone"), 1: (6, "killed")}, 6, "node 1, 10.0.0.1 (m1): killed"),
        ({0: (6, "the run was ended by node 2: nothing comes"), 1: (6, "the run was ended by node 2: x")}, 6,
         "node 2, 10.0.0.2 (m2): nothing comes"),
        ({0: (6, "lost"), 1: (5, "no numbers")}, 5, "node 1, 10.0.0.1 (m1): no numbers"),
    ],
)
def test_the_root_cause_is_told_with_its_machine(ends: dict[int, tuple[int, str]], code: int, text: str) -> None:
    assert launch_ends.verdict({number: End(*end) for number, end in ends.items()}, MACHINE) == (code, text)


def test_the_last_words_of_a_process_are_its_reason() -> None:
    words = ["surogate: wandb receives no more data", "surogate: cannot write x", "  hint: free some space"]
    assert launch_ends.ending(1, words) == End(1, "cannot write x\n  hint: free some space")
    assert launch_ends.ending(-9, []) == End(6, "its process was killed by signal 9")


def test_what_a_node_is_started_with_shows_no_token() -> None:
    given = Start("sft", "run.json", "{}", [], "/", {"SUROGATE_TOKEN": "hidden", "HF_TOKEN": "hidden"})
    assert "hidden" not in f"{given!r} {given}"


def test_machines_must_be_alike() -> None:
    launch_cluster.compare(MACHINE, [{"a": "1"}] * 3)
    with pytest.raises(ConfigError) as refused:
        launch_cluster.compare(MACHINE, [{"a": "1"}, {"a": "2"}, {"a": "1", "NVIDIA driver": "580"}])
    assert "a: 1 on 10.0.0.0 (m0), 2 on 10.0.0.1 (m1)" in str(refused.value)
    assert "NVIDIA driver: none on 10.0.0.0 (m0)" in str(refused.value)


def test_what_starts_nodes_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'surogate\[distributed\]'"):
        launch_cluster.Cluster("auto", 2)


def test_a_process_ends_with_the_worker_that_started_it(tmp_path: Path) -> None:
    path = written(tmp_path, **MANY)
    given = ("sft", "run.json", path.read_text(), [named(path), "--set=distributed.node_rank=0"], str(tmp_path), {})
    script = (
        "import time\nfrom surogate.launch.node import Node, Start\n"
        f"node = Node()\nnode.start(Start(*{given!r}))\nwhile True:\n    time.sleep(1)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", script])
    until_steps(tmp_path / "output")
    assert processes_of(path)
    worker.kill()
    worker.wait()
    deadline = time.monotonic() + 10
    while processes_of(path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_of(path)


def test_a_node_needs_the_folder_in_which_the_command_was_given(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="in which the command was given"):
        Node().start(Start("sft", "run.json", "{}", [], str(tmp_path / "none"), {}))
