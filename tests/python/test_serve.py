"""`surogate serve`: OpenAI's own client gets the texts that `generate` makes, limits hold, and a browser page is served."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import surogate
from conftest import REPOSITORY
from safetensors.numpy import load_file, save_file
from surogate import serve
from surogate.serve.engine import Done, Engine, Job
from surogate.serve.protocol import BadRequest, Request
from surogate.serve.server import LOOK, Limits, Server
from test_generate import TEMPLATE

openai = pytest.importorskip("openai")

STORIES = REPOSITORY / "examples/stories/model"
TOKEN = "a-token-of-some-length"
HELLO = [{"role": "user", "content": "Once upon a time"}]


def start(*words: object, **variables: str) -> tuple[subprocess.Popen[str], str]:
    """A server on a free port, and its address when it answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "surogate", "serve", *map(str, words), "--address", "0", "--device", "cpu", "--dtype", "float32"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    assert process.stdout and process.stderr
    line = process.stdout.readline()
    found = re.search(r"http://\S+/v1", line)
    assert found, line + process.stderr.read()
    return process, found[0]


def make_adapter(place: Path, like: Path, seed: int, rank: int = 4, modules: str = "", **config: object) -> Path:
    """An adapter with drawn matrices on those modules of another one whose names have a text in them."""
    files, drawn = load_file(like / "adapter_model.safetensors"), numpy.random.default_rng(seed)
    found = {}
    for name, of in files.items():
        if modules in name:
            shape = (rank, of.shape[1]) if ".lora_A." in name else (of.shape[0], rank)
            found[name] = drawn.normal(0, 0.15, shape).astype(numpy.float32)
    place.mkdir()
    save_file(found, place / "adapter_model.safetensors")
    targets = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in found})
    fields = json.loads((like / "adapter_config.json").read_text())
    fields |= {"r": rank, "lora_alpha": 3 * rank, "target_modules": targets, **config}
    (place / "adapter_config.json").write_text(json.dumps(fields))
    return place


