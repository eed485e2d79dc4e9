"""Attention inside real training code: checkpoint, autocast, two layers, compile, FSDP2, gradcheck, memory, bytes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from memory import allocated
from reference import Problem, dense_attention, worst
from test_attention import STRATEGIES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import longweave as lw
from longweave.launch import Ranks

CU = [0, 30, 31, 50]


class Block(nn.Module):
    """Attention with a residual; called with a pack across ranks, without one in a single process."""

    def __init__(self, dim: int = 16, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, pack: lw.Pack | None = None, mask: lw.Mask | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        out = dense_attention(q, k, v, mask)[0] if pack is None else lw.attention(q, k, v, pack)
        return x + self.out(out.flatten(1))


def model(layers: int = 2, dtype: torch.dtype = torch.float64) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(layers)).to(dtype)


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(CU[-1], 16, generator=g, dtype=torch.float64) for _ in range(2))


def one_process(mask: lw.Mask, seed: int = 1) -> dict[str, Tensor]:
    layers = model()
    x, weight = data(seed)
    for layer in layers:
        x = layer(x, mask=mask)
    (x * weight).sum().backward()
    return {name: p.grad for name, p in layers.named_parameters()}


def pack_for(strategy: str, options: dict, group=None) -> lw.Pack:
    return lw.Pack(CU, group, "zigzag", strategy=strategy, **options)


def two_layers(strategy: str, options: dict, checkpointed: bool) -> None:
    pack = pack_for(strategy, options)
    layers = model()
    x, weight = (pack.shard(t) for t in data())
    for layer in layers:
        x = checkpoint(layer, x, pack, use_reentrant=False) if checkpointed else layer(x, pack)
    (x * weight).sum().backward()
    expected = one_process(pack.mask)
    for name, p in layers.named_parameters():
        dist.all_reduce(p.grad)  # SUM over ranks is the whole gradient
        assert worst(p.grad, expected[name]) < 1e-10, name


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_layers_and_checkpoint(ranks: Ranks, strategy: str, checkpointed: bool) -> None:
    ranks.run(two_layers, *STRATEGIES[strategy], checkpointed, size=4)


def under_autocast() -> None:
    pack = pack_for("ring", {})
    layer = model(1, torch.float32)[0]
    x = pack.shard(data()[0]).float()
    seen = []
    layer.out.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, pack)
    out.float().sum().backward()
    assert seen == [torch.bfloat16]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    q = torch.randn(x.shape[0], 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert lw.attention(q, q, q, pack).dtype == torch.bfloat16


def exact_under_autocast() -> None:
    """Autocast decides the dtype of q, k, v and nothing inside: the softcap backend must not multiply in bf16."""
    pack = pack_for("ring", {})
    mine = pack.layout.indices(dist.get_rank())
    p = Problem.random(CU[-1], dtype=torch.bfloat16)
    found = []
    for enabled in (False, True):
        q, k, v = (getattr(p, n)[mine].requires_grad_() for n in "qkv")
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = lw.attention(q, k, v, pack, softcap=3.0)
            found.append([out, *torch.autograd.grad(out, (q, k, v), p.grad[mine])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    x = torch.randn(len(mine), 2, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert lw.attention(x, x, x, pack).dtype == torch.float64


def test_autocast_stays_outside(ranks: Ranks) -> None:
    ranks.run(exact_under_autocast, size=2)


def order_of_ring_events() -> list[str]:
    """What one rank does, in order: post a transfer, compute, wait."""
    from longweave.comm.exchange import Pending
    from longweave.kernels.attention import Kernel
    from longweave.softmax import ring

    events: list[str] = []
    send_next, forward, wait = ring.send_next, Kernel.forward, Pending.wait
    ring.send_next = lambda *args: (events.append("post"), send_next(*args))[1]
    Kernel.forward = lambda self, *args, **kw: (events.append("compute"), forward(self, *args, **kw))[1]
    Pending.wait = lambda self: (events.append("wait"), wait(self))[1]
    try:
        with lw.unchecked():
            pack = lw.Pack([0, 48], layout="zigzag", strategy="ring")
            x = torch.randn(pack.tokens, 2, 4)
            lw.attention(x, x, x, pack)
    finally:
        ring.send_next, Kernel.forward, Pending.wait = send_next, forward, wait
    return events


def test_ring_computes_while_the_next_block_is_on_its_way(ranks: Ranks) -> None:
    for events in ranks.run(order_of_ring_events, size=3):
        assert events == ["post", "compute", "wait", "post", "compute", "wait", "compute"]


def replicated_heads() -> float:
    """One K/V head for four query heads on four ranks: its bf16 gradient is a sum over ranks, made in float32."""
    cu = [0, 8]
    pack = lw.Pack(cu, layout="contiguous", mask="full", strategy="ulysses")
    q = torch.zeros(2, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.zeros(2, 1, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    out = lw.attention(q, k, v, pack)
    upstream = torch.tensor([1.0, 2.0**-9, 2.0**-9, 2.0**-9]).bfloat16()[None, :, None].expand_as(out)
    (dv,) = torch.autograd.grad(out, v, upstream)
    return float(dv[0, 0, 0])


def test_ulysses_sums_replicated_heads_in_float32(ranks: Ranks) -> None:
    expected = float(torch.tensor(1 + 3 * 2.0**-9).bfloat16())
    assert expected != 1.0
    assert ranks.run(replicated_heads, size=4) == [expected] * 4


def test_autocast(ranks: Ranks) -> None:
    ranks.run(under_autocast, size=2)


def with_fsdp() -> None:
    """dp × cp: each dp row has its own batch, parameters are sharded over all ranks, gradients averaged by FSDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    flat = mesh._flatten("all")
    pack = pack_for("ring", {}, mesh["cp"])
    layers = model()
    for layer in layers:
        fully_shard(layer, mesh=flat)
    seed = 1 + mesh["dp"].get_local_rank()
    x, weight = (pack.shard(t) for t in data(seed))
    for layer in layers:
        x = layer(x, pack)
    ((x * weight).sum() * dist.get_world_size()).backward()  # FSDP divides by the mesh size; the convention is SUM
    parts = [one_process(pack.mask, seed) for seed in (1, 2)]
    for name, p in layers.named_parameters():
        assert worst(p.grad.full_tensor(), parts[0][name] + parts[1][name]) < 1e-10, name


