"""lw.parallelize and lw.restore: what they change, refuse and leave behind."""

import copy
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from families import CU, FAMILIES, Expected, build, data, exact, one_process
from reference import worst
from test_families import check, expected
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import longweave as lw
from longweave.launch import Ranks
from longweave.models import rebatch, register, unbatch, unregister


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that a module carries except tensors: attributes, hooks, configs."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                seen[f"{name}.{key}"] = value if not isinstance(value, dict) else dict(value)
            if hasattr(value, "_attn_implementation"):
                seen[f"{name}.{key}.__dict__"] = dict(vars(value))
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_restore_leaves_no_trace(family: str) -> None:
    model = build(family, torch.float32)
    model.gradient_checkpointing_enable()
    config, before = model.config, snapshot(model)
    ids = data().ids[None, :9]
    torch.manual_seed(0)
    want = model(input_ids=ids, use_cache=False).logits
    assert lw.parallelize(model, None) is model
    assert model.config is not config
    assert config._attn_implementation == "eager"
    model(**lw.shard_batch(ids).inputs)
    assert lw.restore(model) is model
    after = snapshot(model)
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key] and before[key] != after[key]] == []
    assert model.config is config
    assert model(input_ids=ids, use_cache=False).logits.equal(want)
    lw.restore(lw.parallelize(model))


def test_one_process_without_a_group_is_the_model_itself() -> None:
    model = build("llama")
    full = data()
    want = expected("llama")
    lw.parallelize(model)
    batch = lw.shard_batch(full.ids, CU, labels=full.labels)
    with exact(torch.float64, "llama"):
        assert worst(batch.unshard(model(**batch.inputs).logits)[0], want.logits) < 1e-9


def test_configs_changed_meanwhile_stay_changed() -> None:
    model = build("qwen3")
    config = model.config
    lw.parallelize(model)
    model.config.note = "kept"
    assert not hasattr(config, "note")
    lw.restore(model)
    assert model.config is config
    assert config.note == "kept"
    assert config._attn_implementation == "eager"


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    model = lw.parallelize(build("qwen3_next", torch.float32))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    batch = lw.shard_batch(data().ids, CU)
    assert model(**batch.inputs).logits.abs().max() > 0.1
    assert other(**batch.inputs).logits.abs().max() == 0
    lw.restore(other)
    assert other.config._attn_implementation == "eager"
    assert model(**batch.inputs).logits.abs().max() > 0.1


# -- refusals --------------------------------------------------------------------------------------


class Stranger(nn.Module):
    """Mixes tokens in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, hidden_states: Tensor, **kwargs: object) -> tuple[Tensor, None]:
        return self.inner(hidden_states.cumsum(1)), None


class Backwards(nn.Sequential):
    """A container with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(1))


def gathered(module: nn.Module, pack: lw.Pack, hidden_states: Tensor, **kwargs: object) -> tuple[Tensor, None]:
    """The stranger on the gathered sequence, one document at a time."""

    def run(x: Tensor) -> Tensor:
        parts = [x[a:b].cumsum(0) for a, b in pairwise(CU)]
        return torch.cat(parts)

    mixed = lw.gather_recompute(run, unbatch(hidden_states, pack), pack)
    return rebatch(module.inner(mixed), pack), None


def with_stranger() -> nn.Module:
    model = build("llama")
    model.model.layers[1].self_attn = Stranger().double()
    return model


def test_unknown_modules_are_named_and_refused() -> None:
    model = with_stranger()
    before = snapshot(model)
    with pytest.raises(lw.InputError, match=r"model\.layers\.1\.self_attn is a test_parallelize\.Stranger"):
        lw.parallelize(model)
    assert before.keys() == snapshot(model).keys()
    model = build("llama")
    model.model.layers[0].mlp = nn.Sequential(nn.Linear(32, 32), nn.Conv1d(32, 32, 3))
    with pytest.raises(lw.InputError, match=r"layers\.0\.mlp\.1 is a .*Conv1d"):
        lw.parallelize(model)
    model.model.layers[0].mlp = Backwards(nn.Linear(32, 32))
    with pytest.raises(lw.InputError, match=r"layers\.0\.mlp is a .*Backwards"):
        lw.parallelize(model)
    with pytest.raises(lw.InputError, match="MultiheadAttention"):
        lw.parallelize(nn.MultiheadAttention(8, 2))
    with pytest.raises(lw.InputError, match=r"a torch\.nn\.Module"):
        lw.parallelize("model")
    with pytest.raises(lw.InputError, match="role is 'wise'"):
        register(Stranger, "wise")
    with pytest.raises(lw.InputError, match="class of modules"):
        register(with_stranger, "tokenwise")


