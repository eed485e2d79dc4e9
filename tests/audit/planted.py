"""Steps with a fault each, on one rank, and the same steps without: what `lw.audit` must name, and must not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plain_transformers  # noqa: F401 - before models are made
import torch
import torch.distributed as dist
import torch.nn.functional as F
from families import CU, Data, build, data
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import longweave as lw
from longweave.linear.chains import Direction
from longweave.linear.conv import Halo
from longweave.models import adapters
from longweave.tools.audit import AuditedStep, AuditReport, OneProcess, StepResult, parallelized, recorded, trainer

Inputs = dict[str, Any]


def batch_of(given: Data | None = None) -> Inputs:
    given = given or data()
    return {"input_ids": given.ids, "cu_seqlens": CU, "labels": given.labels}


@contextmanager
def planted(owner: object, name: str, fault: object) -> Iterator[None]:
    true = getattr(owner, name)
    setattr(owner, name, fault)
    try:
        yield
    finally:
        setattr(owner, name, true)


# -- a parallel model ------------------------------------------------------------------------------------


def right(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> AuditReport:
    return lw.audit(parallelized(lw.parallelize(build(family, dtype)), **options), batch_of())


def own_loop(
    family: str = "llama",
    *,
    cu: list[int] | None = None,
    positions: bool = True,
    scale: float = 1.0,
    loss_of: Callable[[Any, Tensor, Inputs], Tensor] | None = None,
    reduce: Callable[[nn.Module], None] = lw.reduce_gradients,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> AuditReport:
    """A loop that a user would write, with one thing wrong."""
    model = lw.parallelize(build(family, dtype))

    def step(inputs: Inputs) -> StepResult:
        given = lw.shard_batch(inputs["input_ids"], cu or inputs["cu_seqlens"], labels=inputs["labels"], **options)
        if not positions:
            n = given.inputs["position_ids"].shape[1]
            given.inputs["position_ids"] = torch.arange(n)[None]
        pack = given.pack
        with recorded(model, max(pack.tokens, 1), pack.tokens) as modules:
            logits = model(**given.inputs).logits
        loss = given.loss(logits) if loss_of is None else loss_of(given, logits[0], inputs)
        (scale * loss).backward()
        reduce(model)
        tokens = pack.layout.indices(pack.rank)
        return StepResult(loss.detach(), None, logits[0, : pack.tokens], tokens, modules)

    return lw.audit(step, batch_of(), model=model, loss="sum")


def right_without_a_reference() -> AuditReport:
    made = parallelized(lw.parallelize(build("llama", torch.float32)))
    return lw.audit(AuditedStep(made.run, made.model, loss="sum"), batch_of())


def documents_without_a_reference() -> AuditReport:
    made = parallelized(lw.parallelize(build("llama", torch.float32)))
    one = AuditedStep(lambda inputs: made.run({**inputs, "cu_seqlens": [0, CU[-1]]}), loss="sum")
    return lw.audit(one, batch_of())


def right_pooled(wrapper: str, **options: Any) -> AuditReport:
    model = lw.pool(build("qwen3", torch.float32), layout="zigzag", **options)
    return lw.audit(DistributedDataParallel(model) if wrapper == "ddp" else model, batch_of())


def pooled_without_documents_apart() -> AuditReport:
    """A mask that lets tokens see their whole document, in a model that became causal only later."""
    model = build("llama", torch.float32)
    attentions = [layer.self_attn for layer in model.model.layers]
    for attention in attentions:
        attention.is_causal = False
    lw.pool(model, mask="full")
    for attention in attentions:
        attention.is_causal = True
    return lw.audit(model, batch_of())


def with_trainer(pool: bool = True, collated: bool = False, **changes: Any) -> AuditReport:
    from trainer_runs import arguments, as_launched, tokenizer
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    with as_launched() as folder:
        model = build("llama", torch.float32)
        made = Trainer(lw.pool(model) if pool else model, TrainingArguments(**arguments(folder, **changes)))
        collate = DataCollatorForSeq2Seq(tokenizer()) if collated else None
        report = lw.audit(trainer(made, collate=collate) if collated else made, batch_of())
        assert made.model_wrapped is made.model  # the Trainer is as before
        assert all(p.grad is None for p in made.model.parameters())
        return report


def means_in_a_trainer() -> AuditReport:
    return with_trainer(average_tokens_across_devices=False)


def gradients_times_ranks() -> AuditReport:
    return own_loop(scale=dist.get_world_size())


def gradients_times_ranks_in_bf16() -> AuditReport:
    return own_loop(scale=dist.get_world_size(), dtype=torch.bfloat16)


def embedding_summed_twice() -> AuditReport:
    def reduce(model: nn.Module) -> None:
        lw.reduce_gradients(model)
        lw.reduce_gradients([model.model.embed_tokens.weight])

    return own_loop(reduce=reduce)


def gradients_not_reduced() -> AuditReport:
    return own_loop(reduce=lambda model: None)


def one_forgotten_in_the_reduction() -> AuditReport:
    return own_loop(reduce=lambda model: lw.reduce_gradients([p for p in model.parameters() if p.ndim > 1]))


def labels_shifted_in_the_shard() -> AuditReport:
    def loss_of(given: Any, logits: Tensor, inputs: Inputs) -> Tensor:
        n, pack = given.pack.tokens, given.pack
        labels = pack.shard(inputs["labels"])
        starts = torch.zeros(CU[-1], dtype=torch.bool)
        starts[CU[:-1]] = True
        labels = torch.where(pack.shard(starts), -100, labels)
        total = F.cross_entropy(logits[: n - 1], labels[1:n], reduction="sum", ignore_index=-100)
        return total / max(given.num_valid, 1)

    return own_loop(loss_of=loss_of, layout="contiguous")


def labels_across_documents() -> AuditReport:
    def loss_of(given: Any, logits: Tensor, inputs: Inputs) -> Tensor:
        targets = torch.cat([inputs["labels"][1:], torch.tensor([-100])])
        local = given.pack.shard(targets)
        total = F.cross_entropy(logits[: len(local)], local, reduction="sum", ignore_index=-100)
        return total / max(int((targets != -100).sum()), 1)

    return own_loop(loss_of=loss_of)


def local_positions() -> AuditReport:
    return own_loop(positions=False, layout="contiguous")


def local_positions_in_zigzag() -> AuditReport:
    return own_loop(positions=False, layout="zigzag")


def one_document_of_all() -> AuditReport:
    return own_loop(cu=[0, CU[-1]])


def no_causal_mask() -> AuditReport:
    return own_loop(mask="full")


def means_of_ranks() -> AuditReport:
    """Each rank divides by its own labels, and the mean over ranks is taken."""

    def loss_of(given: Any, logits: Tensor, inputs: Inputs) -> Tensor:
        own = max(int((given.targets != -100).sum()), 1)
        return given.loss(logits[None], num_items=own) / given.pack.world_size

    layout = lw.Layout.from_spans(CU[-1], [[(0, 20)], [(20, CU[-1])], *[[]] * (dist.get_world_size() - 2)])
    return own_loop(loss_of=loss_of, layout=layout)


def loss_of_all_on_every_rank() -> AuditReport:
    """The loss is reduced before backward, so that it counts once for each rank, and so do gradients."""

    def loss_of(given: Any, logits: Tensor, inputs: Inputs) -> Tensor:
        part = given.loss(logits[None])
        return part * given.pack.world_size

    return own_loop(loss_of=loss_of)


def without(*dropped: str) -> Callable[..., Any]:
    def attention(*args: Any, **kwargs: Any) -> Any:
        return lw.attention(*args, **{**kwargs, **dict.fromkeys(dropped)})

    return attention


def softcap_dropped() -> AuditReport:
    with planted(adapters, "attention", without("softcap")):
        return own_loop("gemma2")


def sinks_dropped() -> AuditReport:
    with planted(adapters, "attention", without("sinks")):
        return own_loop("gpt_oss")


def window_dropped() -> AuditReport:
    with planted(adapters, "attention", without("window")):
        return own_loop("mistral")


def window_too_short() -> AuditReport:
    def attention(*args: Any, **kwargs: Any) -> Any:
        return lw.attention(*args, **{**kwargs, "window": 3})

    with planted(adapters, "attention", attention):
        return own_loop("mistral")


def scale_dropped() -> AuditReport:
    with planted(adapters, "attention", without("scale")):
        return own_loop("gemma2")


def sinks_without_gradient() -> AuditReport:
    def attention(*args: Any, **kwargs: Any) -> Any:
        return lw.attention(*args, **{**kwargs, "sinks": kwargs["sinks"].detach()})

    with planted(adapters, "attention", attention):
        return own_loop("gpt_oss")


def halo_gradients_lost() -> AuditReport:
    with planted(Halo, "add_home", lambda self, d_halos, dxs: None):
        return own_loop("qwen3_5", layout="zigzag")


def states_lost() -> AuditReport:
    """What a linear layer knows of the ranks before is zero; softmax layers still see everything."""
    true = Direction.walk

    def walk(*args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros_like(true(*args, **kwargs))

    with planted(Direction, "walk", walk):
        return own_loop("qwen3_5", layout="contiguous", method="affine")


def other_weights() -> AuditReport:
    model = build("llama", torch.float32)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    return lw.audit(parallelized(lw.parallelize(model)), batch_of())


def other_batch() -> AuditReport:
    model = lw.parallelize(build("llama", torch.float32))
    return lw.audit(model, batch_of(data(seed=int(dist.get_rank() == 1))))


def dropout() -> AuditReport:
    model = build("llama", torch.float32, attention_dropout=0.0)
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: F.dropout(out, 0.1))
    return lw.audit(parallelized(lw.parallelize(model)), batch_of())


def raises_on_one_rank() -> AuditReport:
    def step(inputs: Inputs) -> float:
        if dist.get_rank() == 1:
            raise ValueError("no such thing")
        return 1.0

    return lw.audit(step, batch_of())


# -- steps that do not use longweave ---------------------------------------------------------------------


class Packed(nn.Module):
    """A small transformer over a packed row, with PyTorch's own attention."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.tokens, self.places = nn.Embedding(97, dim), nn.Embedding(128, dim)
        self.qkv, self.out, self.head = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, 97)
        for p in self.parameters():
            nn.init.normal_(p, std=0.4)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.places(positions)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(0, 1) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.head(torch.tanh(x + self.out(y.transpose(0, 1).flatten(1))))


