"""Random small models through the engine and through transformers and peft, which are the truth.

    python tests/oracle/compare_transformers.py [part ...] [--cases N] [--seed S] [--family NAME ...]

Parts: models (logits, hidden states, losses, every gradient), adapters (LoRA by name, pattern,
all-linear), experts (LoRA on the matrices of experts and on routers, by `target_parameters`), training (AdamW and NorMuon curves), exports (folders that transformers and peft read). Needs torch,
transformers, peft and safetensors besides surogate; not a part of the tests that run on every change,
which have stored numbers instead. Shapes and options are drawn from the seed, so that a failure can
be repeated: each line names its case. Exit code 1 if anything was out of tolerance.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import surogate
import torch
import transformers
from draw_configs import FAMILIES, MIXTURES, STACKED, STATEFUL, draw_config, drawn
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

#: Tolerances in float32: relative L2 of logits and hidden states, absolute of losses, relative L2 of gradients.
LOGITS, LOSS, GRADIENT = 2e-5, 2e-5, 1e-4

#: The plain implementations of transformers.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}

#: Gradients with a smaller norm are noise.
NOTHING = 1e-6


class Report:
    """Counts comparisons and prints those that are out of tolerance."""

    def __init__(self) -> None:
        self.case, self.compared, self.failed = "", 0, 0
        self.worst: dict[str, float] = {}

    def check(self, what: str, found: float, allowed: float, kind: str | None = None) -> None:
        self.compared += 1
        kind = kind or what
        self.worst[kind] = max(self.worst.get(kind, 0.0), found / allowed)
        if not found <= allowed:
            self.failed += 1
            print(f"FAILED {self.case}: {what}: {found:.2e}, allowed {allowed:.0e}", flush=True)

    def end(self) -> int:
        """Prints the worst of every kind; returns the exit code."""
        worst = ", ".join(f"{kind} {share:.2f}" for kind, share in self.worst.items())
        print(f"{self.compared} comparisons, {self.failed} failed; worst shares of the tolerances: {worst}")
        return int(self.failed > 0)

    def fail(self, message: str) -> None:
        self.compared += 1
        self.failed += 1
        print(f"FAILED {self.case}: {message}", flush=True)


def relative(found, expected) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape:
        return float("inf")
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


def draw_model(rng: random.Random, folder: Path, dtype=torch.float32, calm: bool = False):
    """A random model, saved; norms and biases are not the ones and zeros that they start as.

    A `calm` one has small weights: curves of others drift apart from rounding alone.
    """
    torch.manual_seed(rng.randrange(1 << 30))
    config = draw_config(rng)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # others take no float64
    config.initializer_range = 0.02 if calm else config.initializer_range
    kind = AutoModelForImageTextToText if config.model_type == "muse_glimmer" else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        own = ("e_score_correction_bias", "expert_bias", "layer_scalar")
        correction = [of for name, of in model.named_buffers() if name.endswith(own)]
        biases = [of for name, of in model.named_parameters() if of.ndim == 1 or name.endswith("_bias")]
        for tensor in correction + biases:
            tensor.add_(torch.randn_like(tensor) * 0.2)
        if calm and config.model_type == "gemma4_text":  # whose scores are not scaled
            for name, parameter in model.named_parameters():
                if name.endswith("q_norm.weight"):
                    parameter.mul_(len(parameter) ** -0.5)
    model = model.to(dtype)
    model.save_pretrained(folder)
    if config.model_type == "olmo_hybrid":
        as_published(model, folder)
    elif config.model_type == "muse_glimmer":
        pass  # no other spelling is published
    elif rng.random() < 0.5 and config.model_type != "ministral3":  # transformers 4 does not have it
        old_spelling(folder / "config.json")
    return model


def as_published(model, folder: Path) -> None:
    """Names and shapes of published files: what transformers 5 writes here has parts of equal sizes, and names of norms that
    belong to other layers."""
    tensors = as_in_files(model.config, {name: of.contiguous() for name, of in model.state_dict().items()})
    save_file({name: of.clone() for name, of in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def old_spelling(path: Path) -> None:
    """The spelling of transformers 4: rope_theta, rope_scaling, torch_dtype."""
    config = json.loads(path.read_text())
    if config["model_type"] == "gemma4_text":
        return other_spelling(path, config)
    if rope := config.pop("rope_parameters", None):
        if "sliding_attention" in rope:
            if config["model_type"] == "gemma3_text":
                config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        if (share := rope.pop("partial_rotary_factor", None)) is not None:
            config["partial_rotary_factor"] = share
        config["rope_theta"] = rope.pop("rope_theta")
        is_null = rope["rope_type"] == "default" and config["model_type"] not in ("gpt_oss", "apertus")  # where null is its own scaling
        config["rope_scaling"] = None if is_null else rope
    config["torch_dtype"] = config.pop("dtype", "float32")
    path.write_text(json.dumps(config))


def other_spelling(path: Path, config: dict) -> None:
    """Heads of layers without a window by fields of their own, as Gemma 4's files have them."""
    full = config.pop("per_layer_config", {}).get(str(config["num_hidden_layers"] - 1), {})
    config["global_head_dim"] = full.get("head_dim", config["head_dim"])
    config["num_global_key_value_heads"] = full.get("num_key_value_heads")
    path.write_text(json.dumps(config))


