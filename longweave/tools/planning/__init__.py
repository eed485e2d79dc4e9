"""`longweave plan`: what is asked for on the command line, as a mask, layouts and plans. Needs no ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from longweave.errors import InputError, shown
from longweave.plan import Layout, Machine, Mask, Plan, Shape, make_plan
from longweave.plan.ranges import MOST_RANKS, check_int
from longweave.plan.stages import exchange_matrix, plan_stages
from longweave.tools.planning.lengths import check_lengths, cu_seqlens_of

MASKS = ("causal", "full", "shared-prefix")
NAMED_LAYOUTS = ("contiguous", "zigzag", "balanced")


@dataclass(frozen=True)
class PlanRequest:
    """Documents and everything that a plan for them depends on."""

    lengths: tuple[int, ...]
    ranks: int = 4
    mask_name: str = "causal"  # "shared-prefix": the first document is a prompt, the others are its answers
    window: int | None = None
    layout: str = "auto"
    strategy: str = "auto"
    shape: Shape = field(default_factory=Shape)
    node_size: int | None = None
    machine: Machine = field(default_factory=Machine)  # what the ranks are taken for

    def __post_init__(self) -> None:
        check_lengths(list(self.lengths))
        check_int("ranks", self.ranks, f"give the number of ranks, at least 1, at most {MOST_RANKS}", 1, MOST_RANKS)
        if self.node_size is not None:
            check_int("node_size", self.node_size, "give the number of ranks in a node, at least 1", 1)
        for name, value, known in (("mask", self.mask_name, MASKS), ("layout", self.layout, ("auto", *NAMED_LAYOUTS))):
            if value not in known:
                raise InputError(f"{name} is {shown(value)}; choose one of {', '.join(known)}")

    @cached_property
    def mask(self) -> Mask:
        cu_seqlens = cu_seqlens_of(self.lengths)
        if self.mask_name == "shared-prefix":
            found = Mask.shared_prefix(self.lengths[0], self.lengths[1:])
        else:
            found = Mask.causal(cu_seqlens) if self.mask_name == "causal" else Mask.full(cu_seqlens)
        return found if self.window is None else found.windowed(self.window)

    @property
    def layout_name(self) -> str:
        """What "auto" stands for, as in `lw.Pack`."""
        if self.layout != "auto":
            return self.layout
        return "zigzag" if sum(length > 0 for length in self.lengths) == 1 else "balanced"

    def make_layout(self, name: str) -> Layout:
        if name == "contiguous":
            return Layout.contiguous(self.mask.total, self.ranks)
        if name == "zigzag":
            return Layout.zigzag(self.mask.cu_seqlens, self.ranks)
        return Layout.balanced(self.mask, self.ranks, node_size=self.node_size, machine=self.machine)

    def make_plan(self, layout: Layout, strategy: str) -> Plan:
        shape = self.shape
        return make_plan(
            self.mask,
            layout,
            strategy,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            itemsize=shape.itemsize,
            machine=self.machine,
        )

    @cached_property
    def plan(self) -> Plan:
        """The plan that was asked for."""
        return self.make_plan(self.make_layout(self.layout_name), self.strategy)

    def across_nodes(self) -> str:
        """How much of the plan's traffic leaves its node, in words; nothing without nodes."""
        if self.node_size is None:
            return ""
        matrix = exchange_matrix(plan_stages(self.plan))
        node = [rank // self.node_size for rank in range(self.ranks)]
        total = int(matrix.sum())
        across = total - sum(
            int(matrix[i, j]) for i in range(self.ranks) for j in range(self.ranks) if node[i] == node[j]
        )
        share = f", {100 * across / total:.1f} % of all" if total else ""
        rest = self.ranks % self.node_size
        nodes = f"nodes of {self.node_size} ranks" + (f" (the last has {rest})" if rest else "")
        return f"{across / 1e6:.2f} MB of it between {nodes}{share}"
