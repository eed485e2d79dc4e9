"""What one rank of 64 would cost on GPUs, counted on a machine without any: see `fake_cuda` and `fake_runs`.

A million packed tokens, 32:8 heads of 128 in bf16; five strategies and three models, forward and backward. Rank 17 in
every run; ranks 0 and 63, and the third model, with LONGWEAVE_FULL=1.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import fake_cuda
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = pytest.mark.skipif(fake_cuda.why_not() is not None, reason=str(fake_cuda.why_not()))

FULL = bool(os.environ.get("LONGWEAVE_FULL"))
RANKS = (17, 0, 63) if FULL else (17,)
STRATEGIES = ("groupcast", "groupcast by flash", "ring", "ulysses", "ring × ulysses", "allgather")
MODELS = ("qwen3_5", "gpt_oss", "qwen3_moe") if FULL else ("qwen3_5", "gpt_oss")
WAYS = ("forward", "backward")

# Bytes that elementwise kernels of one group-cast layer read and wrote on rank 17 when tensors were head-first: with
# transposes, cats and splits of K/V around every kernel call. Measured by the same watch in the same setting; the merge
# of partial results, which was compiled, counts as one kernel.
HEAD_FIRST_TRAFFIC = {"forward": 10_639_170_048, "backward": 30_739_331_728}


def run(module: str, *arguments: str) -> str:
    """The last line that a module prints, in a process that has a CUDA device which is not there."""
    path = os.pathsep.join((str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-m", "fake_cuda", module, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return done.stdout.strip().splitlines()[-1]


@cache
def attention(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("fake_runs", json.dumps({"rank": rank, "attention": STRATEGIES})))
    return found["attention"]


@cache
def model(rank: int, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("fake_runs", json.dumps({"rank": rank, "models": [name]})))
    return found["models"][name]


def most(tally: dict[str, Any], column: int) -> str:
    """For messages: what costs most, by launches (2) or bytes (3)."""
    rows = sorted(tally["top"], key=lambda row: -row[column])[:8]
    return "\n" + "\n".join(f"{n:5d} × {op:32s} {size / 2**20:9.1f} MiB  {line}" for op, line, n, size in rows)


def test_the_watch_counts_what_it_should() -> None:
    assert run("watch_checks") == "counted"


# -- attention -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rank", RANKS)
class TestAttention:
    def test_bytes_are_those_of_the_plan(self, rank: int, strategy: str, way: str) -> None:
        found = attention(rank)[strategy]
        for turn in ("first", "later"):
            messages = found[turn][way]["collectives"].values()
            sent, received = (sum(message[i] for message in messages) for i in (1, 2))
            assert (sent, received) == (found["plan"][way]["sent"], found["plan"][way]["received"])

    def test_memory_is_within_the_formula(self, rank: int, strategy: str, way: str) -> None:
        found = attention(rank)[strategy]
        assert found["later"][way]["extra_peak"] <= found["plan"][way]["peak"]

    def test_later_layers_upload_nothing_and_nobody_waits(self, rank: int, strategy: str, way: str) -> None:
        found = attention(rank)[strategy]
        later = found["later"][way]
        assert later["uploads"] == later["foreign_uploads"] == []
        for turn in ("first", "later"):
            assert found[turn][way]["syncs"] == found[turn][way]["foreign_syncs"] == []

    def test_uploads_of_the_first_layer_do_not_wait(self, rank: int, strategy: str, way: str) -> None:
        waiting = [upload for upload in attention(rank)[strategy]["first"][way]["uploads"] if not upload[2]]
        assert waiting == [], "copies from memory that is not pinned, or that wait"


@pytest.mark.parametrize(("way", "launches"), [("forward", 40), ("backward", 60)])
@pytest.mark.parametrize("rank", RANKS)
def test_launches_of_a_groupcast_layer(rank: int, way: str, launches: int) -> None:
    found = attention(rank)["groupcast"]["later"][way]
    assert found["launches"] <= launches, most(found, 2)


@pytest.mark.parametrize("way", WAYS)
def test_elementwise_traffic_of_a_groupcast_layer(way: str) -> None:
    found = attention(17)["groupcast"]["later"][way]
    assert found["traffic"] <= 0.4 * HEAD_FIRST_TRAFFIC[way], most(found, 3)


# -- models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rank", RANKS)
class TestModels:
    def test_layers_upload_nothing_and_nobody_waits(self, rank: int, name: str) -> None:
        """After the first of its kind: in backward that is the last one."""
        found = model(rank, name)
        for layer in found["later"]["layers"]:
            for way in WAYS:
                assert layer[way]["uploads"] == layer[way]["foreign_uploads"] == []
                assert layer[way]["syncs"] == layer[way]["foreign_syncs"] == []
        first, types = found["first"]["layers"], found["types"]
        for number, kind in enumerate(types):
            if kind in types[:number]:
                assert first[number]["forward"]["uploads"] == []
            if kind in types[number + 1 :]:
                assert first[number]["backward"]["uploads"] == []
            assert first[number]["forward"]["syncs"] == first[number]["backward"]["syncs"] == []

    def test_uploads_do_not_wait(self, rank: int, name: str) -> None:
        for layer in model(rank, name)["first"]["layers"]:
            for way in WAYS:
                assert [upload for upload in layer[way]["uploads"] if not upload[2]] == []

    def test_launches_of_a_decoder_layer(self, rank: int, name: str) -> None:
        """The budget is for Qwen3.5; experts take some kernels of their own."""
        extra = 0 if name == "qwen3_5" else 60
        for layer in model(rank, name)["later"]["layers"]:
            for way, launches in (("forward", 120), ("backward", 200)):
                assert layer[way]["launches"] <= launches + extra, most(layer[way], 2)
