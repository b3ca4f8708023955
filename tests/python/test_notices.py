"""What goes along with an installed package: its licence, those of the crates that it is linked from, and bounds on what it asks for.

Knows the package's metadata; which crates there are says Cargo.lock.
"""

import importlib.metadata
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def licence_file(name: str) -> str:
    files = importlib.metadata.files("surogate") or []
    found = [file for file in files if file.name == name and ".dist-info" in str(file)]
    assert len(found) == 1, f"{name} is in the wheel once: {found}"
    return found[0].read_text(encoding="utf-8")


def test_licences_of_what_is_linked_are_installed() -> None:
    assert licence_file("LICENSE") == (ROOT / "LICENSE").read_text(encoding="utf-8")
    notices = licence_file("THIRD_PARTY_NOTICES.txt")
    locked = tomllib.loads((ROOT / "Cargo.lock").read_text(encoding="utf-8"))["package"]
    versions = {(package["name"], package["version"]) for package in locked}
    named = set(re.findall(r"^([\w-]+) (\d\S*): \S", notices, flags=re.MULTILINE))
    assert len(named) > 100
    assert named <= versions, f"not as locked: {sorted(named - versions)}; run `cargo xtask generate`"
    for name in ("tokenizers", "parquet", "zstd-sys", "onig_sys", "pyo3"):
        assert any(name == crate for crate, _ in named), name
    for text in ("Redistributions in binary form must reproduce", "Mozilla Public License Version 2.0", "K.Kosako"):
        assert text in notices, text
    assert "GNU GENERAL PUBLIC LICENSE" not in notices


def test_every_requirement_has_an_upper_bound() -> None:
    requirements = importlib.metadata.requires("surogate") or []
    assert len(requirements) > 10
    unbounded = [requirement for requirement in requirements if "<" not in requirement.split(";")[0]]
    assert not unbounded
