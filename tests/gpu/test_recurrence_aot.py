"""The Triton kernels beside the recurrences, compiled for GPUs: they fit, and nothing spills."""

import pytest
import torch
from ahead_of_time import catch, compile_for

from longweave.kernels.recurrence import fused_conv, outer
from longweave.kernels.recurrence.conv import conv_edges
from longweave.kernels.recurrence.segments import Segments


@pytest.mark.usefixtures("triton_installed")
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_they_compile(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    convolution, sums = catch(monkeypatch, fused_conv), catch(monkeypatch, outer)
    spans, bf16 = [(0, 60), (60, 100)], torch.bfloat16
    x, weight, halo = torch.zeros(100, 256, dtype=bf16), torch.zeros(256, 4, dtype=bf16), torch.zeros(2, 3, 256)
    places = conv_edges(spans, 4).places
    fused_conv.forward(x, weight, None, halo, places, True)
    fused_conv.backward(x, x, weight, None, halo, places, True)
    d = torch.zeros(100, 4, 128, dtype=bf16)
    outer.outer_sums(d[:, :2], torch.zeros(100, 4), d, 1.0, Segments(spans))
    assert [launch.name for launch in convolution] == ["forward", "slope", "back", "halo"]
    assert [launch.name for launch in sums] == ["outer_sums"]
    for launch in (*convolution, *sums):
        built = compile_for(launch, capability)
        assert built.spills == 0, f"{launch.name} spills {built.spills} bytes of a thread"
        assert built.shared <= 101376
        assert "mma" in built.ptx or launch.name != "outer_sums"