def draw_batch(rng: random.Random, vocabulary: int) -> dict:
    """Rows of one of several kinds: ids, labels, and perhaps positions and weights."""
    rows, length = rng.choice([(1, 2), (1, 7), (2, 7), (3, 65), (5, 33), (1, 1 + rng.randrange(1, 80))])
    ids = np.array([[rng.randrange(vocabulary) for _ in range(length)] for _ in range(rows)])
    labels = np.where(np.random.default_rng(rng.randrange(1 << 30)).random(ids.shape) < 0.3, -100, ids)
    if rng.random() < 0.2:
        labels[:] = -100
        labels[rng.randrange(rows), rng.randrange(1, length)] = rng.randrange(vocabulary)
    kind, positions = rng.choice(["none", "packed", "shifted"]), None
    if kind == "packed":
        positions = np.stack([draw_documents(rng, length) for _ in range(rows)])
    elif kind == "shifted":
        positions = np.stack([np.arange(length) + rng.randrange(40) for _ in range(rows)])
    weights = None
    if rng.random() < 0.4:
        weights = np.array(
            [[rng.choice([0.0, 0.25, 1.0, 3.0]) for _ in range(length)] for _ in range(rows)], np.float32
        )
    if trained(labels, positions, weights) == 0:
        labels, weights = ids.copy(), None
        positions = None
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "weights": weights}


def draw_documents(rng: random.Random, length: int) -> np.ndarray:
    """Positions of documents that fill a row; some have one token."""
    positions: list[int] = []
    while len(positions) < length:
        size = min(rng.choice([1, 1, 2, 5, 9, 30]), length - len(positions))
        positions += range(size)
    return np.array(positions)


def documents(positions: np.ndarray) -> np.ndarray:
    """The number of the document that each position belongs to."""
    starts = np.ones(positions.shape, bool)
    starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return np.cumsum(starts, axis=1)


def target_weights(labels, positions, weights):
    """Targets [B, T] shifted to where they are predicted, and their weights, 0 where none."""
    rows, length = labels.shape
    positions = np.tile(np.arange(length), (rows, 1)) if positions is None else positions
    weights = np.ones(labels.shape, np.float32) if weights is None else weights
    document = documents(positions)
    targets, shifted = np.full(labels.shape, -100), np.zeros(labels.shape, np.float32)
    inside = document[:, 1:] == document[:, :-1]
    # A token of weight 0 is not trained.
    targets[:, :-1] = np.where(inside & (weights[:, 1:] != 0), labels[:, 1:], -100)
    shifted[:, :-1] = np.where(targets[:, :-1] != -100, weights[:, 1:], 0)
    return targets, shifted


def trained(labels, positions, weights) -> float:
    return float(target_weights(labels, positions, weights)[1].sum())


def masks(config, visible: torch.Tensor, dtype):
    """The mask, or one for each type of layer, that transformers adds to the scores."""

    def additive(seen: torch.Tensor) -> torch.Tensor:
        return torch.where(seen, 0.0, -1e30).to(dtype)[:, None]

    window = getattr(config, "sliding_window", None)
    near = torch.ones_like(visible) if window is None else torch.triu(torch.ones_like(visible), 1 - window)
    if config.model_type in ("mistral", "phi3", "phi4_multimodal", "ministral3", "mixtral", "starcoder2"):
        return additive(visible & near)
    by_type = ("gpt_oss", "qwen2_moe", "qwen2", "qwen3", "smollm3", "gemma2", "olmo3", "gemma3_text", "gemma4_text", "exaone4", "cohere2", "granite_swa", "muse_glimmer")
    if config.model_type in by_type:
        return {"full_attention": additive(visible), "sliding_attention": additive(visible & near)}
    return additive(visible)


