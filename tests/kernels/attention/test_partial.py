"""Partial results: the merge, sinks, and the query side of a backward."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Problem, dense_attention, solve, worst

import longweave as lw
from longweave.kernels.attention import Kernel, attend, zeros_like_sum
from longweave.kernels.attention.partial import Partial, QuerySide, Tasks, sinks_gradient
from longweave.plan import slices


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.integers(0, 4))
def test_merge_in_any_order_and_with_nothing(parts: list[int], seed: int) -> None:
    """Keys dealt to three parts, some of which a query does not see at all."""
    problem = Problem.random(9, heads=2, kv_heads=2, dim=4, seed=seed)
    mask = lw.Mask.causal([0, 9])
    kernel = Kernel("reference", 0.5)
    q, k, v = problem.q, problem.k, problem.v
    whole = Partial.empty(q, 4)
    for part in sorted(range(3), key=lambda p: parts[p % len(parts)]):
        span = np.array([3 * part]), np.array([3 * part + 3])
        kernel.forward(whole, q, k, v, Tasks(slices.cut_k(mask.rows, *span)[0]))
    out, lse = dense_attention(problem.q, problem.k, problem.v, mask, scale=0.5)
    assert worst(whole.out, out) < 1e-12
    assert worst(whole.lse.t(), lse) < 1e-12


def test_the_merge_adds_in_float32() -> None:
    """A thousand equal bf16 partials: their mean is exact in float32 and lost in bf16."""
    result = Partial.empty(torch.zeros(1, 1, 4, dtype=torch.bfloat16), 1)
    assert result.out.dtype == torch.float32
    g = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=g).bfloat16()
    for value in values:
        result.add(0, 1, value.view(1, 1, 1), torch.zeros(1, 1, dtype=torch.bfloat16))
    assert abs(float(result.out) - float(values.double().mean())) < 1e-5


def test_rows_that_saw_nothing_change_nothing() -> None:
    """Some kernels say −∞ there, some +∞."""
    g = torch.Generator().manual_seed(0)
    mine = Partial(torch.randn(4, 1, 2, generator=g), torch.randn(1, 4, generator=g))
    mine.out[3], mine.lse[0, 3] = 0, -torch.inf
    before = Partial(mine.out.clone(), mine.lse.clone())
    blind = torch.tensor([[torch.inf, -torch.inf, 0.5, torch.inf]])
    mine.add(0, 4, torch.zeros(4, 1, 2), blind)
    for row in (0, 1, 3):
        assert torch.equal(mine.out[row], before.out[row])
        assert torch.equal(mine.lse[0, row], before.lse[0, row])
    assert not torch.equal(mine.lse[0, 2], before.lse[0, 2])


def test_sinks_of_minus_infinity_change_nothing() -> None:
    problem = Problem.random(6, heads=2, kv_heads=1)
    q, k, v = problem.q, problem.k, problem.v
    tasks = Tasks(lw.Mask.from_slices(6, [((2, 4), (0, 3), "full")]).rows)
    plain, sunk = attend(q, k, v, tasks), attend(q, k, v, tasks, sinks=torch.full((2,), -torch.inf))
    assert torch.equal(plain[0], sunk[0])
    assert torch.equal(plain[1], sunk[1])


def test_the_gradient_of_sinks() -> None:
    problem, mask = Problem.random(9, heads=4, kv_heads=2, sinks=True), lw.Mask.causal([0, 4, 9])
    q, k, v, grad = problem.q, problem.k, problem.v, problem.grad
    out, lse = attend(q, k, v, Tasks(mask.rows), sinks=problem.sinks)
    assert worst(sinks_gradient(problem.sinks, QuerySide(grad, q, out, lse)), solve(problem, mask)["dsinks"]) < 1e-12


def test_heads_of_a_query_side() -> None:
    """Head counts that do not divide go by ranges of heads, each with its own rows of everything."""
    whole = Problem.random(9, heads=4, kv_heads=2)
    problem = Problem(whole.q[:, :3], whole.k, whole.v, whole.grad[:, :3], None)  # 2 heads read K/V 0, one reads 1
    mask = lw.Mask.causal([0, 9])
    # With four heads and no gradient for the last, dense attention gives the gradients of the first three.
    expected = solve(Problem(whole.q, whole.k, whole.v, whole.grad * torch.tensor([1, 1, 1, 0])[:, None], None), mask)
    q, k, v, grad = problem.q, problem.k, problem.v, problem.grad
    for backend in ("cpu_flash", "reference"):
        kernel = Kernel(backend, 16**-0.5, runs=((0, 2, 0, 1), (2, 3, 1, 2)))
        result, tasks = Partial.empty(q, 16), Tasks(mask.rows)
        kernel.forward(result, q, k, v, tasks)
        assert worst(result.out, expected["out"][:, :3]) < 1e-12
        queries = QuerySide(grad, q, result.out, result.lse)
        dq, dk, dv = (zeros_like_sum(x) for x in (q, k, v))
        kernel.backward((dq, dk, dv), queries, k, v, tasks)
        assert worst(dq, expected["dq"][:, :3]) < 1e-12
        assert worst(dk, expected["dk"]) < 1e-12
        assert worst(dv, expected["dv"]) < 1e-12
    assert queries.heads(0, 3) is queries
    assert torch.equal(queries.heads(1, 3).delta, queries.delta[1:3])


def test_sinks_of_minus_infinity_have_no_gradient_where_a_query_sees_nothing() -> None:
    problem, mask = (
        Problem.random(9, heads=4, kv_heads=2, sinks=True),
        lw.Mask.from_slices(9, [((0, 4), (0, 9), "full")]),
    )
    problem.sinks[1] = -torch.inf
    q, k, v, grad = problem.q, problem.k, problem.v, problem.grad
    out, lse = attend(q, k, v, Tasks(mask.rows), sinks=problem.sinks)
    found = sinks_gradient(problem.sinks, QuerySide(grad, q, out, lse))
    assert found.isfinite().all()
    assert found[1] == 0
