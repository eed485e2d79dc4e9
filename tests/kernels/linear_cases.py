"""Every linear mixer as one row of a table: inputs, mixer, reference loop; and the convolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from longweave.kernels.recurrence import linear_attention as forms
from longweave.kernels.recurrence import mix
from longweave.kernels.recurrence.chunks import chunk_table, spans_of
from longweave.kernels.recurrence.delta_rule import GatedDeltaRule
from longweave.kernels.recurrence.mixer import Mixer
from longweave.kernels.recurrence.reference import recurrent

torch.set_num_threads(1)


def on_one_rank(mixer: Mixer, inputs: Sequence[Tensor], cu=None, state=None, *, chunk=None, want_final=True):
    """Outputs and, if wanted, final states of packed segments."""
    table = chunk_table(spans_of(cu, len(inputs[0])), chunk)
    return mix(mixer, inputs, table, state, want_final=want_final)


@dataclass(frozen=True)
class Case:
    name: str
    decay: str  # "none", "head" or "channel"
    beta: bool
    mixer: Mixer
    scale: float = 0.4

    def inputs(self, tokens, Hk=2, Hv=2, K=8, V=8, dtype=torch.float64, decay=0.1, seed=0) -> list[Tensor]:
        """q, k, v, then g and beta where the mixer has them; log decays are uniform in (−2·decay, 0)."""
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, dtype=torch.float64)

        q, k, v = normal(tokens, Hk, K), normal(tokens, Hk, K), normal(tokens, Hv, V)
        k = k / k.norm(dim=-1, keepdim=True)
        given = [q, k, v]
        if self.decay != "none":
            shape = (tokens, Hv, K) if self.decay == "channel" else (tokens, Hv)
            given.append(-2 * decay * torch.rand(shape, generator=rng, dtype=torch.float64))
        if self.beta:
            given.append(torch.rand((tokens, Hv), generator=rng, dtype=torch.float64))
        return [x.to(dtype) for x in given]

    def reference(self, inputs: Sequence[Tensor], cu: Sequence[int] | None, state: Tensor | None, **kw):
        q, k, v, *rest = inputs
        g = rest[0] if self.decay != "none" else None
        beta = rest[-1] if self.beta else None
        return recurrent(q, k, v, g, beta, cu, initial_state=state, scale=self.scale, **kw)

    def chunked(self, inputs: Sequence[Tensor], cu: Sequence[int] | None = None, state: Tensor | None = None, **kw):
        mixer = replace(self.mixer, qk_l2norm=True) if kw.pop("qk_l2norm", False) else self.mixer
        return on_one_rank(mixer, engine_inputs(self, inputs), cu, state, **kw)


GDN = Case("gated delta rule", "head", True, GatedDeltaRule(0.4))
DELTA = Case("delta rule", "none", True, GatedDeltaRule(0.4))
KDA = Case("kda", "channel", True, forms.KimiDelta(0.4))
GLA = Case("gla", "channel", False, forms.ChannelDecay(0.4))
HEAD = Case("decay per head", "head", False, forms.HeadDecay(0.4))
LINEAR = Case("linear attention", "none", False, forms.LinearAttention(0.4))
CASES = [GDN, DELTA, KDA, GLA, HEAD, LINEAR]


def engine_inputs(case: Case, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What the case's mixer takes: the delta rule without decay is the gated one with g = 0."""
    if case is DELTA:
        q, k, v, beta = inputs
        return (q, k, v, torch.zeros_like(beta), beta)
    return tuple(inputs)


def convolution(x, weight, bias=None, cu=None, activation=None, halo=None):
    """F.conv1d on each segment with its halo in front."""
    width = weight.shape[1]
    outs = [x[:0]]
    for segment, (start, stop) in enumerate(pairwise([0, len(x)] if cu is None else cu)):
        before = x.new_zeros(width - 1, x.shape[1]) if halo is None else halo[segment]
        if stop > start:
            seen = torch.cat([before, x[start:stop]]).t().unsqueeze(0)
            outs.append(F.conv1d(seen, weight.unsqueeze(1), bias, groups=x.shape[1])[0].t())
    z = torch.cat(outs)
    return F.silu(z) if activation == "silu" else z


def with_grads(fn, inputs: Sequence[Tensor], state: Tensor | None, seed: int = 7) -> list[Tensor]:
    """out, final state, then the gradient of every input and of the state, for random upstream gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    start = None if state is None else state.detach().clone().requires_grad_()
    out, final = fn(leaves, start)
    rng = torch.Generator().manual_seed(seed)
    loss = sum((y.double() * torch.randn(y.shape, generator=rng, dtype=torch.float64)).sum() for y in (out, final))
    grads = torch.autograd.grad(loss, leaves if start is None else [*leaves, start], materialize_grads=True)
    return [out.detach(), final.detach(), *grads]


def worst(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest error of any tensor, relative to that tensor's largest value (or to 1e-3, if that is more)."""
    assert len(actual) == len(expected)
    errors = [0.0]
    for a, e in zip([x.detach() for x in actual], [x.detach() for x in expected], strict=True):
        assert a.shape == e.shape
        assert bool(torch.isfinite(a).all())
        if e.numel():
            errors.append(float((a.double() - e.double()).abs().max() / e.double().abs().max().clamp_min(1e-3)))
    return max(errors)
