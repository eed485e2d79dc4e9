"""The command line: `longweave …`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from longweave import __version__
from longweave.extras import require
from longweave.plan import Shape
from longweave.tools.progress import running_clock
from longweave.tools.signals import end_on_sigterm

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Context parallelism for PyTorch.")
bench = typer.Typer(no_args_is_help=True, help="Measure here: ratios from one run.")
app.add_typer(bench, name="bench")
WIDE = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140  # tables in pipes are not squeezed to 80 columns
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
console = Console(width=WIDE)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"longweave {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show it and exit."),
) -> None:
    """Context parallelism for PyTorch."""
    if not UNDER_TORCHRUN:  # whose ranks may be deep in a wait, where only the default action is quick
        end_on_sigterm()


@bench.callback()
def bench_progress(ctx: typer.Context) -> None:
    """Measure here: ratios from one run."""
    ctx.with_resource(running_clock(console, f"bench {ctx.invoked_subcommand}: measuring"))


@app.command("plan", context_settings={"ignore_unknown_options": True})  # -5 is a wrong length, not an option
def plan(
    lengths: list[str] = typer.Argument(None, help="Document lengths, such as 137 2041 89."),  # noqa: B008
    lengths_file: Path = typer.Option(None, help="Read them from a .txt, .json, .csv or .npy file."),  # noqa: B008
    ranks: int = 4,
    mask: str = typer.Option("causal", help="causal, full, or shared-prefix (the first document is a prompt)."),
    window: int = typer.Option(None, help="Tokens that a token sees, itself included; all by default."),
    layout: str = typer.Option("auto", help="auto, balanced, zigzag or contiguous."),
    strategy: str = typer.Option("auto", help="auto, groupcast, ring, allgather or ulysses."),
    heads: int = Shape.heads,
    kv_heads: int = Shape.kv_heads,
    head_dim: int = Shape.head_dim,
    node_size: int = typer.Option(None, help="Ranks in a node: the balanced layout keeps traffic inside where it can."),
    picture: Path = typer.Option(None, "--picture", "--png", help="Also draw it to this file, such as p.png."),  # noqa: B008
    html: Path = typer.Option(None, help="Also write a page to explore it, with other layouts and strategies."),  # noqa: B008
) -> None:
    """Who holds and computes what for a pack of documents, what it sends, and why. Needs no ranks."""
    from longweave.errors import LongweaveError
    from longweave.tools.planning import PlanRequest, command

    shape = Shape(heads, kv_heads, head_dim)
    try:
        given = command.given_lengths(lengths, lengths_file)
        asked = PlanRequest(given, ranks, mask, window, layout, strategy, shape, node_size)
        with Console(stderr=True).status("planning") as status:
            for text in command.outputs(asked, picture, html, lambda what: status.update(f"planning {what}")):
                typer.echo(text)
    except LongweaveError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error


@app.command("train")
def train(
    model: str = typer.Option("qwen3_5", help="qwen3_5 (hybrid), qwen3_next, llama, qwen3, qwen3_moe, mistral."),
    ranks: int = typer.Option(2, min=1, max=1024, help="Local ranks to start; ignored under torchrun."),
    dp: int = typer.Option(1, help="Data-parallel rows; the other ranks divide the sequence."),
    steps: int = 50,
    tokens: int = typer.Option(2048, help="Tokens in one batch."),
    accumulate: int = typer.Option(1, help="Batches per step and data-parallel row."),
    hidden: int = 64,
    layers: int = 4,
    lr: float = 3e-3,
    clip: float = typer.Option(1.0, help="Largest gradient norm, over the whole mesh."),
    seed: int = 0,
    bf16: bool = typer.Option(False, help="bfloat16 autocast."),
    checkpointing: bool = typer.Option(False, help="Recompute activations in backward."),
    layout: str = typer.Option("auto", help="auto, zigzag, contiguous or balanced."),
    strategy: str = typer.Option("auto", help="auto, groupcast, ring, allgather or ulysses."),
    out: Path = typer.Option(Path("out/train"), help="Folder for metrics, plot and checkpoints."),  # noqa: B008
    save_every: int = typer.Option(0, help="Steps between checkpoints; 0 is never."),
    resume: str = typer.Option(
        None,
        help="A checkpoint, or the out folder of a run; `auto` is --out if it has one. Ranks may be more or fewer.",
    ),
    wait: float = typer.Option(30.0, envvar="LONGWEAVE_WAIT", help="Seconds that ranks wait for each other in a step."),
    timeout: float = typer.Option(600.0, help="Seconds that they do at the start and around checkpoints."),
) -> None:
    """Train a small byte-level model on Python's own sources, with the sequence split across ranks."""
    require("transformers", "matplotlib")
    if console.is_terminal:  # the bar comes with the first step, from a rank
        console.print("loading torch and starting ranks …")
    from longweave.errors import LongweaveError
    from longweave.tools.train import run
    from longweave.tools.train.failures import TrainingError
    from longweave.tools.train.loop import TrainConfig
    from longweave.tools.train.workload import FAMILIES

    if model not in FAMILIES:
        raise typer.BadParameter(f"model is {model!r}; choose one of {', '.join(FAMILIES)}")
    config = TrainConfig(
        model=model,
        hidden=hidden,
        layers=layers,
        steps=steps,
        tokens=tokens,
        dp=dp,
        accumulate=accumulate,
        lr=lr,
        clip=clip,
        seed=seed,
        bf16=bf16,
        checkpointing=checkpointing,
        layout=layout,
        strategy=strategy,
        out=out,
        save_every=save_every,
        resume="auto" if resume == "auto" else Path(resume) if resume else None,
        wait=wait,
        timeout=timeout,
    )
    try:
        history = run.run_under_torchrun(config) if UNDER_TORCHRUN else run.run_local(config, ranks)
    except LongweaveError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1 if isinstance(error, TrainingError) else 2) from error
    if int(os.environ.get("RANK", "0")) == 0:
        typer.echo(run.line(history[-1]) if history else "nothing left to do")
        run.plot_losses({f"{model}, seed {seed}": history}, out / "loss.png")
        console.print(f"wrote {out / 'metrics.jsonl'} and {out / 'loss.png'}")


