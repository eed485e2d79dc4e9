"""What a pack holds dies with it: by reference counting alone, after any operator, and over thousands of steps."""

import gc
import os
import sys
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import longweave as lw
from longweave.core import PackCore
from longweave.kernels.attention.partial import Tasks
from longweave.launch import Ranks
from longweave.plan.fragments import Fragments
from longweave.plan.schedule import Plan
from longweave.softmax.calls import PlannedCall
from longweave.tensors import Indices
from longweave.tokens import Shards, TokenRoute

FULL = bool(os.environ.get("LONGWEAVE_FULL"))  # `make test-all`
KINDS = (lw.Pack, PackCore, lw.Layout, lw.Mask, Plan, Tasks, Indices, Fragments, Shards, TokenRoute, PlannedCall)
STRATEGIES = ("groupcast", "ring", "allgather", "ulysses")
METHODS = ("affine", "reshard", "gather")
ROOM = 8 << 20  # by which the heap of a process moves for other reasons
# What Python itself keeps for its next objects is filled step by step, fast at first: blocks of memory a step.
BLOCKS = 10 if FULL else 150


class Layer(nn.Module):
    """Attention, convolution and the gated delta rule on (tokens, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.randn(16, 3))

    def forward(self, x: Tensor, pack: lw.Pack, strategy: str, method: str) -> Tensor:
        q = x.view(-1, 2, 8)
        x = x + lw.attention(q, q, q, pack, strategy=strategy).flatten(1)
        y = lw.causal_conv1d(x, self.taps, None, pack, activation="silu").view(-1, 2, 8)
        gate = y.mean(-1)
        y = lw.gated_delta_rule(y, y, y, -gate.abs(), gate.sigmoid(), pack, method=method, qk_l2norm=True)
        return x + y.flatten(1) + lw.shift(x, pack, by=1)


def random_documents(rng: np.random.Generator, total: int = 128) -> list[int]:
    cuts = rng.integers(0, total + 1, rng.integers(1, 8))
    return [0, *sorted(cuts.tolist()), total]


def step(layer: Layer, number: int, cu_seqlens: list[int], layout: str | lw.Layout) -> None:
    pack = lw.Pack(cu_seqlens, layout=layout)
    x = torch.randn(pack.tokens, 16, requires_grad=True)
    y = layer(x, pack, STRATEGIES[number % 4], METHODS[number % 3])
    (y.sum() + lw.document_sum(y, pack).sum() + pack.unshard(y).sum()).backward()


# -- over many steps ---------------------------------------------------------------------------------


def alive() -> tuple[Counter[str], int]:
    """Objects of the library by kind, and bytes of all numpy arrays and tensors that Python can see."""
    found: Counter[str] = Counter()
    storages: dict[int, int] = {}
    for one in gc.get_objects():
        if type(one) in KINDS:
            found[type(one).__name__] += 1
        # An array that refers to nothing is not among the objects; whoever holds it is.
        for held in (one, *gc.get_referents(one)):
            if type(held) in (Tensor, nn.Parameter) and held.device.type == "cpu" and held.layout is torch.strided:
                storages[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
            elif type(held) is np.ndarray and held.base is None:
                storages[held.ctypes.data] = held.nbytes
    return found, sum(storages.values())


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def many_steps(first: int, last: int) -> dict[str, tuple[object, object]]:
    """Objects, bytes, Python's blocks and resident memory after two steps; the garbage collector does not run."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    layer = Layer()
    layouts = ("zigzag", "balanced", "contiguous")
    found = []
    step(layer, 0, [0, 128], "zigzag")  # the first call imports parts of torch, whose modules are cycles
    gc.collect()
    gc.disable()
    try:
        for number in range(last):
            step(layer, number, random_documents(rng), layouts[number % 3])
            if number + 1 in (first, last):
                objects, size = alive()
                found.append((objects, size, sys.getallocatedblocks(), resident()))
    finally:
        gc.enable()
    return dict(zip(("objects", "bytes", "blocks", "resident"), zip(*found, strict=True), strict=True))


