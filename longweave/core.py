"""What the operators need to know about a batch, and the one place where everything derived from it is kept.

    core.once(make, *args) ──▶ make(core, *args), the first time; afterwards what was made, as long as the core lives

A `lw.Pack` holds a core. Nothing that is kept in a core refers back to it: dropping the pack frees all of it at once.
Calls on a pack go through `core.enter`, which checks and compares new kinds of calls and notes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from longweave.comm.agreement import Fact, compare, same_calls, same_history
from longweave.comm.exchange import Comm, Group, resolve
from longweave.comm.ledger import RecordedCall, digest
from longweave.comm.watch import begin
from longweave.errors import InputError, shown
from longweave.kernels.attention import check_backend
from longweave.plan.cost import CPU, Machine, Shape
from longweave.plan.fragments import Fragments, fragments
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import as_cu_seqlens
from longweave.plan.schedule import OPTIONS, Plan, check_options, make_plan
from longweave.tensors import check_tensor
from longweave.tokens import Shards, check_size

LAYOUTS = ("auto", "zigzag", "contiguous", "balanced")
MASKS = ("causal", "full")
METHODS = ("affine", "reshard", "gather")

ASKED_ANYWAY = 32  # calls on the first pack of a group that are compared whether or not their kind is new

T = TypeVar("T")
Kind = tuple[object, ...]


class PackCore:
    """What the operators need to know about a batch, and all that they derive from it.

    Making one sends nothing: every rank comes to the same from the same arguments.
    """

    def __init__(
        self,
        comm: Comm,
        cu_seqlens: object,
        layout: str | Layout = "auto",
        *,
        mask: str | Mask = "causal",
        window: int | None = None,
        strategy: str = "auto",
        method: str = "auto",
        backend: str = "auto",
        options: Mapping[str, int] | None = None,
    ) -> None:
        self.comm = comm
        self.machine = machine_of(comm)
        self.cu_seqlens = as_cu_seqlens(cu_seqlens)
        self.mask = self._mask_of(mask, window)
        self.layout = self._layout_of(layout)
        self.options = check_ways(strategy, method, backend, options or {})
        self.strategy, self.method, self.backend = strategy, method, backend
        self.plans: dict[Plan, int] = {}  # in use, with the number of calls of each
        self.methods: dict[str, Any] = {}  # of linear layers, by operator
        self.masks: dict[str, Mask] = {}  # of calls that have their own, by fingerprint
        self._made: dict[Kind, Any] = {}
        self._calls: dict[Kind, RecordedCall] = {}
        self._is_first = comm.ledger.packs == 0

    # -- what it is --------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Of this rank."""
        return self.layout.counts[self.comm.rank]

    @cached_property
    def shards(self) -> Shards:
        return Shards(self.layout, self.comm)

    @cached_property
    def fragments(self) -> Fragments:
        """The documents as the layout cuts them."""
        return fragments(self.layout, self.cu_seqlens)

    @cached_property
    def positions(self) -> Tensor:
        offsets = self.mask.position_offsets
        with torch.inference_mode(False):
            return torch.from_numpy(self.layout.positions(self.comm.rank, self.cu_seqlens, offsets))

    @cached_property
    def fingerprint(self) -> str:
        """Equal on ranks that hold the same documents, layout and mask, and use the same ways."""
        offsets = self.mask.position_offsets
        borders = digest(f"{self.cu_seqlens.tolist()} {None if offsets is None else offsets.tolist()}")
        ways = f"{self.strategy} {self.method} {self.backend} {sorted(self.options.items())}"
        return f"{borders} {self.layout.fingerprint} {self.mask.fingerprint} {ways}"

    def _layout_of(self, layout: str | Layout) -> Layout:
        """A layout by name for these documents, or the given one if it fits."""
        total, world = int(self.cu_seqlens[-1]), self.comm.size
        if isinstance(layout, Layout):
            check_size(layout, self.comm)
            if layout.total != total:
                raise InputError(
                    f"the layout is for {layout.total} tokens but the documents have {total}; "
                    "make it from this batch's cu_seqlens"
                )
            return layout
        if not isinstance(layout, str) or layout not in LAYOUTS:
            raise InputError(f"layout is {shown(layout)}; choose one of {', '.join(LAYOUTS)}, or give a Layout")
        if layout == "auto":
            documents = int((self.cu_seqlens[1:] > self.cu_seqlens[:-1]).sum())
            layout = "zigzag" if documents == 1 else "balanced"
        if layout == "zigzag":
            return Layout.zigzag(self.cu_seqlens, world)
        if layout == "contiguous":
            return Layout.contiguous(total, world)
        return Layout.balanced(self.mask, world, machine=self.machine)

    def _mask_of(self, mask: str | Mask, window: int | None) -> Mask:
        if isinstance(mask, Mask):
            total = int(self.cu_seqlens[-1])
            if mask.total != total:
                raise InputError(f"the mask has {mask.total} tokens but the documents have {total}; use the same pack")
            if mask.position_offsets is not None and not np.array_equal(mask.cu_seqlens, self.cu_seqlens):
                raise InputError(
                    f"the mask counts positions for the documents {mask.cu_seqlens.tolist()}, but cu_seqlens is "
                    f"{self.cu_seqlens.tolist()}; give cu_seqlens=mask.cu_seqlens"
                )
            found = mask
        elif not isinstance(mask, str) or mask not in MASKS:
            raise InputError(f"mask is {shown(mask)}; choose one of {', '.join(MASKS)}, or give a Mask")
        elif mask == "causal":
            found = Mask.causal(self.cu_seqlens)
        else:
            found = Mask.full(self.cu_seqlens)
        return found if window is None else found.windowed(window)

    # -- what is derived from it -------------------------------------------------------------------

    def once(self, make: Callable[..., T], *args: object) -> T:
        """`make(core, *args)`, called once and kept as long as the pack."""
        key = (make, *args)
        if key not in self._made:
            self._made[key] = make(self, *args)
        return self._made[key]  # type: ignore[no-any-return]

    def plan(
        self, mask: str | Mask | None, window: int | None, strategy: str, shape: Shape, options: Mapping[str, int]
    ) -> Plan:
        """The plan of a call: its own mask, window, strategy and options, and for the rest those of the pack."""
        seen = self.mask if mask is None else self._mask_of(mask, None)
        strategy = self.strategy if strategy == "auto" else strategy
        # Of the pack's options, a strategy that the call names takes its own.
        own = {name: value for name, value in self.options.items() if name in OPTIONS.get(strategy, self.options)}
        return make_plan(
            seen if window is None else seen.windowed(window),
            self.layout,
            strategy,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            v_dim=shape.v_dim,
            itemsize=shape.itemsize,
            machine=self.machine,
            **{**own, **options},
        )

    @property
    def was_used(self) -> bool:
        """Was any operator across ranks called on it?"""
        return bool(self._calls)

    # -- calls -------------------------------------------------------------------------------------

    def enter(self, kind: Kind, check: Callable[[], object], tokens: Sequence[Tensor] = ()) -> RecordedCall:
        """Before a call sends anything. `kind` is what must be alike on all ranks: operator, dtypes, shapes, options.
        `tokens` are tensors that must have this rank's tokens first, in every call.

        A kind that is new to this pack is checked. On the first pack of a group the ranks then compare: every new kind,
        and for the first few calls known kinds too. (A rank that makes a known call where another makes a new one must
        take part in the question.) Returns what the flight recorder notes: `with core.enter(…).forward(): …`
        """
        try:
            call = self._calls.get(kind)
        except TypeError:  # an argument of a wrong type, such as a list: `check` will say so
            kind = tuple(map(str, kind))
            call = self._calls.get(kind)
        ledger = self.comm.ledger
        ask = self._is_first and (call is None or ledger.asked < ASKED_ANYWAY)
        if call is None or ask:
            problem: Exception | None = None
            try:
                check()
            except Exception as error:
                problem = error
            new = call or RecordedCall(ledger, " ".join(map(_shown, kind)))
            try:
                if ask:
                    ledger.asked += 1
                    compare(self.comm, [same_calls(new.description)], problem)
                elif problem:
                    with new.forward():  # other ranks may be in this call, and wait
                        raise problem
            finally:
                del problem  # an error that refers to this frame would keep everything in it alive
            call = self._calls[kind] = new
        if not all(x.shape[:1] == (self.tokens,) for x in tokens):
            with call.forward():
                self.check_tokens(*tokens)
        return call

    def refuse_crossing(self, name: str) -> None:
        """For operators that run along each document: a mask that joins documents asks for something else."""
        crossing = self.mask.crosses_documents(self.cu_seqlens)
        if crossing is not None:
            raise InputError(
                f"the mask lets document {crossing[0]} see document {crossing[1]}, but {name} runs along each document "
                "by itself; give such masks to models that have softmax attention only"
            )

    def check_tokens(self, *tensors: Tensor) -> None:
        """All are tensors that have this rank's tokens first."""
        for x in tensors:
            if not isinstance(x, Tensor):
                check_tensor("an input", x)
            if x.shape[:1] != (self.tokens,):
                raise InputError(
                    f"a tensor of shape {tuple(x.shape)} came in, but rank {self.comm.rank} has {self.tokens} tokens; "
                    "give this rank's tokens first, in the order of pack.layout"
                )


