"""`surogate new-model`: the file of a new architecture, as a subclass of the known one that is nearest to a config.json."""

from __future__ import annotations

import difflib
import keyword
import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from .. import models  # noqa: F401  importing the architectures registers them
from ..dsl.model import ARCHITECTURES, GENERATOR, PAGE, Architecture, nearest
from ..errors import ConfigError, RunError
from ..storage import files, hub
from ..terminal import show, state

#: The types of fields as the file annotates them; others are read by name.
TYPES = (bool, int, float, str)

#: The similarity of names from which one architecture is written as another; all end in the same words.
SIMILAR = 0.9

TEMPLATE = '''"""{title}: {base} except for what follows here; this sentence is the description in docs/models.md."""

from __future__ import annotations

import warnings
from typing import Any

from surogate.dsl import Reader, model
from {module} import {imported}

#: Fields of config.json that {base} rejects or does not read, with the values that were found. A field belongs here until the
#: forward pass follows it: any other value is an error then.
FOUND: dict[str, Any] = {found}


class {title}Config({config}):
{fields}    def derive(self, reader: Reader) -> None:
        for name, value in FOUND.items():
            if (other := reader.take(name)) not in (None, value):
                reader.problem(name, f"{{other!r}} is not supported, expected {{value!r}}")
        if FOUND:
            warnings.warn(f"the forward pass of {name} does not follow {{', '.join(FOUND)}} yet", stacklevel=2)
        super().derive(reader)


@model(
    "{name}",
    config={title}Config,
    model_type="{kind}",
{arguments})
class {title}({base}):
    """Parts that differ are subclasses of those in {path}, handed over in `__init__`."""
'''


def run(options: Namespace) -> int:
    """Writes the file."""
    name, kind, fields, example = described(options.model)
    known, unlike = nearest(name, fields) if "hidden_size" in fields else (like_name(name), [])
    text = source(name, kind, ARCHITECTURES[known], {field: fields[field] for field in unlike if field in fields}, example)
    path = Path(options.output or f"{module_name(kind)}.py")
    taken = RunError(f"{path} already exists and is not overwritten: remove it, or choose another with --output")
    if os.path.lexists(path):
        raise taken
    try:
        files.write_new(path, text)
    except FileExistsError:
        raise taken from None
    state(output=str(path), architecture=name, nearest=known, fields=unlike)
    shown = f" but for {', '.join(f'`{field}`' for field in unlike)}" if unlike else ""
    show(f"{path}: {name} as {known}{shown}")
    show(f"Next: {PAGE}; the file belongs to surogate/models/, its name to the import in __init__.py")
    show(f"Compare: python tests/oracle/compare_transformers.py --family {kind}, once tests/oracle/draw_configs.py draws its fields")
    return 0


def described(model: str) -> tuple[str, str, dict[str, Any], str | None]:
    """Architecture, `model_type`, config.json and name on the Hub of what the command was given: a folder, a name on the Hub, or
    the name of an architecture that has no config.json yet."""
    if "/" not in model and not Path(model).is_dir():
        kind = re.sub(r"\W+", "_", model).strip("_").lower()
        if not kind or not kind[0].isalpha() or keyword.iskeyword(kind):
            raise ConfigError(f"new-model: {model!r} is not a folder, and no name of an architecture either")
        name = next((of for of in ARCHITECTURES if of == model or ARCHITECTURES[of].model_type == kind), None)
        if name is None:
            name = "".join(part[:1].upper() + part[1:] for part in re.split(r"\W+|_", model)) + GENERATOR[0]
        return checked(name), kind, {}, None
    folder = hub.folder(model, weights=False)
    fields = hub.model_config(folder)
    names, of_type = fields.get("architectures"), fields.get("model_type")
    first = names[0] if isinstance(names, list) and names else None
    is_named = isinstance(first, str) and first.isidentifier()
    if not is_named or not isinstance(of_type, str) or not module_name(of_type).isidentifier():
        raise ConfigError(f"{folder / 'config.json'}: `architectures` and `model_type` must name an architecture")
    return checked(str(first)), of_type, fields, None if Path(model).is_dir() else model


def checked(name: str) -> str:
    """The name of an architecture that is not known yet. Raises ConfigError for those that are."""
    if name in ARCHITECTURES:
        path = ARCHITECTURES[name].module.__module__.replace(".", "/")
        raise ConfigError(f"new-model: {name} is known: {path}.py; `surogate sft` trains it")
    return name


def like_name(name: str) -> str:
    """The known architecture with the most similar name, for want of a config.json; Llama where none is similar."""
    whole = [of for of in ARCHITECTURES if not ARCHITECTURES[of].images]
    return next(iter(difflib.get_close_matches(name, whole, 1, SIMILAR)), "LlamaForCausalLM")


def module_name(kind: str) -> str:
    """The name of the file of a `model_type`."""
    return re.sub(r"\W", "_", kind)


def source(name: str, kind: str, known: Architecture, found: dict[str, Any], example: str | None) -> str:
    """The text of the file."""
    base, config = known.module.__name__, known.config.__name__
    title = re.sub("|".join(f"{end}$" for end in GENERATOR), "", name)
    title = title if title != base else f"{title}New"
    simple = {field: value for field, value in found.items() if isinstance(value, TYPES) and hasattr(known.config, field)}
    fields = "".join(f"    {field}: {type(value).__name__} = {value!r}\n" for field, value in simple.items())
    arguments = {"base": known.files.get("base_prefix", "").rstrip("."), "renamed": dict(known.files.get("renamed", []))}
    arguments |= {"carried": known.files.get("carried"), "adapters": known.adapters, "examples": [example] if example else None}
    given = "".join(f"    {key}={value!r},\n" for key, value in arguments.items() if value)
    values = "{" + "".join(f"\n    {field!r}: {value!r}," for field, value in found.items()) + ("\n}" if found else "}")
    return TEMPLATE.format(
        title=title,
        base=base,
        module=known.module.__module__,
        imported=", ".join(sorted({base, config})),
        found=values,
        config=config,
        fields=fields + "\n" if fields else "",
        name=name,
        kind=kind,
        arguments=given,
        path=known.module.__module__.replace(".", "/") + ".py",
    )
