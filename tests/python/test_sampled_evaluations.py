"""Evaluations of runs that sample answers: rewards of answers to prompts that are held out."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
import surogate
import yaml
from safetensors.numpy import load_file
from surogate.errors import ConfigError
from test_sampled_runs import PROMPTS, command, options


def evaluations(folder):
    log = next((folder / "run").glob("log-*.json"))
    return [event for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "evaluation"]


def adapter(folder):
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def held_out(tmp_path, count=3):
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS[:count]))
    return [{"path": str(path), "type": "auto"}]


def test_an_evaluation_judges_answers_to_held_out_prompts(tmp_path):
    """The answers of all prompts, with the same random numbers each time, and those of training as they were."""
    more = {"validation_datasets": held_out(tmp_path), "num_generations_eval": 2}
    trainer = surogate.Trainer(options(tmp_path, **more))
    first, again = trainer.evaluate(), trainer.evaluate()
    assert first["loss"] is None and 0 < first["reward"] < 1 and first["step"] == 0
    # 3 prompts × 2 answers of at most 12 tokens.
    assert first["tokens"] == round(6 * first["completions/mean_length"]) <= 72
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    steps = [trainer.step() for _ in range(4)]
    assert trainer.evaluate()["reward"] != first["reward"]
    plain = [metrics["loss"] for metrics in surogate.Trainer(options(tmp_path))]
    assert [metrics["loss"] for metrics in steps] == plain


def test_answers_of_an_evaluation_are_the_same_at_any_number_at_once(tmp_path):
    def rewards(rows):
        more = {"validation_datasets": held_out(tmp_path, 5), "per_device_train_batch_size": rows}
        return surogate.Trainer(options(tmp_path, **more)).evaluate()["reward"]

    assert rewards(4) == pytest.approx(rewards(8), abs=1e-6)


def test_a_share_of_the_prompts_is_held_out(tmp_path):
    found = command(tmp_path, "grpo", validation_split_ratio=0.2, eval_steps=2)
    assert found.returncode == 0, found.stderr
    assert "4 prompts, 1 held out; 2 with 4 answers each in a step" in found.stderr + found.stdout
    assert "Evaluation after 2 steps | Reward: 0." in found.stderr + found.stdout
    events = evaluations(tmp_path)
    assert [event["step"] for event in events] == [2, 4]
    assert all(event["loss"] is None and event["reward"] > 0 for event in events)
    card = next((tmp_path / "run").glob("adapter/README.md")).read_text()
    assert f"| evaluation reward, last | {events[-1]['reward']:.4f} |" in card


def test_the_best_reward_decides_which_weights_are_the_result(tmp_path):
    """With rewards that fall from call to call the first evaluation is the best: the result is that of one step."""
    more = {"function": "falling", "eval_steps": 1, "validation_datasets": held_out(tmp_path)}
    found = command(tmp_path, "grpo", load_best_model_at_end=True, save_steps=100, **more)
    text = found.stderr + found.stdout
    assert found.returncode == 0, text
    rewards = {event["step"]: event["reward"] for event in evaluations(tmp_path)}
    assert list(rewards.values()) == sorted(rewards.values(), reverse=True) and len(rewards) == 4
    assert f"with the highest reward: {rewards[1]:.4f}" in text
    assert "`load_best_model_at_end` goes by the reward of 3 prompts, which says little" in text
    best = adapter(tmp_path / "run")
    assert command(tmp_path, "grpo", max_steps=1, output_dir=str(tmp_path / "one"), **more).returncode == 0
    one = adapter(tmp_path / "one")
    assert best.keys() == one.keys() and all((best[name] == one[name]).all() for name in one)


def test_a_run_stops_early_without_a_higher_reward(tmp_path):
    more = {"early_stopping_patience": 1, "eval_steps": 1, "max_steps": 20, "learning_rate": 1e-12}
    found = command(tmp_path, "grpo", validation_datasets=held_out(tmp_path), **more)
    assert found.returncode == 0, found.stderr
    assert "Stopping early: 1 evaluation without a higher reward (the best was" in found.stderr + found.stdout


def test_a_resumed_run_evaluates_as_one_in_one_piece(tmp_path):
    more = {"validation_split_ratio": 0.4, "eval_steps": 2, "save_steps": 2}
    whole = command(tmp_path, "grpo", output_dir=str(tmp_path / "run"), **more)
    assert whole.returncode == 0, whole.stderr
    expected = [(event["step"], event["reward"]) for event in evaluations(tmp_path)]
    (tmp_path / "parts").mkdir()
    first = command(tmp_path / "parts", "grpo", **more, max_steps=2)
    assert first.returncode == 0, first.stderr
    second = command(tmp_path / "parts", "grpo", "--resume-from-checkpoint", "true", **more)
    assert second.returncode == 0, second.stderr
    assert [(event["step"], event["reward"]) for event in evaluations(tmp_path / "parts")] == expected


def test_an_environment_has_answers_in_evaluations(tmp_path):
    (tmp_path / "game.py").write_text(
        "class Game:\n"
        "    def reset(self, prompt, **row):\n"
        "        self.turns = 0\n"
        "    def step(self, text):\n"
        "        self.turns += 1\n"
        "        self.reward = float(self.turns)\n"
        "        return None if self.turns == 2 else ' And then'\n"
    )
    more = {"environment": f"{tmp_path / 'game.py'}:Game", "max_turn_length": 3, "max_completion_length": 24}
    run = options(tmp_path, validation_datasets=held_out(tmp_path), **more)
    found = surogate.Trainer({**run, "rewards": [{"function": "environment"}]}).evaluate()
    assert found["reward"] == 2.0 and found["completions/mean_turns"] == 2.0


def test_two_ranks_evaluate_as_one(tmp_path):
    run = options(tmp_path, validation_datasets=held_out(tmp_path, 5))
    one = surogate.Trainer(run).evaluate()
    two = surogate.Trainer({**run, "gpus": 2, "per_device_train_batch_size": 2}).evaluate()
    assert two["reward"] == pytest.approx(one["reward"], abs=1e-6)


def test_rewards_reach_status_report_and_trackers(tmp_path):
    from surogate.cli import status
    from surogate.logs.prometheus import METRICS
    from surogate.trackers import scalars

    found = command(tmp_path, "grpo", validation_datasets=held_out(tmp_path), eval_steps=2)
    assert found.returncode == 0, found.stderr
    events = evaluations(tmp_path)
    state = status.of(tmp_path / "run")
    assert state["evaluation"]["reward"] == events[-1]["reward"] and state["step"]["reward"] > 0
    assert f"Evaluation: reward {events[-1]['reward']:.4f} after 4 steps" in status.text(state)
    at, values = scalars(events[-1])
    assert at == 4 and values["eval/reward"] == events[-1]["reward"] and "eval/step" not in values
    assert "reward" in METRICS["evaluation"]
    page = next((tmp_path / "run").glob("*.html")).read_text()
    assert "<h3>Reward" in page or ">Reward<" in page


def test_a_signal_stops_an_evaluation(tmp_path):
    more = {"validation_datasets": held_out(tmp_path, 5), "num_generations_eval": 400, "eval_steps": 1}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(options(tmp_path, **more)))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "surogate", "grpo", str(path)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    log = tmp_path / "run"
    deadline = time.monotonic() + 60
    while not (found := list(log.glob("log-*.json"))) or '"event":"step"' not in found[0].read_text().replace(" ", ""):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert "Stopping: the evaluation is aborted" in process.communicate(timeout=60)[0]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"num_generations_eval": 0}, "`num_generations_eval` is `0`, expected a whole number from 1"),
        ({"num_generations_eval": 2}, "`num_generations_eval` has no effect without validation data"),
        ({"load_best_model_at_end": True}, "needs evaluations, but there is no validation data"),
        ({"task": "sft", "num_generations_eval": 2, "rewards": None}, "`num_generations_eval` has no effect on `task: sft`"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, more, expected):
    with pytest.raises(ConfigError) as error:
        surogate.Trainer(options(tmp_path, **more))
    assert expected in str(error.value)


def test_a_prompt_that_cannot_be_read_is_told(tmp_path):
    run = options(tmp_path, validation_datasets=held_out(tmp_path))
    (tmp_path / "held_out.jsonl").write_text('{"name": "Tom"}\n')
    with pytest.raises(Exception, match="held_out.jsonl: no row has a prompt"):
        surogate.Trainer(run)
