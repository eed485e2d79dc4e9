"""Index tensors made from host integers: once per device, and never left over from a fake run."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Indices:
    """Integer arrays that are wanted as tensors on some device."""

    def __init__(self, *arrays: np.ndarray) -> None:
        self.arrays = arrays
        self._on: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        # Under FakeTensorMode every new tensor is a fake one. It must not be kept for a later real run.
        real = type(torch.empty(0)) is Tensor
        if real and device in self._on:
            return self._on[device]
        tensors = tuple(torch.tensor(array).to(device, non_blocking=True) for array in self.arrays)
        if real:
            self._on[device] = tensors
        return tensors
