"""The errors that users see. Each says what failed, the value that was seen and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from reprlib import Repr


class LongweaveError(Exception):
    """Base of every error that longweave raises on purpose."""


class InputError(LongweaveError, ValueError):
    """An argument is wrong: its value, its shape, or how it fits another argument."""


class GroupError(LongweaveError, RuntimeError):
    """The process group does not fit: its size, its backend, or what its ranks hold differs."""


class BackendError(LongweaveError, RuntimeError):
    """A kernel that was asked for by name cannot serve this call."""


_short = Repr()
_short.maxother = _short.maxstring = _short.maxlong = 100


def shown(value: object) -> str:
    """A value as an error quotes it: what `repr` gives, shortened."""
    return _short.repr(value)


def did_you_mean(given: object, names: Sequence[str]) -> str:
    """What to add to an error about a name that is not one of `names`: the one that is near, if there is one."""
    near = get_close_matches(given, names, n=1) if isinstance(given, str) else []
    return f"; did you mean {near[0]}?" if near else ""


def named(ranks: Sequence[int]) -> str:
    """Ranks in a text: "rank 3", "ranks 0, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
