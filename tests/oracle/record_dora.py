"""Records what PEFT computes for DoRA with whole modules, into train/tests/it/recorded/dora. Needs transformers and peft:

python tests/oracle/record_dora.py
"""

from __future__ import annotations

import json
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "tests" / "golden" / "llama"


def main() -> None:
    torch.manual_seed(11)
    torch.set_num_threads(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        GOLDEN, dtype=torch.float32, attn_implementation="eager"
    )
    config = peft.LoraConfig(
        r=2,
        lora_alpha=6,
        use_dora=True,
        target_modules=["q_proj", "o_proj", "down_proj"],
        modules_to_save=["embed_tokens", "lm_head"],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
            elif parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    folder = REPOSITORY / "crates" / "train" / "tests" / "recorded" / "dora"
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    written = json.loads((folder / "adapter_config.json").read_text())
    written["base_model_name_or_path"] = GOLDEN.name
    (folder / "adapter_config.json").write_text(json.dumps(written, indent=2) + "\n")
    inputs = load_file(GOLDEN / "inputs.safetensors")
    ids, labels = inputs["input_ids"][:1], inputs["labels"][:1]
    found = model(ids).logits
    targets = labels[:, 1:].reshape(-1)
    loss = torch.nn.functional.cross_entropy(
        found[:, :-1].reshape(-1, found.shape[-1]), targets, ignore_index=-100
    )
    loss.backward()
    names = {
        name.replace(".default.weight", "").replace("lora_A", "lora_A.weight").replace("lora_B", "lora_B.weight"): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    gradients = {
        f"grad.{name.replace('.modules_to_save', '.weight')}": parameter.grad.clone()
        for name, parameter in names.items()
    }
    merged = model.merge_and_unload()
    with torch.no_grad():
        merged_logits = merged(ids).logits
    results = {"logits": found.detach(), "loss": loss.detach().reshape(1), "merged_logits": merged_logits, **gradients}
    save_file({name: value.contiguous() for name, value in results.items()}, folder / "reference.safetensors")


if __name__ == "__main__":
    main()
