"""A small run of `make fuzz` in every `make test`; that it goes on where it was left; that it finds planted faults."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fuzz import STRATEGIES, Fuzz, Progress, main
from fuzz_draw import draw
from fuzz_plans import check_plan
from fuzz_tensors import check_tensors

from longweave.launch import Ranks
from longweave.plan import cost, layout, schedule, tasks

SEED = 7  # another one than `make fuzz` begins with
FOREVER = float("inf")


def test_a_small_run(ranks: Ranks) -> None:
    fuzz = Fuzz(Progress(None, SEED), {"plans": check_plan, "tensors": partial(check_tensors, ranks=ranks)})
    fuzz.run({"plans": 40, "tensors": 12}, FOREVER)
    assert fuzz.progress.done == {"plans": 40, "tensors": 12}
    assert fuzz.progress.failed == {"plans": {}, "tensors": {}}


def cases_of(seed: int) -> list[str]:
    return [str(draw(strategy, seed, kind, index)) for kind, strategy in STRATEGIES.items() for index in range(5)]


def test_seed_and_number_determine_a_case_in_every_process(ranks: Ranks) -> None:
    assert ranks.run(cases_of, SEED, size=2) == [cases_of(SEED)] * 2
    assert len({*cases_of(SEED), *cases_of(SEED + 1)}) == 20


def test_it_goes_on_where_it_was_left(tmp_path: Path) -> None:
    tried: list[object] = []

    def check(case: object) -> None:
        tried.append(case)
        if len(tried) == 20:
            raise KeyboardInterrupt
        assert len(tried) != 3

    path = tmp_path / "deep" / "fuzz.json"
    first = Fuzz(Progress.load(path, SEED), {"plans": check})
    with pytest.raises(KeyboardInterrupt):
        first.run({"plans": 30}, FOREVER)
    first.progress.save()
    assert first.progress.done["plans"] == 19
    assert [*first.progress.failed["plans"]] == [2]
    again = Fuzz(Progress.load(path, SEED), {"plans": check})
    again.run({"plans": 30}, FOREVER)
    assert len(tried) == 20 + 1 + 11, "the case that failed, then the eleven that were left"
    assert str(tried[20]) == str(tried[2])
    assert again.progress.failed["plans"] == {}, "it is right now"
    assert Progress.load(path, SEED).done["plans"] == 30
    assert Progress.load(path, SEED + 1).done["plans"] == 0, "another seed begins at 0"
    late = Fuzz(Progress.load(path, SEED), {"plans": check})
    late.run({"plans": 50}, time.monotonic() - 1)
    assert late.progress.done["plans"] == 30, "time is up"


def test_one_case_by_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--seed", str(SEED), "--only", "plans:4", "--only", "plans:5"]) == 0
    assert "2 of 2 cases are right" in capsys.readouterr().out
    monkeypatch.setattr(schedule, "computed_areas", lambda plan: [0] * plan.world_size)
    numbers = [i for i in range(5) if draw(STRATEGIES["plans"], SEED, "plans", i).mask.area > 64]
    assert main(["--seed", str(SEED), "--only", f"plans:{numbers[0]}"]) == 1
    said = capsys.readouterr().out
    assert f"FAILED plans:{numbers[0]}" in said
    assert f"--seed {SEED} --only plans:{numbers[0]}" in said


# -- planted faults ------------------------------------------------------------------------------------


def a_pair_too_few(patch: pytest.MonkeyPatch) -> None:
    """The last task of a rank is lost where there are many."""
    original = tasks.tasks_on_all
    patch.setattr("plan_walk.tasks_on_all", lambda *args: original(*args)[:4])


def fused_too_eagerly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tasks, "_same_pairs", lambda joined, part, axis: np.ones(len(joined), dtype=bool))


def sent_in_another_order(patch: pytest.MonkeyPatch) -> None:
    original = tasks.GroupCast._send

    def send(self, due, rank):
        splits, index = original(self, due, rank)
        return splits, index[::-1]

    patch.setattr(tasks.GroupCast, "_send", send)


def bytes_of_one_more_hop(patch: pytest.MonkeyPatch) -> None:
    original = schedule._kv_bytes

    def kv_bytes(plan):
        found = original(plan)
        return [(r, s + plan.shape.kv_bytes) for r, s in found] if plan.ulysses_size > 1 else found

    patch.setattr(schedule, "_kv_bytes", kv_bytes)


def odd_tokens_all_to_the_first(patch: pytest.MonkeyPatch) -> None:
    def odd_tokens(lengths, world):
        taken = np.zeros((len(lengths), 2 * world), dtype=np.int64)
        taken[:, 0] = lengths % (2 * world)
        return taken

    patch.setattr(layout, "_odd_tokens", odd_tokens)


def own_tokens_are_sent_too(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cost.Needs, "of_rank", lambda self, ranks, starts, stops: np.zeros_like(starts))


FAULTS = [a_pair_too_few, fused_too_eagerly, sent_in_another_order, bytes_of_one_more_hop]
FAULTS += [odd_tokens_all_to_the_first, own_tokens_are_sent_too]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, fault) -> None:
    fault(monkeypatch)
    for index in range(200):
        try:
            check_plan(draw(STRATEGIES["plans"], SEED, "plans", index))
        except Exception:
            return
    pytest.fail("200 cases, and nothing was noticed")
