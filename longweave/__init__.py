"""Context parallelism for PyTorch: train on sequences longer than one device holds.

    import longweave as lw

Names that need torch are loaded when first used, so that `longweave.plan` stays free of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longweave import plan
from longweave.errors import BackendError, GroupError, InputError, LongweaveError
from longweave.plan import Layout, Mask, Plan, Slice, Span, make_plan

if TYPE_CHECKING:
    from longweave.comm.agree import unchecked
    from longweave.linear.gather import gather_recompute
    from longweave.linear.halo import causal_conv1d
    from longweave.linear.mixers import gated_delta_rule
    from longweave.softmax.attention import attention
    from longweave.tokens import reshard, shard, unshard

__version__ = "0.1.0"

_LAZY = {
    "attention": "longweave.softmax.attention",
    "causal_conv1d": "longweave.linear.halo",
    "gated_delta_rule": "longweave.linear.mixers",
    "gather_recompute": "longweave.linear.gather",
    "reshard": "longweave.tokens",
    "shard": "longweave.tokens",
    "unchecked": "longweave.comm.agree",
    "unshard": "longweave.tokens",
}

__all__ = [
    "BackendError",
    "GroupError",
    "InputError",
    "Layout",
    "LongweaveError",
    "Mask",
    "Plan",
    "Slice",
    "Span",
    "attention",
    "causal_conv1d",
    "gated_delta_rule",
    "gather_recompute",
    "make_plan",
    "plan",
    "reshard",
    "shard",
    "unchecked",
    "unshard",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'longweave' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
