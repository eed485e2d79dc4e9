"""What a layer knows of its batch: the pack that is running, and the batch dimension that models have and packs do not.

    batch.inputs["longweave"] ──▶ model ──▶ layers        by keyword arguments, where the model hands them down
                                    └─ running pack ──▶   by a context variable, where it drops them

The model's own forward sets the context variable and resets it when it ends; a checkpointed layer sets it again while
backward computes the layer anew. So it is never left set, and a model that is called without a batch is found out.
A pooled model that generates runs `Alone`: on this rank, with the attention that it had before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from longweave.errors import InputError
from longweave.pack import Pack, checked_core
from longweave.tensors import check_tensor

KEY = "longweave"


@dataclass(frozen=True)
class Alone:
    """A call that concerns this rank only: generation, a KV cache. The model's own attention serves it."""

    configs: list[tuple[Any, str]]  # of the model, with the attention implementation that each had before

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        ours = [vars(config)[_IMPLEMENTATION] for config, _ in self.configs]
        for config, before in self.configs:
            vars(config)[_IMPLEMENTATION] = before
        try:
            yield
        finally:
            for (config, _), name in zip(self.configs, ours, strict=True):
                vars(config)[_IMPLEMENTATION] = name


_IMPLEMENTATION = "_attn_implementation_internal"  # of a config in transformers
_running: ContextVar[Pack | Alone | None] = ContextVar("longweave_pack", default=None)


def current() -> Pack | Alone | None:
    """What is running: a model on a pack, a pooled model alone, or nothing."""
    return _running.get()


def find_pack(kwargs: Mapping[str, Any]) -> Pack:
    """The pack of this call: from the call itself, else from the model's forward that is running."""
    pack = kwargs.get(KEY)
    if pack is None:
        pack = _running.get()
    if pack is None:
        raise InputError(
            "this model is parallel but was called without a batch; call model(**batch.inputs) with "
            "batch = lw.shard_batch(...) (a pooled model with its rows, not a layer by itself), or lw.restore(model) "
            "first to use it in one process (generate, a KV cache)"
        )
    if not isinstance(pack, Pack):
        raise InputError(f"the argument {KEY!r} is a {type(pack).__name__}; it belongs to lw.shard_batch(...).inputs")
    return pack


@contextmanager
def running(what: Pack | Alone) -> Iterator[None]:
    """While a model's forward, or a recomputation of a part of it, runs on this pack, or alone."""
    token = _running.set(what)
    try:
        with what.own_attention() if isinstance(what, Alone) else nullcontext():
            yield
    finally:
        _running.reset(token)


def rerun(what: Pack | Alone, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` as it was called before: what a checkpointed layer does when backward computes it again."""
    with running(what):
        return fn(*args)


# -- the batch dimension -------------------------------------------------------------------------------

# A rank without tokens carries one placeholder token through the model, because most models cannot reshape empty
# tensors. It is removed in front of every operator across ranks and put back behind it, with the value 0.


def model_tokens(pack: Pack) -> int:
    """How many tokens the model sees on this rank."""
    return max(pack.tokens, 1)


def unbatch(x: Tensor, pack: Pack) -> Tensor:
    """(1, tokens, …) as a model has it → (tokens, …) as `lw.attention` and its siblings take it."""
    checked_core(pack)
    check_tensor("x", x)
    if tuple(x.shape[:2]) != (1, model_tokens(pack)):
        raise InputError(
            f"a layer was called with a tensor of shape {tuple(x.shape)}, but this rank's batch has the shape "
            f"(1, {model_tokens(pack)}, …); call the model with batch.inputs unchanged; in a pooled model nothing "
            "between the rows and the layers may add or drop tokens"
        )
    return x[0, : pack.tokens]


def rebatch(y: Tensor, pack: Pack) -> Tensor:
    """The way back: (tokens, …) → (1, tokens, …)."""
    check_tensor("y", y)
    checked_core(pack).check_tokens(y)
    return with_placeholder(y, pack)[None]


def with_placeholder(y: Tensor, pack: Pack, value: float = 0) -> Tensor:
    """(tokens, …) with the placeholder of a rank that has no tokens."""
    return F.pad(y, (0, 0) * (y.ndim - 1) + (0, 1), value=value) if pack.tokens == 0 else y
