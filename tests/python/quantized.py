"""Models for `surogate quantize` and `surogate prune`, data for both, and what is in the files that they write."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from conftest import tiny_llama
from surogate.cli.commands import main


def wide(**changes: object) -> dict[str, object]:
    """A Llama whose rows are whole groups of every scheme, with weights large enough to matter."""
    return tiny_llama(**{"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.05, **changes})


def quantize(capsys, model: object, output: Path, *options: object) -> tuple[int, str, str]:
    code = main(["quantize", str(model), "--output", str(output), *map(str, options)])
    out, err = capsys.readouterr()
    return code, out, err


def raw(folder: Path, name: str = "model.safetensors") -> dict[str, tuple[str, list[int], bytes]]:
    """Type, shape and bytes of each tensor, whatever its type."""
    data = (folder / name).read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    places = {name: [start + at for at in of["data_offsets"]] for name, of in header.items()}
    return {name: (of["dtype"], of["shape"], data[slice(*places[name])]) for name, of in header.items()}


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def calibration(tmp_path: Path, model: Path, ids: np.ndarray, **options: object) -> Path:
    """A run whose rows are these token ids."""
    rows = "".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in ids.tolist())
    (tmp_path / "rows.jsonl").write_text(rows)
    run = {"model": str(model), "datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "tokens"}], "device": "cpu"}
    run |= {"sequence_len": ids.shape[1], "sample_packing": False, "output_dir": str(tmp_path / "unused"), **options}
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    return tmp_path / "run.yaml"
