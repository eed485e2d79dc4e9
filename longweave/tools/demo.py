"""`make demo`: the same hybrid model trained on two ranks and on one, side by side.

GatedDeltaNet and softmax attention on one balanced layout of packed documents; the losses must agree. All that was seen
is on one page, `out/demo/index.html`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from longweave.errors import LongweaveError
from longweave.plan import CPU, Shape
from longweave.tools.draw import draw_layout
from longweave.tools.planning import PlanRequest
from longweave.tools.planning.page import make_page
from longweave.tools.terminal import end_on_sigterm

if TYPE_CHECKING:
    from longweave.tools.train.loop import TrainConfig

OUT = Path("out/demo")
TOLERANCE = 1e-4


def main(steps: int = 30, tokens: int = 2048) -> None:
    begin = time.perf_counter()
    print("loading torch …", flush=True)  # for seconds
    from longweave.tools.demo_page import LOSS_COLUMNS, DemoResult, demo_page
    from longweave.tools.timeline import Timeline
    from longweave.tools.train.loop import TIMELINE, TrainConfig
    from longweave.tools.train.run import run_local

    config = TrainConfig(steps=steps, tokens=tokens, layout="balanced", strategy="groupcast", out=OUT / "two-ranks")
    request = planned(config)
    layout_text = draw_layout(request.plan.layout, request.mask.cu_seqlens, width=80)
    print(f"A byte-level Qwen3.5-style model, packs of {tokens} tokens of Python's standard library.")
    print(f"The first pack has {len(request.lengths)} documents; who holds what:\n")
    print(layout_text, "\n")
    print(request.plan.report(), "\n")
    print("two ranks, the sequence split between them:", flush=True)
    two = run_local(config, 2, threads=1)
    print("one process, the whole sequence:", flush=True)
    one = run_local(replace(config, out=None), 1, threads=1)
    timeline = Timeline.load(OUT / "two-ranks" / TIMELINE)
    result = DemoResult(f"{layout_text}\n\n{request.plan.report()}", two, one, timeline)
    print("\n" + "   ".join(LOSS_COLUMNS))
    for row in result.loss_rows():
        print("   ".join(cell.rjust(len(column)) for cell, column in zip(row, LOSS_COLUMNS, strict=True)))
    print(f"\nlargest difference of a loss: {result.worst:.1e}")
    print(f"work of the busiest rank over the mean, worst step: {result.imbalance:.3f}")
    print(f"K/V sent per softmax layer: {100 * result.kv_share:.1f} % of what gathering sends")
    (OUT / "index.html").write_text(demo_page(result, make_page(request)), encoding="utf-8")
    print(f"wrote {OUT / 'index.html'}, one page with all of it, after {time.perf_counter() - begin:.0f} s")
    if result.worst > TOLERANCE:
        raise SystemExit(f"the losses differ by {result.worst:.1e}, more than {TOLERANCE:.0e}")


def planned(config: TrainConfig) -> PlanRequest:
    """The first pack as the two ranks will hold it: planned for processes on a CPU, in float32."""
    from longweave.tools.train.workload import draw_documents

    lengths = tuple(b - a for a, b in pairwise(draw_documents(config.tokens, config.seed, 0, 0).cu_seqlens))
    shape = Shape(heads=4, kv_heads=2, head_dim=config.hidden // 4, itemsize=4)
    return PlanRequest(lengths, 2, layout=config.layout, strategy=config.strategy, shape=shape, machine=CPU)


if __name__ == "__main__":
    end_on_sigterm()
    try:
        main()
    except (KeyboardInterrupt, LongweaveError) as error:
        raise SystemExit(str(error) or "interrupted") from None
