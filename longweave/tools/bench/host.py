"""Host time of one layer call: tensors so small that the arithmetic is nothing, so what is left is ours and gloo's.

Two local ranks with 128 tokens each, float32, one thread a rank. Softmax layers have 8:2 heads, head dim 64; the gated
delta rule has 4 heads with states of 128 × 128. All calls go to one pack, as the layers of a model do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import longweave as lw
from longweave.launch import Ranks
from longweave.tools.bench import attention, linear, median_seconds

ONE, FEW = [0, 256], [0, 150, 180, 256]  # borders of one document, and of a few with one that two ranks must share

CASES: dict[str, tuple[list[int], str]] = {
    "ring": (ONE, "zigzag"),
    "groupcast": (FEW, "balanced"),
    "affine": (ONE, "zigzag"),
}


@dataclass(frozen=True)
class HostTime:
    """Milliseconds of one call on the slower rank."""

    name: str
    documents: int
    layout: str
    forward: float
    forward_and_backward: float


def layer(name: str) -> tuple[Callable[[], Tensor], list[Tensor], Tensor]:
    """On one of the ranks: a layer call, its leaves, and a gradient of its output."""
    borders, layout = CASES[name]
    pack = lw.Pack(borders, layout=layout)
    if name == "affine":
        given = [x.requires_grad_() for x in linear.inputs(pack.tokens)]
        q, k, v, g, beta = given
        grad = torch.randn_like(v)
        return lambda: lw.gated_delta_rule(q, k, v, g, beta, pack, method="affine"), given, grad
    q, k, v, grad = attention.inputs(pack.tokens)
    return lambda: lw.attention(q, k, v, pack, strategy=name), [q, k, v], grad


def layer_times(name: str, rounds: int) -> tuple[float, float]:
    """On one of the ranks: seconds of forward, and of forward and backward."""
    call, leaves, grad = layer(name)
    forward = median_seconds(call, rounds)
    return forward, median_seconds(lambda: torch.autograd.grad(call(), leaves, grad), rounds)


def run(rounds: int = 300) -> list[HostTime]:
    rows = []
    with Ranks(2, timeout=600) as ranks:
        for name, (borders, layout) in CASES.items():
            forward, both = (1e3 * max(each) for each in zip(*ranks.run(layer_times, name, rounds), strict=True))
            rows.append(HostTime(name, len(borders) - 1, layout, forward, both))
    return rows