def end(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The stories with a chat template, and an adapter for them."""
    place = tmp_path_factory.mktemp("serve")
    shutil.copytree(STORIES, place / "talkative")
    (place / "talkative/chat_template.jinja").write_text(TEMPLATE)
    options = {"datasets": [{"path": str(REPOSITORY / "examples/stories/data/shakespeare.txt"), "type": "text"}]}
    options |= {"model": str(place / "talkative"), "output_dir": str(place / "run"), "max_steps": 4, "save_steps": 2}
    options |= {"device": "cpu", "sequence_len": 64, "learning_rate": 0.05, "gradient_accumulation_steps": 1}
    (place / "run.yaml").write_text(json.dumps(options))
    words = [sys.executable, "-m", "surogate", "sft", str(place / "run.yaml"), "--quiet"]
    subprocess.run(words, check=True)
    return place


@pytest.fixture(scope="module")
def address(folder) -> Iterator[str]:
    words = [folder / "talkative", "--adapters", f"shakespeare={folder / 'run'}", "--max-sequences", 4, "--max-body", 20_000]
    process, found = start(*words, "--max-tokens", 60)
    yield found
    assert end(process) == 0


@pytest.fixture
def client(address):
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def model(folder):
    return surogate.load(folder / "talkative")


def test_a_conversation_is_answered_whole_and_in_pieces(client, model):
    expected = model.generate(HELLO, max_new_tokens=12)
    options = {"model": "talkative", "messages": HELLO, "max_tokens": 12}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == expected and whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12 and whole.usage.prompt_tokens == model.start([HELLO]).prompt_tokens(0)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == expected and len(pieces) > 5
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_texts_are_continued_with_the_options_of_the_request(client, model):
    prompts = ["The king", "A little dog"]
    answer = client.completions.create(model="talkative", prompt=prompts, max_tokens=9)
    assert [choice.text for choice in answer.choices] == model.generate(prompts, max_new_tokens=9)
    drawn = {"temperature": 0.9, "seed": 5, "max_tokens": 9, "extra_body": {"top_k": 7, "min_p": 0.01}}
    one = client.completions.create(model="talkative", prompt="The king", **drawn).choices[0].text
    options = {"temperature": 0.9, "seed": 5, "top_k": 7, "min_p": 0.01, "max_new_tokens": 9}
    assert one == model.generate("The king", **options)
    stopped = client.completions.create(model="talkative", prompt="Once", max_tokens=40, stop=[" time"]).choices[0]
    assert stopped.finish_reason == "stop" and " time" not in stopped.text
    ids = surogate.Tokenizer(STORIES).encode("The king")
    of_ids = client.completions.create(model="talkative", prompt=ids, max_tokens=9).choices[0].text
    assert of_ids.strip() == answer.choices[0].text.strip()
    streamed = client.completions.create(model="talkative", prompt="The king", max_tokens=9, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text
    several = client.completions.create(model="talkative", prompt="The king", max_tokens=5, n=3, temperature=1.0)
    assert [choice.index for choice in several.choices] == [0, 1, 2]


def test_requests_that_wait_together_get_the_answers_that_each_gets_alone(client, model):
    prompts = [f"The {animal}" for animal in ("dog", "cat", "king", "girl", "boy", "bird", "tree", "house")]
    ask = lambda text: client.completions.create(model="talkative", prompt=text, max_tokens=16).choices[0].text  # noqa: E731
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    assert answers == [model.generate(prompt, max_new_tokens=16) for prompt in prompts]


def test_a_request_that_comes_during_another_changes_neither(client, model):
    texts: list[str] = []
    for chunk in client.completions.create(model="talkative", prompt="The king", max_tokens=60, stream=True, stop=["#"]):
        texts.append(chunk.choices[0].text)
        if len(texts) == 3:
            short = client.completions.create(model="talkative", prompt="Lily", max_tokens=4, temperature=0.8, seed=3)
    assert "".join(texts) == model.generate("The king", max_new_tokens=60)
    assert short.choices[0].text == model.generate("Lily", max_new_tokens=4, temperature=0.8, seed=3)


def test_a_request_longer_than_the_room_waits_for_its_turn(client, model):
    long = "The king went to the park with his dog. " * 40
    ids = surogate.Tokenizer(STORIES).encode(long)[:300]
    with ThreadPoolExecutor(3) as pool:
        ask = lambda prompt: client.completions.create(model="talkative", prompt=prompt, max_tokens=20).choices[0].text  # noqa: E731
        found = [of.result() for of in [pool.submit(ask, prompt) for prompt in ("Lily", ids, "Tom")]]
    assert [found[0], found[2]] == model.generate(["Lily", "Tom"], max_new_tokens=20)
    generation = model.start([ids], max_new_tokens=20)
    while not generation.done:
        generation.step()
    assert found[1].strip() and generation.prompt_tokens(0) == 300


def test_adapters_are_models_by_name(client, folder, model):
    assert [of.id for of in client.models.list()] == ["talkative", "shakespeare"]
    adapted = surogate.load(folder / "talkative", folder / "run/adapter").generate("The king", max_new_tokens=12)
    plain = model.generate("The king", max_new_tokens=12)
    ask = {"prompt": "The king", "max_tokens": 12}
    answers = [client.completions.create(model=name, **ask).choices[0].text for name in ("shakespeare", "talkative")]
    assert answers == [adapted, plain] and adapted != plain


@pytest.fixture(scope="module")
def adapters(folder) -> dict[str, Path]:
    """Adapters of other ranks, scales and modules; one has a chat template of its own."""
    like, place = folder / "run/adapter", folder / "adapters"
    place.mkdir()
    found = {"all": make_adapter(place / "all", like, 1), "few": make_adapter(place / "few", like, 2, 7, "q_proj")}
    found["mlp"] = make_adapter(place / "mlp", like, 3, 8, ".mlp.", use_rslora=True)
    (found["mlp"] / "chat_template.jinja").write_text(TEMPLATE.replace("user", "person") + "{# its own #}")
    return {**found, "trained": like}


PROMPT = "The king went to the park with his dog and they saw a big bird on a tree. The bird"


@pytest.fixture(scope="module")
def alone(folder, adapters):
    """The answers of each adapter, and of the model alone (``""``), when nothing else is on the device."""
    places: dict[str, Path | None] = {**adapters, "": None}
    models = {name: surogate.load(folder / "talkative", place) for name, place in places.items()}
    found = {name: model.generate([PROMPT, "Lily"], max_new_tokens=20) for name, model in models.items()}
    assert len({first for first, _ in found.values()}) == len(found), "they answer differently"
    return found


def test_adapters_answer_in_one_batch_what_each_answers_alone(folder, adapters, alone, tmp_path):
    model = surogate.load(folder / "talkative")
    assert [model.obstacle(place) for place in adapters.values()] == [None] * 4
    model.share([*adapters.values()], 4)
    slots = {"": 0, **{name: slot for slot, name in enumerate(adapters, 1)}}
    for name, slot in slots.items():
        if slot:
            # A run may remove its files before the first answer.
            copy = shutil.copytree(adapters[name], tmp_path / name)
            assert model.place(slot, copy) is None
            shutil.rmtree(copy)
    # The same prompt of all: what they have in common at their beginning is one only for the same adapter.
    asked = [(name, prompt) for name in ("few", "", "all", "mlp", "trained", "few") for prompt in (PROMPT, "Lily")]
    first, *others = asked
    generation = model.start([first[1]], room=200, batch_size=len(asked), max_new_tokens=20, adapter=slots[first[0]])
    for name, prompt in others:
        assert model.add(generation, [prompt], max_new_tokens=20, adapter=slots[name]) is not None
    texts, most = [""] * len(asked), 0
    while not generation.done:
        pieces = generation.step()
        most = max(most, len(pieces))
        for number, text, _ in pieces:
            texts[number] += text
    assert texts == [alone[name][prompt == "Lily"] for name, prompt in asked]
    assert most == len(asked), "one step adds a token to all of them"
    # Another adapter takes a slot; what the adapter before had and it has not is gone.
    assert model.place(slots["all"], adapters["few"]) is None
    generation = model.start([PROMPT], max_new_tokens=20, adapter=slots["all"])
    text = ""
    while not generation.done:
        text += "".join(text for _, text, _ in generation.step())
    assert text == alone["few"][0]
    with pytest.raises(surogate.SurogateError, match="no adapter in the slot 5"):
        model.start([PROMPT], adapter=5)


def test_a_model_that_has_an_adapter_or_is_in_training_takes_no_others(folder, adapters, tmp_path):
    with pytest.raises(surogate.SurogateError, match="loaded without one"):
        surogate.load(folder / "talkative", adapters["all"]).share([adapters["few"]], 1)
    options = {"model": str(folder / "talkative"), "lora": False, "device": "cpu", "output_dir": str(tmp_path / "unused")}
    with pytest.raises(surogate.SurogateError, match="in training"):
        surogate.Trainer(options).model.share([adapters["few"]], 1)


@pytest.mark.parametrize("slots", [None, 1, 2, 0])
def test_requests_for_several_adapters_are_all_answered_however_many_are_on_the_device(folder, adapters, alone, slots):
    words = [word for name, place in adapters.items() for word in ("--adapters", f"{name}={place}")]
    most = [] if slots is None else ["--max-adapters", slots]
    process, address = start(folder / "talkative", *words, *most, "--max-sequences", 6)
    try:
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)
        asked = [(name, place) for name in (*adapters, "") for place in (0, 1)] * 2

        def ask(of: tuple[str, int]) -> str:
            answer = client.completions.create(model=of[0] or "talkative", prompt=(PROMPT, "Lily")[of[1]], max_tokens=20)
            return answer.choices[0].text

        with ThreadPoolExecutor(len(asked)) as pool:
            assert list(pool.map(ask, asked)) == [alone[name][place] for name, place in asked]
        # The template of an adapter is its own.
        said = client.chat.completions.create(model="mlp", messages=HELLO, max_tokens=8).choices[0].message.content
        assert said == surogate.load(folder / "talkative", adapters["mlp"]).generate(HELLO, max_new_tokens=8)
    finally:
        assert end(process) == 0


def test_what_cannot_be_together_is_named_and_answered_and_what_is_broken_fails_alone(folder, adapters, alone, tmp_path):
    like = folder / "run/adapter"
    make_adapter(tmp_path / "broken", like, 5)
    (tmp_path / "broken/adapter_model.safetensors").write_bytes(b"no weights")
    make_adapter(tmp_path / "narrow", like, 6)
    cut = {name: of[:, :-1] for name, of in load_file(tmp_path / "narrow/adapter_model.safetensors").items()}
    save_file(cut, tmp_path / "narrow/adapter_model.safetensors")
    endless = load_file(make_adapter(tmp_path / "endless", like, 7) / "adapter_model.safetensors")
    endless[min(endless)][0, 0] = numpy.inf
    save_file(endless, tmp_path / "endless/adapter_model.safetensors")
    dora = make_adapter(tmp_path / "dora", like, 8, modules="q_proj", use_dora=True)
    matrices = load_file(dora / "adapter_model.safetensors")
    lengths = {name.replace("lora_B.weight", "lora_magnitude_vector"): of for name, of in matrices.items() if ".lora_B." in name}
    matrices |= {name: numpy.full(of.shape[0], 1.5, numpy.float32) for name, of in lengths.items()}
    save_file(matrices, dora / "adapter_model.safetensors")
    named = ("broken", "narrow", "endless", "dora")
    words = [word for name in named for word in ("--adapters", f"{name}={tmp_path / name}")]
    process, address = start(folder / "talkative", *words, "--adapters", f"all={adapters['all']}")
    try:
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)
        ask = lambda name: client.completions.create(model=name, prompt=PROMPT, max_tokens=20).choices[0].text  # noqa: E731
        assert ask("all") == alone["all"][0]
        for name, reason in (("broken", "safetensors"), ("narrow", "has shape")):
            with pytest.raises(openai.BadRequestError, match=reason):
                ask(name)
            assert ask("all") == alone["all"][0]
        assert ask("dora") == surogate.load(folder / "talkative", dora).generate(PROMPT, max_new_tokens=20)
        with ThreadPoolExecutor(6) as pool:
            mixed = list(pool.map(ask, ("all", "dora", "talkative") * 2))
        assert mixed[:3] == mixed[3:] == [alone["all"][0], mixed[1], alone[""][0]]
    finally:
        assert end(process) == 0
    named_there = process.stderr.read() if process.stderr else ""
    for name, reason in (("broken", "safetensors"), ("narrow", "has shape"), ("endless", "has inf"), ("dora", "DoRA")):
        assert re.search(f"`{name}`.*{reason}", named_there), named_there


def test_an_adapter_that_changes_and_a_checkpoint_that_appears_are_answered(folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    process, address = start(run)
    try:
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)
        ask = lambda name: client.completions.create(model=name, prompt=PROMPT, max_tokens=20).choices[0].text  # noqa: E731
        names = ["run", "checkpoint-2"]
        before = [ask(name) for name in names]
        like = run / "adapter"
        for number, rank in ((6, 4), (8, 16), (10, 64)):
            # The place of a checkpoint appears whole.
            made = make_adapter(tmp_path / f"made-{number}", like, number, rank)
            made.rename(run / f"checkpoint-{number}")
            expected = surogate.load(folder / "talkative", run / f"checkpoint-{number}").generate(PROMPT, max_new_tokens=20)
            assert ask(f"checkpoint-{number}") == expected
            assert [ask(name) for name in names] == before
        (run / "checkpoint-6/adapter_model.safetensors").unlink()
        shutil.copy(run / "checkpoint-8/adapter_model.safetensors", run / "checkpoint-6/adapter_model.safetensors")
        shutil.copy(run / "checkpoint-8/adapter_config.json", run / "checkpoint-6/adapter_config.json")
        assert ask("checkpoint-6") == ask("checkpoint-8")
        (run / "checkpoint-8/adapter_model.safetensors").write_bytes(b"")
        with pytest.raises(openai.BadRequestError):
            ask("checkpoint-8")
        assert [ask(name) for name in names] == before
    finally:
        assert end(process) == 0


def test_the_name_of_a_run_means_its_newest_checkpoint_and_then_its_result(folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    (run / "adapter").rename(tmp_path / "adapter")
    process, address = start(run)
    try:
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)
        ask = lambda: client.completions.create(model="run", prompt=PROMPT, max_tokens=20).choices[0].text  # noqa: E731
        expected = lambda of: surogate.load(folder / "talkative", of).generate(PROMPT, max_new_tokens=20)  # noqa: E731
        assert ask() == expected(run / "checkpoint-4")
        make_adapter(tmp_path / "made", tmp_path / "adapter", 6).rename(run / "checkpoint-6")
        for old in (2, 4):
            shutil.rmtree(run / f"checkpoint-{old}")
        assert ask() == expected(run / "checkpoint-6")
        (tmp_path / "adapter").rename(run / "adapter")
        assert ask() == expected(run / "adapter")
    finally:
        assert end(process) == 0


def test_a_server_inside_of_a_process_gives_its_handler_back(folder):
    text = f"""
        import os, signal, threading, time
        from surogate.cli import commands
        from surogate.serve import Server

        signal.signal(signal.SIGTERM, own := lambda *_: None)
        serve = Server.serve_forever
        Server.serve_forever = lambda *given, **named: (threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start(), serve(*given, **named))
        assert commands.main(["serve", {str(folder / 'talkative')!r}, "--address", "0", "--device", "cpu"]) == 0
        assert signal.getsignal(signal.SIGTERM) is own
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_signal_gives_every_request_an_end(folder):
    process, address = start(folder / "talkative", "--max-sequences", 2, "--max-tokens", 400)
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)
    begun = threading.Event()

    def ask(streams: bool) -> str:
        try:
            answer = client.completions.create(model="talkative", prompt="Lily", max_tokens=400, stream=streams, n=2, temperature=1.0)
            for _ in answer if streams else ():
                begun.set()
            return "whole"
        except openai.APIConnectionError as error:
            return f"broken off: {error}"
        except openai.APIError as error:
            return error.message.rpartition(" - ")[2]

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, number % 2 == 0) for number in range(8)]
        assert begun.wait(60)
        assert end(process) == 0
        found = {of.result() for of in asked}
    assert "the server is ending" in found and found <= {"the server is ending", "whole"}, found


