"""Losses of one rank's tokens, normalised by the whole batch, and the sum of gradients over ranks.

    loss of a rank = Σ over its valid tokens of weight · −log p(label)  /  number of valid tokens on all ranks

The SUM over ranks is the mean over the batch, and the SUM of the gradients is its gradient. A rank without valid tokens
has the loss 0, which still takes part in backward: the other ranks wait for its share of every exchange.

    plain PyTorch   loss.backward(); lw.reduce_gradients(model, mesh["cp"])      SUM, nothing to scale
    DDP, FSDP2      (loss * lw.loss_scale(mesh)).backward()                      they average: undo it beforehand
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longweave.comm.agreement import Fact, compare
from longweave.comm.exchange import Comm, Group, all_reduce_sum, is_sharded, ranks_of, received_on_host, resolve
from longweave.comm.ledger import RecordedCall
from longweave.errors import InputError, shown
from longweave.plan.ranges import as_list, check_number
from longweave.tensors import check_device, check_tensor, widened
from longweave.tokens import Shards

# -- losses --------------------------------------------------------------------------------------------


def nll(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """−log p of each target in at least float32, 0 for ignored ones. logits (n, V), targets (n,)."""
    return F.cross_entropy(widened(logits), targets, ignore_index=ignore_index, reduction="none")


def weighted_sum(logits: Tensor, targets: Tensor, weights: Tensor | None, ignore_index: int) -> Tensor:
    losses = nll(logits, targets, ignore_index)
    return losses.sum() if weights is None else (losses * weights.to(losses.dtype)).sum()


def chunked_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor | None,
    ignore_index: int,
    chunk: int,
) -> Tensor:
    """As `weighted_sum` of the logits `hidden @ weight.T + bias`, of which only `chunk` tokens exist at a time.

    Backward computes the logits of each chunk again.
    """

    def part(h: Tensor, w: Tensor, b: Tensor | None, t: Tensor, by: Tensor | None) -> Tensor:
        return weighted_sum(F.linear(h, w, b), t, by, ignore_index)

    total: Tensor | None = None
    for start in range(0, len(hidden), chunk):
        at = slice(start, start + chunk)
        by = None if weights is None else weights[at]
        one: Tensor = checkpoint(part, hidden[at], weight, bias, targets[at], by, use_reentrant=False)
        total = one if total is None else total + one
    assert total is not None
    return total


def check_output_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise InputError unless logits `hidden @ weight.T + bias` can be made."""
    if is_sharded(weight):
        raise InputError(
            "the weight of the output layer is sharded (a DTensor); give fully_shard a model without its output layer, "
            "or call batch.loss(model(**batch.inputs).logits)"
        )
    cast = torch.is_autocast_enabled(hidden.device.type)
    for name, x in {"weight": weight, **({} if bias is None else {"bias": bias})}.items():
        check_tensor(name, x, floating=True)
        check_device(name, x, "hidden", hidden)
        if x.dtype != hidden.dtype and not cast:
            raise InputError(f"{name} is {x.dtype} and hidden {hidden.dtype}; cast them to one dtype")
    if weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise InputError(
            f"hidden has {hidden.shape[-1]} features and the weight the shape {tuple(weight.shape)}; "
            "give hidden states and the (vocabulary, features) weight of the output layer"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"bias has the shape {tuple(bias.shape)}; give ({weight.shape[0]},), one per vocabulary entry")


