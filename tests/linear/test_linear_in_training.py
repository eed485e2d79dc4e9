"""Linear layers inside training code: a hybrid block on one layout, checkpoint, autocast, two layers, views, memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from linear_cases import GDN, convolution, on_one_rank
from linear_ranks import PACKS, own_tokens, pack_of
from reference import dense_attention, worst
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import longweave as lw
from longweave.kernels.recurrence.delta_rule import GatedDeltaRule
from longweave.launch import Ranks

CU = [0, 30, 31, 50]
HEADS, DIM = 2, 8


class GatedDeltaNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        inner = HEADS * DIM
        self.qkv = nn.ModuleList(nn.Linear(width, inner) for _ in range(3))
        self.taps = nn.ParameterList(torch.randn(inner, 4) * 0.5 for _ in range(3))
        self.gates = nn.Linear(width, 2 * HEADS)
        self.out = nn.Linear(inner, width)

    def forward(self, x: Tensor, pack: lw.Pack | None) -> Tensor:
        xs = [project(x) for project in self.qkv]
        if pack is None:
            xs = [convolution(y, w, None, CU, "silu") for y, w in zip(xs, self.taps, strict=True)]
        else:
            xs = lw.causal_conv1d(xs, list(self.taps), None, pack, activation="silu")
        q, k, v = (y.unflatten(1, (HEADS, DIM)) for y in xs)
        g, beta = self.gates(x).chunk(2, 1)
        g, beta = -0.01 * F.softplus(g.to(torch.promote_types(g.dtype, torch.float32))), beta.sigmoid()
        if pack is None:
            y = on_one_rank(GatedDeltaRule(DIM**-0.5, qk_l2norm=True), (q, k, v, g, beta), CU)[0]
        else:
            y = lw.gated_delta_rule(q, k, v, g, beta, pack, qk_l2norm=True)
        return x + self.out(y.flatten(1))


class Attention(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * HEADS * DIM)
        self.out = nn.Linear(HEADS * DIM, width)

    def forward(self, x: Tensor, pack: lw.Pack | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(1, (3, HEADS, DIM)).unbind(1)
        if pack is None:
            y, _ = dense_attention(q, k, v, lw.Mask.causal(CU))
        else:
            y = lw.attention(q, k, v, pack, strategy="ring")
        return x + self.out(y.flatten(1))


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor, pack: lw.Pack | None) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


def model(dtype: torch.dtype = torch.float64) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([GatedDeltaNet(), Mlp(), Attention(), Mlp(), GatedDeltaNet()]).to(dtype)


def data() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(CU[-1], 16, generator=rng, dtype=torch.float64) for _ in range(2))
    return x, weight


def one_process() -> tuple[Tensor, dict[str, Tensor]]:
    layers = model()
    x, weight = data()
    x.requires_grad_()
    y = x
    for layer in layers:
        y = layer(y, None)
    (y * weight).sum().backward()
    return x.grad, {name: p.grad for name, p in layers.named_parameters()}


def hybrid(kind: str, checkpointed: bool, members: list[int] | None) -> None:
    """Softmax attention, GatedDeltaNet and MLPs on one layout; nothing is laid out anew between them."""
    group = None if members is None else dist.new_group(members)
    if members is not None and dist.get_rank() not in members:
        return
    pack = pack_of(kind, CU, group)
    layers = model()
    x, weight = (pack.shard(t) for t in data())
    x.requires_grad_()
    y = x
    for layer in layers:
        y = checkpoint(layer, y, pack, use_reentrant=False) if checkpointed else layer(y, pack)
    (y * weight).sum().backward()
    d_x, expected = one_process()
    mine = own_tokens(pack)
    assert worst(x.grad, d_x[mine]) < 1e-10
    for name, p in layers.named_parameters():
        dist.all_reduce(p.grad, group=group)  # SUM over ranks is the whole gradient
        assert worst(p.grad, expected[name]) < 1e-10, name


@pytest.mark.parametrize("layout", ["zigzag", "balanced", "shuffled"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_hybrid_model_on_one_layout(ranks: Ranks, world: int, layout: str) -> None:
    ranks.run(hybrid, layout, False, None, size=world)


def test_checkpoint(ranks: Ranks) -> None:
    ranks.run(hybrid, "zigzag", True, None, size=3)


def test_on_a_subgroup(ranks: Ranks) -> None:
    ranks.run(hybrid, "zigzag", False, [1, 3], size=4)


def compiled() -> None:
    """torch.compile breaks the graph at the linear layers; what comes out is the same."""
    pack = pack_of("zigzag", CU)
    results = []
    for wrap in (lambda fn: fn, lambda fn: torch.compile(fn, backend="aot_eager")):
        layers = nn.ModuleList(layer for layer in model() if not isinstance(layer, Attention))

        def step(x: Tensor, layers: nn.ModuleList = layers) -> Tensor:
            for layer in layers:
                x = layer(x, pack)
            return x

        x, weight = (pack.shard(t) for t in data())
        (wrap(step)(x) * weight).sum().backward()
        results.append([p.grad for p in layers.parameters()])
    assert all(worst(a, b) < 1e-12 for a, b in zip(*results, strict=True))


def test_compile(ranks: Ranks) -> None:
    ranks.run(compiled, size=2)


def under_autocast(method: str) -> None:
    pack = pack_of("zigzag", CU)
    mine = own_tokens(pack)
    inputs = GDN.inputs(CU[-1], 2, 2, K=8, V=8, dtype=torch.bfloat16, decay=1e-3)
    inputs[3] = inputs[3].float()
    plain, cast = ([x[mine].requires_grad_() for x in inputs] for _ in range(2))
    expected = lw.gated_delta_rule(*plain, pack, method=method)
    with torch.autocast("cpu", torch.bfloat16):
        out = lw.gated_delta_rule(*cast, pack, method=method)
        mixed = [cast[0].float(), *cast[1:]]
        assert lw.gated_delta_rule(*mixed, pack, method=method).dtype == torch.bfloat16
    assert torch.equal(out, expected), "states are float32 under autocast, too"
    d_out = torch.ones_like(out)
    with torch.autocast("cpu", torch.bfloat16):
        grads = torch.autograd.grad(out, cast, d_out)
    for a, b in zip(grads, torch.autograd.grad(expected, plain, d_out), strict=True):
        assert torch.equal(a, b)
    layers = model(torch.float32)
    x = pack.shard(data()[0]).float()
    with torch.autocast("cpu", torch.bfloat16):
        for layer in layers:
            x = layer(x, pack)
    x.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layers.parameters())


@pytest.mark.parametrize("method", ["affine", "reshard", "gather"])
def test_autocast(ranks: Ranks, method: str) -> None:
    ranks.run(under_autocast, method, size=3)


def views() -> None:
    """Inputs that are slices and transposes of larger tensors give the bits of contiguous ones."""
    pack = pack_of("zigzag", CU)
    mine = own_tokens(pack)
    inputs = [x[mine] for x in GDN.inputs(CU[-1])]
    strided = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    assert len(mine) < 2 or not strided[0].is_contiguous()
    for method in ("affine", "reshard", "gather"):
        results = []
        for given in (inputs, strided):
            leaves = [x.detach().requires_grad_() for x in given]
            out = lw.gated_delta_rule(*leaves, pack, method=method)
            results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out).mT.contiguous().mT)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_inputs_that_are_views(ranks: Ranks) -> None:
    ranks.run(views, size=2)


def kept(tokens: int) -> tuple[int, int]:
    """Bytes kept by autograd, and bytes of the inputs."""
    pack = pack_of("zigzag", [0, tokens])
    given = GDN.inputs(tokens, K=16, V=16, dtype=torch.float32)
    leaves = [x[own_tokens(pack)].requires_grad_() for x in given]
    storages: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        lw.gated_delta_rule(*leaves, pack, method="affine")
    return sum(storages.values()), sum(x.numel() * 4 for x in leaves)


def test_what_autograd_keeps(ranks: Ranks) -> None:
    """Inputs, a state for each block of some hundred tokens, and the transitions of the chain."""
    for world in (2, 8):
        for bytes_kept, bytes_of_inputs in ranks.run(kept, 8192, size=world):
            assert bytes_kept < 1.35 * bytes_of_inputs


def order_of_events() -> list[str]:
    """What this rank does, in order: one document of its own, one that is cut."""
    from longweave.linear import affine, chains

    layout = lw.Layout.from_spans(96, [[(0, 16), (32, 48), (80, 96)], [(16, 32), (48, 80)]])
    pack = lw.Pack([0, 16, 32, 96], layout=layout)
    events: list[str] = []

    def noting(name: str, original):
        def wrapped(first, *args, **kwargs):
            if name in ("walk", "exchange") or first.table.spans:
                events.append(name)
            return original(first, *args, **kwargs)

        return wrapped

    watched = [(affine, name) for name in ("run", "summary", "backward_run", "backward_summary")]
    watched += [(chains.Direction, name) for name in ("walk", "exchange")]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in watched:
            patch.setattr(owner, name, noting(name, getattr(owner, name)))
        leaves = [x[own_tokens(pack)].requires_grad_() for x in GDN.inputs(96)]
        lw.gated_delta_rule(*leaves, pack, method="affine").sum().backward()
    return events


def test_the_exchange_is_in_flight_while_whole_documents_are_computed(ranks: Ranks) -> None:
    ends, middle = ranks.run(order_of_events, size=2)
    forward, backward = ["exchange", "run", "walk", "run"], ["exchange", "backward_run", "walk", "backward_run"]
    assert ends == ["run", *forward, "backward_run", *backward]
    assert middle == ["summary", *forward, "backward_summary", *backward]


def no_gradients() -> None:
    pack = pack_of("zigzag", PACKS["ragged"])
    inputs = [x[own_tokens(pack)] for x in GDN.inputs(107)]
    with torch.no_grad():
        out = lw.gated_delta_rule(*inputs, pack)
    assert not out.requires_grad
    leaf = inputs[2].clone().requires_grad_()  # only v needs a gradient
    (grad,) = torch.autograd.grad(lw.gated_delta_rule(*inputs[:2], leaf, *inputs[3:], pack).sum(), leaf)
    assert grad.shape == leaf.shape


def test_without_gradients_or_with_one(ranks: Ranks) -> None:
    ranks.run(no_gradients, size=3)
