"""Who races, on one of the ranks: each contestant is a pass that can be timed, and its whole answer, to be compared.

    one causal document   ours: ring on zigzag          ring-flash-attention zigzag, torch context_parallel,
                                                        one process with all threads, the kernel's own rate
    packed documents      ours: group-cast, balanced    ring-flash-attention llama3, one process with all threads
    delta rule            ours                          Hugging Face's torch form
    training step         ours: documents cut zigzag    plain DDP: every rank its own document

All begin from the same tensors; a layout says which tokens of them a rank has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import longweave as lw
from longweave.kernels.attention import attend, attend_backward
from longweave.kernels.attention.partial import QuerySide, Tasks
from longweave.plan.cost import areas
from longweave.tools.bench import attention, linear
from longweave.tools.bench.peers import results
from longweave.tools.bench.peers.flash_stand_in import AbsentError, ring_flash_attention
from longweave.tools.bench.pool import PoolWorkload

Tensors = tuple[Tensor, ...]
RECTANGLE = 2048, 4096  # queries and keys


@dataclass(frozen=True)
class Contestant:
    """`answer` gives whole tensors, the same on every rank; None where there is nothing to compare. The time of a
    pass counts `share` times: it may be a piece of the work.
    """

    call: Callable[[], object]
    answer: Callable[[], Tensors] | None
    share: float = 1.0


# -- softmax attention ---------------------------------------------------------------------------------


def _attention(layout: lw.Layout, fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Contestant:
    """fn: this rank's q, k, v (tokens, heads, dim) under `layout` → out."""
    torch.manual_seed(0)
    q, k, v, grad = (lw.shard(x.detach(), layout) for x in attention.inputs(layout.total))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def call() -> Tensors:
        out = fn(q, k, v)
        return out, *torch.autograd.grad(out, leaves, grad)

    return Contestant(call, lambda: tuple(lw.unshard(x.detach(), layout) for x in call()))


def ours_attention(cu: list[int], case: str) -> Contestant:
    layout, strategy = ("zigzag", "ring") if case == results.DOCUMENT else ("balanced", "groupcast")
    pack = lw.Pack(cu, layout=layout, strategy=strategy)
    return _attention(pack.layout, lambda q, k, v: lw.attention(q, k, v, pack))


def rfa_zigzag(cu: list[int], case: str) -> Contestant:
    package, world = ring_flash_attention(), dist.get_world_size()
    if cu[-1] % (2 * world):
        raise AbsentError(f"needs tokens that {2 * world} divides, {cu[-1]} given")

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = package.zigzag_ring_flash_attn_func(q[None], k[None], v[None], causal=True)[0]
        return out

    return _attention(lw.Layout.zigzag([0, cu[-1]], world), fn)


def rfa_llama3(cu: list[int], case: str) -> Contestant:
    package, world = ring_flash_attention(), dist.get_world_size()
    if cu[-1] % world:
        raise AbsentError(f"needs tokens that {world} divides, {cu[-1]} given")
    borders = torch.tensor(cu, dtype=torch.int32)
    cu_q, cu_k, most_q, most_k, keys = package.llama3_flash_attn_prepare_cu_seqlens(
        borders, causal=True, rank=dist.get_rank(), world_size=world
    )

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = package.llama3_flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, most_q, most_k, heads_k_stride=1, local_k_slice=keys, causal=True
        )
        return out

    return _attention(lw.Layout.contiguous(cu[-1], world), fn)


def context_parallel(cu: list[int], case: str) -> Contestant:
    """torch's own. Its SDPA takes one document, and its ring no grouped K/V heads, which are repeated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import experimental

    world, groups = dist.get_world_size(), attention.HEADS // attention.KV_HEADS
    if cu[-1] % (2 * world):
        raise AbsentError(f"needs tokens that {2 * world} divides, {cu[-1]} given")
    mesh = init_device_mesh("cpu", (world,))

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        own = torch.empty(cu[-1])  # it wants something to cut; q, k and v are cut already
        with experimental.context_parallel(mesh, buffers=[own], buffer_seq_dims=[0], no_restore_buffers={own}):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out[0].transpose(0, 1)

    found = _attention(lw.Layout.zigzag([0, cu[-1]], world), fn)
    try:
        found.call()
    except Exception as error:  # on all ranks alike: nothing was sent yet
        raise AbsentError(f"torch {torch.__version__} on CPU: {str(error).splitlines()[0]}") from error
    return found


def one_process(cu: list[int], case: str) -> Contestant:
    """Rank 0 has all tokens and a thread for every core; the others wait."""
    world = dist.get_world_size()
    layout = lw.Layout.from_spans(cu[-1], [[(0, cu[-1])], *[[] for _ in range(world - 1)]])
    tasks = Tasks(lw.Mask.causal(cu).rows)
    torch.manual_seed(0)
    q, k, v, grad = (lw.shard(x.detach(), layout) for x in attention.inputs(cu[-1]))

    def call() -> Tensors:
        if dist.get_rank():
            return torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)
        try:
            out, lse = attend(q, k, v, tasks)
            return out, *attend_backward(QuerySide(grad, q, out, lse), k, v, tasks)
        finally:
            torch.set_num_threads(threads)

    return Contestant(call, lambda: tuple(lw.unshard(x, layout) for x in call()))


def kernel_rate(cu: list[int], case: str) -> Contestant:
    """What the largest share of a rank would take at the bare kernel's rate on a rectangle, on all ranks at once."""
    share = float(areas(lw.Mask.causal(cu), lw.Layout.zigzag(cu, dist.get_world_size())).max())
    queries, keys = (min(size, cu[-1]) for size in RECTANGLE)
    return Contestant(attention.rectangle(queries, keys), None, share / (queries * keys))


