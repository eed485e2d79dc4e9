"""Compile Triton kernels for GPUs that are not there: the very launches that the package makes, caught on their way."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from longweave.kernels.triton_launch import ALWAYS

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """What was about to run."""

    kernel: Any
    args: tuple[object, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__.removesuffix("_kernel")


@dataclass(frozen=True)
class Compiled:
    """What became of it: bytes of shared memory, registers and bytes of spills of a thread, and the assembly."""

    shared: int
    registers: int
    spills: int
    ptx: str


def catch(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[Launch]:
    """A list that fills with the launches of `module`; nothing runs."""
    launches: list[Launch] = []

    def note(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
        launches.append(Launch(kernel, args, options))

    monkeypatch.setattr(module, "launch", note)
    return launches


def compile_for(launch: Launch, capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = ALWAYS | {name: launch.options[name] for name in OPTIONS if name in launch.options}
    constants = {name: value for name, value in launch.options.items() if name not in OPTIONS}
    signature, attributes = dict.fromkeys(launch.kernel.arg_names, "constexpr"), {}
    for i, (parameter, value) in enumerate(zip(launch.kernel.params, launch.args, strict=False)):
        name = parameter.name
        if value is None or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            constants[name] = value
        elif isinstance(value, Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]  # as memory of the allocator is
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return Compiled(built.metadata.shared, found["REG"], found["STACK"], built.asm["ptx"])
