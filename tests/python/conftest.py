"""Where the reference numbers lie, and tiny models for tests that need none."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import surogate

# Encoded rows are kept for the session only, and not among the user's.
ROWS = tempfile.TemporaryDirectory(prefix="surogate-rows-")
os.environ["SUROGATE_DATA_CACHE"] = ROWS.name

# Machines that a test measures are not the user's, nor are the user's those of a test.
MACHINES = tempfile.TemporaryDirectory(prefix="surogate-machines-")
os.environ["SUROGATE_MACHINES"] = MACHINES.name

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = REPOSITORY.parent / "shared"
TRIMMED = REPOSITORY / "tests" / "golden"


@pytest.fixture
def golden_folder() -> Path:
    """The reference numbers: the full set where it is there, else the trimmed one."""
    return SHARED / "golden" if SHARED.is_dir() else TRIMMED


@pytest.fixture
def shared() -> Path:
    """The folder of reference numbers next to the checkout; the test is skipped if there is none."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared next to the checkout")
    return SHARED


def updating() -> bool:
    """Whether stored texts are to be regenerated instead of compared."""
    return bool(os.environ.get("SUROGATE_UPDATE"))


def tiny_llama(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer Llama; a change to None removes the field."""
    fields: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    fields.update(changes)
    return {name: value for name, value in fields.items() if value is not None}


def tiny_qwen3(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer Qwen3 with tied embeddings."""
    own = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}
    return tiny_llama(**{**own, **changes})


@pytest.fixture
def make_model(tmp_path):
    """Writes a model folder of one's own with weights drawn by the engine; gives its path."""

    def make(fields: dict, **options):
        place = Path(tempfile.mkdtemp(dir=tmp_path))
        config = place / "drawn" / "config.json"
        config.parent.mkdir()
        config.write_text(json.dumps(fields))
        trainer = surogate.Trainer(
            {
                "model": str(config.parent),
                "init": "random",
                "lora": False,
                "torch_dtype": "float32",
                "device": "cpu",
                "output_dir": str(tmp_path / "unused"),
                **options,
            }
        )
        trainer.export(place / "model")
        return place / "model"

    return make


def tiny_qwen2(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer Qwen2."""
    return tiny_llama(**{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **changes})


def tiny_mistral(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer Mistral with a window of 5."""
    own = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 5}
    return tiny_llama(**{**own, **changes})


def tiny_smollm3(**changes: object) -> dict[str, object]:
    """The config.json of a four-layer SmolLM3 whose second and fourth layers do not rotate."""
    own = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "num_hidden_layers": 4}
    return tiny_llama(**{**own, "no_rope_layer_interval": 2, "tie_word_embeddings": True, **changes})


def tiny_gpt2(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer GPT-2 without dropout."""
    fields: dict[str, object] = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 96,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "torch_dtype": "float32",
    }
    fields.update(changes)
    return {name: value for name, value in fields.items() if value is not None}


def tiny_gemma2(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer Gemma 2 with a window of 5 in its first layer."""
    own = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 16, "sliding_window": 5}
    return tiny_llama(**{**own, "query_pre_attn_scalar": 16, "tie_word_embeddings": True, **changes})


def tiny_gemma3(**changes: object) -> dict[str, object]:
    """The config.json of a three-layer Gemma 3 whose second layer sees everything."""
    own = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window_pattern": 2}
    return tiny_gemma2(**{**own, "num_hidden_layers": 3, **changes})


