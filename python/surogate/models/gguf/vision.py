"""The description of the file in which llama.cpp reads the tower of a vision-language model, next to that of the text.

Knows the form of the description; `towers` has the names. The engine reads and writes the values.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ... import _native
from ...dsl.model import find
from ...errors import ConfigError, ModelConfigError
from ...storage import json_file
from .. import build
from . import parameters
from .form import Metadata
from .towers import TOWERS, Processor, Source, Tower

#: Tensors that readers take as f32 alone.
EXACT = {"v.position_embd.weight", "v.patch_embd.weight"}


def has_tower(fields: dict[str, Any]) -> bool:
    """True if the config.json is that of a model with a tower."""
    return find(fields).images is not None and isinstance(fields.get("vision_config"), dict)


def describe(fields: dict[str, Any], folder: Path, name: str) -> tuple[str, list[str]]:
    """The description of the tower's file as JSON, and sentences on what llama.cpp computes a little otherwise.
    `folder` has the processor and the tokenizer.

    Raises ModelConfigError for what llama.cpp would compute otherwise, ConfigError for a folder without a processor.
    """
    architecture = find(fields)
    tower = TOWERS.get(architecture.name)
    if tower is None or architecture.images is None:
        known = ", ".join(TOWERS)
        said = f"`architectures`: the tower of {architecture.name} has no GGUF form here yet; these have: {known}"
        raise ModelConfigError(architecture.name, [said])
    c: Any = architecture.config.from_dict(architecture.name, fields)
    v: Any = architecture.images[1].from_dict(architecture.name, fields)
    processor = _processor(folder)
    if problems := tower.problems(c, v, processor):
        raise ModelConfigError(architecture.name, problems)
    ir = build(fields, images=True)
    parts = json.loads(ir)["adapters"]["apart"]
    of_tower = [parameter for parameter in parameters(ir) if parameter.startswith(tuple(parts))]
    sources = [source for parameter in of_tower for source in _sources(parameter, tower, v)]
    if tower.token:
        sources.append(_embedding(folder, *tower.token, c.hidden_size))
    metadata: Metadata = [
        ("general.architecture", "text", "clip"),
        ("general.type", "text", "mmproj"),
        ("general.name", "text", name),
        ("clip.has_vision_encoder", "bool", True),
        ("clip.projector_type", "text", tower.projector),
        ("clip.vision.projection_dim", "u32", c.hidden_size),
        *((f"clip.vision.{key}", kind, value) for key, kind, value in tower.sizes(c, v, processor)),
        ("clip.vision.image_mean", "f32s", processor.mean),
        ("clip.vision.image_std", "f32s", processor.deviation),
        *tower.activation(v),
    ]
    description = {"metadata": metadata, "tensors": sources, "parts": parts, "model": ir}
    return json.dumps(description), tower.notes(c, v, processor)


def _processor(folder: Path) -> Processor:
    found = _native.ImageProcessor.read(folder)
    if found is None:
        raise ConfigError(f"{folder}: there is no `preprocessor_config.json`, which says how images are read")
    mean, deviation = found.normalization()
    return Processor(mean, deviation, found.tiles(), found.has_crops())


def _sources(parameter: str, tower: Tower, v: Any) -> list[Source]:
    """The tensors of the file that are made of a parameter."""
    inside = re.fullmatch(rf"{re.escape(tower.layers)}\.(\d+)\.(.*)\.(\w+)", parameter) if tower.layers else None
    source: Source = {"from": parameter}
    if inside:
        layer, module, part = inside.groups()
        module = module.removesuffix(".linear")
        name = f"v.blk.{layer}.{tower.inside[module]}.{part}"
        if module in tower.interleaved:
            source["interleave_heads"] = v.num_attention_heads
    elif parameter in tower.outside:
        name = tower.outside[parameter]
    else:
        module, part = parameter.rsplit(".", 1)
        name = f"{tower.outside[module]}.{part}" if module in tower.outside else ""
    found = tower.parts(parameter, name, v)
    if found is not None:
        return found
    source |= {"name": name} | ({"exact": True} if name in EXACT else {})
    return [source | ({"plus_one": True} if name in tower.offset else {})]


def _embedding(folder: Path, token: str, name: str, columns: int) -> Source:
    """The row of a token in the embedding table."""
    path = folder / "tokenizer.json"
    found = json_file.read(path) if path.is_file() else {}
    added = found.get("added_tokens") or [] if isinstance(found, dict) else []
    ids = [of["id"] for of in added if isinstance(of, dict) and of.get("content") == token]
    if not ids:
        raise ConfigError(f"{path}: there is no token {token}, of which llama.cpp reads the embedding with the tower")
    return {
        "name": name,
        "from": "model.language_model.embed_tokens.weight",
        "steps": [{"slice": {"axis": 0, "from": ids[0], "to": ids[0] + 1}}, {"reshape": [columns]}],
    }
