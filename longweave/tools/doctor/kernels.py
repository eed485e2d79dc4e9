"""Checks of one device by itself: what is installed, and every attention backend against the reference."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import longweave as lw
from longweave.kernels.attention import BACKENDS, choose
from longweave.kernels.attention.partial import Tasks
from longweave.plan.mask import Mask
from longweave.tools.doctor.checks import ABSENT, LIMITS, SKIPPED, Outcome, Site, attempt, short, worst_error

BUDGET = 60.0  # seconds for one backend: FlexAttention compiles anew for every case

PACKAGES = ("triton", "flash-attn", "flash-linear-attention", "transformers")


def environment(site: Site) -> Iterator[Outcome]:
    """Versions, and the device of each rank."""
    yield Outcome("python", "", note=f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    yield Outcome("torch", "", note=torch.__version__)
    yield attempt(site, "CUDA", "", None, _cuda)
    if site.device.type == "cuda":
        yield attempt(site, "NCCL", "", None, _nccl)
        yield attempt(site, "device", f"rank {site.rank}", None, lambda: _gpu(site))
    else:
        yield Outcome(
            "device", f"rank {site.rank}", note=f"CPU, {torch.get_num_threads()} of {os.cpu_count()} cores a rank"
        )
    for package in PACKAGES:
        yield _version(package)


def _cuda() -> Outcome:
    if torch.cuda.is_available():
        return Outcome("", "", note=f"{torch.version.cuda or torch.version.hip}, {torch.cuda.device_count()} devices")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # says why there is none: no such build, no driver, no device
        return Outcome("", "", ABSENT, note=str(error))
    return Outcome("", "", ABSENT, note="torch finds no device")


def _nccl() -> Outcome:
    return Outcome("", "", note=".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]


def _gpu(site: Site) -> Outcome:
    found = torch.cuda.get_device_properties(site.device)
    free, total = torch.cuda.mem_get_info(site.device)
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return Outcome("", "", note=f"{found.name}, compute capability {found.major}.{found.minor}, {memory}")


def _version(package: str) -> Outcome:
    try:
        return Outcome(package, "", note=metadata.version(package))
    except metadata.PackageNotFoundError:
        return Outcome(package, "", ABSENT, note="not installed")


# -- attention -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionCase:
    """One call of a kernel on one device."""

    mask: Mask
    heads: tuple[int, int] = (4, 2)  # of q, and of k and v
    dims: tuple[int, int] = (64, 64)  # of q and k, and of v
    softcap: float | None = None
    sinks: bool = False

    def inputs(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """q, k, v, the gradient of out, sinks; rounded to `dtype`."""
        rng = torch.Generator().manual_seed(0)
        (heads, kv_heads), (dim, v_dim), total = self.heads, self.dims, self.mask.total
        shapes = [(total, heads, dim), (total, kv_heads, dim), (total, kv_heads, v_dim), (total, heads, v_dim)]
        tensors = [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]
        return [x.to(device) for x in (*tensors, torch.randn(heads, generator=rng))]

    def pack(self, group: dist.ProcessGroup, layout: str | lw.Layout = "contiguous", **ways: Any) -> lw.Pack:
        return lw.Pack(self.mask.cu_seqlens, group, layout, mask=self.mask, **ways)

    def solve(self, inputs: list[Tensor], pack: lw.Pack, backend: str = "auto") -> list[Tensor]:
        """out, lse, dq, dk, dv of this rank's tokens, and its part of dsinks, as users get them."""
        q, k, v = (pack.shard(x).detach().requires_grad_() for x in inputs[:3])
        sinks = inputs[4].detach().requires_grad_() if self.sinks else None
        out, lse = lw.attention(
            q, k, v, pack, softcap=self.softcap, sinks=sinks, return_lse=True, backend=backend
        )  # fmt: skip
        leaves = (q, k, v) if sinks is None else (q, k, v, sinks)
        return [out, lse, *torch.autograd.grad(out, leaves, pack.shard(inputs[3]))]

    def reference(self, inputs: list[Tensor], alone: dist.ProcessGroup) -> list[Tensor]:
        """In float64 on the CPU, by plain products, in one process."""
        return self.solve([x.cpu().double() for x in inputs], self.pack(alone), "reference")


_RAGGED = [0, 5, 6, 90, 90, 301]
ATTENTION: dict[str, AttentionCase] = {
    "causal packed": AttentionCase(Mask.causal(_RAGGED)),
    "window 37": AttentionCase(Mask.sliding_window(_RAGGED, 37)),
    "wide window": AttentionCase(Mask.sliding_window([0, 260], 130)),
    "softcap": AttentionCase(Mask.causal(_RAGGED), softcap=5.0),
    "sinks": AttentionCase(Mask.sliding_window(_RAGGED, 64), sinks=True),
    "D 96, Dv 64": AttentionCase(Mask.causal(_RAGGED), dims=(96, 64)),
    "8:1 heads of 128": AttentionCase(Mask.full([0, 40, 201]), heads=(8, 1), dims=(128, 128)),
    "blind rows": AttentionCase(
        Mask.from_slices(300, [((20, 120), (50, 250), (-30, 60)), ((200, 290), (0, 10), "full")])
    ),
}


def attention_backends(site: Site) -> Iterator[Outcome]:
    """Forward and backward of every backend, on every case and dtype that it takes."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if site.device.type == "cuda" else (torch.float32,)
    for backend in BACKENDS:
        begin = time.perf_counter()
        for dtype in dtypes:
            for name, case in ATTENTION.items():
                title = f"{name}, {short(dtype)}"
                if time.perf_counter() - begin > BUDGET:
                    yield Outcome(backend, title, SKIPPED, note=f"{BUDGET:.0f} s for this backend are over")
                    continue
                yield attempt(site, backend, title, LIMITS[dtype], _against_reference(site, case, dtype, backend))


def _against_reference(site: Site, case: AttentionCase, dtype: torch.dtype, backend: str) -> Callable[[], float]:
    def measure() -> float:
        inputs = case.inputs(dtype, site.device)
        return worst_error(case.solve(inputs, case.pack(site.alone_here), backend), case.reference(inputs, site.alone))

    return measure


# What `auto` is asked about: mask, dims of q and v, softcap. Kernels look at the tasks, not at the tensors.
ASKED: dict[str, tuple[Mask, tuple[int, int], float | None]] = {
    "one document of 32768": (Mask.causal([0, 32768]), (128, 128), None),
    "64 documents of 512": (Mask.causal([*range(0, 32769, 512)]), (128, 128), None),
    "window of 1024": (Mask.sliding_window([0, 32768], 1024), (128, 128), None),
    "softcap": (Mask.causal([0, 32768]), (128, 128), 30.0),
    "D 192, Dv 128": (Mask.causal([0, 32768]), (192, 128), None),
    "head dim 512": (Mask.causal([0, 32768]), (512, 512), None),
}


def automatic_choice(site: Site) -> Iterator[Outcome]:
    """Which backend serves which case when nobody names one."""
    for dtype in site.dtypes:
        for name, (mask, (dim, v_dim), softcap) in ASKED.items():

            def measure(mask: Mask = mask, dim: int = dim, v_dim: int = v_dim, cap: float | None = softcap) -> Outcome:
                q, k, v = (torch.empty(1, 8, d, dtype=dtype, device=site.device) for d in (dim, dim, v_dim))  # noqa: B023
                return Outcome("", "", note=choose(q, k, v, 1.0, cap).serving(Tasks(mask.rows)))

            yield attempt(site, f"{name}, {short(dtype)}", "", None, measure)
