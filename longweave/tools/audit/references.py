"""What is right: the unmodified model in one process, one document after another, so that nothing is packed.

OneProcess(model)               loss, gradients, outputs and modules of the whole batch
OneProcess(model).suspects()    the same with something dropped: a softcap, sinks. A step that equals one of these
                                has dropped it
OneProcess(model).exact()       in float32, for models of 16 bits: how far one process is off by rounding
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from longweave.errors import InputError
from longweave.models.changes import is_changed, restore
from longweave.models.loss import nll
from longweave.tools.audit.record import joined, recorded
from longweave.tools.audit.steps import IGNORE, Inputs, StepResult, counted_positions, parameters_of

Forward = Callable[[nn.Module, Tensor, Tensor], Tensor]

# Attributes of modules and configs that cap logits: what leaves them out computes without.
SOFTCAPS = {"attn_logit_softcapping": "softcap", "final_logit_softcapping": "softcap of the logits"}
SINKS = "sinks"  # how parameters are named that are
SCALE = "scaling"  # what attention modules multiply scores by


def hugging_face(model: nn.Module, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """One document, (tokens,), through a transformers model: logits (tokens, vocabulary)."""
    mask = torch.ones_like(input_ids)  # without it, positions that do not count up would be read as several documents
    out = model(input_ids=input_ids[None], position_ids=position_ids[None], attention_mask=mask[None], use_cache=False)
    logits: Tensor = out.logits[0]
    return logits


class OneProcess:
    """A reference: the mean loss over the labels that count, and its gradients, with a model of its own.

    model: not parallel, not pooled, not sharded. It is used as it is and its gradients are replaced.
    forward: logits of one document, `forward(model, input_ids, position_ids)`, both (tokens,); by default as
        transformers models are called.
    """

    def __init__(self, model: nn.Module, forward: Forward = hugging_face) -> None:
        self.model, self.forward = model, forward

    def __call__(self, inputs: Inputs) -> StepResult:
        device = next(self.model.parameters()).device
        ids, cu = inputs["input_ids"].to(device), inputs["cu_seqlens"]
        positions = inputs.get("position_ids")
        positions = (counted_positions(cu) if positions is None else positions).to(device)
        labels = inputs["labels"].to(device)
        valid = sum(int((labels[start + 1 : stop] != IGNORE).sum()) for start, stop in pairwise(cu))
        self.model.zero_grad(set_to_none=True)
        loss, outputs, seen = 0.0, [], []
        for start, stop in pairwise(cu):
            if start == stop:
                continue
            with recorded(self.model, stop - start) as modules:
                logits = self.forward(self.model, ids[start:stop], positions[start:stop])
            part = nll(logits[:-1], labels[start + 1 : stop], IGNORE).sum() / max(valid, 1)
            torch.autograd.backward(part)
            loss += float(part.detach())
            outputs.append(logits.detach())
            seen.append(modules)
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in parameters_of(self.model)}
        grads = {name: g for name, g in grads.items() if name in dict(self._trained())}
        return StepResult(loss, grads, torch.cat(outputs), torch.arange(cu[-1]), joined(seen))

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in parameters_of(self.model) if p.requires_grad)

    def suspects(self) -> dict[str, OneProcess]:
        """Copies that leave something out which this model has, by what is left out."""
        found = {}
        for attribute, title in SOFTCAPS.items():
            if any(getattr(x, attribute, None) is not None for x in _holders(self.model)):
                changed = copy.deepcopy(self.model)
                for holder in _holders(changed):
                    if getattr(holder, attribute, None) is not None:
                        setattr(holder, attribute, None)
                found[title] = OneProcess(changed, self.forward)
        if any(name.rpartition(".")[2] == SINKS for name, _ in self.model.named_parameters()):
            changed = copy.deepcopy(self.model)
            with torch.no_grad():
                for name, p in changed.named_parameters():
                    if name.rpartition(".")[2] == SINKS:
                        p.fill_(-1e4)  # e to the power of it is 0
            found["sinks"] = OneProcess(changed, self.forward)
        if any(_usual_scale(module) is not None for module in self.model.modules()):
            changed = copy.deepcopy(self.model)
            for module in changed.modules():
                usual = _usual_scale(module)
                if usual is not None:
                    setattr(module, SCALE, usual)
            found["scale of attention"] = OneProcess(changed, self.forward)
        return found

    def exact(self) -> OneProcess | None:
        """With twice the bits: what rounding does in one process is the difference to it. None for float64."""
        dtypes = {p.dtype for p in self.model.parameters()}
        if torch.float64 in dtypes:
            return None
        made = copy.deepcopy(self.model)
        return OneProcess(made.double() if torch.float32 in dtypes else made.float(), self.forward)


def _holders(model: nn.Module) -> list[Any]:
    """Modules, and the configs that they refer to, each once."""
    configs = {id(c): c for module in model.modules() if (c := vars(module).get("config")) is not None}
    return [*model.modules(), *configs.values()]


def _usual_scale(module: nn.Module) -> float | None:
    """1/√dim where an attention module has another scale: what a kernel takes when none is given."""
    scale, dim = getattr(module, SCALE, None), getattr(module, "head_dim", None)
    if not isinstance(scale, float) or not isinstance(dim, int) or abs(scale * dim**0.5 - 1) < 1e-6:
        return None
    return float(dim**-0.5)


def unmodified_copy(model: nn.Module) -> nn.Module:
    """A copy that runs in one process: unwrapped, and as it was before `lw.parallelize` or `lw.pool`."""
    inner: Any = model
    while not is_changed_here(inner) and isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
    if any(hasattr(p, "device_mesh") for p in inner.parameters()):
        raise InputError(
            "the model's parameters are sharded (FSDP, tensor parallel), so no copy of it runs in one process; give "
            "reference=longweave.tools.audit.OneProcess(model), with an ordinary model that has the same weights"
        )
    made: nn.Module = copy.deepcopy(inner)
    if is_changed(made):
        with suppress(InputError):
            return restore(made)
        raise InputError(
            "what lw.parallelize or lw.pool did to this model cannot be undone on a copy of it, because something else "
            "was put on it afterwards; give reference=longweave.tools.audit.OneProcess(model) with a model as it was"
        )
    return made


def is_changed_here(model: nn.Module) -> bool:
    """Was this very module given to `lw.parallelize` or `lw.pool`?"""
    return any(name.startswith("_longweave") for name in vars(model))
