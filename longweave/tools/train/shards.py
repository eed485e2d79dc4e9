"""The tensors of a model and its optimizer, in files that any number of ranks can read.

    2 ranks wrote             3 ranks read
    rank-0  rows 0..5    ─┬─▶ rows 0..3
                          ├─▶ rows 4..7     copies the overlap of what it holds with what lies in each file
    rank-1  rows 6..11   ─┴─▶ rows 8..11

A file is in the safetensors format and holds the part of every tensor that its rank holds. The table says which box of
which tensor lies in which file. torch.distributed.checkpoint reshards as well, but its `.metadata` is a pickle: whoever
can write it can run code in the job that resumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from longweave.errors import InputError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
}


@dataclass(frozen=True)
class Chunk:
    """The box of a tensor that lies in one file, under the tensor's name."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """What a checkpoint says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


Table = dict[str, StoredTensor]


# -- which tensors --------------------------------------------------------------------------------


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """`model.…` and `optimizer.<parameter>.<moment>`; a parameter with two names is there once."""
    found: dict[str, torch.Tensor] = {f"model.{name}": tensor for name, tensor in _persistent(model)}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                raise InputError(
                    f"the optimizer keeps {key} of {name} as {type(value).__name__}; only tensors are saved"
                )
            found[f"optimizer.{name}.{key}"] = value
    return found


def make_moments(model: nn.Module, optimizer: torch.optim.Optimizer, table: Table) -> None:
    """Room for the optimizer's state that the table lists: as its parameter is sharded, or whole for other shapes."""
    parameters = dict(model.named_parameters())
    for name, stored in table.items():
        if not name.startswith("optimizer."):
            continue
        owner, _, key = name.removeprefix("optimizer.").rpartition(".")
        if owner not in parameters:
            raise InputError(f"it has {name}, but this model has no parameter {owner}")
        parameter, dtype = parameters[owner], DTYPES[stored.dtype]
        like = stored.shape == tuple(parameter.shape)
        made = torch.zeros_like(parameter, dtype=dtype) if like else torch.zeros(stored.shape, dtype=dtype)
        optimizer.state[parameter][key] = made.detach()


def _persistent(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    saved = model.state_dict()
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


# -- boxes ----------------------------------------------------------------------------------------


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What this rank holds, and where it begins in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.dim()
    if not all(isinstance(placement, Shard) for placement in tensor.placements):
        raise InputError(f"a tensor is placed as {tensor.placements}; only shards are saved and loaded")
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach(), tuple(offsets)


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Table:
    """This rank's part of every tensor into one file; what all ranks hold whole is written by rank 0."""
    held: dict[str, torch.Tensor] = {}
    table: Table = {}
    for name, tensor in tensors.items():
        local, offsets = _local(tensor)
        if local.numel() and (isinstance(tensor, DTensor) or dist.get_rank() == 0):
            held[name] = local.contiguous()
            chunks: tuple[Chunk, ...] = (Chunk(path.name, offsets, tuple(local.shape)),)
        else:
            chunks = ()
        table[name] = StoredTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), chunks)
    try:
        save_file(held, path)
    except SafetensorError as error:
        raise OSError(f"{error}: {path}") from error
    return table


def merge(tables: list[Table]) -> Table:
    """One table from those of all ranks, which list the same tensors."""
    return {
        name: StoredTensor(first.dtype, first.shape, tuple(c for table in tables for c in table[name].chunks))
        for name, first in tables[0].items()
    }


def check_fits(tensors: dict[str, torch.Tensor], table: Table) -> None:
    """Refuses a checkpoint of another model, before any number is read."""
    for name in sorted(tensors.keys() ^ table.keys()):
        where = "is missing in it" if name in tensors else "has no place in this model"
        raise InputError(f"{name} {where}")
    for name, tensor in tensors.items():
        stored = table[name]
        seen = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if (stored.dtype, stored.shape) != seen:
            raise InputError(
                f"{name} is {stored.dtype} {list(stored.shape)} in it, but {seen[0]} {list(seen[1])} in this model"
            )


def read(folder: Path, tensors: dict[str, torch.Tensor], table: Table) -> None:
    """Fill this rank's part of every tensor, in place."""
    try:
        with ExitStack() as stack:
            files = {
                name: stack.enter_context(safe_open(folder / name, framework="pt"))
                for name in {chunk.file for stored in table.values() for chunk in stored.chunks}
            }
            for name, tensor in tensors.items():
                local, offsets = _local(tensor)
                filled = 0
                for chunk in table[name].chunks:
                    boxes = _overlap(offsets, tuple(local.shape), chunk.offsets, chunk.sizes)
                    if boxes is not None:
                        part = _cut(files[chunk.file], name, chunk, boxes[1])
                        local[boxes[0]].copy_(part)
                        filled += part.numel()
                if filled != local.numel():
                    raise InputError(f"{filled} of {local.numel()} numbers of {name} are in it")
    except SafetensorError as error:
        raise InputError(f"a file of it cannot be read: {error}") from error


def _cut(file: Any, name: str, chunk: Chunk, box: tuple[slice, ...]) -> torch.Tensor:
    lazy = file.get_slice(name)
    if tuple(lazy.get_shape()) != chunk.sizes:
        raise InputError(f"{chunk.file} has {name} as {lazy.get_shape()}, but the table says {list(chunk.sizes)}")
    part: torch.Tensor = lazy[box] if box else file.get_tensor(name)  # scalars cannot be sliced
    return part


Box = tuple[slice, ...]


def _overlap(
    mine: tuple[int, ...], my_sizes: tuple[int, ...], theirs: tuple[int, ...], their_sizes: tuple[int, ...]
) -> tuple[Box, Box] | None:
    """The common box in the coordinates of both, or None. Scalars have the empty box in common."""
    begin = [max(a, b) for a, b in zip(mine, theirs, strict=True)]
    end = [min(a + m, b + n) for a, m, b, n in zip(mine, my_sizes, theirs, their_sizes, strict=True)]
    if math.prod(max(0, stop - start) for start, stop in zip(begin, end, strict=True)) == 0:
        return None
    return (
        tuple(slice(start - a, stop - a) for start, stop, a in zip(begin, end, mine, strict=True)),
        tuple(slice(start - b, stop - b) for start, stop, b in zip(begin, end, theirs, strict=True)),
    )