def test_the_refusal_lists_every_class_and_the_lines_that_mend_it() -> None:
    class Inner(nn.Module):
        pass

    model = build("llama")
    model.model.layers[0].mlp = Backwards(nn.Linear(32, 32), Inner(), Stranger())
    model.model.layers[1].mlp = Stranger()
    model.lm_head = nn.Sequential(model.lm_head, nn.Conv1d(8, 8, 3))
    with pytest.raises(lw.InputError) as caught:
        lw.parallelize(model)
    text = str(caught.value)
    for role in ("tokenwise", "layer", "model", "attention"):
        assert f'"{role}"' in text
    assert "an adapter" in text
    assert text.count("Stranger") == 3  # where it is, its import and its line, once each
    lines = [line.strip() for line in text.splitlines()]
    pasted = [line for line in lines if line.startswith(("import ", "from ", "longweave.models.register("))]
    assert len(pasted) == 1 + 3 + 4
    try:
        exec("\n".join(pasted), {"model": model, "ROLE": "tokenwise"})
        lw.restore(lw.parallelize(model))
    finally:
        for cls in (Backwards, Inner, Stranger, nn.Conv1d):
            unregister(cls)
    with pytest.raises(lw.InputError, match="Inner"):
        lw.parallelize(model)


def test_a_file_that_imports_longweave_is_no_role() -> None:
    """Its modules may mix tokens all the same, as Stranger in this file does."""
    with pytest.raises(lw.InputError, match=r"0 is a test_parallelize\.Stranger"):
        lw.parallelize(nn.Sequential(Stranger(), nn.Linear(32, 32)))
    with pytest.raises(lw.InputError, match=r"the model is a test_parallelize\.PlainAttention"):
        lw.parallelize(PlainAttention())
    register(PlainAttention, "layer")
    try:
        lw.restore(lw.parallelize(PlainAttention()))
    finally:
        unregister(PlainAttention)


def strangers() -> None:
    register(Stranger, gathered)
    torch.manual_seed(5)
    model = with_stranger()
    full = data()
    want = one_process(model, "llama", full)
    lw.parallelize(model)
    batch = lw.shard_batch(full.ids, CU, labels=full.labels)
    with exact(torch.float64, "llama"):
        out = model(**batch.inputs)
        loss = batch.loss(out.logits)
        loss.backward()
    unregister(Stranger)
    check(model, batch, out.logits, loss, want)


def test_a_registered_adapter_serves(ranks: Ranks) -> None:
    ranks.run(strangers, size=2)


