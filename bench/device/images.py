"""Rates of training on images: LoRA on the text of random Qwen3-VL shapes, eight images of one megapixel a step.

`images.py TOKENIZER TEMPLATE SHAPE STEPS [fp8_hybrid] [qlora_bnb] [peer]` writes a folder, images and rows, and prints a line for each
layout of the rows, and one for packed rows with each option; with `peer`, also one for transformers with adapters of rank 16 by hand
on the same batch, compiled layers, and PyTorch's attention.
"""

import json
import shutil
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import surogate

TEXT = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
        "model_type": "qwen3_vl_text", "rope_parameters": {"mrope_interleaved": True, "mrope_section": [24, 20, 20],
                                                           "rope_theta": 5000000.0, "rope_type": "default"}}  # fmt: skip
VISION = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "num_heads": 16,
          "num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh", "model_type": "qwen3_vl"}  # fmt: skip
SHAPES = {
    "2b": (
        {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
        {"hidden_size": 1024, "depth": 24, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]},
    ),
    "8b": (
        {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
        {"hidden_size": 1152, "depth": 27, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]},
    ),
}
#: Bounds of the processor's area: images keep their size.
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
             "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}  # fmt: skip
IMAGES = 8


def png(pixels):
    def chunk(kind, content):
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    height, width, _ = pixels.shape
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def folder_of(base, shape, tokenizer, template):
    text, vision = SHAPES[shape]
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": 151655,
              "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
              "tie_word_embeddings": shape == "2b", "text_config": TEXT | text | {"tie_word_embeddings": shape == "2b"},
              "vision_config": VISION | vision | {"out_hidden_size": text["hidden_size"]}}  # fmt: skip
    model = base / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    (model / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    for path in Path(tokenizer).glob("*.json"):
        shutil.copy(path, model)
    shutil.copy(template, model / "chat_template.jinja")
    return model


def rows_of(base, sizes, count):
    """Rows of one image and some words; the images are smooth, as photos are, with some noise."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        height, width = sizes[number % len(sizes)]
        ramp = np.add.outer(np.arange(height), np.arange(width))[..., None] // 9
        noise = rng.integers(0, 30, (height // 8, width // 8, 3)).repeat(8, 0).repeat(8, 1)
        path = base / f"{height}x{width}-{number}.png"
        path.write_bytes(png(((ramp + noise) % 256).astype(np.uint8)))
        asked = [{"type": "image", "image": path.name}, {"type": "text", "text": "What is in this picture? " * 4}]
        answer = "A gradient from the upper left to the lower right, with coarse noise on it. " * 6
        rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]})
    path = base / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def measure(name, model, rows, steps, **options):
    run = {"model": str(model), "init": "random", "torch_dtype": "bfloat16", "lora_rank": 16, "lora_dropout": 0.0,
           "optimizer": "adamw_8bit", "gradient_accumulation_steps": 1, "max_steps": 1000, "learning_rate": 1e-5,
           "datasets": [{"path": str(rows), "type": "conversation"}], "validation_split_ratio": 0.0, "data_cache": "off",
           "output_dir": str(rows.parent / "run"), **options}  # fmt: skip
    begin = time.perf_counter()
    trainer = surogate.Trainer(run)
    seconds, tokens = [], []
    for _ in range(steps):
        begin_step = time.perf_counter()
        metrics = trainer.step()
        seconds.append(time.perf_counter() - begin_step)
        tokens.append(metrics["tokens"])
        memory = (metrics["memory"] or 0) / 1e9
    kept = sorted(zip(seconds[3:], tokens[3:], strict=True))
    median, of = kept[len(kept) // 2]
    first = begin_step - begin
    print(f"{name:28} {of / median:9.0f} tokens/s  {median * 1e3:8.1f} ms  {of:6d} tokens  {memory:6.2f} GB  "
          f"loss {metrics['loss']:.3f}  ({first:.0f} s in all)", flush=True)  # fmt: skip
    return trainer


def peer(model, rows, steps):
    """The same batch in transformers: adapters by hand, as peft has them, on the linears of the text."""
    import torch
    from transformers import AutoConfig, Qwen3VLForConditionalGeneration

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
        net = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
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
    patches = []
    for of in pictures:
        view = (of["views"][0].astype(np.float32) / 255 - 0.5) / 0.5
        height, width = of["grid"]
        x = view.reshape(height // 2, 2, 16, width // 2, 2, 16, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        patches.append(np.repeat(x[:, :, :, :, :, None], 2, 5).reshape(height * width, -1))
    given = dict(
        input_ids=torch.tensor(ids, device="cuda"), labels=torch.tensor(labels, device="cuda"),
        attention_mask=torch.tensor(ids != 151643, device="cuda").long(),
        mm_token_type_ids=torch.tensor(ids == 151655, device="cuda").int(),
        pixel_values=torch.tensor(np.concatenate(patches), device="cuda", dtype=torch.bfloat16),
        image_grid_thw=torch.tensor([[1, *of["grid"]] for of in pictures], device="cuda"),
    )  # fmt: skip
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
    tokens = sum(len(own) for own, *_ in batch)
    memory = torch.cuda.max_memory_allocated() / 1e9
    print(f"{'transformers, padded':28} {tokens / median:9.0f} tokens/s  {median * 1e3:8.1f} ms  {tokens:6d} tokens  "
          f"{memory:6.2f} GB", flush=True)  # fmt: skip


def main():
    tokenizer, template, shape, steps, *more = sys.argv[1:]
    base = Path(tempfile.mkdtemp())
    model = folder_of(base, shape, tokenizer, template)
    of_sizes = {"equal": [(1024, 1024)], "mixed": [(1024, 1024), (512, 512), (256, 384), (768, 512)]}
    for name, sizes in of_sizes.items():
        folder = base / name
        folder.mkdir()
        rows = rows_of(folder, sizes, 5 * IMAGES)
        longest = 1200
        packed = {"sample_packing": True, "sequence_len": IMAGES * longest, "per_device_train_batch_size": 1}
        padded = {"sample_packing": False, "sequence_len": longest, "per_device_train_batch_size": IMAGES}
        measure(f"{shape}, {name} sizes, packed", model, rows, int(steps), **packed)
        measure(f"{shape}, {name} sizes, padded", model, rows, int(steps), **padded)
        if name == "equal":
            for option in [of for of in ("fp8_hybrid", "qlora_bnb") if of in more]:
                own = {"recipe": option} if option == "fp8_hybrid" else {option: True}
                measure(f"{shape}, {name} sizes, packed, {option}", model, rows, int(steps), **packed, **own)
        if "peer" in more and name == "equal":
            peer(model, rows, int(steps))


if __name__ == "__main__":
    main()
