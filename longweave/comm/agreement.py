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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from longweave.comm.exchange import Comm, all_gather_v
from longweave.errors import GroupError

# Set inside `unchecked()` and reset when it ends.
_checking: ContextVar[bool] = ContextVar("longweave_checks", default=True)


@contextmanager
def unchecked() -> Iterator[None]:
    """Inside, ranks are trusted to hold equal packs and make equal calls: nothing is compared.

    Use it on all ranks or on none.
    """
    token = _checking.set(False)
    try:
        yield
    finally:
        _checking.reset(token)


MOST_FACTS = 3  # in one message


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


def compare(comm: Comm, facts: Sequence[Fact], problem: Exception | None = None) -> None:
    """Raise on every rank if a fact differs between ranks, or if any rank has a problem of its own.

    `problem` is this rank's own finding. It is raised here, and the others learn of it and raise too.
    """
    if comm.size == 1 or not _checking.get():
        _raise(problem)
        return
    mine = torch.tensor([digests_of(facts, problem)], device=comm.control_device)
    everyone = all_gather_v(mine, [1] * comm.size, comm).wait().tolist()
    raise_differences(comm, everyone, facts, problem)


def digests_of(facts: Sequence[Fact], problem: Exception | None) -> list[int]:
    """What a rank tells the others: MOST_FACTS digests, and whether it refuses.

    It may refuse before it knows its facts: the message has the same size all the same.
    """
    digests = [digest(fact.value) for fact in facts]
    return [*digests, *[0] * (MOST_FACTS - len(digests)), int(problem is not None)]


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
    for column, fact in enumerate(facts) if _checking.get() else ():
        _compare_column([theirs[column] for theirs in everyone], fact, comm)


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


def named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def digest(text: str) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


# -- calls on packs ------------------------------------------------------------------------------------


class Ledger:
    """What was called on the packs of one group since its ranks last compared."""

    def __init__(self) -> None:
        self.packs = 0  # made so far
        self.gathers = 0  # through the group's store
        self.life: int | None = None  # how many groups had this store before; known once there was a gather
        self.asked = 0  # calls that were compared before they were made
        self.running = 0
        self.calls: Counter[str] = Counter()

    def note(self, description: str, mark: int) -> None:
        """One more call; `mark` is the digest of its description. Calls inside `unchecked()` are compared never."""
        if not _checking.get():
            return
        self.running = (self.running * 1_000_003 + mark) & 0x7FFF_FFFF_FFFF_FFFF
        self.calls[description] += 1

    def fact(self) -> Fact:
        """For the next comparison: the calls so far. They are then forgotten."""
        made = "; ".join(f"{count} × {call}" for call, count in self.calls.items()) or "none"
        fact = Fact(
            str(self.running),
            "made",
            "other calls on the packs before this one than the rest",
            f"all ranks must make the same calls in the same order, with the same dtypes, shapes and options; "
            f"since the pack before, this rank made {made}",
            "Those calls have run: do not trust results and gradients since then.",
        )
        self.running, self.calls = 0, Counter()
        return fact


# A ledger lives as long as its process group.
_ledgers: WeakKeyDictionary[dist.ProcessGroup, Ledger] = WeakKeyDictionary()


def ledger_of(comm: Comm) -> Ledger:
    if comm.group is None:
        return Ledger()  # a single process has nobody to differ from
    return _ledgers.setdefault(comm.group, Ledger())
