"""Steps of models that longweave runs, and of a Trainer, ready to be audited.

parallelized(model)   every rank its shard of the batch; losses add up, gradients are summed by lw.reduce_gradients
pooled(model)         every rank some documents as padded rows, as a loader would deal them; the mean over ranks
trainer(trainer)      likewise, through the Trainer's own training_step, on a copy of its model

All of them keep an unmodified copy of the model as the reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from longweave.comm.exchange import Group, is_sharded, resolve
from longweave.errors import InputError
from longweave.models.batch import shard_batch
from longweave.models.changes import is_changed
from longweave.models.loss import reduce_gradients
from longweave.models.pooled_decoder import POOLING
from longweave.models.running import model_tokens
from longweave.tools.audit.record import recorded
from longweave.tools.audit.references import Forward, OneProcess, hugging_face, unmodified_copy
from longweave.tools.audit.steps import IGNORE, AuditedStep, Inputs, StepFunction, StepResult


def subject_of(step: Any, group: Group, reference: StepFunction | None) -> AuditedStep | None:
    """A model or a Trainer that was given in the place of a step; None if it is a function."""
    if isinstance(step, AuditedStep):
        return step
    if isinstance(step, nn.Module):
        if any(POOLING in vars(module) for module in step.modules()):
            return pooled(step, group, reference=reference)
        if is_changed(step):
            return parallelized(step, group, reference=reference)
        raise InputError(
            "the model is neither parallel nor pooled: call lw.parallelize or lw.pool first, or give your own step, a "
            "function of a batch, with lw.audit(step, batch, model=model)"
        )
    if hasattr(step, "training_step") and isinstance(getattr(step, "model", None), nn.Module):
        return trainer(step, reference=reference)
    return None


def reference_of(model: nn.Module, forward: Forward = hugging_face) -> OneProcess:
    return OneProcess(unmodified_copy(model), forward)


def _audited(
    run: StepFunction, model: nn.Module, source: nn.Module, reference: StepFunction | None, loss: str, gradients: str
) -> AuditedStep:
    made = reference_of(source) if reference is None else reference
    suspects = made.suspects() if isinstance(made, OneProcess) else {}
    return AuditedStep(run, model, made, loss, gradients, suspects)


def parallelized(
    model: nn.Module, group: Group = None, *, reference: StepFunction | None = None, **options: Any
) -> AuditedStep:
    """A model after `lw.parallelize`, also inside DDP. `options` go to `lw.shard_batch`, such as layout or strategy."""
    averages = isinstance(model, DistributedDataParallel)
    ranks = resolve(group).size

    def run(inputs: Inputs) -> StepResult:
        given = dict(options)
        if "position_ids" in inputs:
            given["position_ids"] = inputs["position_ids"]
        batch = shard_batch(inputs["input_ids"], inputs["cu_seqlens"], group, labels=inputs["labels"], **given)
        pack = batch.pack
        with recorded(model, model_tokens(pack), pack.tokens) as modules:
            logits = model(**batch.inputs).logits
        loss = batch.loss(logits)
        torch.autograd.backward(loss * ranks if averages else loss)
        if not averages:
            reduce_gradients(model, group)
        tokens = torch.from_numpy(pack.layout.indices(pack.rank))
        return StepResult(loss.detach(), None, logits[0, : pack.tokens], tokens, modules)

    return _audited(run, model, model, reference, "sum", "same")


# -- rows ----------------------------------------------------------------------------------------------


class DealtRows:
    """Documents of a batch as the padded rows of one rank, and where their tokens came from.

    Documents go to the ranks in turns. A rank without any has a row of padding.
    """

    def __init__(self, inputs: Inputs, rank: int, ranks: int, device: torch.device) -> None:
        cu = inputs["cu_seqlens"]
        spans = [(a, b) for a, b in pairwise(cu) if b > a][rank::ranks]
        longest = max((b - a for a, b in spans), default=1)
        shape = (max(len(spans), 1), longest)
        self.places = torch.full(shape, -1)  # of tokens in the batch
        for row, (a, b) in enumerate(spans):
            self.places[row, : b - a] = torch.arange(a, b)
        self.held = self.places >= 0
        self.tokens = self.places[self.held]
        at = self.places.clamp_min(0)
        ids, labels = inputs["input_ids"].cpu()[at], inputs["labels"].cpu()[at]
        starts = torch.zeros(cu[-1], dtype=torch.bool)
        starts[[a for a, _ in spans]] = True
        labels = torch.where(self.held & ~starts[at], labels, IGNORE)
        self.valid = int((labels != IGNORE).sum())
        made = {"input_ids": ids, "attention_mask": self.held.long(), "labels": labels}
        self.rows = {name: x.to(device) for name, x in made.items()}

    def outputs(self, out: Any) -> tuple[Tensor | None, Tensor | None]:
        """What a model returned for the rows, as rows of tokens; pooled heads return no logits."""
        found = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
        if found is None or found.shape[:2] != self.held.shape:
            return None, self.tokens
        return found[self.held.to(found.device)], self.tokens


def pooled(model: nn.Module, group: Group = None, *, reference: StepFunction | None = None) -> AuditedStep:
    """A model after `lw.pool`, plain or inside DDP or FSDP2. With head="pooled" there are no outputs to look at."""
    comm = resolve(group)
    reduced = isinstance(model, DistributedDataParallel) or any(is_sharded(p) for p in model.parameters())
    device = next(model.parameters()).device

    def run(inputs: Inputs) -> StepResult:
        dealt = DealtRows(inputs, comm.rank, comm.size, device)
        valid = sum(DealtRows(inputs, rank, comm.size, device).valid for rank in range(comm.size))
        out = model(**dealt.rows, num_items_in_batch=max(valid, 1) / comm.size, use_cache=False)
        torch.autograd.backward(out.loss)
        return StepResult(out.loss.detach(), None, *dealt.outputs(out))

    return _audited(run, model, model, reference, "mean", "same" if reduced else "mean")


def trainer(
    trainer: Any,
    *,
    reference: StepFunction | None = None,
    collate: Callable[[list[dict[str, list[int]]]], dict[str, Tensor]] | None = None,
) -> AuditedStep:
    """A transformers.Trainer: its training_step, with its loss, its count of tokens and its way to wrap the model.

    The model is copied and prepared as the Trainer would, so that the Trainer is as before; one that has already
    wrapped its model is audited with that. Rows are padded here, unless `collate` makes them of
    [{"input_ids": …, "labels": …}, …], such as the Trainer's own `data_collator`; outputs are not looked at then.
    """
    source = trainer.accelerator.unwrap_model(trainer.model)
    reference = reference_of(source) if reference is None else reference
    wrapped = trainer.model_wrapped
    if wrapped is trainer.model:
        wrapped = trainer.accelerator.prepare(copy.deepcopy(trainer.model))
        trainer.accelerator._models.pop()
    rank, ranks = trainer.args.process_index, trainer.args.world_size
    device = trainer.args.device
    inner = trainer.accelerator.unwrap_model(wrapped)

    def run(inputs: Inputs) -> StepResult:
        dealt = DealtRows(inputs, rank, ranks, device)
        rows = dealt.rows if collate is None else collate(_features(dealt))
        seen: list[Any] = []
        hook = inner.register_forward_hook(lambda _, args, out: seen.append(out))
        before = getattr(trainer, "current_gradient_accumulation_steps", None)
        trainer.current_gradient_accumulation_steps = 1
        try:
            batches, items = trainer.get_batch_samples(iter([rows]), 1, device)
            loss = trainer.training_step(wrapped, batches[0], items)
        finally:
            trainer.current_gradient_accumulation_steps = before
            hook.remove()
        outputs, tokens = dealt.outputs(seen[-1]) if collate is None and seen else (None, dealt.tokens)
        return StepResult(loss, None, outputs, tokens)

    return _audited(run, wrapped, source, reference, "mean", "same")


def _features(dealt: DealtRows) -> list[dict[str, list[int]]]:
    """The documents as examples of a dataset."""
    names = ("input_ids", "labels")
    return [{name: dealt.rows[name][row].cpu()[held].tolist() for name in names} for row, held in enumerate(dealt.held)]
