"""flash-linear-attention: the linear mixers as fused kernels, on CUDA when it is installed. No other file calls it.

    mixer                       its op                      grouped heads    limits
    gated delta rule, DeltaNet  chunk_gated_delta_rule      yes              K ≤ 256
    KDA                         chunk_kda                   yes              K ≤ 256
    GLA                         chunk_gla                   repeated here
    SSD, lightning, linear      chunk_simple_gla            repeated here    16-bit: K and V even

All take packed segments, states (segments, H, K, V) in float32 at their start, and give those at their end. `run` is
such a call, differentiable. Of a segment whose incoming state S is not known yet, `summarize` finds what S will do:

    state    S' = M·S + U                   U: the last state from S = 0       M: the transition
    output   o_t = o_t(0) + Sᵀ r_t          r_t: what token t reads of S       dS = Mᵀ dS' + Σ_t r_t dO_tᵀ

Columns of v never mix, so that one call finds all of them: K columns of zeros behind v, begun with the identity.

    v        [ v | 0 ]        outputs       [ o(0) | r ]         rule, KDA, GLA. Where the decay is one number per token
    state    [ 0 | I ]        last state    [ U    | M ]         and head, r_t = e^{Σg} q_t and M = e^{Σg} need no call.

GLA and simple GLA read an integer back from the device in each call of several segments (0.6.0); the rest never waits.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longweave.kernels.recurrence.delta_rule import GatedDeltaRule
from longweave.kernels.recurrence.linear_attention import ChannelDecay, HeadDecay, KimiDelta, LinearAttention
from longweave.kernels.recurrence.mixer import Mixer
from longweave.kernels.recurrence.outer import outer_sums
from longweave.kernels.recurrence.segments import TILE, Segments

DEVICES = ("cuda",)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REMEDY = "or use backend='torch'"


@dataclass(frozen=True)
class Entry:
    """An op and what it cannot do."""

    module: str
    name: str
    grouped_since: tuple[int, int] | None = None  # the version that takes fewer heads of q and k than of v
    widest_key: int | None = None
    even: bool = False


SIMPLE = Entry("fla.ops.simple_gla", "chunk_simple_gla", even=True)
ENTRIES: dict[type[Mixer], Entry] = {
    GatedDeltaRule: Entry("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", (0, 5), 256),
    KimiDelta: Entry("fla.ops.kda", "chunk_kda", (0, 5), 256),
    ChannelDecay: Entry("fla.ops.gla", "chunk_gla"),
    HeadDecay: SIMPLE,
    LinearAttention: SIMPLE,
}


@dataclass(frozen=True)
class Op:
    call: Callable[..., Any]
    options: frozenset[str]  # keyword arguments that this version has
    grouped: bool


@cache  # constants of the process: what is installed
def load(entry: Entry) -> Op | str:
    """The op, or why there is none."""
    try:
        if importlib.util.find_spec("fla") is None:
            return "it is not installed: pip install flash-linear-attention"
        call = getattr(importlib.import_module(entry.module), entry.name)
        version = importlib.import_module("fla").__version__
        numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
        parameters = inspect.signature(call).parameters
    except Exception as error:  # whatever a broken or an old installation raises
        said = f"{type(error).__name__}: {error}"
        return f"its {entry.name} cannot be imported ({said}): pip install -U flash-linear-attention"
    if "cu_seqlens" not in parameters or ("head_first" in parameters and parameters["head_first"].default is True):
        # Such a version would read tokens as heads.
        return f"its {entry.name} of version {version} is too old: pip install -U flash-linear-attention"
    return Op(call, frozenset(parameters), entry.grouped_since is not None and numbers >= entry.grouped_since)


def refusal(mixer: Mixer, inputs: Sequence[Tensor], *, asked: bool = False) -> str | None:
    """Why flash-linear-attention does not serve this call, and what to do, or None. `asked`: for it, by name."""
    q, v = inputs[0], inputs[2]
    entry = ENTRIES.get(type(mixer))
    if entry is None:
        return f"it has no kernel for {type(mixer).__name__}: use backend='torch'"
    if q.device.type not in DEVICES:
        return f"inputs are on {q.device}; it runs on CUDA: move them there, {REMEDY}"
    if q.dtype not in DTYPES:
        return f"inputs are {q.dtype}; it takes bfloat16, float16 or float32: cast them, {REMEDY}"
    if q.dtype == torch.float32 and not asked and torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "inputs are float32, which its kernels may round to TF32: allow that for torch's matmuls, too, or cast"
    K, V = q.shape[-1], v.shape[-1]
    if entry.widest_key is not None and entry.widest_key < K:
        return f"keys have {K} dims; {entry.name} takes {entry.widest_key} at most: use backend='torch'"
    if entry.even and q.dtype != torch.float32 and (K % 2 or V % 2):
        return f"K is {K} and V {V}; {entry.name} takes even ones in 16 bits: pad them, {REMEDY}"
    found = load(entry)
    return f"{found}, {REMEDY}" if isinstance(found, str) else None


def run(
    mixer: Mixer,
    inputs: Sequence[Tensor],
    segments: Segments,
    initial_state: Tensor | None = None,
    *,
    want_final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Outputs (1, tokens, H, V) and, if wanted, final states (segments, H, K, V); both differentiable.

    Segments fill the tokens in order. `initial_state` and final states have a row for each that is not empty.
    """
    op = load(ENTRIES[type(mixer)])
    assert isinstance(op, Op), "refusal() comes first"
    q, k, v, *gates = inputs
    if not len(q):
        return _nothing(inputs), None
    group = v.shape[1] // k.shape[1]
    if group > 1 and not op.grouped:
        q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    given: dict[str, Any] = {"q": q, "k": k, "v": v.to(q.dtype)}
    given |= zip(("g", "beta"), gates, strict=False)
    if "g" in given:
        given["g"] = given["g"].float()
    given = {name: x.unsqueeze(0) for name, x in given.items()}
    given |= {"scale": mixer.scale, "initial_state": initial_state, "output_final_state": want_final}  # type: ignore[attr-defined]
    if getattr(mixer, "qk_l2norm", False):
        given["use_qk_l2norm_in_kernel"] = True
    if len(segments.filled) > 1:  # one segment is a batch of one, and needs no bounds
        cu_seqlens, on_host, tiles = segments.bounds(q.device)
        given["cu_seqlens"] = cu_seqlens
        if "cu_seqlens_cpu" in op.options:
            given["cu_seqlens_cpu"] = on_host
        if "chunk_indices" in op.options:
            given |= {"chunk_indices": tiles, "chunk_size": TILE}
    out, final = op.call(**given)
    return out, final


