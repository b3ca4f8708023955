"""Mixtures of experts: a router sends each token to a few of many gated feed-forward layers."""

from __future__ import annotations

from ..dsl import Module, Parameter, Tensor, ops, region
from .activation import activation
from .linear import Linear


class Expert(Module):
    """The matrices of one expert, by the names that an architecture has for gate, up and down."""

    def __init__(self, hidden_size: int, intermediate_size: int, names: tuple[str, str, str]) -> None:
        gate, up, down = names
        setattr(self, gate, Linear(hidden_size, intermediate_size))
        setattr(self, up, Linear(hidden_size, intermediate_size))
        setattr(self, down, Linear(intermediate_size, hidden_size, residual_projection=True))


class Experts(Module):
    """`0`, `1`, …: the experts, whose matrices files keep one by one. A call gives expert g the rows from offsets[g] to
    offsets[g + 1]."""

    def __init__(
        self,
        count: int,
        hidden_size: int,
        intermediate_size: int,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        self.count = count
        self.intermediate_size = intermediate_size
        self.names = names
        for number in range(count):
            setattr(self, str(number), Expert(hidden_size, intermediate_size, names))

    def matrices(self, *names: str) -> list[Parameter]:
        """Matrices of every expert, those of one expert one after another."""
        each = (getattr(self, str(number)) for number in range(self.count))
        return [getattr(expert, name).weight for expert in each for name in names]

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Applies expert e to its rows `offsets[e]..offsets[e + 1]` of rows [N, hidden_size]."""

        def product(x: Tensor, *names: str) -> Tensor:
            return ops.grouped_linear(x, ops.stack(*self.matrices(*names)), offsets, groups=self.count)

        gate, up, down = self.names
        both = ops.split(product(rows, gate, up), sizes=[self.intermediate_size] * 2)
        return product(ops.swiglu(*both), down)


class StackedExperts(Module):
    """`gate_up_proj` [experts, 2·intermediate, hidden], gate and up of each expert concatenated, and `down_proj`, as
    files have them: down(function(gate) · up)."""

    def __init__(self, count: int, hidden_size: int, intermediate_size: int, function: str = "silu") -> None:
        self.gate_up_proj = Parameter(count, 2 * intermediate_size, hidden_size)
        self.down_proj = Parameter(count, hidden_size, intermediate_size, residual_projection=True)
        self.count, self.sizes, self.function = count, [intermediate_size] * 2, function

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Applies expert e to its rows `offsets[e]..offsets[e + 1]` of rows [N, hidden_size]."""
        both = ops.grouped_linear(rows, self.gate_up_proj, offsets, groups=self.count)
        gate, up = ops.split(both, sizes=self.sizes)
        inner = ops.swiglu(gate, up) if self.function == "silu" else activation(self.function, gate) * up
        return ops.grouped_linear(inner, self.down_proj, offsets, groups=self.count)


class Router(Module):
    """`weight` [experts, hidden]: a call gives each token's experts and their weights, which are the softmax of its scores,
    over the chosen ones if `normalise`. Scores are not rounded to the run's type where `f32`. An architecture overrides
    `choose` where the choice is another."""

    def __init__(
        self, hidden_size: int, experts: int, *, top_k: int, normalise: bool, bias: bool = False, f32: bool = False
    ) -> None:
        self.weight = Parameter(experts, hidden_size)
        self.bias = Parameter(experts, init="zeros") if bias else None
        self.top_k = top_k
        self.normalise = normalise or None
        self.f32 = f32 or None
        #: As the operations call them.
        self.scores = "softmax"
        #: Scores and choices of the call that was recorded last.
        self.chosen: tuple[Tensor, Tensor] | None = None

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of each token."""
        return ops.route(logits, top_k=self.top_k, scores=self.scores, normalise=self.normalise)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and numbers [B, T, top_k] of the experts of each token of x [B, T, hidden_size]."""
        given = () if self.bias is None else (self.bias,)
        logits = ops.linear(x, self.weight, *given, bias=True if given else None, f32=self.f32)
        weights, index = self.choose(logits)
        self.chosen = (logits, index)
        return weights, index


class CorrectedRouter(Router):
    """Weights are sigmoids of the scores, which are f32, times `factor`. The choice is made with `e_score_correction_bias` added to them,
    which is not trained, among the experts of the best `kept_groups` of `groups` groups."""

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        *,
        top_k: int,
        normalise: bool,
        factor: float,
        groups: int,
        kept_groups: int,
    ) -> None:
        super().__init__(hidden_size, experts, top_k=top_k, normalise=normalise, f32=True)
        self.e_score_correction_bias = Parameter(experts, init="zeros", buffer=True)
        self.scores = "sigmoid"
        self.rule = dict(factor=factor, groups=groups, kept_groups=kept_groups)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses by scores with the correction bias added; the weights are scores without it."""
        settings = dict(top_k=self.top_k, scores=self.scores, normalise=self.normalise, **self.rule)
        return ops.route(logits, self.e_score_correction_bias, **settings)


class Mixture(Module):
    """A router, by the name that an architecture has for it, and `experts`. A token's result is the weighted sum of those
    of its experts."""

    def __init__(self, router: Router, experts: Module, count: int, *, name: str = "gate") -> None:
        self.name = name
        self.count = count
        setattr(self, name, router)
        self.experts = experts

    @property
    def routing(self) -> Router:
        """The router, under the name that the model's files give it."""
        return getattr(self, self.name)

    def load(self, present: Tensor) -> Tensor:
        """Choices, probabilities and entropies of each expert in the call that was recorded last, f32 [3, experts], of the
        tokens that are `present`."""
        assert self.routing.chosen is not None, "a layer is recorded before its load is requested"
        return ops.expert_load(*self.routing.chosen, present, scores=self.routing.scores)

    @region("mlp")
    def forward(self, x: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' outputs for each token of x [B, T, hidden_size]."""
        return self.mix(x, *self.routing(x))

    def mix(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """The sum of the outputs of the experts `index` [B, T, top_k] for x, weighted by `weights`."""
        order, places, offsets = ops.group_rows(index, groups=self.count)
        rows = self.experts(ops.to_groups(x, order, places), offsets)
        return ops.from_groups(rows, order, places, weights)
