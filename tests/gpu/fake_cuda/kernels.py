"""Kernels that the dispatcher does not see: those of Triton, and functions that torch would compile.

Triton kernels are not run: the host code that prepares and launches them is, with its grids and arguments; each launch
is counted. Of an autotuned kernel the first configuration that is not pruned stands for the best one. A compiled
function runs as it is, and counts as the kernels that it would become.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fake_cuda import CAPABILITY, MULTIPROCESSORS, SHARED_MEMORY
from fake_cuda.watch import Watch, touched

# Our own elementwise kernels. The rest of Triton's (attention, recurrences) is arithmetic and moves what it must.
ELEMENTWISE = "longweave.kernels.fused"


def count_triton() -> None:
    """From here on Triton has a device, and its kernels are counted where they would have been launched."""
    try:
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction
    except ImportError:
        return
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=0: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
            is_active=lambda: True,
            utils=SimpleNamespace(
                get_device_properties=lambda device=0: {
                    "max_shared_mem": SHARED_MEMORY,
                    "multiprocessor_count": MULTIPROCESSORS,
                    "max_num_regs": 65536,
                    "warpSize": 32,
                }
            ),
        )
    )

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        watch = Watch.active
        if watch is None or warmup:
            return
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        known = {p.name: p.default for p in self.params if p.has_default} | given
        if missing := [name for name in self.arg_names if name not in known]:
            raise TypeError(f"{self.fn.__name__} was launched without {', '.join(missing)}")
        size = grid(known) if callable(grid) else grid
        if not all(isinstance(n, int) and n >= 0 for n in size):
            raise TypeError(f"{self.fn.__name__} was launched on the grid {size}")
        if not prod(size):  # then Triton launches nothing
            return
        tensors = [x for name, x in given.items() if isinstance(x, Tensor) and name in self.arg_names]
        if strangers := [x for x in tensors if not x.is_cuda]:
            raise TypeError(f"{self.fn.__name__} was given tensors on {[str(x.device) for x in strangers]}")
        for x in tensors:
            watch.hold(x)
        traffic = 0
        if self.fn.__module__.startswith(ELEMENTWISE):
            passes = _passes(self.src)
            traffic = sum(passes.get(name, 0) * touched(x) for name, x in given.items() if isinstance(x, Tensor))
        watch.launch(self.fn.__name__, traffic)

    def tune(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        config = self.prune_configs(kwargs)[0]
        result = self.fn.run(*args, **kwargs, **config.all_kwargs())
        self.nargs = None
        return result

    JITFunction.run = launch
    Autotuner.run = tune


@cache
def _passes(source: str) -> dict[str, int]:
    """How often a kernel goes over each of its pointers: 1 if it reads or writes there, 2 for both."""
    kernel = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    pointers = {argument.arg: {argument.arg} for argument in kernel.args.args}  # a name, and what it points into
    found: set[tuple[str, str]] = set()

    def behind(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
            return set()  # a value
        if isinstance(node, ast.Name):
            return pointers.get(node.id, set())
        return set().union(*map(behind, ast.iter_child_nodes(node)))

    for node in ast.walk(kernel):  # statements that follow each other stand in this order
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            pointers[node.targets[0].id] = behind(node.value)
    for node in ast.walk(kernel):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.store"):
            found |= {(ast.unparse(node.func), name) for name in behind(node.args[0])}
    return dict(Counter(name for _, name in found))


def count_compiled() -> None:
    """From here on a compiled function is one kernel for each size of what it changes or returns."""

    def compile(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
        if fn is None:
            return lambda given: compile(given, **options)

        @wraps(fn)
        def fused(*args: Any) -> Any:
            watch = Watch.active
            if watch is None:
                return fn(*args)
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.is_cuda]
            before = [x._version for x in tensors]
            with watch.unseen():
                result = fn(*args)
            returned = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            changed = [x for x, version in zip(tensors, before, strict=True) if x._version != version] + returned
            for x in returned:
                watch.hold(x)
            kernels = {x.shape for x in changed}
            watch.launch(fn.__name__, sum(map(touched, (*tensors, *changed))))
            for _ in range(len(kernels) - 1):
                watch.launch(fn.__name__, 0)
            return result

        return fused

    torch.compile = compile  # type: ignore[assignment]
