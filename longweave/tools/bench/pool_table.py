"""What `longweave bench pool` prints of one workload."""

from __future__ import annotations

from rich.table import Table

from longweave.tools.bench.pool import PoolTime


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
