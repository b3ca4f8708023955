"""Which code runs: nothing that lies in the folder in which a command is started, however the package is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import REPOSITORY
from surogate.cli.commands import main
from surogate.environment import import_path
from surogate.logs import processes

#: Modules that the command line, its readers or their services import.
PLANTED = (
    *("json", "signal", "threading", "pathlib", "typing"),
    *("dataclasses", "tensorboard", "httpx", "numpy", "console"),
)

MODULES = Path(sysconfig.get_path("purelib"))


def words(folder: Path, **changes: object) -> list[str]:
    given = {
        "model": REPOSITORY / "examples/stories/model",
        "datasets": json.dumps([{"path": str(REPOSITORY / "examples/stories/data/shakespeare.txt"), "type": "text"}]),
        "output-dir": folder / "output",
        "device": "cpu",
        "sequence-len": 64,
        "max-steps": 2,
        "gradient-accumulation-steps": 1,
        "report_to": "[tensorboard]",
        **changes,
    }
    (folder / "run.yaml").write_text("")
    return ["sft", str(folder / "run.yaml"), *[part for k, v in given.items() for part in (f"--{k}", str(v))]]


def script(folder: Path) -> tuple[list[str], dict[str, str]]:
    return [str(Path(sys.executable).with_name("surogate"))], {}


def module(folder: Path) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "surogate"], {}


def python_path(folder: Path) -> tuple[list[str], dict[str, str]]:
    # A colon too many means the working directory.
    return [sys._base_executable, "-m", "surogate"], {"PYTHONPATH": f"{MODULES}:"}


def user_site(folder: Path) -> tuple[list[str], dict[str, str]]:
    place = folder / f"user/lib/python{sys.version_info.major}.{sys.version_info.minor}"
    place.mkdir(parents=True)
    (place / "site-packages").symlink_to(MODULES)
    return [sys._base_executable, "-m", "surogate"], {"PYTHONUSERBASE": str(folder / "user")}


def from_text(folder: Path) -> tuple[list[str], dict[str, str]]:
    # `-c` puts the working directory first; who drives the command from Python has imported what it needs.
    program = "import sys; there = sys.path.pop(0)\nfrom surogate.cli.commands import main\n"
    program += "sys.path.insert(0, there)\nmain()"
    return [sys.executable, "-c", program], {}


@pytest.mark.parametrize("start", [script, module, python_path, user_site, from_text])
def test_what_lies_beside_the_user_is_not_run(tmp_path, start):
    here = tmp_path / "here"
    here.mkdir()
    mark = tmp_path / "mark"
    for name in PLANTED:
        text = f"open({str(mark)!r}, 'a').write({name!r} + ' ')\nraise ImportError({name!r})\n"
        (here / f"{name}.py").write_text(text)
    command, environment = start(tmp_path)
    environment = {**os.environ, **environment}
    if start is python_path:
        # Python itself would take its own modules from there: only what the readers start with is ours to say.
        for name in ("threading", "pathlib", "typing", "dataclasses", "json", "signal"):
            (here / f"{name}.py").unlink()
    ran = subprocess.run([*command, *words(tmp_path)], cwd=here, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert not mark.exists(), mark.read_text()
    assert "receives nothing" not in ran.stdout + ran.stderr
    assert "finished" in (tmp_path / "output" / "report.html").read_text()
    assert list((tmp_path / "output" / "tensorboard").iterdir())


def test_a_folder_with_the_name_of_a_package_is_none(tmp_path, capfd, monkeypatch):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "aim.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    path = import_path.trusted()
    assert str(tmp_path) not in path and Path(processes.__file__).parents[2] == Path(path[-1])
    assert not processes.is_installed("wandb", [str(tmp_path)]) and processes.is_installed("aim", [str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert str(tmp_path) in import_path.trusted()


def test_a_reader_that_dies_before_its_first_word_is_reported(tmp_path, capfd, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "dataclasses.py").write_text("raise RuntimeError('not the one that is meant')")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    assert main(words(tmp_path, **{"report_to": "[]"})) == 0
    out, err = capfd.readouterr()
    assert "report receives no more data: RuntimeError: not the one that is meant" in out + err
