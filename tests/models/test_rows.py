"""Rows read as documents: padding, packs, borders, planes of positions; what is refused, and with which words."""

import pytest
import torch
from torch import Tensor

import longweave as lw
from longweave.models.packing import kept_tokens
from longweave.models.rows import HomeRows, read_rows

LEFT = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]])
RIGHT = LEFT.flip(1)
PACKED = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
IMAGE = torch.tensor([[[0, 1, 1, 1, 3]], [[0, 1, 1, 2, 3]], [[0, 1, 2, 1, 3]]])  # a token, an image of three, a token


def read(shape: tuple[int, ...], **given: object) -> HomeRows:
    return read_rows(torch.Size(shape), torch.device("cpu"), given)


# Rows, arguments, lengths of the documents, their tokens' places (None: every place), positions of the first plane.
TABLE: dict[str, tuple[tuple[int, int], dict, list[int], list[int] | None, list[int]]] = {
    "nothing but rows": ((2, 3), {}, [3, 3], None, [0, 1, 2, 0, 1, 2]),
    "a mask of ones": ((2, 2), {"attention_mask": torch.ones(2, 2)}, [2, 2], None, [0, 1, 0, 1]),
    "left": ((3, 4), {"attention_mask": LEFT}, [2, 4, 1], [2, 3, 4, 5, 6, 7, 11], [2, 3, 0, 1, 2, 3, 3]),
    "right": ((3, 4), {"attention_mask": RIGHT}, [2, 4, 1], [0, 1, 4, 5, 6, 7, 8], [0, 1, 0, 1, 2, 3, 0]),
    "bools": ((3, 4), {"attention_mask": RIGHT.bool()}, [2, 4, 1], [0, 1, 4, 5, 6, 7, 8], [0, 1, 0, 1, 2, 3, 0]),
    "left, with positions": (
        (2, 4),
        {"attention_mask": LEFT[:2], "position_ids": torch.tensor([[1, 1, 0, 1], [0, 1, 2, 3]])},
        [2, 4],
        [2, 3, 4, 5, 6, 7],
        [0, 1, 0, 1, 2, 3],
    ),
    "both sides": ((1, 4), {"attention_mask": torch.tensor([[0, 1, 1, 0]])}, [2], [1, 2], [1, 2]),
    "mask without rows": ((1, 4), {"attention_mask": torch.tensor([1, 1, 1, 0])}, [3], [0, 1, 2], [0, 1, 2]),
    "packed": ((1, 6), {"position_ids": PACKED[:1]}, [3, 2, 1], None, [0, 1, 2, 0, 1, 0]),
    "packed rows": ((2, 6), {"position_ids": PACKED}, [3, 2, 1, 1, 5], None, PACKED.flatten().tolist()),
    "rows that go on": ((2, 2), {"position_ids": torch.tensor([[0, 1], [2, 3]])}, [2, 2], None, [0, 1, 2, 3]),
    "not from zero": ((1, 4), {"position_ids": torch.tensor([[7, 8, 3, 4]])}, [2, 2], None, [7, 8, 3, 4]),
    "padded pack": (
        (2, 4),
        {"position_ids": torch.tensor([[0, 1, 0, 9], [0, 0, 9, 9]]), "attention_mask": RIGHT[[1, 0]] * RIGHT[0]},
        [2, 1, 1],
        [0, 1, 4, 5],
        [0, 1, 0, 0],
    ),
    "borders": ((1, 6), {"cu_seq_lens_q": torch.tensor([0, 3, 5, 6])}, [3, 2, 1], None, [0, 1, 2, 3, 4, 5]),
    "borders, int32": ((1, 3), {"cu_seq_lens_q": torch.tensor([0, 1, 3]).int()}, [1, 2], None, [0, 1, 2]),
    "borders, a list": ((1, 3), {"cu_seq_lens_q": [0, 1, 3]}, [1, 2], None, [0, 1, 2]),
    "borders of empty documents": (
        (1, 4),
        {"cu_seq_lens_q": torch.tensor([0, 0, 3, 3, 4, 4]).int()},
        [3, 1],
        None,
        [0, 1, 2, 3],
    ),
    "borders with positions": (
        (1, 4),
        {"cu_seq_lens_q": [0, 4], "position_ids": torch.tensor([[0, 1, 0, 1]])},
        [4],
        None,
        [0, 1, 0, 1],
    ),
    "borders of rows": ((2, 3), {"cu_seq_lens_q": [0, 2, 3, 6]}, [2, 1, 3], None, [0, 1, 2, 0, 1, 2]),
    "borders of nothing": ((1, 0), {"cu_seq_lens_q": torch.tensor([0, 0])}, [], None, []),
    "numbers": ((1, 5), {"seq_idx": torch.tensor([[0, 0, 1, 1, 2]]).int()}, [2, 2, 1], None, [0, 1, 2, 3, 4]),
    "numbers without rows": ((1, 3), {"seq_idx": torch.tensor([4, 4, 1])}, [2, 1], None, [0, 1, 2]),
    "numbers of rows": (
        (2, 3),
        {"seq_idx": torch.tensor([[0, 0, 1], [1, 1, 1]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])},
        [1, 1, 3],
        [1, 2, 3, 4, 5],
        [1, 2, 0, 1, 2],
    ),
    "positions for all rows": ((3, 2), {"position_ids": torch.tensor([[5, 6]])}, [2, 2, 2], None, [5, 6] * 3),
    "a pack for all rows": ((2, 3), {"position_ids": torch.tensor([[0, 1, 0]])}, [2, 1] * 2, None, [0, 1, 0] * 2),
    "three planes": ((1, 5), {"position_ids": IMAGE}, [5], None, [0, 1, 1, 1, 3]),
    "four planes": (
        (1, 5),
        {"position_ids": torch.cat([torch.tensor([[[0, 1, 2, 0, 1]]]), IMAGE])},
        [3, 2],
        None,
        [0, 1, 2, 0, 1],
    ),
    "no places": ((1, 0), {}, [], None, []),
    "no places, with everything": (
        (1, 0),
        {"attention_mask": torch.ones(1, 0), "position_ids": torch.zeros(1, 0)},
        [],
        None,
        [],
    ),
    "no rows": ((0, 5), {}, [], None, []),
    "no rows, with a mask": ((0, 5), {"attention_mask": torch.ones(0, 5)}, [], None, []),
    "no rows, with positions": ((0, 5), {"position_ids": torch.arange(5)[None]}, [], None, []),
    "padding only": ((2, 3), {"attention_mask": torch.zeros(2, 3)}, [], [], []),
    "a row of padding": (
        (2, 2),
        {"attention_mask": torch.tensor([[0, 0], [1, 1]]), "position_ids": torch.tensor([[1, 1], [0, 1]])},
        [2],
        [2, 3],
        [0, 1],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_rows_are_read_as_documents(name: str) -> None:
    shape, given, lengths, places, positions = TABLE[name]
    rows = read(shape, **given)
    assert (rows.batch, rows.seq) == shape
    assert rows.lengths.tolist() == lengths
    assert len(rows.positions) == sum(lengths) == len(positions)
    assert (None if rows.places is None else rows.places.tolist()) == places
    assert rows.positions[:, 0].tolist() == positions
    assert rows.positions.dtype == torch.long


def test_every_plane_of_positions_is_kept() -> None:
    planes = torch.stack([torch.arange(8).view(2, 4) + 10 * i for i in range(3)])
    rows = read((2, 4), position_ids=planes, attention_mask=LEFT[:2])
    assert rows.planes == (3,)
    assert torch.equal(rows.positions, planes.flatten(1).T[[2, 3, 4, 5, 6, 7]])
    broadcast = read((2, 4), position_ids=planes[:, :1])
    assert torch.equal(broadcast.positions, planes[:, 0].repeat(1, 2).T)
    assert read((2, 4)).planes == read((2, 4), position_ids=planes[0]).planes == ()


@pytest.mark.parametrize("mask", [None, LEFT, RIGHT, torch.zeros(3, 4)], ids=["whole", "left", "right", "padding"])
def test_take_and_put_are_inverse(mask: Tensor | None) -> None:
    rows = read((3, 4), attention_mask=mask)
    keep = torch.ones(3, 4, dtype=torch.bool) if mask is None else mask.bool()
    for trailing in ((), (5,), (2, 3)):
        x = torch.randn(3, 4, *trailing, dtype=torch.float64)
        taken = rows.take(x)
        assert torch.equal(taken, x[keep])
        assert torch.equal(rows.put(taken), x * keep.view(3, 4, *[1] * len(trailing)))
        assert torch.equal(rows.take(rows.put(taken)), taken)


def test_take_and_put_carry_gradients() -> None:
    for mask in (None, LEFT):
        rows = read((3, 4), attention_mask=mask)
        x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
        y = torch.randn(len(rows.positions), 2, dtype=torch.float64, requires_grad=True)
        up, upstream = (
            torch.randn(3, 4, 2, dtype=torch.float64),
            torch.randn(len(rows.positions), 2, dtype=torch.float64),
        )
        (to_x,) = torch.autograd.grad(rows.take(x), x, upstream)
        (to_y,) = torch.autograd.grad(rows.put(y), y, up)
        assert torch.equal(to_x, rows.put(upstream)), "zeros at padding"
        assert torch.equal(to_y, rows.take(up))


def test_empty_rows_are_taken_and_put() -> None:
    for shape in ((1, 0), (0, 5)):
        x = torch.zeros(*shape, 3, requires_grad=True)
        rows = read(shape)
        assert rows.take(x).shape == (0, 3)
        assert rows.put(rows.take(x)).shape == x.shape
        rows.put(rows.take(x)).sum().backward()


# -- refusals ----------------------------------------------------------------------------------------

HOLE = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]])
ADDED = torch.tensor([[0.0, 0.0, -1e9, -1e9], [0.0, 0.0, 0.0, 0.0]])
NUMBERED = torch.tensor([[1, 1, 2, 2], [1, 1, 1, 1]])

