"""Every bf16 row of the table on one GPU: `surogate sft` itself, a peer for comparison, one table, lines for the record.

    table.py [--only NAME,NAME] [--seconds 60] [--warm-up 8] [--peer .../lean.py] [--out FOLDER] [--again]
             [--commit HASH] [--csv FILE] [--budget SECONDS] [--device cuda|cpu] [--tiny] [--list]
    table.py --collect FILE... [--csv FILE]

A row takes about `--seconds` and 30 more, the peer about 40. Rows whose figures lie in `FOLDER/rows.jsonl` are not run
again, so that a table can be made in several calls; `--budget` stops before a row that would not end in time. The
commit is that of git, or of `--commit`. `--collect` prints the table of such files and appends what the record lacks.
Without `--peer` the peer's column stays empty. Needs the surogate package and, for the peer, PyTorch.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import one_run  # noqa: E402
import peer  # noqa: E402
from rows import MIXTURES, ROWS, Row, vocabulary, write_data, write_model  # noqa: E402

COLUMNS = (
    "date,commit,driver,cuda,work,model,precision,batch,accumulation,seq_len,tokens_per_second,mfu,peak_memory_gb,"
    "planned_memory_gb,planned_tokens_per_second,notes"
).split(",")

# Used memory may exceed the plan by this share, or by these bytes.
MEMORY_SHARE, MEMORY_BYTES = 0.01, 300e6


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of rows, or parts of names, with commas between")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=8.0)
    parser.add_argument("--budget", type=float, default=float("inf"))
    parser.add_argument("--peer", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=HERE.parents[1] / "output" / "table")
    parser.add_argument("--csv", type=pathlib.Path)
    parser.add_argument("--commit")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--collect", type=pathlib.Path, nargs="+")
    for flag in ("--again", "--tiny", "--list"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_args()


def commit_of(a: argparse.Namespace) -> str:
    if a.commit:
        return str(a.commit)
    words = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    try:
        shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        sys.exit("table.py: there is no git checkout here: name the commit with --commit")
    return shown


def machine() -> dict[str, str]:
    """The card, its driver, and the CUDA version of the kernels' compiler."""
    words = [sys.executable, "-m", "surogate", "doctor", "--json"]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    versions = {library["library"]: library.get("version", "") for library in found["libraries"]}
    return {
        "card": one_run.nvml("name") or "cpu",
        "driver": one_run.nvml("driver_version") or "",
        "cuda": versions.get("nvrtc", ""),
    }


def write_run(a: argparse.Namespace, row: Row, folder: pathlib.Path) -> pathlib.Path:
    """The row as a file that `surogate sft` takes."""
    length, tokens = (128, 20_000) if a.tiny else (2048, 4_000_000)
    model = write_model(folder / "model", row.model, a.tiny)
    data = write_data(folder / "data.jsonl", row.packed, length, tokens, vocabulary(row.model, a.tiny))
    options: dict[str, Any] = {
        "model": str(model),
        "init": "random",
        "torch_dtype": "bfloat16",
        "device": a.device,
        "datasets": [{"path": str(data), "type": "tokens"}],
        "output_dir": str(folder / "output"),
        "sequence_len": length,
        "per_device_train_batch_size": row.batch,
        "gradient_accumulation_steps": row.accumulation,
        "max_steps": 1_000_000,
        "save_steps": 1_000_000,
        "eval_steps": 1_000_000,
        "learning_rate": 1e-4,
        "optimizer": "adamw_8bit",
        "lora": row.work == "lora",
        "lora_rank": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        # Of the third step, which lies in the warm-up.
        "debug_time_breakdown": True,
    }
    # Every JSON value is a YAML value.
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in (options | dict(row.options)).items())
    run = folder / "run.yaml"
    run.write_text(text)
    return run


def one_row(a: argparse.Namespace, row: Row, here: dict[str, str], commit: str) -> dict[str, Any]:
    """Ours, then the peer. Files of the run are left in a folder of the row's name."""
    stamp = time.strftime("%H%M%S")
    folder = a.out / f"{row.name}-{stamp}"
    folder.mkdir(parents=True)
    run = write_run(a, row, folder)
    result: dict[str, Any] = {"row": row.name, "commit": commit, "date": datetime.date.today().isoformat()} | here
    result |= {"batch": row.batch, "accumulation": row.accumulation, "seq_len": 128 if a.tiny else 2048}
    try:
        result |= one_run.watch(run, folder / "output", a.warm_up, a.seconds, a.warm_up + a.seconds + 240)
    except one_run.Failed as problem:
        result["error"] = str(problem)
    (folder / "data.jsonl").unlink()
    if a.peer is not None and row.baseline is None and row.model not in MIXTURES:
        result["peer"] = peer.run(a.peer, row, a.out / "peer", 100.0)
    return result


def planned_rate(result: dict[str, Any]) -> float | None:
    planned = result.get("planned_seconds_per_step")
    return result["tokens_per_step"] / planned if planned else None


def record_line(result: dict[str, Any]) -> dict[str, Any]:
    """A result in the columns of the record."""
    row, gib = ROWS[result["row"]], one_run.GIB
    planned = planned_rate(result)
    used = result["used"] or result["memory_in_log"]
    notes = [
        f"row {row.name} of bench/device/table.py",
        f"{result['seconds']:.0f} s, median of {result['steps']} steps",
    ]
    notes += [f"{name} {value}" for name, value in row.options] + ["packed documents of ~150 tokens"] * row.packed
    if "tokens_per_second" in result.get("peer", {}):
        notes.append(f"peer {result['peer']['tokens_per_second']:.0f} ({result['peer']['how']}, short run)")
    notes.append(f"{result['to_step_1']:.1f} s to step 1; {result['card']}")
    values = [result["date"], result["commit"], result["driver"], result["cuda"], row.work, row.model, "bf16"]
    values += [result["batch"], result["accumulation"], result["seq_len"], f"{result['tokens_per_second']:.0f}"]
    values += ["" if result["mfu"] is None else f"{result['mfu']:.3f}", f"{used / gib:.2f}"]
    values += [f"{result['planned_memory'] / gib:.2f}", "" if planned is None else f"{planned:.0f}", "; ".join(notes)]
    return dict(zip(COLUMNS, values, strict=True))