def test_checkpoints_of_a_run_are_models_too(folder):
    process, address = start(folder / "run")
    try:
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
        assert [of.id for of in client.models.list()] == ["run", "checkpoint-2", "checkpoint-4"]
        ask = {"prompt": "The king", "max_tokens": 12}
        answers = {name: client.completions.create(model=name, **ask).choices[0].text for name in ("run", "checkpoint-2", "checkpoint-4")}
    finally:
        assert end(process) == 0
    expected = surogate.load(folder / "talkative", folder / "run/checkpoint-2").generate("The king", max_new_tokens=12)
    assert answers["checkpoint-2"] == expected and answers["checkpoint-4"] == answers["run"]


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "other"}, 404, "there are: talkative, shakespeare"),
        ({"logprobs": True}, 400, "`logprobs` is not supported"),
        ({"frequency_penalty": 0.5}, 400, "`frequency_penalty` is not supported"),
        ({"max_tokens": 61}, 400, "from 1 to 60"),
        ({"n": 5}, 400, "more than 4 sequences"),
        ({"extra_body": {"colour": 1}}, 400, "`colour` is not known"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": 10**400}, 400, "`temperature` is no number"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "`messages[0].content` is no text"),
        ({"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": []}]}, 400, "`messages[1].content` is no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]}, 400, "no text"),
        ({"messages": [{"role": "user", "content": "x" * 15_000}]}, 400, "allows sequences of 512"),
        ({"messages": [{"role": "user", "content": "x" * 30_000}]}, 413, "expected at most 20000"),
    ],
)
def test_what_cannot_be_answered_is_an_error_that_names_it(client, change, status, words):
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(**{"model": "talkative", "messages": HELLO, "max_tokens": 5, **change})
    assert raised.value.status_code == status and words in raised.value.message, raised.value.message


