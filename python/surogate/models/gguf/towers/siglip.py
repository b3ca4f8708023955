"""SigLIP's tower with the projectors of Gemma 3 and of SmolVLM in GGUF files."""

from __future__ import annotations

from typing import Any

from ..form import Metadata
from .form import TANH, Processor, Tower, conv, distinct, encoder, fixed

SIGLIP_INSIDE = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}


def _siglip_outside(tower: str) -> dict[str, str]:
    return {
        f"{tower}.embeddings.patch_embedding": "v.patch_embd",
        f"{tower}.embeddings.position_embedding": "v.position_embd",
        f"{tower}.post_layernorm": "v.post_ln",
    }


GEMMA3_OUTSIDE = _siglip_outside("model.vision_tower") | {
    "model.multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
    "model.multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
}
SMOLVLM_OUTSIDE = _siglip_outside("model.vision_model") | {"model.connector.modality_projection.proj": "mm.model.fc"}


def _siglip_sizes(v: Any, side: int) -> Metadata:
    own = encoder(
        v,
        size=v.image_size,
        inner=v.intermediate_size,
        count=v.num_hidden_layers,
        heads=v.num_attention_heads,
        eps=v.layer_norm_eps,
    )
    return [*own, ("projector.scale_factor", "u32", side)]


def _siglip_problems(c: Any, v: Any, processor: Processor) -> list[str]:
    return fixed(v, hidden_act="gelu_pytorch_tanh") + distinct(v, v.intermediate_size)


def _gemma3_sizes(c: Any, v: Any, processor: Processor) -> Metadata:
    return _siglip_sizes(v, v.side(v.whole.get("mm_tokens_per_image")))


def _gemma3_notes(c: Any, v: Any, processor: Processor) -> list[str]:
    return ["`do_pan_and_scan`: llama.cpp sees long images as a whole alone, without crops"] if processor.crops else []


def _smolvlm_sizes(c: Any, v: Any, processor: Processor) -> Metadata:
    edge = processor.tiles[0] if processor.tiles else v.image_size
    return [*_siglip_sizes(v, v.side), ("preproc_image_size", "u32", edge)]


def _smolvlm_problems(c: Any, v: Any, processor: Processor) -> list[str]:
    """Readers see every image as tiles and as a whole, also one that is a single tile."""
    problems = _siglip_problems(c, v, processor)
    if processor.tiles is None:
        said = "readers of this form cut all images in tiles, expected true"
        return [*problems, f"`do_image_splitting` of the processor: {said}"]
    edge, tile = processor.tiles
    if tile != v.image_size:
        said = f"readers of this form have tiles of `vision_config.image_size`, {v.image_size}, not {tile}"
        problems.append(f"`max_image_size` of the processor: {said}")
    if edge <= tile:
        said = f"readers of this form cut all images in tiles, expected more than one tile, {tile}, not {edge}"
        problems.append(f"`size.longest_edge` of the processor: {said}")
    return problems


GEMMA3 = Tower(
    "gemma3",
    "model.vision_tower.encoder.layers",
    SIGLIP_INSIDE,
    GEMMA3_OUTSIDE,
    _gemma3_sizes,
    _siglip_problems,
    lambda v: [TANH],
    conv,
    offset=("mm.soft_emb_norm.weight",),
    notes=_gemma3_notes,
)
SMOLVLM = Tower(
    "idefics3",
    "model.vision_model.encoder.layers",
    SIGLIP_INSIDE,
    SMOLVLM_OUTSIDE,
    _smolvlm_sizes,
    _smolvlm_problems,
    lambda v: [TANH],
    conv,
)