def _nothing(inputs: Sequence[Tensor]) -> Tensor:
    """Outputs of no tokens, which autograd takes back to every input."""
    q, _, v = inputs[:3]
    zero = sum((x.sum() for x in inputs), start=q.new_zeros(()))
    return (v + zero).to(q.dtype).unsqueeze(0)


# -- what a state that is not known yet will do ------------------------------------------------------------


class Reads(NamedTuple):
    """r_t = scale · weight_t · x_t: what every token reads of the state that enters its segment."""

    x: Tensor  # (tokens, Hk, K)
    weight: Tensor | None  # (tokens, H) in float32
    scale: float


class Summary(NamedTuple):
    U: Tensor  # (segments, H, K, V) in float32
    M: Tensor | None  # in the form of the mixer's kind; None for "none", and where it was not wanted
    reads: Reads | None


@torch.no_grad()
def summarize(
    mixer: Mixer, inputs: Sequence[Tensor], segments: Segments, *, want_M: bool = True, want_reads: bool = True
) -> Summary:
    """Of segments that fill the tokens in order, none of them empty."""
    H, K, V = mixer.state_shape(inputs)
    q, k, v, *gates = inputs
    if not len(q):
        return Summary(torch.zeros((0, H, K, V), dtype=torch.float32, device=q.device), None, None)
    scale: float = mixer.scale  # type: ignore[attr-defined]
    if mixer.kind in ("none", "scalar") or not (want_M or want_reads):
        _, U = run(mixer, inputs, segments, want_final=True)
        assert U is not None
        M, weight = _decays(gates[0], segments) if mixer.kind == "scalar" and (want_M or want_reads) else (None, None)
        return Summary(U, M, Reads(q, weight, scale) if want_reads else None)
    start = torch.zeros((len(segments.spans), H, K, V + K), dtype=torch.float32, device=q.device)
    start[..., V:].diagonal(dim1=-2, dim2=-1).fill_(1)
    wide = torch.nn.functional.pad(v, (0, K))
    out, final = run(mixer, (q, k, wide, *gates), segments, start, want_final=True)
    assert final is not None
    U, M = final[..., :V], final[..., V:]
    if mixer.kind == "diagonal":
        M = M.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    # A copy of what tokens read: the rest of `out` may go.
    return Summary(U, M, Reads(out[0, ..., V:].contiguous(), None, 1.0) if want_reads else None)


def reads_gradient(reads: Reads, d_out: Tensor, segments: Segments) -> Tensor:
    """C (segments, H, K, V): the gradient of each segment's incoming state if its final state had none."""
    return outer_sums(reads.x, reads.weight, d_out.to(reads.x.dtype), reads.scale, segments)


def _decays(g: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """(M, weights): decay over each segment (segments, H, 1, 1), and up to each token (tokens, H), in float32.

    Sums run over all segments, in float64: differences of large float32 numbers are rough.
    """
    starts, begins, ends = segments.of_tokens(g.device)
    c = torch.nn.functional.pad(g.cumsum(0, dtype=torch.float64), (0, 0, 1, 0))
    weight = (c[1:] - c.index_select(0, starts)).exp().float()
    M = (c.index_select(0, ends) - c.index_select(0, begins)).exp().float()
    return M[..., None, None], weight