@app.command("doctor")
def doctor(
    ranks: int = typer.Option(
        None, min=1, help="Local ranks to start: one for each GPU by default, 2 on the CPU; ignored under torchrun."
    ),
    device: str = typer.Option(None, help="cuda or cpu; by default cuda if there is one."),
    model: str = typer.Option("qwen3_5", help="The family of the two-layer model, as in `longweave train`."),
    json: Path = typer.Option(  # noqa: B008
        None, help="Also write all that was found to this file, for a report; its folder is made if need be."
    ),
) -> None:
    """Check this installation: collectives, every kernel, strategy and mixer against one process, a model, and speed.

    Exit code 0: all that could be checked is right.

    1: something failed. 2: the command could not be understood.

    3: CUDA was asked for and there is none; the CPU was checked and is right.
    """
    if device not in (None, "cuda", "cpu"):
        raise typer.BadParameter(f"device is {device!r}; choose cuda or cpu")
    if json is not None and os.environ.get("RANK", "0") == "0":
        try:  # now, not after minutes of checks
            json.parent.mkdir(parents=True, exist_ok=True)
            json.open("a").close()
        except OSError as error:
            raise typer.BadParameter(f"--json {json} cannot be written: {error.strerror}") from error
    with console.status("loading torch and starting ranks") as status:  # loading takes seconds
        from longweave.tools.doctor.show import run_and_show
        from longweave.tools.train.workload import FAMILIES

        if model not in FAMILIES:
            raise typer.BadParameter(f"model is {model!r}; choose one of {', '.join(FAMILIES)}")
        found = run_and_show(console, status, device or "auto", ranks, model, json)
    raise typer.Exit(found.exit_code)


