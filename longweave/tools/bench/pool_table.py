"""What `longweave bench pool` prints and draws of one workload."""

from __future__ import annotations

from rich.table import Table

from longweave.tools.bench.pool import PoolTime
from longweave.tools.charts import BarPanel


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
