"""Names of the weights of mixtures of experts in adapters of PEFT's form. Knows names; docs/ir.md says what the keys
mean."""

from __future__ import annotations

from typing import Any


def experts_as_parameters(gate: str, up: str, down: str, *, renamed: dict[str, str] | None = None) -> dict[str, Any]:
    """The entry for experts that were modules once, by the names of their matrices in files, and are two parameters for
    transformers 5 and PEFT. `renamed`: components of names, in files and for PEFT."""
    return {
        "renamed": [list(pair) for pair in (renamed or {}).items()],
        "bare": ["gate", gate, up, down],
        "routers": ["mlp.gate"],
        "converted": [
            ["gate", "gate.weight"],
            [gate, "gate_up_proj"],
            [up, "gate_up_proj"],
            [down, "down_proj"],
        ],
        "stacks": [{"name": "gate_up_proj", "parts": [gate, up]}, {"name": "down_proj", "parts": [down]}],
    }


#: Of most mixtures.
EXPERTS_AS_PARAMETERS = experts_as_parameters("gate_proj", "up_proj", "down_proj")

#: Of mixtures whose experts were parameters for transformers from the beginning.
STACKED_EXPERTS = {key: EXPERTS_AS_PARAMETERS[key] for key in ("routers", "stacks")} | {"bare": ["gate"]}
