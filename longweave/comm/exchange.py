"""Who we talk to, and how: a process group seen from one rank, and collectives on it.

    Comm             a ProcessGroup, a mesh dimension, or a single process without any group
    on tokens        tensors whose first dimension is tokens, with exactly the tokens that are needed; a call starts at
                     once and returns a `Pending`, whose buffers stay alive and untouched until `wait()`
    sums             float32 for smaller dtypes, in rank order

Tokens travel as bytes, so every dtype does. Between CPUs every collective is a set of messages, each with a tag:

    tag = running number of the exchange · digest of the size of the message

so a message only ever meets a receive of its own size, in the same place. gloo's own collectives abort the process
where ranks differ in a size; here such ranks wait, and are named (`watch.py`). Ranks that exchange equal sizes in
different calls are named by the next pack (`agreement.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from longweave.comm.ledger import Ledger, ledger_of
from longweave.comm.watch import check_unbroken, telling, wait_for
from longweave.errors import GroupError, InputError
from longweave.tensors import accumulation_dtype

T = TypeVar("T")

BUCKET_BYTES = 64 << 20  # of one all-reduce
SMALL = 4096  # elements that every rank sends to every other, instead of summing a part of them each

# One collective under two names: torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Group = dist.ProcessGroup | DeviceMesh | None


@dataclass(frozen=True)
class Comm:
    """A process group seen from this rank. `rank` counts inside the group; torch calls it the group rank.

    It keeps the name of the group, not the group: what autograd or a pack holds on to must not keep a destroyed group
    and its threads alive to the end of the process.
    """

    name: str | None  # None: one process, torch.distributed not initialised
    rank: int
    size: int
    ledger: Ledger

    @classmethod
    def alone(cls, rank: int = 0, size: int = 1) -> Comm:
        """Of a single process; with a size, a rank that plans and never talks."""
        return cls(None, rank, size, ledger_of(None))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group. Raises `GroupError` if it was destroyed, or cannot be used after an error."""
        if self.name is None:
            return None
        if self.ledger.broken is not None:
            raise GroupError(self.ledger.broken)
        found = self.ledger.group
        if found is None:
            raise GroupError(
                "the process group of this pack was destroyed; make packs anew after init_process_group, and call "
                "destroy_process_group after the last backward"
            )
        return found

    @cached_property
    def control_device(self) -> torch.device:
        """Where small control tensors must live to be sent over this group."""
        kinds = self.device_types
        if "cpu" in kinds:
            return torch.device("cpu")
        return torch.device(min(kinds), torch.accelerator.current_device_index())

    @cached_property
    def global_ranks(self) -> list[int]:
        """The ranks of this group as the default group counts them."""
        group = self.group
        return [0] if group is None else dist.get_process_group_ranks(group)

    @property
    def is_cpu_only(self) -> bool:
        """Will this group carry nothing but CPU tensors? gloo offers to carry CUDA tensors on every host."""
        return self.device_types == {"cpu"} or not torch.accelerator.is_available()

    @cached_property
    def device_types(self) -> set[str]:
        group = self.group
        return {"cpu"} if group is None else {device.type for device in group._device_types}


