"""Routes, walked by hand on lists of tokens."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longweave import InputError, Layout
from longweave.plan import Route, route
from longweave.plan.routing import run_index, shift_route


@st.composite
def layouts(draw: st.DrawFn, total: int, world: int) -> Layout:
    """Any layout: random cuts, random owners, random local order."""
    cuts = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=8))})
    spans: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for span in draw(st.permutations(list(itertools.pairwise(cuts)))):
        spans[draw(st.integers(0, world - 1))].append(span)
    return Layout.from_spans(total, spans)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    total, world = draw(st.integers(0, 30)), draw(st.integers(1, 5))
    return draw(layouts(total, world)), draw(layouts(total, world))


def walk(routes: list[Route], local: list[np.ndarray]) -> list[list[int]]:
    """All ranks' routes at once, on numbers of local tokens; -1 where nothing arrives."""
    world = len(routes)
    mail = []
    for rank, path in enumerate(routes):
        out = local[rank][run_index(path.send_runs)]
        mail.append(np.split(out, np.cumsum(path.send_splits)[:-1]))
    result = []
    for rank, path in enumerate(routes):
        new = np.full(path.tokens_out, -1)
        new[run_index(path.keep_dst_runs)] = local[rank][run_index(path.keep_src_runs)]
        arriving = [mail[peer][rank] for peer in range(world)]
        assert [len(m) for m in arriving] == list(path.recv_splits)
        new[run_index(path.recv_runs)] = np.concatenate(arriving)
        result.append(new.tolist())
    return result


@given(pairs())
def test_any_layout_to_any_layout(pair: tuple[Layout, Layout]) -> None:
    src, dst = pair
    routes = [route(src, dst, rank) for rank in range(src.world_size)]
    result = walk(routes, [src.indices(rank) for rank in range(src.world_size)])
    assert result == [dst.indices(rank).tolist() for rank in range(dst.world_size)]
    moved = sum(src.owner(t) != dst.owner(t) for t in range(src.total))
    assert sum(sum(path.send_splits) for path in routes) == moved, "each token at most once, none to itself"
    assert all(path.send_splits[rank] == path.recv_splits[rank] == 0 for rank, path in enumerate(routes))
    assert all(path.communicates == bool(moved) for path in routes)


@given(pairs())
def test_the_way_back_is_the_reverse(pair: tuple[Layout, Layout]) -> None:
    src, dst = pair
    for rank in range(src.world_size):
        there, back = route(src, dst, rank).reversed(), route(dst, src, rank)
        assert there.send_splits == back.send_splits
        assert there.recv_splits == back.recv_splits
        for name in ("send_runs", "recv_runs", "keep_src_runs", "keep_dst_runs"):
            assert run_index(getattr(there, name)).tolist() == run_index(getattr(back, name)).tolist()


# -- shifts -------------------------------------------------------------------------------------------


@st.composite
def packs(draw: st.DrawFn) -> tuple[Layout, list[int]]:
    """Any layout and any documents, some of them empty."""
    total, world = draw(st.integers(0, 30)), draw(st.integers(1, 5))
    cu = sorted([0, total, *draw(st.lists(st.integers(0, total), max_size=6))])
    kind = draw(st.sampled_from(["contiguous", "zigzag", "any"]))
    if kind == "any":
        return draw(layouts(total, world)), cu
    return Layout.contiguous(total, world) if kind == "contiguous" else Layout.zigzag(cu, world), cu


def shifted(cu: list[int], by: int) -> np.ndarray:
    """For each token the one `by` later in its document, or -1: the obvious way."""
    found = [-1] * cu[-1]
    for start, stop in itertools.pairwise(cu):
        for token in range(start, stop):
            if start <= token + by < stop:
                found[token] = token + by
    return np.array(found, dtype=np.int64)


