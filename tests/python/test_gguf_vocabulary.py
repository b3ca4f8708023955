"""Vocabularies of GGUF files: the ids that llama.cpp encodes texts to, against those of the model's tokenizer."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import surogate
from conftest import tiny_llama
from gguf_models import export, model_folder
from llama_cpp import ask
from surogate import ConfigError
from surogate.convert import vocabulary

TEXTS = [
    "Hello world",
    "It's I'M we'll THEY'RE don't",
    "a  b   c\n\n d\t\te \r\n x",
    "x=1234567890+3.14e-10; y[0]/z",
    "camelCase HTTPServer iPhone ABCdef ABC'S abc's 'tis",
    "Zoë naïve Straße ÀÉÎ",
    "русский Ελληνικά",
    "日本語のテキスト、ひらがな。 漢字123abc",
    "http://a.b/c?d=e&f#g //comment /* x */",
    "  leading and trailing  ",
    "emoji 😀 🇩🇪 flag",
    "Ⅳ ² ½ ١٢٣",
    "don’t “quotes” —dash…",
    "foo_bar __init__ $var @x #tag (a)(b){c}[d]<e>",
    "1st 2nd 3rd 10,000.50",
    "\n\n\n   \n   x",
    "Ｆｕｌｌ ｗｉｄｔｈ１２",
]
#: With combining marks.
MARKS = ["e\u0301 a\u0308b n\u0303", "हिन्दी"]


def alphabet() -> dict[int, str]:
    """The letter of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in plain)
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def pairs(cut: tuple[str, ...], whole: bool) -> dict[str, Any]:
    """A tokenizer.json in which every two bytes of the texts are a token: where a text is cut shows in its ids."""
    letters = [alphabet()[byte] for byte in sorted(set("".join(TEXTS + MARKS).encode()))]
    both = [(a, b) for a in letters for b in letters]
    random.Random(3).shuffle(both)
    vocab = {token: number for number, token in enumerate([*letters, *(a + b for a, b in both)])}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps: dict[str, dict[str, Any]] = {
        "digits": {"type": "Digits", "individual_digits": True},
        "words": level | {"use_regex": True},
    }
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    parts = [steps.get(of, split | {"pattern": {"Regex": of}}) for of in cut]
    parts += [] if "words" in cut else [level]
    model = {"type": "BPE", "vocab": vocab, "merges": [f"{a} {b}" for a, b in both], "ignore_merges": whole}
    rest = {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None, "decoder": level}
    return rest | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}, "model": model}


def with_tokenizer(folder: Path, text: str, size: int) -> Path:
    """A small model with such a tokenizer.json."""
    model = model_folder(folder, tiny_llama(vocab_size=size, num_hidden_layers=1, tie_word_embeddings=True))
    (model / "tokenizer.json").write_text(text)
    return model


CUTS = [(cut, name, name in vocabulary.WHOLE) for cut, name in vocabulary.CUTS.items()]
CUTS += [(cut, vocabulary.MERGED[name], False) for cut, name, _ in CUTS if name in vocabulary.MERGED]


@pytest.mark.parametrize(("cut", "name", "whole"), CUTS, ids=[name for _, name, _ in CUTS])
def test_llama_cpp_cuts_texts_where_the_tokenizer_does(cut, name: str, whole: bool, tmp_path: Path, capsys) -> None:
    tokenizer = pairs(cut, whole)
    model = with_tokenizer(tmp_path, json.dumps(tokenizer), len(tokenizer["model"]["vocab"]))
    assert ("tokenizer.ggml.pre", "text", name) in vocabulary.read(model, 0)
    own, found = surogate.Tokenizer(model), ask(export(model, "f16"), texts=TEXTS + MARKS)["tokens"]
    expected = [own.encode(text) for text in TEXTS + MARKS]
    assert found[: len(TEXTS)] == expected[: len(TEXTS)]
    reported = "Note: llama.cpp cuts words before combining marks" in capsys.readouterr().out
    assert reported == (found != expected) == (name in vocabulary.WITHOUT_MARKS)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "smollm2",
        "mistral-7b-v0.3",
        *(pytest.param(of, marks=pytest.mark.long) for of in ("qwen3", "mistral-nemo", "gpt-oss")),
    ],
)
def test_published_vocabularies(name: str, shared: Path, tmp_path: Path, capsys) -> None:
    """But for combining marks, and for words that llama.cpp takes for control tokens by their looks."""
    place = shared / "assets" / "tokenizers" / name
    packed = place / "tokenizer.json.gz"
    text = gzip.decompress(packed.read_bytes()) if packed.is_file() else (place / "tokenizer.json").read_bytes()
    tokenizer = json.loads(text)
    size = 1 + max([*tokenizer["model"]["vocab"].values(), *(of["id"] for of in tokenizer["added_tokens"])])
    model = with_tokenizer(tmp_path, text.decode(), size)
    shutil.copy(place / "tokenizer_config.json", model)
    rows = [json.loads(line) for line in (place / "golden_encodings.jsonl").read_text().splitlines()]
    rows = [row for row in rows if not any(of in row["text"] for of in ("\u0301", "हि", "</s>"))]
    assert len(rows) >= 10
    assert ask(export(model, "f16"), texts=[row["text"] for row in rows])["tokens"] == [
        row["ids_no_special"] for row in rows
    ]


def test_texts_that_are_changed_before_are_told_or_refused(tmp_path: Path, capsys) -> None:
    cut = next(iter(vocabulary.CUTS))
    tokenizer = pairs(cut, False)
    model = with_tokenizer(tmp_path, json.dumps(tokenizer | {"normalizer": {"type": "NFC"}}), 10000)
    export(model)
    assert "Note: the tokenizer composes characters (NFC)" in capsys.readouterr().out
    (model / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": {"type": "Lowercase"}}))
    with pytest.raises(ConfigError, match="Lowercase"):
        vocabulary.read(model, 0)
    (model / "tokenizer.json").write_text(
        json.dumps(tokenizer | {"model": tokenizer["model"] | {"ignore_merges": True}})
    )
    with pytest.raises(ConfigError, match="`ignore_merges` is True, but readers of 'qwen2' do not take"):
        vocabulary.read(model, 0)


def test_pairs_that_are_no_merges_are_told(tmp_path: Path) -> None:
    vocab = {token: number for number, token in enumerate(["<unk>", "a", "b", "c", "ab", "bc", "abc", "<0x41>"])}
    model = {"type": "BPE", "vocab": vocab, "merges": ["a b", "ab c", "b c"], "byte_fallback": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    (note,) = vocabulary.notes(tmp_path)
    assert "1 pairs of tokens, such as 'a' and 'bc'" in note
    model["merges"].append("a bc")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    assert vocabulary.notes(tmp_path) == []
