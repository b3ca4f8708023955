"""Linear layers, with the weight in either orientation."""

from __future__ import annotations

from ..dsl import Module, Parameter, Tensor, ops


class Linear(Module):
    """y = x·Wᵀ + b: `weight` [outputs, inputs] and optionally `bias` [outputs].

    `tied` takes another parameter as the weight, which then keeps its own name.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        residual_projection: bool = False,
        tied: Parameter | None = None,
    ) -> None:
        self.weight = tied or Parameter(outputs, inputs, residual_projection=residual_projection)
        self.bias = Parameter(outputs, init="zeros") if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x · weightᵀ + bias: [B, T, in] becomes [B, T, out]."""
        if self.bias is None:
            return ops.linear(x, self.weight)
        return ops.linear(x, self.weight, self.bias, bias=True)


class Conv1D(Module):
    """y = x·W + b: `weight` [inputs, outputs], the transpose of `Linear`'s, and `bias` [outputs]."""

    def __init__(self, inputs: int, outputs: int, *, residual_projection: bool = False) -> None:
        self.weight = Parameter(inputs, outputs, residual_projection=residual_projection, transposed=True)
        self.bias = Parameter(outputs, init="zeros")

    def forward(self, x: Tensor) -> Tensor:
        """x · weight + bias: [B, T, in] becomes [B, T, out]; GPT-2 keeps its weights [in, out]."""
        return ops.linear(x, self.weight, self.bias, bias=True, transposed=True)
