"""The tokens that end answers, in every file of every result, and the class that opens its tokenizer."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
import surogate
from conftest import REPOSITORY, tiny_llama
from surogate import _native
from surogate.cli import push
from surogate.cli.commands import main
from surogate.convert import vocabulary

STORIES = REPOSITORY / "examples" / "stories" / "model"

PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
HARMONY = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + (m.role if m.role == 'user' else 'model') + '\n' }}"
    "{{ m.content + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

#: Templates by name or as text, the special tokens that they write, and the one after an answer.
FAMILIES = {
    "chatml": ("chatml", ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "llama3": ("llama3", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"),
    "gemma": (GEMMA, ["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
    "phi": (PHI, ["<|user|>", "<|assistant|>", "<|end|>"], "<|end|>"),
    "gpt-oss": (HARMONY, ["<|start|>", "<|message|>", "<|end|>", "<|return|>"], "<|return|>"),
}

#: The first id after the tokens of the stories, and the end of their texts.
FIRST, END = 512, 2


@pytest.fixture
def base(make_model):
    """Makes a base model whose tokenizer has more special tokens; its end is that of texts."""

    def make(tokens: list[str], **changes) -> Path:
        fields = {"vocab_size": 544, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 128}
        folder = make_model(tiny_llama(**fields, bos_token_id=1, eos_token_id=END, tie_word_embeddings=True, **changes))
        tokenizer = json.loads((STORIES / "tokenizer.json").read_text())
        for number, token in enumerate(tokens, FIRST):
            known = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            tokenizer["added_tokens"].append({"id": number, "content": token, **known})
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        settings = json.loads((STORIES / "tokenizer_config.json").read_text())
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": END, "top_k": 7}))
        return folder

    return make


def train(model: Path, place: Path, template: str | None, **options) -> Path:
    """A short run on one conversation; gives its folder."""
    place.mkdir(exist_ok=True)
    rows = [{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there."}]}] * 8
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if template is not None and "{" in template:
        (place / "own.jinja").write_text(template)
        template = str(place / "own.jinja")
    config = {
        "model": str(model),
        "datasets": [{"path": str(place / "rows.jsonl"), "type": "conversation"}],
        "validation_split_ratio": 0,
        "device": "cpu",
        "lora": False,
        "sequence_len": 64,
        "gradient_accumulation_steps": 1,
        "max_steps": 2,
        "output_dir": str(place / "out"),
        **({"template": template} if template else {}),
        **options,
    }
    (place / "run.yaml").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    assert main(["sft", str(place / "run.yaml"), "--quiet"]) == 0
    return place / "out"


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def check(folder: Path, end: int, text: str, is_model: bool = True) -> None:
    """Every file names the end of an answer first, and the old end still."""
    assert read(folder, "generation_config.json") == {"bos_token_id": 1, "eos_token_id": [end, END], "top_k": 7}
    assert read(folder, "tokenizer_config.json")["eos_token"] == text
    if is_model:
        assert read(folder, "config.json")["eos_token_id"] == end
        found = {key: value for key, _, value in vocabulary.read(folder, 544)}
        assert found["tokenizer.ggml.eos_token_id"] == found["tokenizer.ggml.eot_token_id"] == end
    assert _native.end_tokens(folder)[:2] == ([end, END], end)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_result_names_the_end_token_that_it_was_trained_with(family, base, tmp_path, monkeypatch):
    template, tokens, text = FAMILIES[family]
    end = FIRST + tokens.index(text)
    model = base(tokens)
    full = train(model, tmp_path / "full", template)
    check(full / "model", end, text)
    adapted = train(model, tmp_path / "lora", template, lora=True, lora_rank=2, merge_adapter=True, save_steps=1)
    check(adapted / "adapter", end, text, is_model=False)
    check(adapted / "merged", end, text)
    check(adapted / "checkpoint-1", end, text, is_model=False)
    for source, output in ((adapted / "adapter", "by hand"), (adapted / "checkpoint-1", "of a checkpoint")):
        assert main(["merge", str(source), "--output", str(tmp_path / output)]) == 0
        check(tmp_path / output, end, text)
    # An adapter of another program brings tokenizer and template along, and nothing else.
    (adapted / "adapter" / "generation_config.json").unlink()
    settings = read(model, "tokenizer_config.json")
    (adapted / "adapter" / "tokenizer_config.json").write_text(json.dumps(settings))
    assert main(["merge", str(adapted / "adapter"), "--output", str(tmp_path / "theirs")]) == 0
    check(tmp_path / "theirs", end, text)

    pushed = {}
    monkeypatch.setattr("surogate.storage.hub.call_hub", lambda what, call, *doing: call())

    def take(_, **of):
        pushed.update((file.name, file.read_bytes()) for file in Path(of["folder_path"]).iterdir())

    api = type("Api", (), {"endpoint": "https://x", "upload_folder": take})
    monkeypatch.setattr("huggingface_hub.HfApi", api)
    push.upload(full / "model", "me/x", private=True)
    for name in ("generation_config.json", "model.safetensors", "tokenizer.json"):
        assert pushed[name] == (full / "model" / name).read_bytes()


def test_prompts_of_a_chat_model_begin_with_bos_where_its_template_says_so(base, tmp_path):
    """The tokenizer adds BOS to texts; ChatML has none, and Llama 3's template writes it."""
    for template, tokens, begins in (*((*FAMILIES[name][:2], name == "llama3") for name in ("chatml", "llama3")), (None, [], True)):
        model = base(tokens)
        if template is not None:
            model = train(model, tmp_path / template, template) / "model"
        found = {key: value for key, _, value in vocabulary.read(model, 544)}
        assert found["tokenizer.ggml.add_bos_token"] is begins, template


