"""`longweave audit`: the model and the documents of `longweave train`, audited on local ranks or torchrun's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import longweave as lw
from longweave.launch import Ranks
from longweave.tools.audit.report import AuditReport
from longweave.tools.audit.subjects import parallelized, pooled
from longweave.tools.train.workload import FAMILIES, DrawnDocuments, build_model, draw_documents

WAYS = ("parallelize", "pool")


@dataclass(frozen=True)
class AuditedWorkload:
    """What is audited."""

    model: str = "qwen3_5"
    way: str = "parallelize"
    tokens: int = 600
    layout: str = "auto"
    strategy: str = "auto"
    seed: int = 0


def run_local(workload: AuditedWorkload, ranks: int) -> AuditReport:
    """On processes that are started here."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    with Ranks(ranks, threads=threads, timeout=600) as pool:
        return pool.run(audit_workload, workload)[0]


def run_under_torchrun(workload: AuditedWorkload) -> AuditReport:
    """On the ranks that torchrun has started."""
    dist.init_process_group("gloo")
    try:
        return audit_workload(workload)
    finally:
        dist.destroy_process_group()


def audit_workload(workload: AuditedWorkload) -> AuditReport:
    """On one rank of the default group."""
    from transformers import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # that torch code is slow, on every rank
    with _transformers_own_kernels(workload.model):
        torch.manual_seed(workload.seed)
        mixed = {"layer_types": ["linear_attention", "full_attention"]}
        model = build_model(workload.model, 64, 2, **(mixed if _is_hybrid(workload.model) else {}))
    _enlarge(model)
    batch = _documents(workload)
    if workload.way == "pool":
        layout = "balanced" if workload.layout == "auto" else workload.layout  # "auto" may leave all at home
        return lw.audit(pooled(lw.pool(model, layout=layout, strategy=workload.strategy)), batch)
    step = parallelized(lw.parallelize(model), layout=workload.layout, strategy=workload.strategy)
    return lw.audit(step, batch)


def _documents(workload: AuditedWorkload) -> dict[str, object]:
    """Several, of very different lengths: one of half the batch, and ever shorter ones."""
    missing = workload.tokens
    parts: list[DrawnDocuments] = []
    while missing:
        parts.append(draw_documents((missing + 1) // 2, workload.seed, len(parts)))
        missing -= len(parts[-1].input_ids)
    ids = np.concatenate([part.input_ids for part in parts])
    borders = np.cumsum([0, *(n for part in parts for n in np.diff(part.cu_seqlens))])
    return {"input_ids": torch.from_numpy(ids), "cu_seqlens": borders}


def _enlarge(model: nn.Module) -> None:
    """Weights large enough that attention is far from uniform, and a mistake shows."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(4)


def _is_hybrid(family: str) -> bool:
    return family in ("qwen3_5", "qwen3_next")


@contextmanager
def _transformers_own_kernels(family: str) -> Iterator[None]:
    """The reference is transformers' code in torch; with flash-linear-attention in place it would take kernels that
    run on no CPU, and takes them when the module of a model is imported."""
    if not _is_hybrid(family) or "fla" in sys.modules:
        yield
        return
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        import_module(f"transformers.models.{family}.modeling_{family}")
        yield
    finally:
        del sys.modules["fla"]


__all__ = ["FAMILIES", "WAYS", "AuditedWorkload", "audit_workload", "run_local", "run_under_torchrun"]