def _shown(part: object) -> str:
    """A part of a kind in an error text: ("scale", 0.5) is an option, ("window", None) one that was not given."""
    if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str):
        return f"{part[0]}={part[1]!r}"
    return str(part).replace("torch.", "")


def machine_of(comm: Comm) -> Machine:
    """What the cost model takes the ranks of a group for."""
    return CPU if comm.is_cpu_only else Machine()


def check_ways(strategy: str, method: str, backend: str, options: Mapping[str, int]) -> dict[str, int]:
    """Check how layers are to run; returns the options of the strategy."""
    checked = check_options(strategy, options)
    check_method(method)
    check_backend(backend)
    return checked


def check_method(method: object) -> None:
    if not isinstance(method, str) or method not in ("auto", *METHODS):
        raise InputError(f'method is {shown(method)}; choose "auto", "affine", "reshard" or "gather"')


def agreed_core(group: Group, make: Callable[[Comm], tuple[PackCore, Fact | None]]) -> PackCore:
    """The core that `make` returns, once all ranks hold the same core and the same fact that came with it.

    Whatever `make` raises on one rank is raised there, and a GroupError on the others.
    """
    if get_worker_info() is not None:
        raise InputError(
            "a pack is being made inside a DataLoader worker, which cannot talk to the other ranks; make it in the "
            "main process (lw.shard_batch or lw.Pack on what the loader yields). A worker can plan: lw.Layout.balanced "
            "and lw.make_plan need no ranks, and a Layout can be sent to the main process"
        )
    comm = resolve(group)
    if not comm.ledger.is_watched:
        begin(comm.ledger)  # all ranks do, with their first pack
    made: tuple[PackCore, Fact | None] | None = None
    problem: Exception | None = None
    try:
        made = make(comm)
    except Exception as error:
        problem = error
    facts = [same_history(comm.ledger)]
    if made is not None:
        core, also = made
        remedy = "give every rank of the group the same cu_seqlens, mask, layout and options"
        facts += [*([also] if also else []), Fact(core.fingerprint, "holds", "another pack than the rest", remedy)]
    try:
        weights = comm.ledger.take_weights()
        compare(comm, facts, problem, "agreement on a pack", between_packs=True, weights=weights)
    finally:
        del problem
    assert made is not None
    comm.ledger.packs += 1
    return made[0]
