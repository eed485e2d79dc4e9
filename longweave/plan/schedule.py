"""The plan: mask, layout and strategy in one frozen, hashable object, and what it does in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np

from longweave.errors import InputError, did_you_mean, shown
from longweave.plan.cost import (
    MOST_SIZE,
    Machine,
    Shape,
    areas,
    check_machine,
    check_shape,
    cost,
    estimates,
    load_bound,
    receive_bound,
    stages_for,
    traffic,
)
from longweave.plan.heads import head_groups, split_heads
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints, check_int
from longweave.plan.tasks import GroupCast, tasks_by_source, tasks_on_all

# Every strategy, with the options that it takes.
OPTIONS = {
    "groupcast": ("stages", "keep_kv"),
    "ring": ("ulysses_size",),
    "allgather": ("heads_k_stride", "bwd_head_first_stride", "bwd_head_last_stride"),
    "ulysses": ("ulysses_size",),
}
STRATEGIES = tuple(OPTIONS)


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Who computes what and how K/V gets there. Make it with `make_plan`.

    Frozen and hashable; plans for the same head shape that exchange the same messages are equal and have the same
    `fingerprint`. It pickles, so a data-loader worker can make it.
    """

    mask: Mask
    layout: Layout
    strategy: str
    ulysses_size: int  # ranks that exchange heads among themselves: 1 for all but Ulysses and ring × Ulysses
    shape: Shape  # what costs are counted for …
    machine: Machine  # … and on what
    stages: int  # in how many exchanges a group-cast brings its keys
    keep_kv: bool  # whether a group-cast keeps received keys for backward
    head_strides: tuple[int, int | None, int | None]  # of an all-gather: K/V heads a step, backward's first and last
    why: str  # why this strategy

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @cached_property
    def fingerprint(self) -> str:
        digest = blake2b(digest_size=16)
        runs = str((self.shape, self.ulysses_size, self.stages, self.keep_kv, self.head_strides))
        for part in (self.mask.fingerprint, self.layout.fingerprint, self.strategy, runs):
            digest.update(part.encode())
        return digest.hexdigest()

    def head_groups(self, *, backward: bool) -> tuple[tuple[int, int], ...]:
        """The K/V heads of each step of an all-gather."""
        if not isinstance(backward, bool):
            raise InputError(f"backward is {shown(backward)}; give True or False")
        stride, first, last = self.head_strides
        return head_groups(self.shape.kv_heads, stride, *((first, last) if backward else ()))

    def report(self) -> Report:
        """Per rank tokens, mask area, tokens received and sent; imbalance; why this strategy. `print` it."""
        return _report(self)

    @property
    def details(self) -> str:
        """What was decided for the strategy, in words."""
        if self.strategy == "groupcast":
            stages = f"{self.stages} stage{'s' if self.stages > 1 else ''}"
            return f"{stages}, {'received K/V kept' if self.keep_kv else 'K/V received again'} for backward"
        return f"{self.ulysses_size} ranks exchange heads" if self.ulysses_size > 1 else ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"<Plan {self.strategy} for {self.layout.total} tokens on {self.world_size} ranks>"


def make_plan(
    mask: Mask,
    layout: Layout,
    strategy: str = "auto",
    *,
    heads: int = Shape.heads,
    kv_heads: int = Shape.kv_heads,
    head_dim: int = Shape.head_dim,
    v_dim: int | None = Shape.v_dim,
    itemsize: int = Shape.itemsize,
    machine: Machine | None = None,
    **options: int,
) -> Plan:
    """Decide how K/V reaches Q. No communication: all ranks come to the same plan from the same arguments.

    strategy: "groupcast", "ring", "allgather", "ulysses", or "auto" to take the fastest by the cost model (`plan.why`
        says why).
    heads, kv_heads, head_dim, v_dim, itemsize, machine: what the cost model assumes; results do not depend on them.
    options: a named strategy takes its own and refuses those of others; with "auto" an option holds if the strategy
        that is taken has it.
        ulysses_size (ring, ulysses): how many neighbouring ranks divide heads; the ring then goes over blocks of that
            many ranks. Must divide the world size.
        stages, keep_kv (groupcast): in how many exchanges keys arrive, and whether they are kept for backward.
        heads_k_stride (allgather): K/V heads a step; bwd_head_first_stride, bwd_head_last_stride: of backward's first
            and last step, which may be smaller.
    """
    if not isinstance(mask, Mask):
        raise InputError(f"mask is a {type(mask).__name__}; make one with Mask.causal(cu_seqlens) or its siblings")
    if not isinstance(layout, Layout):
        raise InputError(f"layout is a {type(layout).__name__}; make one with Layout.zigzag(cu_seqlens, world_size)")
    if mask.total != layout.total:
        raise InputError(f"the mask has {mask.total} tokens and the layout {layout.total}; make both from one pack")
    shape = check_shape(Shape(heads, kv_heads, head_dim, v_dim, itemsize))
    machine = Machine() if machine is None else check_machine(machine)
    given = check_options(strategy, options)
    why, stages, keep_kv = "asked for", 1, False
    if strategy in ("auto", "groupcast"):
        found = cost(mask, layout)
        if strategy == "auto":
            best, *others = estimates(found, layout, shape, machine)
            strategy = best.strategy
            why = f"fastest by the cost model: {best}; " + ", ".join(map(str, others))
            if "groupcast" not in {best.strategy, *(other.strategy for other in others)}:
                why += "; no groupcast, nearly every key is needed everywhere"
        if strategy == "groupcast":
            most = int(max(found.sent.max(), found.received.max()))
            compute = int(found.area.max()) * machine.seconds_per_pair(shape)
            stages = stages_for(compute, most * machine.seconds_per_token(shape))
            # Yes where no rank receives more tokens than the largest rank holds: at most one more block of K/V.
            keep_kv = int(found.received.max()) <= max(layout.counts)
    given = {name: value for name, value in given.items() if name in OPTIONS[strategy]}
    size = given.get("ulysses_size", layout.world_size if strategy == "ulysses" else 1)
    if layout.world_size % size:
        raise InputError(f"ulysses_size is {size}; give a divisor of the {layout.world_size} ranks")
    return Plan(
        mask,
        layout,
        strategy,
        size,
        shape,
        machine,
        given.get("stages", stages),
        bool(given.get("keep_kv", keep_kv)),
        _head_strides(kv_heads, given),
        why,
    )


