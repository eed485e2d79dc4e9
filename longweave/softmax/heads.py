"""Heads for tokens: the all-to-all of Ulysses.

    before: my tokens, all heads                after: the tokens of all inner ranks, my heads

              h0 h1 h2 h3                                h0 h1                h2 h3
    rank 0    ▒▒ ▒▒ ▓▓ ▓▓                      rank 0    ▒▒ ▒▒     rank 1     ▓▓ ▓▓
    rank 1    ░░ ░░ ██ ██                                ░░ ░░                ██ ██

q, k and v go in one message per peer. With `ulysses_size` ranks exchanging heads among themselves, the others of the
group take part with nothing to send; a ring over the blocks of `ulysses_size` ranks does the rest (one block: no ring).
Head counts need not divide: query heads are spread as evenly as they can be, and K/V heads that several ranks read are
sent to each of them; their gradients are summed in float32 on the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from longweave.comm.exchange import all_to_all_v
from longweave.comm.groups import Comm
from longweave.plan.heads import HeadSplit


@dataclass(frozen=True)
class HeadExchange:
    """The exchange among `inner` ranks of a group, seen from one of them. Tensors are head-first."""

    comm: Comm
    inner: tuple[int, ...]  # group ranks
    index: int  # mine among them
    counts: tuple[int, ...]  # tokens of each
    split: HeadSplit
    order: Tensor  # the block's tokens: from inner rank after inner rank to token order
    back: Tensor  # and back

    def to_heads(self, tensors: Sequence[Tensor], spans: Sequence[Sequence[tuple[int, int]]]) -> list[Tensor]:
        """(heads, my tokens, dim) -> (my heads, block tokens, dim) for each tensor; spans[i][rank] are its heads."""
        outgoing = [
            torch.cat([x[a:b].reshape(-1) for x, (a, b) in zip(tensors, mine, strict=True)])
            for mine in zip(*spans, strict=True)
        ]
        widths = [self._heads(own) * x.shape[-1] for x, own in zip(tensors, spans, strict=True)]
        arrived = self._exchange(outgoing, [tokens * sum(widths) for tokens in self.counts])
        pieces: list[list[Tensor]] = [[] for _ in tensors]
        for part, tokens in zip(arrived, self.counts, strict=True):
            for i, flat in enumerate(torch.split(part, [tokens * width for width in widths])):
                pieces[i].append(flat.view(self._heads(spans[i]), tokens, tensors[i].shape[-1]))
        return [torch.cat(parts, 1).index_select(1, self.order) for parts in pieces]

    def to_tokens(
        self, tensors: Sequence[Tensor], spans: Sequence[Sequence[tuple[int, int]]], dtype: torch.dtype
    ) -> list[list[Tensor]]:
        """(my heads, block tokens, dim) -> for each tensor and inner rank its (heads, my tokens, dim).

        Travels as `dtype`.
        """
        by_rank = [torch.split(x.to(dtype).index_select(1, self.back), list(self.counts), 1) for x in tensors]
        outgoing = [torch.cat([parts[peer].reshape(-1) for parts in by_rank]) for peer in range(len(self.inner))]
        shapes = [
            [
                (own[peer][1] - own[peer][0], self.counts[self.index], x.shape[-1])
                for x, own in zip(tensors, spans, strict=True)
            ]
            for peer in range(len(self.inner))
        ]
        sizes = [[prod(shape) for shape in of_peer] for of_peer in shapes]
        arrived = self._exchange(outgoing, [sum(size) for size in sizes])
        results: list[list[Tensor]] = [[] for _ in tensors]
        for part, size, of_peer in zip(arrived, sizes, shapes, strict=True):
            for i, flat in enumerate(torch.split(part, size)):
                results[i].append(flat.view(of_peer[i]))
        return results

    def _heads(self, spans: Sequence[tuple[int, int]]) -> int:
        start, stop = spans[self.index]
        return stop - start

    def _exchange(self, outgoing: list[Tensor], incoming: list[int]) -> tuple[Tensor, ...]:
        """One flat message to and from every inner rank."""
        if len(self.inner) == 1:
            return tuple(outgoing)
        send, recv = [0] * self.comm.size, [0] * self.comm.size
        for peer, x, size in zip(self.inner, outgoing, incoming, strict=True):
            send[peer], recv[peer] = x.numel(), size
        arrived = all_to_all_v(torch.cat(outgoing), send, recv, self.comm).wait()
        return torch.split(arrived, incoming)


def sum_heads(parts: Sequence[Tensor], spans: Sequence[tuple[int, int]], like: Tensor) -> Tensor:
    """Put the heads of all inner ranks together; heads that several ranks had are added in the dtype of `like`."""
    total = torch.zeros_like(like)
    for part, (start, stop) in zip(parts, spans, strict=True):
        total[start:stop] += part
    return total
