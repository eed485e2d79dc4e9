"""The dispatch solver: what every layout keeps, exact costs, and quality against what no layout can beat."""

import itertools
import math
import pickle
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import lil_matrix
from test_cost import borders, masks

from longweave import InputError, Layout, Mask
from longweave.plan.cost import CPU, Machine, Shape, cost, load_bound, receive_bound
from longweave.plan.dispatch import AS_GOOD_AS_PERFECT, Candidate, Portfolio
from longweave.plan.dispatch.grid import auto_chunk_size, make_grid

SHAPE, MACHINE = Shape(), Machine()
SECONDS_PER_PAIR, SECONDS_PER_TOKEN = MACHINE.seconds_per_pair(SHAPE), MACHINE.seconds_per_token(SHAPE)
TOKENS_PER_RANK = 8192
KINDS = ("lognormal", "mixture", "giant", "single", "tiny", "equal")


# -- packs ------------------------------------------------------------------------------------------


def pack(kind: str, world: int, seed: int = 0) -> list[int]:
    """Document lengths, 8192 tokens a rank."""
    rng = random.Random(f"{kind} {world} {seed}")
    total = TOKENS_PER_RANK * world
    if kind == "single":
        return [total]
    draw = {
        "lognormal": lambda: max(16, int(rng.lognormvariate(math.log(1200), 1.3))),
        "mixture": lambda: rng.randint(64, 512) if rng.random() < 0.98 else rng.randint(8192, 32768),
        "giant": lambda: max(16, int(rng.lognormvariate(math.log(400), 1.0))),
        "tiny": lambda: rng.randint(1, 40),
        "equal": lambda: 4096,
    }[kind]
    lengths = [total // 2] if kind == "giant" else []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(draw(), left))
        if kind == "tiny" and len(lengths) == 400:  # summing thousands again and again is slow: repeat
            return (lengths * (total // sum(lengths) + 1))[: total // 20]
    rng.shuffle(lengths)
    return lengths


worlds = st.integers(1, 9)


def test_grid_finds_documents_that_the_mask_does_not_name() -> None:
    blocks = [((0, 5), (0, 5), "causal"), ((5, 9), (5, 9), "full")]
    assert make_grid(Mask.from_slices(12, blocks), 2, 100).cuts.tolist() == [0, 5, 9, 12]
    nested = [((0, 10), (0, 2), "full"), ((3, 5), (3, 5), "causal"), ((6, 8), (6, 8), "causal")]
    assert make_grid(Mask.from_slices(12, nested), 2, 100).cuts.tolist() == [0, 10, 12]
    assert make_grid(Mask.shared_prefix(4, [3, 2]), 2, 100).shared.tolist() == [0]
    assert make_grid(Mask.causal([0, 4, 4, 9]), 2, 3).cuts.tolist() == [0, 3, 4, 7, 9]


# -- what every balanced layout keeps ---------------------------------------------------------------------


@given(masks(largest=60), worlds, st.sampled_from(["auto", 1, 3, 16]), st.sampled_from([None, 1, 2, 4]))
@settings(max_examples=150)
def test_every_mask_every_world(mask: Mask, world: int, chunk_size: object, node_size: int | None) -> None:
    layout = Layout.balanced(mask, world, chunk_size=chunk_size, node_size=node_size)
    owned = np.concatenate([layout.indices(rank) for rank in range(world)])
    assert sorted(owned.tolist()) == list(range(mask.total)), "every token exactly once"
    for own in layout.spans:
        assert list(own) == sorted(own), "tokens ascend on every rank"
        assert all(a.stop < b.start for a, b in itertools.pairwise(own)), "touching spans are one span"
    chunk = auto_chunk_size(mask.total, world) if chunk_size == "auto" else chunk_size
    assert max(layout.counts) <= -(-mask.total // world) + chunk, "at most one chunk more than an equal share"
    again = Portfolio(mask, world, chunk, slack=chunk, node=node_size)
    best = min(again.candidates(), key=lambda candidate: candidate.key)
    assert best.layout == layout, "the same input gives the same layout"


def test_a_long_document_that_is_less_dense_than_the_rest() -> None:
    """It needs no ranks of its own; with nodes, that was an index out of bounds."""
    mask = Mask.prefix_causal([0, 11, 18, 26, 32, 32], [6, 6, 1, 6, 0])
    layout = Layout.balanced(mask, 5, chunk_size=1, node_size=1)
    assert sum(layout.counts) == 32


@given(masks(largest=60), worlds)
def test_never_worse_than_a_member(mask: Mask, world: int) -> None:
    """Also than those that the portfolio skips because they cannot win."""
    chunk = auto_chunk_size(mask.total, world)
    portfolio = Portfolio(mask, world, chunk, slack=chunk)
    members = [*portfolio.candidates(), portfolio.scored("zigzag", Layout.zigzag(mask.cu_seqlens, world))]
    best = Layout.balanced(mask, world)
    price = portfolio.scored("best", best).key[:2]
    assert all(price <= member.key[:2] for member in members), [m.name for m in members if m.key[:2] < price]


@pytest.mark.parametrize("kind", KINDS)
def test_never_slower_than_plain_heuristics(kind: str) -> None:
    for world in (2, 8):
        mask = Mask.causal(borders(pack(kind, world)))
        ours = cost(mask, Layout.balanced(mask, world)).seconds(SHAPE, MACHINE)
        good = AS_GOOD_AS_PERFECT * mask.area / world * SECONDS_PER_PAIR  # from here on traffic decides
        for other in (Layout.contiguous(mask.total, world), Layout.zigzag(mask.cu_seqlens, world)):
            assert ours <= max(good, cost(mask, other).seconds(SHAPE, MACHINE))


def test_cuts_lie_on_the_chunk_grid() -> None:
    mask = Mask.causal(borders(pack("lognormal", 8)))
    layout = Layout.balanced(mask, 8, chunk_size=256)
    starts = layout.sorted[0]
    document = np.searchsorted(mask.cu_seqlens, starts, side="right") - 1
    assert ((starts - mask.cu_seqlens[document]) % 256 == 0).all()


def test_equal_masks_with_other_documents_are_other_problems() -> None:
    """Documents that a mask names are cut into chunks one by one."""
    named = Mask.shared_prefix(1000, [700, 700, 700])
    unnamed = Mask.from_slices(named.total, named.slices)
    assert named == unnamed
    for mask in (named, unnamed):
        layout = Layout.balanced(mask, 2, chunk_size=300)
        fresh = min(Portfolio(mask, 2, 300, slack=300).candidates(), key=lambda candidate: candidate.key)
        assert layout == fresh.layout


def test_documents_that_a_mask_does_not_name_stay_whole() -> None:
    blocks = Mask.from_slices(12, [((0, 6), (0, 6), "causal"), ((6, 12), (6, 12), "causal")])
    assert Layout.balanced(blocks, 2).spans == (((0, 6),), ((6, 12),))


def test_balanced_layouts_pickle() -> None:
    layout = Layout.balanced(Mask.causal(borders(pack("lognormal", 4))), 4)
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_the_layer_and_the_machine_decide_what_is_slow() -> None:
    """Where links are slow the solver moves less, and a layout made for a machine serves it best."""
    mask = Mask.causal(borders(pack("lognormal", 16)))
    slow, fast = Machine(bytes_per_second=5e9), Machine(bytes_per_second=1e15)
    received = {
        machine: cost(mask, Layout.balanced(mask, 16, machine=machine)).received.max() for machine in (slow, fast)
    }
    assert received[slow] < received[fast]
    few_kv_heads = Shape(kv_heads=1)
    for shape, machine in ((few_kv_heads, MACHINE), (SHAPE, slow), (SHAPE, CPU)):
        layouts = [Layout.balanced(mask, 16, shape=shape, machine=machine), Layout.balanced(mask, 16)]
        own, default = (cost(mask, layout).seconds(shape, machine) for layout in layouts)
        assert own <= 1.03 * default, "a layout for this machine is no slower on it than one for another"


# -- quality, against what no layout can beat ---------------------------------------------------------------


def check_quality(kind: str, world: int, seed: int, slack: float, imbalance: float = 1.05) -> None:
    """Modelled time within `slack` of the bound, and balanced; the bound knows nothing of the solver."""
    mask = Mask.causal(borders(pack(kind, world, seed)))
    layout = Layout.balanced(mask, world)
    result = cost(mask, layout)
    most = -(-mask.total // world) + auto_chunk_size(mask.total, world)
    compute = load_bound(mask, world) * SECONDS_PER_PAIR
    moved = receive_bound(mask, world, most)[0] * SECONDS_PER_TOKEN
    assert result.seconds(SHAPE, MACHINE) <= slack * max(compute, moved)
    assert result.imbalance <= imbalance
    assert max(layout.counts) <= most
    assert min(layout.counts) >= TOKENS_PER_RANK - 2 * auto_chunk_size(mask.total, world)
    # Whole documents fit on ranks; at most a tiny one that lies across a border is shared.
    whole = {"equal": 0, "tiny": 40}
    assert result.sent.max() <= whole.get(kind, mask.total * world)


@pytest.mark.parametrize("world", [2, 8, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_quality(kind: str, world: int) -> None:
    varied = kind in ("lognormal", "mixture")
    for seed in range(3 if varied else 1):
        check_quality(kind, world, seed, slack=1.15 if varied else 1.03)


@pytest.mark.parametrize("kind", ["lognormal", "mixture", "giant", "single", "equal"])
def test_quality_on_128_ranks(kind: str) -> None:
    """A log-normal pack has documents of many ranks here, so traffic is what binds."""
    check_quality(kind, 128, 0, slack=1.6 if kind == "lognormal" else 1.1, imbalance=1.08)


def every_member(mask: Mask, world: int) -> list[Candidate]:
    """The portfolio, without leaving out what comes after a very good candidate."""
    portfolio = Portfolio(mask, world, 128, slack=128)
    portfolio.close = portfolio.good = 0.0
    return list(portfolio.candidates())


def test_traffic_is_far_below_that_of_chunks_without_documents() -> None:
    mask = Mask.causal(borders(pack("lognormal", 32)))
    members = {m.name: m.seconds for m in every_member(mask, 32)}
    assert cost(mask, Layout.balanced(mask, 32)).seconds(SHAPE, MACHINE) < 0.7 * members["lpt"]


def test_swaps_lower_the_traffic_of_lpt() -> None:
    received = {"lpt": 0, "lpt, swapped": 0}
    for seed in range(3):
        mask = Mask.causal(borders(pack("lognormal", 16, seed)))
        for member in every_member(mask, 16):
            if member.name in received:
                received[member.name] += int(member.cost.received.sum())
                assert member.cost.imbalance < 1.05
    assert received["lpt, swapped"] < 0.98 * received["lpt"]


@pytest.mark.parametrize("window", [100, 1024])
def test_windows_move_little(window: int) -> None:
    """A rank needs at most a window before each of its runs; zigzag would need two, contiguous cannot balance."""
    mask = Mask.sliding_window(borders(pack("mixture", 8)), window)
    layout = Layout.balanced(mask, 8)
    result = cost(mask, layout)
    assert result.imbalance <= 1.05
    assert result.received.max() <= 4 * window


@pytest.mark.parametrize("branches", [[1024] * 28, [100 + 397 * i % 2900 for i in range(30)]])
def test_a_shared_prompt_lies_on_all_ranks(branches: list[int]) -> None:
    """Every rank needs the prompt. If one rank held it, that one would send it seven times."""
    mask = Mask.shared_prefix(4096, branches)
    layout = Layout.balanced(mask, 8)
    result = cost(mask, layout)
    assert len(set(np.asarray(layout.owner(np.arange(4096))).tolist())) == 8
    assert result.seconds(SHAPE, MACHINE) <= 1.02 * load_bound(mask, 8) * SECONDS_PER_PAIR
    assert max(result.sent.max(), result.received.max()) <= 1.2 * 4096


# -- the optimum of small cases -----------------------------------------------------------------------------


def optimum(mask: Mask, world: int, chunk: int) -> float:
    """The least modelled time of any assignment of chunks, exactly, for causal documents.

    own[c, r]: rank r holds chunk c. need[c, r]: it needs the keys of c, since it holds c or a later chunk of the
    document. sent[c, r]: how many other ranks need c, if r holds it.
    """
    grid = make_grid(mask, world, chunk)
    tokens, area, document = np.diff(grid.cuts), np.diff(grid.area_before), grid.document_of_chunk
    count = len(tokens)
    own, need, sent = (lambda c, r, k=k: (k * count + c) * world + r for k in range(3))
    last = 3 * count * world  # the time, in units of mean compute
    unit = mask.area / world * SECONDS_PER_PAIR
    rows: list[tuple[dict[int, float], float, float]] = []
    for c, r in itertools.product(range(count), range(world)):
        for later in range(c, count):
            if document[later] == document[c]:
                rows.append(({need(c, r): 1, own(later, r): -1}, 0, np.inf))
        others = {need(c, rank): -1.0 for rank in range(world)}
        rows.append(({sent(c, r): 1, own(c, r): -world, **others}, -1 - world, np.inf))
    for c in range(count):
        rows.append(({own(c, r): 1 for r in range(world)}, 1, 1))
    for r in range(world):
        rows.append(({own(c, r): tokens[c] for c in range(count)}, 0, -(-mask.total // world) + chunk))
        compute = {own(c, r): area[c] * SECONDS_PER_PAIR / unit for c in range(count)}
        per_token = tokens * SECONDS_PER_TOKEN / unit
        received = {need(c, r): per_token[c] for c in range(count)} | {own(c, r): -per_token[c] for c in range(count)}
        for load in (compute, received, {sent(c, r): per_token[c] for c in range(count)}):
            rows.append(({last: 1, **{k: -v for k, v in load.items()}}, 0, np.inf))
    matrix = lil_matrix((len(rows), last + 1))
    for i, (row, _, _) in enumerate(rows):
        for column, value in row.items():
            matrix[i, column] += value
    constraint = LinearConstraint(matrix.tocsr(), [row[1] for row in rows], [row[2] for row in rows])
    goal = np.append(np.zeros(last), 1)
    whole = np.append(np.ones(2 * count * world), np.zeros(count * world + 1))
    upper = np.append(np.ones(2 * count * world), np.full(count * world + 1, np.inf))
    result = milp(goal, constraints=constraint, integrality=whole, bounds=(0, upper), options={"mip_rel_gap": 0.005})
    assert result.success
    return float(result.fun) * unit


@pytest.mark.parametrize(
    ("lengths", "world"),
    [
        ([4096, 1024, 1024, 2048], 2),
        ([6144, 512, 700, 1024], 2),
        ([5000, 2048, 512, 512, 512], 3),
        ([3072, 3072, 1536, 512], 2),
        ([2048, 2048, 2048, 1024], 3),
    ],
)
def test_gap_to_the_optimum(lengths: list[int], world: int) -> None:
    mask = Mask.causal(borders(lengths))
    ours = cost(mask, Layout.balanced(mask, world, chunk_size=512, imbalance=1.0)).seconds(SHAPE, MACHINE)
    assert ours <= 1.25 * optimum(mask, world, 512)


# -- nodes, time, arguments -----------------------------------------------------------------------------------


def test_nodes_keep_documents_inside() -> None:
    across: dict[int | None, int] = {None: 0, 8: 0}
    for seed in range(3):
        mask = Mask.causal(borders(pack("lognormal", 32, seed)))
        for node_size in across:
            result = cost(mask, Layout.balanced(mask, 32, node_size=node_size), node_size=8)
            across[node_size] += int(result.received_across.sum())
            assert result.imbalance <= 1.05
    assert across[8] < 0.7 * across[None]


def test_one_document_per_node_stays_there() -> None:
    mask = Mask.causal(borders([4 * TOKENS_PER_RANK] * 4))
    result = cost(mask, Layout.balanced(mask, 16, node_size=4), node_size=4)
    assert result.imbalance <= 1.03
    assert not result.sent_across.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, r"world_size is 0"),
        ({"chunk_size": 0}, r"chunk_size is 0; give an int of at least 1, or \"auto\""),
        ({"chunk_size": "big"}, r"chunk_size is 'big'"),
        ({"chunk_size": 2.0}, r"chunk_size is 2\.0"),
        ({"chunk_size": True}, r"chunk_size is True"),
        ({"imbalance": -0.1}, r"imbalance is -0\.1"),
        ({"imbalance": float("nan")}, r"imbalance is nan"),
        ({"imbalance": "3%"}, r"imbalance is '3%'"),
        ({"token_slack": -1}, r"token_slack is -1"),
        ({"node_size": 0}, r"node_size is 0"),
        ({"mask": [0, 5]}, r"mask is a list; give a Mask"),
    ],
)
def test_bad_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Layout.balanced(**{"mask": Mask.causal([0, 5]), "world_size": 2, **options})
