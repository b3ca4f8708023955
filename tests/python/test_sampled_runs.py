"""Runs that sample the answers that they train on: samples, rewards, checkpoints, refusals."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import surogate
import yaml
from safetensors.numpy import load_file
from surogate.cli.commands import main
from surogate.errors import ConfigError
from surogate.rewards.functions import call, load

ROOT = Path(__file__).parents[2]
STORIES = ROOT / "examples" / "stories"

REWARDS = '''
import os
import time


def vowels(completions, **_):
    return [sum(of.count(vowel) for vowel in "aeiou") / max(len(of), 1) for of in completions]


def seen(prompts, completions, completion_ids, name, **columns):
    assert not columns, columns
    print("a function may print")
    return [float(len(ids) > 0 and prompt.endswith(of)) for prompt, ids, of in zip(prompts, completion_ids, name, strict=True)]


def some(completions, **_):
    return [None if index % 2 else 1.0 for index in range(len(completions))]


def nothing(completions, **_):
    return [1.0]


def wrong(completions, name, **_):
    return [1 / (of != "Tom") for of in name]


def slow(**_):
    time.sleep(60)


def ends(**_):
    os._exit(3)


calls = 0


def falling(completions, **_):
    """Each call gives less than the one before, whatever the answers are."""
    global calls
    calls += 1
    return [1 / calls + of.count("a") / 1000 for of in completions]
'''

PROMPTS = [{"prompt": f"Once upon a time there was {name}", "name": name} for name in ("Lily", "Tom", "Mia", "Ben", "Sue")]


def options(tmp_path, function="vowels", **more):
    """A small run on stories, with functions in a file of their own."""
    (tmp_path / "functions.py").write_text(REWARDS)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return {
        "model": str(STORIES / "model"),
        "task": "grpo",
        "datasets": [{"path": str(tmp_path / "prompts.jsonl"), "type": "auto"}],
        "rewards": [{"function": f"{tmp_path / 'functions.py'}:{function}"}],
        "output_dir": str(tmp_path / "run"),
        "device": "cpu",
        "torch_dtype": "float32",
        "max_completion_length": 12,
        "sequence_len": 64,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "lora_rank": 4,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "max_steps": 4,
        **more,
    }


def command(tmp_path, name, *arguments, **more):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(options(tmp_path, **more)))
    call = [sys.executable, "-P", "-m", "surogate", name, str(path), *arguments]
    return subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, timeout=300)


def test_the_example_raises_its_reward(tmp_path):
    run = yaml.safe_load((ROOT / "examples" / "grpo.yaml").read_text())
    run |= {"model": str(ROOT / run["model"]), "output_dir": str(tmp_path), "max_steps": 12, "learning_rate": 1e-3}
    run["datasets"][0]["path"] = str(ROOT / run["datasets"][0]["path"])
    rewards = [metrics["reward"] for metrics in surogate.Trainer(run)]
    assert len(rewards) == 12 and sum(rewards[:2]) / 2 < 0.4 and sum(rewards[-3:]) / 3 > 0.8, rewards


@pytest.mark.parametrize("more", [{}, {"temperature": 0.7}, {"lora": False, "learning_rate": 1e-3}, {"sequence_len": 24}])
def test_sampler_and_training_give_the_same_probabilities(tmp_path, more):
    """Also after updates, and at a temperature of their own."""
    for metrics in surogate.Trainer(options(tmp_path, **more)):
        assert 0 <= metrics["sampling/sampling_logp_difference/max"] < 2e-4
        assert metrics["clip_ratio/region_mean"] == 0.0 and metrics["reward"] > 0.1
        assert metrics["completions/mean_length"] <= 12


def test_the_reference_at_a_temperature_is_the_model_without_its_adapter(tmp_path):
    trainer = surogate.Trainer(options(tmp_path, beta=0.1, temperature=1.5))
    steps = list(trainer)
    assert abs(steps[0]["kl"]) < 1e-6 and steps[-1]["kl"] > 1e-6


@pytest.mark.parametrize(
    "changed",
    [
        {"top_k": 1},
        {"top_p": 0.05},
        {"min_p": 0.9},
        {"scale_rewards": "none"},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"mask_truncated_completions": True},
        {"max_completion_length": 5},
    ],
)
def test_each_option_of_samples_changes_a_step(tmp_path, changed):
    functions = [{"function": "length", "tokens": 3}, {"function": "regex", "pattern": "[aeiou]{2}"}]
    usual = options(tmp_path)
    usual["rewards"] += functions
    found, other = (surogate.Trainer({**usual, **more}).step() for more in ({}, changed))
    assert found["grad_norm"] != other["grad_norm"]
    if changed in ({"top_k": 1}, {"top_p": 0.05}):
        assert other["frac_reward_zero_std"] > found["frac_reward_zero_std"]
    if "mask_truncated_completions" in changed:
        # All answers of this model are cut off here, and the run goes on.
        assert other["grad_norm"] == 0.0 and other["completions/clipped_ratio"] == 1.0


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_iterations": 2, "beta": 0.1},
        {"loss_type": "grpo", "temperature": 0.8},
        {"lora": False, "learning_rate": 1e-3, "zero_level": 3},
    ],
    ids=str,
)
def test_ranks_sample_and_learn_what_one_does(tmp_path, more):
    """Each rank samples a share of the answers, with the numbers that a single one would draw."""
    # Later draws may differ: the sums of ranks are rounded otherwise.
    more = {**more, "max_steps": 3}
    alone = list(surogate.Trainer(options(tmp_path, **more, gradient_accumulation_steps=4)))
    several = list(surogate.Trainer(options(tmp_path, **more, gpus=4, gradient_accumulation_steps=1)))
    assert len(alone) == len(several) == 3
    for one, all_ranks in zip(alone, several, strict=True):
        for name in ("loss", "grad_norm", "reward", "reward_std", "completions/mean_length", "kl", "tokens"):
            assert all_ranks.get(name, 0.0) == pytest.approx(one.get(name, 0.0), rel=2e-4, abs=1e-5), name
        assert all_ranks["sampling/sampling_logp_difference/max"] < 2e-4


def test_columns_of_rows_and_ids_reach_functions(tmp_path):
    trainer = surogate.Trainer(options(tmp_path, "seen", num_epochs=1, max_steps=-1))
    assert trainer.total_steps == 3
    metrics = trainer.step()
    assert metrics["rewards/seen/mean"] == 1.0 and metrics["frac_reward_zero_std"] == 1.0 and metrics["grad_norm"] == 0.0


def test_an_answer_without_a_reward_has_no_part(tmp_path):
    metrics = surogate.Trainer(options(tmp_path, "some")).step()
    assert metrics["reward"] == 1.0 and metrics["rewards/some/std"] == 0.0


def test_messages_and_questions_are_answered_by_the_template(tmp_path, shared):
    """Functions see messages where the prompt is messages."""
    rows = [
        {"question": "How much is 2 + 3?", "answer": "5"},
        {"messages": [{"role": "user", "content": "How much is 4 + 3?"}, {"role": "assistant", "content": "7"}], "answer": 7},
        {"text": "no prompt"},
    ]
    run = options(tmp_path, gradient_accumulation_steps=1)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "functions.py").write_text(
        "def vowels(prompts, completions, **_):\n"
        "    assert all(of[-1]['role'] == 'user' and of[0]['role'] == 'system' for of in prompts), prompts\n"
        "    assert all(len(of) == 1 and of[0]['role'] == 'assistant' for of in completions), completions\n"
        "    return [float(len(of[0]['content'])) for of in completions]\n"
    )
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:")
    run |= {"template": str(tmp_path / "template.jinja"), "max_steps": 2, "rewards": [*run["rewards"], {"function": "number", "weight": 0.5}]}
    run["datasets"][0] |= {"system_prompt_type": "fixed", "system_prompt": "Count."}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    call = [sys.executable, "-m", "surogate", "grpo", str(tmp_path / "run.yaml")]
    done = subprocess.run(call, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "1 row left out, the first:" in done.stdout and "row 3: there is none of prompt" in done.stdout
    assert "2 prompts; 1 with 4 answers each in a step" in done.stdout and "1 × vowels + 0.5 × number" in done.stdout


def test_prompts_that_are_too_long_are_told_and_then_end_the_run(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(options(tmp_path)))

    def check(long: int, broken: int = 0) -> tuple[int, str]:
        rows = [{"prompt": "Lily saw a cat. " * 12 if index < long else "Lily"} for index in range(20 - broken)]
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *[{"other": 1}] * broken]))
        code = main(["tokenize", str(path)])
        out, err = capsys.readouterr()
        return code, out + err

    code, text = check(2)
    assert code == 0 and "2 rows left out whose prompts have more than 52 tokens" in text and "keeps 99 % of them" in text, text
    for long, broken in ((11, 0), (6, 5)):
        code, text = check(long, broken)
        assert code == 4 and f"11 of 20 rows have no prompt that can be answered: {long} too long, {broken} otherwise" in text, text


def adapter(tmp_path):
    return load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("more", [{}, {"num_iterations": 2}])
def test_a_resumed_run_draws_the_same_answers(tmp_path, more):
    """With two updates on the same answers the checkpoint lies between them."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    once.mkdir()
    twice.mkdir()
    done = command(once, "grpo", **more)
    assert done.returncode == 0, done.stderr
    first = command(twice, "grpo", "max_steps=3", "save_steps=3", **more)
    assert first.returncode == 0, first.stderr
    second = command(twice, "grpo", "max_steps=4", "resume_from_checkpoint=true", **more)
    assert second.returncode == 0 and "resuming after 3 steps" in second.stdout, second.stderr + second.stdout
    for name, value in adapter(once).items():
        assert (value == adapter(twice)[name]).all(), name


