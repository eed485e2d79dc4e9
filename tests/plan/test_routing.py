"""Routes, walked by hand on lists of tokens."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longweave import InputError, Layout
from longweave.plan import Route, route
from longweave.plan.routing import run_index


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


def walk(src: Layout, dst: Layout) -> tuple[list[list[int]], list[Route]]:
    """All ranks' routes at once, on token numbers."""
    world = src.world_size
    routes = [route(src, dst, rank) for rank in range(world)]
    local = [src.indices(rank) for rank in range(world)]
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
    return result, routes


@given(pairs())
def test_any_layout_to_any_layout(pair: tuple[Layout, Layout]) -> None:
    src, dst = pair
    result, routes = walk(src, dst)
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
    """A million tokens are a few runs, and the second request does no work at all."""
    rng = np.random.default_rng(0)
    cu = np.append(0, np.cumsum(rng.multinomial(1 << 20, np.ones(1000) / 1000)))
    src, dst = Layout.zigzag(cu, 64), Layout.contiguous(1 << 20, 64)
    path = route(src, dst, 5)
    assert len(path.send_runs) + len(path.keep_src_runs) <= len(src.spans_of(5)) + 64
    assert route(Layout.zigzag(cu, 64), Layout.contiguous(1 << 20, 64), 5) is path


def test_layouts_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="hold 5 and 6 tokens"):
        route(Layout.contiguous(5, 2), Layout.contiguous(6, 2), 0)
    with pytest.raises(InputError, match="for 2 and 3 ranks"):
        route(Layout.contiguous(5, 2), Layout.contiguous(5, 3), 0)
    with pytest.raises(InputError, match="rank 2 does not exist"):
        route(Layout.contiguous(5, 2), Layout.contiguous(5, 2), 2)
