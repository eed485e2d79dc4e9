"""`lw.pool(model, head="pooled")`: the output layer and the loss run where the tokens are.

    labels ─▶ targets, moved one place ─ travel with the ids ─┐
    rows ─▶ pack ─▶ layers ─▶ hidden states ─▶ logits, some tokens at a time ─▶ log p(target) ─▶ rows ─▶ loss

The owner of a giant document would else compute, and hold, its logits alone. Four bytes a token go home, and the loss
is the one that the model would have returned. Calls without labels want logits, which are computed at home.

The head's own forward turns hidden states into logits, whatever it does to them (softcaps, scales): it is called with
`HiddenStates` in the place of tokens. A forward that somebody else puts in its place later, such as TRL's fused head,
is given the pack's tokens as one row with `shift_labels`; hooks around the call bring what it returns home.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longweave.errors import InputError
from longweave.models.changes import Undo
from longweave.models.loss import nll
from longweave.models.packing import is_integer
from longweave.models.pooled import Pooled
from longweave.models.pooled_decoder import HiddenStates, arguments, check_range, gather, ignore_index, runs_alone
from longweave.models.roles import is_model
from longweave.models.rows import HomeRows
from longweave.models.running import KEY, model_tokens
from longweave.tensors import eager, widened

HEAD_CHUNK = 1024  # tokens whose logits exist at once

ENTROPY = "output_entropy"
_DECODER = "_longweave_decoder"  # attribute of the module whose call is hooked


class HeadCall(NamedTuple):
    """What is known of a call of the head when it begins, and needed when it ends."""

    targets: Tensor  # (batch, seq)
    shifted: bool  # by us: the last column predicts nothing
    items: Any  # num_items_in_batch
    as_tuple: bool


def find_heads(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of the causal language models inside `model`. Raises InputError where there is none."""
    heads = [(name, module) for name, module in model.named_modules() if is_model(module) and _models_inside(module)]
    heads = [(name, module) for name, module in heads if hasattr(module, "lm_head")]
    if not heads:
        raise InputError(
            f'{type(model).__name__} has no language-model head, which head="pooled" is about; leave head="home"'
        )
    for _, head in heads:
        if len(_models_inside(head)) != 1:
            raise InputError(f'{type(head).__name__} has several models inside; head="pooled" needs one decoder')
        loss = getattr(getattr(head, "loss_function", None), "__name__", None)
        if loss != "ForCausalLMLoss":
            raise InputError(f'{type(head).__name__} has the loss {loss}; head="pooled" knows ForCausalLMLoss only')
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, dict) and any(getattr(c, "is_prompt_learning", False) for c in configs.values()):
            raise InputError(
                "PEFT puts virtual tokens in front of the rows (prompt learning), which would not be sent; leave "
                'head="home"'
            )
    return heads


def pool_heads(model: nn.Module, heads: Sequence[tuple[str, nn.Module]], undo: Undo) -> None:
    """Change the causal language models that were found inside `model`."""
    for name, head in heads:
        (decoder,) = _models_inside(head)
        undo.replace(head, "forward", _head_forward)
        undo.set(head, _DECODER, decoder)
        entry = _entry(model, name)
        undo.set(entry, _DECODER, decoder)
        undo.hook(entry, _before, _after)


def _models_inside(module: nn.Module) -> list[nn.Module]:
    return [part for part in list(module.modules())[1:] if is_model(part)]


def _entry(model: nn.Module, name: str) -> nn.Module:
    """The module that users call to run the head: PEFT calls the forward of what it wraps past its hooks."""
    parts = name.split(".") if name else []
    for depth in range(len(parts)):
        module = model.get_submodule(".".join(parts[:depth]))
        if type(module).__module__.startswith("peft."):
            return module
    return model.get_submodule(name)


# -- around a call ---------------------------------------------------------------------------------------


@eager
def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    asked = arguments(type(module).forward, args, kwargs)
    if isinstance(asked.get(KEY), HiddenStates) or runs_alone(asked):
        return None
    return (), _enter(vars(module)[_DECODER], asked)


@eager
def _after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    pooled = kwargs.get(KEY)
    return _leave(module, pooled, out) if isinstance(pooled, Pooled) and pooled.call else None


