"""Random small models with vision towers through the engine and through transformers and peft, which are the truth.

    python tests/oracle/compare_images.py [--cases N] [--seed S] [--family NAME ...]

Rows, images and pixels are those of the nearest recorded family in ../shared/golden; sizes and options of text and tower
are drawn. Compared are logits, hidden states, the loss, every gradient, and adapters on text, projector and tower. Needs torch,
transformers, peft and safetensors besides surogate. Each line names its case; exit code 1 if anything was out of tolerance.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import surogate
import torch
import transformers
from compare_transformers import GRADIENT, LOGITS, LOSS, NOTHING, Report, adapter_name, as_in_files as named_in_files, relative
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

GOLDEN = Path(__file__).parents[2].parent / "shared/golden"

#: Families, and the recorded ones whose rows and images they are given.
FAMILIES = {
    "qwen2_vl": "qwen2_5_vl", "qwen2_5_vl": "qwen2_5_vl", "qwen3_vl": "qwen3_vl", "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_5_vl", "qwen3_5_moe": "qwen3_5_vl", "gemma3": "gemma3_mm", "gemma4": "gemma4_mm",
    "gemma4_unified": "gemma4_mm",     "mistral3": "mistral3", "smolvlm": "smolvlm", "idefics3": "smolvlm",
}  # fmt: skip

#: Of adapters: everything, the text alone, tower and projector alone.
TARGETS = ["all-linear", r".*language_model.*(q_proj|down_proj)", r".*(visual|vision).*(qkv|proj|fc1|linear_fc2)"]


def draw_text(rng: random.Random, family: str, fields: dict) -> None:
    """Changes the fields of the text."""
    fields["tie_word_embeddings"] = rng.random() < 0.5
    fields["rms_norm_eps"] = rng.choice([1e-6, 1e-5])
    if family in ("qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_unified"):
        return
    groups, kv = rng.choice([1, 2, 3]), rng.choice([1, 2])
    fields |= {"num_attention_heads": groups * kv, "num_key_value_heads": kv, "intermediate_size": rng.choice([32, 64, 80])}
    if family in ("qwen2_vl", "qwen2_5_vl"):  # whose heads fit the sections of the rotation
        fields["num_attention_heads"], fields["num_key_value_heads"] = rng.choice([(3, 1), (3, 3)])
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        fields["attention_bias"] = rng.random() < 0.3
        fields["num_hidden_layers"] = rng.choice([2, 3, 4])
    if family == "qwen3_vl_moe":
        layers = range(fields["num_hidden_layers"])
        fields |= {
            "num_experts": rng.choice([4, 6]), "num_experts_per_tok": rng.choice([1, 2, 3]), "moe_intermediate_size": 32,
            "mlp_only_layers": rng.choice([[], [rng.choice(layers)]]), "decoder_sparse_step": rng.choice([1, 1, 2]),
        }  # fmt: skip


def draw_tower(rng: random.Random, family: str, fields: dict, text: dict) -> None:
    """Changes the fields of the tower."""
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        fields["depth"] = depth = rng.choice([2, 3])
        most = min(depth, text["num_hidden_layers"])
        fields["deepstack_visual_indexes"] = sorted(rng.sample(range(depth), rng.choice(range(most + 1))))
        fields["num_heads"] = rng.choice([1, 2, 4])
    if family in ("smolvlm", "idefics3", "gemma3"):
        fields["num_hidden_layers"] = rng.choice([1, 2])
        fields["num_attention_heads"] = rng.choice([1, 2])
    for name in {"hidden_act", "hidden_activation"} & set(fields):
        fields[name] = "gelu_pytorch_tanh"
    if family in ("qwen2_vl", "qwen2_5_vl"):
        fields["hidden_act"] = {"qwen2_vl": "quick_gelu", "qwen2_5_vl": "silu"}[family]
    if family == "mistral3":
        fields["hidden_act"] = rng.choice(["silu", "gelu"])


def qwen2_tower(of: dict) -> dict:
    """The tower of Qwen2-VL as wide as that of Qwen2.5-VL."""
    kept = ("depth", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size", "in_channels")
    names = {"in_channels": "in_channels"}
    fields = {names.get(name, name): of[name] for name in kept if name in of}
    return fields | {"embed_dim": of["hidden_size"], "hidden_size": of["out_hidden_size"], "mlp_ratio": 2, "model_type": "qwen2_vl"}


def unified_tower(of: dict) -> dict:
    """Patches of Gemma 4 without a tower, as large as those of the recorded tower."""
    kept = {name: of[name] for name in ("patch_size", "pooling_kernel_size")}
    return kept | {"mm_embed_dim": 40, "output_proj_dims": 40, "mm_posemb_size": 16, "model_type": "gemma4_unified_vision"}


def draw_config(rng: random.Random, family: str) -> dict:
    """A configuration as in files."""
    config = json.loads((GOLDEN / FAMILIES[family] / "config.json").read_text())
    config.pop("architectures")
    recorded = config["model_type"]
    config["model_type"] = family
    text, tower = config["text_config"], config["vision_config"]
    if family != recorded:
        text["model_type"] = {"idefics3": "llama", "qwen3_5_moe": "qwen3_5_moe_text"}.get(family, f"{family}_text")
        tower["model_type"] = {"qwen3_5_moe": "qwen3_5_moe_vision"}.get(family, f"{family}_vision")
    if family == "gemma4_unified":
        config["vision_config"] = tower = unified_tower(tower)
        for name in ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "num_experts",
                     "top_k_experts", "moe_intermediate_size"):  # fmt: skip
            text.pop(name)
        config.pop("audio_config")
    if family == "qwen2_vl":
        config["vision_config"] = tower = qwen2_tower(tower)
    if family == "qwen3_5_moe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 24}
    draw_text(rng, family, text)
    config["tie_word_embeddings"] = text["tie_word_embeddings"]
    draw_tower(rng, family, tower, text)
    return config


def draw_model(rng: random.Random, family: str, folder: Path):
    """A random model, saved; norms and biases are not the ones and zeros that they start as."""
    torch.manual_seed(rng.randrange(1 << 30))
    fields = draw_config(rng, family)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    for part in (config, config.text_config, config.vision_config):
        part._attn_implementation, part._experts_implementation = "eager", "eager"
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, of in model.named_parameters():
            if of.ndim == 1 or name.endswith("_bias"):
                of.add_(torch.randn_like(of) * 0.2)
            elif "embed" not in name:
                of.normal_(0, of[0].numel() ** -0.5 if of.ndim != 3 else of.shape[-1] ** -0.5)
            else:
                of.normal_(0, 0.5)
    model.save_pretrained(folder)
    shutil.copy(GOLDEN / FAMILIES[family] / "preprocessor_config.json", folder)
    return model


def as_in_files(family: str, tensors: dict) -> dict:
    """Tensors by the names that files have: some keep older ones, Qwen3.5's matrices of experts are apart."""
    if family == "qwen3_5_moe":
        tensors = named_in_files(SimpleNamespace(model_type="qwen3_5_moe_text"), tensors)
    return {name if ".lora_" in name else older_name(family, name): of for name, of in tensors.items()}


