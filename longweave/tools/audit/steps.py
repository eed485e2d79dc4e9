"""What is audited: a step, which takes a full packed batch on every rank and returns what an update would use.

    inputs  {"input_ids": (tokens,), "cu_seqlens": (0, …, tokens), "labels": (tokens,), …}    the same on every rank
      │
      ▼
    step    ──▶ StepResult: the loss · gradients by parameter · outputs of some tokens, and which tokens these are

How the ranks' results become those of the batch is the step's own convention: losses are added up ("sum") or averaged
("mean", which is also right where every rank returns the same), gradients are whole on every rank ("same": reduced,
as the optimizer finds them) or have yet to be added up or averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from longweave.comm.exchange import is_sharded
from longweave.errors import InputError
from longweave.plan.ranges import as_cu_seqlens

Inputs = dict[str, Any]
IGNORE = -100

LOSSES = ("sum", "mean")
GRADIENTS = ("same", "sum", "mean")

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class StepResult:
    """What a step found on this rank. Only the loss is a must: the more it returns, the more can be named.

    loss: a number or a tensor of one.
    gradients: by parameter name. None: they are read from the `.grad` of the audited model.
    outputs: (n, …), logits or anything else that the model makes of each token; one row a token.
    tokens: (n,) which tokens of the batch the rows are; without it rank r is not known to hold any.
    modules: what each module was given and what it returned, (n, …) both, in the order in which they returned.
    """

    loss: Any
    gradients: Mapping[str, Tensor | None] | None = None
    outputs: Tensor | None = None
    tokens: Any = None
    modules: Mapping[str, tuple[Tensor | None, Tensor]] = field(default_factory=dict)


StepFunction = Callable[[Inputs], Any]


@dataclass(frozen=True)
class AuditedStep:
    """A step with all that is known of it. `lw.audit` makes it from its arguments; adapters make it of a model."""

    run: StepFunction
    model: nn.Module | None = None  # whose weights are compared, and whose gradients are read
    reference: StepFunction | None = None  # the whole batch in one process
    loss: str = "mean"
    gradients: str = "same"
    suspects: Mapping[str, StepFunction] = field(default_factory=dict)  # references with a fault

    def __post_init__(self) -> None:
        for name, value, known in (("loss", self.loss, LOSSES), ("gradients", self.gradients, GRADIENTS)):
            if value not in known:
                raise InputError(f"{name} is {value!r}; choose one of {', '.join(known)}")
        if not callable(self.run):
            raise InputError(f"step is a {type(self.run).__name__}; give a function of a batch")

    def __call__(self, inputs: Inputs) -> StepResult:
        """One step, from no gradients; they are this rank's, on its device."""
        for _, p in parameters_of(self.model):
            p.grad = None
        return self.read(self.run(dict(inputs)))

    @contextmanager
    def gradients_kept(self) -> Iterator[None]:
        """Behind it, they are what they were."""
        before = [(p, p.grad) for _, p in parameters_of(self.model)]
        try:
            yield
        finally:
            for p, grad in before:
                p.grad = grad

    def read(self, answer: Any) -> StepResult:
        """What a step returned, as a result: it may be the loss alone, a tuple, a mapping, or a StepResult."""
        if isinstance(answer, Mapping):
            answer = StepResult(**answer)
        elif isinstance(answer, tuple):
            answer = StepResult(*answer)
        elif not isinstance(answer, StepResult):
            answer = StepResult(answer)
        found = answer.gradients
        if found is None and self.model is not None:
            found = {name: p.grad for name, p in parameters_of(self.model) if p.requires_grad}
        grads = {plain_name(name): None if g is None else whole(g) for name, g in (found or {}).items()}
        if answer.outputs is not None and answer.tokens is None:
            raise InputError("the step returns outputs without tokens; say which tokens of the batch their rows are")
        tokens = None if answer.tokens is None else torch.as_tensor(answer.tokens).cpu().long()
        outputs = answer.outputs
        if outputs is not None and tokens is not None and len(outputs) != len(tokens):
            raise InputError(f"the step returns {len(outputs)} rows of outputs and {len(tokens)} tokens; give as many")
        kept = None if outputs is None else outputs.detach().clone()
        return StepResult(_number(answer.loss), grads, kept, tokens, answer.modules)


def parameters_of(model: nn.Module | None) -> Iterator[tuple[str, nn.Parameter]]:
    if model is not None:
        for name, p in model.named_parameters():
            yield plain_name(name), p


def plain_name(name: str) -> str:
    """Without what DDP, FSDP, torch.compile and checkpointing put before the names of what they wrap."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def whole(x: Any) -> Tensor:
    """A gradient as one tensor; one that is sharded (FSDP, tensor parallel) is gathered by all ranks."""
    full: Tensor = x.detach().full_tensor() if is_sharded(x) else x.detach().clone()
    return full


def _number(loss: Any) -> float:
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise InputError(f"the step returns a loss of shape {tuple(loss.shape)}; give one number")
        loss = whole(loss).item()
    try:
        return float(loss)
    except (TypeError, ValueError):
        raise InputError(f"the step returns {type(loss).__name__} as its loss; give a number") from None


# -- batches -------------------------------------------------------------------------------------------


def as_inputs(batch: Any) -> Inputs:
    """The batch as steps get it: input_ids and labels (tokens,), cu_seqlens a tuple; anything else as it was given."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise InputError(
            f"batch is a {type(batch).__name__}; give a mapping with input_ids (tokens,) and cu_seqlens, such as "
            '{"input_ids": ids, "cu_seqlens": [0, 137, 2178]}, and labels (tokens,) if some tokens do not count'
        )
    ids = _flat(batch["input_ids"], "input_ids")
    borders = batch.get("cu_seqlens")
    cu = as_cu_seqlens([0, len(ids)] if borders is None else borders).tolist()
    if cu[-1] != len(ids):
        raise InputError(f"cu_seqlens ends at {cu[-1]} but input_ids has {len(ids)} tokens")
    labels = ids.clone() if batch.get("labels") is None else _flat(batch["labels"], "labels")
    if len(labels) != len(ids):
        raise InputError(f"labels has {len(labels)} entries and input_ids {len(ids)}; give one a token, not shifted")
    return {**batch, "input_ids": ids, "cu_seqlens": tuple(cu), "labels": labels}


def _flat(given: Any, name: str) -> Tensor:
    x: Tensor = torch.as_tensor(given)
    if x.ndim == 2 and x.shape[0] == 1:
        x = x[0]
    if x.ndim != 1 or x.is_floating_point() or x.is_complex():
        raise InputError(f"{name} is {x.dtype} of shape {tuple(x.shape)}; give integers, (tokens,), packed")
    return x


def counted_positions(cu_seqlens: Sequence[int]) -> Tensor:
    """Of every token, from the start of its document."""
    lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
    return torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.arange(0)
