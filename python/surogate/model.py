"""A model in evaluation mode: logits, hidden states, loss and gradients, likelihoods of continuations, text."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from . import _native, models
from .arrays import Floats, Rows, batch
from .convert import extend
from .dsl import reads_images
from .environment.cuda_libraries import site_packages
from .errors import DataError, SurogateError
from .images import Image, as_json, given, have_images
from .rewards.scores import batches, encoded, is_reward_model, refuse, rows_of, with_score
from .run import plain
from .storage import hub
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing import Unpack  # from Python 3.11 on

Gradients = dict[str, Floats]

#: A beginning and its continuation: texts, or token ids.
Pair = tuple[str, str] | tuple[Sequence[int], Sequence[int]]

#: Messages with `role` and `content`.
Conversation = list[dict[str, Any]]


class Request(TypedDict, total=False):
    """A prompt (one of the first three) with settings of its own."""

    prompt: str | Conversation
    messages: Conversation
    text: str
    tools: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any]
    images: list[Any]
    max_new_tokens: int
    temperature: float
    seed: int


class GenerationOptions(TypedDict, total=False):
    """The options of generation; what they do and their defaults are the engine's."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: Sequence[str]
    ignore_end_tokens: bool
    batch_size: int
    max_pixels: int
    min_pixels: int