def forget_lengths(model) -> None:
    """`dynamic` keeps the frequencies of longer batches that it has seen; a model that has not is the truth."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.max_seq_len_cached = module.original_max_seq_len
            module.inv_freq = module.original_inv_freq.clone()


def forward(model, inner, given: dict, mask) -> tuple:
    """Logits, and the input and output of every layer."""
    hidden: list = []
    decoder = inner.transformer if hasattr(inner, "transformer") else getattr(inner.model, "language_model", inner.model)
    layers = decoder.h if hasattr(decoder, "h") else decoder.layers
    embedded = lambda _m, inputs: hidden.append(inputs[0].detach())  # noqa: E731
    hooks = [layers[0].register_forward_pre_hook(embedded)]
    for layer in layers:
        take = lambda _m, _i, out: hidden.append((out[0] if isinstance(out, tuple) else out).detach())  # noqa: E731
        hooks.append(layer.register_forward_hook(take))
    logits = model(**given, attention_mask=mask, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, hidden


def by_document(model, inner, given: dict, document: torch.Tensor) -> tuple:
    """The same of each document alone: no mask separates them in a state."""
    rows = []
    for row in range(len(document)):
        cuts = [0, *(torch.nonzero(document[row].diff()).flatten() + 1).tolist(), document.shape[1]]
        parts = [
            forward(model, inner, {name: value[row : row + 1, a:b] for name, value in given.items()}, None)
            for a, b in zip(cuts, cuts[1:])
        ]
        logits, hidden = zip(*parts)
        rows.append((torch.cat(logits, 1), [torch.cat(states, 1) for states in zip(*hidden)]))
    logits, hidden = zip(*rows)
    return torch.cat(logits), [torch.cat(states) for states in zip(*hidden)]


def reference(model, batch: dict, dtype=torch.float32):
    """(logits, hidden states, token losses, sum of weighted losses, sum of weights) by transformers."""
    ids = torch.tensor(batch["input_ids"])
    rows, length = ids.shape
    positions = batch["position_ids"]
    positions = np.tile(np.arange(length), (rows, 1)) if positions is None else positions
    document = torch.tensor(documents(positions))
    visible = (document[:, :, None] == document[:, None, :]) & torch.tril(torch.ones(length, length, dtype=torch.bool))
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    forget_lengths(inner)
    given = dict(input_ids=ids, position_ids=torch.tensor(positions))
    if inner.config.model_type in STATEFUL:
        logits, hidden = by_document(model, inner, given, document)
    else:
        logits, hidden = forward(model, inner, given, masks(inner.config, visible, dtype))
    targets, weights = target_weights(batch["labels"], batch["position_ids"], batch["weights"])
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float() if dtype != torch.float64 else logits.flatten(0, 1),
        torch.tensor(targets).flatten(),
        ignore_index=-100,
        reduction="none",
    ).reshape(rows, length)
    weights = torch.tensor(weights)
    return logits, hidden, losses, (losses * weights).sum(), weights.sum()


def in_float64(model):
    """A copy in float64; GPT-2's scores are then not cast to float32 first."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if getattr(module, "reorder_and_upcast_attn", False):
            module.reorder_and_upcast_attn = False
    return exact


def as_in_files(config, tensors: dict) -> dict:
    """Stacked experts one by one, under the names of files."""
    if config.model_type == "olmo_hybrid":
        return convolutions_apart(config, tensors)
    if config.model_type == "granitemoehybrid":
        of = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}
        renamed = {f".experts.{name}": f".{other}" for name, other in of.items()} | {".router.weight": ".router.layer.weight"}
        return {re.sub(r"\.(experts\.\w+|router\.weight)$", lambda found: renamed[found[0]], name): value for name, value in tensors.items()}
    if config.model_type == "nemotron_h":
        return experts_apart(tensors)
    if config.model_type not in MIXTURES:
        return tensors
    layer, gate, up, down = MIXTURES[config.model_type]
    found = {}
    for name, value in tensors.items():
        if ".lora_" in name:
            found[name] = value
            continue
        name = name.replace(".mlp.gate.", f".{layer}.gate.").replace(".gate.moe_statics.", ".moe_statics.")
        before, stacked, last = name.partition(".feed_forward.experts." if layer == "feed_forward" else ".mlp.experts.")
        if not stacked:
            found[name] = value
            continue
        for number, matrix in enumerate(value):
            parts = zip((gate, up), matrix.chunk(2)) if last == "gate_up_proj" else [(down, matrix)]
            found |= {f"{before}.{layer}.experts.{number}.{part}.weight": of for part, of in parts}
    return found


