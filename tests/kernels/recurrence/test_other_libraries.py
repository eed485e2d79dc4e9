"""Against code of others: Hugging Face's torch forms. flash-linear-attention's own kernels: tests/gpu."""

from __future__ import annotations

import inspect

import pytest
import torch
from linear_cases import GDN, KDA, on_one_rank, with_grads, worst

import longweave as lw
from longweave.errors import BackendError
from longweave.kernels.recurrence import fla
from longweave.kernels.recurrence.delta_rule import GatedDeltaRule
from longweave.kernels.recurrence.linear_attention import KimiDelta
from longweave.kernels.recurrence.reference import recurrent


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (2, 4)])
def test_hugging_face_gated_delta_rule(heads: tuple[int, int], l2norm: bool) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    Hk, Hv = heads
    inputs = GDN.inputs(200, Hk, Hv, K=16, V=24, dtype=torch.float32)
    state = torch.randn(1, Hv, 16, 24, generator=torch.Generator().manual_seed(0))
    given = {"output_final_state": True, "use_qk_l2norm_in_kernel": l2norm}

    def theirs(x, s):
        q, k, v, g, beta = x
        q, k = (y.repeat_interleave(Hv // Hk, 1) for y in (q, k))
        packed = (y.unsqueeze(0) for y in (q, k, v, g, beta))
        out, final = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)(*packed, initial_state=s, **given)
        return out.squeeze(0), final

    def ours(x, s):
        return on_one_rank(GatedDeltaRule(16**-0.5, l2norm), x, state=s)

    assert worst(with_grads(ours, inputs, state), with_grads(theirs, inputs, state)) < 1e-5


@pytest.mark.parametrize("l2norm", [False, True])
def test_hugging_face_kimi_delta_attention(l2norm: bool) -> None:
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    inputs = KDA.inputs(90, 2, 2, K=16, V=24, dtype=torch.float32)
    state = torch.randn(1, 2, 16, 24, generator=torch.Generator().manual_seed(0))

    def theirs(x, s):
        packed = (y.unsqueeze(0) for y in x)
        out, final = inspect.unwrap(modeling.chunk_kimi_delta_attention)(
            *packed, initial_state=s, output_final_state=True, use_qk_l2norm_in_kernel=l2norm
        )
        return out.squeeze(0), final

    def ours(x, s):
        return on_one_rank(KimiDelta(16**-0.5, l2norm), x, state=s)

    assert worst(with_grads(ours, inputs, state), with_grads(theirs, inputs, state)) < 1e-5


@pytest.mark.parametrize("case", [GDN, KDA], ids=lambda case: case.name)
def test_l2norm_of_q_and_k_in_float64(case) -> None:
    inputs = case.inputs(70, 2, 4)
    inputs[0][5] = 0  # a query of length 0 has a finite gradient
    cu = [0, 33, 70]
    fast = with_grads(lambda x, s: case.chunked(x, cu, s, qk_l2norm=True), inputs, None)
    slow = with_grads(lambda x, s: case.reference(x, cu, s, qk_l2norm=True), inputs, None)
    assert worst(fast, slow) < 1e-10


def test_scale_defaults_to_the_root_of_the_key_dim() -> None:
    inputs = GDN.inputs(20, K=16)
    expected, _ = recurrent(*inputs, scale=0.25)
    for backend in ("auto", "torch", "recurrent"):
        assert worst([lw.gated_delta_rule(*inputs, lw.Pack([0, 20]), backend=backend)], [expected]) < 1e-10


def test_a_backend_that_cannot_serve_says_why() -> None:
    inputs = GDN.inputs(10, dtype=torch.bfloat16)
    with pytest.raises(BackendError, match=r"inputs are on cpu; it runs on CUDA"):
        lw.gated_delta_rule(*inputs, lw.Pack([0, 10]), backend="fla")
    pack = lw.Pack([0, 10])
    lw.gated_delta_rule(*inputs, pack)
    assert pack.methods["gated_delta_rule"].backend == "torch"
    assert "inputs are on cpu" in pack.methods["gated_delta_rule"].backend_why


@pytest.mark.parametrize("error", [OSError, RuntimeError, ImportError])
def test_a_broken_installation_is_a_reason(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """Whatever importing flash-linear-attention raises: "auto" runs in torch, and asking for it says what it was."""

    def broken(name: str) -> None:
        raise error("libcuda.so.1 is not there")

    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(fla.importlib, "import_module", broken)
    found = fla.load.__wrapped__(fla.ENTRIES[GatedDeltaRule])
    monkeypatch.undo()
    assert f"{error.__name__}: libcuda.so.1 is not there" in found
    monkeypatch.setattr(fla, "load", lambda entry: found)
    monkeypatch.setattr(fla, "DEVICES", ("cpu",))
    q, k, v, g, beta = (x.bfloat16() for x in GDN.inputs(9, 2, 2, K=16, V=16, dtype=torch.float32))
    pack = lw.Pack([0, 5, 9])
    lw.gated_delta_rule(q, k, v, g, beta, pack)
    assert pack.methods["gated_delta_rule"].why
    with pytest.raises(BackendError, match=r"libcuda.so.1 is not there.*or use backend='torch'"):
        lw.gated_delta_rule(q, k, v, g, beta, pack, backend="fla")