class Model:
    """A model on a device, in evaluation mode: dropout is off. Created by :func:`load`, or the model of a
    :class:`Trainer`, whose weights it has at each call.

    A program is compiled for each shape of input: the first call with a new [B, T] takes longer.
    """

    def __init__(
        self,
        native: _native.Model,
        folder: Path,
        gives_scores: bool = False,
        with_images: Callable[[], _native.Model] | None = None,
    ) -> None:
        self._native, self._folder, self._gives_scores = native, folder, gives_scores
        #: Loads the model with its vision tower, which calls without images do without.
        self._with_images = with_images
        self._whole: _native.Model | None = None
        self._told = False

    def __repr__(self) -> str:
        return f"<surogate.Model {self._native.summary()}>"

    def _reading(self, images: Iterable[Image] | None) -> tuple[_native.Model, list[Any] | None]:
        """Returns the native model that computes a call, and the images for it."""
        if images is None:
            return self._native, None
        if self._with_images is None:
            raise SurogateError(f"{self._folder}: the model reads no images, or is trained on text alone")
        if self._whole is None:
            self._whole = self._with_images()
        return self._whole, given(images)

    def _answering(self, prompts: list[Any]) -> _native.Model:
        """Returns the native model that answers prompts: once one had an image, it is that with the vision tower."""
        if self._whole is None and self._with_images is not None and have_images(prompts):
            self._whole = self._with_images()
            if self._whole is not self._native:
                self._native.unload()
        return self._whole or self._native

    def unload(self) -> None:
        """Frees the memory of the device; the next call reads the weights again. Nothing for the model of a
        :class:`Trainer`."""
        for native in {self._native, self._whole or self._native}:
            native.unload()

    @property
    def parameter_names(self) -> list[str]:
        """Names of the parameters for which :meth:`loss_and_gradients` returns gradients."""
        return self._native.parameter_names()

    @overload
    def forward(
        self,
        input_ids: Rows,
        position_ids: Rows | None = None,
        hidden: Literal[False] = False,
        *,
        images: Iterable[Image] | None = None,
    ) -> Floats: ...

    @overload
    def forward(
        self,
        input_ids: Rows,
        position_ids: Rows | None = None,
        *,
        hidden: Literal[True],
        images: Iterable[Image] | None = None,
    ) -> tuple[Floats, list[Floats]]: ...

    def forward(
        self,
        input_ids: Rows,
        position_ids: Rows | None = None,
        hidden: bool = False,
        *,
        images: Iterable[Image] | None = None,
    ) -> Floats | tuple[Floats, list[Floats]]:
        """Logits, float32 [B, T, V].

        `input_ids` [B, T]. `position_ids` [B, T]: positions inside the document; a document starts
        where they do not continue, and documents do not attend to each other. By default every row is one
        document. Rows of unequal lengths are padded on the right; results of padding are 0. With `hidden`, also the residual stream: [embedding output, after layer 0, …],
        each [B, T, H].

        `images`, of a vision-language model: paths, bytes of files or uint8 [H, W, 3], in the order of the tokens that
        stand for them, row after row; each has as many of them as :func:`surogate.process_images` says.
        """
        ids, _, positions, _, lengths = batch(input_ids, position_ids=position_ids)
        native, pictures = self._reading(images)
        logits, states = native.forward(ids, positions, hidden, lengths, pictures)
        return (logits, states) if hidden else logits

    def logps(self, input_ids: Rows, labels: Rows | None = None, position_ids: Rows | None = None) -> Floats:
        """Log-probabilities of the labels, float32 [B, T]: entry t is of the label of token t + 1; 0 where it is -100, and in
        the last entry of a document. Labels are the ids by default."""
        self._check("logps")
        ids, of, positions, _, lengths = batch(input_ids, labels=labels, position_ids=position_ids)
        return self._native.logps(ids, of, positions, lengths)

    @overload
    def loss_and_gradients(
        self,
        input_ids: Rows,
        labels: Rows,
        position_ids: Rows | None = None,
        weights: Rows | None = None,
        per_token: Literal[False] = False,
        *,
        images: Iterable[Image] | None = None,
    ) -> tuple[float, Gradients]: ...

    @overload
    def loss_and_gradients(
        self,
        input_ids: Rows,
        labels: Rows,
        position_ids: Rows | None = None,
        weights: Rows | None = None,
        *,
        per_token: Literal[True],
        images: Iterable[Image] | None = None,
    ) -> tuple[Floats, Gradients]: ...

    def loss_and_gradients(
        self,
        input_ids: Rows,
        labels: Rows,
        position_ids: Rows | None = None,
        weights: Rows | None = None,
        per_token: bool = False,
        *,
        images: Iterable[Image] | None = None,
    ) -> tuple[float | Floats, Gradients]:
        """Loss and its gradients by tensor name (of the model's files; with an adapter, only the adapter's, by
        PEFT's names), each float32 in the shape of the file.

        The loss is Σ weight · cross entropy ÷ Σ weight over the tokens that are trained. `labels`
        [B, T] are aligned with `input_ids` and shifted here; −100 is not trained. `weights` [B, T]
        belong to the labels, 1 by default. With `per_token`, the first result is instead the cross
        entropy of each position, float32 [B, T]: entry t is that of predicting `labels[t + 1]`, 0
        where nothing is trained. The gradients are the same. `images` as in :meth:`forward`.
        """
        self._check("loss_and_gradients")
        native, pictures = self._reading(images)
        arrays = batch(input_ids, labels, position_ids, weights)
        loss, each, gradients = native.loss_and_gradients(*arrays, pictures)
        return (each if per_token else loss), gradients

    def rewards(self, rows: Iterable[Any], places: Sequence[str] | None = None) -> list[float]:
        """The scores of a reward model, one for each row: a text, a conversation (a list of messages), a mapping with
        `prompt` and `completion` or with `messages`, or token ids. Rows become tokens as in training: EOS ends a text, the chat
        template a conversation. Errors name a row by its place, the default is its index."""
        if not self._gives_scores:
            raise SurogateError("rewards: this model gives logits; `surogate reward` trains one that gives scores")
        found, tokenizer = rows_of(rows), None
        ids = []
        for index, row in enumerate(found):
            if tokenizer is None and not (isinstance(row, Sequence) and row and isinstance(row[0], int)):
                tokenizer = Tokenizer(self._folder)
            place = places[index] if places else f"rows[{index}]"
            ids.append(encoded(tokenizer, row, place))  # type: ignore[arg-type]
            if self.longest is not None and len(ids[-1]) > self.longest:
                raise DataError(f"{place}: has {len(ids[-1])} tokens, and the model allows sequences of {self.longest}")
        scores = [0.0] * len(ids)
        for of in batches([len(row) for row in ids]):
            logits = self.forward([ids[index] for index in of])
            for row, index in zip(logits, of, strict=True):
                scores[index] = float(row[len(ids[index]) - 1, 0])
        return scores

    def _check(self, what: str) -> None:
        if self._gives_scores:
            raise refuse(what)

    @property
    def longest(self) -> int | None:
        """The longest sequence that the model allows, in tokens; None if its configuration has no limit."""
        return self._native.longest()

    def score(self, requests: Iterable[Pair], batch_tokens: int | None = None) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations. For each pair (beginning, continuation): the natural logarithm of
        the probability of the continuation, and whether each of its tokens is the most likely one.

        A pair is of two texts, which are encoded as one, or of two sequences of token ids. A token over the border of two
        texts belongs to the continuation. Sequences of all lengths are packed into rows of one shape. `batch_tokens` is the
        size of a batch (8192 by default); a smaller one needs less memory. A beginning that is too long for the model loses
        its first tokens.
        """
        self._check("score")
        pairs = list(requests)
        results = [(0.0, True)] * len(pairs)
        for index, likelihood, greedy in self.scores(pairs, batch_tokens):
            results[index] = (likelihood, greedy)
        return results

    def scores(self, requests: Iterable[Pair], batch_tokens: int | None = None) -> Iterator[tuple[int, float, bool]]:
        """The results of :meth:`score` with the number of the request, batch by batch."""
        self._check("scores")
        pairs = [_pair(index, *request) for index, request in enumerate(requests)]
        scoring = self._native.score(pairs, batch_tokens)
        while not scoring.done:
            yield from scoring.step()

    def start(
        self,
        prompts: Sequence[Any],
        goes_on: bool = False,
        *,
        folder: str | os.PathLike[str] | None = None,
        room: int | None = None,
        adapter: int = 0,
        **options: Any,
    ) -> _native.Generation:
        """Starts to answer prompts; the options are those of :meth:`generate`, as values or as YAML text.

        A prompt may also be an object with `prompt`, `messages` or `text`, and with `tools`, `chat_template_kwargs`,
        `images`, `max_new_tokens`, `temperature` or `seed` of its own. With `goes_on`, one that cannot be answered ends at once, with
        `error` or `context`, and its `refusal` says why. Relative paths of images begin in `folder`, the working directory by
        default. With `room`, tokens of a sequence, there is room for `batch_size` such sequences, and :meth:`add` adds prompts
        while others are answered. `adapter` is the slot of the adapter that answers, after :meth:`share`; 0 is the model alone.
        """
        self._check("generate")
        native, prompts = self._answering(list(prompts)), as_json(prompts)
        known = {name for fields in _native.prompt_fields() for name in fields}
        if unknown := {name: None for of in prompts if isinstance(of, Mapping) for name in of if name not in known}:
            named = ", ".join(f"`{name}`" for name in unknown)
            warnings.warn(f"not used of the prompts: {named}; they have {', '.join(sorted(known))}", stacklevel=3)
        place = None if folder is None else Path(folder)
        generation = native.start(json.dumps(prompts, default=plain), _settings(options), goes_on, place, room, adapter)
        if not self._told:
            self._told = True
            if unused := native.unused_defaults():
                named = ", ".join(unused)
                warnings.warn(f"not applied of the model's generation_config.json: {named}", stacklevel=2)
            if note := native.rounded():
                warnings.warn(note, stacklevel=2)
        return generation

    def add(
        self,
        generation: _native.Generation,
        prompts: Sequence[Any],
        goes_on: bool = False,
        *,
        folder: str | os.PathLike[str] = ".",
        adapter: int = 0,
        **options: Any,
    ) -> int | None:
        """Adds prompts to a generation of this model that goes on, with options of their own but `batch_size`.

        Returns the number of the first of them. None where the caches have no room for one of them: it can be answered by a
        generation of its own, when this one is done.
        """
        self._check("generate")
        return generation.add(json.dumps(as_json(list(prompts)), default=plain), _settings(options), goes_on, Path(folder), adapter)

    def share(self, adapters: Sequence[Path], slots: int) -> None:
        """Makes slots, numbered from 1, for adapters that are on the device together; each has room for the largest of
        `adapters`. What was being generated is over. Errors: a model that was loaded with an adapter, and an adapter with an
        :meth:`obstacle`."""
        self._native.share([*adapters], slots)

    def place(self, slot: int, adapter: Path) -> str | None:
        """Puts an adapter into a slot, of which no answer that runs may be. Returns None, or the reason why the adapter does
        not fit there. Errors: an adapter that does not fit the model at all."""
        return self._new_tokens(adapter) or self._native.place(slot, adapter)

    def obstacle(self, adapter: Path) -> str | None:
        """The reason why an adapter cannot be on the device together with others, or None. Errors as for :meth:`place`."""
        return self._new_tokens(adapter) or self._native.obstacle(adapter)

    def _new_tokens(self, adapter: Path) -> str | None:
        is_longer = _native.tokens_of_adapter(self._folder, adapter) is not None
        return "it has tokens that the model does not have" if is_longer else None

    @overload
    def generate(self, prompt: str | Conversation | Request, **options: Unpack[GenerationOptions]) -> str: ...

    @overload
    def generate(
        self, prompt: list[str] | list[Conversation] | list[Request], **options: Unpack[GenerationOptions]
    ) -> list[str]: ...

    def generate(self, prompt: Any, **options: Unpack[GenerationOptions]) -> str | list[str]:
        """The text after a prompt: a string is continued, a conversation (a list of messages with
        `role` and `content`) is answered by the model's chat template; one that ends with an assistant's message is
        continued. An object has `prompt`, `messages` or `text`, and settings of its own, such as a `seed` for each of several answers
        to one prompt (:class:`Request`). A list of prompts gives a list of texts. Parts of a message's content may be images, spelled as in rows of
        data: `{"type": "image", "image": path | bytes | uint8 [H, W, 3]}`.

        The options are those of `surogate generate`: `max_new_tokens`, `temperature`, `top_k`, `top_p`, `min_p`,
        `repetition_penalty`, `seed`, `stop`, `ignore_end_tokens`, `batch_size`, `max_pixels`, `min_pixels`. Defaults are those of the model's `generation_config.json`;
        without one, the most likely token each time.
        """
        alone = isinstance(prompt, (str, dict)) or (
            len(prompt) > 0 and isinstance(prompt[0], dict) and not {"role", "from"}.isdisjoint(prompt[0])
        )
        prompts = [prompt] if alone else list(prompt)
        generation = self.start(prompts, **options)
        texts = [""] * len(prompts)
        while not generation.done:
            for index, text, _ in generation.step():
                texts[index] += text
        return texts[0] if alone else texts

    def stream(self, prompt: str | Conversation, **options: Unpack[GenerationOptions]) -> Iterator[str]:
        """The text of :meth:`generate` for one prompt, piece by piece."""
        generation = self.start([prompt], **options)
        while not generation.done:
            yield from (text for _, text, _ in generation.step() if text)


#: Values of options of drawing that leave no token out.
OFF = {"top_k": 0, "top_p": 1, "min_p": 0}


def _settings(options: dict[str, Any]) -> list[tuple[str, str]]:
    """Options of generation as YAML texts. Where nothing is drawn, options that leave no token out are none."""
    texts = {name: of if isinstance(of, str) else json.dumps(of, default=plain) for name, of in options.items()}
    draws = not _is(texts.get("temperature"), 0)
    return [(name, text) for name, text in texts.items() if draws or name not in OFF or not _is(text, OFF[name])]


def _is(text: str | None, number: float) -> bool:
    try:
        return text is not None and float(text) == number
    except ValueError:
        return False


def load(
    path: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    dtype: str = "float32",
) -> Model:
    """Loads a model for evaluation.

    `path` is a folder in Hugging Face format or a name on the Hub, `adapter` a folder in PEFT format or a name on
    the Hub. `device` is `auto`, `cuda`, `rocm` or `cpu`. `dtype` is the type of weights and activations: `float32`,
    `bfloat16` or `auto` (float32 on the CPU, bfloat16 on a GPU for a model that was saved in 16 bits).
    """
    folder = hub.folder(os.fspath(path))
    adapter_folder = None if adapter is None else hub.folder(os.fspath(adapter), what="adapter")
    fields = None
    if adapter_folder is not None:
        folder = extend.for_adapter(folder, adapter_folder)
        fields = with_score(hub.model_config(folder), adapter_folder)
    fields = fields or hub.model_config(folder)
    reads = reads_images(fields)

    def loaded(images: bool) -> _native.Model:
        ir = models.build(fields, images=images)
        return _native.Model.load(folder, ir, adapter_folder, device, dtype, site_packages())

    def with_images() -> _native.Model:
        return loaded(True)

    try:
        native = loaded(False)
    except SurogateError as error:
        # The text model refuses an adapter that is on the tower alone.
        if adapter_folder is None or not reads:
            raise
        try:
            native = with_images()
        except SurogateError:
            raise error from None
    return Model(native, folder, is_reward_model(fields), with_images if reads else None)


def _pair(index: int, beginning: Any, continuation: Any) -> tuple[str, str] | tuple[list[int], list[int]]:
    texts = [isinstance(part, str) for part in (beginning, continuation)]
    if all(texts):
        return beginning, continuation
    if any(texts):
        raise ValueError(f"request {index} has a text and token ids, expected two texts or two sequences of token ids")
    return [*map(int, beginning)], [*map(int, continuation)]
