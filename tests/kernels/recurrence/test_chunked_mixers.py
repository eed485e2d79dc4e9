"""Chunked forms against the reference loop: outputs, final states and every gradient."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import CASES, GDN, GLA, HEAD, KDA, LINEAR, Case, on_one_rank, with_grads, worst
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from longweave.errors import InputError
from longweave.kernels.recurrence import check_mixer, factors, mix
from longweave.kernels.recurrence.chunks import chunk_table
from longweave.kernels.recurrence.linear_attention import HeadDecay
from longweave.kernels.recurrence.reference import recurrent

BY_NAME = {"ids": lambda case: case.name}
SEGMENTS = {
    "one": [0, 37],
    "odd and empty": [0, 0, 13, 14, 14, 43, 43],
    "exactly a chunk": [0, 16, 32],
    "a chunk and one": [0, 17, 34, 50],
    "many tiny": list(range(0, 121, 3)),
    "a giant among short": [0, 2, 5, 120, 121, 124, 130],
    "no tokens": [0, 0, 0],
}


def both(case: Case, inputs, cu, state, **kw):
    fast = with_grads(lambda x, s: case.chunked(x, cu, s, **kw), inputs, state)
    slow = with_grads(lambda x, s: case.reference(x, cu, s), inputs, state)
    return fast, slow


def state_for(inputs, cu, dtype=torch.float64):
    segments, k, v = len(cu) - 1, inputs[1], inputs[2]
    rng = torch.Generator().manual_seed(3)
    return torch.randn((segments, v.shape[1], k.shape[2], v.shape[2]), generator=rng, dtype=dtype)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("case", CASES, **BY_NAME)
def test_every_segmentation_in_float64(case: Case, segments: str) -> None:
    cu = SEGMENTS[segments]
    inputs = case.inputs(cu[-1])
    fast, slow = both(case, inputs, cu, state_for(inputs, cu), chunk=16)
    assert worst(fast, slow) < 1e-10


@pytest.mark.parametrize("heads", [(1, 4), (2, 4), (3, 3)])
@pytest.mark.parametrize("case", CASES, **BY_NAME)
def test_grouped_heads_unequal_dims_and_no_initial_state(case: Case, heads: tuple[int, int]) -> None:
    cu = [0, 75, 94, 95]
    inputs = case.inputs(95, *heads, K=6, V=10)
    fast, slow = both(case, inputs, cu, None, chunk=64)
    assert worst(fast, slow) < 1e-10


@pytest.mark.parametrize("decay", [5e-4, 0.05, 3.0, 50.0])
@pytest.mark.parametrize("case", [GDN, KDA, GLA, HEAD], **BY_NAME)
def test_any_strength_of_decay_in_float32(case: Case, decay: float) -> None:
    cu = [0, 150, 190]
    inputs = case.inputs(190, K=16, V=16, decay=decay, dtype=torch.float32)
    state = state_for(inputs, cu, torch.float32)
    fast = with_grads(lambda x, s: case.chunked(x, cu, s), inputs, state)
    slow = with_grads(lambda x, s: case.reference(x, cu, s), [x.double() for x in inputs], state.double())
    assert worst(fast, slow) < 1e-5


@pytest.mark.parametrize("case", [GDN, KDA, GLA], **BY_NAME)
def test_weak_decay_after_strong_decay_keeps_its_digits(case: Case) -> None:
    """cumsum(g) is near −3000 at the end of a chunk: float32 differences would be off by 1e-4."""
    inputs = case.inputs(64, K=16, V=16, dtype=torch.float32)
    inputs[3] = torch.where(torch.arange(64) % 2 == 0, -93.7, -0.137).reshape(64, *[1] * (inputs[3].dim() - 1))
    inputs[3] = inputs[3].expand(inputs[2].shape[:2] + (inputs[1].shape[2:] if case.decay == "channel" else ()))
    fast = with_grads(lambda x, s: case.chunked(x, None, s), inputs, None)
    slow = with_grads(lambda x, s: case.reference(x, None, s), [x.double() for x in inputs], None)
    assert worst(fast, slow) < 1e-5


@pytest.mark.parametrize("case", CASES, **BY_NAME)
def test_bfloat16_is_as_good_as_the_reference_in_bfloat16(case: Case) -> None:
    cu = [0, 90, 100]
    inputs = case.inputs(100, K=16, V=16, dtype=torch.bfloat16)
    exact = with_grads(lambda x, s: case.reference(x, cu, s), [x.double() for x in inputs], None)
    ours = with_grads(lambda x, s: case.chunked(x, cu, s), inputs, None)
    theirs = with_grads(lambda x, s: case.reference(x, cu, s), inputs, None)
    assert ours[0].dtype == torch.bfloat16
    assert ours[1].dtype == torch.float32
    for a, b, e in zip(ours, theirs, exact, strict=True):
        assert worst([a], [e]) <= 2 * worst([b], [e]) + 1e-6


@pytest.mark.parametrize("case", CASES, **BY_NAME)
def test_non_contiguous_inputs(case: Case) -> None:
    cu = [0, 30, 50]
    inputs = case.inputs(50)
    strided = [torch.stack([x, x], -1).transpose(0, 1)[..., 0].transpose(0, 1) for x in inputs]
    assert not any(x.is_contiguous() for x in strided)
    out, final = case.chunked(strided, cu, None, chunk=8)
    expected, expected_final = case.reference(inputs, cu, None)
    assert worst([out, final], [expected, expected_final]) < 1e-10
    d_out = torch.randn(50, 8, 2, dtype=torch.float64).transpose(1, 2)  # an upstream gradient with odd strides
    leaf = strided[2].requires_grad_()
    (ours,) = torch.autograd.grad(case.chunked([*strided[:2], leaf, *strided[3:]], cu, None)[0], leaf, d_out)
    leaf = inputs[2].clone().requires_grad_()
    (theirs,) = torch.autograd.grad(case.reference([*inputs[:2], leaf, *inputs[3:]], cu, None)[0], leaf, d_out)
    assert worst([ours], [theirs]) < 1e-10


@pytest.mark.parametrize("case", CASES, **BY_NAME)
def test_gradcheck(case: Case) -> None:
    inputs = case.inputs(7, 1, 2, K=3, V=2)
    cu = [0, 5, 7]
    leaves = [x.requires_grad_() for x in (*inputs, state_for(inputs, cu))]
    assert torch.autograd.gradcheck(lambda *x: case.chunked(x[:-1], cu, x[-1], chunk=4), leaves)


@pytest.mark.parametrize("case", CASES, **BY_NAME)
@pytest.mark.parametrize("size", [1, 4, 64])
def test_the_size_of_blocks_changes_nothing(case: Case, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cu = [0, 40, 43, 44, 60, 61]
    inputs = case.inputs(61)
    expected = with_grads(lambda x, s: case.reference(x, cu, s), inputs, state_for(inputs, cu))
    monkeypatch.setitem(factors.BLOCK, "cpu", 4 * size)
    monkeypatch.setattr(factors, "LEAST_CHUNKS", 1)
    actual = with_grads(lambda x, s: case.chunked(x, cu, s, chunk=4), inputs, state_for(inputs, cu))
    assert worst(actual, expected) < 1e-10


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    case=st.sampled_from(CASES),
    log2=st.integers(0, 5),
)
def test_random_segments(lengths: list[int], case: Case, log2: int) -> None:
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    inputs = case.inputs(cu[-1], 1, 2, K=4, V=3)
    state = state_for(inputs, cu)
    out, final = case.chunked(inputs, cu, state, chunk=2**log2)
    expected, expected_final = case.reference(inputs, cu, state)
    assert worst([out, final], [expected, expected_final]) < 1e-10


@pytest.mark.parametrize("case", CASES, **BY_NAME)
def test_without_final_states_outputs_and_gradients_are_the_same(case: Case) -> None:
    cu = [0, 40, 43, 43, 60]
    inputs = [x.requires_grad_() for x in case.inputs(60)]
    d_out = torch.randn(60, 2, 8, dtype=torch.float64)
    out, none = case.chunked(inputs, cu, chunk=8, want_final=False)
    assert none is None
    expected, _ = case.reference(inputs, cu, None)
    grads, expected_grads = (torch.autograd.grad(y, inputs, d_out) for y in (out, expected))
    assert worst([out, *grads], [expected, *expected_grads]) < 1e-10


@pytest.mark.parametrize("case", CASES, **BY_NAME)
def test_gradients_of_the_final_state_alone(case: Case) -> None:
    cu = [0, 20, 33]
    inputs = [x.requires_grad_() for x in case.inputs(33)]
    d_final = torch.randn(2, 2, 8, 8, dtype=torch.float64)
    finals = case.chunked(inputs, cu, None, chunk=8)[1], case.reference(inputs, cu, None)[1]
    grads = [torch.autograd.grad(y, inputs, d_final, materialize_grads=True) for y in finals]
    assert worst(*grads) < 1e-10


def test_a_second_derivative_is_refused() -> None:
    inputs = [x.requires_grad_() for x in GDN.inputs(9)]
    (dv,) = torch.autograd.grad(GDN.chunked(inputs)[0].square().sum(), inputs[2], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dv.sum().backward()


def test_fake_tensors_leave_nothing_behind() -> None:
    """The simulator runs this code on fake tensors, before or after real runs with the same table."""
    for fake_first in (True, False):
        table = chunk_table([(0, 17), (17, 40), (40, 43)])
        for fake in (fake_first, not fake_first):
            with FakeTensorMode() if fake else nullcontext():
                given = [torch.rand(s, requires_grad=True) for s in ((43, 2, 4),) * 3 + ((43, 2),) * 2]
                out, final = mix(GDN.mixer, given, table, want_final=True)
                out.sum().backward()
            assert isinstance(out, FakeTensor) == fake
            assert out.shape == (43, 2, 4)
            assert final.shape == (3, 2, 4, 4)
            assert given[0].grad.shape == given[0].shape


def test_autocast_does_not_round_the_scan() -> None:
    inputs = GDN.inputs(80, K=16, V=16, dtype=torch.float32)
    expected = with_grads(lambda x, s: GDN.chunked(x, None, s), inputs, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = with_grads(lambda x, s: GDN.chunked(x, None, s), inputs, None)
    assert worst(actual, expected) == 0


def test_only_inputs_and_block_states_are_kept_for_backward() -> None:
    inputs = [x.requires_grad_() for x in GDN.inputs(1024, 2, 2, K=16, V=16, dtype=torch.float32)]
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        GDN.chunked(inputs, want_final=False)
    blocks = 1024 * 2 // factors.BLOCK["cpu"]
    assert blocks > 1
    states = (blocks - 1) * 2 * 16 * 16 * 4  # the first block starts from zero
    assert sum(kept.values()) == sum(x.numel() * 4 for x in inputs) + states


def test_one_decay_per_head_for_all_tokens_and_its_gradient() -> None:
    q, k, v = LINEAR.inputs(50, 1, 3)
    decay = torch.log1p(-(2.0 ** torch.tensor([-5.0, -6, -7], dtype=torch.float64)))  # as in RetNet
    cu = [0, 20, 50]

    def fast(x, s):
        return on_one_rank(HeadDecay(), (*x[:3], x[3].expand(50, -1)), cu, chunk=8)

    def slow(x, s):
        return recurrent(*x[:3], x[3].expand(50, -1), None, cu)

    assert worst(*(with_grads(f, [q, k, v, decay], None) for f in (fast, slow))) < 1e-10


def test_ssd_is_decay_per_head_of_scaled_inputs() -> None:
    rng = torch.Generator().manual_seed(0)
    x, B, C = (torch.randn(30, h, d, generator=rng, dtype=torch.float64) for h, d in ((4, 5), (2, 3), (2, 3)))
    dt = torch.rand(30, 4, generator=rng, dtype=torch.float64)
    A = -torch.rand(4, generator=rng, dtype=torch.float64) - 0.1

    def slow(given, s):
        x, dt, A, B, C = given
        S, out = torch.zeros(4, 3, 5, dtype=torch.float64), []
        for t in range(30):
            b, c = B[t].repeat_interleave(2, 0), C[t].repeat_interleave(2, 0)
            S = torch.exp(A * dt[t])[:, None, None] * S + dt[t][:, None, None] * b[:, :, None] * x[t][:, None, :]
            out.append(torch.einsum("hnp,hn->hp", S, c))
        return torch.stack(out), S[None]

    def fast(given, s):
        x, dt, A, B, C = given
        return on_one_rank(HeadDecay(), (C, B, x * dt.unsqueeze(-1), A * dt), chunk=8)

    assert worst(*(with_grads(f, [x, dt, A, B, C], None) for f in (fast, slow))) < 1e-10


def test_errors_say_what_was_seen() -> None:
    q, k, v, g, beta = GDN.inputs(10, 2, 4)
    check_mixer(q, k, v, g=g, beta=beta)
    with pytest.raises(InputError, match=r"4 heads, which is no multiple of the 3"):
        check_mixer(torch.cat([q, q[:, :1]], 1), torch.cat([k, k[:, :1]], 1), v, g=g, beta=beta)
    with pytest.raises(InputError, match=r"g has shape \(10, 4, 8\)"):
        check_mixer(q, k, v, g=g.unsqueeze(-1).expand(-1, -1, 8), beta=beta)
    with pytest.raises(InputError, match=r"float32, torch\.float64, torch\.float64"):
        check_mixer(q.float(), k, v, g=g, beta=beta)
    with pytest.raises(InputError, match="they must be equal"):
        check_mixer(q[:, :, :4], k, v, g=g, beta=beta)
    with pytest.raises(InputError, match=r"rise from 0 to the number of tokens, 10"):
        GDN.chunked([q, k, v, g, beta], [0, 7, 5, 10])
    with pytest.raises(InputError, match="power of two"):
        GDN.chunked([q, k, v, g, beta], chunk=48)