REFUSED = {
    "one row too few": ((4,), {}, r"the tokens have the shape \(4,\); give rows"),
    "too many dimensions": ((2, 4, 3), {}, r"the tokens have the shape \(2, 4, 3\); give rows"),
    "hole": ((2, 4), {"attention_mask": HOLE}, "row 1 of attention_mask has padding between its tokens; pad left or"),
    "4-D": (
        (2, 4),
        {"attention_mask": torch.ones(2, 1, 4, 4)},
        r"attention_mask has the shape \(2, 1, 4, 4\) for tokens of \(2, 4\); give one of the same shape",
    ),
    "document numbers": (
        (2, 4),
        {"attention_mask": NUMBERED},
        r"attention_mask holds 2, which is neither 1 \(a token\) nor 0 .*cu_seqlens or position_ids",
    ),
    "additive": ((2, 4), {"attention_mask": ADDED}, r"attention_mask holds -1e\+09, which is neither"),
    "infinite": (
        (2, 4),
        {"attention_mask": ADDED.masked_fill(ADDED < 0, -torch.inf)},
        "attention_mask holds -inf, which is neither",
    ),
    "dict": ((2, 4), {"attention_mask": {"full_attention": HOLE}}, r"attention_mask is a dict of masks for tokens of"),
    "text": ((2, 4), {"attention_mask": "causal"}, "attention_mask is"),
    "mask of a longer row": ((2, 4), {"attention_mask": torch.ones(2, 5)}, r"attention_mask has the shape \(2, 5\)"),
    "mask of one row": ((2, 4), {"attention_mask": torch.ones(4)}, r"attention_mask has the shape \(4,\) for tokens"),
    "positions of other rows": (
        (2, 4),
        {"position_ids": torch.zeros(3, 4)},
        r"position_ids is \(3, 4\) for tokens of \(2, 4\); give one entry per token",
    ),
    "positions of a longer row": ((2, 4), {"position_ids": torch.zeros(2, 5)}, r"position_ids is \(2, 5\)"),
    "positions without rows": ((1, 4), {"position_ids": torch.zeros(4)}, r"position_ids is \(4,\)"),
    "a list of positions": ((1, 4), {"position_ids": [[0, 1, 2, 3]]}, "position_ids is list"),
    "borders that end early": (
        (1, 4),
        {"cu_seq_lens_q": [0, 3]},
        "cu_seq_lens_q ends at 3, but the batch has 4 tokens; give the borders of packed tokens",
    ),
    "borders that end late": ((1, 4), {"cu_seq_lens_q": [0, 3, 5]}, "cu_seq_lens_q ends at 5, but the batch has 4"),
    "borders beside padding": (
        (1, 4),
        {"cu_seq_lens_q": [0, 3], "attention_mask": torch.tensor([[1, 1, 1, 0]])},
        "cu_seq_lens_q ends at 3, but the batch has 3 tokens, and padding beside them; give",
    ),
    "borders that fall": ((1, 4), {"cu_seq_lens_q": [0, 3, 2, 4]}, "falls from 3 to 2"),
    "borders that begin late": ((1, 4), {"cu_seq_lens_q": [1, 4]}, "starts at 1"),
    "borders that are floats": ((1, 4), {"cu_seq_lens_q": torch.tensor([0.0, 4.0])}, "holds float32, not ints"),
    "numbers of other tokens": ((1, 4), {"seq_idx": torch.zeros(1, 5)}, r"seq_idx is \(1, 5\) for tokens of \(1, 4\)"),
    "numbers, transposed": ((2, 4), {"seq_idx": torch.zeros(4, 2)}, r"seq_idx is \(4, 2\) for tokens of \(2, 4\)"),
    "numbers of one row": ((2, 4), {"seq_idx": torch.zeros(1, 4)}, r"seq_idx is \(1, 4\) for tokens of \(2, 4\)"),
    "a list of numbers": ((1, 4), {"seq_idx": [0, 0, 1, 1]}, "seq_idx is list for tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    shape, given, message = REFUSED[name]
    with pytest.raises(lw.InputError, match=message):
        read(shape, **given)


@pytest.mark.parametrize("mask", [NUMBERED, ADDED, HOLE], ids=["numbers", "additive", "hole"])
def test_shard_batch_refuses_the_same_masks(mask: Tensor) -> None:
    """Document numbers and additive masks once passed for tokens and padding."""
    with pytest.raises(lw.InputError, match=r"neither 1 .* nor 0|padding between"):
        lw.shard_batch(torch.zeros_like(mask, dtype=torch.long), attention_mask=mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float64])
def test_masks_of_any_dtype(dtype: torch.dtype) -> None:
    assert kept_tokens(LEFT.to(dtype), 3, 4).tolist() == LEFT.bool().tolist()
    assert kept_tokens(LEFT.tolist(), 3, 4).tolist() == LEFT.bool().tolist()