class Script:
    """An engine whose answers are put into queues, one for each request."""

    started = 0

    def __init__(self) -> None:
        self.models = ["one", "two"]
        self.jobs: queue.Queue[Job] = queue.Queue()
        self.refusal: str | None = None

    def names(self) -> list[str]:
        return self.models

    def submit(self, request: Request) -> Job:
        if self.refusal is not None:
            raise BadRequest(self.refusal)
        job = Job(request)
        self.jobs.put(job)
        return job

    def next(self) -> Job:
        """The request that the page has sent."""
        return self.jobs.get(timeout=20)

    def answer(self, *pieces: str) -> Job:
        """Answers the next request whole."""
        job = self.next()
        for piece in pieces:
            job.events.put((0, piece, None))
        job.events.put((0, "", "stop"))
        job.events.put(Done(1, len(pieces)))
        return job


@pytest.mark.parametrize("is_accepted", [True, False])
def test_a_connection_made_before_the_end_gets_an_answer(is_accepted, monkeypatch):
    monkeypatch.setattr(serve.server, "FIRST", 30.0)
    server = Server(("127.0.0.1", 0), Script(), Limits(1 << 20, 60, 100, 4), None)
    serving = threading.Thread(target=server.serve_forever, args=(0.05,))
    client = socket.socket()
    client.settimeout(30)
    if is_accepted:
        serving.start()
    client.connect(server.server_address)
    if is_accepted:
        left = time.monotonic() + 20
        while not server._new and time.monotonic() < left:
            time.sleep(0.01)
        server.shutdown()
    with ThreadPoolExecutor(1) as pool:
        finished = pool.submit(server.finish, 30)
        time.sleep(0.2)
        assert not finished.done()
        client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        finished.result(30)
    client.close()
    server.server_close()