@app.command("audit")
def audit(
    ctx: typer.Context,
    model: str = typer.Option("qwen3_5", help="A family, as in `longweave train`."),
    ranks: int = typer.Option(2, min=1, help="Local ranks to start; ignored under torchrun."),
    way: str = typer.Option("parallelize", help="parallelize or pool: how the model is divided over ranks."),
    tokens: int = typer.Option(600, min=16, help="In the batch."),
    layout: str = typer.Option("auto", help="auto, zigzag, contiguous or balanced."),
    strategy: str = typer.Option("auto", help="auto, groupcast, ring, allgather or ulysses."),
    seed: int = 0,
    json: Path = typer.Option(None, help="Also write the report to this file."),  # noqa: B008
) -> None:
    """Audit a training step across ranks against one process: who sees whom, labels, positions, loss, gradients.

    `lw.audit` does the same for a step of your own. Exit code 0: right. 1: a fault was named. 2: not understood.
    """
    require("transformers")
    ctx.with_resource(running_clock(console, "audit: loading torch and starting ranks"))
    from longweave.errors import LongweaveError
    from longweave.tools.audit import command

    for name, value, known in (("model", model, command.FAMILIES), ("way", way, command.WAYS)):
        if value not in known:
            raise typer.BadParameter(f"{name} is {value!r}; choose one of {', '.join(known)}")
    workload = command.AuditedWorkload(model, way, tokens, layout, strategy, seed)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    try:
        report = command.run_under_torchrun(workload) if under_torchrun else command.run_local(workload, ranks)
    except LongweaveError as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(2) from error
    if int(os.environ.get("RANK", "0")) == 0:
        typer.echo(f"{model}, lw.{way}: {report}")
        if json is not None:
            json.parent.mkdir(parents=True, exist_ok=True)
            json.write_text(report.as_json() + "\n")
            typer.echo(f"wrote {json}")
    raise typer.Exit(0 if report.ok else 1)


