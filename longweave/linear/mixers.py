"""The linear mixers across ranks: `lw.gated_delta_rule` and its siblings, each a check and a mixer.

    mixer                       state                                                                     transition
    gated_delta_rule            S_t = e^{g_t} (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ                   dense
      with g = None (DeltaNet)  S_t = (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ                           dense
    kimi_delta_attention        S_t = (I − β_t k_t k_tᵀ) diag(e^{g_t}) S_{t−1} + β_t k_t v_tᵀ             dense
    gated_linear_attention      S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ                                    diagonal
    ssd (Mamba2)                S_t = e^{A Δ_t} S_{t−1} + Δ_t B_t x_tᵀ                                    scalar
    lightning_attention         S_t = λ S_{t−1} + k_t v_tᵀ; without λ, linear attention                   scalar, none

Tensors hold this rank's tokens, in the order of `pack.layout`, and every document begins with S = 0. Shapes are
in the docstrings below. All take `method`:

    "affine"     summaries of fragments travel; works on the layout as it is
    "reshard"    tokens travel to a contiguous layout and back
    "gather"     inputs travel to every rank, which computes everything and keeps its part
    "auto"       the pack's, else the one that sends the fewest bytes; `pack.methods` and the logger `longweave.linear`
                 say why

and `backend`, what this rank computes on: "torch", "fla" (flash-linear-attention, CUDA) or "auto", see `engines.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longweave import finite
from longweave.comm.ledger import RecordedCall
from longweave.core import PackCore, check_method
from longweave.errors import InputError, shown
from longweave.kernels.recurrence import check_mixer
from longweave.kernels.recurrence.delta_rule import GatedDeltaRule
from longweave.kernels.recurrence.linear_attention import ChannelDecay, HeadDecay, KimiDelta, LinearAttention
from longweave.kernels.recurrence.mixer import Mixer
from longweave.linear.engines import Engine, check_backend, choose_engine
from longweave.linear.gather import gathered
from longweave.linear.methods import Contiguous, CutDocuments, MethodChoice, Sizes, choose, in_place, move_all, whole
from longweave.pack import Pack, checked_core
from longweave.plan.ranges import check_number
from longweave.tensors import (
    accumulation_dtype,
    check_device,
    check_tensor,
    eager,
    kind_of,
    on_one_device,
    why_unusual,
)


@eager
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    pack: Pack,
    *,
    method: str = "auto",
    scale: float | None = None,
    qk_l2norm: bool = False,
    backend: str = "auto",
    check_finite: bool = False,
) -> Tensor:
    """Gated delta rule (GatedDeltaNet) along each document, from and to this rank's tokens.

    q, k: (tokens, Hk, K); v: (tokens, Hv, V); Hv a multiple of Hk: heads repeat as in GQA.
    g: log decay (tokens, Hv), normally ≤ 0; None is no decay (DeltaNet). beta: (tokens, Hv).
    method: "auto", "affine", "reshard" or "gather", see `longweave.linear.mixers`.
    scale: of q; K^-1/2 by default. qk_l2norm: use x·rsqrt(Σx² + 1e-6) of q and k.
    backend: "torch" (any device), "fla" (flash-linear-attention, CUDA), "auto": "fla" where it can serve, else
        "torch"; or "recurrent", the reference loop, for documents that are not cut.
    check_finite: refuse, on all ranks, tensors that have NaN or ±∞, and name document and rank. Waits for the device
        and for the other ranks.

    Returns out (tokens, Hv, V) in the dtype of q. States are float32 (float64 for float64 inputs), also under autocast.
    Raises `InputError`, before anything is sent, for shapes and head counts that do not fit; on the first pack of a
    group on all ranks alike, and `GroupError` where the ranks' calls differ.

        out = lw.gated_delta_rule(q, k, v, g, beta, lw.Pack(cu_seqlens, group), qk_l2norm=True)
    """
    q, k, v = _one_dtype(q, k, v)

    def check(core: PackCore) -> None:
        check_mixer(q, k, v, g=g, beta=beta)
        check_backend(backend, recurrent=True)
        if backend == "recurrent" and _method(core, method) != "gather" and core.fragments.linked:
            raise InputError(
                'backend "recurrent" cannot take documents that the layout cuts; use "torch", or method "gather"'
            )
        choose_engine(backend, GatedDeltaRule(1.0), (q, k, v))

    options = {"scale": scale, "qk_l2norm": qk_l2norm, "backend": backend, "check_finite": check_finite}
    call = _enter("gated_delta_rule", pack, method, {"q": q, "k": k, "v": v, "g": g, "beta": beta}, options, check)
    if check_finite:
        finite.check_finite(call.core, {"q": q, "k": k, "v": v, "g": g, "beta": beta})
    decay = beta.new_zeros(()).expand(beta.shape) if g is None else g
    return _mix(call, GatedDeltaRule(_scale(scale, k), qk_l2norm), (q, k, v, decay, beta), backend)


@eager
def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pack: Pack,
    *,
    method: str = "auto",
    scale: float | None = None,
    qk_l2norm: bool = False,
    backend: str = "auto",
    check_finite: bool = False,
) -> Tensor:
    """KDA: as `gated_delta_rule`, with a log decay per channel, g (tokens, Hv, K)."""
    q, k, v = _one_dtype(q, k, v)

    def check(core: PackCore) -> None:
        check_mixer(q, k, v, g=g, beta=beta, channel_decay=True)
        check_backend(backend)
        choose_engine(backend, KimiDelta(), (q, k, v))

    options = {"scale": scale, "qk_l2norm": qk_l2norm, "backend": backend, "check_finite": check_finite}
    call = _enter("kimi_delta_attention", pack, method, {"q": q, "k": k, "v": v, "g": g, "beta": beta}, options, check)
    if check_finite:
        finite.check_finite(call.core, {"q": q, "k": k, "v": v, "g": g, "beta": beta})
    return _mix(call, KimiDelta(_scale(scale, k), qk_l2norm), (q, k, v, g, beta), backend)


@eager
def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    pack: Pack,
    *,
    method: str = "auto",
    scale: float | None = None,
    backend: str = "auto",
    check_finite: bool = False,
) -> Tensor:
    """GLA: a log decay per channel, g (tokens, Hv, K), and no beta. scale defaults to K^-1/2."""
    q, k, v = _one_dtype(q, k, v)

    def check(core: PackCore) -> None:
        check_mixer(q, k, v, g=g, channel_decay=True)
        check_backend(backend)
        choose_engine(backend, ChannelDecay(), (q, k, v))

    options = {"scale": scale, "backend": backend, "check_finite": check_finite}
    call = _enter("gated_linear_attention", pack, method, {"q": q, "k": k, "v": v, "g": g}, options, check)
    if check_finite:
        finite.check_finite(call.core, {"q": q, "k": k, "v": v, "g": g})
    return _mix(call, ChannelDecay(_scale(scale, k)), (q, k, v, g), backend)


@eager
def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    pack: Pack,
    *,
    method: str = "auto",
    scale: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """Lightning attention and RetNet: one log decay per head of v, log_decay (Hv,); None is no decay.

    The gradient of log_decay is this rank's part (SUM over ranks is the full one).
    """
    q, k, v = _one_dtype(q, k, v)

    def check(core: PackCore) -> None:
        check_number("scale", scale, "give a finite number", -1e300, 1e300)
        check_mixer(q, k, v)
        _check_per_head("log_decay", log_decay, v)
        check_backend(backend)
        choose_engine(backend, LinearAttention(), (q, k, v))

    options = {"scale": scale, "backend": backend}
    call = _enter(
        "lightning_attention", pack, method, {"q": q, "k": k, "v": v, "log_decay": log_decay}, options, check, 3
    )
    if log_decay is None:
        return _mix(call, LinearAttention(float(scale)), (q, k, v), backend)
    return _mix(call, HeadDecay(float(scale)), (q, k, v, log_decay.expand(len(q), -1)), backend)


@eager
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    pack: Pack,
    *,
    D: Tensor | None = None,
    method: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """Mamba2's state space: S_t = e^{A Δ_t} S_{t−1} + Δ_t B_t x_tᵀ, y_t = S_tᵀ C_t + D x_t.

    x (tokens, H, P); dt (tokens, H), after bias and softplus; A, D (H,); B, C (tokens, groups, N), H a multiple of
    groups. The gradients of A and D are this rank's part (SUM over ranks is the full one).
    """

    def check(core: PackCore) -> None:
        check_mixer(C, B, x, beta=dt)
        _check_per_head("A", A, x)
        _check_per_head("D", D, x)
        check_backend(backend)
        choose_engine(backend, HeadDecay(), (C, B, x))

    call = _enter(
        "ssd", pack, method, {"x": x, "dt": dt, "B": B, "C": C, "A": A, "D": D}, {"backend": backend}, check, 4
    )
    wide = accumulation_dtype(x.dtype)
    step = dt.to(wide)
    y = _mix(call, HeadDecay(), (C, B, x.to(wide) * step.unsqueeze(-1), A.to(wide) * step), backend)
    return y if D is None else (y + D.unsqueeze(-1) * x).to(y.dtype)


# -- what they share ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A call that may go ahead."""

    name: str
    core: PackCore
    method: str
    recorded: RecordedCall  # by the flight recorder


