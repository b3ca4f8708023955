"""The model class of lm-evaluation-harness: its three kinds of requests, answered by the engine.

Importing this module registers the class as `surogate`. `python -m surogate.harness` is the harness's own command line with
it: `--model surogate --model_args pretrained=output/stories --tasks …`. Knows texts and how the harness cuts them; what is
likely, and what text follows, is the engine's.
"""

from __future__ import annotations

if __name__ == "__main__":
    import sys

    from .environment.import_path import trusted

    # `-m` puts the working directory first: an `lm_eval.py` that lies there is not the harness.
    sys.path[:] = trusted()

import contextlib
import json
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from .cli.generate import open_model, tokenizer_folder
from .environment import working_directory
from .tokenizer import Tokenizer

#: Settings of a request that are options of generation by the same name.
SAME = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")

#: Settings of a request that are kept when they have this value, as nothing else is done.
FIXED = {"num_beams": 1, "use_cache": True}

#: Tokens of an answer where the request does not say.
MOST_NEW_TOKENS = 256

#: The longest sequence of a model whose configuration names none; the harness takes the same.
LONGEST = 2048


@register_model("surogate")
class Surogate(TemplateLM):  # type: ignore[misc]  # the harness is not typed
    """A model folder, a name on the hub, a run, a checkpoint or an adapter.

    The arguments are those of `surogate evaluate`: `pretrained`, `adapter`, `base`, `device`, `dtype`; `batch_size`, the
    most sequences that are generated at a time; `batch_tokens`, tokens that are scored at a time; `max_length`, the longest
    sequence; `add_bos_token`, whether texts begin with the token for it (left out: as the tokenizer does);
    `prefix_token_id`, the token before texts that have nothing before them (left out: the tokenizer's first or last).
    """

    def __init__(
        self,
        pretrained: str,
        adapter: str | None = None,
        base: str | None = None,
        device: str | None = "auto",
        dtype: str = "auto",
        batch_size: int | str = 64,
        max_batch_size: int | None = None,
        batch_tokens: int | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
    ) -> None:
        super().__init__()
        if batch_size != "auto" and int(batch_size) < 1:
            raise ValueError(f"batch_size: {batch_size} is below 1")
        self.batch_size = max_batch_size or 64 if batch_size == "auto" else int(batch_size)
        place = {"model": str(pretrained), "adapter": adapter, "base": base}
        options = Namespace(**place, device=device or "auto", dtype=dtype)
        self.tokenizer = Tokenizer(tokenizer_folder(options))
        self._name = str(adapter or pretrained)
        self._model = open_model(options)
        self._batch_tokens = batch_tokens
        self._add_bos = add_bos_token
        self._prefix = prefix_token_id
        self.max_length = min(length for length in (max_length, self._model.longest or LONGEST) if length)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._special(self.tokenizer.eos_token_id, self.tokenizer.bos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before texts that have nothing before them."""
        return self._special(self._prefix, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)

    def _special(self, *ids: int | None) -> int:
        found = [token for token in ids if token is not None]
        if not found:
            raise ValueError("the tokenizer has neither bos_token nor eos_token: give prefix_token_id=ID in model_args")
        return found[0]

    @property
    def tokenizer_name(self) -> str:
        """The key of requests that are kept in a cache of the harness."""
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the template; a model has one."""
        if isinstance(chat_template, str):
            raise ValueError(f"--apply_chat_template {chat_template}: the model has one template, which has no name")
        return self.tokenizer.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; without a prompt for an answer it ends inside the last message, which goes on."""
        text = self.tokenizer.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        begin = text.rindex(last.strip())
        whole = last.lstrip()
        return text[: begin + len(whole if text[begin:].startswith(whole) else last.strip())]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text. A text that begins with the token for it gets no second one."""
        special = add_special_tokens if add_special_tokens is not None else self._add_bos
        if add_special_tokens is None and self.tokenizer.bos_token_id is not None:
            begins = string.startswith(self.tokenizer.decode([self.prefix_token_id]))
            special = False if begins else special
        return self.tokenizer.encode(string, True if special is None else special)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Likelihoods of continuations. As all bars of this class, the one of the harness is for terminals alone."""
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm or None)
        return scores

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        kept = [self._kept(context, continuation) for _, context, continuation in requests]
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or None, desc="Scoring continuations") as bar:
            for index, likelihood, greedy in self._model.scores(kept, self._batch_tokens):
                results[index] = (likelihood, greedy)
                if (text := requests[index][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", text, results[index])
                bar.update(1)
        return results

    def _kept(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Tokens of a beginning and its continuation; of a beginning that is too long, the end."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise ValueError(f"a continuation has {len(continuation)} tokens, but the model allows {self.max_length}")
        return context[-room:], continuation

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of the longest sequence."""
        windows = []
        for index, request in enumerate(requests):
            (text,) = request.args
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(index, (None, *utils.make_disjoint_window(window))) for window in rolling]
        scores = self._loglikelihood_tokens([window for _, window in windows], disable_tqdm=disable_tqdm)
        totals = [0.0] * len(requests)
        for (index, _), (likelihood, _) in zip(windows, scores, strict=True):
            totals[index] += likelihood
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers of all requests; those with the same settings run together."""
        alike: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or None, desc="Generating answers") as bar:
            for settings, indices in alike.items():
                options = generation_options(json.loads(settings))
                room = self.max_length - options["max_new_tokens"]
                if room < 1:
                    most = options["max_new_tokens"]
                    raise ValueError(f"max_gen_toks: {most} tokens leave no room: the model allows {self.max_length}")
                prompts = [self.tok_encode(requests[index].args[0])[-room:] or [self.prefix_token_id] for index in indices]
                generation = self._model.start(prompts, batch_size=self.batch_size, **options)
                while not generation.done:
                    for number, text, end in generation.step():
                        texts[indices[number]] += text
                        bar.update(int(end is not None))
                for index in indices:
                    self.cache_hook.add_partial("generate_until", requests[index].args, texts[index])
        return texts


def generation_options(settings: dict[str, Any]) -> dict[str, Any]:
    """The engine's options for the settings of a request. Raises ValueError for those that it has none for."""
    given = dict(normalize_gen_kwargs(settings, MOST_NEW_TOKENS))
    draws = given.pop("do_sample", False)
    options = {"max_new_tokens": given.pop("max_gen_toks"), "stop": given.pop("until", [])}
    taken = {name: given.pop(name) for name in SAME if name in given}
    unknown = [name for name, value in given.items() if FIXED.get(name) != value]
    if unknown:
        raise ValueError(f"generation_kwargs: {unknown[0]}: {given[unknown[0]]!r} is not supported")
    if not draws:
        taken = {name: value for name, value in taken.items() if name in ("repetition_penalty", "seed")}
        taken["temperature"] = 0
    return options | taken


@contextlib.contextmanager
def metrics_by_name() -> Iterator[None]:
    """Keeps a metric that a task names from being one that lies in the working directory; a path is obeyed."""
    import evaluate

    load = evaluate.load

    def load_by_name(path: str, *more: Any, **named: Any) -> Any:
        with contextlib.nullcontext() if os.sep in path else working_directory.empty_directory():
            return load(path, *more, **named)

    evaluate.load = load_by_name
    try:
        yield
    finally:
        evaluate.load = load


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    with metrics_by_name():
        cli_evaluate()
