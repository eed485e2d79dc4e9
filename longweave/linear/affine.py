"""Any linear mixer over any layout: fragments are summed up, summaries travel, every fragment runs with its true state.

    one document, zigzag on 2 ranks              rank 0: HEAD and LAST          rank 1: MID
                                                 ╎                              ╎
    what others wait for                         run HEAD: outputs, U           summary of MID: M, U
    exchange starts                              U ───────────────────────────▶
                                                   ◀─────────────────────────── M, U
    while it is in flight                        documents that lie here whole, factors of what comes next
    states arrive                                S = M·U₀ + U₁                  S = U₀
    the rest                                     run LAST from S                run MID from S

Backward is the mirror image: LAST runs at once, MID gives its C, C's travel, HEAD and MID run with the gradient of
their last state. M was kept by forward, so only C travels. What travels does not grow with the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longweave.comm.groups import Comm
from longweave.kernels.affine import map_shape
from longweave.kernels.chunks import chunk_table
from longweave.kernels.mixer import Mixer
from longweave.kernels.prepared import Prepared
from longweave.kernels.scan import Run, backward_run, backward_summary, run, summary
from longweave.linear.chain import Rows, exchange, walk
from longweave.plan.chains import RankChains
from longweave.plan.fragments import Role

# Factors that one stage makes for the next are kept up to this size; beyond it they are made twice.
KEEP_BYTES = 1 << 30


def affine_mix(mixer: Mixer, inputs: Sequence[Tensor], chains: RankChains, comm: Comm) -> Tensor:
    """Outputs (tokens, H, V) of this rank's tokens. Every rank of the group must call it."""
    out: Tensor = _AffineMix.apply(mixer, chains, comm, *inputs)  # type: ignore[no-untyped-call]
    return out


class _AffineMix(torch.autograd.Function):
    """Keeps the inputs, states at block borders, and the maps of the chains that pass here."""

    @staticmethod
    def forward(ctx: Any, mixer: Mixer, chains: RankChains, comm: Comm, *inputs: Tensor) -> Tensor:
        with torch.autocast(inputs[0].device.type, enabled=False):
            out, done, maps = _forward(mixer, chains, comm, inputs, want_states=any(ctx.needs_input_grad))
        ctx.mixer, ctx.chains, ctx.comm = mixer, chains, comm
        ctx.sizes = [len(inputs), *(len(done[role].states) for role in Role)]
        ctx.save_for_backward(*inputs, *(state for role in Role for state in done[role].states), maps)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *saved, maps = ctx.saved_tensors
        parts = []
        for size in ctx.sizes:
            parts.append(saved[:size])
            saved = saved[size:]
        inputs, *by_role = parts
        states = dict(zip(Role, by_role, strict=True))
        with torch.autocast(d_out.device.type, enabled=False):
            grads = _backward(ctx.mixer, ctx.chains, ctx.comm, tuple(inputs), states, maps, d_out)
        return None, None, None, *grads


def _forward(
    mixer: Mixer, chains: RankChains, comm: Comm, inputs: tuple[Tensor, ...], *, want_states: bool
) -> tuple[Tensor, dict[Role, Run], Tensor | None]:
    """Outputs, what each role keeps for backward, and the maps of the chains."""
    parts = _parts(mixer, chains, inputs)
    head, mid, last = parts[Role.HEAD], parts[Role.MID], parts[Role.LAST]
    H, _, V = head.state_shape
    out = inputs[0].new_empty((len(inputs[0]), H, V))
    done = {Role.HEAD: run(head, out=out, want_states=want_states)}
    U, M = summary(mid, all_maps=True)
    own = Rows(torch.cat([_states(done[Role.HEAD]), U]), _maps(mixer, M, U))
    arriving = exchange(own, chains.forward, comm, communicates=chains.communicates)

    done[Role.WHOLE] = run(parts[Role.WHOLE], out=out, want_final=False, want_states=want_states)
    _make_ready(last)

    rows = arriving.wait()
    S = walk(mixer.kind, rows, chains.forward_steps, _count(mid, last))
    S_mid, S_last = torch.split(S, [_count(mid), _count(last)])
    done[Role.MID] = run(mid, S_mid, out=out, want_final=False, want_states=want_states)
    done[Role.LAST] = run(last, S_last, out=out, want_final=False, want_states=want_states)
    return out, done, rows.maps


def _backward(
    mixer: Mixer,
    chains: RankChains,
    comm: Comm,
    inputs: tuple[Tensor, ...],
    states: dict[Role, list[Tensor | None]],
    maps: Tensor | None,
    d_out: Tensor,
) -> Sequence[Tensor]:
    parts = _parts(mixer, chains, inputs, pullbacks=True)
    head, mid, last = parts[Role.HEAD], parts[Role.MID], parts[Role.LAST]
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    _, C_last = backward_run(last, states[Role.LAST], d_out, grads=grads)
    C = torch.cat([backward_summary(mid, d_out), C_last])
    arriving = exchange(Rows(C, None), chains.backward, comm, communicates=chains.communicates)

    backward_run(parts[Role.WHOLE], states[Role.WHOLE], d_out, grads=grads)
    _make_ready(head)

    rows = Rows(arriving.wait().states, maps)
    dS = walk(mixer.kind, rows, chains.backward_steps, _count(head, mid), transposed=True)
    dS_head, dS_mid = torch.split(dS, [_count(head), _count(mid)])
    backward_run(head, states[Role.HEAD], d_out, dS_head, grads=grads)
    backward_run(mid, states[Role.MID], d_out, dS_mid, grads=grads)
    return grads


def _parts(
    mixer: Mixer, chains: RankChains, inputs: tuple[Tensor, ...], *, pullbacks: bool = False
) -> dict[Role, Prepared]:
    """The fragments of each role. MID is used by two stages; what runs last is made ready during the exchange."""
    device = inputs[0].device.type
    twice = {Role.MID, Role.HEAD if pullbacks else Role.LAST}
    parts = {}
    for role in Role:
        table = chunk_table(chains.spans[role], device=device)
        part = Prepared(mixer, inputs, table, pullbacks=pullbacks)
        part.keep = role in twice and _factor_bytes(part) <= KEEP_BYTES
        parts[role] = part
    return parts


def _factor_bytes(part: Prepared) -> int:
    """About what the factors of all blocks take."""
    H, K, V = part.state_shape
    chunk = part.table.chunk
    per_token = 3 * K + 2 * V + 3 * chunk
    return int(part.table.lengths.sum()) * H * per_token * (2 if part.pullbacks else 1) * part.dtype.itemsize


def _make_ready(part: Prepared) -> None:
    """Make the factors of a part that will run when states have arrived."""
    if part.keep:
        with torch.no_grad():
            for number in range(len(part.blocks)):
                part.ready(number)


def _count(*parts: Prepared) -> int:
    return sum(len(part.table.spans) for part in parts)


def _states(done: Run) -> Tensor:
    assert done.final_state is not None
    return done.final_state


def _maps(mixer: Mixer, M: Tensor | None, U: Tensor) -> Tensor | None:
    """Own rows of M, also when there are none: others may send some."""
    shape = map_shape(mixer.kind, U.shape[2])
    if M is None and shape is not None:
        return U.new_empty((0, U.shape[1], *shape))
    return M
