# ruff: noqa: E402
"""The real kernels of flash-linear-attention in Triton's interpreter, on CPU tensors. Import it before Triton.

Three things are in the way. The interpreter is chosen when kernels are defined, so the environment comes first. There
is no device to time configurations on, so every autotuner takes its first one. And loop variables are plain integers in
the interpreter while kernels call methods of them, so that each loop begins by making its variable a tensor.
"""

from __future__ import annotations

import ast
import os
import sys
from collections import Counter

assert "triton" not in sys.modules, "the interpreter must be chosen before Triton is imported"
os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.runtime.autotuner as autotuner
import triton.runtime.interpreter as interpreter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from longweave.kernels.recurrence import fla

torch.set_num_threads(1)
fla.DEVICES = ("cpu",)
launched: Counter[str] = Counter()


def _first_configuration(tuner, *args, **kwargs):
    tuner.configs = tuner.configs[:1]
    return _tuned(tuner, *args, **kwargs)


def _counted(kernel, *args, **kwargs):
    launched[kernel.fn.__name__] += 1
    with _disable_current_modes():  # the interpreter's own copies are no launches
        return _launch(kernel, *args, **kwargs)


class Launches(TorchDispatchMode):
    """What a GPU would be given: Triton's kernels, and torch's operations other than views and allocations."""

    FREE = ("aten.empty", "aten.new_empty", "aten.detach", "aten.lift_fresh", "aten.is_", "prim.")

    def __init__(self) -> None:
        super().__init__()
        self.torch: Counter[str] = Counter()

    def __enter__(self) -> Launches:
        launched.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        if not views and not str(func).startswith(self.FREE):
            self.torch[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def triton(self) -> Counter[str]:
        return launched

    def __str__(self) -> str:
        return f"{launched.total()} of Triton and {self.torch.total()} of torch: {dict(self.torch)}"


def _loop(transformer, node):
    node = transformer.generic_visit(node)
    of_range = isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func).split(".")[-1] == "range"
    if of_range and isinstance(node.target, ast.Name):
        name = node.target.id
        as_tensor = ast.parse(f"{name} = interpreter_semantic.to_tensor({name}, False)").body[0]
        node.body.insert(0, ast.copy_location(as_tensor, node))
    return node


_tuned, autotuner.Autotuner.run = autotuner.Autotuner.run, _first_configuration
_launch, interpreter.InterpretedFunction.run = interpreter.InterpretedFunction.run, _counted
interpreter.ASTTransformer.visit_For = _loop
