"""`lw.Pack`: one batch of packed documents on its ranks. It owns everything that is derived from the batch.

    cu_seqlens, group, layout, mask ──▶ Pack ──┬─ plans by mask, window, strategy and head shape
                  ranks are compared once      ├─ tasks, group-casts, fragments, chains, halos, routes
                                               └─ index tensors by device

Made once per batch, given to every operator, and all of it is freed with it. What operators need is in its `PackCore`;
the `Pack` around it adds `handle`, the tensor by which a compiled graph names its pack:

    pack.handle ──▶ storage ──▶ core        whoever keeps the handle keeps the core: autograd, until backward is done
    operators   ──▶ int(handle) ──▶ core    the number is no constant of the graph, so a new pack compiles nothing anew
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import count
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from longweave.comm.agreement import Fact, compare, digest, ledger_of, same_calls
from longweave.comm.groups import Comm, Group, resolve
from longweave.errors import InputError
from longweave.plan.cost import CPU, Machine, Shape
from longweave.plan.fragments import Fragments, fragments
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints, as_cu_seqlens
from longweave.plan.schedule import Plan, Report, check_options, make_plan
from longweave.tokens import Shards, check_size, check_tokens

LAYOUTS = ("auto", "zigzag", "contiguous", "balanced")
MASKS = ("causal", "full")
METHODS = ("affine", "reshard", "gather")

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
        self.cu_seqlens = as_cu_seqlens(cu_seqlens)
        self.mask = self._mask_of(mask, window)
        self.layout = self._layout_of(layout)
        self.machine = CPU if comm.is_cpu_only else Machine()
        self.options = check_options(strategy, options or {})
        check_method(method)
        self.strategy, self.method, self.backend = strategy, method, backend
        self.plans: dict[Plan, int] = {}  # in use, with the number of calls of each
        self.methods: dict[str, Any] = {}  # of linear layers, by operator
        self.masks: dict[str, Mask] = {}  # of calls that have their own, by fingerprint
        self._made: dict[Kind, Any] = {}
        self._calls: dict[Kind, tuple[str, int]] = {}
        self._ledger = ledger_of(comm)
        self._is_first = self._ledger.packs == 0

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
        return torch.from_numpy(self.layout.positions(self.comm.rank, self.cu_seqlens, offsets))

    @cached_property
    def fingerprint(self) -> str:
        """Equal on ranks that hold the same documents, layout and mask, and use the same ways."""
        borders = f"{digest(self.cu_seqlens.tobytes().hex()):x}"
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
        if layout not in LAYOUTS:
            raise InputError(f"layout is {layout!r}; choose one of {', '.join(LAYOUTS)}, or give a Layout")
        if layout == "auto":
            documents = int((self.cu_seqlens[1:] > self.cu_seqlens[:-1]).sum())
            layout = "zigzag" if documents == 1 else "balanced"
        if layout == "zigzag":
            return Layout.zigzag(self.cu_seqlens, world)
        if layout == "contiguous":
            return Layout.contiguous(total, world)
        return Layout.balanced(self.mask, world, machine=CPU if self.comm.is_cpu_only else Machine())

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
        elif mask == "causal":
            found = Mask.causal(self.cu_seqlens)
        elif mask == "full":
            found = Mask.full(self.cu_seqlens)
        else:
            raise InputError(f"mask is {mask!r}; choose one of {', '.join(MASKS)}, or give a Mask")
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
        return make_plan(
            seen if window is None else seen.windowed(window),
            self.layout,
            self.strategy if strategy == "auto" else strategy,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            v_dim=shape.v_dim,
            itemsize=shape.itemsize,
            machine=self.machine,
            **{**self.options, **options},
        )

    # -- calls -------------------------------------------------------------------------------------

    def enter(self, kind: Kind, check: Callable[[], object]) -> None:
        """Before a call sends anything. `kind` is what must be alike on all ranks: operator, dtypes, shapes, options.

        A kind that is new to this pack is checked; on the first pack of a group, with all ranks at once.
        """
        call = self._calls.get(kind)
        if call is None:
            problem = None
            try:
                check()
            except Exception as error:
                problem = error
            description = " ".join(map(str, kind))
            if self._is_first:
                compare(self.comm, [same_calls(description)], problem)
            elif problem:
                raise problem
            call = self._calls[kind] = (description, digest(description))
        self._ledger.note(*call)

    def refuse_crossing(self, name: str) -> None:
        """For operators that run along each document: a mask that joins documents asks for something else."""
        crossing = self.mask.crosses_documents(self.cu_seqlens)
        if crossing is not None:
            raise InputError(
                f"the mask lets document {crossing[0]} see document {crossing[1]}, but {name} runs along each document "
                "by itself; give such masks to models that have softmax attention only"
            )

    def check_tokens(self, *tensors: Tensor) -> None:
        """All have this rank's tokens first."""
        for x in tensors:
            if len(x) != self.tokens:
                raise InputError(
                    f"a tensor of shape {tuple(x.shape)} came in, but rank {self.comm.rank} has {self.tokens} tokens; "
                    "give this rank's tokens first, in the order of pack.layout"
                )


