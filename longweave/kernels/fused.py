"""Passes over attention results that are one Triton kernel each on a GPU. Callers have plain torch for other devices.

merge       two partials become one, in place
finish      sinks, and the cast to the dtype of the inputs
delta       ⟨grad_out, out⟩ of every query and head
add_rows    rows that came back from several ranks, added to the tokens they belong to, in rank order
"""

from __future__ import annotations

import torch
from torch import Tensor


def serves(x: Tensor) -> bool:
    """Is x where these kernels run?"""
    return False


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """out (T, H, Dv), lse (H, T), in place; rows of the part that saw nothing have lse = ±∞."""
    raise NotImplementedError


def finish(out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A new (T, H, Dv) in `dtype`; lse gains the sinks (H,), in place."""
    raise NotImplementedError


def delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """(H, T) in float32."""
    raise NotImplementedError


def add_rows(total: Tensor, rows: Tensor, index: Tensor, offsets: Tensor) -> None:
    """total[t] += Σ rows[index[j]], offsets[t] <= j < offsets[t + 1], added in that order."""
    raise NotImplementedError