def ddp(scale: float | None, masked: bool = True, detail: str = "all") -> AuditReport:
    """DDP: every rank packs some documents into one row. Local sum over global count, so DDP's mean needs × P."""
    model = Packed()
    outer = DistributedDataParallel(model)
    rank, world = dist.get_rank(), dist.get_world_size()

    def step(inputs: Inputs) -> Any:
        spans = [*pairwise(inputs["cu_seqlens"])][rank::world]
        tokens = torch.cat([torch.arange(a, b) for a, b in spans])
        document = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(spans)])
        positions = torch.cat([torch.arange(b - a) for a, b in spans])
        mask = (document[:, None] == document[None]).tril() if masked else None
        targets = torch.full_like(inputs["labels"], -100)
        for a, b in pairwise(inputs["cu_seqlens"]):
            targets[a : b - 1] = inputs["labels"][a + 1 : b]
        logits = outer(inputs["input_ids"][tokens], positions, mask)
        total = F.cross_entropy(logits, targets[tokens], ignore_index=-100, reduction="sum")
        loss = total / max(int((targets != -100).sum()), 1)
        (loss * (scale or world)).backward()
        if detail == "loss":
            return loss.detach()
        return loss.detach(), None, logits, tokens

    return lw.audit(
        step, batch_of(), model=outer, loss="sum", reference=OneProcess(Packed(), lambda m, ids, at: m(ids, at))
    )


