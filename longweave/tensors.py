"""What every part that touches tensors needs: dtypes of sums, kinds, index tensors from host integers, graph breaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from itertools import count
from typing import Any, Generic, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from longweave.errors import InputError, shown

F = TypeVar("F", bound=Callable[..., Any])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype values of `dtype` are summed: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widened(x: Tensor) -> Tensor:
    """x in the dtype in which it is summed."""
    return x.to(accumulation_dtype(x.dtype))


def kind_of(x: object, *, per_token: bool = True) -> tuple[object, ...]:
    """What other ranks must have alike: dtype and shape, `per_token` without the tokens. Of anything else its type."""
    if not isinstance(x, Tensor):
        return (type(x).__name__,)
    unusual = why_unusual(x)
    if unusual is not None:  # a kind that every check refuses
        return (unusual,)
    return x.dtype, tuple(x.shape[1:] if per_token else x.shape)


def on_one_device(*tensors: object) -> bool:
    """A part of a kind, because the devices themselves differ between ranks."""
    devices = [x.device for x in tensors if isinstance(x, Tensor)]
    return not devices or devices.count(devices[0]) == len(devices)


# -- checks --------------------------------------------------------------------------------------------

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def why_unusual(x: Tensor) -> str | None:
    """What a tensor is whose values operators cannot take: not dense, or without any."""
    if x.layout is torch.strided and not (x.is_meta or x.is_nested or x.is_quantized):
        return None
    if x.is_nested or x.is_quantized:
        return f"a {'nested' if x.is_nested else 'quantized'} tensor"
    return "a tensor on the meta device, without values" if x.is_meta else f"a {str(x.layout)[len('torch.') :]} tensor"


def check_tensor(name: str, x: object, *, floating: bool = False) -> None:
    """Raise InputError unless x is a dense tensor that has values, `floating`: of a dtype that is computed in."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} is {shown(x)}, a {type(x).__name__}; give a tensor")
    unusual = why_unusual(x)
    if unusual is not None:
        raise InputError(f"{name} is {unusual}; give a dense tensor that has values")
    if floating and x.dtype not in FLOATS:
        raise InputError(
            f"{name} is {x.dtype}; give {', '.join(str(dtype).removeprefix('torch.') for dtype in FLOATS)}"
        )


def check_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.device != other.device:
        raise InputError(f"{name} is on {x.device} and {other_name} on {other.device}; move them to one device")


def check_fill(fill: object, dtype: torch.dtype) -> int | float:
    """A number that tensors of this dtype can be filled with.

    Integers must be held exactly, floats without overflow; NaN and infinities are values of their own.
    """
    if not isinstance(fill, int | float):
        raise InputError(f"fill is {shown(fill)}; give a number")
    if dtype.is_floating_point or dtype.is_complex:
        holds = not abs(fill) < torch.inf or abs(fill) <= torch.finfo(dtype).max
        fill = float(fill) if holds else fill
    else:
        try:
            holds = bool(torch.tensor(fill, dtype=dtype).item() == fill)
        except (RuntimeError, OverflowError, ValueError, TypeError):
            holds = False
    if not holds:
        raise InputError(f"fill is {shown(fill)}, which {dtype} cannot hold; give another number, or cast the tensor")
    return fill


def aligned(x: Tensor) -> Tensor:
    """x with a last stride of 1 and rows that loads of 16 bytes can begin at: itself if it is so, else a copy.

    A contiguous x is copied, too, if it begins at an odd place, or says odd strides of dimensions of size 1.
    """
    steps = *x.stride()[:-1], x.storage_offset()
    fits = x.stride(-1) == 1 and all(step * x.element_size() % 16 == 0 for step in steps)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def faking() -> bool:
    """Is every new tensor a fake one, as under FakeTensorMode? Such a tensor must not be kept for a later real run."""
    return type(torch.empty(0)) is not Tensor


