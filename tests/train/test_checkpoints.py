"""Checkpoints: whole or not there, refused when they do not fit or were changed, read by any number of ranks."""

import fcntl
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

import longweave as lw
from longweave.launch import Ranks
from longweave.tools.train import checkpoints, loop
from longweave.tools.train.checkpoints import CheckpointError
from longweave.tools.train.loop import Metrics, TrainConfig
from longweave.tools.train.run import train_and_show
from longweave.tools.train.workload import documents_digest

FULL = bool(os.environ.get("LONGWEAVE_FULL"))
TINY = TrainConfig(hidden=32, layers=4, tokens=192, steps=4, warmup=2)
PROGRAM = Path(__file__).with_name("killed_saves.py")


def run(ranks: Ranks, config: TrainConfig, size: int) -> list[Metrics]:
    return ranks.run(train_and_show, config, False, size=size, timeout=120)[0]


def losses(history: list[Metrics]) -> np.ndarray:
    return np.array([m.loss for m in history])


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with checkpoints after steps 2 and 4. Not to be changed."""
    out = tmp_path_factory.mktemp("saved")
    run(ranks, replace(TINY, out=out, save_every=2), 2)
    return out


# -- killed, full, forbidden -------------------------------------------------------------------------


def program(*args: str) -> dict:
    done = subprocess.run([sys.executable, str(PROGRAM), *args], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_killed_before_and_after_everything_that_touches_the_disk(tmp_path: Path) -> None:
    found = program("points", str(tmp_path / "out"))
    assert found["points"] >= 10
    assert found["steps"] == sorted(found["steps"])
    assert set(found["steps"]) == {1, 2}, "the old one until `latest` is replaced, then the new one"


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """20 kills with LONGWEAVE_FULL=1; some of them must have found a half-written checkpoint."""
    found = program("random", str(tmp_path / "out"), str(20 if FULL else 4), "7")
    assert len(found["steps"]) == (20 if FULL else 4)
    if FULL:
        assert found["killed while half was written"] > 0


@contextmanager
def disk(folder: Path, size: str) -> Iterator[Callable[..., None]]:
    """A file system of its own; yields what mounts it again with other options."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {made.stderr.decode().strip()}")

    def again(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)

    try:
        yield again
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(ranks: Ranks, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "1200k"):
        out = tmp_path / "disk" / "run"
        with pytest.raises(CheckpointError) as caught:
            run(ranks, replace(TINY, steps=12, out=out, save_every=1), 2)
        text = str(caught.value)
        kept = checkpoints.newest(out)
        assert kept is not None
        assert "No space left on device" in text
        assert str(out) in text.partition("; the last complete")[0], "names the path"
        assert f"the last complete checkpoint is {kept}" in text
        assert not list(out.glob(".saving-*")), "room is made again"
        size = (kept / "rank-0.safetensors").stat().st_size
        assert size > 1000
        resumed = replace(TINY, steps=checkpoints.read_contents(kept).step + 1, resume=out)
        assert len(run(ranks, resumed, 1)) == 1


def train_until_full(config: TrainConfig, name: str, first: int) -> str:
    """From step `first` on, there is no room for one file."""

    def fill(metrics: Metrics | None) -> None:
        if dist.get_rank() == 0 and (metrics.step if metrics else -1) == first - 1:
            config.out.mkdir(exist_ok=True)
            (config.out / "metrics.jsonl").write_text('{"step": -1}\n')
            (config.out / name).unlink(missing_ok=True)
            (config.out / name).symlink_to("/dev/full")

    fill(None)
    try:
        loop.train(config, fill)
    except lw.LongweaveError as error:
        return f"{type(error).__name__}: {error}"
    return "written"


@pytest.mark.parametrize(
    ("name", "first", "what"),
    [(".metrics.jsonl", 0, "metrics"), ("metrics.jsonl", 1, "metrics of step 1"), (loop.TIMELINE, 0, "the timeline")],
)
def test_a_full_disk_beside_checkpoints_is_told_on_all_ranks(
    ranks: Ranks, tmp_path: Path, name: str, first: int, what: str
) -> None:
    out = tmp_path / "run"
    said = ranks.run(train_until_full, replace(TINY, out=out), name, first, size=2)
    text = f"RunFileError: {what} could not be written: rank 0: [Errno 28] No space left on device: '{out / name}'"
    assert said == [text, text]


def test_no_permission(ranks: Ranks, tmp_path: Path) -> None:
    """Root may write anywhere, so: below a file, and on a file system that is read-only."""
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Not a directory: '.*file/run'"):
        run(ranks, replace(TINY, out=tmp_path / "file" / "run"), 2)
    with disk(tmp_path / "disk", "20m") as remount:
        out = tmp_path / "disk" / "run"
        run(ranks, replace(TINY, steps=2, out=out, save_every=2), 2)
        remount("ro")
        with pytest.raises(CheckpointError, match=r"Read-only file system: '.*disk/run"):
            run(ranks, replace(TINY, out=out, save_every=2, resume="auto"), 2)
        remount("rw")
        assert [m.step for m in run(ranks, replace(TINY, out=out, save_every=2, resume="auto"), 2)] == [2, 3]


