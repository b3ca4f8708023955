"""Layers of several kinds in one stack, and two stacks side by side: toy models from their description to a training step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import surogate
from conftest import tiny_mistral
from safetensors import safe_open
from surogate import models
from surogate.dsl import Batch, Layers, Module, Tensor, each, model, ops, output, repeat
from surogate.errors import ModelError
from surogate.layers import Attention, Decoder, DecoderLayer, Embedding, GatedMLP, Linear, RMSNorm
from surogate.models.mistral import MistralConfig

WINDOWS = [3, None, 3, None]
KINDS = ["sliding" if window else "full" for window in WINDOWS]
IDS = np.random.default_rng(3).integers(1, 96, (2, 12)).astype(np.int32)


def layer(c: MistralConfig, window: object, inner: int = 0) -> DecoderLayer:
    mlp = GatedMLP(c.hidden_size, inner or c.intermediate_size)
    return DecoderLayer(c, Attention(c, window=window), mlp)


class Toy(Module):
    """A decoder over layers that a subclass gives."""

    def __init__(self, c: MistralConfig) -> None:
        c.pad_token_id = None
        pattern, layers = self.layers(c)
        self.model = Decoder(c, layers, pattern=pattern)
        self.lm_head = Linear(c.hidden_size, c.vocab_size)

    def forward(self, batch: Batch) -> None:
        output("logits", self.lm_head(self.model(batch)))


@model("PatternForTests", config=MistralConfig, base="model")
class Pattern(Toy):
    """Windows by kind, as Gemma has them."""

    def layers(self, c: MistralConfig) -> tuple:
        return KINDS, {"sliding": layer(c, 3), "full": layer(c, None)}


@model("EachForTests", config=MistralConfig, base="model")
class Each(Toy):
    """The same as attributes of one kind."""

    def layers(self, c: MistralConfig) -> tuple:
        return None, layer(c, each(WINDOWS))


@model("WidthsForTests", config=MistralConfig, base="model")
class Widths(Toy):
    """Kinds with weights of other sizes."""

    def layers(self, c: MistralConfig) -> tuple:
        return KINDS, {"sliding": layer(c, 3), "full": layer(c, None, inner=80)}


class Block(Module):
    """A layer of a tower: no rotation, and every token sees its whole row."""

    def __init__(self, c: MistralConfig) -> None:
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)
        self.head_dim = c.head_dim

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.norm(x)
        heads = ops.split_heads(y, head_dim=self.head_dim)
        seen, _ = ops.attention(heads, heads, heads, batch.document_start, bidirectional=True)
        x = x + ops.merge_heads(seen) + self.mlp(y)
        output("tower.layer.{i}", x)
        return x


@model("TowerForTests", config=MistralConfig)
class Tower(Toy):
    """A tower over the positions, the result of which is added to the logits of a decoder."""

    def __init__(self, c: MistralConfig) -> None:
        self.patches = Embedding(c.max_position_embeddings, c.hidden_size)
        self.tower = Layers(3, Block(c))
        super().__init__(c)

    def layers(self, c: MistralConfig) -> tuple:
        return KINDS, {"sliding": layer(c, 3), "full": layer(c, None)}

    def forward(self, batch: Batch) -> None:
        seen = repeat(self.tower, self.patches(batch.position_ids), batch)
        output("logits", self.lm_head(self.model(batch) + seen))


def fields(name: str) -> dict:
    return tiny_mistral(architectures=[name], model_type=None, num_hidden_layers=len(WINDOWS))


def twin(folder: Path, name: str) -> Path:
    """The same weights for another architecture."""
    place = folder.parent / name
    shutil.copytree(folder, place)
    (place / "config.json").write_text(json.dumps(fields(name)))
    return place


def curve(folder: Path, **options: object) -> list[float]:
    """Losses of three steps."""
    trainer = surogate.Trainer(
        {
            "model": str(folder),
            "lora": False,
            "torch_dtype": "float32",
            "device": "cpu",
            "sequence_len": 12,
            "output_dir": str(folder / "unused"),
            **options,
        }
    )
    batch = {"input_ids": IDS[None], "labels": IDS[None]}
    return [trainer.step(batch, learning_rate=1e-2)["loss"] for _ in range(3)]


def test_kinds_are_the_same_as_attributes_of_one_kind(make_model):
    kinds = make_model(fields("PatternForTests"))
    one = twin(kinds, "EachForTests")
    ir = json.loads(models.build(fields("PatternForTests")))
    assert ir["body"][-3]["pattern"] == [0, 1, 0, 1] and len(ir["body"][-3]["blocks"]) == 2
    results = [surogate.load(folder, dtype="float32").loss_and_gradients(IDS, IDS) for folder in (kinds, one)]
    assert results[0][0] == results[1][0]
    assert all(np.array_equal(gradient, results[1][1][name]) for name, gradient in results[0][1].items())
    for options in ({}, {"recompute_block": True}, {"lora": True, "lora_rank": 4}):
        assert curve(kinds, **options) == curve(one, **options)
    # Of windows the results depend on which layer has one.
    assert curve(kinds)[0] != curve(twin(kinds, "MistralForCausalLM"))[0]


def test_kinds_have_weights_of_their_own(make_model):
    folder = make_model(fields("WidthsForTests"))
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = [file.get_slice(f"model.layers.{i}.mlp.up_proj.weight").get_shape() for i in range(4)]
    assert shapes == [[48, 32], [80, 32], [48, 32], [80, 32]]
    losses = curve(folder)
    assert losses[2] < losses[0] and losses == curve(folder, recompute_block=True)


def test_a_tower_stands_beside_a_decoder(make_model):
    folder = make_model(fields("TowerForTests"))
    ir = json.loads(models.build(fields("TowerForTests")))
    assert [item["stack"] for item in ir["body"] if "repeat" in item] == ["tower", "model.layers"]
    losses = curve(folder)
    assert losses[2] < losses[0]
    assert losses == curve(folder, recompute_block=True)
    adapted = curve(folder, lora=True, lora_rank=4, lora_target_modules=["up_proj"])
    assert adapted[0] == losses[0] and adapted[2] < adapted[0]


def test_pattern_and_kinds_belong_together():
    with pytest.raises(ModelError, match="the pattern has the kinds full, sliding, the layers given are sliding"):
        Layers(KINDS, {"sliding": Module()})


def test_an_output_of_two_stacks_is_refused():
    @model("TwiceForTests", config=MistralConfig)
    class Twice(Module):
        def __init__(self, c: MistralConfig) -> None:
            self.embed, self.one, self.two = Embedding(c.vocab_size, c.hidden_size), Layers(1, Block(c)), Layers(1, Block(c))

        def forward(self, batch: Batch) -> None:
            output("logits", repeat(self.two, repeat(self.one, self.embed(batch.input_ids), batch), batch))

    with pytest.raises(ModelError, match="output `tower.layer.{i}` is given twice"):
        models.build(fields("TwiceForTests"))
