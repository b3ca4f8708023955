"""A model's tokenizer and chat template, as the trainer uses them.

The engine does the work.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

from . import _native, models
from .images import Image, given
from .storage import hub

Messages = Sequence[Mapping[str, Any]]

#: Parameters of the function of this name in transformers, which would be variables of the template here.
OF_TRANSFORMERS = (
    "chat_template", "continue_final_message", "max_length", "padding", "return_assistant_tokens_mask", "return_dict",
    "return_tensors", "tokenize", "tokenizer_kwargs", "truncation",
)  # fmt: skip


class Tokenizer:
    """The tokenizer of a model folder, or of a name on the Hub."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._native = _native.Tokenizer(hub.folder(self._path, weights=False))

    def __repr__(self) -> str:
        return f"<surogate.Tokenizer {self._path}>"

    @property
    def bos_token_id(self) -> int | None:
        """The token before texts, if there is one."""
        return self._native.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The token after texts, if there is one."""
        return self._native.eos_token_id

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template, if there is one."""
        return self._native.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens in the text are recognized."""
        return self._native.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return self._native.decode(list(ids), skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Renders a conversation with the model's own template. `variables` are passed to it, such as
        `enable_thinking=False`. Raises TypeError for parameters of transformers that change what is returned."""
        if wrong := [name for name in OF_TRANSFORMERS if variables.get(name)]:
            hint = "this returns the text: `encode(text, add_special_tokens=False)` gives its tokens, and `Model.generate` continues answers"
            raise TypeError(f"apply_chat_template: `{wrong[0]}` is no variable of a template ({hint})")
        return self._native.render(
            json.dumps(list(messages)), _optional(tools), add_generation_prompt, json.dumps(variables)
        )

    @overload
    def labels(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        images: None = None,
        **options: Any,
    ) -> tuple[list[int], list[int], list[float]]: ...

    @overload
    def labels(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        images: Iterable[Image],
        **options: Any,
    ) -> tuple[list[int], list[int], list[float], list[list[int]] | None]: ...

    def labels(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        images: Iterable[Image] | None = None,
        **options: Any,
    ) -> Any:
        """(ids, labels, weights) of a conversation, as for a row of type `conversation`: labels are not
        shifted, -100 is not trained. Options as in run.yaml: `system`, `loss_scale`,
        `response_prefix`, `agent_template`, `clock`.

        With `images`, of a vision-language model: as in a row with a column of images, they take the places of parts
        without an image of their own and of the word `<image>`, or stand before the first user's text; an empty list
        where the messages name all of them. Each place becomes the tokens of its image, which are not trained. The fourth
        result are the positions of the tokens by time, row and column, three lists, or None where positions have one
        axis."""
        texts = (json.dumps(list(messages)), _optional(tools), json.dumps(options))
        if images is None:
            return self._native.labels(*texts)
        files = given(images)
        folder = hub.folder(self._path, weights=False)
        form = json.dumps(json.loads(models.build(hub.model_config(folder), images=True))["images"])
        return self._native.labels_with_images(*texts, folder, form, files or None)


def _optional(tools: Sequence[Mapping[str, Any]] | None) -> str | None:
    return None if tools is None else json.dumps(list(tools))