def experts_apart(tensors: dict) -> dict:
    """Stacked experts of two matrices one by one, under the names that files of Nemotron-H have."""
    found = {}
    for name, value in tensors.items():
        before, stacked, last = name.partition(".mixer.experts.")
        matrices = enumerate(value) if stacked and ".lora_" not in name else ()
        found |= {f"{before}.mixer.experts.{number}.{last}.weight": of for number, of in matrices} or {name: value}
    return {re.sub(r"^model\.", "backbone.", name): of for name, of in found.items()}


def convolutions_apart(config, tensors: dict) -> dict:
    """The convolution of queries, keys and values as three."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    sizes = [keys, keys, config.linear_num_value_heads * config.linear_value_head_dim]
    found = {}
    for name, value in tensors.items():
        if name.endswith(".conv1d.weight"):
            parts = zip("qkv", value.split(sizes))
            found |= {name.replace(".conv1d.", f".{which}_conv1d."): part for which, part in parts}
        else:
            found[name] = value
    return found


class Expected:
    """What transformers gives for one batch, in one precision."""

    def __init__(self, model, batch: dict, names, dtype=torch.float32) -> None:
        model.zero_grad(set_to_none=True)
        logits, hidden, losses, total, weight = reference(model, batch, dtype)
        (total / weight).backward()
        self.logits, self.hidden = logits.detach(), hidden
        self.losses, self.loss = losses.detach(), (total / weight).item()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        self.gradients = {names(name): value for name, value in as_in_files(model.config, gradients).items()}


def compare_model(report: Report, model, engine: surogate.Model, batch: dict, names=lambda name: name) -> None:
    """Everything that `surogate.Model` gives for one batch. Where float32 itself loses more than the
    tolerance, which a second run of the reference in float64 measures, four times as much is allowed."""
    expected = Expected(model, batch, names)
    exact = Expected(in_float64(model), batch, names, torch.float64)
    found, states = engine.forward(batch["input_ids"], batch["position_ids"], hidden=True)
    noise = 4 * relative(expected.logits, exact.logits)
    report.check("logits", relative(found, expected.logits), max(LOGITS, noise))
    if len(states) != len(expected.hidden):
        report.fail(f"{len(states)} hidden states, expected {len(expected.hidden)}")
    for index, (state, of, precise) in enumerate(zip(states, expected.hidden, exact.hidden)):
        report.check(f"hidden {index}", relative(state, of), max(LOGITS, 4 * relative(of, precise)), "hidden")
    arguments = (batch["input_ids"], batch["labels"], batch["position_ids"], batch["weights"])
    value, grads = engine.loss_and_gradients(*arguments)
    each, _ = engine.loss_and_gradients(*arguments, per_token=True)
    noise = 4 * float((expected.losses - exact.losses).abs().max())
    report.check("loss", abs(value - expected.loss), max(LOSS, noise))
    report.check("token losses", float(np.abs(each - expected.losses.numpy()).max()), max(LOSS, noise))
    if set(grads) != set(expected.gradients):
        report.fail(f"gradients of other names: {sorted(set(grads) ^ set(expected.gradients))[:6]}")
    for name in set(grads) & set(expected.gradients):
        of, precise = expected.gradients[name], exact.gradients[name]
        if precise.norm() >= NOTHING:
            noise = 4 * relative(of, precise)
            report.check(f"gradient of {name}", relative(grads[name], of), max(GRADIENT, noise), "gradient")
        else:
            report.check(f"gradient of {name}, that is 0", float(np.linalg.norm(grads[name])), 1e-4, "zero gradient")


def models(report: Report, rng: random.Random, folder: Path) -> None:
    model = draw_model(rng, folder / "model")
    c = model.config
    described = {
        k: v for k, v in c.to_diff_dict().items() if not k.startswith(("summary_", "archi", "transf", "bos", "eos"))
    }
    report.case += f" {c.model_type} {described}"
    engine = surogate.load(folder / "model")
    for _ in range(2):
        batch = draw_batch(rng, c.vocab_size)
        compare_model(report, model, engine, batch)


def draw_targets(rng: random.Random, model):
    """target_modules for peft"""
    if model.config.model_type == "gpt2":
        return rng.choice(
            [
                "all-linear",
                ["c_attn"],
                ["c_fc"],
                ["attn.c_proj"],
                ["c_attn", "mlp.c_proj"],
                r".*\.(c_attn|c_fc)",
                r"transformer\.h\.0\.mlp\.c_.*",
            ]
        )
    if model.config.model_type in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        queries = "q_proj" if model.config.q_lora_rank is None else "q_b_proj"
        return rng.choice([["kv_b_proj"], [queries, "o_proj"], ["kv_a_proj_with_mqa"], r".*\.(kv_b|o)_proj"])
    if model.config.model_type in ("nemotron_h", "granitemoehybrid", "falcon_h1"):
        return rng.choice([["q_proj"], ["in_proj", "o_proj"], ["k_proj", "v_proj"], r".*\.(q|in)_proj"])
    if model.config.model_type == "lfm2_moe":
        return rng.choice([["q_proj"], r".*\.(q|in)_proj", ["k_proj", "out_proj"], r".*\.(out|v)_proj"])
    if model.config.model_type in [*MIXTURES, "gpt_oss"]:
        return rng.choice([["q_proj"], ["q_proj", "v_proj"], ["k_proj", "o_proj"], r".*\.(q|o)_proj"])
    if model.config.model_type == "starcoder2":
        return rng.choice(["all-linear", ["c_fc", "q_proj"], ["k_proj", "c_proj"], r".*\.(q|o|c)_proj"])
    if model.config.model_type == "lfm2":
        named = [["w1", "w2"], r".*\.(q|in)_proj", ["out_proj", "k_proj"], r".*\.(out|v)_proj"]
        return rng.choice(["all-linear", *named])
    if model.config.model_type in ("muse_glimmer", "phi4_multimodal"):  # names of linears are those of towers, too
        within = r"model\.language_model" if model.config.model_type == "muse_glimmer" else "model"
        return within + r"\.layers\..*\." + rng.choice(["o_proj", "(qkv|q|gate_up)_proj", "(o|down)_proj", r"mlp\..*_proj"])
    if model.config.model_type == "apertus":
        return rng.choice(["all-linear", ["up_proj", "q_proj"], ["k_proj", "down_proj"], r".*\.(q|o|up)_proj"])
    if model.config.model_type in ("phi3", "glm4"):
        attention = ["qkv_proj"] if model.config.model_type == "phi3" else ["q_proj", "v_proj"]
        return rng.choice(
            ["all-linear", attention, ["gate_up_proj"], [*attention, "down_proj"], r".*\.(o|gate_up)_proj"]
        )
    return rng.choice(
        [
            "all-linear",
            ["q_proj"],
            ["down_proj"],
            ["q_proj", "v_proj", "gate_proj"],
            ["k_proj", "up_proj", "o_proj"],
            r".*\.(q|o)_proj",
            r"model\.layers\.0\.mlp\..*_proj",
            r".*layers\.\d\.self_attn\.[kv]_proj",
        ]
    )


def draw_variant(rng: random.Random, gpt2: bool) -> dict:
    """Options of PEFT that change ranks, scales and targets from module to module; often none."""
    if rng.random() < 0.4:
        return {}
    options: dict = {"use_rslora": rng.random() < 0.5}
    if gpt2:
        return options | rng.choice([{}, {"rank_pattern": {"c_attn": 5}}, {"alpha_pattern": {r".*mlp\..*": 9}}])
    if rng.random() < 0.5:
        options["rank_pattern"] = rng.choice([{"q_proj": 5}, {r".*\.0\..*": 2, "v_proj": 7}, {"mlp.down_proj": 6}])
    if rng.random() < 0.5:
        options["alpha_pattern"] = rng.choice([{"q_proj": 3}, {r".*self_attn\..*": 9}, {"^model.layers.0.*": 5}])
    if rng.random() < 0.3:
        options["exclude_modules"] = rng.choice([["v_proj"], ["mlp.up_proj", "k_proj"], r".*\.[ko]_proj"])
    return options


def sparse(model) -> list[int]:
    """The layers with experts: configs may keep all others dense."""
    has_experts = lambda layer: hasattr(layer.mlp, "experts") or hasattr(layer, "experts")  # noqa: E731
    return [number for number, layer in enumerate(model.model.layers) if has_experts(layer)]


def draw_parameters(rng: random.Random, model) -> dict:
    """Targets of peft that are parameters: those of experts, the router's, with linears of attention or without."""
    router = "mlp.router.weight" if model.config.model_type == "gpt_oss" else "mlp.gate.weight"
    apart = model.config.model_type == "gemma4_text"  # experts are next to the feed-forward layer, not in its place
    gate_up, down = (("" if apart else "mlp.") + f"experts.{name}" for name in ("gate_up_proj", "down_proj"))
    with_router = [] if apart else [[down, router], [router]]  # a linear module there
    parameters = rng.choice([[gate_up, down], [gate_up], [down], ["experts.gate_up_proj", down], *with_router])
    if rng.random() < 0.3:
        parameters = [f"layers.{rng.choice(sparse(model))}.{name}" for name in parameters if name in (gate_up, down)]
    modules = rng.choice([[], draw_targets(rng, model)])
    return {"target_modules": modules, "target_parameters": parameters, "use_rslora": rng.random() < 0.3}