@given(packs(), st.integers(-5, 5) | st.sampled_from([-(2**70), -40, 17, 40, 2**70]))
def test_shift_brings_the_neighbour_in_the_document(pack: tuple[Layout, list[int]], by: int) -> None:
    layout, cu = pack
    ranks = range(layout.world_size)
    routes = [shift_route(layout, cu, rank, by) for rank in ranks]
    local, source = [layout.indices(rank) for rank in ranks], shifted(cu, by)
    assert walk(routes, local) == [source[local[rank]].tolist() for rank in ranks]
    # Back: what a token gave away returns to it, and tokens that nobody reads get nothing.
    read = [np.where(np.isin(tokens, source), tokens, -1).tolist() for tokens in local]
    arrived = [np.array(new, dtype=np.int64) for new in walk(routes, local)]
    assert walk([path.reversed() for path in routes], arrived) == read
    assert all((path.tokens_in, path.tokens_out) == (len(local[r]),) * 2 for r, path in enumerate(routes))
    moved = sum(n >= 0 and layout.owner(t) != layout.owner(n) for t, n in enumerate(source.tolist()))
    assert sum(sum(path.send_splits) for path in routes) == moved, "each entry at most once, none to itself"
    assert all(path.communicates == bool(moved) for path in routes)
    for rank, path in enumerate(routes):
        assert path.send_splits[rank] == path.recv_splits[rank] == 0
        unmoved = not moved and np.array_equal(source[local[rank]], local[rank])
        assert path.is_identity == unmoved


def test_a_shift_by_nothing_is_the_identity_and_a_shift_out_of_documents_is_not() -> None:
    assert shift_route(Layout.zigzag([0, 9], 2), [0, 9], 1, 0).is_identity
    path = shift_route(Layout.contiguous(3, 1), [0, 1, 2, 3], 0, 1)
    assert not path.is_identity, "every token is alone in its document and gets nothing"
    assert len(path.keep_dst_runs) == len(path.recv_runs) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 4], 0, 1), r"ends at 4 but the layout has 5 tokens"),
        (([0, 5], 2, 1), r"rank 2 does not exist"),
        (([0, 5], 0, 1.0), r"by is 1\.0"),
        (([0, 5], 0, True), r"by is True"),
    ],
)
def test_bad_shifts(arguments: tuple, message: str) -> None:
    with pytest.raises(InputError, match=message):
        shift_route(Layout.contiguous(5, 2), *arguments)


# -- both ---------------------------------------------------------------------------------------------


def test_identity_only_when_nothing_moves_anywhere() -> None:
    src = Layout.zigzag([0, 40], 4)
    assert all(route(src, Layout.zigzag([0, 40], 4), rank).is_identity for rank in range(4))
    turned = Layout.from_spans(10, [[(5, 10), (0, 5)]])
    assert route(turned, turned, 0).is_identity
    path = route(Layout.contiguous(10, 1), turned, 0)
    assert not path.communicates
    assert not path.is_identity
    partly = Layout.from_spans(6, [[(0, 2)], [(4, 6)], [(2, 4)]])
    path = route(Layout.contiguous(6, 3), partly, 0)
    assert path.communicates, "rank 0 keeps all its tokens but must take part"
    assert not path.is_identity


def test_runs_stay_runs() -> None:
    """A million tokens are a few runs."""
    rng = np.random.default_rng(0)
    cu = np.append(0, np.cumsum(rng.multinomial(1 << 20, np.ones(1000) / 1000)))
    src, dst = Layout.zigzag(cu, 64), Layout.contiguous(1 << 20, 64)
    path = route(src, dst, 5)
    assert len(path.send_runs) + len(path.keep_src_runs) <= len(src.spans_of(5)) + 64
    path = shift_route(src, cu, 5, 1)
    assert len(path.send_runs) + len(path.keep_src_runs) <= 2 * len(src.spans_of(5)) + 64


def test_layouts_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="hold 5 and 6 tokens"):
        route(Layout.contiguous(5, 2), Layout.contiguous(6, 2), 0)
    with pytest.raises(InputError, match="for 2 and 3 ranks"):
        route(Layout.contiguous(5, 2), Layout.contiguous(5, 3), 0)
    with pytest.raises(InputError, match="rank 2 does not exist"):
        route(Layout.contiguous(5, 2), Layout.contiguous(5, 2), 2)