def test_only_named_modules_of_the_working_directory_are_imported(tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit('the working directory was imported')")
    (tmp_path / "json.py").write_text("raise SystemExit('the working directory was imported')")
    rewards = [{"function": "functions:vowels"}, {"function": "json"}]
    done = command(tmp_path, "grpo", "max_steps=1", rewards=rewards)
    assert done.returncode == 0 and "1 × vowels + 1 × json" in done.stdout, done.stderr


def test_an_interrupted_run_finishes_its_step_and_goes_on(tmp_path):
    """Ctrl-C reaches the process of the reward functions, too."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(options(tmp_path, max_steps=200)))
    call = [sys.executable, "-u", "-m", "surogate", "grpo", str(path)]
    run = subprocess.Popen(call, stdout=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True)
    assert any(line.startswith("Step 1/") for line in run.stdout)
    os.killpg(run.pid, signal.SIGINT)
    printed = run.stdout.read()
    assert run.wait(120) == 130 and "Saved" in printed, printed
    done = command(tmp_path, "grpo", "max_steps=8", "resume_from_checkpoint=true")
    assert done.returncode == 0 and "resuming after" in done.stdout, done.stderr + done.stdout


def test_the_plan_names_what_sampling_takes(tmp_path, capsys):
    def planned(*more):
        words = ["plan", str(ROOT / "examples" / "grpo.yaml"), f"model={STORIES / 'model'}", *more, "--json"]
        assert main(words) == 0
        return json.loads(capsys.readouterr().out)

    whole = planned()["sampling"]
    assert (whole["answers"], whole["at_once"]) == (64, 64)
    assert 0 < whole["page_bytes"] < whole["memory_bytes"]
    assert whole["tokens_per_second"] == pytest.approx(64 * 64 / whole["seconds"])
    longer = planned("max_completion_length=128")["sampling"]
    assert longer["seconds"] > 1.5 * whole["seconds"] and longer["page_bytes"] == whole["page_bytes"]
    # Where pages do not fit, fewer answers are sampled at a time, and take more steps.
    little = planned("memory_limit=16MiB", "per_device_train_batch_size=1", "gradient_accumulation_steps=64")["sampling"]
    assert little["at_once"] < 64 and little["memory_bytes"] < 16 << 20 and little["seconds"] > whole["seconds"]
    plan = planned("max_steps=10", "num_iterations=2")
    steps = 10 * plan["estimate"]["step_seconds"] + 5 * plan["sampling"]["seconds"]
    assert plan["estimate"]["run_seconds"] == pytest.approx(steps)


def test_log_and_report_have_answers_with_their_rewards(tmp_path):
    done = command(tmp_path, "grpo")
    assert done.returncode == 0 and "| Reward: 0." in done.stdout, done.stderr
    log = next((tmp_path / "run").glob("log-*.json"))
    events = [json.loads(line) for line in log.read_text().splitlines()]
    samples = [event for event in events if event["event"] == "samples"]
    assert samples and samples[0]["step"] == 1
    shown = samples[0]["samples"][0]
    assert shown["prompt"].startswith("Once upon") and set(shown["rewards"]) == {"vowels"} and shown["text"]
    assert shown["text"].startswith(" ") and shown["text"][:10] in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("function", "more", "said"),
    [
        ("wrong", {}, "reward `wrong`: ZeroDivisionError: division by zero; first for the answer"),
        ("nothing", {}, "reward `nothing`: it returned [1.0]"),
        ("slow", {"reward_timeout": 0.5}, "reward `slow` gave no answer within 0.5 s (`reward_timeout`)"),
        ("ends", {}, "the process of reward functions ended: exit status: 3"),
        ("missing", {}, "has no function or class `missing`; it has ends, falling, nothing, seen, slow, some, vowels, wrong"),
        ("vowels", {"num_generations": 3}, "`num_generations: 3` does not divide the 8 answers of a step"),
        ("vowels", {"rewards": None}, "`task: grpo` needs `rewards`"),
        ("vowels", {"rewards": [{"function": "nmber"}]}, "expected `module:name` or one of number, regex, json, length"),
        ("vowels", {"rewards": [{"function": "regex"}]}, "`function: regex` needs `pattern`"),
        ("vowels", {"rewards": [{"function": "number", "field": "age"}]}, "reads the field `age`"),
        ("vowels", {"max_completion_length": 64}, "leaves no token of `sequence_len: 64` for a prompt"),
        ("vowels", {"sequence_len": 14}, "no row has a prompt"),
        ("vowels", {"gpus": 2, "sequence_parallel_size": 2}, "`sequence_parallel_size: 2` is not available yet with `task: grpo`"),
        ("vowels", {"gpus": 3, "num_generations": 5}, "does not divide the 24 answers of a step"),
        ("vowels", {"sapo_temperature_pos": 2.0}, "`sapo_temperature_pos` has no effect on `loss_type: dapo`"),
        ("vowels", {"loss_type": "sigmoid"}, "`task: grpo` has no loss `sigmoid`"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path, function, more, said):
    with pytest.raises(surogate.SurogateError) as error:
        list(surogate.Trainer(options(tmp_path, function, **more)))
    assert said in str(error.value), error.value


def test_options_of_samples_belong_to_grpo(tmp_path):
    run = {**options(tmp_path), "task": "sft", "datasets": [{"path": str(STORIES / "data" / "shakespeare.txt"), "type": "text"}]}
    with pytest.raises(ConfigError, match="`num_generations` has no effect on `task: sft`"):
        surogate.Trainer(run)


@pytest.mark.parametrize(
    ("given", "completions", "columns", "expected"),
    [
        ({"function": "number"}, ["so 1,234.50", "7", "none"], {"answer": ["#### 1234.5", 7, 3]}, [1, 1, 0]),
        ({"function": "number", "field": "n"}, [[{"role": "assistant", "content": "it is -2"}]], {"n": [-2]}, [1]),
        ({"function": "regex", "pattern": "^a.*z$"}, ["a\nz", "az!"], {}, [1, 0]),
        ({"function": "json"}, ['{"a": 1}', "```json\n[1]\n```", "{a}"], {}, [1, 1, 0]),
        ({"function": "length", "tokens": 2}, ["", "", ""], {"completion_ids": [[1], [1, 2, 3], [1] * 4]}, [0, -0.5, -1]),
    ],
)
def test_built_in_functions(given, completions, columns, expected):
    assert call(load(given), [""] * len(completions), completions, columns) == expected


class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("1.0", "a value of type str, 1.0, expected 2 numbers"),
        (3, "a value of type int, 3, expected 2"),
        ({0: 1.0, 1: 1.0}, "a value of type dict, .* expected 2 numbers"),
        ({1.0, 2.0}, "a value of type set"),
        (b"ab", "a value of type bytes"),
        (None, "a value of type NoneType"),
        (np.float32(1), "expected 2 numbers"),
        (np.array(1.0), "expected 2 numbers"),
        ([1.0], r"it returned \[1.0\], expected 2 numbers, one for each answer"),
        (itertools.count(), "expected 2 numbers"),
        ([0, float("inf")], "it returned inf for answer 2, expected a finite number"),
        ([0, float("nan")], "it returned nan for answer 2, expected a finite number, or None"),
        (np.array([np.nan, 1]), "it returned nan for answer 1"),
        (["x", 0], "it returned 'x' for answer 1, expected a number or None"),
        ([0, 10**400], "for answer 2, expected a number or None"),
    ],
)
def test_wrong_rewards_are_refused(returned, said):
    with pytest.raises(ConfigError, match=said):
        call(lambda **_: returned, ["", ""], ["", ""], {})


@pytest.mark.parametrize("returned", [[1, None], (1, None), np.array([1, None]), iter([1, None])])
def test_rewards_are_a_number_or_nothing_for_each_answer(returned):
    assert call(lambda **_: returned, ["", ""], ["", ""], {}) == [1.0, None]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Unreadable(), "Unreadable, whose text cannot be read; first for the answer 'b'"),
        (KeyboardInterrupt(), "KeyboardInterrupt; first for the answer 'b'"),
        (SystemExit(3), "SystemExit: 3; first for the answer 'b'"),
    ],
)
def test_whatever_a_reward_function_raises_is_its_error(error, said):
    def raises(completions, **_):
        if "b" in completions:
            raise error
        return [0] * len(completions)

    with pytest.raises(ConfigError, match=said):
        call(raises, ["", ""], ["a", "b"], {})


def test_a_reward_module_that_exits_is_named(tmp_path):
    (tmp_path / "exits.py").write_text("raise SystemExit(2)")
    with pytest.raises(ConfigError, match="exits.py cannot be imported: SystemExit: 2"):
        load({"function": f"{tmp_path / 'exits.py'}:any"})


def test_reward_functions_may_change_their_arguments():
    def changes(prompts, completions, name, **_):
        completions[0][0].clear()
        for of in (prompts, completions, name):
            of.clear()
        return [1, 2]

    completions = [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}]]
    given = (["p", "q"], completions, {"name": ["x", "y"]})
    before = json.dumps(given)
    assert call(changes, *given) == [1, 2]
    assert json.dumps(given) == before


@pytest.mark.filterwarnings("error")
def test_asynchronous_reward_functions_are_awaited():
    async def lengths(completions, **_):
        await asyncio.sleep(0)
        return [1 / len(of) for of in completions]

    assert call(lengths, ["", ""], ["a", "bc"], {}) == [1, 0.5]
    with pytest.raises(ConfigError, match="ZeroDivisionError: division by zero; first for the answer ''"):
        call(lengths, ["", ""], ["a", ""], {})


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda completions, trainer_state, **_: [0], r"`trainer_state`, which is not passed \(give it the default None\)"),
        (lambda completions, age, **_: [0], "takes `age`, which is not passed; prompts, completions, name are passed"),
        (lambda prompts, completions: [0], "does not take `name`; prompts, completions, name are passed"),
    ],
)
def test_arguments_that_do_not_fit_a_reward_function_are_named(function, said):
    with pytest.raises(ConfigError, match=said):
        call(function, [""], [""], {"name": [""]})
    with pytest.raises(ConfigError, match="a column `prompts`, which is an argument of reward functions"):
        call(function, [""], [""], {"prompts": [""]})


@pytest.mark.parametrize("loss", [{}, {"loss_type": "bnpo", "beta": 0.05}, {"num_iterations": 2}])
def test_answers_that_share_their_prompt_give_the_numbers_of_rows_of_their_own(loss, tmp_path):
    """The same answers are drawn: the losses and gradients of the first round are the same but for rounding."""
    run = options(tmp_path, **loss, learning_rate=1e-5, max_steps=2)
    apart, shared = (list(surogate.Trainer({**run, "share_prompts": share})) for share in (False, True))
    for one, other in zip(apart, shared, strict=True):
        assert other["reward"] == one["reward"]
        for key in ("loss", "grad_norm", "entropy", "sampling/sampling_logp_difference/mean"):
            assert other[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
    assert sum(step["tokens"] for step in shared) < sum(step["tokens"] for step in apart)
