"""Nemotron-H and Nemotron 3: one mixer a layer, a Mamba-2 state-space model, attention without positions, a feed-forward
layer with squared ReLU, or a mixture of such experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from .. import layers
from ..dsl import Batch, Module, Reader, Tensor, model, ops, output, region
from ..layers import CausalLM, Decoder, Linear, Mamba2, MambaSizes, Mixture, RMSNorm, Routing, window
from .deepseek_v3 import SparseFields, corrected_router

#: Kinds of layers by the letters of `hybrid_override_pattern`, and in both spellings of lists.
LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
KINDS = {"linear_attention": "mamba", "full_attention": "attention"} | {kind: kind for kind in LETTERS.values()}

#: Fields that decide about initialization, kernels and parts that are not computed.
UNUSED = """chunk_size expand mamba_proj_bias use_mamba_kernels num_logits_to_keep rescale_prenorm_residual time_step_floor
    time_step_max moe_shared_expert_overlap mtp_layers_block_type mtp_hybrid_override_pattern n_shared_experts num_hidden_layers"""

#: `up_proj` and `down_proj` of dense layers are linear modules, and no name of a module means a parameter. PEFT refuses adapters
#: on `out_proj`, which fused kernels read past them.
STACKS = [{"name": "up_proj", "parts": ["up_proj"]}, {"name": "down_proj", "parts": ["down_proj"]}]
ADAPTERS = {"routers": ["mixer.gate"], "bare": ["gate", "out_proj"], "stacks": STACKS}


class NemotronHConfig(SparseFields):
    vocab_size: int = 131072
    intermediate_size: int = 21504
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 4096
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: Literal[False] = False
    attention_bias: Literal[False] = False  # transformers reads it and has no biases
    mlp_bias: bool = False
    use_bias: bool = False
    use_conv_bias: bool = True
    mlp_hidden_act: Literal["relu2"] = "relu2"
    mamba_hidden_act: Literal["silu"] = "silu"
    mamba_ssm_cache_dtype: Literal["float32"] = "float32"
    residual_in_fp32: bool = False  # read by no code
    hidden_dropout: Literal[0, 0.0] = 0.0
    ssm_state_size: int = 128
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    n_groups: int = 8
    conv_kernel: int = 4
    time_step_min: float = 0.001
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1

    def derive(self, reader: Reader) -> None:
        for name in UNUSED.split():
            reader.take(name)
        if (size := reader.take("attention_head_dim")) is not None and "head_dim" not in reader.fields:
            self.head_dim = size
        super().derive(reader)
        self.rms_norm_eps = self.layer_norm_epsilon
        for name in ("norm_eps", "rms_norm_eps"):
            if (found := reader.take(name)) not in (None, self.rms_norm_eps):
                reader.problem(name, f"{found!r} is not `layer_norm_epsilon`")
        self.pad_token_id = None  # its row has a gradient
        self.window = window(reader, None)
        kinds = self.layer_kinds(reader)
        self.num_hidden_layers = len(kinds)
        self.read_experts(reader, 8)
        self.kinds, self.routing = kinds, None
        if "moe" in kinds:
            self.routing = Routing(self.num_experts, self.num_experts_per_tok, scores="sigmoid")
        if self.mamba_num_heads % self.n_groups:
            reader.problem("n_groups", f"{self.n_groups} does not divide {self.mamba_num_heads} heads")
        if layers.time_limits(reader.take("time_step_limit")) != layers.time_limits(None):
            reader.problem("time_step_limit", "is not supported, expected [0, Infinity]")

    def layer_kinds(self, reader: Reader) -> list[str]:
        """The kind of every layer, of a list or of a text with a letter for each."""
        pattern, kinds = reader.take("hybrid_override_pattern"), reader.take("layers_block_type")
        kinds = reader.take("layer_types") if kinds is None else kinds
        if kinds is None and isinstance(pattern, str):
            kinds = [LETTERS.get(letter, letter) for letter in pattern]
        if kinds is None:
            kinds = ["mamba", "moe", "attention", "mlp"]
        if not isinstance(kinds, list) or not kinds or not all(isinstance(k, str) and k in KINDS for k in kinds):
            reader.problem("layers_block_type", f"expected a list of {', '.join(KINDS)}, or `hybrid_override_pattern`")
            return ["mamba"]
        return [KINDS[kind] for kind in kinds]


class Attention(layers.Attention):
    def __init__(self, c: NemotronHConfig) -> None:
        super().__init__(c, window=c.window)

    def heads(self, x: Tensor, rotate: Callable[..., Tensor] | None, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self.split, self.project(x))
        return q, k, v


def squared_relu(x: Tensor) -> Tensor:
    y = ops.activation(x, function="relu")
    return y * y


class MLP(Module):
    """`down_proj`(relu(`up_proj`(x))²)."""

    def __init__(self, hidden_size: int, inner: int, *, bias: bool) -> None:
        self.up_proj = Linear(hidden_size, inner, bias=bias)
        self.down_proj = Linear(inner, hidden_size, bias=bias, residual_projection=True)

    @region("mlp")
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(squared_relu(self.up_proj(x)))


class Experts(Module):
    """`0`, `1`, …: a matrix up and one down of each expert."""

    def __init__(self, count: int, hidden_size: int, inner: int) -> None:
        self.count = count
        for number in range(count):
            setattr(self, str(number), MLP(hidden_size, inner, bias=False))

    def product(self, x: Tensor, name: str, offsets: Tensor) -> Tensor:
        matrices = [getattr(getattr(self, str(number)), name).weight for number in range(self.count)]
        return ops.grouped_linear(x, ops.stack(*matrices), offsets, groups=self.count)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        return self.product(squared_relu(self.product(rows, "up_proj", offsets)), "down_proj", offsets)


class SharedMixture(Mixture):
    """The sum of the outputs of a token's experts, between `fc1_latent_proj` and `fc2_latent_proj` if they are narrower, and
    `shared_experts`(x)."""

    def __init__(self, c: NemotronHConfig) -> None:
        width = c.moe_latent_size or c.hidden_size
        super().__init__(corrected_router(c), Experts(c.num_experts, width, c.moe_intermediate_size), c.num_experts)
        self.shared_experts = MLP(c.hidden_size, c.moe_shared_expert_intermediate_size, bias=c.mlp_bias)
        self.latent = c.moe_latent_size is not None
        if self.latent:
            self.fc1_latent_proj = Linear(c.hidden_size, width, bias=c.mlp_bias)
            self.fc2_latent_proj = Linear(width, c.hidden_size, bias=c.mlp_bias)

    def mix(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        given = self.fc1_latent_proj(x) if self.latent else x
        result = super().mix(given, weights, index)
        return (self.fc2_latent_proj(result) if self.latent else result) + self.shared_experts(x)


def mixer(c: NemotronHConfig, kind: str) -> Module:
    if kind == "attention":
        return Attention(c)
    if kind == "moe":
        return SharedMixture(c)
    if kind == "mlp":
        return MLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
    sizes = MambaSizes(
        heads=c.mamba_num_heads,
        head_dim=c.mamba_head_dim,
        groups=c.n_groups,
        state=c.ssm_state_size,
        width=c.conv_kernel,
        limits=(c.time_step_min, layers.MOST_STEP),
        conv_bias=c.use_conv_bias,
        bias=c.use_bias,
        output_bias=c.use_bias,
    )
    return Mamba2(c.hidden_size, c.rms_norm_eps, sizes)


class Layer(Module):
    """x + mixer(norm(x))."""

    def __init__(self, c: NemotronHConfig, kind: str) -> None:
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mixer = mixer(c, kind)
        self.given = {"mamba": lambda batch: (batch,), "attention": lambda batch: (None, batch)}.get(kind, lambda _: ())

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.mixer(self.norm(x), *self.given(batch))
        output("hidden.layer.{i}", x)
        return x


class HybridDecoder(Decoder):
    def __init__(self, c: NemotronHConfig) -> None:
        super().__init__(c, {kind: Layer(c, kind) for kind in dict.fromkeys(c.kinds)}, pattern=c.kinds)
        self.embeddings = self.embed_tokens
        del self.embed_tokens

    def embed(self, batch: Batch) -> Tensor:
        return self.embeddings(batch.input_ids)

    def declare_norm(self, norm: Module) -> None:
        self.norm_f = norm

    def last(self, x: Tensor) -> Tensor:
        return self.norm_f(x)

    def shared(self, x: Tensor, batch: Batch) -> tuple[()]:
        return ()


@model(
    "NemotronHForCausalLM",
    config=NemotronHConfig,
    model_type="nemotron_h",
    base="model",
    renamed={"backbone.": "model."},
    carried=["mtp."],
    adapters=ADAPTERS,
    examples=["nvidia/Nemotron-H-8B-Base-8K", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"],
)
class NemotronH(CausalLM):
    def __init__(self, c: NemotronHConfig) -> None:
        super().__init__(c, HybridDecoder(c))
