"""What every module of a model was given and returned, token by token, so that the one that goes wrong can be named.

A module is guilty if its output is off while its input is right: an output projection behind a wrong attention has a
wrong output, too, but was given a wrong input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from longweave.tools.audit.steps import plain_name

Recorded = dict[str, tuple[Tensor | None, Tensor]]


@contextmanager
def recorded(model: nn.Module, tokens: int, kept: int | None = None) -> Iterator[Recorded]:
    """Inside, the model runs on `tokens` tokens, of which the first `kept` count; what its modules do is noted.

    Only what has one row a token, (1, tokens, …) or (tokens, …). Modules that run again in backward count once.
    """
    seen: Recorded = {}
    kept = tokens if kept is None else kept

    def note(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        y = _rows(_first_tensor(out), tokens)
        if y is not None and name not in seen and torch.is_grad_enabled():
            x = _rows(_first_tensor((*args, *kwargs.values())), tokens)
            seen[name] = (None if x is None else x[:kept], y[:kept])

    hooks = []
    for name, module in model.named_modules():
        title = plain_name(f"{name}.")[:-1]
        if title:

            def hook(_: nn.Module, args: Any, kwargs: Any, out: Any, title: str = title) -> None:
                note(title, args, kwargs, out)

            hooks.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in hooks:
            handle.remove()


def joined(parts: list[Recorded]) -> Recorded:
    """Of several runs on one document each: one after another."""
    names = [name for name in parts[0] if all(name in part for part in parts)] if parts else []
    found: Recorded = {}
    for name in names:
        xs = [x for part in parts if (x := part[name][0]) is not None]
        ys = [part[name][1] for part in parts]
        if len({y.shape[1:] for y in ys}) == 1:
            alike = len(xs) == len(parts) and len({x.shape[1:] for x in xs}) == 1
            found[name] = (torch.cat(xs) if alike else None, torch.cat(ys))
    return found


def _first_tensor(values: Any) -> Tensor | None:
    if isinstance(values, Tensor):
        return values
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return None
    return next((x for x in values if isinstance(x, Tensor)), None)


def _rows(x: Tensor | None, tokens: int) -> Tensor | None:
    if x is None:
        return None
    if x.ndim >= 2 and x.shape[:2] == (1, tokens):
        return x[0].detach().clone()
    return x.detach().clone() if x.ndim >= 1 and x.shape[0] == tokens else None
