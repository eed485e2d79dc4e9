"""What `longweave bench peers` and `longweave bench pool` print, draw and write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from longweave.tools.bench.peers.results import OURS, PeerTime
from longweave.tools.bench.pool import PoolTime
from longweave.tools.charts import BarPanel, check_picture, save_figure

if TYPE_CHECKING:
    from longweave.tools.bench.peers import Comparison

# -- peers -----------------------------------------------------------------------------------------------


def peers_table(comparison: Comparison) -> Table:
    table = Table(title="ours beside others: same kernel, same run, in turns; float32, one thread a rank")
    table.caption = f"median (quartiles) of the rounds, slowest rank; above 1 ours is faster; {comparison.machine}"
    for column in ("what", "ranks", "tokens", "who", "seconds", "theirs over ours", "by CPU time", "bar"):
        table.add_column(column, justify="left" if column in ("what", "who") else "right")
    for line in comparison.times:
        ratio = "" if line.who == OURS else str(line.ratio)
        busy = "" if line.who == OURS or line.busy_ratio is None else f"{line.busy_ratio.median:.2f}"
        bar = "" if line.bar is None else f"≥ {line.bar:.2f}"
        time = f"{line.time.median:.3f} ({line.time.low:.3f} to {line.time.high:.3f})"
        first = (line.case, str(line.ranks), str(line.tokens)) if line.who == OURS else ("", "", "")
        table.add_row(*first, line.who, time, ratio, busy, bar, end_section=_last(line, comparison.times))
    return table


def _last(line: PeerTime, times: Sequence[PeerTime]) -> bool:
    same = [other for other in times if (other.case, other.ranks) == (line.case, line.ranks)]
    return line is same[-1]


def missing_lines(comparison: Comparison) -> list[str]:
    """Each peer that did not take part, once, with the races that it missed."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for peer in comparison.missing:
        by_reason.setdefault((peer.who, peer.reason), []).append(f"{peer.case}, {peer.ranks} ranks")
    return [f"missing: {who} ({'; '.join(where)}): {reason}" for (who, reason), where in by_reason.items()]


def write_json(comparison: Comparison, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(comparison.as_json(), indent=1) + "\n")


def draw_peers(comparison: Comparison, path: Path) -> str:
    """A bar for every peer: its seconds over ours, with quartiles, and a tick where the least is."""
    lines = [line for line in comparison.times if line.who != OURS]
    figure = check_picture(path)(figsize=(9, 1.2 + 0.36 * len(lines)), layout="constrained")
    axis = figure.add_subplot()
    for place, line in enumerate(lines):
        ratio = line.ratio
        whiskers = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
        axis.barh(place, ratio.median, xerr=whiskers, color="C0" if ratio.median >= 1 else "C1", height=0.7, capsize=3)
        if line.bar is not None:
            axis.plot([line.bar] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
    axis.set_yticks(range(len(lines)), [f"{line.case}, {line.ranks}: {line.who}" for line in lines], fontsize=8)
    axis.invert_yaxis()
    axis.axvline(1, color="gray", linewidth=1)
    axis.set_xlabel("their seconds over ours (above 1: ours is faster); black: the least that is wanted")
    axis.set_title(comparison.machine, fontsize=8)
    return save_figure(figure, path)


# -- pool ------------------------------------------------------------------------------------------------


def pool_table(lines: list[PoolTime]) -> Table:
    first = lines[0]
    work = first.workload
    kind = "equal rows" if work.equal else f"rows of log-normal lengths, up to {work.longest} tokens"
    table = Table(
        title=f"{work.family}, {kind}: {work.ranks} ranks × {work.rows} rows × {work.steps} steps, DDP, float32",
        caption=f"the slowest rank has {first.allowed:.2f} × the mean work at home: no sharing gains more",
    )
    table.add_column("")
    columns = "s a step,ratio,median,of the gain,of allowed,CPU ratio,work,tokens,CPU time,MB moved,MB peak"
    for column in columns.split(","):
        table.add_column(column, justify="right")
    for line in lines:
        gain = f"{line.share:.0%}" if line.variant != "home" and not work.equal else ""
        slowest = (line.slowest_work, line.slowest_tokens, line.slowest_busy)
        table.add_row(
            line.variant,
            f"{line.seconds / work.steps:.2f}",
            f"{line.ratio:.2f}",
            f"{line.median_ratio:.2f}",
            gain,
            f"{line.ratio / line.allowed:.2f}",
            f"{line.busy_ratio:.2f}",
            *(f"{value:.2f}" for value in slowest),
            f"{line.mb_sent:.2f}",
            f"{line.mb_peak:.0f}" if line.mb_peak else "",
        )
    return table


def pool_panels(lines: list[PoolTime]) -> list[BarPanel]:
    """Seconds of every step, and the work of its ranks: that of the busiest one, over the mean."""
    work = lines[0].workload
    name = f"{work.family}, {'equal rows' if work.equal else 'log-normal rows'}"
    labels = [f"step {step}" for step in range(work.steps)]
    return [
        BarPanel(f"{name}: seconds", labels, {line.variant: line.step_seconds for line in lines}),
        BarPanel(
            f"{name}: busiest of {work.ranks} ranks over the mean work",
            labels,
            {line.variant: [max(loads) for loads in line.loads] for line in lines},
        ),
    ]
