"""Keys of sizes, rotations and experts that several forms have."""

from __future__ import annotations

from typing import Any

from ...layers.window import FULL, SLIDING
from .form import Metadata

#: The reason of problems with biases.
NO_BIASES = "readers of this form have no such biases"

#: Numbers of the rules that give an expert's score.
SOFTMAX, SIGMOID = 1, 2


def rotation_of(config: Any) -> Any:
    """The rotation, that of full attention where kinds of layers have their own."""
    return config.rope[FULL] if isinstance(config.rope, dict) else config.rope


def rotated(config: Any) -> int:
    """Columns of a head that turn."""
    return int(config.head_dim * (rotation_of(config).share or 1.0))


def u32s(**sizes: int | None) -> Metadata:
    """Whole numbers, by key with `__` for a dot; None is left out."""
    return [(name.replace("__", "."), "u32", value) for name, value in sizes.items() if value is not None]


def f32s(**sizes: float | None) -> Metadata:
    """Numbers, by key with `__` for a dot; None is left out."""
    return [(name.replace("__", "."), "f32", value) for name, value in sizes.items() if value is not None]


def replaced(sizes: Metadata, *others: Metadata) -> Metadata:
    """The entries, of which later ones take the place of earlier ones with their key."""
    found = {key: (key, kind, value) for key, kind, value in sizes}
    for other in others:
        found |= {key: (key, kind, value) for key, kind, value in other}
    return list(found.values())


def llama(config: Any) -> Metadata:
    """The sizes of Llama and of architectures like it."""
    return [
        *u32s(
            context_length=config.max_position_embeddings,
            embedding_length=config.hidden_size,
            block_count=config.num_hidden_layers,
            feed_forward_length=getattr(config, "intermediate_size", None),
            attention__head_count=config.num_attention_heads,
            attention__head_count_kv=config.num_key_value_heads,
            attention__key_length=config.head_dim,
            attention__value_length=config.head_dim,
            rope__dimension_count=rotated(config),
            vocab_size=config.vocab_size,
        ),
        *f32s(attention__layer_norm_rms_epsilon=config.rms_norm_eps, rope__freq_base=rotation_of(config).theta),
    ]


def window(config: Any) -> Metadata:
    """The window of the layers that have one, if any has."""
    return u32s(attention__sliding_window=config.window) if config.window else []


def routed(config: Any, inner: int, *, used: int | None = None, **more: int | None) -> Metadata:
    """The sizes of experts of `inner` columns, of which each token goes through `used`."""
    count = config.num_experts_per_tok if used is None else used
    counts = u32s(expert_count=config.num_experts, expert_used_count=count, expert_feed_forward_length=inner)
    return counts + u32s(**more)


def pattern(kinds: list[str]) -> Metadata:
    """Returns for each layer whether it has a window."""
    return [("attention.sliding_window_pattern", "bools", [kind == SLIDING for kind in kinds])]


def ssm(kernel: int, state: int, groups: int, rank: int, inner: int) -> Metadata:
    """The sizes of state-space models and of delta nets."""
    return u32s(
        ssm__conv_kernel=kernel,
        ssm__state_size=state,
        ssm__group_count=groups,
        ssm__time_step_rank=rank,
        ssm__inner_size=inner,
    )


def windows_problems(config: Any) -> list[str]:
    """Returns the problems of windows in a form that has none."""
    found = [*(getattr(config, "windows", None) or []), getattr(config, "window", None)]
    shorter = any(window is not None and window < config.max_position_embeddings for window in found)
    said = "`sliding_window`: readers of this form attend to everything; set it to null to say so"
    return [said] if shorter else []


def refused(config: Any, reason: str, *names: str) -> list[str]:
    """Problems of those of the fields `names` that are set."""
    return [f"`{name}`: {reason}" for name in names if getattr(config, name)]


def dense_problems(config: Any, leading: int = 0) -> list[str]:
    """Returns the problems of layers without experts in a form in which only the first `leading` have none."""
    kinds = ["dense" if i < leading else "sparse" for i in range(config.num_hidden_layers)]
    said = "every layer has experts" if not leading else "only the first layers have no experts"
    return [] if config.kinds == kinds else [f"`mlp_only_layers`: in this form {said}"]


def leading_dense(config: Any) -> int:
    """The layers before the first with experts."""
    return config.kinds.index("sparse") if "sparse" in config.kinds else len(config.kinds)


def fields(config: Any, *pairs: tuple[str, str]) -> Metadata:
    """Numbers of the configuration by key, where they are set."""
    return [(key, "f32", value) for key, name in pairs if (value := getattr(config, name)) is not None]


def tanh_problems(config: Any, name: str, function: str) -> list[str]:
    """Returns the problems of activations in forms whose readers compute GELU by tanh."""
    known = ("gelu_pytorch_tanh", "gelu_new")
    return [] if function in known else [f"`{name}`: readers of this form compute gelu_tanh, not {function}"]
