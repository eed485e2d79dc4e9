"""The dtype of sums, and index tensors: one copy per device and stream, never a fake one."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from longweave import tensors
from longweave.tensors import Indices, accumulation_dtype, joined_copies, on_host, widened

CPU = torch.device("cpu")


def test_sums_are_float32_unless_float64() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert accumulation_dtype(dtype) == widened(torch.zeros(1, dtype=dtype)).dtype == torch.float32
    assert accumulation_dtype(torch.float64) == torch.float64
    x = torch.zeros(2)
    assert widened(x) is x


def test_indices_are_made_once() -> None:
    indices = Indices(np.array([3, 1]), np.array([0], dtype=np.int32))
    first, second = indices.on(CPU)
    assert first.tolist() == [3, 1]
    assert second.dtype == torch.int32
    assert indices.on(CPU)[0] is first
    assert indices.on(torch.device("meta"))[0].device.type == "meta"


class Stream:
    """What `torch.cuda.current_stream` gives, as far as it is read."""

    def __init__(self, device: str, cuda_stream: int) -> None:
        self.device, self.cuda_stream = torch.device(device), cuda_stream


def test_each_stream_of_each_device_has_its_own_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that one stream has asked for may not have arrived when another stream reads it."""
    current = Stream("cuda:0", 0)
    uploads: list[torch.device] = []

    def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
        uploads.append(device)
        return torch.tensor(array)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(tensors, "_upload", upload)
    indices = Indices(np.arange(3))
    copies = {}
    # The default stream is number 0 on every device, and "cuda" means another device when the current one changes.
    for name, device, stream in (
        ("cuda:0", "cuda:0", 0),
        ("cuda:0", "cuda:0", 7),
        ("cuda:1", "cuda:1", 0),
        ("cuda", "cuda:2", 0),
        ("cuda", "cuda:3", 0),
    ):
        current = Stream(device, stream)
        copies[device, stream] = indices.on(torch.device(name))[0]
        assert indices.on(torch.device(device))[0] is copies[device, stream]
    assert len({id(copy) for copy in copies.values()}) == len(uploads) == 5
    current = Stream("cuda:0", 0)
    assert indices.on(torch.device("cuda:0"))[0] is copies["cuda:0", 0]


def test_uploads_to_cuda_are_pinned_and_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, object]] = []

    def pin_memory(x: torch.Tensor) -> torch.Tensor:
        seen.append(("pin", x.tolist()))
        return x

    def to(x: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        seen.append((str(device), non_blocking))
        return x

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    tensors._upload(np.array([4, 2]), torch.device("cuda:0"))
    assert seen == [("pin", [4, 2]), ("cuda:0", True)]


def test_fake_tensors_are_not_kept() -> None:
    indices = Indices(np.arange(3))
    with FakeTensorMode():
        assert isinstance(indices.on(CPU)[0], FakeTensor)
    real = indices.on(CPU)[0]
    assert type(real) is torch.Tensor
    with FakeTensorMode():
        assert isinstance(indices.on(CPU)[0], FakeTensor)
    assert indices.on(CPU)[0] is real


def test_what_inference_made_serves_training() -> None:
    indices = Indices(np.array([1, 0]))
    with torch.inference_mode():
        indices.on(CPU)
    x = torch.ones(2, requires_grad=True)
    x.index_select(0, indices.on(CPU)[0]).sum().backward()
    assert x.grad is not None


def test_copies_in_one_piece() -> None:
    """Of any dtype and shape, empty and not contiguous ones too."""
    given = {
        "mask": torch.tensor([[True, False], [True, True]]),
        "ids": torch.arange(12).reshape(3, 4).T,
        "none": torch.zeros(0, 5, dtype=torch.int32),
        "number": torch.tensor(1.5, dtype=torch.float64),
        "small": torch.tensor([1, 2, 3], dtype=torch.int16),
        "half": torch.randn(3).bfloat16(),
    }
    found = joined_copies(given)
    assert list(found) == list(given)
    for name, x in given.items():
        assert found[name].dtype == x.dtype
        assert found[name].equal(x)
    assert on_host({**given, "text": "as it is"})["ids"] is given["ids"], "nothing is far away"
