"""Inputs of a mixer, cut into blocks of chunks, and the solved factors of each block when a stage asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from longweave.kernels.recurrence.chunks import Block, ChunkTable
from longweave.kernels.recurrence.mixer import Factors, Mixer, Pullback
from longweave.tensors import accumulation_dtype

# Size of a block in tokens × heads. On CPU a factor then takes 512 KiB (128 floats each), measured best.
BLOCK = {"cpu": 1024}
BLOCK_ELSEWHERE = 1 << 18
# With many heads a block would shrink to one chunk, and then every state would be kept for backward.
LEAST_CHUNKS = 4


@dataclass
class SolvedFactors:
    """Factors of one block, T = (I + L)⁻¹ of its chunks (B, C, C), and the way back to the inputs."""

    factors: Factors
    T: Tensor | None
    pullback: Pullback | None


@dataclass
class ChunkedInputs:
    """Inputs (tokens, heads, ...) of a mixer over the segments of a table.

    With `keep`, the factors made by one stage serve the next one too; without, they live for one block.
    Keep them when two stages follow each other: `summary` and `run`, or `backward_summary` and `backward_run`
    (then with `pullbacks`, so that the first of them makes what the second needs).
    """

    mixer: Mixer
    inputs: tuple[Tensor, ...]
    table: ChunkTable
    keep: bool = False
    pullbacks: bool = False
    _kept: dict[int, SolvedFactors] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Of states, factors and summaries."""
        return accumulation_dtype(reduce(torch.promote_types, (x.dtype for x in self.inputs)))

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(heads, K, V)."""
        return self.mixer.state_shape(self.inputs)

    @property
    def blocks(self) -> tuple[Block, ...]:
        size = BLOCK.get(self.device.type, BLOCK_ELSEWHERE)
        return self.table.blocks(max(LEAST_CHUNKS, size // (self.table.chunk * self.state_shape[0])))

    def solve(self, number: int, *, last_use: bool = False) -> SolvedFactors:
        """The factors of block `number`; after its `last_use` they are not kept any longer."""
        solved = self._kept.pop(number, None) if last_use else self._kept.get(number)
        if solved is None:
            inputs = [self.blocks[number].gather(x, self.dtype) for x in self.inputs]
            if self.pullbacks:
                solved = _solved(*self.mixer.linearize(inputs))
            else:
                solved = _solved(self.mixer.factors(inputs), None)
            if self.keep and not last_use:
                self._kept[number] = solved
        return solved

    def rows(self, per_segment: Tensor | None) -> Tensor:
        """(segments, H, K, V), or None for zeros -> a fresh (rows · H, K, V) in the dtype of states."""
        H, K, V = self.state_shape
        if per_segment is None:
            return torch.zeros((len(self.table.spans) * H, K, V), dtype=self.dtype, device=self.device)
        return self.table.to_rows(per_segment.to(self.dtype)).reshape(-1, K, V)

    def segments(self, rows: Tensor) -> Tensor:
        """(rows · H, ...) -> (segments, H, ...)."""
        return self.table.to_segments(rows.view(len(self.table.spans), self.state_shape[0], *rows.shape[1:]))

    def empty_out(self) -> Tensor:
        """Room for outputs (tokens, H, V); zeros where no segment will write."""
        x, (H, _, V) = self.inputs[0], self.state_shape
        make = torch.empty if self.table.covers(len(x)) else torch.zeros
        return make((len(x), H, V), dtype=x.dtype, device=x.device)

    def empty_grads(self) -> Sequence[Tensor]:
        """Room for the gradients of the inputs; zeros where no segment will write."""
        make = torch.empty_like if self.table.covers(len(self.inputs[0])) else torch.zeros_like
        return [make(x, memory_format=torch.contiguous_format) for x in self.inputs]


def _solved(f: Factors, pullback: Pullback | None) -> SolvedFactors:
    if f.within is None:
        return SolvedFactors(f, None, pullback)
    # The inverse costs less than solving for wide right-hand sides, and backward applies it again.
    return SolvedFactors(f, _unit_lower_inverse(f.within), pullback)


def _unit_lower_inverse(L: Tensor) -> Tensor:
    """(I + tril₋₁ L)⁻¹ of (B, C, C), C a power of two.

    Solved in tiles along the diagonal, which are then joined two by two, so that most of the work is matmuls:
    [X 0; E Y]⁻¹ = [X⁻¹ 0; −Y⁻¹ E X⁻¹  Y⁻¹].
    """
    B, C, _ = L.shape
    side = min(C, 16)
    tiles = _diagonal_tiles(L, side)
    eye = torch.eye(side, dtype=L.dtype, device=L.device).expand(tiles.shape)
    inverse: Tensor = torch.linalg.solve_triangular(tiles, eye, upper=False, unitriangular=True)
    while side < C:
        X, Y = inverse[:, 0::2], inverse[:, 1::2]
        E = _diagonal_tiles(L, 2 * side)[..., side:, :side]
        inverse = L.new_zeros((B, C // (2 * side), 2 * side, 2 * side))
        inverse[..., :side, :side] = X
        inverse[..., side:, side:] = Y
        inverse[..., side:, :side] = torch.matmul(Y, torch.matmul(E, X)).neg_()
        side *= 2
    return inverse.view(B, C, C)


def _diagonal_tiles(L: Tensor, side: int) -> Tensor:
    """(B, C, C) -> (B, C / side, side, side), a view."""
    B, C, _ = L.shape
    grid = L.view(B, C // side, side, C // side, side)
    return torch.diagonal(grid, dim1=1, dim2=3).permute(0, 3, 1, 2)
