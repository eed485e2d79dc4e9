"""`Watch`: runs code on a CUDA device that is not there, and counts what a GPU would have had to do.

    tensors on the CPU     are real: integers, plans and batches have their values
    tensors on "cuda"      are fake: shape, strides, dtype, and the size of their storage
    longweave's operators  run their own bodies, not their stand-ins for tracing
    Triton kernels         are counted when they are launched, see `kernels.py`

    with Watch() as watch, watch.during(Tally()) as forward:
        out = layer(x)
    forward.launches, forward.traffic, forward.peak, forward.syncs, forward.uploads, forward.collectives

What is counted, by operator and by the line of code that asked for it:
    launches      kernels; views and empty buffers cost nothing; a matmul, a sort, an attention call count as one
    traffic       bytes that kernels read and write, without matmuls, attention and the recurrences of linear attention
    syncs         whatever makes the host wait: values read, tensors copied to the CPU, sizes that depend on values
    uploads       copies to the device: bytes, whether from pinned memory and without waiting
    collectives   messages, bytes sent to other ranks and received from them
    peak          the most memory of live storages at a time
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OWN = find_spec("longweave").submodule_search_locations[0]  # type: ignore[union-attr,index]
LAUNCHER = "triton_launch.py"  # who called it is the line to know
MODELS = "/site-packages/transformers/"
PASSED_OVER = ("/site-packages/torch/", "/site-packages/triton/", "/fake_cuda/", "/contextlib.py", "<frozen")

# Kernels whose time is arithmetic, not memory.
MATMULS = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "convolution", "convolution_backward", "_scaled_mm")
# The host waits for the result: it is a value, or has a size that depends on values.
SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "bincount", "is_nonzero")
UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_")
# These write all of their first argument without reading it.
OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "arange")
# What is read of the first argument is as large as the result; …
GATHERS = ("index_select", "index", "gather", "embedding", "take_along_dim")
# … and what is written, and for sums read, of the first argument is as large as the values.
SCATTERS = {"index_add_": 3, "index_copy_": 2, "index_put_": 3, "scatter_": 2, "scatter_add_": 3, "index_fill_": 1}


class UnknownValueError(RuntimeError):
    """The host asked for a value of a tensor on the device."""


@dataclass
class Collective:
    """All messages of one kind. Bytes without what a rank sends to itself."""

    count: int = 0
    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class Site:
    """An operator and the line that asked for it. `own`: a line of longweave is in the call stack."""

    op: str
    line: str
    own: bool


@dataclass
class Tally:
    """What one stretch of code cost."""

    calls: Counter[Site] = field(default_factory=Counter)
    moved: Counter[Site] = field(default_factory=Counter)
    syncs: Counter[Site] = field(default_factory=Counter)
    uploads: list[tuple[Site, int, bool]] = field(default_factory=list)  # bytes; pinned and without waiting
    collectives: dict[str, Collective] = field(default_factory=dict)
    before: int = 0  # live bytes when it began, …
    peak: int = 0  # … and at most, those included

    @property
    def launches(self) -> int:
        return self.calls.total()

    @property
    def traffic(self) -> int:
        return self.moved.total()

    def summary(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "launches": self.launches,
            "traffic": self.traffic,
            "extra_peak": self.peak - self.before,
            "syncs": _listed(Counter({site: n for site, n in self.syncs.items() if site.own})),
            "foreign_syncs": _listed(Counter({site: n for site, n in self.syncs.items() if not site.own})),
            "uploads": [[site.line, size, free] for site, size, free in self.uploads if site.own],
            "foreign_uploads": [[site.line, size, free] for site, size, free in self.uploads if not site.own],
            "collectives": {kind: [c.count, c.sent, c.received] for kind, c in self.collectives.items()},
            "top": [[site.op, site.line, n, self.moved[site]] for site, n in self.calls.most_common()],
        }


def _listed(sites: Counter[Site]) -> list[list[Any]]:
    return [[site.op, site.line, n] for site, n in sites.items()]


class _FakeTensors(FakeTensorMode):
    """torch.cuda says that there is a device; no tensor must be made on it for that."""

    @property
    def avoid_device_init(self) -> bool:
        return True


class Watch(TorchDispatchMode):
    """See the module. One at a time, for a process that `fake_cuda.install` has prepared."""

    active: Watch | None = None

    def __init__(self) -> None:
        super().__init__()
        self.fake = _FakeTensors(allow_non_fake_inputs=True)
        self.live = 0
        self.current = Tally()
        self._storages: dict[int, int] = {}
        self._pinned: set[int] = set()
        self._unseen = False
        self._lock = threading.RLock()  # storages may die in autograd's threads

    def __enter__(self) -> Watch:
        Watch.active = self
        self._lifting = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device="cuda") is made on the CPU, then uploaded
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._lifting)
        Watch.active = None

    # -- stretches ---------------------------------------------------------------------------------

    def switch(self, tally: Tally) -> None:
        """From here on everything is counted there."""
        if not tally.peak:
            tally.before = self.live
        tally.peak = max(tally.peak, self.live)
        self.current = tally

    @contextmanager
    def during(self, tally: Tally) -> Iterator[Tally]:
        previous = self.current
        self.switch(tally)
        try:
            yield tally
        finally:
            self.switch(previous)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Nothing is counted and no memory held: what runs here stands for a kernel that is counted elsewhere."""
        self._unseen = True
        try:
            yield
        finally:
            self._unseen = False

    # -- operators ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if func.namespace == "longweave":
            with self._again():
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not (any(isinstance(x, FakeTensor) for x in inputs) or _on_cuda(args, kwargs)):
            return self._on_cpu(func, name, args, kwargs)
        if name in SYNCS:
            self._count(self.current.syncs, name)
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UnknownValueError(
                f"{name} waits for a value that only a GPU would have, at {_site(name).line}"
            ) from error
        if self._unseen:
            return out
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        known = {_key(x) for x in inputs}
        fresh = [x for x in outputs if _key(x) not in known]
        for x in (*inputs, *outputs):
            self.hold(x)
        if func.namespace == "c10d":
            self._collective(name, args)
        elif name in ("_to_copy", "copy_", "_copy_from") and _crosses(inputs, outputs):
            self._copy_between_devices(name, inputs, outputs, args, kwargs)
        elif name == "copy_" and _same_data(*args[:2]):
            pass  # as `total[a:b] += x` ends; torch does nothing
        elif name not in (*SYNCS, *UNINITIALISED) and (fresh or func._schema.is_mutable):
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            self.launch(name, self._traffic(name, func, inputs, fresh, given))
        return out

    def _on_cpu(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A real operator. Pinned memory is ordinary memory that is remembered."""
        if name == "_pin_memory":
            copy = args[0].clone()
            key = _key(copy)
            self._pinned.add(key)
            weakref.finalize(copy.untyped_storage(), self._pinned.discard, key)
            return copy
        if name == "is_pinned":
            return _key(args[0]) in self._pinned
        return func(*args, **kwargs)

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Watch inside an operator, too."""
        TorchDispatchMode.__enter__(self)
        try:
            yield
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    # -- counting ----------------------------------------------------------------------------------

    def launch(self, name: str, traffic: int) -> None:
        site = _site(name)
        self.current.calls[site] += 1
        self.current.moved[site] += traffic

    def _count(self, counter: Counter[Site], name: str) -> None:
        counter[_site(name)] += 1

    def _traffic(self, name: str, func: Any, inputs: list[Tensor], fresh: list[Tensor], given: dict[str, Any]) -> int:
        if "attention" in name or name in MATMULS:
            return 0
        changed = [
            x
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for x in tree_leaves(given.get(argument.name))
            if isinstance(x, Tensor)
        ]
        read = list(inputs)
        if name in OVERWRITES or func._overloadname.endswith("out"):  # written, not read: once less
            for x in changed:
                del read[next(i for i, y in enumerate(read) if y is x)]
        written = sum(map(touched, (*fresh, *changed)))
        if name in GATHERS:
            return 2 * written + sum(map(touched, read[1:]))
        if name in SCATTERS:
            values = read[-1] if len(read) > 1 else read[0]
            return SCATTERS[name] * touched(values) + sum(map(touched, read[1:-1]))
        return sum(map(touched, read)) + written

    def _copy_between_devices(
        self, name: str, inputs: list[Tensor], outputs: list[Tensor], args: Any, kwargs: Any
    ) -> None:
        source = args[1] if name == "copy_" else args[0]
        if source.is_cuda:
            self._count(self.current.syncs, "download")
            return
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        free = not waits and _key(source) in self._pinned
        self.current.uploads.append((_site(name), source.numel() * source.element_size(), free))

    def _collective(self, name: str, args: Any) -> None:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        one = self.current.collectives.setdefault(name, Collective())
        one.count += 1
        if name == "alltoall_base_":
            received, sent, _, recv_splits, send_splits = args[:5]
            one.received += _without(received, recv_splits, rank)
            one.sent += _without(sent, send_splits, rank)
        elif name == "_allgather_base_":
            gathered, own = args[:2]
            one.received += nbytes(gathered) - nbytes(own)
            one.sent += nbytes(own) * (size - 1)
        elif name == "send":
            one.sent += sum(map(nbytes, args[0]))
        elif name == "recv_":
            one.received += sum(map(nbytes, args[0]))
        else:
            one.sent += sum(nbytes(x) for x in tree_leaves(args) if isinstance(x, Tensor))

    def hold(self, x: Tensor) -> None:
        """Count the storage of x as live until it dies."""
        if not x.is_cuda:
            return
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if key in self._storages:
                return
            self._storages[key] = size
            self.live += size
            self.current.peak = max(self.current.peak, self.live)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        with self._lock:
            self.live -= self._storages.pop(key, 0)


# -- tensors -------------------------------------------------------------------------------------------


def nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def touched(x: Tensor) -> int:
    """Bytes of memory behind a tensor: an expanded dimension is read once."""
    if not x.is_cuda:
        return 0
    count = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        count *= length if stride else min(length, 1)
    return count


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _same_data(x: Tensor, y: Tensor) -> bool:
    if _key(x) != _key(y) or x.storage_offset() != y.storage_offset():
        return False
    return (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())


def _without(x: Tensor, splits: list[int], rank: int) -> int:
    """Bytes of x without the rows of one rank."""
    rows = x.shape[0]
    own = splits[rank] if splits else rows // torch.distributed.get_world_size()
    return nbytes(x) // rows * (rows - own) if rows else 0


def _crosses(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    return len({x.device.type for x in (*inputs, *outputs)}) > 1


def _on_cuda(args: Any, kwargs: Any) -> bool:
    devices = [x for x in (*args, kwargs.get("device")) if isinstance(x, torch.device)]
    return any(device.type == "cuda" for device in devices)


def _site(op: str) -> Site:
    """The nearest line of longweave or of a model, else of anything but torch, Triton and this package.

    What a library does that longweave called is longweave's; what a model does is not, although longweave calls models.
    """
    foreign = None
    frame = sys._getframe(2)
    while frame is not None:
        path, line = frame.f_code.co_filename, f"{frame.f_lineno} {frame.f_code.co_name}"
        if path.startswith(OWN) and not path.endswith(LAUNCHER):
            return Site(op, f"{path[len(OWN) + 1 :]}:{line}", True)
        if foreign is None and not any(part in path for part in PASSED_OVER):
            foreign = f"{path.rsplit('site-packages/', 1)[-1]}:{line}"
        if MODELS in path:
            break
        frame = frame.f_back
    return Site(op, foreign or "autograd", False)
