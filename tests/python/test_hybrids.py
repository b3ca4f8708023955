"""Models with gated delta nets: fields of their configs, documents, what is refused, files of models with other parts."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import surogate
from conftest import REPOSITORY, tiny_llama, tiny_olmo_hybrid
from golden import LOGITS, assert_close
from safetensors.numpy import load_file, save_file
from surogate import models
from surogate.cli.commands import main
from surogate.errors import ModelConfigError, SurogateError

STORIES = REPOSITORY / "examples" / "stories"

IDS = np.random.default_rng(4).integers(1, 90, (2, 80))


def tiny_qwen3_5(**changes: object) -> dict[str, object]:
    """The config.json of a three-layer Qwen3.5, its second layer with attention."""
    own = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 3}
    own |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16}
    own |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    return tiny_llama(**{**own, "linear_value_head_dim": 12, "max_position_embeddings": 128, **changes})


def tiny_qwen3_5_moe(**changes: object) -> dict[str, object]:
    own = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_experts": 4}
    own |= {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
    return tiny_qwen3_5(**{**own, "intermediate_size": None, **changes})


def tiny_qwen3_next(**changes: object) -> dict[str, object]:
    own = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "mlp_only_layers": [2]}
    return tiny_qwen3_5_moe(**{**own, "intermediate_size": 48, "norm_topk_prob": True, **changes})


def tiny_lfm2(**changes: object) -> dict[str, object]:
    """The config.json of a three-layer LFM2, its second layer with attention."""
    own = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 3, "full_attn_idxs": [1]}
    own |= {"block_multiple_of": 8, "rms_norm_eps": None, "norm_eps": 1e-5, "max_position_embeddings": 128}
    return tiny_llama(**{**own, "tie_word_embeddings": True, **changes})


def tiny_lfm2_moe(**changes: object) -> dict[str, object]:
    """The config.json of a three-layer LFM2 MoE, its second layer with attention, its first dense."""
    own = {"architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "full_attn_idxs": None, "num_experts": 4}
    own |= {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts_per_tok": 2}
    return tiny_lfm2(**{**own, "moe_intermediate_size": 24, "block_multiple_of": None, **changes})


def tiny_falcon_h1(**changes: object) -> dict[str, object]:
    """The config.json of a two-layer Falcon-H1, whose layers have attention and a state space side by side."""
    own = {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "mamba_d_ssm": 32, "mamba_n_heads": 4}
    own |= {"mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8, "mamba_rms_norm": True}
    return tiny_llama(**{**own, "num_hidden_layers": 2, "max_position_embeddings": 128, **changes})


def tiny_nemotron_h(**changes: object) -> dict[str, object]:
    """The config.json of a Nemotron-H with a layer of each kind."""
    own = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "num_hidden_layers": None}
    own |= {"layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 8}
    own |= {"ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    own |= {"moe_shared_expert_intermediate_size": 24, "hidden_act": None, "rms_norm_eps": None, "head_dim": 16}
    return tiny_llama(**{**own, "max_position_embeddings": 128, **changes})


def tiny_granitemoehybrid(**changes: object) -> dict[str, object]:
    """The config.json of a three-layer Granite 4, its second layer with attention, with experts in each."""
    own = {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "num_local_experts": 4}
    own |= {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3, "num_experts_per_tok": 2}
    own |= {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "shared_intermediate_size": 24}
    return tiny_llama(**{**own, "max_position_embeddings": 128, **changes})


HYBRIDS = [tiny_qwen3_5, tiny_qwen3_5_moe, tiny_qwen3_next]

#: All of which a state goes from token to token.
STATEFUL = [*HYBRIDS, tiny_lfm2, tiny_lfm2_moe, tiny_falcon_h1, tiny_nemotron_h, tiny_granitemoehybrid]


def operations(fields: dict, op: str) -> list[dict]:
    """Attributes of an operation in each layer that has it; those before and after the layers are not counted."""
    ir = json.loads(models.build(fields))
    [stack] = [item for item in ir["body"] if "repeat" in item]
    blocks = [stack["blocks"][stack["pattern"][i] if "pattern" in stack else 0] for i in range(stack["repeat"])]
    return [node.get("attrs", {}) for block in blocks for node in block["nodes"] if node["op"] == op]


def test_kinds_of_layers():
    assert len(operations(tiny_qwen3_5(), "gated_delta")) == 2 and len(operations(tiny_qwen3_5(), "attention")) == 1
    every = tiny_qwen3_5(layer_types=None, num_hidden_layers=8)
    assert len(operations(every, "attention")) == 2, "every fourth where nothing is said"
    assert len(operations(tiny_qwen3_5(layer_types=None, full_attention_interval=3), "attention")) == 1
    assert len(operations(tiny_qwen3_next(), "route")) == 2, "the last layer is dense"
    assert len(operations(tiny_qwen3_next(mlp_only_layers=None, decoder_sparse_step=2), "route")) == 1
    assert len(operations(tiny_qwen3_5_moe(), "route")) == 3


def test_rotations_of_text():
    """Axes of images are passed over: a text has one position on all."""
    axes = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    plain = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    new = tiny_qwen3_5(rope_theta=None, rope_parameters=plain | axes)
    old = tiny_qwen3_5(rope_theta=1e7, partial_rotary_factor=0.5, rope_scaling={"type": "default"} | axes)
    assert models.build(new) == models.build(old)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    with_axes = models.build(tiny_qwen3_5(rope_theta=None, rope_parameters=plain | yarn | axes))
    assert with_axes == models.build(tiny_qwen3_5(rope_theta=None, rope_parameters=plain | yarn)) != models.build(new)
    ir = json.loads(models.build(tiny_qwen3_5()))
    [frequencies] = [item for item in ir["body"] if item.get("op") == "rope_frequencies"]
    assert frequencies["attrs"]["head_dim"] == 4, "a quarter of a head where nothing is said"


@pytest.mark.parametrize("make", HYBRIDS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["linear_attention", "sliding_attention", "full_attention"]),
        ("layer_types", ["full_attention"]),
        ("full_attention_interval", 0),
        ("linear_num_key_heads", 3),
        ("linear_key_head_dim", 256),
        ("linear_value_head_dim", 0),
        ("linear_conv_kernel_dim", 9),
        ("hidden_act", "gelu"),
        ("attn_output_gate", False),
        ("mamba_ssm_dtype", "bfloat16"),
        ("partial_rotary_factor", "half"),
        ("num_key_value_heads", 3),
    ],
)
def test_fields_that_cannot_be_honoured_are_refused_by_name(make, field, value):
    with pytest.raises(ModelConfigError, match=f"`{field}`"):
        models.build(make(**{"layer_types": None, field: value}))


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (tiny_qwen3_5, "mlp_only_layers", [0]),
        (tiny_qwen3_5_moe, "mlp_only_layers", [0]),
        (tiny_qwen3_5_moe, "norm_topk_prob", False),
        (tiny_qwen3_5_moe, "num_experts_per_tok", 5),
        (tiny_qwen3_next, "mlp_only_layers", "all"),
    ],
)
def test_fields_of_one_family_that_cannot_be_honoured(make, field, value):
    with pytest.raises(ModelConfigError, match=f"`{field}`"):
        models.build(make(**{field: value}))


@pytest.mark.parametrize("make", STATEFUL)
def test_documents_of_a_row_do_not_see_each_other(make, make_model):
    """Logits and gradients of a packed row are those of its documents alone, shorter than the convolution, within and
    beyond a chunk of the delta rule."""
    model = surogate.load(make_model(make()))
    lengths = [3, 66, 1, 10]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    ids = IDS[:1, : sum(lengths)]
    packed = model.forward(ids, positions)
    loss, gradients = model.loss_and_gradients(ids, ids, positions)
    ends = np.cumsum(lengths)
    alone = [model.forward(ids[:, end - n : end]) for end, n in zip(ends, lengths, strict=True)]
    assert_close(packed, np.concatenate(alone, axis=1), LOGITS, "logits")
    summed: dict[str, np.ndarray] = {}
    total = sum(n - 1 for n in lengths)
    for end, n in zip(ends, lengths, strict=True):
        if n > 1:
            _, own = model.loss_and_gradients(ids[:, end - n : end], ids[:, end - n : end])
            for name, value in own.items():
                summed[name] = summed.get(name, 0) + value.astype(np.float64) * (n - 1) / total
    for name, value in gradients.items():
        if np.linalg.norm(summed[name]) > 1e-6:
            assert_close(value, summed[name], 1e-4, name)
    assert not np.allclose(model.forward(ids), packed, atol=1e-3), "as one document it is another text"


def steps(folder, **options) -> list[float]:
    """Losses of three steps of two micro-batches."""
    base = {"model": str(folder), "torch_dtype": "float32", "device": "cpu", "sequence_len": 80, "lora": False}
    base |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "optimizer": "adamw"}
    trainer = surogate.Trainer(base | options)
    batch = {"input_ids": IDS[:, None], "labels": IDS[:, None]}
    return [trainer.step(batch, learning_rate=1e-2)["loss"] for _ in range(3)]


@pytest.mark.parametrize("make", STATEFUL)
def test_recomputed_activations_have_the_same_bits(make, make_model):
    folder = make_model(make())
    saved = steps(folder, recompute_block=False)
    assert saved == steps(folder, recompute_block=True)
    assert saved[2] < saved[0]


@pytest.mark.parametrize("level", [1, 3])
def test_ranks_have_the_losses_of_one_device(level, make_model):
    """Sharded states and gradients, and at level 3 weights: those of the convolution have three axes."""
    folder = make_model(tiny_qwen3_5())
    ranks = steps(folder, gpus=2, gradient_accumulation_steps=1, zero_level=level)
    np.testing.assert_allclose(ranks, steps(folder), rtol=1e-5)


def answers(model, prompts, **options) -> list[list[int]]:
    generation = model.start(prompts, ignore_end_tokens=True, **options)
    while not generation.done:
        generation.step()
    return [generation.answer(index) for index in range(len(prompts))]


@pytest.mark.parametrize("make", STATEFUL)
@pytest.mark.parametrize("batch_size", [4, 2])
def test_tokens_are_those_of_whole_rows(make, batch_size, make_model):
    """Prompts shorter than the convolution, read in one part and in several, at once and in slots that others had: each
    token is the likeliest after all before it."""
    model = surogate.load(make_model(make(max_position_embeddings=256)))
    ids = np.random.default_rng(5).integers(1, 90, 300).tolist()
    prompts = [ids[:1], ids[1:3], ids[3:20], ids[20:220], ids[220:253]]
    found = answers(model, prompts, max_new_tokens=12, batch_size=batch_size)
    for prompt, answer in zip(prompts, found, strict=True):
        logits = model.forward([prompt + answer])[0, len(prompt) - 1 : -1]
        likeliest = np.sort(logits, axis=1)
        assert (likeliest[:, -1] - likeliest[:, -2]).min() > 1e-5, "two tokens are as likely"
        assert logits.argmax(axis=1).tolist() == answer
        assert answers(model, [prompt], max_new_tokens=12) == [answer]


def test_a_run_answers_prompts(make_model, tmp_path):
    """At an evaluation, from the weights as they are; training is the same as without."""
    folder = make_model(tiny_qwen3_5(vocab_size=512, tie_word_embeddings=False, max_position_embeddings=256))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STORIES / "model" / file, folder)
    results = []
    for number, prompts in enumerate(([], ["Once upon a time", "a"])):
        output = tmp_path / f"run {number}"
        options = {"model": str(folder), "output_dir": str(output), "device": "cpu", "torch_dtype": "float32"}
        options |= {"datasets": [{"path": str(STORIES / "data" / "shakespeare.txt"), "type": "text"}]}
        options |= {"sequence_len": 64, "per_device_train_batch_size": 1, "max_steps": 2, "eval_steps": 2, "lora": False}
        options |= {"optimizer": "adamw", "learning_rate": 1e-2, "sample_prompts": prompts, "sample_tokens": 8}
        (tmp_path / "run.yaml").write_text(json.dumps(options))
        assert main(["sft", str(tmp_path / "run.yaml"), "--quiet"]) == 0
        results.append(output)
    weights = [next(output.rglob("model.safetensors")).read_bytes() for output in results]
    assert weights[0] == weights[1]
    log = next(results[1].glob("log-*.json")).read_text().splitlines()
    [event] = [event for event in map(json.loads, log) if event["event"] == "samples"]
    model = surogate.load(results[1] / "model")
    for sample in event["samples"]:
        assert sample["text"] == model.generate(sample["prompt"], max_new_tokens=8)


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Matrices of experts as published files have them: of each layer two tensors, gate before up."""
    found, groups = {}, {}
    for name, value in tensors.items():
        container, expert, rest = name.partition(".experts.")
        if not expert:
            found[name] = value
            continue
        number, part = rest.removesuffix(".weight").split(".")
        groups.setdefault(f"{container}.experts", {})[int(number), part] = value
    for container, of in groups.items():
        count = 1 + max(number for number, _ in of)
        both = [np.concatenate([of[i, "gate_proj"], of[i, "up_proj"]]) for i in range(count)]
        found[f"{container}.gate_up_proj"] = np.stack(both)
        found[f"{container}.down_proj"] = np.stack([of[i, "down_proj"] for i in range(count)])
    return found


