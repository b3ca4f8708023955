"""A run on a Ray cluster of machines with a network, a host name and processes of their own: the guide's example as it is
written, and a clear end where the head of the cluster is lost.

The machines are Linux namespaces of this one, as in `node_faults.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import node_faults
import pytest
from test_guides import CONFIGURATIONS
from test_nodes import ROOT, Process, ended, steps, until_steps

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.ray]

pytest.importorskip("ray", reason="Ray has no wheel for this Python")

#: Seconds in which a cluster has come together: it is slow to start, and more so on a busy machine.
TOGETHER = 300

#: Seconds within which all must have ended: 20 without an answer of the head, 25 to save, and what Python takes.
ENDED = 70

#: A token that an earlier cluster left in the home folder would be requested.
ENVIRONMENT = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}

#: A run that does not end by itself.
LONG = {"max_steps": 100_000, "save_steps": 100_000}

#: A machine: processes, host name and folders of Ray of its own; with the first process all others end.
MACHINE = """
set -e
mount -t proc proc /proc
hostname {name}
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
mount -t tmpfs -o size=512m tmpfs /dev/shm
{ray} start {role} --node-ip-address={address} --num-cpus=1 --object-store-memory=80000000
exec sleep infinity
"""


@dataclass
class Machine:
    outer: subprocess.Popen[bytes]

    @property
    def first(self) -> int:
        """Its first process, as this machine counts."""
        pid = self.outer.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def inside(self, *words: object) -> list[str]:
        return ["nsenter", "-t", str(self.first), "-a", *map(str, words)]

    def processes(self, part: str) -> list[int]:
        """Processes of it whose command line has this part."""
        space, found = os.readlink(f"/proc/{self.first}/ns/pid"), []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "ns/pid") == space and part in (process / "cmdline").read_bytes().decode(errors="replace"):
                    found.append(int(process.name))
        return found

    def said(self) -> str:
        """What workers have written into their logs."""
        logs = Path(f"/proc/{self.first}/root/tmp/ray").glob("session_2*/logs/worker-*.err")
        return "".join(log.read_text(errors="replace") for log in logs)

    def switch_off(self) -> None:
        self.outer.kill()


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """Two machines of a cluster. The first is its head."""
    if os.geteuid() != 0 or not shutil.which("ip") or subprocess.run(["ip", "netns", "add", f"try{os.getpid()}"]).returncode:
        pytest.skip("namespaces need root, iproute2 and a system that makes them")
    subprocess.run(["ip", "netns", "del", f"try{os.getpid()}"], check=True)
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(node_faults.networks(f"sr{os.getpid() % 100_000}n"))
        found = []
        for number, space in enumerate(spaces[:2]):
            role = "--head --port=6379 --include-dashboard=false" if number == 0 else "--address=10.78.0.1:6379"
            values = {"name": f"node{number}", "role": role, "address": f"10.78.0.{number + 1}"}
            script = MACHINE.format(ray=f"{sys.executable} -m ray.scripts.scripts", **values)
            words = ["ip", "netns", "exec", space, "unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc"]
            outer = subprocess.Popen(
                [*words, "bash", "-c", script],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=ENVIRONMENT,
            )
            stack.callback(outer.wait)
            stack.callback(outer.kill)
            found.append(Machine(outer))
            wait_for(found[0], number + 1)
        yield found


def wait_for(head: Machine, count: int) -> None:
    """Waits until a number of machines have joined the cluster."""
    look = "import ray; ray.init('auto', log_to_driver=False, logging_level='error'); print('alive', len(ray.nodes()))"
    until = time.monotonic() + TOGETHER
    while True:
        time.sleep(2)
        with contextlib.suppress(IndexError, subprocess.TimeoutExpired):
            words = head.inside(sys.executable, "-c", look)
            found = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, timeout=TOGETHER)
            if f"alive {count}" in found.stdout:
                return
        assert time.monotonic() < until, "the cluster did not come together"


def wait_for_clients(machine: Machine, address: str) -> None:
    """Until Ray's client server takes a client of this machine: on a busy machine its process is late."""
    look = f"import ray; ray.init({address!r}, logging_level='error'); print('taken')"
    until = time.monotonic() + TOGETHER
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            words = machine.inside(sys.executable, "-c", look)
            if "taken" in subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, timeout=TOGETHER).stdout:
                return
        assert time.monotonic() < until, "Ray's client server takes no client"
        time.sleep(2)


