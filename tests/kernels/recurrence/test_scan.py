"""The stages one by one: what a caller with many ranks puts together must equal one run over the whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from linear_cases import CASES, GDN, LINEAR, Case, engine_inputs, worst

from longweave.kernels.recurrence.chunks import chunk_table
from longweave.kernels.recurrence.factors import ChunkedInputs
from longweave.kernels.recurrence.mixer import Mixer, advanced, transition_shape
from longweave.kernels.recurrence.scan import backward_run, backward_summary, run, summary

BY_NAME = {"ids": lambda case: case.name}
WHOLE = (0, 101)
CUTS = [0, 1, 24, 24, 73, 101]  # fragments of one document, one of them empty
FRAGMENTS = list(pairwise(CUTS))


def setup(case: Case) -> tuple[Mixer, tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = engine_inputs(case, case.inputs(101, 1, 2, K=6, V=5))
    rng = torch.Generator().manual_seed(1)
    start, d_final = (torch.randn(1, 2, 6, 5, generator=rng, dtype=torch.float64) for _ in range(2))
    d_out = torch.randn(101, 2, 5, generator=rng, dtype=torch.float64)
    return case.mixer, inputs, start, d_final, d_out


@pytest.mark.parametrize("case", CASES, **BY_NAME)
def test_fragments_joined_by_their_summaries_equal_the_whole(case: Case) -> None:
    mixer, inputs, start, d_final, d_out = setup(case)
    one = chunk_table([WHOLE], 16)
    whole = run(ChunkedInputs(mixer, inputs, one), start)
    expected_grads, expected_d_start = backward_run(
        ChunkedInputs(mixer, inputs, one, pullbacks=True), whole.states, d_out, d_final
    )

    order = [3, 0, 4, 2, 1]  # fragments lie in any order
    table = chunk_table([FRAGMENTS[i] for i in order], 16)
    place = [order.index(i) for i in range(5)]
    forward = ChunkedInputs(mixer, inputs, table, keep=True)
    U, M = summary(forward)
    transitions = [None if M is None else M[at] for at in place]
    arriving = [start[0]]
    for at, transition in zip(place, transitions, strict=True):
        arriving.append(advanced(mixer.kind, U[at], transition, arriving[-1]))
    done = run(forward, torch.stack([arriving[i] for i in order]))
    assert not forward._kept
    assert worst([done.out, arriving[-1]], [whole.out, whole.final_state[0]]) < 1e-10

    back = ChunkedInputs(mixer, inputs, table, keep=True, pullbacks=True)
    C = backward_summary(back, d_out)
    leaving = [d_final[0]]
    for i in reversed(range(5)):
        leaving.append(advanced(mixer.kind, C[place[i]], transitions[i], leaving[-1], transposed=True))
    leaving = leaving[::-1]  # leaving[i] is the gradient of the state that fragment i receives
    grads, d_start = backward_run(back, done.states, d_out, torch.stack([leaving[i + 1] for i in order]))
    assert not back._kept
    assert worst([*grads, d_start[place[0]]], [*expected_grads, expected_d_start[0]]) < 1e-10
    assert worst([leaving[0]], [expected_d_start[0]]) < 1e-10


@pytest.mark.parametrize("case", CASES, **BY_NAME)
def test_transitions_come_for_every_segment_in_its_place(case: Case) -> None:
    mixer, inputs, *_ = setup(case)
    chunked = ChunkedInputs(mixer, inputs, chunk_table(FRAGMENTS, 8))
    U, M = summary(chunked)
    for place, span in enumerate(FRAGMENTS):
        u, m = summary(ChunkedInputs(mixer, inputs, chunk_table([span], 8)))
        assert worst([U[place]], [u[0]]) < 1e-14
        if mixer.kind == "none":
            assert M is m is None
        else:
            assert M.shape == (len(FRAGMENTS), 2, *transition_shape(mixer.kind, 6))
            assert worst([M[place]], [m[0]]) < 1e-14


@pytest.mark.parametrize("case", CASES, **BY_NAME)
def test_the_summary_is_what_the_run_does_to_a_state(case: Case) -> None:
    mixer, inputs, start, _, _ = setup(case)
    chunked = ChunkedInputs(mixer, inputs, chunk_table([WHOLE], 16))
    U, M = summary(chunked)
    final = run(chunked, start).final_state
    assert worst([advanced(mixer.kind, U, M, start)], [final]) < 1e-10


def test_a_token_with_beta_0_and_g_0_is_the_identity() -> None:
    q, k, v, g, beta = GDN.inputs(70, 1, 2, K=6, V=5)
    chunked = ChunkedInputs(GDN.mixer, (q, k, v, g * 0, beta * 0), chunk_table([(0, 70)], 16))
    start = torch.randn(1, 2, 6, 5, dtype=torch.float64)
    U, M = summary(chunked)
    assert torch.equal(run(chunked, start).final_state, start)
    assert torch.equal(U, torch.zeros_like(U))
    assert torch.equal(M, torch.eye(6, dtype=torch.float64).expand(1, 2, 6, 6))


def test_tables_over_parts_of_the_tokens_fill_one_output() -> None:
    """A caller may run what needs no incoming state first, and the rest when the states have arrived."""
    mixer, inputs, _, _, d_out = setup(GDN)
    spans = [(0, 30), (30, 80), (80, 101)]
    together = run(ChunkedInputs(mixer, inputs, chunk_table(spans, 16)))
    table = chunk_table(spans, 16)
    grads, _ = backward_run(ChunkedInputs(mixer, inputs, table, pullbacks=True), together.states, d_out)
    out, parts = torch.full_like(together.out, torch.nan), [torch.full_like(x, torch.nan) for x in inputs]
    for group in ([spans[1]], [spans[2], spans[0]]):
        piece = run(ChunkedInputs(mixer, inputs, chunk_table(group, 16)), out=out)
        back = ChunkedInputs(mixer, inputs, chunk_table(group, 16), pullbacks=True)
        backward_run(back, piece.states, d_out, grads=parts)
    assert worst([out, *parts], [together.out, *grads]) < 1e-12


def test_tokens_outside_the_spans_come_out_zero() -> None:
    mixer, inputs, _, _, d_out = setup(LINEAR)
    done = run(ChunkedInputs(mixer, inputs, chunk_table([(20, 60)], 16)))
    back = ChunkedInputs(mixer, inputs, chunk_table([(20, 60)], 16), pullbacks=True)
    grads, _ = backward_run(back, done.states, d_out)
    for x in (done.out, *grads):
        assert not x[:20].any()
        assert not x[60:].any()
        assert x[20:60].any()


def test_states_are_float32_for_bfloat16_inputs() -> None:
    inputs = GDN.inputs(40, dtype=torch.bfloat16)
    chunked = ChunkedInputs(GDN.mixer, tuple(inputs), chunk_table([(0, 40)], 16))
    U, M = summary(chunked)
    done = run(chunked)
    assert {U.dtype, M.dtype, done.final_state.dtype} == {torch.float32}
    assert done.out.dtype == torch.bfloat16
