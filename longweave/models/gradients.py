"""Gradients over ranks. Each rank's gradient is the part that its own tokens' loss causes; the SUM is the full one.

plain PyTorch   loss.backward(); lw.reduce_gradients(model, mesh["cp"])          SUM, nothing to scale
DDP, FSDP2      (loss * lw.loss_scale(mesh)).backward()                          they average: undo it beforehand
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from longweave.comm.agree import agree
from longweave.comm.groups import Comm, Group, ranks_of, resolve
from longweave.comm.reduce import all_reduce_sum, is_sharded
from longweave.errors import InputError


def reduce_gradients(model: nn.Module | Iterable[Tensor], group: Group = None) -> None:
    """Replace every gradient by its SUM over the ranks of the group: the full gradient, on every rank. In place.

    model: a module, or its parameters. A parameter that has a gradient on some ranks only (an expert that no token of
    this rank chose) counts as 0 elsewhere; one without any stays without. Sums are float32 for smaller dtypes.

    Not for DistributedDataParallel or FSDP, which reduce by themselves: see `lw.loss_scale`.
    """
    comm = resolve(group)
    parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
    parameters = [p for p in parameters if p.requires_grad]
    problem = None
    if any(is_sharded(p) for p in parameters):
        problem = InputError(
            "the parameters are sharded (FSDP), and FSDP reduces their gradients itself; multiply the loss by "
            "lw.loss_scale(mesh) before backward instead"
        )
    shapes = [tuple(p.shape) for p in parameters]
    agree(
        comm,
        [_Shapes(str(shapes))],
        "reduce_gradients",
        problem,
        what="hold other parameters than the rest",
        remedy="call lw.reduce_gradients with the same parameters, in the same order, on every rank",
    )
    _reduce(parameters, comm)


def _reduce(parameters: list[Tensor], comm: Comm) -> None:
    if comm.size == 1 or not parameters:
        return
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=comm.control_device)
    present = all_reduce_sum([has], comm)[0].tolist()
    live = [p for p, count in zip(parameters, present, strict=True) if count]
    sums = all_reduce_sum([torch.zeros_like(p) if p.grad is None else p.grad for p in live], comm)
    for p, total in zip(live, sums, strict=True):
        if p.grad is None:
            p.grad = total
        else:
            p.grad.copy_(total)


def loss_scale(mesh: Group) -> int:
    """What to multiply the loss by where gradients are averaged (DDP, FSDP2): the number of ranks of the mesh.

    mesh: the mesh, of any dimensions, or the group over which DDP or FSDP averages, such as the whole dp × cp mesh.
    Right for a loss that is divided by the valid tokens of *all* data-parallel replicas,
    `batch.loss(logits, num_items=lw.reduce_sum(batch.num_valid, mesh["dp"]))`. If instead each replica's mean should
    weigh the same, take the loss without `num_items` and the scale of the cp dimension, `lw.loss_scale(mesh["cp"])`.
    """
    return ranks_of(mesh)


def reduce_sum(value: float, group: Group = None) -> float:
    """The SUM of a number over the ranks of a group, such as valid tokens over data-parallel replicas."""
    comm = resolve(group)
    x = torch.tensor([value], dtype=torch.float64, device=comm.control_device)
    return float(all_reduce_sum([x], comm)[0])


class _Shapes:
    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.agreed_on: WeakSet[Any] = WeakSet()
