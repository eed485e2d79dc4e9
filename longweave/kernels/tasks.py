"""What a kernel is asked to do: tasks, and how a backend turns them into calls once.

A task `(q0, q1, k0, k1, lo, hi)` lets the queries q0 <= q < q1 see the keys k0 <= k < k1 with lo <= k - q <= hi, all in
local coordinates. Tasks are tight (every query of a task sees at least one key of it) and disjoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

NO_LIMIT = 1 << 40

T = TypeVar("T")


class Tasks:
    """An immutable list of tasks that remembers what backends made of it.

    Plans hold their tasks as long as they live, so every layer and step finds the calls already made.
    """

    __slots__ = ("_made", "rows")

    def __init__(self, rows: npt.NDArray[np.int64]) -> None:
        self.rows = np.ascontiguousarray(rows, dtype=np.int64).reshape(-1, 6)
        self._made: dict[object, object] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def compiled(self, compiler: Callable[[npt.NDArray[np.int64]], T]) -> T:
        """`compiler(rows)`, called once."""
        if compiler not in self._made:
            self._made[compiler] = compiler(self.rows)
        return self._made[compiler]  # type: ignore[return-value]


def alone(q0: npt.NDArray[np.int64], q1: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """For each query range: does it share no query with any other range of the list?"""
    order = np.argsort(q0, kind="stable")
    starts, stops = q0[order], q1[order]
    reach = np.maximum.accumulate(stops)
    free = np.ones(len(order), dtype=bool)
    free[1:] &= starts[1:] >= reach[:-1]
    free[:-1] &= reach[:-1] <= starts[1:]
    result = np.empty_like(free)
    result[order] = free
    return result
