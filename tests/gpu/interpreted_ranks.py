"""The whole library on the Triton kernels: two gloo ranks whose kernels are interpreted, against one process.

Every strategy, with kernels, merges, sinks and sums of gradients as on a GPU. Started by test_spans_values.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from reference import Problem
from test_attention import STRATEGIES, compare, layout_of

import longweave as lw
from longweave.kernels import fused
from longweave.kernels.attention import spans
from longweave.kernels.attention.spans import Tiles
from longweave.kernels.triton_launch import INTERPRETED
from longweave.launch import Ranks

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set")

CU = [0, 9, 10, 10, 36]
MASKS = {"causal": lw.Mask.causal(CU), "window": lw.Mask.sliding_window(CU, 9)}


def compare_all(layout: str, mask: str, strategies: list[str]) -> dict[str, int]:
    """Compares each on this rank; how often each kernel was launched."""
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, where a row has seen nothing
    launches: dict[str, int] = {}

    def counting(module: object) -> None:
        launch = module.launch

        def launch_and_count(kernel, grid, *args, **options) -> None:
            launches[kernel.__name__] = launches.get(kernel.__name__, 0) + 1
            launch(kernel, grid, *args, **options)

        module.launch = launch_and_count

    counting(spans)
    counting(fused)
    spans.tiles_for = lambda *_: Tiles(16, 16, 4, 1)
    problem = Problem.random(CU[-1], heads=2, kv_heads=2, dtype=torch.float32, sinks=True)
    for strategy, options in (STRATEGIES[name] for name in strategies):
        where = layout_of(layout, MASKS[mask], dist.get_world_size())
        try:
            compare(MASKS[mask], where, strategy, options, problem, 3e-6, call_options={"backend": "triton"})
        except Exception as error:
            raise AssertionError(strategy) from error
    return launches


def test_two_ranks_equal_one_process() -> None:
    with Ranks(2) as ranks:
        for launches in ranks.run(compare_all, "zigzag", "causal", list(STRATEGIES)):
            kernels = {"forward_kernel", "dq_kernel", "dkv_kernel", "finish_kernel", "delta_kernel", "add_rows_kernel"}
            assert set(launches) == kernels  # forward merges in its registers
        ranks.run(compare_all, "odd", "window", ["ring", "groupcast"])  # a rank has nothing