def check_options(strategy: str, options: Mapping[str, object]) -> dict[str, int]:
    """The options that were given, if all of them exist and the strategy (unless it is "auto") takes them."""
    if not isinstance(strategy, str) or strategy not in (*STRATEGIES, "auto"):
        raise InputError(f"strategy is {shown(strategy)}; choose one of auto, {', '.join(STRATEGIES)}")
    every = dict.fromkeys(name for names in OPTIONS.values() for name in names)
    taken = tuple(every) if strategy == "auto" else OPTIONS[strategy]
    found: dict[str, int] = {}
    for name, value in options.items():
        if name not in every:
            hint = did_you_mean(name, [*every, "strategy", "method", "backend", "layout", "mask", "window"])
            raise InputError(f"there is no option {name!r}; attention across ranks has {', '.join(every)}{hint}")
        if name not in taken:
            owners = " and ".join(owner for owner, names in OPTIONS.items() if name in names)
            raise InputError(f"{name} goes with {owners}; strategy {strategy} takes {', '.join(taken)}")
        if value is None:
            continue
        if name == "keep_kv":
            if not isinstance(value, int) or value not in (0, 1):
                raise InputError(f"keep_kv is {shown(value)}; give True or False")
            found[name] = int(value)
        else:
            found[name] = check_int(name, value, f"give a positive int, at most {MOST_SIZE}", 1, MOST_SIZE)
    return found


