"""Plans as text and as pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from longweave.plan import Layout, Mask
from longweave.plan.ranges import as_cu_seqlens

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def draw_layout(layout: Layout, cu_seqlens: object, width: int = 100) -> str:
    """Documents as a ruler, and for each rank a line that is dark where it holds tokens.

    One column stands for `total / width` tokens; it is dark for a rank that holds at least half of them, shaded for one
    that holds fewer.
    """
    cu = as_cu_seqlens(cu_seqlens)
    width = max(1, min(width, layout.total))
    edges = np.arange(width + 1) * layout.total // width
    lines = [f"{'documents':>9} {_ruler(cu, width, layout.total)}"]
    for rank in range(layout.world_size):
        held = np.zeros(layout.total + 1, dtype=np.int64)
        held[layout.indices(rank) + 1] = 1
        before = np.cumsum(held)
        share = (before[edges[1:]] - before[edges[:-1]]) / np.maximum(edges[1:] - edges[:-1], 1)
        line = "".join("█" if s >= 0.5 else "░" if s > 0 else "·" for s in share)
        lines.append(f"{f'rank {rank}':>9} {line} {layout.counts[rank]} tokens")
    return "\n".join(lines)


def _ruler(cu: np.ndarray, width: int, total: int) -> str:
    """Each column shows the document of its first token: 0, 1, 2, …"""
    first = np.arange(width) * total // width
    return "".join(_DIGITS[d % len(_DIGITS)] for d in np.searchsorted(cu, first, side="right") - 1)


def plot_plan(mask: Mask, layout: Layout, path: Path) -> None:
    """The mask as a picture: who computes which pair, a colour for each rank."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = min(layout.total, 512)
    edges = np.arange(size) * layout.total // max(size, 1)
    tokens = edges + (layout.total // max(size, 1)) // 2
    owners = np.asarray(layout.owner(np.minimum(tokens, layout.total - 1))) if layout.total else np.zeros(0)
    seen = np.zeros((size, size), dtype=bool)
    for q0, q1, k0, k1, lo, hi in mask.rows.tolist():
        q, k = np.flatnonzero((tokens >= q0) & (tokens < q1)), np.flatnonzero((tokens >= k0) & (tokens < k1))
        distance = tokens[k][None, :] - tokens[q][:, None]
        seen[np.ix_(q, k)] |= (distance >= lo) & (distance <= hi)
    picture = np.where(seen, owners[:, None].astype(float), np.nan)
    figure, axes = pyplot.subplots(figsize=(6, 5.2), layout="constrained")
    colours = pyplot.get_cmap("tab20", max(layout.world_size, 2))
    image = axes.imshow(picture, cmap=colours, vmin=-0.5, vmax=max(layout.world_size, 2) - 0.5, interpolation="nearest")
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.set_xticks([0, size], ["0", str(layout.total)])
    axes.set_yticks([0, size], ["0", str(layout.total)])
    figure.colorbar(image, ax=axes, label="computed by rank", ticks=range(layout.world_size))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
