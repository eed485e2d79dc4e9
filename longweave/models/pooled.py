"""The rows of all ranks as one pack, and the way there and home.

    rows ─ lengths ─▶ all ranks, through the store ─▶ documents ─▶ layout ─▶ pack
         ─ ids, positions, targets ─▶ one all-to-all-v ─▶ where the tokens are computed
    rows ◀─ hidden states, … ◀─ the reverse one ◀─ layers

Documents stand in the order of the ranks that brought them, so every rank knows where all of them are.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longweave.comm.agreement import MOST_FACTS, Fact, digests_of, raise_differences, same_history
from longweave.comm.exchange import Comm, group_named, resolve
from longweave.comm.ledger import RecordedCall
from longweave.comm.store_gather import store_all_gather
from longweave.core import PackCore, machine_of
from longweave.errors import InputError
from longweave.models.packing import check_tokens, given_tokens
from longweave.models.rows import HomeRows, read_rows
from longweave.models.running import model_tokens, unbatch, with_placeholder
from longweave.pack import Pack
from longweave.plan.document_work import DecoderWork
from longweave.plan.homing import faster_layout, home_layout
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints
from longweave.plan.routing import route
from longweave.tensors import check_tensor
from longweave.tokens import TokenRoute

_HINT = (
    "A call that only this rank makes under no_grad, to read on with a KV cache, needs use_cache=True as an argument: "
    "config.use_cache alone makes no cache in a pooled model, and the call waits for the others. "
)
_DIGESTS = 8 * (MOST_FACTS + 2)  # bytes of `digests_of`, in front of a message


@dataclass(frozen=True)
class Pooling:
    """How a decoder is pooled. It belongs to the decoder."""

    group: str | None  # its name; None is the default group
    head: str
    layout: str
    mask: str
    ways: dict[str, Any]  # strategy, method, backend, options of the pack
    wait: float
    work: DecoderWork


class Pooled:
    """One batch of all ranks: this rank's rows, the pack, and the tokens that this rank computes.

    ids (1, tokens) or embeds (1, tokens, D), positions (…, 1, tokens) and targets (1, tokens) are ready for the model,
    with a placeholder where the rank has no tokens.
    """

    def __init__(self, rows: HomeRows, pack: Pack, route: TokenRoute) -> None:
        self.rows, self.pack, self.route = rows, pack, route
        self.ids: Tensor | None = None
        self.embeds: Tensor | None = None
        self.positions: Tensor
        self.targets: Tensor | None = None
        self.call: Any = None  # of a pooled head that is running on it

    def bring(self, ids: Tensor | None, embeds: Tensor | None, targets: Tensor | None) -> None:
        """Bring the rows' tokens to where they are computed: everything that is ints in one message."""
        columns = [None if ids is None else self.rows.take(ids)[:, None], self.rows.positions]
        columns += [None if targets is None else self.rows.take(targets)[:, None]]
        there = self._there(torch.cat([x.long() for x in columns if x is not None], dim=1))
        if ids is not None:
            self.ids, there = there[None, :, 0], there[:, 1:]
        if targets is not None:
            at = there[: self.pack.tokens, -1]
            self.targets, there = with_placeholder(at, self.pack, -100)[None], there[:, :-1]
        # One plane of positions is (1, tokens), several are (planes, 1, tokens).
        planes = self.rows.planes
        self.positions = there.T.reshape(*planes, 1, model_tokens(self.pack))
        if embeds is not None:
            self.embeds = self._there(self.rows.take(embeds))[None]

    def home(self, y: Tensor) -> Tensor:
        """(1, tokens, …) of this rank's computation → (batch, seq, …) of its rows, with zeros at padding."""
        with RecordedCall(self.pack.core.comm.ledger, "hidden states from a pooled model").forward():
            return self.rows.put(self.route.back.walk(unbatch(y, self.pack)))

    def _there(self, x: Tensor) -> Tensor:
        return with_placeholder(self.route.walk(x), self.pack)


def gather_rows(
    pooling: Pooling,
    asked: Mapping[str, Any],
    read: Callable[[], Mapping[str, Any]],
    kind: str,
    weights_of: Callable[[Mapping[str, Any]], str],
    targets_of: Callable[[HomeRows, Mapping[str, Any]], Tensor | None],
) -> Pooled:
    """One pack of the documents of all ranks.

    asked: the arguments of the decoder; read: gives those that rows are read from, in the host's memory. kind, and what
    weights_of gives: what must be the same on every rank. targets_of: gives (batch, seq), what each token predicts,
    where that travels along. Whatever these raise on one rank, all ranks raise.
    """
    comm = resolve(group_named(pooling.group))
    _warn_if_forgotten(comm)
    rows: HomeRows | None = None
    targets: Tensor | None = None
    problem: Exception | None = None
    ids, embeds = asked.get("input_ids"), asked.get("inputs_embeds")
    weights = ""
    try:
        host = read()
        weights = weights_of(host)
        rows = _read(asked, host)
        targets = targets_of(rows, host)
    except Exception as error:
        problem = error
    try:
        lengths = _all_lengths(comm, pooling, rows, kind, weights, problem)
    finally:
        del problem  # an error that refers to this frame would keep everything in it alive
    assert rows is not None
    home = home_layout([int(some.sum()) for some in lengths])
    if not home.total:
        raise InputError("the rows of all ranks are padding only; a batch needs at least one token on some rank")
    core = _core(comm, pooling, np.concatenate([[0], np.cumsum(np.concatenate(lengths))]), home)
    there = TokenRoute(route(home, core.layout, comm.rank), comm)
    comm.ledger.packs += 1
    pooled = Pooled(rows, Pack.around(core), there)
    with RecordedCall(comm.ledger, "tokens for a pooled model").forward():
        pooled.bring(ids, embeds, targets)
    return pooled


