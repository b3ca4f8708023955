"""What goes to the terminal and into logs: nothing of others steers a terminal. Files that others made stay."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import surogate
from conftest import REPOSITORY
from surogate import _native
from surogate.cli.commands import main

#: Clears the screen, sets the title, a control of eight bits, turns the direction.
EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e"

STORIES = REPOSITORY / "examples/stories"


def options(folder: Path, **changes: object) -> list[str]:
    given = {
        "model": STORIES / "model",
        "datasets": json.dumps([{"path": str(STORIES / "data/shakespeare.txt"), "type": "text", "samples": 50}]),
        "output-dir": folder / "output",
        "device": "cpu",
        "sequence-len": 64,
        "max-steps": 1,
        "gradient-accumulation-steps": 1,
        "report_to": "[]",
        **changes,
    }
    (folder / "run.yaml").write_text("")
    return ["sft", str(folder / "run.yaml"), *[part for k, v in given.items() for part in (f"--{k}", str(v))]]


def steers(text: str) -> list[str]:
    return [c for c in text if (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or c == "\u202e"]


def test_only_one_file_prints():
    package = Path(surogate.__file__).parent
    reported = {"terminal.py", "reader.py", "generated.py"}  # To the terminal; to a pipe whose end is `say`; for developers.
    for path in package.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        prints = [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]
        assert not prints or path.name in reported, path


def test_what_nobody_caught_is_made_visible(tmp_path):
    script = f"""
import sys
from surogate.cli import commands
def fail(*_):
    raise ValueError({EVIL!r})
commands.COMMANDS["schema"] = fail
sys.argv = ["surogate", "schema"]
commands.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and "ValueError" in done.stderr and not steers(done.stderr), done.stderr


def test_a_base_model_that_is_no_name(tmp_path, capsys):
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": f"a{EVIL}b/c"}))
    assert main(["generate", str(tmp_path), "--prompt", "x", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert "no name on the Hub" in err and not steers(err), err


def test_a_text_is_made_visible():
    shown = _native.visible(EVIL + "ä\n\t模型")
    assert not steers(shown) and shown.startswith("\\u001b[2J") and shown.endswith("ä\n\t模型")
    assert json.loads(_native.visible(json.dumps(EVIL, ensure_ascii=False))) == EVIL


def test_names_of_a_run_and_its_files_are_made_visible(tmp_path, capfd):
    place = tmp_path / f"there{EVIL}"
    place.mkdir()
    rows = place / "rows.jsonl"
    rows.write_text("".join(json.dumps({f"text{EVIL}": "Once upon a time there was a cat."}) + "\n" for _ in range(40)))
    data = [{"path": str(rows), "type": "text", "text_field": f"text{EVIL}"}]
    words = options(place, **{"run-name": f"name{EVIL}", "datasets": json.dumps(data)})
    assert main(words) == 0, capfd.readouterr().err
    assert main(words) == 2
    wrong = json.dumps([{**data[0], "text_field": f"other{EVIL}"}])
    assert main(options(place, **{"output-dir": place / "b", "datasets": wrong})) != 0
    reported = capfd.readouterr()
    assert "there\\u001b[2J" in reported.out + reported.err
    assert not steers(reported.out) and not steers(reported.err)
    (log,) = (place / "output").glob("log-*.json")
    text = log.read_text()
    assert not steers(text)
    assert json.loads(text.splitlines()[0])["manifest"]["run"] == f"name{EVIL}"


def test_a_models_configuration_is_made_visible(tmp_path, capfd):
    model = tmp_path / "model"
    model.mkdir()
    for file in (STORIES / "model").iterdir():
        (model / file.name).symlink_to(file)
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").unlink()
    for change in ({"hidden_act": EVIL}, {f"field{EVIL}": 1, "hidden_size": 0}, {"architectures": [EVIL]}):
        (model / "config.json").write_text(json.dumps({**fields, **change}))
        assert main(options(tmp_path, model=model)) == 2
    reported = capfd.readouterr()
    assert "\\u001b" in reported.err and not steers(reported.out + reported.err)


@pytest.mark.parametrize("text", ["my thesis\nwithout an end", "{}\n"])
def test_a_log_file_that_is_something_else_is_left_alone(tmp_path, capfd, text):
    mine = tmp_path / "thesis.tex"
    mine.write_text(text)
    assert main(options(tmp_path, **{"log_file": mine})) == 2
    err = capfd.readouterr().err
    assert "log_file" in err and "expected nothing, an empty file, or a log" in err
    assert mine.read_text() == text and not (tmp_path / "output" / "manifest.json").exists()


def test_nothing_in_the_output_folder_is_followed_or_replaced(tmp_path, capfd):
    output, mine = tmp_path / "output", tmp_path / "mine"
    output.mkdir()
    mine.write_text("important")
    for name in (".trial", f".report.html.{os.getpid()}", "trainer_state.json", "report.html", "data.html"):
        (output / name).symlink_to(mine)
    assert main(options(tmp_path)) == 0
    reported = "".join(capfd.readouterr())
    assert mine.read_text() == "important"
    assert "report.html cannot be written" in reported and "trainer_state.json cannot be written" in reported
    assert sum(path.is_symlink() for path in output.iterdir()) == 5
    words = options(tmp_path)
    assert main(["tokenize", words[1], "--debug", *words[2:]]) == 1 and mine.read_text() == "important"


def test_a_link_out_of_a_model_is_refused_before_the_first_step(tmp_path, capfd):
    model = tmp_path / "model"
    model.mkdir()
    for file in (STORIES / "model").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (tmp_path / "secret").write_text("key")
    (model / "vocab.txt").symlink_to(tmp_path / "secret")
    assert main(options(tmp_path, model=model)) != 0
    assert "outside of the model's folder" in capfd.readouterr().err
    assert not (tmp_path / "output").exists()


JOINED = "می\u200cخواهم 👩\u200d🔬"


@pytest.mark.parametrize("terminal", [True, False])
def test_samples_of_a_run_keep_what_joins_words(tmp_path, terminal):
    data, run = tmp_path / "data.txt", tmp_path / "run.json"
    data.write_text("Tom saw a cat.\n\n" * 30)
    of_run = {
        "model": str(REPOSITORY / "examples" / "stories" / "model"), "device": "cpu", "max_steps": 1, "sequence_len": 64,
        "datasets": [{"path": str(data), "type": "text"}], "output_dir": str(tmp_path / "run"), "report_to": [],
        "sample_prompts": [f"{JOINED} \u202e"], "sample_tokens": 2, "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip
    run.write_text(json.dumps(of_run))
    command = [sys.executable, "-m", "surogate", "sft", str(run)]
    if terminal:
        ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 400, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
        with subprocess.Popen(command, stdout=its, stderr=its, stdin=its, env=environment) as process:
            os.close(its)
            said = b""
            with contextlib.suppress(OSError):  # the end of a terminal
                while piece := os.read(ours, 4096):
                    said += piece
        os.close(ours)
        assert process.returncode == 0
        text = said.decode()
    else:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sample = next(line for line in text.splitlines() if "Sample after 1 step" in line)
    assert JOINED in sample and (("\\u202e" in sample), ("\u202e" in sample)) == (terminal, not terminal), ascii(sample)
