"""lw.pool: every rank calls the model with its own rows; outputs and gradients are those of one process."""

import os
import re
import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from families import FAMILIES, VOCAB, Expected, build, data, exact
from pool_rows import KINDS, places_of, rows, valid
from reference import worst
from test_agreement import ODD, catch
from test_families import TOLERANCE, expected
from test_parallelize import Stranger, snapshot, with_stranger
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import longweave as lw
from longweave.launch import Ranks
from longweave.models import pooled_decoder
from longweave.models.pooled_decoder import POOLING
from longweave.plan.cost import Machine, areas
from longweave.plan.document_work import DecoderWork
from longweave.plan.homing import balanced_layout, home_layout

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


SIZES = (2, 3, 4, 8) if FULL else (2,)
CASES = sorted(
    {(family, size) for family in FAMILIES for size in SIZES} | {("llama", 4), ("qwen3_5", 4), ("gpt_oss", 4)}
)


@pytest.mark.parametrize(("family", "size"), CASES)
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


def wrapped_in_fsdp1(want: Expected, head: str, originals: bool, nested: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    world = dist.get_world_size()
    model = lw.pool(build("llama"), layout="zigzag", head=head, wait=20)
    policy = ModuleWrapPolicy({type(model.model.layers[0])}) if nested else None
    outer = FullyShardedDataParallel(
        model, use_orig_params=originals, auto_wrap_policy=policy, device_id=torch.device("cpu")
    )
    given, _ = rows("right", dist.get_rank(), world)
    with exact(torch.float64, "llama"):
        for _ in range(2):
            loss = outer(**given, num_items_in_batch=valid(data())).loss
            (loss * world / 2).backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    assert worst(total, want.loss) < 1e-9
    with FullyShardedDataParallel.summon_full_params(outer, with_grads=originals):
        for name, p in model.named_parameters():
            name = name.replace("_fsdp_wrapped_module.", "")
            if originals:
                assert worst(p.grad, want.grads[name]) < 1e-9, name


@pytest.mark.parametrize(("head", "originals", "nested"), [
    ("home", True, True), ("home", False, True), ("pooled", True, True), ("pooled", False, False),
])  # fmt: skip
def test_fsdp1(ranks: Ranks, head: str, originals: bool, nested: bool) -> None:
    """Its parameters are views of shards, which differ from rank to rank by nature."""
    ranks.run(wrapped_in_fsdp1, expected("llama"), head, originals, nested, size=2)


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


# -- ranks that differ -------------------------------------------------------------------------------


def one_stays_away(wait: float) -> tuple[str, float, str]:
    """What was said, after how long, and what the rank that stayed away is told if it comes later."""
    model = lw.pool(build("llama", torch.float32), layout="zigzag", wait=wait)
    given, _ = rows("right", dist.get_rank(), dist.get_world_size())
    dist.barrier()
    begun = time.monotonic()
    said = catch(lambda: model(**given)) if dist.get_rank() != ODD else ""
    took = time.monotonic() - begun
    dist.barrier()
    late = catch(lambda: model(**given)) if dist.get_rank() == ODD else ""
    model(**given).loss.backward()  # all together again
    return said, took, late


def test_a_rank_that_does_not_call_the_model_is_named(ranks: Ranks) -> None:
    found = ranks.run(one_stays_away, 2.0, size=3, timeout=60)
    for rank in (0, 2):
        said, took, _ = found[rank]
        start = "GroupError: rank 1 of the group has not come to the forward of a pooled model within 2 s"
        assert said.startswith(f"{start} (call 1; I am rank {rank})"), said
        assert "no rank may skip a batch" in said
        assert took < 5
    assert found[ODD][2].startswith("GroupError: rank 1 came too late: rank ")


# What rank ODD does otherwise: how it pools, its model, the call around and the arguments of it.
DIFFERENT: dict[str, dict[str, Any]] = {
    "no_grad": {"gradients": False},
    "eval": {"training": False},
    "layout": {"how": {"layout": "contiguous"}},
    "mask": {"how": {"mask": "full"}, "sees_ahead": True},
    "head": {"how": {"head": "pooled"}},
    "strategy": {"how": {"strategy": "ring"}},
    "option": {"how": {"strategy": "groupcast", "stages": 2}},
    "frozen parameters": {"frozen": True},
    "another model": {"family": "mistral"},  # with as many parameters
    "checkpointing": {"checkpointing": True},
    "embeddings": {"embeddings": True},
    "hidden states": {"arguments": {"output_hidden_states": True}},
    "autocast": {"autocast": True},
}
BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "hole": ({"attention_mask": torch.tensor([[1, 0, 1]])}, "row 0 of attention_mask has padding between its tokens"),
    "document numbers": ({"attention_mask": torch.tensor([[1, 1, 2]])}, "attention_mask holds 2, which is neither"),
    "positions": ({"position_ids": torch.zeros(1, 4)}, r"position_ids is (1, 4) for tokens of (1, 3)"),
    "borders": ({"cu_seq_lens_q": [0, 2]}, "cu_seq_lens_q ends at 2, but the batch has 3 tokens"),
    "no tokens": ({"input_ids": None}, "neither of input_ids and inputs_embeds was given"),
    "attentions": ({"output_attentions": True}, "a pooled model never holds attention weights"),
    "dropout": ({}, "layers.1.self_attn asks for attention dropout 0.1 in training"),
    "stranger": ({"token_type_ids": torch.zeros(1, 3)}, "the argument token_type_ids has a value for every token"),
}