def _enter(decoder: nn.Module, asked: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the head, with the pack of all ranks' rows, and targets in the place of labels."""
    if asked.get("labels") is None and asked.get("shift_labels") is None:
        return {**asked, KEY: gather(decoder, asked)}
    shifted = asked.get("shift_labels") is None
    targets: Tensor | None = None

    def targets_of(rows: HomeRows, host: Mapping[str, Any]) -> Tensor:
        nonlocal targets
        targets = _targets(asked, rows, host, decoder.config.vocab_size)  # type: ignore[union-attr,arg-type]
        return targets

    pooled = gather(decoder, asked, "pooled", targets_of)
    assert targets is not None
    as_tuple = asked.get("return_dict") is False
    pooled.call = HeadCall(targets, shifted, asked.get("num_items_in_batch"), as_tuple)
    return {**asked, KEY: pooled, "labels": None, "shift_labels": pooled.targets, "return_dict": True}


def _targets(asked: Mapping[str, Any], rows: HomeRows, host: Mapping[str, Any], vocabulary: int) -> Tensor:
    """What every token of the rows should predict, −100 where nothing."""
    name = "labels" if asked.get("shift_labels") is None else "shift_labels"
    labels, ignored = asked[name], ignore_index(asked)
    if not isinstance(labels, Tensor) or labels.shape != (rows.batch, rows.seq) or not is_integer(labels):
        shown = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError(f"{name} is {shown} for tokens of {(rows.batch, rows.seq)}; give an integer for every token")
    check_range(name, host["labels"], vocabulary)
    if name == "labels" and rows.seq:
        labels = torch.cat([labels[:, 1:], labels.new_full((rows.batch, 1), ignored)], dim=1)
    # A padding token predicts nothing, though the first token of a left-padded row stands right of one.
    return rows.put(rows.take(labels.masked_fill(labels == ignored, -100)) + 100) - 100


def _leave(module: Any, pooled: Pooled, out: Any) -> Any:
    """What the head returned for the pack's tokens becomes what it returns for this rank's rows."""
    call: HeadCall = pooled.call
    if not isinstance(out, dict) or out.get("log_probs") is None:
        raise InputError(
            f'the forward of {type(module).__name__} was replaced after lw.pool(head="pooled") by one that returns no '
            "log_probs; undo that, or pool the model again"
        )
    columns = slice(-1 if call.shifted else None)
    found = {name: x[:, columns] for name, x in _home(out, pooled).items()}
    counted = call.targets[:, columns] != -100
    if out.get("label_mask") is not None:
        found["label_mask"] = counted
    items = counted.sum().clamp(min=1) if call.items is None else call.items
    loss = -found["log_probs"].sum() / (items.to(counted.device) if isinstance(items, Tensor) else items)
    if out.get("aux_loss") is not None:
        by_config = getattr(module.config.get_text_config(), "router_aux_loss_coef", 0.0)
        loss = loss + getattr(module, "router_aux_loss_coef", by_config) * out["aux_loss"]
    whole: Any = type(out)(**{**out, **found, "loss": loss})  # made anew, since the first entry must be the loss
    return whole.to_tuple() if call.as_tuple else whole


def _home(out: Mapping[str, Any], pooled: Pooled) -> dict[str, Tensor]:
    """Whatever it returned of every token of the pack: log-probabilities, entropies, hits, values of several columns.

    Floats and flags are sent together, and integers.
    """
    tokens = (1, model_tokens(pooled.pack))
    per_token = {name: x for name, x in out.items() if isinstance(x, Tensor) and tuple(x.shape[:2]) == tokens}
    per_token.pop("label_mask", None)  # known at home
    found: dict[str, Tensor] = {}
    for integers in (False, True):
        some = {name: x for name, x in per_token.items() if is_integer(x) == integers}
        if not some:
            continue
        wide = [x.long() if integers else widened(x) for x in some.values()]
        flat = [x.reshape(*tokens, -1) for x in wide]
        parts = torch.split(pooled.home(torch.cat(flat, dim=-1)), [x.shape[-1] for x in flat], dim=-1)
        for (name, x), part in zip(some.items(), parts, strict=True):
            found[name] = part.reshape(*part.shape[:2], *x.shape[2:]).to(x.dtype)
    return {name: found[name] for name in per_token}


# -- the head itself -------------------------------------------------------------------------------------


def _head_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward in the place of `original`, the unbound forward of a causal language model's class."""

    @wraps(original)
    @eager
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        asked = arguments(original, args, kwargs)
        if runs_alone(asked) or isinstance(asked.get(KEY), HiddenStates):
            return original(self, **asked)
        here = KEY not in asked  # called past the hooks
        if here:
            asked = _enter(vars(self)[_DECODER], asked)
        pooled: Pooled = asked[KEY]
        if pooled.call is None:
            return original(self, **asked)
        out = _in_chunks(self, original, pooled, asked)
        return _leave(self, pooled, out) if here else out

    return forward


def _in_chunks(head: Any, original: Callable[..., Any], pooled: Pooled, asked: dict[str, Any]) -> Any:
    """log p of every target, and the entropy if asked for, from logits of which only a part exists at a time."""
    wants_entropy = bool(asked.pop(ENTROPY, False))
    states = head.base_model(**{k: v for k, v in asked.items() if k != "logits_to_keep"})
    hidden, targets = states.last_hidden_state, pooled.targets
    assert targets is not None
    router = {"output_router_logits": False} if hasattr(head.config, "output_router_logits") else {}

    def part(h: Tensor, t: Tensor) -> Tensor:
        given = HiddenStates(type(states)(last_hidden_state=h))
        logits = widened(original(head, return_dict=True, **{KEY: given, **router}).logits[0])
        columns = [-nll(logits, t[0], -100)]
        if wants_entropy:
            columns.append(_entropy(logits).masked_fill(t[0] == -100, 0))
        return torch.stack(columns, dim=-1)

    # As many chunks on every rank: the weights of the output layer may have to be gathered for each (FSDP2).
    count = -(-max(pooled.pack.layout.counts) // HEAD_CHUNK)
    chunks = zip(hidden.tensor_split(count, 1), targets.tensor_split(count, 1), strict=True)
    values = torch.cat([checkpoint(part, h, t, use_reentrant=False) for h, t in chunks])[None]
    aux = None
    if getattr(states, "router_logits", None) is not None:
        # The head's own balancing loss, from the router logits of this rank's rows.
        given = HiddenStates(type(states)(last_hidden_state=hidden[:, :0], router_logits=states.router_logits))
        options = {"attention_mask": asked.get("attention_mask"), "output_router_logits": True, KEY: given}
        aux = original(head, return_dict=True, **options).aux_loss
    from longweave.models.outputs import PooledHeadOutput  # needs transformers, as models that come here do

    return PooledHeadOutput(
        log_probs=values[..., 0],
        entropy=values[..., 1] if wants_entropy else None,
        aux_loss=aux,
        hidden_states=states.get("hidden_states"),
        router_logits=states.get("router_logits"),
    )


def _entropy(logits: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits, dim=-1)
    return -(log_p.exp() * log_p).sum(-1)
