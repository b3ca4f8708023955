"""Likelihoods of continuations, and lm-evaluation-harness on them: numbers of its transformers backend, the command line."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import surogate
from conftest import REPOSITORY
from golden import DEVICE, FAMILIES, MIXTURES
from surogate import SurogateError
from surogate.cli.commands import main
from test_golden import of_family

pytestmark = pytest.mark.xdist_group("evaluate")

# Nothing is fetched: tasks and data lie here.
os.environ["HF_DATASETS_OFFLINE"] = "1"

STORIES = REPOSITORY / "examples" / "stories" / "model"
TASKS = Path(__file__).parent / "tasks"
NAMES = ("choices", "texts", "answers")


@pytest.fixture(scope="module")
def stories():
    return surogate.load(STORIES, device=DEVICE)


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    """A folder with the installed harness, which knows the tasks of `arc` alone: to read those of all takes 20 seconds."""
    installed = Path(importlib.util.find_spec("lm_eval").origin).parent
    folder = tmp_path_factory.mktemp("harness")
    (folder / "lm_eval" / "tasks").mkdir(parents=True)
    for file in [*installed.iterdir(), *(installed / "tasks").glob("*.py")]:
        if file.name not in ("tasks", "__pycache__"):
            (folder / "lm_eval" / file.relative_to(installed)).symlink_to(file)
    shutil.copytree(installed / "tasks" / "arc", folder / "lm_eval" / "tasks" / "arc")
    return folder


@pytest.fixture
def few_tasks(harness, monkeypatch):
    """The harness of this process knows these tasks, too."""
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(harness / "lm_eval" / "tasks" / "manager.py"))


def environment(harness: Path | None, **more: str) -> dict[str, str]:
    """Variables of a process that imports the harness of a folder, or the installed one."""
    path = [str(harness or ""), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **more}


def expected(model: surogate.Model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The same from the logits of the sequence alone."""
    logits = model.forward([context + continuation])[0, len(context) - 1 : -1].astype(np.float64)
    largest = logits.max(-1, keepdims=True)
    logs = logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))
    picked = logs[np.arange(len(continuation)), continuation]
    return float(picked.sum()), bool((logits.argmax(-1) == continuation).all())


def close(found: tuple[float, bool], wanted: tuple[float, bool]) -> None:
    assert found[1] == wanted[1]
    assert found[0] == pytest.approx(wanted[0], rel=2e-5, abs=2e-5)


@pytest.mark.parametrize("name", [*FAMILIES, *MIXTURES])
def test_scores_are_those_of_the_logits(name, golden_folder):
    """Of sequences of several lengths in one call, past windows and changing rotations."""
    golden = of_family(name, golden_folder)
    model = surogate.load(golden.folder, device=DEVICE)
    ids = (golden.inputs["input_ids"].reshape(-1) % 90 + 3).tolist()
    pairs = [(ids[:1], ids[1:3]), (ids[3:20], ids[20:24]), (ids[1:30], ids[30:31]), (ids[5:9], ids[9:37])]
    for found, pair in zip(model.score(pairs), pairs, strict=True):
        close(found, expected(model, *pair))


