"""One odd row among the first ones changes nothing for the others: it is dropped and counted."""

from __future__ import annotations

import json

import pytest
import surogate
from conftest import REPOSITORY
from surogate.cli.commands import main
from surogate.errors import ConfigError, DataError

MODEL = str(REPOSITORY / "examples" / "stories" / "model")
PAIR = {"prompt": "Once ", "chosen": "good ", "rejected": "bad "}
VERDICT = {"prompt": "Once ", "completion": "good ", "label": True}


def numbered(row, count=40):
    return [{name: f"{of}{n}" if isinstance(of, str) else of for name, of in row.items()} for n in range(count)]


@pytest.fixture
def check(tmp_path, capfd):
    """Shows the data of a run on these rows; gives the exit code and what was printed."""

    def shown(task, rows, **options):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset = {"path": str(tmp_path / "rows.jsonl"), "type": options.pop("type", "auto")}
        run = {
            "model": MODEL, "task": task, "device": "cpu", "sequence_len": 256, "max_steps": 2, "num_epochs": 1, "data_cache": "off",
            "datasets": [dataset | options.pop("dataset", {})], "output_dir": str(tmp_path / "run"), **options,
        }  # fmt: skip
        (tmp_path / "run.yaml").write_text(json.dumps({name: of for name, of in run.items() if of is not None}))
        code = main([task, str(tmp_path / "run.yaml")])
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return shown


@pytest.mark.parametrize(
    ("task", "row", "odd"),
    [
        ("dpo", PAIR, {"prompt": 7}),
        ("dpo", PAIR, {"prompt": ["q"]}),
        ("dpo", PAIR, {"chosen": 7}),
        ("reward", PAIR, {"prompt": 7}),
        ("kto", VERDICT, {"prompt": 7}),
        ("kto", VERDICT, {"label": 2}),
        ("kto", VERDICT, {"completion": 7}),
        ("sft", {"text": "Once "}, {"text": 7}),
    ],
)
def test_an_odd_row_is_dropped_and_the_columns_of_the_others_are_read(check, task, row, odd):
    name = next(iter(odd))
    code, printed = check(task, [*numbered(row, 30), row | odd, *numbered(row, 10)])
    assert code == 0, printed
    assert "not used" not in printed
    dropped = printed.partition("dropped 1 row:")[2]
    assert f"`{name}`" in dropped, printed


def losses(run):
    events = (json.loads(line) for log in run.glob("log-*.json") for line in log.read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "step"]


def test_margins_in_text_are_those_in_numbers(check, tmp_path):
    found = []
    for margin in (0.5, "0.5"):
        run = tmp_path / type(margin).__name__
        code, printed = check("reward", [row | {"margin": margin} for row in numbered(PAIR)], output_dir=str(run))
        assert code == 0 and "margin in `margin`" in printed
        found.append(losses(run))
    assert found[0] == found[1] != []


def test_recommended_rows_are_no_fewer_than_the_loss_takes(check):
    code, printed = check("kto", numbered(VERDICT), max_steps=None, apply_recommended_values=True)
    assert code == 0
    assert "per_device_train_batch_size: 1" not in printed


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        (numbered({"prompt": "Once "}), {"dataset": {"repeats": 5}}, "`datasets[0].repeats: 5` is not available yet"),
        (numbered({"prompt": "Once "}), {"interleave_probs": [1.0]}, "`interleave_probs` is not available yet"),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}],
            {},
            "`prompt` has images, and answers to images are not sampled yet",
        ),
        ([{"prompt": "Once", "images": ["a.png"]}], {}, "`images` has images"),
    ],
)
def test_what_prompts_do_not_take_is_refused_by_name(check, rows, options, expected):
    rewards = [{"function": "length", "tokens": 10}]
    code, printed = check("grpo", rows, rewards=rewards, max_completion_length=8, **options)
    assert code != 0 and expected in printed, printed


def test_the_folder_of_a_reference_is_checked_before_the_data(tmp_path):
    (tmp_path / "pairs.jsonl").write_text(json.dumps(PAIR) + "\n")
    config = {
        "model": MODEL, "task": "dpo", "device": "cpu", "reference": str(tmp_path / "none"), "lora": True,
        "datasets": [{"path": str(tmp_path / "pairs.jsonl"), "type": "preference"}], "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    with pytest.raises((ConfigError, DataError), match="`reference: .*none` has no `config.json`"):
        surogate.Trainer(config)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "adapter_config.json").write_text("{}")
    with pytest.raises((ConfigError, DataError), match="surogate merge"):
        surogate.Trainer(config)
