"""`longweave bench peers`: who races, what is compared, and what is said of it. Times of such lengths say nothing."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import plain_transformers  # noqa: F401 - before models are made
import pytest
import torch
from typer.testing import CliRunner

import longweave as lw
from longweave.cli import app
from longweave.launch import Ranks
from longweave.tools.bench import peers, tables
from longweave.tools.bench.peers import contestants, flash_stand_in
from longweave.tools.bench.peers.results import (
    CONTEXT_PARALLEL,
    DELTA,
    DELTA_FORWARD,
    DOCUMENT,
    HUGGING_FACE,
    KERNEL,
    LLAMA3,
    ONE_PROCESS,
    OURS,
    PACKED,
    STEP,
    ZIGZAG,
    Missing,
    PeerTime,
    Rounds,
    Spread,
    verdict,
)
from longweave.tools.terminal import check_writable

INSTALLED = find_spec(flash_stand_in.PACKAGE) is not None


def time_of(who: str, seconds: list[float], case: str = DOCUMENT, ranks: int = 2, tokens: int = 8192) -> PeerTime:
    mine = Rounds(tuple(seconds), tuple(0.96 * s for s in seconds))
    return PeerTime(case, ranks, tokens, who, mine, Rounds((1.0, 2.0, 4.0), (0.96, 1.92, 3.84)))


def test_ratios_are_those_of_a_round() -> None:
    """The machine slows down fourfold between the rounds; the peer is a tenth slower in each."""
    line = time_of(ZIGZAG, [1.1, 2.2, 4.4])
    assert line.ratio == Spread(pytest.approx(1.1), pytest.approx(1.1), pytest.approx(1.1))
    assert line.time.median == 2.2
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)


def test_bars() -> None:
    said = verdict(
        [
            time_of(OURS, [1.0, 2.0, 4.0]),
            time_of(ZIGZAG, [1.05, 2.1, 4.2]),
            time_of(KERNEL, [0.9, 1.8, 3.8]),
            time_of(ONE_PROCESS, [9.0, 9.0, 9.0]),
            time_of(LLAMA3, [1.4, 2.98, 8.0], PACKED, 4),
            time_of(HUGGING_FACE, [5.0, 10.0, 20.0], DELTA, 1, 4096),
        ],
        cores=2,
    )
    judged = [(line.partition(" (")[0], line.rpartition("; ")[2]) for line in said]
    assert judged == [
        ("one causal document, 2 ranks: 1.05 of ring-flash-attention zigzag", "the bar of 1.05 is met"),
        ("one causal document, 2 ranks: 0.90 of the kernel's own rate", "the bar of 0.95 is missed"),
        (
            "packed documents, 4 ranks: 1.49 of ring-flash-attention llama3",
            "not decided: 1.50 lies between 1.44 and 1.75",
        ),
        ("delta rule, 1 rank: 5.00 of Hugging Face's torch form", "the bar of 5.00 is met"),
    ]
    fast = time_of(ZIGZAG, [0.96, 2.2, 4.8])  # the median is above the bar, but another run could miss it
    assert verdict([fast], 2)[0].endswith("; not decided: 1.05 lies between 1.03 and 1.15")
    assert " (1.44 to 1.75; 1.49 by CPU time); " in said[2]
    assert "no bars" in verdict([time_of(ZIGZAG, [1.0, 2.0, 4.0], tokens=512)], 2)[0], "they are for other lengths"


def test_a_busy_machine_is_named() -> None:
    """Our ranks had half a core each."""
    ours = Rounds((1.0, 2.0), (0.5, 1.0))
    lines = [PeerTime(DOCUMENT, ranks, 512, OURS, ours, ours) for ranks in (2, 4)]
    assert "down to 50% of theirs" in verdict(lines, cores=2)[-1]
    assert "other programs" not in verdict(lines[1:], cores=2)[-1], "4 ranks on 2 cores have half a core each"


def test_races() -> None:
    found = peers.races(512, [2, 4], 3, list(peers.CASES.values()))
    names = [(race.case, race.ranks) for race in found]
    assert names == [(case, world) for world in (2, 4) for case in (DOCUMENT, PACKED, STEP)] + [
        (DELTA_FORWARD, 1),
        (DELTA, 1),
    ]
    assert {race.cu[-1] for race in found} == {512, 256}
    assert len(peers.races(8192, [2], 1, [PACKED])[0].cu) - 1 == 23


def race_without_peer(race: peers.Race) -> tuple[dict[str, Rounds], dict[str, str]]:
    """On one of the ranks: ring-flash-attention cannot be found."""
    kept, flash_stand_in.PACKAGE = flash_stand_in.PACKAGE, "no_such_package"
    try:
        return peers.on_rank(race)
    finally:
        flash_stand_in.PACKAGE = kept


def test_missing_peers_are_listed(ranks: Ranks) -> None:
    for found, missing in ranks.run(race_without_peer, peers.Race(DOCUMENT, 2, [0, 64], 2), size=2):
        assert list(found) == [OURS, ONE_PROCESS, KERNEL]
        assert all(len(took.seconds) == len(took.busy) == 2 and min(took.seconds) > 0 for took in found.values())
        assert missing[ZIGZAG] == "not installed: pip install --no-deps ring-flash-attn"
        assert "flash_attention_for_cpu" in missing[CONTEXT_PARALLEL]


def flawed(cu: list[int], case: str) -> contestants.Contestant:
    """Wrong in one gradient of rank 1's tokens."""
    right = contestants.one_process(cu, case)
    assert right.answer is not None

    def answer() -> contestants.Tensors:
        *others, dv = right.answer()
        return *others, dv * torch.linspace(1.0, 1.01, len(dv))[:, None, None]

    return contestants.Contestant(right.call, answer)


