"""Fragments, chains and halos, walked by hand on lists of tokens and of fragment numbers."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_routing import layouts

from longweave import InputError, Layout
from longweave.plan.chains import RankChains, rank_chains, sent_bytes, sent_rows
from longweave.plan.fragments import Fragments, Role, fragments, pack_of
from longweave.plan.halo import halo_route


@st.composite
def packs(draw: st.DrawFn) -> tuple[Layout, list[int]]:
    total, world = draw(st.integers(0, 30)), draw(st.integers(1, 5))
    cu = sorted([0, total, *draw(st.lists(st.integers(0, total), max_size=6))])
    return draw(layouts(total, world)), cu


def own_rows(f: Fragments, rank: int, *roles: Role) -> list[int]:
    return [int(row) for role in roles for row in f.rows_of(rank) if f.roles[row] == role]


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
        for fragment, row in zip(f.of(rank), f.rows_of(rank), strict=True):
            assert fragment.start == end, "in the order of local tokens, without gaps"
            end = fragment.stop
            assert tokens[fragment.start : fragment.stop].tolist() == list(range(f.starts[row], f.stops[row]))
            length = len(chains[fragment.document])
            first, last = fragment.position == 0, fragment.position == length - 1
            expected = {(True, True): Role.WHOLE, (True, False): Role.HEAD, (False, True): Role.LAST}
            assert fragment.role == expected.get((first, last), Role.MID)
        assert end == len(tokens)


def walk(parts: list[RankChains], f: Fragments, backward: bool) -> list[dict[int, tuple[int, ...]]]:
    """All ranks at once. A state is the tuple of fragments it came through: U of a fragment is (it,), M appends it."""
    world = len(parts)
    roles = (Role.MID, Role.LAST) if backward else (Role.HEAD, Role.MID)
    waits = (Role.HEAD, Role.MID) if backward else (Role.MID, Role.LAST)
    pools, map_pools = [], []
    for rank in range(world):
        pools.append(own_rows(f, rank, *roles))
        map_pools.append(own_rows(f, rank, Role.MID))
    mail_states = [
        [list(np.array(pools[r])[m.tolist()]) if len(m) else [] for m in way(parts[r], backward).send_states]
        for r in range(world)
    ]
    mail_maps = [
        [list(np.array(map_pools[r])[m.tolist()]) if len(m) else [] for m in parts[r].forward.send_maps]
        for r in range(world)
    ]
    arriving = []
    for rank, part in enumerate(parts):
        states, maps = list(pools[rank]), list(map_pools[rank])
        for peer in range(world):
            assert len(mail_states[peer][rank]) == way(part, backward).recv_states[peer]
            assert len(mail_maps[peer][rank]) == part.forward.recv_maps[peer]
            states += mail_states[peer][rank]
            maps += mail_maps[peer][rank]
        waiting = own_rows(f, rank, *waits)
        found: dict[int, tuple[int, ...]] = {}
        going: list[tuple[int, ...]] = []
        for number, step in enumerate(part.backward_steps if backward else part.forward_steps):
            rows = [states[i] for i in step.states]
            assert -1 not in step.states
            if number:
                assert [maps[i] for i in step.maps] == rows, "M and U of one fragment"
                assert -1 not in step.maps
            going = [(*(going[i] if number else ()), row) for i, row in enumerate(rows)]
            for chain, place in zip(step.of, step.into, strict=True):
                found[waiting[place]] = going[chain]
        assert set(found) == set(waiting), "everybody who waits is served"
        arriving.append(found)
    return arriving


def way(part: RankChains, backward: bool):
    return part.backward if backward else part.forward


@given(packs())
def test_every_fragment_learns_what_went_before(pack: tuple[Layout, list[int]]) -> None:
    layout, cu = pack
    f = fragments(layout, cu)
    parts = [rank_chains(f, rank) for rank in range(layout.world_size)]
    for found in walk(parts, f, backward=False):
        for row, path in found.items():
            assert path == tuple(range(row - int(f.positions[row]), row))
    for found in walk(parts, f, backward=True):
        for row, path in found.items():
            end = row - int(f.positions[row]) + int(f.chain_lengths[row])
            assert path == tuple(range(end - 1, row, -1))


@given(packs())
def test_rows_travel_only_to_those_who_need_them(pack: tuple[Layout, list[int]]) -> None:
    layout, cu = pack
    f = fragments(layout, cu)
    world = layout.world_size
    U, M, C = np.zeros((3, world), dtype=int)
    for row, rank in enumerate(f.ranks):
        chain = np.flatnonzero(f.documents == f.documents[row])
        U[rank] += len({int(f.ranks[r]) for r in chain if r > row} - {rank})
        C[rank] += len({int(f.ranks[r]) for r in chain if r < row} - {rank})
        if f.roles[row] == Role.MID:
            M[rank] += len({int(f.ranks[r]) for r in chain} - {rank})
    assert [x.tolist() for x in sent_rows(f)] == [U.tolist(), M.tolist(), C.tolist()]
    for rank in range(world):
        part = rank_chains(f, rank)
        sends, _ = part.forward.splits(1000, 1)
        assert sum(sends) == 1000 * U[rank] + M[rank]
        assert sends[rank] == 0
        assert sum(part.backward.splits(1000, 1)[0]) == 1000 * C[rank]
        assert bool(U.sum() or C.sum()) == part.communicates


def test_bytes_do_not_grow_with_the_sequence() -> None:
    found = []
    for tokens in (64, 4096, 1 << 20):
        f = fragments(Layout.zigzag([0, tokens], 4), [0, tokens])
        found.append([x.tolist() for x in sent_bytes(f, 4 * 128 * 128, 4 * 128 * 128)])
    assert found[0] == found[1] == found[2]
    # Chain 0 1 2 3 2 1 0: U to all who come later, M of the five in the middle to the three others.
    one = 4 * 128 * 128 * 4
    assert found[0][0] == [3 * one, (3 + 1 + 6) * one, (3 + 2 + 6) * one, (3 + 3) * one]


def test_a_document_on_one_rank_sends_nothing() -> None:
    cu = list(range(0, 1001, 10))
    f = fragments(Layout.contiguous(1000, 4), cu)
    assert not f.communicates
    assert not f.linked
    assert sum(map(np.sum, sent_rows(f))) == 0
    assert not rank_chains(f, 0).forward_steps
    turned = Layout.from_spans(10, [[(5, 10), (0, 5)], []])
    assert fragments(turned, [0, 10]).linked, "two fragments in the wrong order, on one rank"
    assert not fragments(turned, [0, 10]).communicates


def test_many_documents_on_many_ranks_are_planned_quickly() -> None:
    rng = np.random.default_rng(0)
    cu = np.append(0, np.cumsum(rng.multinomial(1 << 20, np.ones(2000) / 2000)))
    layout = Layout.zigzag(cu, 64)
    part = rank_chains(fragments(layout, cu), 5)
    assert len(part.forward_steps) == 126 - 5, "all chains side by side"
    assert rank_chains(fragments(Layout.zigzag(cu, 64), cu), 5) is part


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


def test_a_pack_belongs_to_one_layout_object() -> None:
    cu = [0, 7, 20]
    a, b = Layout.zigzag(cu, 2), Layout.zigzag(cu, 2)
    assert pack_of(a, cu) is pack_of(a, np.array(cu)) is pack_of(a, tuple(cu))
    assert pack_of(a, cu) is not pack_of(b, cu), "ranks agree on objects"
    assert pack_of(a, cu).fragments is pack_of(b, cu).fragments
    assert pack_of(a, cu).fingerprint == pack_of(b, cu).fingerprint != pack_of(a, [0, 8, 20]).fingerprint
    with pytest.raises(InputError, match="ends at 19 but the layout has 20"):
        pack_of(a, [0, 19])


def test_the_picture() -> None:
    cu = [0, 23, 29, 40]
    layout = Layout.from_spans(40, [[(0, 6), (12, 18), (32, 40)], [(6, 12), (18, 32)]])
    names = {
        rank: [("ABC"[x.document], x.position, x.role.name) for x in fragments(layout, cu).of(rank)] for rank in (0, 1)
    }
    assert names == {
        0: [("A", 0, "HEAD"), ("A", 2, "MID"), ("C", 1, "LAST")],
        1: [("A", 1, "MID"), ("A", 3, "LAST"), ("B", 0, "WHOLE"), ("C", 0, "HEAD")],
    }
    assert list(itertools.chain(fragments(layout, cu).ranks.tolist())) == [0, 1, 0, 1, 1, 1, 0]
