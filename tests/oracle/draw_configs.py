"""Random configurations of small models, as transformers describes them.

Knows the fields of each family; `compare_transformers.py` makes models of them.
"""

from __future__ import annotations

import random

import transformers


def draw_rope(rng: random.Random, head_dim: int) -> dict:
    theta = rng.choice([10000.0, 500000.0, 1000000.0, 1234.5])
    kind = rng.choice(["default", "default", "linear", "llama3", "yarn", "dynamic", "longrope"])
    rope: dict = {"rope_type": kind, "rope_theta": theta}
    if kind != "default":
        rope["factor"] = rng.choice([2.0, 4.0, 8.0, 1.5])
    if kind == "llama3":
        rope |= {"low_freq_factor": rng.choice([1.0, 0.5]), "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = rng.choice([16, 64, 8192])
    if kind == "yarn":
        rope["original_max_position_embeddings"] = rng.choice([16, 64, 2048])
        rope |= rng.choice([{}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 1.3}, {"truncate": False}])
        rope |= rng.choice([{}, {"mscale": 0.7, "mscale_all_dim": 0.9}])
    if kind == "longrope":
        rope["original_max_position_embeddings"] = rng.choice([16, 40])
        for name, first in (("short_factor", 1.0), ("long_factor", 2.0)):
            rope[name] = [first + rng.random() for _ in range(head_dim // 2)]
        rope |= rng.choice([{}, {"attention_factor": 1.1}])
    return rope


FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "smollm3", "gpt2"]
FAMILIES += ["gemma2", "gemma3_text", "phi3", "granite", "olmo2", "olmo3", "glm4", "ministral3", "seed_oss", "exaone4", "ernie4_5", "lfm2"]
FAMILIES += ["gemma", "starcoder2", "cohere2", "hunyuan_v1_dense", "granite_swa", "apertus", "olmo_hybrid"]
FAMILIES += ["muse_glimmer", "phi4_multimodal"]

#: Mixtures of experts: the names of gate, up and down of an expert in files, and of the layer that holds them.
MIXTURES = {
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "olmoe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "minimax_m2": ("block_sparse_moe", "w1", "w3", "w2"),
    **dict.fromkeys(["qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "ernie4_5_moe"], ("mlp", "gate_proj", "up_proj", "down_proj")),
    "lfm2_moe": ("feed_forward", "w1", "w3", "w2"),
    **dict.fromkeys(["qwen3_5_moe_text", "qwen3_next"], ("mlp", "gate_proj", "up_proj", "down_proj")),
}
FAMILIES += [*MIXTURES, "gpt_oss", "qwen3_5_text", "gemma4_text"]

#: Those with Mamba-2.
STATE_SPACES = ["nemotron_h", "falcon_h1", "granitemoehybrid"]
FAMILIES += STATE_SPACES

#: Those of which peft adapts the matrices of experts, which are parameters of three axes there.
STACKED = ["ernie4_5_moe", "qwen3_moe", "olmoe", "mixtral", "minimax_m2", "gpt_oss", "gemma4_text"]

#: Mixtures whose experts are in groups.
GROUPED = ["deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"]

#: Those with gated delta nets.
HYBRIDS = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"]

#: Those of which a state goes from token to token.
STATEFUL = [*HYBRIDS, *STATE_SPACES, "lfm2", "lfm2_moe"]

#: Those whose rotation is given by kind of layer.
BY_KIND = ["gemma3_text", "olmo3"]

#: What is drawn from; `--family` narrows it.
drawn = list(FAMILIES)


def draw_part(rng: random.Random, family: str, head_dim: int, original: int) -> dict:
    """A rotation of a part of each head."""
    rope: dict = {"rope_type": "default", "rope_theta": rng.choice([10000.0, 500.0])}
    rope["partial_rotary_factor"] = rng.choice([share for share in (0.5, 0.75, 1.0) if int(head_dim * share) % 2 == 0])
    if family in ("phi3", "phi4_multimodal") and rng.random() < 0.5:
        pairs = int(head_dim * rope["partial_rotary_factor"]) // 2
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        for name, first in (("short_factor", 1.0), ("long_factor", 2.0)):
            rope[name] = [first + rng.random() for _ in range(pairs)]
    return rope


def own_fields(rng: random.Random, family: str, fields: dict) -> dict:
    """Fields that only some of the later families have."""
    layers, window = fields["num_hidden_layers"], rng.choice([1, 2, 5, 16])
    own: dict = {}
    if family in ("gemma2", "gemma3_text"):
        own["query_pre_attn_scalar"] = rng.choice([8, 16, 24, 100])
        own["attn_logit_softcapping"] = rng.choice([None, 4.0, 50.0]) if family == "gemma2" else None
        own["final_logit_softcapping"] = rng.choice([None, 3.0, 30.0])
        own["hidden_activation"] = rng.choice(["gelu_pytorch_tanh", "gelu_pytorch_tanh", "gelu", "silu"])
    if family in ("gemma2", "gemma3_text", "olmo3", "exaone4"):
        own["sliding_window"] = window
        if rng.random() < 0.7:
            own["layer_types"] = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    if family in BY_KIND:
        full, local = fields["rope_parameters"], {"rope_type": "default", "rope_theta": 700.0}
        if family == "olmo3":  # reading the old spelling, transformers gives layers with a window this one
            local["rope_theta"] = full["rope_theta"] = 500000.0
        own["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    if family == "phi4_multimodal":
        small = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2}
        own["vision_config"] = small | {"num_hidden_layers": 2, "image_size": 28, "crop_size": 28, "feature_layer": -2}
        own["audio_config"] = small | {"num_blocks": 1, "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16}
    if family in ("phi3", "phi4_multimodal"):
        own["sliding_window"] = rng.choice([None, window])
        own["original_max_position_embeddings"] = fields["rope_parameters"].get("original_max_position_embeddings", 128)
    if family in ("granite", "granite_swa"):
        own |= {"embedding_multiplier": rng.choice([1.0, 12.0]), "attention_multiplier": rng.choice([0.1, 0.3])}
        own |= {"residual_multiplier": rng.choice([0.22, 1.0]), "logits_scaling": rng.choice([1.0, 8.0])}
    if family in ("gemma2", "gemma3_text", "granite", "olmo2", "olmo3", "glm4"):
        own["attention_bias"] = rng.random() < 0.4
    if family == "ernie4_5":
        own["use_bias"] = rng.random() < 0.4
    if family in ("lfm2", "lfm2_moe"):
        own |= {"norm_eps": fields.pop("rms_norm_eps"), "conv_L_cache": rng.choice([2, 3, 4])}
        own["layer_types"] = [rng.choice(["conv", "full_attention"]) for _ in range(layers)]
        own["layer_types"][rng.randrange(layers)] = "full_attention"  # has the modules that adapters are drawn from
    if family == "lfm2_moe":
        own |= {"num_experts": rng.choice([3, 4, 9]), "num_experts_per_tok": rng.choice([1, 2, 3])}
        own |= {"moe_intermediate_size": rng.choice([8, 24, 40]), "hidden_size": rng.choice([32, 64, 96])}
        own |= {"num_dense_layers": rng.choice([0, layers - 1]), "use_expert_bias": rng.random() < 0.7}
        return own | {"norm_topk_prob": rng.random() < 0.7, "routed_scaling_factor": rng.choice([1.0, 2.5])}
    if family == "lfm2":
        own |= {"block_auto_adjust_ff_dim": rng.random() < 0.7, "block_multiple_of": rng.choice([4, 16])}
        own["block_ffn_dim_multiplier"] = rng.choice([1.0, 1.3])
    if family == "exaone4":
        own["sliding_window_pattern"] = rng.choice([1, 2, 3])
        if rng.random() < 0.3:
            own |= {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    if family in ("granite", "seed_oss"):
        own["mlp_bias"] = rng.random() < 0.4
    if family == "seed_oss":
        own |= {"attention_bias": rng.random() < 0.6, "attention_out_bias": rng.random() < 0.4}
        own |= {"attention_dropout": 0.0, "residual_dropout": 0.0}
    if family == "ministral3":
        own["sliding_window"] = rng.choice([None, window])
        own["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e6, "factor": rng.choice([4.0, 16.0])}
        own["rope_parameters"] |= {"original_max_position_embeddings": rng.choice([4, 12, 64])}
        own["rope_parameters"] |= rng.choice([{}, {"mscale": 1.0, "mscale_all_dim": 1.0}])
        own["rope_parameters"]["llama_4_scaling_beta"] = rng.choice([0.1, 0.3])
    if family == "gemma":
        own |= {"hidden_act": rng.choice(["gelu", "gelu_pytorch_tanh", "silu"]), "attention_bias": rng.random() < 0.4}
    if family == "starcoder2":
        own |= {"norm_epsilon": fields.pop("rms_norm_eps"), "use_bias": rng.random() < 0.6, "hidden_act": "gelu_pytorch_tanh"}
        own["sliding_window"] = rng.choice([None, window])
    if family == "granite_swa":
        own["sliding_window"] = window
        own |= rng.choice([{}, {"layer_rope_theta": [rng.choice([0, 500.0, 10000.0]) for _ in range(layers)]}])
        own["layer_types"] = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    if family == "hunyuan_v1_dense":
        own["attention_bias"] = rng.random() < 0.4
        if rng.random() < 0.5:
            own["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": rng.choice([3.0, 1000.0])}
    if family == "cohere2":
        own |= {"layer_norm_eps": fields.pop("rms_norm_eps"), "logit_scale": rng.choice([0.0625, 0.25, 1.0])}
        own |= {"sliding_window": window, "attention_bias": rng.random() < 0.4}
        own["layer_types"] = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    if family == "gpt_oss":
        own |= {"num_local_experts": rng.choice([3, 4, 9]), "num_experts_per_tok": rng.choice([1, 2, 3])}
        own |= {"sliding_window": window, "swiglu_limit": rng.choice([0.3, 1.5, 7.0])}
        own |= {"attention_bias": rng.random() < 0.6, "swiglu_alpha": rng.choice([1.702, 1.702, 1.0])}
        if rng.random() < 0.7:
            own["layer_types"] = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    if family == "gemma4_text":
        return draw_gemma4(rng, fields)
    if family in GROUPED:
        return own | draw_grouped(rng, family, fields)
    if family == "ernie4_5_moe":
        own |= {"moe_num_experts": rng.choice([3, 4, 9]), "moe_k": rng.choice([1, 2, 3]), "use_bias": rng.random() < 0.4}
        own |= {"moe_intermediate_size": rng.choice([8, 24, 40]), "moe_num_shared_experts": rng.choice([0, 1, 2])}
        own |= {"moe_layer_start_index": rng.choice([0, layers - 1]), "moe_layer_interval": 1}
        return own | {"hidden_size": rng.choice([32, 64, 96]), "moe_layer_end_index": rng.choice([-1, layers - 1])}
    if family == "apertus":
        own |= {"attention_bias": rng.random() < 0.4, "hidden_size": fields["num_attention_heads"] * fields["head_dim"]}
    if family in HYBRIDS:
        return own | draw_hybrid(rng, family, fields)
    if family in STATE_SPACES:
        return own | draw_state_space(rng, family, fields)
    if family in MIXTURES:
        experts = rng.choice([3, 4, 9])
        own |= {"num_experts" if family == "olmoe" else "num_local_experts": experts}
        own |= {"num_experts_per_tok": rng.choice([1, 2, 3]), "intermediate_size": rng.choice([16, 24, 40])}
        own["hidden_size"] = rng.choice([32, 64, 96])
    if family == "olmoe":
        heads = rng.choice([2, 4])
        own |= {"num_attention_heads": heads, "num_key_value_heads": rng.choice([1, heads])}
        own |= {"head_dim": own["hidden_size"] // heads, "norm_topk_prob": rng.random() < 0.5}
    if family == "minimax_m2" and fields["head_dim"] in (8, 16, 32, 64):
        own["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": rng.choice([0.5, 1.0])}
    if family == "mixtral":
        own["sliding_window"] = rng.choice([None, window])
    if family == "qwen2_moe":
        own.pop("num_local_experts")
        own |= {"num_experts": experts, "shared_expert_intermediate_size": rng.choice([9, 24])}
        own |= {"qkv_bias": rng.random() < 0.7, "decoder_sparse_step": rng.choice([1, 1, 2])}
        own |= {"moe_intermediate_size": rng.choice([8, 24, 40]), "norm_topk_prob": rng.random() < 0.5}
        if rng.random() < 0.5:
            own |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": rng.choice([0, 1, layers])}
    if family == "qwen3_moe":
        own |= {"moe_intermediate_size": rng.choice([8, 24, 40]), "norm_topk_prob": rng.random() < 0.5}
        own |= {"mlp_only_layers": rng.choice([[], [0], [layers - 1]]), "decoder_sparse_step": rng.choice([1, 1, 2])}
    return own


def draw_grouped(rng: random.Random, family: str, fields: dict) -> dict:
    """Sizes of experts in groups, and of latents."""
    groups = rng.choice([1, 2, 4])
    own: dict = {"n_routed_experts": 8, "n_group": groups, "topk_group": rng.randrange(1, groups + 1)}
    own |= {"num_experts_per_tok": rng.choice([1, 2]), "n_shared_experts": rng.choice([1, 2])}
    own |= {"norm_topk_prob": rng.random() < 0.5, "routed_scaling_factor": rng.choice([1.0, 2.5])}
    own |= {"first_k_dense_replace": min(rng.choice([0, 1]), fields["num_hidden_layers"] - 1), "hidden_size": rng.choice([32, 64, 96])}
    own |= {"moe_intermediate_size": rng.choice([8, 24, 40]), "attention_bias": rng.random() < 0.4}
    if family == "glm4_moe":
        return own | {"use_qk_norm": rng.random() < 0.6}
    rope: dict = {"rope_type": "default", "rope_theta": 10000.0}
    if rng.random() < 0.6:
        rope |= {"rope_type": "yarn", "factor": rng.choice([4.0, 40.0]), "original_max_position_embeddings": 16}
        rope |= rng.choice([{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 0.9}])
    own |= {"rope_parameters": rope, "num_key_value_heads": fields["num_attention_heads"]}
    own |= {"q_lora_rank": rng.choice([None, 20]), "kv_lora_rank": rng.choice([12, 16])}
    own |= {"qk_nope_head_dim": rng.choice([8, 20]), "qk_rope_head_dim": rng.choice([4, 16])}
    own["head_dim"] = own["qk_rope_head_dim"]
    own["v_head_dim"] = rng.choice([8, 16, 36])
    if family == "glm4_moe_lite":
        own.pop("first_k_dense_replace")
        own["mlp_layer_types"] = [rng.choice(["dense", "sparse"]) for _ in range(fields["num_hidden_layers"])]
    if family == "deepseek_v2":
        own |= {"norm_topk_prob": False, "mlp_bias": rng.random() < 0.3}
        own["hidden_size"] = 32 * fields["num_attention_heads"]
        own["topk_method"] = rng.choice(["greedy", "group_limited_greedy"])
        return own
    return own | {"rope_interleave": rng.random() < 0.7}


def draw_gemma4(rng: random.Random, fields: dict) -> dict:
    """Kinds of layers with heads of their own, shared keys and values, embeddings of layers, experts."""
    sliding, full = "sliding_attention", "full_attention"
    layers, heads = rng.choice([2, 3, 4, 5]), fields["num_attention_heads"]
    kinds = [rng.choice([sliding, full]) for _ in range(layers - 1)] + [full]
    shared = [n for n in range(1, layers) if set(kinds[: layers - n]) == set(kinds)]
    local = {"rope_type": "default", "rope_theta": rng.choice([10000.0, 700.0])}
    turned = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0])}
    turned |= rng.choice([{}, {}, {"factor": 4.0}])
    own: dict = {"num_hidden_layers": layers, "layer_types": kinds, "sliding_window": rng.choice([1, 2, 5, 16])}
    scaled = {key: value for key, value in fields["rope_parameters"].items() if key != "truncate"}  # not read by kind
    own |= {"rope_parameters": {sliding: local, full: rng.choice([turned, turned, scaled])}}
    own["global_head_dim"] = rng.choice([8, 12, 32, 64])
    own["attention_k_eq_v"] = sliding in kinds and rng.random() < 0.4  # else `v_proj` is no target of adapters
    own["num_global_key_value_heads"] = rng.choice([None, *[n for n in range(1, heads + 1) if heads % n == 0]])
    own["num_kv_shared_layers"] = rng.choice([0, *shared])
    # Transformers 5.23 computes shared keys and values only where layers have inputs of their own.
    own["hidden_size_per_layer_input"] = rng.choice([4, 9] if own["num_kv_shared_layers"] else [0, 4, 9])
    own["use_double_wide_mlp"] = rng.random() < 0.5
    own["vocab_size_per_layer_input"] = fields["vocab_size"] + rng.choice([0, 0, 3])
    own |= {"final_logit_softcapping": rng.choice([None, 3.0, 30.0]), "attention_bias": rng.random() < 0.3}
    own["hidden_activation"] = rng.choice(["gelu_pytorch_tanh", "gelu_pytorch_tanh", "gelu", "silu"])
    own["use_bidirectional_attention"] = rng.choice([None, "vision"])
    if rng.random() < 0.5:
        own |= {"enable_moe_block": True, "num_experts": rng.choice([3, 4, 9]), "top_k_experts": rng.choice([2, 3])}  # the norm after a single one undoes its scale
        own["moe_intermediate_size"] = rng.choice([8, 24, 40])
    return own


def draw_hybrid(rng: random.Random, family: str, fields: dict) -> dict:
    """Kinds of layers, sizes of gated delta nets, experts."""
    layers, key_heads = fields["num_hidden_layers"], rng.choice([1, 2, 3])
    own: dict = {"linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * rng.choice([1, 2, 3])}
    own |= {"linear_key_head_dim": rng.choice([4, 7, 16, 32]), "linear_value_head_dim": rng.choice([4, 9, 16, 40])}
    own |= {"linear_conv_kernel_dim": rng.choice([2, 3, 4]), "attention_bias": rng.random() < 0.3}
    own["layer_types"] = [rng.choice(["linear_attention", "full_attention"]) for _ in range(layers)]
    own["layer_types"][rng.randrange(layers)] = "full_attention"  # has the modules that adapters are drawn from
    if family == "qwen3_5_text":
        return own
    if family == "olmo_hybrid":
        fields.pop("head_dim")
        own |= {"num_hidden_layers": layers + 1, "layer_types": [*own["layer_types"], "linear_attention"]}
        own |= {"rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([None, 10000.0, 700.0])}}
        own |= {"hidden_size": rng.choice([12, 24, 36]) * fields["num_attention_heads"]}
        own["linear_value_head_dim"] = rng.choice([4, 9, 16, 40, 192])
        return own | {"linear_allow_neg_eigval": rng.random() < 0.5}
    own |= {"num_experts": rng.choice([3, 4, 9]), "num_experts_per_tok": rng.choice([1, 2, 3])}
    own |= {"moe_intermediate_size": rng.choice([8, 24, 40]), "shared_expert_intermediate_size": rng.choice([9, 24])}
    own["hidden_size"] = rng.choice([32, 64, 96])
    if family == "qwen3_next":
        own |= {"norm_topk_prob": rng.random() < 0.5, "decoder_sparse_step": rng.choice([1, 1, 2])}
        own |= {"mlp_only_layers": rng.choice([[], [0], [layers - 1]])}
    return own


def draw_state_space(rng: random.Random, family: str, fields: dict) -> dict:
    """Sizes of Mamba-2, kinds of layers, experts, multipliers."""
    heads, layers = rng.choice([1, 2, 3, 4, 6]), fields["num_hidden_layers"] + 1
    groups = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    own: dict = {"mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_state": rng.choice([5, 16, 40, 150])}
    own |= {"mamba_d_conv": rng.choice([2, 3, 4]), "mamba_conv_bias": rng.random() < 0.5, "mamba_proj_bias": rng.random() < 0.3}
    own |= {"mamba_chunk_size": 8, "time_step_limit": rng.choice([(0.0, float("inf")), (0.0, float("inf")), (0.1, 0.9)])}
    own |= {"attention_bias": rng.random() < 0.3, "num_hidden_layers": layers}
    kinds = [rng.choice(["linear_attention", "full_attention"]) for _ in range(layers)]
    kinds[:2] = rng.sample(["linear_attention", "full_attention"], 2)
    factor = lambda: rng.choice([0.4, 0.7, 1.0, 1.3])  # noqa: E731
    if family == "falcon_h1":
        own |= {"mamba_d_head": rng.choice([5, 8, 16]), "projectors_bias": rng.random() < 0.3, "mlp_bias": rng.random() < 0.3}
        own |= {"mamba_d_ssm": heads * own["mamba_d_head"], "mamba_rms_norm": rng.random() < 0.6}
        own |= {"mamba_norm_before_gate": rng.random() < 0.5, "ssm_multipliers": [factor() for _ in range(5)]}
        own |= {"mlp_multipliers": [factor(), factor()], "embedding_multiplier": rng.choice([1.0, 5.0])}
        scaled = ("lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
        return own | {f"{name}_multiplier": factor() for name in scaled}
    experts = {"moe_intermediate_size": rng.choice([8, 24, 40]), "num_experts_per_tok": rng.choice([1, 2, 3])}
    if family == "granitemoehybrid":
        own |= {"hidden_size": 12 * fields["num_attention_heads"], "layer_types": kinds, "mamba_expand": rng.choice([1, 2])}
        own |= {"mamba_n_heads": rng.choice([1, 2, 3]), "mamba_n_groups": 1, "head_dim": 12}
        own["rope_parameters"] = {"rope_type": "default", "rope_theta": rng.choice([700.0, 10000.0])}
        own |= {"num_local_experts": rng.choice([0, 3, 9]), "num_experts_per_tok": experts["num_experts_per_tok"]}
        own |= {"shared_intermediate_size": rng.choice([9, 24]), "position_embedding_type": rng.choice([None, "rope", "nope"])}
        own |= {"embedding_multiplier": rng.choice([1.0, 6.0]), "attention_multiplier": rng.choice([0.1, 0.3])}
        return own | {"residual_multiplier": factor(), "logits_scaling": rng.choice([1.0, 2.5])}
    for name in ("rope_parameters", "rms_norm_eps", "tie_word_embeddings", "mamba_expand", "num_hidden_layers"):
        fields.pop(name, None)
    for name, other in (("num_heads", "n_heads"), ("head_dim", None)):
        own[f"mamba_{name}"] = own.pop(f"mamba_{other}") if other else rng.choice([5, 8, 16])
    own |= {"n_groups": own.pop("mamba_n_groups"), "ssm_state_size": own.pop("mamba_d_state"), "conv_kernel": own.pop("mamba_d_conv")}
    own |= {"use_conv_bias": own.pop("mamba_conv_bias"), "chunk_size": own.pop("mamba_chunk_size"), "use_bias": own.pop("mamba_proj_bias")}
    del own["time_step_limit"], own["num_hidden_layers"], own["attention_bias"]
    own["layers_block_type"] = [*kinds, *rng.sample(["moe", "mlp"], rng.choice([0, 1, 2]))]
    own |= experts | {"n_routed_experts": 8, "moe_shared_expert_intermediate_size": rng.choice([9, 24]), "hidden_size": rng.choice([32, 64])}
    own |= {"n_group": (of := rng.choice([1, 2, 4])), "topk_group": rng.randrange(1, of + 1), "norm_topk_prob": rng.random() < 0.5}
    own["num_experts_per_tok"] = rng.choice([1, 2])
    own |= {"routed_scaling_factor": rng.choice([1.0, 2.5]), "mlp_bias": rng.random() < 0.3, "layer_norm_epsilon": rng.choice([1e-5, 1e-3])}
    return own | {"moe_latent_size": rng.choice([None, None, 32])}


def draw_config(rng: random.Random):
    """A configuration of transformers with shapes that are not round."""
    family = rng.choice(drawn)
    if family == "gpt2":
        return draw_gpt2(rng)
    heads = rng.choice([1, 2, 3, 4, 6])
    kv = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    head_dim = rng.choice([8, 12, 16, 20, 32, 64])
    hidden = rng.choice([size for size in (24, 36, 50, 52, 64, 96) if size % heads == 0 or family == "qwen3"])
    if family in ("phi3", "phi4_multimodal"):  # its head_dim follows from the hidden size
        hidden = heads * head_dim
    layers = rng.choice([1, 2, 3])
    rope = draw_rope(rng, head_dim)
    # The documents of a row of a stateful family go through transformers alone, with rotations of their own length.
    if family in (*BY_KIND, *STATEFUL, "gemma4_text") and rope["rope_type"] in ("dynamic", "longrope"):
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    if family in BY_KIND:
        rope.pop("truncate", None)  # transformers looks for it next to the kinds and not in them
    if family in MIXTURES:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    if family in ("phi3", "phi4_multimodal", "glm4", "glm4_moe", *HYBRIDS):
        rope = draw_part(rng, family, head_dim, rng.choice([16, 40]))
    fields = dict(
        vocab_size=rng.choice([67, 101, 128, 333, 1000]),
        hidden_size=hidden,
        intermediate_size=rng.choice([17, 40, 90, 131, 200]),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head_dim,
        rms_norm_eps=rng.choice([1e-5, 1e-6, 1e-8, 1e-3]),
        rope_parameters=rope,
        max_position_embeddings=rng.choice([24, 128]) if rope["rope_type"] == "dynamic" else rng.choice([128, 2048]),
        tie_word_embeddings=rng.random() < 0.5,
        pad_token_id=rng.choice([None, 0, 5]),
        initializer_range=rng.choice([0.02, 0.08, 0.3]),
        bos_token_id=1,
        eos_token_id=2,
    )
    window = rng.choice([1, 2, 5, 16])
    if family in ("llama", "qwen3", "smollm3"):
        fields["attention_bias"] = rng.random() < 0.4
    if family in ("llama", "smollm3"):
        fields["mlp_bias"] = rng.random() < 0.4
    if family == "mistral":
        fields["sliding_window"] = rng.choice([None, window])
    if family in ("qwen2", "qwen3", "smollm3") and rng.random() < 0.5:
        fields |= {"use_sliding_window": True, "sliding_window": window}
        if rng.random() < 0.5:
            fields["layer_types"] = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
        elif family != "smollm3":
            fields["max_window_layers"] = rng.choice([0, 1, layers])
    if family == "smollm3":
        rotated = {"no_rope_layers": [rng.choice([0, 1]) for _ in range(layers)]}
        fields |= rng.choice([{"no_rope_layer_interval": rng.choice([1, 2, 4])}, rotated])
    fields |= own_fields(rng, family, fields)
    if family == "muse_glimmer":
        return draw_muse(rng, fields)
    return transformers.AutoConfig.for_model(family, **fields)


def draw_muse(rng: random.Random, text: dict):
    """A Muse Glimmer with a small tower, whose config has the sizes of the text at its top, too."""
    layers = text["num_hidden_layers"]
    text |= {"head_dim": rng.choice([8, 12, 20]), "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
    text["hidden_size"] = 12 * text["num_attention_heads"]
    text |= {"sliding_window": rng.choice([1, 2, 5, 16]), "qk_scale_factor": rng.choice([1.0, 3.87]), "post_norm_eps": rng.choice([1e-8, 1e-5])}
    text |= {"final_logit_softcapping": rng.choice([3.0, 20.0]), "output_multiplier": rng.choice([0.2, 1.0]), "attention_bias": rng.random() < 0.3}
    text |= {"layer_types": [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]}
    text |= rng.choice([{}, {"layer_rope_theta": [rng.choice([0, 700.0]) for _ in range(layers)]}])
    tower = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
    parts = {"text_config": text, "vision_config": tower, "out_hidden_size": 64, "projector_hidden_size": 8}
    top = {name: text[name] for name in ("vocab_size", "sliding_window", "tie_word_embeddings", "initializer_range")}
    return transformers.AutoConfig.for_model("muse_glimmer", **parts, **top)


def draw_gpt2(rng: random.Random):
    """A GPT-2 without dropout."""
    heads = rng.choice([1, 2, 3, 4, 6])
    return transformers.AutoConfig.for_model(
        "gpt2",
        vocab_size=rng.choice([67, 101, 128, 333, 1000]),
        n_positions=128,
        n_embd=heads * rng.choice([4, 8, 12, 17, 32]),
        n_layer=rng.choice([1, 2, 3]),
        n_head=heads,
        n_inner=rng.choice([None, 17, 90]),
        activation_function=rng.choice(
            ["gelu_new", "gelu", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu", "silu", "tanh"]
        ),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=rng.choice([1e-5, 1e-6, 1e-3]),
        scale_attn_weights=rng.random() < 0.7,
        scale_attn_by_inverse_layer_idx=rng.random() < 0.3,
        reorder_and_upcast_attn=rng.random() < 0.3,
        tie_word_embeddings=rng.random() < 0.7,
        initializer_range=rng.choice([0.02, 0.08, 0.3]),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=rng.choice([None, 0]),
    )
