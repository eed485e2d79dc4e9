"""Errors at the door of the linear mixers: each says what was seen and what to do."""

from __future__ import annotations

from torch import Tensor

from longweave.errors import InputError

FLOATS = "float64, float32, bfloat16 or float16"


def check_mixer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    channel_decay: bool = False,
    initial_state: Tensor | None = None,
    segments: int = 1,
) -> None:
    """Shapes and dtypes of q, k (tokens, Hk, K), v (tokens, Hv, V), g, beta (tokens, Hv), g per channel (…,
    K).
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise InputError(f"{name} has shape {tuple(x.shape)}; it must be (tokens, heads, dim)")
    if q.shape != k.shape:
        raise InputError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; they must be equal")
    tokens, Hk, K = k.shape
    Hv, V = v.shape[1:]
    if v.shape[0] != tokens:
        raise InputError(f"v has {v.shape[0]} tokens and k {tokens}; give all inputs the same tokens")
    if Hk == 0 or Hv % Hk:
        raise InputError(f"v has {Hv} heads, which is no multiple of the {Hk} heads of q and k")
    decay_shape = (tokens, Hv, K) if channel_decay else (tokens, Hv)
    for name, gate, shape in (("g", g, decay_shape), ("beta", beta, (tokens, Hv))):
        if gate is not None and tuple(gate.shape) != shape:
            raise InputError(f"{name} has shape {tuple(gate.shape)}; with these q, k, v it must be {shape}")
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta), ("initial_state", initial_state)):  # type: ignore[assignment]
        if x is not None and not x.is_floating_point():
            raise InputError(f"{name} is {x.dtype}; give {FLOATS}")
        if x is not None and x.device != q.device:
            raise InputError(f"{name} is on {x.device} and q on {q.device}; move them to one device")
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; cast them to one dtype")
    if initial_state is not None and tuple(initial_state.shape) != (segments, Hv, K, V):
        raise InputError(
            f"initial_state has shape {tuple(initial_state.shape)}; "
            f"with {segments} segments it must be {(segments, Hv, K, V)}"
        )
