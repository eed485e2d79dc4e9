"""Which flash library serves, and why not: what may be installed or activated, without a GPU."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from attention_cases import MASKS
from flash_rules import installed
from reference import Problem, solve, worst

import longweave as lw
from longweave.kernels.attention import attend, attend_backward, choose, cpu_flash, cuda_flash
from longweave.kernels.attention.partial import QuerySide, Tasks
from longweave.plan.tasks import fuse

HALF = torch.empty(4, 2, 64, dtype=torch.float16)

# A package like flash-attn: the same functions, which call PyTorch's operator.
STAND_IN = """
import torch
deterministic = None
def _flash_attn_varlen_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, softmax_scale, causal,
                               window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
                               return_softmax=False):
    assert not causal and not softcap
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, causal, False, scale=softmax_scale,
        window_size_left=window_size_left, window_size_right=window_size_right)
    return out, lse, None, None
def _flash_attn_varlen_backward(dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, max_q, max_k, dropout_p, softmax_scale,
                                causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic):
    none = torch.zeros(2, dtype=torch.uint64)
    grads = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, causal, none, none, scale=softmax_scale,
        window_size_left=window_size_left, window_size_right=window_size_right)
    for total, grad in zip((dq, dk, dv), grads):
        total.copy_(grad)
    globals()["deterministic"] = deterministic
