"""A run whose process is killed again and again ends with the bits of a run straight through.

SUROGATE_KILLS=200 sets the number of kills; without it there are a few, and more in the long form of the tests. The
moments are random, and the seed is printed: SUROGATE_KILL_SEED=… repeats them.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

KILLS = int(os.environ.get("SUROGATE_KILLS", "10" if os.environ.get("SUROGATE_TEST_ALL") else "3"))
#: Chosen so that several kills fall between two checkpoints, some into a checkpoint, one into the end.
STEPS, SAVE_STEPS = 40, 4
ROOT = Path(__file__).parents[2]


def options(output: Path, **changed: object) -> dict[str, object]:
    example = ROOT / "examples" / "stories"
    return {
        "run_name": "killed",
        "model": str(example / "model"),
        "output_dir": str(output),
        "device": os.environ.get("SUROGATE_TEST_DEVICE", "cpu"),
        "datasets": [{"path": str(example / "data" / "shakespeare.txt"), "type": "text", "samples": 60}],
        "validation_split_ratio": 0.1,
        "sequence_len": 32,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "save_steps": SAVE_STEPS,
        "eval_steps": 6,
        "save_total_limit": 2,
        "learning_rate": 5e-3,
        "lora_rank": 4,
        "resume_from_checkpoint": True,
        **changed,
    }


def start(path: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "surogate", "sft", str(path)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def whole(path: Path) -> tuple[str, float]:
    """Runs to the end; gives what was printed and the seconds that it took."""
    begin = time.monotonic()
    with start(path) as process:
        text = process.stdout.read()
    assert process.returncode == 0, text
    return text, time.monotonic() - begin


def saved(output: Path, whole_ones: bool = True) -> list[int]:
    """Steps of the checkpoints that are there; each of them must be whole, unless that is not requested."""
    if not whole_ones:
        return sorted(int(folder.name.split("-")[1]) for folder in output.glob("checkpoint-*"))
    steps = []
    for state in output.glob("checkpoint-*/state.json"):
        for name, of in json.loads(state.read_text())["files"].items():
            content = (state.parent / name).read_bytes()
            assert len(content) == of["bytes"], f"{state.parent}/{name} is not whole"
        steps.append(json.loads(state.read_text())["step"])
    return sorted(steps)


def digests(output: Path) -> dict[str, str]:
    files = [*output.glob("*/*.safetensors"), *output.glob("*/adapter_config.json")]
    last = {f"checkpoint-{STEPS}", "adapter", "model"}
    digest = {str(f.relative_to(output)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    return {name: value for name, value in digest.items() if name.split("/")[0] in last}


def losses(output: Path) -> dict[tuple[str, int], float]:
    """The last word of the log on each step and each evaluation."""
    (log,) = output.glob("log-*.json")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return {(e["event"], e["step"]): e["loss"] for e in events if e["event"] in ("step", "evaluation")}


def test_killed_while_the_first_manifest_was_written(tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    for name in (".manifest.json.f68b192c4896d8e6.17406.0.tmp", ".resolved.yaml.f68b192c4896d8e6.17406.0.tmp", ".manifest.json.mine.tmp"):
        (output / name).write_text("{")
    (tmp_path / "run.yaml").write_text(json.dumps(options(output)))
    whole(tmp_path / "run.yaml")
    assert [entry.name for entry in output.iterdir() if entry.name.startswith(".")] == [".manifest.json.mine.tmp"]


@pytest.mark.parametrize(
    "changed",
    [
        {"lora_dropout": 0.1},
        {"lora": False, "torch_dtype": "bfloat16", "sample_packing": False, "learning_rate": 1e-3},
    ],
    ids=["adapter", "model"],
)
def test_killed_again_and_again(tmp_path, changed):
    for name in ("straight", "killed"):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(options(tmp_path / name, **changed)))
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    _, seconds = whole(tmp_path / "straight.yaml")
    seed = int(os.environ.get("SUROGATE_KILL_SEED", time.time_ns() % 10**6))
    print(f"SUROGATE_KILL_SEED={seed}, {seconds:.2f} s straight through")
    moments = random.Random(seed)
    kills, newest, finished = 0, 0, 0
    while kills < KILLS:
        with start(tmp_path / "killed.yaml") as process:
            try:
                process.wait(moments.uniform(0.0, seconds))
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
            text = process.stdout.read()
        assert process.returncode in (0, -9), text
        steps = saved(killed)
        assert not steps or steps[-1] >= newest, f"checkpoint-{newest} was lost, {steps} are there"
        newest = steps[-1] if steps else newest
        if process.returncode == 0:
            # Starts over: the kills have to cover the whole run.
            assert digests(killed) == digests(straight) and losses(killed) == losses(straight)
            finished += 1
            killed.rename(tmp_path / f"finished-{finished}")
            newest = 0
    whole(tmp_path / "killed.yaml")
    assert digests(killed) == digests(straight) and len(digests(killed)) == (3 if "lora" in changed else 5)
    assert losses(killed) == losses(straight)
    left = [entry.name for entry in killed.iterdir() if entry.name.startswith(".")]
    assert left == [], "nothing that was in the making is left over"


def test_killed_in_the_middle_of_an_evaluation(tmp_path):
    """The step is reported, its checkpoint is there or not yet, and the loss held out is half added up."""
    changed = {"validation_split_ratio": 0.6, "max_steps": 8, "eval_steps": 2, "save_steps": 2, "save_total_limit": 4}
    changed["datasets"] = [{**options(tmp_path)["datasets"][0], "samples": 600}]
    for name in ("straight", "killed"):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(options(tmp_path / name, **changed)))
    whole(tmp_path / "straight.yaml")
    straight, killed = tmp_path / "straight", tmp_path / "killed"

    def reported() -> list[tuple[str, int]]:
        """What the log of the run says has happened."""
        lines = [line for log in killed.glob("log-*.json") for line in log.read_text().splitlines()]
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [(e["event"], e["step"]) for e in events if e["event"] in ("step", "evaluation")]

    # Step 3 is the fourth: an evaluation follows it.
    for _ in range(20):
        with start(tmp_path / "killed.yaml") as process:
            while process.poll() is None and ("step", 3) not in reported():
                time.sleep(0.002)
            process.kill()
            process.stdout.read()
        if ("evaluation", 4) not in reported():
            break
        killed.rename(tmp_path / f"too-late-{time.time_ns()}")
    assert ("step", 3) in reported() and ("evaluation", 4) not in reported(), "no process was killed in an evaluation"
    whole(tmp_path / "killed.yaml")
    assert losses(killed) == losses(straight)
    name = "adapter/adapter_model.safetensors"
    assert (killed / name).read_bytes() == (straight / name).read_bytes()