def check_method(method: object) -> None:
    if method not in ("auto", *METHODS):
        raise InputError(f'method is {method!r}; choose "auto", "affine", "reshard" or "gather"')


class Pack:
    """Documents, their layout on the ranks of a group, and everything derived from them. Make one per batch.

    cu_seqlens: where documents begin and end, as increasing ints from 0; equal neighbours are an empty document.
    group: a ProcessGroup, a 1-D DeviceMesh such as `mesh["cp"]`, or None for the default group.
    layout: who holds which token: "auto" (zigzag for one document, balanced for several), "zigzag", "contiguous",
        "balanced" or a Layout.
    mask, window: who sees whom: "causal", "full" or a Mask, and how many tokens a token sees back, itself included. It
        is what "balanced" balances, and what attention uses unless a call says otherwise.
    strategy, method, backend and options such as `stages`: what attention and linear layers use where a call says
        "auto".

    Every rank of the group makes it with the same arguments. That is compared here, with one small message; a rank that
    differs is named on all of them, and what one rank refuses all refuse. Raises `InputError` and `GroupError`.

        pack = lw.Pack(cu_seqlens, mesh["cp"])
        out = lw.attention(pack.shard(q), pack.shard(k), pack.shard(v), pack)
    """

    def __init__(
        self,
        cu_seqlens: object,
        group: Group = None,
        layout: str | Layout = "auto",
        *,
        mask: str | Mask = "causal",
        window: int | None = None,
        strategy: str = "auto",
        method: str = "auto",
        backend: str = "auto",
        **options: int,
    ) -> None:
        def make(comm: Comm) -> tuple[PackCore, None]:
            ways: dict[str, Any] = {"strategy": strategy, "method": method, "backend": backend, "options": options}
            return PackCore(comm, cu_seqlens, layout, mask=mask, window=window, **ways), None

        self.core, _ = agreed_core(group, make)
        self.handle = _handle(self.core)

    @classmethod
    def around(cls, core: PackCore) -> Pack:
        """The pack of a core that the ranks have agreed on."""
        pack = cls.__new__(cls)
        pack.core, pack.handle = core, _handle(core)
        return pack

    @property
    def cu_seqlens(self) -> Ints:
        return self.core.cu_seqlens

    @property
    def layout(self) -> Layout:
        return self.core.layout

    @property
    def mask(self) -> Mask:
        return self.core.mask

    @property
    def group(self) -> Any:
        """The process group; None for a single process."""
        return self.core.comm.group

    @property
    def rank(self) -> int:
        """Inside the group."""
        return self.core.comm.rank

    @property
    def world_size(self) -> int:
        return self.core.comm.size

    @property
    def tokens(self) -> int:
        """The number of this rank's tokens."""
        return self.core.tokens

    @property
    def positions(self) -> Tensor:
        """The position of each of this rank's tokens in its document: (tokens,) on the CPU, for rotary embeddings.

        Where the mask continues a document in another one, as answers continue their prompt in `Mask.shared_prefix`,
        positions go on from there.
        """
        return self.core.positions

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's tokens of a tensor that every rank has in full, see `lw.shard`. No communication."""
        return self.core.shards.shard(x, dim)

    def unshard(self, x_local: Tensor, dim: int = 0) -> Tensor:
        """The tokens of all ranks, in token order, on every rank; backward adds up gradients, see `lw.unshard`."""
        core = self.core
        shape = None if not isinstance(x_local, Tensor) else (x_local.dtype, _but(x_local.shape, dim))

        def check() -> None:
            check_tokens(x_local, core.tokens, dim, f"the count of rank {core.comm.rank}")

        core.enter(("unshard", shape, "along dim", dim), check)
        return core.shards.unshard(x_local, dim)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that attention layers have used on this pack, the most used one first."""
        used = self.core.plans
        return tuple(sorted(used, key=lambda plan: -used[plan]))

    @property
    def methods(self) -> Mapping[str, Any]:
        """How linear layers went on this pack: for each operator its method, bytes sent and why."""
        return dict(self.core.methods)

    def report(self, **shape: int) -> Report:
        """What the attention layers really do on this pack: the report of the plan that most of them used.

        Before any layer was called, or with a head shape (`heads`, `kv_heads`, `head_dim`, `v_dim`, `itemsize`), the
        plan that a layer of this shape gets. `pack.plans` has all that are in use. Every rank can make it; it plans
        for all of them, which takes a while for many ranks: not for every step.
        """
        if self.plans and not shape:
            return self.plans[0].report()
        return self.core.plan(None, None, "auto", Shape(**shape), {}).report()

    def __repr__(self) -> str:
        held = f"{self.tokens} of {self.layout.total} tokens"
        return f"<Pack of {len(self.cu_seqlens) - 1} documents: rank {self.rank} of {self.world_size}, {held}>"


def _but(shape: torch.Size, dim: int) -> tuple[int, ...]:
    """The shape without one dimension."""
    place = dim % max(len(shape), 1)
    return (*shape[:place], *shape[place + 1 :])


def agreed_core(group: Group, make: Callable[[Comm], tuple[PackCore, Fact | None]]) -> tuple[PackCore, Fact | None]:
    """What `make` returns, once all ranks hold the same: its core, and what else it gave to be compared.

    Whatever `make` raises on one rank is raised there, and a GroupError on the others.
    """
    if get_worker_info() is not None:
        raise InputError(
            "a pack is being made inside a DataLoader worker, which cannot talk to the other ranks; make it in the "
            "main process (lw.shard_batch or lw.Pack on what the loader yields). A worker can plan: lw.Layout.balanced "
            "and lw.make_plan need no ranks, and a Layout can be sent to the main process"
        )
    comm = resolve(group)
    made: tuple[PackCore, Fact | None] | None = None
    problem: Exception | None = None
    try:
        made = make(comm)
    except Exception as error:
        problem = error
    ledger = ledger_of(comm)
    facts = [ledger.fact()]
    if made is not None:
        core, also = made
        remedy = "give every rank of the group the same cu_seqlens, mask, layout and options"
        facts += [*([also] if also else []), Fact(core.fingerprint, "holds", "another pack than the rest", remedy)]
    compare(comm, facts, problem)
    assert made is not None
    ledger.packs += 1
    return made


# -- handles -------------------------------------------------------------------------------------------

_serial = count(1)
# By the number in its handle. An entry dies with its core.
_cores: WeakValueDictionary[int, PackCore] = WeakValueDictionary()


class _Tie(np.ndarray):
    """The memory of a handle. It holds on to the core, so every tensor that shares this memory does."""

    core: PackCore


def _handle(core: PackCore) -> Tensor:
    number = next(_serial)
    _cores[number] = core
    memory = np.array(number, dtype=np.int64).view(_Tie)
    memory.core = core
    return torch.from_numpy(memory)


def core_of(handle: Tensor) -> PackCore:
    """The core of the pack that has this handle."""
    return _cores[int(handle)]
