"""What the pages show is executed: every command of surogate, every YAML as a plan, every Python example; and every
message that troubleshooting speaks of is one that the program can print.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil

import pytest
from conftest import REPOSITORY
from surogate import _native
from surogate.cli.commands import main

pytestmark = pytest.mark.xdist_group("pages")

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
MODEL = "examples/stories/model"

# Commands that are not executed, and why: they are of other programs, or need a network or minutes.
ELSEWHERE = {
    r"git clone .*|cd surogate": "needs a network",
    r"(pip install|maturin) .*": "installs; CI does it",
    r"\./test\.sh": "is what runs this",
    r"python3 -m venv .*|\. \.venv/bin/activate": "is what CI does",
    r"(python|bash) bench/.*": "measures on a GPU",
    r"surogate sft examples/gsm8k\.yaml": "fetches a model",
    r"python -m surogate\.harness .*": "fetches the data of tasks; test_evaluate.py starts it with one of here",
    r"surogate doctor --calibrate.*|surogate plan .*my-gpu\.json.*": "takes half a minute; test_plan.py has both",
    r"surogate evaluate .*--chat": "needs a model with a chat template",
    r"surogate (generate|chat) .*--image.*": "needs a model that reads images; test_image_answers.py has one",
    r"surogate export output/photos .*": "needs a run on images; test_export_vision.py has models with towers",
    r"export SUROGATE_TOKEN=.*": "is the user's",
    r"export SUROGATE_SITE_PACKAGES=.*|cargo xtask kernels .*": "compiles kernels, as test.sh does",
    r"python examples/shapes/answers\.py": "takes half a minute; test_example_of_shapes.py has it",
    r"ray start .*": "makes a machine part of a cluster; test_ray.py has one",
    r"(torchrun|srun|surogate sft) .*distributed\.num_nodes.*": "waits for other machines; test_nodes.py has them",
}

# Tasks whose data would be fetched, and such as lie here.
TASKS = REPOSITORY / "tests" / "python" / "tasks"
OF_HERE = {
    "arc_easy,hellaswag": f"{TASKS}/choices.yaml,{TASKS}/texts.yaml",
    "arc_easy": f"{TASKS}/choices.yaml",
    "my_choices.yaml": "choices.yaml",
}

# Python examples that use names of the text around them.
PREAMBLE = """
import surogate
ids, labels = [[1, 403, 407]], [[1, 403, 407]]
model = surogate.load("examples/stories/model")
options = {
    "model": "examples/stories/model",
    "datasets": [{"path": "examples/stories/data/shakespeare.txt", "type": "text"}],
    "sequence_len": 64,
    "device": "cpu",
}
"""


def blocks(language: str) -> list:
    """The code blocks of a language, page by page."""
    found = []
    for page in PAGES:
        texts = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        found += [pytest.param(text, id=f"{page.name}-{i}") for i, text in enumerate(texts)]
    return found


def commands(page) -> list[str]:
    """The command lines of a page."""
    texts = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [re.sub(r"\s+#.*", "", line).strip() for text in texts for line in text.splitlines()]
    return [part.strip() for line in lines if line for part in line.split("&&")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with the run of the quickstart, cut short."""
    folder = tmp_path_factory.mktemp("finished")
    words = ["sft", str(REPOSITORY / "examples/stories.yaml"), "--output-dir", str(folder / "stories"), "--quiet"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        assert main([*words, "--max-steps", "2"]) == 0
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch, finished):
    """A folder that looks as the pages suppose: examples, a run.yaml, a finished run."""
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / "path" / "to").mkdir(parents=True)
    for name in ("model", "other"):
        (tmp_path / "path" / "to" / name).symlink_to(REPOSITORY / MODEL)
    shutil.copytree(REPOSITORY / MODEL, tmp_path / "path" / "to" / "talkative")
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (tmp_path / "path" / "to" / "talkative" / "chat_template.jinja").write_text(template)
    shutil.copytree(finished, tmp_path / "output")
    shutil.copytree(finished / "stories" / "adapter", tmp_path / "my-adapter")
    (tmp_path / "run.yaml").write_text((REPOSITORY / "examples/stories.yaml").read_text())
    for file in TASKS.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "prompts.jsonl").write_text('"Once upon a time"\n{"prompt": "Lily saw"}\n')
    monkeypatch.setattr("sys.stdin", io.StringIO("/exit\n"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_do_what_they_say(page, place, capfd):
    executed = 0
    for line in commands(page):
        if any(re.fullmatch(pattern, line) for pattern in ELSEWHERE):
            continue
        words = shlex.split(line)
        assert words[0] == "surogate", f"{line}: a command that is neither executed nor listed"
        words = words[: words.index(">")] if ">" in words else words
        if words[1] == "evaluate":
            words = [OF_HERE.get(word, word) for word in words]
        if words[1] == "doctor" and ("--operations" in words or "--report" in words):
            words += ["--only", "adamw"]  # all take half a minute; test_cli.py has them
        if words[1] == "chat":
            words = ["path/to/talkative" if word == "path/to/model" else word for word in words]
        if words[1] in ("sft", "pt"):
            if "--resume-from-checkpoint" not in words and "--output-dir" not in words:
                shutil.rmtree(place / "output" / "stories", ignore_errors=True)
            words += [] if "--max-steps" in words else ["--max-steps", "2"]
        assert main(words[1:]) == 0, f"{line}: {capfd.readouterr().err}"
        executed += 1
    elsewhere = ("README.md", "amd.md", "performance.md", "multi-node.md")
    assert executed or page.name in elsewhere, "nothing of this page was executed"


@pytest.mark.parametrize("text", blocks("yaml"))
def test_configurations_are_planned(text, place, capfd):
    (place / "page.yaml").write_text(text)
    # Local data is read for the plan: instructions need a template, which this small model lacks.
    shutil.copytree(MODEL, place / "instruct")
    template = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    (place / "instruct" / "chat_template.jinja").write_text(template)
    if "pipeline_parallel_size" in text:
        # Stages need an output head of its own; a plan reads no weights.
        config = place / "instruct" / "config.json"
        config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    changes = ["--model", "instruct", "--sequence-len", "512", "--machine", "h200"]
    if "teacher:" in text:
        changes += ["--teacher", "instruct"]
    if "rope_scaling" in text:
        pytest.fail("a page changes the model's positions: plan it by hand here")
    for run in _native.Config.run_names(text, "page") or [None]:
        chosen = ["--run", run] if run else []
        assert main(["plan", "page.yaml", *chosen, *changes]) == 0, capfd.readouterr().err


@pytest.mark.parametrize("text", [block for block in blocks("python") if "import surogate" in block.values[0]])
def test_examples_in_python_run(text, place):
    text = text.replace("range(10)", "range(2)")
    of_here = f'["stories_choices"], task_manager=lm_eval.tasks.TaskManager(include_path="{TASKS}", include_defaults=False)'
    exec(compile(text.replace('["arc_easy"]', of_here), "page", "exec"), {})


def test_the_python_api_goes_on_with_its_examples(place):
    names: dict[str, object] = {}
    exec(PREAMBLE, names)
    page = (REPOSITORY / "docs/python-api.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    executed = [text for text in examples if "loss_and_gradients" in text or "Trainer(" in text]
    assert len(executed) == 4
    for text in executed:
        exec(text.replace('Trainer("run.yaml")', 'Trainer({**options, "max_steps": 2})'), names)
    assert (place / "result").is_dir()


def _source() -> str:
    """All texts of the program, those that are broken over lines joined."""
    files = [*(REPOSITORY / "crates").rglob("src/**/*.rs"), *(REPOSITORY / "python" / "surogate").rglob("*.py")]
    text = "\n".join(file.read_text() for file in files)
    return re.sub(r'\\\n\s*|"\s*\n\s*f?"', "", text)


def test_messages_of_troubleshooting_are_real():
    page = (REPOSITORY / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    source = _source()
    assert len(messages) > 25
    # Calls on files are named when they fail: `io("create", …)` prints `cannot create …`.
    said = [re.sub(r"^cannot (\w+)$", r'io("\1"', message) for message in messages]
    assert not [message for message in said if message not in source]
