"""Where a value that is not finite came in: its tensor, document and rank, said on every rank.

    rank 0   all finite      ─┐
    rank 1   v, document 3    ├─▶ everybody: "v is not finite in document 3, at its token 17, on rank 1"
    rank 2   all finite      ─┘

NaN and ±∞ stay in their own document: no other one reads them. But a loss is a sum over documents.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from longweave.comm.exchange import all_gather_v, received_on_host
from longweave.core import PackCore
from longweave.errors import InputError
from longweave.tensors import kind_of


def check_finite(core: PackCore, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise on every rank if one of them holds a value that is not finite. Waits for the device and the other ranks."""
    comm, given = core.comm, {name: x for name, x in tensors.items() if x is not None}
    kind = ("check_finite of", *(kind_of(x, per_token=False)[0] for x in given.values()))
    with core.enter(kind, lambda: core.check_tokens(*given.values()), tuple(given.values())).forward():
        bad = [_first_bad(x.detach()) for x in given.values()]
        number = next((i for i, token in enumerate(bad) if token >= 0), -1)
        mine = torch.tensor([[number, _token_of(core, bad[number]) if number >= 0 else 0]], device=comm.control_device)
        everyone = received_on_host(all_gather_v(mine, [1] * comm.size, comm).wait(), comm).tolist()
        for rank, (number, token) in enumerate(everyone):
            if number >= 0:
                document = int(np.searchsorted(core.cu_seqlens, token, side="right")) - 1
                raise InputError(
                    f"{list(given)[number]} is not finite in document {document}, at its token "
                    f"{token - int(core.cu_seqlens[document])}, on rank {rank}; look at what made it, and at its input"
                )


def _first_bad(x: Tensor) -> int:
    """The first token with a value that is not finite; −1 if there is none."""
    tokens = (~torch.isfinite(x)).flatten(1).any(1) if x.ndim > 1 else ~torch.isfinite(x)
    return int(tokens.to(torch.uint8).argmax()) if bool(tokens.any()) else -1


def _token_of(core: PackCore, local: int) -> int:
    """Counted over the whole pack."""
    return int(core.layout.indices(core.comm.rank)[local])