def test_one_run_in_a_folder(ranks: Ranks, tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=f"another run is writing to {tmp_path}"):
            run(ranks, replace(TINY, out=tmp_path), 2)
    (tmp_path / ".saving-step-7").mkdir()
    (tmp_path / ".saving-step-7" / "rank-0.safetensors").touch()
    run(ranks, replace(TINY, steps=1, out=tmp_path), 2)
    assert not (tmp_path / ".saving-step-7").exists(), "of a run that was killed"


# -- resuming ----------------------------------------------------------------------------------------

ALL = [(a, b) for a in range(1, 5) for b in range(1, 5)]


@pytest.mark.parametrize(("wrote", "reads"), ALL if FULL else [(3, 2), (2, 4)])
def test_on_any_number_of_ranks_from_any(ranks: Ranks, tmp_path: Path, saved: Path, wrote: int, reads: int) -> None:
    whole = losses(run(ranks, replace(TINY, steps=5), 1))
    run(ranks, replace(TINY, steps=2, out=tmp_path, save_every=2), wrote)
    # The learning rate follows from the number of steps: as in the run that was not interrupted.
    resumed = run(ranks, replace(TINY, steps=5, resume=tmp_path), reads)
    assert [m.step for m in resumed] == [2, 3, 4]
    assert np.abs(losses(resumed) / whole[2:] - 1).max() < 1e-5


def drawn_keys(config: TrainConfig) -> list[tuple[int, ...]]:
    """Which batches this rank draws."""
    keys: list[tuple[int, ...]] = []
    real = loop.draw_documents

    def draw(tokens: int, *key: int) -> object:
        keys.append(key)
        return real(tokens, *key)

    loop.draw_documents = draw  # type: ignore[assignment]
    try:
        train_and_show(config, False)
    finally:
        loop.draw_documents = real
    return keys


def test_every_step_once(ranks: Ranks, tmp_path: Path) -> None:
    """A run that goes back: no batch is lost or repeated, metrics have a step once, no checkpoint is overwritten."""
    config = replace(TINY, out=tmp_path, save_every=2, accumulate=2)
    first = ranks.run(drawn_keys, config, size=2)[0]
    assert [key[1:] for key in first] == [(step, i) for step in range(4) for i in range(2)]
    old = (tmp_path / "step-4" / checkpoints.CONTENTS).read_bytes()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while it wrote
    again = replace(config, resume=tmp_path / "step-2", steps=5, dp=2, accumulate=1)
    assert ranks.run(drawn_keys, again, size=2)[0] == [(0, step, i) for step in (2, 3, 4) for i in range(2)]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert (tmp_path / "step-4" / checkpoints.CONTENTS).read_bytes() == old
    assert checkpoints.newest(tmp_path) == tmp_path / "step-4.2"
    with pytest.raises(
        checkpoints.CheckpointError, match=r"holds checkpoints of an earlier run .*step-4.2\); give --resume"
    ):
        run(ranks, replace(TINY, steps=1, out=tmp_path), 1)
    (tmp_path / checkpoints.LATEST).write_text("../elsewhere")
    assert checkpoints.newest(tmp_path) == tmp_path / "step-4.2", "the furthest, if `latest` names none"


def test_auto_starts_from_nothing_once(ranks: Ranks, tmp_path: Path) -> None:
    config = replace(TINY, out=tmp_path / "run", save_every=1, resume="auto")
    assert len(run(ranks, replace(config, steps=2), 2)) == 2
    assert [m.step for m in run(ranks, replace(config, steps=3), 1)] == [2]


# -- refused -----------------------------------------------------------------------------------------


def refusal(config: TrainConfig, pretend: checkpoints.Facts | None) -> str:
    """What this rank says; with `pretend` the checkpoint is not told by its facts, but by its tensors."""
    if pretend is not None:
        TrainConfig.facts = pretend  # type: ignore[assignment,method-assign]
    try:
        train_and_show(config, False)
    except lw.InputError as error:
        return str(error)
    finally:
        dist.barrier()
        if pretend is not None:
            TrainConfig.facts = real_facts  # type: ignore[method-assign]
    return "taken"


real_facts = TrainConfig.facts


@pytest.mark.parametrize(
    "change", [{"hidden": 64}, {"layers": 3}, {"model": "llama"}, {"seed": 1}, {"tokens": 256}, {"accumulate": 2}]
)
def test_another_run_is_refused_on_all_ranks(ranks: Ranks, saved: Path, change: dict) -> None:
    name, value = next(iter(change.items()))
    for text in ranks.run(refusal, replace(TINY, resume=saved, **change), None, size=2):
        assert f"{saved / 'step-4'} is of another run" in text
        assert f"{value} here" in text
        assert name in text


