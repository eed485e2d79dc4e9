"""Bad input to batches, losses, models and local ranks."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from bad_values import INF, INTS, NAN, SCALARS, Question, Row, ask_all, integers, tensors
from torch import nn

import longweave as lw
from longweave.launch import Ranks
from longweave.models import rebatch, register, unbatch, unregister
from longweave.models.packing import pack_tokens

CU, T, V = [0, 3, 8], 8, 10
IDS, ROW_IDS = torch.arange(T), torch.arange(T).view(2, 4)
PACK = lw.Pack(CU)
BATCH, ROWS_BATCH = lw.shard_batch(IDS, CU, labels=IDS), lw.shard_batch(ROW_IDS)

WHOLE = "None | int64 | int8 | uint16 | int16 | uint64"  # None: not given
WEIGHTS = (
    "None | numpy | int64 | int8 | uint16 | int16 | uint64 | beyond int64 | bool | float64 | float16 | bfloat16 | "
    "float8 | negative | whole floats | nan"
)
OTHER_FLOATS = "float64 | float16 | bfloat16"
ANY_DTYPE = f"int64 | int8 | uint16 | bool | complex | {OTHER_FLOATS} | float8 | one dim less | no channels"
COUNTS = (SCALARS, "None | 2**40 | 2**70 | 1.5 | 1e30 | float64 | int64 | tensor(2) | tensor(2.)")
GROUPS = ({name: value for name, value in SCALARS.items() if not isinstance(value, torch.Tensor)}, "None")
NAMES = (SCALARS, "")
MASKS = {
    **integers(2, 4),
    "document ids": torch.tensor([[1, 1, 2, 2], [1, 1, 1, 1]]),
    "additive": torch.tensor([[0, 0, -1e9, -1e9], [0, 0, 0, 0]]),
    "additive, -inf": torch.tensor([[0, 0, -INF, -INF], [0, 0, 0, 0]]),
    "transposed": torch.ones(4, 2),
    "of pairs": torch.ones(2, 1, 4, 4),
    "of one row": torch.ones(4),
    "flat": torch.ones(T),
    "zeros": torch.zeros(2, 4),
    "complex": torch.ones(2, 4) + 1j,
}
FILL = "-1 | 0 | 2**40 | 2**70 | -2**70 | nan | inf | 1.5 | 1e30 | True | float64"


class Decoder(nn.Module):
    """A model that is known only as long as it is registered."""


def parallelized(**arguments: Any) -> None:
    lw.restore(lw.parallelize(**arguments))


def pooled(**arguments: Any) -> None:
    register(Decoder, "model")
    try:
        lw.restore(lw.pool(**arguments))
    finally:
        unregister(Decoder)


def like_tokens(kind: str, good: dict[str, Any], *shape: int) -> Row:
    """What stands beside ids, packed or in rows."""
    table = {**integers(*shape), "(1, tokens)": torch.ones(1, *shape, dtype=torch.int64)}
    packed = " | (1, tokens)" if len(shape) == 1 else ""
    return Row(
        f"shard_batch {kind}",
        lw.shard_batch,
        good,
        input_ids=(table, WHOLE.removeprefix("None | ") + packed),
        labels=(table, WHOLE + packed),
        shift_labels=(table, WHOLE + packed),
        position_ids=(table, WHOLE + packed),
        loss_weights=(table, WEIGHTS + (f"{packed} | one dim more | [True]" if packed else "")),
    )


ROWS = [
    like_tokens("packed", {"input_ids": IDS, "cu_seqlens": CU}, T),
    like_tokens("rows", {"input_ids": ROW_IDS}, 2, 4),
    Row("shard_batch by positions", lw.shard_batch, {"input_ids": IDS}, position_ids=(integers(T), WHOLE)),
    Row(
        "shard_batch of rows",
        lw.shard_batch,
        {"input_ids": ROW_IDS},
        attention_mask=(MASKS, f"{WHOLE} | bool | whole floats"),
        cu_seqlens=(INTS, "None"),
    ),
    Row(
        "shard_batch of embeddings",
        lw.shard_batch,
        {"inputs_embeds": torch.randn(T, 3), "cu_seqlens": CU},
        inputs_embeds=(tensors(T, 3), f"numpy | {OTHER_FLOATS} | float8 | one dim more"),
    ),
    Row(
        "shard_batch",
        lw.shard_batch,
        {"input_ids": IDS, "cu_seqlens": CU},
        cu_seqlens=(INTS, "None"),
        group=GROUPS,
        layout=NAMES,
        strategy=NAMES,
        mask=({**SCALARS, "of other tokens": lw.Mask.causal([0, 9])}, ""),
        window=(SCALARS, "None | 2**40 | 2**70 | 10**400 | int64"),
        ignore_index=(SCALARS, "-1 | 0 | 2**40 | int64"),
        method=NAMES,
        backend=NAMES,
        stages=(SCALARS, "None | int64"),
        nonsense=NAMES,
    ),
    Row(
        "Batch",
        lw.Batch,
        {"packed": pack_tokens(IDS, CU), "pack": PACK, "ignore_index": -100},
        packed=NAMES,
        pack=NAMES,
    ),
    *(
        Row(
            f"batch.{name}",
            getattr(BATCH, name),
            {"logits": torch.randn(1, T, V)},
            logits=({**tensors(1, T, V), "few words": torch.randn(1, T, 3)}, OTHER_FLOATS),
            **{other: (SCALARS, COUNTS[1].removeprefix("None | ") if other == "temperature" else COUNTS[1])},
        )
        for name, other in (("loss", "num_items"), ("logprobs", "temperature"), ("local_logprobs", "temperature"))
    ),
    Row(
        "batch.chunked_loss",
        BATCH.chunked_loss,
        {"hidden": torch.randn(1, T, 4), "weight": torch.randn(V, 4)},
        hidden=(tensors(1, T, 4), ""),
        weight=({**tensors(V, 4), "few words": torch.randn(3, 4)}, "one token more"),
        bias=(tensors(V), "None"),
        chunk=(SCALARS, "2**40 | 2**70 | 10**400 | int64"),
        num_items=COUNTS,
    ),
    Row("batch.reduce_loss", BATCH.reduce_loss, {"loss": torch.tensor(1.0)}, loss=(SCALARS, "tensor(2.) | zeros(3)")),
    Row("batch.unshard", BATCH.unshard, {"x": torch.randn(1, T, 3)}, x=(tensors(1, T, 3), ANY_DTYPE)),
    Row(
        "batch.to_rows",
        ROWS_BATCH.to_rows,
        {"x": torch.randn(T, 3)},
        x=(tensors(T, 3), ANY_DTYPE.replace("uint16 | ", "").replace("float8", "one dim more")),
        fill=(SCALARS, FILL),
    ),
    Row(
        "batch.to_rows of ints",
        ROWS_BATCH.to_rows,
        {"x": torch.ones(T, dtype=torch.int64)},
        fill=(SCALARS, "-1 | 0 | 2**40 | True | float64"),
    ),
    Row("parallelize", parallelized, {"model": nn.Linear(2, 2)}, model=NAMES, group=GROUPS),
    Row(
        "pool",
        pooled,
        {"model": Decoder()},
        model=NAMES,
        group=GROUPS,
        **dict.fromkeys(("head", "layout", "mask", "strategy", "method", "backend", "nonsense"), NAMES),
        wait=(SCALARS, "1.5 | float64 | int64"),
        stages=(SCALARS, "None | int64"),
    ),
    Row("restore", lw.restore, {}, model=({**SCALARS, "as it was": Decoder()}, "")),
    Row(
        "reduce_gradients",
        lw.reduce_gradients,
        {"model": nn.Linear(2, 2)},
        model=({**SCALARS, "meta": [torch.empty(2, device="meta", requires_grad=True)]}, "[]"),
        group=GROUPS,
    ),
    Row("loss_scale", lw.loss_scale, {"mesh": None}, mesh=GROUPS),
    Row(
        "reduce_sum",
        lw.reduce_sum,
        {"value": 1},
        value=(SCALARS, FILL.replace("True", "int64 | tensor(2) | tensor(2.)")),
        group=GROUPS,
    ),
    Row(
        "register",
        register,
        {"module_class": Decoder, "role": "layer"},
        module_class=({**SCALARS, "a module": Decoder()}, ""),
        role=(SCALARS, "type"),
    ),
    Row("unregister", unregister, {"module_class": Decoder}, module_class=NAMES),
    Row("unbatch", unbatch, {"x": torch.randn(1, T, 2), "pack": PACK}, x=(tensors(1, T, 2), ANY_DTYPE), pack=NAMES),
    Row("rebatch", rebatch, {"y": torch.randn(T, 2), "pack": PACK}, y=(tensors(T, 2), ANY_DTYPE), pack=NAMES),
    Row(
        "Ranks",
        Ranks,
        {"size": 1},
        size=(SCALARS, "int64"),
        threads=(SCALARS, "int64"),
        timeout=(SCALARS, "inf | 1.5 | float64 | int64"),
    ),
]


@ask_all(ROWS)
def test_bad_values_are_refused(question: Question) -> None:
    question.ask()
    unregister(Decoder)


def test_a_pool_of_ranks_takes_functions_that_can_be_sent() -> None:
    with Ranks(1) as pool:
        for bad in (None, 3, "x", lambda: 1):
            with pytest.raises(lw.InputError, match="give a function"):
                pool.run(bad)
        for size, timeout in ((0, None), (2, None), ("1", None), (1, -1), (1, "x"), (1, NAN)):
            with pytest.raises(lw.InputError):
                pool.run(abs, 1, size=size, timeout=timeout)


# -- what was wrong without an error --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool])
def test_weights_of_every_dtype_weigh(dtype: torch.dtype) -> None:
    weights = torch.tensor([1, 0, 1, 0, 1, 1, 0, 1]).to(dtype)
    logits = torch.randn(1, T, V)
    batch = lw.shard_batch(IDS, CU, labels=IDS, loss_weights=weights)
    each = nn.functional.cross_entropy(logits[0, :-1], IDS[1:], reduction="none")
    inside = torch.tensor([i + 1 not in CU for i in range(T - 1)])
    torch.testing.assert_close(batch.loss(logits), (each * weights[1:].float() * inside).sum() / batch.num_valid)


@pytest.mark.parametrize(("ignore_index", "label"), list(product((-100, -1, 3), (-100, -1, -7))))
def test_labels_that_nobody_can_predict_are_refused(ignore_index: int, label: int) -> None:
    labels = IDS.clone()
    labels[4] = label
    if label == ignore_index:
        assert lw.shard_batch(IDS, CU, labels=labels, ignore_index=ignore_index).num_valid == 5
        return
    with pytest.raises(lw.InputError, match=f"labels holds {label}.*ignore_index is {ignore_index}"):
        lw.shard_batch(IDS, CU, labels=labels, ignore_index=ignore_index)


def test_padding_may_hold_anything() -> None:
    """Positions that were counted by cumsum - 1 are -1 left of the tokens."""
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    batch = lw.shard_batch(ROW_IDS, attention_mask=mask, position_ids=mask.cumsum(1) - 1)
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]


def test_numpy_and_lists_are_as_good_as_tensors() -> None:
    one = lw.shard_batch(IDS, CU, labels=IDS)
    for ids in (IDS.tolist(), IDS.numpy(), IDS.numpy().astype(np.uint16)):
        assert lw.shard_batch(ids, np.array(CU), labels=ids).targets.tolist() == one.targets.tolist()
