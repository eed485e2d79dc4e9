"""Linear attention across ranks against one process: outputs and every gradient, on every layout and world size.

`LONGWEAVE_FULL=1` runs the product of all mixers, methods, layouts, packs and ranks; otherwise a table of it.
"""

from __future__ import annotations

import inspect
import logging

import plain_transformers  # noqa: F401 - before models are made
import pytest
import torch
import torch.distributed as dist
from linear_cases import DELTA, GDN, GLA, KDA, Case
from linear_ranks import FULL, LAYOUTS, PACKS, Problem, own_tokens, pack_of
from torch import Tensor

import longweave as lw
from longweave.comm.exchange import Comm, resolve
from longweave.core import PackCore
from longweave.kernels.recurrence.delta_rule import GatedDeltaRule
from longweave.kernels.recurrence.reference import recurrent
from longweave.launch import Ranks
from longweave.linear.methods import Sizes, choose
from longweave.plan.chains import sent_bytes
from longweave.plan.fragments import fragments

WEAK = 5e-4  # g is uniform in (−1e-3, 0): a state lasts longer than any document here
METHODS = ["affine", "reshard", "gather", "auto"]


@pytest.fixture(scope="module")
def problems() -> dict[str, Problem]:
    """Grouped heads, K ≠ V; weak decay, which hides nothing, on most."""
    shape = {"Hk": 1, "Hv": 2, "K": 6, "V": 5}
    return {
        name: Problem.solve(GDN, cu, decay=0.1 if name == "ragged" else WEAK, **shape) for name, cu in PACKS.items()
    }


def every_pack(problems: dict[str, Problem], layout: str, methods: list[str], tolerance: float) -> None:
    for name, problem in problems.items():
        pack = pack_of(layout, problem.cu)
        for method in methods:
            try:
                problem.compare(pack, tolerance, method=method)
            except Exception as error:
                raise AssertionError(f"{name} by {method}") from error


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_affine_on_every_layout(ranks: Ranks, problems: dict[str, Problem], world: int, layout: str) -> None:
    ranks.run(every_pack, problems, layout, ["affine"], 1e-10, size=world)


@pytest.mark.parametrize("layout", LAYOUTS if FULL else ["zigzag", "shuffled"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8] if FULL else [1, 2, 3])
def test_reshard_gather_and_auto(ranks: Ranks, problems: dict[str, Problem], world: int, layout: str) -> None:
    ranks.run(every_pack, problems, layout, ["reshard", "gather", "auto"], 1e-10, size=world)


@pytest.fixture(scope="module")
def float32_problems() -> dict[str, Problem]:
    cu = [0, 500, 501, 640]
    shape = {"Hk": 2, "Hv": 4, "K": 16, "V": 24, "dtype": torch.float32}
    return {"weak": Problem.solve(GDN, cu, decay=WEAK, **shape), "strong": Problem.solve(GDN, cu, decay=1.0, **shape)}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_float32(ranks: Ranks, float32_problems: dict[str, Problem], world: int, layout: str) -> None:
    ranks.run(every_pack, float32_problems, layout, ["affine", "reshard", "gather"], 2e-6, size=world)


def bfloat16(problem: Problem) -> None:
    """No worse than twice the error of one process in bfloat16."""

    def errors(found: list[Tensor]) -> list[float]:
        return [
            float((x.double() - e).abs().max() / e.abs().max()) for x, e in zip(found, problem.expected, strict=True)
        ]

    def solve(pack: lw.Pack) -> list[Tensor]:
        leaves = [pack.shard(x).requires_grad_() for x in problem.inputs]
        out = lw.gated_delta_rule(*leaves, pack, scale=GDN.scale, method="affine")
        grads = torch.autograd.grad(out, leaves, pack.shard(problem.d_out))
        return [pack.unshard(x) for x in (out.detach(), *grads)]

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    one, ours = errors(solve(lw.Pack(problem.cu, alone))), errors(solve(pack_of("zigzag", problem.cu)))
    assert all(mine <= 2 * theirs for mine, theirs in zip(ours, one, strict=True))


def test_bfloat16(ranks: Ranks) -> None:
    shape = {"Hk": 2, "Hv": 4, "K": 16, "V": 24, "dtype": torch.bfloat16}
    ranks.run(bfloat16, Problem.solve(GDN, [0, 300, 301, 400], **shape), size=4)


