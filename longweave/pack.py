"""`lw.Pack`: one batch of packed documents on its ranks. It owns everything that is derived from the batch.

    cu_seqlens, group, layout, mask ──▶ Pack ──┬─ plans by mask, window, strategy and head shape
                  ranks are compared once      ├─ tasks, group-casts, fragments, chains, halos, routes
                                               └─ index tensors by device

Made once per batch, given to every operator, and all of it is freed with it. It is kept in the pack's `core`
(`longweave.core`); the pack itself adds `handle`, the tensor by which a compiled graph names its pack:

    pack.handle ──▶ storage ──▶ core        whoever keeps the handle keeps the core: autograd, until backward is done
    operators   ──▶ int(handle) ──▶ core    the number is no constant of the graph, so a new pack compiles nothing anew
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from longweave.comm.exchange import Comm, Group
from longweave.core import PackCore, agreed_core
from longweave.errors import InputError
from longweave.finite import check_finite
from longweave.plan.cost import Shape
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints
from longweave.plan.schedule import Plan, Report
from longweave.tensors import Handles, eager
from longweave.tokens import check_tokens, describe


class Pack:
    """Documents, their layout on the ranks of a group, and everything derived from them. Make one per batch.

    cu_seqlens: where documents begin and end, as increasing ints from 0; equal neighbours are an empty document.
    group: a ProcessGroup, a 1-D DeviceMesh such as `mesh["cp"]`, or None for the default group.
    layout: who holds which token: "auto" (zigzag for one document, balanced for several), "zigzag", "contiguous",
        "balanced" or a Layout.
    mask, window: who sees whom: "causal", "full" or a Mask, and how many tokens a token sees back, itself included. It
        is what "balanced" balances, and what attention uses unless a call says otherwise.
    strategy, backend and options such as `stages`: what softmax attention uses where a call says "auto"; method:
        likewise for linear layers, whose own `backend=` a pack does not set.

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

        self.core = agreed_core(group, make)
        self.handle = _cores.issue(self.core)

    @classmethod
    def around(cls, core: PackCore) -> Pack:
        """The pack of a core that the ranks have agreed on."""
        pack = cls.__new__(cls)
        pack.core, pack.handle = core, _cores.issue(core)
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
    @eager
    def positions(self) -> Tensor:
        """The position of each of this rank's tokens in its document: (tokens,) on the CPU, for rotary embeddings.

        Where the mask continues a document in another one, as answers continue their prompt in `Mask.shared_prefix`,
        positions go on from there.
        """
        return self.core.positions

    @eager
    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's tokens of a tensor that every rank has in full, see `lw.shard`. No communication."""
        return self.core.shards.shard(x, dim)

    @eager
    def unshard(self, x_local: Tensor, dim: int = 0) -> Tensor:
        """The tokens of all ranks, in token order, on every rank; backward adds up gradients, see `lw.unshard`."""
        core = self.core
        whose = f"the count of rank {core.comm.rank}"
        with core.enter(
            (describe("unshard", x_local, dim),), lambda: check_tokens(x_local, core.tokens, dim, whose)
        ).forward():
            return core.shards.unshard(x_local, dim)

    @eager
    def check_finite(self, **tensors: Tensor) -> None:
        """Raise `InputError` on every rank where one of the tensors, each with this rank's tokens first, has NaN or ±∞
        on some rank; it names tensor, document, token and rank. To be called by all ranks. For looking for the cause:
        it waits for the device and for the other ranks.

            pack.check_finite(q=q, hidden=hidden)
        """
        check_finite(self.core, tensors)

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
        assumed = Shape(**shape)
        report = self.core.plan(None, None, "auto", assumed, {}).report()
        heads = f"{assumed.heads}:{assumed.kv_heads} heads of {assumed.head_dim}"
        return report if shape else replace(report, why=f"no attention layer has run yet, for {heads}; {report.why}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Pack:
        """A pack is shared, not copied: ranks have agreed on this one."""
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise InputError(
            "a pack belongs to the ranks that made it and cannot be pickled; send cu_seqlens and pack.layout, and make "
            "the pack where it is used"
        )

    def __repr__(self) -> str:
        held = f"{self.tokens} of {self.layout.total} tokens"
        return f"<Pack of {len(self.cu_seqlens) - 1} documents: rank {self.rank} of {self.world_size}, {held}>"


def checked_core(pack: object) -> PackCore:
    """The core of what was given as a pack."""
    if not isinstance(pack, Pack):
        raise InputError(f"pack is a {type(pack).__name__}; make one per batch: lw.Pack(cu_seqlens, group)")
    return pack.core


_cores: Handles[PackCore] = Handles()


def core_of(handle: Tensor) -> PackCore:
    """The core of the pack that has this handle."""
    return _cores.find(handle)
