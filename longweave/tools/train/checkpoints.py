"""Checkpoints that are whole or not there, whenever a save is killed.

    out/
      .saving-step-20/     every rank writes its shards here and forces them to the disk;
                           then rank 0 writes checkpoint.json, the table of what is where
      step-20/             the same folder, renamed when all of it is there. It is never touched again: another
                           checkpoint of step 20 (of a run that went back) becomes step-20.2
      latest               the name of the newest one, replaced in one go: it only ever names a whole one
      .lock                held by rank 0 while it runs: two runs in one folder would mix

JSON and numbers, no pickles: loading executes nothing. Digests tell files that were cut off or changed.
What goes wrong on one rank is raised on all.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from longweave.errors import InputError
from longweave.tools.train import shards
from longweave.tools.train.shards import Chunk, StoredTensor, Table
from longweave.tools.train.together import RunFileError, naming, nothing, together

Facts = dict[str, str | int]  # what must be alike when a run is resumed

CONTENTS, LATEST = "checkpoint.json", "latest"
FORMAT = "longweave checkpoint 1"


class CheckpointError(RunFileError):
    """A checkpoint could not be written; earlier ones are as they were."""


@dataclass(frozen=True)
class Contents:
    """`checkpoint.json`."""

    step: int
    facts: Facts
    tensors: Table
    files: dict[str, str]  # the digest of each


# -- finding --------------------------------------------------------------------------------------


def find(folder: Path) -> Path:
    """`folder` itself if it is a checkpoint, or the newest of a run's folder; raises where there is none."""
    if not folder.exists():
        raise InputError(f"resume is {folder}, which does not exist; give a checkpoint or the out folder of a run")
    found = folder if (folder / CONTENTS).is_file() else newest(folder)
    if found is None:
        raise InputError(
            f"resume is {folder}, which is no checkpoint (no {CONTENTS} in it) and holds none. Give a checkpoint, "
            "or the out folder of a run that has saved one"
        )
    return found


def newest(out: Path) -> Path | None:
    """The last complete checkpoint of a run, if it has one: the one that `latest` names, else the furthest."""
    with suppress(OSError, UnicodeDecodeError):
        found = out / (out / LATEST).read_text().strip()
        if found.parent == out and (found / CONTENTS).is_file():
            return found
    return max(_complete(out), key=_place, default=None)


def _complete(out: Path) -> list[Path]:
    """All checkpoints of a run that were written to the end."""
    return [folder for folder in out.glob("step-*") if _place(folder) and (folder / CONTENTS).is_file()]


def _place(folder: Path) -> tuple[int, ...]:
    """Steps, and which try at them: (20, 2) for step-20.2; () for another folder."""
    found = re.fullmatch(r"step-(\d+)(?:\.(\d+))?", folder.name)
    return (int(found[1]), int(found[2] or 1)) if found else ()


def read_contents(folder: Path) -> Contents:
    """The table of a checkpoint; raises `InputError` for anything that `save` has not written."""
    try:
        raw = json.loads((folder / CONTENTS).read_bytes())
        body = raw["body"]
        if raw["format"] != FORMAT or raw["sha256"] != _digest(body):
            raise ValueError("its digest or its format is another one")
        for name in body["files"]:
            if not re.fullmatch(r"rank-\d+\.safetensors", name):
                raise ValueError(f"{name!r} is no file of a checkpoint")
        tensors = {str(name): _stored(entry, body["files"]) for name, entry in body["tensors"].items()}
        return Contents(_sizes([body["step"]], 1)[0], dict(body["facts"]), tensors, dict(body["files"]))
    except OSError as error:
        raise InputError(f"{folder / CONTENTS} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{folder / CONTENTS} is damaged or was changed ({error}); take another checkpoint") from error


def check_facts(folder: Path, facts: Facts) -> Contents:
    """The contents of a checkpoint that this run can go on from: same model, same data order.

    A fact that earlier versions did not write down is not compared.
    """
    contents = read_contents(folder)
    other = [f"{name} is {contents.facts[name]} there and {mine} here" for name, mine in facts.items()
             if contents.facts.get(name, mine) != mine]  # fmt: skip
    if other:
        raise InputError(
            f"{folder} is of another run: {'; '.join(other)}. Give the options that it was made with, "
            "and the same version of Python if it is the documents"
        )
    return contents


# -- the folder of a run --------------------------------------------------------------------------


