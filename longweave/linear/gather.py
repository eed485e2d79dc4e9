"""`lw.gather_recompute`: any sequence module on the gathered sequence, keeping only the local input.

    forward     x_local ─ gather ─▶ x ─ fn ─▶ y ─ my tokens ─▶ y_local        kept: x_local
    backward    x_local ─ gather ─▶ x ─ fn ─▶ y                               the same random numbers as in forward

    param_grads      gradient of y that is used         dx                              gradient of each parameter
    "part"           mine; zero at others' tokens       reduce-scatter, added float32   my part; SUM over ranks is whole
    "full"           of all tokens (gathered, too)      my tokens of it: whole          whole on every rank: do not sum

With "full", a reduction over the ranks would count every parameter gradient once for each of them. It is for frameworks
that do not reduce over this group. Everything else in this library follows "part".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longweave.comm.exchange import all_gather_v, received_on_host
from longweave.comm.ledger import call_of
from longweave.core import PackCore
from longweave.errors import InputError, shown
from longweave.pack import Pack, checked_core
from longweave.tensors import check_device, check_tensor, eager, kind_of, on_one_device
from longweave.tokens import Shards

PARAM_GRADS = ("part", "full")


@eager
def gather_recompute(
    fn: Callable[..., Tensor],
    x_local: Tensor | Sequence[Tensor],
    pack: Pack,
    params: Sequence[Tensor] = (),
    param_grads: str = "part",
) -> Tensor:
    """fn over the whole sequence, from and to this rank's tokens. For modules that have nothing better.

    fn: takes the full tensor(s), tokens first and in token order, and returns one tensor with the same tokens first.
        It is called twice, with the same random numbers, and must compute the same both times.
    x_local: (tokens, …), this rank's tokens in the order of `pack.layout`; or several such tensors.
    params: every tensor that fn uses and that needs a gradient. Not needed if fn is a module: its parameters are taken.
    param_grads: "part" or "full", see `longweave.linear.gather`.

    Returns this rank's tokens of fn's result. Every rank computes all tokens: time does not shrink with the ranks,
    memory kept for backward does. Raises `InputError` before anything is sent if the arguments do not fit, and in
    backward if fn turns out to use a tensor that needs a gradient and is not among `params`.

        y_local = lw.gather_recompute(mamba, x_local, pack)
    """
    core = checked_core(pack)
    xs = tuple(x_local) if isinstance(x_local, list | tuple) else (x_local,)
    misfit = _misfit(fn, params)
    if misfit is None and not len(params) and isinstance(fn, nn.Module):
        params = tuple(fn.parameters())
    kind = ("gather_recompute of", *map(kind_of, xs), "param_grads", param_grads, on_one_device(*xs), misfit or "")
    with core.enter(kind, lambda: _check(xs, core, param_grads, misfit), xs).forward():
        return gathered(fn, xs, core.shards, params, whole_param_grads=param_grads == "full")


def gathered(
    fn: Callable[..., Tensor],
    xs: Sequence[Tensor],
    shards: Shards,
    params: Sequence[Tensor] = (),
    *,
    whole_param_grads: bool = False,
) -> Tensor:
    """As `gather_recompute`, without checks."""
    run = _GatherCall(fn, shards, len(xs), whole_param_grads)
    wanted = [p for p in params if p.requires_grad]
    out: Tensor = _GatherRecompute.apply(run, *xs, *wanted)  # type: ignore[no-untyped-call]
    return out


def _misfit(fn: object, params: object) -> str | None:
    """What is wrong with arguments that are no part of the kind of a call, and so are looked at in every call."""
    if not callable(fn):
        return f"fn is {shown(fn)}; give a module, or a function of the full tensors"
    if not isinstance(params, Sequence) or not all(isinstance(p, Tensor) for p in params):
        return f"params is {shown(params)}; give a list of the tensors that fn uses, such as list(module.parameters())"
    return None


def _check(xs: Sequence[Tensor], core: PackCore, param_grads: str, misfit: str | None) -> None:
    if misfit is not None:
        raise InputError(misfit)
    if not isinstance(param_grads, str) or param_grads not in PARAM_GRADS:
        raise InputError(f'param_grads is {shown(param_grads)}; choose "part" or "full"')
    if not xs:
        raise InputError("x_local is empty; give a tensor with this rank's tokens first, or several such tensors")
    for x in xs:
        check_tensor("x_local", x)
    core.check_tokens(*xs)
    for x in xs[1:]:
        check_device("one x_local", x, "another", xs[0])


@dataclass(frozen=True)
class _GatherCall:
    """What forward and backward share."""

    fn: Callable[..., Tensor]
    shards: Shards
    count: int  # tensors of tokens; the others are parameters
    whole_param_grads: bool


class _GatherRecompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _GatherCall, *tensors: Tensor) -> Tensor:
        xs, shards = tensors[: run.count], run.shards
        ctx.run, ctx.surroundings = run, _Surroundings(xs[0].device, run)
        ctx.call = call_of(shards.comm.ledger, "gather_recompute")
        ctx.save_for_backward(*tensors)  # parameters too: autograd notices when one was changed before backward
        ctx.params = tensors[run.count :]  # the ones that `fn` uses: a checkpoint unpacks others in their place
        with ctx.surroundings.again():
            y = run.fn(*(shards.gather(x.detach()) for x in xs))
        if not isinstance(y, Tensor) or not y.ndim or len(y) != shards.layout.total:
            seen = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise InputError(f"fn returned {seen}; it must return a tensor with all {shards.layout.total} tokens first")
        return shards.mine(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_local: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.call.backward():
            return _GatherRecompute._again(ctx, d_local)

    @staticmethod
    def _again(ctx: Any, d_local: Tensor) -> tuple[Tensor | None, ...]:
        """Gather and run `fn` once more, then bring its gradients home."""
        run, shards = ctx.run, ctx.run.shards
        saved = ctx.saved_tensors[: run.count]  # asked for once: a checkpoint unpacks only once
        needs = ctx.needs_input_grad[1 : 1 + run.count]
        xs = [shards.gather(x.detach()).requires_grad_(need) for x, need in zip(saved, needs, strict=True)]
        with ctx.surroundings.again(), torch.enable_grad():
            y = run.fn(*xs)
        wanted = [x for x, need in zip(xs, needs, strict=True) if need] + list(ctx.params)
        _refuse_unknown(y, wanted)
        dy = shards.gather(d_local) if run.whole_param_grads else shards.spread(d_local)
        found = list(torch.autograd.grad(y, wanted, dy, allow_unused=True)) if y.requires_grad else [None] * len(wanted)
        home = shards.mine if run.whole_param_grads else shards.sum_home
        d_xs: list[Tensor | None] = []
        for x, need in zip(xs, needs, strict=True):
            if need:
                dx = found.pop(0)
                d_xs.append(home(torch.zeros_like(x) if dx is None else dx))  # every rank takes part in the sum
            else:
                d_xs.append(None)
        return None, *d_xs, *found


class _Surroundings:
    """Random state and autocast of forward, for backward. With "full", rank 0's random numbers on every rank:
    each of them then answers for the outputs of all.
    """

    def __init__(self, device: torch.device, run: _GatherCall) -> None:
        self.device = device
        self.autocast = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        self.seed: int | None = None
        comm = run.shards.comm
        if run.whole_param_grads and comm.size > 1:
            seed = torch.randint(1 << 62, (1, 1), device=comm.control_device)
            self.seed = int(received_on_host(all_gather_v(seed, [1] * comm.size, comm).wait(), comm)[0])
        self.states = (
            [torch.get_rng_state()] if device.type == "cpu" else [torch.get_rng_state(), _device_state(device)]
        )
        self.used = False

    @contextmanager
    def again(self) -> Iterator[None]:
        """The first time, random numbers are drawn as usual (unless seeded); later, the same ones, leaving no trace."""
        enabled, dtype = self.autocast
        with torch.autocast(self.device.type, dtype=dtype, enabled=enabled):
            if not self.used and self.seed is None:
                self.used = True
                yield
                return
            with torch.random.fork_rng(
                [] if self.device.type == "cpu" else [self.device], device_type=self.device.type
            ):
                if self.seed is not None:
                    torch.manual_seed(self.seed)
                else:
                    torch.set_rng_state(self.states[0])
                    if self.device.type != "cpu":
                        torch.get_device_module(self.device).set_rng_state(self.states[1], self.device)
                yield


def _device_state(device: torch.device) -> Tensor:
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _refuse_unknown(y: Tensor, wanted: Sequence[Tensor]) -> None:
    """Raise if y depends on a leaf that needs a gradient and would not get one."""
    known = {id(t) for t in wanted}
    stop = {t.grad_fn for t in wanted if t.grad_fn is not None}
    todo, seen = [y.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen or node in stop:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise InputError(
                f"fn uses a tensor of shape {tuple(leaf.shape)} that needs a gradient but is not among params; "
                "pass it in params, or detach it"
            )
        todo.extend(next_node for next_node, _ in node.next_functions)