def docs_example() -> AuditReport:
    """The step in docs/audit.md, with a model that has no document mask."""
    text = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    code = text.partition("<!-- example: own step -->\n```python\n")[2].partition("```")[0]
    rank, world = dist.get_rank(), dist.get_world_size()

    def documents_of_this_rank(inputs: Inputs) -> SimpleNamespace:
        spans = [*pairwise(inputs["cu_seqlens"])][rank::world]
        targets = torch.full_like(inputs["labels"], -100)
        for a, b in pairwise(inputs["cu_seqlens"]):
            targets[a : b - 1] = inputs["labels"][a + 1 : b]
        tokens = torch.cat([torch.arange(a, b) for a, b in spans])
        positions = torch.cat([torch.arange(b - a) for a, b in spans])
        return SimpleNamespace(
            tokens=tokens,
            positions=positions,
            targets=targets[tokens],
            targets_of_all_ranks=max(int((targets != -100).sum()), 1),
        )

    names = {"documents_of_this_rank": documents_of_this_rank, "model": DistributedDataParallel(Packed())}
    names |= {"lw": lw, "F": F, "dist": dist, "OneProcess": OneProcess, "batch": batch_of(), "copy": Packed()}
    names |= {"forward": lambda model, ids, positions: model(ids, positions)}
    exec(code, names)
    return names["report"]


