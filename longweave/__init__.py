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
    from longweave import models
    from longweave.comm.ledger import unchecked
    from longweave.comm.watch import set_wait
    from longweave.documents import document_mean, document_sum, shift
    from longweave.linear.conv import causal_conv1d
    from longweave.linear.gather import gather_recompute
    from longweave.linear.mixers import (
        gated_delta_rule,
        gated_linear_attention,
        kimi_delta_attention,
        lightning_attention,
        ssd,
    )
    from longweave.models.batch import Batch, shard_batch
    from longweave.models.changes import restore
    from longweave.models.loss import loss_scale, reduce_gradients, reduce_sum
    from longweave.models.parallelize import parallelize
    from longweave.models.pool import pool
    from longweave.pack import Pack
    from longweave.softmax.attention import attention
    from longweave.tokens import reshard, shard, unshard
    from longweave.tools.audit import audit

__version__ = "0.1.0"

_LAZY = {
    "Batch": "longweave.models.batch",
    "Pack": "longweave.pack",
    "attention": "longweave.softmax.attention",
    "audit": "longweave.tools.audit",
    "causal_conv1d": "longweave.linear.conv",
    "document_mean": "longweave.documents",
    "document_sum": "longweave.documents",
    "gated_delta_rule": "longweave.linear.mixers",
    "gated_linear_attention": "longweave.linear.mixers",
    "gather_recompute": "longweave.linear.gather",
    "kimi_delta_attention": "longweave.linear.mixers",
    "lightning_attention": "longweave.linear.mixers",
    "loss_scale": "longweave.models.loss",
    "parallelize": "longweave.models.parallelize",
    "pool": "longweave.models.pool",
    "reduce_gradients": "longweave.models.loss",
    "reduce_sum": "longweave.models.loss",
    "reshard": "longweave.tokens",
    "restore": "longweave.models.changes",
    "set_wait": "longweave.comm.watch",
    "shard": "longweave.tokens",
    "shard_batch": "longweave.models.batch",
    "shift": "longweave.documents",
    "ssd": "longweave.linear.mixers",
    "unchecked": "longweave.comm.ledger",
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
    "Pack",
    "Plan",
    "Slice",
    "Span",
    "attention",
    "audit",
    "causal_conv1d",
    "document_mean",
    "document_sum",
    "gated_delta_rule",
    "gated_linear_attention",
    "gather_recompute",
    "kimi_delta_attention",
    "lightning_attention",
    "loss_scale",
    "make_plan",
    "models",
    "parallelize",
    "plan",
    "pool",
    "reduce_gradients",
    "reduce_sum",
    "reshard",
    "restore",
    "set_wait",
    "shard",
    "shard_batch",
    "shift",
    "ssd",
    "unchecked",
    "unshard",
]


def __getattr__(name: str) -> Any:
    if name == "models":  # lw.models.register
        return import_module("longweave.models")
    if name not in _LAZY:
        raise AttributeError(f"module 'longweave' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "models"})
