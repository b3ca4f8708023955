"""Rates of training on images: LoRA of rank 16 on the text of random shapes, eight images of about one megapixel a step.

    images.py TOKENIZER SHAPE [--layouts NAME...] [--seconds 6] [--peer] [--options JSON] [--classes] [--rows FILE]

TOKENIZER is a folder with the tokenizer of Qwen3. Writes a model of SHAPE, images and conversations with one each, and runs
`surogate sft` on them: rows packed or padded, images of one size or of four. Prints a line for each: tokens and images a second,
MFU, the share of the floor, and what the plan said. The floor is the time of the products and of attention alone, tower included:
products at 665 TFLOP/s, attention at 643 and 519 forward and backward, and in the tower, whose heads have 64 or 72 columns, at 435
(cuDNN with heads of 64), all on an H200. Neither it nor MFU counts adapters, padding or work that is done twice; both count
the logits of all tokens, of which a run computes those of the trained tokens. With `--peer` also
transformers with adapters by hand on the first batch, compiled layers, PyTorch's attention.
"""

import argparse
import json
import shutil
import tempfile
import time
import zlib
from pathlib import Path

import classes
import numpy as np
import one_run
import surogate

PRODUCTS, TOWER, FORWARD, BACKWARD, PEAK = 665e12, 435e12, 643e12, 519e12, 989.4e12
IMAGES = 8
#: Rows with each image, so that an epoch has many steps.
REPEATS = 16
#: Tokens of a row that has one image.
LONGEST = {"qwen3-vl": 1200, "gemma3": 448}
SIZES = {"equal": [(1024, 1024)], "mixed": [(1024, 1024), (512, 512), (256, 384), (768, 512)]}
#: The texts around images in the tokenizer, and what they are for a family.
PLACES = {"<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|image_pad|>": 151655}
GEMMA = {
    "<|vision_start|>": "<start_of_image>",
    "<|vision_end|>": "<end_of_image>",
    "<|image_pad|>": "<image_soft_token>",
}
SHAPES = {
    "qwen3-vl-2b": (
        {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
        {"hidden_size": 1024, "depth": 24, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]},
    ),
    "qwen3-vl-8b": (
        {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
        {"hidden_size": 1152, "depth": 27, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]},
    ),
    "gemma3-4b": (
        {"hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 8, "intermediate_size": 10240},
        {"hidden_size": 1152, "num_hidden_layers": 27, "intermediate_size": 4304},
    ),
}


def qwen(shape):
    """`config.json` and `preprocessor_config.json`: images keep their size."""
    text, vision = SHAPES[shape]
    tied = shape.endswith("2b")
    text = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied,
            "max_position_embeddings": 32768, "model_type": "qwen3_vl_text",
            "rope_parameters": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_theta": 5000000.0,
                                "rope_type": "default"}} | text  # fmt: skip
    vision = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "num_heads": 16,
              "num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh", "model_type": "qwen3_vl",
              "out_hidden_size": text["hidden_size"]} | vision  # fmt: skip
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": 151655,
              "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
              "tie_word_embeddings": tied, "text_config": text, "vision_config": vision}  # fmt: skip
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
                 "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
                 "size": {"shortest_edge": 65536, "longest_edge": 16777216}}  # fmt: skip
    return config, processor, "<|vision_start|><|image_pad|><|vision_end|>"


def gemma(shape):
    """The same: every image becomes 896 × 896."""
    text, vision = SHAPES[shape]
    text = {"num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "rms_norm_eps": 1e-6, "sliding_window": 1024,
            "max_position_embeddings": 131072, "model_type": "gemma3_text", "query_pre_attn_scalar": 256,
            "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 6} | text  # fmt: skip
    vision = {"num_attention_heads": 16, "image_size": 896, "patch_size": 14, "hidden_act": "gelu_pytorch_tanh",
              "layer_norm_eps": 1e-6, "model_type": "siglip_vision_model", "vision_use_head": False} | vision  # fmt: skip
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": 151655,
              "boi_token_index": 151652, "eoi_token_index": 151653, "mm_tokens_per_image": 256, "tie_word_embeddings": True,
              "text_config": text, "vision_config": vision}  # fmt: skip
    processor = {"image_processor_type": "Gemma3ImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
                 "size": {"height": 896, "width": 896}}  # fmt: skip
    return config, processor, "<start_of_image>"


def model_of(base, shape, tokenizer):
    """The folder of the model, without weights."""
    config, processor, place = (qwen if shape.startswith("qwen") else gemma)(shape)
    model = base / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    (model / "preprocessor_config.json").write_text(json.dumps(processor))
    words = (Path(tokenizer) / "tokenizer.json").read_text()
    for text in PLACES:
        words = words.replace(f'"{text}"', f'"{GEMMA[text] if shape.startswith("gemma") else text}"')
    (model / "tokenizer.json").write_text(words)
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'image' %}" + place + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
    return model


