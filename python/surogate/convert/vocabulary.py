"""A tokenizer.json as the vocabulary of a GGUF file.

Supports two kinds of byte-pair encoding: byte-level as in GPT-2, whose pre-tokenizer must have a name in GGUF, and
character-level with byte fallback as in SentencePiece.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .. import _native
from ..dsl.config import LARGEST
from ..errors import ConfigError
from ..storage import json_file

Metadata = list[tuple[str, str, Any]]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Words that begin where small letters end, with or without an English ending.
CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+ENDING"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*ENDING"
    r"|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#: Han and kana, and words with marks: DeepSeek-V3.
HAN = "[一-龥぀-ゟ゠-ヿ]+"
MARKED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: The pattern of Qwen3.5, which keeps letters and their marks together.
LETTERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: Ways of cutting text, by what tokenizer.json says of them: patterns, "digits" one by one, "words" as GPT-2 has them.
CUTS = {
    (WORDS.replace("DIGITS", r"\p{N}"),): "qwen2",
    (WORDS.replace("DIGITS", r"\p{N}{1,3}"),): "llama-bpe",
    (CASES.replace("DIGITS", r"\p{N}").replace("ENDING", ""),): "tekken",
    (CASES.replace("DIGITS", r"\p{N}{1,3}").replace("ENDING", ENDING),): "gpt-4o",
    (r"\p{N}{1,3}", HAN, MARKED): "deepseek-v3",
    (LETTERS,): "qwen35",
    ("digits", "words"): "smollm",
    ("words",): "gpt-2",
}
#: Names for vocabularies whose words are not tokens as they are, but merged, where the usual name means the other.
MERGED = {"llama-bpe": "dbrx"}
#: Names whose readers take a word that is a token as that token, and those whose vocabulary gives the same either way.
WHOLE, EITHER = ("llama-bpe", "tekken"), ("gpt-4o",)
#: Longest token that is looked for merges, in characters.
LONGEST = 512
#: Names whose readers cut words before combining marks, where the model does not.
WITHOUT_MARKS = ("tekken", "gpt-4o")


def read(folder: Path, size: int) -> Metadata:
    """The vocabulary of a model folder, filled up to `size` entries; a mark that there is none, where there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return [("tokenizer.ggml.model", "text", "no_vocab")]
    tokenizer = json_file.read(path)
    try:
        return _read(folder, path, size, tokenizer)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        # Every access relies on the form that the tokenizers library writes.
        raise ConfigError(f"{path}: this is not a tokenizer: {type(error).__name__}: {error}") from None


def notes(folder: Path) -> list[str]:
    """Sentences on texts that readers encode otherwise than the model's tokenizer. After :func:`read`."""
    path, found = folder / "tokenizer.json", []
    if not path.is_file():
        return ["the model has no tokenizer.json, so the file has no vocabulary: llama.cpp needs one to run a model"]
    tokenizer = json_file.read(path)
    if "NFC" in [step["type"] for step in _steps(tokenizer.get("normalizer"), "normalizers")]:
        found.append("the tokenizer composes characters (NFC) before it encodes a text; llama.cpp does not")
    if tokenizer["model"].get("byte_fallback"):
        count, pair = _other_pairs(tokenizer["model"])
        if pair:
            some = f"{count} pairs of tokens, such as {pair[0]!r} and {pair[1]!r}"
            found.append(f"llama.cpp joins {some}, whose text is a token; the tokenizer does not have these merges")
    if not tokenizer["model"].get("byte_fallback") and _cut(path, tokenizer) in WITHOUT_MARKS:
        found.append("llama.cpp cuts words before combining marks, as in Hindi, where the tokenizer does not")
    return found


def _other_pairs(model: dict[str, Any]) -> tuple[int, tuple[str, str] | None]:
    """The number of pairs of tokens whose text is a token and which are no merge, and one of them. Tokens longer than
    `LONGEST` characters are left out: the time grows with the square of the length."""
    vocab, merges = model["vocab"], {pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]}
    count, some = 0, None
    for token in vocab:
        for i in range(1, len(token) if len(token) <= LONGEST else 0):
            a, b = token[:i], token[i:]
            if a in vocab and b in vocab and f"{a} {b}" not in merges:
                count, some = count + 1, some or (a, b)
    return count, some


def _steps(step: Any, name: str) -> list[Any]:
    """The steps of a part of a tokenizer, which may be one, none, or a sequence under `name`."""
    if not isinstance(step, dict):
        return []
    return step.get(name, []) if step.get("type") == "Sequence" else [step]


def _check_normalizer(path: Path, tokenizer: dict[str, Any], by_characters: bool) -> None:
    spaces = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    known = [{"type": "NFC"}, *(spaces if by_characters else [])]
    for step in _steps(tokenizer.get("normalizer"), "normalizers"):
        if step not in known:
            raise ConfigError(f"{path}: this change of a text before it is encoded has no GGUF form here: {step}")


