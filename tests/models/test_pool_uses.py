"""lw.pool in use: generation, caches, other heads, sub-groups, autocast, compiled layers, copies, saved models."""

import copy
import warnings
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import CU, FAMILIES, VOCAB, Expected, build, data, exact
from pool_rows import places_of, rows, valid
from reference import worst
from test_families import expected
from test_parallelize import snapshot
from test_pool import check_gradients
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertModel,
    DynamicCache,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)
from transformers.utils.generic import ModelOutput

import longweave as lw
from longweave.launch import Ranks
from longweave.models import pooled_head

# -- alone on a rank ---------------------------------------------------------------------------------


def generating(family: str, head: str) -> None:
    """Only one rank generates, another only reads on with a cache: nobody waits for anybody."""
    plain = build(family, torch.float32).eval()
    model = lw.pool(copy.deepcopy(plain), layout="zigzag", head=head, wait=5)
    prompts, _ = rows("left", 0, 2)
    prompts = {name: prompts[name] for name in ("input_ids", "attention_mask")}
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    for cached in (True, False):
        if dist.get_rank() == 0:
            want = plain.generate(**prompts, **options, use_cache=cached)
            assert model.generate(**prompts, **options, use_cache=cached).equal(want)
        else:
            ids = data().ids[None, :9]
            with torch.no_grad():
                first = model(ids[:, :6], use_cache=True)
                then = model(ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
                want = plain(ids, use_cache=True)
            assert worst(then.logits, want.logits[:, 6:]) < 1e-4
    assert model.config._attn_implementation == "longweave"
    given, _ = rows("right", dist.get_rank(), 2)
    out = model(**given)  # and together again
    with torch.no_grad():
        mine = plain(**given)
    assert worst(out.loss, mine.loss) < 1e-4


@pytest.mark.parametrize("head", ["home", "pooled"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_generation_and_caches_concern_their_rank_only(ranks: Ranks, family: str, head: str) -> None:
    ranks.run(generating, family, head, size=2)


# -- heads -------------------------------------------------------------------------------------------


class ValueHead(nn.Module):
    """A critic, as RL trainers build it: a model of their own around a decoder."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.value = backbone, nn.Linear(32, 1).double()

    def forward(self, **given: Tensor) -> Tensor:
        return self.value(self.backbone(**given).last_hidden_state)[..., 0]


def of_kind(kind: str, family: str) -> nn.Module:
    config = build(family).config
    config.num_labels = 3
    torch.manual_seed(0)
    if kind == "classes of rows":
        model = AutoModelForSequenceClassification.from_config(config)
    elif kind == "classes of tokens":
        model = AutoModelForTokenClassification.from_config(config)
    else:
        model = AutoModel.from_config(config)
    model = model.double()
    return ValueHead(model) if kind == "values" else model


def result(kind: str, model: nn.Module, given: dict[str, Tensor], keep: Tensor) -> Tensor:
    out = model(**given)
    if kind == "embeddings":  # the mean over a row's tokens
        mask = keep[..., None]
        return (out.last_hidden_state * mask).sum(1) / mask.sum(1).clamp(min=1)
    if kind == "classes of rows":
        return out.logits
    return (out if kind == "values" else out.logits)[keep]


def any_head(kind: str, family: str) -> None:
    given, keep = rows("right", dist.get_rank(), dist.get_world_size())
    given = {name: given[name] for name in ("input_ids", "attention_mask")}
    found = []
    for how in (None, {"layout": "zigzag"}):
        model = of_kind(kind, family)
        if how is not None:
            lw.pool(model, **how)
        with exact(torch.float64, family):
            y = result(kind, model, given, keep)
            generator = torch.Generator().manual_seed(dist.get_rank())
            (y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum().backward()
        lw.reduce_gradients(model)
        found.append((y.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (want, grads), (got, others) = found
    assert worst(got, want) < 1e-9
    for name, grad in grads.items():
        if grad is not None:
            assert worst(others[name], grad) < 1e-9, name


@pytest.mark.parametrize("kind", ["classes of rows", "classes of tokens", "embeddings", "values"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_any_head_runs_at_home(ranks: Ranks, kind: str, family: str) -> None:
    ranks.run(any_head, kind, family, size=3)


def per_token() -> None:
    """What a pooled head returns in the place of logits."""
    plain = build("gemma2")  # caps its logits
    model = lw.pool(copy.deepcopy(plain), layout="zigzag", head="pooled")
    given, keep = rows("right", dist.get_rank(), dist.get_world_size())
    with exact(torch.float64, "gemma2"):
        out = model(**given, output_entropy=True, output_hidden_states=True)
        want = plain(**given)
        free = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
    logp = torch.log_softmax(want.logits[:, :-1], -1)
    labels = given["labels"][:, 1:]
    counts = labels != -100
    expected_logp = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(~counts, 0)
    assert worst(out.log_probs, expected_logp) < 1e-9
    assert worst(out.entropy, -(logp.exp() * logp).sum(-1).masked_fill(~counts, 0)) < 1e-9
    assert worst(out.loss, want.loss) < 1e-9
    assert len(out.hidden_states) == 3
    assert worst(free.logits[keep], want.logits[keep]) < 1e-9
    with exact(torch.float64, "gemma2"):
        moved = torch.cat([given["labels"][:, 1:], torch.full_like(given["labels"][:, :1], -100)], 1)
        again = model(**{**given, "labels": None}, shift_labels=moved)
    assert again.log_probs.shape == moved.shape
    assert worst(again.log_probs[:, :-1], out.log_probs) < 1e-12
    assert worst(again.loss, out.loss) < 1e-12


def test_a_pooled_head_returns_log_probabilities(ranks: Ranks) -> None:
    ranks.run(per_token, size=2)


# -- groups, precision, compilers --------------------------------------------------------------------


def in_a_sub_group(want: Expected) -> None:
    """Ranks 1 and 3 share, ranks 0 and 2 share; the group rank of 3 and 2 is 1."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
    group = world["cp"]
    model = lw.pool(build("qwen3_5"), group, layout="zigzag")
    with exact(torch.float64, "qwen3_5"):
        given, _ = rows("right", group.get_local_rank(), 2)
        model(**given, num_items_in_batch=valid(data())).loss.backward()
    lw.reduce_gradients(model, group)
    for name, p in model.named_parameters():
        assert worst(p.grad, want.grads[name]) < 1e-9, name


def test_a_sub_group_shares_inside_itself(ranks: Ranks) -> None:
    ranks.run(in_a_sub_group, expected("qwen3_5"), size=4)


def under_autocast() -> None:
    """bfloat16 arithmetic on float32 weights: as far from float32 as without `lw.pool`."""
    given, _ = rows("right", dist.get_rank(), dist.get_world_size())
    found = []
    for cast, how in ((False, None), (True, None), (True, {}), (True, {"head": "pooled"})):
        model = build("llama", torch.float32)
        if how is not None:
            lw.pool(model, layout="zigzag", **how)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            loss = model(**given, num_items_in_batch=20).loss
        loss.backward()
        lw.reduce_gradients(model)
        found.append((loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (loss, grad), plain, *pooled = found
    for one in pooled:
        assert (one[0] - loss).abs() <= 2 * (plain[0] - loss).abs() + 0.02
        assert (one[1] - grad).norm() <= 2 * (plain[1] - grad).norm()


def test_autocast_is_no_worse_than_without(ranks: Ranks) -> None:
    ranks.run(under_autocast, size=2)


def compiled(want: Expected) -> None:
    """The layers are compiled, or the whole model; a new batch compiles nothing anew."""
    for whole in (False, True):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        model = lw.pool(build("llama", torch.float32), layout="zigzag")
        outer: nn.Module = model
        if whole:
            outer = torch.compile(model, backend=counter)
        else:
            for layer in model.model.layers:
                layer.compile(backend=counter)
        frames = []
        for step in range(3):
            model.zero_grad()
            given, _ = rows(("right", "left", "right")[step], dist.get_rank(), dist.get_world_size())
            outer(**given, num_items_in_batch=valid(data())).loss.backward()
            frames.append(counter.frame_count)
        check_gradients(model, want, 1e-5)
        assert frames[0] > 0
        assert frames[1] == frames[2]


def test_compiled_layers(ranks: Ranks) -> None:
    ranks.run(compiled, expected("llama"), size=2)


# -- what stays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["home", "pooled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_restore_leaves_no_trace(family: str, head: str) -> None:
    model = build(family, torch.float32)
    model.gradient_checkpointing_enable()
    config, before = model.config, snapshot(model)
    ids = data().ids[None, :9]
    want = model(input_ids=ids, use_cache=False).logits
    assert lw.pool(model, head=head) is model
    assert model.config is not config
    model(input_ids=ids, labels=ids).loss.backward()
    assert lw.restore(model) is model
    after = snapshot(model)
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key] and before[key] != after[key]] == []
    assert model.config is config
    assert model(input_ids=ids, use_cache=False).logits.equal(want)


@pytest.mark.parametrize("head", ["home", "pooled"])
def test_a_deep_copy_is_a_model_of_its_own(head: str) -> None:
    """As trainers copy a reference model."""
    model = lw.pool(build("qwen3_next", torch.float32), head=head)
    other = copy.deepcopy(model)
    ids = data().ids[None, :9]
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
        assert abs(float(other(input_ids=ids, labels=ids).loss) - torch.tensor(float(VOCAB)).log()) < 1e-5
        assert abs(float(model(input_ids=ids, labels=ids).loss) - torch.tensor(float(VOCAB)).log()) > 1e-3
    assert other.generate(ids, max_new_tokens=2, do_sample=False)[0, -1] == 0
    lw.restore(other)
    assert other.config._attn_implementation == "eager"
    assert not other._forward_hooks
    assert not other._forward_pre_hooks
    assert model.config._attn_implementation == "longweave"
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gpt_oss"])
def test_saved_models_know_nothing_of_it(family: str, tmp_path: Path) -> None:
    model = build(family, torch.float32).eval()
    ids = data().ids[None, :9]
    want = model(input_ids=ids).logits
    lw.pool(model, head="pooled").save_pretrained(tmp_path)
    assert "longweave" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert worst(loaded(input_ids=ids).logits, want) < 1e-6


def test_without_process_group_it_is_the_model_itself() -> None:
    model = lw.pool(build("qwen3_5"))
    want = expected("qwen3_5")
    given, keep = rows("right", 0, 1)
    with exact(torch.float64, "qwen3_5"):
        out = model(**given, num_items_in_batch=valid(data()))
        out.loss.backward()
    assert worst(out.logits[keep], want.logits[places_of(0, 1)]) < 1e-9
    assert worst(out.loss, want.loss) < 1e-9
    assert CU[-1] == int(keep.sum())


# -- what would be silently wrong --------------------------------------------------------------------


def test_parts_of_a_pooled_model_are_not_pooled_again() -> None:
    model = lw.pool(build("llama"))
    for again in (model.model, ValueHead(model.model), copy.deepcopy(model.model)):
        with pytest.raises(lw.InputError, match="pooled already"):
            lw.pool(again)
        with pytest.raises(lw.InputError, match="pooled already"):
            lw.parallelize(again)
    with pytest.raises(lw.InputError, match="takes rows"):
        model.model(**lw.shard_batch(data().ids, CU).inputs)


def test_refused_because_it_would_be_wrong() -> None:
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    prompts = get_peft_model(build("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(lw.InputError, match="virtual tokens"):
        lw.pool(prompts, head="pooled")
    activated = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5])
    with pytest.raises(lw.InputError, match="alora"):
        lw.pool(get_peft_model(build("llama"), activated))
    model = lw.pool(build("llama"))
    model.get_input_embeddings().neftune_noise_alpha = 5
    with pytest.raises(lw.InputError, match="NEFTune"):
        model(input_ids=data().ids[None])


def test_a_pooled_head_wants_integer_labels() -> None:
    model = lw.pool(build("llama"), head="pooled")
    ids = data().ids[None]
    for labels in (ids > 3, ids.float()):
        with pytest.raises(lw.InputError, match=r"labels is torch\.(bool|float32) .* give an integer for every token"):
            model(input_ids=ids, labels=labels)


def test_restore_does_not_undo_what_others_did_later() -> None:
    model = lw.pool(build("llama"), head="pooled")
    ours = model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(lw.InputError, match="replaced after"):
        lw.restore(model)
    model.forward = ours
    lw.restore(model)


def test_the_loss_comes_first() -> None:
    model = lw.pool(build("qwen3_moe"), head="pooled")
    ids = data().ids[None, :9]
    model.router_aux_loss_coef = 3.0
    out = model(input_ids=ids, labels=ids, output_router_logits=True)
    assert out[0] is out.loss
    assert out.loss.ndim == 0
    first, *_ = model(input_ids=ids, labels=ids, output_router_logits=True, return_dict=False)
    assert worst(first, out.loss) < 1e-12
    assert worst(lw.restore(model)(input_ids=ids, labels=ids, output_router_logits=True).loss, out.loss) < 1e-5


def chunks_with_fsdp() -> None:
    """Ranks with few and with many tokens; the output layer is gathered for every chunk."""
    pooled_head.HEAD_CHUNK = 8
    try:
        model = lw.pool(build("llama", torch.float32), layout="home", head="pooled")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.model.layers, model.model, model.lm_head, model):
            fully_shard(part, mesh=mesh)
        given, _ = rows("right", dist.get_rank(), dist.get_world_size())
        out = model(**given)
        out.loss.backward()
    finally:
        pooled_head.HEAD_CHUNK = 1024
    plain = build("llama", torch.float32)
    assert worst(out.loss, plain(**given).loss) < 1e-5


def test_every_rank_has_as_many_chunks(ranks: Ranks) -> None:
    ranks.run(chunks_with_fsdp, size=2)


def other_planes() -> None:
    ids = data().ids[None, :8]
    model = lw.pool(build("llama"), wait=5)
    positions = torch.arange(8).expand(3, 1, 8) if dist.get_rank() else None
    with pytest.raises(lw.GroupError, match="another call of the pooled model"):
        model(input_ids=ids, position_ids=positions)


def test_other_planes_of_positions_are_named(ranks: Ranks) -> None:
    ranks.run(other_planes, size=2)


def test_caches_with_checkpointing() -> None:
    """A call that runs alone is computed anew in backward as it was: with the attention that the model had before."""
    plain = build("llama")
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    model = lw.pool(copy.deepcopy(plain))
    ids = data().ids[None, :9]
    for one in (plain, model):
        one(ids, past_key_values=DynamicCache(config=one.config)).logits.square().sum().backward()
    for (name, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert worst(q.grad, p.grad) < 1e-9, name


def without_ddp() -> None:
    """Nobody averages the gradients: after the first step, the ranks' weights differ."""
    model = lw.pool(build("llama", torch.float32), wait=5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given, _ = rows("right", dist.get_rank(), dist.get_world_size())
    model(**given).loss.backward()
    optimizer.step()
    with pytest.raises(lw.GroupError, match=r"other weights .*DDP or FSDP2"):
        model(**given)


def test_weights_that_differ_are_named(ranks: Ranks) -> None:
    ranks.run(without_ddp, size=2)


def prefix_tuning() -> int:
    """How often it was said that the calls share nothing."""
    from peft import PrefixTuningConfig, get_peft_model

    model = get_peft_model(
        build("llama", torch.float32), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    lw.pool(model, wait=5)
    ids = data().ids[None, : 9 + dist.get_rank()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    return sum("runs alone on its rank" in str(one.message) for one in caught)


def test_training_alone_is_said_once(ranks: Ranks) -> None:
    assert ranks.run(prefix_tuning, size=2) == [1, 1]


def test_a_pooled_model_is_not_pickled(tmp_path: Path) -> None:
    for head in ("home", "pooled"):
        model = lw.pool(build("llama"), head=head)
        with pytest.raises(lw.InputError, match=r"cannot be pickled.*lw\.restore\(model\) first"):
            torch.save(model, tmp_path / "model.pt")
        torch.save(lw.restore(model), tmp_path / "model.pt")
        copy.deepcopy(lw.pool(model, head=head))


# -- models around a decoder -------------------------------------------------------------------------


class TwoModels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        self.decoder = build("llama", torch.float32)
        self.encoder = BertModel(BertConfig(**sizes, num_attention_heads=2)).eval()

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(ids).logits.sum() + self.encoder(ids).last_hidden_state.square().sum()


def test_other_models_beside_the_decoder_stay_as_they_are() -> None:
    model, ids = TwoModels(), data().ids[None, :9]
    config = model.encoder.config
    want, alone = model(ids), model.encoder(ids).last_hidden_state
    lw.pool(model)
    assert model.encoder.config is config
    assert model.encoder(ids).last_hidden_state.equal(alone)
    assert worst(model(ids), want) < 1e-5
    lw.restore(model)
    assert model.encoder(ids).last_hidden_state.equal(alone)
    assert worst(model(ids), want) < 1e-6


def with_images() -> tuple[Any, dict[str, Tensor]]:
    """A Qwen3.5 with a vision tower, and a row of text around four image tokens."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "num_position_embeddings": 64, "spatial_merge_size": 2}
    text = build("qwen3_5").config.to_dict()
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision, **tokens)).double()
    ids = torch.randint(80, (1, 12 + 5 * (dist.is_initialized() and dist.get_rank())))
    ids[0, 2], ids[0, 3:7] = 92, 90
    images = {"pixel_values": torch.randn(16, 96).double(), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return model, {"input_ids": ids, "labels": ids, "mm_token_type_ids": (ids == 90).int(), **images}


def multimodal() -> None:
    model, given = with_images()
    with exact(torch.float64, "qwen3_5"):
        want = model(**given).loss
        tower = model.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"])
        lw.pool(model, layout="zigzag")
        assert model.model.visual.config._attn_implementation != "longweave"
        if dist.get_rank():  # alone, on its rank
            again = model.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"])
            assert again.pooler_output.equal(tower.pooler_output)
        loss = model(**given).loss
        loss.backward()
        assert worst(loss, want) < 1e-9
        assert model.model.visual.patch_embed.proj.weight.grad.abs().max() > 0
        lw.restore(model)
        assert worst(model(**given).loss, want) < 1e-9


def test_a_vision_tower_runs_on_its_rank(ranks: Ranks) -> None:
    ranks.run(multimodal, size=2)


def several_columns() -> None:
    """A forward put in the place of the head's returns whatever it likes of every token: all of it comes home."""
    model = lw.pool(build("llama"), head="pooled", layout="zigzag")

    def forward(self: Any, *args: Any, labels: Any = None, shift_labels: Any = None, **kwargs: Any) -> ModelOutput:
        kwargs = {name: x for name, x in kwargs.items() if name not in ("return_dict", "num_items_in_batch")}
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        log_p = torch.log_softmax(self.lm_head(hidden), -1)
        found = log_p.gather(-1, shift_labels.clamp(min=0)[..., None])[..., 0]
        best = log_p.argmax(-1)
        return ModelOutput(loss=found.sum(), log_probs=found, best=best, hit=best == shift_labels, two=log_p[..., :2])

    plain = build("llama")
    given, keep = rows("right", dist.get_rank(), dist.get_world_size())
    model.forward = MethodType(forward, model)
    with exact(torch.float64, "llama"):
        out = model(**given)
        want = torch.log_softmax(plain(**given).logits, -1)[:, :-1]
    keep = keep[:, :-1] & keep[:, 1:]
    assert out.best[keep].equal(want.argmax(-1)[keep])
    assert out.hit[keep].equal((want.argmax(-1) == given["labels"][:, 1:])[keep])
    assert out.two.shape == (*keep.shape, 2)
    assert worst(out.two[keep], want[..., :2][keep]) < 1e-9


def test_whatever_a_head_returns_comes_home(ranks: Ranks) -> None:
    ranks.run(several_columns, size=2)


def in_a_group_of_one() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))
    model = lw.pool(build("llama", torch.float32), mesh["cp"])
    with pytest.warns(UserWarning, match="nothing is shared"):
        model(input_ids=data().ids[None, :9])


def test_a_group_of_one_is_noticed(ranks: Ranks) -> None:
    ranks.run(in_a_group_of_one, size=2)


def test_processes_that_nobody_joined_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="trains alone"):
        lw.pool(build("llama", torch.float32))(input_ids=data().ids[None, :9])


def test_what_a_pooled_head_has_not() -> None:
    ids = data().ids[None, :9]
    with pytest.raises(AttributeError, match="log_probs and no logits"):
        _ = lw.pool(build("llama"), head="pooled")(input_ids=ids, labels=ids).logits
    with pytest.raises(lw.InputError, match="output_entropy"):
        lw.pool(build("llama"))(input_ids=ids, labels=ids, output_entropy=True)
    model = lw.pool(build("llama"), head="pooled")
    with pytest.warns(UserWarning, match="called by itself"):
        model.model(input_ids=ids)


def one_rank_is_wrong(how: str, head: str) -> None:
    """What only one rank does wrong is raised there, and named on the others, before anything is sent."""
    model = lw.pool(build("llama", torch.float32), head=head, wait=5)
    given, _ = rows("right", dist.get_rank(), dist.get_world_size())
    model(**given).loss.backward()
    wrong = dist.get_rank() == 1
    if wrong and how == "ids":
        given["input_ids"][0, 0] = VOCAB
    elif wrong and how == "labels":
        given["labels"][0, 1] = VOCAB + 3
    elif wrong and how == "floats":
        given["input_ids"] = given["input_ids"].float()
    elif wrong and how == "dtype":
        model.bfloat16()
    elif how == "frozen":  # as many, but others
        model.model.layers[dist.get_rank()].requires_grad_(False)
    with pytest.raises(lw.InputError if wrong and how in ("ids", "labels", "floats") else lw.GroupError) as raised:
        model(**given)
    text = {"ids": "input_ids holds 97", "labels": "labels holds 100", "floats": "torch.float32"}
    assert text.get(how, "other weights") in str(raised.value)


@pytest.mark.parametrize("how", ["ids", "labels", "floats", "dtype", "frozen"])
def test_a_wrong_rank_is_named(ranks: Ranks, how: str) -> None:
    ranks.run(one_rank_is_wrong, how, "pooled" if how in ("labels", "dtype") else "home", size=2)