def png(pixels):
    """The file of an image, uint8 [H, W, 3]."""

    def chunk(kind, content):
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    height, width, _ = pixels.shape
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def rows_of(folder, sizes, count):
    """Conversations about one image each; the images are smooth, as photos are, with some noise."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        height, width = sizes[number % len(sizes)]
        ramp = np.add.outer(np.arange(height), np.arange(width))[..., None] // 9
        noise = rng.integers(0, 30, (height // 8, width // 8, 3)).repeat(8, 0).repeat(8, 1)
        path = folder / f"{height}x{width}-{number}.png"
        path.write_bytes(png(((ramp + noise) % 256).astype(np.uint8)))
        question = [{"type": "image", "image": path.name}, {"type": "text", "text": "What is in this picture? " * 4}]
        answer = "A gradient from the upper left to the lower right, with coarse noise on it. " * 6
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * REPEATS))
    return path


def work_of(model, sizes, tokens):
    """FLOPs of products, and of attention in the tower, forward and backward: for a row of this many tokens with an image, in the mean."""
    config = json.loads((model / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    hidden, heads, keys, size = (
        text[of] for of in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layer = hidden * size * (2 * heads + 2 * keys) + 3 * hidden * text["intermediate_size"]
    weights = text["num_hidden_layers"] * layer + hidden * text["vocab_size"]
    wide, inner, depth = (
        vision["hidden_size"],
        vision["intermediate_size"],
        vision.get("depth") or vision["num_hidden_layers"],
    )
    products = tower = forward = backward = 0.0
    for height, width in sizes:
        side = vision["patch_size"]
        patches = (896 // side) ** 2 if config["model_type"] == "gemma3" else height * width // side**2
        # Frozen weights: forward, and backward to the values before them; the tower forward alone.
        products += 4.0 * weights * tokens + 2.0 * depth * (4 * wide * wide + 2 * wide * inner) * patches
        pairs = text["num_hidden_layers"] * heads * size * tokens * tokens / 2
        forward += 4.0 * pairs
        tower += 4.0 * depth * wide * patches * patches
        backward += 10.0 * pairs
    return [of / len(sizes) for of in (products, tower, forward, backward)]


def measure(name, model, rows, a, per_row, **options):
    """Prints the line of a run. `per_row`: tokens of a row in the mean, and the work of one."""
    folder = rows.parent / name.replace(" ", "-")
    folder.mkdir()
    (folder / "model").symlink_to(model)
    values = {"datasets": [{"path": str(rows), "type": "conversation"}], "lora": True, "lora_rank": 16, "lora_dropout": 0.0,
              "gradient_accumulation_steps": 1, "validation_split_ratio": 0.0, "data_cache": "off", "num_epochs": 100000,
              "debug_time_breakdown": a.classes}  # fmt: skip
    run = one_run.write_run(folder, "cuda", values | options | a.options)
    try:
        found = one_run.watch(run, folder / "output", 3.0, a.seconds, 240)
    except one_run.Failed as problem:
        print(f"| {name} | FAILED: {str(problem)[-400:]!r} |", flush=True)
        return
    tokens, work = per_row
    rate = found["mean_tokens_per_second"] / tokens
    floor = sum(of / at for of, at in zip(work, (PRODUCTS, TOWER, FORWARD, BACKWARD), strict=True))
    seconds = found["seconds"] / found["steps"]
    off = f"{found['planned_seconds_per_step'] / seconds - 1:+.1%}" if found["planned_seconds_per_step"] else ""
    planned, used = (of / one_run.GIB for of in (found["planned_memory"], found["used"]))
    print(f"| {name} | {found['mean_tokens_per_second']:.0f} | {rate:.1f} | {seconds * 1e3:.1f} | {found['tokens_per_step']:.0f} | "
          f"{sum(work) * rate / PEAK:.1%} | {floor * rate:.2f} | {off} | {planned:.2f} | {used:.2f} |",
          flush=True)  # fmt: skip
    if a.classes:
        print(f"\n{classes.markdown(found)}\n", flush=True)
    if a.rows:
        with a.rows.open("a") as record:
            record.write(json.dumps({"name": name, **found}) + "\n")


def peer(model, rows, steps):
    """The first batch in transformers: adapters by hand, as peft has them, on the linears of the text."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    class Adapted(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, of = base, dict(device="cuda", dtype=torch.bfloat16)
            self.a = torch.nn.Parameter(torch.randn(16, base.in_features, **of) * 0.01)
            self.b = torch.nn.Parameter(torch.zeros(base.out_features, 16, **of))

        def forward(self, x):
            return self.base(x) + (x @ self.a.T) @ self.b.T

    config = AutoConfig.from_pretrained(model)
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        net = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    net.requires_grad_(False)
    for layer in net.model.language_model.layers:
        for part, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")),
                            (layer.mlp, ("gate_proj", "up_proj", "down_proj"))):  # fmt: skip
            for of in names:
                setattr(part, of, Adapted(getattr(part, of)))
    net.gradient_checkpointing_enable({"use_reentrant": False})
    net.train()
    for layer in net.model.language_model.layers:
        layer.compile()
    tokenizer = surogate.Tokenizer(model)
    batch, pictures = [], []
    for line in rows.read_text().splitlines()[:IMAGES]:
        messages = json.loads(line)["messages"]
        path = rows.parent / messages[0]["content"][0].pop("image")
        batch.append(tokenizer.labels(messages, images=[path]))
        pictures.append(surogate.process_images(model, [path])[0])
    longest = max(len(ids) for ids, *_ in batch)
    ids = np.full((IMAGES, longest), 151643)
    labels = np.full((IMAGES, longest), -100)
    for row, (own, marks, *_) in enumerate(batch):
        ids[row, : len(own)], labels[row, : len(own)] = own, marks
    views = [(of["views"][0].astype(np.float32) / 255 - 0.5) / 0.5 for of in pictures]
    if config.model_type == "gemma3":
        own = dict(pixel_values=np.stack(views).transpose(0, 3, 1, 2), token_type_ids=ids == 151655)
    else:
        patches = []
        for view, of in zip(views, pictures, strict=True):
            height, width = of["grid"]
            x = view.reshape(height // 2, 2, 16, width // 2, 2, 16, 3).transpose(0, 3, 1, 4, 6, 2, 5)
            patches.append(np.repeat(x[:, :, :, :, :, None], 2, 5).reshape(height * width, -1))
        own = dict(pixel_values=np.concatenate(patches), mm_token_type_ids=ids == 151655,
                   image_grid_thw=np.array([[1, *of["grid"]] for of in pictures]))  # fmt: skip
    own |= dict(input_ids=ids, labels=labels, attention_mask=ids != 151643)
    types = {"pixel_values": torch.bfloat16, "mm_token_type_ids": torch.int}
    given = {name: torch.tensor(of, device="cuda", dtype=types.get(name, torch.long)) for name, of in own.items()}
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    seconds = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        net(**given).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    median = sorted(seconds[3:])[len(seconds[3:]) // 2]
    tokens = sum(len(ids) for ids, *_ in batch)
    memory = torch.cuda.max_memory_allocated() / one_run.GIB
    print(f"| transformers, padded | {tokens / median:.0f} | {IMAGES / median:.1f} | {median * 1e3:.1f} | {tokens} | | | | | "
          f"{memory:.2f} |", flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("shape", choices=list(SHAPES))
    layouts = [f"{sizes} {layout}" for sizes in SIZES for layout in ("packed", "padded")]
    parser.add_argument("--layouts", nargs="*", choices=layouts, default=layouts)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--classes", action="store_true")
    parser.add_argument("--rows", type=Path)
    a = parser.parse_args()
    base = Path(tempfile.mkdtemp())
    model = model_of(base, a.shape, a.tokenizer)
    print(f"{a.shape}, {a.options}\n| rows | tokens/s | images/s | step, ms | tokens | MFU | of the floor | plan off by | "
          "planned, GiB | used |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|", flush=True)  # fmt: skip
    longest = LONGEST[a.shape.rsplit("-", 1)[0]]
    for name, sizes in SIZES.items():
        folder = base / name
        folder.mkdir()
        rows = rows_of(folder, sizes, 5 * IMAGES)
        tokenizer = surogate.Tokenizer(model)
        tokens = []
        for line in rows.read_text().splitlines()[: len(sizes)]:
            messages = json.loads(line)["messages"]
            path = folder / messages[0]["content"][0].pop("image")
            tokens.append(len(tokenizer.labels(messages, images=[path])[0]))
        mean = sum(tokens) / len(tokens)
        per_row = mean, [sum(of) / len(tokens) for of in zip(*(work_of(model, [s], t) for s, t in zip(sizes, tokens)))]
        layout = {
            "packed": {"sample_packing": True, "sequence_len": IMAGES * longest, "per_device_train_batch_size": 1},
            "padded": {"sample_packing": False, "sequence_len": longest, "per_device_train_batch_size": IMAGES},
        }
        for kind, options in layout.items():
            if f"{name} {kind}" in a.layouts:
                measure(f"{name} {kind}", model, rows, a, per_row, **options)
    if a.peer:  # last: it keeps memory of the GPU
        peer(model, base / "equal" / "rows.jsonl", 12)
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
