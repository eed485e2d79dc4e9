"""The command line: `longweave …`."""

from __future__ import annotations

import os
from pathlib import Path

import typer
from rich.console import Console

from longweave import __version__
from longweave.errors import LongweaveError
from longweave.extras import require
from longweave.plan import Shape
from longweave.tools.bench_commands import bench
from longweave.tools.terminal import console, end_on_sigterm, errors, running_clock, will_be_written

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Context parallelism for PyTorch.",
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.add_typer(bench, name="bench")
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ


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


@app.command("plan", context_settings={"ignore_unknown_options": True})  # -5 is a wrong length, not an option
def plan(
    lengths: list[str] = typer.Argument(None, help="Document lengths, such as 137 2041 89."),  # noqa: B008
    lengths_file: Path = typer.Option(None, help="Read them from a .txt, .json, .csv or .npy file; - is stdin."),  # noqa: B008
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
    from longweave.tools.planning import PlanRequest, command

    shape = Shape(heads, kv_heads, head_dim)
    try:
        given = command.given_lengths(lengths, lengths_file)
        asked = PlanRequest(given, ranks, mask, window, layout, strategy, shape, node_size)
        with Console(stderr=True).status("planning") as status:
            tell = lambda what: status.update(f"planning {what}")  # noqa: E731
            for text in command.outputs(asked, picture, html, console.width, tell):
                status.stop()  # it is drawn on the same terminal
                typer.echo(text)
                status.start()
    except LongweaveError as error:
        errors.print(str(error), style="red", markup=False)
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
        errors.print(str(error), style="red", markup=False)
        raise typer.Exit(1 if isinstance(error, TrainingError) else 2) from error
    if int(os.environ.get("RANK", "0")) == 0:
        typer.echo(run.line(history[-1]) if history else "nothing left to do")
        typer.echo(run.draw(f"{model}, seed {seed}", history, out))


@app.command("doctor")
def doctor(
    ranks: int = typer.Option(
        None, min=1, help="Local ranks to start: one for each GPU by default, 2 on the CPU; ignored under torchrun."
    ),
    device: str = typer.Option(None, help="cuda or cpu; by default cuda if there is one."),
    model: str = typer.Option("qwen3_5", help="The family of the two-layer model, as in `longweave train`."),
    json: Path = typer.Option(  # noqa: B008
        None,
        callback=will_be_written,
        help="Also write all that was found to this file, for a report; its folder is made if need be.",
    ),
) -> None:
    """Check this installation: collectives, every kernel, strategy and mixer against one process, a model, and speed.

    Exit code 0: all that could be checked is right.

    1: something failed. 2: the command could not be understood.

    3: CUDA was asked for and there is none; the CPU was checked and is right.
    """
    if device not in (None, "cuda", "cpu"):
        raise typer.BadParameter(f"device is {device!r}; choose cuda or cpu")
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
    json: Path = typer.Option(None, callback=will_be_written, help="Also write the report to this file."),  # noqa: B008
) -> None:
    """Audit a training step across ranks against one process: who sees whom, labels, positions, loss, gradients.

    `lw.audit` does the same for a step of your own. Exit code 0: right. 1: a fault was named. 2: not understood.
    """
    require("transformers")
    ctx.with_resource(running_clock("audit: loading torch and starting ranks"))
    from longweave.tools.audit import command

    for name, value, known in (("model", model, command.FAMILIES), ("way", way, command.WAYS)):
        if value not in known:
            raise typer.BadParameter(f"{name} is {value!r}; choose one of {', '.join(known)}")
    workload = command.AuditedWorkload(model, way, tokens, layout, strategy, seed)
    try:
        report = command.run_under_torchrun(workload) if UNDER_TORCHRUN else command.run_local(workload, ranks)
    except LongweaveError as error:
        errors.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from error
    if int(os.environ.get("RANK", "0")) == 0:
        typer.echo(f"{model}, lw.{way}: {report}")
        if json is not None:
            json.parent.mkdir(parents=True, exist_ok=True)
            json.write_text(report.as_json() + "\n")
            typer.echo(f"wrote {json}")
    raise typer.Exit(0 if report.ok else 1)


if __name__ == "__main__":
    app()