def test_an_answer_that_takes_its_time_comes_as_soon_as_it_is_there():
    engine = Script()
    server = Server(("127.0.0.1", 0), engine, Limits(1 << 20, 60, 100, 4), None)
    threading.Thread(target=server.serve_forever, args=(0.05,)).start()
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, f"http://127.0.0.1:{server.server_address[1]}/v1")
            job = engine.next()
            # Longer than the time between two looks at the client.
            time.sleep(3 * LOOK)
            begun = time.monotonic()
            for event in ((0, "late", None), (0, "", "stop"), Done(1, 1)):
                job.events.put(event)
            status, body = asked.result(20)
        assert status == 200 and json.loads(body)["choices"][0]["text"] == "late" and time.monotonic() - begun < 20
    finally:
        server.shutdown()
        server.server_close()


def connection(address: str) -> http.client.HTTPConnection:
    host, port = re.findall(r"//([^:]+):(\d+)", address)[0]
    return http.client.HTTPConnection(host, int(port), timeout=60)


def ask(address: str, body: object = None, **headers: str) -> tuple[int, str]:
    of = connection(address)
    data = json.dumps(body or {"prompt": "a", "max_tokens": 1}) if not isinstance(body, bytes) else body
    of.request("POST", "/v1/completions", data, {"Content-Type": "application/json", **headers})
    answer = of.getresponse()
    return answer.status, answer.read().decode()