def _enter(
    name: str,
    pack: Pack,
    method: str,
    tensors: Mapping[str, Tensor | None],
    options: Mapping[str, object],
    check: Callable[[PackCore], None],
    per_token: int | None = None,
) -> _Call:
    """Check this rank's input; on the first pack of a group, with all ranks.

    The first `per_token` tensors (by default all) have this rank's tokens first.
    """
    core = checked_core(pack)
    given = list(tensors.values())
    by_token = [x for x in given[:per_token] if x is not None]

    def check_all() -> None:
        for label, x in tensors.items():
            if x is not None or (name, label) not in _MAY_BE_NONE:
                check_tensor(label, x)
        _check_options(options)
        check_method(method)
        core.refuse_crossing(name)
        core.check_tokens(*by_token)
        check(core)

    kinds = [kind_of(x) for x in given[:per_token]]
    kinds += [kind_of(x, per_token=False) for x in given[len(kinds) :]]
    kind = (name, "of", *kinds, "method", method, *options.items(), on_one_device(*given))
    recorded = core.enter(kind, check_all, by_token)
    return _Call(name, core, _method(core, method), recorded)


# Everything else must be there.
_MAY_BE_NONE = {("gated_delta_rule", "g"), ("lightning_attention", "log_decay"), ("ssd", "D")}


