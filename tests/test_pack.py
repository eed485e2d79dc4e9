"""`lw.Pack`: what it says about a batch, what it refuses, and that its report is what the layers really do."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

import longweave as lw
from longweave.launch import Ranks
from longweave.plan.cost import CPU

CU = [0, 37, 38, 38, 41, 100, 107]
LAYOUTS = ["auto", "zigzag", "contiguous", "balanced"]


def attributes(layout: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    pack = lw.Pack(torch.tensor(CU), layout=layout)
    assert pack.cu_seqlens.tolist() == CU
    assert pack.group is dist.group.WORLD
    assert (pack.rank, pack.world_size) == (rank, world)
    assert pack.layout.world_size == world
    assert pack.tokens == pack.layout.counts[rank] == len(pack.layout.indices(rank))
    assert pack.mask == lw.Mask.causal(CU)
    assert repr(pack) == f"<Pack of 6 documents: rank {rank} of {world}, {pack.tokens} of 107 tokens>"
    named = {
        "zigzag": lw.Layout.zigzag(CU, world),
        "contiguous": lw.Layout.contiguous(107, world),
        "balanced": pack.layout,
        "auto": lw.Pack(CU, layout="balanced").layout,
    }
    assert pack.layout == named[layout]
    assert lw.Pack([0, 30, 30], layout="auto").layout == lw.Layout.zigzag([0, 30, 30], world), "one document"
    assert lw.Pack(CU, layout=named["zigzag"]).layout is named["zigzag"]
    for form in (CU, tuple(CU), np.array(CU, dtype=np.int32), torch.tensor(CU, dtype=torch.int32)):
        assert lw.Pack(form, layout="zigzag").layout == named["zigzag"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attributes(ranks: Ranks, layout: str) -> None:
    ranks.run(attributes, layout, size=3)


def test_one_process_needs_no_group() -> None:
    pack = lw.Pack(CU)
    assert (pack.group, pack.rank, pack.world_size, pack.tokens) == (None, 0, 1, 107)
    x = torch.randn(107, 2, 8, dtype=torch.float64)
    local = pack.shard(x)
    assert torch.equal(pack.unshard(local), x)
    assert lw.attention(local, local, local, pack).shape == (107, 2, 8)


def on_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    pack = lw.Pack(CU, mesh["cp"])
    assert pack.group is mesh["cp"].get_group()
    assert (pack.rank, pack.world_size) == (mesh["cp"].get_local_rank(), 2)
    with pytest.raises(lw.InputError, match=r'mesh\["cp"\]'):
        lw.Pack(CU, mesh)
    with pytest.raises(lw.InputError, match="group is a str"):
        lw.Pack(CU, "cp")
    outsider = dist.new_group([0])
    if dist.get_rank():
        with pytest.raises(lw.GroupError, match="not a member"):
            lw.Pack(CU, outsider)


def test_groups(ranks: Ranks) -> None:
    ranks.run(on_a_mesh, size=4)


def positions() -> None:
    counted = [i for start, stop in pairwise(CU) for i in range(stop - start)]
    answers = lw.Mask.shared_prefix(40, [20, 1, 30, 16])
    masks = {
        "causal": ("causal", counted),
        "full": ("full", counted),
        "window": (lw.Mask.sliding_window(CU, 9), counted),
        "prefix": (lw.Mask.prefix_causal(CU, [10, 1, 0, 0, 30, 7]), counted),
        "slices": (lw.Mask.from_slices(107, [((0, 107), (0, 107), "causal")]), counted),
        "shared": (answers, [*range(40), *(40 + i for length in (20, 1, 30, 16) for i in range(length))]),
    }
    for name, (mask, expected) in masks.items():
        cu = answers.cu_seqlens if name == "shared" else CU
        for layout in LAYOUTS:
            pack = lw.Pack(cu, layout=layout, mask=mask)
            assert pack.positions.shape == (pack.tokens,)
            assert pack.positions.tolist() == [expected[i] for i in pack.layout.indices(pack.rank)], (name, layout)
            assert torch.equal(pack.unshard(pack.positions), torch.tensor(expected)), (name, layout)
    windowed = lw.Pack(answers.cu_seqlens, mask=answers, window=5)
    assert windowed.unshard(windowed.positions).tolist() == masks["shared"][1], "a window moves nothing"


@pytest.mark.parametrize("world", [2, 4, 8])
def test_positions(ranks: Ranks, world: int) -> None:
    ranks.run(positions, size=world)


# -- what it refuses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seqlens": [1, 5]}, "start"),
        ({"cu_seqlens": [0, 5, 4]}, "cu_seqlens"),
        ({"cu_seqlens": [0.0, 2.5]}, "cu_seqlens"),
        ({"cu_seqlens": "documents"}, "cu_seqlens"),
        ({"layout": "spiral"}, "layout is 'spiral'; choose one of auto, zigzag, contiguous, balanced"),
        ({"layout": lw.Layout.contiguous(9, 1)}, "the layout is for 9 tokens but the documents have 107"),
        ({"layout": lw.Layout.contiguous(107, 2)}, "the group has 1 ranks but the layout is for 2"),
        ({"mask": "diagonal"}, "mask is 'diagonal'; choose one of causal, full"),
        ({"mask": None}, "mask is None"),
        ({"mask": lw.Mask.causal([0, 9])}, "the mask has 9 tokens but the documents have 107"),
        ({"mask": lw.Mask.shared_prefix(40, [60, 7])}, "give cu_seqlens=mask.cu_seqlens"),
        ({"window": 0}, "window is 0"),
        ({"window": 2.0}, "window is 2.0"),
        ({"mask": "full", "window": 4}, "a window of 4 .*see ahead"),
        ({"strategy": "teleport"}, "strategy is 'teleport'"),
        ({"method": "magic"}, "method is 'magic'"),
        ({"flavour": 3}, "there is no option 'flavour'"),
        ({"stages": 0}, "stages is 0"),
        ({"strategy": "ring", "stages": 2}, "stages goes with groupcast; strategy ring takes ulysses_size"),
        ({"strategy": "allgather", "ulysses_size": 1}, "ulysses_size goes with ring and ulysses; strategy allgather"),
    ],
)
def test_refusals(arguments: dict, message: str) -> None:
    with pytest.raises(lw.LongweaveError, match=message):
        lw.Pack(**{"cu_seqlens": CU, **arguments})


def options_of_others() -> None:
    """With "auto", on the pack or in the call, an option holds if the strategy that is taken has it."""
    cu = [0, 1100, 2000, 3000, 4000]  # ranks need little of each other
    pack = lw.Pack(cu, layout="contiguous", stages=3, ulysses_size=2, heads_k_stride=1)
    x = torch.randn(pack.tokens, 2, 16)
    lw.attention(x, x, x, pack)
    (plan,) = pack.plans
    assert (plan.strategy, plan.stages, plan.ulysses_size) == ("groupcast", 3, 1)
    lw.attention(x, x, x, pack, stages=2, bwd_head_first_stride=1)
    assert {plan.stages for plan in pack.plans} == {3, 2}
    lw.attention(x, x, x, pack, strategy="ring", ulysses_size=1)
    assert pack.plans[-1].strategy == "ring"
    named = lw.Pack(cu, layout="contiguous", strategy="groupcast", stages=3)
    with pytest.raises(lw.InputError, match="ulysses_size goes with ring and ulysses; strategy groupcast takes"):
        lw.attention(x, x, x, named, ulysses_size=2)
    lw.attention(x, x, x, named, strategy="allgather")  # the pack's stages are not the call's
    with pytest.raises(lw.InputError, match="stages goes with groupcast; strategy allgather takes"):
        lw.attention(x, x, x, named, strategy="allgather", stages=3)


def test_a_named_strategy_refuses_options_of_others_and_auto_does_not(ranks: Ranks) -> None:
    ranks.run(options_of_others, size=4)


class InWorker(Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return lw.Pack([0, 4]).tokens


def test_a_loader_worker_cannot_make_one() -> None:
    assert InWorker()[0] == 4
    with pytest.raises(lw.InputError, match="inside a DataLoader worker"):
        next(iter(DataLoader(InWorker(), num_workers=1, multiprocessing_context="fork")))


# -- what the layers really do -----------------------------------------------------------------------


def reports() -> None:
    from longweave.softmax.allgather import AllGatherStrategy
    from longweave.softmax.ring import RingStrategy

    cu = [0, 700, 701, 1200, 2400]
    pack = lw.Pack(cu, layout="zigzag")
    small = {"heads": 1, "kv_heads": 1, "head_dim": 16, "itemsize": 4}
    large = {"heads": 8, "kv_heads": 2, "head_dim": 64, "itemsize": 4}
    # Before any layer was called: the plan that a layer of this shape will get.
    assert pack.plans == ()
    assert pack.core.machine == CPU, "costs are counted for the machine that the ranks run on"
    assert pack.report(**small).strategy == "allgather"
    assert pack.report(**large).strategy == "ring"
    assert pack.report().strategy == lw.make_plan(pack.mask, pack.layout, machine=CPU).strategy
    assert pack.plans == (), "a report is no use"
    ran: list[str] = []
    originals = AllGatherStrategy.forward, RingStrategy.forward
    AllGatherStrategy.forward = lambda self, *a: (ran.append("allgather"), originals[0](self, *a))[1]
    RingStrategy.forward = lambda self, *a: (ran.append("ring"), originals[1](self, *a))[1]
    try:
        for shape in (large, small, small):
            q = torch.randn(pack.tokens, shape["heads"], shape["head_dim"])
            k = torch.randn(pack.tokens, shape["kv_heads"], shape["head_dim"])
            lw.attention(q, k, k, pack)
    finally:
        AllGatherStrategy.forward, RingStrategy.forward = originals
    assert ran == ["ring", "allgather", "allgather"]
    assert [plan.strategy for plan in pack.plans] == ["allgather", "ring"], "the most used one first"
    assert pack.report() == pack.plans[0].report() == pack.report(**small)
    assert pack.plans[1].report() == pack.report(**large)
    assert pack.report().total_tokens == 2400
    assert "fastest by the cost model" in pack.report().why
    lw.attention(q, k, k, pack, strategy="groupcast", window=100)
    assert {plan.strategy for plan in pack.plans} == {"allgather", "ring", "groupcast"}
    assert pack.plans[-1].mask == lw.Mask.sliding_window(cu, 100)
    assert pack.report().strategy == "allgather"


def test_the_report_is_of_what_ran(ranks: Ranks) -> None:
    ranks.run(reports, size=4)


def methods() -> None:
    pack = lw.Pack([0, 700, 1200], layout="zigzag", method="reshard")
    n = pack.tokens
    q, v, g = torch.randn(n, 1, 8), torch.randn(n, 2, 8), torch.zeros(n, 2)
    lw.gated_delta_rule(q, q, v, g, g.sigmoid(), pack, qk_l2norm=True)
    assert pack.methods["gated_delta_rule"].method == "reshard"
    lw.gated_delta_rule(q, q, v, g, g.sigmoid(), pack, qk_l2norm=True, method="affine")
    assert pack.methods["gated_delta_rule"].method == "affine"
    other = lw.Pack([0, 700, 1200], layout="zigzag")
    lw.gated_delta_rule(q, q, v, g, g.sigmoid(), other, qk_l2norm=True)
    choice = other.methods["gated_delta_rule"]
    assert choice.bytes_sent[choice.method] == min(choice.bytes_sent.values()) > 0
    assert "fewest bytes" in choice.why


def test_methods_of_linear_layers_are_listed(ranks: Ranks) -> None:
    ranks.run(methods, size=2)


def strategy_of_the_pack() -> None:
    """What the pack says holds for every call that says "auto"; a call can say otherwise."""
    for strategy in ("ring", "allgather", "ulysses", "groupcast"):
        pack = lw.Pack(CU, layout="zigzag", strategy=strategy)
        x = torch.randn(pack.tokens, 2, 16)
        lw.attention(x, x, x, pack)
        assert [plan.strategy for plan in pack.plans] == [strategy]
        assert pack.report(heads=32, kv_heads=4, head_dim=128).strategy == strategy
        lw.attention(x, x, x, pack, strategy="ring")
        assert {plan.strategy for plan in pack.plans} == {strategy, "ring"}


def test_the_strategy_of_a_pack(ranks: Ranks) -> None:
    ranks.run(strategy_of_the_pack, size=2)


def test_copies_and_pickles() -> None:
    """A model that holds a pack may be copied; a pack is not sent to another process."""
    import copy
    import pickle

    pack = lw.Pack([0, 5, 9])
    assert copy.deepcopy(pack) is pack
    with pytest.raises(lw.InputError, match="cannot be pickled; send cu_seqlens"):
        pickle.dumps(pack)


def test_a_pack_made_in_inference_mode_can_train() -> None:
    with torch.inference_mode():
        pack = lw.Pack([0, 5, 9])
        positions = pack.positions
    q, k, v = (torch.randn(9, 2, 4, requires_grad=True) for _ in range(3))
    lw.attention(q, k, v, pack).sum().backward()
    assert q.grad is not None
    assert not positions.is_inference()


def test_hooks_that_copy_what_autograd_saves() -> None:
    q, k, v = (torch.randn(9, 2, 4, requires_grad=True) for _ in range(3))

    def out(*inputs):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            return lw.attention(*inputs, lw.Pack([0, 5, 9]))

    grads = torch.autograd.grad(out(q, k, v).sum(), (q, k, v))  # the pack is gone
    want = torch.autograd.grad(lw.attention(q, k, v, lw.Pack([0, 5, 9])).sum(), (q, k, v))
    for got, expected in zip(grads, want, strict=True):
        assert torch.equal(got, expected)


def test_layers_of_other_shapes_have_plans_of_their_own() -> None:
    pack = lw.Pack([0, 5, 9], strategy="ulysses")
    for heads in (2, 4):
        lw.attention(*(torch.randn(9, heads, 4) for _ in range(3)), pack)
    assert {plan.shape.heads for plan in pack.plans} == {2, 4}


def test_sinks_of_every_call_are_checked() -> None:
    pack = lw.Pack([0, 5, 9])
    q, k, v = (torch.randn(9, 4, 4) for _ in range(3))
    lw.attention(q, k, v, pack, sinks=torch.zeros(4))
    for sinks, message in (
        (torch.zeros(1), "one logit per query head"),
        (torch.zeros(4, dtype=torch.int64), "floating"),
    ):
        with pytest.raises(lw.InputError, match=message):
            lw.attention(q, k, v, pack, sinks=sinks)


def test_a_pack_inside_a_compiled_function() -> None:
    pack = lw.Pack([0, 5, 9])
    x = torch.randn(9, 2)

    @torch.compile(backend="aot_eager")
    def fn(x, pack):
        return pack.unshard(pack.shard(x * 2)) * pack.positions[:, None]

    assert torch.equal(fn(x, pack), x * 2 * pack.positions[:, None])


def test_a_batch_has_positions_of_its_own() -> None:
    batch = lw.shard_batch(torch.arange(8), [0, 3, 8])
    batch.inputs["position_ids"].add_(7)
    assert batch.pack.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def test_arguments_of_odd_types_are_refused() -> None:
    pack = lw.Pack([0, 5, 9])
    q = torch.randn(9, 2, 4)
    g = torch.zeros(9, 2)
    for call, message in (
        (lambda: lw.gated_delta_rule(q, q, q, g, g, pack, method=["affine"]), "method is"),
        (lambda: pack.unshard(q, "0"), "dim is '0'"),
        (lambda: lw.attention(q, q, q, pack, return_lse="yes"), "return_lse is 'yes'"),
        (lambda: lw.attention(q, q, q, pack, dropout=0.1), "there is no option 'dropout'"),
        (lambda: lw.shift(q.half(), pack, fill=1e9), "cannot hold"),
        (lambda: lw.Pack([0, 9], stragety="ring"), "did you mean strategy?"),
    ):
        with pytest.raises(lw.InputError, match=message):
            call()
    assert torch.equal(lw.attention(q, q, q, pack, window=2**70), lw.attention(q, q, q, pack))


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("tritn", "'tritn'; softmax attention has auto, cpu_flash, .*; did you mean triton"),
        ("fla", "'fla' belongs to linear mixers.*lw.gated_delta_rule"),
        ("torch", "'torch' belongs to linear mixers"),
        (None, "backend is None; softmax attention has"),
    ],
)
def test_names_of_backends_are_checked_at_once(backend: object, message: str) -> None:
    ids, x = torch.arange(9), torch.randn(9, 2, 4)
    pack = lw.Pack([0, 5, 9])
    with pytest.raises(lw.InputError, match=message):
        lw.Pack([0, 5, 9], backend=backend)
    with pytest.raises(lw.InputError, match=message):
        lw.shard_batch(ids, [0, 5, 9], backend=backend)
    if backend is not None:
        with pytest.raises(lw.InputError, match=message):
            lw.attention(x, x, x, pack, backend=backend)


def one_misspelt_backend() -> str:
    try:
        lw.Pack([0, 5, 9], backend="tritn" if dist.get_rank() == 1 else "auto")
    except (lw.InputError, lw.GroupError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_a_misspelt_backend_is_refused_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks.run(one_misspelt_backend, size=2)
    assert first.startswith("GroupError")
    assert "rank 1 of the group refused" in first
    assert second.startswith("InputError: backend is 'tritn'")


def test_a_backend_that_cannot_serve_names_those_that_can() -> None:
    x = torch.randn(9, 2, 4)
    with pytest.raises(lw.BackendError, match="tensors are on cpu; use 'auto' or 'cpu_flash' or 'reference'"):
        lw.attention(x, x, x, lw.Pack([0, 9]), backend="flex")


def test_cu_seqlens_of_floats_are_called_what_they_are() -> None:
    for given, name in ((torch.tensor([0.0, 9.0]), "float32"), (torch.tensor([0, 9]).half(), "float16")):
        with pytest.raises(lw.InputError, match=f"cu_seqlens holds {name}, not ints"):
            lw.Pack(given)
    with pytest.raises(lw.InputError, match="cu_seqlens holds floats, not ints"):
        lw.Pack([0.0, 9.0])


def test_kinds_of_calls_do_not_name_devices() -> None:
    """Ranks of one host hold cuda:0, cuda:1, …: that is no difference between their calls."""
    pack = lw.Pack([0, 5, 9])
    q, g, w = torch.randn(9, 2, 4), torch.zeros(9, 2), torch.randn(4, 3)
    lw.attention(q, q, q, pack, sinks=torch.zeros(2))
    lw.gated_delta_rule(q, q, q, g, g, pack)
    lw.causal_conv1d(q[:, 0], w, w[:, 0], pack)
    lw.gather_recompute(torch.relu, lw.shift(q, pack), pack)
    pack.unshard(lw.document_mean(q, pack)[[0] * 9])
    assert len(pack.core._calls) == 7
    for kind, call in pack.core._calls.items():
        assert "cpu" not in f"{kind} {call.description}"
