"""`surogate merge` against peft's merge_and_unload, weight by weight, in every type that weights come in.

    python tests/oracle/compare_merges.py [--cases N] [--seed S]

Needs what compare_transformers.py needs, whose drawn models and adapters it takes. Exit code 1 if anything was out
of tolerance.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

import torch
from compare_transformers import Report, adapt, draw_model, read_folder, relative
from surogate.cli.commands import main as surogate
from transformers import AutoModelForCausalLM

#: Relative L2 of a weight: the order of a sum in float32, and what a rounding makes of it where it was nearly a tie.
ALLOWED = {torch.float32: 1e-6, torch.bfloat16: 2e-4, torch.float16: 5e-5}


def merges(report: Report, rng: random.Random, folder: Path) -> None:
    dtype = rng.choice(list(ALLOWED))
    model = draw_model(rng, folder / "model", dtype)
    adapted = adapt(rng, model)
    adapted.save_pretrained(folder / "adapter")
    report.case += f" {model.config.model_type} {dtype} tied {model.config.tie_word_embeddings}"
    with torch.no_grad():
        merged = adapted.merge_and_unload()
    code = surogate(
        ["merge", str(folder / "adapter"), "--model", str(folder / "model"), "--output", str(folder / "out")]
    )
    if code:
        return report.fail(f"surogate merge ended with {code}")
    found, expected = read_folder(folder / "out"), merged.state_dict()
    for name, weight in found.items():
        report.check(name, relative(weight, expected[name].float().numpy()), ALLOWED[dtype], str(dtype))
    loaded, notes = AutoModelForCausalLM.from_pretrained(folder / "out", output_loading_info=True)
    if any(notes[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")) or loaded.dtype != dtype:
        report.fail(f"transformers loads {loaded.dtype} and says {notes}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = Report()
    for case in range(options.seed, options.seed + options.cases):
        report.case = f"merges {case}"
        with tempfile.TemporaryDirectory() as folder:
            merges(report, random.Random(f"merges {case}"), Path(folder))
    worst = ", ".join(f"{kind} {share:.2f}" for kind, share in report.worst.items())
    print(f"{report.compared} comparisons, {report.failed} failed; worst shares of the tolerances: {worst}")
    return int(report.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
