"""Records what transformers computes for small models of families without a folder of recorded values.

    python tests/oracle/record_families.py

Writes tests/golden/families.json: of each family's smallest form in tests/python/conftest.py, with weights by `drawn_weights`, the
last logits of two rows, the lengths of the logits of all tokens, the loss and the norm of every gradient, in float64, by how much
these norms differ in float32, and the likeliest tokens after each row. Of models with images: the same of a drawn configuration
on the recorded rows of ../shared/golden, without answers. Needs torch, transformers, safetensors and pytest.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))

import compare_images  # noqa: E402
import compare_transformers  # noqa: E402
import conftest  # noqa: E402
from drawn_weights import drawn  # noqa: E402
from safetensors.numpy import load_file as load_file_numpy  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

#: Tokens of an answer, at most, and the least distance of the logits of the two likeliest ones.
LONGEST, APART = 16, 5e-5

#: Norms of gradients that are not compared between float32 and float64.
SMALL = 1e-3

#: The plain implementations of transformers; others take no float64.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}

MAKERS = ["gemma", "starcoder2", "cohere2", "hunyuan", "granite_swa", "minimax_m2", "gemma4_unified"]
MAKERS += ["apertus", "olmo_hybrid", "muse_glimmer", "phi4_multimodal"]


#: Models with images, and what names the configuration that is drawn.
WITH_IMAGES = {"qwen3_vl_moe": 0, "gemma4_unified": 0}


def filled(kind, config, folder: str):
    """A model in float64 with drawn weights, and the names of its tensors in files."""
    model = kind.from_config(config)
    model.save_pretrained(folder)
    if config.model_type == "olmo_hybrid":
        compare_transformers.as_published(model, Path(folder))
    path = Path(folder) / "model.safetensors"
    names = {name: list(of.shape) for name, of in load_file(path).items()}
    save_file({name: torch.tensor(drawn(name, shape)) for name, shape in names.items()}, path, {"format": "pt"})
    return kind.from_pretrained(folder, **EAGER).double().eval(), names


def values(fields: dict, logits, loss: float, gradients: dict, names: dict) -> dict:
    """What is recorded. Gradients of tensors that files keep in another form are left to the comparisons."""
    norms = {name: of.norm().item() for name, of in gradients.items() if name in names}
    last = [[round(value, 9) for value in row] for row in logits[:, -1].tolist()]
    lengths = [[round(value, 7) for value in row] for row in logits.norm(dim=-1).tolist()]
    return {"config": fields, "logits": last, "lengths": lengths, "loss": loss, "gradient_norms": norms}


def distance(rounded: dict, gradients: dict) -> float:
    """The largest relative difference of a norm between two sets of gradients."""
    pairs = [(of.norm().item(), gradients[name].norm().item()) for name, of in rounded.items()]
    return max(abs(found / norm - 1) for found, norm in pairs if norm > SMALL)


def gradients_of_text(model, ids) -> tuple:
    """The model's outputs, and its gradients by name."""
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out, {name: of.grad for name, of in model.named_parameters() if of.grad is not None}


@torch.no_grad()
def answers(model, rows: list[list[int]]) -> list[list[int]]:
    """The likeliest tokens after each row, up to the first that another is almost as likely as."""
    found: list[list[int]] = [[] for _ in rows]
    for row, answer in zip(rows, found, strict=True):
        while len(answer) < LONGEST:
            values, tokens = model(input_ids=torch.tensor([row + answer]), use_cache=False).logits[0, -1].topk(2)
            if values[0] - values[1] < APART:
                break
            answer.append(int(tokens[0]))
    return found


def of_text(fields: dict) -> dict:
    given = dict(fields)
    given.pop("architectures")
    config = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    with tempfile.TemporaryDirectory() as folder:
        kind = transformers.AutoModelForCausalLM
        if "text_config" in given:
            kind = transformers.AutoModelForImageTextToText
        model, names = filled(kind, config, folder)
        ids = torch.tensor(conftest.recorded_ids())
        out, gradients = gradients_of_text(model, ids)
        of_model = values(fields, out.logits, out.loss.item(), gradients, names) | {"answers": answers(model, ids.tolist())}
        _, rounded = gradients_of_text(model.float(), ids)
        return of_model | {"float32_error": distance(rounded, gradients)}


def of_images(family: str, seed: int) -> dict:
    """The values of rows with images; `rows` is the folder of golden that has them."""
    fields = compare_images.draw_config(random.Random(f"{family} {seed}"), family)
    config = transformers.AutoConfig.for_model(**fields)
    inputs = load_file_numpy(compare_images.GOLDEN / compare_images.FAMILIES[family] / "inputs.safetensors")
    inputs = compare_images.merged_patches(inputs) if family == "gemma4_unified" else inputs
    with tempfile.TemporaryDirectory() as folder:
        model, names = filled(transformers.AutoModelForImageTextToText, config, folder)
        logits, _, loss, gradients = compare_images.expected(model, inputs, torch.float64)
        _, _, _, rounded = compare_images.expected(model.float(), inputs, torch.float32)
        kept = json.loads((Path(folder) / "config.json").read_text())
    own = {compare_images.older_name(family, name): of for name, of in gradients.items()}
    found = values(kept, logits, loss, own, names)
    return found | {"float32_error": distance(rounded, gradients), "rows": compare_images.FAMILIES[family]}


def main() -> None:
    texts = {name: of_text(getattr(conftest, f"tiny_{name}")()) for name in MAKERS}
    images = {name: of_images(name, seed) for name, seed in WITH_IMAGES.items()}
    text = json.dumps({"transformers": transformers.__version__, "families": texts, "images": images}, indent=1)
    (ROOT / "tests/golden/families.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
