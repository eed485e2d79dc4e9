"""One process solves a problem; ranks hold their part of the solution against it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from linear_cases import CASES, DELTA, GDN, GLA, KDA, Case
from torch import Tensor

import longweave as lw

# `make test-all` sets it: the full product of mixers, methods, layouts, packs and ranks.
FULL = os.environ.get("LONGWEAVE_FULL") == "1"

PACKS = {
    "ragged": [0, 37, 38, 38, 41, 100, 107],
    "giant": [0, 1, 3, 150, 151, 153, 153],
    "over all ranks": [0, 130],
    "few": [0, 2, 3],
    "one token": [0, 1],
    "nothing": [0, 0],
    "hundreds of tiny ones": np.append(0, np.cumsum(np.random.default_rng(0).integers(1, 5, 200))).tolist(),
}
LAYOUTS = ("contiguous", "zigzag", "balanced", "shuffled", "last")


def layout_of(kind: str, cu: list[int], world: int, seed: int | None = None) -> str | lw.Layout:
    """What `lw.Pack` takes: a name, or spans that only a test makes ("shuffled" by `seed`, by default the ranks)."""
    if kind in ("contiguous", "zigzag", "balanced"):
        return kind
    total = cu[-1]
    if kind == "last":
        return lw.Layout.from_spans(total, [*[[]] * (world - 1), [(0, total)]])
    rng = np.random.default_rng(world if seed is None else seed)
    cuts = sorted({0, total, *rng.integers(0, total + 1, 5 * world).tolist()})
    spans: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for i in rng.permutation(len(cuts) - 1):
        spans[int(rng.integers(world))].append((cuts[i], cuts[i + 1]))
    return lw.Layout.from_spans(total, spans)


def pack_of(kind: str, cu: list[int], group=None, **options) -> lw.Pack:
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    return lw.Pack(cu, group, layout_of(kind, cu, world), **options)


def own_tokens(pack: lw.Pack) -> Tensor:
    """The global index of each of this rank's tokens."""
    return torch.from_numpy(pack.layout.indices(pack.rank))


def across_ranks(case: Case) -> Callable[..., Tensor]:
    """The case's function with a pack in place of cu_seqlens."""

    def delta(q, k, v, beta, pack, **options):
        return lw.gated_delta_rule(q, k, v, None, beta, pack, **options)

    names = {GDN.name: lw.gated_delta_rule, DELTA.name: delta, KDA.name: lw.kimi_delta_attention}
    names |= {GLA.name: lw.gated_linear_attention}
    return names[case.name]


@dataclass
class Problem:
    """Inputs, upstream gradient, and what one process makes of them: out, then the gradient of every input."""

    case: str
    cu: list[int]
    inputs: list[Tensor]
    d_out: Tensor
    expected: list[Tensor]

    @classmethod
    def solve(cls, case: Case, cu: list[int], dtype: torch.dtype = torch.float64, **shape) -> Problem:
        """By the loop over tokens, in float64."""
        inputs = case.inputs(cu[-1], dtype=dtype, **shape)
        leaves = [x.double().requires_grad_() for x in inputs]
        out, _ = case.reference(leaves, cu, None)
        rng = torch.Generator().manual_seed(5)
        d_out = torch.randn(out.shape, generator=rng, dtype=torch.float64).to(dtype)
        grads = [torch.zeros_like(x) for x in leaves]
        if len(out):
            grads = torch.autograd.grad(out, leaves, d_out.double(), materialize_grads=True)
        return cls(case.name, cu, inputs, d_out, [out.detach(), *grads])

    def compare(self, pack: lw.Pack, tolerance: float, **options) -> None:
        """On a rank: its tokens of everything, relative to the largest value of the whole tensor."""
        case = next(case for case in CASES if case.name == self.case)
        mine = own_tokens(pack)
        leaves = [x[mine].requires_grad_() for x in self.inputs]
        options.setdefault("scale", case.scale)
        out = across_ranks(case)(*leaves, pack, **options)
        assert out.dtype == leaves[0].dtype
        assert out.is_contiguous()
        grads = torch.autograd.grad(out, leaves, self.d_out[mine])
        for number, (found, whole) in enumerate(zip([out.detach(), *grads], self.expected, strict=True)):
            assert found.shape == whole[mine].shape
            assert bool(torch.isfinite(found).all())
            if len(mine):
                error = float((found.double() - whole[mine]).abs().max() / whole.abs().max().clamp_min(1e-3))
                assert error < tolerance, f"tensor {number} is off by {error:.1e}"
