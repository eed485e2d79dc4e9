"""Heads instead of tokens: which heads a rank computes when the ranks of a group divide them (Ulysses).

    8 query heads, 2 K/V heads, 3 ranks      rank 0: q 0 1      rank 1: q 2 3 4      rank 2: q 5 6 7
                                                     k 0                k 0   1              k 1

Query heads are divided as evenly as they can be; each rank gets every K/V head that its query heads read, so some K/V
heads lie on several ranks and their gradients are summed. Inside a rank, *runs* are query heads with the same number of
query heads per K/V head: what a kernel with grouped heads takes in one call.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

Pair = tuple[int, int]


@dataclass(frozen=True)
class HeadSplit:
    """For each rank: its query heads, its K/V heads, and its runs (q start, q stop, k start, k stop), all local."""

    q: tuple[Pair, ...]
    k: tuple[Pair, ...]
    runs: tuple[tuple[tuple[int, int, int, int], ...], ...]

    @property
    def replicated(self) -> bool:
        """Does any K/V head lie on more than one rank?"""
        held = [head for start, stop in self.k for head in range(start, stop)]
        return len(held) > len(set(held))


def split_heads(heads: int, kv_heads: int, ranks: int) -> HeadSplit:
    """Divide `heads` query heads, `heads // kv_heads` to a K/V head, over `ranks` ranks."""
    per_kv = heads // kv_heads
    q_spans, k_spans, runs = [], [], []
    for rank in range(ranks):
        start, stop = heads * rank // ranks, heads * (rank + 1) // ranks
        first, last = start // per_kv, -(-stop // per_kv) if stop > start else start // per_kv
        q_spans.append((start, stop))
        k_spans.append((first, last))
        runs.append(_runs(start, stop, first, last, per_kv))
    return HeadSplit(tuple(q_spans), tuple(k_spans), tuple(runs))


def _runs(start: int, stop: int, first: int, last: int, per_kv: int) -> tuple[tuple[int, int, int, int], ...]:
    """Query heads by K/V head, and K/V heads with equally many query heads together."""
    runs: list[tuple[int, int, int, int]] = []
    for kv in range(first, last):
        q0, q1 = max(start, kv * per_kv) - start, min(stop, (kv + 1) * per_kv) - start
        if runs:
            a, b, c, d = runs[-1]
            if (b - a) == (q1 - q0) * (d - c):
                runs[-1] = (a, q1, c, d + 1)
                continue
        runs.append((q0, q1, kv - first, kv - first + 1))
    return tuple(runs)


def head_groups(kv_heads: int, stride: int, first: int | None = None, last: int | None = None) -> tuple[Pair, ...]:
    """K/V heads in steps of `stride`, the first and last step cut so that they begin with `first` or end with `last`.

    >>> head_groups(8, 4, first=1, last=1)
    ((0, 1), (1, 4), (4, 7), (7, 8))

    Less communication then stands alone before the first and after the last computation. A ragged last step is as
    small as it comes; a cut that is as large as its step changes nothing.
    """
    cuts = set(range(0, kv_heads, stride)) | {kv_heads}
    begin = kv_heads - (kv_heads % stride or stride)  # of the last step
    if first is not None and first < min(stride, kv_heads):
        cuts.add(first)
    if last is not None and last < kv_heads - begin:
        cuts.add(kv_heads - last)
    edges = sorted(cuts)
    return tuple(itertools.pairwise(edges))
