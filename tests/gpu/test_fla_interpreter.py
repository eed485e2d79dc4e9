"""Linear attention on the real kernels of flash-linear-attention, interpreted, against the loop over tokens.

Everything runs on ranks of its own: the interpreter must be chosen before a process imports Triton. The interpreter
has no bfloat16 and is slow, so cases are small: a few dozen tokens, 16 to 24 dims. `LONGWEAVE_FULL=1` runs more of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from linear_cases import CASES, DELTA, GDN, GLA, HEAD, KDA, LINEAR, Case, engine_inputs, with_grads, worst
from linear_ranks import FULL, across_ranks, layout_of, own_tokens
from torch import Tensor

import longweave as lw
from longweave.errors import BackendError
from longweave.kernels.recurrence import fla
from longweave.kernels.recurrence.chunks import spans_of
from longweave.kernels.recurrence.factors import ChunkedInputs
from longweave.kernels.recurrence.scan import backward_summary, summary
from longweave.kernels.recurrence.segments import Segments
from longweave.launch import Ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None,
    reason="needs flash-linear-attention and triton: pip install --no-deps fla-core flash-linear-attention triton",
)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
SHAPE = {"Hk": 1, "Hv": 2, "K": 16, "V": 24}
ALL_SEEDS = range(4) if FULL else range(1)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Ranks]:
    with Ranks(3, timeout=600) as pool:
        yield pool


def given(case: Case, tokens: int, dtype: torch.dtype, seed: int = 0, **shape: int) -> list[Tensor]:
    """q, k, v in `dtype`, gates in float32, all with few enough digits for `dtype`. Weak decay: states live long."""
    inputs = case.inputs(tokens, dtype=dtype, decay=0.02, seed=seed, **(SHAPE | shape))
    return [x if number < 3 else x.float() for number, x in enumerate(inputs)]


# -- one process: the stages ---------------------------------------------------------------------------------


def stages(name: str, dtype: torch.dtype, cu: list[int]) -> None:
    """Summaries and what tokens read against the scan; a run from given states with every gradient against the loop."""
    import fla_interpreted  # noqa: F401

    case = next(case for case in CASES if case.name == name)
    inputs = given(case, cu[-1], dtype)
    exact = [x.double() for x in inputs]
    segments, H = Segments(spans_of(cu, cu[-1])), SHAPE["Hv"]
    rng = torch.Generator().manual_seed(1)
    d_out = torch.randn((cu[-1], H, SHAPE["V"]), generator=rng).to(dtype)

    found = fla.summarize(case.mixer, engine_inputs(case, inputs), segments)
    chunked = ChunkedInputs(case.mixer, engine_inputs(case, exact), segments.table(d_out.device))
    U, M = summary(chunked)
    C = fla.reads_gradient(found.reads, d_out, segments)
    assert (M is None) == (found.M is None)
    assert worst([found.U, C], [U, backward_summary(chunked, d_out.double())]) < TOLERANCE[dtype]
    assert M is None or worst([found.M], [M]) < TOLERANCE[dtype]

    state = torch.randn((len(segments.spans), H, SHAPE["K"], SHAPE["V"]), generator=rng)

    def fused(leaves: Sequence[Tensor], start: Tensor | None) -> tuple[Tensor, Tensor]:
        out, final = fla.run(case.mixer, engine_inputs(case, leaves), segments, start, want_final=True)
        return out.squeeze(0), final

    expected = with_grads(lambda leaves, start: case.reference(leaves, cu, start), exact, state.double())
    assert worst(with_grads(fused, inputs, state), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stages(interpreted: Ranks, case: Case) -> None:
    interpreted.run(stages, case.name, torch.float32, [0, 3, 4, 37], size=1)


@pytest.mark.parametrize("case", CASES if FULL else [GDN, GLA, HEAD], ids=lambda case: case.name)
def test_stages_in_16_bits(interpreted: Ranks, case: Case) -> None:
    interpreted.run(stages, case.name, torch.float16, [0, 33] if case is GDN else [0, 1, 30, 97], size=1)


# -- ranks ---------------------------------------------------------------------------------------------------


def per_head(case: Case, inputs: Sequence[Tensor], pack: lw.Pack, **options) -> Tensor:
    """lw.ssd, or linear attention, as the case has it: x Δ = v, A Δ = g."""
    q, k, v, *rest = inputs
    if not rest:
        return lw.lightning_attention(q, k, v, None, pack, scale=case.scale, **options)
    dt = rest[0].detach().neg() + 0.1
    A = torch.ones(v.shape[1], requires_grad=False)
    x = v / dt.unsqueeze(-1).to(v.dtype)
    return lw.ssd(x, dt, A.neg(), k, q * case.scale, pack, **options)


def on_ranks(name: str, dtype: torch.dtype, cu: list[int], layout: str | list, seed: int, method: str) -> list[str]:
    """Outputs and every gradient of this rank's tokens against the loop over all tokens in float64."""
    import fla_interpreted  # noqa: F401

    case = next(case for case in CASES if case.name == name)
    group = torch.distributed.group.WORLD
    world = torch.distributed.get_world_size()
    spans = layout_of(layout, cu, world) if isinstance(layout, str) else lw.Layout.from_spans(cu[-1], layout)
    pack = lw.Pack(cu, group, spans)
    inputs = given(case, cu[-1], dtype, seed)
    exact = [x.double().requires_grad_() for x in inputs]
    l2norm = {"qk_l2norm": True} if case.beta else {}
    expected = case.reference(exact, cu, None, **l2norm)[0]
    d_out = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed + 9)).to(dtype)
    grads = torch.autograd.grad(expected, exact, d_out.double(), materialize_grads=True)

    mine = own_tokens(pack)
    leaves = [x[mine].requires_grad_() for x in inputs]
    options = {"backend": "fla", "method": method, **l2norm}
    out = across_ranks(case)(*leaves, pack, scale=case.scale, **options)
    assert out.dtype == dtype
    assert out.requires_grad
    assert out.is_contiguous()
    (choice,) = pack.methods.values()
    assert choice.backend == "fla"
    found = torch.autograd.grad(out, leaves, d_out[mine])
    for tensor, (a, e) in enumerate(zip([out, *found], [expected, *grads], strict=True)):
        assert a.shape == e[mine].shape
        if len(mine):
            error = float((a.detach().double() - e.detach()[mine]).abs().max() / e.detach().abs().max())
            assert error < TOLERANCE[dtype], f"tensor {tensor} is off by {error:.1e}"

    with torch.no_grad():  # other calls inside, the same values
        again = across_ranks(case)(*leaves, pack, scale=case.scale, **options)
    assert not len(mine) or float((again - out.detach()).abs().max()) <= TOLERANCE[dtype]
    return [role.name for role in lw_roles(pack)]


