"""Runs that meet faults: their options by the name of the kind, what is done to them, and what must hold after it.

`test_faults.py` says how often.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import colored_images
from conftest import tiny_llama
from node_faults import full_rows
from processes import descendants
from test_data_streaming import shard
from test_killed import ROOT, digests, losses, options, saved
from test_nodes import port

KINDS = ["killed", "ended", "all ended", "full", "damaged", "tracker", "clock", "killed"]
"""One of each, and the commonest twice."""

WHOLE = {"lora": False, "learning_rate": 1e-3}
PAIRS = {"datasets": [{"path": str(ROOT / "examples" / "stories" / "data" / "happy.jsonl"), "type": "auto", "samples": 40}]}
SAMPLED = {"num_generations": 4, "max_completion_length": 8, "rewards": [{"function": "length", "tokens": 3}]}
TEACHER = str(ROOT / "examples" / "stories" / "model")
LONGER = {"sequence_len": 256, "max_length": 128}
SHORTER = {"sequence_len": 128, "max_length": 64, "learning_rate": 5e-4}

#: Changes of the options of a run, by the name of its kind.
RUNS: dict[str, dict[str, object]] = {
    "adapter": {"lora_dropout": 0.1},
    "merged": {"lora_dropout": 0.1, "merge_adapter": True},
    "model": {**WHOLE, "torch_dtype": "bfloat16", "sample_packing": False},
    "best": {**WHOLE, "load_best_model_at_end": True, "eval_steps": 4},
    "tokens": {**WHOLE, "new_tokens": ["<x>", "<y>"]},
    "ranks": {**WHOLE, "gpus": 2, "zero_level": 2},
    "stages": {**WHOLE, "gpus": 2, "pipeline_parallel_size": 2, "model": "untied"},
    "four bits": {"qlora_bnb": True},
    "quantize_aware": {**WHOLE, "quantize_aware": "w8a16", "quantize_aware_group_size": -1},
    "dpo": {**PAIRS, **LONGER, "task": "dpo"},
    "dpo of all weights": {**PAIRS, **LONGER, **WHOLE, "task": "dpo", "precompute_ref_log_probs": True},
    "orpo": {**PAIRS, **LONGER, "task": "orpo"},
    "kto": {**PAIRS, **SHORTER, "task": "kto"},
    "cpo": {**PAIRS, **SHORTER, "task": "cpo"},
    "reward": {**PAIRS, **LONGER, "task": "reward"},
    "grpo": {**PAIRS, **SAMPLED, "task": "grpo", "sequence_len": 128, "per_device_train_batch_size": 4},
    "distil": {"task": "distil", "teacher": TEACHER},
    "kept teacher": {"task": "distil", "teacher": TEACHER, "beta": 0.0, "loss_top_k": 8, "precompute_teacher": True},
    "images": {**WHOLE, "model": "images", "sequence_len": 128},
    "stream": {"streaming": True, "shuffle_buffer_size": 30, "validation_split_ratio": 0.0},
    "bucket": {},
    "nodes": {"per_device_train_batch_size": 1, "shuffle": False, "shard_scope": "world", "validation_split_ratio": 0.0},
}

TRACKERS = {
    "fails at once": "raise RuntimeError('the service is down')",
    "hangs": "import time\ntime.sleep(1000)",
    "crashes": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "fails later": """
class Settings:
    def __init__(self, **more): ...
class Run:
    url, reported = None, 0
    def define_metric(self, *names, **more): ...
    def log(self, numbers):
        self.reported += 1
        if self.reported > 7:
            raise ConnectionError('the service went down')
    def finish(self, exit_code): raise ConnectionError('the service is down')
def init(**more): return Run()
""",
}
"""Clients of a service that fail, each as the text of the module that is imported."""

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>

/* The clock of the day jumps by JUMP seconds once the process is AFTER milliseconds old. */
int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  static struct timespec begin;
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(id, now);
  if (result || (id != CLOCK_REALTIME && id != CLOCK_REALTIME_COARSE)) return result;
  struct timespec age;
  real(CLOCK_MONOTONIC, &age);
  if (!begin.tv_sec) begin = age;
  long milliseconds = (age.tv_sec - begin.tv_sec) * 1000 + (age.tv_nsec - begin.tv_nsec) / 1000000;
  if (milliseconds >= atol(getenv("AFTER"))) now->tv_sec += atol(getenv("JUMP"));
  return result;
}
"""


