"""What type checkers and completion see of the package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import surogate
from conftest import REPOSITORY

#: Uses of the package that are wrong, and the word of mypy for each.
WRONG = {
    "surogate.load(7)": "arg-type",
    "surogate.nothing": "attr-defined",
    "surogate.Trainer('run.yaml').step().keys()": "union-attr",
}


def snippet() -> str:
    """The Python of the README."""
    found = re.search(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert found
    return found[1]


def checked(tmp_path: Path, text: str) -> str:
    """What mypy says about a program."""
    (tmp_path / "program.py").write_text(text)
    words = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "program.py"]
    return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True).stdout


def test_the_readme_is_typed(tmp_path):
    said = checked(tmp_path, snippet())
    assert "Success" in said, said


@pytest.mark.parametrize("wrong", WRONG)
def test_mistakes_are_found(tmp_path, wrong):
    assert f"[{WRONG[wrong]}]" in checked(tmp_path, f"import surogate\n\n{wrong}\n")


def test_the_names_are_listed_and_there():
    assert set(surogate.__all__) <= set(dir(surogate))
    for name in surogate.__all__:
        assert getattr(surogate, name) is not None
    with pytest.raises(AttributeError, match="`nothing`"):
        surogate.nothing  # noqa: B018


def test_nothing_is_imported_before_it_is_used():
    text = "import sys, surogate; print([name for name in sys.modules if name.startswith(('surogate.', 'numpy'))])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_is_typed(tmp_path):
    """But for descriptions of models, whose methods and fields are narrower than those that they override."""
    words = [sys.executable, "-m", "mypy", "--cache-dir", tmp_path, "--config-file", "pyproject.toml", "python/surogate"]
    said = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True).stdout
    assert "Success" in said, said
