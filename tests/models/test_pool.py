"""lw.pool: every rank calls the model with its own rows; outputs and gradients are those of one process."""

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from families import FAMILIES, Expected, build, data, exact
from pool_rows import KINDS, places_of, rows, valid
from reference import worst
from test_families import TOLERANCE, expected
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import longweave as lw
from longweave.launch import Ranks

FULL = bool(os.environ.get("LONGWEAVE_FULL"))


def check_gradients(model: nn.Module, want: Expected, tolerance: float) -> None:
    lw.reduce_gradients(model)
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert worst(p.grad, want.grads[name]) < tolerance, name


def check_logits(out: Any, keep: Tensor, want: Expected, tolerance: float) -> None:
    own = want.logits[places_of(dist.get_rank(), dist.get_world_size())]
    assert out.logits.shape[:2] == keep.shape
    if len(own):
        assert worst(out.logits[keep], own) < tolerance


def train_step(
    family: str, want: Expected, kind: str, dtype: torch.dtype, how: dict, checkpointing: str | None
) -> None:
    model = build(family, dtype)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    lw.pool(model, **how)
    with exact(dtype, family):
        given, keep = rows(kind, dist.get_rank(), dist.get_world_size(), model)
        out = model(**given, num_items_in_batch=valid(data()))
        out.loss.backward()
    tolerance = TOLERANCE[dtype]
    total = out.loss.detach().clone()
    dist.all_reduce(total)
    assert worst(total, want.loss) < tolerance
    if how.get("head") != "pooled":
        check_logits(out, keep, want, tolerance)
    check_gradients(model, want, tolerance)


def variants(family: str, want: Expected, cases: list[tuple]) -> None:
    for case in cases:
        train_step(family, want, *case)


SIZES = [2, 3, 4, 8] if FULL else [2, 4]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_one_process(ranks: Ranks, family: str, size: int) -> None:
    cut, auto = {"layout": "zigzag"}, {}
    exactly = torch.float64
    cases: list[tuple] = [
        ("right" if size == 2 else "packed", exactly, cut, None),
        ("left" if size == 2 else "embeddings", exactly, {**auto, "head": "pooled"}, None),
        ("padded pack", torch.float32, {**cut, "head": "pooled"}, "reentrant" if size == 2 else "plain"),
    ]
    if FULL:
        cases += [(kind, exactly, how, "plain") for kind in KINDS for how in (cut, auto, {"layout": "home"})]
    ranks.run(variants, family, expected(family), cases, size=size)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_every_kind_of_rows(ranks: Ranks, family: str, size: int) -> None:
    """Packed rows say where documents are in three ways; a rank may have nothing but padding, or nothing at all."""
    heads = ("home", "pooled")
    layouts = ("zigzag", "auto", "home", "contiguous")
    cases = [
        (kind, torch.float64, {"layout": layouts[i % 4], "head": heads[(i + size) % 2]}, None)
        for i, kind in enumerate(KINDS)
    ]
    ranks.run(variants, family, expected(family), cases, size=size)


# -- what is wrong must be seen ----------------------------------------------------------------------


def with_fault(fault: str, want: Expected) -> str:
    """Which comparison fails when the code is broken on purpose."""
    from longweave.models import rows as reading
    from longweave.tokens import TokenRoute

    if fault == "documents merged":
        before = reading._begins
        reading._begins = lambda places, *rest: np.arange(len(places)) == 0
    else:
        before = TokenRoute.walk

        def cut(self: TokenRoute, x: Tensor, dim: int = 0, fill: float = 0) -> Tensor:
            return before(self, x.detach(), dim, fill).requires_grad_(x.requires_grad)

        TokenRoute.walk = cut
    try:
        train_step("llama", want, "right", torch.float64, {"layout": "zigzag"}, None)
    except AssertionError:
        return "noticed"
    finally:
        if fault == "documents merged":
            reading._begins = before
        else:
            TokenRoute.walk = before
    return "not noticed"


