"""Checks of training as a whole: a model's loss and gradients, the same bits twice, memory that does not grow."""

from __future__ import annotations

import copy
import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import longweave as lw
from longweave.core import METHODS
from longweave.plan.schedule import STRATEGIES
from longweave.tools.doctor.across import CU, MASKS, MIXERS
from longweave.tools.doctor.checks import FAIL, LIMITS, OK, Outcome, Site, SkipCase, attempt, error_of
from longweave.tools.train.workload import VOCABULARY, build_model

# -- a model -------------------------------------------------------------------------------------------


def model(site: Site) -> Iterator[Outcome]:
    """Two layers of a Hugging Face model: the loss, and the gradient of every parameter."""
    yield attempt(site, site.family, "float32", None, partial(_model_error, site))
    if site.device.type == "cuda":
        yield attempt(site, site.family, "bfloat16", None, partial(_rounded_model_error, site))


def tiny_model(family: str) -> nn.Module:
    """Random weights, the same on every rank; a hybrid has one linear and one softmax layer."""
    if find_spec("transformers") is None:
        raise SkipCase("transformers is not installed: pip install 'longweave[hf]'")
    torch.manual_seed(0)
    changes = {"layer_types": ["linear_attention", "full_attention"]} if family in ("qwen3_5", "qwen3_next") else {}
    made = build_model(family, hidden=64, layers=2, **changes)
    with torch.no_grad():
        for p in made.parameters():
            if p.ndim > 1:
                p.mul_(4)  # large enough that attention is far from uniform, and a mistake shows
    return made.train()


def model_pass(site: Site, made: nn.Module, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The loss and every gradient, summed over the ranks of the group."""
    made = lw.parallelize(copy.deepcopy(made).to(site.device), group)
    ids = torch.randint(0, VOCABULARY, (CU[-1],), generator=torch.Generator().manual_seed(4)).to(site.device)
    batch = lw.shard_batch(ids, CU, group)
    loss = batch.loss(made(**batch.inputs).logits)
    torch.autograd.backward(loss)
    lw.reduce_gradients(made, group)
    grads = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    return {"loss": batch.reduce_loss(loss.detach()), **grads}


def _errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    if found.keys() != wanted.keys():
        raise AssertionError(f"gradients exist for other parameters: {sorted(found.keys() ^ wanted.keys())[:4]}")
    return {name: error_of(x, wanted[name]) for name, x in found.items()}


def _model_error(site: Site) -> Outcome:
    made = tiny_model(site.family)
    # One process on the same device: with CUDA, Hugging Face models are made of modules that run nowhere else.
    errors = _errors(model_pass(site, made, site.group), model_pass(site, made, site.alone_here))
    name = max(errors, key=lambda key: errors[key])
    # Ten times that of one operator: both sides round in float32, through two layers and the loss, back and forth.
    limit = 10 * LIMITS[torch.float32]
    verdict = OK if errors[name] <= limit else FAIL
    return Outcome("", "", verdict, errors[name], limit, note=f"{len(errors)} tensors, worst {name}")


def _rounded_model_error(site: Site) -> Outcome:
    """In bfloat16 ranks may be off as far as one process in bfloat16 is, and half as much again."""
    made = tiny_model(site.family)
    exact = model_pass(site, made, site.alone_here)
    rounded = made.to(torch.bfloat16)
    one = _errors(model_pass(site, rounded, site.alone_here), exact)
    ranks = _errors(model_pass(site, rounded, site.group), exact)
    name = max(ranks, key=lambda key: ranks[key] - 1.5 * one[key])
    limit = 1.5 * one[name] + LIMITS[torch.bfloat16]
    return Outcome("", "", OK if ranks[name] <= limit else FAIL, ranks[name], limit, note=f"worst {name}")


# -- the same bits -------------------------------------------------------------------------------------


def determinism(site: Site) -> Iterator[Outcome]:
    """Two runs on two packs, with torch's switch for deterministic algorithms: not one bit differs."""
    dtype, case = site.dtypes[-1], MASKS["window 23"]
    full = case.inputs(dtype, site.device)
    with _deterministic():
        for strategy in STRATEGIES:

            def attention(strategy: str = strategy) -> list[Tensor]:
                return case.solve(full, case.pack(site.group, "auto", strategy=strategy))

            yield attempt(site, "attention", strategy, 0.0, lambda run=attention: _unequal(run(), run()))  # type: ignore[misc]
        mixer = MIXERS["gated delta rule"]
        given = [x.to(site.device) for x in mixer.inputs(CU[-1], dtype)]
        for method in METHODS:

            def linear(method: str = method) -> list[Tensor]:
                return mixer.solve(given, lw.Pack(CU, site.group, "zigzag"), method)

            yield attempt(site, "gated delta rule", method, 0.0, lambda run=linear: _unequal(run(), run()))  # type: ignore[misc]


def _unequal(first: list[Tensor], second: list[Tensor]) -> float:
    """The share of tensors that are not equal bit by bit."""
    return sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True)) / len(first)


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# -- memory --------------------------------------------------------------------------------------------

PACKS = 100
ROOM = 6 << 20  # by which memory moves for other reasons; one tensor kept of each of 50 packs would be 12 MiB


def memory(site: Site) -> Iterator[Outcome]:
    """A hundred packs, each with an attention layer and a linear one: what they held is free again."""
    yield attempt(site, f"{PACKS} packs", "", None, partial(_growth, site))


def _growth(site: Site) -> Outcome:
    """The less of two halves: what is kept grows in both, what a process sets up once does not."""
    _steps(site, PACKS // 5)
    grown = []
    for _ in range(2):
        before = _bytes_in_use(site)
        _steps(site, PACKS // 2)
        grown.append(_bytes_in_use(site) - before)
    mib, least = 2.0**20, max(min(grown), 0)
    counted = "memory that torch has allocated on the GPU" if site.device.type == "cuda" else "memory of the process"
    note = f"{least / mib:.1f} MiB more after {PACKS // 2} further packs (limit {ROOM / mib:.0f} MiB; {counted})"
    return Outcome("", "", OK if least <= ROOM else FAIL, least / mib, ROOM / mib, "MiB", note)


def _steps(site: Site, count: int) -> None:
    for number in range(count):
        _step(site, number)


def _step(site: Site, number: int) -> None:
    pack = lw.Pack([0, 1 + 7 * number % 250, 256], site.group, "zigzag")
    x = torch.ones((pack.tokens, 4, 128), device=site.device, requires_grad=True)
    out = lw.attention(x, x, x, pack, strategy=STRATEGIES[number % len(STRATEGIES)])
    y, beta = out[:, :2, :32], out.detach()[:, :2, 0] / 2
    out = lw.gated_delta_rule(y, y, y, -beta, beta, pack, method=METHODS[number % len(METHODS)], qk_l2norm=True)
    torch.autograd.backward(out.sum())


def _bytes_in_use(site: Site) -> int:
    gc.collect()
    if site.device.type == "cuda":
        torch.cuda.synchronize(site.device)
        return torch.cuda.memory_allocated(site.device)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError as error:
        raise SkipCase("this system does not tell how much memory a process has") from error
    return pages * os.sysconf("SC_PAGE_SIZE")
