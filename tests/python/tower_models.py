"""Small random vision-language models with a tokenizer that llama.cpp reads: one of each tower that has a GGUF form."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from surogate.models import build

SIZE = 96
IMAGE, BEGIN, END = 88, 90, 91
#: Tokens of prompts before and after an image.
BEFORE, AFTER = [5, 6, 7], [11, 12, 13]

TEXT: dict[str, Any] = {
    "vocab_size": SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
#: Three axes of a text with heads of 16 columns.
SECTIONS = {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 3, 3]}
GEMMA4_TEXT = TEXT | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "global_head_dim": 32,
    "use_bidirectional_attention": "vision",
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
QWEN_TOWER: dict[str, Any] = {"depth": 3, "num_heads": 2, "in_channels": 3, "patch_size": 4, "temporal_patch_size": 2}
QWEN3_TOWER = QWEN_TOWER | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48}
QWEN3_TOWER |= {"num_position_embeddings": 16}
QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2}
QWEN_SIZE = {"size": {"shortest_edge": 64, "longest_edge": 65536}}
SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
VISION = {BEGIN: "<|vision_start|>", END: "<|vision_end|>"}

Frame = Callable[[int, tuple[int, int]], list[int]]


def framed(tokens: int, grid: tuple[int, int]) -> list[int]:
    return [BEGIN, *[IMAGE] * tokens, END]


def rows(tokens: int, grid: tuple[int, int]) -> list[int]:
    """Rows of tokens with a token after each: BEGIN, after the last END."""
    ends = [BEGIN] * (grid[0] - 1) + [END]
    return [token for end in ends for token in [*[IMAGE] * grid[1], end]]


def tiles(tokens: int, grid: tuple[int, int]) -> list[int]:
    """The tiles, each after its place, and the image as a whole."""
    (down, across), of_view = grid, tokens // (grid[0] * grid[1] + 1)
    found: list[int] = []
    for row in range(down):
        for column in range(across):
            found += [BEGIN, 70 + 4 * row + column, *[IMAGE] * of_view]
        found += [94] if row + 1 < down else [93]
    return [*found, BEGIN, END, *[IMAGE] * of_view, BEGIN]


@dataclass(frozen=True)
class Family:
    architecture: str
    kind: str
    text: dict[str, Any]
    tower: dict[str, Any]
    processor: dict[str, Any]
    #: Texts of tokens that llama.cpp knows.
    special: dict[int, str]
    frame: Frame = framed
    whole: dict[str, Any] = field(default_factory=dict)
    #: Heights and widths of images that no processor resizes.
    sizes: tuple[tuple[int, int], ...] = ((16, 24), (24, 16))


FAMILIES = {
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        TEXT
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
        SIGLIP,
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
        {BEGIN: "<start_of_image>", END: "<end_of_image>"},
        whole={"mm_tokens_per_image": 4},
        sizes=((16, 16),),
    ),
    "smolvlm": Family(
        "SmolVLMForConditionalGeneration",
        "smolvlm",
        TEXT | {"model_type": "llama"},
        SIGLIP,
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 32},
            "max_image_size": {"longest_edge": 16},
        },
        {BEGIN: "<fake_token_around_image>", END: "<global-img>", 93: "\n\n", 94: "\n"}
        | {70 + number: f"<row_{number // 4 + 1}_col_{number % 4 + 1}>" for number in range(16)},
        tiles,
        {"scale_factor": 2},
        sizes=((32, 32), (16, 32)),
    ),
    "qwen2_vl": Family(
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        TEXT | {"rope_parameters": SECTIONS},
        QWEN_TOWER | {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2},
        QWEN | QWEN_SIZE,
        VISION,
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        TEXT | {"rope_parameters": SECTIONS},
        QWEN_TOWER
        | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48, "fullatt_block_indexes": [1]}
        | {"window_size": 112},
        QWEN | QWEN_SIZE,
        VISION,
        # The second has four windows.
        sizes=((16, 24), (120, 136)),
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        TEXT | {"num_hidden_layers": 3, "rope_parameters": SECTIONS | {"mrope_interleaved": True}},
        QWEN3_TOWER | {"deepstack_visual_indexes": [0, 2]},
        QWEN | QWEN_SIZE,
        VISION,
    ),
    "mistral3": Family(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        TEXT | {"model_type": "mistral", "sliding_window": None},
        {key: value for key, value in SIGLIP.items() if key != "image_size"}
        | {"model_type": "pixtral", "head_dim": 16, "hidden_act": "silu", "image_size": 32},
        {"image_processor_type": "PixtralImageProcessor", "patch_size": 8, "size": {"longest_edge": 32}},
        {BEGIN: "[IMG_BREAK]", END: "[IMG_END]"},
        rows,
        {"spatial_merge_size": 2, "multimodal_projector_bias": True},
    ),
}

FAMILIES |= {
    "idefics3": replace(
        FAMILIES["smolvlm"],
        architecture="Idefics3ForConditionalGeneration",
        kind="idefics3",
        processor=FAMILIES["smolvlm"].processor | {"image_processor_type": "Idefics3ImageProcessor"},
    ),
    "qwen3_vl_moe": replace(
        FAMILIES["qwen3_vl"],
        architecture="Qwen3VLMoeForConditionalGeneration",
        kind="qwen3_vl_moe",
        text=FAMILIES["qwen3_vl"].text | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "qwen3_5": replace(
        FAMILIES["qwen3_vl"],
        architecture="Qwen3_5ForConditionalGeneration",
        kind="qwen3_5",
        text=TEXT
        | {
            "num_hidden_layers": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": SECTIONS | {"mrope_interleaved": True, "partial_rotary_factor": 0.5},
        },
        tower=QWEN3_TOWER,
    ),
    "ministral3": replace(
        FAMILIES["mistral3"],
        text=TEXT
        | {
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 64,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "gemma4": Family(
        "Gemma4ForConditionalGeneration",
        "gemma4",
        GEMMA4_TEXT
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": SIZE}
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
            "standardize": True,
            "use_clipped_linears": True,
        },
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 2, "do_resize": False},
        {BEGIN: "<|image>", END: "<image|>"},
    ),
    "gemma4_unified": Family(
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified",
        # What tokens of an image see of each other in the last layer does not reach the text.
        GEMMA4_TEXT | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
        {
            "image_processor_type": "Gemma4UnifiedImageProcessor",
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "do_resize": False,
        },
        {BEGIN: "<|image>", END: "<image|>"},
    ),
}

#: A way of cutting text that has a name in GGUF.
CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def text_of(name: str, ids: list[int]) -> str:
    """The text that is cut into these tokens."""
    return "".join(FAMILIES[name].special.get(id, f"<{id}>") for id in ids)


def fields_of(name: str, *, text: dict[str, Any] | None = None, tower: dict[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a family, with other settings of the text and the tower."""
    of = FAMILIES[name]
    return {
        "architectures": [of.architecture],
        "model_type": of.kind,
        "tie_word_embeddings": False,
        "image_token_id": IMAGE,
        "image_token_index": IMAGE,
        "text_config": of.text | (text or {}),
        "vision_config": of.tower | (tower or {}),
        **of.whole,
    }


