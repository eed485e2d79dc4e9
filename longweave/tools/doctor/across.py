"""Checks of ranks together: what they send arrives, and what they compute is what one process computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

import longweave as lw
from longweave.comm.exchange import (
    Comm,
    all_gather_v,
    all_reduce_sum,
    all_to_all_v,
    reduce_scatter_v,
    resolve,
    send_next,
)
from longweave.core import METHODS
from longweave.plan.schedule import STRATEGIES
from longweave.tools.doctor.checks import LIMITS, Outcome, Site, SkipCase, attempt, error_of, short, worst_error
from longweave.tools.doctor.kernels import AttentionCase

CU = [0, 37, 38, 38, 150, 157, 300]  # odd lengths, one token, none
LAYOUTS = ("zigzag", "balanced", "contiguous", "rank 0 empty")


def layout_of(name: str, cu: list[int], size: int) -> str | lw.Layout:
    """What `lw.Pack` takes."""
    if name != "rank 0 empty":
        return name
    rest = lw.Layout.contiguous(cu[-1], max(size - 1, 1))
    return lw.Layout.from_spans(cu[-1], [(), *rest.spans] if size > 1 else rest.spans)


def own_tokens(pack: lw.Pack) -> Tensor:
    """The global index of each of this rank's tokens."""
    return torch.from_numpy(pack.layout.indices(pack.rank))


def summed(x: Tensor, site: Site) -> Tensor:
    """Over ranks."""
    return next(all_reduce_sum([x], resolve(site.group)))


# -- collectives ---------------------------------------------------------------------------------------


def collectives(site: Site) -> Iterator[Outcome]:
    """Every collective that the package uses, with uneven and empty parts, by value."""
    groups = {"all ranks": site.group}
    if site.size > 1:
        members = list(range(1 if site.size > 2 else 0, site.size))
        groups["a sub-group"] = site.subgroup(members)
    for title, group in groups.items():
        if group == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
            continue
        comm = resolve(group)
        for name, measure in COLLECTIVES.items():
            yield attempt(site, name, title, 0.0, partial(measure, comm, site.device))


def _rows(count: int, code: float, device: torch.device) -> Tensor:
    """`count` rows that can be told from all others."""
    steps = torch.arange(count, device=device, dtype=torch.float32)[:, None]
    return code + steps + torch.tensor([0.0, 0.5], device=device)


def _part(source: int, target: int) -> int:
    """Rows that one rank sends another: between 0 and 3."""
    return (2 * source + 3 * target) % 4


def _all_to_all(comm: Comm, device: torch.device) -> float:
    me, everyone = comm.rank, range(comm.size)
    send = torch.cat([_rows(_part(me, peer), 4 * (comm.size * me + peer), device) for peer in everyone])
    wanted = torch.cat([_rows(_part(peer, me), 4 * (comm.size * peer + me), device) for peer in everyone])
    splits = [_part(me, peer) for peer in everyone], [_part(peer, me) for peer in everyone]
    return error_of(all_to_all_v(send, *splits, comm).wait(), wanted)


def _all_to_all_empty(comm: Comm, device: torch.device) -> float:
    nothing = [0] * comm.size
    return error_of(all_to_all_v(_rows(0, 0, device), nothing, nothing, comm).wait(), _rows(0, 0, device))


def _all_gather(comm: Comm, device: torch.device) -> float:
    counts = [(3 * rank + 1) % 4 for rank in range(comm.size)]
    found = all_gather_v(_rows(counts[comm.rank], 4 * comm.rank, device), counts, comm).wait()
    return error_of(found, torch.cat([_rows(count, 4 * rank, device) for rank, count in enumerate(counts)]))


def _all_gather_even(comm: Comm, device: torch.device) -> float:
    found = all_gather_v(_rows(3, 4 * comm.rank, device), [3] * comm.size, comm).wait()
    return error_of(found, torch.cat([_rows(3, 4 * rank, device) for rank in range(comm.size)]))


def _reduce_scatter(comm: Comm, device: torch.device) -> float:
    counts = [(rank + 2) % 3 for rank in range(comm.size)]
    x = _rows(sum(counts), comm.rank, device)
    start = list(accumulate(counts, initial=0))[comm.rank]
    wanted = torch.stack([_rows(sum(counts), rank, device) for rank in range(comm.size)]).sum(0)
    return error_of(reduce_scatter_v(x, counts, comm).wait(), wanted[start : start + counts[comm.rank]])


