"""What a rank did in a step, by its own clock: no gaps, no overlaps, waits that happened, bytes that the plan says."""

import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import longweave as lw
from longweave.comm.exchange import resolve
from longweave.comm.ledger import Ledger, RecordedCall
from longweave.errors import BackendError
from longweave.launch import Ranks
from longweave.tools import charts
from longweave.tools.bench import attention
from longweave.tools.bench.packed import Footprint, PackedTimes, compare_panels, packed_panels
from longweave.tools.bench.pool import PoolTime, PoolWorkload
from longweave.tools.bench.tables import pool_panels
from longweave.tools.timeline import BUSY, WAITING, Lane, SentExchange, StepRecorder, TimedInterval, Timeline, recording
from longweave.tools.train.loop import TIMELINE, TrainConfig
from longweave.tools.train.run import draw, train_and_show

BORDERS = [0, 700, 733, 1000]
LATE = 0.4  # seconds by which one rank is


def check_lane(lane: Lane) -> None:
    """Its intervals are the step: one after the other, without gaps."""
    assert lane.intervals[0].begin == 0
    assert lane.intervals[-1].end == pytest.approx(lane.seconds)
    for one, other in pairwise(lane.intervals):
        assert one.begin < one.end == other.begin
    assert lane.time(BUSY) + lane.time(WAITING) == pytest.approx(lane.seconds)
    assert all(0 <= sent.at <= lane.seconds for sent in lane.sent)


# -- on ranks ------------------------------------------------------------------------------------------