def test_sequence_classifiers_and_vision_are_refused() -> None:
    from transformers.models.llama import LlamaConfig, LlamaForSequenceClassification

    small = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    with pytest.raises(lw.InputError, match="LlamaForSequenceClassification"):
        lw.parallelize(LlamaForSequenceClassification(small))
    changing = build("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(lw.InputError, match="longest position"):
        lw.parallelize(changing)


def test_calls_that_a_parallel_model_refuses() -> None:
    model = lw.parallelize(build("qwen3_moe"))
    ids = data().ids
    batch = lw.shard_batch(ids, CU)
    cases: list[tuple[dict, str]] = [
        ({"use_cache": True}, r"lw\.restore"),
        ({"attention_mask": torch.ones(1, CU[-1])}, r"lw\.shard_batch\(input_ids, attention_mask"),
        ({"output_attentions": True}, "attention weights"),
        ({"labels": ids[None]}, "would shift them"),
        ({"input_ids": ids[None, :5]}, r"shape \(1, 5\)"),
        ({"longweave": 3}, "belongs to"),
    ]
    for change, message in cases:
        with pytest.raises(lw.InputError, match=message):
            model(**{**batch.inputs, **change})
    with pytest.raises(lw.InputError, match=r"without a batch.*lw\.restore"):
        model(input_ids=ids[None])
    with pytest.raises(lw.InputError, match=r"lw\.restore"):
        model.generate(ids[None, :4], max_new_tokens=2)
    with pytest.raises(lw.InputError, match="parallel or pooled already"):
        lw.parallelize(model)
    with pytest.raises(lw.InputError, match="parallel or pooled already"):
        lw.parallelize(model.model)
    with pytest.raises(lw.InputError, match="neither parallel nor pooled"):
        lw.restore(build("llama"))
    with pytest.raises(lw.BackendError, match="flex"):
        model(**lw.shard_batch(ids, CU, backend="flex").inputs)
    lw.restore(model)
    assert model.generate(ids[None, :4], max_new_tokens=2, do_sample=False).shape == (1, 6)
    dropped = lw.parallelize(build("llama", attention_dropout=0.1))
    with pytest.raises(lw.InputError, match="dropout"):
        dropped(**batch.inputs)
    dropped.eval()(**batch.inputs)


def other_groups() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    with pytest.raises(lw.InputError, match=r'mesh\["cp"\]'):
        lw.parallelize(build("llama"), mesh)
    model = lw.parallelize(build("llama"), mesh["cp"])
    with pytest.raises(lw.GroupError, match="another process group"):
        model(**lw.shard_batch(data().ids, CU, mesh["dp"]).inputs)
    with pytest.raises(lw.BackendError, match="flex"):
        model(**lw.shard_batch(data().ids, CU, mesh["cp"], backend="flex").inputs)


def test_groups_must_be_the_same(ranks: Ranks) -> None:
    ranks.run(other_groups, size=2)


# -- the way of the pack -----------------------------------------------------------------------------


def forget(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A model that hands no keyword arguments of ours to its layers."""
    kwargs.pop("longweave", None)
    return args, kwargs


def two_batches_at_once(family: str, reentrant: bool | None, want: list[Expected]) -> None:
    """Forward of two batches before backward of either: each recomputation needs its own batch."""
    model = build(family)
    lw.parallelize(model)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for layer in model.model.layers:
        layer.register_forward_pre_hook(forget, with_kwargs=True)
    losses = []
    with exact(torch.float64, family):
        for seed in (1, 2):
            full = data(seed)
            layout = lw.Layout.zigzag(CU, dist.get_world_size()) if seed == 1 else "contiguous"
            batch = lw.shard_batch(full.ids, CU, labels=full.labels, layout=layout)
            losses.append(batch.loss(model(**batch.inputs).logits))
        for loss in losses:
            loss.backward()
    lw.reduce_gradients(model)
    for name, p in model.named_parameters():
        assert worst(p.grad, want[0].grads[name] + want[1].grads[name]) < 1e-9, name


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_layers_without_keyword_arguments_find_their_batch(ranks: Ranks, family: str, reentrant: bool | None) -> None:
    want = [one_process(build(family), family, data(seed)) for seed in (1, 2)]
    ranks.run(two_batches_at_once, family, reentrant, want, size=2)


# -- experts -------------------------------------------------------------------------------------------


def balancing(family: str, want_loss: Tensor, want_aux: Tensor, want_grads: dict[str, Tensor]) -> None:
    model = lw.parallelize(build(family))
    full = data()
    batch = lw.shard_batch(full.ids, CU, labels=full.labels)
    with exact(torch.float64, family):
        out = model(**batch.inputs, output_router_logits=True)
        out.loss.backward()
    assert worst(batch.reduce_loss(out.aux_loss), want_aux) < 1e-6
    assert worst(batch.reduce_loss(out.loss), want_loss) < 1e-6
    lw.reduce_gradients(model)
    for name, p in model.named_parameters():
        assert worst(p.grad, want_grads[name]) < 1e-6, name
    with pytest.raises(lw.InputError, match="return_dict"):
        model(**batch.inputs, output_router_logits=True, return_dict=False)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_the_balancing_loss_is_that_of_all_tokens(ranks: Ranks, family: str) -> None:
    """One document, so that a single call of the plain model is the reference, balancing loss included."""
    model, full = build(family), data()
    module = sys.modules[type(model).__module__]
    model.router_aux_loss_coef = 1.0
    want = one_process(model, family, full)
    with exact(torch.float64, family):
        routed = [
            model(input_ids=full.ids[None, a:b], use_cache=False, output_router_logits=True).router_logits
            for a, b in pairwise(CU)
        ]
        layers = tuple(torch.cat([doc[i] for doc in routed]) for i in range(len(routed[0])))
        aux = module.load_balancing_loss_func(layers, model.num_experts, model.num_experts_per_tok)
        (aux * build(family).router_aux_loss_coef).backward()
    grads = {n: want.grads[n] + (0 if p.grad is None else p.grad) for n, p in model.named_parameters()}
    loss = want.loss + build(family).router_aux_loss_coef * aux.detach()
    ranks.run(balancing, family, loss, aux.detach(), grads, size=2)


# -- precision, other libraries ------------------------------------------------------------------------


def autocast(family: str) -> None:
    """No worse than twice the error of one process under autocast."""
    model = build(family, torch.float32)
    full = data()
    want = one_process(model, family, full)
    with torch.autocast("cpu", torch.bfloat16):
        rough = one_process(model, family, full)
    lw.parallelize(model)
    batch = lw.shard_batch(full.ids, CU, labels=full.labels)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**batch.inputs)
        loss = batch.loss(out.logits)
    loss.backward()
    assert loss.dtype == torch.float32
    assert (batch.unshard(out.logits) - want.logits).norm() < 2 * (rough.logits - want.logits).norm()
    lw.reduce_gradients(model)
    ours, theirs = (
        sum(float((grads[name] - want.grads[name]).norm() ** 2) for name in grads)
        for grads in ({name: p.grad for name, p in model.named_parameters()}, rough.grads)
    )
    assert ours < 4 * theirs


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5", "kimi_linear"])
def test_autocast(ranks: Ranks, family: str) -> None:
    ranks.run(autocast, family, size=2)


def sharded() -> None:
    """FSDP2 first, parallelize afterwards; gradients by FSDP's own reduction."""
    model = build("qwen3_next")
    full, want = data(), one_process(model, "qwen3_next", data())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    lw.parallelize(model, mesh["cp"])
    batch = lw.shard_batch(full.ids, CU, mesh["cp"], labels=full.labels)
    with exact(torch.float64, "qwen3_next"):
        out = model(**batch.inputs)
        (batch.loss(out.logits) * lw.loss_scale(mesh)).backward()
    assert worst(batch.unshard(out.logits)[0], want.logits) < 1e-9
    for name, p in model.named_parameters():
        assert worst(p.grad.full_tensor(), want.grads[name]) < 1e-9, name
    with pytest.raises(lw.InputError, match="FSDP reduces"):
        lw.reduce_gradients(model, mesh["cp"])
    with pytest.raises(lw.InputError, match="DTensor"):
        batch.chunked_loss(torch.zeros(batch.pack.tokens, 32).double(), model.lm_head.weight)
    lw.restore(model)


def test_fsdp_before_parallelize(ranks: Ranks) -> None:
    ranks.run(sharded, size=2)


def with_lora(family: str) -> nn.Module:
    peft = pytest.importorskip("peft")
    # The wrapper takes its dtypes from the model, and B begins with 0: then A would have no gradient to compare.
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(build(family), config)
    torch.manual_seed(3)
    for name, p in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.2)
    return model.double()


def lora(family: str, want: Expected, checkpointing: bool) -> None:
    model = with_lora(family)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    before = snapshot(model)
    assert lw.parallelize(model) is model
    full = data()
    batch = lw.shard_batch(full.ids, CU, labels=full.labels)
    with exact(torch.float64, family):
        out = model(**batch.inputs)
        loss = batch.loss(out.logits)
        loss.backward()
    lw.reduce_gradients(model)
    assert worst(batch.unshard(out.logits)[0], want.logits) < 1e-9
    assert worst(batch.reduce_loss(loss), want.loss) < 1e-9
    assert worst(out.loss, loss) < 1e-5
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert any("lora_A" in name for name in trained)
    assert any("modules_to_save" in name for name in trained)
    for name, p in trained.items():
        assert worst(p.grad, want.grads[name]) < 1e-9, name
        assert want.grads[name].abs().max() > 1e-6, name
    lw.restore(model)
    after = snapshot(model)
    assert [key for key in before if before[key] is not after[key] and before[key] != after[key]] == []


@pytest.mark.parametrize(("family", "checkpointing"), [("llama", False), ("qwen3_5", True)])
def test_lora(ranks: Ranks, family: str, checkpointing: bool) -> None:
    want = one_process(with_lora(family), family, data())
    ranks.run(lora, family, want, checkpointing, size=2)


def test_activated_lora_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[3])
    with pytest.raises(lw.InputError, match="alora_invocation_tokens"):
        lw.parallelize(peft.get_peft_model(build("llama"), config))