def whole_model(text, place):
    """A text model as the part of one with a vision tower and a head for further tokens, which are not computed."""
    place.mkdir()
    fields = json.loads((text / "config.json").read_text())
    kind = "Qwen3_5Moe" if "num_experts" in fields else "Qwen3_5"
    own = {"architectures": [f"{kind}ForConditionalGeneration"], "text_config": fields}
    own["model_type"] = fields["model_type"].removesuffix("_text")
    (place / "config.json").write_text(json.dumps(own | {"vision_config": {"depth": 2}, "image_token_id": 88}))
    tensors = {
        name if name.startswith("lm_head.") else "model.language_model." + name.removeprefix("model."): value
        for name, value in stacked(load_file(text / "model.safetensors")).items()
    }
    tensors["model.visual.blocks.0.attn.qkv.weight"] = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = np.ones((4, 4), np.float32)
    save_file(tensors, place / "model.safetensors")
    return place


#: Tensors that no adapter here is on.
KEPT = ("visual", "mtp", "norm", "conv1d", "A_log", "dt_bias", "embed_tokens", "lm_head", "mlp.gate.")

#: What trains experts, too.
ON_EXPERTS = {"lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize(
    ("make", "options"),
    [(tiny_qwen3_5, {}), (tiny_qwen3_5_moe, {}), (tiny_qwen3_5_moe, ON_EXPERTS), (tiny_qwen3_5_moe, ON_EXPERTS | {"qlora_bnb": True})],
)
def test_the_text_part_of_a_model_with_images(make, options, make_model, tmp_path):
    """Files of mixtures have the matrices of experts in stacks, and so have results."""
    # Matrices in codes have whole blocks of 64.
    text = make_model(make(hidden_size=64, moe_intermediate_size=64) if "qlora_bnb" in options else make())
    folder = whole_model(text, tmp_path / "whole")
    logits = surogate.load(folder).forward(IDS)
    np.testing.assert_array_equal(logits, surogate.load(text).forward(IDS))
    settings = {"model": str(folder), "torch_dtype": "float32", "device": "cpu", "lora_rank": 4, "lora_dropout": 0.0}
    trainer = surogate.Trainer(settings | options | {"output_dir": str(tmp_path / "run")})
    trainer.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=1e-2)
    trainer.export(tmp_path / "adapter")
    adapted = surogate.load(folder, adapter=tmp_path / "adapter").forward(IDS)
    merged = ["merge", str(tmp_path / "adapter"), "--model", str(folder), "--output", str(tmp_path / "merged")]
    assert main(merged) == 0
    if "qlora_bnb" not in options:  # of which the merged weights have the base as its codes give it
        np.testing.assert_allclose(surogate.load(tmp_path / "merged").forward(IDS), adapted, atol=2e-5)
    check_files(folder, tmp_path / "merged", KEPT if options or make is tiny_qwen3_5 else (*KEPT, ".experts."))
    trainer.export_merged(tmp_path / "live")
    ours, theirs = (load_file(place / "model.safetensors") for place in (tmp_path / "live", tmp_path / "merged"))
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], atol=1e-6, err_msg=name)