def call_otherwise(
    how: dict[str, Any] | None = None,
    family: str = "llama",
    gradients: bool = True,
    training: bool = True,
    frozen: bool = False,
    checkpointing: bool = False,
    embeddings: bool = False,
    autocast: bool = False,
    sees_ahead: bool = False,
    arguments: dict[str, Any] | None = None,
) -> None:
    model = build(family, torch.float32).train(training)
    for layer in model.model.layers:
        layer.self_attn.is_causal = not sees_ahead
    lw.pool(model, **{"layout": "zigzag", "wait": 20, **(how or {})})
    if frozen:
        model.model.layers[0].mlp.requires_grad_(False)
    if checkpointing:
        model.gradient_checkpointing_enable()
    kind = "embeddings" if embeddings else "right"
    given, _ = rows(kind, dist.get_rank(), dist.get_world_size(), model)
    cast = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with torch.set_grad_enabled(gradients), cast:
        model(**given, **(arguments or {}))


def calls_that_differ() -> tuple[dict[str, str], dict[str, str]]:
    odd = dist.get_rank() == ODD
    differ = {name: catch(lambda: call_otherwise(**(bad if odd else {}))) for name, bad in DIFFERENT.items()}  # noqa: B023
    call_otherwise()  # all is well again
    refused = {}
    for head in ("home", "pooled"):
        model = lw.pool(build("llama", torch.float32), head=head, wait=20)
        given = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[1, 2, 3]])}
        for name, (bad, _) in BAD_ROWS.items():
            arguments = {**given, **(bad if odd else {})}
            model.model.layers[1].self_attn.attention_dropout = 0.1 * (odd and name == "dropout")
            refused[f"{head}, {name}"] = catch(lambda: model(**arguments))  # noqa: B023
        model.model.layers[1].self_attn.attention_dropout = 0.1
        model.eval()(**given)  # there is none in evaluation
        model.model.layers[1].self_attn.attention_dropout = 0.0
        model.train()(**given).loss.backward()
    return differ, refused


def test_ranks_that_differ_are_named_on_every_rank(ranks: Ranks) -> None:
    for rank, (differ, refused) in enumerate(ranks.run(calls_that_differ, size=3, timeout=60)):
        start = "GroupError: rank 1 of the group makes another call of the pooled model than the rest"
        for name, said in differ.items():
            assert said.startswith(f"{start} (I am rank {rank})"), (name, said)
            assert said.endswith("Nothing was sent."), (name, said)
        own = {name: said.partition("this rank's call is: ")[2] for name, said in differ.items()}
        # The odd one says what it does, the others the same in every case.
        assert len(set(own.values())) == (len(own) if rank == ODD else 1)
        for name, said in refused.items():
            why = BAD_ROWS[name.partition(", ")[2]][1]
            told = f"GroupError: rank 1 of the group refused this call: {why}"
            assert said.startswith(f"InputError: {why}" if rank == ODD else told), (name, said)


def cannot_be_read() -> str:
    """On one rank something is wrong before the ranks meet."""
    model = lw.pool(build("llama", torch.float32), wait=20)
    given = {"input_ids": torch.tensor([[1, 2, 3]])}

    def no_room(*_: object) -> None:
        raise lw.InputError("no room")

    with patch.object(pooled_decoder, "_to_read", no_room) if dist.get_rank() == 1 else nullcontext():
        return catch(lambda: model(**given))


def test_what_one_rank_cannot_read_all_refuse(ranks: Ranks) -> None:
    mine, odd = ranks.run(cannot_be_read, size=2)
    assert odd == "InputError: no room"
    assert mine.startswith("GroupError: rank 1 of the group refused this call: no room")


