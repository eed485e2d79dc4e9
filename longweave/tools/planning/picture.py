"""A plan as a picture: who computes which pair, work, tokens and traffic of every rank, and who sends to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longweave.plan import Layout, Mask, Plan
from longweave.plan.ranges import Ints
from longweave.plan.schedule import Report
from longweave.plan.stages import exchange_matrix, plan_stages
from longweave.tools.charts import check_picture, save_figure

MOST_PIXELS = 640  # along a side of the square of pairs
MOST_NAMED = 24  # documents or ranks that are all labelled; of more, some


def draw_plan(plan: Plan, path: Path, node_size: int | None = None) -> None:
    """Write the picture; its format is that of the file's suffix, such as .png, .svg or .pdf."""
    figure_class = check_picture(path)
    import matplotlib

    report = plan.report()
    figure = figure_class(figsize=(12, 7.6), layout="constrained")
    colours = _colours(matplotlib.colormaps["turbo"], plan.world_size)
    grid = figure.add_gridspec(4, 2, width_ratios=(1.35, 1), height_ratios=(1, 1, 1, 2.6))
    _draw_pairs(figure.add_subplot(grid[:, 0]), plan.mask, plan.layout, colours)
    _draw_bars([figure.add_subplot(grid[row, 1]) for row in range(3)], report, colours)
    matrix = figure.add_subplot(grid[3, 1])
    _draw_matrix(figure, matrix, exchange_matrix(plan_stages(plan)), node_size)
    documents = len(plan.mask.cu_seqlens) - 1
    figure.suptitle(
        f"{documents} documents, {report.total_tokens} tokens, {plan.world_size} ranks, {plan.strategy}: imbalance "
        f"{report.imbalance:.3f}, {report.bytes_received / 1e6:.2f} MB received"
    )
    save_figure(figure, path)


def _colours(scale: Any, ranks: int) -> Any:
    return scale(np.linspace(0.06, 0.94, ranks) if ranks > 1 else np.array([0.2]))


def owner_of_pairs(mask: Mask, layout: Layout, pixels: int) -> npt.NDArray[np.int64]:
    """(pixels, pixels): the rank that computes the pair in the middle of each pixel, -1 for pairs that nobody does."""
    tokens = (2 * np.arange(pixels) + 1) * layout.total // (2 * max(pixels, 1))
    owners = np.asarray(layout.owner(tokens), dtype=np.int64)
    found = np.full((pixels, pixels), -1, dtype=np.int64)
    for q0, q1, k0, k1, lo, hi in mask.rows.tolist():
        q, k = (slice(*np.searchsorted(tokens, edges)) for edges in ((q0, q1), (k0, k1)))
        distance = tokens[k][None, :] - tokens[q][:, None]
        seen = (distance >= lo) & (distance <= hi)
        found[q, k] = np.where(seen, owners[q][:, None], found[q, k])
    return found


def _draw_pairs(axes: Any, mask: Mask, layout: Layout, colours: Any) -> None:
    from matplotlib.patches import Patch

    total = layout.total
    owners = owner_of_pairs(mask, layout, min(total, MOST_PIXELS))
    picture = np.where((owners >= 0)[:, :, None], np.asarray(colours)[np.maximum(owners, 0)], 1.0)
    if total:
        axes.imshow(picture, extent=(0, total, total, 0), interpolation="nearest")
    cu = mask.cu_seqlens
    documents = [d for d in range(len(cu) - 1) if cu[d + 1] > cu[d]]
    wide = [d for d in documents if cu[d + 1] - cu[d] > total / 150]
    for d in wide:
        axes.axvline(cu[d], color="0.75", linewidth=0.6)
        axes.axhline(cu[d], color="0.75", linewidth=0.6)
    named = [d for d in documents if cu[d + 1] - cu[d] > total / 40]
    named = named or documents[:: max(1, len(documents) // 8)]
    middles = [(int(cu[d]) + int(cu[d + 1])) / 2 for d in named]
    axes.set_xticks(middles, [str(d) for d in named], fontsize=8)
    axes.set_yticks(middles, [f"doc {d}" for d in named], fontsize=8)
    axes.set_xlabel("keys, by document")
    axes.set_ylabel("queries, by document")
    axes.set_title("who computes which pair")
    shown = _some(layout.world_size)
    patches = [Patch(color=colours[rank], label=f"rank {rank}") for rank in shown]
    axes.legend(handles=patches, fontsize=8, loc="upper right", ncols=1 + len(shown) // 13)


def _draw_bars(axes: list[Any], report: Report, colours: Any) -> None:
    ranks = np.arange(len(report.ranks))
    work, tokens, traffic = axes
    work.bar(ranks, [rank.area for rank in report.ranks], color=colours)
    work.axhline(report.load_bound, color="0.2", linewidth=0.9, linestyle="--")
    work.set_title("pairs computed by each rank (dashed: the bound of any layout)", fontsize=9)
    tokens.bar(ranks, [rank.tokens for rank in report.ranks], color=colours)
    tokens.set_title("tokens held", fontsize=9)
    traffic.bar(ranks - 0.2, [rank.bytes_received / 1e6 for rank in report.ranks], 0.4, color="tab:orange")
    traffic.bar(ranks + 0.2, [rank.bytes_sent / 1e6 for rank in report.ranks], 0.4, color="tab:green")
    traffic.set_title("MB received (left, orange) and sent (right, green)", fontsize=9)
    shown = _some(len(ranks))
    for each in axes:
        each.set_xticks(shown, [str(rank) for rank in shown], fontsize=8)
        each.tick_params(axis="y", labelsize=8)
        each.margins(x=0.01)


def _draw_matrix(figure: Any, axes: Any, matrix: Ints, node_size: int | None) -> None:
    world, shown = len(matrix), _some(len(matrix))
    image = axes.imshow(matrix / 1e6, cmap="Blues", vmin=0, vmax=max(float(matrix.max()) / 1e6, 1e-9))
    figure.colorbar(image, ax=axes, label="MB")
    for edge in range(node_size or world, world, node_size or world):
        axes.axvline(edge - 0.5, color="0.2", linewidth=0.8)
        axes.axhline(edge - 0.5, color="0.2", linewidth=0.8)
    names, size = [str(rank) for rank in shown], 8 if len(shown) < 17 else 6
    axes.set_xticks(shown, names, fontsize=size, rotation=0 if len(shown) < 17 else 90)
    axes.set_yticks(shown, names, fontsize=size)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.set_title("who sends to whom", fontsize=9)


def _some(count: int) -> list[int]:
    """All of 0 … count - 1 if they are few, else every so many."""
    return list(range(0, count, -(-count // MOST_NAMED)))
