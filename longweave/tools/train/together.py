"""What all ranks of a run do together: what goes wrong on one is raised on all, with the file that it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from longweave.errors import InputError, LongweaveError

T = TypeVar("T")


class RunFileError(LongweaveError, RuntimeError):
    """A file of a run could not be written."""


def together(what: Callable[[], T], group: dist.ProcessGroup | None, error: Callable[[str], Exception]) -> list[T]:
    """Run it on every rank; the results of all, or the first rank's error on all."""
    mine: tuple[T | None, str | None]
    try:
        mine = what(), None
    except (OSError, InputError) as problem:
        mine = None, str(problem)
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, mine, group=group)
    problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text is not None]
    if problems:
        raise error(problems[0])
    return [answer for answer, _ in answers]


def nothing() -> None:
    return None


def rank_0_writes(what: str, write: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """A small file that only rank 0 writes; `what` names it in the error."""
    mine = write if dist.get_rank() == 0 else nothing
    together(mine, group, lambda text: RunFileError(f"{what} could not be written: {text}"))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Around writing to a file: the system says that the disk is full, but not where."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def compare_facts(facts: Mapping[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Raise on all ranks unless these are the same on all: each draws its batches by itself."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(facts), group=group)
    other = [
        f"{name} is {value} on rank 0 and {theirs.get(name)} on rank {rank}"
        for name, value in everyone[0].items()
        for rank, theirs in enumerate(everyone)
        if theirs.get(name) != value
    ]
    if other:
        raise InputError(
            f"the ranks are not of one run: {'; '.join(other[:4])}. Start all of them with the same options, and with "
            "the same version of Python if it is the documents"
        )