@pytest.fixture
def scripted(request):
    """A server whose answers a test puts together, with its address; the parameter is its limit of seconds."""
    engine = Script()
    server = Server(("127.0.0.1", 0), engine, Limits(1 << 20, getattr(request, "param", 60), 100, 4), None)
    threading.Thread(target=server.serve_forever, args=(0.05,)).start()
    yield engine, f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def test_a_request_that_comes_byte_by_byte_gives_its_place_away(scripted, monkeypatch):
    monkeypatch.setattr(serve.server, "TIMEOUT", 2.0)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    for start_of in (b"", head + b"Content-Length: 500\r\n\r\n"):
        of = connection(scripted[1])
        of.connect()
        begun = time.monotonic()
        with pytest.raises(OSError):
            of.sock.sendall(start_of)
            while time.monotonic() < begun + 20:
                of.sock.sendall(b"x")
                time.sleep(0.2)
        assert time.monotonic() < begun + 15
        of.close()


@pytest.mark.parametrize("scripted", [1], indirect=True)
def test_a_client_that_takes_its_time_for_each_piece_gets_no_more_than_its_time(scripted):
    engine, address = scripted
    of = connection(address)
    of.request("POST", "/v1/completions", json.dumps({"prompt": "a", "stream": True}), {"Content-Type": "application/json"})
    job = engine.next()
    for _ in range(30):
        job.events.put((0, "piece", None))
        time.sleep(0.1)
    job.events.put((0, "", "stop"))
    job.events.put(Done(1, 30))
    text = of.getresponse().read().decode()
    assert "the answer took longer than 1 s" in text and "[DONE]" not in text and job.is_cancelled.is_set(), text


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("POST", {"Transfer-Encoding": "chunked"}, 411),
        ("POST", {"Content-Length": "9" * 5000}, 413),
        ("POST", {"Content-Length": "-1"}, 411),
        ("GET", {"Content-Length": "20"}, 400),
        ("GET", {"Content-Length": ["0", "20"]}, 400),
        ("POST", {"Content-Length": ["2", "20"]}, 400),
    ],
)
def test_what_follows_a_request_is_not_read_as_another(scripted, method, headers, status):
    of = connection(scripted[1])
    of.putrequest(method, "/v1/models" if method == "GET" else "/v1/completions")
    for name, values in {"Content-Type": "application/json", **headers}.items():
        for value in [values] if isinstance(values, str) else values:
            of.putheader(name, value)
    of.endheaders()
    # The client's own is closed as soon as the answer says that the connection ends.
    with of.sock.dup() as left:
        answer = of.getresponse()
        assert (answer.status, answer.headers["Connection"]) == (status, "close")
        assert json.loads(answer.read())["error"]["message"]
        assert left.recv(1) == b"", "the connection ends"
    of.close()


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "talkative", "prompt": "a\\ud800"}',
        b'{"model": "\\udfff", "prompt": "a"}',
        json.dumps({"prompt": [10**30]}).encode(),
        json.dumps({"prompt": [-1]}).encode(),
        json.dumps({"prompt": [5, 10**6]}).encode(),
    ],
)
def test_what_is_no_text_fails_alone(address, body):
    """An answer that runs meanwhile comes to its end."""
    of = connection(address)
    running = json.dumps({"prompt": "Once", "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}})
    of.request("POST", "/v1/completions", running, {"Content-Type": "application/json"})
    answer = of.getresponse()
    begin = answer.read(10)
    status, text = ask(address, body)
    assert status == 400 and "error" in json.loads(text), text
    whole = (begin + answer.read()).decode()
    assert "error" not in whole and whole.endswith("[DONE]\n\n"), whole


def test_requests_whose_clients_have_gone_take_no_place():
    # It loads nothing, and begins no answer.
    engine = Engine({"one": None}, most=4, waiting=2, tokens=100)
    first, second = engine.submit(request := Request("one", False, [{}], {}, False, False)), engine.submit(request)
    with pytest.raises(BadRequest, match="2 requests are waiting"):
        engine.submit(request)
    first.is_cancelled.set()
    third = engine.submit(request)
    assert list(engine._waiting) == [second, third]
    with pytest.raises(BadRequest, match="2 requests are waiting"):
        engine.submit(request)


class Odd:
    """Models whose first answer has 20 pieces, and that can take no other request meanwhile."""

    first, done, count = "one", False, 0

    def __contains__(self, name: str) -> bool:
        return True

    def load_first(self) -> None:
        pass

    def use(self, *_: object) -> tuple[Odd, int]:
        return self, 0

    def start(self, *_: object, **__: object) -> Odd:
        return self

    def add(self, *_: object, **__: object) -> None:
        raise ValueError("odd")

    def step(self) -> list[tuple[int, str, str | None]]:
        time.sleep(0.05)
        self.count += 1
        self.done = self.count == 20
        return [(0, "x", "stop" if self.done else None)]

    def prompt_tokens(self, number: int) -> int:
        return 1

    def answer(self, number: int) -> list[int]:
        return [1] * self.count

    def forget(self, number: int) -> None:
        pass


def test_a_request_that_cannot_begin_fails_alone():
    engine = Engine(Odd(), most=4, waiting=2, tokens=100)
    engine.load_first()
    running = engine.submit(Request("one", False, [{}], {}, True, False))
    assert running.events.get(timeout=20) == (0, "x", None)
    other = engine.submit(Request("one", False, [{}], {}, True, False)).events.get(timeout=20)
    assert isinstance(other, BadRequest) and other.status == 500 and "ValueError: odd" in str(other)
    events = [running.events.get(timeout=20) for _ in range(20)]
    assert events[-2:] == [(0, "x", "stop"), Done(1, 20)]
    engine.close()


def test_other_pages_of_a_browser_cannot_ask(address):
    assert ask(address)[0] == 200
    assert ask(address, Host="evil.example")[0] == 403
    assert ask(address, **{"Content-Type": "text/plain"})[0] == 415
    assert ask(address, b"{")[0] == ask(address, b"[" * 9000)[0] == ask(address, b"[]")[0] == 400


def test_an_answer_ends_when_its_client_goes_and_the_next_one_is_answered(address, client):
    of = connection(address)
    body = json.dumps({"prompt": "Once", "max_tokens": 60, "stream": True})
    of.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert of.getresponse().read(10)
    of.sock.shutdown(socket.SHUT_RDWR)
    of.close()
    begun = time.monotonic()
    assert client.completions.create(model="talkative", prompt="The", max_tokens=2).choices[0].text
    assert time.monotonic() - begun < 20


def test_a_token_is_asked_for_and_never_accepted_in_part(folder, tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    process, address = start(folder / "talkative", "--token-file", file, "--max-waiting", 1, "--max-sequences", 1)
    try:
        assert [ask(address, Authorization=of)[0] for of in ("", "Bearer wrong", f"Bearer {TOKEN[:-1]}")] == [401] * 3
        assert ask(address, Authorization=f"Bearer {TOKEN}", Host="name.of.cluster")[0] == 200
        client = openai.OpenAI(base_url=address, api_key=TOKEN, max_retries=0)
        codes: list[int] = []

        def slow() -> None:
            try:
                client.completions.create(model="talkative", prompt="Once", max_tokens=200)
                codes.append(200)
            except openai.APIStatusError as error:
                codes.append(error.status_code)

        threads = [threading.Thread(target=slow) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 429 in codes and 200 in codes and set(codes) == {200, 429}, codes
    finally:
        end(process)


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        (["--address", "0.0.0.0:0"], {}, "there is no token"),
        (["--address", "here"], {}, "expected HOST:PORT or PORT"),
        ([], {"SUROGATE_SERVE_TOKEN": "short"}, "expected at least 16"),
        ([], {"SUROGATE_SERVE_TOKEN": "ein-längeres-Geheimnis"}, "not ASCII"),
        (["--adapters", "x"], {}, "expected NAME=DIR"),
    ],
)
def test_wrong_words_are_reported_before_a_model_is_loaded(words, variables, expected):
    line = [sys.executable, "-m", "surogate", "serve", str(STORIES), *words]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, **variables}, timeout=60)
    assert done.returncode == 2 and expected in done.stderr, done.stderr


