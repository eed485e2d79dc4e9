"""The plan: mask, layout and strategy in one frozen, hashable object."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

from longweave.errors import InputError
from longweave.plan.cost import cost
from longweave.plan.estimate import Machine, Shape, estimates, stages_for
from longweave.plan.layout import Layout, SpanTable
from longweave.plan.mask import Mask

if TYPE_CHECKING:
    from longweave.plan.report import Report

STRATEGIES = ("groupcast", "ring", "allgather", "ulysses")


@dataclass(frozen=True)
class Decision:
    """What a plan says, without identity: shared by all equal plans."""

    mask: Mask
    table: SpanTable
    strategy: str
    ulysses_size: int
    shape: Shape
    machine: Machine
    stages: int
    keep_kv: bool
    why: str
    fingerprint: str


class Plan:
    """Who computes what and how K/V gets there. Make it once per batch with `make_plan` and pass it to every layer.

    Frozen and hashable; equal plans have the same `fingerprint`. It pickles, so a data-loader worker can make it.
    """

    __slots__ = ("__weakref__", "agreed_on", "decision", "key", "layout")

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.layout = Layout(decision.table)
        self.agreed_on: WeakSet[Any] = WeakSet()
        #: names this very object to the compiled operators, which can take strings but not plans
        self.key = f"{decision.fingerprint}/{next(_serial)}"
        _remember(self)

    @property
    def mask(self) -> Mask:
        return self.decision.mask

    @property
    def strategy(self) -> str:
        return self.decision.strategy

    @property
    def ulysses_size(self) -> int:
        """How many ranks exchange heads among themselves: 1 for all but Ulysses and ring × Ulysses."""
        return self.decision.ulysses_size

    @property
    def stages(self) -> int:
        """In how many exchanges a group-cast brings its keys, unless a call says otherwise."""
        return self.decision.stages

    @property
    def keep_kv(self) -> bool:
        """Whether a group-cast keeps received keys for backward, unless a call says otherwise.

        Yes where no rank receives more tokens than the largest rank holds: at most one more block of K/V.
        """
        return self.decision.keep_kv

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def why(self) -> str:
        """Why this strategy."""
        return self.decision.why

    @property
    def fingerprint(self) -> str:
        return self.decision.fingerprint

    def report(self) -> Report:
        """Per rank tokens, mask area, tokens received and sent; imbalance; why this strategy. `print` it."""
        from longweave.plan.report import make_report

        return make_report(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[type[Plan], tuple[Decision]]:
        return Plan, (self.decision,)

    def __repr__(self) -> str:
        return f"<Plan {self.strategy} for {self.layout.total} tokens on {self.world_size} ranks>"


def make_plan(
    mask: Mask,
    layout: Layout,
    strategy: str = "auto",
    *,
    ulysses_size: int | None = None,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    v_dim: int | None = None,
    itemsize: int = 2,
    machine: Machine | None = None,
) -> Plan:
    """Decide how K/V reaches Q. No communication: all ranks come to the same plan from the same arguments.

    strategy: "groupcast", "ring", "allgather", "ulysses", or "auto" to take the fastest by the cost model (`plan.why`
        says why).
    ulysses_size: for "ring" and "ulysses", how many neighbouring ranks divide heads; the ring then goes over blocks of
        that many ranks. Must divide the world size.
    heads, kv_heads, head_dim, v_dim, itemsize, machine: what the cost model assumes; results do not depend on them.

    Equal arguments share one decision (an LRU cache), so asking again is cheap.
    """
    if not isinstance(mask, Mask):
        raise InputError(f"mask is a {type(mask).__name__}; make one with Mask.causal(cu_seqlens) or its siblings")
    if not isinstance(layout, Layout):
        raise InputError(f"layout is a {type(layout).__name__}; make one with Layout.zigzag(cu_seqlens, world_size)")
    if mask.total != layout.total:
        raise InputError(f"the mask has {mask.total} tokens and the layout {layout.total}; make both from one pack")
    if strategy not in (*STRATEGIES, "auto"):
        raise InputError(f"strategy is {strategy!r}; choose one of auto, {', '.join(STRATEGIES)}")
    for name, value in (("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim), ("itemsize", itemsize)):
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{name} is {value!r}; give a positive int")
    if v_dim is not None and (not isinstance(v_dim, int) or v_dim < 1):
        raise InputError(f"v_dim is {v_dim!r}; give a positive int or None")
    if heads % kv_heads:
        raise InputError(f"heads is {heads} and kv_heads {kv_heads}; query heads must be a multiple of K/V heads")
    shape = Shape(heads, kv_heads, head_dim, v_dim, itemsize)
    # Masks are equal if they allow the same pairs, whatever their documents: those belong to the key.
    documents = mask.cu_seqlens.tobytes()
    return Plan(_decide(mask, documents, layout.table, strategy, ulysses_size, shape, machine or Machine()))


@lru_cache(maxsize=128)
def _decide(
    mask: Mask,
    documents: bytes,
    table: SpanTable,
    strategy: str,
    ulysses_size: int | None,
    shape: Shape,
    machine: Machine,
) -> Decision:
    why = "asked for"
    if strategy == "auto":
        best, *others = estimates(mask, table, shape, machine)
        strategy = best.strategy
        why = f"fastest by the cost model: {best}; " + ", ".join(map(str, others))
    size = check_ulysses_size(strategy, ulysses_size, table.world_size)
    stages, keep_kv = 1, False
    if strategy == "groupcast":
        layout_cost = cost(mask, Layout(table))
        most = int(max(layout_cost.sent.max(), layout_cost.received.max()))
        compute = int(layout_cost.area.max()) * shape.flops_per_pair / machine.flops
        stages = stages_for(compute, most * shape.kv_bytes / machine.bytes_per_second)
        keep_kv = int(layout_cost.received.max()) <= max(table.counts)
    digest = blake2b(digest_size=16)
    for part in (mask.fingerprint, table.fingerprint, strategy, str((size, stages, keep_kv))):
        digest.update(part.encode())
    return Decision(mask, table, strategy, size, shape, machine, stages, keep_kv, why, digest.hexdigest())


def check_ulysses_size(strategy: str, size: int | None, world_size: int) -> int:
    """The number of ranks that exchange heads: given, or by the strategy."""
    if size is None:
        return world_size if strategy == "ulysses" else 1
    if strategy not in ("ring", "ulysses"):
        raise InputError(f"ulysses_size goes with the strategies ring and ulysses, not with {strategy}")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world_size % size:
        raise InputError(f"ulysses_size is {size!r}; give a divisor of the {world_size} ranks")
    return size


# -- plans by key, for operators that can be handed strings only ---------------------------------------

_serial = count()
_alive: WeakValueDictionary[str, Plan] = WeakValueDictionary()
_recent: OrderedDict[str, Decision] = OrderedDict()


def _remember(plan: Plan) -> None:
    _alive[plan.key] = plan
    _recent[plan.fingerprint] = plan.decision
    _recent.move_to_end(plan.fingerprint)
    while len(_recent) > 128:
        _recent.popitem(last=False)


def recall(key: str) -> Plan:
    """The plan with this key: the object itself, or an equal one if that is gone (a backward after its batch)."""
    plan = _alive.get(key)
    if plan is not None:
        return plan
    fingerprint = key.split("/")[0]
    if fingerprint not in _recent:
        raise InputError("the plan of this call is gone; keep a reference to it until backward is done")
    return Plan(_recent[fingerprint])
