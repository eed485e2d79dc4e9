"""The linear mixers across ranks: `lw.gated_delta_rule` and its relatives, each a check and a mixer.

    mixer                       state                                                                     maps
    gated_delta_rule            S_t = e^{g_t} (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ                   dense
      with g = None (DeltaNet)  S_t = (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ                           dense
    kimi_delta_attention        S_t = (I − β_t k_t k_tᵀ) diag(e^{g_t}) S_{t−1} + β_t k_t v_tᵀ             dense
    gated_linear_attention      S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ                                    diagonal
    ssd (Mamba2)                S_t = e^{A Δ_t} S_{t−1} + Δ_t B_t x_tᵀ                                    scalar
    lightning_attention         S_t = λ S_{t−1} + k_t v_tᵀ; without λ, linear attention                   scalar, none

Tensors hold this rank's tokens, in the order of `layout`, and every document begins with S = 0. The shapes are those of
the one-rank functions of the same names in `longweave.kernels`. All take `method`:

    "affine"     summaries of fragments travel; works on the layout as it is
    "reshard"    tokens travel to a contiguous layout and back
    "gather"     inputs travel to every rank, which computes everything and keeps its part
    "auto"       the one that sends the fewest bytes; the logger `longweave.linear` says why
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from longweave.comm.groups import Comm, Group
from longweave.errors import InputError
from longweave.kernels import delta_rule
from longweave.kernels.affine import map_shape
from longweave.kernels.checks import check_mixer
from longweave.kernels.chunks import chunk_table
from longweave.kernels.local import mix
from longweave.kernels.mixer import Mixer
from longweave.kernels.relatives import ChannelDecay, HeadDecay, KimiDelta, LinearAttention
from longweave.linear.affine import affine_mix
from longweave.linear.choice import Choice, Sizes, check_method, choose_method
from longweave.linear.door import Door, eager, open_door
from longweave.linear.gather import gather_recompute
from longweave.linear.reshard import contiguous_of, reshard_all
from longweave.plan.chains import rank_chains
from longweave.plan.fragments import Fragments, pack_of
from longweave.plan.layout import Layout


@eager
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    layout: Layout,
    cu_seqlens: object,
    group: Group = None,
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
    backend: the kernel for documents that are not cut, see `longweave.kernels.delta_rule`; cut ones need "torch".
    check_finite: refuse, on all ranks, a g that has NaN or ±∞. Waits for the device and for the other ranks.

    Returns out (tokens, Hv, V) in the dtype of q. States are float32 (float64 for float64 inputs), also under autocast.
    Raises, before anything is sent, `InputError` for shapes, head counts and cu_seqlens that do not fit, `GroupError`
    for a group of another size than the layout or ranks that disagree.

        layout = lw.Layout.zigzag(cu_seqlens, world_size)
        out = lw.gated_delta_rule(q, k, v, g, beta, layout, cu_seqlens, group, qk_l2norm=True)
    """
    q, k, v = _one_dtype(q, k, v)

    def check() -> None:
        check_mixer(q, k, v, g=g, beta=beta)
        _check_finite(g, check_finite)
        if backend not in ("auto", "torch", "recurrent", "fla"):
            raise InputError(f'backend is "{backend}"; choose "auto", "torch", "recurrent" or "fla"')

    door = _open("gated_delta_rule", layout, cu_seqlens, group, method, (q, k, v, g, beta), check, check_finite)
    mixer = delta_rule.GatedDeltaRule(_scale(scale, k), qk_l2norm)
    decay = beta.new_zeros(()).expand(beta.shape) if g is None else g

    def local(inputs: Sequence[Tensor], borders: Sequence[int]) -> Tensor:
        q, k, v, g, beta = inputs
        return delta_rule.gated_delta_rule(
            q, k, v, g, beta, borders, scale=scale, qk_l2norm=qk_l2norm, backend=backend
        )[0]

    if backend in ("recurrent", "fla") and method != "gather" and door.fragments.linked:
        raise InputError(
            f'backend "{backend}" cannot take documents that the layout cuts; use backend "torch", or method "gather"'
        )
    return _mix(mixer, (q, k, v, decay, beta), layout, cu_seqlens, door, method, local)