# -- refusals at the door ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"head": "both"}, "head is 'both'; choose one of home, pooled"),
        ({"layout": "spiral"}, "layout is 'spiral'; choose one of .*, home"),
        ({"layout": lw.Layout.contiguous(4, 1)}, "layout is .*; choose one of"),
        ({"mask": "diagonal"}, "mask is 'diagonal'; choose one of causal, full"),
        ({"wait": 0}, "wait is 0; give a positive number of seconds"),
        ({"wait": -1.5}, "wait is -1.5"),
        ({"wait": True}, "wait is True"),
        ({"wait": "10"}, "wait is '10'"),
        ({"wait": float("inf")}, "wait is inf"),
        ({"wait": float("nan")}, "wait is nan"),
        ({"strategy": "teleport"}, "strategy is 'teleport'"),
        ({"method": "magic"}, "method is 'magic'"),
        ({"backend": "abacus"}, "backend"),
        ({"flavour": 2}, "there is no option 'flavour'"),
        ({"strategy": "ring", "stages": 2}, "stages goes with groupcast"),
        ({"group": "world"}, "group is a str"),
    ],
)
def test_bad_options_are_refused_and_change_nothing(how: dict, message: str) -> None:
    model = build("llama", torch.float32)
    before = snapshot(model)
    with pytest.raises(lw.InputError, match=message):
        lw.pool(model, **how)
    assert snapshot(model) == before


def test_a_mask_that_is_not_the_models_is_refused() -> None:
    model, encoder = build("llama", torch.float32), build("llama", torch.float32).model
    for layer in encoder.layers:
        layer.self_attn.is_causal = False
    by_config = build("llama", torch.float32, is_causal=False)
    for one, wrong, right in ((model, "full", "causal"), (encoder, "causal", "full"), (by_config, "causal", "full")):
        before = snapshot(one)
        with pytest.raises(lw.InputError, match=rf'mask is "{wrong}", but layers\.0\.self_attn.*mask="{right}"'):
            lw.pool(one, mask=wrong)
        assert snapshot(one) == before
        lw.pool(one, mask=right)
    ids = data().ids[None, :9]
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % VOCAB
    assert worst(encoder(ids).last_hidden_state[:, 0], encoder(other).last_hidden_state[:, 0]) > 1e-4
    assert model(ids).logits[:, 0].equal(model(other).logits[:, 0])


