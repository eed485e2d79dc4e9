"""Linear attention across ranks against one process: outputs and every gradient, on every layout and world size."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from linear_cases import DELTA, GDN, GLA, KDA, Case
from linear_ranks import LAYOUTS, PACKS, Problem, layout_of
from torch import Tensor

import longweave as lw
from longweave.kernels.delta_rule import GatedDeltaRule
from longweave.kernels.recurrent import recurrent
from longweave.kernels.relatives import retnet_log_decay
from longweave.linear import mixers
from longweave.plan.chains import sent_bytes
from longweave.plan.fragments import fragments
from longweave.launch import Ranks

WEAK = 5e-4  # g is uniform in (−1e-3, 0): a state lasts longer than any document here


@pytest.fixture(scope="module")
def problems() -> dict[str, Problem]:
    """Grouped heads, K ≠ V; weak decay, which hides nothing, on most."""
    shape = {"Hk": 1, "Hv": 2, "K": 6, "V": 5}
    return {
        name: Problem.solve(GDN, cu, decay=0.1 if name == "ragged" else WEAK, **shape) for name, cu in PACKS.items()
    }


def every_pack(problems: dict[str, Problem], layout: str, methods: list[str], tolerance: float) -> None:
    for name, problem in problems.items():
        for method in methods:
            try:
                problem.compare(layout_of(layout, problem.cu, dist.get_world_size()), tolerance, method=method)
            except Exception as error:
                raise AssertionError(f"{name} by {method}") from error


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_affine_on_every_layout(ranks: Ranks, problems: dict[str, Problem], world: int, layout: str) -> None:
    ranks.run(every_pack, problems, layout, ["affine"], 1e-10, size=world)


@pytest.mark.parametrize("layout", ["zigzag", "shuffled"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
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
    ranks.run(every_pack, float32_problems, layout, ["affine", "reshard", "gather"], 5e-5, size=world)


def bfloat16(problem: Problem) -> None:
    """No worse than twice the error of one process in bfloat16."""
    layout = layout_of("zigzag", problem.cu, dist.get_world_size())
    mine = torch.from_numpy(layout.indices(dist.get_rank()))

    def errors(found: list[Tensor]) -> list[float]:
        return [
            float((x.double() - e).abs().max() / e.abs().max()) for x, e in zip(found, problem.expected, strict=True)
        ]

    def solve(leaves: list[Tensor], layout: lw.Layout, d_out: Tensor, group) -> list[Tensor]:
        out = lw.gated_delta_rule(*leaves, layout, problem.cu, group, scale=GDN.scale, method="affine")
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    whole = [x.clone().requires_grad_() for x in problem.inputs]
    one = errors(solve(whole, lw.Layout.contiguous(problem.cu[-1], 1), problem.d_out, alone))
    shards = solve([x[mine].requires_grad_() for x in problem.inputs], layout, problem.d_out[mine], None)
    for ours, theirs in zip(errors([lw.unshard(x, layout) for x in shards]), one, strict=True):
        assert ours <= 2 * theirs


def test_bfloat16(ranks: Ranks) -> None:
    shape = {"Hk": 2, "Hv": 4, "K": 16, "V": 24, "dtype": torch.bfloat16}
    ranks.run(bfloat16, Problem.solve(GDN, [0, 300, 301, 400], **shape), size=4)


@pytest.mark.parametrize("method", ["affine", "reshard", "gather"])
@pytest.mark.parametrize("case", [GDN, DELTA, KDA, GLA], ids=lambda case: case.name)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_relatives(ranks: Ranks, world: int, case: Case, method: str) -> None:
    solved = {"": Problem.solve(case, PACKS["ragged"], decay=WEAK, Hk=1, Hv=2, K=6, V=5)}
    for layout in ("zigzag", "shuffled"):
        ranks.run(every_pack, solved, layout, [method], 1e-10, size=world)


# -- mixers with inputs of their own --------------------------------------------------------------------


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    rng = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]


def shared_parameters(name: str, method: str) -> None:
    """SSD and lightning attention: per-token inputs, and per-head ones whose gradients sum over ranks."""
    cu, heads = PACKS["ragged"], 4
    total = cu[-1]
    q, k, v, d_out = draw((total, 2, 6), (total, 2, 6), (total, heads, 5), (total, heads, 5))
    layout = layout_of("zigzag", cu, dist.get_world_size())
    if name == "ssd":
        (dt, A, D) = (x.abs() * 0.3 for x in draw((total, heads), (heads,), (heads,)))
        per_token, per_head = [v, dt, k, q], [-A, D]

        def ours(x, dt, B, C, A, D):
            return mixers.ssd(x, dt, A, B, C, layout, cu, D=D, method=method)

        def theirs(x, dt, B, C, A, D):
            return recurrent(C, B, x * dt[..., None], A * dt, None, cu)[0] + D[:, None] * x
    elif name == "lightning":
        per_token, per_head = [q, k, v], [retnet_log_decay(heads).double()]

        def ours(q, k, v, decay):
            return mixers.lightning_attention(q, k, v, decay, layout, cu, method=method)

        def theirs(q, k, v, decay):
            return recurrent(q, k, v, decay.expand(total, -1), None, cu)[0]
    else:
        per_token, per_head = [q, k, v], []

        def ours(q, k, v):
            return mixers.lightning_attention(q, k, v, None, layout, cu, method=method)

        def theirs(q, k, v):
            return recurrent(q, k, v, None, None, cu)[0]

    leaves = [x.clone().requires_grad_() for x in (*per_token, *per_head)]
    expected = theirs(*leaves)
    whole = torch.autograd.grad(expected, leaves, d_out)
    mine = torch.from_numpy(layout.indices(dist.get_rank()))
    shards = [x[mine].requires_grad_() for x in per_token] + [x.clone().requires_grad_() for x in per_head]
    out = ours(*shards)
    grads = list(torch.autograd.grad(out, shards, d_out[mine]))
    torch.testing.assert_close(out, expected[mine], atol=1e-10, rtol=0)
    for i, (found, reference) in enumerate(zip(grads, whole, strict=True)):
        if i < len(per_token):
            torch.testing.assert_close(found, reference[mine], atol=1e-10, rtol=0)
        else:
            dist.all_reduce(found)
            torch.testing.assert_close(found, reference, atol=1e-10 * float(reference.abs().max()), rtol=0)


@pytest.mark.parametrize("method", ["affine", "reshard", "gather"])
@pytest.mark.parametrize("name", ["ssd", "lightning", "linear attention"])
@pytest.mark.parametrize("world", [2, 3])
def test_ssd_and_lightning(ranks: Ranks, world: int, name: str, method: str) -> None:
    ranks.run(shared_parameters, name, method, size=world)


def against_hugging_face(l2norm: bool) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    inputs = GDN.inputs(300, 2, 4, K=16, V=24, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in inputs]
    q, k, v, g, beta = leaves
    q, k = (x.repeat_interleave(2, 1) for x in (q, k))
    expected = torch_chunk_gated_delta_rule(*(x[None] for x in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=l2norm)[0][
        0
    ]
    d_out = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    whole = torch.autograd.grad(expected, leaves, d_out)
    layout = lw.Layout.zigzag([0, 300], dist.get_world_size())
    mine = torch.from_numpy(layout.indices(dist.get_rank()))
    shards = [x.detach()[mine].requires_grad_() for x in inputs]
    out = lw.gated_delta_rule(*shards, layout, [0, 300], qk_l2norm=l2norm)
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
        for method in ("affine", "reshard", "gather"):
            problem.compare(layout_of("zigzag", problem.cu, len(members)), 1e-10, group, method=method)


def test_group_rank_is_not_global_rank(ranks: Ranks, problems: dict[str, Problem]) -> None:
    ranks.run(on_a_subgroup, problems["giant"], [1, 3], size=4)


@pytest.mark.parametrize("method", ["auto", "affine", "reshard", "gather"])
@pytest.mark.parametrize("layout", ["contiguous", "shuffled"])
def test_one_process_without_a_group(problems: dict[str, Problem], layout: str, method: str) -> None:
    for problem in problems.values():
        problem.compare(layout_of(layout, problem.cu, 1), 1e-10, method=method)


def sent(cu: list[int], layout: str, method: str, dtype: torch.dtype) -> dict[str, int]:
    """Bytes this rank hands to the network, forward and backward, and what the formulas say."""
    from longweave.comm import exchange

    layout = layout_of(layout, cu, dist.get_world_size())
    mine = layout.indices(dist.get_rank())
    leaves = [x[mine].requires_grad_() for x in GDN.inputs(cu[-1], 1, 2, K=6, V=5, dtype=dtype)]
    lw.gated_delta_rule(*leaves, layout, cu, method=method).sum().backward()  # everybody has agreed
    counted = [0]
    original = {name: getattr(dist, name) for name in ("all_to_all_single", "batch_isend_irecv")}
    gather = exchange._all_gather

    def all_to_all_single(received, x, *args, **kwargs):
        counted[0] += x.numel()
        return original["all_to_all_single"](received, x, *args, **kwargs)

    def batch_isend_irecv(ops):
        counted[0] += sum(op.tensor.numel() for op in ops if op.op is dist.isend)
        return original["batch_isend_irecv"](ops)

    def all_gather(gathered, x, **kwargs):
        counted[0] += x.numel() * (dist.get_world_size() - 1)
        return gather(gathered, x, **kwargs)

    try:
        dist.all_to_all_single, dist.batch_isend_irecv = all_to_all_single, batch_isend_irecv
        exchange._all_gather = all_gather
        out = lw.gated_delta_rule(*leaves, layout, cu, method=method)
        forward = counted[0]
        out.sum().backward()
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv = original.values()
        exchange._all_gather = gather
    itemsize = 8 if dtype == torch.float64 else 4
    rows = sent_bytes(fragments(layout, cu), 2 * 6 * 5, 2 * 6 * 6, itemsize)
    return {
        "forward": forward,
        "backward": counted[0] - forward,
        "rows forward": int(rows[0][dist.get_rank()]),
        "rows backward": int(rows[1][dist.get_rank()]),
        "busiest": mixers.method_of(layout, cu, GatedDeltaRule(1.0), leaves).bytes_sent[method],
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
    layout = layout_of(layout, cu, dist.get_world_size())
    leaves = [x[layout.indices(dist.get_rank())].requires_grad_() for x in GDN.inputs(cu[-1])]
    lw.gated_delta_rule(*leaves, layout, cu)
    before = dist.group.WORLD._get_sequence_number_for_group()
    lw.gated_delta_rule(*leaves, layout, cu).sum().backward()
    return int(dist.group.WORLD._get_sequence_number_for_group()) - before


def test_documents_on_one_rank_cost_no_communication(ranks: Ranks) -> None:
    assert ranks.run(calls_to_others, list(range(0, 81, 20)), "contiguous", size=4) == [0] * 4
    assert ranks.run(calls_to_others, [0, 13, 80], "last", size=4) == [0] * 4
    assert ranks.run(calls_to_others, [0, 1400], "zigzag", size=4) == [2] * 4, "one forward, one backward"


def bits(method: str) -> list[bytes]:
    cu = PACKS["ragged"]
    layout = layout_of("zigzag", cu, dist.get_world_size())
    leaves = [x[layout.indices(dist.get_rank())].requires_grad_() for x in GDN.inputs(cu[-1], dtype=torch.float32)]
    out = lw.gated_delta_rule(*leaves, layout, cu, method=method)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    return [x.detach().numpy().tobytes() for x in (out, *grads)]


@pytest.mark.parametrize("method", ["affine", "reshard", "gather"])
def test_the_same_bits_every_run(ranks: Ranks, method: str) -> None:
    first = ranks.run(bits, method, size=4)
    assert all(ranks.run(bits, method, size=4) == first for _ in range(2))


def test_auto_takes_the_fewest_bytes_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    long, tiny = [0, 1 << 16], list(range(0, 4001, 8))
    inputs = [x[:4] for x in GDN.inputs(4, 4, 4, K=128, V=128, dtype=torch.bfloat16)]
    mixer = GatedDeltaRule(1.0)
    with caplog.at_level(logging.INFO, "longweave.linear"):
        one = mixers.method_of(lw.Layout.zigzag(long, 4), long, mixer, inputs)
        many = mixers.method_of(lw.Layout.zigzag(tiny, 4), tiny, mixer, inputs)
    whole = mixers.method_of(lw.Layout.contiguous(4000, 4), list(range(0, 4001, 1000)), mixer, inputs)
    assert (one.method, many.method, whole.method) == ("affine", "reshard", "affine")
    assert min(one.bytes_sent, key=one.bytes_sent.get) == "affine"
    assert "nothing is sent" in whole.reason
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO"]
    assert "linear attention by reshard: fewest bytes" in caplog.text
