"""A run that meets faults again and again loses nothing but steps after its last checkpoint, and ends with the bits of
a run that met none.

Faults: the process is killed or asked to end, the disk is full, a file of a checkpoint is damaged, a tracker fails, hangs or
crashes, the clock jumps by years. There are a few of each kind; SUROGATE_FAULTS_MINUTES=60 goes on for an hour in each kind of
run. What happens when is random, and the seed is printed: SUROGATE_FAULT_SEED=… repeats it. Commands that make models of
models meet the same: they leave nothing, and the next one makes what an undisturbed one does.
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

import pytest
from conftest import tiny_llama
from test_killed import ROOT, SAVE_STEPS, STEPS, digests, losses, options, saved, whole

MINUTES = float(os.environ.get("SUROGATE_FAULTS_MINUTES", "0"))

KINDS = ["killed", "ended", "full", "damaged", "tracker", "clock", "killed"]
"""One of each, and the commonest twice."""

LONG = MINUTES > 0 or bool(os.environ.get("SUROGATE_TEST_ALL"))

WHOLE = {"lora": False, "learning_rate": 1e-3}
PAIRS = {"datasets": [{"path": str(ROOT / "examples" / "stories" / "data" / "happy.jsonl"), "type": "auto", "samples": 40}]}
SAMPLED = {"num_generations": 4, "max_completion_length": 8, "rewards": [{"function": "length", "tokens": 3}]}
LONGER = {"sequence_len": 256, "max_length": 128}

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
    "reward": {**PAIRS, **LONGER, "task": "reward"},
    "grpo": {**PAIRS, **SAMPLED, "task": "grpo", "sequence_len": 128, "per_device_train_batch_size": 4},
    "distil": {"task": "distil", "teacher": str(ROOT / "examples" / "stories" / "model")},
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
"""What a client of a service does, as the text of the module that is imported."""

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


class Run:
    """A run in a folder, and what is known of it."""

    def __init__(self, path: Path, output: Path, straight: Path, moments: random.Random, seconds: float) -> None:
        self.path, self.output, self.straight = path, output, straight
        self.moments, self.seconds = moments, seconds
        self.clock = jumping_clock(path.parent)
        self.newest, self.finished = 0, 0

    def meets(self, kind: str) -> None:
        """One process that meets a fault, or ends before it does."""
        environment, limit, timeout, allowed = dict(os.environ), None, None, {0}
        words = [sys.executable, "-m", "surogate", "sft", str(self.path)]
        if kind == "killed":
            timeout, allowed = self.moments.uniform(0.0, self.seconds), {0, -signal.SIGKILL}
        elif kind == "ended":
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
            modules = self.path.parent / "modules"
            modules.mkdir(exist_ok=True)
            (modules / "wandb.py").write_text(TRACKERS[how])
            environment["PYTHONPATH"] = os.pathsep.join([str(modules), os.environ.get("PYTHONPATH", "")])
            words += ["--report-to", "[wandb]"]
            print(f"tracker: {how}")
            # One that hangs is waited for after the run; half of the processes are killed before their end.
            if how == "hangs" or self.moments.random() < 0.5:
                timeout, allowed = self.moments.uniform(0.0, 2 * self.seconds), {0, -signal.SIGKILL}
        elif kind == "clock" and self.clock is not None:
            years = self.moments.choice([-30, -1, 1, 30])
            after = int(self.moments.uniform(0, 1000 * self.seconds))
            environment |= {"LD_PRELOAD": str(self.clock), "JUMP": str(years * 31_557_600), "AFTER": str(after)}

        def full() -> None:  # No file may grow beyond this: the system's answer is that of a full disk.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        out = self.path.parent / "said.txt"
        with out.open("w") as said:
            process = subprocess.Popen(
                words, stdout=said, stderr=said, env=environment, preexec_fn=full if limit else None
            )
            begin = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
            if process.poll() == 0 and kind != "tracker":
                # Faults are to fall into the run, and the machine may have been busier before.
                self.seconds = min(self.seconds, time.monotonic() - begin)
            if process.poll() is None and kind == "ended":
                process.terminate()
                process.wait(60)
            if process.poll() is None:
                process.kill()
            process.wait()
        text = out.read_text()
        assert process.returncode in allowed, f"{kind}: exit code {process.returncode}\n{text}"
        if process.returncode == 1:
            assert "cannot write" in text and "too large" in text, text
        self.check(process.returncode == 0)

    def check(self, ended: bool) -> None:
        steps = saved(self.output)
        assert not self.newest or (steps and steps[-1] >= self.newest), f"checkpoint-{self.newest} was lost: {steps}"
        self.newest = steps[-1] if steps else 0
        if ended:
            self.compare()
            self.finished += 1
            shutil.rmtree(self.output)
            self.newest = 0

    def compare(self) -> None:
        assert digests(self.output) == digests(self.straight), "other bits than without faults"
        assert losses(self.output) == losses(self.straight), "other losses than without faults"


@pytest.mark.skipif(sys.platform != "linux", reason="limits and preloading as Linux has them")
@pytest.mark.parametrize("of", RUNS if LONG else ["adapter"])
def test_faults_again_and_again(tmp_path, make_model, of):
    changed = RUNS[of]
    if changed.get("model") == "untied":
        changed = changed | {"model": str(untied(make_model))}
    for name in ("straight", "faulty"):
        of_run = options(tmp_path / name, save_total_limit=3, **changed)
        (tmp_path / f"{name}.yaml").write_text(json.dumps(of_run))
    _, seconds = whole(tmp_path / "straight.yaml")
    seed = int(os.environ.get("SUROGATE_FAULT_SEED", time.time_ns() % 10**6))
    print(f"SUROGATE_FAULT_SEED={seed}, {seconds:.2f} s straight through, {STEPS} steps, saved every {SAVE_STEPS}")
    moments = random.Random(seed)
    run = Run(tmp_path / "faulty.yaml", tmp_path / "faulty", tmp_path / "straight", moments, seconds)
    met: dict[str, int] = dict.fromkeys(KINDS, 0)
    end = time.monotonic() + 60 * MINUTES
    kinds = moments.sample(KINDS, len(KINDS))
    while kinds or time.monotonic() < end:
        kind = kinds.pop() if kinds else moments.choice(KINDS)
        run.meets(kind)
        met[kind] += 1
    whole(tmp_path / "faulty.yaml")
    run.compare()
    left = [entry.name for entry in run.output.iterdir() if entry.name.startswith(".")]
    assert left == [], "nothing that was in the making is left over"
    print(f"{of}: {met} and {run.finished + 1} times to the end")


def untied(make_model) -> Path:
    """A model with a head of its own, which stages can hold, and the tokenizer of the stories."""
    model = Path(make_model(tiny_llama(vocab_size=512)))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "examples" / "stories" / "model" / file, model)
    return model


def made(place: Path) -> dict[str, bytes]:
    """The files of a result; of the card all but the day."""
    files = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
    return {str(path.relative_to(place)): path.read_bytes() for path in files if path.name != "README.md"}


COMMANDS: dict[str, list[str]] = {
    "merge": ["merge", "ADAPTER", "--output", "OUT"],
    "export": ["export", "MODEL", "--format", "gguf", "--output", "OUT/model.gguf"],
    "quantize": ["quantize", "MODEL", "--scheme", "w8a16", "--output", "OUT"],
    "prune": ["prune", "MODEL", "--calibration", "ROWS", "--layers", "2", "--output", "OUT"],
    "extend": ["extend", "MODEL", "--tokens", "<x>,<y>", "--output", "OUT"],
}


@pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux has them")
@pytest.mark.parametrize("name", COMMANDS if LONG else ["merge", "export"])
def test_commands_that_meet_faults(tmp_path, make_model, name):
    """The largest matrices are so large that they take a while to write."""
    model = Path(make_model(tiny_llama(vocab_size=512, hidden_size=256, intermediate_size=3072, num_hidden_layers=4)))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "examples" / "stories" / "model" / file, model)
    adapter = tmp_path / "run"
    (tmp_path / "run.yaml").write_text(json.dumps(options(adapter, model=str(model), max_steps=1)))
    if "ADAPTER" in COMMANDS[name]:
        whole(tmp_path / "run.yaml")

    def words(output: Path) -> list[str]:
        named = {"ADAPTER": str(adapter), "MODEL": str(model), "ROWS": str(tmp_path / "run.yaml")}
        given = [named.get(word, word.replace("OUT", str(output))) for word in COMMANDS[name]]
        return [sys.executable, "-m", "surogate", *given]

    begin = time.monotonic()
    (tmp_path / "straight").mkdir()
    (tmp_path / "faulty").mkdir()
    for place in ("straight", "faulty"):
        if not words(Path("x"))[-1].endswith(".gguf"):
            (tmp_path / place).rmdir()
    subprocess.run(words(tmp_path / "straight"), check=True, capture_output=True)
    seconds, before, source = time.monotonic() - begin, made(tmp_path / "straight"), made(model)
    largest = max(len(content) for content in before.values())
    seed = int(os.environ.get("SUROGATE_FAULT_SEED", time.time_ns() % 10**6))
    print(f"SUROGATE_FAULT_SEED={seed}, {seconds:.2f} s straight through")
    moments, end, output = random.Random(seed), time.monotonic() + 60 * MINUTES, tmp_path / "faulty"
    met: dict[str, int] = {}
    kinds = ["killed", "killed", "full", "ended"]
    while kinds or time.monotonic() < end:
        kind = kinds.pop() if kinds else moments.choice(["killed", "ended", "full"])
        limit = moments.randrange(4096, largest)

        def full(limit: int = limit) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        said = tmp_path / "said.txt"
        with said.open("w") as out:
            process = subprocess.Popen(words(output), stdout=out, stderr=out, preexec_fn=full if kind == "full" else None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(moments.uniform(0.0, 1.1 * seconds) if kind != "full" else None)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL if kind == "killed" else signal.SIGTERM)
            process.wait(60)
        allowed = {"killed": {0, -9}, "ended": {0, 143, -15}, "full": {1}}[kind]
        assert process.returncode in allowed, f"{kind}: exit code {process.returncode}\n{said.read_text()}"
        assert made(model) == source, "what the command reads stays as it is"
        met[kind] = met.get(kind, 0) + 1
        file = output / "model.gguf"
        is_there = file.exists() if "gguf" in COMMANDS[name] else output.exists()
        assert is_there or process.returncode != 0
        if is_there:
            # A process may be killed after its last step.
            assert made(output) == before
            if file.exists():
                file.unlink()
            else:
                shutil.rmtree(output)
        elif kind != "killed":
            hidden = [path.name for path in (*tmp_path.iterdir(), *(output.iterdir() if output.exists() else ()))]
            assert not [of for of in hidden if of.startswith(".")] or "killed" in met, f"{kind}: {hidden}"
    subprocess.run(words(output), check=True, capture_output=True)
    assert made(output) == before
    # An empty folder may be one that another process has just made.
    hidden = [path for path in (*tmp_path.iterdir(), *output.iterdir()) if path.name.startswith(".")]
    left = [path.name for path in hidden if path.is_file() or any(path.iterdir())]
    assert left == [], "nothing that was in the making is left over"
    print(f"{name}: {met}")