def test_scores_do_not_depend_on_the_batch(stories):
    generator = np.random.default_rng(0)
    cut = [generator.integers(3, 500, size=size).tolist() for size in generator.integers(2, 90, size=60)]
    pairs = [(ids[: len(ids) // 2], ids[len(ids) // 2 :]) for ids in cut]
    once = stories.score(pairs)
    for found, alone in zip(stories.score(pairs, batch_tokens=1), once, strict=True):
        close(found, alone)
    for index in (0, 17, 59):
        close(once[index], stories.score([pairs[index]])[0])
        close(once[index], expected(stories, *pairs[index]))
    likeliest = [int(stories.forward([[1, 403]])[0, -1].argmax())]
    assert stories.score([([1, 403], likeliest), ([1, 403], [7])])[0][1]


@pytest.mark.parametrize(
    ("beginning", "continuation"),
    [("Once upon a", " time"), ("Once upon a ", "time"), ("", "Once"), ("Once up", "on a time"), ("<s>Once", " é\n")],
)
def test_texts_are_encoded_as_one(stories, beginning, continuation):
    tokenizer = surogate.Tokenizer(STORIES)
    ids = tokenizer.encode(beginning + continuation, not beginning.startswith("<s>"))
    ends = [len(tokenizer.decode(ids[: count + 1], True).encode()) for count in range(len(ids))]
    before = len(beginning.removeprefix("<s>").encode())
    border = next(count for count, end in enumerate(ends) if end > before)
    close(stories.score([(beginning, continuation)])[0], expected(stories, ids[:border], ids[border:]))


def test_a_space_between_texts_is_encoded_once(stories):
    (time, likeliest), (table, _) = stories.score([("Once upon a", word) for word in (" time", " table")])
    assert likeliest and -0.1 < time < 0 and table < -5
    with pytest.raises(ValueError, match="request 1 has a text and token ids"):
        stories.score([("a", "b"), ("a", [3])])
    with pytest.raises(SurogateError, match="request 0 has an empty continuation"):
        stories.score([("Once", "")])


def test_what_cannot_be_scored_is_refused(stories):
    for pair, said in {
        ((), (1,)): "no token before",
        ((1,), ()): "an empty continuation",
        ((1,), (512,)): "token id 512 is outside",
        ((1,), (3,) * 513): "scores 513 tokens, and the model allows sequences of 512",
    }.items():
        with pytest.raises(SurogateError, match=said):
            stories.score([([1], [2]), pair])
    assert stories.score([]) == []
    # As many tokens as the model allows, and one more that is only predicted.
    ids = ([5, 9, 30, 77] * 150)[:513]
    close(stories.score([([1, 2, 3], ids[1:])])[0], stories.score([([3], ids[1:])])[0])


def test_the_numbers_are_those_of_the_harness(capsys, tmp_path):
    """Recorded with lm_eval 0.4.13, its `hf` model class, transformers 5.23, float32 on the CPU."""
    recorded = json.loads((TASKS / "recorded.json").read_text())
    tasks = ",".join(f"{name}.yaml" for name in NAMES)
    output = tmp_path / "results.json"
    place = Path.cwd()
    os.chdir(TASKS)
    try:
        words = ["evaluate", str(STORIES), "--tasks", tasks, "--samples", "--output", str(output), "--device", DEVICE]
        code = main(words)
    finally:
        os.chdir(place)
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "stories_choices" in out and "acc_norm" in out and f"Written: {output}" in out
    found = json.loads(output.read_text())
    for task, responses in recorded["responses"].items():
        for sample, wanted in zip(found["samples"][task], responses, strict=True):
            for got, of_harness in zip(sample["filtered_resps"], wanted, strict=True):
                if task == "stories_choices":
                    close(tuple(got), tuple(of_harness))
                elif task == "stories_texts":
                    assert got == pytest.approx(of_harness, rel=1e-6)
                else:
                    assert got == of_harness
        for metric, value in recorded["results"][task].items():
            assert found["results"][task][metric] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("tasks", ["few", pytest.param("all", marks=pytest.mark.long)])
def test_the_class_is_known_to_the_harness(harness, tasks):
    """Its own command line with the class, with examples before each question."""
    place = ["--model_args", f"pretrained={STORIES}", "--device", DEVICE]
    words = ["--model", "surogate", *place, "--tasks", "choices.yaml", "--num_fewshot", "1"]
    words = [sys.executable, "-m", "surogate.harness", *words, "--limit", "3", "--batch_size", "2"]
    of = environment(harness if tasks == "few" else None)
    done = subprocess.run(words, cwd=TASKS, env=of, capture_output=True, text=True)
    assert done.returncode == 0 and "|stories_choices|" in done.stdout.replace(" ", ""), done.stderr


def test_options_of_requests():
    from surogate.harness import generation_options

    greedy = {"max_new_tokens": 9, "stop": ["."], "temperature": 0}
    assert generation_options({"until": ["."], "max_gen_toks": 9, "do_sample": False, "top_p": 0.5}) == greedy
    drawn = {"max_new_tokens": 256, "stop": ["a"], "temperature": 0.7, "top_p": 0.9}
    assert generation_options({"until": "a", "do_sample": True, "temperature": 0.7, "top_p": 0.9}) == drawn
    assert generation_options({"num_beams": 1})["temperature"] == 0
    with pytest.raises(ValueError, match="num_beams: 4"):
        generation_options({"num_beams": 4})


def test_a_conversation_that_goes_on_ends_inside_its_last_message():
    from surogate.harness import Surogate

    def rendered(messages: list, add_generation_prompt: bool) -> str:
        text = "".join(f"<{m['role']}>{m['content'].strip()}</s>" for m in messages)
        return text + "<assistant>" * add_generation_prompt

    of = SimpleNamespace(tokenizer=SimpleNamespace(apply_chat_template=rendered))
    messages = [{"role": "user", "content": "Say A"}, {"role": "assistant", "content": " A"}]
    assert Surogate.apply_chat_template(of, messages[:1]) == "<user>Say A</s><assistant>"
    assert Surogate.apply_chat_template(of, messages, False) == "<user>Say A</s><assistant>A"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "arc_eazy"], "arc_eazy is neither a task nor the file of one (did you mean arc_easy"),
        (["--tasks", "nothing.yaml"], "there is no file nothing.yaml"),
        (["--tasks", ","], "--tasks names no task"),
        (["--tasks", "arc_easy", "--include-path", "nowhere"], "nowhere is not a folder"),
        (["--tasks", "arc_easy", "--limit", "0"], "--limit: '0' is not a number above 0"),
        (["--tasks", "arc_easy", "--samples"], "--samples needs --output"),
        (["--tasks", "arc_easy", "--learning-rate", "1"], "--learning_rate is not a flag of this command"),
        ([], "required: --tasks"),
        (["--tasks", str(TASKS / "choices.yaml"), "--chat"], "has no chat template"),
    ],
)
def test_mistakes(capsys, few_tasks, words, said):
    try:
        code = main(["evaluate", str(STORIES), *words])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert said in capsys.readouterr().err