def check_files(base, result, kept) -> None:
    """The same names and shapes; all but what is kept differs."""
    ours, theirs = load_file(result / "model.safetensors"), load_file(base / "model.safetensors")
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in theirs.items()}
    changed = {name for name, value in theirs.items() if not np.array_equal(ours[name], value)}
    assert changed == {name for name in theirs if not any(part in name for part in kept)}


def test_a_trained_model_has_its_experts_in_stacks_where_its_files_have(make_model, tmp_path):
    text = make_model(tiny_qwen3_5_moe())
    folder = whole_model(text, tmp_path / "whole")
    batch = {"input_ids": IDS[None], "labels": IDS[None]}
    for number, model in enumerate((text, folder)):
        options = {"model": str(model), "torch_dtype": "float32", "device": "cpu", "lora": False}
        trainer = surogate.Trainer(options | {"output_dir": str(tmp_path / f"run {number}")})
        trainer.step(batch, learning_rate=1e-2)
        trainer.export(tmp_path / f"{number}")
    check_files(folder, tmp_path / "1", ("visual", "mtp"))
    ours, theirs = (load_file(tmp_path / f"{number}" / "model.safetensors") for number in (1, 0))
    for name, value in stacked(theirs).items():
        name = name if name.startswith("lm_head.") else "model.language_model." + name.removeprefix("model.")
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_a_matrix_that_is_there_twice_is_refused(make_model, tmp_path):
    text = make_model(tiny_qwen3_5_moe())
    tensors = load_file(text / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    save_file(stacked(tensors) | {name: tensors[name]}, text / "model.safetensors")
    with pytest.raises(SurogateError, match=f"`{name}` is there, and is a part of `model.layers.0.mlp.experts.gate_up_proj`"):
        surogate.load(text).forward(IDS)


def test_tokens_in_front_of_the_first_image(shared):
    """The recorded model with images: a token sees nothing of what comes later."""
    folder = shared / "golden" / "qwen3_5_vl"
    ids = load_file(folder / "inputs.safetensors")["input_ids"][:, :4]
    logits = load_file(folder / "reference.safetensors")["logits"][:, :4]
    assert_close(surogate.load(folder).forward(ids), logits, LOGITS, "logits")


def test_adapters_are_on_every_linear_layer(make_model, tmp_path):
    trainer = surogate.Trainer({"model": str(make_model(tiny_qwen3_5())), "device": "cpu", "lora_rank": 2})
    trainer.export(tmp_path / "adapter")
    targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    own = {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"}
    assert {target.rsplit(".", 1)[-1] for target in targets} == own | {"gate_proj", "up_proj", "down_proj"}
    assert len(targets) == 2 * 5 + 4 + 3 * 3, "of two delta nets, one attention, three feed-forward layers"


@pytest.mark.parametrize("make", [tiny_falcon_h1, tiny_nemotron_h])
def test_adapters_leave_out_what_peft_refuses(make, make_model, tmp_path):
    """PEFT loads no adapter on `out_proj` of these, so that by default there is none, and a request for one is an error."""
    model = str(make_model(make()))
    trainer = surogate.Trainer({"model": model, "device": "cpu", "lora_rank": 2})
    trainer.export(tmp_path / "adapter")
    targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    names = {target.rsplit(".", 1)[-1] for target in targets}
    assert {"in_proj", "q_proj", "o_proj"} <= names and "out_proj" not in names
    with pytest.raises(SurogateError, match="out_proj"):
        surogate.Trainer({"model": model, "device": "cpu", "lora_target_modules": ["out_proj"]})


def test_fields_of_olmo_hybrid():
    plain = tiny_olmo_hybrid(rope_parameters=None, rope_theta=None)
    assert len(operations(plain, "rope")) == 2, "of queries and keys in the last layer"
    for none in ({"rope_parameters": {"rope_theta": None}}, {"rope_theta": None}):
        assert not operations(plain | none, "rope")

    def values(fields: dict) -> set[int]:
        [stack] = [item for item in json.loads(models.build(fields))["body"] if "repeat" in item]
        named = [row for block in stack["blocks"] for row in block["parameters"]]
        return {row["shape"][0] for row in named if row["name"].endswith("v_conv1d.weight")}

    assert values(plain) == {2 * 144}
    sized = tiny_olmo_hybrid(linear_key_head_dim=None, linear_value_head_dim=None)
    assert values(sized) == {2 * 2 * 12}, "by default keys have three quarters of a head's share of the columns, values twice as many"
    for twice, factors in ((True, [2.0]), (False, [])):
        found = [node["factor"] for node in operations(plain | {"linear_allow_neg_eigval": twice}, "scale")]
        assert [factor for factor in found if factor == 2.0] == factors
    with pytest.raises(ModelConfigError, match="`linear_num_key_heads`: 2 does not divide"):
        models.build(tiny_olmo_hybrid(linear_num_value_heads=3))


def test_fields_of_lfm2():
    def widths(fields: dict) -> set[int]:
        [stack] = [item for item in json.loads(models.build(fields))["body"] if "repeat" in item]
        rows = [row for block in stack["blocks"] for row in block["parameters"]]
        return {row["shape"][0] for row in rows if row["name"].endswith("feed_forward.w1.weight")}

    assert len(operations(tiny_lfm2(), "causal_conv")) == 2 and len(operations(tiny_lfm2(), "attention")) == 1
    assert len(operations(tiny_lfm2(full_attn_idxs=None), "attention")) == 3, "all where nothing is said"
    both = tiny_lfm2(layer_types=["conv", "conv", "full_attention"])
    assert len(operations(both, "causal_conv")) == 2, "and not the layers of full_attn_idxs"
    size = tiny_lfm2()["intermediate_size"]
    assert widths(tiny_lfm2(block_auto_adjust_ff_dim=False)) == {size}
    assert widths(tiny_lfm2(intermediate_size=96, block_ffn_dim_multiplier=1.1)) == {72}, "70 in eights"
    assert widths(tiny_lfm2(block_ff_dim=30)) == {24}
    assert widths(tiny_lfm2(block_ff_dim=30) | {"block_ffn_dim_multiplier": None}) == {20}
    names = [row["name"] for row in json.loads(models.build(tiny_lfm2(tie_embedding=False)))["parameters"]]
    assert "lm_head.weight" in names and "model.embedding_norm.weight" in names
    assert {of["eps"] for of in operations(tiny_lfm2(norm_eps=1e-3), "rmsnorm")} == {1e-3}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("conv_bias", True),
        ("conv_L_cache", 9),
        ("full_attn_idxs", "all"),
        ("layer_types", ["conv", "mamba", "conv"]),
        ("rms_norm_eps", 1e-3),
        ("block_norm_eps", 1e-3),
        ("conv_dim", 64),
        ("num_heads", 2),
        ("use_pos_enc", False),
        ("block_use_swiglu", False),
        ("block_ff_dim", 0),
        ("tie_embedding", "yes"),
        ("attention_dropout", 0.1),
    ],
)
def test_fields_of_lfm2_that_cannot_be_honoured(field, value):
    with pytest.raises(ModelConfigError, match=f"`{field}`"):
        models.build(tiny_lfm2(**{field: value}))