def make(name: str, folder: Path, fields: dict[str, Any] | None = None, **processor: Any) -> Path:
    """Writes a model of a family, with the names of published files, and gives its folder."""
    folder.mkdir(parents=True)
    fields = fields or fields_of(name)
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "preprocessor_config.json").write_text(json.dumps(FAMILIES[name].processor | processor))
    _write_tokenizer(name, folder)
    model = json.loads(build(fields, images=True))
    rng = np.random.default_rng(len(name))
    published = {new: old for old, new in reversed(model.get("files", {}).get("renamed", []))}
    tensors = {_published(of, published): _draw(rng, of, shape) for of, shape in _shapes(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes(model: dict[str, Any]) -> dict[str, list[int]]:
    """Shapes in files by parameter, layer by layer."""

    def of(specs: list[dict[str, Any]], layer: int = 0) -> dict[str, list[int]]:
        return {spec["name"].replace("{i}", str(layer)): spec.get("stored", spec["shape"]) for spec in specs}

    found = of(model["parameters"])
    for item in model["body"]:
        for i in range(item.get("repeat", 0)):
            found |= of(item["blocks"][item["pattern"][i] if "pattern" in item else 0]["parameters"], i)
    return found


def _published(parameter: str, names: dict[str, str]) -> str:
    for new, old in names.items():
        if parameter.startswith(new):
            return old + parameter.removeprefix(new)
    return parameter


def _draw(rng: np.random.Generator, parameter: str, shape: list[int]) -> np.ndarray:
    """Weights that keep the size of what they multiply; norms around 1, or around 0 where they act as 1 + w."""
    if parameter.endswith(("_min", "_max")):
        return np.full(shape, -2.0 if parameter.endswith("_min") else 2.0, np.float32)
    if len(shape) < 2:
        is_scale = "norm" in parameter and parameter.endswith("weight") or "scale" in parameter or "scalar" in parameter
        return np.asarray(rng.normal(0.0, 0.1, shape) + is_scale, dtype=np.float32)
    spread = 1.5 / np.sqrt(np.prod(shape[1:]))
    if "embed_tokens" in parameter:
        spread = 1.0
    elif "pos" in parameter:
        spread = 0.3
    return rng.normal(0.0, spread, shape).astype(np.float32)


def _write_tokenizer(name: str, folder: Path) -> None:
    """Every token but three is special, so that a text of them is cut into them."""
    words = {id: text_of(name, [id]) for id in range(SIZE)} | {1: "a", 2: "b", 3: "ab"}
    flags = {flag: False for flag in ("single_word", "lstrip", "rstrip", "normalized")} | {"special": True}
    added = [{"id": id, "content": text, **flags} for id, text in words.items() if id not in (1, 2, 3)]
    split = {"type": "Split", "pattern": {"Regex": CUT}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_]},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": {text: id for id, text in words.items()}, "merges": ["a b"]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def images_of(name: str) -> list[np.ndarray]:
    """Images that no processor resizes. Those that are cut in tiles are shrunk once: their colors change slowly."""
    rng = np.random.default_rng(7)
    found = []
    for height, width in FAMILIES[name].sizes:
        if FAMILIES[name].frame is tiles:
            y, x = np.mgrid[0:height, 0:width]
            found.append(np.stack([7 * y, 7 * x, 3 * (x + y)], -1).astype(np.uint8))
        else:
            found.append(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    return found
