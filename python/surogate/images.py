"""Images for models: files, bytes and arrays as the engine takes them, and what a model's processor makes of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from . import _native
from .errors import DataError
from .storage import hub

#: A path, the bytes of a file, or uint8 [H, W, 3].
Image = str | os.PathLike[str] | bytes | npt.ArrayLike


class ProcessedImage(TypedDict):
    """An image as a model takes it."""

    #: uint8 [n, H, W, 3], resized, in the model's order.
    views: npt.NDArray[np.uint8]
    #: Tokens of the language model.
    tokens: int
    #: Rows and columns: of patches for Qwen, of tokens for Pixtral and Gemma 4, else of tiles.
    grid: tuple[int, int]
    #: Height and width of the decoded image.
    size: tuple[int, int]


#: A file with its name, the bytes of one, or an array that is contiguous.
Given = tuple[str, bytes] | bytes | npt.NDArray[np.uint8]


def given(images: Iterable[Image]) -> list[Given]:
    """Images for the engine."""
    return [_one(number, image) for number, image in enumerate(images)]


def _one(number: int, image: Image) -> Given:
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str | os.PathLike):
        try:
            return os.fspath(image), Path(image).read_bytes()
        except OSError as error:
            raise DataError(f"image {number + 1}: cannot read {os.fspath(image)}: {error.strerror}") from error
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(f"image {number + 1}: {array.dtype}{list(array.shape)}, expected uint8 [height, width, 3]")
    return np.ascontiguousarray(array)


#: Types of parts of a content that are images, and fields that hold one.
PARTS, HOLDERS = ("image", "image_url", "input_image"), ("image", "image_url", "url", "path", "bytes")


def is_image(part: Any) -> bool:
    """True if a part of a message's content is an image."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in PARTS or kind is None and any(part.get(name) is not None for name in PARTS[:2])


def have_images(prompts: Iterable[Any]) -> bool:
    """True if a prompt is a conversation with an image, or an object that brings images."""
    return any(isinstance(of, Mapping) and of.get("images") or any(map(is_image, _parts(of))) for of in prompts)


def as_json(prompts: Iterable[Any]) -> list[Any]:
    """Prompts with their images as JSON takes them: bytes and arrays become `data:` URIs, paths texts."""
    return [_as_json(prompt) for prompt in prompts]


def _as_json(prompt: Any) -> Any:
    if isinstance(prompt, Mapping):
        held = {name: _as_json(value) if name in ("prompt", "messages") else value for name, value in prompt.items()}
        if isinstance(held.get("images"), list | tuple):
            held["images"] = [_text(image) for image in held["images"]]
        return held
    if not isinstance(prompt, list | tuple):
        return prompt
    return [_message(message) if isinstance(message, Mapping) else message for message in prompt]


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": [_part(part) if is_image(part) else part for part in content]}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _text(value) if name in HOLDERS else value for name, value in part.items()}


def _text(image: Any) -> Any:
    """An image as JSON has it; what is JSON already stays."""
    if isinstance(image, Mapping):
        return {name: _text(value) for name, value in image.items()}
    if image is None or isinstance(image, str | int | list):
        return image
    if isinstance(image, os.PathLike):
        return os.fspath(image)
    return _native.image_uris(given([image]))[0]


def _parts(prompt: Any) -> list[Any]:
    """The parts of all contents of a prompt."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt") if prompt.get("prompt") is not None else prompt.get("messages")
    if not isinstance(prompt, list | tuple):
        return []
    contents = [message.get("content") for message in prompt if isinstance(message, Mapping)]
    return [part for content in contents if isinstance(content, list | tuple) for part in content]


def process_images(
    model: str | os.PathLike[str] | Mapping[str, Any],
    images: Iterable[Image],
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> list[ProcessedImage]:
    """The images as a model's processor makes them: decoded, turned, on white, resized, in views.

    `model` is a folder or a name on the Hub, or the configuration of a processor as a mapping. `min_pixels` and
    `max_pixels` replace the bounds of the area that the configuration has."""
    if isinstance(model, Mapping):
        processor = _native.ImageProcessor.of(json.dumps(dict(model)))
    else:
        folder = hub.folder(os.fspath(model), weights=False)
        found = _native.ImageProcessor.read(folder)
        if found is None:
            raise DataError(f"{folder}: there is no `preprocessor_config.json`, which says how images are read")
        processor = found
    if min_pixels is not None or max_pixels is not None:
        processor = processor.bounded(min_pixels, max_pixels)
    made = processor.prepare(given(images))
    return [{"views": views, "tokens": tokens, "grid": grid, "size": size} for views, tokens, grid, size in made]
