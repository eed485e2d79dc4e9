"""What a plan says about one layer on one rank, in bytes: what travels, and how much memory it may take.

Forward bytes are the plan's own (`plan.report()`). Backward, as docs/strategies.md has it:

    groupcast    K/V again unless they were kept; gradients the way back, in float32
    ring         K/V once more, the other way round; gradients of every other rank's block, in float32
    allgather    K/V again; gradients of all other tokens, in float32
    ulysses      the output's gradient one way; dq, dk, dv the other, in float32 where ranks share a K/V head

Memory is what a layer takes besides its inputs. Results: out and lse in float32 and out in the dtype of the inputs;
backward dq, dk, dv in float32 and in the dtype of the inputs, and one float32 for each query and head. Then buffers:

    groupcast    of a stage what is sent and what arrives, that in token order too; two stages at a time
    ring         two receive buffers and the own block; in backward the gradients of four blocks
    allgather    all keys of some heads, as they arrive and in token order, and those of the next heads; in backward
                 their gradients, in token order, in rank order, as they leave and as they arrive
    ulysses      q, k, v and out of the block's tokens and this rank's heads: as sent, as received, in token order and
                 as kept; in backward as kept, and their gradients likewise
"""

from __future__ import annotations

from typing import NamedTuple

from longweave.plan.heads import split_heads
from longweave.plan.schedule import Plan
from longweave.plan.tasks import GroupCast

WIDE = 4  # bytes of what is summed


class Figures(NamedTuple):
    sent: int
    received: int
    peak: int


def forward(plan: Plan, rank: int) -> Figures:
    report = plan.report().ranks[rank]
    return Figures(report.bytes_sent, report.bytes_received, _results(plan, rank) + _buffers(plan, rank, False))


def backward(plan: Plan, rank: int) -> Figures:
    sent, received = _BYTES[plan.strategy](plan, rank)
    return Figures(sent, received, _gradients(plan, rank) + _buffers(plan, rank, True))


# -- bytes ---------------------------------------------------------------------------------------------


def _groupcast(plan: Plan, rank: int) -> tuple[int, int]:
    shape, report = plan.shape, plan.report().ranks[rank]
    wide = shape.kv_bytes // shape.itemsize * WIDE
    again = 0 if plan.keep_kv else shape.kv_bytes
    received, sent = report.tokens_received, report.tokens_sent
    return sent * again + received * wide, received * again + sent * wide


def _allgather(plan: Plan, rank: int) -> tuple[int, int]:
    shape, counts = plan.shape, plan.layout.counts
    wide = shape.kv_bytes // shape.itemsize * WIDE
    own, others = counts[rank], plan.layout.total - counts[rank]
    peers = plan.world_size - 1
    return own * peers * shape.kv_bytes + others * wide, others * shape.kv_bytes + own * peers * wide


def _ring(plan: Plan, rank: int) -> tuple[int, int]:
    shape, size, total = plan.shape, plan.ulysses_size, plan.layout.total
    blocks = _blocks(plan)
    me, inner = divmod(rank, size)
    split = split_heads(shape.heads, shape.kv_heads, size)
    heads = split.k[inner][1] - split.k[inner][0]
    width = heads * (shape.head_dim + shape.value_dim)
    sent = received = 0
    if len(blocks) > 1:
        before, after = blocks[me - 1], blocks[(me + 1) % len(blocks)]
        sent = (total - before) * width * shape.itemsize + (total - blocks[me]) * width * WIDE
        received = (total - blocks[me]) * width * shape.itemsize + (total - after) * width * WIDE
    if size > 1:
        exchange_out, exchange_in = _exchange(plan, rank)
        sent, received = sent + exchange_out, received + exchange_in
    return sent, received


def _exchange(plan: Plan, rank: int) -> tuple[int, int]:
    """Of Ulysses: grad_out to the heads, dq, dk, dv to the tokens."""
    shape, size = plan.shape, plan.ulysses_size
    split = split_heads(shape.heads, shape.kv_heads, size)
    first, me = rank - rank % size, rank % size
    itemsize = WIDE if split.replicated else shape.itemsize

    def there(i: int) -> int:
        return (split.q[i][1] - split.q[i][0]) * shape.value_dim * shape.itemsize

    def back(i: int) -> int:
        (q0, q1), (k0, k1) = split.q[i], split.k[i]
        return ((q1 - q0) * shape.head_dim + (k1 - k0) * (shape.head_dim + shape.value_dim)) * itemsize

    mine, sent, received = plan.layout.counts[rank], 0, 0
    for peer in range(size):
        if peer != me:
            theirs = plan.layout.counts[first + peer]
            sent += mine * there(peer) + theirs * back(me)
            received += theirs * there(me) + mine * back(peer)
    return sent, received


_BYTES = {"groupcast": _groupcast, "allgather": _allgather, "ring": _ring, "ulysses": _ring}


def _blocks(plan: Plan) -> list[int]:
    """Tokens of each block of ranks that exchange heads."""
    counts, size = plan.layout.counts, plan.ulysses_size
    return [sum(counts[first : first + size]) for first in range(0, len(counts), size)]


# -- memory --------------------------------------------------------------------------------------------


def _results(plan: Plan, rank: int) -> int:
    shape, tokens = plan.shape, plan.layout.counts[rank]
    return tokens * shape.heads * (shape.value_dim * (WIDE + shape.itemsize) + 2 * WIDE)


def _gradients(plan: Plan, rank: int) -> int:
    shape, tokens = plan.shape, plan.layout.counts[rank]
    numbers = shape.heads * shape.head_dim + shape.kv_bytes // shape.itemsize
    return tokens * (numbers * (WIDE + shape.itemsize) + shape.heads * WIDE)


def _buffers(plan: Plan, rank: int, back: bool) -> int:
    shape = plan.shape
    wide = shape.kv_bytes // shape.itemsize * WIDE
    if plan.strategy == "groupcast":
        stages = GroupCast(plan.mask, plan.layout, plan.stages).of(rank).stages
        per_token = shape.kv_bytes + (wide if back else 0)
        sizes = sorted((2 * sum(stage.recv_splits) + sum(stage.send_splits)) * per_token for stage in stages)
        return sum(sizes[-2:])
    if plan.strategy == "allgather":
        groups = plan.head_groups(backward=back)
        heads = max(stop - start for start, stop in groups)
        per_head = plan.layout.total * (shape.head_dim + shape.value_dim) * heads
        return per_head * (3 * shape.itemsize + (4 * WIDE if back else 0))
    size = plan.ulysses_size
    split = split_heads(shape.heads, shape.kv_heads, size)
    block = max(_blocks(plan))
    heads = max(stop - start for start, stop in split.k)
    width = heads * (shape.head_dim + shape.value_dim)
    ring = block * width * (3 * shape.itemsize + (4 * WIDE if back else 0)) if len(_blocks(plan)) > 1 else 0
    if size == 1:
        return ring
    q_heads = max(stop - start for start, stop in split.q)
    numbers = max(
        block * (q_heads * (shape.head_dim + shape.value_dim) + width),
        max(plan.layout.counts) * (shape.heads * (shape.head_dim + shape.value_dim) + shape.kv_bytes // shape.itemsize),
    )
    return ring + numbers * (4 * shape.itemsize + (4 * WIDE if back else WIDE))