def tiny_gemma(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer Gemma 1."""
    own = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu", "head_dim": 16}
    return tiny_llama(**{**own, "tie_word_embeddings": True, **changes})


def tiny_starcoder2(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer StarCoder2 with a window."""
    own = {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "rms_norm_eps": None, "hidden_act": None}
    return tiny_llama(**{**own, "norm_epsilon": 1e-5, "sliding_window": 5, **changes})


def tiny_cohere2(**changes: object) -> dict[str, object]:
    """The config.json of a four-layer Cohere 2, three of them with a window."""
    own = {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "rms_norm_eps": None, "layer_norm_eps": 1e-5}
    return tiny_llama(**{**own, "num_hidden_layers": 4, "sliding_window": 5, "logit_scale": 0.25, **changes})


def tiny_granite_swa(**changes: object) -> dict[str, object]:
    """The config.json of a four-layer Granite with windows, of which one layer does not rotate."""
    own = {"architectures": ["GraniteSWAForCausalLM"], "model_type": "granite_swa", "num_hidden_layers": 4}
    return tiny_llama(**{**own, "sliding_window": 5, "layer_rope_theta": [0, 500.0, 500.0, 10000.0], **changes})


def tiny_apertus(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer Apertus."""
    own = {"architectures": ["ApertusForCausalLM"], "model_type": "apertus", "hidden_act": "xielu", "rope_theta": None}
    return tiny_llama(**{**own, **changes})


def tiny_olmo_hybrid(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer OLMo Hybrid without positions, whose value heads are two of the rule each."""
    own = {"architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid"}
    own |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 144}
    return tiny_llama(**{**own, "rope_parameters": {"rope_theta": None, "rope_type": "default"}, **changes})


def tiny_phi4_multimodal(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer Phi-4 multimodal with small towers, which rotates half of each head."""
    own = {"architectures": ["Phi4MultimodalForCausalLM"], "model_type": "phi4_multimodal", "partial_rotary_factor": 0.5}
    small = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2}
    channels = ("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels")
    own["vision_config"] = small | {"num_hidden_layers": 2, "image_size": 28, "crop_size": 28}
    own["audio_config"] = small | {"num_blocks": 1} | dict.fromkeys(channels, 16)
    return tiny_llama(**{**own, **changes})


def tiny_phi4mm(**changes: object) -> dict[str, object]:
    """The same as the model's own code writes it."""
    own = {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm", "vision_config": None, "audio_config": None}
    own |= {"embd_layer": {"embedding_cls": "image_audio"}, "img_processor": None, "audio_processor": {"name": "cascades"}}
    own |= {"vision_lora": {"r": 4, "lora_alpha": 8}, "speech_lora": {"r": 4, "lora_alpha": 8}, "full_attn_mod": 1}
    return tiny_phi4_multimodal(**{**own, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, **changes})


def tiny_muse_glimmer(**changes: object) -> dict[str, object]:
    """The config.json of a four-layer Muse Glimmer with a small tower."""
    text = {"model_type": "muse_glimmer_text", "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 5, "post_norm_eps": 1e-4}
    absent = {"architectures": None, "hidden_act": None}
    tower = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
    whole = {"architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer", "torch_dtype": "float32"}
    whole |= {"vision_config": tower, "out_hidden_size": 64, "projector_hidden_size": 8}
    return whole | {"text_config": tiny_llama(**{**text, **absent, **changes})}


def tiny_hunyuan(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer dense Hunyuan, whose rotation has an `alpha`."""
    own = {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "head_dim": 8}
    return tiny_llama(**{**own, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32}, **changes})


def tiny_gemma4_unified(**changes: object) -> dict[str, object]:
    """A text of Gemma 4 without what its form without a tower does not have."""
    absent = {"hidden_size_per_layer_input": None, "vocab_size_per_layer_input": None}
    own = {"architectures": ["Gemma4UnifiedForCausalLM"], "model_type": "gemma4_unified_text"}
    return tiny_gemma4(**{**absent, **own, **changes})


def tiny_minimax_m2(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer MiniMax-M2, which rotates half of each head."""
    own = {"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "num_local_experts": 4}
    return tiny_llama(**{**own, "num_experts_per_tok": 2, "rotary_dim": 8, "head_dim": 16, **changes})


def recorded_ids() -> list[list[int]]:
    """Two rows of tokens for recorded values, longer than windows of small models."""
    return [[(7 * t + 3) % 90 + 3 for t in range(24)], [(11 * t * t + 5) % 90 + 3 for t in range(24)]]


def tiny_gemma4(**changes: object) -> dict[str, object]:
    """The config.json of a four-layer Gemma 4, whose last two layers read keys and values of the first two, and whose layers
    have embeddings of their own."""
    own = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "sliding_window": 5, "rope_theta": None}
    own |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "global_head_dim": 32}
    own |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
    return tiny_llama(**{**own, "use_double_wide_mlp": True, "head_dim": 16, "tie_word_embeddings": True, **changes})


def tiny_gemma4_mixture(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer Gemma 4 with experts, whose second layer has keys for values, too."""
    own = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "num_kv_shared_layers": 0}
    own |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
    own |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    return tiny_gemma4(**{**own, **changes})


def tiny_phi3(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer Phi-3 that rotates three quarters of each head."""
    own = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.75}
    return tiny_llama(**{**own, "num_attention_heads": 2, "original_max_position_embeddings": 64, **changes})


def tiny_granite(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer Granite."""
    own = {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "embedding_multiplier": 12.0}
    multipliers = {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 8.0}
    return tiny_llama(**{**own, **multipliers, **changes})


def tiny_olmo2(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer OLMo 2."""
    return tiny_llama(**{"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", **changes})


def tiny_olmo3(**changes: object) -> dict[str, object]:
    """The config.json of a four-layer OLMo 3, windows of 5 in all layers but the last."""
    own = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 5, "num_hidden_layers": 4}
    return tiny_llama(**{**own, **changes})


def tiny_glm4(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer GLM-4."""
    return tiny_llama(**{"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "head_dim": 16, **changes})


def tiny_seed_oss(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer Seed-OSS without dropout."""
    own = {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "head_dim": 16}
    return tiny_llama(**{**own, "attention_dropout": 0.0, "residual_dropout": 0.0, **changes})


def tiny_exaone4(**changes: object) -> dict[str, object]:
    """The config.json of a four-layer EXAONE 4 with a window of 5 in all layers but the fourth."""
    own = {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "num_hidden_layers": 4}
    return tiny_llama(**{**own, "sliding_window": 5, "sliding_window_pattern": 4, **changes})


def tiny_ernie4_5(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer ERNIE 4.5."""
    own = {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "head_dim": 16}
    return tiny_llama(**{**own, **changes})
