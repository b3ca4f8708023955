"""Held-out losses by number format: the script on a small model, and the small parts that it is made of."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY

DEVICE = os.environ.get("SUROGATE_TEST_DEVICE", "cpu")
SCRIPT = REPOSITORY / "bench" / "device" / "quality.py"
STORIES = REPOSITORY / "examples" / "stories"

sys.path.insert(0, str(SCRIPT.parent))
import quality  # noqa: E402


def call(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def test_formats_are_compared_and_adapters_on_nf4_are_those_on_its_values(tmp_path):
    rows = tmp_path / "rows.jsonl"
    # Rows that fit into the 512 positions of the model.
    rows.write_text("".join(sorted((STORIES / "data" / "gsm8k.jsonl").open(), key=len)[:24]))
    words = ["--steps", 2, "--seeds", "1,2", "--rows", 2, "--sequence-len", 512, "--device", DEVICE]
    done = call("run", STORIES / "model", rows, *words, "--prompt", "{instruction} ", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "adapters on NF4 and on its values end alike" in done.stdout
    for name, _, _, other in quality.ROWS:
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(name + " ") and " a run" in line]
        losses = [float(word) for word in line.removeprefix(name).split()[:2]]
        assert losses[0] != losses[1] and all(1 < loss < 20 for loss in losses), line
        assert (" %, by seed " in done.stdout.split("yardstick")[1]) or other is None
    recipes = [name for name, own, _, _ in quality.ROWS if "recipe" in own]
    for name in recipes:
        assert f"\n{name}{quality.IN_BF16} " in done.stdout.split("yardstick")[1], done.stdout
    assert len(list((tmp_path / "out").glob("*.log.json"))) == 2 * (len(quality.ROWS) + len(recipes))


def test_a_difference_between_adapters_is_a_failure(capsys):
    losses = {name: [1.0, 2.0] for name, _, _, _ in quality.ROWS}
    assert quality.show(losses) == 0
    losses["lora on NF4"] = [1.0, 2.0000001]
    assert quality.show(losses) == 1
    assert "DIFFER" in capsys.readouterr().out


def text(of: str) -> bytes:
    return struct.pack("<Q", len(of)) + of.encode()


def test_blocks_of_codes_are_expanded():
    """A container with a list among its facts, and one block of each kind of codes."""
    wide = struct.pack("<e", 0.5) + bytes(range(256 - 16, 256)) + bytes(range(16))
    narrow = struct.pack("<ee", 2.0, -3.0) + bytes([0xA1] * 16)
    plain = np.arange(4, dtype="<f4").tobytes()
    tensors = [("wide", (1, 32), 8, 0), ("narrow", (2, 16), 3, 64), ("plain", (4,), 0, 96)]
    head = struct.pack("<IIQQ", 0x46554747, 3, len(tensors), 2)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    head += text("list") + struct.pack("<IIQ", 9, 4, 2) + struct.pack("<II", 7, 8)
    for name, shape, kind, offset in tensors:
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, offset)
    data = head + b"\0" * (-len(head) % 32) + wide.ljust(64, b"\0") + narrow.ljust(32, b"\0") + plain
    file = quality.Container(data)
    assert file.facts == {"general.architecture": "llama", "list": [7, 8]}
    assert (file.numbers("wide") == 0.5 * np.r_[np.arange(-16, 0), np.arange(16)]).all()
    assert (file.numbers("narrow").reshape(2, 16) == np.array([[-1.0], [17.0]])).all()
    assert (file.numbers("plain") == np.arange(4)).all()
    with pytest.raises(SystemExit, match="no GGUF"):
        quality.Container(b"\1" + data[1:])


def test_values_of_nf4_are_those_of_its_table():
    x = np.zeros((3, 50), np.float32)
    x[0, :4] = [8.0, -8.0, 4.0, 0.5]
    x[2, 49] = -1.0
    found = quality.from_bf16(quality.as_nf4(quality.as_bf16(x)))
    table = [8.0, -8.0, 8 * 0.4407098293304443, 8 * 0.07958029955625534]
    assert (found[0, :4] == quality.from_bf16(quality.as_bf16(np.array(table, np.float32)))).all()
    assert found[2, 49] == -1.0 and (found[1] == 0).all()
