"""Where pooled documents run."""

import numpy as np
import pytest

from longweave.plan import CPU, Layout, Machine, Mask
from longweave.plan.cost import Shape, areas
from longweave.plan.homing import WORTH, DecoderWork, home_layout, levelled

WORK, SHAPE = DecoderWork(6e6, 4096.0, 1024.0), Shape(8, 2, 32, itemsize=4)


def slowest(mask: Mask, layout: Layout) -> float:
    return float((np.array(layout.counts) * WORK.flops_per_token + areas(mask, layout) * WORK.flops_per_pair).max())


@pytest.mark.parametrize("machine", [CPU, Machine()])
@pytest.mark.parametrize("sigma", [0.05, 0.5, 1.5])
def test_documents_move_only_where_the_slowest_rank_gains(machine: Machine, sigma: float) -> None:
    rng = np.random.default_rng(0)
    for world in (2, 3, 8):
        lengths = rng.lognormal(6, sigma, (world, 2)).astype(int) + 1
        home = home_layout(lengths.sum(1).tolist())
        mask = Mask.causal([0, *np.cumsum(lengths).tolist()])
        found = levelled(mask, home, WORK, SHAPE, machine)
        assert found == home or slowest(mask, found) < (1 - WORTH) * slowest(mask, home)


def test_level_ranks_spare_themselves_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal rows, and one rank alone: nothing can be gained, which is seen before a layout is sought."""
    monkeypatch.setattr(Layout, "balanced", None)
    for counts, borders in (([800, 800, 800], [0, 500, 800, 1100, 1600, 1900, 2400]), ([70], [0, 70])):
        home = home_layout(counts)
        assert levelled(Mask.causal(borders), home, WORK, SHAPE, CPU) == home