def test_the_page_loads_nothing_from_elsewhere(address):
    of = connection(address)
    of.request("GET", "/")
    answer = of.getresponse()
    page, rules = answer.read().decode(), answer.headers["Content-Security-Policy"]
    assert answer.status == 200 and "default-src 'none'" in rules and rules.count("'sha256-") == 2 and "unsafe" not in rules
    assert not re.search(r"https?://|\bsrc=|\bhref=|innerHTML|\bon\w+=", page)
    of.request("GET", "/health")
    assert json.loads(of.getresponse().read()) == {"status": "ok"}


#: The parts of a browser that the script of the page uses.
BROWSER = """
const boxes = {};
const make = () => ({
  value: "", textContent: "", className: "", listeners: {}, children: [],
  addEventListener(kind, call) { this.listeners[kind] = call; }, append(of) { this.children.push(of); },
  replaceChildren(...of) { this.children = of; if (of.length) this.value = of[0].value; }, scrollIntoView() {}, remove() { this.gone = true; },
});
globalThis.document = { getElementById: (id) => (boxes[id] ??= make()), createElement: make };
globalThis.Option = class { constructor(text, value) { this.value = value; } };
const plain = globalThis.fetch;
globalThis.fetch = (place, options) => plain(process.argv[2] + place, options);
"""

CONVERSATION = """
const until = async (is) => { while (!is()) await new Promise((done) => setTimeout(done, 20)); };
(async () => {
  await until(() => boxes.model?.value);
  for (const text of JSON.parse(process.argv[3])) {
    boxes.text.value = text;
    boxes.form.listeners.submit({ preventDefault() {} });
    await until(() => boxes.send.textContent === "Send");
  }
  console.log(JSON.stringify(boxes.messages.children.filter((of) => !of.gone).map((of) => [of.className, of.textContent])));
})();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_of_the_page_shows_answers_as_they_come_and_errors(address, model, tmp_path):
    page = (Path(surogate.__file__).parent / "serve/chat.html").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (tmp_path / "page.js").write_text(BROWSER + script.replace('"use strict";', "") + CONVERSATION)
    texts = ["Once upon a time", "x" * 15_000]
    words = ["node", str(tmp_path / "page.js"), address.removesuffix("v1"), json.dumps(texts)]
    shown = json.loads(subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout)
    assert shown[0] == ["message user", texts[0]]
    assert shown[1] == ["message assistant", model.generate([{"role": "user", "content": texts[0]}], max_new_tokens=60)]
    assert shown[-1][0] == "message error" and "allows sequences of 512" in shown[-1][1]
