"""Linear attention on the real kernels of flash-linear-attention, interpreted, against the loop over tokens.

Everything runs on ranks of its own: the interpreter must be chosen before a process imports Triton. The interpreter
has no bfloat16 and is slow, so cases are small: a few dozen tokens, 16 to 24 dims. `LONGWEAVE_FULL=1` runs more.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

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


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Ranks]:
    with Ranks(3, timeout=600) as pool:
        yield pool


def given(case: Case, tokens: int, dtype: torch.dtype, seed: int = 0, **shape: int) -> list[Tensor]:
    """q, k, v in `dtype`, gates in float32, all with few enough digits for `dtype`. Weak decay: states live long."""
    inputs = case.inputs(tokens, dtype=dtype, decay=0.02, seed=seed, **(SHAPE | shape))
    if case is HEAD:
        inputs[3] -= 0.02  # what `mixed` divides by
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


@pytest.mark.parametrize("case", [x for x in CASES if FULL or not x.beta], ids=lambda case: case.name)
def test_stages(interpreted: Ranks, case: Case) -> None:
    interpreted.run(stages, case.name, torch.float32, [0, 3, 4, 37], size=1)


@pytest.mark.parametrize("case", CASES if FULL else [GDN, GLA, HEAD], ids=lambda case: case.name)
def test_stages_in_16_bits(interpreted: Ranks, case: Case) -> None:
    interpreted.run(stages, case.name, torch.float16, [0, 33] if case is GDN else [0, 1, 30, 97], size=1)


# -- ranks ---------------------------------------------------------------------------------------------------


def mixed(case: Case, inputs: Sequence[Tensor], pack: lw.Pack, **options) -> Tensor:
    """The case's function. Decay per head is `lw.ssd` with x Δ = v and A Δ = g; linear attention has its own."""
    if case is LINEAR:
        return lw.lightning_attention(*inputs, None, pack, scale=case.scale, **options)
    if case is HEAD:
        q, k, v, g = inputs
        A = torch.full((v.shape[1],), -2.0)
        return lw.ssd(v.float() / (g / A).unsqueeze(-1), g / A, A, k, q * case.scale, pack, **options)
    return across_ranks(case)(*inputs, pack, scale=case.scale, **options)


def on_ranks(name: str, dtype: torch.dtype, cu: list[int], layout: str | list, seed: int, method: str) -> None:
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
    out = mixed(case, leaves, pack, **options)
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

    if FULL or not case.beta:  # delta rules take the interpreter longest
        with torch.no_grad():  # other calls inside, the same values
            again = mixed(case, leaves, pack, **options)
        assert not again.requires_grad
        assert worst([again], [out]) < TOLERANCE[dtype]


# Rank 1 has nothing; one document is cut into fragments of one token, one lies on rank 0 in two pieces.
EMPTY_RANK = [[(0, 9), (20, 21), (22, 30), (12, 20)], [], [(9, 12), (21, 22), (30, 41)]]
MIXED = [[(0, 9), (14, 15), (25, 41)], [(9, 14), (15, 25)]]  # HEAD, MID, WHOLE … and both in one rank
RANK_CASES: list[tuple[Case, int, torch.dtype, list[int], str | list]] = [
    (GDN, 2, torch.float32, [0, 29, 31, 40], "zigzag"),
    (GDN, 3, torch.float32, [0, 9, 30, 41], EMPTY_RANK),
    (GDN, 3, torch.float32, [0, 2, 3], "contiguous"),
    (DELTA, 2, torch.float16, [0, 20, 25, 41], MIXED),
    (KDA, 2, torch.float32, [0, 20], [[(0, 7), (15, 20)], [(7, 15)]]),
    (GLA, 3, torch.float32, [0, 9, 30, 41], EMPTY_RANK),
    (HEAD, 3, torch.float32, [0, 9, 30, 41], EMPTY_RANK),
    (LINEAR, 2, torch.float32, [0, 20, 25, 41], MIXED),
]
if FULL:
    RANK_CASES += [
        (case, world, dtype, cu, layout)
        for case in CASES
        for world in (2, 3)
        for dtype in (torch.float32, torch.float16)
        for cu, layout in (([0, 37, 38, 38, 41, 100], "zigzag"), ([0, 70], "contiguous"), ([0, 37, 70], "shuffled"))
    ]


@pytest.mark.parametrize(("case", "world", "dtype", "cu", "layout"), RANK_CASES)
def test_cut_documents(interpreted: Ranks, case: Case, world: int, dtype: torch.dtype, cu: list, layout) -> None:
    interpreted.run(on_ranks, case.name, dtype, cu, layout, 0, "affine", size=world)


@pytest.mark.parametrize("method", ["reshard", "gather"])
def test_other_methods(interpreted: Ranks, method: str) -> None:
    interpreted.run(on_ranks, GLA.name, torch.float32, [0, 0, 17, 20], "zigzag", 0, method, size=2)


# -- in training ---------------------------------------------------------------------------------------------


