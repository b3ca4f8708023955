"""The work of the mixtures' rows by a training loop in plain PyTorch, as lean as we can write it: merged products, experts by
`torch._grouped_mm` over sorted rows, attention of cuDNN, `torch.compile` for each block, a CUDA graph of a micro-step where
one can be captured, fused AdamW.

    python bench/device/mixture_peer.py lora-30b-a3b 2 4      # row, rows of a micro-batch, micro-steps

Prints a line of JSON for each variant. Lora: adapters of rank 16 on attention. Deliberately unknown here: our side.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rows import MIXTURES, ROWS
from torch import Tensor, nn
from torch.nn import functional

LENGTH, RANK, SCALE = 2048, 16, 2.0
DEVICE, TYPE = "cuda", torch.bfloat16

# Steps before the clock, and steps under it.
WARM_UP, STEPS = 3, 8


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cosines + torch.cat((-b, a), -1) * sines


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, device=DEVICE, dtype=TYPE).normal_(0.0, 0.02))


class Block(nn.Module):
    def __init__(self, fields: dict[str, Any], lora: bool) -> None:
        super().__init__()
        hidden, self.heads, self.key_heads = (fields[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        self.head_dim = fields.get("head_dim", hidden // self.heads)
        self.experts, self.each = fields["num_experts"], fields["num_experts_per_tok"]
        self.normalise = fields["norm_topk_prob"]
        inner = fields.get("moe_intermediate_size", fields["intermediate_size"])
        self.widths = [self.heads * self.head_dim] + [self.key_heads * self.head_dim] * 2
        self.qkv, self.o = weight(sum(self.widths), hidden), weight(hidden, self.widths[0])
        self.router = weight(self.experts, hidden)
        self.gate_up, self.down = weight(self.experts, 2 * inner, hidden), weight(self.experts, hidden, inner)
        ones = [torch.ones(n, device=DEVICE, dtype=TYPE) for n in (hidden, hidden, self.head_dim, self.head_dim)]
        self.norms = nn.ParameterList([nn.Parameter(one) for one in ones])
        if lora:
            self.requires_grad_(False)
            self.a = weight(3 * RANK, hidden)
            self.b = nn.ParameterList([weight(width, RANK) for width in self.widths])
            self.a_o, self.b_o = weight(RANK, self.widths[0]), weight(hidden, RANK)
        self.lora = lora

    def attention(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = list(functional.linear(x, self.qkv).split(self.widths, -1))
        if self.lora:
            inner = (functional.linear(x, self.a) * SCALE).chunk(3, -1)
            parts = [part + functional.linear(t, b) for part, t, b in zip(parts, inner, self.b, strict=True)]
        q, k, v = (part.view(batch, length, -1, self.head_dim) for part in parts)
        q = rotated(normed(q, self.norms[2]), cosines, sines).transpose(1, 2)
        k = rotated(normed(k, self.norms[3]), cosines, sines).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2).reshape(batch, length, -1)
        out = functional.linear(y, self.o)
        return out + functional.linear(functional.linear(y, self.a_o) * SCALE, self.b_o) if self.lora else out

    def mixture(self, x: Tensor) -> Tensor:
        scores = functional.linear(x, self.router).float().softmax(-1)
        weights, chosen = scores.topk(self.each, -1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        chosen = chosen.flatten()
        order = chosen.argsort(stable=True)
        counts = (chosen[:, None] == torch.arange(self.experts, device=x.device)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        rows = x[order // self.each]
        gate, up = torch._grouped_mm(rows, self.gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
        y = torch._grouped_mm(functional.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        y = y[back].view(len(x), self.each, -1)
        return (y * weights[..., None].to(y.dtype)).sum(1)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = x + self.attention(normed(x, self.norms[0]), cosines, sines)
        h = normed(x, self.norms[1])
        return x + self.mixture(h.flatten(0, 1)).view_as(x)


class Peer(nn.Module):
    def __init__(self, fields: dict[str, Any], lora: bool) -> None:
        super().__init__()
        self.embedding, self.head = (weight(fields["vocab_size"], fields["hidden_size"]) for _ in range(2))
        self.norm = nn.Parameter(torch.ones(fields["hidden_size"], device=DEVICE, dtype=TYPE))
        self.requires_grad_(not lora)
        self.blocks = nn.ModuleList(Block(fields, lora) for _ in range(fields["num_hidden_layers"]))
        half = torch.arange(0, self.blocks[0].head_dim, 2, device=DEVICE) / self.blocks[0].head_dim
        angles = torch.outer(torch.arange(LENGTH, device=DEVICE).float(), 1e6**-half).repeat(1, 2)[None, :, None]
        self.tables = angles.cos().to(TYPE), angles.sin().to(TYPE)
        self.of_head = head_loss

    def forward(self, ids: Tensor) -> Tensor:
        x = functional.embedding(ids, self.embedding)
        # With frozen weights the first layer's input needs no gradient, its adapters do.
        for block in self.blocks:
            x = block(x, *self.tables)
        return self.of_head(normed(x, self.norm), self.head, ids)


def head_loss(x: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    logits = functional.linear(x[:, :-1].flatten(0, 1), head)
    return functional.cross_entropy(logits.float(), ids[:, 1:].flatten())


def captured(micro_step: Callable[[], None]) -> Callable[[], None]:
    """The same work as one CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            micro_step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        micro_step()
    return graph.replay


def rate(model: Peer, rows: int, micro_steps: int, vocabulary: int, graph: bool) -> float:
    """Tokens per second of whole steps, the update included."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.randint(1, vocabulary, (rows, LENGTH), device=DEVICE)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)

    def micro_step() -> None:
        (model(ids) / micro_steps).backward()

    run = captured(micro_step) if graph else micro_step
    began = math.nan
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            torch.cuda.synchronize()
            began = time.perf_counter()
        for _ in range(micro_steps):
            run()
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    return STEPS * micro_steps * rows * LENGTH / (time.perf_counter() - began)


def main() -> int:
    row, rows, micro_steps = ROWS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    fields = MIXTURES[row.model]
    torch.backends.cuda.enable_math_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    model = Peer(fields, row.work == "lora")
    for variant in ("eager", "compiled", "compiled, CUDA graph"):
        if variant == "compiled":
            for block in model.blocks:
                block.compile()
            model.of_head = torch.compile(head_loss)
        try:
            found: dict[str, Any] = {"tokens_per_second": rate(model, rows, micro_steps, fields["vocab_size"], "graph" in variant)}
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as problem:
            found = {"error": str(problem)[-300:]}
        peak = torch.cuda.max_memory_allocated()
        line = {"row": row.name, "rows": rows, "micro_steps": micro_steps, "variant": variant, "torch": torch.__version__}
        print(json.dumps(line | found | {"peak_gib": round(peak / 2**30, 1)}), flush=True)
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