@pytest.mark.parametrize("case", [GDN, DELTA, KDA, GLA], ids=lambda case: case.name)
@pytest.mark.parametrize("world", [2, 3, 4, 8] if FULL else [2, 3, 4])
def test_siblings(ranks: Ranks, world: int, case: Case) -> None:
    packs = PACKS if FULL else {"ragged": PACKS["ragged"]}
    solved = {name: Problem.solve(case, cu, decay=WEAK, Hk=1, Hv=2, K=6, V=5) for name, cu in packs.items()}
    for layout in LAYOUTS if FULL else ("zigzag", "shuffled"):
        ranks.run(every_pack, solved, layout, METHODS, 1e-10, size=world)


# -- mixers with inputs of their own --------------------------------------------------------------------


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    rng = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]


def shared_parameters(name: str, layout: str, cu: list[int]) -> None:
    """SSD and lightning attention: per-token inputs, and per-head ones whose gradients sum over ranks."""
    heads, total = 4, cu[-1]
    q, k, v, d_out = draw((total, 2, 6), (total, 2, 6), (total, heads, 5), (total, heads, 5))
    pack = pack_of(layout, cu)
    if name == "ssd":
        (dt, A, D) = (x.abs() * 0.3 for x in draw((total, heads), (heads,), (heads,)))
        per_token, per_head = [v, dt, k, q], [-A, D]

        def ours(x, dt, B, C, A, D, method):
            return lw.ssd(x, dt, A, B, C, pack, D=D, method=method)

        def theirs(x, dt, B, C, A, D):
            return recurrent(C, B, x * dt[..., None], A * dt, None, cu)[0] + D[:, None] * x
    elif name == "lightning":
        retnet = torch.log1p(-(2.0 ** (-5 - torch.arange(heads, dtype=torch.float64))))
        per_token, per_head = [q, k, v], [retnet]

        def ours(q, k, v, decay, method):
            return lw.lightning_attention(q, k, v, decay, pack, method=method)

        def theirs(q, k, v, decay):
            return recurrent(q, k, v, decay.expand(total, -1), None, cu)[0]
    else:
        per_token, per_head = [q, k, v], []

        def ours(q, k, v, method):
            return lw.lightning_attention(q, k, v, None, pack, method=method)

        def theirs(q, k, v):
            return recurrent(q, k, v, None, None, cu)[0]

    leaves = [x.clone().requires_grad_() for x in (*per_token, *per_head)]
    expected = theirs(*leaves)
    whole = [torch.zeros_like(x) for x in leaves]
    if total:
        whole = torch.autograd.grad(expected, leaves, d_out)
    mine = own_tokens(pack)
    for method in METHODS:
        shards = [x[mine].requires_grad_() for x in per_token] + [x.clone().requires_grad_() for x in per_head]
        out = ours(*shards, method)
        grads = list(torch.autograd.grad(out, shards, d_out[mine]))
        torch.testing.assert_close(out, expected[mine], atol=1e-10, rtol=0)
        for i, (found, reference) in enumerate(zip(grads, whole, strict=True)):
            if i < len(per_token):
                torch.testing.assert_close(found, reference[mine], atol=1e-10, rtol=0)
            else:
                dist.all_reduce(found)
                torch.testing.assert_close(found, reference, atol=1e-10 * float(reference.abs().max()), rtol=0)


@pytest.mark.parametrize("name", ["ssd", "lightning", "linear attention"])
@pytest.mark.parametrize("world", [2, 3, 4, 8] if FULL else [2, 3])
def test_ssd_and_lightning(ranks: Ranks, world: int, name: str) -> None:
    for layout in LAYOUTS if FULL else ["zigzag"]:
        for cu in PACKS.values() if FULL else [PACKS["ragged"]]:
            ranks.run(shared_parameters, name, layout, cu, size=world)