@pytest.mark.parametrize("fault", ["documents merged", "gradient of the exchange cut"])
def test_planted_faults_are_noticed(ranks: Ranks, fault: str) -> None:
    assert "noticed" in ranks.run(with_fault, fault, expected("llama"), size=2)


# -- trainers' habits --------------------------------------------------------------------------------


def wrapped(want: Expected, wrapper: str, head: str) -> None:
    """DDP and FSDP2 average over ranks; each rank's loss is divided by its own share so that the mean is the mean."""
    world = dist.get_world_size()
    model = lw.pool(build("qwen3_5"), layout="zigzag", head=head)
    if wrapper == "ddp":
        outer: nn.Module = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        outer = fully_shard(model, mesh=mesh)
    with exact(torch.float64, "qwen3_5"):
        given, _ = rows("right", dist.get_rank(), world)
        for _ in range(2):  # the second backward adds to the first
            (outer(**given, num_items_in_batch=valid(data())).loss * world / 2).backward()
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if wrapper == "fsdp" else p.grad
        assert worst(grad, want.grads[name]) < 1e-9, name


@pytest.mark.parametrize("head", ["home", "pooled"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_ddp_and_fsdp_need_no_scaling(ranks: Ranks, wrapper: str, head: str) -> None:
    ranks.run(wrapped, expected("qwen3_5"), wrapper, head, size=3)


def in_evaluation(want: Expected) -> None:
    model = lw.pool(build("qwen3_5"), layout="zigzag").eval()
    given, keep = rows("left", dist.get_rank(), dist.get_world_size())
    with exact(torch.float64, "qwen3_5"), torch.no_grad():
        out = model(**given, output_hidden_states=True)
        logits = model.lm_head(out.hidden_states[-1])
    check_logits(out, keep, want, 1e-9)
    assert out.past_key_values is None
    assert len(out.hidden_states) == 3
    assert all(h.shape == (*keep.shape, 32) for h in out.hidden_states)
    assert worst(logits[keep], out.logits[keep]) < 1e-12
    own = model.get_input_embeddings()(given["input_ids"])
    assert worst(out.hidden_states[0][keep], own[keep]) < 1e-12
    loss, listed, *_ = model(**given, return_dict=False)
    assert loss.ndim == 0
    assert listed.shape == out.logits.shape


def test_evaluation_returns_rows_in_order(ranks: Ranks) -> None:
    ranks.run(in_evaluation, expected("qwen3_5"), size=3)


def balanced_experts(family: str) -> None:
    """The balancing loss is about the rank's own rows, as without `lw.pool`."""
    given, _ = rows("right", dist.get_rank(), dist.get_world_size())
    found = []
    for how in (None, {"head": "home"}, {"head": "pooled"}):
        model = build(family, torch.float64, router_aux_loss_coef=10.0)
        model.set_attn_implementation("sdpa" if family != "gpt_oss" else "eager")
        if how is not None:
            lw.pool(model, layout="zigzag", **how)
        with exact(torch.float64, family):
            out = model(**given, num_items_in_batch=9, output_router_logits=True)
            out.loss.backward()
        lw.reduce_gradients(model)
        found.append(
            (
                out.loss.detach(),
                out.aux_loss.detach(),
                model.model.layers[0].mlp.gate if family != "gpt_oss" else model.model.layers[0].mlp.router,
            )
        )
        assert out.router_logits[0].shape == (given["input_ids"].numel(), 4)
    for loss, aux, gate in found[1:]:
        assert worst(loss, found[0][0]) < 1e-9
        assert worst(aux, found[0][1]) < 1e-9
        assert worst(gate.weight.grad, found[0][2].weight.grad) < 1e-9


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_are_balanced_over_the_rows_of_a_rank(ranks: Ranks, family: str) -> None:
    ranks.run(balanced_experts, family, size=2)