def test_what_needs_no_change_stays_as_it_is(base, tmp_path):
    """Texts end as the base does; a model that names its end of a turn already is not touched."""
    template, tokens, text = FAMILIES["chatml"]
    model = base(tokens)
    (tmp_path / "texts.jsonl").write_text('{"text": "Once upon a time"}\n' * 8)
    texts = {"datasets": [{"path": str(tmp_path / "texts.jsonl"), "type": "text"}]}
    result = train(model, tmp_path / "texts", None, **texts) / "model"
    for name in ("generation_config.json", "tokenizer_config.json"):
        assert read(result, name) == read(model, name)
    assert read(result, "config.json")["eos_token_id"] == END
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, FIRST + 1]}))
    result = train(model, tmp_path / "chat", template) / "model"
    assert read(result, "generation_config.json") == {"eos_token_id": [END, FIRST + 1]}
    assert read(result, "tokenizer_config.json")["eos_token"] == "</s>"
    found = {key: value for key, _, value in vocabulary.read(result, 544)}
    assert (found["tokenizer.ggml.eos_token_id"], found["tokenizer.ggml.eot_token_id"]) == (END, FIRST + 1)


def test_lists_and_missing_files(base, tmp_path):
    template, tokens, _ = FAMILIES["chatml"]
    model = base(tokens)
    (model / "generation_config.json").unlink()
    fields = read(model, "config.json")
    (model / "config.json").write_text(json.dumps(fields | {"eos_token_id": [END, 3]}))
    result = train(model, tmp_path / "run", template) / "model"
    expected = {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": [FIRST + 1, END, 3]}
    assert read(result, "generation_config.json") == expected
    assert read(result, "config.json")["eos_token_id"] == [FIRST + 1, END, 3]
    # A template that writes `eos_token` would write another text.
    model = base(tokens)
    own = "{% for m in messages %}{{ eos_token + m.content + '<|im_end|>' }}{% endfor %}"
    result = train(model, tmp_path / "own", own) / "model"
    assert read(result, "generation_config.json")["eos_token_id"] == [FIRST + 1, END]
    assert read(result, "tokenizer_config.json")["eos_token"] == "</s>"


def test_generation_of_a_result_ends_where_its_files_say(base, tmp_path):
    template, tokens, _ = FAMILIES["chatml"]
    options = {"max_steps": 60, "learning_rate": 2e-2, "lr_scheduler_type": "constant", "optimizer": "adamw"}
    result = train(base(tokens), tmp_path / "run", template, **options)
    model = surogate.load(result / "model")
    generation = model.start([[{"role": "user", "content": "Hello"}]], max_new_tokens=40, temperature=0)
    while not generation.done:
        generation.step()
    named = read(result / "model", "generation_config.json")["eos_token_id"]
    assert generation.answer(0)[-1] == named[0] == FIRST + 1 and len(generation.answer(0)) < 40


#: As SmolLM2 has it: a class that builds another pre-tokenizer than the file's.
DIGITS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def test_a_tokenizer_is_opened_as_it_was_trained_with(make_model, tmp_path, capfd):
    model = make_model(tiny_llama(vocab_size=544, max_position_embeddings=128))
    words = {chr(number): number for number in range(33, 127)}
    tokenizer = {"model": {"type": "BPE", "vocab": words, "merges": []}, "pre_tokenizer": DIGITS, "added_tokens": []}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "!"}))
    (tmp_path / "texts.jsonl").write_text('{"text": "Once 2024"}\n' * 8)
    texts = {"datasets": [{"path": str(tmp_path / "texts.jsonl"), "type": "text"}], "lora": True, "lora_rank": 2}
    place = tmp_path / "run"
    out = train(model, place, None, **texts, merge_adapter=True)
    for folder in ("adapter", "merged"):
        assert read(out / folder, "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"
    capfd.readouterr()
    shutil.rmtree(out)
    assert main(["sft", str(place / "run.yaml")]) == 0
    assert "`tokenizer_class: PreTrainedTokenizerFast` instead of `GPT2Tokenizer`" in capfd.readouterr().out
    assert main(["merge", str(out), "--output", str(tmp_path / "merged")]) == 0
    assert "instead of" not in capfd.readouterr().out, "the adapter's is right already"
    tokenizer["pre_tokenizer"] = DIGITS["pretokenizers"][1]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    out = train(model, tmp_path / "plain", None, **texts)
    assert read(out / "adapter", "tokenizer_config.json")["tokenizer_class"] == "GPT2Tokenizer"


TEXTS = ["I am 123 years old, 2024!", "  two  spaces\n\nnew", "don't 12345.678", "你好 مرحبا", "def f(x):\n    return x+1", " a", "é"]


#: Classes that change the pre-tokenizer when transformers opens the tokenizer. `None`: the one that the model declares.
CLASSES = [None, "PreTrainedTokenizerFast", "GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer", "GemmaTokenizer"]


def openings():
    """Pairs of tokenizers and classes. The largest tokenizers, up to ten seconds each, meet other classes than their own
    only in the long tests, but for one.
    """
    for family in ("gpt2", "smollm2", "mistral-7b-v0.3", "mistral-nemo", "qwen3", "gpt-oss"):
        large = family in ("mistral-nemo", "qwen3", "gpt-oss")
        for declared in CLASSES:
            is_short = not large or declared is None or (family, declared) == ("qwen3", "GPT2Tokenizer")
            marks = [] if is_short else [pytest.mark.long]
            yield pytest.param(family, declared, marks=marks)


@pytest.mark.parametrize(("family", "declared"), openings())
def test_transformers_cuts_as_training_does(family, declared, shared, make_model, tmp_path):
    """Whatever class the model declares."""
    import transformers

    of = shared / "assets" / "tokenizers" / family
    model = make_model(tiny_llama(vocab_size=96))
    for file in of.iterdir():
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        (model / file.name.removesuffix(".gz")).write_bytes(content)
    settings = read(model, "tokenizer_config.json")
    (model / "tokenizer_config.json").write_text(json.dumps(settings | ({"tokenizer_class": declared} if declared else {})))
    _native.extend(model, ["<|new|>"], 64, tmp_path / "result", False)
    ours = surogate.Tokenizer(tmp_path / "result")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "result"))
    for text in [*TEXTS, "a<|new|> b"]:
        assert theirs(text)["input_ids"] == ours.encode(text), text
