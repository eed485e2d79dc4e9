"""Chains of fragments: what travels between ranks, walked by hand on lists of fragment numbers."""

import numpy as np
from hypothesis import given
from test_routing import packs

from longweave import Layout
from longweave.plan.chains import RankChains, rank_chains, sent_bytes, sent_rows
from longweave.plan.fragments import Fragments, Role, fragments


def own_rows(f: Fragments, rank: int, *roles: Role) -> list[int]:
    return [int(row) for role in roles for row in f.rows_of(rank) if f.roles[row] == role]


def walk(parts: list[RankChains], f: Fragments, backward: bool) -> list[dict[int, tuple[int, ...]]]:
    """All ranks at once. A state is the tuple of fragments it came through: U of a fragment is (it,), M appends it."""
    world = len(parts)
    roles = (Role.MID, Role.LAST) if backward else (Role.HEAD, Role.MID)
    waits = (Role.HEAD, Role.MID) if backward else (Role.MID, Role.LAST)
    pools, transition_pools = [], []
    for rank in range(world):
        pools.append(own_rows(f, rank, *roles))
        transition_pools.append(own_rows(f, rank, Role.MID))
    mail_states = [
        [list(np.array(pools[r])[m.tolist()]) if len(m) else [] for m in way(parts[r], backward).send_states]
        for r in range(world)
    ]
    mail_transitions = [
        [list(np.array(transition_pools[r])[m.tolist()]) if len(m) else [] for m in parts[r].forward.send_transitions]
        for r in range(world)
    ]
    arriving = []
    for rank, part in enumerate(parts):
        states, transitions = list(pools[rank]), list(transition_pools[rank])
        for peer in range(world):
            assert len(mail_states[peer][rank]) == way(part, backward).recv_states[peer]
            assert len(mail_transitions[peer][rank]) == part.forward.recv_transitions[peer]
            states += mail_states[peer][rank]
            transitions += mail_transitions[peer][rank]
        waiting = own_rows(f, rank, *waits)
        found: dict[int, tuple[int, ...]] = {}
        going: list[tuple[int, ...]] = []
        for number, step in enumerate(part.backward_steps if backward else part.forward_steps):
            rows = [states[i] for i in step.states]
            assert -1 not in step.states
            if number:
                assert [transitions[i] for i in step.transitions] == rows, "M and U of one fragment"
                assert -1 not in step.transitions
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
