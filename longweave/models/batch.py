"""`lw.shard_batch`: from a full batch, the same on every rank, to this rank's part of it and a right loss."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor

from longweave.comm.agree import agree
from longweave.comm.groups import Comm, Group, resolve
from longweave.comm.reduce import all_reduce_sum
from longweave.errors import InputError
from longweave.models.loss import GatherSame, chunked_sum, nll, weighted_sum
from longweave.models.pack import Pack, make_pack, unshift
from longweave.models.step import KEY, Step
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints
from longweave.plan.schedule import STRATEGIES, Plan
from longweave.tokens import shard, unshard

LAYOUTS = ("auto", "zigzag", "contiguous", "balanced")


class Batch:
    """This rank's part of a batch. Make it with `lw.shard_batch`.

    inputs: keyword arguments for the model: input_ids and position_ids (1, tokens), use_cache=False and the step that
        the layers look for; where labels were given without weights also labels, shift_labels and num_items_in_batch,
        with which Hugging Face models compute the same loss as `loss` themselves.
    input_ids, position_ids: (tokens,) of this rank.
    targets: (tokens,) what each token should predict, `ignore_index` where nothing. weights: (tokens,) or None.
    num_valid: the number of targets that count, on all ranks together.
    layout, cu_seqlens, group, plan: what `lw.attention` and its siblings take.

    A rank without tokens has a placeholder token in `inputs`; it counts nowhere.
    """

    def __init__(self, pack: Pack, step: Step, labels_given: bool, ignore_index: int) -> None:
        self._pack, self.step, self.ignore_index = pack, step, ignore_index
        self.group, self.layout, self.cu_seqlens = step.group, step.layout, step.cu_seqlens
        self.num_valid = int((pack.targets != ignore_index).sum())
        self.input_ids = self.shard(pack.ids)
        self.targets = self.shard(pack.targets)
        self.weights = None if pack.weights is None else self.shard(pack.weights)
        if pack.positions is None:
            positions = torch.from_numpy(step.layout.positions(step.rank, step.cu_seqlens))
            self.position_ids = positions.to(pack.ids.device)
        else:
            self.position_ids = self.shard(pack.positions)
        self.inputs: dict[str, Any] = {
            "input_ids": (self.input_ids if step.tokens else pack.ids[:1])[None],
            "position_ids": self._placed(self.position_ids, 0)[None],
            "use_cache": False,
            KEY: step,
        }
        if labels_given and pack.weights is None:
            targets = self._placed(self.targets, ignore_index)[None]
            self.inputs |= {
                "labels": targets,
                "shift_labels": targets,
                "num_items_in_batch": max(self.num_valid, 1),
            }
            if ignore_index != -100:
                self.inputs["ignore_index"] = ignore_index

    @property
    def plan(self) -> Plan:
        """The plan for causal attention, for models that call `lw.attention` themselves."""
        return self.step.plan()

    # -- loss --------------------------------------------------------------------------------------

    def loss(self, logits: Tensor, num_items: float | None = None) -> Tensor:
        """This rank's part of the mean loss over the batch: the SUM over ranks is the mean, in at least float32.

        logits: (1, tokens, vocabulary) or (tokens, vocabulary), as the model returns them.
        num_items: what to divide by in the place of `num_valid`, such as the valid tokens of several accumulated
            batches, or of all data-parallel replicas (`lw.reduce_sum`).
        """
        flat = self._flat(logits, "logits")
        total = weighted_sum(flat, self._placed(self.targets, self.ignore_index), self._weights(), self.ignore_index)
        return total / self._items(num_items)

    def chunked_loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        chunk: int = 1024,
        num_items: float | None = None,
    ) -> Tensor:
        """As `loss`, from hidden states and the output layer's weight; logits exist for `chunk` tokens at a time.

        hidden: (1, tokens, features) or (tokens, features); weight: (vocabulary, features).

            hidden = model.model(**batch.inputs).last_hidden_state
            loss = batch.chunked_loss(hidden, model.lm_head.weight)
        """
        flat, targets = self._flat(hidden, "hidden"), self._placed(self.targets, self.ignore_index)
        total = chunked_sum(flat, weight, bias, targets, self._weights(), self.ignore_index, chunk)
        return total / self._items(num_items)

    def reduce_loss(self, loss: Tensor) -> Tensor:
        """The SUM over ranks of a loss, to be logged: the loss of the whole batch on every rank, without gradient."""
        return all_reduce_sum([loss], resolve(self.group))[0]

    # -- tokens ------------------------------------------------------------------------------------

    def logprobs(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        """log p of every token given those before it in its document: (total,), in token order, on every rank.

        Entry i belongs to token i (with `shift_labels`: to shift_labels[i]); it is 0 for the first token of a document
        and for ignored labels. Differentiable, for a loss that every rank computes alike from the result: each rank's
        parameter gradient is then the part of its own tokens, and the SUM over ranks the full gradient. So do not
        divide such a loss by the number of ranks, and do not sum it for logging.
        """
        if not temperature > 0:
            raise InputError(f"temperature is {temperature}; give a positive number")
        local = self.local_logprobs(logits, temperature)
        full: Tensor = GatherSame.apply(local, self.layout, self.group)  # type: ignore[no-untyped-call]
        return unshift(full, self.cu_seqlens) if self._pack.shifted_by_us else full

    def local_logprobs(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        """log p of this rank's `targets`: (tokens,), 0 where ignored. No communication."""
        flat = self._flat(logits, "logits")
        if temperature != 1.0:
            flat = flat / temperature
        return -nll(flat, self._placed(self.targets, self.ignore_index), self.ignore_index)[: self.step.tokens]

    def shard(self, x: Tensor) -> Tensor:
        """This rank's entries of a (total, …) tensor that every rank has, such as advantages."""
        return shard(x, self.layout, self.group)

    def unshard(self, x: Tensor, dim: int | None = None) -> Tensor:
        """The tokens of all ranks, in token order, on every rank.

        (1, tokens, …), as a model returns it, becomes (1, total, …), and (tokens, …) becomes (total, …). `dim` says
        where the tokens are; None: in the one of these that fits.

        Backward adds up the gradients of all ranks, see `lw.unshard`.
        """
        n = max(self.step.tokens, 1)
        if dim is None:
            dim = 1 if x.ndim > 1 and x.shape[0] == 1 and x.shape[1] == n else 0
        if self.step.tokens == 0 and x.shape[dim] == 1:
            x = x.narrow(dim, 0, 0)
        return unshard(x, self.layout, self.group, dim)

    def to_rows(self, x: Tensor, fill: float = 0) -> Tensor:
        """(total, …) → (batch, seq, …), for a batch that was given in rows; `fill` where there was padding."""
        if self._pack.rows is None:
            raise InputError("the batch was not given as (batch, seq) rows; its documents lie at batch.cu_seqlens")
        batch, seq, places = self._pack.rows
        if x.ndim > 1 and x.shape[:2] == (1, self.layout.total):
            x = x[0]
        if x.shape[0] != self.layout.total:
            raise InputError(f"x has the shape {tuple(x.shape)}; give (total, …) with the {self.layout.total} tokens")
        out = x.new_full((batch * seq, *x.shape[1:]), fill)
        return out.index_copy(0, places.to(x.device), x).view(batch, seq, *x.shape[1:])

    # ----------------------------------------------------------------------------------------------

    def _placed(self, x: Tensor, value: int) -> Tensor:
        """With the placeholder of a rank that has no tokens."""
        return x if self.step.tokens else F.pad(x, (0, 1), value=value)

    def _weights(self) -> Tensor | None:
        return None if self.weights is None else self._placed(self.weights, 0)

    def _items(self, given: float | None) -> float:
        if given is not None and not given > 0:
            raise InputError(f"num_items is {given}; give the positive number of tokens to divide by")
        return max(self.num_valid, 1) if given is None else given

    def _flat(self, x: Tensor, name: str) -> Tensor:
        n = max(self.step.tokens, 1)
        if x.ndim == 3 and x.shape[0] == 1:
            x = x[0]
        if x.ndim != 2 or x.shape[0] != n:
            raise InputError(
                f"{name} has the shape {tuple(x.shape)} but this rank has {n} tokens; "
                "give what the model returned for this batch's inputs"
            )
        return x

    def __repr__(self) -> str:
        return f"<Batch of {self.layout.total} tokens, {self.num_valid} valid; {self.step!r}>"


