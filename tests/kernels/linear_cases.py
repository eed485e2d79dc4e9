"""Every linear mixer as one row of a table: inputs, fast form, reference loop, engine form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longweave.kernels.recurrence import linear_attention as forms
from longweave.kernels.recurrence import mix
from longweave.kernels.recurrence.chunks import chunk_table, spans_of
from longweave.kernels.recurrence.delta_rule import GatedDeltaRule, gated_delta_rule
from longweave.kernels.recurrence.mixer import Mixer
from longweave.kernels.recurrence.reference import recurrent

torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    name: str
    decay: str  # "none", "head" or "channel"
    beta: bool
    mixer: Mixer
    fast: Callable[..., tuple[Tensor, Tensor | None]]
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

    def chunked(self, inputs: Sequence[Tensor], cu: Sequence[int] | None, state: Tensor | None, **kw):
        return self.fast(*inputs, cu, initial_state=state, output_final_state=True, scale=self.scale, **kw)


def _delta_net(q, k, v, beta, cu, **kw):
    return gated_delta_rule(q, k, v, None, beta, cu, **kw)


def _head_decay(q, k, v, g, cu, *, initial_state, output_final_state, scale, chunk=64):
    table = chunk_table(spans_of(cu, len(q)), chunk)
    return mix(forms.HeadDecay(scale), (q, k, v, g), table, initial_state, want_final=output_final_state)


def _linear(q, k, v, cu, **kw):
    return forms.lightning_attention(q, k, v, None, cu, **kw)


GDN = Case("gated delta rule", "head", True, GatedDeltaRule(0.4), gated_delta_rule)
DELTA = Case("delta rule", "none", True, GatedDeltaRule(0.4), _delta_net)
KDA = Case("kda", "channel", True, forms.KimiDelta(0.4), forms.kimi_delta_attention)
GLA = Case("gla", "channel", False, forms.ChannelDecay(0.4), forms.gated_linear_attention)
HEAD = Case("decay per head", "head", False, forms.HeadDecay(0.4), _head_decay)
LINEAR = Case("linear attention", "none", False, forms.LinearAttention(0.4), _linear)
CASES = [GDN, DELTA, KDA, GLA, HEAD, LINEAR]


def engine_inputs(case: Case, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What the case's mixer takes: the delta rule without decay is the gated one with g = 0."""
    if case is DELTA:
        q, k, v, beta = inputs
        return (q, k, v, torch.zeros_like(beta), beta)
    return tuple(inputs)


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