def test_fsdp2_on_a_dp_cp_mesh(ranks: Ranks) -> None:
    ranks.run(with_fsdp, size=4)


def compiled(strategy: str, options: dict) -> None:
    pack = pack_for(strategy, options)
    layers = model()
    step = torch.compile(partial(_through, layers), fullgraph=True, backend="aot_eager")
    x, weight = (pack.shard(t) for t in data())
    (step(x, pack) * weight).sum().backward()
    expected = one_process(pack.mask)
    for name, p in layers.named_parameters():
        dist.all_reduce(p.grad)
        assert worst(p.grad, expected[name]) < 1e-10, name


def _through(layers: nn.ModuleList, x: Tensor, pack: lw.Pack) -> Tensor:
    for layer in layers:
        x = layer(x, pack)
    return x


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compile_fullgraph(ranks: Ranks, strategy: str) -> None:
    ranks.run(compiled, *STRATEGIES[strategy], size=2)


def check_gradients(strategy: str, options: dict) -> bool:
    """gradcheck of the operator: on every rank, perturbing its own inputs while the others hold still."""
    pack = lw.Pack([0, 4, 5], layout="zigzag", strategy=strategy, **options)
    problem = Problem.random(5, heads=2, kv_heads=1, dim=3, v_dim=2, sinks=True)
    mine = pack.layout.indices(dist.get_rank())
    q, k, v = (getattr(problem, n)[mine].requires_grad_() for n in "qkv")
    sinks = problem.sinks.clone().requires_grad_()
    leaves = [q, k, v, sinks]
    # The loss of all ranks, as a function of one entry of one rank at a time.
    weight = problem.grad[mine]

    def loss() -> Tensor:
        out = lw.attention(q, k, v, pack, sinks=sinks)
        total = (out * weight).sum().detach().clone()
        dist.all_reduce(total)
        return total

    out = lw.attention(q, k, v, pack, sinks=sinks)
    grads = torch.autograd.grad(out, leaves, weight)
    dist.all_reduce(grads[3])
    for turn in range(dist.get_world_size()):
        for leaf, grad in zip(leaves, grads, strict=True):
            shared = leaf is sinks
            size = torch.tensor(leaf.numel())
            dist.broadcast(size, turn)
            for i in range(int(size)):
                values = []
                for step in (1e-6, -1e-6):
                    if shared or dist.get_rank() == turn:
                        with torch.no_grad():
                            leaf.view(-1)[i] += step
                    values.append(loss())
                    if shared or dist.get_rank() == turn:
                        with torch.no_grad():
                            leaf.view(-1)[i] -= step
                if shared or dist.get_rank() == turn:
                    numeric = (values[0] - values[1]) / 2e-6
                    assert abs(numeric - grad.reshape(-1)[i]) < 1e-6
    return True


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_numerically(ranks: Ranks, strategy: str) -> None:
    assert ranks.run(check_gradients, *STRATEGIES[strategy], size=2) == [True, True]


