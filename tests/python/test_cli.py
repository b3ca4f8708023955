"""The command line: what it prints and with which code it ends."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import platform
import pty
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from surogate.cli.arguments import UsageError, split_overrides
from surogate.cli.commands import main

STORIES = Path(__file__).parents[2] / "examples" / "stories"


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def test_overrides_are_distinguished_from_flags():
    words = "run.yaml --zero-level 2 --set a.b=c=d --json --max-steps=-1 --set=e=f --machine h200".split()
    rest, overrides = split_overrides(words)
    assert rest == ["run.yaml", "--json", "--machine", "h200"]
    assert overrides == [("zero_level", "2"), ("a.b", "c=d"), ("max_steps", "-1"), ("e", "f")]


@pytest.mark.parametrize("words", [["--lora-rank"], ["--lora-rank", "--json"], ["--set"], ["--set", "novalue"]])
def test_overrides_need_values(words):
    with pytest.raises(UsageError):
        split_overrides(words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run.yaml --lora", [("lora", "true")]),
        ("--lora run.yaml", [("lora", "true")]),
        ("--no-lora run.yaml", [("lora", "false")]),
        ("run.yaml --resume-from-checkpoint", [("resume_from_checkpoint", "true")]),
        ("--resume-from-checkpoint --lora run.yaml", [("resume_from_checkpoint", "true"), ("lora", "true")]),
        ("run.yaml --resume-from-checkpoint output/step_10", [("resume_from_checkpoint", "output/step_10")]),
        ("--no-merge-adapter run.yaml", [("merge_adapter", "false")]),
        ("--lora false run.yaml", [("lora", "false")]),
        ("--lora=false run.yaml", [("lora", "false")]),
        ("--foo run.yaml", [("foo", "true")]),
        ("run.yaml --foo", [("foo", "true")]),
        ("run.yaml --no-foo --lora", [("no_foo", "true"), ("lora", "true")]),
        ("run.yaml --lr 3", [("lr", "3")]),
        ("run.yaml learning_rate=1e-3 datasets.0.path=a=b", [("learning_rate", "1e-3"), ("datasets.0.path", "a=b")]),
    ],
)
def test_options_are_taken_as_other_programs_take_them(words, expected):
    rest, overrides = split_overrides(["sft", *words.split()])
    assert (rest, overrides) == (["sft", "run.yaml"], expected)


def test_a_file_whose_name_has_an_equals_sign_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rate=3.yaml").write_text("")
    assert split_overrides(["sft", "rate=3.yaml"]) == (["sft", "rate=3.yaml"], [])
    assert split_overrides(["merge", "rank=3"]) == (["merge", "rank=3"], [])


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("lr: 1", "it is `learning_rate` here"),
        ("base_model: x", "it is `model` here"),
        ("per_device_batch_size: 1", "it is `per_device_train_batch_size` here"),
        ("train_batch_size: 8", "it is `batch_size` here"),
        ("packing: true", "it is `sample_packing` here"),
        ("load_in_4bit: true", "`qlora_bnb: true`"),
        ("val_set_size: 0.1", "it is `validation_split_ratio` here"),
        ("gradient_checkpointing: true", "`recompute_block: true`"),
        ("seed: 1", "`train_seed`"),
        ("chat_template: chatml", "it is `template` here"),
        ("max_length: none", "write `null`"),
        ("special_tokens: {pad_token: x}", "`new_tokens` adds others"),
        ("finetuning_type: full", "`lora: false`"),
        ("fp16: false", "remove it: it is off here, too"),
        ("lora_target: all", "`lora_target_modules: [all-linear]`"),
        ("adapter: lora", "`lora: true` trains adapters"),
        ("stage: sft", "`surogate sft run.yaml` says it"),
        ("do_train: true", "remove it"),
        ("lora_rnk: 1", "did you mean `lora_rank`?"),
    ],
)
def test_names_of_other_trainers_have_hints(capsys, run_file, line, hint):
    with run_file[0].open("a") as file:
        file.write(line + "\n")
    code, _, err = run(capsys, "sft", run_file[0])
    assert code == 2 and hint in err
    assert not run_file[1].exists()


def test_hints_are_right(capsys, run_file):
    for value in ("null", "none", "tensorboard", "[tensorboard]"):
        code, out, err = run(capsys, "show", "config", run_file[0], "--report-to", value)
        assert code == 0 and ("report_to: [\"tensorboard\"]" in out) == ("tensorboard" in value), err
    code, out, _ = run(capsys, "show", "config", run_file[0], "--lora-target-modules", "all-linear")
    assert code == 0 and 'lora_target_modules: ["all-linear"]  # given' in out
    code, _, err = run(capsys, "show", "config", run_file[0], "--lora-target-modules", "q_proj,v_proj")
    assert code == 2 and "write `[q_proj,v_proj]`" in err
    code, _, err = run(capsys, "show", "config", run_file[0], "--report-to", "[none, wandb]")
    assert code == 2 and "has `none` next to trackers" in err


def test_help_has_choices_and_groups_in_80_columns(capsys):
    code, out, _ = run(capsys, "sft", "--help-all")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    assert "One of: linear, cosine, cosine_with_restarts, wsd, constant." in words
    assert "--distributed.num-nodes" in words and "datasets[].messages_field" in words
    for word in ("--per-device-train-batch-size", "micro-batches", "--gradient-accumulation-steps"):
        assert word in out


def test_what_is_not_there_is_told_with_the_mistakes_of_the_file(capsys, tmp_path):
    path, output = tmp_path / "run.yaml", tmp_path / "deep" / "output"
    path.write_text(
        f"model: {tmp_path}/none\nlearning_rte: 1\noutput_dir: {output}\n"
        f"datasets:\n- path: {tmp_path}/none.jsonl\n  type: text\n"
    )
    code, _, err = run(capsys, "sft", path)
    assert code == 2
    assert f"{path}:1:8: there is no folder" in err and f"{path}:2:1: there is no option" in err
    assert f"{path}:5:9: there is no such file or folder" in err
    assert not output.parent.exists()


def test_targets_and_weights_are_checked_before_the_data(capfd, run_file):
    with run_file[0].open("a") as file:
        file.write("lora_target_modules: [q_proj, w_proj]\n")
    data = run_file[0].parent / "data.jsonl"
    data.write_text("this is no data\n")
    code, _, err = run(capfd, "sft", run_file[0])
    assert code == 2 and "`w_proj` matches no linear" in err and "hint: " in err
    assert re.search(rf"{run_file[0]}:\d+:\d+: ", err)
    assert not run_file[1].exists()


def test_a_run_whose_data_are_refused_leaves_no_folder(capfd, run_file):
    (run_file[0].parent / "data.jsonl").write_text("this is no data\n")
    code, _, err = run(capfd, "sft", run_file[0])
    assert code == 4 and "data.jsonl" in err
    assert not run_file[1].exists()


def test_the_end_of_a_run_says_what_came_of_it(capfd, run_file):
    code, out, _ = run(capfd, "sft", run_file[0], "--max-steps", "1", "--eval-steps", "1")
    assert code == 0
    assert re.search(r"Done after [\d.]+ (ms|s): 1 step, evaluation \d\.\d{4}\n", out)
    assert f"Report: {run_file[1]}/report.html\n" in out
    assert f"surogate merge {run_file[1]}\n" in out and f"surogate push {run_file[1]} OWNER/NAME" in out
    assert "Evaluation after 1 step |" in out and "; 1 step\n" in out
    logs = [path.name for path in run_file[1].glob("log-*.json")]
    assert len(logs) == 1 and len(re.findall(r"\d{8}-\d{6}", logs[0])) == 1
    code, out, err = run(capfd, "merge", run_file[1])
    assert code == 0 and "0.00" not in out, err
    assert (run_file[1] / "merged" / "model.safetensors").is_file()


def test_logging_steps_thins_the_console_and_not_the_log(capfd, run_file):
    code, out, _ = run(capfd, "sft", run_file[0], "--max-steps", "5", "--logging-steps", "2")
    shown = [line.split("/")[0] for line in out.splitlines() if line.startswith("Step ")]
    assert (code, shown) == (0, ["Step 1", "Step 3", "Step 4"])
    log = next(run_file[1].glob("log-*.json")).read_text()
    assert log.count('"event":"step"') == 5


def test_a_signal_while_modules_are_loaded_leaves_no_traceback(tmp_path):
    """The program is stopped as soon as the engine's library is in its memory."""
    for _ in range(5):
        started = subprocess.Popen(
            [sys.executable, "-P", "-m", "surogate", "sft", str(tmp_path / "none.yaml")],
            stderr=subprocess.PIPE,
            text=True,
        )
        maps = f"/proc/{started.pid}/maps"
        while started.poll() is None:
            with contextlib.suppress(OSError), open(maps) as file:
                if "_native" in file.read():
                    started.send_signal(signal.SIGINT)
                    break
        _, said = started.communicate()
        assert "Traceback" not in said
        # It may have ended by itself just before.
        assert started.returncode in (130, 2), said