"""


@pytest.fixture
def hopper() -> Iterator[None]:
    """Tensors as if they were on a GPU that has everything."""
    with (
        patch.object(cuda_flash, "_capability", lambda q: (9, 0)),
        patch.object(cpu_flash, "why_not", lambda *call: "no CPU"),
    ):
        yield


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put a package `flash_attn` with these files where imports find it."""

    def install(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / "flash_attn" / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    monkeypatch.syspath_prepend(tmp_path)
    cuda_flash._flash_attn.cache_clear()
    yield install
    cuda_flash._flash_attn.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


def test_not_installed(hopper: None, package: Callable[..., None]) -> None:
    assert cuda_flash.why_not_flash_attn(HALF, HALF, HALF) == "flash-attn is not installed"


def test_only_version_4(hopper: None, package: Callable[..., None]) -> None:
    """It leaves a folder `flash_attn` with nothing in it that is called here."""
    package(cute="")
    assert "flash-attn-4" in cuda_flash.why_not_flash_attn(HALF, HALF, HALF)
    assert choose(HALF, HALF, HALF, 1.0, None).backend == "aten_flash"


@pytest.mark.parametrize("error", ["raise ImportError('undefined symbol')", "raise RuntimeError('no driver')"])
def test_broken(hopper: None, package: Callable[..., None], error: str) -> None:
    package(__init__="", flash_attn_interface=error)
    assert "cannot be imported" in cuda_flash.why_not_flash_attn(HALF, HALF, HALF)
    assert choose(HALF, HALF, HALF, 1.0, None).backend == "aten_flash"
    with pytest.raises(lw.BackendError, match=r"flash_attn.*cannot be imported"):
        choose(HALF, HALF, HALF, 1.0, None, "flash_attn")


def test_too_old(hopper: None, package: Callable[..., None]) -> None:
    package(__init__="", flash_attn_interface="def flash_attn_unpadded_func(): ...")
    assert "2.7" in cuda_flash.why_not_flash_attn(HALF, HALF, HALF)


def test_not_imported_for_other_devices(package: Callable[..., None]) -> None:
    package(__init__="raise SystemExit", flash_attn_interface="")
    assert cuda_flash.why_not_flash_attn(HALF, HALF, HALF) == "tensors are on cpu"


@pytest.mark.parametrize("name", MASKS)
def test_package(hopper: None, package: Callable[..., None], name: str) -> None:
    package(__init__="", flash_attn_interface=STAND_IN)
    mask, tasks = MASKS[name], Tasks(fuse(MASKS[name].rows))
    problem = Problem.random(mask.total, dtype=torch.float16)
    expected = solve(problem, mask)
    assert cuda_flash.order()[0] == "flash_attn"
    with installed("FA2"):
        out, lse = attend(problem.q, problem.k, problem.v, tasks, backend="flash_attn")
        side = QuerySide(problem.grad, problem.q, out.half(), lse)
        grads = attend_backward(side, problem.k, problem.v, tasks, backend="flash_attn")
    for which, value in zip(("out", "lse", "dq", "dk", "dv"), (out, lse.t(), *grads), strict=True):
        assert worst(value, expected[which]) < 4e-3, which


@pytest.mark.parametrize("wanted", [False, True])
def test_determinism_is_torchs_switch(hopper: None, package: Callable[..., None], wanted: bool) -> None:
    package(__init__="", flash_attn_interface=STAND_IN)
    problem, tasks = Problem.random(8, dtype=torch.float16), Tasks(lw.Mask.causal([0, 8]).rows)
    side = QuerySide(problem.grad, problem.q, problem.q, torch.zeros(4, 8))
    torch.use_deterministic_algorithms(wanted)
    try:
        with installed("FA2"):
            attend_backward(side, problem.k, problem.v, tasks, backend="flash_attn")
    finally:
        torch.use_deterministic_algorithms(False)
    assert sys.modules["flash_attn.flash_attn_interface"].deterministic is wanted


@pytest.mark.parametrize(
    ("name", "capability", "dim", "reason"),
    [
        ("FA3", (9, 0), 128, None),
        ("FA3", (10, 0), 128, "needs compute capability 9"),
        ("FA4", (10, 0), 128, None),
        ("FA4", (10, 0), 256, None),
        ("FA4", (10, 0), 192, "but not 192"),
        ("FA4", (9, 0), 192, None),
        ("FA4", (8, 0), 64, "needs compute capability 9 or 10"),
        ("mine", (9, 0), 64, "not known"),
    ],
)
def test_activated(name: str, capability: tuple[int, int], dim: int, reason: str | None) -> None:
    """What torch.nn.attention.activate_flash_attention_impl has put under the operator."""
    x = torch.empty(4, 2, dim, dtype=torch.bfloat16)
    with (
        patch.object(torch.nn.attention, "current_flash_attention_impl", lambda: name),
        patch.object(cuda_flash, "_capability", lambda q: capability),
    ):
        assert cuda_flash.order()[0] == "aten_flash"
        found = cuda_flash.why_not_aten(x, x, x, None)
    assert found is None if reason is None else reason in found


def test_deterministic_fa3_has_limits(hopper: None) -> None:
    x = torch.empty(4, 2, 256, dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        with patch.object(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3"):
            assert "deterministic" in cuda_flash.why_not_aten(x, x, x, None)
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_is_large() -> None:
    def large(mask: lw.Mask) -> bool:
        return cuda_flash.suits(Tasks(fuse(mask.rows)))

    assert large(lw.Mask.causal([0, 3000, 5000]))
    assert large(lw.Mask.full([0, 1024]))
    assert not large(lw.Mask.causal([0, 1024]))  # 512 keys on average
    assert not large(lw.Mask.causal(list(range(0, 100_001, 1000))))
    assert not large(lw.Mask.sliding_window([0, 100_000], 4096))
    comb = [((i * 2048, (i + 1) * 2048), (0, 2048), "full") for i in range(0, 16, 2)]
    assert not large(lw.Mask.from_slices(16 * 2048, comb))  # the same keys again and again: a call for each


def test_a_version_that_was_activated_may_take_several_calls() -> None:
    """Two halves of a long document, as zigzag has them: of the keys between them, only the second half sees all."""
    halves = [((0, 4096), (0, 4096), "causal"), ((4096, 8192), (0, 30000), "full")]
    tasks = Tasks(fuse(lw.Mask.from_slices(65536, halves).rows))
    assert not cuda_flash.suits(tasks)
    with patch.object(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3"):
        assert cuda_flash.suits(tasks)
        assert not cuda_flash.suits(Tasks(fuse(lw.Mask.sliding_window([0, 100_000], 4096).rows)))