def older_name(family: str, name: str) -> str:
    """The name that a parameter has in published files."""
    if family in ("qwen2_vl", "qwen2_5_vl"):
        return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    if family == "gemma4_unified":
        name = name.replace("embed_vision.multimodal_embedder.", "embed_vision_.").replace("embed_vision.", "vision_embedder.")
        return name.replace("embed_vision_.", "embed_vision.")
    if family in ("gemma3", "mistral3"):
        name = name if name.startswith("lm_head.") else name.removeprefix("model.")
        return name.replace("language_model.", "language_model.model.").replace("lm_head.", "language_model.lm_head.")
    return name


def expected(model, inputs: dict, dtype=torch.float32) -> tuple:
    """Logits, hidden states, loss and gradients by transformers."""
    model.zero_grad(set_to_none=True)
    names = ("input_ids", "pixel_values", "image_grid_thw", "mm_token_type_ids", "token_type_ids", "image_sizes",
             "pixel_attention_mask", "image_position_ids")  # fmt: skip
    given = {name: torch.tensor(inputs[name]) for name in names if name in inputs}
    given = {name: of.to(dtype) if of.is_floating_point() else of for name, of in given.items()}
    out = model(**given, labels=torch.tensor(inputs["labels"]), output_hidden_states=True)
    out.loss.backward()
    gradients = {name: of.grad.clone() for name, of in model.named_parameters() if of.grad is not None}
    return out.logits.detach(), [of.detach() for of in out.hidden_states], out.loss.item(), gradients