@eager
def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    layout: Layout,
    cu_seqlens: object,
    group: Group = None,
    *,
    method: str = "auto",
    scale: float | None = None,
    qk_l2norm: bool = False,
    check_finite: bool = False,
) -> Tensor:
    """KDA: as `gated_delta_rule`, with a log decay per channel, g (tokens, Hv, K)."""
    q, k, v = _one_dtype(q, k, v)

    def check() -> None:
        check_mixer(q, k, v, g=g, beta=beta, channel_decay=True)
        _check_finite(g, check_finite)

    door = _open("kimi_delta_attention", layout, cu_seqlens, group, method, (q, k, v, g, beta), check, check_finite)
    return _mix(KimiDelta(_scale(scale, k), qk_l2norm), (q, k, v, g, beta), layout, cu_seqlens, door, method)


@eager
def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    layout: Layout,
    cu_seqlens: object,
    group: Group = None,
    *,
    method: str = "auto",
    scale: float | None = None,
    check_finite: bool = False,
) -> Tensor:
    """GLA: a log decay per channel, g (tokens, Hv, K), and no beta. scale defaults to K^-1/2."""
    q, k, v = _one_dtype(q, k, v)

    def check() -> None:
        check_mixer(q, k, v, g=g, channel_decay=True)
        _check_finite(g, check_finite)

    door = _open("gated_linear_attention", layout, cu_seqlens, group, method, (q, k, v, g), check, check_finite)
    return _mix(ChannelDecay(_scale(scale, k)), (q, k, v, g), layout, cu_seqlens, door, method)


@eager
def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    layout: Layout,
    cu_seqlens: object,
    group: Group = None,
    *,
    method: str = "auto",
    scale: float = 1.0,
) -> Tensor:
    """Lightning attention and RetNet: one log decay per head of v, log_decay (Hv,); None is no decay.

    The gradient of log_decay is this rank's part (SUM over ranks is the full one).
    """
    q, k, v = _one_dtype(q, k, v)

    def check() -> None:
        check_mixer(q, k, v)
        _check_per_head("log_decay", log_decay, v)

    door = _open("lightning_attention", layout, cu_seqlens, group, method, (q, k, v, log_decay), check)
    if log_decay is None:
        return _mix(LinearAttention(scale), (q, k, v), layout, cu_seqlens, door, method)
    inputs = (q, k, v, log_decay.expand(len(q), -1))
    return _mix(HeadDecay(scale), inputs, layout, cu_seqlens, door, method)


@eager
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    layout: Layout,
    cu_seqlens: object,
    group: Group = None,
    *,
    D: Tensor | None = None,
    method: str = "auto",
) -> Tensor:
    """Mamba2's state space: S_t = e^{A Δ_t} S_{t−1} + Δ_t B_t x_tᵀ, y_t = S_tᵀ C_t + D x_t.

    x (tokens, H, P); dt (tokens, H), after bias and softplus; A, D (H,); B, C (tokens, groups, N), H a multiple of
    groups. The gradients of A and D are this rank's part (SUM over ranks is the full one).
    """

    def check() -> None:
        check_mixer(C, B, x, beta=dt)
        _check_per_head("A", A, x)
        _check_per_head("D", D, x)

    door = _open("ssd", layout, cu_seqlens, group, method, (x, dt, A, B, C, D), check)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    step = dt.to(wide)
    inputs = (C, B, x.to(wide) * step.unsqueeze(-1), A.to(wide) * step)
    y = _mix(HeadDecay(), inputs, layout, cu_seqlens, door, method)
    return y if D is None else (y + D.unsqueeze(-1) * x).to(y.dtype)