# -- the delta rule ------------------------------------------------------------------------------------


def _delta(fn: Callable[..., Tensor], tokens: int, case: str) -> Contestant:
    leaves = [x.requires_grad_() for x in linear.inputs(tokens)]
    grad = torch.randn(len(leaves[0]), linear.HEADS, linear.DIM)

    def call() -> Tensors:
        if case == results.DELTA_FORWARD:
            with torch.no_grad():
                return (fn(*leaves),)
        out = fn(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return Contestant(call, call)


def ours_delta(cu: list[int], case: str) -> Contestant:
    pack = lw.Pack(cu)
    return _delta(lambda q, k, v, g, beta: lw.gated_delta_rule(q, k, v, g, beta, pack), cu[-1], case)


def hugging_face_delta(cu: list[int], case: str) -> Contestant:
    try:
        return _delta(linear.hugging_face(), cu[-1], case)
    except ImportError as error:
        raise AbsentError(f"{error}: pip install 'longweave[hf]'") from error


# -- a training step -------------------------------------------------------------------------------------

# The same documents, weights and gradients: what is left is the price of splitting, which a document that does not fit
# on one rank has to pay.
WORKLOAD = PoolWorkload("dense", layers=2)


def _ids(tokens: int) -> Tensor:
    return torch.randint(WORKLOAD.vocabulary, (tokens,), generator=torch.Generator().manual_seed(0))


def _contestant(model: nn.Module, step: Callable[[], Tensor]) -> Contestant:
    """step: forward and backward → this rank's part of the loss of all."""

    def call() -> Tensor:
        model.zero_grad(set_to_none=True)
        return step()

    def answer() -> Tensors:
        loss = call().detach().clone()
        dist.all_reduce(loss)
        return loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)

    return Contestant(call, answer)


def ours_step(cu: list[int], case: str) -> Contestant:
    model = lw.parallelize(_model())
    ids = _ids(cu[-1])

    def step() -> Tensor:
        batch = lw.shard_batch(ids, cu, layout="zigzag")
        loss: Tensor = batch.loss(model(**batch.inputs).logits)
        loss.backward()  # type: ignore[no-untyped-call]
        lw.reduce_gradients(model)
        return loss

    return _contestant(model, step)


def ddp_step(cu: list[int], case: str) -> Contestant:
    model = DistributedDataParallel(_model())
    start, stop = list(pairwise(cu))[dist.get_rank()]
    ids = _ids(cu[-1])[None, start:stop]

    def step() -> Tensor:
        loss: Tensor = model(ids, labels=ids, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss / dist.get_world_size()

    return _contestant(model, step)


def _model() -> nn.Module:
    try:
        model: nn.Module = WORKLOAD.model()
    except ImportError as error:
        raise AbsentError(f"{error}: pip install 'longweave[hf]'") from error
    return model


Maker = Callable[[list[int], str], Contestant]  # of the borders of documents, and of the case
CONTESTANTS: dict[str, dict[str, Maker]] = {
    results.DOCUMENT: {
        results.OURS: ours_attention,
        results.ZIGZAG: rfa_zigzag,
        results.CONTEXT_PARALLEL: context_parallel,
        results.ONE_PROCESS: one_process,
        results.KERNEL: kernel_rate,
    },
    results.PACKED: {
        results.OURS: ours_attention,
        results.LLAMA3: rfa_llama3,
        results.ONE_PROCESS: one_process,
    },
    results.DELTA_FORWARD: {results.OURS: ours_delta, results.HUGGING_FACE: hugging_face_delta},
    results.DELTA: {results.OURS: ours_delta, results.HUGGING_FACE: hugging_face_delta},
    results.STEP: {results.OURS: ours_step, results.DDP: ddp_step},
}