def compare(report: Report, family: str, model, engine: surogate.Model, inputs: dict, trained: bool = True) -> None:
    """Everything that the engine gives for the recorded rows, with four times the noise of float32 allowed."""
    found = expected(model, inputs)
    exact = expected(copy.deepcopy(model).double(), inputs, torch.float64)
    ids, labels = (inputs[name].astype(np.int32) for name in ("input_ids", "labels"))
    images = [inputs[f"image.{number}"] for number in range(3)]
    logits, hidden = engine.forward(ids, hidden=True, images=images)
    report.check("logits", relative(logits, found[0]), max(LOGITS, 4 * relative(found[0], exact[0])))
    # transformers has its last state after the last norm.
    for index, (state, of, precise) in enumerate(zip(hidden[:-1], found[1][:-1], exact[1][:-1], strict=True)):
        report.check(f"hidden {index}", relative(state, of), max(LOGITS, 4 * relative(of, precise)), "hidden")
    loss, gradients = engine.loss_and_gradients(ids, labels, images=images)
    report.check("loss", abs(loss - found[2]), max(LOSS, 4 * abs(found[2] - exact[2])))
    wanted, precise = ({adapter_name(name): of for name, of in as_in_files(family, side[3]).items()} for side in (found, exact))
    if set(wanted) != set(gradients):
        report.fail(f"gradients of other names: {sorted(set(wanted) ^ set(gradients))[:6]}")
    for name in set(wanted) & set(gradients):
        if precise[name].norm() >= NOTHING:
            noise = 4 * relative(wanted[name], precise[name])
            # Adapters on convolutions are matrices here.
            of = wanted[name].flatten(1) if ".lora_" in name else wanted[name]
            report.check(f"gradient of {name}", relative(gradients[name], of), max(GRADIENT, noise), "gradient")


def adapted(rng: random.Random, model):
    """A peft model with random A and B on some of the linears."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rng.choice([1, 4, 8]), lora_alpha=8, target_modules=rng.choice(TARGETS), task_type="CAUSAL_LM")
    found = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, of in found.named_parameters():
            if "lora_" in name:
                of.normal_(0, 0.2)
    return found


def merged_patches(inputs: dict, side: int = 8) -> dict:
    """Pixels and places of patches of `side` pixels, which are tokens, as the processor of Gemma 4 without a tower gives them."""
    values, places = np.zeros((3, 6, 3 * side * side), np.float32), np.full((3, 6, 2), -1)
    for number in range(3):
        image = inputs[f"image.{number}"].astype(np.float32) / 255
        rows, columns = (extent // side for extent in image.shape[:2])
        cut = image.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(rows * columns, -1)
        values[number, : len(cut)] = cut
        places[number, : len(cut)] = [(column, row) for row in range(rows) for column in range(columns)]
    return inputs | {"pixel_values": values, "image_position_ids": places}


def case(report: Report, rng: random.Random, family: str, folder: Path) -> None:
    model = draw_model(rng, family, folder / "model")
    report.case += f" {family} {model.config.text_config.to_diff_dict()} {model.config.vision_config.to_diff_dict()}"
    inputs = load_file(GOLDEN / FAMILIES[family] / "inputs.safetensors")
    if family == "gemma4_unified":
        inputs = merged_patches(inputs)
        settings = json.loads((folder / "model/preprocessor_config.json").read_text())
        settings["image_processor_type"] = "Gemma4UnifiedImageProcessor"
        (folder / "model/preprocessor_config.json").write_text(json.dumps(settings))
    compare(report, family, model, surogate.load(folder / "model"), inputs)
    peft = adapted(rng, model)
    peft.save_pretrained(folder / "adapter")
    report.case += f" adapter {peft.peft_config['default'].target_modules}"
    compare(report, family, peft, surogate.load(folder / "model", adapter=folder / "adapter"), inputs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="draw of these alone")
    options = parser.parse_args()
    report = Report()
    for family in options.family or FAMILIES:
        for number in range(options.seed, options.seed + options.cases):
            report.case = f"{number}"
            with tempfile.TemporaryDirectory() as folder:
                try:
                    case(report, random.Random(f"{family} {number}"), family, Path(folder))
                except Exception as error:
                    report.fail(f"{type(error).__name__}: {error}")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
