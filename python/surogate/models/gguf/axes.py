"""Forms of texts whose pairs turn with time, row and column. Positions of a text are the same on all axes."""

from __future__ import annotations

from typing import Any

from .form import Form, Metadata
from .sizes import llama, rotated, windows_problems


def sections(config: Any, default: tuple[int, int, int]) -> Metadata:
    """Pairs that turn with each axis, one axis after the other. Readers do not turn pairs beyond them."""
    found, pairs = config.rope.sections or default, rotated(config) // 2
    time = pairs - found[1] - found[2]
    return [("rope.dimension_sections", "i32s", [*(found if time == found[0] else (pairs, 0, 0)), 0])]


def alternating_notes(config: Any, default: tuple[int, int, int]) -> list[str]:
    """Returns a note on pairs beyond the shares of the axes, which readers turn with row and column, the model with time."""
    found, pairs = config.rope.sections or default, rotated(config) // 2
    beyond = [i for i in range(pairs) if i % 3 and i // 3 >= found[i % 3] and sum(found) <= 2 * pairs]
    said = f"readers turn the pairs {beyond} of images with row and column, the model with time; texts are the same"
    return [said] if beyond else []


def epsilon_notes(_: Any) -> list[str]:
    return ["llama.cpp of October 2026 normalizes in this form without an epsilon; the model has `rms_norm_eps`"]


def alternating(config: Any, default: tuple[int, int, int]) -> Metadata:
    """The same of pairs that alternate between the axes. Readers turn pair i with axis i mod 3 if that axis has it, and
    else not at all, where the model turns it with the first axis: so that every pair turns, an axis has at least its
    share."""
    found, pairs = config.rope.sections or default, rotated(config) // 2
    shares = [(pairs + 2 - axis) // 3 for axis in range(3)]
    found = found if sum(found) <= 2 * pairs else shares
    return [("rope.dimension_sections", "i32s", [*map(max, found, shares), 0])]


def qwen2vl_sizes(config: Any) -> Metadata:
    return llama(config) + sections(config, (16, 24, 24))


def qwen3vl_sizes(config: Any) -> Metadata:
    return llama(config) + alternating(config, (24, 20, 20))


QWEN2VL = Form("qwen2vl", sizes=qwen2vl_sizes, problems=windows_problems, notes=epsilon_notes)

FORMS = {
    "Qwen2VLForConditionalGeneration": QWEN2VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN2VL,
    "Qwen3VLForConditionalGeneration": Form(
        "qwen3vl",
        sizes=qwen3vl_sizes,
        problems=windows_problems,
        notes=lambda config: alternating_notes(config, (24, 20, 20)),
    ),
}
