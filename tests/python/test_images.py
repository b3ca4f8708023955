"""Decoding, sizes, resampling and patches against what transformers' processors give on the shared images."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import surogate
from surogate.errors import DataError

SHARED = Path(__file__).parents[2].parent / "shared" / "golden" / "vision"

#: Names in the recordings and the classes of transformers.
CLASSES = {
    "qwen2_vl": "Qwen2VL",
    "qwen3_vl": "Qwen2VL",
    "gemma3": "Gemma3",
    "gemma4": "Gemma4",
    "pixtral": "Pixtral",
    "smolvlm": "SmolVLM",
    "idefics3": "Idefics3",
    "siglip": "Siglip",
}


def read(name):
    path = SHARED / name
    return json.loads(path.read_text()) if path.is_file() else {}


@functools.cache
def arrays(name):
    from safetensors.numpy import load_file

    return load_file(SHARED / name)


@pytest.fixture
def decoded(shared):
    pytest.importorskip("safetensors")
    return arrays("decoded.safetensors")


@pytest.fixture
def recorded(shared):
    pytest.importorskip("safetensors")
    return arrays("preprocess.safetensors")


def processor(name, setting):
    recorded = read("preprocess.json")["settings"][name]
    kind = {"image_processor_type": f"{CLASSES[name]}ImageProcessor"}
    return kind | recorded["constructor"] | recorded["settings"][setting]


#: A configuration under which an image keeps its size.
PLAIN = {"image_processor_type": "SiglipImageProcessor", "do_resize": False}


def images():
    return {of["file"]: of for of in read("images.json").get("images", [])}


@pytest.mark.parametrize("name", list(images()))
def test_images_are_decoded_as_pillow_does(name, shared, decoded):
    folder = shared / "golden/vision"
    of = images()[name]
    (made,) = surogate.process_images(PLAIN, [folder / "images" / name])
    found = made["views"][0]
    rows = decoded.get(f"{name}.rows")
    expected = decoded[f"{name}.rgb"] if rows is None else decoded[f"{name}.rgb_rows"]
    compared = found if rows is None else found[rows]
    if name == "grey16.png":
        # Pillow clips samples of 16 bits at 255; here they are scaled.
        assert found.shape == expected.shape and found.max() == 255 and len(np.unique(found)) > 100
        return
    difference = np.abs(compared.astype(int) - expected.astype(int))
    if of["format"] == "JPEG":
        assert difference.max() <= 5 and difference.mean() <= 0.5
    else:
        assert difference.max() == 0


def failing():
    return sorted(path.name for path in (SHARED / "images").glob("bad_*"))


@pytest.mark.parametrize("name", failing())
def test_broken_files_are_refused(name, shared):
    path = shared / "golden/vision/images" / name
    with pytest.raises(DataError, match=f"image 1: .*{name}.*(empty|expected JPEG|cut off)"):
        surogate.process_images(PLAIN, [path])
    with pytest.raises(DataError, match="image 2: cannot read"):
        surogate.process_images(PLAIN, [np.zeros((4, 4, 3), np.uint8), path.with_name("nothing.png")])


def sizes():
    path = SHARED / "sizes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


#: Settings of the table of sizes.
SIZED = {
    "qwen2_vl_published": ("qwen2_vl", {"size": {"shortest_edge": 3136, "longest_edge": 12845056}}),
    "qwen2_vl_class": ("qwen2_vl", {"size": {"shortest_edge": 3136, "longest_edge": 1003520}}),
    "qwen3_vl_published": ("qwen3_vl", {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}),
    "qwen2_vl_small": ("qwen2_vl", {"size": {"shortest_edge": 3136, "longest_edge": 50176}}),
    "qwen3_vl_small": ("qwen3_vl", {"size": {"shortest_edge": 4096, "longest_edge": 65536}}),
    "gemma4_70": ("gemma4", {"max_soft_tokens": 70}),
    "gemma4_280": ("gemma4", {"max_soft_tokens": 280}),
    "gemma4_1120": ("gemma4", {"max_soft_tokens": 1120}),
    "pixtral_1024_16": ("pixtral", {"size": {"longest_edge": 1024}, "patch_size": {"height": 16, "width": 16}}),
    "mistral3_1540_28": ("pixtral", {"size": {"longest_edge": 1540}, "patch_size": {"height": 28, "width": 28}}),
    "smolvlm_2048_512": ("smolvlm", {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}),
    "idefics3_1456_364": ("idefics3", {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}}),
}


def size_of(config, h, w):
    from surogate import _native

    return _native.ImageProcessor.of(json.dumps(config)).layout(h, w)


@pytest.mark.parametrize("setting", SIZED)
def test_sizes_are_those_of_transformers(setting, shared):
    name, more = SIZED[setting]
    recorded = read("preprocess.json")["settings"][name]
    config = {"image_processor_type": f"{CLASSES[name]}ImageProcessor"} | recorded["constructor"] | more
    table = sizes()
    assert len(table) > 70
    for row in table:
        expected = row[setting]
        if isinstance(expected, str):
            with pytest.raises(DataError):
                size_of(config, row["h"], row["w"])
            continue
        views, tiles = size_of(config, row["h"], row["w"])
        if name in ("smolvlm", "idefics3"):
            tile = more["max_image_size"]["longest_edge"]
            count = expected[4] * expected[5]
            assert views == [(tile, tile)] * (count + 1 if count > 1 else 1), row
            assert tiles == tuple(expected[4:6]) or count == 1, row
        else:
            assert views == [tuple(expected)], row


def cases():
    recorded = read("preprocess.json")
    for case in recorded.get("cases", []):
        if case["processor"] in CLASSES:
            yield pytest.param(case, id=case["id"])


@pytest.mark.parametrize("case", list(cases()))
def test_views_are_resampled_as_by_transformers(case, shared, decoded, recorded):
    name, image = case["processor"], case["image"]
    rgb = decoded.get(f"{image}.rgb")
    if rgb is None:
        # The largest image is recorded by rows: its file is a PNG, which is decoded exactly.
        rgb = shared / "golden/vision/images" / image
    (made,) = surogate.process_images(processor(name, case["setting"]), [rgb])
    views = made["views"]
    if "image_tokens" in case and name not in ("gemma3", "smolvlm", "idefics3"):
        assert made["tokens"] == case["image_tokens"]
    if "grid_thw" in case and name.startswith("qwen"):
        assert list(made["grid"]) == case["grid_thw"][1:]
    stacked = views.reshape(-1, *views.shape[2:])
    key = case["id"]
    expected = recorded.get(f"{key}.u8")
    if expected is None:
        rows = recorded[f"{key}.rows"]
        stacked_rows, expected = stacked[rows], recorded[f"{key}.u8_rows"]
    else:
        stacked_rows = stacked
    difference = np.abs(stacked_rows.astype(int) - expected.reshape(stacked_rows.shape).astype(int))
    assert difference.max() <= 3, difference.max()
    assert (difference > 0).mean() <= 0.06
    means = recorded[f"{key}.block_mean"]
    blocks = [
        [block.reshape(-1, 3).mean(0) for block in np.array_split(band, means.shape[1], axis=1)]
        for band in np.array_split(stacked.astype(float), means.shape[0], axis=0)
    ]
    assert np.abs(np.array(blocks) - means).max() <= 0.6


def test_bounds_of_the_area_replace_those_of_the_configuration():
    config = processor("qwen2_vl", "published") if read("preprocess.json") else {
        "image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 3136, "longest_edge": 12845056}
    }  # fmt: skip
    image = np.zeros((560, 560, 3), np.uint8)
    usual, small, large = (
        surogate.process_images(config, [image], **more)[0]
        for more in ({}, {"max_pixels": 50176}, {"min_pixels": 1003520})
    )
    assert (usual["tokens"], usual["grid"], usual["size"]) == (400, (40, 40), (560, 560))
    assert small["views"].shape == (1, 224, 224, 3) and large["views"].shape == (1, 1008, 1008, 3)
    with pytest.raises(ValueError, match="is above `max_pixels`"):
        surogate.process_images(config, [image], min_pixels=10**6, max_pixels=10**5)
    with pytest.raises(ValueError, match="no effect"):
        surogate.process_images({"image_processor_type": "SiglipImageProcessor"}, [image], max_pixels=10**5)


@pytest.mark.parametrize("image", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3))])
def test_arrays_of_another_form_are_refused(image):
    with pytest.raises(ValueError, match="expected uint8"):
        surogate.process_images(PLAIN, [image])
