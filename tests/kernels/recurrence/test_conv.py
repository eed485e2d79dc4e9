"""The causal convolution against F.conv1d on each segment with its halo in front."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import convolution
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from longweave.errors import InputError
from longweave.kernels.recurrence import conv
from longweave.kernels.recurrence.chunks import spans_of
from longweave.kernels.recurrence.conv import check_conv, conv_backward, conv_edges, conv_forward


def edges_of(cu, tokens, width):
    return conv_edges(spans_of(cu, tokens), width)


def forward(x, weight, bias=None, cu=None, activation=None, halo=None):
    return conv_forward(x, weight, bias, halo, edges_of(cu, len(x), weight.shape[1]), activation == "silu")


def compare(cu, width, activation, *, with_bias=True, with_halo=True, dtype=torch.float64, channels=5) -> float:
    rng = torch.Generator().manual_seed(width)

    def normal(*shape):
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

    x, weight = normal(cu[-1], channels), normal(channels, width)
    bias = normal(channels) if with_bias else None
    halo = normal(len(cu) - 1, width - 1, channels) if with_halo else None
    d_out = normal(cu[-1], channels)
    ours = forward(x, weight, bias, cu, activation, halo)
    edges, silu = edges_of(cu, cu[-1], width), activation == "silu"
    dx, d_weight, d_bias, d_halo = conv_backward(d_out, x, weight, bias, halo, edges, silu)
    assert (d_bias is None, d_halo is None) == (bias is None, halo is None)
    ours = [ours, dx.to(dtype), d_weight, d_bias, None if halo is None else d_halo.to(dtype)]

    leaves = [None if a is None else a.double().requires_grad_() for a in (x, weight, bias, halo)]
    y = convolution(*leaves[:3], cu, activation, leaves[3])
    used = [leaf for leaf in leaves if leaf is not None]
    theirs = [y.detach(), *torch.autograd.grad(y, used, d_out.double(), materialize_grads=True)]
    worst = 0.0
    for found, exact in zip([a for a in ours if a is not None], theirs, strict=True):
        assert found.dtype == dtype
        assert found.shape == exact.shape
        if exact.numel():
            worst = max(worst, float((found.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-3)))
    return worst


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", range(2, 9))
def test_every_width(width: int, activation: str | None) -> None:
    assert compare([0, 1, 1, 4, 20, 27, 60], width, activation) < 1e-12


@pytest.mark.parametrize("cu", [[0, 40], [0, 1, 2, 3, 4], [0, 0, 5, 5], [0, 0], list(range(0, 90, 3))])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_halo", [False, True])
def test_every_segmentation(cu: list[int], with_bias: bool, with_halo: bool) -> None:
    assert compare(cu, 4, "silu", with_bias=with_bias, with_halo=with_halo) < 1e-12


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(2, 8), st.integers(1, 200))
def test_strips_change_nothing(lengths: list[int], width: int, strip: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "STRIP_ELEMENTS", strip)
        assert compare([0, *torch.tensor(lengths).cumsum(0).tolist()], width, "silu") < 1e-12


def test_half_precision_sums_in_float32() -> None:
    assert compare([0, 700, 701, 1000], 4, "silu", dtype=torch.float32) < 1e-5
    assert compare([0, 700, 701, 1000], 4, "silu", dtype=torch.bfloat16) < 2**-8  # one rounding at the end


def test_gradients_of_tokens_wait_for_their_cast() -> None:
    """Whoever sends halo gradients home adds them to those of x in float32, and rounds once."""
    rng = torch.Generator().manual_seed(0)
    x, weight, bias, halo, dy = (
        torch.randn(s, generator=rng).bfloat16() for s in ((12, 3), (3, 4), (3,), (2, 3, 3), (12, 3))
    )
    edges = conv_edges([(0, 5), (5, 12)], 4)
    given = (x, weight, bias, halo, edges, True)
    assert conv_forward(*given).dtype == torch.bfloat16
    grads = conv_backward(dy, *given)
    assert [g.dtype for g in grads] == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    leaves = [t.double().requires_grad_() for t in (x, weight, bias, halo)]
    y = convolution(*leaves[:3], [0, 5, 12], "silu", leaves[3])
    exact = torch.autograd.grad(y, leaves, dy.double())
    for got, want in ((grads[0], exact[0]), (grads[3], exact[3])):
        assert float((got.double() - want).abs().max() / want.abs().max()) < 1e-5
    assert conv_backward(dy, x, weight, None, None, edges, True)[2:] == (None, None)


def test_mixed_dtypes_are_summed_in_the_wider_one() -> None:
    x, weight = torch.randn(9, 3, dtype=torch.float64), torch.randn(3, 4)
    expected = forward(x, weight.double())
    assert float((forward(x, weight) - expected).abs().max()) < 1e-12


def test_fake_tensors_leave_nothing_behind() -> None:
    edges = conv_edges([(0, 5), (5, 12)], 4)
    for fake in (True, False, True):
        with FakeTensorMode() if fake else nullcontext():
            y = conv_forward(torch.rand(12, 3), torch.rand(3, 4), None, None, edges, False)
        assert isinstance(y, FakeTensor) == fake


def test_a_cut_segment_with_its_halo_equals_the_whole() -> None:
    x, weight = torch.randn(30, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    whole = forward(x, weight)
    halo = torch.zeros(3, 3, 3, dtype=torch.float64)
    halo[1, 1:] = x[:2]  # the second piece has only two tokens before it
    halo[2] = x[8:11]
    assert torch.allclose(forward(x, weight, None, [0, 2, 11, 30], halo=halo), whole, atol=1e-13)


def test_non_contiguous_input() -> None:
    x, weight = torch.randn(6, 50, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    assert torch.equal(forward(x.t(), weight), forward(x.t().contiguous(), weight))


def test_errors_say_what_was_seen() -> None:
    x, weight = torch.randn(10, 4), torch.randn(4, 4)
    with pytest.raises(InputError, match="width 1;"):
        check_conv(x, weight[:, :1], None, None)
    with pytest.raises(InputError, match="width 9;"):
        check_conv(x, torch.randn(4, 9), None, None)
    with pytest.raises(InputError, match=r"weight \(3, 4\)"):
        check_conv(x, weight[:3], None, None)
    with pytest.raises(InputError, match="'relu'"):
        check_conv(x, weight, None, "relu")
    with pytest.raises(InputError, match=r"bias has shape \(3,\)"):
        check_conv(x, weight, torch.zeros(3), None)
    check_conv(x, weight, torch.zeros(4), "silu")
