"""The batch of `families` as trainers have it: every rank has some of the documents, in rows of its own."""

from itertools import pairwise

import torch
from families import CU, VOCAB, Data, data
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

# Documents of each rank. Someone has the giant one, someone has none.
DEAL = {
    1: [[0, 1, 2, 3, 4, 5, 6]],
    2: [[4, 1, 3], [0, 2, 5, 6]],
    3: [[1, 3], [4], [0, 2, 5, 6]],
    4: [[4, 0], [], [1, 3, 2], [5, 6]],
    8: [[], [0], [4], [2, 6], [], [1], [3], [5]],
}
KINDS = ("right", "left", "packed", "padded pack", "borders", "numbers", "embeddings")


def documents(rank: int, world: int) -> list[int]:
    return DEAL[world][rank]


def places_of(rank: int, world: int) -> Tensor:
    """The tokens of a rank's documents in the whole batch, in the order of its rows."""
    spans = [torch.arange(CU[i], CU[i + 1]) for i in documents(rank, world)]
    return torch.cat([torch.zeros(0, dtype=torch.long), *spans])


def valid(full: Data) -> int:
    """The labels that count: no first token of a document does."""
    return sum(int((full.labels[start + 1 : stop] != -100).sum()) for start, stop in pairwise(CU))


def rows(kind: str, rank: int, world: int, model: nn.Module | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """The arguments of the model, labels included, and (batch, seq) where they hold tokens."""
    full = data()
    own = documents(rank, world)
    ids = [full.ids[CU[i] : CU[i + 1]] for i in own]
    labels = [full.labels[CU[i] : CU[i + 1]].clone() for i in own]
    for one in labels:
        one[0] = -100
    positions = [torch.arange(len(one)) for one in ids]
    if kind in ("packed", "borders", "numbers"):
        flat = {
            name: torch.cat([torch.zeros(0, dtype=torch.long), *some])[None]
            for name, some in (("input_ids", ids), ("labels", labels), ("position_ids", positions))
        }
        lengths = torch.tensor([len(one) for one in ids], dtype=torch.long)
        if kind == "borders":
            cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
            flat |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 50, "max_length_k": 50}
            del flat["position_ids"]
        elif kind == "numbers":
            flat["seq_idx"] = torch.repeat_interleave(torch.arange(len(ids)), lengths)[None]
            del flat["position_ids"]
        return flat, torch.ones_like(flat["input_ids"], dtype=torch.bool)
    if kind == "padded pack":  # two documents a row, padded to the right
        pairs = [slice(i, i + 2) for i in range(0, len(ids), 2)]
        ids, labels, positions = ([torch.cat(some[pair]) for pair in pairs] for some in (ids, labels, positions))
    if not ids:
        ids, labels, positions = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, dtype=torch.long)], []
    side = "left" if kind == "left" else "right"
    seq = max(len(one) for one in ids) + 2  # padding in every row

    def padded(some: list[Tensor], value: int) -> Tensor:
        whole = pad_sequence([*some, torch.zeros(seq, dtype=torch.long)], True, value, side)
        return whole[:-1]

    keep = padded([torch.ones_like(one) for one in ids], 0)
    found = {"input_ids": padded(ids, 0), "labels": padded(labels, -100), "attention_mask": keep}
    if kind == "padded pack" and positions:
        found["position_ids"] = padded(positions, 0)
    if kind == "embeddings":
        assert model is not None
        found["inputs_embeds"] = model.get_input_embeddings()(found.pop("input_ids"))
    assert int(found["labels"].max()) < VOCAB
    return found, keep.bool()