def _ring(comm: Comm, device: torch.device) -> float:
    if comm.size == 1:
        raise SkipCase("one rank has nobody to send to")
    x = _rows(3, 4 * comm.rank, device)
    for _ in range(comm.size):  # all the way round: everybody has its own again
        x = send_next(x, torch.empty_like(x), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, comm).wait()
    return error_of(x, _rows(3, 4 * comm.rank, device))


def _all_reduce(comm: Comm, device: torch.device) -> float:
    found = next(all_reduce_sum([torch.full((5,), comm.rank + 1.0, device=device)], comm))
    return error_of(found, torch.full((5,), comm.size * (comm.size + 1) / 2))


COLLECTIVES: dict[str, Callable[[Comm, torch.device], float]] = {
    "all-to-all-v, uneven": _all_to_all,
    "all-to-all-v, nothing": _all_to_all_empty,
    "all-gather, uneven": _all_gather,
    "all-gather, even": _all_gather_even,
    "reduce-scatter": _reduce_scatter,
    "send and receive, ring": _ring,
    "all-reduce": _all_reduce,
}


# -- softmax attention ---------------------------------------------------------------------------------

MASKS: dict[str, AttentionCase] = {
    "causal": AttentionCase(lw.Mask.causal(CU), dims=(32, 32)),
    "window 23": AttentionCase(lw.Mask.sliding_window(CU, 23), dims=(32, 32)),
    "shared prefix": AttentionCase(lw.Mask.shared_prefix(70, [30, 1, 99]), dims=(32, 32)),
    "softcap and sinks": AttentionCase(lw.Mask.causal(CU), dims=(32, 24), softcap=5.0, sinks=True),
}


def strategies(site: Site) -> Iterator[Outcome]:
    """Every strategy × mask × layout, forward and all gradients."""
    ways: list[tuple[str, dict[str, int]]] = [(name, {}) for name in STRATEGIES]
    ways.append(("groupcast", {"stages": 3, "keep_kv": 0}))
    if site.size >= 4 and site.size % 2 == 0:
        ways.append(("ring", {"ulysses_size": 2}))
    for dtype in site.dtypes:
        for name, case in MASKS.items():
            full = case.inputs(dtype, site.device)
            wanted = case.reference(full, site.alone)
            for strategy, options in ways:
                for layout in LAYOUTS:
                    row = " ".join([strategy, *(f"{key}={value}" for key, value in options.items())])
                    measure = partial(attention_error, site, case, full, wanted, layout, strategy, options)
                    yield attempt(site, row, f"{name}, {layout}, {short(dtype)}", LIMITS[dtype], measure)


def attention_error(
    site: Site,
    case: AttentionCase,
    full: list[Tensor],
    wanted: list[Tensor],
    layout: str,
    strategy: str,
    options: Mapping[str, int],
) -> float:
    """Of this rank's tokens."""
    cu = case.mask.cu_seqlens.tolist()
    pack = case.pack(site.group, layout_of(layout, cu, site.size), strategy=strategy, **options)
    found = case.solve(full, pack)
    error = worst_error(found[:5], wanted[:5], own_tokens(pack))
    return max(error, error_of(summed(found[5], site), wanted[5])) if case.sinks else error


# -- linear attention ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixerCase:
    """A linear mixer: `call(pack, method, *inputs)`, and its inputs."""

    call: Callable[..., Tensor]
    gates: tuple[str, ...] = ()  # after q, k, v: "head" and "channel" decays, "beta", and what is one for each head

    def inputs(self, tokens: int, dtype: torch.dtype, heads: int = 2, dim: int = 32) -> list[Tensor]:
        rng = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn((tokens, heads, dim), generator=rng) for _ in range(3))
        given = [x.to(dtype) for x in (q, k / k.norm(dim=-1, keepdim=True), v)]
        shapes = {"head": (tokens, heads), "channel": (tokens, heads, dim), "beta": (tokens, heads), "each": (heads,)}
        for gate in self.gates:
            x = torch.rand(shapes[gate], generator=rng)
            given.append(x if gate == "beta" else -0.1 * x)
        return given

    def solve(self, given: list[Tensor], pack: lw.Pack, method: str) -> list[Tensor]:
        """out and the gradient of every input, of this rank's tokens."""
        total = pack.layout.total
        local = [pack.shard(x) if len(x) == total else x for x in given]
        leaves = [x.detach().requires_grad_() for x in local]
        out = self.call(pack, method, *leaves)
        rng = torch.Generator().manual_seed(2)
        grad = pack.shard(torch.randn((total, *out.shape[1:]), generator=rng)).to(out)
        return [out, *torch.autograd.grad(out, leaves, grad)]


