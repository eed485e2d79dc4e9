"""The fused convolution in Triton's interpreter, against plain torch in float64. Run by test_spans_values."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from longweave.kernels.recurrence import conv, fused_conv
from longweave.kernels.triton_launch import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set")

CU = [0, 1, 1, 3, 40, 47]  # one token, none, shorter than the taps, longer than a block


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BLOCK", "SIDE", "BACK_BLOCK"):
        monkeypatch.setattr(fused_conv, name, 16)
    monkeypatch.setattr(fused_conv, "ROUNDS", 2)  # two programs sum up three blocks


def problem(width: int, *, bias: bool, halo: bool, channels: int = 19) -> list[Tensor | None]:
    """dy, x, weight, bias, halo in float64; x and dy have gaps between their rows."""
    g = torch.Generator().manual_seed(width)
    dy, x = (torch.randn(CU[-1], 2 * channels, generator=g, dtype=torch.float64)[:, :channels] for _ in range(2))
    weight, offset = (torch.randn(channels, size, generator=g, dtype=torch.float64) for size in (width, 1))
    beyond = torch.randn(len(CU) - 1, width - 1, channels, generator=g, dtype=torch.float64)
    return [dy, x, weight, offset[:, 0] if bias else None, beyond if halo else None]


def results(tensors: list[Tensor | None], silu: bool) -> list[Tensor | None]:
    dy, x, weight, bias, halo = tensors
    edges = conv.conv_edges(list(pairwise(CU)), weight.shape[1])
    y = conv.conv_forward(x, weight, bias, halo, edges, silu)
    return [y, *conv.conv_backward(dy, x, weight, bias, halo, edges, silu)]


@pytest.mark.parametrize(
    ("width", "bias", "halo", "silu"),
    [(4, True, True, True), (4, False, False, True), (2, True, False, False), (7, False, True, False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values(width: int, bias: bool, halo: bool, silu: bool, dtype: torch.dtype) -> None:
    exact = [None if x is None else x.to(dtype).double() for x in problem(width, bias=bias, halo=halo)]
    given = [None if x is None else x.to(dtype) for x in exact]
    if given[4] is not None:
        given[4] = given[4].float()  # as it is received
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    for name, got, expected in zip(
        ("y", "dx", "dw", "db", "d_halo"), results(given, silu), results(exact, silu), strict=True
    ):
        assert (got is None) == (expected is None), name
        if got is not None:
            assert (got.double() - expected).abs().max() < tolerance * expected.abs().max().clamp_min(1), name


def test_a_cut_changes_no_bit() -> None:
    """One document whole, and as two segments of which the second is given the first one's last tokens."""
    _, x, weight, bias, _ = (None if t is None else t.float() for t in problem(4, bias=True, halo=False))
    whole = conv.conv_forward(x, weight, bias, None, conv.conv_edges([(0, 47)], 4), True)
    for cut in (1, 2, 20, 46):
        before = torch.nn.functional.pad(x[:cut], (0, 0, 3, 0))[-3:]
        halo = torch.stack([torch.zeros_like(before), before])
        assert torch.equal(
            conv.conv_forward(x, weight, bias, halo, conv.conv_edges([(0, cut), (cut, 47)], 4), True), whole
        )


def test_nothing() -> None:
    edges = conv.conv_edges([], 4)
    x, weight = torch.empty(0, 5), torch.ones(5, 4)
    assert conv.conv_forward(x, weight, None, None, edges, True).shape == (0, 5)
    dx, dw, _, _ = conv.conv_backward(x, x, weight, None, None, edges, True)
    assert dx.shape == (0, 5)
    assert bool((dw == 0).all())