def _warn_if_forgotten(comm: Comm) -> None:
    """A group of one rank; or a launcher started several processes, but nobody joined them."""
    processes = os.environ.get("WORLD_SIZE", "1")
    world = resolve(None).size
    if comm.size == 1 < world:
        warnings.warn(
            f"the group of the pooled model has one rank, of {world} in all: nothing is shared. Give lw.pool the "
            "group, or the dimension of a mesh, inside which documents are to be shared",
            stacklevel=5,
        )
    if comm.name is None and processes not in ("", "1"):
        warnings.warn(
            f"WORLD_SIZE is {processes}, but torch.distributed is not initialised: this process trains alone, with or "
            "without lw.pool. Call torch.distributed.init_process_group, or let the trainer do it (on CPUs "
            "transformers' trainers need use_cpu=True)",
            stacklevel=5,
        )


def warn_of_rows_alone(pooling: Pooling) -> None:
    """A call that trains runs on this rank only."""
    if resolve(group_named(pooling.group)).size > 1:
        warnings.warn(
            "a call of the pooled model with past_key_values (such as PEFT's prefix tuning) runs alone on its rank, "
            "though gradients are recorded: its rows are not shared, and nothing is gained by lw.pool",
            stacklevel=4,
        )


def _read(asked: Mapping[str, Any], host: Mapping[str, Any]) -> HomeRows:
    tokens, name = given_tokens(asked.get("input_ids"), asked.get("inputs_embeds"))
    check_tensor(name, tokens)
    check_tokens(tokens, name)
    return read_rows(tokens.shape if name == "input_ids" else tokens.shape[:-1], tokens.device, asked, host)


def _all_lengths(
    comm: Comm, pooling: Pooling, rows: HomeRows | None, kind: str, weights: str, problem: Exception | None
) -> list[Ints]:
    """The lengths of the documents of every rank, once all ranks have said that they make the same call."""
    options = {"layout": pooling.layout, "mask": pooling.mask, **pooling.ways}
    call = f"{kind}; pooled with {', '.join(f'{name} {value}' for name, value in options.items() if value)}"
    costs = f"{pooling.work} {machine_of(comm)}"  # they decide the layout
    same_call = Fact(
        f"{call} {costs}",
        "makes",
        "another call of the pooled model than the rest",
        f"every rank must call it alike, in the same mode and with the same options; this rank's call is: {call}",
    )
    same_weights = Fact(
        weights,
        "holds",
        "other weights (values, dtypes, or which of them are frozen) than the rest",
        "all ranks must begin with the same weights and take the same steps: wrap the model in DDP or FSDP2, which "
        "average gradients (transformers' trainers do, on CPUs with use_cpu=True)",
    )
    facts = [same_history(comm.ledger), same_call, same_weights]
    own = np.array(digests_of(facts, problem), dtype=np.int64).tobytes()
    own += rows.lengths.tobytes() if problem is None and rows is not None else f"{problem}".encode()
    found = store_all_gather(comm, own, pooling.wait, "the forward of a pooled model", _HINT)
    everyone = [np.frombuffer(message[:_DIGESTS], dtype=np.int64).tolist() for message in found]
    reasons = [
        f"{message[_DIGESTS:].decode()}" if row[-1] else "" for row, message in zip(everyone, found, strict=True)
    ]
    raise_differences(comm, everyone, facts, problem, reasons)
    return [np.frombuffer(message[_DIGESTS:], dtype=np.int64) for message in found]


def _core(comm: Comm, pooling: Pooling, cu_seqlens: Ints, home: Layout) -> PackCore:
    mask = Mask.causal(cu_seqlens) if pooling.mask == "causal" else Mask.full(cu_seqlens)
    layout: str | Layout = pooling.layout
    ways = pooling.ways
    if layout in ("auto", "home"):
        layout = home if layout == "home" else faster_layout(mask, home, pooling.work, machine_of(comm))
        if ways["strategy"] == "auto":
            # Tokens and pairs are balanced together, so pairs stay with their queries; others would balance them apart.
            ways = {**ways, "strategy": "groupcast"}
    return PackCore(comm, cu_seqlens, layout, mask=mask, **ways)
