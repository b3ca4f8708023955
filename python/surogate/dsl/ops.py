"""One function for each operation of the engine; generated from its declarations.

`cargo xtask generate` writes the signatures to ops.pyi. Inputs are positional tensors or
parameters, attributes are keywords. An operation with one result gives it, others give a tuple.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .. import _native
from .tensor import Tensor, each
from .trace import Trace

SCHEMAS: dict[str, dict[str, Any]] = {schema["name"]: schema for schema in json.loads(_native.op_schemas())}


def _number(kind: str, value: Any) -> Any:
    """Whole numbers for float attributes are written as floats, so that equal models are equal text."""
    if isinstance(value, each):
        return each([_number(kind, v) for v in value.values])
    if kind.rstrip("?") == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _function(schema: dict[str, Any]) -> Callable[..., Any]:
    name = schema["name"]
    kinds = {attribute["name"]: attribute["kind"] for attribute in schema["attributes"]}

    def call(*inputs: Any, **attributes: Any) -> Tensor | tuple[Tensor, ...]:
        written = {key: _number(kinds.get(key, ""), value) for key, value in attributes.items()}
        results = Trace.current().emit(name, inputs, written)
        return results[0] if len(results) == 1 else tuple(results)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = schema["doc"]
    return call


globals().update({name: _function(schema) for name, schema in SCHEMAS.items()})
__all__ = list(SCHEMAS)