@bench.command("attention")
def bench_attention(
    tokens: list[int] = typer.Argument(None, min=2, help="Document lengths; 8192 16384 by default."),  # noqa: B008
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


@bench.command("packed")
def bench_packed(tokens: list[int] = typer.Argument(None, min=64, help="Pack sizes; 8192 32768 by default.")) -> None:  # noqa: B008
    """Packed documents on 2 and 4 local ranks: group-cast, all-gather, ring and one process. Takes minutes."""
    from longweave.tools.bench import packed

    typer.echo("packed causal documents, forward + backward, float32, 8:2 heads, d 64, one thread a rank;")
    typer.echo(f"{packed.PLANNED_FOR}; group-cast in seconds, and how many times faster it is")
    columns = "documents,tokens,ranks,groupcast s,over 1 process x 2 threads,over allgather,over ring"
    titles = [*columns.split(","), "MB received", "MB all-gather"]
    typer.echo("  ".join(titles))
    for length in tokens or [8192, 32768]:
        for kind in ("lognormal", "giant"):
            for row in packed.run(length, kind):  # minutes: every row is shown when it is there
                ratios = (row.one_process, row.allgather, row.ring)
                cells = [row.kind, str(row.tokens), str(row.ranks), f"{row.groupcast:.3f}"]
                cells += [f"{other / row.groupcast:.2f}" for other in ratios]
                cells += [f"{row.mb_groupcast:.2f}", f"{row.mb_allgather:.2f}"]
                typer.echo("  ".join(cell.rjust(len(title)) for cell, title in zip(cells, titles, strict=True)))


@bench.command("compare")
def bench_compare(tokens: int = typer.Argument(32768, min=64), ranks: int = typer.Option(4, min=1, max=1024)) -> None:
    """Packed documents: traffic, balance and memory of all-gather, ring and group-cast."""
    from longweave.tools.bench import packed

    typer.echo(packed.PLANNED_FOR)
    table = Table(title=f"{tokens} tokens of log-normal documents on {ranks} ranks, one forward, worst rank")
    for column in ("strategy", "layout", "tokens received", "imbalance", "MB kept with inputs", "MB peak over inputs"):
        table.add_column(column, justify="left" if column in ("strategy", "layout") else "right")
    for row in packed.compare(packed.documents("lognormal", tokens), ranks):
        numbers = (f"{row.imbalance:.3f}", f"{row.mb_kept:.1f}", f"{row.mb_peak:.1f}")
        table.add_row(row.strategy, row.layout, str(row.tokens_received), *numbers)
    console.print(table)


@bench.command("peers")
def bench_peers(
    tokens: int = typer.Argument(8192, min=64, help="Of a document, a pack and a step; the delta rule has half."),
    ranks: list[int] = typer.Option([2, 4], min=1, max=1024, help="Local ranks; may be given several times."),  # noqa: B008
    rounds: int = typer.Option(7, min=1, help="In which all take turns."),
    only: list[str] = typer.Option(None, help="document, packed, delta or step; may be given several times."),  # noqa: B008
    picture: Path = typer.Option(None, help="Also draw the ratios to this file, such as peers.png."),  # noqa: B008
    json: Path = typer.Option(None, help="Also write everything to this file."),  # noqa: B008
) -> None:
    """Ours beside ring-flash-attention, torch, Hugging Face, DDP and one process, in one run. Takes minutes."""
    from longweave.tools.bench import peers, tables

    if picture is not None:
        require("matplotlib")
    if unknown := [name for name in only or () if name not in peers.CASES]:
        raise typer.BadParameter(f"only is {unknown[0]!r}; choose from {', '.join(peers.CASES)}")
    comparison = peers.Comparison()
    cases = [peers.CASES[name] for name in only or peers.CASES]
    peers.run(peers.races(tokens, ranks, rounds, cases), comparison)
    console.print(tables.peers_table(comparison))
    for line in (*tables.missing_lines(comparison), *comparison.verdicts):
        typer.echo(line)
    if picture is not None:
        tables.draw_peers(comparison, picture)
        typer.echo(f"wrote {picture}")
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
    plot: Path = typer.Option(Path("out/linear.png"), help="Where the plot of the methods goes."),  # noqa: B008
) -> None:
    """The gated delta rule: over lengths, and by every method on 2 local ranks."""
    require("matplotlib")
    from longweave.tools.bench import linear

    table = Table(title="gated delta rule, float32, 4 heads, 128 × 128, one thread a process unless said")
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
    linear.plot(rows, plot)
    console.print(f"plot: {plot}")


@bench.command("pool")
def bench_pool(
    ranks: int = typer.Option(2, min=2, help="Local ranks, one thread each; no more than cores."),
    rows: int = typer.Option(2, min=1, help="Of a rank in a step."),
    steps: int = typer.Option(8, min=1, help="With new lengths in each."),
    longest: int = typer.Option(8192, min=16, help="Tokens of the longest row."),
    seed: int = typer.Option(0, help="Of the lengths."),
    rounds: int = typer.Option(2, min=1, help="Of each step, of which the best counts: for machines that are shared."),
) -> None:
    """DDP against DDP with `lw.pool`, on rows of very different lengths and on equal ones. Takes minutes."""
    require("transformers")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler, which measures memory, would tell that it does
    from longweave.launch import Ranks
    from longweave.tools.bench import pool
    from longweave.tools.bench.tables import pool_table

    said = []
    with Ranks(ranks, timeout=3600) as workers:
        sizes = {"ranks": ranks, "rows": rows, "steps": steps, "longest": longest, "seed": seed, "rounds": rounds}
        for workload in pool.workloads(**sizes):
            lines = pool.run(workload, workers)
            console.print(pool_table(lines))
            said += pool.verdict(lines)
    for line in said:
        typer.echo(line)


if __name__ == "__main__":
    app()
