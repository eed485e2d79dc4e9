"""Every operator as one row: which calls to draw, its inputs, the call across ranks, and one process in plain torch.

    inputs       per token, and shared by all ranks (weights, sinks, decays per head)
    ours         on a rank: this rank's tokens of the former, a copy of the latter, a pack
    theirs       on full tensors, in float64
    outputs      "tokens" (this rank's), "moved" (this rank's under another layout), "whole" (all, on every rank),
                 "value" (this rank's, without a gradient)

Gradients of tokens must be whole. Those of what is shared are parts that sum over ranks, unless `whole_grads` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from fuzz_plans import options_of
from hypothesis import strategies as st
from linear_cases import CASES, DELTA, GDN, GLA, KDA, convolution
from linear_ranks import across_ranks, layout_of
from reference import dense_attention
from test_documents import one_process, reduced
from torch import Tensor

import longweave as lw
from longweave.core import METHODS
from longweave.kernels.recurrence.reference import recurrent

Tensors = list[Tensor]
Draw = st.DrawFn
Call = dict[str, Any]


def normal(seed: int, *shapes: tuple[int, ...]) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]


class Operator:
    """`call` is what was drawn for it, `cu` the documents."""

    outputs: ClassVar[tuple[str, ...]] = ("tokens",)

    def draw(self, draw: Draw, cu: list[int], ranks: int) -> Call:
        raise NotImplementedError

    def inputs(self, call: Call, cu: list[int], seed: int) -> tuple[Tensors, Tensors]:
        raise NotImplementedError

    def ours(self, call: Call, pack: lw.Pack, xs: Tensors, shared: Tensors) -> Tensors:
        raise NotImplementedError

    def theirs(self, call: Call, cu: list[int], xs: Tensors, shared: Tensors) -> Tensors:
        raise NotImplementedError

    def pack(self, call: Call) -> Call:
        """What the pack is told besides documents and layout."""
        return {}

    def whole_grads(self, call: Call) -> bool:
        return False


# -- softmax attention -----------------------------------------------------------------------------------------


class Attention(Operator):
    outputs = ("tokens", "value")

    def draw(self, draw: Draw, cu: list[int], ranks: int) -> Call:
        total, kv_heads = cu[-1], draw(st.integers(1, 4))
        kind = draw(st.sampled_from(["causal", "causal", "full", "window", "prefix", "slices"]))
        strategy = draw(st.sampled_from(["groupcast", "ring", "allgather", "ulysses", "auto"]))
        softcap = draw(st.sampled_from([None, None, 2.0]))
        scale = draw(st.sampled_from([None, None, 0.7, -0.3, 0.0]))
        flash = softcap is None and (scale is None or scale > 0)
        return {
            "mask": self._mask(draw, kind, cu, total),
            "mask_of": draw(st.sampled_from(["pack", "call"])),
            "strategy": strategy,
            "options": draw(options_of(strategy, ranks, kv_heads)),
            "heads": kv_heads * draw(st.integers(1, 3)),
            "kv_heads": kv_heads,
            "dim": draw(st.sampled_from([4, 8, 17, 32])),
            "v_dim": draw(st.sampled_from([None, 8, 24])),
            "sinks": draw(st.booleans()),
            "softcap": softcap,
            "scale": scale,
            "backend": draw(st.sampled_from(["auto", "reference", *(["cpu_flash"] if flash else [])])),
        }

    @staticmethod
    def _mask(draw: Draw, kind: str, cu: list[int], total: int) -> lw.Mask:
        lengths = [stop - start for start, stop in pairwise(cu)]
        if kind == "window":
            return lw.Mask.sliding_window(cu, draw(st.integers(1, max(1, *lengths))))
        if kind == "prefix":
            return lw.Mask.prefix_causal(cu, [draw(st.integers(0, length)) for length in lengths])
        if kind == "slices":  # documents see any keys: themselves, others, none
            slices = []
            for start, stop in pairwise(cu):
                keys = sorted((draw(st.integers(0, total)), draw(st.integers(0, total))))
                slices.append(((start, stop), keys, draw(st.sampled_from(["full", "causal", (-9, 4)]))))
            return lw.Mask.from_slices(total, slices)
        return lw.Mask.causal(cu) if kind == "causal" else lw.Mask.full(cu)

    def inputs(self, call: Call, cu: list[int], seed: int) -> tuple[Tensors, Tensors]:
        heads, kv_heads, dim, total = call["heads"], call["kv_heads"], call["dim"], cu[-1]
        *xs, sinks = normal(
            seed, (total, heads, dim), (total, kv_heads, dim), (total, kv_heads, call["v_dim"] or dim), (heads,)
        )
        return xs, [sinks] if call["sinks"] else []

    def pack(self, call: Call) -> Call:
        return {"mask": call["mask"]} if call["mask_of"] == "pack" else {}

    def ours(self, call: Call, pack: lw.Pack, xs: Tensors, shared: Tensors) -> Tensors:
        out, lse = lw.attention(
            *xs,
            pack,
            mask=call["mask"] if call["mask_of"] == "call" else None,
            strategy=call["strategy"],
            softcap=call["softcap"],
            scale=call["scale"],
            sinks=shared[0] if shared else None,
            backend=call["backend"],
            return_lse=True,
            **(call["options"] if pack.world_size > 1 or "ulysses_size" not in call["options"] else {}),
        )
        return [out, lse]

    def theirs(self, call: Call, cu: list[int], xs: Tensors, shared: Tensors) -> Tensors:
        options = {"scale": call["scale"], "softcap": call["softcap"], "sinks": shared[0] if shared else None}
        return [*dense_attention(*xs, call["mask"], **options)]


# -- linear mixers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixing(Operator):
    """The mixers of `linear_cases`."""

    name: str

    @property
    def case(self) -> Any:
        return next(case for case in CASES if case.name == self.name)

    def draw(self, draw: Draw, cu: list[int], ranks: int) -> Call:
        Hk = draw(st.integers(1, 2))
        return {
            "method": draw(st.sampled_from(["auto", *METHODS])),
            "qk_l2norm": self.case is not GLA and draw(st.booleans()),
            "shape": {
                "Hk": Hk,
                "Hv": Hk * draw(st.integers(1, 2)),
                "K": draw(st.integers(1, 9)),
                "V": draw(st.integers(1, 9)),
                "decay": draw(st.sampled_from([5e-4, 0.1, 1.0])),
            },
        }

    def inputs(self, call: Call, cu: list[int], seed: int) -> tuple[Tensors, Tensors]:
        return self.case.inputs(cu[-1], seed=seed, **call["shape"]), []

    def _l2norm(self, call: Call) -> Call:
        return {"qk_l2norm": True} if call["qk_l2norm"] else {}

    def ours(self, call: Call, pack: lw.Pack, xs: Tensors, shared: Tensors) -> Tensors:
        function, options = across_ranks(self.case), self._l2norm(call)
        return [function(*xs, pack, scale=self.case.scale, method=call["method"], **options)]

    def theirs(self, call: Call, cu: list[int], xs: Tensors, shared: Tensors) -> Tensors:
        return [self.case.reference(xs, cu, None, **self._l2norm(call))[0]]


class Ssd(Operator):
    def draw(self, draw: Draw, cu: list[int], ranks: int) -> Call:
        return {"method": draw(st.sampled_from(["auto", *METHODS])), "skip": draw(st.booleans())}

    def inputs(self, call: Call, cu: list[int], seed: int) -> tuple[Tensors, Tensors]:
        total = cu[-1]
        x, dt, B, C, A, D = normal(seed, (total, 4, 5), (total, 4), (total, 2, 6), (total, 2, 6), (4,), (4,))
        return [x, dt.abs() * 0.3, B, C], [-A.abs() * 0.3, *([D] if call["skip"] else [])]

    def ours(self, call: Call, pack: lw.Pack, xs: Tensors, shared: Tensors) -> Tensors:
        (x, dt, B, C), (A, *D) = xs, shared
        return [lw.ssd(x, dt, A, B, C, pack, D=D[0] if D else None, method=call["method"])]

    def theirs(self, call: Call, cu: list[int], xs: Tensors, shared: Tensors) -> Tensors:
        (x, dt, B, C), (A, *D) = xs, shared
        out, _ = recurrent(C, B, x * dt[..., None], A * dt, None, cu)
        return [out + D[0][:, None] * x if D else out]


class Lightning(Operator):
    def draw(self, draw: Draw, cu: list[int], ranks: int) -> Call:
        return {"method": draw(st.sampled_from(["auto", *METHODS])), "decays": draw(st.booleans())}

    def inputs(self, call: Call, cu: list[int], seed: int) -> tuple[Tensors, Tensors]:
        total = cu[-1]
        q, k, v, decay = normal(seed, (total, 2, 6), (total, 2, 6), (total, 4, 5), (4,))
        return [q, k / k.norm(dim=-1, keepdim=True), v], [-decay.abs() * 0.1] if call["decays"] else []

    def ours(self, call: Call, pack: lw.Pack, xs: Tensors, shared: Tensors) -> Tensors:
        return [lw.lightning_attention(*xs, shared[0] if shared else None, pack, method=call["method"])]

    def theirs(self, call: Call, cu: list[int], xs: Tensors, shared: Tensors) -> Tensors:
        decay = shared[0].expand(len(xs[0]), -1) if shared else None
        return [recurrent(*xs, decay, None, cu)[0]]


# -- convolutions, neighbours, documents, layouts ------------------------------------------------------------------


class Convolution(Operator):
    outputs = ("tokens", "tokens")

    def draw(self, draw: Draw, cu: list[int], ranks: int) -> Call:
        return {
            "width": draw(st.integers(2, 8)),
            "bias": draw(st.booleans()),
            "activation": draw(st.sampled_from([None, "silu"])),
            "together": draw(st.booleans()),
        }

    def inputs(self, call: Call, cu: list[int], seed: int) -> tuple[Tensors, Tensors]:
        width, total = call["width"], cu[-1]
        x, y, *shared = normal(seed, (total, 5), (total, 3), (5, width), (3, width), (5,), (3,))
        return [x, y], shared if call["bias"] else shared[:2]

    def ours(self, call: Call, pack: lw.Pack, xs: Tensors, shared: Tensors) -> Tensors:
        weights, biases = shared[:2], shared[2:] or None
        if call["together"]:
            return [*lw.causal_conv1d(xs, weights, biases, pack, activation=call["activation"])]
        rows = zip(xs, weights, biases or (None, None), strict=True)
        return [lw.causal_conv1d(*row, pack, activation=call["activation"]) for row in rows]

    def theirs(self, call: Call, cu: list[int], xs: Tensors, shared: Tensors) -> Tensors:
        rows = zip(xs, shared[:2], shared[2:] or (None, None), strict=True)
        return [convolution(*row, cu, call["activation"]) for row in rows]


class Shift(Operator):
    def draw(self, draw: Draw, cu: list[int], ranks: int) -> Call:
        return {"by": draw(st.integers(-9, 9) | st.sampled_from([500, -500])), "fill": draw(st.sampled_from([0, 0.5]))}

    def inputs(self, call: Call, cu: list[int], seed: int) -> tuple[Tensors, Tensors]:
        return normal(seed, (cu[-1], 2, 3)), []

    def ours(self, call: Call, pack: lw.Pack, xs: Tensors, shared: Tensors) -> Tensors:
        return [lw.shift(*xs, pack, call["by"], call["fill"])]

    def theirs(self, call: Call, cu: list[int], xs: Tensors, shared: Tensors) -> Tensors:
        return [one_process(*xs, cu, call["by"], call["fill"])]


class Documents(Operator):
    outputs = ("whole", "whole")

    def draw(self, draw: Draw, cu: list[int], ranks: int) -> Call:
        return {}

    def inputs(self, call: Call, cu: list[int], seed: int) -> tuple[Tensors, Tensors]:
        return normal(seed, (cu[-1], 3, 2)), []

    def ours(self, call: Call, pack: lw.Pack, xs: Tensors, shared: Tensors) -> Tensors:
        return [lw.document_sum(*xs, pack), lw.document_mean(*xs, pack)]

    def theirs(self, call: Call, cu: list[int], xs: Tensors, shared: Tensors) -> Tensors:
        return [reduced(*xs, cu, False), reduced(*xs, cu, True)]


class Layouts(Operator):
    """unshard by pack and by layout, reshard to another layout, and shard of a full tensor."""

    outputs = ("whole", "whole", "moved", "tokens")

    def draw(self, draw: Draw, cu: list[int], ranks: int) -> Call:
        kind = draw(st.sampled_from(["contiguous", "zigzag", "shuffled", "last"]))
        return {"to": kind, "to_seed": draw(st.integers(0, 1 << 30)), "dim": draw(st.sampled_from([0, 1, -1]))}

    def moved_layout(self, call: Call, cu: list[int], ranks: int) -> lw.Layout:
        found = layout_of(call["to"], cu, ranks, call["to_seed"])
        if isinstance(found, lw.Layout):
            return found
        return lw.Layout.zigzag(cu, ranks) if found == "zigzag" else lw.Layout.contiguous(cu[-1], ranks)

    def inputs(self, call: Call, cu: list[int], seed: int) -> tuple[Tensors, Tensors]:
        return normal(seed, (cu[-1], 3)), normal(seed + 1, (cu[-1], 2))

    def ours(self, call: Call, pack: lw.Pack, xs: Tensors, shared: Tensors) -> Tensors:
        (x,), (full,), dim = xs, shared, call["dim"]
        to = self.moved_layout(call, pack.cu_seqlens.tolist(), pack.world_size)
        whole = lw.unshard(x.movedim(0, dim), pack.layout, pack.group, dim).movedim(dim, 0)
        moved = lw.reshard(x.movedim(0, dim), pack.layout, to, pack.group, dim).movedim(dim, 0)
        return [pack.unshard(x.movedim(0, dim), dim).movedim(dim, 0), whole, moved, pack.shard(full)]

    def theirs(self, call: Call, cu: list[int], xs: Tensors, shared: Tensors) -> Tensors:
        return [xs[0] * 1, xs[0] * 1, xs[0] * 1, shared[0] * 1]


class Recomputed(Operator):
    def draw(self, draw: Draw, cu: list[int], ranks: int) -> Call:
        return {"param_grads": draw(st.sampled_from(["part", "full"]))}

    def inputs(self, call: Call, cu: list[int], seed: int) -> tuple[Tensors, Tensors]:
        x, y, mix, out = normal(seed, (cu[-1], 4), (cu[-1], 4), (4, 4), (4, 3))
        return [x, y], [mix, out]

    @staticmethod
    def _module(x: Tensor, y: Tensor, mix: Tensor, out: Tensor) -> Tensor:
        return ((torch.tanh(x @ mix) * y).cumsum(0) @ out) / max(1, len(x)) ** 0.5

    def ours(self, call: Call, pack: lw.Pack, xs: Tensors, shared: Tensors) -> Tensors:
        def module(x: Tensor, y: Tensor) -> Tensor:
            return self._module(x, y, *shared)

        return [lw.gather_recompute(module, xs, pack, params=shared, param_grads=call["param_grads"])]

    def theirs(self, call: Call, cu: list[int], xs: Tensors, shared: Tensors) -> Tensors:
        return [self._module(*xs, *shared)]

    def whole_grads(self, call: Call) -> bool:
        return call["param_grads"] == "full"


OPERATORS: dict[str, Operator] = {
    "attention": Attention(),
    **{case.name: Mixing(case.name) for case in (GDN, DELTA, KDA, GLA)},
    "ssd": Ssd(),
    "lightning attention": Lightning(),
    "causal_conv1d": Convolution(),
    "shift": Shift(),
    "document_sum, document_mean": Documents(),
    "shard, unshard, reshard": Layouts(),
    "gather_recompute": Recomputed(),
}
