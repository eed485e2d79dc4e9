"""Layers whose tokens pass a state along the sequence: mixers, causal convolution, gather-and-recompute."""

from longweave.linear.conv import causal_conv1d
from longweave.linear.gather import gather_recompute
from longweave.linear.mixers import (
    gated_delta_rule,
    gated_linear_attention,
    kimi_delta_attention,
    lightning_attention,
    ssd,
)

__all__ = [
    "causal_conv1d",
    "gated_delta_rule",
    "gated_linear_attention",
    "gather_recompute",
    "kimi_delta_attention",
    "lightning_attention",
    "ssd",
]
