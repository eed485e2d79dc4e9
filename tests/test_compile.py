"""torch.compile over many packs: few compilations, and the numbers of eager code.

Packs differ in documents, tokens and layout, and leave the strategy to "auto". A rank has at least 2 tokens here: torch
compiles anew for sizes 0 and 1, so a pack that leaves a rank with so few may add a compilation.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
from torch._dynamo.utils import counters

import longweave as lw
from longweave.launch import Ranks

DIM, HEADS, KV_HEADS = 32, 4, 2
HEAD_DIM = DIM // HEADS
LAYOUTS = ("auto", "zigzag", "contiguous", "balanced")


class Block(nn.Module):
    """A decoder block: norm, mixer, norm, MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def mix(self, x: Tensor, pack: lw.Pack) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, pack: lw.Pack) -> Tensor:
        x = x + self.out(self.mix(self.norms[0](x), pack))
        return x + self.down(F.silu(self.up(self.norms[1](x))))


class SoftmaxBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def mix(self, x: Tensor, pack: lw.Pack) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], 1)
        return lw.attention(q, k, v, pack, sinks=self.sinks).flatten(1)


class LinearBlock(Block):
    """Like GatedDeltaNet: projection, convolution, gated delta rule, gate."""

    def __init__(self) -> None:
        super().__init__()
        self.qkvz = nn.Linear(DIM, 4 * DIM)
        self.taps = nn.Parameter(torch.randn(3 * DIM, 4) * 0.3)
        self.gates = nn.Linear(DIM, 2 * HEADS)

    def mix(self, x: Tensor, pack: lw.Pack) -> Tensor:
        qkv, z = self.qkvz(x).split([3 * DIM, DIM], -1)
        qkv = lw.causal_conv1d(qkv, self.taps, None, pack, activation="silu")
        q, k, v = qkv.unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(1)
        g, beta = self.gates(x).split(HEADS, -1)
        out = lw.gated_delta_rule(q, k, v, -F.softplus(g), beta.sigmoid(), pack, qk_l2norm=True)
        return out.flatten(1) * F.silu(z)


def packs(count: int) -> list[tuple[list[int], str]]:
    """Documents and a layout, all of them different."""
    rng = np.random.default_rng(5)
    found = []
    for number in range(count):
        lengths = rng.integers(1, 60, rng.integers(1, 9))
        found.append(([0, 8, *(8 + np.cumsum(lengths)).tolist()], LAYOUTS[number % 4]))
    assert len({cu[-1] for cu, _ in found}) > count // 3, "different numbers of tokens"
    return found


def over_packs(kind: type[Block], backend: str, count: int, fullgraph: bool) -> tuple[list[int], int]:
    """How often each frame was compiled, and the number of graphs; outputs and gradients are compared with eager code.

    A frame is a function, or the rest of one after a graph break. Torch gives up on one after 8 times.
    """
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    block = kind().double()
    compiled = torch.compile(block, backend=backend, fullgraph=fullgraph)
    alive: list[lw.Pack] = []
    for cu, layout in packs(count):
        pack = lw.Pack(cu, layout=layout)
        alive = [*alive[-1:], pack]  # two at a time
        assert pack.tokens >= 2
        x = torch.randn(pack.tokens, DIM, dtype=torch.float64)
        found = []
        for run in (block, compiled):
            leaf = x.clone().requires_grad_()
            y = run(leaf, pack)
            grads = torch.autograd.grad(y.square().sum(), [leaf, *block.parameters()])
            found.append([y, *grads])
        for eager, other in zip(*found, strict=True):
            torch.testing.assert_close(other, eager, rtol=1e-9, atol=1e-9)
    return list(FRAME_COMPILE_COUNTER.values()), counters["stats"]["unique_graphs"]


def test_a_decoder_block_compiles_once_or_twice(ranks: Ranks) -> None:
    """For the first pack, and then for any number of tokens."""
    for frames, graphs in ranks.run(over_packs, SoftmaxBlock, "aot_eager", 50, True, size=2, timeout=300):
        assert len(frames) == 1, "one graph, without breaks"
        assert graphs == frames[0] <= 3


def test_by_inductor(ranks: Ranks) -> None:
    for frames, graphs in ranks.run(over_packs, SoftmaxBlock, "inductor", 4, True, size=2, timeout=300):
        assert len(frames) == 1
        assert graphs == frames[0] <= 3


def test_a_linear_block_compiles_each_part_once_or_twice(ranks: Ranks) -> None:
    """Graph breaks are where the library computes; each part between them is compiled for itself."""
    for frames, graphs in ranks.run(over_packs, LinearBlock, "aot_eager", 50, False, size=2, timeout=300):
        assert len(frames) > 2, "with breaks"
        assert max(frames) <= 3, frames
        assert 2 < graphs <= sum(frames)