def test_a_new_pack_every_step_leaves_nothing() -> None:
    """On ranks of its own: what other tests left behind would be counted, or hidden."""
    first, last = (200, 3000) if FULL else (30, 100)
    with Ranks(2) as own:
        found_on_ranks = own.run(many_steps, first, last, timeout=1200)
    for found in found_on_ranks:
        before, after = found["objects"]
        assert after == before, "of what a pack holds"
        assert not after["PackCore"]
        assert 0 < found["bytes"][1] <= found["bytes"][0]
        before, after = found["blocks"]
        assert after - before < BLOCKS * (last - first), (after - before) / (last - first)
        before, after = found["resident"]
        assert after - before < ROOM, (before, after)


def one_layout() -> dict[str, tuple[object, object]]:
    """A layout that is used again and again holds nothing of the packs that used it."""
    layer = Layer()
    layout = lw.Layout.from_spans(128, [[(0, 40), (100, 128)], [(40, 100)]])
    cu = [0, 30, 31, 90, 128]
    sizes = []
    step(layer, 0, cu, layout)
    gc.collect()
    gc.disable()
    try:
        for number in range(36):
            step(layer, number, cu, layout)
            if number + 1 in (12, 36):
                sizes.append((alive()[0], _reachable(layout)))
    finally:
        gc.enable()
    return {"objects": (sizes[0][0], sizes[1][0]), "reachable": (sizes[0][1], sizes[1][1])}


def _reachable(root: object) -> int:
    """How many objects an object refers to, directly and through others; classes and modules end the way."""
    seen: dict[int, object] = {}
    queue = [root]
    while queue:
        one = queue.pop()
        if id(one) in seen or isinstance(one, type | type(gc)) or callable(one):
            continue
        seen[id(one)] = one
        queue += gc.get_referents(one)
    return len(seen)


def test_a_layout_of_many_packs_holds_nothing_of_them(ranks: Ranks) -> None:
    for found in ranks.run(one_layout, size=2):
        for before, after in found.values():
            assert after == before
        assert not found["objects"][1]["PackCore"]


# -- one pack ----------------------------------------------------------------------------------------


DOCUMENTS = [0, 20, 21, 64]
SEES_ALL = lw.Mask.full(DOCUMENTS)


