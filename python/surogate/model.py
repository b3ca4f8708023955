"""A model in evaluation mode: logits, hidden states, loss and gradients."""

from __future__ import annotations

import os
from typing import Literal, overload

import numpy.typing as npt

from . import _native, hub, models
from .arrays import Floats, floats, integers, optional
from .machine import site_packages

Gradients = dict[str, Floats]


class Model:
    """Weights on a device with compiled programs. Made by :func:`load`; dropout is off.

    Rows are compiled for the shapes that they come in: the first call with a new [B, T] takes
    longer.
    """

    def __init__(self, native: _native.Model) -> None:
        self._native = native

    @property
    def parameter_names(self) -> list[str]:
        """The names that :meth:`loss_and_gradients` gives gradients for."""
        return self._native.parameter_names()

    @overload
    def forward(
        self, input_ids: npt.ArrayLike, position_ids: npt.ArrayLike | None = None, hidden: Literal[False] = False
    ) -> Floats: ...

    @overload
    def forward(
        self, input_ids: npt.ArrayLike, position_ids: npt.ArrayLike | None = None, *, hidden: Literal[True]
    ) -> tuple[Floats, list[Floats]]: ...

    def forward(
        self, input_ids: npt.ArrayLike, position_ids: npt.ArrayLike | None = None, hidden: bool = False
    ) -> Floats | tuple[Floats, list[Floats]]:
        """Logits, float32 [B, T, V].

        `input_ids` [B, T]. `position_ids` [B, T]: positions inside the document; a document starts
        where they do not continue, and documents do not see each other. Left out: every row is one
        document. With `hidden`, also the residual stream: [embedding output, after layer 0, …],
        each [B, T, H].
        """
        ids = integers("input_ids", input_ids)
        positions = optional(integers, "position_ids", position_ids, ids.shape)
        logits, states = self._native.forward(ids, positions, hidden)
        return (logits, states) if hidden else logits

    @overload
    def loss_and_gradients(
        self,
        input_ids: npt.ArrayLike,
        labels: npt.ArrayLike,
        position_ids: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
        per_token: Literal[False] = False,
    ) -> tuple[float, Gradients]: ...

    @overload
    def loss_and_gradients(
        self,
        input_ids: npt.ArrayLike,
        labels: npt.ArrayLike,
        position_ids: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
        *,
        per_token: Literal[True],
    ) -> tuple[Floats, Gradients]: ...

    def loss_and_gradients(
        self,
        input_ids: npt.ArrayLike,
        labels: npt.ArrayLike,
        position_ids: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
        per_token: bool = False,
    ) -> tuple[float | Floats, Gradients]:
        """Loss and its gradients by tensor name (Hugging Face's; of the adapter alone, PEFT's, where
        there is one), each float32 in the shape of the file.

        The loss is Σ weight · cross entropy ÷ Σ weight over the tokens that are trained. `labels`
        [B, T] are aligned with `input_ids` and shifted here; −100 is not trained. `weights` [B, T]
        belong to the labels, 1 if left out. With `per_token`, the first result is instead the cross
        entropy of each position, float32 [B, T]: entry t is that of predicting `labels[t + 1]`, 0
        where nothing is trained. The gradients are the same.
        """
        ids = integers("input_ids", input_ids)
        loss, each, gradients = self._native.loss_and_gradients(
            ids,
            integers("labels", labels, ids.shape),
            optional(integers, "position_ids", position_ids, ids.shape),
            optional(floats, "weights", weights, ids.shape),
        )
        return (each if per_token else loss), gradients


def load(
    path: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    dtype: str = "float32",
) -> Model:
    """Loads a model for evaluation.

    `path` is a folder in Hugging Face's form or a name on the hub, `adapter` a folder in PEFT's
    form. `device` is `cpu`, `cuda` or `auto`; `dtype` is `float32` or `bfloat16`: how weights and
    activations are stored.
    """
    folder = hub.folder(os.fspath(path))
    ir = models.build(hub.model_config(folder))
    adapter_folder = None if adapter is None else hub.folder(os.fspath(adapter), what="adapter")
    return Model(_native.Model.load(folder, ir, adapter_folder, device, dtype, site_packages()))
