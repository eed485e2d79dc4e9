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
    from longweave.models.batch import Batch, shard_batch
    from longweave.models.gradients import loss_scale, reduce_gradients, reduce_sum
    from longweave.models.parallel import parallelize, restore
    from longweave.softmax.attention import attention
    from longweave.tokens import reshard, shard, unshard

__version__ = "0.1.0"

_LAZY = {
    "Batch": "longweave.models.batch",
    "attention": "longweave.softmax.attention",
    "causal_conv1d": "longweave.linear.halo",
    "gated_delta_rule": "longweave.linear.mixers",
    "gather_recompute": "longweave.linear.gather",
    "loss_scale": "longweave.models.gradients",
    "parallelize": "longweave.models.parallel",
    "reduce_gradients": "longweave.models.gradients",
    "reduce_sum": "longweave.models.gradients",
    "reshard": "longweave.tokens",
    "restore": "longweave.models.parallel",
    "shard": "longweave.tokens",
    "shard_batch": "longweave.models.batch",
    "unchecked": "longweave.comm.agree",
    "unshard": "longweave.tokens",
}

__all__ = [
    "BackendError",
    "Batch",
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
    "loss_scale",
    "make_plan",
    "parallelize",
    "plan",
    "reduce_gradients",
    "reduce_sum",
    "reshard",
    "restore",
    "shard",
    "shard_batch",
    "unchecked",
    "unshard",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'longweave' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
