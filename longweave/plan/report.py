"""What a plan does, in numbers: per rank and in total, as an object and as text."""

from __future__ import annotations

from dataclasses import dataclass

from longweave.plan.cast import cast
from longweave.plan.cost import areas, load_bound, receive_bound, traffic
from longweave.plan.heads import split_heads
from longweave.plan.layout import SpanTable, join_ranks
from longweave.plan.schedule import Plan
from longweave.plan.work import work_by_source, work_on_all


@dataclass(frozen=True)
class RankReport:
    """One rank's share of one attention layer, forward.

    Received and sent are tokens of K/V (all K/V heads); tasks are pieces of the mask, each one kernel call or a few.
    """

    rank: int
    tokens: int
    area: int
    tokens_received: int
    tokens_sent: int
    bytes_received: int
    bytes_sent: int
    kernel_tasks: int


@dataclass(frozen=True)
class Report:
    """See `Plan.report`. Bytes are for the shape that the plan was made for; `print` gives a table."""

    strategy: str
    why: str
    total_tokens: int
    total_area: int
    ranks: tuple[RankReport, ...]
    load_bound: int  # pairs that some rank must compute in any layout
    receive_bound: int  # tokens that some rank must receive in any layout (causal masks)
    bytes_if_gathered: int  # received by all ranks together if K/V were all-gathered or sent round a ring

    @property
    def imbalance(self) -> float:
        """Largest mask area of a rank over the mean; 1.0 is perfect. 1.0 if there is no work."""
        mean = self.total_area / len(self.ranks)
        return max(rank.area for rank in self.ranks) / mean if mean else 1.0

    @property
    def bytes_received(self) -> int:
        return sum(rank.bytes_received for rank in self.ranks)

    def __str__(self) -> str:
        busiest = max(rank.area for rank in self.ranks)
        most = max(rank.tokens_received for rank in self.ranks)
        share = f"{100 * self.bytes_received / self.bytes_if_gathered:.1f} %" if self.bytes_if_gathered else "all"
        lines = [
            f"strategy {self.strategy} ({self.why})",
            f"{self.total_tokens} tokens, {self.total_area} pairs, imbalance {self.imbalance:.3f}",
            f"busiest rank {busiest} pairs, bound {self.load_bound}; "
            f"most received {most} tokens, bound {self.receive_bound}",
            f"{self.bytes_received / 1e6:.2f} MB received, {share} of gathering or a ring",
            "rank    tokens            area    received        sent  MB received  tasks",
        ]
        lines += [
            f"{r.rank:4d}{r.tokens:10d}{r.area:16d}{r.tokens_received:12d}{r.tokens_sent:12d}"
            f"{r.bytes_received / 1e6:13.2f}{r.kernel_tasks:7d}"
            for r in self.ranks
        ]
        return "\n".join(lines)


def make_report(plan: Plan) -> Report:
    work = _areas(plan)
    tokens = _kv_tokens(plan)
    shape = plan.decision.shape
    rows = []
    for rank, (received, sent) in enumerate(tokens):
        extra_in, extra_out = _head_exchange_bytes(plan, rank) if plan.ulysses_size > 1 else (0, 0)
        rows.append(
            RankReport(
                rank,
                plan.layout.counts[rank],
                work[rank],
                received,
                sent,
                received * shape.kv_bytes + extra_in,
                sent * shape.kv_bytes + extra_out,
                _tasks(plan, rank),
            )
        )
    gathered = plan.layout.total * (plan.world_size - 1) * shape.kv_bytes
    return Report(
        plan.strategy,
        plan.why,
        plan.layout.total,
        plan.mask.area,
        tuple(rows),
        load_bound(plan.mask, plan.world_size),
        receive_bound(plan.mask, plan.world_size, max(plan.layout.counts) or None)[0],
        gathered,
    )


def _areas(plan: Plan) -> list[int]:
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


def _kv_tokens(plan: Plan) -> list[tuple[int, int]]:
    """(received, sent) K/V tokens of each rank, of all K/V heads, on the way to other ranks' queries."""
    counts, total, ranks = plan.layout.counts, plan.layout.total, plan.world_size
    if plan.strategy == "groupcast":
        sent, received = traffic(plan.mask, plan.layout)
        return list(zip(received.tolist(), sent.tolist(), strict=True))
    if plan.strategy == "allgather":
        return [(total - count, count * (ranks - 1)) for count in counts]
    # A ring of blocks: all but the own arrive, all but the next one's leave; each rank carries its share of the heads.
    size = plan.ulysses_size
    blocks = [sum(counts[first : first + size]) for first in range(0, ranks, size)]
    of_block = [
        ((total - block) // size, (total - blocks[(i + 1) % len(blocks)]) // size) for i, block in enumerate(blocks)
    ]
    return [of_block[rank // size] for rank in range(ranks)]


def _head_exchange_bytes(plan: Plan, rank: int) -> tuple[int, int]:
    """Bytes (received, sent) of q, k, v one way and of the output the other way, among ranks that exchange heads."""
    shape, size = plan.decision.shape, plan.ulysses_size
    split = split_heads(shape.heads, shape.kv_heads, size)
    first, me = rank - rank % size, rank % size

    def there(i: int) -> int:
        (q0, q1), (k0, k1) = split.q[i], split.k[i]
        return ((q1 - q0) * shape.head_dim + (k1 - k0) * (shape.head_dim + shape.value_dim)) * shape.itemsize

    def back(i: int) -> int:
        return (split.q[i][1] - split.q[i][0]) * shape.value_dim * shape.itemsize

    mine = plan.layout.counts[rank]
    received = sent = 0
    for peer in range(size):
        if peer != me:
            theirs = plan.layout.counts[first + peer]
            sent += mine * there(peer) + theirs * back(me)
            received += theirs * there(me) + mine * back(peer)
    return received, sent


def _tasks(plan: Plan, rank: int) -> int:
    table: SpanTable = plan.layout.table
    if plan.strategy == "groupcast":
        schedule = cast(plan.mask, table, rank, plan.stages)
        return len(schedule.own) + sum(len(stage.rows) for stage in schedule.stages)
    if plan.strategy == "allgather":
        return len(work_on_all(plan.mask, table, rank))
    if plan.ulysses_size > 1:
        table, rank = join_ranks(table, plan.ulysses_size), rank // plan.ulysses_size
    return sum(len(rows) for rows in work_by_source(plan.mask, table, rank))
