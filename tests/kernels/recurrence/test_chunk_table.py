"""The chunk table: integers only, so checked against what it says in its own words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longweave.errors import InputError
from longweave.kernels.recurrence.chunks import chunk_table, spans_of


def test_the_picture_in_the_docstring() -> None:
    table = chunk_table([(0, 5), (5, 7), (7, 14)], chunk=4)
    assert table.alive == (3, 2)
    assert table.order.tolist() == [2, 0, 1]
    (block,) = table.blocks(100)
    assert block.tokens.tolist() == [
        [7, 8, 9, 10],
        [0, 1, 2, 3],
        [5, 6, -1, -1],
        [11, 12, 13, -1],
        [4, -1, -1, -1],
    ]


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(0, 4), st.integers(1, 9))
def test_each_token_has_one_slot_and_state_rows_follow_their_segment(lengths: list[int], log2: int, size: int) -> None:
    cu = np.cumsum([0, *lengths]).tolist()
    table = chunk_table(spans_of(cu, cu[-1]), 2**log2)
    blocks = table.blocks(size)
    slots = np.concatenate([block.tokens.reshape(-1) for block in blocks]) if blocks else np.zeros(0)
    assert sorted(slots[slots >= 0].tolist()) == list(range(cu[-1]))
    seen = [0] * len(lengths)
    for block in blocks:
        assert block.n <= max(size, 1)
        for piece in block.pieces:
            for chunk, row in zip(range(piece.lo, piece.hi), range(piece.row_lo, piece.row_hi), strict=True):
                segment = int(table.order[row])
                assert piece.first == (seen[segment] == 0)
                assert block.tokens[chunk, 0] == cu[segment] + seen[segment]
                seen[segment] += int((block.tokens[chunk] >= 0).sum())
                assert (row < piece.row_next) == (seen[segment] < lengths[segment])
    assert seen == lengths


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 9))
def test_gather_then_scatter_is_the_identity(lengths: list[int], size: int) -> None:
    cu = np.cumsum([0, *lengths]).tolist()
    x = torch.randn(cu[-1], 2, 3)
    out = torch.full_like(x, torch.nan)
    for block in chunk_table(spans_of(cu, cu[-1]), 8).blocks(size):
        chunks = block.gather(x, torch.float64)
        assert chunks.shape == (block.n, 2, 8, 3)
        assert not chunks.transpose(1, 2)[torch.from_numpy(block.tokens < 0)].any()
        block.scatter(chunks, out)
    assert torch.equal(out, x)


def test_steps_do_not_grow_with_the_number_of_documents() -> None:
    assert len(chunk_table([(0, 65536)], 64).alive) == 1024
    assert chunk_table([(50 * i, 50 * i + 50) for i in range(500)], 64).alive == (500,)


def test_the_size_of_chunks_follows_the_lengths() -> None:
    assert chunk_table([(0, 65536)]).chunk == 32
    assert chunk_table([(0, 65536)], device="cuda").chunk == 64
    assert chunk_table([(60 * i, 60 * i + 60) for i in range(50)], device="cuda").chunk == 64
    assert chunk_table([(30 * i, 30 * i + 30) for i in range(50)], device="cuda").chunk == 32
    assert chunk_table([(9 * i, 9 * i + 9) for i in range(50)]).chunk == 16


def test_spans_come_in_many_forms_and_bad_ones_are_refused() -> None:
    assert chunk_table(np.array([[0, 5], [5, 9]])).spans == chunk_table([[0, 5], [5, 9]]).spans == ((0, 5), (5, 9))
    assert spans_of(torch.tensor([0, 2, 2, 5]), 5) == spans_of(np.array([0, 2, 2, 5]), 5) == ((0, 2), (2, 2), (2, 5))
    with pytest.raises(InputError, match="overlaps"):
        chunk_table([(0, 5), (4, 9)])
    with pytest.raises(InputError, match="backwards"):
        chunk_table([(5, 3)])
    with pytest.raises(InputError, match=r"cu_seqlens is \(0, 4\)"):
        spans_of([0, 4], 5)
