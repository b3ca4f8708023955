"""The result of a run in other forms, from the command line."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import surogate
from conftest import (
    REPOSITORY,
    tiny_ernie4_5,
    tiny_exaone4,
    tiny_gpt2,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
    tiny_seed_oss,
    tiny_smollm3,
)
from safetensors.numpy import load_file, save_file
from surogate import ConfigError, ModelConfigError
from surogate.cli.commands import main
from surogate.convert import vocabulary
from surogate.models import gguf


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def trained(tmp_path, make_model):
    """A model and the output folder of a short run with LoRA on it."""
    model = make_model(tiny_llama(initializer_range=0.3))
    options = {"model": str(model), "device": "cpu", "lora_rank": 2, "output_dir": str(tmp_path / "run")}
    trainer = surogate.Trainer(options)
    ids = np.arange(24).reshape(1, 2, 12) + 1
    for _ in range(3):
        trainer.step({"input_ids": ids, "labels": ids}, learning_rate=1e-2)
    trainer.export(tmp_path / "run" / "adapter")
    return model, tmp_path / "run"


def test_an_adapter_in_every_form(capsys, trained):
    model, folder = trained
    for form in ("peft", "hf"):
        code, out, err = run(capsys, "export", folder, "--format", form)
        assert (code, err) == (0, "") and (folder / form).is_dir(), err
    name = "adapter_model.safetensors"
    assert (folder / "peft" / name).read_bytes() == (folder / "adapter" / name).read_bytes()
    ids = [[1, 5, 9, 2]]
    merged = surogate.load(folder / "hf").forward(ids)
    live = surogate.load(model, adapter=folder / "adapter").forward(ids)
    np.testing.assert_allclose(merged, live, rtol=0, atol=1e-5)
    code, out, _ = run(capsys, "export", folder, "--format", "gguf", "--encoding", "q8_0")
    file = folder / "run-q8_0.gguf"
    assert code == 0 and file.read_bytes()[:8] == b"GGUF\x03\0\0\0" and "read back and compared" in out
    assert "no vocabulary" in out
    assert not [path for path in folder.iterdir() if path.name.startswith(".")], "nothing is left over"
    for words in (["hf"], ["peft"], ["gguf", "--encoding", "q8_0"]):
        code, _, err = run(capsys, "export", folder, "--format", *words)
        assert code == 2 and "nothing is overwritten" in err, err


@pytest.mark.parametrize(("form", "stage"), [("gguf", "_gguf"), ("peft", "shutil.copytree")])
def test_what_a_killed_export_left_is_removed_by_the_next(capsys, trained, form, stage):
    """Killed with its temporary folder half full, the folder of the merged model too; others' folders stay."""
    _, folder = trained
    output = folder / f"result.{form}"
    words = ["export", str(folder), "--format", form, "--output", str(output)]
    killed = textwrap.dedent(f"""
        import os, pathlib, sys
        from surogate.cli.commands import main
        from surogate.convert import export
        def die(*_, **__):
            for place in pathlib.Path({str(folder)!r}).glob(".result.*"):
                (place / "part").write_text("half")
            os.kill(os.getpid(), 9)
        export.{stage} = die
        main({words!r})
    """)
    assert subprocess.run([sys.executable, "-c", killed]).returncode == -9
    (left,) = folder.glob(".result.*")
    theirs = [folder / f".result.{form}.export.{name}" for name in ("mine", "empty.tmp", "held.tmp")]
    for place in theirs:
        place.mkdir()
    (theirs[0] / "notes").touch()
    (theirs[2] / "part").touch()
    handle = os.open(theirs[2], os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    code, _, err = run(capsys, *words)
    os.close(handle)
    assert (code, err) == (0, "") and output.exists()
    assert not left.exists() and sorted(folder.glob(".result.*")) == sorted(theirs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_is_rounded_is_told(capsys, tmp_path, make_model, dtype):
    """A file keeps the type of a model in 16 bits; what is rounded is named with its extent."""
    model = make_model(tiny_llama(initializer_range=0.3))
    tensors = {name: value.astype(np.float32) for name, value in load_file(model / "model.safetensors").items()}
    fields = json.loads((model / "config.json").read_text()) | {"torch_dtype": dtype}
    (model / "config.json").write_text(json.dumps(fields))
    if dtype == "float16":
        save_file({name: value.astype(np.float16) for name, value in tensors.items()}, model / "model.safetensors")
    elif dtype == "bfloat16":
        cut = {name: (value.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, value in tensors.items()}
        bits = {name: (value.view(np.uint32) >> 16).astype(np.uint16) for name, value in cut.items()}
        write_bf16(model / "model.safetensors", bits)
    code, out, err = run(capsys, "export", model, "--format", "gguf")
    assert code == 0, err
    encoding = "f16" if dtype == "float16" else "bf16"
    assert (model / f"model-{encoding}.gguf").is_file() and ("Note: values were rounded" in out) == (dtype == "float32")
    code, out, err = run(capsys, "export", model, "--format", "gguf", "--encoding", "q8_0")
    assert code == 0 and "Note: values were rounded to q8_0: the largest change is " in out, err
    largest = float(re.search(r"largest change is ([0-9.e+-]+),", out)[1])
    most = max(np.abs(value).max() for value in tensors.values())
    assert 0 < largest < most / 100


def test_a_run_tells_how_far_it_rounds_what_it_loads_and_writes(capfd, tmp_path, make_model):
    """A model in f16 is trained in bf16; f32 copies of weights are rounded in its result."""
    model = make_model(tiny_llama(initializer_range=0.3))
    halves = {name: value.astype(np.float16) for name, value in load_file(model / "model.safetensors").items()}
    save_file(halves, model / "model.safetensors")
    fields = json.loads((model / "config.json").read_text()) | {"torch_dtype": "float16"}
    (model / "config.json").write_text(json.dumps(fields))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": list(range(1, 13))}) + "\n")
    options = {
        "model": str(model),
        "datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "tokens"}],
        "validation_split_ratio": 0,
        "device": "cpu",
        "sequence_len": 16,
        "max_steps": 2,
    }

    def rounded(name: str, **changes: object) -> tuple[list[float], str]:
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps({**options, **changes, "output_dir": str(tmp_path / name)}))
        code, out, err = run(capfd, "sft", path)
        assert code == 0, err
        return [float(value) for value in re.findall(r"rounded to bf16: the largest change is ([0-9.e+-]+),", out)], out

    def error(value: np.ndarray) -> float:
        bits = value.astype(np.float32).view(np.uint32)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
        return float(np.abs(nearest - value.astype(np.float32)).max())

    expected = max(error(value) for value in halves.values())
    found, out = rounded("adapter")
    assert found == [pytest.approx(expected, rel=0.05)] and "Note: as the model was loaded, values were rounded" in out
    assert rounded("exact", torch_dtype="float32")[0] == []
    found, out = rounded("masters", lora=False, master_dtype="float32", optimizer="adamw")
    assert len(found) == 2 and 0 < found[1] < expected * 2 and "; checkpoints keep the f32 weights" in out


def write_bf16(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file of bf16, given as bits."""
    head, at = {}, 0
    for name, value in tensors.items():
        head[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(value.tobytes() for value in tensors.values()))


def test_a_merge_tells_what_it_rounds(capsys, tmp_path, trained):
    model, folder = trained
    assert run(capsys, "merge", folder, "--output", tmp_path / "exact")[1].count("Note:") == 0
    bits = {}
    for name, value in load_file(model / "model.safetensors").items():
        bits[name] = (value.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    write_bf16(model / "model.safetensors", bits)
    code, out, err = run(capsys, "merge", folder, "--output", tmp_path / "rounded")
    assert code == 0 and "Note: values were rounded to bf16: the largest change is " in out, err


def test_a_merge_that_leaves_the_range_of_the_model_is_refused(capsys, tmp_path, trained):
    model, folder = trained
    halves = {name: value.astype(np.float16) for name, value in load_file(model / "model.safetensors").items()}
    name = next(name for name in halves if name.endswith("q_proj.weight"))
    halves[name][0, 0] = 65504
    save_file(halves, model / "model.safetensors")
    pairs = load_file(folder / "adapter" / "adapter_model.safetensors")
    for part in (of for of in pairs if name.removesuffix(".weight") in of):
        pairs[part][...] = 10.0
    save_file(pairs, folder / "adapter" / "adapter_model.safetensors")
    code, _, err = run(capsys, "merge", folder, "--output", tmp_path / "merged")
    assert code == 1 and "1 of its weights would be larger than f16 holds" in err and not (tmp_path / "merged").exists(), err


def test_a_result_is_checked_without_a_second_model(tmp_path):
    """What is allocated while a result is written and checked stays far below the weights."""
    fields = tiny_llama(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=20, vocab_size=4096, num_attention_heads=8
    )
    (tmp_path / "config.json").write_text(json.dumps(fields))
    trainer = surogate.Trainer(
        {
            "model": str(tmp_path),
            "init": "random",
            "device": "cpu",
            "torch_dtype": "float32",
            "lora_rank": 2,
            "lora_target_modules": ["q_proj"],
            "sequence_len": 16,
            "output_dir": str(tmp_path / "run"),
        }
    )
    ids = np.arange(8).reshape(1, 1, 8) + 1
    trainer.step({"input_ids": ids, "labels": ids}, learning_rate=1e-3)

    def allocated() -> int:
        """Bytes of memory of the process that are not those of mapped files."""
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])

    before, most, ended = allocated(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.002):
            most = max(most, allocated())

    watcher = threading.Thread(target=watch)
    watcher.start()
    trainer.export_merged(tmp_path / "merged")
    ended.set()
    watcher.join()
    weights = sum(file.stat().st_size for file in (tmp_path / "merged").glob("*.safetensors"))
    assert weights > 1 << 30, "smaller ones are loaded a second time as well"
    assert most - before < weights // 10, f"{(most - before) >> 20} MiB for {weights >> 20} MiB of weights"


def test_what_has_no_such_form_is_refused(capsys, tmp_path, make_model):
    model = make_model(tiny_qwen3())
    code, _, err = run(capsys, "export", model, "--format", "peft")
    assert code == 2 and "only an adapter can be exported as `peft`" in err
    code, _, err = run(capsys, "export", tmp_path, "--format", "hf")
    assert code == 2 and "there is no model, adapter or checkpoint" in err
    code, _, err = run(capsys, "export", model, "--format", "hf", "--encoding", "f16")
    assert code == 2 and "--encoding needs --format gguf" in err
    scaled = tiny_llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(ModelConfigError, match="'dynamic'"):
        gguf.describe(scaled, [], "x")


def test_tensors_are_called_as_in_gguf():
    description = json.loads(gguf.describe(tiny_llama(tie_word_embeddings=True), [], "tiny"))
    tensors = {tensor["name"]: tensor for tensor in description["tensors"]}
    assert len(tensors) == 2 + 2 * 9 and "output.weight" not in tensors
    assert description["repeated"] == ["lm_head.weight"]
    assert tensors["blk.1.attn_k.weight"] == {
        "name": "blk.1.attn_k.weight",
        "from": "model.layers.1.self_attn.k_proj.weight",
        "interleave_heads": 2,
    }
    values = {key: value for key, _, value in description["metadata"]}
    assert values["general.architecture"] == "llama" and values["llama.attention.head_count_kv"] == 2
    other = json.loads(gguf.describe(tiny_qwen3(), [], "tiny"))
    assert all("interleave_heads" not in tensor for tensor in other["tensors"])
    assert "blk.0.attn_q_norm.weight" in [tensor["name"] for tensor in other["tensors"]]


@pytest.mark.parametrize(
    ("fields", "encoding"),
    [
        (tiny_llama(), "bf16"),
        (tiny_mistral(sliding_window=None), "f16"),
        (tiny_qwen2(), "q8_0"),
        (tiny_qwen3(), "f32"),
        (tiny_smollm3(no_rope_layer_interval=4), "q8_0"),
        (tiny_gpt2(), "bf16"),
        (tiny_seed_oss(), "q8_0"),
        (tiny_ernie4_5(), "bf16"),
        ({**tiny_exaone4(), "sliding_window": None}, "f16"),
    ],
    ids=lambda of: of if isinstance(of, str) else of["model_type"],
)
def test_every_architecture_has_a_form(capsys, make_model, fields, encoding):
    model = make_model({**fields, "initializer_range": 0.3})
    code, out, err = run(capsys, "export", model, "--format", "gguf", "--encoding", encoding)
    assert code == 0 and "read back and compared" in out, err
    content = (model / f"{model.name}-{encoding}.gguf").read_bytes()
    assert content[:4] == b"GGUF" and gguf.FORMS[fields["architectures"][0]].name.encode() in content


def test_what_readers_would_compute_otherwise_is_refused():
    for fields, named in [
        (tiny_mistral(), "sliding_window"),
        (tiny_smollm3(), "no_rope_layers"),
        (tiny_gpt2(activation_function="relu"), "activation_function"),
        (tiny_seed_oss(mlp_bias=True), "mlp_bias"),
        (tiny_ernie4_5(use_bias=True), "use_bias"),
        (tiny_exaone4(), "sliding_window"),
        (tiny_exaone4(num_hidden_layers=64, sliding_window_pattern=2), "layer_types"),
        (tiny_gpt2(scale_attn_by_inverse_layer_idx=True), "scale_attn_weights"),
    ]:
        with pytest.raises(ModelConfigError, match=named):
            gguf.describe(fields, [], "x")


def test_the_vocabulary_of_the_example(tmp_path):
    found = {key: value for key, _, value in vocabulary.read(REPOSITORY / "examples/stories/model", 515)}
    assert found["tokenizer.ggml.model"] == "llama" and found["tokenizer.ggml.add_bos_token"] is True
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert tokens[:3] == ["<unk>", "<s>", "</s>"] and tokens[514] == "[PAD514]"
    assert types[1] == vocabulary.CONTROL and types[tokens.index("<0x0A>")] == vocabulary.BYTE
    assert found["tokenizer.ggml.bos_token_id"] == 1
    # The first merge has the highest score.
    scores = found["tokenizer.ggml.scores"]
    path = REPOSITORY / "examples/stories/model" / "tokenizer.json"
    first = json.loads(path.read_text())["model"]["merges"][0]
    first = first.split(" ") if isinstance(first, str) else first
    assert scores[tokens.index("".join(first))] == max(scores) == 0


def test_a_way_of_cutting_text_without_a_name_is_refused(tmp_path):
    cut = {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated"}
    tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "pre_tokenizer": cut}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="a\\+"):
        vocabulary.read(tmp_path, 1)
    tokenizer["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert ("tokenizer.ggml.pre", "text", "gpt-2") in vocabulary.read(tmp_path, 1)


#: Bits of a code, elements that share a scale, and whether there is an offset.
CODES = {"Q4_K": (4, 32, True), "Q5_K": (5, 32, True), "Q6_K": (6, 16, False)}


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """What the plain quantiser makes of values: the scale, in f32, from the smallest to the largest number of a block."""
    bits, block, offset = CODES[kind]
    x = values.reshape(-1, block).astype(np.float64)
    if offset:
        low, high = np.minimum(x.min(1, keepdims=True), 0), np.maximum(x.max(1, keepdims=True), 0)
        scale = (high - low) / (2**bits - 1)
        return (np.round((x - low) / scale) * scale + low).reshape(values.shape)
    most = 2 ** (bits - 1)
    scale = np.abs(x).max(1, keepdims=True) / most
    return (np.clip(np.round(x / scale), -most, most - 1) * scale).reshape(values.shape)


@pytest.mark.parametrize("encoding", ["q4_k_m", "q5_k_m", "q6_k", "q8_0"])
def test_quantised_files_are_read_by_the_package_of_the_format(capsys, make_model, encoding):
    """Types of tensors as llama.cpp mixes them; values as the `gguf` package reads them, nearer than plain rounding."""
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import load_file

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    model = make_model(tiny_llama(**sizes, initializer_range=0.05))
    code, out, err = run(capsys, "export", model, "--format", "gguf", "--encoding", encoding)
    assert code == 0 and "read back and compared" in out and "Note: rows" not in out, err
    reader = GGUFReader(model / f"{model.name}-{encoding}.gguf")
    weights = load_file(model / "model.safetensors")
    found = {tensor.name: tensor for tensor in reader.tensors}
    base = encoding.removesuffix("_m").upper()
    mixed = encoding.endswith("_m")
    more = "Q6_K" if mixed else base
    assert found["output.weight"].tensor_type.name == more and found["token_embd.weight"].tensor_type.name == base
    assert found["output_norm.weight"].tensor_type.name == "F32"
    # Of eight layers the first, the last, and every third between them.
    for part in ("attn_v", "ffn_down"):
        types = [found[f"blk.{i}.{part}.weight"].tensor_type.name for i in range(8)]
        assert types == [more if i in (0, 3, 6, 7) else base for i in range(8)]
    assert {found[f"blk.{i}.ffn_up.weight"].tensor_type.name for i in range(8)} == {base}
    for name, source in {
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
        "blk.1.attn_output": "model.layers.1.self_attn.o_proj",
        "blk.3.ffn_down": "model.layers.3.mlp.down_proj",
        "blk.5.ffn_gate": "model.layers.5.mlp.gate_proj",
    }.items():
        tensor, expected = found[f"{name}.weight"], weights[f"{source}.weight"]
        kind = tensor.tensor_type.name
        values = dequantize(tensor.data, tensor.tensor_type).reshape(expected.shape)
        error = np.sqrt(((values - expected) ** 2).mean())
        if kind in CODES:
            assert error < 0.97 * np.sqrt(((rounded(expected, kind) - expected) ** 2).mean()), name
        assert error < 0.05 * 2.0 ** (4 - int(kind[1])) * 2.5 * expected.std(), name


def test_rows_that_are_no_whole_blocks_are_said(capsys, make_model):
    from gguf import GGUFReader

    model = make_model(tiny_llama())  # rows of 32 and of 48
    code, out, err = run(capsys, "export", model, "--format", "gguf", "--encoding", "q4_k_m")
    assert code == 0, err
    assert "are stored in q5_0: token_embd.weight, blk.0.attn_q.weight" in out and " more" in out
    assert "are stored in f16: blk.0.ffn_down.weight, blk.1.ffn_down.weight\n" in out
    assert "are stored in q8_0: output.weight, blk.1.attn_v.weight\n" in out
    found = {of.name: of.tensor_type.name for of in GGUFReader(model / f"{model.name}-q4_k_m.gguf").tensors}
    assert (found["blk.0.attn_q.weight"], found["blk.0.ffn_down.weight"]) == ("Q5_0", "F16")


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q5_1"])
def test_blocks_are_those_of_the_package(capsys, make_model, kind):
    """Blocks of 32, to the byte where the package encodes as well."""
    from gguf import GGMLQuantizationType, GGUFReader, quantize
    from safetensors.numpy import load_file

    model = make_model(tiny_llama(hidden_size=96, num_attention_heads=4, initializer_range=0.3))
    encoding = {"Q8_0": "q6_k", "Q5_0": "q4_k_m", "Q5_1": "q5_k_m"}[kind]
    assert run(capsys, "export", model, "--format", "gguf", "--encoding", encoding)[0] == 0
    found = {of.name: of for of in GGUFReader(model / f"{model.name}-{encoding}.gguf").tensors}
    tensor = found["blk.0.ffn_gate.weight"]
    assert tensor.tensor_type.name == kind
    weights = load_file(model / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    expected = quantize(weights, GGMLQuantizationType[kind])
    assert np.array_equal(np.asarray(tensor.data).reshape(-1), expected.reshape(-1))


def test_a_file_has_the_chat_template(capsys, tmp_path, make_model):
    import shutil

    from gguf import GGUFReader

    source = REPOSITORY / "examples" / "stories" / "model"
    model = tmp_path / "with-template"
    shutil.copytree(source, model)
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    code, out, err = run(capsys, "export", model, "--format", "gguf", "--encoding", "q5_k_m")
    assert code == 0, err
    field = GGUFReader(model / "with-template-q5_k_m.gguf").get_field("tokenizer.chat_template")
    assert field is not None and field.contents() == template


def test_an_export_from_python_warns_where_it_is_rounded(make_model, tmp_path):
    run = {"model": str(make_model(tiny_llama())), "device": "cpu", "torch_dtype": "bfloat16", "max_steps": 2, "lora_dropout": 0.0}
    trainer = surogate.Trainer(run)
    ids = [[[1, 2, 3, 4]]]
    trainer.step({"input_ids": ids, "labels": ids}, 1e-2)
    with pytest.warns(UserWarning, match="round"):
        trainer.export_merged(tmp_path / "merged")


@pytest.mark.parametrize("place", ["output/stoires", "models/x"])
def test_a_name_that_is_no_folder_either_is_told(place, tmp_path):
    """The Hub is tried for what may be a name; the message says that there is no such folder."""
    words = [sys.executable, "-m", "surogate", "export", place, "--format", "hf"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and f"{place}: there is no model, adapter or checkpoint" in done.stderr
    words = [sys.executable, "-m", "surogate", "merge", place, "--output", "merged"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 1 and "there is no folder of that name either" in done.stderr, done.stderr
