"""Do all ranks hold the same plan? Asked once for each new plan object on each group.

A rank that was given another batch would send other sizes: a hang, or tokens in wrong places. So the first use of a
layout or plan on a group compares fingerprints with one tiny all-gather, before anything else is sent. The question is
asked per *object*, not per fingerprint: a plan that one rank has seen before and another has not must not make them
disagree on whether to ask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any, Protocol
from weakref import WeakSet

import torch

from longweave.comm.exchange import all_gather_v
from longweave.comm.groups import Comm
from longweave.errors import GroupError, InputError

_checking: ContextVar[bool] = ContextVar("longweave_checks", default=True)


class Planned(Protocol):
    """A layout or a plan."""

    agreed_on: WeakSet[Any]

    @property
    def fingerprint(self) -> str: ...


@contextmanager
def unchecked() -> Iterator[None]:
    """Inside, ranks are trusted to hold equal plans: no fingerprints are compared. Use it on all ranks or on none."""
    token = _checking.set(False)
    try:
        yield
    finally:
        _checking.reset(token)


def agree(
    comm: Comm,
    plans: Sequence[Planned],
    call: str,
    problem: InputError | None = None,
    *,
    what: str = "hold another plan than the rest",
    remedy: str = "give every rank of the group the same cu_seqlens, mask and layout",
) -> None:
    """Raise on every rank if the ranks' plans or calls differ, or if any rank found a problem with its own input.

    `call` describes what must be alike on all ranks besides the plans (dtype, trailing shape). `problem` is this rank's
    own finding; while the question is being asked, the others learn of it and raise too instead of waiting forever.
    `what` and `remedy` are the words for fingerprints that differ.
    """
    new = [plan for plan in plans if comm.group not in plan.agreed_on]
    if comm.size == 1 or not new or not _checking.get():
        if problem:
            raise problem
        return
    said = " ".join(plan.fingerprint for plan in plans)
    mine = torch.tensor([_digest(said), _digest(call), int(problem is not None)], device=comm.control_device)
    everyone = all_gather_v(mine[None], [1] * comm.size, comm).wait()
    plan_digests, call_digests, problems = (column.tolist() for column in everyone.cpu().unbind(1))
    if problem:
        raise problem
    if any(problems):
        bad = [rank for rank, flag in enumerate(problems) if flag]
        raise GroupError(f"{_ranks(bad)} of the group refused this call; see the error there. Nothing was sent.")
    _compare(plan_digests, comm, what, remedy)
    _compare(
        call_digests,
        comm,
        "make another call than the rest",
        f"dtype and trailing shape must be alike on every rank; this rank has {call}",
    )
    for plan in new:
        plan.agreed_on.add(comm.group)


def _compare(digests: list[int], comm: Comm, what: str, remedy: str) -> None:
    counts = Counter(digests)
    if len(counts) == 1:
        return
    (common, votes), *_ = counts.most_common()
    if votes * 2 > comm.size:
        odd = [rank for rank, digest in enumerate(digests) if digest != common]
        raise GroupError(f"{_ranks(odd)} of the group {what} (I am rank {comm.rank}); {remedy}. Nothing was sent.")
    camps = [[rank for rank, digest in enumerate(digests) if digest == seen] for seen in counts]
    listed = " / ".join(_ranks(camp) for camp in camps)
    raise GroupError(
        f"the ranks of the group disagree: {listed} {what} (I am rank {comm.rank}); {remedy}. Nothing was sent."
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
