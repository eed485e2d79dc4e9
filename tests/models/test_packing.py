"""What shard_batch makes of every form of input, without ranks."""

import numpy as np
import pytest
import torch

import longweave as lw
from longweave.models.packing import pack_tokens, shift, unshift

IDS = torch.arange(10, 20)
CU = [0, 4, 4, 5, 10]


def test_targets_move_forward_and_never_across_documents() -> None:
    packed = pack_tokens(IDS, CU)
    assert packed.targets.tolist() == [11, 12, 13, -100, -100, 16, 17, 18, 19, -100]
    assert packed.cu_seqlens.tolist() == CU
    labels = IDS.clone()
    labels[1] = -100
    assert pack_tokens(IDS[None], CU, labels=labels[None]).targets.tolist()[:4] == [-100, 12, 13, -100]
    assert pack_tokens(IDS, CU, shift_labels=labels).targets.tolist() == labels.tolist()
    weights = pack_tokens(IDS, CU, loss_weights=torch.arange(10.0)).weights
    assert weights is not None
    assert weights.tolist() == [1, 2, 3, 0, 0, 6, 7, 8, 9, 0]
    assert unshift(shift(IDS, packed.cu_seqlens, 0), packed.cu_seqlens).tolist() == [
        0,
        11,
        12,
        13,
        0,
        0,
        16,
        17,
        18,
        19,
    ]


def test_forms_of_documents() -> None:
    assert pack_tokens(IDS).cu_seqlens.tolist() == [0, 10]
    assert pack_tokens(IDS.tolist(), np.array(CU)).ids.tolist() == IDS.tolist()
    positions = torch.tensor([0, 1, 2, 3, 0, 0, 1, 2, 3, 4])
    packed = pack_tokens(IDS[None], position_ids=positions[None])
    assert packed.cu_seqlens.tolist() == [0, 4, 5, 10]
    assert packed.positions is not None
    assert packed.positions.tolist() == positions.tolist()
    late = pack_tokens(IDS, position_ids=positions + 7)
    assert late.cu_seqlens.tolist() == [0, 4, 5, 10]


def test_rows_lose_their_padding() -> None:
    ids = torch.arange(12).view(3, 4)
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    packed = pack_tokens(ids, attention_mask=mask, labels=ids * 10)
    assert packed.ids.tolist() == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 9]
    assert packed.targets.tolist() == [10, 20, -100, 70, -100, 90, 100, 110, -100]
    assert pack_tokens(ids).cu_seqlens.tolist() == [0, 4, 8, 12]
    batch = lw.shard_batch(ids, attention_mask=mask)
    rows = batch.to_rows(batch.pack.unshard(batch.input_ids), fill=-1)
    assert rows.tolist() == [[0, 1, 2, -1], [-1, -1, 6, 7], [8, 9, 10, 11]]
    single = pack_tokens(ids[:1], attention_mask=mask[:1])
    assert single.cu_seqlens.tolist() == [0, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": IDS[:9]}, r"labels has the shape \(9,\) for input_ids of \(10,\)"),
        ({"loss_weights": torch.ones(11)}, "loss_weights has the shape"),
        ({"shift_labels": IDS, "labels": IDS}, "not both"),
        ({"cu_seqlens": [0, 9]}, "cu_seqlens ends at 9 but input_ids has 10 tokens"),
        ({"cu_seqlens": [0, 6, 3, 10]}, "cu_seqlens"),
        ({"input_ids": IDS.float()}, "integer token ids"),
        ({"input_ids": IDS[:0]}, "not empty"),
        ({"input_ids": IDS.view(2, 5)[None]}, r"\(1, 2, 5\)"),
        ({"input_ids": IDS.view(2, 5), "cu_seqlens": [0, 10]}, "every row is a document"),
        ({"input_ids": IDS.view(2, 5), "labels": IDS}, "one entry per token"),
        ({"attention_mask": torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1, 1])}, "row 0 .* padding between"),
        ({"attention_mask": torch.zeros(10)}, "0 everywhere"),
        ({"attention_mask": torch.ones(9)}, "attention_mask has the shape"),
        ({"input_ids": "text"}, "input_ids is"),
        ({"layout": "best"}, "layout is 'best'"),
        ({"layout": lw.Layout.contiguous(9, 1)}, "the layout is for 9 tokens"),
        ({"strategy": "magic"}, "strategy is 'magic'"),
    ],
)
def test_refusals(arguments: dict, message: str) -> None:
    with pytest.raises(lw.InputError, match=message):
        lw.shard_batch(**{"input_ids": IDS, **arguments})


def test_the_fingerprint_sees_everything() -> None:
    base = {"input_ids": IDS, "cu_seqlens": CU, "labels": IDS}
    changes: list[dict] = [
        {},
        {"input_ids": IDS + 1},
        {"labels": IDS + 1},
        {"cu_seqlens": [0, 4, 5, 10]},
        {"loss_weights": torch.ones(10)},
        {"position_ids": torch.arange(10)},
    ]
    assert len({pack_tokens(**{**base, **change}).fingerprint() for change in changes}) == len(changes)