def race_with_flaw(race: peers.Race) -> tuple[dict[str, Rounds], dict[str, str]]:
    kept = contestants.CONTESTANTS[PACKED]
    contestants.CONTESTANTS[PACKED] = {OURS: contestants.ours_attention, "flawed": flawed}
    try:
        return peers.on_rank(race)
    finally:
        contestants.CONTESTANTS[PACKED] = kept


def test_who_computes_something_else_does_not_race(ranks: Ranks) -> None:
    for found, missing in ranks.run(race_with_flaw, peers.Race(PACKED, 2, [0, 40, 64], 1), size=2):
        assert list(found) == [OURS]
        assert missing["flawed"].startswith("computes something else: values differ by ")


@pytest.mark.skipif(not INSTALLED, reason="ring-flash-attention is not installed")
@pytest.mark.parametrize(("case", "who", "cu"), [(DOCUMENT, ZIGZAG, [0, 96]), (PACKED, LLAMA3, [0, 41, 50, 96])])
def test_ring_flash_attention_computes_the_same(ranks: Ranks, case: str, who: str, cu: list[int]) -> None:
    """In float32, with three ranks: they race only if outputs and all gradients are ours."""
    for found, _ in ranks.run(peers.on_rank, peers.Race(case, 3, cu, 1), size=3):
        assert found[who].seconds[0] > 0
    uneven = [*cu[:-1], 97]
    for _, missing in ranks.run(peers.on_rank, peers.Race(case, 3, uneven, 1), size=3):
        assert "divides, 97 given" in missing[who]


@pytest.mark.skipif(not INSTALLED, reason="ring-flash-attention is not installed")
def test_the_stand_ins_stay_with_the_peer(ranks: Ranks) -> None:
    assert ranks.run(modules_after_import, size=1) == [[]]


def modules_after_import() -> list[str]:
    flash_stand_in.ring_flash_attention()
    return [name for name in sys.modules if name.startswith("flash_attn") or ("adapters" in name and "ring" in name)]


@pytest.mark.parametrize("case", [STEP, DELTA, DELTA_FORWARD])
def test_other_races(ranks: Ranks, case: str) -> None:
    world = 2 if case == STEP else 1
    for found, missing in ranks.run(peers.on_rank, peers.Race(case, world, [0, 32, 64][: world + 1], 1), size=world):
        assert len(found) == 2
        assert not missing


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def run(wanted: list[peers.Race], into: peers.Comparison) -> None:
        assert [(race.case, race.ranks, race.rounds) for race in wanted] == [(DOCUMENT, 2, 3)]
        into.times += [time_of(OURS, [1.0, 2.0, 4.0]), time_of(ZIGZAG, [1.1, 2.2, 4.4])]
        into.missing += [Missing(DOCUMENT, 2, CONTEXT_PARALLEL, "not here")]

    monkeypatch.setattr(peers, "run", run)
    files = ["--picture", str(tmp_path / "new" / "p.png"), "--json", str(tmp_path / "new" / "p.json")]
    command = ["bench", "peers", "--ranks", "2", "--rounds", "3", "--only", "document", *files]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "missing: torch context_parallel (one causal document, 2 ranks): not here" in result.output
    assert "the bar of 1.05 is met" in result.output
    assert (tmp_path / "new" / "p.png").stat().st_size > 1000
    found = json.loads((tmp_path / "new" / "p.json").read_text())
    assert set(found) == {"machine", "torch", "times", "missing", "verdicts"}
    assert found["times"][1]["ratio"] == pytest.approx({"low": 1.1, "median": 1.1, "high": 1.1})
    assert set(found["times"][0]) == {"case", "ranks", "tokens", "who", "seconds", "time", "ratio", "bar"} | {
        "cpu_seconds",
        "cpu_ratio",
    }
    assert found["missing"] == [{"case": DOCUMENT, "ranks": 2, "who": CONTEXT_PARALLEL, "reason": "not here"}]
    wrong = CliRunner().invoke(app, ["bench", "peers", "--only", "ring"])
    assert wrong.exit_code == 2
    assert "choose from document" in wrong.output


def test_the_table_names_a_race_once() -> None:
    comparison = peers.Comparison([time_of(OURS, [1.0, 2.0, 4.0]), time_of(ZIGZAG, [1.1, 2.2, 4.4])])
    table = tables.peers_table(comparison)
    assert [list(column.cells)[1] for column in table.columns][:4] == ["", "", "", ZIGZAG]


def test_a_peer_with_nan_in_one_gradient_is_not_the_same() -> None:
    right = torch.ones(3), torch.ones(2)
    assert peers._difference(right, right) == ""
    assert "computes something else" in peers._difference((right[0], torch.tensor([1.0, torch.nan])), right)


def test_too_few_tokens_are_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "peers", "64", "--ranks", "128"])
    assert result.exit_code == 2
    assert "give at least two for each rank" in " ".join(result.output.split())


def test_files_that_will_be_written_are_tried_and_not_left(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "p.json")
    assert not any((tmp_path / "new").iterdir())
    (tmp_path / "file").write_text("kept")
    check_writable(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    with pytest.raises(lw.InputError, match="cannot be written"):
        check_writable(tmp_path / "file" / "p.json")