def test_fields_of_lfm2_moe():
    rules = operations(tiny_lfm2_moe(routed_scaling_factor=2.0), "route")
    assert rules == [{"top_k": 2, "scores": "sigmoid", "normalise": True, "epsilon": 1e-6, "factor": 2.0}] * 2
    [plain, _] = operations(tiny_lfm2_moe(norm_topk_prob=False), "route")
    assert plain == {"top_k": 2, "scores": "sigmoid", "factor": 1.0}
    assert len(operations(tiny_lfm2_moe(num_dense_layers=0), "route")) == 3
    assert len(operations(tiny_lfm2_moe(num_dense_layers=None), "route")) == 1, "two are dense where nothing is said"

    def biases(fields: dict) -> list[str]:
        [stack] = [item for item in json.loads(models.build(fields))["body"] if "repeat" in item]
        return [row["name"] for block in stack["blocks"] for row in block["parameters"] if "expert_bias" in row["name"]]

    assert biases(tiny_lfm2_moe()) == ["model.layers.{i}.feed_forward.expert_bias"] * 2, "of both kinds of layers"
    assert biases(tiny_lfm2_moe(use_expert_bias=False)) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_experts_per_tok", 5), ("num_experts", 0), ("output_router_logits", True), ("conv_bias", True), ("tie_embedding", 1)],
)
def test_fields_of_lfm2_moe_that_cannot_be_honoured(field, value):
    with pytest.raises(ModelConfigError, match=f"`{field}`"):
        models.build(tiny_lfm2_moe(**{field: value}))