class Indices:
    """Integer arrays that are wanted as tensors, again and again, on some device.

    Uploads do not wait, so the order of a stream is all that protects a copy: a kernel on another stream could read it
    before it has arrived. Each stream therefore has its own copy. Copies die with this object.
    """

    def __init__(self, *arrays: np.ndarray) -> None:
        self.arrays = arrays
        self._copies: dict[tuple[torch.device, int | None], tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """The arrays as tensors on `device`, ready for what runs next on its current stream."""
        if faking():
            return tuple(torch.tensor(array).to(device) for array in self.arrays)
        key = _place(device)
        if key not in self._copies:
            self._copies[key] = tuple(_upload(array, device) for array in self.arrays)
        return self._copies[key]


class Order:
    """A permutation of rows, and the way back. One that changes nothing costs nothing."""

    def __init__(self, order: np.ndarray) -> None:
        self.rising = np.array_equal(order, np.arange(len(order)))
        self._indices = Indices(order, np.argsort(order))

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Row i of the result is row order[i] of x. `out` is a place for it, unless the order changes nothing."""
        return x if self.rising else torch.index_select(x, 0, self._indices.on(x.device)[0], out=out)

    def undo(self, x: Tensor) -> Tensor:
        return x if self.rising else x.index_select(0, self._indices.on(x.device)[1])


def _place(device: torch.device) -> tuple[torch.device, int | None]:
    """The device with its number, and its current stream if it has streams."""
    if device.type != "cuda":
        return device, None
    stream = torch.cuda.current_stream(device)
    return stream.device, stream.cuda_stream


def _upload(array: np.ndarray, device: torch.device) -> Tensor:
    # A tensor made in inference mode could not serve a later training step.
    with torch.inference_mode(False):
        if device.type != "cuda":
            return torch.tensor(array).to(device)
        return torch.tensor(array).pin_memory().to(device, non_blocking=True)


def eager(fn: F) -> F:
    """`torch.compile` breaks the graph around `fn` and runs it as it is."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # only then is the compiler loaded already
            return torch.compiler.disable(fn)(*args, **kwargs)  # type: ignore[no-untyped-call]
        return fn(*args, **kwargs)

    # A code object of its own: the compiler counts by it how often it has compiled, and gives up after a few times.
    call.__code__ = call.__code__.replace(co_name=fn.__name__)
    return cast("F", wraps(fn)(call))


# -- to the host ---------------------------------------------------------------------------------------


def on_host(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with every tensor in the host's memory: one wait for the device, however many lie there."""
    far = {name: x.detach() for name, x in given.items() if isinstance(x, Tensor) and _is_far(x)}
    return {**given, **joined_copies(far)}


def _is_far(x: Tensor) -> bool:
    return x.device.type != "cpu" and why_unusual(x) is None


def joined_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the host's memory, sent as one piece of bytes."""
    if not tensors:
        return {}
    device = next(iter(tensors.values())).device
    pieces = [x.contiguous().reshape(-1).view(torch.uint8).to(device) for x in tensors.values()]
    parts = torch.split(torch.cat(pieces).cpu(), [len(piece) for piece in pieces])
    # A piece of its own each, because only there values of any size may begin.
    return {
        name: part.clone().view(x.dtype).reshape(x.shape)
        for (name, x), part in zip(tensors.items(), parts, strict=True)
    }


# -- handles -------------------------------------------------------------------------------------------

T = TypeVar("T")


class _Memory(np.ndarray):
    """The memory of a handle. It holds on to an object, so every tensor that shares this memory does."""

    held: object


class Handles(Generic[T]):
    """Objects as tensors: a number for each, in memory that holds on to it.

    Operators in a compiled graph can be handed tensors only. A handle is no constant of the graph, and whoever keeps it
    (autograd, until backward is done) keeps the object. Nothing else is kept here: an entry dies with its object.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary()

    def issue(self, held: T) -> Tensor:
        """A 0-dim int64 tensor on the CPU."""
        number = next(self._numbers)
        self._objects[number] = held
        memory = np.array(number, dtype=np.int64).view(_Memory)
        memory.held = held
        with torch.inference_mode(False):  # autograd must be able to save it
            return torch.from_numpy(memory)

    def find(self, handle: Tensor) -> T:
        found = self._objects.get(int(handle))
        if found is None:
            raise InputError(
                "what backward needs is gone: the handle that keeps it was copied, as a hook on saved tensors does "
                "that clones or moves everything; leave 0-dim tensors out of the hook"
            )
        return found
