"""The fused passes, in Triton's interpreter, against plain torch in float64. Started by test_spans_values."""

import pytest
import torch
from reference import worst
from torch import Tensor

from longweave.kernels import fused, triton_launch
from longweave.kernels.attention.partial import Partial, QuerySide
from longweave.kernels.triton_launch import INTERPRETED

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, where a row has seen nothing
]

TOKENS, HEADS, DIM = 70, 3, 24
BLIND = {"mine": [1, 2, 3, 4], "theirs": [3, 4, 5, 6]}  # 4 and 6 with lse = +∞ on their side


def partial(seed: int) -> Partial:
    """As views of larger tensors."""
    g = torch.Generator().manual_seed(seed)
    out, lse = torch.randn(TOKENS, HEADS + 2, DIM, generator=g), torch.randn(HEADS + 2, TOKENS + 5, generator=g)
    return Partial(out[:, 1:-1], lse[1:-1, :TOKENS] * 4)


def pair() -> tuple[Partial, Partial]:
    mine, theirs = partial(0), partial(1)
    mine.out[BLIND["mine"]] = 0
    mine.lse[:, BLIND["mine"]] = -torch.inf
    theirs.lse[:, BLIND["theirs"]] = -torch.inf
    theirs.lse[:, [4, 6]] = torch.inf
    return mine, theirs


def wide(x: Partial) -> Partial:
    """In float64, which the fused passes leave to plain torch."""
    return Partial(x.out.double(), x.lse.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merge(dtype: torch.dtype) -> None:
    mine, theirs = pair()
    part = theirs.out.to(dtype)
    expected = wide(mine)
    expected.add(0, TOKENS, part.double(), theirs.lse.double())
    before = mine.out.clone(), mine.lse.clone()
    fused.merge(mine.out, mine.lse, part, theirs.lse)
    assert worst(mine.out, expected.out) < 1e-6
    assert worst(mine.lse, expected.lse) < 1e-6
    # What saw nothing changes no bit; who saw nothing on both sides stays as it was.
    assert torch.equal(mine.out[BLIND["theirs"]], before[0][BLIND["theirs"]])
    assert torch.equal(mine.lse[:, BLIND["theirs"]], before[1][:, BLIND["theirs"]])
    assert (mine.out[[3, 4]] == 0).all()
    assert (mine.lse[:, [3, 4]] == -torch.inf).all()


def test_merge_looks_away_from_blind_rows() -> None:
    mine, theirs = pair()
    theirs.out[BLIND["theirs"]] = torch.nan
    fused.merge(mine.out, mine.lse, theirs.out, theirs.lse)
    assert mine.out.isfinite().all()


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -torch.inf, 20.0])])
def test_finish(sinks: Tensor | None) -> None:
    mine, _ = pair()
    expected = wide(mine)
    want = expected.finish(sinks, torch.float64)
    got = fused.finish(mine.out, mine.lse, sinks, torch.float16)
    assert got.dtype == torch.float16
    assert got.is_contiguous()
    assert worst(got, want) < 1e-3
    assert worst(mine.lse, expected.lse) < 1e-6
    assert (got[BLIND["mine"]] == 0).all()
    if sinks is not None:
        assert torch.equal(mine.lse[:, 1], sinks)


def test_delta() -> None:
    out, grad = partial(0).out, partial(1).out.half()
    for grad_out in (grad, torch.ones(()).expand(TOKENS, HEADS, DIM)):
        got = fused.delta(grad_out, out)
        assert got.shape == (HEADS, TOKENS)
        assert worst(got, QuerySide(grad_out, out.double(), out.double(), torch.zeros(1).double()).delta) < 1e-6


@pytest.mark.parametrize(("shape", "indices"), [((2, 24), torch.int32), ((1100,), torch.int64)])
def test_add_rows_has_the_bits_of_a_loop(shape: tuple[int, ...], indices: torch.dtype) -> None:
    """Rows of four ranks, one after the other, as `index_add_` would add them."""
    g = torch.Generator().manual_seed(0)
    tokens, each = 30, 12
    total = torch.randn(tokens, *shape, generator=g)
    rows = torch.randn(4 * each, *shape, generator=g) * 10.0 ** torch.randint(
        -3, 4, (4 * each, *[1] * len(shape)), generator=g
    )
    peers = [torch.randperm(tokens, generator=g)[:each].sort()[0] for _ in range(4)]
    expected = total.clone()
    for peer, part in zip(peers, rows.split(each), strict=True):
        expected.index_add_(0, peer, part)
    sent = torch.cat(peers)
    by_token = torch.argsort(sent, stable=True)
    offsets = torch.searchsorted(sent[by_token], torch.arange(tokens + 1))
    fused.add_rows(total, rows, by_token.to(indices), offsets.to(indices))
    assert torch.equal(total, expected)
    # Another order gives other bits, so this was a test.
    backwards = torch.argsort(sent.flip(0), stable=True)
    other = torch.zeros_like(total)
    fused.add_rows(other, rows.flip(0), backwards, offsets)
    first = torch.zeros_like(total)
    fused.add_rows(first, rows, by_token, offsets)
    assert not torch.equal(first, other)


def test_nothing_to_do() -> None:
    empty = Partial(torch.zeros(0, HEADS, DIM), torch.zeros(HEADS, 0))
    fused.merge(empty.out, empty.lse, empty.out, empty.lse)
    assert fused.finish(empty.out, empty.lse, None, torch.float16).shape == (0, HEADS, DIM)
    assert fused.delta(empty.out, empty.out).shape == (HEADS, 0)
    total = torch.ones(3, 5)
    fused.add_rows(total, torch.zeros(0, 5), torch.zeros(0, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
    assert (total == 1).all()


def test_who_is_served() -> None:
    assert triton_launch.serves(torch.zeros(1))
    assert triton_launch.serves(torch.zeros(1).half())
    assert not triton_launch.serves(torch.zeros(1).double())
