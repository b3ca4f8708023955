"""Services that get the metrics: what reaches them, and that no failure of theirs touches the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import surogate
from conftest import REPOSITORY
from surogate import _native
from surogate.cli.commands import main
from surogate.logs import processes
from surogate.terminal import warn

#: A client that keeps what it is reported, with the calls of Aim's.
AIM = """
import json, os
class Run(dict):
    def __init__(self, run_hash=None, repo=None, experiment=None, **more):
        self.hash, self.repo = run_hash or "made-up", repo
        self.reported = {"hash": run_hash, "experiment": experiment, "values": []}
    def track(self, value, name, step, epoch, context):
        self.reported["values"].append([context["subset"] + "/" + name, step, value])
    def close(self):
        with open(os.path.join(self.repo, "reported"), "a") as file:
            file.write(json.dumps({**self.reported, "name": self.name, "max_steps": self["options"]["max_steps"]}) + "\\n")
"""


def options(folder: Path, **changes: object) -> list[str]:
    words = {
        "model": REPOSITORY / "examples/stories/model",
        "datasets": json.dumps([{"path": str(REPOSITORY / "examples/stories/data/shakespeare.txt"), "type": "text"}]),
        "output-dir": folder / "output",
        "device": "cpu",
        "run-name": "tracked",
        "sequence-len": 64,
        "max-steps": 4,
        "save-steps": 2,
        "gradient-accumulation-steps": 1,
        "log_gpu_util": 2,
        **changes,
    }
    (folder / "run.yaml").write_text("")
    return ["sft", str(folder / "run.yaml"), *[part for k, v in words.items() for part in (f"--{k}", str(v))]]


def losses(folder: Path) -> list[float]:
    (log,) = (folder / "output").glob("log-*.json")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]


def module(folder: Path, name: str, text: str, monkeypatch) -> None:
    place = folder / "modules"
    place.mkdir(exist_ok=True)
    (place / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(place))


def test_tensorboard_gets_the_curves_and_forgets_what_is_done_again(tmp_path, capfd):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = options(tmp_path, **{"report_to": "[tensorboard]"})
    assert main(words) == 0
    for gone in ("adapter", "checkpoint-4"):
        (tmp_path / "output" / gone).rename(tmp_path / gone)
    assert main([*words, "--resume-from-checkpoint", "true", "--max-steps", "5"]) == 0, capfd.readouterr().err
    curves = EventAccumulator(str(tmp_path / "output" / "tensorboard"))
    curves.Reload()
    seen = [(value.step, value.value) for value in curves.Scalars("train/loss")]
    first = losses(tmp_path)
    assert [at for at, _ in seen] == [1, 2, 3, 4, 5]
    assert [value for _, value in seen] == pytest.approx(first[:2] + first[4:])
    assert [value.step for value in curves.Scalars("device/memory_used_gib")] == [2, 4]
    assert len(curves.Scalars("eval/loss")) >= 1 and curves.Scalars("train/tokens_per_second")[0].value > 0


SAMPLES = {
    "event": "samples",
    "time": "2026-01-01T00:00:00Z",
    "step": 2,
    "samples": [{"prompt": "Once", "text": " upon", "finish": "length", "tokens": 1}],
}


def test_answers_to_prompts_reach_the_services(tmp_path, monkeypatch):
    from surogate.trackers.aim import Aim
    from surogate.trackers.tensorboard import TensorBoard
    from surogate.trackers.wandb import Wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.take([SAMPLES])
    board.close(None)
    curves = EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    (found,) = curves.Tensors("samples/0")
    assert (found.step, found.tensor_proto.string_val[0]) == (2, b"Once upon")
    assert curves.SummaryMetadata("samples/0").plugin_data.plugin_name == "text"

    class Run:
        def __init__(self) -> None:
            self.reported: list = []

        def log(self, values: dict) -> None:
            self.reported.append(values)

        def track(self, value, name, step, epoch, context) -> None:
            self.reported.append((value, name, step, context["subset"]))

    module(tmp_path, "wandb", "def Table(columns, rows): return (columns, rows)", monkeypatch)
    module(tmp_path, "aim", "def Text(text): return text", monkeypatch)
    for name in ("wandb", "aim"):
        # What is imported here is forgotten after the test.
        monkeypatch.setitem(sys.modules, name, sys)
        del sys.modules[name]
    for made, expected in [
        (Wandb({}, tmp_path), {"samples": (["step", "prompt", "answer"], [[2, "Once", " upon"]]), "step": 2}),
        (Aim({}, tmp_path), (["Once upon"], "samples", 2, "eval")),
    ]:
        made._run = Run()
        made.take([SAMPLES])
        assert made._run.reported == [expected]


def pieces(data: bytes) -> list[bytes]:
    """What a file of W&B consists of: blocks of 32 KiB, in which pieces with a checksum, a length and a kind lie."""
    found, at, whole = [], 7, b""
    while at + 7 <= len(data):
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if (1 << 15) - at % (1 << 15) < 7 or kind == 0:
            at += (1 << 15) - at % (1 << 15)
            continue
        whole = data[at + 7 : at + 7 + length] if kind in (1, 2) else whole + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(whole)
    return found


def test_wandb_gets_a_run_of_its_own(tmp_path, capfd, monkeypatch):
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    named = {"wandb_project": "a project", "wandb_name": "a name"}
    assert main(options(tmp_path, **{"report_to": "[wandb]"}, **named)) == 0
    assert capfd.readouterr().err == ""
    (file,) = (tmp_path / "output" / "wandb").glob("offline-run-*/*.wandb")
    records = [Record.FromString(data) for data in pieces(file.read_bytes())]
    run = next(record.run for record in records if record.HasField("run"))
    assert (run.project, run.display_name) == ("a project", "a name")
    assert run.run_id == json.loads((tmp_path / "output" / "manifest.json").read_text())["run_id"]
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [row["train/loss"] for row in rows if "train/loss" in row] == pytest.approx(losses(tmp_path))
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert any(record.HasField("exit") and record.exit.exit_code == 0 for record in records)


def test_aim_gets_a_run_that_is_gone_on_with(tmp_path, capfd, monkeypatch):
    module(tmp_path, "aim", AIM, monkeypatch)
    (tmp_path / "repo").mkdir()
    named = {"aim_experiment": "an experiment", "aim_name": "a name", "aim_repo": tmp_path / "repo"}
    words = options(tmp_path, **{"report_to": "[aim]"}, **named)
    assert main(words) == 0
    assert main([*words, "--resume-from-checkpoint", "true", "--max-steps", "5"]) == 0, capfd.readouterr().err
    first, second = [json.loads(line) for line in (tmp_path / "repo" / "reported").read_text().splitlines()]
    assert (first["hash"], second["hash"]) == (None, "made-up")
    assert (first["experiment"], first["name"], first["max_steps"]) == ("an experiment", "a name", 4)
    reported = [value for reported in (first, second) for value in reported["values"] if value[0] == "train/loss"]
    assert [step for _, step, _ in reported] == [1, 2, 3, 4, 5]
    assert [value for _, _, value in reported] == pytest.approx(losses(tmp_path))


if find_spec("aim") is not None:

    def test_a_repository_of_aim_holds_the_run(tmp_path, capfd):
        assert main(options(tmp_path, **{"report_to": "[aim]", "aim_repo": tmp_path / "repo"})) == 0
        program = """
