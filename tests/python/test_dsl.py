"""The language: what is recorded, and that mistakes point at the user's line."""

from __future__ import annotations

import inspect
import json
from typing import Literal

import pytest
from surogate.dsl import (
    Batch,
    Layers,
    ModelConfig,
    Module,
    Parameter,
    Unset,
    build,
    each,
    model,
    ops,
    output,
    region,
    repeat,
    task,
)
from surogate.errors import ModelConfigError, ModelError
from surogate.layers import Embedding, Linear, RMSNorm
from surogate.models import TASKS


class TinyConfig(ModelConfig):
    hidden_size: int
    num_hidden_layers: int = 2
    hidden_act: Literal["silu"] = "silu"


def record(forward, **parts):
    """The IR of a model whose `forward(self, batch)` and attributes are given."""

    class Tiny(Module):
        def __init__(self, c):
            self.embed = Embedding(10, c.hidden_size)
            for name, part in parts.items():
                setattr(self, name, part(c))

    Tiny.forward = forward
    model("TinyForTests", config=TinyConfig)(Tiny)
    return json.loads(build({"architectures": ["TinyForTests"], "hidden_size": 8}))


def line_of(function, text: str) -> int:
    """The number of the line of `function` that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_a_wrong_shape_is_an_error_at_the_line_of_the_model():
    def forward(self, batch):
        x = self.embed(batch.input_ids)
        return self.wide(x)  # here

    with pytest.raises(ModelError) as error:
        record(forward, wide=lambda c: Linear(c.hidden_size + 1, 4))
    assert error.value.place == f"{_this_file()}:{line_of(forward, '# here')}"
    assert "linear(float[B, T, 8], float[4, 9])" in str(error.value)


def _this_file() -> str:
    from surogate.dsl.place import _short

    return _short(__file__)


def test_an_unknown_attribute_is_named():
    def forward(self, batch):
        ops.rmsnorm(self.embed(batch.input_ids), self.norm.weight, epsilon=1e-6)

    with pytest.raises(ModelError, match="unknown attribute `epsilon`, known are: eps"):
        record(forward, norm=lambda c: RMSNorm(c.hidden_size, 1e-6))


def test_operations_outside_of_a_model_are_refused():
    with pytest.raises(ModelError, match=r"test_dsl.py:\d+: operations can only be used inside"):
        ops.add(None, None)


def test_an_unused_parameter_is_refused_where_it_was_declared():
    def forward(self, batch):
        output("hidden.embed", self.embed(batch.input_ids))

    with pytest.raises(ModelError, match=r"`spare.weight` is declared but") as error:
        record(forward, spare=lambda c: Linear(c.hidden_size, 4))
    assert "test_dsl.py" in str(error.value)


class Layer(Module):
    def __init__(self, c):
        self.norm = RMSNorm(c.hidden_size, 1e-5)
        self.proj = Linear(c.hidden_size, c.hidden_size)

    def forward(self, x, eps):
        with region("inner"):
            y, _ = ops.rmsnorm(x, self.norm.weight, eps=eps)
        x = x + self.proj(y)
        output("hidden.layer.{i}", x)
        return x


def stack(c):
    return Layers(c.num_hidden_layers, Layer(c))


def test_a_repeat_is_recorded_once_with_attributes_by_iteration():
    def forward(self, batch):
        x = repeat(self.layers, self.embed(batch.input_ids), each([1e-5, 1e-6]))
        output("hidden.final_norm", x)

    ir = record(forward, layers=stack)
    whole = ir["body"][1]
    assert (whole["repeat"], whole["stack"], "pattern" in whole) == (2, "layers", False)
    [block] = whole["blocks"]
    carry = {**whole["carry"][0], **block["carry"][0]}
    nodes = block["nodes"]
    assert [n["op"] for n in nodes] == ["rmsnorm", "linear", "add"]
    assert nodes[0]["attrs"] == {"eps": {"each": [1e-5, 1e-6]}}
    assert [n.get("region") for n in nodes] == ["inner", None, None]
    assert carry == {
        "initial": ir["body"][0]["outputs"][0],
        "inside": nodes[0]["inputs"][0],
        "next": nodes[2]["outputs"][0],
        "result": ir["outputs"][0]["value"],
    }
    names = [p["name"] for p in block["parameters"]]
    assert names == ["layers.{i}.norm.weight", "layers.{i}.proj.weight"]
    assert block["outputs"] == [{"name": "hidden.layer.{i}", "value": carry["next"]}]


def test_a_task_is_recorded_apart_from_the_model():
    @task("scores for tests")
    class Scores(Module):
        def __init__(self, c):
            self.score = Linear(c.hidden_size, 3)

        def forward(self, of, batch):
            loss, _ = ops.cross_entropy(self.score(of["hidden.embed"]), batch.targets)
            for name, value in zip(["loss_sum", "weight_sum"], ops.weighted_sum(loss, batch.weights), strict=True):
                output(name, value)

    def forward(self, batch):
        output("hidden.embed", self.embed(batch.input_ids))

    record(forward)
    fields = {"architectures": ["TinyForTests"], "hidden_size": 8}
    plain, ir = json.loads(build(fields)), json.loads(build(fields, ["scores for tests"]))
    [scores] = ir.pop("tasks")
    assert plain.pop("tasks") == [] and plain == ir, "a task changes nothing of the model"
    assert [i["name"] for i in scores["inputs"]] == ["targets", "weights"]
    assert [p["name"] for p in scores["parameters"]] == ["score.weight"]
    assert [n["op"] for n in scores["nodes"]] == ["linear", "cross_entropy", "weighted_sum"]
    with pytest.raises(ModelError, match="there is no task `other`; there are causal_lm, .*dpo, .*scores for tests"):
        build(fields, ["other"])


def test_a_task_asks_for_what_the_model_gives():
    def forward(self, batch):
        output("hidden.embed", self.embed(batch.input_ids))

    record(forward)
    with pytest.raises(ModelError, match=r"causal_lm.py:\d+: the model has no output `logits`; it has hidden.embed"):
        build({"architectures": ["TinyForTests"], "hidden_size": 8}, TASKS)


def test_a_value_for_every_iteration_is_asked_for():
    def forward(self, batch):
        repeat(self.layers, self.embed(batch.input_ids), each([1e-5]))

    with pytest.raises(ModelError, match="`eps` has 1 values for 2 iterations"):
        record(forward, layers=stack)


class Giving(Layer):
    def forward(self, x, kept, own):
        y = self.norm(x) + own
        return self.proj(y), y


class Reading(Layer):
    def forward(self, x, kept, own):
        return self.proj(self.norm(x)) + kept + own, kept


def handing(c):
    return Layers(["giving", "reading"], {"giving": Giving(c), "reading": Reading(c)})


def test_layers_hand_on_values_and_are_given_their_own():
    def forward(self, batch):
        x = self.embed(batch.input_ids)
        x, _ = repeat(self.layers, (x, Unset("B", "T", 8)), each([x, x * 2.0]))
        output("hidden.final_norm", x)

    ir = record(forward, layers=handing)
    [whole] = [item for item in ir["body"] if "repeat" in item]
    assert [sorted(row) for row in whole["carry"]] == [["initial", "result"], ["result"]]
    [own] = whole["each"]
    assert own["values"] == ["embed", "scale"]
    giving, reading = whole["blocks"]
    assert giving["carry"][1]["next"] != giving["carry"][1]["inside"]
    assert reading["carry"][1]["next"] == reading["carry"][1]["inside"]
    assert all(any(own["inside"] in n["inputs"] for n in block["nodes"]) for block in (giving, reading))


def test_values_for_layers_are_one_for_each_and_alike():
    def forward(self, batch):
        x = self.embed(batch.input_ids)
        repeat(self.layers, (x, Unset("B", "T", 8)), each([x] if self.short else [x, self.narrow(x)]))

    parts = dict(layers=handing, narrow=lambda c: Linear(c.hidden_size, 4))
    with pytest.raises(ModelError, match="a repeat of 2 layers is given 1 values, one for each"):
        record(forward, short=lambda c: True, **parts)
    with pytest.raises(ModelError, match="differ in type"):
        record(forward, short=lambda c: False, **parts)


def test_values_do_not_leave_a_repeat_unnoticed():
    class Leaky(Layer):
        def forward(self, x, kept):
            kept.append(self.proj(x))
            return self.norm(kept[0])

    def forward(self, batch):
        kept = []
        repeat(self.layers, self.embed(batch.input_ids), kept)
        output("logits", kept[0])

    with pytest.raises(ModelError, match="inside a repeat that has ended"):
        record(forward, layers=lambda c: Layers(2, Leaky(c)))


def test_a_layer_gives_what_it_takes():
    class Narrow(Module):
        def __init__(self, c):
            self.proj = Linear(c.hidden_size, 4)

        def forward(self, x):
            return self.proj(x)

    def forward(self, batch):
        repeat(self.layers, self.embed(batch.input_ids))

    with pytest.raises(ModelError, match=r"takes .*float\[B, T, 8\] and gives .*float\[B, T, 4\]"):
        record(forward, layers=lambda c: Layers(2, Narrow(c)))


def test_tied_weights_keep_their_first_name():
    def forward(self, batch):
        self.head.weight = self.embed.weight
        ops.linear(self.embed(batch.input_ids), self.head.weight)

    ir = record(forward, head=lambda c: Module())
    assert [p["name"] for p in ir["parameters"]] == ["embed.weight"]


def test_tensors_cannot_steer_the_recording():
    def forward(self, batch):
        if self.embed(batch.input_ids):
            pass

    with pytest.raises(TypeError, match="can only depend on the config"):
        record(forward)


def test_parameters_need_a_place_in_the_model():
    loose = Parameter(3, 8)

    def forward(self, batch):
        ops.linear(self.embed(batch.input_ids), loose)

    with pytest.raises(ModelError, match="must be an attribute of a module"):
        record(forward)


def test_the_batch_has_no_other_tensors():
    with pytest.raises(AttributeError, match="a batch has no `labels`"):
        Batch().labels


def test_config_problems_come_together():
    with pytest.raises(ModelConfigError) as error:
        TinyConfig.from_dict(
            "Tiny", {"num_hidden_layers": "two", "hidden_act": "gelu", "logits_scaling": 2.0}
        )
    assert [p.split(":")[0] for p in error.value.problems] == [
        "`hidden_size`",
        "`num_hidden_layers`",
        "`hidden_act`",
        "`logits_scaling`",
    ]


def test_config_fields_nobody_knows_are_warned_about():
    with pytest.warns(UserWarning, match="does not use `made_up`"):
        TinyConfig.from_dict("Tiny", {"hidden_size": 8, "made_up": 3, "_note": "x", "transformers_version": "5"})
