"""SUM over the ranks of a group, in place of each tensor, few messages for many tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from longweave.comm.exchange import sum_dtype
from longweave.comm.groups import Comm

BUCKET_BYTES = 64 << 20


def all_reduce_sum(tensors: Sequence[Tensor], comm: Comm) -> list[Tensor]:
    """The sums over ranks, as new tensors of the same dtypes. Adds in float32 where the dtype is smaller.

    Every rank must give tensors of the same shapes in the same order. Carries no gradient.
    """
    results: list[Tensor] = []
    for bucket in _buckets(tensors):
        flat = torch.cat([x.detach().reshape(-1).to(sum_dtype(x.dtype)) for x in bucket])
        if comm.group is not None and comm.size > 1 and flat.numel():
            dist.all_reduce(flat, group=comm.group)
        sizes = [x.numel() for x in bucket]
        results += [part.view(x.shape).to(x.dtype) for part, x in zip(torch.split(flat, sizes), bucket, strict=True)]
    return results


def is_sharded(x: Tensor) -> bool:
    """Whether others hold parts of this tensor."""
    return isinstance(x, DTensor)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of neighbours with one dtype and device, about BUCKET_BYTES each."""
    bucket: list[Tensor] = []
    filled = 0
    for x in tensors:
        alike = bucket and (x.dtype, x.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and not (alike and filled < BUCKET_BYTES):
            yield bucket
            bucket, filled = [], 0
        bucket.append(x)
        filled += x.numel() * max(x.element_size(), 4)
    if bucket:
        yield bucket