def test_a_full_disk_is_told_before_the_first_step(capfd, run_file, monkeypatch):
    place = run_file[0].parent / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        code, out, err = run(capfd, "sft", run_file[0], "--checkpoint-dir", place / "c", "--output-dir", place / "o")
    finally:
        subprocess.run(["umount", str(place)], check=True)
    assert code == 1 and "not enough space" in err and "`save_total_limit`" in err
    assert "Step " not in out


@pytest.fixture
def run_file(tmp_path, make_model):
    """A short run on data of its own; gives the file and the folder that it writes to."""
    from conftest import tiny_llama

    data = tmp_path / "data.jsonl"
    rows = [{"input_ids": [(7 * i + j) % 90 + 1 for j in range(12)]} for i in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""
model: {make_model(tiny_llama(initializer_range=0.3))}
output_dir: {tmp_path / "output"}
device: cpu
torch_dtype: float32
datasets: [{{path: {data}, type: tokens}}]
sequence_len: 48
per_device_train_batch_size: 2
gradient_accumulation_steps: 1
max_steps: 12
save_steps: 6
learning_rate: 2e-2
"""
    )
    return path, tmp_path / "output"


def test_a_run_from_yaml_to_adapter(capfd, run_file):
    path, folder = run_file
    code, out, err = run(capfd, "sft", path)
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if line.startswith("Step ")]
    assert re.fullmatch(
        r"Step 0/12 \| Loss: \d\.\d{4} \| Norm: \d+\.\d\d \| LR: \d\.\d\de-\d\d \| \d+\.\d\ds \| \d+ tok/s"
        r" \| Epoch \d\.\d\d \| \d+\.\d\d GiB",
        lines[0],
    )
    assert len(lines) == 12
    (log,) = folder.glob("log-*.json")
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [event["loss"] for event in steps if event["event"] == "step"]
    assert len(losses) == 12 and losses[-1] < losses[0]
    expected = {"adapter", "checkpoint-6", "checkpoint-12", "manifest.json", "report.html", "resolved.yaml"}
    expected |= {log.name, "trainer_state.json"}
    assert {entry.name for entry in folder.iterdir()} == expected
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    state = json.loads((folder / "trainer_state.json").read_text())
    assert (state["global_step"], state["max_steps"]) == (12, 12)
    assert [entry["loss"] for entry in state["log_history"] if "loss" in entry] == losses
    code, _, err = run(capfd, "sft", path)
    assert code == 2 and "holds another run" in err


def test_events_of_the_log_go_to_programs(capfd, run_file):
    path, folder = run_file
    code, out, err = run(capfd, "sft", path, "--json", "--max-steps", "3")
    assert (code, err) == (0, "")
    (log,) = folder.glob("log-*.json")
    assert [json.loads(line) for line in out.splitlines()] == [
        json.loads(line) for line in log.read_text().splitlines()
    ]
    code, _, err = run(capfd, "sft", path, "--json", "--quiet")
    assert code == 2 and "not allowed with" in err


def test_pt_trains_the_weights_themselves(capfd, run_file):
    path, folder = run_file
    code, _, err = run(capfd, "pt", path, "--max-steps", "2")
    assert (code, err) == (0, "")
    assert (folder / "model" / "model.safetensors").is_file()


def test_an_adapter_is_merged_in_the_run_and_afterwards(capfd, run_file):
    path, folder = run_file
    code, out, err = run(capfd, "sft", path, "--max-steps", "3", "--merge-adapter", "true")
    assert (code, err) == (0, "") and f"Merged: {folder / 'merged'}" in out
    code, out, _ = run(capfd, "merge", folder / "adapter", "--output", folder / "again")
    assert code == 0 and "14 of 21 tensors adapted" in out, out
    name = "model.safetensors"
    assert (folder / "again" / name).read_bytes() == (folder / "merged" / name).read_bytes()
    code, _, err = run(capfd, "merge", folder / "adapter")
    assert code == 2 and "nothing is overwritten" in err
    code, _, err = run(capfd, "merge", folder / "adapter", "--lora-rank", "3")
    assert code == 2 and "--lora_rank is not a flag of this command" in err


@pytest.mark.parametrize(
    ("what", "text"), [("graph", "graph LlamaForCausalLM"), ("program", "entry update"), ("memory", "in all")]
)
def test_show_prints_each_stage(capsys, run_file, what, text):
    code, out, _ = run(capsys, "show", what, run_file[0])
    assert code == 0 and text in out
    assert not run_file[1].exists()


def test_plan_is_made_for_a_machine_that_is_not_here(capsys, run_file):
    code, out, _ = run(capsys, "plan", run_file[0], "--machine", "h200", "--json")
    plan = json.loads(out)
    assert code == 0 and plan["machine"]["arch"] == "sm_90a"
    assert plan["memory_bytes"] == sum(line["bytes"] for line in plan["memory"]) > 0
    assert plan["estimate"]["step_seconds"] > 0
    code, _, err = run(capsys, "plan", run_file[0], "--machine", "abacus")
    assert code == 2 and "known: a100-40" in err and "h200" in err


def test_what_does_not_fit_ends_with_3(capsys, run_file):
    code, _, err = run(capsys, "plan", run_file[0], "--machine", "h200", "--memory-limit", "1MiB")
    assert code == 3 and "the smallest plan needs" in err


@pytest.fixture
def wide_layers(tmp_path):
    """run.yaml of adapters on four layers of a 7B shape with random weights: plans of all 32 take half a minute each."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "vocab_size": 32000}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", **sizes, **heads}))
    (tmp_path / "data.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3, 4]}))
    data = {"path": str(tmp_path / "data.jsonl"), "type": "tokens"}
    options = {"model": str(tmp_path), "init": "random", "torch_dtype": "bfloat16", "sequence_len": 512, "datasets": [data]}
    (tmp_path / "run.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items()))
    return tmp_path / "run.yaml"


def test_a_refusal_names_options_that_make_it_fit(capsys, wide_layers):
    """Codes of frozen weights fit, those of trained ones together with these do not."""
    words = ["plan", wide_layers, "--machine", "rtx3090", "--memory-limit", "2560MiB"]
    code, _, err = run(capsys, *words)
    assert code == 3 and "`qlora_bnb: true`" in err, err
    assert run(capsys, *words, "--qlora-bnb", "true")[0] == 0
    words = ["plan", wide_layers, "--machine", "rtx4090", "--memory-limit", "5632MiB", "--recipe", "fp8_hybrid"]
    assert run(capsys, *words)[0] == 0
    code, _, err = run(capsys, *words, "--lora", "false")
    assert code == 3 and "`recipe: bf16`" in err and "`lora: true`" in err, err
    assert run(capsys, *words, "--lora", "false", "--recipe", "bf16")[0] == 0


def test_recommended_formats_follow_the_machine(capsys, wide_layers):
    """FP8 products where they were measured and pay, NF4 weights where nothing else fits, neither against one's word."""
    words = ["plan", wide_layers, "--apply-recommended-values", "true"]
    chosen = run(capsys, *words, "--machine", "h200")[1]
    assert "recipe: fp8_hybrid (" in chosen and "qlora_bnb" not in chosen, chosen
    chosen = run(capsys, *words, "--machine", "h200", "--recipe", "bf16")[1]
    assert "fp8_hybrid" not in chosen, chosen
    chosen = run(capsys, *words, "--machine", "rtx4090")[1]
    assert "recipe: fp8_hybrid (" in chosen and "measured on Hopper alone" in chosen and "qlora_bnb" not in chosen, chosen
    small = [*words, "--machine", "rtx3090", "--memory-limit", "2560MiB"]
    code, chosen, _ = run(capsys, *small)
    assert code == 0 and "qlora_bnb: true (" in chosen and "fp8_hybrid" not in chosen, chosen
    assert run(capsys, *small, "--qlora-bnb", "false")[0] == 3


def test_data_that_cannot_be_trained_on_ends_with_4(capfd, run_file, tmp_path):
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}] * 4
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = run(capfd, "sft", run_file[0])
    assert code == 4 and "data.jsonl" in err