def operators() -> dict:
    def inputs(pack: lw.Pack, *shapes: tuple[int, ...]) -> list[Tensor]:
        return [torch.randn(pack.tokens, *shape, requires_grad=True) for shape in shapes]

    def attention(strategy: str):
        def call(pack: lw.Pack) -> Tensor:
            q, k, v = inputs(pack, (4, 8), (2, 8), (2, 8))
            return lw.attention(q, k, v, pack, strategy=strategy, sinks=torch.zeros(4, requires_grad=True))

        return call

    def delta(method: str):
        def call(pack: lw.Pack) -> Tensor:
            q, k, v, g, beta = inputs(pack, (2, 8), (2, 8), (2, 8), (2,), (2,))
            return lw.gated_delta_rule(q, k, v, -g.abs(), beta.sigmoid(), pack, method=method, qk_l2norm=True)

        return call

    def kimi(pack: lw.Pack) -> Tensor:
        q, k, v, g, beta = inputs(pack, (2, 8), (2, 8), (2, 8), (2, 8), (2,))
        return lw.kimi_delta_attention(q, k, v, -g.abs(), beta.sigmoid(), pack, qk_l2norm=True)

    def gla(pack: lw.Pack) -> Tensor:
        q, k, v, g = inputs(pack, (2, 8), (2, 8), (2, 8), (2, 8))
        return lw.gated_linear_attention(q, k, v, -g.abs(), pack)

    def lightning(pack: lw.Pack) -> Tensor:
        return lw.lightning_attention(*inputs(pack, (2, 8), (2, 8), (2, 8)), torch.tensor([-0.1, -0.2]), pack)

    def ssd(pack: lw.Pack) -> Tensor:
        x, dt, B, C = inputs(pack, (2, 8), (2,), (1, 4), (1, 4))
        return lw.ssd(x, dt.abs(), torch.tensor([-0.1, -0.2]), B, C, pack)

    def conv(pack: lw.Pack) -> Tensor:
        return lw.causal_conv1d(*inputs(pack, (6,)), torch.randn(6, 4, requires_grad=True), None, pack)

    def window(pack: lw.Pack) -> Tensor:
        q, k, v = inputs(pack, (4, 8), (2, 8), (2, 8))
        full = lw.attention(q, k, v, pack, mask=SEES_ALL)
        return full + lw.attention(q, k, v, pack, window=5, return_lse=True)[0]

    def checkpointed(pack: lw.Pack) -> Tensor:
        (q,) = inputs(pack, (4, 8))
        return torch.utils.checkpoint.checkpoint(lambda x: lw.attention(x, x, x, pack), q, use_reentrant=False)

    return {
        **{f"attention by {name}": attention(name) for name in STRATEGIES},
        **{f"gated_delta_rule by {name}": delta(name) for name in METHODS},
        "kimi_delta_attention": kimi,
        "gated_linear_attention": gla,
        "lightning_attention": lightning,
        "ssd": ssd,
        "causal_conv1d": conv,
        "mask and window of a call": window,
        "checkpoint": checkpointed,
        "gather_recompute": lambda pack: lw.gather_recompute(nn.Linear(6, 6), *inputs(pack, (6,)), pack),
        "shift": lambda pack: lw.shift(*inputs(pack, (6,)), pack, by=-2),
        "document_sum": lambda pack: lw.document_sum(*inputs(pack, (6,)), pack),
        "document_mean": lambda pack: lw.document_mean(*inputs(pack, (6,)), pack),
        "unshard": lambda pack: pack.unshard(*inputs(pack, (6,))),
        "shard": lambda pack: pack.shard(torch.randn(64, 6, requires_grad=True)),
        "positions and report": lambda pack: (pack.positions, pack.report(), torch.ones(1, requires_grad=True))[2] * 2,
    }


COMPILED = ("attention by ring", "attention by ulysses", "gated_delta_rule by affine", "mask and window of a call")


def freed(compiled: bool) -> list[str]:
    """The operators after which something of the pack is left, without the garbage collector."""
    left = []
    for name, call in operators().items():
        if compiled and name not in COMPILED:
            continue
        if compiled:
            torch.compiler.reset()
            call = torch.compile(call, backend="aot_eager")
        call(lw.Pack(DOCUMENTS, layout="zigzag")).sum().backward()  # what torch imports and compiles, it keeps
        for order in ("backward, then drop", "drop, then backward", "drop"):
            gc.disable()
            try:
                pack = lw.Pack(DOCUMENTS, layout="zigzag")
                core = weakref.ref(pack.core)
                out = call(pack)
                if order == "backward, then drop":
                    out.sum().backward()
                del pack
                if order == "drop, then backward":
                    out.sum().backward()  # autograd kept what it needs of the pack
                del out
                if core() is not None:
                    left.append(f"{name}: {order}")
            finally:
                gc.enable()
    return left


def test_a_pack_that_is_dropped_frees_everything(ranks: Ranks) -> None:
    assert ranks.run(freed, False, size=2) == [[], []]


def test_also_in_compiled_graphs(ranks: Ranks) -> None:
    assert ranks.run(freed, True, size=2, timeout=300) == [[], []]


def test_a_handle_keeps_what_backward_needs() -> None:
    pack = lw.Pack([0, 5])
    handle, core = pack.handle, weakref.ref(pack.core)
    del pack
    assert core() is not None
    again = handle.detach().view(1)
    del handle
    assert core() is not None, "also through a view"
    del again
    assert core() is None


def test_a_refused_pack_leaves_nothing() -> None:
    gc.collect()  # of earlier tests
    before = alive()[0]
    for _ in range(3):
        with pytest.raises(lw.InputError):
            lw.Pack([0, 5], window=0)
    gc.collect()  # the traceback of an error is a cycle of Python's own
    assert alive()[0] == before