def in_training() -> None:
    """Checkpointing of either kind, work in place on the output, hooks on saved tensors: the same gradients."""
    import fla_interpreted  # noqa: F401

    pack = lw.Pack([0, 5, 18], torch.distributed.group.WORLD, lw.Layout.from_spans(18, [[(0, 8), (14, 18)], [(8, 14)]]))
    mine = own_tokens(pack)
    d_out = torch.randn(18, 2, 24, generator=torch.Generator().manual_seed(3))[mine]

    def layer(*leaves: Tensor) -> Tensor:
        return lw.lightning_attention(*leaves, pack, backend="fla", method="affine")

    def grads(run) -> list[Tensor]:
        leaves = [x[mine].requires_grad_() for x in given(LINEAR, 18, torch.float32)]
        leaves.append(torch.tensor([-0.01, -0.02], requires_grad=True))
        run(*leaves).backward(d_out)
        return [x.grad for x in leaves]

    def hooked(*leaves: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            return layer(*leaves)

    expected = grads(layer)
    checkpoint = torch.utils.checkpoint.checkpoint
    for reentrant in (False, True):
        assert worst(grads(lambda *x: checkpoint(layer, *x, use_reentrant=reentrant)), expected) == 0  # noqa: B023
    assert worst(grads(lambda *x: layer(*x).mul_(2)), [2 * x for x in expected]) < 1e-6
    assert worst(grads(hooked), expected) == 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert worst(grads(layer), expected) == 0


def test_in_training(interpreted: Ranks) -> None:
    interpreted.run(in_training, size=2)


def checkpointed() -> None:
    """Without a decay there is no transition, and nothing is read where documents begin: rank 0 keeps nothing."""
    import fla_interpreted  # noqa: F401

    pack = lw.Pack([0, 6], torch.distributed.group.WORLD, lw.Layout.from_spans(6, [[(0, 3)], [(3, 6)]]))
    q, k, v = (torch.randn(3, 1, 16, requires_grad=True) for _ in range(3))

    def layer(*leaves: Tensor) -> Tensor:
        return lw.lightning_attention(*leaves, None, pack, backend="fla", method="affine")

    torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=False).sum().backward()


def test_every_rank_recomputes(interpreted: Ranks) -> None:
    """Recomputing is collective: a rank that has nothing to read again must do it all the same."""
    interpreted.run(checkpointed, size=2, timeout=60)


def counted(spans: list) -> list[int]:
    """Launches of a later layer: of Triton and of torch, forward, then backward. Nothing waits or uploads."""
    import fla_interpreted

    pack = lw.Pack([0, 5, 20, 25, 41], torch.distributed.group.WORLD, lw.Layout.from_spans(41, spans))
    mine = own_tokens(pack)
    for _ in range(2):  # the first layer uploads
        leaves = [x[mine].requires_grad_() for x in given(GDN, 41, torch.float16)]
        with fla_interpreted.Launches() as forward:
            out = lw.gated_delta_rule(*leaves, pack, qk_l2norm=True, backend="fla", method="affine")
            counts = [forward.triton.total(), forward.torch.total()]
        d_out = torch.ones_like(out)
        with fla_interpreted.Launches() as backward:
            out.backward(d_out)
            counts += [backward.triton.total(), backward.torch.total()]
    waits = {"aten._local_scalar_dense.default", "aten._to_copy.default", "aten.item.default"}
    assert not waits & {*forward.torch, *backward.torch}
    return counts


@pytest.mark.skipif(not FULL, reason="counted on fake CUDA in every run; here with LONGWEAVE_FULL=1")
def test_launches(interpreted: Ranks) -> None:
    """One run for whole documents, two and a pass back for cut ones, however many fragments there are."""
    whole, cut = [[(0, 20)], [(20, 41)]], [[(0, 9), (14, 15), (25, 41)], [(9, 14), (15, 25)]]
    for found in interpreted.run(counted, whole, size=2):
        assert found[0] == 7
        assert found[2] == 9
        assert found[1] + found[3] <= 12
    for found in interpreted.run(counted, cut, size=2):
        assert found[0] == 14
        assert found[2] == 10
        assert found[1] <= 24
        assert found[3] <= 20


# -- who serves ----------------------------------------------------------------------------------------------


def refusals() -> None:
    import fla_interpreted  # noqa: F401

    def tried(case: Case, dtype: torch.dtype = torch.float16, backend: str = "fla", **shape: int) -> str:
        pack = lw.Pack([0, 2])
        try:
            mixed(case, given(case, 2, dtype, **shape), pack, backend=backend)
        except BackendError as error:
            return str(error)
        (choice,) = pack.methods.values()
        return f"{choice.backend}: {choice.backend_why}"

    assert "keys have 257 dims; chunk_gated_delta_rule takes 256 at most: use backend='torch'" in tried(GDN, K=257)
    assert "keys have 257 dims; chunk_kda takes 256" in tried(KDA, K=257)
    assert tried(GDN, K=257, backend="auto").startswith("torch: flash-linear-attention does not serve: keys have 257")
    assert "K is 15 and V 24; chunk_simple_gla takes even ones in 16 bits" in tried(LINEAR, K=15)
    assert "inputs are torch.float64" in tried(GDN, torch.float64)
    assert tried(LINEAR) == "fla: asked for"
    assert tried(LINEAR, backend="auto").startswith("fla: ")
    assert tried(LINEAR, torch.float32) == "fla: asked for"
    assert "may round to TF32" in tried(LINEAR, torch.float32, backend="auto")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert tried(LINEAR, torch.float32, backend="auto").startswith("fla: ")
    torch.backends.cuda.matmul.fp32_precision = "none"
    assert tried(LINEAR, backend="torch") == "torch: asked for"


def test_who_serves(interpreted: Ranks) -> None:
    interpreted.run(refusals, size=1)