@pytest.mark.parametrize("strategy", ["groupcast", "ring", "allgather", "ulysses"])
def test_gradcheck_in_one_process(strategy: str) -> None:
    pack = lw.Pack([0, 4, 5], strategy=strategy)
    p = Problem.random(5, heads=4, kv_heads=2, dim=3, v_dim=2, sinks=True)
    leaves = [t.clone().requires_grad_() for t in (p.q, p.k, p.v, p.sinks)]
    assert torch.autograd.gradcheck(lambda q, k, v, s: lw.attention(q, k, v, pack, sinks=s), leaves)


def kept_by_autograd(strategy: str, options: dict) -> dict[str, int]:
    """Bytes that one call keeps for backward: all that is alive when nobody holds q, k, v and out any more."""
    pack = lw.Pack([0, 700, 960], layout="zigzag", strategy=strategy, **options)
    heads, dim = 8, 16
    leaves = [torch.randn(pack.tokens, heads, dim, requires_grad=True) for _ in "qkv"]

    def forward() -> Tensor:
        return lw.attention(*(leaf * 1.0 for leaf in leaves), pack).sum()  # neither the product nor the sum keeps any

    assert forward().requires_grad  # and what the pack keeps is made now
    found = allocated(forward)
    one = pack.tokens * heads * dim * 4
    return {"kept": found.kept, "peak": found.peak, "inputs": 4 * one, "lse": pack.tokens * heads * 4}


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_autograd_keeps_does_not_grow_with_the_ranks(ranks: Ranks, strategy: str, world: int) -> None:
    for found in ranks.run(kept_by_autograd, *STRATEGIES[strategy], size=world):
        one_more_block = found["inputs"] // 2 if strategy == "groupcast" else 0  # K and V, as many heads as Q
        needed = found["inputs"] + found["lse"]
        assert needed <= found["kept"] <= 1.02 * (needed + one_more_block) < found["peak"] * 1.02


def bytes_sent(strategy: str, options: dict) -> list[tuple[int, int, int, int]]:
    """Bytes handed to the network by this rank, forward and backward, and what the formula says."""
    from longweave.comm.exchange import resolve

    cu = [0, 100, 101, 155]
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = lw.Layout.from_spans(155, [[(r, 155)] if r == world - 1 else [(r, r + 1)] for r in range(world)])
    layout = lw.Layout.zigzag(cu, world) if strategy != "uneven" else layout
    lw.Pack(cu, layout=layout)  # on its first pack a group compares calls
    pack = lw.Pack(cu, layout=layout, strategy="ring", **options)
    heads, kv_heads, dim, v_dim = 4, 2, 16, 8
    p = Problem.random(155, heads, kv_heads, dim, v_dim, dtype=torch.bfloat16)
    mine = layout.indices(rank)
    q, k, v = (getattr(p, n)[mine].requires_grad_() for n in "qkv")
    ledger = resolve(None).ledger
    before = ledger.bytes_sent
    out = lw.attention(q, k, v, pack)
    forward = ledger.bytes_sent - before
    torch.autograd.grad(out, (q, k, v), p.grad[mine])
    backward = ledger.bytes_sent - before - forward
    per_token = kv_heads * (dim + v_dim)
    passed_on = sum(layout.counts[(rank - s) % world] for s in range(world - 1))  # W − 1 hops
    passed_back = sum(layout.counts[(rank + s) % world] for s in range(world - 1))
    grads = sum(layout.counts[(rank + s) % world] for s in range(1, world))
    expected_backward = passed_back * per_token * 2 + grads * per_token * 4  # K/V in bf16, gradients in float32
    return [(forward, passed_on * per_token * 2, backward, expected_backward)]