def resolve(group: Group) -> Comm:
    """A Comm for a ProcessGroup, a 1-D DeviceMesh, or None (the default group; one rank if there is none)."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InputError(
                f"group is a DeviceMesh with dimensions {group.mesh_dim_names or group.ndim}; "
                'give the one that splits the sequence, such as mesh["cp"]'
            )
        group = group.get_group()
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            return Comm.alone()
        group = dist.group.WORLD
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError("this process is not a member of the group; call only on the group's own ranks")
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(f"group is a {type(group).__name__}; give a ProcessGroup, a 1-D DeviceMesh or None")
    rank = dist.get_rank(group)
    if rank < 0:
        raise GroupError("this process is not a member of the group; call only on the group's own ranks")
    return Comm(group.group_name, rank, dist.get_world_size(group), ledger_of(group))


def ranks_of(group: Group) -> int:
    """How many ranks there are, also in a mesh of several dimensions."""
    return int(group.size()) if isinstance(group, DeviceMesh) else resolve(group).size


def name_of(group: Group) -> str:
    """A string that tells groups apart; "" is a single process."""
    return resolve(group).name or ""


def group_named(name: str | None) -> Group:
    """The group that has this name (`name_of`); None is the default group, whichever there is by then.

    A model keeps the name of its group: one that kept the group itself would keep its threads alive to the end.
    """
    try:
        return None if not name else _resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise GroupError(f"the process group {name!r} was destroyed; lw.restore the model and pool it anew") from error


# -- on tokens -----------------------------------------------------------------------------------------


class Pending(Generic[T]):
    """A result on its way. `wait()` returns it, the first time after the communication is complete."""

    def __init__(
        self, works: Sequence[dist.Work], finish: Callable[[], T], buffers: Sequence[Tensor] = (),
        comm: Comm | None = None,
    ) -> None:  # fmt: skip
        self._works: Sequence[dist.Work] = works
        self._finish: Callable[[], T] | None = finish
        self._buffers: Sequence[Tensor] = buffers  # what is being sent must not be freed or reused before wait()
        self._ledger = comm.ledger if comm is not None and works else None
        self._result: T
        if self._ledger is not None:
            self._ledger.pending[id(works)] = works

    def wait(self) -> T:
        if self._finish is not None:
            if self._ledger is not None:
                self._ledger.pending.pop(id(self._works), None)
                wait_for(self._works, self._ledger, self._buffers[0].device)
            self._result = self._finish()
            self._finish, self._works, self._buffers = None, (), ()
        return self._result


def done(result: T) -> Pending[T]:
    """A result that is already here."""
    return Pending((), lambda: result)


def all_to_all_v(
    x: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], comm: Comm, into: Tensor | None = None
) -> Pending[Tensor]:
    """Send the first send_splits[0] tokens to rank 0, the next to rank 1, …; receive likewise, in rank order.

    Every rank of the group must call it, also with nothing to send. `into` is a contiguous place for what arrives.
    """
    x = x.contiguous()
    received = x.new_empty((sum(recv_splits), *x.shape[1:])) if into is None else into
    if comm.name is None:
        received.copy_(x)
        return done(received)
    if _by_messages(x):
        outgoing, incoming = torch.split(x, list(send_splits)), torch.split(received, list(recv_splits))
        incoming[comm.rank].copy_(outgoing[comm.rank])
        works = send_receive(
            [(peer, outgoing[peer]) for peer in _others(comm)], [(peer, incoming[peer]) for peer in _others(comm)], comm
        )
        return Pending(works, lambda: received, (x, received), comm)
    stays = send_splits[comm.rank]
    _count_exchange(comm, (len(x) - stays) * (x.nbytes // max(len(x), 1)), x.device)
    group = comm.group
    with telling(comm.ledger):
        work = dist.all_to_all_single(
            _bytes(received), _bytes(x), list(recv_splits), list(send_splits), group=group, async_op=True
        )
    return Pending((work,), lambda: received, (x, received), comm)


def all_gather_v(x: Tensor, counts: Sequence[int], comm: Comm) -> Pending[Tensor]:
    """The tokens of all ranks, in rank order. `counts[r]` is the number of tokens that rank r has."""
    x = x.contiguous()
    if comm.name is None or comm.size == 1:
        return done(x.clone())
    gathered = x.new_empty((sum(counts), *x.shape[1:]))
    if min(counts) == max(counts) and not _by_messages(x):
        if not gathered.numel():
            return done(gathered)
        _count_exchange(comm, x.nbytes * (comm.size - 1), x.device)
        group = comm.group
        with telling(comm.ledger):
            work = _all_gather(_bytes(gathered), _bytes(x), group=group, async_op=True)
        return Pending((work,), lambda: gathered, (x, gathered), comm)
    # Each rank sends its tokens to every other, straight into place.
    slots = torch.split(gathered, list(counts))
    slots[comm.rank].copy_(x)
    works = send_receive([(peer, x) for peer in _others(comm)], [(peer, slots[peer]) for peer in _others(comm)], comm)
    return Pending(works, lambda: gathered, (x, gathered), comm)


def reduce_scatter_v(x: Tensor, counts: Sequence[int], comm: Comm) -> Pending[Tensor]:
    """`x` has tokens for every rank, in rank order; returns the SUM over ranks of the tokens for this one.

    Adds in float32 (float64 for float64) in rank order: the same bits every run, whatever the dtype that travels.
    """
    mine = counts[comm.rank]
    dtype = sum_dtype(x.dtype)
    starts = [0, *accumulate(counts)]
    own = x[starts[comm.rank] : starts[comm.rank + 1]].clone()  # a view would keep all of x until wait()
    if comm.name is None or comm.size == 1:
        return done(own)
    recv_splits = [0 if peer == comm.rank else mine for peer in range(comm.size)]
    send_splits = [0 if peer == comm.rank else n for peer, n in enumerate(counts)]
    outgoing = torch.cat([x[: starts[comm.rank]], x[starts[comm.rank + 1] :]])
    pending = all_to_all_v(outgoing, send_splits, recv_splits, comm)
    trailing, given = x.shape[1:], x.dtype  # `finish` must not hold on to x

    def finish() -> Tensor:
        others = pending.wait().view(comm.size - 1, mine, *trailing)
        if own.is_cuda:  # few kernels however many ranks there are; their order does not change either
            before, after = others[: comm.rank].sum(0, dtype=dtype), others[comm.rank :].sum(0, dtype=dtype)
            return before.add_(own).add_(after).to(given)
        parts = list(others.unbind())
        parts.insert(comm.rank, own)
        return _sum_in_order(parts, dtype).to(given)

    return Pending((), finish, (own,))


def _sum_in_order(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total


def send_next(x: Tensor, into: Tensor, to: int, source: int, comm: Comm) -> Pending[Tensor]:
    """Send `x` to group rank `to` while `into` fills from group rank `source`: one step of a ring."""
    return Pending(send_receive([(to, x)], [(source, into)], comm), lambda: into, (x, into), comm)


def send_receive(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], comm: Comm
) -> list[dist.Work]:
    """Post point-to-point messages to and from group ranks; contiguous tensors, received in place.

    Empty ones are not sent. Every rank of the group must call it, also with nothing to send: calls are counted.
    """
    device = next((x.device for _, x in (*sends, *receives)), torch.device("cpu"))
    sends = [(peer, x) for peer, x in sends if x.numel()]
    receives = [(peer, x) for peer, x in receives if x.numel()]
    _count_exchange(comm, sum(x.nbytes for _, x in sends), device, [peer for peer, _ in sends])
    if not sends and not receives:
        return []
    group = comm.group
    assert group is not None
    if not _by_messages((sends or receives)[0][1]):
        ops = [dist.P2POp(dist.isend, _bytes(x), group=group, group_peer=peer) for peer, x in sends]
        ops += [dist.P2POp(dist.irecv, _bytes(x), group=group, group_peer=peer) for peer, x in receives]
        with telling(comm.ledger):
            return dist.batch_isend_irecv(ops)
    with telling(comm.ledger):
        works = [group.recv([_bytes(x)], peer, _tag(comm.ledger, x)) for peer, x in receives]
        works += [group.send([_bytes(x)], peer, _tag(comm.ledger, x)) for peer, x in sends]
    return works


def _by_messages(x: Tensor) -> bool:
    """Between CPUs. Devices have collectives of their own, which send everything at once and never abort."""
    return x.device.type == "cpu"


def _count_exchange(comm: Comm, bytes_sent: int, device: torch.device, peers: Sequence[int] = ()) -> None:
    if device.type not in comm.device_types:
        raise InputError(
            f"a tensor on {device.type} came in, but the process group carries "
            f"{', '.join(sorted(comm.device_types))} only"
            '; move it there, or make the group with a backend for both, such as "cpu:gloo,cuda:nccl"'
        )
    comm.ledger.exchanges += 1
    comm.ledger.bytes_sent += bytes_sent
    if comm.ledger.observer is not None:
        comm.ledger.observer.sends(bytes_sent, list(peers))


def _tag(ledger: Ledger, x: Tensor) -> int:
    """30 bits, different for exchanges that are under way at the same time."""
    mixed = x.nbytes * 0x9E37_79B9_7F4A_7C15 & 0xFFFF_FFFF_FFFF_FFFF
    return (ledger.exchanges & 0x7FF) << 19 | mixed >> 45


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed across ranks: integers and wide floats in their own."""
    return accumulation_dtype(dtype) if dtype.is_floating_point else dtype


