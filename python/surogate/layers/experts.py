"""Mixtures of experts: a router sends each token to a few of many gated feed-forward layers."""

from __future__ import annotations

from ..dsl import Module, Parameter, Tensor, ops, region
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
        self.names = names
        for number in range(count):
            setattr(self, str(number), Expert(hidden_size, intermediate_size, names))

    def matrices(self, name: str) -> list[Parameter]:
        """One matrix of every expert."""
        return [getattr(getattr(self, str(number)), name).weight for number in range(self.count)]

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        def product(x: Tensor, name: str) -> Tensor:
            return ops.grouped_linear(x, ops.stack(*self.matrices(name)), offsets, groups=self.count)

        gate, up, down = self.names
        return product(ops.swiglu(product(rows, gate), product(rows, up)), down)


class Mixture(Module):
    """`gate`, the router, and `experts`. A token's result is the sum of those of its `top_k` experts, weighted with the
    softmax of the router's scores, over the chosen ones if `normalise`."""

    def __init__(self, hidden_size: int, experts: Experts, *, top_k: int, normalise: bool) -> None:
        self.gate = Linear(hidden_size, experts.count)
        self.experts = experts
        self.top_k = top_k
        self.normalise = normalise or None

    @region("mlp")
    def forward(self, x: Tensor) -> Tensor:
        weights, index = ops.route(self.gate(x), top_k=self.top_k, scores="softmax", normalise=self.normalise)
        order, places, offsets = ops.group_rows(index, groups=self.experts.count)
        rows = self.experts(ops.to_groups(x, order, places), offsets)
        return ops.from_groups(rows, order, places, weights)
