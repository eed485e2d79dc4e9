"""What programs of the Triton kernels walk over: every pair once, in few steps. Integers only."""

import time

import numpy as np
import pytest

import longweave as lw
from longweave.kernels.attention.partial import TaskRows
from longweave.kernels.attention.span_lists import ListsFor

CU = [0, 37, 38, 38, 41, 100, 107]
MASKS = {
    "causal": lw.Mask.causal(CU),
    "full": lw.Mask.full(CU),
    "window": lw.Mask.sliding_window([0, 80, 107], 9),
    "wide window": lw.Mask.sliding_window([0, 107], 60),
    "prefix": lw.Mask.prefix_causal(CU, [10, 1, 0, 0, 30, 7]),
    "shared": lw.Mask.shared_prefix(40, [20, 1, 30, 16]),
    "slices": lw.Mask.from_slices(
        107, [((0, 50), (10, 60), (-20, 7)), ((60, 107), (0, 107), "causal"), ((3, 9), (90, 107), "full")]
    ),
    "short documents": lw.Mask.causal(list(range(0, 107, 3))),
}


def walk(array: np.ndarray, programs: int, block: int, step: int, total: int) -> tuple[np.ndarray, list[int]]:
    """Walks as the kernels do: how often each pair (own, other) is seen, and the steps of each program."""
    seen, steps = np.zeros((total + block, total + step), dtype=int), []
    for start, full0, full1, edge0, edge1 in array[: 5 * programs].reshape(-1, 5).tolist():
        own = np.arange(start, start + block)
        steps.append(0)
        for at in range(full0, full1, 2):
            first, last = array[at : at + 2].tolist()
            assert (last - first) % step == 0
            seen[start : start + block, first:last] += 1
            steps[-1] += (last - first) // step
        for at in range(edge0, edge1, 4):
            first, last, piece0, piece1 = array[at : at + 4].tolist()
            low, high = np.full(block, 1 << 30), np.full(block, -(1 << 30))
            for piece in range(piece0, piece1, 6):
                own0, own1, other0, other1, lo, hi = array[piece : piece + 6].tolist()
                mine = (own >= own0) & (own < own1)
                assert (low[mine] == 1 << 30).all()  # a row is in one piece only
                low[mine], high[mine] = np.maximum(own + lo, other0)[mine], np.minimum(own + hi, other1 - 1)[mine]
            other = np.arange(first, last)
            seen[start : start + block, first:last] += (other >= low[:, None]) & (other <= high[:, None])
            steps[-1] += -(-(last - first) // step)
    return seen, steps


def lists(rows: TaskRows, keys_own: bool, block: int, step: int) -> tuple[np.ndarray, int]:
    made = ListsFor(keys_own, block, step)(rows)
    return made.array.arrays[0], made.programs


@pytest.mark.parametrize("keys_own", [False, True])
@pytest.mark.parametrize(("block", "step"), [(16, 16), (32, 16), (16, 32), (128, 64)])
@pytest.mark.parametrize("name", MASKS)
def test_every_pair_once(name: str, block: int, step: int, keys_own: bool) -> None:
    mask = MASKS[name]
    seen, steps = walk(*lists(mask.rows, keys_own, block, step), block, step, mask.total)
    dense = mask.dense().T if keys_own else mask.dense()
    assert np.array_equal(seen[: mask.total, : mask.total], dense)
    assert seen.sum() == dense.sum()
    assert steps == sorted(steps, reverse=True)
    assert min(steps) > 0


def test_large_tasks_are_mostly_full() -> None:
    """Of a causal document only the diagonal is compared: two steps of 64 keys for 128 queries."""
    array, programs = lists(lw.Mask.causal([0, 1024]).rows, False, 128, 64)
    for start, full0, full1, edge0, edge1 in array[: 5 * programs].reshape(-1, 5).tolist():
        assert [array[full0:full1].tolist(), array[edge0 : edge0 + 2].tolist()] == [
            [0, start] if start else [],
            [start, start + 128],
        ]
        assert edge1 - edge0 == 4


def test_short_documents_share_steps() -> None:
    """128 documents of 8 tokens: a block of 128 queries takes two steps, not sixteen."""
    array, programs = lists(lw.Mask.causal(list(range(0, 1025, 8))).rows, False, 128, 64)
    assert walk(array, programs, 128, 64, 1024)[1] == [2] * 8


def test_many_tasks_are_fast() -> None:
    lengths = np.random.default_rng(0).integers(1, 20, 100_000)
    rows = lw.Mask.causal(np.append(0, np.cumsum(lengths))).rows
    assert len(rows) == 100_000
    begin = time.process_time()
    for keys_own in (False, True):
        lists(rows, keys_own, 128, 64)
    assert time.process_time() - begin < 1


def test_far_limits_fit() -> None:
    """Windows wider than 2^31, and tokens near the end of what int32 holds."""
    rows = np.array([[(1 << 30) - 200, (1 << 30) - 100, 0, 50, -(1 << 40), 1 << 40]])
    array, programs = lists(rows, False, 128, 64)
    assert programs == 2
    assert array.dtype == np.int32
    pieces = array[-12:].reshape(2, 6)
    assert (pieces[:, 4] <= -(1 << 30)).all()
    assert (pieces[:, 1].astype(np.int64) + pieces[:, 5] < 1 << 31).all()