def test_models_that_are_refused() -> None:
    with pytest.raises(lw.InputError, match=r"model is a str; give a torch\.nn\.Module"):
        lw.pool("model")
    with pytest.raises(
        lw.InputError, match=r"Linear has no decoder that is known \(known are deepseek_v3, .*register\(type\(decoder\)"
    ):
        lw.pool(nn.Linear(2, 2))
    with pytest.raises(lw.InputError, match=r"0 is a test_parallelize\.Stranger"):
        lw.pool(nn.Sequential(Stranger()))
    model = with_stranger()
    before = snapshot(model)
    with pytest.raises(lw.InputError, match=r"layers\.1\.self_attn is a test_parallelize\.Stranger"):
        lw.pool(model)
    assert snapshot(model) == before
    model = build("llama", torch.float32, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(lw.InputError, match="rotary embedding of type 'dynamic'"):
        lw.pool(model)


def test_a_model_is_pooled_once() -> None:
    for change in (lw.parallelize, lw.pool):
        model = change(build("llama", torch.float32))
        for again in (lw.pool, lw.parallelize):
            with pytest.raises(lw.InputError, match=r"already; call lw\.restore"):
                again(model)
        with pytest.raises(lw.InputError, match=r"already; call lw\.restore"):
            lw.pool(nn.Sequential(model))
        lw.pool(lw.restore(model))


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3", "mistral", "gemma2", "gpt_oss"])
def test_the_cost_of_a_decoder(family: str) -> None:
    """Pairs and K/V are those of its attention layers, without linear ones, and those with a window apart."""
    model = lw.pool(build(family, torch.float32))
    config, work = model.config, vars(model.model)[POOLING].work
    every = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = getattr(config, "layer_types", None) or [every] * config.num_hidden_layers
    assert work.is_chained == ("linear_attention" in kinds)
    assert (work.flops_to_sum_up > 0) == work.is_chained
    assert work.bytes_home == 4 * config.hidden_size
    found = {attention.window: attention for attention in work.attention}
    assert set(found) == {None, *([config.sliding_window] if "sliding_attention" in kinds else [])}
    for window, attention in found.items():
        layers = kinds.count("full_attention" if window is None else "sliding_attention")
        assert attention.kv_bytes == layers * 2 * config.num_key_value_heads * config.head_dim * 4
        assert attention.flops_per_pair == layers * 4 * config.num_attention_heads * config.head_dim


LARGE = {
    "mistral": ("MistralConfig", {"head_dim": 128}),
    "gemma2": ("Gemma2Config", {}),
    "gpt_oss": ("GptOssConfig", {"num_hidden_layers": 24, "num_local_experts": 32}),
}


@pytest.mark.parametrize("family", LARGE)
def test_windowed_models_are_balanced(family: str) -> None:
    """By what their layers really do with long documents on 8 ranks."""
    import transformers

    name, sizes = LARGE[family]
    config = getattr(transformers, name)(vocab_size=1000, **sizes)
    with torch.device("meta"):
        model = lw.pool(transformers.AutoModelForCausalLM.from_config(config))
    work = vars(model.model)[POOLING].work
    rng, layers = np.random.default_rng(0), config.num_hidden_layers
    full = {"mistral": 0.0}.get(family, 0.5)
    per_pair = 4.0 * config.num_attention_heads * config.head_dim * layers
    for _ in range(10):
        documents = np.clip(rng.lognormal(np.log(8000), 1.5, (8, 2)).astype(int), 16, 131_072)
        mask, home = lw.Mask.causal(np.cumsum([0, *documents.flatten()])), home_layout(documents.sum(1).tolist())
        layout = balanced_layout(mask, home, work)
        pairs = full * areas(mask, layout) + (1 - full) * areas(mask.windowed(config.sliding_window), layout)
        done = np.array(layout.counts) * work.flops_per_token + pairs * per_pair
        assert done.max() < done.mean() * 1.03


def test_frozen_weights_and_a_pooled_head_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of forward and backward, a frozen weight has two thirds; a pooled head is computed where the tokens are."""
    from longweave.models import pooled

    seen: list[float] = []

    def spy(mask: lw.Mask, home: lw.Layout, work: DecoderWork, machine: Machine) -> lw.Layout:
        seen.append(work.flops_per_token)
        return home

    monkeypatch.setattr(pooled, "faster_layout", spy)
    ids = data().ids[None, :9]
    model = lw.pool(build("llama", torch.float32), head="pooled")
    whole = vars(model.model)[POOLING].work.flops_per_token
    weights = sum(p.numel() for name, p in model.model.named_parameters() if "embed_tokens" not in name)
    mlp = sum(p.numel() for p in model.model.layers[0].mlp.parameters())
    assert whole == 2 * weights
    head = 2 * model.config.hidden_size * model.config.vocab_size
    model(ids)  # logits come from home
    model(ids, labels=ids)
    model.model.layers[0].mlp.requires_grad_(False)
    model(ids, labels=ids)
    with torch.no_grad():  # no backward: a frozen weight is one of three units, as all are
        model(ids, labels=ids)
    assert seen == pytest.approx([whole, whole + head, whole + head - 2 * mlp / 3, whole + head])


def test_a_pooled_head_needs_a_language_model() -> None:
    """What is around the decoder is of no concern else: the same model is pooled with its head at home."""
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification(build("llama").config)
    before = snapshot(model)
    with pytest.raises(lw.InputError, match='has no language-model head, which head="pooled" is about'):
        lw.pool(model, head="pooled")
    assert snapshot(model) == before
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    want = model(input_ids=ids, use_cache=False).logits
    assert worst(lw.pool(model)(input_ids=ids).logits, want) < 1e-5


# -- refusals at a call ------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["home", "pooled"])
def test_calls_that_are_refused(head: str) -> None:
    model = lw.pool(build("llama", torch.float32), head=head)
    given = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[1, 2, 3]])}
    for name, (bad, message) in BAD_ROWS.items():
        model.model.layers[1].self_attn.attention_dropout = 0.1 * (name == "dropout")
        with pytest.raises(lw.InputError, match=re.escape(message)):
            model(**{**given, **bad})
    model.model.layers[1].self_attn.attention_dropout = 0.0
    with pytest.raises(lw.InputError, match="the rows of all ranks are padding only"):
        model(**given, attention_mask=torch.zeros(1, 3))
    model(**given).loss.backward()
    model.set_attn_implementation("sdpa")
    with pytest.raises(lw.InputError, match=r"was changed to 'sdpa' in the meantime.*lw\.restore\(model\)"):
        model(**given)
    lw.pool(lw.restore(model))(**given).loss.backward()
