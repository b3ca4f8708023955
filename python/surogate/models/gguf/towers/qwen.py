"""The towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 in GGUF files."""

from __future__ import annotations

import re
from typing import Any

from ..form import Metadata, cut
from .form import SILU, TANH, Processor, Source, Tower, distinct, encoder, fixed

QWEN_OUTSIDE = {"model.visual.patch_embed.proj": "v.patch_embd", "model.visual.pos_embed": "v.position_embd"}
QWEN_INSIDE = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
QWEN2_OUTSIDE = QWEN_OUTSIDE | {
    "model.visual.merger.ln_q": "v.post_ln",
    "model.visual.merger.mlp.0": "mm.0",
    "model.visual.merger.mlp.2": "mm.2",
}
QWEN3_OUTSIDE = QWEN_OUTSIDE | {
    "model.visual.merger.norm": "v.post_ln",
    "model.visual.merger.linear_fc1": "mm.0",
    "model.visual.merger.linear_fc2": "mm.2",
}
DEEP = re.compile(r"model\.visual\.deepstack_merger_list\.(\d+)\.(norm|linear_fc1|linear_fc2)\.(weight|bias)")

#: The epsilon of the norms, which no config says.
QWEN_EPS = 1e-6
#: Pixels a side of the windows of Qwen2.5-VL.
QWEN_WINDOW = 112
#: An image of usual size, where the tower has none: readers try the memory with it.
QWEN_IMAGE = 560


def _by_frame(parameter: str, v: Any) -> list[Source]:
    """A convolution over two frames as two over one."""
    axes = [v.hidden_size, v.num_channels, v.temporal_patch_size, v.patch_size, v.patch_size]
    shape = [v.hidden_size, v.num_channels, v.patch_size, v.patch_size]
    names = ["v.patch_embd.weight", "v.patch_embd.weight.1"]
    return [
        {
            "name": name,
            "from": parameter,
            "exact": True,
            "steps": [{"reshape": axes}, cut(2, frame, frame + 1), {"reshape": shape}],
        }
        for frame, name in enumerate(names)
    ]


def _qwen2_parts(parameter: str, name: str, v: Any) -> list[Source] | None:
    if name == "v.patch_embd.weight":
        return _by_frame(parameter, v)
    if ".attn_qkv." in name:
        rows = [cut(0, number * v.hidden_size, (number + 1) * v.hidden_size) for number in range(3)]
        names = [name.replace("attn_qkv", f"attn_{letter}") for letter in "qkv"]
        return [{"name": n, "from": parameter, "steps": [of]} for n, of in zip(names, rows, strict=True)]
    return None


def _qwen3_parts(parameter: str, name: str, v: Any) -> list[Source] | None:
    if found := DEEP.fullmatch(parameter):
        number, module, part = found.groups()
        of = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}[module]
        return [{"name": f"v.deepstack.{v.deep[int(number)]}.{of}.{part}", "from": parameter}]
    return _by_frame(parameter, v) if name == "v.patch_embd.weight" else None


def _qwen_sizes(v: Any, size: int, inner: int) -> Metadata:
    own = encoder(v, size=size, inner=inner, count=v.depth, heads=v.num_heads, eps=QWEN_EPS)
    return [*own, ("spatial_merge_size", "u32", v.spatial_merge_size)]


def _qwen_problems(v: Any, act: str) -> list[str]:
    return fixed(v, temporal_patch_size=2, spatial_merge_size=2, theta=10000.0, hidden_act=act)


def _qwen2_sizes(c: Any, v: Any, processor: Processor) -> Metadata:
    return _qwen_sizes(v, QWEN_IMAGE, int(v.hidden_size * v.mlp_ratio))


def _qwen2_problems(c: Any, v: Any, processor: Processor) -> list[str]:
    return _qwen_problems(v, "quick_gelu") + distinct(v, int(v.hidden_size * v.mlp_ratio))


def _qwen2_5_period(v: Any) -> int:
    """The period of the blocks that see everything, the others see windows; 0 if there are no windows."""
    if v.full[: v.depth] == list(range(v.depth)):
        return 0
    return int(v.full[0]) + 1 if v.full else v.depth + 1


def _qwen2_5_sizes(c: Any, v: Any, processor: Processor) -> Metadata:
    own = _qwen_sizes(v, QWEN_IMAGE, v.intermediate_size)
    return [*own, ("n_wa_pattern", "u32", _qwen2_5_period(v)), ("window_size", "u32", v.window_size)]


def _qwen2_5_problems(c: Any, v: Any, processor: Processor) -> list[str]:
    problems = _qwen_problems(v, "silu") + distinct(v, v.intermediate_size)
    period = _qwen2_5_period(v)
    if period and [i for i in range(v.depth) if (i + 1) % period == 0] != [i for i in v.full if i < v.depth]:
        said = f"in this form blocks that see everything are equally far apart, not {v.full}"
        problems.append(f"`vision_config.fullatt_block_indexes`: {said}")
    if period and v.window_size != QWEN_WINDOW:
        problems.append(f"`vision_config.window_size`: readers of this form have {QWEN_WINDOW}, not {v.window_size}")
    return problems


def _qwen3_sizes(c: Any, v: Any, processor: Processor) -> Metadata:
    return _qwen_sizes(v, v.table * v.patch_size, v.intermediate_size)


def _qwen3_problems(c: Any, v: Any, processor: Processor) -> list[str]:
    problems = _qwen_problems(v, "gelu_pytorch_tanh")
    if len(v.deep) >= c.num_hidden_layers:
        said = f"expected fewer than the text has layers, {c.num_hidden_layers}, as readers need it, not {len(v.deep)}"
        problems.append(f"`vision_config.deepstack_visual_indexes`: {said}")
    return problems


QWEN2 = Tower(
    "qwen2vl_merger",
    "model.visual.blocks",
    QWEN_INSIDE,
    QWEN2_OUTSIDE,
    _qwen2_sizes,
    _qwen2_problems,
    lambda v: [],
    _qwen2_parts,
)
QWEN2_5 = Tower(
    "qwen2.5vl_merger",
    "model.visual.blocks",
    QWEN_INSIDE,
    QWEN2_OUTSIDE,
    _qwen2_5_sizes,
    _qwen2_5_problems,
    lambda v: [SILU],
    _qwen2_parts,
)
QWEN3 = Tower(
    "qwen3vl_merger",
    "model.visual.blocks",
    QWEN_INSIDE,
    QWEN3_OUTSIDE,
    _qwen3_sizes,
    _qwen3_problems,
    lambda v: [TANH],
    _qwen3_parts,
)