def adapt(rng: random.Random, model, deviation: float = 0.3, parameters: bool = False):
    """A peft model with random A and B, on the parameters of experts if wanted."""
    from peft import LoraConfig, get_peft_model

    r, gpt2 = rng.choice([1, 2, 3, 4, 8, 16]), model.config.model_type == "gpt2"
    modules = {"target_modules": [] if parameters else draw_targets(rng, model)}
    config = LoraConfig(
        r=r,
        lora_alpha=rng.choice([1, 4, 16, 2 * r]),
        lora_dropout=0.0 if parameters else rng.choice([0.0, 0.1]),
        task_type="CAUSAL_LM",
        fan_in_fan_out=gpt2,
        **(draw_parameters(rng, model) if parameters else modules | draw_variant(rng, gpt2)),
    )
    adapted = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, deviation)
    return adapted


def adapter_name(name: str) -> str:
    return name.replace(".default", "")


def experts(report: Report, rng: random.Random, folder: Path) -> None:
    """Adapters on the parameters of experts, of families that have them."""
    stacked = [family for family in drawn if family in STACKED]
    if not stacked:
        report.case += " (no mixture among the families)"
        return
    every, drawn[:] = list(drawn), stacked
    try:
        adapters(report, rng, folder, parameters=True)
    finally:
        drawn[:] = every


