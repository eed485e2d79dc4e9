"""Against code of others: Hugging Face's torch forms, and what flash-linear-attention would be given."""

from __future__ import annotations

import pytest
import torch
from linear_cases import GDN, KDA, on_one_rank, with_grads, worst

import longweave as lw
from longweave.errors import BackendError
from longweave.kernels.recurrence import fla
from longweave.kernels.recurrence.chunks import spans_of
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
        out, final = modeling.torch_chunk_gated_delta_rule(*packed, initial_state=s, **given)
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
        out, final = modeling.chunk_kimi_delta_attention(
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


@pytest.fixture
def fake_fla(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """An op with the signature and the limits of flash-linear-attention's, on any device."""
    calls: list[dict] = []

    def op(*, q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
        calls.append({"q": q, "k": k, "g": g, "cu_seqlens": cu_seqlens, "initial_state": initial_state})
        assert q.shape[0] == 1
        assert q.shape == k.shape
        assert q.shape[2] == v.shape[2]
        assert bool((cu_seqlens.diff() > 0).all())
        assert all(x.is_contiguous() for x in (q, k, v, g, beta))
        out, final = recurrent(
            *(x.squeeze(0).float() for x in (q, k, v, g, beta)),
            cu_seqlens,
            initial_state=initial_state,
            scale=scale,
            qk_l2norm=use_qk_l2norm_in_kernel,
        )
        return out.unsqueeze(0).to(q.dtype), final if output_final_state else None

    monkeypatch.setattr(fla, "load_op", lambda: op)
    monkeypatch.setattr(fla, "refusal", lambda q: None)
    return calls


@pytest.mark.parametrize("cu", [[0, 11, 30], [0, 0, 11, 11, 30, 30]])
@pytest.mark.parametrize("with_state", [False, True])
def test_arguments_for_flash_linear_attention(fake_fla: list[dict], cu: list[int], with_state: bool) -> None:
    inputs = GDN.inputs(30, 2, 4, dtype=torch.bfloat16)
    state = torch.randn(len(cu) - 1, 4, 8, 8) if with_state else None
    out, final = fla.gated_delta_rule(*inputs, spans_of(cu, 30), state, True, GDN.scale, True)
    (call,) = fake_fla
    assert call["cu_seqlens"].tolist() == [0, 11, 30]
    assert call["g"].dtype == torch.float32
    expected, expected_final = GDN.chunked(inputs, cu, state, qk_l2norm=True)
    assert worst([out], [expected]) < 2**-8  # both are rounded to bfloat16
    assert worst([final], [expected_final]) < 1e-5


@pytest.mark.parametrize("backend", ["auto", "fla", "torch"])
def test_flash_linear_attention_is_taken_where_it_can_serve(fake_fla: list[dict], backend: str) -> None:
    inputs = GDN.inputs(30, 2, 4, dtype=torch.bfloat16)
    cu = [0, 11, 30]
    out = lw.gated_delta_rule(*inputs, lw.Pack(cu), scale=GDN.scale, backend=backend)
    assert len(fake_fla) == (backend != "torch")
    assert worst([out], [GDN.chunked(inputs, cu)[0]]) < 2**-8


def test_flash_linear_attention_without_tokens(fake_fla: list[dict]) -> None:
    inputs = GDN.inputs(0, 2, 4, dtype=torch.bfloat16)
    state = torch.randn(2, 4, 8, 8)
    out, final = fla.gated_delta_rule(*inputs, spans_of([0, 0, 0], 0), state, True, GDN.scale, False)
    assert out.shape == (0, 4, 8)
    assert torch.equal(final, state)
    assert not fake_fla


def test_a_backend_that_cannot_serve_says_why() -> None:
    inputs = GDN.inputs(10, dtype=torch.bfloat16)
    for call in (
        lambda: fla.gated_delta_rule(*inputs, [(0, 10)], None, False, 1.0, False),
        lambda: lw.gated_delta_rule(*inputs, lw.Pack([0, 10]), backend="fla"),
    ):
        with pytest.raises(BackendError, match=r"inputs are on cpu; it runs on CUDA"):
            call()