@pytest.mark.parametrize("kind", ["zigzag", "uneven"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_ring_sends_what_the_formula_says(ranks: Ranks, world: int, kind: str) -> None:
    for ((forward, expected, backward, expected_backward),) in ranks.run(bytes_sent, kind, {}, size=world):
        assert forward == expected
        assert backward == expected_backward


TOKENS, BLOCK = 64, 64 * 2 * 2 * 32 * 4  # of a rank; bytes of its K and V


def peak_of_ring() -> tuple[int, int]:
    """The most bytes alive at once in a forward and in a backward pass, on as many tokens a rank for any world."""
    pack = lw.Pack([0, TOKENS * dist.get_world_size()], layout="contiguous", mask="full", strategy="ring")
    q, k, v = (torch.randn(TOKENS, 2, 32, requires_grad=True) for _ in "qkv")
    torch.autograd.grad(lw.attention(q, k, v, pack).sum(), (q, k, v))  # what the pack keeps is made now
    forward = allocated(lambda: lw.attention(q, k, v, pack))
    out = lw.attention(q, k, v, pack).sum()
    backward = allocated(lambda: torch.autograd.grad(out, (q, k, v), retain_graph=True))
    return forward.peak, backward.peak


def test_ring_needs_as_much_memory_whatever_the_ranks(ranks: Ranks) -> None:
    """Two receive buffers take turns, and one gradient is on its way at a time: nothing is added by more steps."""
    few, many = (max(ranks.run(peak_of_ring, size=world)) for world in (3, 8))
    assert few[0] > 3 * BLOCK  # its own K and V, and two to receive
    for forward_or_backward in (0, 1):
        assert many[forward_or_backward] < few[forward_or_backward] + BLOCK // 2


def kernel_calls(kind: str) -> list[int]:
    """How many kernel calls each ring step makes on this rank."""
    from longweave.kernels.attention import Kernel

    world = dist.get_world_size()
    layout = {"zigzag": lw.Layout.zigzag([0, 800], world), "contiguous": lw.Layout.contiguous(800, world)}[kind]
    pack = lw.Pack([0, 800], layout=layout, strategy="ring")
    calls: list[int] = []
    original = Kernel._forward
    Kernel._forward = lambda self, *args: (calls.append(1), original(self, *args))[1]
    try:
        x = torch.randn(pack.tokens, 2, 4)
        lw.attention(x, x, x, pack)
    finally:
        Kernel._forward = original
    return calls


def test_steps_without_work_make_no_kernel_call(ranks: Ranks) -> None:
    assert [len(c) for c in ranks.run(kernel_calls, "contiguous", size=4)] == [1, 2, 3, 4]
    assert [len(c) for c in ranks.run(kernel_calls, "zigzag", size=4)] == [4, 4, 4, 4]


def bits(strategy: str, options: dict) -> list[bytes]:
    pack = pack_for(strategy, options)
    p = Problem.random(CU[-1], dtype=torch.float32)
    mine = pack.layout.indices(dist.get_rank())
    q, k, v = (getattr(p, n)[mine].requires_grad_() for n in "qkv")
    out = lw.attention(q, k, v, pack)
    grads = torch.autograd.grad(out, (q, k, v), p.grad[mine])
    return [t.detach().numpy().tobytes() for t in (out, *grads)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_bits_every_run(ranks: Ranks, strategy: str) -> None:
    first = ranks.run(bits, *STRATEGIES[strategy], size=4)
    assert all(ranks.run(bits, *STRATEGIES[strategy], size=4) == first for _ in range(2))
