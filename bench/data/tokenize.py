"""Conversations to labelled tokens: `surogate tokenize` and `datasets.map` with transformers, whole processes alternately.

    tokenize.py MODEL_FOLDER CONVERSATIONS.jsonl [--peer PYTHON] [--copies 10] [--pairs 3] [--workers 2]

PYTHON is an interpreter with transformers and datasets. Both sides read the same file (its lines repeated, each copy
with another first word, so that nothing is answered from a store of words), write the model's chat template, encode,
mark what of the assistant is trained, and keep the rows: ours with its cache of rows in an empty folder, the peer with
that of datasets. The peer renders with the template of the same text in which answers stand between generation marks,
by which `apply_chat_template(return_assistant_tokens_mask=True)` gives its masks. Start and import are measured besides
it on one conversation and taken off on both sides. The third column is ours with the library that the peer uses, by
`SUROGATE_ENCODER=library`. Ratios are of neighbouring runs, so that what slows the machine for longer falls out.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

PEER = """
import json, sys
from datasets import Dataset
from transformers import AutoTokenizer

folder, data, template, workers, cache = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.chat_template = open(template).read()

def encode(rows):
    reported = tokenizer.apply_chat_template(
        rows["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(reported["input_ids"], reported["assistant_masks"])
    labels = [[i if m else -100 for i, m in zip(ids, mask)] for ids, mask in pairs]
    return {"input_ids": reported["input_ids"], "labels": labels}

rows = Dataset.from_json(data, cache_dir=cache)
several = int(workers) if len(rows) > 1 else None
done = rows.map(encode, batched=True, num_proc=several, remove_columns=rows.column_names)
print("TOKENS", sum(map(len, done["input_ids"])), sum(x != -100 for row in done["labels"] for x in row))
"""

# The ChatML part of templates, with the answers marked; equal text for conversations without tools and thoughts.
MARKED = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- if loop.last -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- generation -%}
{{- message.content + '<|im_end|>' -}}
{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("conversations", type=pathlib.Path)
    parser.add_argument("--peer", default=sys.executable)
    for name, value in {"copies": 10, "pairs": 3, "workers": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def repeat(source: pathlib.Path, target: pathlib.Path, copies: int, rows: int | None = None) -> None:
    lines = source.read_text().splitlines()[:rows]
    with target.open("w") as out:
        for copy in range(copies):
            for line in lines:
                row = json.loads(line)
                row["messages"][0]["content"] = f"({copy}) " + row["messages"][0]["content"]
                out.write(json.dumps({"messages": row["messages"]}) + "\n")


def timed(command: list[str], **variables: str) -> tuple[float, float, str]:
    """Wall seconds, processor seconds and output of a process with its children."""
    before, start = os.times(), time.perf_counter()
    reported = subprocess.run(command, text=True, capture_output=True, env={**os.environ, **variables})
    wall, after = time.perf_counter() - start, os.times()
    if reported.returncode:
        raise SystemExit(f"{' '.join(command[:4])} …: {reported.stderr[-2000:]}")
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, spent, reported.stdout


def main() -> None:
    a = arguments()
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        many, one = folder / "many.jsonl", folder / "one.jsonl"
        repeat(a.conversations, many, a.copies)
        repeat(a.conversations, one, 1, rows=1)
        (folder / "peer.py").write_text(PEER)
        (folder / "marked.jinja").write_text(MARKED)

        def ours(data: pathlib.Path, encoder: str) -> tuple[float, float, str]:
            shutil.rmtree(folder / "rows", ignore_errors=True)
            run = {
                "model": str(a.folder.resolve()), "init": "random", "device": "cpu", "sequence_len": 32768,
                "dataloader_num_workers": a.workers, "data_cache": str(folder / "rows"),
                "validation_split_ratio": 0, "datasets": [{"path": str(data), "type": "conversation"}],
            }  # fmt: skip
            (folder / "run.yaml").write_text(json.dumps(run))
            command = [sys.executable, "-m", "surogate", "tokenize", str(folder / "run.yaml")]
            return timed(command, SUROGATE_ENCODER=encoder)

        def peer(data: pathlib.Path) -> tuple[float, float, str]:
            shutil.rmtree(folder / "peer", ignore_errors=True)
            command = [a.peer, str(folder / "peer.py"), str(a.folder.resolve()), str(data)]
            command += [str(folder / "marked.jinja"), str(a.workers), str(folder / "peer")]
            return timed(
                command, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", HF_DATASETS_DISABLE_PROGRESS_BARS="1"
            )

        sides = {"ours": lambda d: ours(d, "auto"), "library": lambda d: ours(d, "library"), "peer": peer}
        start = {name: min(side(one)[:2] for _ in range(2)) for name, side in sides.items()}
        print("start alone, wall and processor seconds:", {k: tuple(round(x, 2) for x in v) for k, v in start.items()})
        rounds: list[dict[str, tuple[float, float]]] = []
        for number in range(a.pairs):
            reported = {name: side(many) for name, side in sides.items()}
            if number == 0:
                tokens = re.search(r"TOKENS (\d+) (\d+)", reported["peer"][2])
                assert tokens is not None
                print("peer: tokens, trained:", *tokens.groups())
                print(reported["ours"][2].strip())
            rounds.append(
                {n: (max(w - start[n][0], 0.01), max(c - start[n][1], 0.01)) for n, (w, c, _) in reported.items()}
            )
            print({name: tuple(round(x, 2) for x in pair) for name, pair in rounds[-1].items()}, flush=True)
        for name in ("library", "ours"):
            for index, what in enumerate(("wall", "processor")):
                ratios = sorted(pair["peer"][index] / pair[name][index] for pair in rounds)
                print(
                    f"{name}: {statistics.median(ratios):.2f}x of the peer by {what} time "
                    f"({ratios[0]:.2f}-{ratios[-1]:.2f})"
                )


if __name__ == "__main__":
    main()