def _head_strides(kv_heads: int, given: Mapping[str, int]) -> tuple[int, int | None, int | None]:
    stride = given.get("heads_k_stride", max(1, kv_heads // 4))
    if stride > kv_heads:
        raise InputError(f"heads_k_stride is {stride} but there are {kv_heads} K/V heads; give at most that many")
    small = stride // 4 or None  # a short start and end where a step is wide enough to be cut
    first, last = (given.get(f"bwd_head_{end}_stride", small) for end in ("first", "last"))
    for name, value in (("bwd_head_first_stride", first), ("bwd_head_last_stride", last)):
        if value is not None and value > stride:
            raise InputError(f"{name} is {value} but heads_k_stride is {stride}; give at most that many")
    if first is not None and last is not None and stride not in (first, last) and first + last > stride:
        raise InputError(
            f"bwd_head_first_stride {first} and bwd_head_last_stride {last} together exceed heads_k_stride {stride}; "
            "make them smaller"
        )
    return stride, first, last


# -- in numbers ----------------------------------------------------------------------------------------


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


MOST_RANKS_SHOWN = 128  # in a printed report


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
    details: str  # stages and the like

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
        moves_kv = self.strategy != "ulysses"  # which moves all that a rank has, for its share of the heads
        share = f"{100 * self.bytes_received / self.bytes_if_gathered:.1f} %" if self.bytes_if_gathered else "all"
        lines = [
            f"strategy {self.strategy} ({self.why})",
            *([self.details] if self.details else []),
            f"{self.total_tokens} tokens, {self.total_area} pairs, imbalance {self.imbalance:.3f}",
            f"busiest rank {busiest} pairs, bound {self.load_bound}; "
            + (
                f"most received {most} tokens, bound {self.receive_bound}" if moves_kv else "heads move, not K/V tokens"
            ),
            f"{self.bytes_received / 1e6:.2f} MB received, {share} of gathering or a ring",
            "rank    tokens           pairs  tokens received  tokens sent  MB received  tasks",
        ]
        for r in self.ranks[:MOST_RANKS_SHOWN]:
            received, sent = (r.tokens_received, r.tokens_sent) if moves_kv else ("–", "–")
            traffic = f"{received:>17}{sent:>13}{r.bytes_received / 1e6:13.2f}"
            lines.append(f"{r.rank:4d}{r.tokens:10d}{r.area:16d}{traffic}{r.kernel_tasks:7d}")
        if len(self.ranks) > MOST_RANKS_SHOWN:
            lines.append(f"   … {len(self.ranks) - MOST_RANKS_SHOWN} more ranks")
        return "\n".join(lines)


def _report(plan: Plan) -> Report:
    work, tasks = computed_areas(plan), _task_counts(plan)
    shape = plan.shape
    there, back = head_messages(plan)
    of_heads = there + back
    rows = []
    for rank, (received, sent) in enumerate(_kv_bytes(plan)):
        rows.append(
            RankReport(
                rank,
                plan.layout.counts[rank],
                work[rank],
                received // shape.kv_bytes,
                sent // shape.kv_bytes,
                received + int(of_heads[:, rank].sum()),
                sent + int(of_heads[rank].sum()),
                tasks[rank],
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
        plan.details,
    )


def computed_areas(plan: Plan) -> list[int]:
    """Allowed pairs that each rank computes, in units of all heads."""
    own: list[int] = areas(plan.mask, plan.layout).tolist()
    size = plan.ulysses_size
    if size == 1:
        return own
    # A block of ranks computes the pairs of all its tokens, each rank for its share of the heads.
    shape = plan.shape
    q_heads = split_heads(shape.heads, shape.kv_heads, size).q
    shares = [(stop - start) / shape.heads for start, stop in q_heads]
    blocks = [sum(own[first : first + size]) for first in range(0, plan.world_size, size)]
    return [round(blocks[rank // size] * shares[rank % size]) for rank in range(plan.world_size)]


def _kv_bytes(plan: Plan) -> list[tuple[int, int]]:
    """(received, sent) bytes of K/V of each rank, on the way to other ranks' queries."""
    counts, total, ranks, shape = plan.layout.counts, plan.layout.total, plan.world_size, plan.shape
    if plan.strategy == "groupcast":
        sent, received = traffic(plan.mask, plan.layout)
        return [(int(r) * shape.kv_bytes, int(s) * shape.kv_bytes) for r, s in zip(received, sent, strict=True)]
    if plan.strategy == "allgather":
        return [((total - count) * shape.kv_bytes, count * (ranks - 1) * shape.kv_bytes) for count in counts]
    # A ring of blocks: all but the own arrive, all but the next one's leave; each rank carries the K/V heads it reads.
    size = plan.ulysses_size
    blocks = [sum(counts[first : first + size]) for first in range(0, ranks, size)]
    heads = [stop - start for start, stop in split_heads(shape.heads, shape.kv_heads, size).k]
    widths = [count * (shape.kv_bytes // shape.kv_heads) for count in heads]
    of_block = [(total - block, total - blocks[(i + 1) % len(blocks)]) for i, block in enumerate(blocks)]
    return [
        (of_block[rank // size][0] * widths[rank % size], of_block[rank // size][1] * widths[rank % size])
        for rank in range(ranks)
    ]


def head_messages(plan: Plan) -> tuple[Ints, Ints]:
    """Bytes of q, k, v one way and of the output the other, among ranks that exchange heads: (from rank, to rank)."""
    shape, size, world = plan.shape, plan.ulysses_size, plan.world_size
    split, counts = split_heads(shape.heads, shape.kv_heads, size), np.array(plan.layout.counts, dtype=np.int64)
    q_heads, k_heads = (np.array([stop - start for start, stop in heads]) for heads in (split.q, split.k))
    there = (q_heads * shape.head_dim + k_heads * (shape.head_dim + shape.value_dim)) * shape.itemsize
    back = q_heads * shape.value_dim * shape.itemsize
    block, inner = np.divmod(np.arange(world), size)
    meets = (block[:, None] == block) & (inner[:, None] != inner)
    return counts[:, None] * there[inner] * meets, back[inner][:, None] * counts * meets


def _task_counts(plan: Plan) -> list[int]:
    """The tasks of each rank."""
    mask, layout, ranks = plan.mask, plan.layout, range(plan.world_size)
    if plan.strategy == "groupcast":
        schedules = map(GroupCast(mask, layout, plan.stages).of, ranks)
        return [len(schedule.own) + sum(len(stage.tasks) for stage in schedule.stages) for schedule in schedules]
    if plan.strategy == "allgather":
        return [len(tasks_on_all(mask, layout, rank)) for rank in ranks]
    size = plan.ulysses_size
    blocks = layout if size == 1 else layout.joined(size)
    of_block = [sum(map(len, tasks_by_source(mask, blocks, block))) for block in range(blocks.world_size)]
    return [of_block[rank // size] for rank in ranks]