def jumping_clock(folder: Path) -> Path | None:
    """A library that is loaded before all others, and moves the clock; none where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    (folder / "clock.c").write_text(CLOCK)
    library = folder / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "clock.c", "-ldl"], check=True)
    return library


def damage(moments: random.Random, output: Path) -> str | None:
    """Damages a file of the newest checkpoint, if another one is left."""
    checkpoints = sorted(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if len(checkpoints) < 2:
        return None
    path = moments.choice(sorted(file for file in checkpoints[-1].iterdir() if file.is_file()))
    content = bytearray(path.read_bytes())
    how = moments.choice(["flipped", "cut", "removed"])
    if how == "removed":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[: moments.randrange(len(content))])
    else:
        content[moments.randrange(len(content))] ^= 1 << moments.randrange(8)
        path.write_bytes(content)
    return f"{path.parent.name}/{path.name} {how}"


def environment(folder: Path) -> dict[str, str]:
    """The variables of all processes of a test, whose caches lie in its folder."""
    caches = {f"SUROGATE_{name.upper()}": str(folder / name) for name in ("streams", "runs", "data_cache")}
    return {**os.environ, **caches}


class Run:
    """A run in a folder, and what is known of it."""

    kinds = KINDS

    def __init__(self, folder: Path, changed: dict[str, object], moments: random.Random) -> None:
        self.folder, self.changed, self.moments = folder, changed, moments
        self.output, self.straight = folder / "faulty", folder / "straight"
        self.environment = environment(folder)
        self.clock = jumping_clock(folder)
        self.seconds, self.newest, self.finished = 0.0, 0, 0
        self.met: dict[str, int] = {}

    def begin(self) -> None:
        """Writes the options, and runs once without a fault."""
        for name in ("straight", "faulty"):
            of = options(self.folder / name, save_total_limit=3, **self.changed)
            (self.folder / f"{name}.yaml").write_text(json.dumps(self.of_place(name, of)))
        begin = time.monotonic()
        self.whole("straight")
        self.seconds = time.monotonic() - begin

    def of_place(self, name: str, of: dict[str, object]) -> dict[str, object]:
        """The options of one of the two runs."""
        return of

    def whole(self, name: str) -> None:
        """A run to its end."""
        self.before()
        with (self.folder / "whole.txt").open("w") as said:
            processes = self.start(name, [], said, self.environment, None)
            codes = [process.wait() for process in processes]
        text = (self.folder / "whole.txt").read_text()
        assert set(codes) == {0}, text

    def start(self, name: str, flags: list[str], said: Any, variables: dict[str, str], full: Any) -> list[subprocess.Popen[bytes]]:
        """Starts the processes of a run. The first meets the fault."""
        words = [sys.executable, "-m", "surogate", "sft", str(self.folder / f"{name}.yaml"), *flags]
        return [subprocess.Popen(words, stdout=said, stderr=said, env=variables, preexec_fn=full)]

    def before(self) -> None:
        """Is called before each process."""

    def clear(self) -> None:
        """Removes a run that came to its end, before the next one begins."""
        shutil.rmtree(self.output)

    def left(self) -> list[str]:
        """Names of what is left over at the end and has no use."""
        return [entry.name for entry in self.output.iterdir() if entry.name.startswith(".")]

    def meets(self, kind: str) -> None:
        """One process that meets a fault, or ends before it does."""
        variables, limit, timeout, allowed = dict(self.environment), None, None, {0}
        flags: list[str] = []
        if kind == "killed":
            timeout, allowed = self.moments.uniform(0.0, self.seconds), {0, -signal.SIGKILL}
        elif kind in ("ended", "all ended"):
            # Python takes no signal before its first line.
            timeout, allowed = self.moments.uniform(0.0, self.seconds), {0, 143, -signal.SIGTERM}
        elif kind == "full":
            largest = max((file.stat().st_size for file in self.straight.glob("checkpoint-*/*")), default=1)
            limit, allowed = self.moments.randrange(4096, largest), {0, 1}
        elif kind == "damaged":
            for _ in range(8):
                # A run that is on its way has more than one checkpoint.
                if len(saved(self.output)) < 2:
                    self.meets("killed")
            where = damage(self.moments, self.output)
            print(f"damaged: {where}")
            if where is not None:
                self.newest = saved(self.output, whole_ones=False)[-2]
        elif kind == "tracker":
            how = self.moments.choice(sorted(TRACKERS))
            modules = self.folder / "modules"
            modules.mkdir(exist_ok=True)
            (modules / "wandb.py").write_text(TRACKERS[how])
            variables["PYTHONPATH"] = os.pathsep.join([str(modules), os.environ.get("PYTHONPATH", "")])
            flags = ["--report-to", "[wandb]"]
            print(f"tracker: {how}")
            # One that hangs is waited for after the run; half of the processes are killed before their end.
            if how == "hangs" or self.moments.random() < 0.5:
                timeout, allowed = self.moments.uniform(0.0, 2 * self.seconds), {0, -signal.SIGKILL}
        elif kind == "clock" and self.clock is not None:
            years = self.moments.choice([-30, -1, 1, 30])
            after = int(self.moments.uniform(0, 1000 * self.seconds))
            variables |= {"LD_PRELOAD": str(self.clock), "JUMP": str(years * 31_557_600), "AFTER": str(after)}

        def full() -> None:  # No file may grow beyond this: the system's answer is that of a full disk.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        self.before()
        out = self.folder / "said.txt"
        with out.open("w") as said:
            process, *others = self.start("faulty", flags, said, variables, full if limit else None)
            begin = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
            if process.poll() == 0 and kind != "tracker":
                # Faults are to fall into the run, and the machine may have been busier before.
                self.seconds = min(self.seconds, time.monotonic() - begin)
            if process.poll() is None and kind in ("ended", "all ended"):
                # A batch system may send it to every process of the run.
                for number in [*(descendants(process.pid) if kind == "all ended" else ()), process.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(number, signal.SIGTERM)
                process.wait(600)
            if process.poll() is None:
                process.kill()
            process.wait()
            self.after(others)
        text = out.read_text()
        assert process.returncode in allowed, f"{kind}: exit code {process.returncode}\n{text}"
        assert "Traceback" not in text and "panicked" not in text, f"{kind}: {text}"
        if process.returncode == 1:
            assert "cannot write" in text and "too large" in text, text
        self.met[kind] = self.met.get(kind, 0) + 1
        self.check(process.returncode == 0)

    def after(self, others: list[subprocess.Popen[bytes]]) -> None:
        """Waits for the processes that met no fault of their own."""

    def check(self, ended: bool) -> None:
        steps = saved(self.output)
        assert not self.newest or (steps and steps[-1] >= self.newest), f"checkpoint-{self.newest} was lost: {steps}"
        self.newest = steps[-1] if steps else 0
        if ended:
            self.compare()
            self.finished += 1
            self.clear()
            self.newest = 0

    def compare(self) -> None:
        assert digests(self.output) == digests(self.straight), "other bits than without faults"
        assert losses(self.output) == losses(self.straight), "other losses than without faults"


class KeptTeacher(Run):
    """A run whose teacher is computed before the first step, and often again."""

    def before(self) -> None:
        if self.moments.random() < 0.6:
            for kept in (self.folder / "data_cache").glob("*.values"):
                kept.unlink()

    def left(self) -> list[str]:
        # A file of a killed process stays for a day.
        return [*super().left(), *(of.name for of in (self.folder / "data_cache").glob("*.partial"))]


class Streamed(Run):
    """A run that streams from a bucket, with room for two of its files."""

    def of_place(self, name: str, of: dict[str, object]) -> dict[str, object]:
        held_out = self.folder / "held.jsonl"
        held_out.write_bytes(shard(99))
        return of | {
            "datasets": [{"path": "s3://acme/shards", "type": "text"}],
            "validation_datasets": [{"path": str(held_out), "type": "text"}],
            "streaming_disk_limit": 2 * len(shard(0)) + 1000,
        }

    def left(self) -> list[str]:
        # The process that fetches files may outlive the run by a moment.
        until = time.monotonic() + 30
        while (found := list((self.folder / "streams").iterdir())) and time.monotonic() < until:
            time.sleep(0.2)
        return [*super().left(), *(of.name for of in found)]


class InBucket(Run):
    """A run that writes to a bucket. The folder of this machine may be lost, too."""

    kinds = [*KINDS, "lost", "lost"]

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        from surogate.storage.outputs import folder_of
        from surogate.storage.remote import Remote

        self.address = f"s3://acme/runs/{self.folder.name}"
        os.environ["SUROGATE_RUNS"] = self.environment["SUROGATE_RUNS"]
        self.remote, self.output = Remote(self.address), folder_of(self.address)

    def of_place(self, name: str, of: dict[str, object]) -> dict[str, object]:
        return of if name == "straight" else of | {"output_dir": self.address}

    def meets(self, kind: str) -> None:
        if kind != "lost":
            return super().meets(kind)
        # The folder in the bucket is all that is left.
        super().meets("killed")
        self.wait_for_uploads()
        if self.output.is_dir():
            shutil.rmtree(self.output)
        self.newest = max(self.sent(), default=0)
        self.met[kind] = self.met.get(kind, 0) + 1

    def sent(self) -> list[int]:
        """The steps of the checkpoints that are whole in the bucket."""
        names = self.remote.names()
        return [int(of.rpartition("-")[2]) for of in self.remote.marks(names) if of.startswith("checkpoint-")]

    def compare(self) -> None:
        super().compare()
        names = self.remote.names()
        for folder in (of for of in self.remote.marks(names) if (self.output / of).is_dir()):
            for file in (self.output / folder).iterdir():
                assert self.remote.read(f"{folder}/{file.name}") == file.read_bytes(), f"{folder}/{file.name} differs in the bucket"
        assert {"adapter", "checkpoint-40"} <= set(self.remote.marks(names)), sorted(names)

    def clear(self) -> None:
        self.wait_for_uploads()
        self.remote.remove(list(self.remote.names()))
        super().clear()

    def left(self) -> list[str]:
        self.wait_for_uploads()
        known = {".uploaded", ".sent"}
        uploads = [of.name for of in self.output.parent.iterdir() if of.name.endswith(".upload")]
        return [*(name for name in super().left() if name not in known), *uploads]

    def wait_for_uploads(self) -> None:
        """A process that uploads goes on after a kill of the run."""
        mark = f"SUROGATE_RUNS={self.environment['SUROGATE_RUNS']}".encode()
        until = time.monotonic() + 120
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                while b"surogate.logs.reader" in (process / "cmdline").read_bytes():
                    if mark not in (process / "environ").read_bytes().split(b"\0"):
                        break
                    assert time.monotonic() < until, "a process that uploads does not end"
                    time.sleep(0.1)


class OnNodes(Run):
    """A run of two nodes, one of which meets the fault; then the other ends by itself."""

    kinds = [kind for kind in KINDS if kind not in ("tracker", "clock")]

    def of_place(self, name: str, of: dict[str, object]) -> dict[str, object]:
        return of | {"datasets": full_rows(self.folder, 60, 32)}

    def start(self, name: str, flags: list[str], said: Any, variables: dict[str, str], full: Any) -> list[subprocess.Popen[bytes]]:
        meeting = {"num_nodes": 2, "rendezvous": f"127.0.0.1:{port()}", "timeout": 20}
        flags = [*flags, *(f"--set=distributed.{key}={value}" for key, value in meeting.items())]
        found = []
        for node in (0, 1):
            # The disk of checkpoints is that of the first.
            more = [*flags, f"--set=distributed.node_rank={node}", f"--set=distributed.worker_output_dir={self.folder / 'worker'}"]
            found += super().start(name, more, said, variables, full if node == 0 else None)
        return found if full or self.moments.random() < 0.5 else found[::-1]

    def after(self, others: list[subprocess.Popen[bytes]]) -> None:
        for process in others:
            # A node whose other one never came waits for as long as nodes do.
            code = process.wait(600)
            assert code in (0, 1, 6, 143, -signal.SIGTERM), f"the other node ended with {code}"


#: Kinds of runs that need more than options.
CLASSES: dict[str, type[Run]] = {
    "kept teacher": KeptTeacher,
    "stream": Streamed,
    "bucket": InBucket,
    "nodes": OnNodes,
}


def untied(make_model: Any, **changes: object) -> Path:
    """A model with a head of its own, which stages can hold, and the tokenizer of the stories."""
    model = Path(make_model(tiny_llama(vocab_size=512, **changes)))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "examples" / "stories" / "model" / file, model)
    return model


def images(shared: Path, folder: Path) -> dict[str, object]:
    """The options of a model that sees, and of its images."""
    colored_images.write(shared, folder)
    return {
        "model": str(folder / "model"), "init": "random", "torch_dtype": "float32",
        "datasets": [{"path": str(folder / "train.jsonl"), "type": "auto"}],
    }  # fmt: skip