def shard_batch(
    input_ids: Any,
    cu_seqlens: object = None,
    group: Group = None,
    labels: Any = None,
    layout: str | Layout = "auto",
    strategy: str = "auto",
    *,
    attention_mask: Any = None,
    position_ids: Any = None,
    shift_labels: Any = None,
    loss_weights: Any = None,
    ignore_index: int = -100,
    method: str = "auto",
    **attention_options: Any,
) -> Batch:
    """Divide a batch over the ranks of a group. Every rank gives the same full batch, which is checked each time.

    input_ids: (tokens,) or (1, tokens), packed; or (batch, seq), each row a document, its padding named by
        `attention_mask` (1 for tokens, 0 left or right of them).
    cu_seqlens: where documents begin and end. Or give packed `position_ids`, which start anew with each document; with
        neither, a single row is one document.
    labels: one per token, not shifted, `ignore_index` for tokens that do not count; None: the tokens themselves. They
        are moved one place forward here, never across documents. `shift_labels` in their place are taken as they are.
    loss_weights: one per token, where the labels are: each token's loss is multiplied by its weight. The loss is still
        divided by the number of labels that count.
    position_ids: positions to use, where they are not simply counted from the start of each document.
    layout: "auto" (zigzag for one document, balanced for several), "zigzag", "contiguous", "balanced" or a Layout.
    strategy: how K/V travels, see `lw.make_plan`; method: how linear layers do, see `lw.gated_delta_rule`.
    attention_options: for every `lw.attention` call, such as `backend` or `heads_k_stride`.

    Raises, on every rank and before anything else is sent, `InputError` for arguments that do not fit each other and
    `GroupError` for a batch that differs between ranks, or where another rank found an error.

        batch = lw.shard_batch(input_ids, cu_seqlens, mesh["cp"])
        loss = batch.loss(model(**batch.inputs).logits)
        loss.backward()
    """
    comm = resolve(group)
    pack: Pack | None = None
    table: Layout | None = None
    said, problem = "", None
    try:
        pack = make_pack(
            input_ids, cu_seqlens, labels, shift_labels, loss_weights, attention_mask, position_ids, ignore_index
        )
        if strategy not in (*STRATEGIES, "auto"):
            raise InputError(f"strategy is {strategy!r}; choose one of auto, {', '.join(STRATEGIES)}")
        table = make_layout(layout, pack.cu_seqlens, comm.size)
        said = f"{pack.fingerprint()} {table.fingerprint}"
    except InputError as error:
        problem = error
    given = [labels is not None or shift_labels is not None, loss_weights is not None]
    call = f"shard_batch with {strategy=} {method=} {ignore_index=} labels and weights {given} {attention_options}"
    _agree(comm, said, call, problem)
    assert pack is not None
    assert table is not None
    step = Step(pack.cu_seqlens, table, group, strategy, method, attention_options)
    return Batch(pack, step, given[0], ignore_index)