@contextmanager
def run_folder(out: Path, start: Path | None, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Hold `out` for this run, which goes on from `start`; remove what killed runs have left half-written."""
    lock: list[int] = []

    def take() -> None:
        out.mkdir(parents=True, exist_ok=True)
        lock.append(os.open(out / ".lock", os.O_RDWR | os.O_CREAT))
        try:
            fcntl.flock(lock[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"another run is writing to {out}; give another out folder") from None
        for half in [*out.glob(".saving-*"), *out.glob(f".{LATEST}*")]:
            shutil.rmtree(half) if half.is_dir() else half.unlink()
        kept = [folder.name for folder in sorted(_complete(out), key=_place)]
        if kept and not _is_in(start, out):
            raise OSError(
                f"{out} holds checkpoints of an earlier run ({', '.join(kept)}); give --resume {out} to go on from "
                f"them, or another --out"
            )

    try:
        together(take if dist.get_rank() == 0 else nothing, group, lambda text: CheckpointError(f"out: {text}"))
        yield
    finally:
        for descriptor in lock:
            os.close(descriptor)


def went_on_from(start: Path, out: Path) -> None:
    """`start` has been loaded: if it lies in `out`, a restart goes on from there, too. On rank 0."""
    if _is_in(start, out):
        _point(out, start.name)


def _is_in(start: Path | None, out: Path) -> bool:
    return start is not None and start.resolve().parent == out.resolve()


# -- saving and loading ---------------------------------------------------------------------------


def save(
    out: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    facts: Facts,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Every rank writes its shards; returns the folder. Inside `run_folder`, on all ranks."""
    rank = dist.get_rank()
    half = out / f".saving-step-{step}"
    tensors = shards.tensors_of(model, optimizer)

    def write_shards() -> tuple[Table, str, str]:
        path = half / f"rank-{rank}.safetensors"
        table = shards.write(path, tensors)
        _sync(path)
        return table, path.name, _file_digest(path)

    def finish(written: list[tuple[Table, str, str]]) -> Path:
        unseen = [name for _, name, _ in written if not (half / name).is_file()]
        if unseen:
            raise OSError(f"rank 0 does not see {', '.join(unseen)} in {half}; all hosts must share the out folder")
        table = shards.merge([table for table, _, _ in written])
        files = {name: digest for _, name, digest in written}
        _write(half / CONTENTS, _encode(Contents(step, facts, table, files)))
        _sync(half)
        done = _free_name(out, step)
        half.rename(done)
        _sync(out)
        _point(out, done.name)
        return done

    def failed(text: str) -> CheckpointError:
        if rank == 0:
            shutil.rmtree(half, ignore_errors=True)
        kept = newest(out)
        last = f"the last complete checkpoint is {kept}" if kept else "there is no complete checkpoint yet"
        return CheckpointError(f"the checkpoint of step {step} could not be saved: {text}; {last}")

    together(half.mkdir if rank == 0 else nothing, group, failed)
    written = together(write_shards, group, failed)
    done = together((lambda: finish(written)) if rank == 0 else nothing, group, failed)[0]
    assert done is not None
    return done


def chosen_by_rank_0(choose: Callable[[], Path | None], group: dist.ProcessGroup | None) -> Path | None:
    """Where the run starts is looked up once: another host may see a folder later."""
    return together(choose if dist.get_rank() == 0 else nothing, group, InputError)[0]


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    facts: Facts,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Fill model and optimizer from a checkpoint; returns the number of steps that it had done."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def examine() -> Contents:
        contents = check_facts(folder, facts)
        for name in sorted(contents.files)[rank::world]:  # each is read by one rank
            if _file_digest(folder / name) != contents.files[name]:
                raise InputError(f"{folder / name} is damaged or was changed; take another checkpoint")
        return contents

    def fill(contents: Contents) -> None:
        shards.make_moments(model, optimizer, contents.tensors)
        tensors = shards.tensors_of(model, optimizer)
        shards.check_fits(tensors, contents.tensors)
        with torch.no_grad():
            shards.read(folder, tensors, contents.tensors)

    def refused(text: str) -> InputError:
        return InputError(f"{folder} cannot be resumed from: {text}")

    contents = together(examine, group, refused)[rank]
    together(lambda: fill(contents), group, refused)
    return contents.step


# -- in pieces ------------------------------------------------------------------------------------


def _free_name(out: Path, step: int) -> Path:
    name, again = out / f"step-{step}", 1
    while name.exists():
        again += 1
        name = out / f"step-{step}.{again}"
    return name


def _point(out: Path, name: str) -> None:
    """`latest` names this one from now on, or the one before, but never half of a name."""
    draft = out / f".{LATEST}"
    _write(draft, name.encode())
    draft.replace(out / LATEST)
    _sync(out)


def _write(path: Path, data: bytes) -> None:
    with naming(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """What was written to this file, or renamed in this folder, is on the disk afterwards."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encode(contents: Contents) -> bytes:
    body = asdict(contents)
    return json.dumps({"format": FORMAT, "sha256": _digest(body), "body": body}).encode()


def _digest(body: Any) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _one_of(value: Any, names: Any) -> str:
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{value!r} is not known")
    return value


def _sizes(values: Any, dims: int) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) != dims or any(type(n) is not int or n < 0 for n in values):
        raise ValueError(f"{values!r} is no list of {dims} sizes")
    return tuple(values)


def _stored(entry: Any, files: Any) -> StoredTensor:
    dims = len(entry["shape"])
    chunks = [
        Chunk(_one_of(chunk["file"], files), _sizes(chunk["offsets"], dims), _sizes(chunk["sizes"], dims))
        for chunk in entry["chunks"]
    ]
    return StoredTensor(_one_of(entry["dtype"], shards.DTYPES), _sizes(entry["shape"], dims), tuple(chunks))
