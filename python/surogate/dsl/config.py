"""Reads config.json: fields are annotated class attributes, and unsupported values are rejected by name.

    class LlamaConfig(ModelConfig):
        hidden_size: int
        attention_bias: bool = False
        hidden_act: Literal["silu"] = "silu"      # another value is rejected

Of fields that the class does not name, those known to change the arithmetic of other architectures are
rejected, bookkeeping fields are ignored, and all others give a warning.
"""

from __future__ import annotations

import types
import typing
import warnings
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from ..errors import ModelConfigError

#: Fields that say nothing about arithmetic, and those on the form of the weights' files, which the engine reads.
BOOKKEEPING = frozenset(
    """
    architectures auto_map bos_token_id eos_token_id sep_token_id decoder_start_token_id dtype torch_dtype model_type
    name_or_path transformers_version use_cache tokenizer_class task_specific_params problem_type id2label label2id
    num_labels finetuning_task prefix return_dict output_attentions output_hidden_states torchscript use_bfloat16
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens tf_legacy_loss
    is_llama_config unsloth_fixed unsloth_version transformers.js_config base_model_tp_plan attn_implementation
    max_window_layers n_ctx quantization_config compression_config
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
""".split()
)

#: Fields that change arithmetic in some architecture, with the value that means "not used".
NEUTRAL: dict[str, Any] = {
    "partial_rotary_factor": 1.0,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "is_decoder": False,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_parameters": None,
    "chunk_size_feed_forward": 0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
    "logit_scale": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "no_rope_layers": None,
    "num_local_experts": None,
    "num_experts": None,
    "output_router_logits": False,
    "pruned_heads": {},
}

#: Fields at the top of config.json that also hold for its parts.
OF_THE_WHOLE = ("tie_word_embeddings",)

_MISSING = object()

#: Whole numbers have at most this size, and so do sizes that are not below.
WHOLE = (1 << 31) - 1

#: Sizes in the spellings of Hugging Face, with the largest value: some ten times what any model has. Products of them
#: stay within 64 bits, and what is made for each layer within seconds.
LARGEST: dict[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 1 << 12),
    **dict.fromkeys(("hidden_size", "n_embd"), 1 << 18),
    **dict.fromkeys(("intermediate_size", "n_inner"), 1 << 21),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 1 << 11),
    "head_dim": 1 << 12,
    "vocab_size": 1 << 23,
}

#: The largest number of type f32.
FLOAT = 3.4e38


class Reader:
    """The raw fields of one config.json, and the problems found in it."""

    def __init__(self, architecture: str, fields: dict[str, Any]) -> None:
        self.architecture = architecture
        self.fields = fields
        self.read: set[str] = set()
        self.problems: list[str] = []

    def take(self, name: str) -> Any:
        """A field's value; null and absent are the same and give None."""
        self.read.add(name)
        return self.fields.get(name)

    def problem(self, field: str, message: str) -> None:
        """Collects a problem of a field: all of them are reported together."""
        self.problems.append(f"`{field}`: {message}")

    def unread(self) -> list[str]:
        """Checks the fields that were not read: those without a neutral value that no architecture knows."""
        unknown = []
        for name, value in self.fields.items():
            if name in self.read or name in BOOKKEEPING or name.startswith("_") or value is None or value is False:
                continue
            if name in NEUTRAL:
                if value != NEUTRAL[name]:
                    self.problem(name, f"{value!r} is not supported for a {self.architecture}")
            else:
                unknown.append(name)
        return unknown

    def finish(self) -> None:
        """Checks the fields that were not read, then raises if there was a problem."""
        unknown = self.unread()
        if self.problems:
            raise ModelConfigError(self.architecture, self.problems)
        if unknown:
            names = ", ".join(f"`{name}`" for name in unknown)
            warnings.warn(f"config.json: a {self.architecture} does not use {names}; ignored", stacklevel=4)


class ModelConfig:
    """Base of the config classes. Annotated attributes are fields; a value is the default.

    Kinds: `int` (a size, at least 1), `float`, `bool`, `str`; `int | None` and so on for those that
    may be none, which null says, an int then being any whole number; `Literal[...]` for the values that
    are supported; or a class with a `read(reader, field)` class method.
    """

    architecture: ClassVar[str] = ""
    #: Where config.json keeps the fields, if not at its top: models of several parts have an object for each.
    section: ClassVar[str | None] = None
    initializer_range: float = 0.02

    @classmethod
    def from_dict(cls, architecture: str, fields: dict[str, Any]) -> typing.Self:
        """Reads config.json. Raises ModelConfigError with every problem."""
        if cls.section is not None:
            part = fields.get(cls.section)
            if not isinstance(part, dict):
                raise ModelConfigError(architecture, [f"`{cls.section}`: is missing, expected an object of settings"])
            fields = part | {name: fields[name] for name in OF_THE_WHOLE if name in fields}
        reader = Reader(architecture, fields)
        config = cls._of(reader)
        reader.finish()
        return config

    @classmethod
    def _of(cls, reader: Reader) -> typing.Self:
        config = cls()
        for name, kind in typing.get_type_hints(cls).items():
            if get_origin(kind) is not ClassVar and not name.startswith("_"):
                setattr(config, name, _read(reader, name, kind, getattr(cls, name, _MISSING)))
        if not reader.problems:
            config.derive(reader)
        return config

    @classmethod
    def unlike(cls, architecture: str, fields: dict[str, Any]) -> list[str]:
        """Names of the fields of a config.json that this class rejects or does not use."""
        reader = Reader(architecture, fields)
        cls._of(reader)
        unknown = reader.unread()
        rejected = [problem.split("`")[1].split(".")[0] for problem in reader.problems]
        return list(dict.fromkeys([*rejected, *unknown]))

    def derive(self, reader: Reader) -> None:
        """Fills in what follows from other fields and checks them against each other."""


def _read(reader: Reader, name: str, kind: Any, default: Any) -> Any:
    custom = getattr(kind, "read", None)
    if custom is not None:
        return custom(reader, name)
    value = reader.take(name)
    if value is None:
        if _is_null(reader, name, kind):
            return None
        if default is _MISSING:
            reader.problem(name, f"is missing, expected {_describe(kind)}")
            return None
        return default
    if not _fits(value, kind) or kind is int and value < 1:
        reader.problem(name, f"{_shown(value)} is not supported, expected {_describe(kind)}")
    elif isinstance(value, int) and value > (most := LARGEST.get(name, WHOLE)):
        reader.problem(name, f"{_shown(value)} is not supported, expected at most {most}")
    else:
        return float(value) if kind is float and isinstance(value, int) else value
    return None


def _is_null(reader: Reader, name: str, kind: Any) -> bool:
    """True if a field is given as null, and null is one of its values: not the default of a missing field then."""
    optional = get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)
    return optional and name in reader.fields


def _shown(value: Any) -> str:
    """A value as Python writes it, shortened."""
    if isinstance(value, int) and abs(value) > 1 << 64:
        return "a number beyond 64 bits"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(value == allowed and type(value) in (type(allowed), int, float) for allowed in get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(kind))
    if kind is float:
        # Comparing is exact for whole numbers of any size, and false for NaN.
        return isinstance(value, (int, float)) and not isinstance(value, bool) and -FLOAT <= value <= FLOAT
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and value >= -WHOLE
    return isinstance(value, kind)


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(repr(value) for value in get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_describe(part) for part in get_args(kind) if part is not type(None))
    return {int: "a whole number above 0", float: "a number", bool: "true or false", str: "a string"}.get(
        kind, str(kind)
    )
