"""Layouts as text. Pictures of plans are in `tools.planning`."""

from __future__ import annotations

import numpy as np

from longweave.plan import Layout
from longweave.plan.ranges import as_cu_seqlens
from longweave.plan.schedule import MOST_RANKS_SHOWN

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def draw_layout(layout: Layout, cu_seqlens: object, width: int = 100) -> str:
    """Documents as a ruler, and for each rank a line that is dark where it holds tokens.

    One column stands for `total / width` tokens; it is dark for a rank that holds at least half of them, shaded for one
    that holds fewer. Of many ranks the first are drawn.
    """
    cu = as_cu_seqlens(cu_seqlens)
    width = max(1, min(width, layout.total))
    edges = np.arange(width + 1) * layout.total // width
    lines = [f"{'documents':>9} {_ruler(cu, width, layout.total)}"]
    for rank in range(min(layout.world_size, MOST_RANKS_SHOWN)):
        starts, stops, _ = layout.local_spans(rank)
        before = _tokens_before(edges, starts, stops)
        share = np.diff(before) / np.maximum(np.diff(edges), 1)
        line = "".join("█" if s >= 0.5 else "░" if s > 0 else "·" for s in share)
        lines.append(f"{f'rank {rank}':>9} {line} {layout.counts[rank]} tokens")
    if layout.world_size > MOST_RANKS_SHOWN:
        lines.append(f"          … {layout.world_size - MOST_RANKS_SHOWN} more ranks")
    return "\n".join(lines)


def _tokens_before(edges: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """How many tokens of spans in token order lie before each edge."""
    done = np.append(0, np.cumsum(stops - starts))
    begun = np.searchsorted(starts, edges)  # spans that begin before the edge; only the last of them may end behind it
    found: np.ndarray = done[begun] - np.maximum(np.append(0, stops)[begun] - edges, 0)
    return found


def _ruler(cu: np.ndarray, width: int, total: int) -> str:
    """Each column shows the document of its first token: 0, 1, 2, …; after Z it begins anew."""
    if not total:
        return "no tokens"
    first = np.arange(width) * total // width
    return "".join(_DIGITS[d % len(_DIGITS)] for d in np.searchsorted(cu, first, side="right") - 1)