def late_pass(strategy: str, late: int) -> Lane:
    pack = lw.Pack(BORDERS, layout="contiguous", strategy=strategy)
    q, k, v = (torch.randn(pack.tokens, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    with recording(None) as recorder:
        if pack.rank == late:
            time.sleep(LATE)
        lw.attention(q, k, v, pack).sum().backward()
        lane = recorder.stop()
        lw.attention(q, k, v, pack)  # after the step: not written down
    assert recorder.stop() is lane
    assert resolve(None).ledger.observer is None
    return lane


@pytest.mark.parametrize("strategy", ["groupcast", "ring"])
def test_one_rank_is_late_and_the_other_waits(ranks: Ranks, strategy: str) -> None:
    lanes = ranks.run(late_pass, strategy, 0, size=2)  # rank 1 needs what rank 0 has
    for lane in lanes:
        check_lane(lane)
    assert [lane.rank for lane in lanes] == [0, 1]
    assert lanes[1].time(WAITING) >= 0.8 * LATE
    assert lanes[0].time(BUSY) >= LATE
    waits = {one.what for one in lanes[1].intervals if one.kind == WAITING}
    assert "attention, forward" in waits
    mask, layout = lw.Mask.causal(BORDERS), lw.Layout.contiguous(BORDERS[-1], 2)
    report = lw.make_plan(mask, layout, strategy, heads=4, kv_heads=2, head_dim=16, itemsize=4).report()
    for lane, planned in zip(lanes, report.ranks, strict=True):
        assert lane.bytes_sent("attention, forward") == planned.bytes_sent
    assert {peer for sent in lanes[0].sent for peer in sent.peers} == {1}


def test_a_training_run_keeps_one_step(ranks: Ranks, tmp_path: Path) -> None:
    config = TrainConfig(hidden=32, layers=4, tokens=256, steps=3, warmup=2, out=tmp_path)
    history = ranks.run(train_and_show, config, False, size=2, timeout=300)[0]
    timeline = Timeline.load(tmp_path / TIMELINE)
    assert timeline.title == "step 1"
    assert timeline.lanes[0].seconds == pytest.approx(config.tokens / history[1].tokens_per_second, rel=0.5)
    for lane in timeline.lanes:
        check_lane(lane)
        waits = {one.what for one in lane.intervals if one.kind == WAITING}
        assert {"FSDP2, all-gather", "FSDP2, reduce-scatter", "sum of the loss"} <= waits
        assert {"attention, backward", "gated_delta_rule, forward"} <= {one.what for one in lane.intervals}
    for m in history:
        assert max(m.loads) == pytest.approx(m.imbalance)
        assert sum(m.loads) == pytest.approx(2)
    assert "run.png" in draw("a run", history, tmp_path)
    assert (tmp_path / "run.png").stat().st_size > 10_000
    (tmp_path / "run.png").unlink()
    assert draw("a run with nothing to do", [], tmp_path) == f"wrote {tmp_path / 'metrics.jsonl'}"
    assert not (tmp_path / "run.png").exists()


def run_snippet(code: str, path: Path) -> None:
    def step() -> None:
        pack = lw.Pack(BORDERS)
        pack.unshard(torch.zeros(pack.tokens, 4))

    exec(code, {"group": None, "model": None, "step": step, "path": path / f"{torch.distributed.get_rank()}.json"})


def test_the_snippet_of_the_documentation(ranks: Ranks, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    code = page.partition("<!-- test: recording -->\n```python\n")[2].partition("```")[0]
    ranks.run(run_snippet, code, tmp_path, size=2)
    one, other = (Timeline.load(tmp_path / f"{rank}.json") for rank in range(2))
    assert one == other
    for lane in one.lanes:
        check_lane(lane)
        assert lane.bytes_sent() >= 500 * 4 * 4


def test_the_timelines_of_bench_attention(ranks: Ranks, tmp_path: Path) -> None:
    lanes = ranks.run(attention.recorded_pass, 256, "zigzag", size=2)
    for lane in lanes:
        check_lane(lane)
    path = tmp_path / "a.svg"
    assert charts.draw_timelines([Timeline("zigzag", tuple(lanes))], path) == f"wrote {path}"
    assert path.stat().st_size > 5000


# -- in one process ------------------------------------------------------------------------------------


def test_an_error_that_leaves_a_call_ends_its_interval() -> None:
    ledger = Ledger(None)
    ledger.observer = recorder = StepRecorder()
    call = RecordedCall(ledger, "attention of nothing")
    with suppress(ZeroDivisionError), call.forward():
        raise ZeroDivisionError
    time.sleep(0.01)
    lane = recorder.stop()
    check_lane(lane)
    assert lane.intervals[-1].what == ""
    assert lane.intervals[-1].seconds >= 0.01


def test_a_timeline_survives_its_file(tmp_path: Path) -> None:
    intervals = (TimedInterval(BUSY, "attention, forward", 0.0, 0.25), TimedInterval(WAITING, "", 0.25, 0.5))
    lanes = (Lane(0, 0.5, 0.2, intervals, (SentExchange("shift", 0.1, 64, (1, 2)),)), Lane(1, 0.5, 0.4, intervals, ()))
    timeline = Timeline("step 7", lanes)
    timeline.save(tmp_path / TIMELINE)
    assert Timeline.load(tmp_path / TIMELINE) == timeline
    assert timeline.loads == [1.0, 1.0]
    assert lanes[0].busy_share == 0.5


def test_benchmarks_are_drawn(tmp_path: Path) -> None:
    footprints = [Footprint("ring", "zigzag", 2048, 1.0, 10.5, 11.5), Footprint("groupcast", "balanced", 0, 1, 9, 5)]
    times = [PackedTimes("giant", 8192, ranks, 0.1, 0.2, 0.3, 0.4, 1.0, 4.0) for ranks in (2, 4)]
    line = (8.0, 1.1, 1.2, 1.1, 1.0, 1.1, 7.9, 1.3, 2.5, 3.0, 1.5, (1.0,), (4.0,) * 2, ((1.5, 0.5),) * 2)
    pooled = pool_panels([PoolTime(PoolWorkload("dense", steps=2), "home", *line)])
    assert pooled[1].series == {"home": [1.5, 1.5]}
    for name, panels in (("a", compare_panels(footprints)), ("b", packed_panels(times)), ("c", pooled)):
        charts.draw_bars(panels, tmp_path / f"{name}.png", "a title", columns=2)
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    with pytest.raises(BackendError, match=r"ends in one of .*\.png"):
        charts.prepare(tmp_path / "a.abc")