def adapters(report: Report, rng: random.Random, folder: Path, parameters: bool = False) -> None:
    model = draw_model(rng, folder / "model")
    if parameters and not sparse(model):
        return
    adapted = adapt(rng, model, parameters=parameters)
    adapted.save_pretrained(folder / "adapter")
    of = adapted.peft_config["default"]
    targets = f"{of.target_modules or ''} {of.target_parameters or ''}"
    report.case += f" {model.config.model_type} r {of.r} alpha {of.lora_alpha} {targets}"
    engine = surogate.load(folder / "model", adapter=folder / "adapter")
    batch = draw_batch(rng, model.config.vocab_size)
    compare_model(report, adapted, engine, batch, adapter_name)
    merged = adapted.merge_and_unload()
    logits, exact = reference(merged, batch)[0].detach(), reference(in_float64(merged), batch, torch.float64)[0].detach()
    found = engine.forward(batch["input_ids"], batch["position_ids"])
    report.check("merged logits", relative(found, logits), max(2 * LOGITS, 4 * relative(logits, exact)))


def draw_steps(rng: random.Random, vocabulary: int, steps: int) -> list[dict]:
    """A batch for each step: arrays [accumulation, B, T]; some packed, some weighted."""
    accumulation, rows, length = rng.choice([(1, 2, 16), (2, 2, 13), (4, 1, 24), (3, 3, 9)])
    packed, weighted = rng.random() < 0.4, rng.random() < 0.4
    batches = []
    for _ in range(steps):
        shape = (accumulation, rows, length)
        numbers = np.random.default_rng(rng.randrange(1 << 30))
        ids = numbers.integers(0, vocabulary, shape)
        batch = {"input_ids": ids, "labels": np.where(numbers.random(shape) < 0.3, -100, ids)}
        if packed:
            flat = [draw_documents(rng, length) for _ in range(accumulation * rows)]
            batch["position_ids"] = np.stack(flat).reshape(shape)
        if weighted:
            batch["weights"] = numbers.choice([0.5, 1.0, 2.0], shape).astype(np.float32)
        batches.append(batch)
    return batches


class NorMuon(torch.optim.Optimizer):
    """NorMuon by its paper: the momentum of a matrix made orthogonal, its rows evened out, steps of one size."""

    def __init__(self, matrices: list, decay: float, momentum: float, beta2: float, cautious: bool) -> None:
        super().__init__([{"params": matrices}], {"lr": 0.0})
        self.decay, self.momentum, self.beta2, self.cautious = decay, momentum, beta2, cautious

    @staticmethod
    def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
        x = matrix / (matrix.norm() + 1e-7)
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        return x.T if tall else x

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, gradient, rate = self.state[p], p.grad.double(), group["lr"]
                first = state.get("first", torch.zeros_like(gradient))
                state["first"] = self.momentum * first + (1 - self.momentum) * gradient
                direction = self.orthogonal(state["first"])
                squares = direction.square().mean(dim=1, keepdim=True)
                state["rows"] = self.beta2 * state.get("rows", 0.0) + (1 - self.beta2) * squares
                even = direction / (state["rows"].sqrt() + 1e-8)
                norm = even.norm()
                kept = (
                    torch.where(even * p >= 0, 1 - rate * self.decay, 1.0) if self.cautious else 1 - rate * self.decay
                )
                # Without a gradient so far there is no direction.
                step = 0.2 * rate * p.numel() ** 0.5 / norm * even if norm > 0 else torch.zeros_like(even)
                p.copy_(p * kept - step)


