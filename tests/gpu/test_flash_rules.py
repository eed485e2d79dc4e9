"""The flash backend on ranks: the real aten operators, with CPU kernels that follow the rules of each version."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from attention_cases import MASKS as KERNEL_MASKS
from flash_rules import RULES, installed
from reference import Problem, solve, worst
from test_attention import MASKS, STRATEGIES, compare, layout_of

import longweave as lw
from longweave.kernels.attention import attend, attend_backward, cuda_flash
from longweave.kernels.attention.partial import QuerySide, Tasks
from longweave.kernels.attention.waves import compile_waves
from longweave.launch import Ranks
from longweave.plan.tasks import fuse

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
SINGLE = {"single queries": lw.Mask.from_slices(20, [((2, 3), (0, 5), "full"), ((3, 4), (9, 16), "full")])}
WIDE = {"wide window": lw.Mask.sliding_window([0, 90, 91, 107], 33)}


def on_cpu(rules: str) -> ExitStack:
    """The operators by these rules, and a backend that takes a CPU for the device it wants."""
    stack = ExitStack()
    stack.calls = stack.enter_context(installed(rules))
    stack.enter_context(patch.object(cuda_flash, "_capability", lambda q: (9, 0)))
    return stack


def every_mask(strategy: str, options: dict, rules: str, dtype: torch.dtype) -> None:
    """Every mask and layout on these ranks."""
    with on_cpu(rules) as stack:
        for name, mask in (MASKS | WIDE).items():
            problem = Problem.random(mask.total, dtype=dtype, sinks=name in ("causal", "window", "slices"))
            for layout in ("zigzag", "contiguous", "odd"):
                spans = layout_of(layout, mask, dist.get_world_size())
                call = {"backend": "aten_flash"}
                try:
                    compare(mask, spans, strategy, options, problem, TOLERANCE[dtype], call_options=call)
                except Exception as error:
                    raise AssertionError(f"mask {name}, layout {layout}") from error
        assert {"forward", "backward"} <= set(stack.calls)


@pytest.mark.parametrize("rules", ["FA2", "FA3"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_ranks(ranks: Ranks, strategy: str, rules: str) -> None:
    name, options = STRATEGIES[strategy]
    ranks.run(every_mask, name, options, rules, torch.float16 if rules == "FA2" else torch.bfloat16, size=4)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", KERNEL_MASKS | SINGLE)
def test_on_one_rank(name: str, rules: str) -> None:
    """Also K and V in one buffer, in one that loads cannot begin at, and head dims that must be filled up."""
    mask, dtype = (KERNEL_MASKS | SINGLE)[name], torch.float16
    tasks = Tasks(fuse(mask.rows))
    variants = ((16, 16, 0), (16, 16, 4), (20, 12, 0)) if rules == "FA2" else ((16, 16, 0),)  # the same for all rules
    for dim, v_dim, offset in variants:
        problem = Problem.random(mask.total, heads=4, kv_heads=2, dim=dim, v_dim=v_dim, dtype=dtype)
        expected = solve(problem, mask)
        both = torch.cat([problem.k[..., :offset], problem.k, problem.v], -1)
        k, v = both[..., offset : offset + dim], both[..., offset + dim :]
        with on_cpu(rules) as stack:
            out, lse = attend(problem.q, k, v, tasks, backend="aten_flash")
            side = QuerySide(problem.grad, problem.q, out.to(dtype), lse)
            grads = attend_backward(side, k, v, tasks, backend="aten_flash")
        found = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse.t(), *grads), strict=True))
        for which, value in found.items():
            assert worst(value, expected[which]) < TOLERANCE[dtype], which
        waves = len(tasks.compiled(compile_waves))
        assert stack.calls == ["forward"] * waves + ["backward"] * waves


def test_tensors_that_begin_oddly() -> None:
    """Contiguous, but where no load of 16 bytes can begin; and one token, whose stride could be anything."""
    problem = Problem.random(20, dtype=torch.float16)
    q, k, v, grad = (
        torch.cat([x.new_zeros(6), x.flatten()])[6:].view(x.shape)
        for x in (problem.q, problem.k, problem.v, problem.grad)
    )
    assert q.is_contiguous()
    mask = lw.Mask.causal([0, 20])
    expected = solve(problem, mask)
    with on_cpu("FA2"):
        out, lse = attend(q, k, v, Tasks(mask.rows), backend="aten_flash")
        grads = attend_backward(QuerySide(grad, q, out.half(), lse), k, v, Tasks(mask.rows), backend="aten_flash")
        for name, value in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
            assert worst(value, expected[name]) < TOLERANCE[torch.float16], name
        q, k, v = (x[:1].as_strided((1, *x.shape[1:]), (3, *x.stride()[1:])) for x in (q, k, v))
        attend(q, k, v, Tasks(lw.Mask.causal([0, 1]).rows), backend="aten_flash")


def test_nothing_is_copied() -> None:
    """q, k and v reach the operator where they are, also as parts of one buffer and with gaps between the tasks."""
    mask = lw.Mask.from_slices(300, [((10, 90), (20, 80), "full"), ((100, 200), (120, 290), "causal")])
    problem = Problem.random(mask.total, dtype=torch.float16)
    both = torch.cat([problem.k, problem.v], -1)
    places = {x.untyped_storage().data_ptr() for x in (problem.q, both)}
    seen = set()

    def watch(q, k, v, *rest):
        seen.update(x.untyped_storage().data_ptr() for x in (q, k, v))
        return torch.zeros_like(q), torch.zeros(q.shape[1], len(q))

    with on_cpu("FA2"), patch.object(cuda_flash, "_call_forward", watch):
        attend(problem.q, both[..., :16], both[..., 16:], Tasks(mask.rows), backend="aten_flash")
    assert seen == places