def guide(folder: Path, restarts: int = 0, address: str = "auto", **more: object) -> Path:
    """The guide's example, with a model, data and sizes that a test has time for."""
    text = CONFIGURATIONS["a model on two nodes"]
    small: dict[str, object] = {
        "model_name": ROOT / "examples" / "stories" / "model",
        "dataset": ROOT / "examples" / "stories" / "data" / "shakespeare.txt",
        "per_device_train_batch_size": 1,
        "sequence_len": 32,
        "warmup_steps": 2,
        "output_dir": "./output/stories",
        "gpus_per_node": 1,
        "ray_address": address,
    }
    for name, value in small.items():
        text, count = re.subn(rf"(?m)^( *{name}:) .*$", rf"\g<1> {value}", text)
        assert count == 1, name
    path = folder / "config.yaml"
    text += f"  max_restarts: {restarts}\n" if restarts else ""
    path.write_text(text + "device: cpu\n" + "".join(f"{name}: {json.dumps(value)}\n" for name, value in more.items()))
    return path


def start(machine: Machine, path: Path) -> Process:
    """`surogate sft config.yaml` on a machine, in the folder of the file."""
    command = f"cd {path.parent} && exec {sys.executable} -m surogate sft {path.name}"
    words = machine.inside("bash", "-c", command)
    return Process(words, ENVIRONMENT)


def until_gone(machine: Machine, part: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while left := machine.processes(part):
        assert time.monotonic() < until, f"{len(left)} processes are left"
        time.sleep(0.5)


def test_the_example_of_the_guide_runs_as_it_is_written(tmp_path: Path, machines: list[Machine]) -> None:
    path = guide(tmp_path, max_steps=4)
    ((code, text),) = ended([start(machines[0], path)], 240)
    assert code == 0, text
    assert "Ray: node 0 is 10.78.0.1 (node0), node 1 is 10.78.0.2 (node1)" in text, text
    assert "Starting distributed training with 2 nodes..." in text and "\nStep 0/4 | Loss: " in text, text
    assert [step["step"] for step in steps(tmp_path / "output" / "stories")] == [0, 1, 2, 3]
    assert not [of for machine in machines for of in machine.processes("--set=distributed.node_rank=")]


@pytest.mark.long
def test_without_the_process_that_keeps_the_cluster_all_save_and_end(tmp_path: Path, machines: list[Machine]) -> None:
    path = guide(tmp_path, restarts=2, **LONG)
    leader = start(machines[0], path)
    output = tmp_path / "output" / "stories"
    until_steps(output)
    (keeper,) = machines[0].processes("gcs_server")
    os.kill(keeper, signal.SIGKILL)
    begun = time.monotonic()
    ((code, text),) = ended([leader], ENDED)
    assert code == 6 and "the head of the Ray cluster, 10.78.0.1:6379, is lost: no answer for 20 s" in text, text
    assert time.monotonic() - begun < ENDED and "restart 1 of" not in text, text
    assert list(output.glob("checkpoint-*")), text
    for machine in machines:
        until_gone(machine, "--set=distributed.node_rank=", 5)
        assert "the head of the Ray cluster, 10.78.0.1:6379, is lost" in machine.said()


@pytest.mark.long
@pytest.mark.parametrize("how", ["switched off", "without its keeper"])
def test_a_client_ends_with_the_head(tmp_path: Path, machines: list[Machine], how: str) -> None:
    """The command is given through Ray's client server, on the other machine."""
    address = "ray://10.78.0.1:10001"
    path = guide(tmp_path, restarts=2, address=address, **LONG)
    wait_for_clients(machines[1], address)
    leader = start(machines[1], path)
    until_steps(tmp_path / "output" / "stories")
    if how == "switched off":
        machines[0].switch_off()
    else:
        (keeper,) = machines[0].processes("gcs_server")
        os.kill(keeper, signal.SIGKILL)
    ((code, text),) = ended([leader], ENDED)
    assert code == 6 and "the head of the Ray cluster, 10.78.0.1:" in text and "is lost: no answer for 20 s" in text, text
    assert "restart 1 of" not in text, text
    until_gone(machines[1], "--set=distributed.node_rank=", ENDED)


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_head_that_is_switched_off_ends_the_run_wherever_it_was_started(
    tmp_path: Path, machines: list[Machine], place: int
) -> None:
    leader = start(machines[place], guide(tmp_path, restarts=2, **LONG))
    until_steps(tmp_path / "output" / "stories")
    assert len(machines[1].processes("--set=distributed.node_rank=")) == 1
    machines[0].switch_off()
    begun = time.monotonic()
    until_gone(machines[1], "--set=distributed.node_rank=", ENDED)
    if place == 1:
        ((code, text),) = ended([leader], ENDED)
        assert code == 6 and "the head of the Ray cluster, 10.78.0.1:6379, is lost" in text, text
        assert "restart 1 of" not in text, text
        return
    leader.kill()
    leader.wait()
    while "the head of the Ray cluster, 10.78.0.1:6379, is lost" not in machines[1].said():
        assert time.monotonic() - begun < ENDED
        time.sleep(0.5)