def tables(model) -> list:
    """Embeddings and the output head."""
    found = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    return [*found, model.get_output_embeddings().weight]


class Torch:
    """Training as torch does it: AdamW, decay of matrices alone, clipping by the global norm. With `normuon` that
    takes all matrices but embeddings and head."""

    def __init__(
        self, model, decay: float, clip: float, betas: tuple[float, float], epsilon: float, normuon: dict | None = None
    ) -> None:
        self.model, self.clip = model, clip
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        trained = list(named.values())
        decayed = {id(p) for name, p in named.items() if p.ndim > 1 and not name.endswith("_bias")}
        self.normuon = None
        if normuon is not None:
            apart = {id(p) for p in tables(model)}
            matrices = [p for p in trained if p.ndim > 1 and id(p) not in apart]
            self.normuon = NorMuon(matrices, decay, **normuon)
            taken = {id(p) for p in matrices}
            trained = [p for p in trained if id(p) not in taken]
        groups = [
            {"params": [p for p in trained if id(p) in decayed], "weight_decay": decay},
            {"params": [p for p in trained if id(p) not in decayed], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]] or [{"params": [torch.zeros(1, requires_grad=True)]}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=epsilon)

    def step(self, batch: dict, rate: float) -> tuple[float, float]:
        """(loss before the update, norm before clipping)"""
        self.model.zero_grad()
        micro = [{k: v[i] for k, v in batch.items()} for i in range(len(batch["input_ids"]))]
        micro = [{"position_ids": None, "weights": None} | part for part in micro]
        weight = sum(trained(m["labels"], m["position_ids"], m["weights"]) for m in micro)
        loss = 0.0
        for part in micro:
            share = reference(self.model, part)[3] / weight
            share.backward()
            loss += share.item()
        optimizers = [self.optimizer] if self.normuon is None else [self.optimizer, self.normuon]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        parameters = [p for group in groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.clip or float("inf")).item()
        for group in groups:
            group["lr"] = rate
        for optimizer in optimizers:
            optimizer.step()
        return loss, norm


def training(report: Report, rng: random.Random, folder: Path) -> None:
    model = draw_model(rng, folder / "model", calm=True).requires_grad_(True)
    decay, clip = rng.choice([0.0, 0.1, 0.5]), rng.choice([0.0, 0.5, 1.0, 1000.0])
    betas, epsilon = rng.choice([(0.9, 0.999), (0.8, 0.95)]), rng.choice([1e-8, 1e-6])
    options = {
        "model": folder / "model",
        "torch_dtype": "float32",
        "optimizer": "adamw",
        "lora": False,
        "device": "cpu",
        "weight_decay": decay,
        "max_grad_norm": clip,
        "adamw_beta1": betas[0],
        "adamw_beta2": betas[1],
        "adamw_epsilon": epsilon,
    }
    normuon = None
    stacked = model.config.model_type in [*MIXTURES, "gpt_oss", "nemotron_h", "granitemoehybrid"] or getattr(model.config, "enable_moe_block", False)
    stacked = stacked or any(of.ndim > 2 for of in model.parameters())  # of convolutions
    if rng.random() < 0.5 and not stacked:  # stacked matrices are one parameter here
        normuon = {
            "momentum": rng.choice([0.95, 0.8]),
            "beta2": rng.choice([0.95, 0.5]),
            "cautious": rng.random() < 0.5,
        }
        options |= {
            "optimizer": "normuon",
            "normuon_momentum": normuon["momentum"],
            "normuon_beta2": normuon["beta2"],
            "normuon_cautious_wd": normuon["cautious"],
        }
    names = lambda name: name  # noqa: E731
    if rng.random() < 0.5:
        model = adapt(rng, model, 0.05)
        model.peft_config["default"].lora_dropout = 0.0
        model.save_pretrained(folder / "adapter")
        options |= {"lora": True, "adapter": folder / "adapter"}
        names = adapter_name
    report.case += f" {model.config.model_type} lora {options['lora']} decay {decay} clip {clip}"
    report.case += f" {options['optimizer']}"
    trainer, torch_run = surogate.Trainer(options), Torch(model, decay, clip, betas, epsilon, normuon)
    for step, batch in enumerate(draw_steps(rng, model.config.vocab_size, 20)):
        rate = 1e-3 * min(1.0, step / 5)
        loss, norm = torch_run.step(batch, rate)
        metrics = trainer.step(batch, learning_rate=rate)
        report.check(f"loss of step {step}", abs(metrics["loss"] - loss) / loss, 1e-4, "training loss")
        report.check(f"norm of step {step}", abs(metrics["grad_norm"] - norm) / norm, 1e-3, "training norm")
    trainer.export(folder / "result")
    result = read_folder(folder / "result")
    trained = {name: of.detach() for name, of in model.named_parameters() if of.requires_grad}
    for name, weight in as_in_files(model.config, trained).items():
        far = np.abs(result[names(name)] - weight.numpy()) > 5e-5
        report.check(f"trained {name}", far.mean(), 1e-3, "trained weights")


