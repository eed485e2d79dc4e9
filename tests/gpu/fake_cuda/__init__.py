"""A CUDA device for programs on a machine that has none: its tensors have shapes, strides and dtypes, and no memory.

    python -m fake_cuda <module> …       runs a module in a process of its own, in which this device exists

    guard.cpp   device guard and hooks that do nothing, built here with the C++ compiler (4 s, kept in a cache folder)
    watch.py    `Watch`: tensors on "cuda" are fake and those on the CPU real; counts what a GPU would have had to do
    kernels.py  the same for kernels that the dispatcher does not see: Triton's, and compiled functions

The hooks must be there when torch is loaded, so this module imports torch only inside `install`.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).with_name("guard.cpp")
CAPABILITY = (9, 0)
NAME = "NVIDIA H100 80GB HBM3"
MULTIPROCESSORS = 132
SHARED_MEMORY = 227 << 10  # of one block


def why_not() -> str | None:
    """Why fake CUDA cannot be had here; None if it can."""
    if compiler() is None:
        return "no C++ compiler: install g++ or clang++, or set CXX"
    return None


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "g++", "clang++"))), None)


def library() -> Path:
    """The built guard, made the first time. Its name says which torch and which source it was made for."""
    key = hashlib.sha256(f"{version('torch')} {sys.version_info[:2]}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"longweave-fake-cuda-{os.getuid()}" / f"guard-{key}.so"
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _build(path)
    return path


def _build(path: Path) -> None:
    found = find_spec("torch")
    assert found is not None
    assert found.origin is not None
    torch = Path(found.origin).parent
    include = [torch / "include", torch / "include/torch/csrc/api/include"]
    command = [compiler() or "g++", "-std=c++20", "-shared", "-fPIC", "-O1", str(SOURCE)]
    command += [f"-I{folder}" for folder in include]
    command += [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        built = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
        if built.returncode:
            raise RuntimeError(f"the fake CUDA guard does not compile:\n{built.stderr}")
        made.replace(path)  # whole or not at all: another process may be building it too


def install() -> None:
    """From here on torch has a device "cuda"."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is loaded already; fake CUDA must come first, in a process of its own")
    ctypes.CDLL(str(library()))
    import torch

    # What Python code asks a CUDA device. The C++ functions behind these are not in a CPU build.
    stream = SimpleNamespace(device=torch.device("cuda", 0), cuda_stream=0)
    properties = SimpleNamespace(
        name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=MULTIPROCESSORS,
        total_memory=80 << 30, warp_size=32, shared_memory_per_block_optin=SHARED_MEMORY,
    )  # fmt: skip
    cuda = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda._exchange_device = cuda._maybe_exchange_device = lambda device: 0  # what `with torch.cuda.device(…)` calls
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda device=None: CAPABILITY
    cuda.get_device_name = lambda device=None: NAME
    cuda.get_device_properties = lambda device=None: properties
    cuda.current_stream = lambda device=None: stream
    torch.accelerator.is_available = lambda: True
    torch._subclasses.fake_tensor.init_gpu_context = lambda device: None  # it would make a real tensor there
    torch.accelerator.current_device_index = lambda: 0
    from fake_cuda import kernels

    kernels.count_triton()
    kernels.count_compiled()