def _check_options(options: Mapping[str, object]) -> None:
    for name in ("qk_l2norm", "check_finite"):
        if not isinstance(options.get(name, False), bool):
            raise InputError(f"{name} is {shown(options[name])}; give True or False")
    if options.get("scale") is not None:
        check_number("scale", options["scale"], "give a finite number, or leave it out", -1e300, 1e300)


def _method(core: PackCore, method: str) -> str:
    return core.method if method == "auto" else method


def _mix(call: _Call, mixer: Mixer, inputs: Sequence[Tensor], backend: str) -> Tensor:
    """Outputs of this rank's tokens."""
    with call.recorded.forward():
        return _run(call, mixer, inputs, backend)


def _run(call: _Call, mixer: Mixer, inputs: Sequence[Tensor], backend: str) -> Tensor:
    core = call.core
    chosen = choose_engine(backend, mixer, inputs)
    asked = MethodChoice(call.method, {}, "asked for")
    choice = core.once(choose, Sizes.of(mixer, inputs)) if call.method == "auto" else asked
    core.methods[call.name] = replace(choice, backend=chosen.name, backend_why=chosen.why)
    engine = chosen.engine
    if choice.method == "gather":
        documents = core.once(whole)
        return gathered(lambda *full: engine.whole(mixer, full, documents), inputs, core.shards)
    cut = core.once(in_place)
    if choice.method == "reshard" and cut.fragments.communicates:
        contiguous = core.once(Contiguous)
        out = _on_fragments(mixer, move_all(inputs, contiguous.there), contiguous, engine)
        return move_all([out], contiguous.there.back)[0]
    return _on_fragments(mixer, inputs, cut, engine)


def _on_fragments(mixer: Mixer, inputs: Sequence[Tensor], cut: CutDocuments, engine: Engine) -> Tensor:
    if cut.fragments.linked:
        return engine.cut(mixer, inputs, cut.chains)
    return engine.whole(mixer, inputs, cut.local)


def _one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, q, k, v of different dtypes become the autocast dtype."""
    if not all(isinstance(x, Tensor) and why_unusual(x) is None for x in (q, k, v)):
        return q, k, v  # refused with all ranks, in a moment
    if len({x.dtype for x in (q, k, v)}) > 1 and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def _scale(scale: float | None, k: Tensor) -> float:
    return float(k.shape[-1]) ** -0.5 if scale is None else float(scale)


def _check_per_head(name: str, x: Tensor | None, v: Tensor) -> None:
    if x is None:
        return
    check_tensor(name, x, floating=True)
    check_device(name, x, "v", v)
    if tuple(x.shape) != (v.shape[1],):
        raise InputError(f"{name} has shape {tuple(x.shape)}; it must be ({v.shape[1]},), one per head")