def ddp_right() -> AuditReport:
    return ddp(None)


def ddp_right_by_loss_alone() -> AuditReport:
    return ddp(None, detail="loss")


def ddp_wrong_scale() -> AuditReport:
    return ddp(1.0)


def ddp_wrong_scale_by_loss_alone() -> AuditReport:
    return ddp(1.0, detail="loss")


def sdpa_without_documents() -> AuditReport:
    return ddp(None, masked=False)


def sdpa_without_documents_by_loss_alone() -> AuditReport:
    return ddp(None, masked=False, detail="loss")


def nan_in_a_weight() -> AuditReport:
    """Of one token id. It stands in some documents, and all that comes after it in these is NaN."""
    model, alone = Packed(), Packed()
    ids, cu = batch_of()["input_ids"].clone(), CU
    ids[ids == 96] = 95
    ids[[cu[2] + 1, cu[4] + 30]] = 96
    with torch.no_grad():
        model.tokens.weight[96] = alone.tokens.weight[96] = nan
    spans = [*pairwise(cu)][dist.get_rank() :: dist.get_world_size()]

    def step(inputs: Inputs) -> Any:
        parts = [model(inputs["input_ids"][a:b], torch.arange(b - a)) for a, b in spans]
        loss = sum(
            F.cross_entropy(x, inputs["labels"][a:b], reduction="sum") for x, (a, b) in zip(parts, spans, strict=True)
        )
        loss.backward()
        return loss.detach(), None, torch.cat(parts), torch.cat([torch.arange(a, b) for a, b in spans])

    reference = OneProcess(alone, lambda m, ids, at: m(ids, at))
    return lw.audit(step, {"input_ids": ids, "cu_seqlens": cu}, model=model, loss="sum", reference=reference)


