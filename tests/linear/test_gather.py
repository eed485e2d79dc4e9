"""gather_recompute against one process: both gradient conventions, random numbers, what is kept, what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from linear_ranks import PACKS, own_tokens, pack_of
from reference import worst
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import longweave as lw
from longweave.launch import Ranks

TOTAL = 53


class Module(nn.Module):
    """Every token sees all before it, and dropout makes random numbers matter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(6, 6, dtype=torch.float64)
        self.out = nn.Linear(6, 4, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dropout(torch.tanh(self.mix(x)).cumsum(0)))


def data() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    x, d_out = (torch.randn(TOTAL, n, generator=rng, dtype=torch.float64) for n in (6, 4))
    return x, d_out


def compare(kind: str, param_grads: str, dropout: float) -> None:
    """Against one process; with dropout, all ranks and the one process draw the same random numbers."""
    x, d_out = data()
    pack = pack_of(kind, [0, 20, TOTAL])
    module = Module(dropout)
    params = tuple(module.parameters())
    x.requires_grad_()
    mine = own_tokens(pack)
    shard = x.detach()[mine].requires_grad_()

    torch.manual_seed(7)
    state = torch.get_rng_state()
    out = lw.gather_recompute(module, shard, pack, param_grads=param_grads)
    if param_grads == "full" and dist.get_world_size() > 1:  # random numbers of rank 0, by a seed drawn there
        torch.set_rng_state(state)
        torch.manual_seed(int(torch.randint(1 << 62, (1, 1))))
    else:
        torch.set_rng_state(state)
    expected = module(x)
    torch.testing.assert_close(out, expected[mine], atol=1e-12, rtol=0)

    whole = torch.autograd.grad(expected, [x, *params], d_out)
    torch.rand(3)  # forward's random state is long gone
    before = torch.get_rng_state()
    grads = list(torch.autograd.grad(out, [shard, *params], d_out[mine]))
    assert torch.equal(torch.get_rng_state(), before), "recomputation leaves no trace"
    torch.testing.assert_close(grads[0], whole[0][mine], atol=1e-10, rtol=0)
    for found, reference in zip(grads[1:], whole[1:], strict=True):
        if param_grads == "part":
            dist.all_reduce(found)
        torch.testing.assert_close(found, reference, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("param_grads", ["part", "full"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_against_one_process(ranks: Ranks, world: int, param_grads: str, dropout: float) -> None:
    for layout in ("zigzag", "shuffled"):
        ranks.run(compare, layout, param_grads, dropout, size=world)


def own_random_numbers() -> None:
    """Ranks with different random states: outputs and gradients of each belong to the numbers it drew."""
    x, d_out = data()
    pack = pack_of("zigzag", [0, TOTAL])
    module, rank = Module(0.5), dist.get_rank()
    mine = own_tokens(pack)
    shard = x[mine].requires_grad_()
    torch.manual_seed(100 + rank)
    out = lw.gather_recompute(module, shard, pack)
    (grad,) = torch.autograd.grad(out, shard, d_out[mine])
    x.requires_grad_()
    total = torch.zeros_like(x)
    for peer in range(dist.get_world_size()):
        torch.manual_seed(100 + peer)
        theirs = torch.from_numpy(pack.layout.indices(peer))
        expected = module(x)[theirs]
        if peer == rank:
            torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
        total += torch.autograd.grad(expected, x, d_out[theirs])[0]
    torch.testing.assert_close(grad, total[mine], atol=1e-10, rtol=0)


def test_every_rank_may_draw_its_own_random_numbers(ranks: Ranks) -> None:
    ranks.run(own_random_numbers, size=3)


def the_original_is_too_large() -> list[float]:
    """Gathering grad_output *and* summing over ranks counts every parameter gradient once for each rank."""
    x, d_out = data()
    module, pack = Module(), pack_of("zigzag", [0, TOTAL])
    mine = own_tokens(pack)
    (whole,) = torch.autograd.grad(module(x), [module.out.weight], d_out)
    ratios = []
    for param_grads in ("part", "full"):
        out = lw.gather_recompute(module, x[mine], pack, param_grads=param_grads)
        (grad,) = torch.autograd.grad(out, [module.out.weight], d_out[mine])
        dist.all_reduce(grad)
        ratios.append(float((grad / whole).mean()))
    return ratios


@pytest.mark.parametrize("world", [2, 4, 8])
def test_part_sums_to_the_reference_and_full_must_not_be_summed(ranks: Ranks, world: int) -> None:
    assert ranks.run(the_original_is_too_large, size=world)[0] == pytest.approx([1, world])


def kept() -> tuple[int, int]:
    """Bytes that autograd keeps, parameters aside (it notes them, and their memory is there anyway)."""
    pack = pack_of("contiguous", [0, 64 * 8])
    shard = torch.randn(pack.tokens, 6, dtype=torch.float64, requires_grad=True)
    module = Module()
    storages: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        lw.gather_recompute(module, shard, pack)
    for p in module.parameters():
        storages.pop(p.untyped_storage().data_ptr(), None)
    return sum(storages.values()), shard.numel() * 8


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_only_the_local_input_is_kept(ranks: Ranks, world: int) -> None:
    for bytes_kept, bytes_of_input in ranks.run(kept, size=world):
        assert bytes_kept == bytes_of_input


def several_inputs_and_views() -> None:
    """Two inputs, one without gradient; parameters given by hand, one of them a view of another tensor."""
    pack = pack_of("zigzag", PACKS["ragged"])
    rng = torch.Generator().manual_seed(2)
    x, y = (torch.randn(107, 6, generator=rng, dtype=torch.float64) for _ in range(2))
    table = torch.randn(2, 6, dtype=torch.float64, generator=rng, requires_grad=True)
    weight = table[1] * 2
    mine = own_tokens(pack)
    shard = x[mine].t().contiguous().t().requires_grad_()  # not contiguous

    def fn(x, y):
        return (x * y * weight).cumsum(0)

    out = lw.gather_recompute(fn, (shard, y[mine]), pack, params=[weight])
    d_x, d_table = torch.autograd.grad(out, [shard, table], torch.ones_like(out))
    x.requires_grad_()
    whole = torch.autograd.grad((x * y * (table[1] * 2)).cumsum(0).sum(), [x, table])
    dist.all_reduce(d_table)
    torch.testing.assert_close(d_x, whole[0][mine])
    torch.testing.assert_close(d_table, whole[1])


def test_several_inputs_and_parameters_that_are_views(ranks: Ranks) -> None:
    ranks.run(several_inputs_and_views, size=3)


def test_a_forgotten_parameter_is_refused() -> None:
    weight = torch.ones(3, requires_grad=True)
    pack = lw.Pack([0, 5])
    x = torch.randn(5, 3, requires_grad=True)
    out = lw.gather_recompute(lambda x: x * weight, x, pack)
    with pytest.raises(lw.InputError, match=r"shape \(3,\) that needs a gradient but is not among params"):
        out.sum().backward()
    lw.gather_recompute(lambda x: x * weight, x, pack, params=[weight]).sum().backward()
    assert weight.grad is not None


def test_a_parameter_that_was_changed_before_backward_is_noticed() -> None:
    """Backward runs fn again: with other parameters it would be the gradient of something else."""
    pack, x = lw.Pack([0, TOTAL]), data()[0].requires_grad_()
    weight = torch.ones(6, dtype=torch.float64, requires_grad=True)
    module = Module()
    for fn, params, changed in ((module, (), module.mix.weight), (lambda x: x * weight, [weight], weight)):
        out = lw.gather_recompute(fn, x, pack, params=params)
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_what_is_refused() -> None:
    pack = lw.Pack([0, 5])
    with pytest.raises(lw.InputError, match="param_grads is 'half'"):
        lw.gather_recompute(lambda x: x, torch.randn(5, 3), pack, param_grads="half")
    with pytest.raises(lw.InputError, match=r"shape \(4, 3\) came in, but rank 0 has 5"):
        lw.gather_recompute(lambda x: x, torch.randn(4, 3), pack)
    with pytest.raises(lw.InputError, match=r"fn returned shape \(4, 3\)"):
        lw.gather_recompute(lambda x: x[1:], torch.randn(5, 3), pack)
    with pytest.raises(lw.InputError, match="fn returned a tuple"):
        lw.gather_recompute(lambda x: (x, x), torch.randn(5, 3), pack)
    with pytest.raises(lw.InputError, match="pack is a list"):
        lw.gather_recompute(lambda x: x, torch.randn(5, 3), [0, 5])


def test_a_checkpoint_unpacks_once() -> None:
    """Non-reentrant checkpoints hand out each saved tensor one time only."""
    pack = lw.Pack([0, 5, 9])
    x, weight = torch.randn(9, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return lw.gather_recompute(lambda y: y @ weight, x, pack, params=[weight])

    checkpoint(run, x, use_reentrant=False).sum().backward()
    assert worst(weight.grad, x.detach().sum(0)[:, None].expand(4, 4)) < 1e-5
