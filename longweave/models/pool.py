"""`lw.pool`: data parallelism whose ranks share their documents. To a trainer it is data parallelism as ever.

    rows of rank 0 ─┐                                                ┌─▶ hidden states of its rows ─▶ its head, loss
    rows of rank 1 ─┼─ lengths, ids ─▶ one pack ─▶ layers, balanced ─┼─▶ hidden states of its rows ─▶ its head, loss
    rows of rank 2 ─┘                                                └─▶ hidden states of its rows ─▶ its head, loss
                    └───────── inside the decoder's forward ─────────┘

What changes in the model, and nothing else:

    layers               run across ranks (`longweave.models.layers`)
    decoders             put the documents of all ranks together and bring the results home; `generate`, and calls with
                         a KV cache, run alone on their rank (`longweave.models.pooled_decoder`)
    head="pooled"        output layer and loss run where the tokens are (`longweave.models.pooled_head`)

Gradients go the same way back. The loss of rank r causes gradients on all ranks that computed its tokens; their mean
over ranks, which DDP and FSDP take, is the mean of what each rank would have had by itself.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from longweave.comm.exchange import Group, name_of
from longweave.core import LAYOUTS, MASKS, check_ways
from longweave.errors import InputError, shown
from longweave.models.changes import Undo, is_changed
from longweave.models.decoder_work import work_of
from longweave.models.layers import check_layers, check_mask, config_sharers, switch_layers
from longweave.models.pooled import Pooling
from longweave.models.pooled_decoder import ALONE, POOLING, decoder_forward, generate
from longweave.models.pooled_head import find_heads, pool_heads
from longweave.models.roles import FAMILIES, is_model, roles
from longweave.models.running import Alone
from longweave.plan.ranges import check_number

M = TypeVar("M", bound=nn.Module)

HEADS = ("home", "pooled")
WAIT = 600.0  # seconds


def pool(
    model: M,
    group: Group = None,
    *,
    head: str = "home",
    layout: str = "auto",
    mask: str = "causal",
    strategy: str = "auto",
    method: str = "auto",
    backend: str = "auto",
    wait: float = WAIT,
    **options: int,
) -> M:
    """Let data-parallel ranks share the work on their documents. In place; returns the model.

    Every rank goes on giving the model its own rows, as any trainer does: with padding left or right, packed with
    `position_ids` that begin anew (or `cu_seq_lens_q`, `seq_idx`), as `input_ids` or `inputs_embeds`, as many as it
    likes. Inside the decoder the documents of all ranks become one balanced pack, and hidden states come home to the
    rows. Gradients averaged over the ranks (DDP, FSDP2) equal those without `pool`; nothing is to be scaled.

    group: the ranks that share, as a ProcessGroup or a 1-D DeviceMesh; None is the default group, which may be
        initialised later.
    head: "home" computes logits and loss where the rows are. "pooled" computes them where the tokens are, in chunks:
        the model then returns, in calls with labels, the loss and `log_probs` in the place of logits.
    layout: "auto" moves documents only where that pays; "balanced", "zigzag", "contiguous", or "home" for never.
    mask: "causal", or "full" for encoders, whose tokens see their whole document: as the layers say it of themselves.
    strategy, method, backend, options such as `stages`: as in `lw.Pack`; strategy "auto" is "groupcast" where layout is
        "auto" or "home".
    wait: seconds to wait for ranks that do not call the model when others do; then they are named.

    Calls with a KV cache, and `generate`, run alone on their rank. `lw.restore` makes the model as it was. `pool` may
    come before or after `peft.get_peft_model` (with head="pooled": after), DDP and `fully_shard`.

    Raises `InputError` for a model without a decoder that is known, or with parts that have no role
    (see `lw.parallelize`), and for a mask that is not that of its attention layers.

        lw.pool(model)
        Trainer(model, args, train_dataset=data).train()
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    _check_options(head, layout, mask, wait)
    check_ways(strategy, method, backend, options)
    if is_changed(model):
        raise InputError("the model is parallel or pooled already; call lw.restore(model) first")
    name = None if group is None else name_of(group)
    decoders = _decoders(model)
    parts = {decoder: roles(decoder) for decoder in decoders}  # raises before anything is changed
    for some in parts.values():
        check_layers(some, model.modules())
        check_mask(some, mask)
    heads = find_heads(model) if head == "pooled" else []
    undo = Undo()
    switch_layers([part for some in parts.values() for part in some], config_sharers(model, decoders), undo)
    alone = Alone([(changed, config._attn_implementation) for config, changed, _ in undo.configs])
    ways = {"strategy": strategy, "method": method, "backend": backend, "options": options}
    for decoder, some in parts.items():
        undo.set(decoder, POOLING, Pooling(name, head, layout, mask, ways, wait, work_of(decoder, some)))
        undo.set(decoder, ALONE, alone)
        undo.replace(decoder, "forward", decoder_forward)
    for module in model.modules():
        if callable(getattr(type(module), "generate", None)):
            undo.set(module, ALONE, alone)
            undo.replace(module, "generate", generate)
    pool_heads(model, heads, undo)
    undo.keep(model)
    return model


def _check_options(head: object, layout: object, mask: object, wait: object) -> None:
    for name, value, known in (("head", head, HEADS), ("layout", layout, (*LAYOUTS, "home")), ("mask", mask, MASKS)):
        if not isinstance(value, str) or value not in known:
            raise InputError(f"{name} is {shown(value)}; choose one of {', '.join(known)}")
    check_number("wait", wait, "give a positive number of seconds, at most 1e9", 1e-3, 1e9)


def _decoders(model: nn.Module) -> list[nn.Module]:
    """The innermost modules that are models: they embed tokens and call the layers."""
    models = [module for module in model.modules() if is_model(module)]
    found = [module for module in models if not any(is_model(part) for part in list(module.modules())[1:])]
    if not found:
        problem = "none of its modules embeds tokens, calls layers and returns a ModelOutput with last_hidden_state"
        try:
            roles(model)
        except InputError as error:
            problem = str(error)
        raise InputError(
            f"{type(model).__name__} has no decoder that is known (known are {', '.join(FAMILIES)}): {problem}. "
            'A decoder of your own: longweave.models.register(type(decoder), "model")'
        )
    return found