def nan_of_a_module() -> AuditReport:
    """On one rank, in its first token."""
    model = lw.parallelize(build("llama", torch.float32))

    def poison(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        first = torch.arange(out.shape[1])[None, :, None] == 0
        return torch.where(first, nan, out) if dist.get_rank() == 1 else out

    model.model.layers[1].mlp.register_forward_hook(poison)
    made = parallelized(model, layout="contiguous")
    return lw.audit(replace(made, reference=OneProcess(build("llama", torch.float32))), batch_of())


def mean_of_no_labels() -> AuditReport:
    """Each rank divides by its own labels, and rank 1 has none."""

    def loss_of(given: Any, logits: Tensor, inputs: Inputs) -> Tensor:
        return given.loss(logits[None]) * given.num_valid / (0 if dist.get_rank() == 1 else 1)

    return own_loop(loss_of=loss_of)


def nan_in_gradients() -> AuditReport:
    """What comes out is finite; the derivative of a root at 0 is not."""

    def step_of(model: Packed) -> OneProcess:
        return OneProcess(model, lambda m, ids, at: m(ids, at) + (0 * m.tokens.weight.sum()).sqrt())

    return lw.audit(step_of(Packed()), batch_of(), reference=step_of(Packed()))


def masked_logits() -> AuditReport:
    """Right: what the vocabulary does not have is −inf."""

    def step_of(model: Packed) -> OneProcess:
        return OneProcess(model, lambda m, ids, at: m(ids, at).masked_fill(torch.arange(97) == 96, -inf))

    batch = batch_of()
    batch["input_ids"] = batch["labels"] = batch["input_ids"] % 96
    return lw.audit(step_of(Packed()), batch, reference=step_of(Packed()))


class Routed(nn.Module):
    """Two experts; documents of an even length go to the one, the others to the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(97, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 97, bias=bias) for bias in (False, True))

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.experts[len(ids) % 2](self.tokens(ids))


def one_expert_on_each_rank() -> AuditReport:
    """On two ranks each has the documents of one expert: the other's parameters have no gradient there."""
    model = Routed()

    def step(inputs: Inputs) -> Any:
        spans = [(a, b) for a, b in pairwise(inputs["cu_seqlens"]) if (b - a) % 2 == dist.get_rank()]
        targets = torch.full_like(inputs["labels"], -100)
        for a, b in pairwise(inputs["cu_seqlens"]):
            targets[a : b - 1] = inputs["labels"][a + 1 : b]
        logits = torch.cat([model(inputs["input_ids"][a:b]) for a, b in spans])
        tokens = torch.cat([torch.arange(a, b) for a, b in spans])
        total = F.cross_entropy(logits, targets[tokens], ignore_index=-100, reduction="sum")
        loss = total / max(int((targets != -100).sum()), 1)
        loss.backward()
        assert any(p.grad is None for p in model.parameters())
        return loss.detach(), None, logits, tokens

    reference = OneProcess(Routed(), lambda m, ids, at: m(ids))
    return lw.audit(step, batch_of(), model=model, loss="sum", gradients="sum", reference=reference)


def shards_alone(cut: bool = False) -> AuditReport:
    """Every rank runs an ordinary model on its own stretch of the sequence, as if it were all there is."""
    model = build("llama", torch.float32)
    rank, world = dist.get_rank(), dist.get_world_size()

    def step(inputs: Inputs) -> Any:
        total = CU[-1] // world * world if cut else CU[-1]
        borders = [total * r // world for r in range(world + 1)]
        own = range(borders[rank], borders[rank + 1])
        targets = torch.full_like(inputs["labels"], -100)
        for a, b in pairwise(inputs["cu_seqlens"]):
            targets[a : b - 1] = inputs["labels"][a + 1 : b]
        pieces = [(max(a, own[0]), min(b, own[-1] + 1)) for a, b in pairwise(CU)]
        logits = []
        for a, b in pieces:
            if b > a:
                at = torch.arange(a, b) - max(s for s in CU if s <= a)
                ones = torch.ones(1, b - a, dtype=torch.long)
                ids = inputs["input_ids"][None, a:b]
                logits.append(model(input_ids=ids, position_ids=at[None], attention_mask=ones).logits[0])
        found, tokens = torch.cat(logits), torch.arange(own[0], own[-1] + 1)
        loss = F.cross_entropy(found, targets[tokens], ignore_index=-100, reduction="sum")
        loss = loss / max(int((targets != -100).sum()), 1)
        loss.backward()
        lw.reduce_gradients(model)
        return loss.detach(), None, found, tokens

    return lw.audit(step, batch_of(), model=model, loss="sum")


def tail_cut_off() -> AuditReport:
    return shards_alone(cut=True)
