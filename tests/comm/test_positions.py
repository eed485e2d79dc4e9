"""When a rank that waits gives up, and what it says: values in, text out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longweave.comm.positions import PATIENCE, Position, Seen, described, reason_to_give_up

LIMIT = 30.0
HERE = Position(5, 8, "attention", "forward", "attention of q", waits=True, host="a", pid=1)
NEXT = replace(HERE, number=9, name="shift", description="shift of x")
COMPUTES = replace(HERE, waits=False)
OUTSIDE = replace(HERE, number=7, waits=False, is_over=True)
BEHIND = replace(HERE, number=6, waits=False)
LEFT = replace(OUTSIDE, departures=1, left=7, departure="attention, forward, call 7 with InputError: no")
GAVE_UP = replace(HERE, gave_up="rank 3 ended")
NOT_BEGUN = Position()


def reason(*others: Seen, waited: float = LIMIT + 1, mine: Position = HERE, patient: bool = False) -> str | None:
    ranks = dict(enumerate([Seen(mine, 0, waited), *others]))
    return reason_to_give_up(0, ranks, waited, LIMIT, LIMIT, patient)


def still(position: Position, seconds: float = LIMIT + 1) -> Seen:
    """A rank that lives, and has not got on for so long."""
    return Seen(position, 0.5, seconds)


@pytest.mark.parametrize(
    ("other", "at_once", "at_the_limit", "much_later"),
    [
        (LEFT, "rank 1 left attention, forward, call 7 with InputError: no", ..., ...),
        (GAVE_UP, "rank 3 ended", ..., ...),
        (NEXT, None, "the ranks wait in different calls, for", ...),
        (OUTSIDE, None, "rank 1 did not come to attention, forward, call 8, within", ...),
        (NOT_BEGUN, None, None, "rank 1 did not come to attention, forward, call 8, within"),
        (BEHIND, None, None, "rank 1 did not come to attention, forward, call 8, within"),
        (HERE, None, None, "all ranks wait in attention, forward, call 8, for"),
        (COMPUTES, None, None, "rank 1 is in attention, forward, call 8, for"),
    ],
)
def test_what_follows_from_where_another_rank_is(other: Position, at_once, at_the_limit, much_later) -> None:
    last: str | None = None
    for seconds, wanted in ((1.0, at_once), (LIMIT + 1, at_the_limit), (PATIENCE * LIMIT + 1, much_later)):
        last = last if wanted is ... else wanted
        said = reason(still(other, seconds), waited=seconds)
        assert (said is None) == (last is None), said
        assert last is None or said.startswith(last)


@pytest.mark.parametrize("other", [NEXT, OUTSIDE, BEHIND, HERE, COMPUTES, NOT_BEGUN])
def test_a_rank_that_gets_on_is_waited_for(other: Position) -> None:
    assert reason(still(other, 5.0), waited=PATIENCE * LIMIT + 1) is None


def test_while_anybody_is_at_work_different_calls_are_no_deadlock() -> None:
    assert reason(still(NEXT), still(COMPUTES)) is None
    assert reason(still(NEXT), still(HERE)) == f"the ranks wait in different calls, for {LIMIT + 1:.0f} s"


def test_a_call_that_was_left_matters_to_those_that_come_to_it() -> None:
    later = replace(LEFT, number=9, left=9, departure="shift, forward, call 9 with InputError: no")
    assert reason(still(later), waited=1.0) is None, "it owes nothing for call 8"
    assert reason(still(later), waited=1.0, mine=replace(HERE, number=9)) is not None
    assert reason(still(LEFT), waited=1.0, mine=replace(HERE, departures=1)) is None, "both have raised"


def test_a_rank_without_a_sign_of_life_is_given_up_at_the_limit() -> None:
    assert reason(Seen(HERE, LIMIT - 1, 0.0)) is None
    assert reason(Seen(HERE, LIMIT + 1, LIMIT + 1)) == "rank 1 gave no sign of life for 31 s"
    assert reason(Seen(NOT_BEGUN, LIMIT + 1, LIMIT + 1)) is None, "it has never given one"


def test_a_patient_rank_lets_others_do_other_things_before() -> None:
    assert reason(still(OUTSIDE), patient=True) is None
    much_later = PATIENCE * LIMIT + 1
    assert "did not come" in str(reason(still(OUTSIDE, much_later), waited=much_later, patient=True))
    assert "different calls" in str(reason(still(NEXT), patient=True)), "but not wait in another call"


def test_another_call_under_the_same_number_is_named_at_once() -> None:
    mine = replace(HERE, history=((7, "shift, forward", 11), (8, "attention, forward", 12)))

    def other(*history: tuple[int, str, int]) -> str | None:
        return reason(still(replace(HERE, history=history)), waited=1.0, mine=mine)

    said = other((7, "conv, forward", 13), (8, "attention, forward", 12))
    assert said == "call 7 of rank 1 was conv, forward, that of rank 0 was shift, forward"
    assert str(other((7, "shift, forward", 14))).endswith("with other dtypes, shapes or options")
    assert other((7, "shift, forward", 0)) is None, "unchecked"
    assert other((1, "shift", 99)) is None, "only numbers that both remember"


def test_who_is_where() -> None:
    ranks = dict(enumerate(map(Seen, (HERE, HERE, OUTSIDE, NOT_BEGUN, COMPUTES))))
    ranks[5] = Seen(NEXT, LIMIT)
    assert described(0, ranks, LIMIT) == (
        "ranks 0, 1 wait in attention, forward, call 8; "
        "rank 2 is not in a call; the last was attention, forward, call 7; "
        "rank 3 has not exchanged anything on this group yet; "
        "rank 4 is in attention, forward, call 8; "
        "rank 5 was last seen in shift, forward, call 9 (process 1 on host a): ended, stopped, in one call that "
        "lets no Python run, or on a host that cannot be reached"
    )
    other = replace(HERE, description="attention of q, in another way")
    assert described(0, {0: Seen(HERE), 1: Seen(other)}, LIMIT) == (
        "rank 0 waits in attention of q, forward, call 8; "
        "rank 1 waits in attention of q, in another way, forward, call 8"
    )


def test_positions_are_text() -> None:
    position = replace(HERE, history=((7, "shift, forward", -11),))
    assert Position.read(position.text().encode()) == position