def method_of(layout: Layout, cu_seqlens: object, mixer: Mixer, inputs: Sequence[Tensor]) -> Choice:
    """What `method="auto"` takes for these inputs (only shapes and dtypes matter), with bytes and reason.

    method_of(layout, cu_seqlens, GatedDeltaRule(scale=1.0), (q, k, v, g, beta)).reason
    """
    H, K, V = mixer.state_shape(inputs)
    shape = map_shape(mixer.kind, K)
    per_token = sum(x.element_size() * prod(x.shape[1:]) for x in inputs)
    sizes = Sizes(
        state=H * K * V,
        map=0 if shape is None else H * shape[0] * shape[1],
        itemsize=8 if any(x.dtype == torch.float64 for x in inputs) else 4,
        token_in=per_token,
        token_out=H * V * inputs[0].element_size(),
    )
    return choose_method(layout, cu_seqlens, sizes)


# -- what they share ---------------------------------------------------------------------------------------

Local = Callable[[Sequence[Tensor], Sequence[int]], Tensor]


def _mix(
    mixer: Mixer,
    inputs: Sequence[Tensor],
    layout: Layout,
    cu_seqlens: object,
    door: Door,
    method: str,
    local: Local | None = None,
) -> Tensor:
    """Outputs of this rank's tokens. `local` mixes documents that are not cut, given their borders."""
    if local is None:

        def local(tensors: Sequence[Tensor], borders: Sequence[int]) -> Tensor:
            spans = pairwise(borders)
            return mix(mixer, tensors, chunk_table(spans, device=tensors[0].device.type))[0]

    if method == "auto":
        method = method_of(layout, cu_seqlens, mixer, inputs).method
    if method == "gather":
        borders = door.fragments.cu_seqlens.tolist()
        return gather_recompute(lambda *full: local(full, borders), inputs, layout, door.comm.group)
    if method == "reshard" and door.fragments.communicates:
        contiguous = contiguous_of(layout)
        moved = reshard_all(inputs, layout, contiguous, door.comm)
        out = _on_fragments(mixer, moved, pack_of(contiguous, cu_seqlens).fragments, door.comm, local)
        return reshard_all([out], contiguous, layout, door.comm)[0]
    return _on_fragments(mixer, inputs, door.fragments, door.comm, local)


def _on_fragments(mixer: Mixer, inputs: Sequence[Tensor], f: Fragments, comm: Comm, local: Local) -> Tensor:
    if f.linked:
        return affine_mix(mixer, inputs, rank_chains(f, comm.rank), comm)
    return local(inputs, (0, *(span.stop for span in f.local_spans(comm.rank))))


def _open(
    name: str,
    layout: Layout,
    cu_seqlens: object,
    group: Group,
    method: str,
    tensors: Sequence[Tensor | None],
    check: Callable[[], None],
    ask_always: bool = False,
) -> Door:
    def check_all(tokens: int, rank: int) -> str:
        check_method(method)
        check()
        first = tensors[0]
        if first is None or len(first) != tokens:
            seen = None if first is None else tuple(first.shape)
            raise InputError(f"the inputs have shape {seen} but rank {rank} has {tokens} tokens; use the same layout")
        shapes = [None if x is None else (x.dtype, tuple(x.shape[1:])) for x in tensors]
        return f"{name} of {shapes} by {method}"

    if not all(x is None or isinstance(x, Tensor) for x in tensors):
        raise InputError(f"{name} takes tensors; got {[type(x).__name__ for x in tensors]}")
    return open_door(layout, cu_seqlens, group, check_all, ask_always=ask_always)


def _one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, q, k, v of different dtypes become the autocast dtype."""
    if not all(isinstance(x, Tensor) for x in (q, k, v)):
        raise InputError(f"q, k, v must be tensors; got {[type(x).__name__ for x in (q, k, v)]}")
    if len({x.dtype for x in (q, k, v)}) > 1 and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def _scale(scale: float | None, k: Tensor) -> float:
    return float(k.shape[-1]) ** -0.5 if scale is None else float(scale)


def _check_finite(g: Tensor | None, wanted: bool) -> None:
    if wanted and g is not None and not bool(torch.isfinite(g).all()):
        raise InputError(f"g has {int((~torch.isfinite(g)).sum())} values that are not finite; look at its input")


def _check_per_head(name: str, x: Tensor | None, v: Tensor) -> None:
    if x is not None and tuple(x.shape) != (v.shape[1],):
        raise InputError(f"{name} has shape {tuple(x.shape)}; it must be ({v.shape[1]},), one per head")
