"""The command line: `longweave …`."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Context parallelism for PyTorch.")
bench = typer.Typer(no_args_is_help=True, help="Measure here: ratios from one run.")
app.add_typer(bench, name="bench")
console = Console()


@app.callback()
def main() -> None:
    """Context parallelism for PyTorch."""


@bench.command("attention")
def bench_attention(tokens: list[int] = typer.Argument(None, help="Document lengths; 8192 16384 by default.")) -> None:  # noqa: B008
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


if __name__ == "__main__":
    app()
