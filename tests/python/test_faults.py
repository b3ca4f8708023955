"""A run that meets faults again and again loses nothing but steps after its last checkpoint, and ends with the bits of
a run that met none.

Faults: the process is killed or asked to end, alone or with all that it started, the disk is full, a file of a checkpoint is
damaged, a tracker fails, hangs or crashes, the clock jumps by years, a machine is lost whose run is in a bucket. There are a few
of each kind; SUROGATE_FAULTS=100 meets as many in each kind of run, SUROGATE_FAULTS_MINUTES=60 goes on for an hour. What happens
when is random, and the seed is printed: SUROGATE_FAULT_SEED=… repeats it. Commands that make models of models meet the same: they
leave nothing, and the next one makes what an undisturbed one does.
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
from bucket_server import s3_server
from fault_runs import CLASSES, RUNS, Run, images, untied
from test_data_buckets import keys
from test_data_streaming import SHARDS, shard
from test_killed import SAVE_STEPS, STEPS, options, whole

MINUTES = float(os.environ.get("SUROGATE_FAULTS_MINUTES", "0"))
LEAST = int(os.environ.get("SUROGATE_FAULTS", "0"))
LONG = MINUTES > 0 or LEAST > 0 or bool(os.environ.get("SUROGATE_TEST_ALL"))


@pytest.fixture(scope="module")
def s3():
    """The address of a server, with shards of text in its bucket `acme`."""
    with s3_server("acme", {f"shards/train-{number:05}.jsonl": shard(number) for number in range(SHARDS)}) as address:
        yield address


@pytest.mark.skipif(sys.platform != "linux", reason="limits and preloading as Linux has them")
@pytest.mark.parametrize("of", RUNS if LONG else ["adapter"])
def test_faults_again_and_again(tmp_path, make_model, monkeypatch, request, of):
    changed = RUNS[of]
    if changed.get("model") == "untied":
        changed = changed | {"model": str(untied(make_model))}
    if of == "images":
        changed = changed | images(request.getfixturevalue("shared"), tmp_path)
    if of in ("stream", "bucket"):
        for name, value in keys(request.getfixturevalue("s3")).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SUROGATE_RUNS", "")
    seed = int(os.environ.get("SUROGATE_FAULT_SEED", time.time_ns() % 10**6))
    moments = random.Random(f"{seed} {of}")
    run = CLASSES.get(of, Run)(tmp_path, changed, moments)
    run.begin()
    print(f"{of}: SUROGATE_FAULT_SEED={seed}, {run.seconds:.2f} s straight through, {STEPS} steps, saved every {SAVE_STEPS}")
    end = time.monotonic() + 60 * MINUTES
    kinds = moments.sample(run.kinds, len(run.kinds))
    while kinds or time.monotonic() < end or sum(run.met.values()) < LEAST:
        run.meets(kinds.pop() if kinds else moments.choice(run.kinds))
    run.whole("faulty")
    run.compare()
    assert run.left() == [], "nothing that was in the making is left over"
    print(f"{of}: {run.met} and {run.finished + 1} times to the end")


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
    model = untied(make_model, hidden_size=256, intermediate_size=3072, num_hidden_layers=4)
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
    print(f"{name}: SUROGATE_FAULT_SEED={seed}, {seconds:.2f} s straight through")
    moments, end, output = random.Random(f"{seed} {name}"), time.monotonic() + 60 * MINUTES, tmp_path / "faulty"
    met: dict[str, int] = {}
    kinds = ["killed", "killed", "full", "ended"]
    while kinds or time.monotonic() < end or sum(met.values()) < LEAST:
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