MIXERS: dict[str, MixerCase] = {
    "gated delta rule": MixerCase(
        lambda pack, method, q, k, v, g, beta: lw.gated_delta_rule(q, k, v, g, beta, pack, method=method),
        ("head", "beta"),
    ),
    "delta rule": MixerCase(
        lambda pack, method, q, k, v, beta: lw.gated_delta_rule(q, k, v, None, beta, pack, method=method), ("beta",)
    ),
    "KDA": MixerCase(
        lambda pack, method, q, k, v, g, beta: lw.kimi_delta_attention(q, k, v, g, beta, pack, method=method),
        ("channel", "beta"),
    ),
    "GLA": MixerCase(
        lambda pack, method, q, k, v, g: lw.gated_linear_attention(q, k, v, g, pack, method=method), ("channel",)
    ),
    "SSD": MixerCase(
        lambda pack, method, C, B, x, dt, A: lw.ssd(x, dt, A, B, C, pack, method=method), ("beta", "each")
    ),
    "lightning": MixerCase(
        lambda pack, method, q, k, v, decay: lw.lightning_attention(q, k, v, decay, pack, method=method), ("each",)
    ),
}


def linear_mixers(site: Site) -> Iterator[Outcome]:
    """Every mixer × method on documents that are cut; says which kernels served."""
    for dtype in site.dtypes:
        for name, case in MIXERS.items():
            given = case.inputs(CU[-1], dtype)
            wanted = case.solve([x.double() for x in given], lw.Pack(CU, site.alone), "affine")
            for method in METHODS:
                for layout in ("zigzag", "rank 0 empty"):
                    measure = partial(_mixer_error, site, case, given, wanted, method, layout, dtype)
                    yield attempt(site, name, f"{method}, {layout}, {short(dtype)}", None, measure)


def _mixer_error(
    site: Site,
    case: MixerCase,
    given: list[Tensor],
    wanted: list[Tensor],
    method: str,
    layout: str,
    dtype: torch.dtype,
) -> Outcome:
    pack = lw.Pack(CU, site.group, layout_of(layout, CU, site.size))
    found = case.solve([x.to(site.device) for x in given], pack, method)
    own, error = own_tokens(pack), 0.0
    for x, whole in zip(found, wanted, strict=True):
        per_token = len(whole) == CU[-1]
        error = max(error, error_of(x, whole[own], whole) if per_token else error_of(summed(x, site), whole))
    served = {choice.backend for choice in pack.methods.values()}
    limit = LIMITS[dtype]
    return Outcome("", "", "ok" if error <= limit else "FAIL", error, limit, note=f"on {', '.join(sorted(served))}")


def convolution(site: Site) -> Iterator[Outcome]:
    """The causal convolution of cut documents, with and without bias and activation."""
    for dtype in site.dtypes:
        for activation in (None, "silu"):
            for layout in LAYOUTS:
                measure = partial(_conv_error, site, activation, layout, dtype)
                title = f"{activation or 'plain'}, {layout}, {short(dtype)}"
                yield attempt(site, "causal convolution", title, LIMITS[dtype], measure)


def _conv_error(site: Site, activation: str | None, layout: str, dtype: torch.dtype) -> float:
    rng = torch.Generator().manual_seed(3)
    shapes = ((CU[-1], 24), (24, 4), (24,), (CU[-1], 24))
    full = [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]

    def solve(pack: lw.Pack, x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
        leaves = [y.detach().requires_grad_() for y in (pack.shard(x), weight, bias)]
        y = lw.causal_conv1d(leaves[0], leaves[1], leaves[2], pack, activation=activation)
        return [y, *torch.autograd.grad(y, leaves, pack.shard(grad))]

    wanted = solve(lw.Pack(CU, site.alone), *(x.double() for x in full))
    pack = lw.Pack(CU, site.group, layout_of(layout, CU, site.size))
    y, dx, *parts = solve(pack, *(x.to(site.device) for x in full))
    parameters = [summed(x, site) for x in parts]
    return max(worst_error([y, dx], wanted[:2], own_tokens(pack)), worst_error(parameters, wanted[2:]))
