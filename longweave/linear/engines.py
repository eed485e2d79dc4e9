"""Which kernels a linear mixer runs on: for segments that lie here whole, and for chains of fragments over ranks.

    "torch"        any device, any dtype            `mix`, `affine_mix`
    "fla"          flash-linear-attention, CUDA     `fla.run`, `fused_mix`
    "recurrent"    the loop over tokens             whole segments only
    "auto"         "fla" where it can serve, else "torch"

What travels between ranks is the same for "torch" and "fla": ranks that differ still understand each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from longweave.errors import BackendError, InputError
from longweave.kernels.recurrence import fla, mix
from longweave.kernels.recurrence.delta_rule import GatedDeltaRule
from longweave.kernels.recurrence.mixer import Mixer
from longweave.kernels.recurrence.reference import recurrent
from longweave.kernels.recurrence.segments import Segments
from longweave.linear.affine import affine_mix
from longweave.linear.chains import Chains
from longweave.linear.fused_mix import fused_mix


@dataclass(frozen=True)
class Engine:
    """(mixer, this rank's inputs, where they lie) -> outputs (tokens, H, V)."""

    whole: Callable[[Mixer, Sequence[Tensor], Segments], Tensor]
    cut: Callable[[Mixer, Sequence[Tensor], Chains], Tensor]


@dataclass(frozen=True)
class EngineChoice:
    name: str
    why: str

    @property
    def engine(self) -> Engine:
        return ENGINES[self.name]


def check_backend(backend: str, *, recurrent: bool = False) -> None:
    names = ("auto", "torch", "fla", *(["recurrent"] if recurrent else []))
    if not isinstance(backend, str) or backend not in names:
        listed = ", ".join(f'"{name}"' for name in names)
        raise InputError(f'backend is "{backend}"; choose one of {listed}')


def choose_engine(backend: str, mixer: Mixer, inputs: Sequence[Tensor]) -> EngineChoice:
    """Raises BackendError where "fla" was asked for and cannot serve. Reads shapes, dtypes and devices only."""
    if backend not in ("auto", "fla"):
        return EngineChoice(backend, "asked for")
    reason = fla.refusal(mixer, inputs, asked=backend == "fla")
    if reason is None:
        return EngineChoice("fla", "asked for" if backend == "fla" else "flash-linear-attention can serve")
    if backend == "fla":
        raise BackendError(f"flash-linear-attention cannot serve this call: {reason}")
    return EngineChoice("torch", f"flash-linear-attention does not serve: {reason}")


def _torch_whole(mixer: Mixer, inputs: Sequence[Tensor], segments: Segments) -> Tensor:
    return mix(mixer, inputs, segments.table(inputs[0].device))[0]


def _fla_whole(mixer: Mixer, inputs: Sequence[Tensor], segments: Segments) -> Tensor:
    return fla.run(mixer, inputs, segments)[0].squeeze(0)


def _recurrent_whole(mixer: Mixer, inputs: Sequence[Tensor], segments: Segments) -> Tensor:
    assert isinstance(mixer, GatedDeltaRule)
    q, k, v, g, beta = inputs
    borders = (0, *(stop for _, stop in segments.spans))
    return recurrent(q, k, v, g, beta, borders, scale=mixer.scale, qk_l2norm=mixer.qk_l2norm)[0]


def _refused(mixer: Mixer, inputs: Sequence[Tensor], chains: Chains) -> Tensor:
    raise AssertionError("a check refuses this before")


ENGINES = {
    "torch": Engine(_torch_whole, affine_mix),
    "fla": Engine(_fla_whole, fused_mix),
    "recurrent": Engine(_recurrent_whole, _refused),
}