def make_layout(layout: str | Layout, cu_seqlens: Ints, world_size: int) -> Layout:
    """A layout by name for these documents, or the given one if it fits."""
    total = int(cu_seqlens[-1])
    if isinstance(layout, Layout):
        if (layout.total, layout.world_size) != (total, world_size):
            raise InputError(
                f"the layout is for {layout.total} tokens on {layout.world_size} ranks but the batch has {total} "
                f"tokens on {world_size}; make it from this batch's cu_seqlens and the size of the group"
            )
        return layout
    if layout not in LAYOUTS:
        raise InputError(f"layout is {layout!r}; choose one of {', '.join(LAYOUTS)}, or give a Layout")
    if layout == "auto":
        documents = int((cu_seqlens[1:] > cu_seqlens[:-1]).sum())
        layout = "zigzag" if documents == 1 else "balanced"
    if layout == "zigzag":
        return Layout.zigzag(cu_seqlens, world_size)
    if layout == "contiguous":
        return Layout.contiguous(total, world_size)
    return Layout.balanced(Mask.causal(cu_seqlens), world_size)


class _Said:
    """A fingerprint that was never agreed on: every batch is compared."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.agreed_on: WeakSet[Any] = WeakSet()


def _agree(comm: Comm, said: str, call: str, problem: InputError | None) -> None:
    agree(
        comm,
        [_Said(said)],
        call,
        problem,
        what="hold another batch than the rest",
        remedy="give every rank of the group the same full batch (seed the loader by the data-parallel rank only)",
    )