# -- torch.compile -------------------------------------------------------------------------------------


def compiled() -> None:
    model = build("llama", torch.float32, num_hidden_layers=1)
    full, want = data(), one_process(model, "llama", data())
    lw.parallelize(model)
    batch = lw.shard_batch(full.ids, CU, labels=full.labels)
    out = torch.compile(model, backend="aot_eager")(**batch.inputs)
    loss = batch.loss(out.logits)
    loss.backward()
    check(model, batch, out.logits, loss, want)


def test_compile(ranks: Ranks) -> None:
    ranks.run(compiled, size=2)


def compiled_layers(family: str, most_graphs: int, settled_after: int) -> None:
    """Twelve packs of other sizes, documents and layouts: the first two compile, the rest runs."""
    torch._dynamo.reset()
    eager = lw.parallelize(build(family))
    model = copy.deepcopy(eager)
    graphs = [0]

    def counting(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs[0] += 1
        return aot_eager(module, inputs)

    for layer in model.model.layers:
        layer.compile(backend=counting)
    after = []
    try:
        for i in range(12):
            total = 30 + 7 * i
            ids = torch.randint(0, 97, (total,), generator=torch.Generator().manual_seed(i))
            batch = lw.shard_batch(ids, [0, 5 + i, total - 9, total], layout="contiguous" if i % 3 else "auto")
            want, got = (m(**batch.inputs).logits for m in (eager, model))
            assert worst(got, want) < 1e-12
            for logits in (want, got):
                batch.loss(logits).backward()
            after.append(graphs[0])
    finally:
        torch._dynamo.reset()
    for (name, p), other in zip(eager.named_parameters(), model.parameters(), strict=True):
        assert worst(other.grad, p.grad) < 1e-12, name
    assert 0 < graphs[0] <= most_graphs, after
    assert after[settled_after] == after[-1], after


@pytest.mark.parametrize(("family", "most_graphs"), [("llama", 3), ("qwen3_5", 24)])
def test_compiled_layers_serve_every_pack(ranks: Ranks, family: str, most_graphs: int) -> None:
    """Llama has one graph per layer, for all layers; around linear layers graphs break, so a hybrid has several."""
    ranks.run(compiled_layers, family, most_graphs, 2, size=2)


PLAIN = """
import sys
sys.modules["transformers"] = None  # importing it fails
import torch
from torch import nn
import longweave as lw
import longweave.models

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, pack):
        q, k, v = self.qkv(x).unflatten(-1, (2, 12)).chunk(3, -1)
        return lw.attention(q, k, v, pack).flatten(1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention, self.out = nn.Embedding(11, 8), Attention(), nn.Linear(8, 11)

    def forward(self, input_ids, longweave, **kwargs):
        x = self.embed(input_ids[0])
        return self.out(x + self.attention(x, longweave))

longweave.models.register(Attention, "layer")
longweave.models.register(Model, "layer")
model = lw.parallelize(Model())
batch = lw.shard_batch(torch.arange(9), [0, 4, 9])
batch.loss(model(**batch.inputs)).backward()
lw.reduce_gradients(model)
assert model.attention.qkv.weight.grad.abs().max() > 0
lw.restore(model)
"""


def test_plain_models_need_no_transformers() -> None:
    subprocess.run([sys.executable, "-c", PLAIN], check=True)
    lazy = "import sys, longweave.models.parallelize, longweave.models.batch; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", lazy], check=True)


class PlainAttention(nn.Module):
    """A plain model that calls lw.attention itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(97, 16), nn.Linear(16, 48), nn.Linear(16, 97)

    def forward(self, ids: Tensor, pack: lw.Pack | None = None) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (4, 12)).chunk(3, -1)
        if pack is None:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        else:
            mixed = lw.attention(q, k, v, pack)
        return self.out(x + mixed.flatten(1))


def plain() -> None:
    torch.manual_seed(0)
    model = PlainAttention().double()
    full = data()
    losses = [F.cross_entropy(model(full.ids[a:b])[:-1], full.ids[a + 1 : b], reduction="sum") for a, b in pairwise(CU)]
    valid = CU[-1] - len(CU) + 1
    grads = torch.autograd.grad(sum(losses) / valid, list(model.parameters()))
    batch = lw.shard_batch(full.ids, CU)
    loss = batch.loss(model(batch.input_ids, batch.pack))
    loss.backward()
    lw.reduce_gradients(model)
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert worst(p.grad, grad) < 1e-10


def test_a_plain_model_trains_as_in_one_process(ranks: Ranks) -> None:
    ranks.run(plain, size=3)
