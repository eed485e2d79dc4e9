"""Pictures of what was measured: curves of a run, timelines of ranks, bars of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longweave.errors import BackendError
from longweave.tools.terminal import check_writable

if TYPE_CHECKING:  # a picture of a plan needs no torch
    from longweave.tools.timeline import TimedInterval, Timeline
    from longweave.tools.train.loop import Metrics

MOST_LANES = 32  # in a picture; ranks beyond are left out, and it says so
MOST_CURVES = 8  # ranks that have a curve of their own; of more, the least and the largest are drawn
# The shades of a lane: what, in words, light and dark enough for both papers.
SHADES = {
    "call": ("computing in longweave's calls", "#2f6fd0"),
    "rest": ("computing, the rest of the step", "#9dbfec"),
    "waiting": ("waiting for other ranks", "#e08a2e"),
}


def shade(interval: TimedInterval) -> str:
    """Which of SHADES an interval has."""
    if not interval.is_busy:
        return "waiting"
    return "call" if interval.what else "rest"


def check_picture(path: Path) -> Any:
    """matplotlib's Figure class, if it can write a file with such an ending."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError("pictures need matplotlib; pip install 'longweave[plot]'") from error
    suffixes = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in suffixes:
        known = ", ".join(f".{suffix}" for suffix in sorted(suffixes))
        raise BackendError(f"the picture is {str(path)!r}; give a file that ends in one of {known}")
    return Figure


def prepare(path: Path) -> None:
    """Before anything is measured: raises if the picture could not be written then."""
    check_picture(path)
    check_writable(path)


def save_figure(figure: Any, path: Path) -> str:
    """Says what was written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return f"wrote {path}"


# -- a run ---------------------------------------------------------------------------------------------


def draw_run(name: str, history: Sequence[Metrics], timeline: Timeline, path: Path) -> None:
    """Loss, tokens a second, load of the ranks, and one step."""
    lanes = _lane_height(timeline)
    figure = check_picture(path)(figsize=(12, 3.6 + lanes), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=(3.6, lanes))
    steps = [m.step for m in history]
    loss, speed = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    loss.plot(steps, [m.loss for m in history], linewidth=2, label=name)
    loss.set(xlabel="step", title="loss, nats per byte")
    _finish(loss)
    speed.plot(steps, [m.tokens_per_second for m in history], linewidth=1.5, label=name)
    speed.set(xlabel="step", title="tokens a second, of all ranks")
    speed.set_ylim(bottom=0)
    _finish(speed)
    _loads(figure.add_subplot(grid[0, 2]), history)
    _lanes(figure.add_subplot(grid[1, :]), timeline)
    _lane_legend(figure)
    save_figure(figure, path)


def _loads(axes: Any, history: Sequence[Metrics]) -> None:
    steps, ranks = [m.step for m in history], len(history[0].loads)
    if ranks <= MOST_CURVES:
        curves = {f"rank {rank}": [m.loads[rank] for m in history] for rank in range(ranks)}
    else:
        curves = {"busiest": [max(m.loads) for m in history], "least busy": [min(m.loads) for m in history]}
    for name, values in curves.items():
        axes.plot(steps, values, linewidth=1.5, label=name)
    axes.axhline(1.0, color="0.4", linewidth=0.8, linestyle="--")
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))
    axes.set_ylim(min(0.9, low - 0.02), max(1.1, high + 0.02))  # rounding is not to look like a load
    axes.set(xlabel="step", title="attention work over the mean")
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.margins(x=0.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8)


# -- timelines -----------------------------------------------------------------------------------------


def draw_timelines(timelines: Sequence[Timeline], path: Path) -> str:
    """One under the other, all on one scale."""
    heights = [_lane_height(timeline) for timeline in timelines]
    figure = check_picture(path)(figsize=(12, sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, timeline in zip(all_axes, timelines, strict=True):
        _lanes(axes, timeline)
        axes.set_xlim(0, 1e3 * max(one.seconds for one in timelines))
    _lane_legend(figure)
    return save_figure(figure, path)


def _lane_height(timeline: Timeline) -> float:
    """Inches, with title and legend."""
    return 1.5 + 0.45 * min(len(timeline.lanes), MOST_LANES)


def _lanes(axes: Any, timeline: Timeline) -> None:
    lanes = timeline.lanes[:MOST_LANES]
    for row, lane in enumerate(lanes):
        for name, (_, colour) in SHADES.items():
            bars = [(1e3 * one.begin, 1e3 * one.seconds) for one in lane.intervals if shade(one) == name]
            axes.broken_barh(bars, (row - 0.32, 0.64), color=colour, linewidth=0)
        moments = [1e3 * one.at for one in lane.sent]
        axes.plot(moments, [row - 0.42] * len(moments), "v", color="0.15", markersize=4)
    names = [f"rank {lane.rank}: busy {lane.busy_share:.0%}, sent {lane.bytes_sent() / 1e3:.1f} kB" for lane in lanes]
    axes.set_yticks(range(len(lanes)), names, fontsize=8)
    axes.set_ylim(len(lanes) - 0.4, -0.7)
    axes.set_xlim(0, 1e3 * timeline.seconds)
    axes.set_xlabel("milliseconds since a rank left the barrier in front of the step")
    left_out = f"; the first {MOST_LANES} of {len(timeline.lanes)} ranks" if len(timeline.lanes) > MOST_LANES else ""
    axes.set_title(f"{timeline.title}, {1e3 * timeline.seconds:.1f} ms{left_out}", loc="left", fontsize=10)


def _lane_legend(figure: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=colour, label=words) for words, colour in SHADES.values()]
    handles.append(Line2D([], [], marker="v", color="0.15", linestyle="", markersize=4, label="an exchange is sent"))
    figure.legend(handles=handles, fontsize=8, ncols=4, loc="outside lower right", frameon=False)


# -- benchmarks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BarPanel:
    """Groups of bars: for each label on the axis a bar of every series."""

    title: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float]]


def draw_bars(panels: Sequence[BarPanel], path: Path, title: str = "", columns: int = 3) -> str:
    """Panels side by side, `columns` in a row, with the value on every bar where there is room."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    width = max(4.6, *(0.22 * len(panel.labels) * len(panel.series) for panel in panels))
    figure = check_picture(path)(figsize=(width * columns, 3.8 * rows + 0.4), layout="constrained")
    for place, panel in enumerate(panels):
        _bars(figure.add_subplot(rows, columns, place + 1), panel)
    figure.suptitle(title, fontsize=11)
    return save_figure(figure, path)


def _bars(axes: Any, panel: BarPanel) -> None:
    count = len(panel.series)
    width = 0.84 / max(count, 1)
    crowded = count * len(panel.labels) > 6
    for i, (name, values) in enumerate(panel.series.items()):
        places = [at + (i - (count - 1) / 2) * width for at in range(len(panel.labels))]
        bars = axes.bar(places, values, width, label=name)
        axes.bar_label(bars, fmt="{:.4g}", fontsize=7, rotation=90 if crowded else 0, padding=2)
    axes.set_xticks(range(len(panel.labels)), panel.labels, fontsize=8)
    axes.set_title(panel.title, fontsize=10)
    axes.margins(y=0.22)
    if count > 1:
        axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