class GatherSame(torch.autograd.Function):
    """The full tensor on every rank, for a loss that every rank computes alike from it.

    Each rank's own gradient then already is that of the whole loss with respect to its tokens, so backward keeps its
    part and sends nothing. (`pack.unshard` is for ranks that go on with different parts of the loss: it adds them up.)
    """

    @staticmethod
    def forward(ctx: Any, x_local: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return shards.gather(x_local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        shards: Shards = ctx.shards
        return shards.mine(grads[0]), None


# -- gradients -----------------------------------------------------------------------------------------


def reduce_gradients(model: nn.Module | Iterable[Tensor], group: Group = None) -> None:
    """Replace every gradient by its SUM over the ranks of the group: the full gradient, on every rank. In place.

    model: a module, or its parameters. A parameter that has a gradient on some ranks only (an expert that no token of
    this rank chose) counts as 0 elsewhere; one without any stays without. Sums are float32 for smaller dtypes.

    Parameters that are sharded over other ranks than the group's (tensor parallel) are summed shard by shard. Not for
    DistributedDataParallel or FSDP over the group, which reduce by themselves: see `lw.loss_scale`. Raises `InputError`
    for FSDP and `GroupError` where the ranks' parameters differ.
    """
    comm = resolve(group)
    parameters: list[Tensor] = []
    problem: Exception | None = None
    held: list[object] = []
    try:
        parameters = _trained(model)
        _refuse_fsdp(parameters, comm)
        held = [(tuple(_local(p).shape), _grad_dtype(p)) for p in parameters]
    except Exception as error:
        problem = error
    same_parameters = Fact(
        str(held),
        "holds",
        "other parameters than the rest",
        "call lw.reduce_gradients with the same parameters, of the same shapes and dtypes, in the same order, on every "
        "rank",
    )
    compare(comm, [same_parameters], problem, "reduce_gradients")
    with RecordedCall(comm.ledger, "reduce_gradients").forward():
        _reduce(parameters, comm)


def _trained(model: object) -> list[Tensor]:
    """The parameters that get gradients."""
    problem = f"model is {shown(model)}; give a module, or a list of its parameters"
    if isinstance(model, Tensor):
        raise InputError(problem)
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else as_list(model, problem)
    for p in parameters:
        check_tensor("a parameter", p)
    return [p for p in parameters if p.requires_grad]


def _reduce(parameters: Sequence[Tensor], comm: Comm) -> None:
    if comm.size == 1 or not parameters:
        return
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=comm.control_device)
    present = received_on_host(next(all_reduce_sum([has], comm)), comm).tolist()
    grads = [_own_grad(p) for p, count in zip(parameters, present, strict=True) if count]
    for grad, total in zip(grads, all_reduce_sum(grads, comm), strict=True):
        grad.copy_(total)


def _own_grad(parameter: Any) -> Tensor:
    """What this rank holds of the gradient, to be changed in place."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=_grad_dtype(parameter))
    elif is_sharded(parameter) and parameter.grad.placements != parameter.placements:
        # Tensor parallel leaves some gradients as partial sums; all ranks of that mesh are here with the same ones.
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return _local(parameter.grad)


def _local(x: Any) -> Tensor:
    """What this rank holds of a parameter or a gradient."""
    local: Tensor = x.detach().to_local() if is_sharded(x) else x.detach()
    return local


def _refuse_fsdp(parameters: Sequence[Any], comm: Comm) -> None:
    """Ranks of the group must hold the same shards: none may be sharded over the group itself."""
    members = set(comm.global_ranks)
    meshes = {p.device_mesh for p in parameters if is_sharded(p)}
    if any(len(members.intersection(mesh.mesh.flatten().tolist())) > 1 for mesh in meshes):
        raise InputError(
            "the parameters are sharded over this group (FSDP), and FSDP reduces their gradients itself; multiply the "
            "loss by lw.loss_scale(mesh) before backward instead"
        )


def _grad_dtype(parameter: Tensor) -> torch.dtype:
    """What the gradient of a parameter is or would be."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def loss_scale(mesh: Group = None) -> int:
    """What to multiply the loss by where gradients are averaged (DDP, FSDP2): the number of ranks of the mesh.

    mesh: the mesh, of any dimensions, or the group over which DDP or FSDP averages, such as the whole dp × cp mesh;
    None is the default group.
    Right for a loss that is divided by the valid tokens of *all* data-parallel replicas,
    `batch.loss(logits, num_items=lw.reduce_sum(batch.num_valid, mesh["dp"]))`. If instead each replica's mean should
    weigh the same, take the loss without `num_items` and the scale of the cp dimension, `lw.loss_scale(mesh["cp"])`.
    """
    return ranks_of(mesh)


def reduce_sum(value: float, group: Group = None) -> float:
    """The SUM of a number over the ranks of a group, such as valid tokens over data-parallel replicas."""
    comm = resolve(group)
    if isinstance(value, Tensor):
        check_tensor("value", value)
        value = value.item() if value.numel() == 1 else value.tolist()
    is_nan = isinstance(value, float) and value != value  # a number as well: the other ranks are to see it
    number = value if is_nan else check_number("value", value, "give a number")
    x = torch.tensor([number], dtype=torch.float64, device=comm.control_device)
    with RecordedCall(comm.ledger, "reduce_sum").forward():
        return float(received_on_host(next(all_reduce_sum([x], comm)), comm))