def named_linears(config) -> list[str]:
    """Modules that adapters of an export are on."""
    if config.model_type == "gpt2":
        return ["c_attn", "mlp.c_proj"]
    if config.model_type == "lfm2_moe":
        return ["out_proj", "q_proj"]
    if config.model_type == "starcoder2":
        return ["o_proj", "c_proj"]
    if config.model_type in ("mixtral", "minimax_m2", "nemotron_h", "granitemoehybrid"):
        return ["o_proj", "q_proj"]
    return ["out_proj", "w2"] if config.model_type == "lfm2" else ["o_proj", "down_proj"]


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file

    files = [load_file(file) for file in folder.glob("*.safetensors")]
    return {name: value.float().numpy() for file in files for name, value in file.items()}


def exports(report: Report, rng: random.Random, folder: Path) -> None:
    dtype = rng.choice([torch.float32, torch.bfloat16])
    word = str(dtype).removeprefix("torch.")
    base = draw_model(rng, folder / "model", dtype)
    options = {"model": folder / "model", "device": "cpu", "learning_rate": 1e-2, "lora": rng.random() < 0.5}
    options["optimizer"] = rng.choice(["adamw", "adamw_8bit"])
    if options["lora"]:
        options["lora_rank"] = rng.choice([1, 3, 8])
        options["lora_target_modules"] = rng.choice(
            [["all-linear"], named_linears(base.config)]
        )
        options["lora_dtype"] = rng.choice(["float32", "bfloat16"])
    c = base.config
    chosen = {key: value for key, value in options.items() if key != "model"}
    report.case += f" {word} tied {c.tie_word_embeddings} {c.model_type} {chosen}"
    trainer = surogate.Trainer(options)
    for batch in draw_steps(rng, c.vocab_size, 3):
        trainer.step(batch, learning_rate=1e-2)
    trainer.export(folder / "result")
    kind = AutoModelForImageTextToText if c.model_type == "muse_glimmer" else AutoModelForCausalLM
    if options["lora"]:
        from peft import PeftModel

        fresh = kind.from_pretrained(folder / "model", dtype=torch.float32, **EAGER)
        model = PeftModel.from_pretrained(fresh, folder / "result").eval()
        engine = surogate.load(folder / "model", adapter=folder / "result")
    else:
        loaded, notes = kind.from_pretrained(folder / "result", output_loading_info=True, **EAGER)
        if any(notes[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            report.fail(f"transformers says {notes}")
        if loaded.dtype != dtype:
            report.fail(f"transformers loads {loaded.dtype}, expected {dtype}")
        model, engine = loaded.float().eval(), surogate.load(folder / "result")
        for module in model.modules():  # no tensor of files: rounded by the type that it was made in
            if hasattr(module, "scalar_embed_scale"):
                module.embed_scale.fill_(module.scalar_embed_scale)
    batch = draw_batch(rng, c.vocab_size)
    logits = reference(model, batch)[0].detach()
    found = engine.forward(batch["input_ids"], batch["position_ids"])
    report.check("logits of the export", relative(found, logits), LOGITS)


PARTS = {"models": models, "adapters": adapters, "experts": experts, "training": training, "exports": exports}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="draw of these alone")
    options = parser.parse_args()
    drawn[:] = options.family or FAMILIES
    report = Report()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}")
    for part in options.parts or PARTS:
        for case in range(options.seed, options.seed + options.cases):
            report.case = f"{part} {case}"
            with tempfile.TemporaryDirectory() as folder:
                try:
                    PARTS[part](report, random.Random(f"{part} {case}"), Path(folder))
                except Exception as error:
                    report.fail(f"{type(error).__name__}: {error}")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
