"""`longweave bench …`: the commands; what they measure is in `tools/bench`, which they load late."""

from __future__ import annotations

import os
from pathlib import Path

import typer
from rich.table import Table

from longweave.errors import LongweaveError
from longweave.extras import require
from longweave.tools import charts
from longweave.tools.terminal import console, running_clock, will_be_written

bench = typer.Typer(no_args_is_help=True, help="Measure here: ratios from one run.")


def _picture(path: Path | None) -> Path | None:
    """One that cannot be drawn is refused now, not after minutes of measuring."""
    if path is not None:
        require("matplotlib")
        try:
            charts.prepare(path)
        except LongweaveError as error:
            raise typer.BadParameter(str(error)) from error
    return path


PICTURE = typer.Option(None, "--picture", callback=_picture, help="Also draw it to this file, such as b.png.")


@bench.callback()
def bench_progress(ctx: typer.Context) -> None:
    """Measure here: ratios from one run."""
    ctx.with_resource(running_clock(f"bench {ctx.invoked_subcommand}: measuring"))


@bench.command("attention")
def bench_attention(
    tokens: list[int] = typer.Argument(None, min=2, help="Document lengths; 8192 16384 by default."),  # noqa: B008
    picture: Path = PICTURE,
) -> None:
    """Softmax attention of one causal document on 2 and 4 local ranks."""
    from longweave.tools.bench import attention

    lengths = tokens or [8192, 16384]
    table = Table(title="one causal document, forward + backward, float32, 8:2 heads, d 64, one thread a rank")
    for column in ("tokens", "ranks", "what", "seconds", "speed-up", "over"):
        table.add_column(column, justify="left" if column in ("what", "over") else "right")
    for length in lengths:
        for row in attention.run(length):
            table.add_row(
                str(row.tokens), str(row.ranks), row.what, f"{row.seconds:.3f}", f"{row.ratio:.2f}", row.against
            )
    console.print(table)
    console.print(attention.timelines(lengths[0]))
    if picture:
        typer.echo(charts.draw_timelines(attention.recorded_timelines(lengths[0]), picture))


@bench.command("packed")
def bench_packed(
    tokens: list[int] = typer.Argument(None, min=64, help="Pack sizes; 8192 32768 by default."),  # noqa: B008
    picture: Path = PICTURE,
) -> None:
    """Packed documents on 2 and 4 local ranks: group-cast, all-gather, ring and one process. Takes minutes."""
    from longweave.tools.bench import packed

    typer.echo("packed causal documents, forward + backward, float32, 8:2 heads, d 64, one thread a rank;")
    typer.echo(f"{packed.PLANNED_FOR}; group-cast in seconds, and how many times faster it is")
    columns = "documents,tokens,ranks,groupcast s,over 1 process x 2 threads,over allgather,over ring"
    titles = [*columns.split(","), "MB received", "MB all-gather"]
    typer.echo("  ".join(titles))
    rows = []
    for length in tokens or [8192, 32768]:
        for kind in ("lognormal", "giant"):
            for row in packed.run(length, kind):  # minutes: every row is shown when it is there
                rows.append(row)
                ratios = (row.one_process, row.allgather, row.ring)
                cells = [row.kind, str(row.tokens), str(row.ranks), f"{row.groupcast:.3f}"]
                cells += [f"{other / row.groupcast:.2f}" for other in ratios]
                cells += [f"{row.mb_groupcast:.2f}", f"{row.mb_allgather:.2f}"]
                typer.echo("  ".join(cell.rjust(len(title)) for cell, title in zip(cells, titles, strict=True)))
    if picture:
        typer.echo(charts.draw_bars(packed.packed_panels(rows), picture))


@bench.command("compare")
def bench_compare(
    tokens: int = typer.Argument(32768, min=64),
    ranks: int = typer.Option(4, min=1, max=1024),
    picture: Path = PICTURE,
) -> None:
    """Packed documents: traffic, balance and memory of all-gather, ring and group-cast."""
    from longweave.tools.bench import packed

    typer.echo(packed.PLANNED_FOR)
    title = f"{tokens} tokens of log-normal documents on {ranks} ranks, one forward, worst rank"
    table = Table(title=title)
    for column in ("strategy", "layout", "tokens received", "imbalance", "MB kept with inputs", "MB peak over inputs"):
        table.add_column(column, justify="left" if column in ("strategy", "layout") else "right")
    rows = packed.compare(packed.documents("lognormal", tokens), ranks)
    for row in rows:
        numbers = (f"{row.imbalance:.3f}", f"{row.mb_kept:.1f}", f"{row.mb_peak:.1f}")
        table.add_row(row.strategy, row.layout, str(row.tokens_received), *numbers)
    console.print(table)
    if picture:
        typer.echo(charts.draw_bars(packed.compare_panels(rows), picture, title))


