"""Layers shared by several architectures. Each computes the same as the class of the same name in
transformers, with the same parameter names."""

from .activation import Activation, activation
from .adapters import EXPERTS_AS_PARAMETERS, STACKED_EXPERTS, experts_as_parameters
from .attention import Attention
from .config import Balance, DecoderConfig, MixtureConfig, Routing, count_of_experts
from .decoder import CausalLM, Decoder, DecoderLayer, TextPart
from .delta import ChannelConv, GatedDeltaNet
from .dropout import dropout
from .embedding import Embedding
from .experts import CorrectedRouter, Experts, Mixture, Router, StackedExperts
from .files import SIGLIP_RENAMED, VISION_CARRIED, VISION_RENAMED
from .heads import HeadsConfig
from .linear import Conv1D, Linear
from .mamba import MOST_STEP, Mamba2, MambaFields, MambaSizes, time_limits
from .mlp import FusedGatedMLP, GatedMLP
from .norm import GroupedRMSNorm, LayerNorm, RMSNorm
from .rotary import ImageRotation, RotaryByKind, RotaryEmbedding, Rotation, Rotations
from .scale import scale_rows
from .softcap import soft_cap
from .window import FULL, SLIDING, layer_types, layer_windows, window

__all__ = [
    "EXPERTS_AS_PARAMETERS",
    "FULL",
    "MOST_STEP",
    "SIGLIP_RENAMED",
    "SLIDING",
    "STACKED_EXPERTS",
    "VISION_CARRIED",
    "VISION_RENAMED",
    "Activation",
    "Attention",
    "Balance",
    "CausalLM",
    "ChannelConv",
    "Conv1D",
    "CorrectedRouter",
    "Decoder",
    "DecoderConfig",
    "DecoderLayer",
    "Embedding",
    "Experts",
    "FusedGatedMLP",
    "GatedDeltaNet",
    "GatedMLP",
    "GroupedRMSNorm",
    "HeadsConfig",
    "ImageRotation",
    "LayerNorm",
    "Linear",
    "Mamba2",
    "MambaFields",
    "MambaSizes",
    "Mixture",
    "MixtureConfig",
    "RMSNorm",
    "RotaryByKind",
    "RotaryEmbedding",
    "Rotation",
    "Rotations",
    "Router",
    "Routing",
    "StackedExperts",
    "TextPart",
    "activation",
    "count_of_experts",
    "dropout",
    "experts_as_parameters",
    "layer_types",
    "layer_windows",
    "scale_rows",
    "soft_cap",
    "time_limits",
    "window",
]
