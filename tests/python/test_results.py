"""What a result has besides its weights: tokenizer, the chat template as trained, generation settings, card, licence;
from the run through merge and export to the Hub."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import surogate
from conftest import REPOSITORY
from surogate import ConfigError, _native
from surogate.cli import push
from surogate.cli.commands import main

pytestmark = pytest.mark.xdist_group("results")

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

#: The model's own.
OWN = TEMPLATE.replace("m.role", "m.role | upper")

CARD = "---\nlicense: apache-2.0\n---\n# base\n"


def run(capfd, *arguments: object) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    out, err = capfd.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The example's model with settings, a template, a card and a licence of its own."""
    folder = tmp_path_factory.mktemp("base") / "tiny"
    shutil.copytree(REPOSITORY / "examples/stories/model", folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    (folder / "chat_template.jinja").write_text(OWN)
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE").write_text("as it is")
    return folder


@pytest.fixture(scope="module")
def options(model, tmp_path_factory) -> dict:
    place = tmp_path_factory.mktemp("data")
    (place / "own.jinja").write_text(TEMPLATE)
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat and a dog sat."}]
    (place / "chats.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(24)))
    return {
        "model": str(model),
        "datasets": [{"path": str(place / "chats.jsonl"), "type": "conversation"}],
        "template": str(place / "own.jinja"),
        "device": "cpu",
        "sequence_len": 64,
        "max_steps": 2,
        "eval_steps": 1,
        "learning_rate": 1e-3,
        "gradient_accumulation_steps": 1,
        "run_name": "mine",
    }


def trained(options: dict, folder: Path, **changes: object) -> Path:
    """The output folder of a run."""
    output = folder / "output"
    (folder / "run.yaml").write_text(json.dumps({**options, "output_dir": str(output), **changes}))
    assert main(["sft", str(folder / "run.yaml"), "--quiet"]) == 0
    return output


def check(folder: Path, model: Path, library: str) -> None:
    """Whether a folder has everything that belongs to a result of these runs."""
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    for name in ("tokenizer.json", "generation_config.json", "LICENSE"):
        assert (folder / name).read_text() == (model / name).read_text(), name
    messages = [{"role": "user", "content": "x"}]
    rendered = surogate.Tokenizer(folder).apply_chat_template(messages, add_generation_prompt=True)
    assert rendered == "user: x</s>\nassistant: "
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings.get("chat_template", TEMPLATE) == TEMPLATE
    card = (folder / "README.md").read_text()
    assert card.startswith("---\n") and f"library_name: {library}\n" in card and 'license: "apache-2.0"\n' in card
    assert "tiny with Surogate" in card and "| chats.jsonl | 24 |" in card
    assert "learning_rate: 0.001\n" in card and "template: own.jinja\n" in card
    assert "| steps | 2 |" in card and "| training loss, last step | " in card and "| evaluation loss, last | " in card
    assert str(model.parent) not in card and "output" not in card


def test_an_adapter_its_merge_and_its_files_carry_what_was_trained(capfd, model, options, tmp_path):
    output = trained(options, tmp_path, merge_adapter=True)
    check(output / "adapter", model, "peft")
    check(output / "merged", model, "transformers")
    shutil.rmtree(output / "merged")
    assert run(capfd, "merge", output)[0] == 0
    check(output / "merged", model, "transformers")
    for form, place in (("hf", output / "hf"), ("peft", output / "peft")):
        assert run(capfd, "export", output, "--format", form)[0] == 0
        check(place, model, "transformers" if form == "hf" else "peft")
    code, _, err = run(capfd, "export", output, "--format", "gguf", "--output", tmp_path / "x.gguf")
    assert code == 0, err
    file = (tmp_path / "x.gguf").read_bytes()
    key = b"tokenizer.chat_template"
    assert file.count(key) == 1
    # Type 8 is text, whose length stands before it.
    value = file[file.index(key) + len(key) :]
    assert value[:4] == (8).to_bytes(4, "little") and int.from_bytes(value[4:12], "little") == len(TEMPLATE.encode())
    assert value[12 : 12 + len(TEMPLATE.encode())].decode() == TEMPLATE


def test_a_whole_model_carries_it_too(model, options, tmp_path):
    output = trained(options, tmp_path, lora=False)
    check(output / "model", model, "transformers")


def test_without_a_template_the_models_own_goes_on(model, options, tmp_path):
    output = trained({name: value for name, value in options.items() if name != "template"}, tmp_path)
    assert (output / "adapter" / "chat_template.jinja").read_text() == OWN


def test_a_result_is_uploaded(capfd, monkeypatch, model, options, tmp_path):
    from huggingface_hub import HfApi

    asked: list = []
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **given: asked.append((name, given)))

    def uploaded(_: HfApi, **given: object) -> None:
        place = Path(given["folder_path"])
        files = {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        asked.append({**given, "files": files})

    monkeypatch.setattr(HfApi, "upload_folder", uploaded)
    output = trained(options, tmp_path)
    code, out, err = run(capfd, "push", output, "me/mine")
    assert code == 0, err
    assert asked[0] == ("me/mine", {"private": True, "exist_ok": True})
    assert asked[1]["repo_id"] == "me/mine" and "/me/mine" in out
    files = asked[1]["files"]
    assert set(files) == {path.name for path in (output / "adapter").iterdir()}
    assert all(f"  {name} (" in out for name in files)
    # No folder of this machine is named.
    assert str(tmp_path).encode() not in b"".join(files.values()) and str(model).encode() not in b"".join(files.values())
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == model.name
    assert str(model) in (output / "adapter/adapter_config.json").read_text()
    assert run(capfd, "push", output / "checkpoint-2", "me/mine", "--public")[0] == 0
    assert asked[2][1]["private"] is False and not {"state.json", "optimizer.safetensors"} & set(asked[3]["files"])
    for name in (".env", "notes.txt", "sub/.env"):
        (output / "adapter" / name).parent.mkdir(exist_ok=True)
        (output / "adapter" / name).write_text("key")
    code, out, _ = run(capfd, "push", output, "me/mine", "--dry-run")
    assert code == 0 and len(asked) == 4 and "not uploaded: .env, notes.txt, sub" in out
    assert run(capfd, "push", output, "me/mine")[0] == 0 and asked[5]["files"] == files
    (output / "adapter/LICENSE").unlink(missing_ok=True)
    (output / "adapter/LICENSE").symlink_to("/etc/passwd")
    code, _, err = run(capfd, "push", output, "me/mine")
    assert code == 2 and "LICENSE leads to /etc/passwd" in err
    for words in (["push", tmp_path / "none", "me/mine"], ["push", output, "mine"]):
        assert run(capfd, *words)[0] == 2


def test_names_that_are_published():
    for source, name in {
        "owner/model": "owner/model",
        "/users/me/.cache/huggingface/hub/models--owner--a-b.c/snapshots/0123": "owner/a-b.c",
        "/srv/me/secret/model/": "model",
        "./a/b": "b",
        "a/b/c": "c",
        "~/model": "model",
    }.items():
        assert push.public_name(source) == name


def test_no_file_that_is_published_names_a_folder_of_this_machine(model, tmp_path):
    place = tmp_path / "result"
    shutil.copytree(model, place)
    of = {"name_or_path": "/srv/me/base", "tokenizer_file": "/srv/me/base/tokenizer.json", "vocab_file": "vocab.txt"}
    texts = {
        "config.json": {**json.loads((place / "config.json").read_text()), "text_config": {"_name_or_path": "/srv/me/base"}},
        "generation_config.json": {"_name_or_path": "~/me/base", "eos_token_id": 2},
        "preprocessor_config.json": {"parts": [{"image_processor": {"_name_or_path": "/srv/me/base"}}]},
        "processor_config.json": of,
        "special_tokens_map.json": {"eos_token": "/srv/me"},
    }
    for name, fields in texts.items():
        (place / name).write_text(json.dumps(fields))
    with push._staged(place, _native.published(place)) as staged:
        sent = {path.name: json.loads(path.read_text()) for path in staged.glob("*.json")}
    assert sent["config.json"]["text_config"] == {"_name_or_path": "base"}
    assert sent["generation_config.json"] == {"_name_or_path": "base", "eos_token_id": 2}
    assert sent["preprocessor_config.json"] == {"parts": [{"image_processor": {"_name_or_path": "base"}}]}
    assert sent["processor_config.json"] == {"name_or_path": "base", "tokenizer_file": "tokenizer.json", "vocab_file": "vocab.txt"}
    # A value that is no path stays, whatever it looks like.
    assert sent["special_tokens_map.json"] == texts["special_tokens_map.json"]


def test_texts_of_the_options_are_not_in_the_card(options, tmp_path):
    private = "a secret prompt"
    prompts = {"sample_prompts": [private], "eval_strategy": "steps", "eval_steps": 2, "run_name": "x"}
    output = trained({**options, **prompts, "response_prefix": private}, tmp_path)
    card = (output / "adapter/README.md").read_text()
    assert private not in card and str(tmp_path) not in card and "max_steps: 2" in card, card


def test_a_repository_that_may_not_be_made_ends_the_run_before_it_begins(capfd, monkeypatch, options, tmp_path):
    from huggingface_hub import HfApi

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no connection")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    (tmp_path / "run.yaml").write_text(
        json.dumps({**options, "output_dir": str(tmp_path / "output"), "push_to_hub": "me/mine"})
    )
    code, out, err = run(capfd, "sft", tmp_path / "run.yaml")
    assert code == 1 and "repository `me/mine`" in err and "Step" not in out
    assert not (tmp_path / "output").exists()


def test_an_unknown_id_has_no_text(model):
    tokenizer = surogate.Tokenizer(model)
    assert tokenizer.decode(tokenizer.encode("a cat")).strip().endswith("a cat")
    with pytest.raises(surogate.SurogateError, match="token id 99999 is outside of the tokenizer's"):
        tokenizer.decode([1, 99999])


def test_scalars_of_numpy_are_options(options):
    import numpy as np

    given = {**options, "learning_rate": np.float64(1e-3), "max_steps": np.int64(1), "lora": np.bool_(True)}
    assert surogate.Trainer(given).total_steps == 1
    with pytest.raises(ConfigError, match="learning_rate"):
        surogate.Trainer({**options, "learning_rate": np.array([1.0, 2.0])})


def test_the_column_of_messages_is_suggested(capfd, options, tmp_path):
    turns = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "A cat."}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"conversations": turns}) + "\n")
    data = [{"path": str(tmp_path / "chats.jsonl"), "type": "conversation"}]
    (tmp_path / "run.yaml").write_text(json.dumps({**options, "datasets": data, "output_dir": str(tmp_path / "o")}))
    code, out, err = run(capfd, "sft", tmp_path / "run.yaml")
    assert code == 4 and "chats.jsonl" in err and "set `messages_field: conversations`" in err