def _read(folder: Path, path: Path, size: int, tokenizer: dict[str, Any]) -> Metadata:
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    if model.get("type") != "BPE":
        raise ConfigError(f"{path}: a tokenizer of type {model.get('type')} has no GGUF form here, expected BPE")
    for token, number in model["vocab"].items():
        if not isinstance(number, int) or not 0 <= number < LARGEST["vocab_size"]:
            expected = f"expected a whole number from 0 and below {LARGEST['vocab_size']}"
            raise ConfigError(f"{path}: the token {token!r} has the id {number!r}, {expected}")
    types = [UNUSED] * max(size, 1 + max(model["vocab"].values(), default=-1))
    tokens = [f"[PAD{i}]" for i in range(len(types))]
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, NORMAL
    for token in added:
        number = token["id"]
        if not isinstance(number, int) or not 0 <= number < len(tokens):
            raise ConfigError(f"{path}: the added token {token['content']!r} has the id {number}, of {size}")
        tokens[number], types[number] = token["content"], CONTROL if token.get("special") else USER_DEFINED
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    _check_normalizer(path, tokenizer, bool(model.get("byte_fallback")))
    if model.get("byte_fallback"):
        own = _by_characters(tokens, types, pairs, model, tokenizer)
    else:
        own = [
            ("tokenizer.ggml.model", "text", "gpt2"),
            ("tokenizer.ggml.pre", "text", _cut(path, tokenizer)),
            ("tokenizer.ggml.merges", "texts", pairs),
        ]
    lists: Metadata = [("tokenizer.ggml.tokens", "texts", tokens), ("tokenizer.ggml.token_type", "i32s", types)]
    return own + lists + _special(folder, {token: i for i, token in enumerate(tokens)})


def _by_characters(
    tokens: list[str], types: list[int], pairs: list[str], model: dict[str, Any], tokenizer: dict[str, Any]
) -> Metadata:
    """Scores stand for the order of merges: an earlier one is higher."""
    ranks = {pair.replace(" ", ""): rank for rank, pair in reversed(list(enumerate(pairs)))}
    scores = [-float(ranks.get(token, len(pairs))) for token in tokens]
    for number, token in enumerate(tokens):
        if token.startswith("<0x") and token.endswith(">") and len(token) == 6:
            types[number] = BYTE
        elif token == model.get("unk_token"):
            types[number] = UNKNOWN
    prefix = '"Prepend"' in json.dumps(tokenizer.get("normalizer")) or _prepends(tokenizer.get("pre_tokenizer"))
    return [
        ("tokenizer.ggml.model", "text", "llama"),
        ("tokenizer.ggml.pre", "text", "default"),
        ("tokenizer.ggml.scores", "f32s", scores),
        ("tokenizer.ggml.add_space_prefix", "bool", prefix),
    ]


def _prepends(step: Any) -> bool:
    return isinstance(step, dict) and step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never"


def _cut(path: Path, tokenizer: dict[str, Any]) -> str:
    """The name of the way in which text is cut before it is encoded."""
    cuts: list[str] = []
    for step in _steps(tokenizer.get("pre_tokenizer"), "pretokenizers") or [{}]:
        if step.get("type") == "Split":
            cuts.append(step["pattern"].get("Regex", ""))
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            cuts.append("digits")
        elif step.get("type") == "ByteLevel":
            cuts += ["words"] if step.get("use_regex", True) else []
        else:
            cuts.append(str(step.get("type")))
    found = CUTS.get(tuple(cuts))
    if found is None:
        raise ConfigError(f"{path}: this way of cutting text has no name in GGUF that is known here: {cuts}")
    whole = bool(tokenizer["model"].get("ignore_merges"))
    if not whole and found in MERGED:
        return MERGED[found]
    if whole != (found in WHOLE) and found not in EITHER:
        said = "take" if found in WHOLE else "do not take"
        where = f"{path}: `ignore_merges` is {whole}"
        raise ConfigError(f"{where}, but readers of {found!r} {said} words that are tokens as they are")
    return found


def _special(folder: Path, ids: dict[str, int]) -> Metadata:
    """Numbers of the tokens with a role, whether prompts begin with one, and the chat template."""
    settings = _json(folder / "tokenizer_config.json")
    config = _json(folder / "config.json")
    _, of_turn, _, begins = _native.end_tokens(folder)
    found: Metadata = []
    for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token = settings.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        number = ids.get(token, config.get(f"{role}_token_id")) if token else config.get(f"{role}_token_id")
        if isinstance(number, list):
            number = number[0] if number else None
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise ConfigError(f"{folder}: `{role}_token_id` is {number!r}, expected the id of a token")
        # Configurations say by -1, or by an id after the last, that there is no such token.
        if number is not None and 0 <= number < len(ids):
            found.append((f"tokenizer.ggml.{key}_token_id", "u32", number))
    if of_turn is not None:
        found.append(("tokenizer.ggml.eot_token_id", "u32", of_turn))
    found.append(("tokenizer.ggml.add_bos_token", "bool", begins))
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    if isinstance(text, str):
        found.append(("tokenizer.chat_template", "text", text))
    return found


def _json(path: Path) -> dict[str, Any]:
    fields = json_file.read(path) if path.is_file() else {}
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: holds {type(fields).__name__}, expected an object")
    return fields
