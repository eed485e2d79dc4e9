"""What a plan does, in numbers: per rank and in total, as an object and as text."""

from __future__ import annotations

from dataclasses import dataclass

from longweave.plan.cost import areas, traffic
from longweave.plan.heads import split_heads
from longweave.plan.schedule import Plan
from longweave.plan.work import work_by_source, work_on_all


@dataclass(frozen=True)
class RankReport:
    """One rank's share of one attention layer, forward. Received and sent are tokens of K/V (all K/V heads)."""

    rank: int
    tokens: int
    area: int
    tokens_received: int
    tokens_sent: int
    bytes_received: int
    bytes_sent: int


@dataclass(frozen=True)
class Report:
    """See `Plan.report`. Bytes are for the shape that the plan was made for."""

    strategy: str
    why: str
    total_tokens: int
    total_area: int
    ranks: tuple[RankReport, ...]

    @property
    def imbalance(self) -> float:
        """Largest mask area of a rank over the mean; 1.0 is perfect. 1.0 if there is no work."""
        mean = self.total_area / len(self.ranks)
        return max(rank.area for rank in self.ranks) / mean if mean else 1.0

    def __str__(self) -> str:
        lines = [
            f"strategy {self.strategy} ({self.why})",
            f"{self.total_tokens} tokens, {self.total_area} pairs, imbalance {self.imbalance:.3f}",
            "rank    tokens            area    received        sent  MB received",
        ]
        lines += [
            f"{r.rank:4d}{r.tokens:10d}{r.area:16d}{r.tokens_received:12d}{r.tokens_sent:12d}"
            f"{r.bytes_received / 1e6:13.2f}"
            for r in self.ranks
        ]
        return "\n".join(lines)


def make_report(plan: Plan) -> Report:
    work = rank_areas(plan)
    shape = plan.decision.shape
    rows = []
    for rank, tokens in enumerate(plan.layout.counts):
        received, sent = kv_tokens(plan, rank)
        bytes_received, bytes_sent = received * shape.kv_bytes, sent * shape.kv_bytes
        if plan.ulysses_size > 1:
            extra_in, extra_out = _head_exchange_bytes(plan, rank)
            bytes_received, bytes_sent = bytes_received + extra_in, bytes_sent + extra_out
        rows.append(RankReport(rank, tokens, work[rank], received, sent, bytes_received, bytes_sent))
    return Report(plan.strategy, plan.why, plan.layout.total, sum(work), tuple(rows))


def rank_areas(plan: Plan) -> list[int]:
    """Allowed pairs that each rank computes, in units of all heads."""
    own: list[int] = areas(plan.mask, plan.layout).tolist()
    size = plan.ulysses_size
    if size == 1:
        return own
    # A block of ranks computes the pairs of all its tokens, each rank for its share of the heads.
    shape = plan.decision.shape
    q_heads = split_heads(shape.heads, shape.kv_heads, size).q
    shares = [(stop - start) / shape.heads for start, stop in q_heads]
    blocks = [sum(own[first : first + size]) for first in range(0, plan.world_size, size)]
    return [round(blocks[rank // size] * shares[rank % size]) for rank in range(plan.world_size)]


def kv_tokens(plan: Plan, rank: int) -> tuple[int, int]:
    """K/V tokens (of all K/V heads) that a rank receives and sends on the way to other ranks' queries."""
    if plan.strategy == "groupcast":
        sent, received = traffic(plan.mask, plan.layout)
        return int(received[rank]), int(sent[rank])
    counts = plan.layout.counts
    total, ranks = plan.layout.total, plan.world_size
    if plan.ulysses_size > 1:
        size = plan.ulysses_size
        blocks = [sum(counts[first : first + size]) for first in range(0, ranks, size)]
        block = rank // size
        # Passed on in the ring of blocks: all but the own arrive, all but the next one's leave; 1/size of the heads.
        return (total - blocks[block]) // size, (total - blocks[(block + 1) % len(blocks)]) // size
    if plan.strategy == "ring":
        return total - counts[rank], total - counts[(rank + 1) % ranks]
    return total - counts[rank], counts[rank] * (ranks - 1)


def _head_exchange_bytes(plan: Plan, rank: int) -> tuple[int, int]:
    """Bytes of q, k, v one way and of the output the other way, between the ranks that exchange heads."""
    shape, size = plan.decision.shape, plan.ulysses_size
    split = split_heads(shape.heads, shape.kv_heads, size)
    first, me = rank - rank % size, rank % size
    received = sent = 0
    for peer in range(size):
        if peer == me:
            continue
        to_peer, to_me = (_bytes_per_token(split.q[i], split.k[i], plan) for i in (peer, me))
        mine, theirs = plan.layout.counts[rank], plan.layout.counts[first + peer]
        out_mine, out_theirs = ((split.q[i][1] - split.q[i][0]) * shape.value_dim * shape.itemsize for i in (me, peer))
        sent += mine * to_peer + theirs * out_mine
        received += theirs * to_me + mine * out_theirs
    return received, sent


def _bytes_per_token(q: tuple[int, int], k: tuple[int, int], plan: Plan) -> int:
    shape = plan.decision.shape
    values = (q[1] - q[0]) * shape.head_dim + (k[1] - k[0]) * (shape.head_dim + shape.value_dim)
    return values * shape.itemsize


def task_count(plan: Plan, rank: int) -> int:
    """The number of tasks (before a backend splits them) of a rank that computes its own queries."""
    table = plan.layout.table
    if plan.strategy == "allgather":
        return len(work_on_all(plan.mask, table, rank))
    return sum(len(rows) for rows in work_by_source(plan.mask, table, rank))
