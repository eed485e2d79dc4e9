"""`make demo`: the same hybrid model trained on two ranks and on one, side by side.

GatedDeltaNet and softmax attention on one balanced layout of packed documents; the losses must agree.
"""

from __future__ import annotations

import time
from pathlib import Path

import longweave as lw
from longweave.tools.draw import draw_layout
from longweave.tools.planning.picture import draw_plan
from longweave.tools.signals import end_on_sigterm
from longweave.tools.train.failures import TrainingError
from longweave.tools.train.loop import TrainConfig
from longweave.tools.train.run import plot_losses, run_local
from longweave.tools.train.workload import draw_documents

OUT = Path("out/demo")
TOLERANCE = 1e-4


def main(steps: int = 30, tokens: int = 2048) -> None:
    begin = time.perf_counter()
    config = TrainConfig(steps=steps, tokens=tokens, layout="balanced", strategy="groupcast")
    drawn = draw_documents(tokens, config.seed, 0, 0)
    mask = lw.Mask.causal(drawn.cu_seqlens)
    layout = lw.Layout.balanced(mask, 2)
    print(f"A byte-level Qwen3.5-style model, packs of {tokens} tokens of Python's standard library.")
    print(f"The first pack has {len(drawn.cu_seqlens) - 1} documents; who holds what:\n")
    print(draw_layout(layout, drawn.cu_seqlens, width=80), "\n")
    plan = lw.make_plan(mask, layout, config.strategy, heads=4, kv_heads=2, head_dim=16, itemsize=4)
    print(plan.report(), "\n")
    print("two ranks, the sequence split between them:")
    two = run_local(config, 2, threads=1)
    print("one process, the whole sequence:")
    one = run_local(config, 1, threads=1)
    print("\nstep   two ranks   one process   difference")
    worst = 0.0
    for a, b in zip(two, one, strict=True):
        worst = max(worst, abs(a.loss - b.loss))
        if a.step % 5 == 0 or a is two[-1]:
            print(f"{a.step:4d}   {a.loss:9.6f}   {b.loss:11.6f}   {a.loss - b.loss:+.1e}")
    received, gathered = sum(m.kv_received for m in two), sum(m.kv_gathered for m in two)
    print(f"\nlargest difference of a loss: {worst:.1e}")
    print(f"work of the busiest rank over the mean, worst step: {max(m.imbalance for m in two):.3f}")
    print(f"K/V sent per softmax layer: {100 * received / gathered:.1f} % of what gathering sends")
    plot_losses({"two ranks": two, "one process": one}, OUT / "loss.png")
    draw_plan(plan, OUT / "plan.png")
    print(f"wrote {OUT / 'loss.png'} and {OUT / 'plan.png'} after {time.perf_counter() - begin:.0f} s")
    if worst > TOLERANCE:
        raise SystemExit(f"the losses differ by {worst:.1e}, more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    end_on_sigterm()
    try:
        main()
    except (KeyboardInterrupt, TrainingError) as error:
        raise SystemExit(str(error) or "interrupted") from None
