"""The architectures in GGUF files: tensor names, keys of sizes, order of elements.

Knows names; the engine reads and writes the values. An architecture without an entry in `FORMS` cannot be exported.
"""

from __future__ import annotations

import json
from typing import Any

from ...dsl.model import find
from ...errors import ModelConfigError
from .. import build
from . import axes, delta, dense, experts, gemma, latent, lfm2, mamba
from .form import Form, Metadata, sources
from .rotation import rotation, rotation_notes

#: By the name that stands in config.json's `architectures`.
FORMS: dict[str, Form] = {}
for kind in (dense, gemma, axes, experts, latent, mamba, delta, lfm2):
    FORMS |= kind.FORMS


def vocabulary_size(fields: dict[str, Any]) -> int:
    """Rows of the embedding table. Raises ModelConfigError for a configuration that is not supported."""
    architecture = find(fields)
    config: Any = architecture.config.from_dict(architecture.name, fields)
    return config.vocab_size


def describe(fields: dict[str, Any], vocabulary: Metadata, name: str) -> str:
    """The description of a model's file as JSON: metadata, and the source of every tensor.

    Raises ModelConfigError for what has no form in GGUF.
    """
    architecture = find(fields)
    form = FORMS.get(architecture.name)
    if form is None:
        known = ", ".join(FORMS)
        raise ModelConfigError(
            architecture.name, [f"`architectures`: {architecture.name} has no GGUF form here yet; these have: {known}"]
        )
    config: Any = architecture.config.from_dict(architecture.name, fields)
    kind = form.name_for(config)
    scaling, frequencies, problems = rotation(form, kind, config)
    problems += form.problems(config)
    if problems:
        raise ModelConfigError(architecture.name, problems)
    metadata: Metadata = [("general.architecture", "text", kind), ("general.type", "text", "model")]
    metadata.append(("general.name", "text", name))
    metadata += [(f"{kind}.{key}", of, value) for key, of, value in form.sizes(config)]
    metadata += form.more(config) + _deepstack(kind, fields)
    metadata += scaling + vocabulary
    ir = build(fields)
    tensors = sources(parameters(ir), form, config)
    tied = config.tie_word_embeddings
    if tied and form.own_head:
        table = next(of for of in tensors if of["name"] == "token_embd.weight")
        tensors.append(table | {"name": "output.weight"})
    description = {
        "metadata": metadata,
        "tensors": tensors,
        "repeated": ["lm_head.weight"] if tied else [],
        "frequencies": frequencies,
        "constants": [{"name": of, "values": values} for of, values in form.constants(config).items()],
        "model": ir,
    }
    return json.dumps(description)


def notes(fields: dict[str, Any]) -> list[str]:
    """Sentences on what readers compute a little otherwise than the model."""
    architecture = find(fields)
    config = architecture.config.from_dict(architecture.name, fields)
    return rotation_notes(config) + FORMS[architecture.name].notes(config)


def _deepstack(kind: str, fields: dict[str, Any]) -> Metadata:
    """The number of the tower's blocks whose results are added after the first layers of the text, too."""
    tower = fields.get("vision_config")
    blocks = tower.get("deepstack_visual_indexes") if isinstance(tower, dict) else None
    return [(f"{kind}.n_deepstack_layers", "u32", len(blocks))] if isinstance(blocks, list) and blocks else []


def parameters(ir: str) -> list[str]:
    """Names of all parameters, layer by layer."""
    model = json.loads(ir)
    names = [spec["name"] for spec in model["parameters"]]
    for item in model["body"]:
        for i in range(item.get("repeat", 0)):
            block = item["blocks"][item["pattern"][i] if "pattern" in item else 0]
            names += [spec["name"].replace("{i}", str(i)) for spec in block["parameters"]]
    return names
