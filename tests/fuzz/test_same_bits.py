"""The same input on the same number of ranks gives the same bits: on one pack, on a new one, and in new processes.

A row for every strategy, method and operator, each in float32 and bfloat16: outputs and all gradients. Processes differ
in what must not matter: addresses of memory, seeds of hashes, what ran before.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from families import CU as FAMILY_CU
from families import build, data
from fuzz_operators import OPERATORS
from fuzz_tensors import Problem, TensorCase
from linear_ranks import layout_of
from pool_rows import rows, valid
from torch import Tensor

import longweave as lw
from longweave.core import METHODS
from longweave.launch import Ranks

CU = (0, 37, 38, 38, 41, 100, 107, 190)
WORLD = 4
DTYPES = ("float32", "bfloat16")

HEADS = {"heads": 6, "kv_heads": 2, "dim": 16, "v_dim": 8, "sinks": True, "scale": None, "softcap": None}
PLAIN = {**HEADS, "mask": lw.Mask.causal(CU), "mask_of": "pack", "backend": "auto"}
ATTENTION: dict[str, dict[str, Any]] = {
    "ring": {"strategy": "ring", "options": {}},
    "ring x ulysses": {"strategy": "ring", "options": {"ulysses_size": 2}},
    "ulysses": {"strategy": "ulysses", "options": {}},
    "allgather": {"strategy": "allgather", "options": {"heads_k_stride": 2, "bwd_head_first_stride": 1}},
    "groupcast": {"strategy": "groupcast", "options": {"stages": 3, "keep_kv": 0}},
    "groupcast, kept": {"strategy": "groupcast", "options": {"stages": 1, "keep_kv": 1}},
    "auto": {"strategy": "auto", "options": {}},
    "softcap": {"strategy": "ring", "options": {}, "softcap": 2.0},
    "window": {"strategy": "groupcast", "options": {}, "mask": lw.Mask.sliding_window(CU, 9)},
}
MIXER = {"qk_l2norm": True, "shape": {"Hk": 1, "Hv": 2, "K": 6, "V": 5, "decay": 5e-4}}
CALLS: dict[str, dict[str, dict[str, Any]]] = {
    "attention": {name: {**PLAIN, **row} for name, row in ATTENTION.items()},
    **{mixer: {m: {**MIXER, "method": m} for m in METHODS} for mixer in ("gated delta rule", "delta rule", "kda")},
    "gla": {m: {**MIXER, "qk_l2norm": False, "method": m} for m in METHODS},
    "ssd": {m: {"method": m, "skip": True} for m in METHODS},
    "lightning attention": {m: {"method": m, "decays": True} for m in METHODS},
    "causal_conv1d": {"": {"width": 4, "bias": True, "activation": "silu", "together": True}},
    "shift": {"": {"by": 2, "fill": 0}},
    "document_sum, document_mean": {"": {}},
    "shard, unshard, reshard": {"": {"to": "zigzag", "to_seed": 0, "dim": 0}},
    "gather_recompute": {grads: {"param_grads": grads} for grads in ("part", "full")},
}


def problems() -> dict[str, Problem]:
    """All rows."""
    found = {}
    for operator, calls in CALLS.items():
        for name, call in calls.items():
            for dtype in DTYPES:
                case = TensorCase(operator, call, CU, "shuffled", 3, WORLD, None, dtype, "contiguous", 5)
                found[f"{operator} {name} {dtype}"] = Problem.solve(case)
    return found


def bits(tensors: list[Tensor]) -> str:
    digest = blake2b(digest_size=8)
    for x in tensors:
        digest.update(x.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def of_operators(given: dict[str, Problem], backwards: bool) -> dict[str, str]:
    """A digest of every row on this rank, twice on one pack. `backwards`: other calls came before each."""
    found = {}
    layout = layout_of("shuffled", [*CU], WORLD, 3)
    for name in sorted(given, reverse=backwards):
        problem = given[name]
        operator = OPERATORS[problem.case.operator]
        pack = lw.Pack(CU, layout=layout, **operator.pack(problem.case.call))
        upstream = [ds[pack.rank if len(ds) > 1 else 0] for ds in problem.upstream]
        runs = []
        for _ in range(2):
            outputs, grads = problem.run(operator, pack, upstream)
            runs.append(bits([*outputs, *grads]))
        found[name] = runs[0] if runs[0] == runs[1] else f"{runs} on one pack"
    return found


def of_training(family: str) -> dict[str, str]:
    """Two steps of a whole model, its batch divided by `shard_batch` or by `lw.pool`: the weights after them."""
    found = {}
    for way in ("parallelize", "pool"):
        model = build(family, torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        (lw.parallelize if way == "parallelize" else lw.pool)(model)
        for seed in (1, 2):
            if way == "parallelize":
                batch = lw.shard_batch(data(seed).ids, FAMILY_CU, labels=data(seed).labels)
                loss = batch.loss(model(**batch.inputs).logits)
            else:
                given, _ = rows("right", dist.get_rank(), WORLD, model)
                loss = model(**given, num_items_in_batch=valid(data())).loss
            loss.backward()
            lw.reduce_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        found[way] = bits(list(model.parameters()))
    return found


def all_of_it(given: dict[str, Problem], backwards: bool) -> dict[str, str]:
    return {**of_operators(given, backwards), **of_training("qwen3_5")}


def different(a: list[dict[str, str]], b: list[dict[str, str]]) -> list[str]:
    return [
        f"{name} on rank {rank}: {mine[name]} and {theirs[name]}"
        for rank, (mine, theirs) in enumerate(zip(a, b, strict=True))
        for name in mine
        if mine[name] != theirs[name]
    ]


def test_the_same_bits_again_and_after_a_restart(ranks: Ranks) -> None:
    given = problems()
    first = ranks.run(all_of_it, given, False, size=WORLD)
    assert not [f"{name}: {text}" for row in first for name, text in row.items() if "on one pack" in text]
    assert len(first[0]) == len(given) + 2
    assert not different(first, ranks.run(all_of_it, given, True, size=WORLD)), "in the same processes"
    with Ranks(WORLD) as started:
        assert not different(first, started.run(all_of_it, given, False)), "in new ones"


def test_a_difference_would_be_seen(ranks: Ranks) -> None:
    """One bit of one input."""
    name = "gated delta rule affine float32"
    given = {name: problems()[name]}
    first = ranks.run(of_operators, given, False, size=WORLD)
    x = given[name].xs[0]
    x.view(torch.int32)[60, 0, 0] ^= 1
    assert different(first, ranks.run(of_operators, given, False, size=WORLD))
