"""The tower of Gemma 4, and its patches without one, in GGUF files."""

from __future__ import annotations

from typing import Any

from ....layers.window import SLIDING
from ..form import Metadata
from .form import TANH, Processor, Source, Tower, encoder, fixed

GEMMA4_INSIDE = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA4_OUTSIDE = {
    "model.vision_tower.patch_embedder.input_proj": "v.patch_embd",
    "model.vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "model.vision_tower.std_bias": "v.std_bias",
    "model.vision_tower.std_scale": "v.std_scale",
    "model.embed_vision.embedding_projection": "mm.input_projection",
}
UNIFIED_OUTSIDE = {
    "model.vision_embedder.patch_ln1": "v.patch_norm.1",
    "model.vision_embedder.patch_dense": "v.patch_embd",
    "model.vision_embedder.patch_ln2": "v.patch_norm.2",
    "model.vision_embedder.pos_embedding": "v.position_embd.weight",
    "model.vision_embedder.pos_norm": "v.patch_norm.3",
    "model.embed_vision.embedding_projection": "mm.input_projection",
}
#: An image of usual size, which readers do not use.
GEMMA4_IMAGE = 224


def _gemma4_parts(parameter: str, name: str, v: Any) -> list[Source] | None:
    if name == "v.patch_embd.weight":
        # By row, column, channel in the model; by channel, row, column in the file.
        side = v.patch_size
        steps = [{"reshape": [v.hidden_size, side, side, v.num_channels]}, {"permute": [0, 3, 1, 2]}]
        return [{"name": name, "from": parameter, "exact": True, "steps": steps}]
    if name == "v.position_embd.weight":
        steps = [{"reshape": [2, v.position_embedding_size, v.hidden_size]}]
        return [{"name": name, "from": parameter, "exact": True, "steps": steps}]
    return None


def _gemma4_sizes(c: Any, v: Any, processor: Processor) -> Metadata:
    own = encoder(
        v,
        size=GEMMA4_IMAGE,
        inner=v.intermediate_size,
        count=v.num_hidden_layers,
        heads=v.num_attention_heads,
        eps=v.rms_norm_eps,
    )
    return [*own, ("projector.scale_factor", "u32", v.pooling_kernel_size)]


def _gemma4_problems(c: Any, v: Any, processor: Processor) -> list[str]:
    return fixed(
        v,
        rotation=100.0,
        head_dim=v.hidden_size // v.num_attention_heads,
        num_key_value_heads=v.num_attention_heads,
        attention_bias=False,
        hidden_activation="gelu_pytorch_tanh",
    )


def _unified_parts(parameter: str, name: str, v: Any) -> list[Source] | None:
    side = v.patch_size * v.pooling_kernel_size
    steps: list[dict[str, Any]] = []
    if name == "v.position_embd.weight":
        steps = [{"reshape": [v.mm_posemb_size, 2, v.mm_embed_dim]}, {"permute": [1, 0, 2]}]
    elif name == "v.patch_embd.weight":
        steps = [{"reshape": [v.mm_embed_dim, side, side, v.num_channels]}, {"permute": [0, 3, 1, 2]}]
        steps.append({"reshape": [v.mm_embed_dim, v.width]})
    elif name.startswith("v.patch_norm.1."):
        steps = [{"reshape": [side, side, v.num_channels]}, {"permute": [2, 0, 1]}, {"reshape": [v.width]}]
    return [{"name": name, "from": parameter, "exact": True, "steps": steps}] if steps else None


def _unified_sizes(c: Any, v: Any, processor: Processor) -> Metadata:
    own = encoder(v, width=v.mm_embed_dim, size=GEMMA4_IMAGE, inner=0, count=0, heads=0, eps=v.rms_norm_eps)
    return [*own, ("projector.scale_factor", "u32", v.pooling_kernel_size)]


def _notes(c: Any, v: Any, processor: Processor) -> list[str]:
    """Returns a note where the tokens of an image see each other in other layers than readers let them."""
    kinds = c.both_ways if c.use_bidirectional_attention == "vision" else ()
    if kinds == (SLIDING,):
        return []
    said = f"here they do {'in all layers' if kinds else 'in no layer'}, so that its answers to images differ"
    return [f"in llama.cpp tokens of an image see each other both ways in layers with a window alone; {said}"]


GEMMA4 = Tower(
    "gemma4v",
    "model.vision_tower.encoder.layers",
    GEMMA4_INSIDE,
    GEMMA4_OUTSIDE,
    _gemma4_sizes,
    _gemma4_problems,
    lambda v: [TANH],
    _gemma4_parts,
    notes=_notes,
)
UNIFIED = Tower(
    "gemma4uv",
    "",
    {},
    UNIFIED_OUTSIDE,
    _unified_sizes,
    lambda c, v, processor: fixed(v),
    lambda v: [TANH],
    _unified_parts,
    notes=_notes,
)
