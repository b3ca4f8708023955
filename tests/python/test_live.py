"""A trainer's live model, its iteration and callbacks; rows of unequal lengths, DLPack, and the handlers of signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import surogate
from conftest import REPOSITORY, tiny_llama
from surogate.tasks import cpo, dpo, kto, orpo, reward
from test_api import random_batch, trainer
from test_mixtures import tiny_qwen3_moe

STORIES = REPOSITORY / "examples" / "stories"
PROMPT = "Once upon a time"


@pytest.fixture
def llama(make_model):
    return make_model(tiny_llama(initializer_range=0.3))


def losses(run: surogate.Trainer, seeds: range) -> list[float]:
    return [run.step(random_batch((1, 2, 12), seed))["loss"] for seed in seeds]


FORMS = {
    "full": {"lora": False},
    "adapter": {"lora_dropout": 0.3, "lora_rank": 4},
    "bf16": {"lora": False, "torch_dtype": "bfloat16"},
    "f16": {"lora": False, "torch_dtype": "float16"},
    "nf4": {"qlora_bnb": True},
    "fp8": {"lora": False, "torch_dtype": "bfloat16", "recipe": "fp8_hybrid"},
    "ranks": {"lora": False, "gpus": 2},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_live_model_has_the_weights_in_training(llama, tmp_path, form):
    """Equal to the exported result, and looking changes nothing: steps give the same bits with and without."""
    options = {"learning_rate": 1e-2, **FORMS[form]}
    rows = 2 * options.get("gpus", 1)
    batches = [random_batch((rows, 2, 12), seed) for seed in range(5)]
    plain = trainer(llama, tmp_path, **options)
    wanted = [plain.step(batch)["loss"] for batch in batches]
    run = trainer(llama, tmp_path, **options)
    model = run.model
    ids = batches[0]["input_ids"][0]
    seen = []
    for batch in batches:
        seen.append(run.step(batch)["loss"])
        model.forward(ids)
        model.score([([1, 2], [3])])
        assert len(model.start([[1, 2, 3]], max_new_tokens=3, ignore_end_tokens=True).step()) <= 1
        if form != "ranks":
            model.loss_and_gradients(ids, ids)
    assert seen == wanted
    run.export_merged(tmp_path / "merged")
    dtype = "bfloat16" if options.get("torch_dtype") == "bfloat16" else "float32"
    exported = surogate.load(tmp_path / "merged", dtype=dtype)
    found, expected = model.forward(ids), exported.forward(ids)
    # With the recipe, the live model multiplies in 8 bits.
    close = {"bf16": 1e-2, "f16": 1e-2, "fp8": 0.3, "nf4": 5e-2}.get(form, 1e-5)
    assert np.linalg.norm(found - expected) <= close * np.linalg.norm(expected)
    # A further step changes it.
    before = model.forward(ids)
    run.step(batches[0])
    assert np.abs(model.forward(ids) - before).max() > 0


@pytest.mark.parametrize("form", ["full", "adapter", "f16"])
def test_live_gradients_are_those_of_the_exported_model(llama, tmp_path, form):
    run = trainer(llama, tmp_path, learning_rate=1e-2, **FORMS[form])
    # In float16 the first steps are skipped, until their loss scale fits.
    losses(run, range(16 if form == "f16" else 3))
    batch = random_batch((2, 12), 9)
    loss, gradients = run.model.loss_and_gradients(**batch)
    assert set(gradients) == set(run.model.parameter_names)
    run.export(tmp_path / "result")
    base = llama if form == "adapter" else tmp_path / "result"
    exported = surogate.load(base, adapter=tmp_path / "result" if form == "adapter" else None)
    expected, slopes = exported.loss_and_gradients(**batch)
    close = 2e-2 if form == "f16" else 1e-4
    assert loss == pytest.approx(expected, rel=close)
    assert set(slopes) == set(gradients)
    for name, slope in slopes.items():
        assert np.linalg.norm(gradients[name] - slope) <= close * np.linalg.norm(slope) + 1e-7, name


def test_a_mixture_is_looked_at_while_it_trains(make_model, tmp_path):
    folder = make_model(tiny_qwen3_moe())
    batch = random_batch((1, 2, 12))
    plain = trainer(folder, tmp_path, lora=False)
    wanted = [plain.step(batch) for _ in range(3)]
    run = trainer(folder, tmp_path, lora=False)
    for step in wanted:
        metrics = run.step(batch)
        assert (metrics["loss"], metrics["expert_load"]) == (step["loss"], step["expert_load"])
        run.model.forward(batch["input_ids"][0])
        assert run.model.start([[1, 2]], max_new_tokens=2).step() is not None


def stories(tmp_path, **options) -> surogate.Trainer:
    return surogate.Trainer(
        {
            "model": str(STORIES / "model"),
            "datasets": [{"path": str(STORIES / "data" / "shakespeare.txt"), "type": "text"}],
            "sequence_len": 64,
            "lora_rank": 2,
            "device": "cpu",
            "max_steps": 6,
            "eval_steps": 3,
            "learning_rate": 1e-2,
            "output_dir": str(tmp_path / "run"),
            **options,
        }
    )


def test_text_follows_the_weights(tmp_path):
    run = stories(tmp_path)
    model = run.model
    first = model.generate(PROMPT, max_new_tokens=20)
    assert first == surogate.load(STORIES / "model").generate(PROMPT, max_new_tokens=20)
    stream = model.stream(PROMPT, max_new_tokens=20)
    next(stream)
    for _ in run:
        pass
    with pytest.raises(surogate.ConfigError, match="this one is over"):
        list(stream)
    run.export(tmp_path / "adapter")
    tuned = surogate.load(STORIES / "model", adapter=tmp_path / "adapter").generate(PROMPT, max_new_tokens=20)
    assert model.generate(PROMPT, max_new_tokens=20) == tuned != first


def test_an_iteration_ends_with_the_run(tmp_path):
    run = stories(tmp_path)
    run.step()
    steps = [metrics["step"] for metrics in run]
    assert steps == [1, 2, 3, 4, 5] and run.steps_done == run.total_steps == 6
    assert list(run) == []
    assert repr(run).startswith("<surogate.Trainer ") and "an adapter of rank 2" in repr(run) and "6 of 6" in repr(run)
    assert repr(run.model).startswith("<surogate.Model ") and "6 of 6" in repr(run.model)
    assert "llama in f32 on" in repr(surogate.load(STORIES / "model")) and "stories" in repr(
        surogate.Tokenizer(STORIES / "model")
    )


class Log(surogate.Callback):
    def __init__(self, ends_at: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.ends_at = ends_at

    def on_start(self, trainer):
        self.calls.append(("start", trainer.steps_done))

    def on_step(self, trainer, metrics):
        self.calls.append(("step", metrics["step"]))
        return metrics["step"] != self.ends_at

    def on_evaluation(self, trainer, metrics):
        self.calls.append(("evaluation", metrics["step"]))

    def on_end(self, trainer):
        self.calls.append(("end", trainer.steps_done))


def test_callbacks_hear_of_steps_and_evaluations(tmp_path):
    log, seen = Log(), []
    stories(tmp_path).train(callbacks=[log, lambda metrics: seen.append(metrics["loss"])])
    steps = [("step", number) for number in range(6)]
    assert log.calls == [("start", 0), *steps[:3], ("evaluation", 3), *steps[3:], ("evaluation", 6), ("end", 6)]
    assert len(seen) == 6 and all(np.isfinite(seen))


def test_a_callback_ends_the_training(tmp_path):
    log = Log(ends_at=1)
    run = stories(tmp_path)
    run.train(callbacks=[log])
    assert log.calls == [("start", 0), ("step", 0), ("step", 1), ("end", 2)]
    run.train(callbacks=[lambda metrics: metrics["step"] != 2])
    assert run.steps_done == 3
    run.train()
    assert run.steps_done == 6
    stale = stories(tmp_path, learning_rate=0.0, eval_steps=1, early_stopping_patience=1)
    stale.train()
    assert stale.steps_done == 2


def test_answers_of_numpy_end_it_too_and_what_cannot_be_called_is_refused(tmp_path):
    run = stories(tmp_path)
    run.train(callbacks=[lambda metrics: np.float32(metrics["step"]) < 1])
    assert run.steps_done == 2
    for wrong in (Log, object(), "log"):
        with pytest.raises(TypeError, match="neither a function nor an instance of a class of surogate.Callback"):
            run.train(callbacks=[wrong])
    with pytest.raises(TypeError, match="is no list of callbacks"):
        run.train(callbacks=print)
    assert run.steps_done == 2


def test_a_trainer_warns_of_rows_that_are_left_out(tmp_path):
    rows = [{"input_ids": [5] * (90 if number < 2 else 20)} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(UserWarning, match="10.0 % of the rows of .*rows.jsonl are too long and dropped: .* of at least 92 keeps 99 %"):
        stories(tmp_path, datasets=[{"path": str(tmp_path / "rows.jsonl"), "type": "tokens"}])


def test_the_metrics_of_every_task_are_typed():
    known = set(surogate.StepMetrics.__annotations__)
    for of in (cpo.CPO, dpo.DPO, kto.KTO, orpo.ORPO, reward.Reward):
        assert set(of.metrics) | {name for name, *_ in getattr(of, "differences", ())} <= known, of
    assert known >= {"loss", "kl", "entropy", "reward", "completions/mean_length"}


def test_a_notebook_shows_progress_and_the_curve(tmp_path, monkeypatch):
    pages = []
    cell = SimpleNamespace(update=lambda html: pages.append(html))
    display = ModuleType("IPython.display")
    display.HTML = lambda text: text
    display.display = lambda html, display_id: pages.append(html) or cell
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    stories(tmp_path).train()
    assert "0 of 6 steps" in pages[0] and "<svg" not in pages[0]
    assert "6 of 6 steps" in pages[-1] and "<polyline" in pages[-1] and pages[-1].count("<circle") == 2
    ipython.get_ipython = lambda: SimpleNamespace()
    pages.clear()
    stories(tmp_path).train(callbacks=[lambda metrics: False])
    assert not pages


def test_rows_of_unequal_lengths_are_padded(make_model, llama):
    for folder in (llama, make_model(tiny_qwen3_moe())):
        model = surogate.load(folder)
        rows = [[5, 9, 11, 2, 7], [3], [8, 1, 30]]
        logits, hidden = model.forward(rows, hidden=True)
        assert logits.shape[:2] == (3, 5)
        for row, found, stream in zip(rows, logits, hidden[1], strict=True):
            np.testing.assert_allclose(found[: len(row)], model.forward([row])[0], rtol=0, atol=1e-5)
            assert not found[len(row) :].any() and not stream[len(row) :].any()
    loss, each = 0.0, [model.loss_and_gradients([row], [row], per_token=True)[0].sum() for row in (rows[0], rows[2])]
    loss, _ = model.loss_and_gradients(rows, rows)
    assert loss == pytest.approx(sum(each) / 6, rel=1e-5)
    with pytest.raises(ValueError, match=r"labels: its rows have \[5, 1, 2\] tokens, expected \[5, 1, 3\]"):
        model.loss_and_gradients(rows, [rows[0], rows[1], [1, 2]])
    with pytest.raises(ValueError, match="input_ids: row 1 is empty"):
        model.forward([[1, 2], []])


def test_a_padded_step_is_that_of_its_rows(llama, tmp_path):
    rows = [[[5, 9, 11, 2, 7], [8, 1, 30]], [[3, 4], [6, 7, 8, 9]]]
    run = trainer(llama, tmp_path, lora=False)
    metrics = run.step({"input_ids": rows, "labels": rows})
    assert metrics["tokens"] == 14
    alone = surogate.load(llama)
    sums = [alone.loss_and_gradients([row], [row])[0] * (len(row) - 1) for part in rows for row in part]
    assert metrics["loss"] == pytest.approx(sum(sums) / 10, rel=1e-5)
    with pytest.raises(ValueError, match="its micro-batches have 2, 1 rows"):
        run.step({"input_ids": [[[1], [2]], [[1, 2]]], "labels": [[[1], [2]], [[1, 2]]]})


class Tensor:
    """Speaks DLPack and nothing else, as tensors of other libraries."""

    def __init__(self, array: np.ndarray, kind: int = 1) -> None:
        self._array, self._kind = array, kind

    def __dlpack__(self, **given):
        return self._array.__dlpack__(**given)

    def __dlpack_device__(self):
        return self._kind, 0


def test_tensors_of_other_libraries_come_and_go(llama):
    model = surogate.load(llama)
    ids = np.array([[1, 2, 3]])
    logits = model.forward(Tensor(ids))
    assert (logits == model.forward(ids)).all()
    assert logits.__dlpack_device__()[0] == 1 and (np.from_dlpack(logits) == logits).all()
    with pytest.raises(ValueError, match=r"input_ids: lies on a device \(DLPack's kind 2\)"):
        model.forward(Tensor(ids, 2))


def test_handlers_of_signals_are_given_back(tmp_path):
    """In a process of its own, which runs twice, the second time interrupted, and then ends at SIGTERM."""
    run = tmp_path / "run.yaml"
    run.write_text(
        f"model: {STORIES / 'model'}\ndevice: cpu\nsequence_len: 64\nmax_steps: 1\nlora_rank: 2\n"
        f"datasets: [{{path: {STORIES / 'data' / 'shakespeare.txt'}, type: text}}]\noutput_dir: {tmp_path / 'out'}\n"
    )
    program = f"""
import os, pathlib, signal, threading, time
from surogate.cli.commands import main
def terminate():
    # Before its first step the second run may not have taken over the handler.
    while not any('"step"' in log.read_text() for log in pathlib.Path({str(tmp_path / "second")!r}).glob("log-*.json")):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
# A shell starts what runs in the background with interrupts ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
mine = lambda *_: print("mine", flush=True)
signal.signal(signal.SIGUSR1, mine)
before = [signal.getsignal(of) for of in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
assert main(["sft", {str(run)!r}, "--quiet"]) == 0
assert [signal.getsignal(of) for of in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before
os.kill(os.getpid(), signal.SIGUSR1)
threading.Thread(target=terminate, daemon=True).start()
words = ["--max-steps", "100000", "--output-dir", {str(tmp_path / "second")!r}, "--eval-strategy", "no"]
assert main(["sft", {str(run)!r}, "--quiet", *words]) == 143
try:
    os.kill(os.getpid(), signal.SIGINT)
    # Another thread may have been given the signal: then nothing wakes this one.
    for _ in range(600):
        time.sleep(0.05)
except KeyboardInterrupt:
    print("interrupted", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("not reached", flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["mine", "interrupted"], done.stderr
    assert done.returncode == -signal.SIGTERM
