"""Answers of several turns: what an environment says between them, and what is learned of it."""

from __future__ import annotations

import json

import pytest
import surogate
import yaml
from conftest import tiny_llama
from surogate.errors import ConfigError, SurogateError
from surogate.rewards.environments import Environments
from test_sampled_runs import command, options

GAMES = '''
import json
from pathlib import Path


class Echo:
    """Says a few words after each of the first two turns, and counts them."""

    def __init__(self):
        self.reward, self.turns = 0.0, 0

    def reset(self, prompt, name, **_):
        self.name = name
        return None

    def step(self, text):
        assert isinstance(text, str)
        self.turns += 1
        self.reward = float(self.turns)
        return f" {self.name} laughed." if self.turns < 3 else None


class Opening(Echo):
    def reset(self, prompt, **_):
        self.name = "Tom"
        return " and a dog."


class Chat:
    def step(self, text):
        self.turns = getattr(self, "turns", 0) + 1
        return {"role": "user", "content": "Go on."} if self.turns < 2 else None


class Broken(Echo):
    def step(self, text):
        return 1 / 0


class Messages(Echo):
    def step(self, text):
        return [{"role": "user", "content": "?"}]


class Idle:
    pass


def heard(prompts, completions, completion_ids, name, environments, **_):
    for text, of, game in zip(completions, name, environments, strict=True):
        assert text.count(f" {of} laughed.") == 2 and game.turns == 3, (text, game.turns)
    return [game.turns / 3 + len(ids) for game, ids in zip(environments, completion_ids, strict=True)]


def chatted(completions, completion_ids, **_):
    path = Path(__file__).with_name("chat.jsonl")
    with path.open("a") as lines:
        for messages, ids in zip(completions, completion_ids, strict=True):
            lines.write(json.dumps({"messages": messages, "ids": ids}) + "\\n")
    return [float(len(message[0]["content"])) for message in completions]
'''


def game(tmp_path, name, function="environment", **more):
    """A run whose answers have turns of four tokens."""
    (tmp_path / "games.py").write_text(GAMES)
    known = function if function == "environment" else f"{tmp_path / 'games.py'}:{function}"
    return options(
        tmp_path, environment=f"{tmp_path / 'games.py'}:{name}", max_turn_length=4, max_completion_length=40, sequence_len=96,
        rewards=[{"function": known}], **more,
    )  # fmt: skip


def test_turns_are_sampled_and_what_is_said_between_them_is_read(tmp_path):
    """The log-probabilities of training are the sampler's: no token that was sampled is encoded again."""
    steps = list(surogate.Trainer(game(tmp_path, "Echo", "heard")))
    assert len(steps) == 4
    for metrics in steps:
        assert metrics["completions/mean_turns"] == 3.0
        assert metrics["completions/max_length"] <= 12, "tokens of the environment are not the model's"
        assert 0 <= metrics["sampling/sampling_logp_difference/max"] < 2e-4
    assert surogate.Trainer(game(tmp_path, "Echo")).step()["reward"] == 3.0


def test_fewer_turns_and_longer_turns_are_options(tmp_path):
    found = [surogate.Trainer({**game(tmp_path, "Echo"), **more}).step() for more in ({}, {"max_turns": 1}, {"max_turn_length": 7})]
    assert [metrics["completions/mean_turns"] for metrics in found[:2]] == [3.0, 1.0]
    assert found[2]["completions/max_length"] > 12
    short = surogate.Trainer({**game(tmp_path, "Echo"), "max_completion_length": 9}).step()
    assert short["completions/mean_turns"] < 3 and short["completions/clipped_ratio"] == 1.0


def test_an_environment_may_put_words_after_the_prompt(tmp_path):
    run = command(tmp_path, "grpo", **{**game(tmp_path, "Opening"), "max_steps": 1})
    assert run.returncode == 0, run.stderr
    logged = [json.loads(line) for line in next((tmp_path / "run").glob("log-*.json")).read_text().splitlines()]
    shown = [answer for event in logged for answer in event.get("samples", []) if "turns" in answer]
    assert shown and all(answer["turns"] == 3 and answer["text"].count(" Tom laughed.") == 2 for answer in shown), logged


@pytest.mark.parametrize("more", [{}, {"tools": []}, {"tools": None}, {"tools": [{"name": "go", "description": "Goes on."}]}])
def test_messages_go_through_the_chat_template(shared, tmp_path, more):
    """Also with tools that the template has no place for: an environment may read them."""
    model = tmp_path / "chat"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_llama(vocab_size=49152, max_position_embeddings=128)))
    for file in (shared / "assets" / "tokenizers" / "smollm2").iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "special")):
            (model / file.name).write_bytes(file.read_bytes())
    run = game(tmp_path, "Chat", "chatted") | {"model": str(model), "init": "random", "max_steps": 1}
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"question": "Who are you?", **more}) + "\n")
    surogate.Trainer(run).step()
    tokenizer = surogate.Tokenizer(model)
    said = tokenizer.encode("<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    answers = [json.loads(line) for line in (tmp_path / "chat.jsonl").read_text().splitlines()]
    assert len(answers) == 8
    for answer in answers:
        assert [message["role"] for message in answer["messages"]] == ["assistant", "user", "assistant"]
        assert answer["ids"][4 : 4 + len(said)] == list(said), answer["ids"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Broken", "environment `Broken`: answer 1"),
        ("Messages", "expected a text, as the prompt is"),
        ("Idle", "has no method `step`"),
        ("Missing", "has no function or class `Missing`; it has Broken"),
    ],
)
def test_faults_of_an_environment_are_named(tmp_path, name, words):
    with pytest.raises(SurogateError, match=words):
        surogate.Trainer(game(tmp_path, name)).step()


def test_options_of_environments_need_one(tmp_path):
    for more, words in (
        ({"max_turns": 3}, "`max_turns` has no effect without `environment`"),
        ({"rewards": [{"function": "environment"}]}, "is the reward of an environment, and there is none"),
        ({"environment": "Game"}, "expected `module:name`"),
    ):
        run = command(tmp_path, "grpo", **more)
        assert run.returncode == 2 and words in run.stderr, run.stderr
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(game(tmp_path, "Echo")))


def test_replies_are_messages_texts_or_nothing(tmp_path):
    (tmp_path / "odd.py").write_text("class Odd:\n    def step(self, text):\n        return 5\n")
    environments = Environments(f"{tmp_path / 'odd.py'}:Odd")
    assert environments.reset(["a"], {}) == [None]
    with pytest.raises(ConfigError, match="it returned 5, expected messages, a text or None"):
        environments.step([(0, "b")])


@pytest.mark.filterwarnings("error")
def test_methods_of_environments_may_be_asynchronous_and_raise_anything(tmp_path):
    step = "    async def step(self, text):\n        return text\n"
    reset = "    def reset(self, prompt):\n        return exit() if prompt == 'b' else None\n"
    (tmp_path / "late.py").write_text(f"class Late:\n{step}{reset}")
    environments = Environments(f"{tmp_path / 'late.py'}:Late")
    assert environments.reset(["a"], {}) == [None]
    assert environments.step([(0, "on")]) == ["on"]
    with pytest.raises(ConfigError, match="(?s)environment `Late`: answer 1, 'b': .*SystemExit"):
        environments.reset(["b"], {})
