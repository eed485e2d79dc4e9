"""A few steps of `make soak`: every way to fail, resumed; and that it would notice what it looks for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soak
from soak import (
    POINTS,
    SAMPLE_EVERY,
    WARM_UP,
    WAYS,
    Fault,
    Run,
    check_memory,
    disturbed,
    draw_faults,
    read_losses,
    train,
)

from longweave.launch import RankError, Ranks


def test_faults_and_resumes(tmp_path: Path) -> None:
    """On ranks of its own: some of them die."""
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    calm.mkdir()
    rough.mkdir()
    until = float("inf")
    faults = [
        Fault(3, 1, "backward", "raise"),
        Fault(15, 0, "save", "kill"),
        Fault(17, 1, "forward", "exit"),
        Fault(18, 1, "backward", "stop"),
    ]
    with Ranks(2) as own:
        weights = own.run(train, Run(calm, 1, 20, until))
        resumed, happened = disturbed(own, Run(rough, 1, 20, until), faults, timeout=60)
    assert happened == faults
    assert {resumed} == set(weights)
    assert read_losses(rough) == read_losses(calm)
    lines = [json.loads(line)[0] for line in (rough / "losses.jsonl").read_text().splitlines()]
    # Steps 0 to 2; all from the start, to the save after step 15, which fails; again from 8; to 17, and twice from 16.
    assert lines == [*range(3), *range(16), *range(8, 17), *range(16, 18), *range(16, 20)]


def test_a_failure_that_nobody_planted_is_raised(tmp_path: Path) -> None:
    class Broken:
        def run(self, *args: object, **options: object) -> None:
            raise RankError("rank 0 died with exit code 1")

    with pytest.raises(RankError, match="exit code 1"):
        disturbed(Broken(), Run(tmp_path, 0, 20, 0.0), [Fault(3, 0, "forward", "kill")], 1.0)


def test_every_fault_is_drawn_and_happens_in_its_step() -> None:
    faults = draw_faults(np.random.default_rng(0), 500, 200)
    assert {(fault.point, fault.way) for fault in faults} == {(point, way) for point in POINTS for way in WAYS}
    assert [fault.step for fault in faults] == sorted(fault.step for fault in faults)
    assert all((fault.step + 1) % soak.SAVE_EVERY == 0 for fault in faults if fault.point == "save")
    assert {fault.rank for fault in faults} == {0, 1}


@pytest.mark.parametrize("what", ["nothing", "objects", "bytes"])
def test_memory_that_grows_is_named(tmp_path: Path, what: str) -> None:
    samples = []
    for number in range(1, 40):
        objects = Counter(PackCore=number if what == "objects" else 0)
        size = (100 << 20) + number * (1 << 20 if what == "bytes" else 1000)
        samples.append([number * SAMPLE_EVERY, objects, size])
    assert samples[-1][0] > 3 * WARM_UP
    (tmp_path / "memory-1.jsonl").write_text("\n".join(map(json.dumps, samples)))
    wrong = check_memory(tmp_path)
    assert len(wrong) == (what != "nothing"), wrong
