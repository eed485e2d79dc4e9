"""Decay inside a chunk, without overflow and without lost digits.

With c = cumsum(g), a chunk needs e^{c_i} (from its start), e^{c_C − c_i} (to its end) and e^{c_i − c_j} for
i ≥ j. Each is the exponential of a sum of g over consecutive tokens: never above 1 when g ≤ 0. Two things
can spoil that:

* After strong decay c is large, and differences of large float32 numbers are rough: at c = −3000 they are
  off by 1e-4. So c is summed, and subtracted, in float64.
* Per channel, e^{c_i − c_j} cannot be multiplied onto products q_i·k_j: it must be split over q and k, and
  e^{−c_j} overflows when c_j < −88. `channel_products` splits at a border between j and i, where both halves
  are ≤ 1:

      chunk of 8                 every square is one matmul of
      D                          rows decayed from its border (their end of the square's columns)
      1 D                        columns decayed to that border
      2 2 D
      2 2 1 D
      4 4 4 4 D                  D: diagonal, no decay
      4 4 4 4 1 D                1, 2, 4: side of the square
      4 4 4 4 2 2 D
      4 4 4 4 2 2 1 D

  It is exact for every g ≤ 0, however strong, and for g > 0 as long as the result itself is finite.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cumulative(g: Tensor, dim: int) -> Tensor:
    """c, in float64."""
    return g.cumsum(dim, dtype=torch.float64)


def pairwise(c: Tensor, dtype: torch.dtype) -> Tensor:
    """(…, C) -> (…, C, C): e^{c_i − c_j} for i ≥ j, else 0.

    The upper triangle is cleared before exp, where it could overflow, and again after it. (Filling it with −∞
    before would do, but exp of −∞ is slow on CPU.)
    """
    return (c.unsqueeze(-1) - c.unsqueeze(-2)).to(dtype).tril().exp().tril()


def channel_products(rows: Tensor, columns: Tensor, c: Tensor) -> Tensor:
    """P_ij = Σ_κ rows_iκ columns_jκ e^{c_iκ − c_jκ} for i ≥ j, else 0.

    rows (R, B, C, K): R sets of rows that share columns (B, C, K) and decay c (B, C, K). Returns (R, B, C,
    C). C is a power of two.
    """
    R, B, C, K = rows.shape
    squares = (rows * columns).sum(-1).view(R, B, C, 1, 1)  # the diagonal, as C squares of side 1
    side = 1
    while side < C:
        halves = (B, C // (2 * side), 2, side, K)
        c_early, c_late = c.view(halves).unbind(2)
        border = c_early[..., -1:, :]
        early = columns.view(halves)[:, :, 0] * (border - c_early).to(columns.dtype).exp()
        late = rows.view(R, *halves)[:, :, :, 1] * (c_late - border).to(rows.dtype).exp()
        before, after = squares.view(R, B, -1, 2, side, side).unbind(3)
        top = torch.cat([before, torch.zeros_like(before)], -1)
        bottom = torch.cat([torch.matmul(late, early.mT), after], -1)
        squares = torch.cat([top, bottom], -2)
        side *= 2
    return squares.squeeze(2)
