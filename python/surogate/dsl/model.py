"""The `@model` decorator and the list of architectures; from a config.json to the IR."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..errors import ModelConfigError
from .config import ModelConfig
from .module import Module, Parameter
from .place import here
from .structure import Batch
from .task import record
from .trace import Trace


@dataclass(frozen=True)
class Architecture:
    """An entry of the registry that `@model` fills."""

    name: str
    model_type: str | None
    config: type[ModelConfig]
    module: type[Module]
    #: Properties of the files, as written in the IR.
    files: dict[str, Any]
    #: How adapters name its weights, as written in the IR.
    adapters: dict[str, Any] = field(default_factory=dict)
    #: Published models of this architecture, as the Hub names them.
    examples: tuple[str, ...] = ()
    #: The module that also computes images, and the config of its tower.
    images: tuple[type[Module], type[ModelConfig]] | None = None


#: By the name that stands in config.json's `architectures`.
ARCHITECTURES: dict[str, Architecture] = {}

M = TypeVar("M", bound=type[Module])


def model(
    name: str,
    *,
    config: type[ModelConfig],
    model_type: str | None = None,
    base: str | None = None,
    computed: Sequence[str] = (),
    renamed: Mapping[str, str] | None = None,
    carried: Sequence[str] = (),
    adapters: Mapping[str, Any] | None = None,
    examples: Sequence[str] = (),
    images: tuple[type[Module], type[ModelConfig]] | None = None,
) -> Callable[[M], M]:
    """Registers a module as the architecture `name`. It is constructed with the config and its
    `forward(batch)` is recorded; what it marks with `output` can be requested.

    `model_type` stands for the name in a config.json that names no architecture. `base` is the attribute
    without whose name files of the bare base model are written; `computed` are endings of the names of
    stored tables that are not read. `renamed` has beginnings of names in published files with those of
    the attributes, `carried` beginnings of the names of parts that are not computed: results take their
    tensors over. `adapters` says how adapters name the weights, where that is not as files do. `examples`
    are published models, for docs/models.md. `images` are the module that computes images, too, and the
    config of its tower: it is constructed with both configs, and its attribute `images` is the layout of
    batches for it. A module with an attribute `max_positions` has no positions from there on, and one
    with an attribute `carried` names such beginnings that depend on the config. One that computes images has
    the beginnings of the names of its projectors, which make tokens of what the tower gives, in `projectors`.
    """
    files: dict[str, Any] = {"base_prefix": f"{base}."} if base else {}
    files |= {"computed": list(computed)} if computed else {}
    files |= {"renamed": [list(pair) for pair in renamed.items()]} if renamed else {}
    files |= {"carried": list(carried)} if carried else {}

    place = here()

    def register(module: M) -> M:
        module.place = place
        ARCHITECTURES[name] = Architecture(name, model_type, config, module, files, dict(adapters or {}), tuple(examples), images)
        return module

    return register


def find(fields: dict[str, Any]) -> Architecture:
    """The architecture that a config.json names."""
    kind = fields.get("model_type")
    names = fields.get("architectures") or [a.name for a in ARCHITECTURES.values() if kind and a.model_type == kind]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelConfigError("model", ["`architectures`: is not supported, expected a list with one name"])
    if not names:
        more = f", and `model_type: {kind}` is not known" if kind else ""
        raise ModelConfigError("model", [f"`architectures`: is missing{more}, so the architecture is unknown"])
    found = ARCHITECTURES.get(names[0])
    if found is None and names[0].endswith(CLASSIFIER):
        found = _classifier(names[0], fields)
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelConfigError(
            "model", [f"`architectures`: {names[0]} is not available yet, supported are {known}{_nearest(names[0], fields)}"]
        )
    return found


#: Fields that a message names, at most.
NAMED = 12

#: The page on adding an architecture, in a checkout.
PAGE = "docs/adding-a-model.md"


def nearest(name: str, fields: dict[str, Any]) -> tuple[str, list[str]]:
    """The known architecture whose fields are nearest to those of a config.json of another, `name`, and the names of the fields
    that it rejects or does not read."""
    # Architectures with a tower have their fields in sections, or a config for each kind of text.
    whole = [of for of in ARCHITECTURES.values() if getattr(of.config, "section", "text_config") is None]
    unlike = {of.name: of.config.unlike(of.name, fields) for of in whole}
    like = difflib.SequenceMatcher(None, name)

    def distance(known: str) -> tuple[int, float]:
        like.set_seq2(known)
        return len(unlike[known]), -like.ratio()

    found = min(unlike, key=distance)
    return found, unlike[found]


def _nearest(name: str, fields: dict[str, Any]) -> str:
    """The part of a message on the known architecture whose fields are nearest to those of a config.json."""
    near = difflib.get_close_matches(name, ARCHITECTURES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    if "hidden_size" not in fields:
        return f"{hint}; {PAGE} says how to add one"
    known, unlike = nearest(name, fields)
    names = [f"`{field}`" for field in unlike]
    shown = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    fits = f"but for the fields {shown}" if names else "in all fields"
    return f"{hint}; the config is one of {known} {fits}; {PAGE} says how to add one, and `surogate new-model` begins its file"


#: The end of the names of architectures with a score in the place of logits.
CLASSIFIER = "ForSequenceClassification"

#: The ends of the names of those with logits.
GENERATOR = ("ForCausalLM", "LMHeadModel")


def _classifier(name: str, fields: dict[str, Any]) -> Architecture | None:
    """An architecture with a head of one output, `score`, in the place of its `lm_head`; None if the layers are not known.
    `logits` are the scores, [B, T, 1]."""
    stem = name.removesuffix(CLASSIFIER)
    of = next((ARCHITECTURES[stem + end] for end in GENERATOR if stem + end in ARCHITECTURES), None)
    if of is None or "base_prefix" not in of.files:
        return None
    labels = fields.get("num_labels", len(fields.get("id2label") or [0]))
    if labels != 1:
        raise ModelConfigError(name, [f"`id2label`: {labels} labels are not supported, expected one, a score"])
    base, plain = of.files["base_prefix"].removesuffix("."), of.module

    class Classifier(plain):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            del self.lm_head
            self.score = Linear(getattr(config, "hidden_size", None) or config.n_embd, 1)

        def forward(self, batch: Batch) -> None:
            output("logits", self.score(getattr(self, base)(batch)))

    from ..layers.linear import Linear
    from .structure import output

    Classifier.place = plain.place
    computed = [*of.files.get("computed", []), "lm_head.weight"]
    return replace(of, name=name, module=Classifier, files={**of.files, "computed": computed})


#: Parameters of a model, at most: some ten times what the largest have. Bytes of states stay within 64 bits.
PARAMETERS = 1 << 45


def _check_size(architecture: str, declared: list[Parameter]) -> None:
    """Each size may be in its bounds, and their product not."""
    sizes = {of: math.prod(of.shape) * of.layers for of in declared}
    total = sum(sizes.values())
    if total > PARAMETERS:
        largest = max(sizes, key=lambda of: sizes[of])
        shape = " × ".join(str(extent) for extent in largest.shape)
        repeated = f" in {largest.layers} layers" if "{i}" in str(largest.name) else ""
        what = f"the sizes make {total:.2g} parameters, expected at most {PARAMETERS:.2g}"
        raise ModelConfigError(architecture, [f"{what}; most of them are in `{largest.name}`, {shape}{repeated}"])


def _of_experts(adapters: Mapping[str, Any], declared: list[Parameter]) -> dict[str, Any]:
    """What `adapters` says of a model with these parameters: where layers with experts are none, as some configs have it, names of
    matrices mean plain linear layers."""
    if "stacks" not in adapters:
        return dict(adapters)
    ends = [rf"\.\d+\.{part}\.weight" for stack in adapters["stacks"] for part in stack.get("parts", ())]
    ends += [rf"\.{re.escape(stack.get('held', [stack['name']])[0])}" for stack in adapters["stacks"] if not stack.get("parts")]
    is_of_experts = re.compile(f"(?:{'|'.join(ends)})$").search
    if any(is_of_experts(str(of.name)) for of in declared):
        return dict(adapters)
    return {key: value for key, value in adapters.items() if value and key in ("renamed", "apart")}


def reads_images(fields: dict[str, Any]) -> bool:
    """True if the architecture of a config.json computes images."""
    return find(fields).images is not None


def build(
    fields: dict[str, Any],
    tasks: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
    *,
    images: bool = False,
) -> str:
    """The IR (JSON text, docs/ir.md) of the model that a config.json describes, with what `tasks` compute from it: names, or a
    mapping from names to settings. With `images`, the model computes them; without, it is the text model alone.

    Raises ModelConfigError for fields that cannot be honoured, ModelError when the architecture's
    file records something that does not fit together.
    """
    architecture = find(fields)
    config = architecture.config.from_dict(architecture.name, fields)
    trace = Trace(architecture.name, config.initializer_range)
    module: Any
    if images:
        if architecture.images is None:
            raise ModelConfigError(architecture.name, ["images are not available yet for this architecture"])
        kind, tower = architecture.images
        module = kind(config, tower.from_dict(architecture.name, fields))  # type: ignore[call-arg]
    else:
        module = architecture.module(config)  # type: ignore[call-arg]
    declared = module.name_parameters()
    _check_size(architecture.name, declared)
    with trace.recording():
        module(Batch())
        for name in tasks:
            record(name, config, trace, tasks[name] if isinstance(tasks, Mapping) else {})
    head: dict[str, Any] = {}
    if (limit := getattr(module, "max_positions", None)) is not None:
        head["max_positions"] = limit
    files = dict(architecture.files)
    if images:
        head["images"] = module.images
    carried = [*files.pop("carried", []), *getattr(module, "carried", ())]
    adapters = _of_experts(architecture.adapters, declared)
    if images:
        adapters["apart"] = [part for part in carried if any(str(of.name).startswith(part) for of in declared)]
        carried = [part for part in carried if part not in adapters["apart"]]
        of_module = getattr(module, "projectors", ())
        adapters["projectors"] = [part for part in of_module if any(str(of.name).startswith(part) for of in declared)]
    if carried:
        files["carried"] = carried
    if files:
        head["files"] = files
    if adapters:
        head["adapters"] = adapters
    return trace.to_json(declared, head)
