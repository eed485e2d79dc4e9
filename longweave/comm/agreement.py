"""Do all ranks mean the same? Facts are compared by one tiny all-gather, before anything else is sent.

    rank 0   [ documents · layout · mask | labels, ids | calls since the last pack | my own problem? ]
    rank 1   [            …              |      …      |             …             |        no       ]

A rank that was given another batch would send other sizes: a hang, or tokens in wrong places. So whoever opens a new
pack compares its facts, and what one rank refuses all ranks refuse: nobody is left waiting.

Calls on a pack are *noted*: each adds a digest of its kind (operator, dtypes, shapes, options) to a running digest,
which the next pack's message carries. A rank that made another call than the rest is named there, one step later, and
it costs neither a message nor a wait. On the first pack of a group calls are compared before they send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan, nan
from struct import pack, unpack

import torch

from longweave.comm.exchange import Comm, all_gather_v, received_on_host
from longweave.comm.ledger import Ledger, RecordedCall, digest, is_checking
from longweave.errors import GroupError, named

MOST_FACTS = 3  # in one message
SAME_WEIGHTS = 1e-5  # of a checksum: rounding is less, a step in another direction more


@dataclass(frozen=True)
class Fact:
    """Something that must be the same on every rank, with the words for a rank where it is not."""

    value: str  # compared by digest
    verb: str  # in the singular: "holds"
    difference: str  # "another batch than the rest"
    remedy: str
    ending: str = "Nothing was sent."


def same_calls(description: str) -> Fact:
    """The kind of a call that is about to be made."""
    return Fact(
        description,
        "makes",
        "another call than the rest",
        f"operator, dtypes, trailing shapes and options must be alike on every rank; this rank calls {description}",
    )


def compare(
    comm: Comm,
    facts: Sequence[Fact],
    problem: Exception | None = None,
    what: str = "comparison of calls",
    *,
    between_packs: bool = False,
    weights: float = nan,
) -> None:
    """Raise on every rank if a fact differs between ranks, or if any rank has a problem of its own.

    `problem` is this rank's own finding. It is raised here, and the others learn of it and raise too. `what` is how
    the flight recorder calls it; `between_packs`: ranks may have other things to do before they come. `weights` is a
    checksum of a model's weights, which may differ by rounding; NaN is none.
    """
    if comm.size == 1 or not is_checking():
        _raise(problem)
        return
    with RecordedCall(comm.ledger, what, what, between_packs).meeting():
        mine = torch.tensor([digests_of(facts, problem, weights)], device=comm.control_device)
        everyone = received_on_host(all_gather_v(mine, [1] * comm.size, comm).wait(), comm).tolist()
        raise_differences(comm, everyone, facts, problem)


def digests_of(facts: Sequence[Fact], problem: Exception | None, weights: float = nan) -> list[int]:
    """What a rank tells the others: MOST_FACTS digests, the bits of a checksum, and whether it refuses.

    It may refuse before it knows its facts: the message has the same size all the same.
    """
    digests = [digest(fact.value) for fact in facts]
    (bits,) = unpack("<q", pack("<d", weights))
    return [*digests, *[0] * (MOST_FACTS - len(digests)), bits, int(problem is not None)]


def raise_differences(
    comm: Comm,
    everyone: Sequence[Sequence[int]],
    facts: Sequence[Fact],
    problem: Exception | None,
    reasons: Sequence[str] | None = None,
) -> None:
    """Raise what `compare` raises, from the `digests_of` all ranks. `reasons`: why each refuses, if known."""
    try:
        _raise(problem)
    finally:
        del problem
    refused = [rank for rank, theirs in enumerate(everyone) if theirs[-1]]
    if refused:
        why = "; see the error there" if reasons is None else f": {reasons[refused[0]]}"
        raise GroupError(f"{named(refused)} of the group refused this call{why}. Nothing was sent.")
    for column, fact in enumerate(facts) if is_checking() else ():
        _compare_column([theirs[column] for theirs in everyone], fact, comm)
    if is_checking():
        _compare_weights([unpack("<d", pack("<q", theirs[-2]))[0] for theirs in everyone], comm)


def _compare_weights(found: list[float], comm: Comm) -> None:
    if any(map(isnan, found)):
        return
    middle = sorted(found)[len(found) // 2]
    same = [value == middle or abs(value - middle) <= SAME_WEIGHTS * middle < inf for value in found]
    if all(same):
        return
    camps = [0 if alike else 1 + rank for rank, alike in enumerate(same)]
    same_weights = Fact(
        "",
        "holds",
        "other weights of the model than the rest",
        "every rank must begin with the same weights and take the same steps: was lw.reduce_gradients(model, group) "
        "called before optimizer.step(), on all ranks? If ranks are meant to hold different weights (experts), give "
        "lw.parallelize(..., compare_weights=False)",
        "Do not trust what was trained since they parted.",
    )
    _compare_column(camps, same_weights, comm)


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        try:
            raise problem
        finally:
            del problem  # else the error, its traceback and this frame would be a cycle


def _compare_column(digests: list[int], fact: Fact, comm: Comm) -> None:
    counts = Counter(digests)
    if len(counts) == 1:
        return
    (common, votes), *_ = counts.most_common()
    end = f"(I am rank {comm.rank}); {fact.remedy}. {fact.ending}"
    if votes * 2 > comm.size:
        odd = [rank for rank, value in enumerate(digests) if value != common]
        verb = fact.verb if len(odd) == 1 else fact.verb.removesuffix("s")
        raise GroupError(f"{named(odd)} of the group {verb} {fact.difference} {end}")
    camps = [[rank for rank, value in enumerate(digests) if value == seen] for seen in counts]
    listed = " / ".join(named(camp) for camp in camps)
    # Nobody is the rest: "another batch than the rest" becomes "another batch".
    each = f"each {fact.verb} {fact.difference.removesuffix(' than the rest')}"
    raise GroupError(f"the ranks of the group disagree: {listed} {each} {end}")


# -- calls on packs ------------------------------------------------------------------------------------


def same_history(ledger: Ledger) -> Fact:
    """The calls since the pack before, forward and backward, in their order. They are then forgotten."""
    running, calls = ledger.take_calls()
    made = "; ".join(f"{count} × {call}" for call, count in calls.items()) or "none"
    return Fact(
        str(running),
        "made",
        "other calls on the packs before this one than the rest",
        f"all ranks must make the same calls in the same order, with the same dtypes, shapes and options; "
        f"since the pack before, this rank made {made}",
        "Those calls have run: do not trust results and gradients since then.",
    )
