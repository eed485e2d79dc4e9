"""Task rows → pieces → waves → the pairs that each version of FlashAttention sees: exactly those of the tasks."""

import numpy as np
import pytest
from flash_rules import RULES, Call
from test_attention import MASKS, layout_of

import longweave as lw
from longweave.kernels.attention.partial import NO_LIMIT
from longweave.kernels.attention.waves import TASKS_PER_WAVE, Wave, compile_waves
from longweave.plan import slices
from longweave.plan.tasks import GroupCast, tasks_by_source, tasks_on_all


def pairs(rows: np.ndarray, queries: int, keys: int) -> np.ndarray:
    """(queries, keys): how many tasks allow the pair."""
    q0, q1, k0, k1, lo, hi = rows.T
    row = np.repeat(np.arange(len(rows)), q1 - q0)
    q = np.arange(len(row)) - np.repeat(np.cumsum(q1 - q0) - q1, q1 - q0)
    start = np.maximum(k0[row], q + lo[row])
    return covered(q, start, np.maximum(start, np.minimum(k1[row], q + hi[row] + 1)), queries, keys)


def covered(q: np.ndarray, start: np.ndarray, stop: np.ndarray, queries: int, keys: int) -> np.ndarray:
    cells = queries * (keys + 1)
    change = np.bincount(q * (keys + 1) + start, minlength=cells) - np.bincount(q * (keys + 1) + stop, minlength=cells)
    return change.reshape(queries, keys + 1).cumsum(1)[:, :-1]


def allowed(waves: tuple[Wave, ...], queries: int, keys: int, rules: str) -> np.ndarray:
    """(queries, keys): in how many calls the kernel sees the pair."""
    q, start, stop = [], [], []
    for wave in waves:
        call = Call(rules, *wave.borders.arrays, wave.max_q, wave.max_k, *wave.window)
        call.check(wave.q[1] - wave.q[0], wave.k[1] - wave.k[0])
        first, last = call.rows()
        assert wave.area == (last - first).sum()
        assert not wave.first or (last > first).all()
        q.append(np.arange(*wave.q))
        start.append(first + wave.k[0])
        stop.append(last + wave.k[0])
    return covered(*(np.concatenate([[], *x]).astype(np.int64) for x in (q, start, stop)), queries, keys)


def random_tasks(random: np.random.Generator) -> tuple[np.ndarray, int, int]:
    """A grid of cells, most of them near the diagonal, each with limits of its own; one width where both limit."""
    count, longest = random.integers(2, 60), random.choice([3, 6, 25])
    q_cuts, k_cuts = (np.concatenate([[0], np.cumsum(random.integers(0, longest, size=count))]) for _ in "qk")
    q, k = (x.reshape(-1) for x in np.meshgrid(np.arange(count), np.arange(count)))
    full = (q_cuts[q] < q_cuts[q + 1]) & (k_cuts[k] < k_cuts[k + 1])
    full &= random.random(len(q)) < np.where(abs(q - k) < 2, 0.8, 0.02)
    q0, q1, k0, k1 = q_cuts[q], q_cuts[q + 1], k_cuts[k], k_cuts[k + 1]
    hi = (k0 + k1 - q0 - q1) // 2 + random.integers(-longest, longest, size=len(q))
    lo = hi - random.integers(0, 2 * longest)
    kind = random.integers(0, 4, size=len(q))  # none, upper, lower, both
    lo, hi = np.where(kind < 2, -NO_LIMIT, lo), np.where(kind % 2 == 0, NO_LIMIT, hi)
    return slices.tighten(np.stack([q0, q1, k0, k1, lo, hi], axis=1)[full])[0], int(q_cuts[-1]), int(k_cuts[-1])


def test_random_tasks() -> None:
    random, count = np.random.default_rng(0), 0
    while count < 100_000:
        rows, queries, keys = random_tasks(random)
        count += len(rows)
        expected = pairs(rows, queries, keys)
        assert expected.max(initial=0) <= 1
        waves = compile_waves(rows)
        for rules in ("FA2", "FA3"):
            assert np.array_equal(allowed(waves, queries, keys, rules), expected), (rules, rows.tolist())


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "odd"])
def test_tasks_of_plans(layout: str) -> None:
    wide = {"wide window": lw.Mask.sliding_window([0, 90, 91, 107], 33)}
    for name, mask in (MASKS | wide).items():
        spans = layout_of(layout, mask, 4)
        cast = GroupCast(mask, spans, 2)
        for rank in range(4):
            mine = cast.of(rank)
            lists = [*tasks_by_source(mask, spans, rank), tasks_on_all(mask, spans, rank), mine.own]
            lists += [stage.tasks for stage in mine.stages]
            for rows in lists:
                expected = pairs(rows, mask.total, mask.total)
                waves = compile_waves(rows)
                for rules in RULES:
                    assert np.array_equal(allowed(waves, mask.total, mask.total, rules), expected), (name, rank, rules)


def test_one_call_for_packed_documents() -> None:
    """10^5 documents, of one token too, shorter and longer than the window; only what backward pads parts them."""
    cu = np.concatenate([[0], np.cumsum(np.random.default_rng(0).integers(1, 40, size=100_000))])
    for mask in (lw.Mask.causal(cu), lw.Mask.full(cu), lw.Mask.sliding_window(cu, 16)):
        waves = compile_waves(mask.rows)
        assert len(waves) == -(-100_000 // TASKS_PER_WAVE)
        assert all(wave.first for wave in waves)
        assert sum(wave.area for wave in waves) == slices.area(mask.rows).sum()


def test_gaps_are_cut() -> None:
    """No gap is longer than the longest task, or than a thousand tokens: it would set the size of every segment."""
    rows = np.array([[0, 10, 0, 10, -NO_LIMIT, 0], [9000, 9010, 70_000, 70_010, -NO_LIMIT, 61_000]])
    (wave,) = compile_waves(rows)
    assert wave.max_q <= 1024
    assert wave.max_k <= 1024
    assert (wave.q, wave.k) == ((0, 9010), (0, 70_010))
