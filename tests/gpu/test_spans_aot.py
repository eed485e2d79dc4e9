"""The package's own Triton kernels, compiled for GPUs: they fit, they hardly spill, they use tensor cores.

With LONGWEAVE_FULL=1 for every shape, kernel and family of GPUs; otherwise for a few.
"""

import os
import re
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from ahead_of_time import Compiled, Launch, catch, compile_for

import longweave as lw
from longweave.kernels import fused, triton_launch
from longweave.kernels.attention import partial, spans
from longweave.kernels.attention.partial import Partial, QuerySide, Tasks

pytestmark = pytest.mark.usefixtures("triton_installed")

FULL = bool(os.environ.get("LONGWEAVE_FULL"))
# Bytes that a program may have. An A100 has 166912; what is made for it serves its smaller relatives, too.
SHARED = {80: 101376, 90: 232448, 100: 232448, 120: 101376}
TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
# Bytes of a thread. With 512 columns dk and dv have more sums than registers hold, and dq with a softcap a few more.
SPILLS = {"fresh": 0, "forward": 0, "dq": 64, "dkv": 256}
ATOMIC = re.compile(r"\b(atom|red)\.(global|gpu|relaxed|add)")  # nobody else writes the rows of a program
DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (72, 80), (96, 96)]
CASES = [
    (80, "dq", (64, 64), 30.0),
    (90, "forward", (128, 128), None),
    (90, "dkv", (128, 128), None),
    (100, "fresh", (64, 64), None),
]
IN_FLOAT32 = [(80, "dkv", (256, 256))]
if FULL:
    CASES = [(*case, None) for case in product(SHARED, SPILLS, DIMS)]
    CASES += [(*case, 30.0) for case in product(SHARED, SPILLS, [(128, 128), (256, 256)])]
    IN_FLOAT32 = list(product(SHARED, SPILLS, DIMS[:4]))


def launches_of(
    monkeypatch: pytest.MonkeyPatch, capability: int, dims: tuple[int, int], dtype: torch.dtype, softcap: float | None
) -> dict[str, Launch]:
    """What a forward and a backward of a small problem would start on such a GPU."""
    monkeypatch.setattr(triton_launch, "capability", lambda device: capability)
    caught, delta = catch(monkeypatch, spans), catch(monkeypatch, fused)
    monkeypatch.setattr(partial, "serves", lambda x: True)
    tokens, heads, kv_heads = 100, 8, 2
    dim, v_dim = dims
    q, kv = torch.zeros(tokens, heads, dim, dtype=dtype), torch.zeros(tokens, kv_heads, dim + v_dim, dtype=dtype)
    k, v = kv[..., :dim], kv[..., dim:]
    tasks = Tasks(lw.Mask.causal([0, tokens]).rows)
    into = Partial.empty(q, v_dim)
    for fresh in (True, False):
        spans.forward(into, q, k, v, tasks, 1.0, softcap, fresh)
    out = into.out.to(dtype)
    grads = tuple(torch.zeros(x.shape) for x in (q, k, v))
    spans.backward(grads, QuerySide(out, q, out, into.lse), k, v, tasks, 1.0, softcap)
    assert [launch.name for launch in caught] == ["forward", "forward", "dq", "dkv"]
    assert [launch.name for launch in delta] == ["delta"]
    return dict(zip(SPILLS, caught, strict=True))


def check(built: Compiled, capability: int, spills: int) -> None:
    assert built.shared <= SHARED[capability], f"{built.shared} bytes of shared memory"
    assert built.spills <= spills, f"{built.spills} bytes of a thread are spilled"


@pytest.mark.parametrize(("capability", "kernel", "dims", "softcap"), CASES)
def test_attention(
    monkeypatch: pytest.MonkeyPatch, capability: int, kernel: str, dims: tuple[int, int], softcap: float | None
) -> None:
    launch = launches_of(monkeypatch, capability, dims, torch.bfloat16, softcap)[kernel]
    built = compile_for(launch, capability)
    check(built, capability, SPILLS[kernel])
    assert TENSOR_CORES[capability] in built.ptx or launch.options["BLOCK"] < 64
    assert "mma" in built.ptx
    assert not ATOMIC.search(built.ptx)


@pytest.mark.parametrize(("capability", "kernel", "dims"), IN_FLOAT32)
def test_attention_in_float32(
    monkeypatch: pytest.MonkeyPatch, capability: int, kernel: str, dims: tuple[int, int]
) -> None:
    built = compile_for(launches_of(monkeypatch, capability, dims, torch.float32, None)[kernel], capability)
    check(built, capability, 512)
    assert "mma" not in built.ptx  # tensor cores would round


@pytest.mark.parametrize("capability", SHARED if FULL else [90])
def test_fused_passes(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    launches = catch(monkeypatch, fused)
    into = Partial.empty(torch.zeros(100, 8, 128), 128)
    part = into.out.to(torch.bfloat16)
    fused.merge(into.out, into.lse, part, into.lse)
    fused.finish(into.out, into.lse, torch.zeros(8), torch.bfloat16)
    fused.delta(part, part)
    numbers = torch.zeros(101, dtype=torch.int32)
    fused.add_rows(into.out, into.out, numbers[:100], numbers)
    assert [launch.name for launch in launches] == ["merge", "finish", "delta", "add_rows"]
    for launch in launches:
        built = compile_for(launch, capability)
        check(built, capability, 0)
        assert ".v4." in built.ptx, f"{launch.name} does not move 16 bytes at a time"
        assert not ATOMIC.search(built.ptx)


@pytest.mark.parametrize(("capability", "reason"), [(75, "needs compute capability 8.0, not 7.5"), (80, None)])
def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capability: int, reason: str | None) -> None:
    monkeypatch.setattr(triton_launch, "capability", lambda device: capability)
    monkeypatch.setattr(triton_launch, "_failure", lambda: None)
    on_a_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16)
    found = triton_launch.why_not(on_a_gpu)
    assert (found is None) if reason is None else reason in found


def test_a_triton_that_does_not_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it finds no driver; elsewhere there may be no compiler."""
    monkeypatch.setattr(triton_launch, "capability", lambda device: 80)
    on_a_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16)
    triton_launch._failure.cache_clear()
    found = triton_launch.why_not(on_a_gpu)
    triton_launch._failure.cache_clear()
    assert found is not None
    assert found.startswith("triton does not work here: ")