def against_hugging_face(l2norm: bool) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    inputs = GDN.inputs(300, 2, 4, K=16, V=24, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in inputs]
    q, k, v, g, beta = leaves
    q, k = (x.repeat_interleave(2, 1) for x in (q, k))
    torch_form = inspect.unwrap(torch_chunk_gated_delta_rule)  # with flash-linear-attention installed it is wrapped
    expected = torch_form(*(x[None] for x in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=l2norm)[0][0]
    d_out = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    whole = torch.autograd.grad(expected, leaves, d_out)
    pack = pack_of("zigzag", [0, 300])
    mine = own_tokens(pack)
    shards = [x.detach()[mine].requires_grad_() for x in inputs]
    out = lw.gated_delta_rule(*shards, pack, qk_l2norm=l2norm)
    grads = torch.autograd.grad(out, shards, d_out[mine])
    for found, reference in zip([out, *grads], [expected, *whole], strict=True):
        assert float((found - reference[mine]).detach().abs().max() / reference.detach().abs().max()) < 1e-5


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_hugging_face(ranks: Ranks, world: int, l2norm: bool) -> None:
    pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    ranks.run(against_hugging_face, l2norm, size=world)


# -- groups, bytes, bits ----------------------------------------------------------------------------------


def on_a_subgroup(problem: Problem, members: list[int]) -> None:
    group = dist.new_group(members)
    if dist.get_rank() in members:
        for method in METHODS:
            problem.compare(pack_of("zigzag", problem.cu, group), 1e-10, method=method)


def test_group_rank_is_not_global_rank(ranks: Ranks, problems: dict[str, Problem]) -> None:
    ranks.run(on_a_subgroup, problems["giant"], [1, 3], size=4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["contiguous", "shuffled"])
def test_one_process_without_a_group(problems: dict[str, Problem], layout: str, method: str) -> None:
    for problem in problems.values():
        problem.compare(pack_of(layout, problem.cu), 1e-10, method=method)


def sent(cu: list[int], layout: str, method: str, dtype: torch.dtype) -> dict[str, int]:
    """Bytes this rank hands to the network, forward and backward, and what the formulas say."""
    lw.Pack([0, 8])  # on its first pack a group compares calls
    pack = pack_of(layout, cu)
    leaves = [pack.shard(x).requires_grad_() for x in GDN.inputs(cu[-1], 1, 2, K=6, V=5, dtype=dtype)]
    lw.gated_delta_rule(*leaves, pack, method=method).sum().backward()  # all have agreed on this call
    ledger = resolve(None).ledger
    before = ledger.bytes_sent
    out = lw.gated_delta_rule(*leaves, pack, method=method)
    forward = ledger.bytes_sent - before
    out.sum().backward()
    backward = ledger.bytes_sent - before - forward
    itemsize = 8 if dtype == torch.float64 else 4
    rows = sent_bytes(fragments(pack.layout, cu), 2 * 6 * 5, 2 * 6 * 6, itemsize)
    lw.gated_delta_rule(*leaves, pack)
    return {
        "forward": forward,
        "backward": backward,
        "rows forward": int(rows[0][dist.get_rank()]),
        "rows backward": int(rows[1][dist.get_rank()]),
        "busiest": pack.methods["gated_delta_rule"].bytes_sent[method],
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "shuffled"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_affine_sends_what_the_formula_says(ranks: Ranks, world: int, layout: str, dtype: torch.dtype) -> None:
    found = {}
    for length in (130, 1300):
        for answer in ranks.run(sent, [0, length, length + 1], layout, "affine", dtype, size=world):
            assert answer["forward"] == answer["rows forward"]
            assert answer["backward"] == answer["rows backward"]
            found.setdefault(length, []).append(answer)
        assert max(a["forward"] + a["backward"] for a in found[length]) == found[length][0]["busiest"]
    if layout != "shuffled":
        assert found[130] == found[1300], "bytes do not grow with the sequence"


@pytest.mark.parametrize("method", ["reshard", "gather"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_reshard_and_gather_send_what_the_formula_says(ranks: Ranks, layout: str, method: str) -> None:
    for world in (2, 3):
        answers = ranks.run(sent, PACKS["ragged"], layout, method, torch.float64, size=world)
        assert max(a["forward"] + a["backward"] for a in answers) == answers[0]["busiest"]


def calls_to_others(cu: list[int], layout: str) -> int:
    lw.Pack([0, 8])  # on its first pack a group compares calls
    pack = pack_of(layout, cu)
    leaves = [x[own_tokens(pack)].requires_grad_() for x in GDN.inputs(cu[-1])]
    lw.gated_delta_rule(*leaves, pack)
    before = resolve(None).ledger.exchanges
    lw.gated_delta_rule(*leaves, pack).sum().backward()
    return int(resolve(None).ledger.exchanges) - before


def test_documents_on_one_rank_cost_no_communication(ranks: Ranks) -> None:
    assert ranks.run(calls_to_others, list(range(0, 81, 20)), "contiguous", size=4) == [0] * 4
    assert ranks.run(calls_to_others, [0, 13, 80], "last", size=4) == [0] * 4
    assert ranks.run(calls_to_others, [0, 1400], "zigzag", size=4) == [2] * 4, "one forward, one backward"


def bits_of(out: Tensor, leaves: list[Tensor]) -> list[bytes]:
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    return [x.detach().numpy().tobytes() for x in (out, *grads)]


def bits(method: str) -> list[bytes]:
    """Also of several calls on one pack."""
    cu = PACKS["ragged"]
    pack = pack_of("zigzag", cu)
    leaves = [x[own_tokens(pack)].requires_grad_() for x in GDN.inputs(cu[-1], dtype=torch.float32)]
    first, *others = (bits_of(lw.gated_delta_rule(*leaves, pack, method=method), leaves) for _ in range(3))
    assert others == [first, first], "the pack is used anew and nothing has changed"
    return first


@pytest.mark.parametrize("method", ["affine", "reshard", "gather"])
def test_the_same_bits_every_run(ranks: Ranks, method: str) -> None:
    first = ranks.run(bits, method, size=4)
    assert ranks.run(bits, method, size=4) == first


def interleaved(method: str) -> None:
    """Two packs at once: forward on one, forward on the other, then backward in either order."""
    packs = [pack_of("zigzag", PACKS["ragged"]), pack_of("shuffled", PACKS["giant"])]
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def forward(pack: lw.Pack) -> tuple[Tensor, list[Tensor]]:
        given = GDN.inputs(pack.layout.total, 1, 1, K=6, V=6, dtype=torch.float32)
        q, k, v, g, beta = leaves = [pack.shard(x).requires_grad_() for x in given]
        v = lw.causal_conv1d(v.flatten(1), weight, None, pack, activation="silu").unsqueeze(1)
        out = lw.gated_delta_rule(q, k, v, g, beta, pack, method=method)
        return lw.shift(out, pack) + out, [*leaves, weight]

    alone = [bits_of(*forward(pack)) for pack in packs]
    for order in ([0, 1], [1, 0]):
        started = [forward(pack) for pack in packs]
        found = {which: bits_of(*started[which]) for which in order}
        assert [found[0], found[1]] == alone


@pytest.mark.parametrize("method", ["affine", "reshard", "gather"])
def test_two_packs_at_once(ranks: Ranks, method: str) -> None:
    ranks.run(interleaved, method, size=3)


def test_auto_takes_the_fewest_bytes_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    long, tiny = [0, 1 << 16], list(range(0, 4001, 8))
    inputs = [x[:4] for x in GDN.inputs(4, 4, 4, K=128, V=128, dtype=torch.bfloat16)]
    sizes = Sizes.of(GatedDeltaRule(1.0), inputs)

    def chosen(cu: list[int], layout: str):
        return choose(PackCore(Comm.alone(0, 4), cu, layout), sizes)

    with caplog.at_level(logging.INFO, "longweave.linear"):
        one, many = chosen(long, "zigzag"), chosen(tiny, "zigzag")
        whole = chosen(list(range(0, 4001, 1000)), "contiguous")
    assert (one.method, many.method, whole.method) == ("affine", "reshard", "affine")
    assert min(one.bytes_sent, key=one.bytes_sent.get) == "affine"
    assert "nothing is sent" in whole.why
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO"]
    assert "linear attention by reshard: fewest bytes" in caplog.text


def the_way_it_went() -> None:
    pack = lw.Pack([0, 40], layout="zigzag", method="reshard")
    inputs = [pack.shard(x) for x in GDN.inputs(40)]
    lw.gated_delta_rule(*inputs, pack)
    assert pack.methods["gated_delta_rule"].method == "reshard", "the pack's own"
    lw.gated_delta_rule(*inputs, pack, method="gather")
    assert pack.methods["gated_delta_rule"].method == "gather", "the call's own comes first"
    assert "asked for" in pack.methods["gated_delta_rule"].why


def test_a_pack_tells_which_method_was_used(ranks: Ranks) -> None:
    ranks.run(the_way_it_went, size=2)
