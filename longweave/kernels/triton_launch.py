"""How the package's own Triton kernels are started: where they run, and one launch.

Triton comes with CUDA builds of torch. It is imported when a kernel is first launched, never before: its kernels live
in modules of their own (`fused_kernels`, `attention/span_kernels`) that nothing imports at the top. With
TRITON_INTERPRET=1 in the environment Triton interprets the kernels, and CPU tensors are served, too.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from longweave.tensors import faking

# Constants of the process: Triton itself reads the variable once, when a kernel is defined.
INSTALLED = find_spec("triton") is not None
INTERPRETED = INSTALLED and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")

ALWAYS = {"enable_fp_fusion": True}  # options of every launch; what Triton takes by default changes with its versions
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = 80  # compute capability: older GPUs have less shared memory than tiles take, and no bfloat16


def why_not(x: Tensor) -> str | None:
    """Why no Triton kernel can take x, or None."""
    if not INSTALLED:
        return "triton is not installed: it comes with CUDA builds of torch, or by pip install 'longweave[triton]'"
    if x.device.type != "cuda" and not (INTERPRETED and x.device.type == "cpu"):
        return f"tensors are on {x.device.type}"
    if torch.version.hip is not None:
        return "its tiles were chosen for NVIDIA GPUs, and nobody has tried them on others"
    if (found := capability(x.device)) < OLDEST:
        return f"it needs compute capability {OLDEST / 10}, not {found / 10}"
    if x.dtype not in DTYPES:
        return f"it has no {str(x.dtype).removeprefix('torch.')}"
    if INTERPRETED and x.dtype == torch.bfloat16:
        return "Triton's interpreter has no bfloat16"
    return None if INTERPRETED or faking() else _failure()


def serves(x: Tensor) -> bool:
    """Is x where the package's own kernels run?"""
    return why_not(x) is None


@lru_cache(maxsize=1)  # a constant of the process
def _failure() -> str | None:
    """What the first launch of a kernel raises. Triton builds its launchers when they are needed, with a C compiler.

    So it may be there and not work, and `auto` must know before it counts on it.
    """
    try:
        from longweave.kernels.fused_kernels import trial_kernel

        launch(trial_kernel, (1,), torch.empty(1, device="cuda"))
    except Exception as error:  # whatever an installation that is broken raises
        return f"triton does not work here: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
    """Start `kernel` for every program of `grid`, on the device of the first argument."""
    first = args[0]
    assert isinstance(first, Tensor)
    if faking():
        return  # there is no memory to work on
    if first.is_cuda:
        with torch.cuda.device(first.device):
            kernel[grid](*args, **ALWAYS, **options)
    else:
        kernel[grid](*args, **ALWAYS, **options)


def capability(device: torch.device) -> int:
    """80 for compute capability 8.0, and so on; what the interpreter and fake devices pretend to be, too."""
    if device.type != "cuda" or faking():
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def in_units(*tensors: Tensor) -> tuple[int, tuple[int, ...]]:
    """A unit, and the strides of tokens and heads in it: 8 numbers if all strides are multiples of that, otherwise 1.

    A kernel is compiled for a unit and multiplies with it. So the compiler knows that rows start at multiples of 16
    bytes, and moves that much at a time; by itself it would look for multiples of 16 numbers, which 72 is not.
    """
    strides = [stride for x in tensors for stride in x.stride()[:2]]
    unit = 1 if any(stride % 8 for stride in strides) else 8
    return unit, tuple(stride // unit for stride in strides)


def power_of_two(n: int) -> int:
    """The next one, n itself included: the sizes that tiles can have."""
    return 1 << (n - 1).bit_length()


def unit_rows(x: Tensor) -> Tensor:
    """x with neighbours in its last dim side by side, as the kernels read it. A gradient of a sum may come expanded."""
    return x if x.stride(-1) == 1 else x.contiguous()