def test_a_result_is_not_overwritten(capsys, tmp_path):
    (tmp_path / "there.json").write_text("mine")
    assert main(["evaluate", str(STORIES), "--tasks", "arc_easy", "--output", str(tmp_path / "there.json")]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


def test_a_missing_extra_is_named(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["evaluate", str(STORIES), "--tasks", "arc_easy"]) == 2
    assert "pip install 'surogate[eval]'" in capsys.readouterr().err


def test_without_the_data_of_a_task(tmp_path, harness):
    """arc_easy is on the Hub, which is out of reach."""
    offline = environment(harness, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    words = [sys.executable, "-m", "surogate", "evaluate", str(STORIES), "--tasks", "arc_easy"]
    done = subprocess.run(words, env=offline, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "the data of tasks is fetched from the Hub once" in done.stderr, done.stderr


PLANTED = 'print("code of the working directory runs")\nraise SystemExit(7)\n'


@pytest.fixture
def planted(tmp_path):
    """A working directory with files that libraries would load by name, and a task that names a metric."""
    for name in ("code_eval/code_eval.py", "lm_eval.py", "evaluate.py", "datasets.py", "json.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(PLANTED)
    task = (TASKS / "choices.yaml").read_text()
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/mine.yaml").write_text(f"{task}\n  - metric: code_eval\n")
    (tmp_path / "tasks/choices.jsonl").write_text((TASKS / "choices.jsonl").read_text())
    return tmp_path


@pytest.mark.parametrize("command", ["surogate", "surogate.harness"])
def test_no_code_of_the_working_directory_runs(planted, harness, command):
    model = ["evaluate", str(STORIES)]
    if command != "surogate":
        model = ["--model", "surogate", "--model_args", f"pretrained={STORIES}"]
        # Here the harness's own rules hold: files of data are named from the working directory.
        (planted / "choices.jsonl").write_text((TASKS / "choices.jsonl").read_text())
    words = [sys.executable, "-m", command, *model, "--device", DEVICE, "--limit", "2"]
    offline = environment(harness, HF_HOME="kept", HF_HUB_OFFLINE="1", HF_EVALUATE_OFFLINE="1")
    words += ["--tasks", "tasks/mine.yaml"]
    done = subprocess.run(words, cwd=planted, env=offline, capture_output=True, text=True)
    assert "code of the working directory" not in done.stdout + done.stderr
    assert done.returncode != 7, done.stderr


def test_data_lie_beside_their_task(capsys, tmp_path, monkeypatch, few_tasks):
    (tmp_path / "tasks").mkdir()
    for name in ("choices.yaml", "choices.jsonl"):
        (tmp_path / "tasks" / name).write_text((TASKS / name).read_text())
    monkeypatch.chdir(tmp_path)
    words = ["evaluate", str(STORIES), "--device", DEVICE, "--limit", "2", "--json"]
    assert main([*words, "--tasks", "tasks/choices.yaml"]) == 0, capsys.readouterr().err
    assert main([*words, "--tasks", "tasks", "--output", "there.json"]) == 0, capsys.readouterr().err
    assert (tmp_path / "there.json").is_file() and Path.cwd() == tmp_path