def all_reduce_sum(tensors: Iterable[Tensor], comm: Comm) -> Iterator[Tensor]:
    """The sums over ranks, as new tensors of the same dtypes, in few messages: one bucket of them exists at a time.

    Every rank must give tensors of the same shapes in the same order, and take all of them. Carries no gradient.
    """
    for bucket in _buckets(tensors):
        flat = torch.cat([x.detach().reshape(-1).to(sum_dtype(x.dtype)) for x in bucket])
        if comm.name is not None and comm.size > 1 and flat.numel():
            flat = _all_reduced(flat, comm)
        sizes = [x.numel() for x in bucket]
        yield from (part.view(x.shape).to(x.dtype) for part, x in zip(torch.split(flat, sizes), bucket, strict=True))


def _all_reduced(flat: Tensor, comm: Comm) -> Tensor:
    """Between CPUs in rank order, so that every rank has the same bits."""
    if not _by_messages(flat):
        _count_exchange(comm, flat.nbytes, flat.device)
        group = comm.group
        with telling(comm.ledger):
            work = dist.all_reduce(flat, group=group, async_op=True)
        return Pending((work,), lambda: flat, (flat,), comm).wait()
    if len(flat) <= SMALL:
        everyone = all_gather_v(flat, [len(flat)] * comm.size, comm).wait().view(comm.size, -1)
        return _sum_in_order(everyone.unbind(), flat.dtype)
    borders = [len(flat) * rank // comm.size for rank in range(comm.size + 1)]
    counts = [stop - start for start, stop in pairwise(borders)]
    return all_gather_v(reduce_scatter_v(flat, counts, comm).wait(), counts, comm).wait()


def received_on_host(x: Tensor, comm: Comm) -> Tensor:
    """What an exchange has brought, for host code to read. A device whose exchange was ended brings anything."""
    found = x.cpu()  # waits for the device
    check_unbroken(comm.ledger)
    return found


def is_sharded(x: Tensor) -> bool:
    """Whether others hold parts of this tensor."""
    return isinstance(x, DTensor)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of neighbours with one dtype and device, about BUCKET_BYTES each."""
    bucket: list[Tensor] = []
    filled = 0
    for x in tensors:
        alike = bucket and (x.dtype, x.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and not (alike and filled < BUCKET_BYTES):
            yield bucket
            bucket, filled = [], 0
        bucket.append(x)
        filled += x.numel() * max(x.element_size(), 4)
    if bucket:
        yield bucket


def _others(comm: Comm) -> list[int]:
    """All other ranks, the next one first: not every rank then starts with rank 0."""
    return [(comm.rank + step) % comm.size for step in range(1, comm.size)]


def _bytes(x: Tensor) -> Tensor:
    """The same memory as a (tokens, bytes) tensor. Needs a contiguous tensor."""
    # Flat first, and not by `view`: a dimension of size 1 may have any stride, also in a contiguous tensor.
    return (
        x.as_strided((x.numel(),), (1,)).view(torch.uint8).view(x.shape[0], -1)
        if x.numel()
        else x.new_empty((x.shape[0], 0), dtype=torch.uint8)
    )
