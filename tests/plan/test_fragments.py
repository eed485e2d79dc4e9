"""Fragments and halos, walked by hand on lists of tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_routing import packs

from longweave import InputError, Layout
from longweave.plan.fragments import Role, fragments, halo_route


@given(packs())
def test_fragments_are_the_layout_cut_by_the_documents(pack: tuple[Layout, list[int]]) -> None:
    layout, cu = pack
    f = fragments(layout, cu)
    chains: dict[int, list[int]] = {}
    for row in range(len(f.starts)):
        document = int(f.documents[row])
        assert cu[document] <= f.starts[row] < f.stops[row] <= cu[document + 1]
        assert f.positions[row] == len(chains.setdefault(document, []))
        assert not chains[document] or f.stops[row - 1] == f.starts[row], "a chain has no gaps"
        chains[document].append(int(f.ranks[row]))
    assert sum(f.stops - f.starts) == layout.total
    assert f.communicates == any(len(set(owners)) > 1 for owners in chains.values())
    assert f.linked == any(len(owners) > 1 for owners in chains.values())
    for rank in range(layout.world_size):
        tokens = layout.indices(rank)
        end = 0
        for (start, stop), row in zip(f.local_spans(rank), f.rows_of(rank), strict=True):
            assert start == end, "in the order of local tokens, without gaps"
            end = stop
            assert tokens[start:stop].tolist() == list(range(f.starts[row], f.stops[row]))
            length = len(chains[int(f.documents[row])])
            first, last = f.positions[row] == 0, f.positions[row] == length - 1
            expected = {(True, True): Role.WHOLE, (True, False): Role.HEAD, (False, True): Role.LAST}
            assert f.roles[row] == expected.get((first, last), Role.MID)
        assert end == len(tokens)


@given(packs(), st.integers(2, 8))
def test_halos_are_the_tokens_before_each_fragment(pack: tuple[Layout, list[int]], width: int) -> None:
    layout, cu = pack
    f = fragments(layout, cu)
    world, reach = layout.world_size, width - 1
    routes = [halo_route(f, rank, width) for rank in range(world)]
    local = [layout.indices(rank) for rank in range(world)]
    mail = [np.split(local[r][routes[r].send_tokens], np.cumsum(routes[r].send_splits)[:-1]) for r in range(world)]
    wanted = 0
    for rank, route in enumerate(routes):
        slots = np.full(route.fragments * reach, -1)
        arriving = [mail[peer][rank] for peer in range(world)]
        assert [len(m) for m in arriving] == list(route.recv_splits)
        slots[route.recv_slots] = np.concatenate(arriving)
        slots[route.keep_slots] = local[rank][route.keep_tokens]
        for row, halo in zip(f.rows_of(rank), slots.reshape(-1, reach), strict=True):
            begin = cu[f.documents[row]]
            expected = [t if t >= begin else -1 for t in range(f.starts[row] - reach, f.starts[row])]
            assert halo.tolist() == expected
            wanted += sum(t >= 0 for t in expected)
        copies = np.append(route.send_tokens, route.keep_tokens)
        for token, readers in zip(route.home_tokens, route.home_readers, strict=True):
            places = [r for r in readers if r < len(copies)]
            assert places == np.flatnonzero(copies == token).tolist()
        assert sorted(set(copies.tolist())) == route.home_tokens.tolist()
    assert all(route.needed == bool(wanted) for route in routes)
    assert all(route.communicates == any(sum(r.send_splits) for r in routes) for route in routes)


def test_borders_however_they_are_given() -> None:
    cu = [0, 7, 20]
    layout = Layout.zigzag(cu, 2)
    expected = fragments(layout, cu)
    for borders in (np.array(cu), tuple(cu)):
        f = fragments(layout, borders)
        assert f.local_spans(0) == expected.local_spans(0)
        assert np.array_equal(f.documents, expected.documents)
        assert np.array_equal(f.roles, expected.roles)
    with pytest.raises(InputError, match="ends at 19 but the layout has 20"):
        fragments(layout, [0, 19])


def test_the_picture() -> None:
    cu = [0, 23, 29, 40]
    layout = Layout.from_spans(40, [[(0, 6), (12, 18), (32, 40)], [(6, 12), (18, 32)]])
    f = fragments(layout, cu)
    names = {
        rank: [("ABC"[f.documents[row]], f.positions[row], Role(f.roles[row]).name) for row in f.rows_of(rank)]
        for rank in (0, 1)
    }
    assert names == {
        0: [("A", 0, "HEAD"), ("A", 2, "MID"), ("C", 1, "LAST")],
        1: [("A", 1, "MID"), ("A", 3, "LAST"), ("B", 0, "WHOLE"), ("C", 0, "HEAD")],
    }
    assert f.ranks.tolist() == [0, 1, 0, 1, 1, 1, 0]