import aim, sys
import aim.sdk.index_manager
repo = aim.Repo(sys.argv[1])
name = repo.list_all_runs()[0]
aim.sdk.index_manager.RepoIndexManager.get_index_manager(repo).index(name)  # As Aim's own pages do before they read.
run = aim.Run(name, repo=repo, read_only=True)
losses = [m for m in run.metrics() if (m.name, m.context["subset"]) == ("loss", "train")]
print(run.name, [m.values.sparse_list()[1] for m in losses])
"""
        words = [sys.executable, "-c", program, str(tmp_path / "repo")]
        said = subprocess.run(words, capture_output=True, text=True, check=False)
        assert said.stdout.startswith("tracked [["), said.stderr
        # They are kept by digests of the steps, not in their order.
        assert sorted(json.loads(said.stdout.split(" ", 1)[1])[0]) == pytest.approx(sorted(losses(tmp_path)))


def driven(folder: Path, **changes: object) -> surogate.Trainer:
    """The same run, to be driven step by step."""
    text = REPOSITORY / "examples/stories/data/shakespeare.txt"
    given = {
        "model": str(REPOSITORY / "examples/stories/model"),
        "datasets": [{"path": str(text), "type": "text", "samples": 100}],
        "output_dir": str(folder / "output"),
        "device": "cpu",
        "run_name": "tracked",
        "sequence_len": 64,
        "max_steps": 4,
        "gradient_accumulation_steps": 1,
        "log_gpu_util": 2,
    }
    return surogate.Trainer({**given, **changes})


def test_a_trainer_that_is_driven_tells_the_same(tmp_path, capfd):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with driven(tmp_path, report_to=["tensorboard"]) as trainer:
        steps = [trainer.step() for _ in range(4)]
        held_out = trainer.evaluate()
        trainer.save(tmp_path / "saved")
    assert capfd.readouterr().err == ""
    (log,) = (tmp_path / "output").glob("log-tracked-*.json")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    names = [
        "start",
        "startup",
        "step",
        "step",
        "device",
        "step",
        "step",
        "device",
        "evaluation",
        "checkpoint",
        "finished",
    ]
    assert [event["event"] for event in events] == names
    assert events[0]["options"]["max_steps"] == 4 and events[0]["manifest"]["run"] == "tracked"
    assert losses(tmp_path) == [step["loss"] for step in steps]
    found = EventAccumulator(str(tmp_path / "output" / "tensorboard")).Reload()
    reported = {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert reported["train/loss"] == [(i + 1, pytest.approx(step["loss"])) for i, step in enumerate(steps)]
    assert reported["eval/loss"] == [(4, pytest.approx(held_out["loss"]))] and len(reported["device/utilization"]) == 2
    assert not (tmp_path / "output" / "report.html").exists()
    page = tmp_path / "report.html"
    assert main(["report", str(log), "--output", str(page)]) == 0 and "tracked" in page.read_text()


def test_a_trainer_tells_how_it_ended(tmp_path):
    def events(folder: Path) -> list[dict]:
        (log,) = (folder / "output").glob("log-*.json")
        return [json.loads(line) for line in log.read_text().splitlines()]

    with (
        pytest.raises(ZeroDivisionError),
        driven(tmp_path / "a", log_file="auto", report_to=["tensorboard"]) as trainer,
    ):
        trainer.step()
        1 / 0
    assert (events(tmp_path / "a")[-1]["event"], events(tmp_path / "a")[-1]["error"]) == (
        "failed",
        "ZeroDivisionError: division by zero",
    )
    # One that is forgotten ends with the process, or when its last reference is gone.
    log = tmp_path / "b.json"
    trainer = driven(tmp_path / "b", log_file=str(log))
    trainer.step()
    del trainer
    assert json.loads(log.read_text().splitlines()[-1])["event"] == "finished"
    # One that resumes says where.
    trainer = driven(tmp_path / "c", log_file=str(log))
    trainer.step()
    trainer.save(tmp_path / "checkpoint")
    again = driven(
        tmp_path / "d", log_file=str(tmp_path / "d.json"), resume_from_checkpoint=str(tmp_path / "checkpoint")
    )
    again.step()
    again.close()
    again.step()
    reported = [json.loads(line) for line in (tmp_path / "d.json").read_text().splitlines()]
    assert [(e["event"], e.get("step")) for e in reported if e["event"] != "startup"] == [
        ("resume", 1),
        ("step", 1),
        ("device", 1),
        ("finished", None),
    ]


def test_without_a_reader_a_trainer_writes_nothing(tmp_path):
    trainer = driven(tmp_path)
    trainer.step()
    trainer.close()
    driven(tmp_path, log_file=str(tmp_path / "empty.json")).close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_package_that_is_missing_is_named_and_the_run_continues(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(processes, "is_installed", lambda package, path: False)
    assert main(options(tmp_path, **{"report_to": "[wandb, aim]"})) == 0
    err = capfd.readouterr().err
    assert "the package is not installed" in err and "pip install 'surogate[wandb]'" in err and "surogate[aim]" in err
    assert len(losses(tmp_path)) == 4 and (tmp_path / "output" / "adapter").is_dir()


@pytest.mark.parametrize(
    ("client", "reported"),
    [
        ("raise RuntimeError('the service is down')", "RuntimeError: the service is down"),
        ("import time\ntime.sleep(1000)", "did not finish within"),
        ("import os\nos._exit(3)", "wandb receives no more data: its process exited with code 3"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "wandb receives no more data: its process was"),
    ],
    ids=["fails", "hangs", "ends", "crashes"],
)
def test_a_client_that_misbehaves_does_not_touch_the_run(tmp_path, capfd, monkeypatch, client, reported):
    module(tmp_path, "wandb", client, monkeypatch)
    monkeypatch.setattr(processes, "TIMEOUT", 3.0)
    begin = time.monotonic()
    assert main(options(tmp_path, **{"report_to": "[wandb]"})) == 0
    assert time.monotonic() - begin < 30
    out, err = capfd.readouterr()
    assert reported in out + err
    assert len(losses(tmp_path)) == 4 and (tmp_path / "output" / "adapter").is_dir()
    assert "finished" in (tmp_path / "output" / "report.html").read_text()


def test_readers_notice_that_a_run_was_killed(tmp_path):
    words = [sys.executable, "-m", "surogate", *options(tmp_path, **{"max-steps": 100000, "save-steps": 100000})]
    page = tmp_path / "output" / "report.html"
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        try:
            _wait(lambda: page.is_file() and 'class="chip running"' in page.read_text())
            copy = tmp_path / "copy.html"
            assert main(["report", str(tmp_path / "output"), "--output", str(copy)]) == 0
            assert 'class="chip running"' in copy.read_text()
        finally:
            process.send_signal(signal.SIGKILL)
    _wait(lambda: "ended unexpectedly" in page.read_text())
    assert [name for name in os.listdir(tmp_path / "output") if name.startswith(".")] == []


def _wait(is_so) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_passwords_are_in_no_argument_and_no_message(capsys):
    """Every user of a machine can read the arguments of its processes, and messages go into logs."""
    readers = processes.LogReaders([], report=False)
    readers._start("report", {"reader": "report", "repo": "aim://user:password@host"})
    (process,) = readers._processes
    words = Path(f"/proc/{process._process.pid}/cmdline").read_bytes().split(b"\0")
    readers.finish()
    assert b"surogate.logs.reader" in words and not [word for word in words if b"password" in word], words
    _native.say("no server at aim://user:pass/word@host:1/x")
    assert _native.unsaid() == ["no server at aim://***@host:1/x"]
    warn("no server at aim://user:password@host")
    assert "aim://***@host" in capsys.readouterr().err