def test_a_loss_that_is_no_number_ends_with_5(capfd, run_file):
    code, _, err = run(capfd, "sft", run_file[0], "--learning-rate", "1e30", "--max-grad-norm", "0")
    assert code == 5 and "diverged" in err, err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_saves_and_ends(run_file, number, code):
    path, folder = run_file
    words = [sys.executable, "-m", "surogate", "sft", str(path), "--max-steps", "1000000", "--save-steps", "1000000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("Step 3/"):
                process.send_signal(number)
                break
        rest = process.stdout.read()
    assert process.returncode == code
    assert "saving a checkpoint" in rest
    assert len(list(folder.glob("checkpoint-*/state.json"))) == 1


def test_a_signal_ends_the_run_at_its_next_checkpoint(run_file):
    path, folder = run_file
    words = [sys.executable, "-m", "surogate", "sft", str(path), "--max-steps", "1000000", "--save-steps", "40"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("Step 3/"):
                process.send_signal(signal.SIGUSR2)
                break
        rest = process.stdout.read()
    assert process.returncode == 140 and "saving a checkpoint" not in rest, rest
    *_, last = re.findall(r"^Step (\d+)/", rest, re.MULTILINE)
    (saved,) = (int(of.parent.name.removeprefix("checkpoint-")) for of in folder.glob("checkpoint-*/state.json"))
    assert saved == int(last) + 1 and saved % 40 == 0


def test_a_second_interrupt_ends_the_run_at_once(run_file):
    path, folder = run_file
    words = [sys.executable, "-m", "surogate", "sft", str(path)]
    # A step takes an epoch, which is long: its end is not waited for.
    words += ["--gradient-accumulation-steps", "100000", "--set", "datasets.0.repeats=1000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        while not (folder / "resolved.yaml").exists():
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    assert not list(folder.glob("checkpoint-*"))


def test_quiet_prints_nothing_and_logs_everything(capfd, run_file):
    path, folder = run_file
    assert run(capfd, "sft", path, "--quiet") == (0, "", "")
    (log,) = folder.glob("log-*.json")
    assert log.read_text().count('"event":"step"') == 12
    code, out, err = run(capfd, "sft", path, "--quiet")
    assert code == 2 and out == "" and "holds another run" in err


@pytest.mark.parametrize("colour", [True, False])
def test_a_terminal_gets_a_bar_below_the_lines(run_file, colour):
    main_end, run_end = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    fcntl.ioctl(run_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment |= {"TERM": "xterm"} | ({} if colour else {"NO_COLOR": "1"})
    words = [sys.executable, "-m", "surogate", "sft", str(run_file[0]), "--max-steps", "40"]
    with subprocess.Popen(words, stdout=run_end, stderr=run_end, env=environment) as process:
        os.close(run_end)
        shown = b""
        # Reading from a terminal whose other end is closed is an error on Linux.
        with contextlib.suppress(OSError):
            while part := os.read(main_end, 65536):
                shown += part
        os.close(main_end)
    text = shown.decode()
    assert process.returncode == 0, text
    assert " left" in text and "Step 39/40 | Loss: " in text
    assert re.search(r"loss \d\.\d{4} [▁-█]{8,32} · \d+ tok/s", text), text
    pieces = re.split(r"\x1b\[[0-9;?]*[A-Za-z]|\s{3,}|[\r\n━╸─]", text)
    lines = [found[0] for piece in pieces if (found := re.search(r"(Step \d|loss \d\.).*", piece))]
    assert len(lines) > 40 and max(map(len, lines)) <= 80, lines
    assert ("\x1b[36m" in text) == colour


def test_a_disk_that_fills_up_ends_the_run_and_keeps_what_was_saved(run_file):
    path, folder = run_file
    words = [sys.executable, "-m", "surogate", "sft", str(path), "--lora-rank", "2"]
    assert subprocess.run([*words, "--max-steps", "6"], capture_output=True, check=False).returncode == 0
    states = {file: file.read_bytes() for file in (folder / "checkpoint-6").iterdir()}
    most = max(len(content) for content in states.values()) - 1

    def full() -> None:  # No file may grow beyond this: the system's answer is that of a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    more = [*words, "--resume-from-checkpoint", "true", "--log-file", str(folder / "second.json")]
    done = subprocess.run(more, capture_output=True, text=True, check=False, preexec_fn=full)
    assert done.returncode == 1 and "cannot write" in done.stderr and "too large" in done.stderr, done.stderr
    assert {file: file.read_bytes() for file in (folder / "checkpoint-6").iterdir()} == states
    assert not (folder / "checkpoint-12").exists()
    assert [entry.name for entry in folder.iterdir() if entry.name.startswith(".")] == []
    done = subprocess.run(more, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and (folder / "checkpoint-12").is_dir(), done.stderr


def test_a_folder_that_cannot_be_written_is_reported_before_anything_runs(capfd, run_file, tmp_path):
    (tmp_path / "file").write_text("")
    for option in ("--output-dir", "--checkpoint-dir"):
        code, out, err = run(capfd, "sft", run_file[0], option, tmp_path / "file" / "inside")
        assert code == 1 and "cannot create" in err and "Step" not in out, err


@pytest.mark.parametrize(
    ("words", "least"),
    [
        (["--only", "adamw,linear,rowwise"], 500),
        pytest.param(["--own-kernels"], 2000, marks=pytest.mark.long),
        pytest.param([], 3000, marks=pytest.mark.long),
    ],
)
def test_doctor_holds_operations_against_their_references(words, least, capfd):
    assert results_of_operations(capfd, *words) > least


def results_of_operations(capfd, *words: str) -> int:
    """The number of results that the doctor compared, none of which differs."""
    code, out, err = run(capfd, "doctor", "--operations", *words)
    assert re.search(r"surogate: 0 of \d+ examples compared\n", err), "it takes minutes on a GPU"
    counts = re.search(r"operations on \w+: (\d+) results, 0 differ", out)
    assert code == 0 and counts, out
    return int(counts[1])


def test_own_kernels_are_those_of_operations_that_call_no_library(capfd):
    products, others = (results_of_operations(capfd, "--only", name) for name in ("linear", "adamw"))
    assert results_of_operations(capfd, "--only", "adamw,linear", "--own-kernels") == others > 0 < products


def test_doctor_takes_own_kernels_of_operations_only(capfd):
    code, _, err = run(capfd, "doctor", "--own-kernels")
    assert code == 2 and "--own-kernels needs --operations" in err, err


def test_doctor_never_fails(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert code == 0 and found["device"] in ("cpu", "cuda", "rocm")
    of = {vendor: [row["library"] for row in found["libraries"] if row["vendor"] == vendor] for vendor in ("NVIDIA", "AMD")}
    assert of["NVIDIA"] == ["driver", "nvrtc", "cublaslt", "cudnn", "nccl", "nvml"]
    assert of["AMD"] == ["hip", "hiprtc", "hipblaslt", "rccl", "amdsmi"]
    for row in found["libraries"]:
        wanted = {"version", "path", "origin"} if row["found"] else {"missing", "mend"}
        assert wanted <= row.keys() and row["needed_for"], row
    installed = {row["extra"]: row["version"] for row in found["extras"]}
    assert installed.keys() == {"wandb", "aim", "tensorboard", "eval", "cloud", "distributed"}
    code, out, _ = run(capsys, "doctor")
    assert all(f"  {row['package']:<12} {row['version'] or 'not installed'}" in out for row in found["extras"])
    assert "nodes that a Ray cluster starts" in out


def test_doctor_says_which_command_mends_what_is_missing(capsys, monkeypatch, tmp_path):
    broken = tmp_path / "lib64" / "libcudnn.so.9"
    broken.parent.mkdir()
    broken.write_text("no library")
    monkeypatch.setenv("SUROGATE_CUDA_PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and f"not usable: {broken} cannot be loaded" in out, out
    assert "to fix it: pip install --force-reinstall --upgrade nvidia-cudnn-cu13" in out
    assert f"{tmp_path / 'cache' / 'surogate' / 'cuda'} (0 entries" in out


def test_doctor_finds_an_installation_of_rocm_that_is_broken(capsys, monkeypatch, tmp_path):
    broken = tmp_path / "lib" / "libamdhip64.so.7"
    broken.parent.mkdir()
    broken.write_text("no library")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and f"HIP (libamdhip64): not usable: {broken} cannot be loaded" in out, out
    assert "install ROCm 6 or newer" in out
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "nowhere"))
    code, out, _ = run(capsys, "doctor")
    assert "AMD GPUs: ROCm was not found (`device: rocm` needs it)" in out, out


def test_a_gpu_of_amd_that_is_not_there_is_an_error_that_says_what_is_missing(run_file, capfd):
    code, _, err = run(capfd, "sft", run_file[0], "--device", "rocm")
    assert code == 1 and "no AMD GPU can be used here" in err and "ROCm 6 or newer" in err, err


def test_doctor_writes_a_report_without_private_data(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SUROGATE_CUDA_PATH", str(tmp_path / "jane" / "secret"))
    written = tmp_path / "report.json"
    code, out, _ = run(capsys, "doctor", "--report", written, "--only", "rmsnorm")
    report = json.loads(written.read_text())
    assert code == 0 and report["operations"]["differing"] == 0, out
    assert "results, 0 differ" in report["operations"]["verdict"]
    assert {"report", "date", "system", "libraries", "gpus", "device", "surogate"} <= report.keys()
    for private in ("jane", "secret", str(tmp_path)):
        assert private not in written.read_text(), private
    for name in (platform.node(), getpass.getuser()):
        assert not re.search(rf"\b{re.escape(name)}\b", written.read_text()), name
    code, _, err = run(capsys, "doctor", "--report", written, "--operations")
    assert code == 2 and "--report compares all operations itself" in err


def test_a_run_tells_what_it_did_before_its_first_step(run_file):
    path, folder = run_file
    # In a process of its own: only the first run of a process has the time of the interpreter.
    words = [sys.executable, "-m", "surogate", "sft", str(path), "--max-steps", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    code, out = done.returncode, done.stdout
    (line,) = [line for line in out.splitlines() if line.startswith("First step after ")]
    assert code == 0 and re.match(r"First step after \d+\.\d\d s: interpreter, options and model \d", line), line
    (log,) = folder.glob("log-*.json")
    (event,) = [event for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "startup"]
    names = [phase["phase"] for phase in event["phases"]]
    wanted = ["data", "folders", "plan", "weights", "first step"]
    assert [name for name in names if name in wanted] == wanted
    assert abs(sum(phase["seconds"] for phase in event["phases"]) - event["seconds"]) < 1e-6


def test_a_run_trains_while_large_weights_are_hashed_and_its_manifest_gets_the_digest(tmp_path):
    model, output = tmp_path / "model", tmp_path / "output"
    shutil.copytree(STORIES / "model", model)
    # Hashed with the weights, as every file of its kind, and read by nothing else: zeros that take no room on the disk.
    with (model / "further.safetensors").open("wb") as file:
        file.truncate(3 << 30)
    text = f"model: {model}\ndatasets: [{{path: {STORIES / 'data' / 'shakespeare.txt'}, type: text}}]\n"
    (tmp_path / "run.yaml").write_text(text + f"sequence_len: 64\nmax_steps: 1000000\noutput_dir: {output}\n")
    words = [sys.executable, "-m", "surogate", "sft", str(tmp_path / "run.yaml"), "--save-strategy", "no"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            digests: list[object] = []
            end = time.monotonic() + 120
            while time.monotonic() < end and not (digests and digests[-1]) and process.poll() is None:
                if (output / "manifest.json").is_file():
                    digests.append(json.loads((output / "manifest.json").read_text())["digests"]["model"])
                time.sleep(0.02)
            assert process.poll() is None and digests[-1]["weights"], digests[-1:]
        finally:
            process.kill()
    (log,) = output.glob("log-*.json")
    assert any(json.loads(line)["event"] == "step" for line in log.read_text().splitlines())


def test_schema_is_json(capsys):
    code, out, _ = run(capsys, "schema")
    assert code == 0 and "learning_rate" in json.loads(out)["properties"]


def test_help_lists_the_options(capsys):
    code, out, _ = run(capsys, "sft", "--help-all")
    assert code == 0 and "--learning-rate float" in out and "--lora-rank" in out


def test_every_problem_of_a_configuration_is_reported_at_once(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: x\nzero_leve: 1\nlearning_rate: fast\n")
    code, out, err = run(capsys, "show", "config", path, "--lora-rnk", "4")
    assert code == 2 and out == ""
    assert f"{path}:2:1" in err and "did you mean `zero_level`" in err
    assert f"{path}:3:16" in err and "lora_rnk" in err


def test_show_config_says_what_was_given_and_what_is_chosen(capsys, run_file):
    code, out, _ = run(capsys, "show", "config", run_file[0], "--lora-rank", "4")
    assert code == 0
    assert "learning_rate: 0.02  # given" in out and "lora_rank: 4  # given" in out
    # Decided by the files and the moment of the run.
    later = {"data_cache", "template", "clock", "recompute_lora", "exact_sampling"}
    open_ones = {line.split(":")[0] for line in out.splitlines() if re.match(r"\w+: auto(?! *#)", line)}
    assert open_ones <= later, "each other `auto` has a value or a reason"
    assert re.search(r"warmup_steps: \d+  # auto: ", out) and "model_type: llama  # auto: " in out
    assert re.search(r"recompute_block: (true|false|auto)  # auto: ", out)
    assert not run_file[1].exists()


@pytest.mark.parametrize(
    "words", [["sft"], ["sft", "missing.yaml"], ["fly"], ["schema", "--lora", "true"], ["sft", "a.yaml", "b.yaml"]]
)
def test_wrong_usage_ends_with_2(capsys, words):
    code, _, err = run(capsys, *words)
    assert code == 2 and err


def test_paths_begin_at_home_and_variables_are_refused(capsys, run_file, tmp_path, monkeypatch):
    path, _ = run_file
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    text = path.read_text().replace(f"{tmp_path}/", "~/")
    assert text.count("~/") >= 2
    path.write_text(text)
    code, out, err = run(capsys, "sft", "~/run.yaml" if path.parent == tmp_path else path, "--output-dir", "~/runs", "--max-steps", "1")
    assert code == 0, err
    assert (tmp_path / "runs" / "adapter").is_dir() and not (tmp_path / "~").exists()
    assert run(capsys, "report", "--output=~/page.html", "~/runs")[0] == 0 and (tmp_path / "page.html").is_file()
    code, out, _ = run(capsys, "show", "config", path, "--checkpoint-dir=~/points", "--log-file=~/log.json")
    assert f'checkpoint_dir: "{tmp_path}/points"  # given' in out and f'log_file: "{tmp_path}/log.json"  # given' in out
    for option in ("output_dir", "checkpoint_dir", "log_file", "data_cache", "adapter", "model", "resume_from_checkpoint"):
        for value, name in (("$HOME/x", "`$HOME`"), ("a/${RUN}", "`${RUN}`"), ("~user/x", "`~user`")):
            code, _, err = run(capsys, "sft", path, f"--set={option}={value}")
            assert code == 2 and f"`{option}` is `{value}`, and " in err and name in err, err
    code, _, err = run(capsys, "sft", path, "--set=datasets.0.path=$DATA/rows.jsonl")
    assert code == 2 and "`datasets[0].path`" in err and "`$DATA`" in err
    code, _, err = run(capsys, "merge", "$RUN/adapter")
    assert code == 2 and "`$RUN`" in err
    assert sorted(entry.name for entry in tmp_path.iterdir() if "$" in entry.name or "~" in entry.name) == []


def test_few_steps_are_told_before_they_are_done(capfd, run_file):
    path, _ = run_file
    rows = (path.parent / "data.jsonl").read_text().splitlines()[:12]
    (path.parent / "data.jsonl").write_text("\n".join(rows) + "\n")
    few = ["--num-epochs", "2", "--max-steps", "-1", "--sample-packing", "false", "--validation-split-ratio", "0"]
    code, out, err = run(capfd, "sft", path, *few, "--per-device-train-batch-size", "4", "--gradient-accumulation-steps", "4")
    assert code == 0, err
    note = "Note: the run has only 2 optimizer steps: a step takes 16 rows (4 × 4) and an epoch has 12; it has "
    assert note in out and out.index(note) < out.index("Step 0/2")
    for command in ("plan", "tokenize"):
        _, out, _ = run(capfd, command, path, *few)
        assert "optimizer steps: a step takes" in out, command
    _, out, _ = run(capfd, "tokenize", path, *few, "--max-steps", "2")
    assert "optimizer steps" not in out and "; 2 steps in " in out, out


def test_show_config_of_several_runs_shows_each(capsys, run_file):
    path, _ = run_file
    path.write_text(path.read_text() + "runs:\n  - run_name: a\n    lora_rank: 2\n  - run_name: b\n    lora_rank: 3\n")
    code, out, _ = run(capsys, "show", "config", path)
    assert code == 0 and out.index("# Run 1 of 2: a") < out.index("lora_rank: 2") < out.index("# Run 2 of 2: b")
    assert out.index("# Run 2 of 2: b") < out.index("lora_rank: 3")
    assert "lora_rank: 3" in run(capsys, "show", "config", path, "--run", "b")[1]


def test_the_short_help_leads_to_the_long_one_and_to_init(capsys):
    code, short, _ = run(capsys, "sft", "--help")
    assert code == 0 and len(short.splitlines()) < 120
    assert "surogate init MODEL DATASET" in short and "--help-all" in short and "--learning-rate float" in short
    assert "--neftune-noise-alpha" not in short


def test_a_mistyped_folder_is_no_name_on_the_hub(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    code, _, err = run(capsys, "merge", "runs/frist")
    assert code == 2 and "there is no folder `runs/frist`; did you mean `runs/first`?" in err, err


def test_a_plan_needs_nothing_but_a_configuration(capsys, tmp_path):
    """Without tokenizer and weights; what is assumed for them is named."""
    fields = {"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 30)
    options = {"model": str(tmp_path), "datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "auto"}]}
    (tmp_path / "run.yaml").write_text(json.dumps(options))
    for more, expected in (
        ({"torch_dtype": "bfloat16"}, "there is no tokenizer.json in"),
        ({}, "say of which type these are: planned as bfloat16"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "is already quantized (MXFP4), and its weights are not here"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | more))
        code, out, err = run(capsys, "plan", tmp_path / "run.yaml", "--machine", "h100")
        assert code == 0 and expected in out and "Assumed: rows of 512 tokens" in out, err
        code, _, err = run(capsys, "sft", tmp_path / "run.yaml", "--device", "cpu", "--output-dir", tmp_path / "out")
        assert code != 0 and not (tmp_path / "out").exists(), "a run needs them"


def test_what_takes_long_says_so(capsys, run_file, monkeypatch):
    from surogate import _native, terminal

    preview = _native.preview
    monkeypatch.setattr(_native, "preview", lambda *given: (time.sleep(0.3), preview(*given))[1])
    monkeypatch.setattr(terminal, "NOTES_AFTER", (0.05, 0.1))
    code, out, err = run(capsys, "plan", run_file[0])
    assert code == 0 and re.search(r"surogate: planning, \d+ s so far\n", err) and "so far" not in out
    monkeypatch.setattr(terminal, "NOTES_AFTER", (60.0, 60.0))
    assert run(capsys, "plan", run_file[0])[2] == ""


def test_a_result_says_what_adds_host_memory(capsys, tmp_path):
    """Codes that do not fit together with what else is on the card lie in host memory: how much of it is said."""
    sizes = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    (tmp_path / "data.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3, 4]}))
    data = {"path": str(tmp_path / "data.jsonl"), "type": "tokens"}
    options = {"model": str(tmp_path), "init": "random", "sequence_len": 512, "datasets": [data]}
    (tmp_path / "run.yaml").write_text(json.dumps(options))
    code, _, err = run(capsys, "plan", tmp_path / "run.yaml", "--machine", "rtx4090", "--memory-limit", "8GiB")
    assert code == 3 and re.search(
        r"`qlora_bnb: true` \(\d\.\d\d GiB, and \d\.\d\d GiB of host memory for [a-z, ]*frozen weights in codes\)", err
    ), err


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        ("--output-dir", "", "`output_dir` is empty, expected a folder"),
        ("--resume-from-checkpoint", "s3://b/run/checkpoint-2", "is an address, expected `true` or a local folder"),
    ],
)
def test_folders_that_are_none_are_refused(capsys, run_file, option, value, part):
    code, _, error = run(capsys, "sft", run_file[0], option, value)
    assert code == 2 and part in error, error