def append(path: pathlib.Path, results: list[dict[str, Any]]) -> int:
    """Adds what the record lacks; gives the number of lines."""
    text = path.read_text() if path.is_file() else ""
    known = {tuple(line.values()) for line in csv.DictReader(text.splitlines())}
    lines = [record_line(result) for result in results if "error" not in result]
    new = [line for line in lines if tuple(str(value) for value in line.values()) not in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not text:
            writer.writeheader()
        writer.writerows(new)
    return len(new)


def verdict(row: Row, rate: float, of: dict[str, dict[str, Any]]) -> str:
    if row.baseline is not None:
        name, share = row.baseline
        if "tokens_per_second" not in of.get(name, {}):
            return f"wants {share:.2f} × {name}, which was not run"
        ratio = rate / of[name]["tokens_per_second"]
        return f"{ratio:.3f} × {name}, wants {share:.2f}: {'reached' if ratio >= share else 'MISSED'}"
    if row.must_beat is not None and rate <= row.must_beat:
        return "does NOT beat what it must"
    return "target reached" if row.target is not None and rate >= row.target else "beats what it must"


def show(results: list[dict[str, Any]], tiny: bool) -> str:
    """The table as text; sizes in GiB, rates in thousand tokens per second."""
    of = {result["row"]: result for result in results}
    head = f"{'row':20} {'ours':>7} {'peer':>7} {'ratio':>6} {'beat':>6} {'target':>6} {'MFU':>6}"
    lines = [head + f" {'planned':>8} {'off':>6} {'used':>7} {'plan':>7} {'start':>6}  verdict"]
    for name, row in ROWS.items():
        result = of.get(name)
        if result is None:
            continue
        if "error" in result:
            words = " ".join(result["error"].split())
            lines.append(f"{name:20} FAILED: {words[:60]} … {words[-300:]}")
            continue
        rate, planned, gib = result["tokens_per_second"], planned_rate(result), one_run.GIB
        peer_rate = result.get("peer", {}).get("tokens_per_second")
        number = lambda value, form: "–" if value is None else format(value, form)  # noqa: E731
        thousand = lambda value: number(None if value is None else value / 1e3, ".1f")  # noqa: E731
        used = result["used"] or result["memory_in_log"]
        over = used - result["planned_memory"] > max(MEMORY_SHARE * result["planned_memory"], MEMORY_BYTES)
        text = f"{name:20} {thousand(rate):>7} {thousand(peer_rate):>7} {number(peer_rate and rate / peer_rate, '.3f'):>6}"
        text += f" {thousand(row.must_beat):>6} {thousand(row.target):>6} {number(result['mfu'], '.1%'):>6}"
        text += f" {thousand(planned):>8} {number(planned and planned / rate - 1, '+.1%'):>6} {used / gib:7.2f}"
        text += f" {result['planned_memory'] / gib:7.2f} {result['to_step_1']:6.1f}  "
        words = [] if tiny else [verdict(row, rate, of)]
        words += ["more memory than planned"] * (over and result["used"] is not None)
        lines.append((text + "; ".join(words)).rstrip())
        if "error" in result.get("peer", {}):
            lines.append(f"    the peer failed: {' '.join(result['peer']['error'].split())[-200:]}")
    return "\n".join(lines)


def read(paths: list[pathlib.Path]) -> list[dict[str, Any]]:
    """Results of files, the last of each row."""
    lines = [line for path in paths if path.is_file() for line in path.read_text().splitlines()]
    return list({result["row"]: result for result in map(json.loads, lines)}.values())


def record_of(card: str) -> pathlib.Path:
    name = "-".join(card.lower().split())
    return HERE.parent / "results" / f"{name}.csv"


def main() -> int:
    a = arguments()
    wanted = [word for word in a.only.split(",") if word]
    rows = [
        row for name, row in ROWS.items() if not wanted or any(w == name or w not in ROWS and w in name for w in wanted)
    ]
    if a.list:
        print("\n".join(row.name for row in rows))
        return 0
    if a.collect:
        results = read(a.collect)
        print(show(results, a.tiny))
        for result in results:
            append(a.csv or record_of(result["card"]), [result])
        return 0
    commit, here, began = commit_of(a), machine(), time.monotonic()
    journal = a.out / "rows.jsonl"
    for row in rows:
        done = {result["row"] for result in read([journal]) if "error" not in result and result["commit"] == commit}
        if row.name in done and not a.again:
            continue
        needed = a.warm_up + a.seconds + 25 + (50 if a.peer is not None and row.baseline is None else 0)
        if time.monotonic() - began + needed > a.budget:
            print(f"{row.name} and what follows it are left for another call", flush=True)
            break
        result = one_row(a, row, here, commit)
        a.out.mkdir(parents=True, exist_ok=True)
        with journal.open("a") as file:
            file.write(json.dumps(result) + "\n")
        append(a.csv or record_of(here["card"]), [result])
        print(show([result], a.tiny).splitlines()[-1], flush=True)
    results = read([journal])
    print("\n" + show(results, a.tiny))
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
