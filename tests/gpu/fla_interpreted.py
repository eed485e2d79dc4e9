"""The real kernels of flash-linear-attention in Triton's interpreter, on CPU tensors. Import it before anything of Triton.

Three things are in the way. The interpreter is chosen when kernels are defined, so the environment comes first. There is
no device to time configurations on, so every autotuner takes its first one. And loop variables are plain integers in
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

from longweave.kernels.recurrence import fla

torch.set_num_threads(1)
fla.DEVICES = ("cpu",)
launched: Counter[str] = Counter()


def _first_configuration(tuner, *args, **kwargs):
    tuner.configs = tuner.configs[:1]
    return _tuned(tuner, *args, **kwargs)


def _counted(kernel, *args, **kwargs):
    launched[kernel.fn.__name__] += 1
    return _launch(kernel, *args, **kwargs)


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
