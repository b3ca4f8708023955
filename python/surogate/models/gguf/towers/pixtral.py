"""Pixtral's tower with the projector of Mistral 3 in GGUF files."""

from __future__ import annotations

from typing import Any

from ..form import Metadata
from .form import SILU, TANH, Processor, Tower, conv, encoder, fixed

PIXTRAL_INSIDE = {
    "attention_norm": "ln1",
    "ffn_norm": "ln2",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_out",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}
PIXTRAL_OUTSIDE = {
    "model.vision_tower.patch_conv": "v.patch_embd",
    "model.vision_tower.ln_pre": "v.pre_ln",
    "model.multi_modal_projector.norm": "mm.input_norm",
    "model.multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
    "model.multi_modal_projector.linear_1": "mm.1",
    "model.multi_modal_projector.linear_2": "mm.2",
}
PIXTRAL_EPS = 1e-5


def _pixtral_sizes(c: Any, v: Any, processor: Processor) -> Metadata:
    own = encoder(
        v,
        size=v.image_size,
        inner=v.intermediate_size,
        count=v.num_hidden_layers,
        heads=v.num_attention_heads,
        eps=PIXTRAL_EPS,
    )
    return [*own, ("spatial_merge_size", "u32", v.side)]


def _pixtral_problems(c: Any, v: Any, processor: Processor) -> list[str]:
    problems = fixed(v, theta=10000.0, head_dim=v.hidden_size // v.num_attention_heads)
    if v.hidden_act not in ("silu", "gelu_pytorch_tanh"):
        said = f"readers of this form compute silu or gelu_tanh, not {v.hidden_act}"
        problems.append(f"`vision_config.hidden_act`: {said}")
    if c.rms_norm_eps != PIXTRAL_EPS:
        said = f"`text_config.rms_norm_eps`: readers of this form have {PIXTRAL_EPS} in the projector"
        problems.append(f"{said}, not {c.rms_norm_eps}")
    act = v.whole.get("projector_hidden_act") or "gelu"
    if act not in ("gelu", "gelu_pytorch_tanh"):
        problems.append(f"`projector_hidden_act`: readers of this form compute gelu, not {act}")
    return problems


PIXTRAL = Tower(
    "pixtral",
    "model.vision_tower.transformer.layers",
    PIXTRAL_INSIDE,
    PIXTRAL_OUTSIDE,
    _pixtral_sizes,
    _pixtral_problems,
    lambda v: [SILU if v.hidden_act == "silu" else TANH],
    conv,
    interleaved=("attention.q_proj", "attention.k_proj"),
    token=("[IMG_BREAK]", "v.token_embd.img_break"),
)