@bench.command("peers")
def bench_peers(
    tokens: int = typer.Argument(8192, min=64, help="Of a document, a pack and a step; the delta rule has half."),
    ranks: list[int] = typer.Option([2, 4], min=1, max=1024, help="Local ranks; may be given several times."),  # noqa: B008
    rounds: int = typer.Option(7, min=1, help="In which all take turns."),
    only: list[str] = typer.Option(None, help="document, packed, delta or step; may be given several times."),  # noqa: B008
    picture: Path = PICTURE,
    json: Path = typer.Option(None, callback=will_be_written, help="Also write everything to this file."),  # noqa: B008
) -> None:
    """Ours beside ring-flash-attention, torch, Hugging Face, DDP and one process, in one run. Takes minutes."""
    from longweave.tools.bench import peers, tables

    if unknown := [name for name in only or () if name not in peers.CASES]:
        raise typer.BadParameter(f"only is {unknown[0]!r}; choose from {', '.join(peers.CASES)}")
    comparison = peers.Comparison()
    try:
        wanted = peers.races(tokens, ranks, rounds, [peers.CASES[name] for name in only or peers.CASES])
    except LongweaveError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        peers.run(wanted, comparison)
    finally:  # what was measured is shown whatever came then
        console.print(tables.peers_table(comparison))
    for line in (*tables.missing_lines(comparison), *comparison.verdicts):
        typer.echo(line)
    if picture:
        typer.echo(tables.draw_peers(comparison, picture))
    if json is not None:
        tables.write_json(comparison, json)
        typer.echo(f"wrote {json}")


@bench.command("plan")
def bench_plan() -> None:
    """How long planning a batch takes on this host."""
    from longweave.tools.bench import host

    table = Table(title="planning, one thread; every batch pays")
    for column in ("what", "ms", "target ms"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in host.planning():
        table.add_row(row.what, f"{row.ms:.1f}", f"{row.target_ms:.0f}")
    console.print(table)


@bench.command("host")
def bench_host(rounds: int = typer.Option(300, min=1, help="Calls of each kind.")) -> None:
    """Host time of one layer call on tiny tensors, on 2 local ranks."""
    from longweave.tools.bench import host

    table = Table(title="one layer call on 128 tokens a rank, 2 ranks, one thread each, float32; median")
    for column in ("what", "documents", "layout", "forward ms", "forward + backward ms"):
        table.add_column(column, justify="left" if column in ("what", "layout") else "right")
    for call in host.layer_calls(rounds):
        times = (f"{call.forward:.2f}", f"{call.forward_and_backward:.2f}")
        table.add_row(call.name, str(call.documents), call.layout, *times)
    console.print(table)
    console.print(f"of which the flight recorder takes {1e6 * host.recorder_seconds():.2f} µs a call")


@bench.command("linear")
def bench_linear(
    tokens: list[int] = typer.Argument(None, min=16, help="Lengths for the methods; 4096 to 65536 by default."),  # noqa: B008
    picture: Path = PICTURE,
) -> None:
    """The gated delta rule: over lengths, and by every method on 2 local ranks."""
    from longweave.tools.bench import linear

    table = Table(title="gated delta rule, float32, 4 heads, 128 × 128, one thread a process unless named")
    for column in ("what", "seconds", "ratio", "goal", "over"):
        table.add_column(column, justify="left" if column in ("what", "over") else "right")
    for row in (linear.growth(), linear.two_ranks()):
        table.add_row(row.what, f"{row.seconds:.3f}", f"{row.ratio:.2f}", row.goal, row.against)
    console.print(table)
    rows = linear.methods(tokens or [4096, 8192, 16384, 32768, 65536])
    table = Table(title="one document in zigzag on 2 ranks, forward + backward")
    for column in ("tokens", "method", "MiB sent by the busiest rank", "seconds"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for line in rows:
        table.add_row(str(line.tokens), line.method, f"{line.bytes_sent / 2**20:.2f}", f"{line.seconds:.3f}")
    console.print(table)
    if picture:
        typer.echo(linear.draw_methods(rows, picture))


@bench.command("pool")
def bench_pool(
    ranks: int = typer.Option(2, min=2, help="Local ranks, one thread each; no more than cores."),
    rows: int = typer.Option(2, min=1, help="Of a rank in a step."),
    steps: int = typer.Option(8, min=1, help="With new lengths in each."),
    longest: int = typer.Option(8192, min=16, help="Tokens of the longest row."),
    seed: int = typer.Option(0, help="Of the lengths."),
    rounds: int = typer.Option(2, min=1, help="Of each step, of which the best counts: for machines that are shared."),
    picture: Path = PICTURE,
) -> None:
    """DDP against DDP with `lw.pool`, on rows of very different lengths and on equal ones. Takes minutes."""
    require("transformers")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler, which measures memory, would tell that it does
    from longweave.launch import Ranks
    from longweave.tools.bench import pool
    from longweave.tools.bench.tables import pool_panels, pool_table

    verdicts, panels = [], []
    with Ranks(ranks, timeout=3600) as workers:
        sizes = {"ranks": ranks, "rows": rows, "steps": steps, "longest": longest, "seed": seed, "rounds": rounds}
        for workload in pool.workloads(**sizes):
            lines = pool.run(workload, workers)
            console.print(pool_table(lines))
            verdicts += pool.verdict(lines)
            panels += pool_panels(lines)
    for line in verdicts:
        typer.echo(line)
    if picture:
        typer.echo(charts.draw_bars(panels, picture, columns=2))
