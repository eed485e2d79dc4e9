"""What the varlen kernels of FlashAttention do with their arguments, as CPU kernels of the real aten operators.

The rules were read in the sources of flash-attn 2.8 and of torch (`mha_varlen_fwd`, `mha_varlen_bwd`, `mask.h`), of
flash-attn's `hopper/` and of `flash_attn/cute` (version 4):

    FA2   a limit >= max_seqlen_k is dropped, the right one too; beside a limit, a free side is max_seqlen_k;
          a row that sees nothing has out 0 and lse +∞; with max_seqlen_q = 1, grouped heads and no window, queries
          are viewed as one per segment
    FA3   left >= max_seqlen_k − 1 and right >= max_seqlen_q − 1 are dropped; beside a limit, a free side is that;
          a row that sees nothing has lse −∞
    FA4   limits are kept as they are; lse −∞

All of them write zeros to out and dq of a segment without keys and to dk and dv of a segment without queries, as far as
their grid reaches: up to max_seqlen_q and max_seqlen_k. A call with a longer segment, of which they would leave memory
unwritten, is refused here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

RULES = ("FA2", "FA3", "FA4")


@dataclass(frozen=True)
class Call:
    """The integers of one call."""

    rules: str
    cu_q: np.ndarray
    cu_k: np.ndarray
    max_q: int
    max_k: int
    left: int
    right: int

    def check(self, queries: int, keys: int) -> None:
        for cu, total, longest in ((self.cu_q, queries, self.max_q), (self.cu_k, keys, self.max_k)):
            assert cu.dtype == np.int32
            assert cu[0] == 0
            assert cu[-1] == total
            lengths = np.diff(cu)
            assert lengths.min() >= 0
            assert lengths.max() <= longest
        assert 1 < len(self.cu_q) == len(self.cu_k) <= 65_536  # segments are a y coordinate of the grid

    @property
    def limits(self) -> tuple[int, int]:
        """The window that the kernel applies, (left, right); a side that it does not look at is far away."""
        left, right, far = self.left, self.right, 1 << 40
        if self.rules == "FA2":
            left, right = (-1 if x >= self.max_k else x for x in (left, right))
            if left < 0 and right == 0:
                return far, 0
            if left < 0 <= right:
                left = self.max_k
            if right < 0 <= left:
                right = self.max_k
        elif self.rules == "FA3":
            left = -1 if left >= self.max_k - 1 else left
            right = -1 if right >= self.max_q - 1 else right
            if left < 0 and right == 0:
                return far, 0
            if left >= 0 or right >= 0:
                left = self.max_k - 1 if left < 0 else left
                right = self.max_q - 1 if right < 0 else right
        return far if left < 0 else left, far if right < 0 else right

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """For every query of the call, the first key that it sees and the one behind the last."""
        queries, keys = np.diff(self.cu_q).astype(np.int64), np.diff(self.cu_k).astype(np.int64)
        segment = np.repeat(np.arange(len(queries)), queries)
        row = np.arange(self.cu_q[-1]) - self.cu_q[segment]
        aligned = row + keys[segment] - queries[segment]  # at the bottom right
        left, right = self.limits
        start = np.clip(aligned - left, 0, keys[segment])
        stop = np.clip(aligned + 1 + right, start, keys[segment])
        return start + self.cu_k[segment], stop + self.cu_k[segment]


# -- the operators -------------------------------------------------------------------------------------


@contextmanager
def installed(rules: str) -> Iterator[list[str]]:
    """`aten::_flash_attention_forward` and `_backward` run on the CPU by these rules; yields the calls made."""
    library, calls = torch.library.Library("aten", "IMPL"), []

    def forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None,
        window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        assert (dropout, debug, seqused_k, alibi_slopes, block_table) == (0.0, False, None, None, None)
        calls.append("forward")
        call = _call(rules, cu_q, cu_k, max_q, max_k, window_size_left, 0 if causal else window_size_right)
        _check(call, q, k, v)
        if rules == "FA2" and max_q == 1 and q.shape[1] > k.shape[1] and (call.left, call.right) == (-1, -1):
            assert len(q) == len(cu_q) - 1, "FA2 views the queries as one per segment"
        return *_forward(call, q, k, v, scale), _nothing(2), _nothing(), q.new_empty(0)

    def backward(
        grad_out, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng_state, unused, *, scale=None,
        window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert dropout == 0.0
        calls.append("backward")
        call = _call(rules, cu_q, cu_k, max_q, max_k, window_size_left, 0 if causal else window_size_right)
        _check(call, q, k, v)
        assert out.shape == grad_out.shape == q.shape
        assert out.dtype == grad_out.dtype == q.dtype
        assert lse.dtype == torch.float32
        assert lse.shape == (q.shape[1], len(q))
        assert lse.is_contiguous()
        return _backward(call, grad_out, q, k, v, out, lse, scale)

    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield calls
    finally:
        library._destroy()


def _nothing(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint64)


def _call(rules: str, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, left: int | None, right: int | None) -> Call:
    for cu in (cu_q, cu_k):
        assert cu.dtype == torch.int32
        assert cu.is_contiguous()
    left, right = (-1 if x is None else x for x in (left, right))
    return Call(rules, cu_q.numpy(), cu_k.numpy(), max_q, max_k, left, right)


def _check(call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    call.check(len(q), len(k))
    for x in (q, k, v):
        assert x.dtype == q.dtype
        assert x.dtype in (torch.float16, torch.bfloat16)
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0  # loads are 16 bytes wide
        assert x.stride(0) % 8 == x.stride(1) % 8 == 0
    assert k.shape == v.shape
    assert q.shape[2] == k.shape[2] <= 256
    assert q.shape[2] % 8 == 0
    assert q.shape[1] % k.shape[1] == 0


def _seen(call: Call, keys: int) -> Tensor:
    starts, stops = (torch.from_numpy(x)[:, None] for x in call.rows())
    columns = torch.arange(keys)
    return (starts <= columns) & (columns < stops)


def _logits(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    return (torch.einsum("qhd,khd->hqk", q.float(), k) * scale).masked_fill(~seen, -torch.inf)


def _forward(call: Call, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    seen, groups = _seen(call, len(k)), q.shape[1] // k.shape[1]
    logits = _logits(q, k.float().repeat_interleave(groups, 1), seen, scale)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.clamp_min(-1e30)[..., None])
    out = torch.einsum("hqk,khd->qhd", weights, v.float().repeat_interleave(groups, 1)).to(q.dtype)
    return out, torch.where(seen.any(-1), lse, torch.inf if call.rules == "FA2" else -torch.inf)


def _backward(
    call: Call, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seen, groups = _seen(call, len(k)), q.shape[1] // k.shape[1]
    k32, v32 = (x.float().repeat_interleave(groups, 1) for x in (k, v))
    g32 = grad_out.float()
    # Of a row whose lse is −∞ the kernels take e^logit: wrong, but finite.
    weights = torch.exp(_logits(q, k32, seen, scale) - torch.where(lse > -torch.inf, lse, 0.0)[..., None])
    delta = (g32 * out.float()).sum(-1).t()[..., None]
    d_logits = weights * (torch.einsum("qhd,khd->hqk", g32, v32) - delta) * scale
    dq = torch.einsum("hqk,khd->qhd", d_logits, k32)
    dk, dv = torch.einsum("hqk,qhd->khd", d_logits, q.float()), torch.einsum("hqk,qhd->khd", weights, g32)
    dk, dv = (x.view(len(x), -1, groups, x.shape[-1]).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
