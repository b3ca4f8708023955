"""`share_prompts`: both answers of a pair follow one prompt, which is computed once."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import surogate
from conftest import tiny_llama, tiny_mistral
from recorded_preferences import DEVICE, GOLDEN
from surogate.errors import ConfigError

STORIES = Path(__file__).parents[2] / "examples" / "stories" / "model"
WORDS = "the cat sat on a mat and then it ran away from home because of rain in spring".split()


@pytest.fixture
def pairs(tmp_path):
    """Pairs of short answers to prompts of 1 to 30 words; one pair shares nothing, one is all prompt but a word."""
    draw = random.Random(5)

    def words(most):
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    rows = [{"prompt": words(30) + " ", "chosen": words(9), "rejected": words(9)} for _ in range(22)]
    rows += [{"prompt": "", "chosen": "cat", "rejected": "mat"}, {"prompt": "a " * 40, "chosen": "b", "rejected": "c"}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row | {"margin": 0.5}) + "\n" for row in rows))
    return path


@pytest.fixture
def run(pairs, tmp_path):
    return {
        "model": str(STORIES), "task": "dpo", "device": DEVICE,
        "datasets": [{"path": str(pairs), "type": "preference"}], "torch_dtype": "float32", "lora_dropout": 0.0,
        "learning_rate": 1e-2, "warmup_steps": 0, "optimizer": "adamw", "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "sample_packing": False, "sequence_len": 256, "max_length": 128,
        "validation_split_ratio": 0.2, "output_dir": str(tmp_path / "run"), "max_steps": 3,
    }  # fmt: skip


def taken(run, **more):
    """The steps of a run, its evaluation and its weights."""
    trainer = surogate.Trainer({**run, **more})
    steps = list(trainer)
    return steps, trainer.evaluate(), trainer


TASKS = {
    "dpo": {},
    "ipo": {"task": "dpo", "loss_type": ["ipo", "sft"], "ld_alpha": 0.5},
    "wpo": {"task": "dpo", "use_weighting": True},
    "orpo": {"task": "orpo"},
    "cpo": {"task": "cpo"},
    "simpo": {"task": "cpo", "loss_type": "simpo", "beta": 2.0},
    "reward": {"task": "reward", "center_rewards_coefficient": 0.01},
    "full": {"task": "orpo", "lora": False, "learning_rate": 1e-3},
    "padded": {"padding_free": False},
}


@pytest.mark.parametrize("name", TASKS)
def test_a_shared_prompt_gives_the_numbers_of_one_for_each_answer(name, run):
    run = {**run, **TASKS[name]}
    apart, shared = (taken(run, share_prompts=shared) for shared in (False, True))
    assert sum(step["tokens"] for step in shared[0]) < 0.8 * sum(step["tokens"] for step in apart[0])
    of_time = ("second", "tokens", "memory", "mfu", "ceiling")
    for index, (one, other) in enumerate(zip([*apart[0], apart[1]], [*shared[0], shared[1]], strict=True)):
        assert one.keys() == other.keys()
        # AdamW turns a gradient of about zero into a whole step of either sign.
        near = 2e-5 if index == 0 else 2e-4
        for key in one:
            if isinstance(one[key], float) and not any(word in key for word in of_time):
                assert other[key] == pytest.approx(one[key], rel=2e-4, abs=near), key


def widened(value):
    """A recorded configuration with the tokens of the stories, long rows and windows that hide nothing."""
    if not isinstance(value, dict):
        return value
    sizes = {"vocab_size": 512, "vocab_size_per_layer_input": 512, "max_position_embeddings": 512, "n_positions": 512}
    sizes |= {"sliding_window": 300} if value.get("sliding_window") else {}
    ends = {key: 2 for key, of in value.items() if key.endswith("token_id") and (isinstance(of, list) or (of or 0) > 511)}
    return {key: widened(of) for key, of in value.items()} | {k: v for k, v in sizes.items() if k in value} | ends


#: Families whose layers carry a state from token to token.
WITH_STATE = ("falcon_h1", "granitemoehybrid", "lfm2", "nemotron_h", "qwen3_5")


@pytest.mark.parametrize("family", sorted(path.parent.name for path in GOLDEN.glob("*/config.json")))
def test_every_family_shares_prompts_or_says_why_not(family, run, tmp_path):
    model = tmp_path / family
    model.mkdir()
    (model / "config.json").write_text(json.dumps(widened(json.loads((GOLDEN / family / "config.json").read_text()))))
    for file in STORIES.glob("tokenizer*"):
        (model / file.name).write_bytes(file.read_bytes())
    run = {**run, "model": str(model), "init": "random", "shuffle": False, "validation_split_ratio": 0.0}
    run |= {"per_device_train_batch_size": 24, "gradient_accumulation_steps": 1}
    apart = surogate.Trainer({**run, "share_prompts": False}).step()
    if family.startswith(WITH_STATE):
        with pytest.raises(ConfigError, match="carries a state from token to token"):
            surogate.Trainer({**run, "share_prompts": True})
        assert surogate.Trainer(run).step()["tokens"] == apart["tokens"]
        return
    shared = surogate.Trainer(run).step()
    assert shared["tokens"] < apart["tokens"]
    for key in ("grad_norm", "logps/chosen", "logps/rejected", "logits/rejected"):
        assert shared[key] == pytest.approx(apart[key], rel=1e-3), key


@pytest.mark.parametrize("layout", [{"sample_packing": True}, {"padding_free": True}])
def test_the_reference_of_known_log_probabilities_is_shared_too(layout, run, tmp_path):
    run = {**run, **layout, "share_prompts": True, "data_cache": str(tmp_path / "cache")}
    steps, _, _ = taken(run)
    known, _, _ = taken(run, precompute_ref_log_probs=True)
    for one, other in zip(steps, known, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["rewards/margins"] == pytest.approx(one["rewards/margins"], rel=1e-4, abs=1e-5)


def test_a_resumed_run_with_shared_prompts_takes_the_same_steps(run, tmp_path):
    run = {**run, "sample_packing": True, "max_steps": 4}
    trainer = surogate.Trainer(run)
    for _ in range(2):
        trainer.step()
    trainer.save(tmp_path / "kept")
    expected = [trainer.step() for _ in range(2)]
    resumed = surogate.Trainer({**run, "resume_from_checkpoint": str(tmp_path / "kept")})
    for step in expected:
        found = resumed.step()
        assert (found["loss"], found["grad_norm"]) == (step["loss"], step["grad_norm"])


def test_generations_of_the_live_model_see_whole_texts(run):
    trainer = surogate.Trainer({**run, "share_prompts": True})
    trainer.step()
    ids = [[5, 6, 7, 8, 9, 10, 11]]
    logits = trainer.model.forward(ids)
    alone = trainer.model.forward([ids[0][:4]])
    np.testing.assert_allclose(np.asarray(logits)[0, :4], np.asarray(alone)[0], atol=2e-4)


@pytest.mark.parametrize(("window", "shares"), [(64, False), (512, True)])
def test_windows_that_hide_a_part_of_a_document_keep_prompts_apart(window, shares, run, make_model, tmp_path):
    config = tiny_llama(vocab_size=512, max_position_embeddings=512)
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    model = make_model(config)
    for file in STORIES.glob("tokenizer*"):
        (model / file.name).write_bytes(file.read_bytes())
    run = {**run, "model": str(model)}
    steps, _, _ = taken(run)
    tokens = [sum(step["tokens"] for step in taken(run, share_prompts=on)[0]) for on in (False, shares)]
    assert sum(step["tokens"] for step in steps) == tokens[1]
    assert (tokens[1] < tokens[0]) == shares
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(run | {"max_steps": 1}))
    done = subprocess.run([sys.executable, "-m", "surogate", "dpo", path], capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    assert ("computed for each answer: its attention has a window of 64 tokens" in said) != shares
    assert ("follow one prompt, which is computed once" in said) == shares
    if not shares:
        with pytest.raises(ConfigError, match=r"`share_prompts: true`: its attention has a window of 64 tokens"):
            surogate.Trainer({**run, "share_prompts": True})


def test_noise_by_the_length_of_documents_keeps_prompts_apart(run):
    with pytest.raises(ConfigError, match="`neftune_noise_alpha` weighs its noise by the length of documents"):
        surogate.Trainer({**run, "share_prompts": True, "neftune_noise_alpha": 5})
    assert surogate.Trainer({**run, "neftune_noise_alpha": 5}).step()["tokens"] > 0


def test_other_tasks_refuse_the_option(run):
    with pytest.raises(ConfigError, match="`share_prompts` has no effect on `task: kto`"):
        surogate.Trainer({**run, "task": "kto", "share_prompts": True})


def test_batches_by_hand_are_not_longer_than_the_windows_allow(pairs, run, make_model):
    """Rows of data are so short that no window hides anything, and the program has none."""
    model = make_model(tiny_mistral(sliding_window=24, vocab_size=512))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (Path(model) / file).write_bytes((STORIES / file).read_bytes())
    pairs.write_text("".join(json.dumps({"prompt": "a ", "chosen": "b", "rejected": of}) + "\n" for of in "cdefghijkl"))
    run = {**run, "model": str(model), "sequence_len": 24, "max_length": 12, "validation_split_ratio": 0}

    def batch(length: int) -> dict[str, dict[str, np.ndarray]]:
        ids = np.arange(3, 3 + 2 * length).reshape(2, 1, length) % 200 + 3
        return {side: {"input_ids": of, "labels": of} for side, of in zip(("chosen", "rejected"), ids, strict=True)}

    shared, apart = (surogate.Trainer({**run, "share_prompts": shares}) for shares in ("auto", False))
    assert shared.step(batch(24), 0.0)["loss"] == pytest.approx(apart.step(batch(24), 0.0)["loss"], rel=1e-5)
    with pytest.raises(surogate.SurogateError, match="a document of a batch has 25 tokens.*at most 24.*window of 24 tokens"):
        shared.step(batch(25), 0.0)
    assert apart.step(batch(25), 0.0)["loss"] > 0