def lw_roles(pack: lw.Pack) -> list:
    from longweave.pack import checked_core
    from longweave.plan.fragments import Role

    f = checked_core(pack).fragments
    return [Role(int(role)) for role in f.roles[f.ranks == pack.rank]]


# Rank 1 has nothing; one document is cut into fragments of one token, one lies on rank 0 in two pieces.
EMPTY_RANK = [[(0, 9), (20, 21), (22, 30), (12, 20)], [], [(9, 12), (21, 22), (30, 41)]]
MIXED = [[(0, 9), (14, 15), (25, 41)], [(9, 14), (15, 25)]]  # HEAD, MID, WHOLE … and both in one rank
RANK_CASES: list[tuple[Case, int, torch.dtype, list[int], str | list]] = [
    (GDN, 2, torch.float32, [0, 29, 31, 40], "zigzag"),
    (GDN, 3, torch.float16, [0, 5, 41], "contiguous"),
    (GDN, 3, torch.float32, [0, 9, 30, 41], EMPTY_RANK),
    (GDN, 3, torch.float32, [0, 2, 3], "contiguous"),
    (DELTA, 2, torch.float32, [0, 20, 25, 41], MIXED),
    (KDA, 2, torch.float32, [0, 20, 25, 41], MIXED),
    (GLA, 3, torch.float32, [0, 9, 30, 41], EMPTY_RANK),
]
if FULL:
    RANK_CASES += [
        (case, world, dtype, cu, layout)
        for case in (GDN, DELTA, KDA, GLA)
        for world in (2, 3)
        for dtype in (torch.float32, torch.float16)
        for cu, layout in (([0, 37, 38, 38, 41, 100], "zigzag"), ([0, 70], "contiguous"), ([0, 37, 70], "shuffled"))
    ]


@pytest.mark.parametrize(("case", "world", "dtype", "cu", "layout"), RANK_CASES)
def test_cut_documents(interpreted: Ranks, case: Case, world: int, dtype: torch.dtype, cu: list, layout) -> None:
    interpreted.run(on_ranks, case.name, dtype, cu, layout, 0, "affine", size=world)


@pytest.mark.parametrize("method", ["reshard", "gather"])
def test_other_methods(interpreted: Ranks, method: str) -> None:
    interpreted.run(on_ranks, GDN.name, torch.float32, [0, 0, 17, 20], "zigzag", 0, method, size=2)
