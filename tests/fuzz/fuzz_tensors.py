"""Random calls of every operator on ranks, held against one process: outputs and all gradients.

    here         TensorCase ──▶ Problem: inputs, upstream gradients, what one process makes of them, tolerances
    on a rank    Problem ──▶ pack, this rank's tokens, the call, its gradients ──▶ what is off, in words

float64 within 1e-10, float32 within 1e-5 of the largest value of a tensor; bfloat16 no worse than twice one process in
bfloat16 (the same operator on one rank), but not better than twice the rounding of the result itself. A gradient whose
parts cancel, such as that of a query which sees one key, is held against a tenth of the largest gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from fuzz_operators import OPERATORS, Call, Layouts, Operator, Tensors, normal
from hypothesis import strategies as st
from linear_ranks import layout_of, own_tokens
from reference import worst
from test_cost import borders
from torch import Tensor

import longweave as lw
from longweave.launch import Ranks

TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
HALF_STEP = 2.0**-8  # of bfloat16, relative
STRIDES = ("contiguous", "transposed", "stacked")
MOST_TOKENS = 260


@dataclass(frozen=True)
class TensorCase:
    operator: str
    call: Call
    cu: tuple[int, ...]
    layout: str
    layout_seed: int
    pool: int  # ranks that are started …
    members: tuple[int, ...] | None  # … and those of them that form the group; None is the default group
    dtype: str
    strides: str  # of inputs and upstream gradients
    seed: int

    @property
    def ranks(self) -> int:
        return self.pool if self.members is None else len(self.members)


@st.composite
def documents(draw: st.DrawFn) -> list[int]:
    """Ragged, some empty, some of one token, some long."""
    lengths = draw(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(0, 130)), max_size=7))
    kept: list[int] = []
    for length in lengths or [0]:
        kept.append(min(length, MOST_TOKENS - sum(kept)))
    return borders(kept)


@st.composite
def tensor_cases(draw: st.DrawFn) -> TensorCase:
    pool = draw(st.integers(1, 8))
    members = None
    if draw(st.integers(0, 2)) == 0:
        members = tuple(sorted(draw(st.sets(st.integers(0, pool - 1), min_size=1))))
    ranks, cu = pool if members is None else len(members), draw(documents())
    weighted = ["attention"] * 6 + [name for name in OPERATORS if name != "attention"]
    name = draw(st.sampled_from(weighted))
    return TensorCase(
        name,
        OPERATORS[name].draw(draw, cu, ranks),
        tuple(cu),
        draw(st.sampled_from(["contiguous", "zigzag", "balanced", "shuffled", "shuffled", "last"])),
        draw(st.integers(0, 1 << 30)),
        pool,
        members,
        draw(st.sampled_from(["float64", "float64", "float32", "bfloat16"])),
        draw(st.sampled_from(STRIDES)),
        draw(st.integers(0, 1 << 30)),
    )


# -- one process -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    case: TensorCase
    xs: Tensors  # in the dtype of the case
    shared: Tensors
    upstream: list[list[Tensor]]  # for each output with a gradient, for each rank
    outputs: Tensors
    grads: Tensors  # of xs, then of shared
    allowed: list[float]  # of outputs, then of gradients

    @classmethod
    def solve(cls, case: TensorCase) -> Problem:
        operator, dtype = OPERATORS[case.operator], getattr(torch, case.dtype)
        xs, shared = ([x.to(dtype) for x in some] for some in operator.inputs(case.call, [*case.cu], case.seed))
        leaves = [x.double().requires_grad_() for x in (*xs, *shared)]
        outputs = operator.theirs(case.call, [*case.cu], leaves[: len(xs)], leaves[len(xs) :])
        with_grads = [y for y, kind in zip(outputs, operator.outputs, strict=True) if kind != "value"]
        upstream = []
        for number, (y, kind) in enumerate(zip(outputs, operator.outputs, strict=True)):
            if kind != "value":  # a whole output has an upstream gradient of its own on every rank
                copies = case.ranks if kind == "whole" else 1
                seeds = [case.seed + 17 + 100 * number + rank for rank in range(copies)]
                upstream.append([normal(seed, tuple(y.shape))[0].to(dtype) for seed in seeds])
        total = [sum(d.double() for d in ds) for ds in upstream]
        grads = [torch.zeros_like(x) for x in leaves]
        if case.cu[-1]:  # without tokens nothing depends on anything
            grads = torch.autograd.grad(with_grads, leaves, total, materialize_grads=True)
        solved = cls(case, xs, shared, upstream, [y.detach() for y in outputs], list(grads), [])
        solved.allowed.extend(solved._allowed(operator))
        return solved

    def _allowed(self, operator: Operator) -> list[float]:
        expected = [*self.outputs, *self.grads]
        if self.case.dtype in TOLERANCES:
            return [TOLERANCES[self.case.dtype]] * len(expected)
        alone = lw.Pack([*self.case.cu], layout="contiguous", **operator.pack(self.case.call))
        outputs, grads = self.run(operator, alone, [sum(ds).to(ds[0].dtype) for ds in self.upstream])
        errors = [worst(y, e) for y, e in zip(outputs, self.outputs, strict=True)]
        errors += [self.gradient_error(d, e) for d, e in zip(grads, self.grads, strict=True)]
        return [2 * max(HALF_STEP, error) for error in errors]

    def gradient_error(self, found: Tensor, expected: Tensor) -> float:
        """The largest difference, relative to the largest value, or to a tenth of that of all gradients."""
        least = 0.1 * max(map(_largest, self.grads))
        own = max(1e-3, _largest(expected))  # what `worst` has divided by
        return worst(found, expected) * own / max(own, least)

    def run(self, operator: Operator, pack: lw.Pack, upstream: Tensors) -> tuple[Tensors, Tensors]:
        """Outputs and gradients of a call on a pack. `upstream`: full ones, of this rank where ranks differ."""
        case = self.case
        of_kind = {kind: self._tokens(kind, operator, pack) for kind in ("tokens", "moved", "value", "whole")}
        leaves = [strided(x[of_kind["tokens"]], case.strides).requires_grad_() for x in self.xs]
        shared = [strided(x.clone(), case.strides).requires_grad_() for x in self.shared]
        outputs = operator.ours(case.call, pack, leaves, shared)
        kinds = [kind for kind in operator.outputs if kind != "value"]
        given = [strided(d[of_kind[kind]], case.strides) for d, kind in zip(upstream, kinds, strict=True)]
        with_grads = [y for y, kind in zip(outputs, operator.outputs, strict=True) if kind != "value"]
        grads = torch.autograd.grad(with_grads, [*leaves, *shared], given, materialize_grads=True)
        return [y.detach() for y in outputs], list(grads)

    def _tokens(self, kind: str, operator: Operator, pack: lw.Pack) -> Tensor | slice:
        """Which entries of a full tensor this rank has."""
        if kind == "moved" and isinstance(operator, Layouts):
            layout = operator.moved_layout(self.case.call, [*self.case.cu], pack.world_size)
            return torch.from_numpy(layout.indices(pack.rank))
        return slice(None) if kind == "whole" else own_tokens(pack)


def _largest(x: Tensor) -> float:
    finite = x[torch.isfinite(x)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def strided(x: Tensor, strides: str) -> Tensor:
    """The same values in other places of memory."""
    if strides == "transposed" and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return torch.stack([x, x], -1)[..., 0] if strides == "stacked" else x


# -- on a rank -------------------------------------------------------------------------------------------------


def compare(problem: Problem) -> list[str]:
    """What is off on this rank. Nothing is raised before all ranks have compared: nobody is left waiting."""
    case = problem.case
    operator = OPERATORS[case.operator]
    group = None if case.members is None else dist.new_group(list(case.members))
    if case.members is not None and dist.get_rank() not in case.members:
        return []
    layout = layout_of(case.layout, [*case.cu], case.ranks, case.layout_seed)
    pack = lw.Pack([*case.cu], group, layout, **operator.pack(case.call))
    upstream = [ds[pack.rank if len(ds) > 1 else 0] for ds in problem.upstream]
    outputs, grads = problem.run(operator, pack, upstream)
    names = [f"output {i}" for i in range(len(outputs))] + [f"gradient {i}" for i in range(len(grads))]
    kinds = [*operator.outputs, *["tokens"] * len(problem.xs), *["shared"] * len(problem.shared)]
    rows = zip(names, kinds, [*outputs, *grads], [*problem.outputs, *problem.grads], problem.allowed, strict=True)
    return [line for row in rows if (line := _off(problem, pack, *row))]


def _off(
    problem: Problem, pack: lw.Pack, name: str, kind: str, found: Tensor, expected: Tensor, allowed: float
) -> str | None:
    operator = OPERATORS[problem.case.operator]
    if kind != "value" and found.dtype != problem.xs[0].dtype:
        return f"rank {pack.rank}: {name} is {found.dtype}, not {problem.xs[0].dtype}"
    if kind == "shared" and not operator.whole_grads(problem.case.call):
        size = found.double().abs().max().reshape(1) if found.numel() else torch.zeros(1, dtype=torch.float64)
        found = found.double()
        dist.all_reduce(found, group=pack.group)
        dist.all_reduce(size, group=pack.group)
        if problem.case.dtype == "bfloat16":  # every part is rounded by itself, and parts may cancel
            allowed += float(HALF_STEP * size / expected.abs().max().clamp_min(1e-3)) if expected.numel() else 0.0
    elif kind != "shared":
        mine = problem._tokens(kind, operator, pack)
        if found.shape != expected[mine].shape:
            return f"rank {pack.rank}: {name} has shape {tuple(found.shape)}, not {tuple(expected[mine].shape)}"
        whole = expected.clone()
        whole[mine] = found.to(whole.dtype)
        found = whole
    error = (problem.gradient_error if name.startswith("gradient") else worst)(found, expected)
    if not error <= allowed:
        return f"rank {pack.rank}: {name} is off by {error:.1e}, allowed {allowed:.1e}"
    return None


def check_tensors(case: TensorCase, ranks: Ranks, timeout: float = 180.0) -> None:
    """Raises AssertionError with what is off, or whatever a rank raised. Ranks may have to be started first."""
    found = ranks.run(compare, Problem.solve(case), size=case.pool, timeout=timeout)
    off = [line for of_rank in found for line in of_rank]
    assert not off, "; ".join(off)