def with_another_library(config: TrainConfig, on_ranks: tuple[int, ...]) -> str:
    with patch.object(loop, "documents_digest", lambda: "another" if dist.get_rank() in on_ranks else "this"):
        return refusal(config, None)


def test_a_checkpoint_that_does_not_tell_its_documents_is_taken(saved: Path, tmp_path: Path) -> None:
    """Of an earlier version."""
    copy = tmp_path / "copy"
    shutil.copytree(saved / "step-2", copy)
    edit(copy / TABLE, lambda body: body["facts"].pop("documents of Python's standard library"), True)
    assert checkpoints.check_facts(copy, TINY.facts).step == 2


def test_documents_of_another_python_are_refused(ranks: Ranks, saved: Path) -> None:
    """On resuming, and between ranks."""
    name = "documents of Python's standard library is"
    for text in ranks.run(with_another_library, replace(TINY, resume=saved), (0, 1), size=2):
        assert f"{name} {documents_digest()} there and another here. Give" in text
        assert "same version of Python" in text
    for text in ranks.run(with_another_library, TINY, (1,), size=2):
        assert f"the ranks are not of one run: {name} this on rank 0 and another on rank 1. Start" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [({"hidden": 64}, "in this model"), ({"layers": 3}, "layers.3"), ({"model": "llama"}, "model.")],
)
def test_other_tensors_are_refused_on_all_ranks(ranks: Ranks, saved: Path, change: dict, said: str) -> None:
    config = replace(TINY, resume=saved, **change)
    for text in ranks.run(refusal, config, TINY.facts, size=2):
        assert "cannot be resumed from" in text
        assert said in text


class Touch:
    """A pickle that does something when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def edit(path: Path, change: Callable[[dict], None], sign: bool) -> None:
    """Change the table; `sign`: with a digest that fits."""
    raw = json.loads(path.read_text())
    change(raw["body"])
    if sign:
        raw["sha256"] = sha256(json.dumps(raw["body"], sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(raw))


def first_chunk(body: dict) -> dict:
    return next(entry for entry in body["tensors"].values() if entry["chunks"])["chunks"][0]


def elsewhere(body: dict) -> None:
    body["files"] = {f"../../{name}": digest for name, digest in body["files"].items()}
    for entry in body["tensors"].values():
        for chunk in entry["chunks"]:
            chunk["file"] = f"../../{chunk['file']}"


TABLE, SHARD = checkpoints.CONTENTS, "rank-1.safetensors"
TAMPERED: dict[str, Callable[[Path, Path], object]] = {
    "a pickle as table": lambda c, bait: (c / TABLE).write_bytes(pickle.dumps(Touch(bait))),
    "a pickle as shard": lambda c, bait: (c / SHARD).write_bytes(pickle.dumps(Touch(bait))),
    "a bit of a shard": lambda c, bait: flip(c / SHARD),
    "half a shard": lambda c, bait: os.truncate(c / SHARD, 5000),
    "no shard": lambda c, bait: (c / SHARD).unlink(),
    "half a table": lambda c, bait: os.truncate(c / TABLE, 500),
    "another step": lambda c, bait: edit(c / TABLE, lambda body: body.update(step=1), False),
    "a step that is none": lambda c, bait: edit(c / TABLE, lambda body: body.update(step="x"), True),
    "files elsewhere": lambda c, bait: edit(c / TABLE, elsewhere, True),
    "a chunk too large": lambda c, bait: edit(c / TABLE, lambda b: first_chunk(b).update(sizes=[9999, 32]), True),
    "a chunk of other dims": lambda c, bait: edit(c / TABLE, lambda b: first_chunk(b).update(sizes=[1]), True),
    "a missing chunk": lambda c, bait: edit(
        c / TABLE, lambda b: next(iter(b["tensors"].values())).update(chunks=[]), True
    ),
    "a list of lists": lambda c, bait: (c / TABLE).write_text("[" * 100_000),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_changed_files_are_refused_and_nothing_is_executed(ranks: Ranks, saved: Path, tmp_path: Path, how: str) -> None:
    copy, bait = tmp_path / "copy", tmp_path / "executed"
    copy.mkdir()
    for file in (saved / "step-2").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    TAMPERED[how](copy, bait)
    for text in ranks.run(refusal, replace(TINY, resume=copy), None, size=2):
        assert str(copy) in text
    assert not bait.exists()


def test_what_is_no_checkpoint(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(lw.InputError, match="is no checkpoint"):
        replace(TINY, resume=tmp_path).check(1)
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(lw.InputError, match="is no checkpoint"):
        replace(TINY, resume=tmp_path).check(1)
    assert checkpoints.find(saved) == saved / "step-4"
    assert checkpoints.find(saved / "step-2") == saved / "step-2"
