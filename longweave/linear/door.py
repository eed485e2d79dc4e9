"""The door of every linear layer: its own checks, then, on the first use of a layout and its documents, all ranks'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch

from longweave.comm.agree import agree
from longweave.comm.groups import Comm, Group
from longweave.errors import InputError
from longweave.plan.fragments import Fragments, pack_of
from longweave.plan.layout import Layout
from longweave.tokens import comm_for

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Door:
    """A call that may go ahead."""

    comm: Comm
    fragments: Fragments


class Question:
    """Something that was never agreed on: makes the ranks ask in every call."""

    fingerprint = "question"

    def __init__(self) -> None:
        self.agreed_on: WeakSet[Any] = WeakSet()


def open_door(
    layout: Layout,
    cu_seqlens: object,
    group: Group,
    check: Callable[[int, int], str],
    *,
    ask_always: bool = False,
) -> Door:
    """`check(tokens, rank)` looks at this rank's tensors: it raises InputError, or describes the call.

    With `ask_always` a refusal on one rank raises on all of them in every call, not only in the first one.
    """
    if not isinstance(layout, Layout):
        raise InputError(f"layout is a {type(layout).__name__}; make one, such as lw.Layout.zigzag(cu_seqlens, world)")
    comm = comm_for(layout, group)
    problem, call, pack = None, "", None
    try:
        pack = pack_of(layout, cu_seqlens)
        call = check(layout.counts[comm.rank], comm.rank)
    except InputError as error:
        problem = error
    questions = [Question()] if ask_always else []
    agree(comm, [layout, *([pack] if pack else []), *questions], call, problem)
    assert pack is not None
    return Door(comm, pack.fragments)


def eager(fn: F) -> F:
    """`torch.compile` breaks the graph around `fn` and runs it as it is: its plans and messages are not for tracing."""

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # only then is the compiler loaded already
            return torch.compiler.disable(fn)(*args, **kwargs)  # type: ignore[no-untyped-call]
        return fn(*args, **kwargs)

    return cast("F", call)
