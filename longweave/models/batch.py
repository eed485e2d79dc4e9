"""`lw.shard_batch`: from a full batch, the same on every rank, to this rank's part of it and a right loss.

ids or embeddings, labels, … ──▶ PackedTokens ──▶ one comparison of the ranks ──▶ Batch ─┬─ inputs of the model
documents, mask, layout, …   ──▶ Pack ──────────┘                                        └─ targets, loss
"""

from __future__ import annotations

import sys
import warnings
from math import inf
from typing import Any, cast

import torch
from torch import Tensor

from longweave.comm.agreement import Fact
from longweave.comm.exchange import Comm, Group, all_reduce_sum
from longweave.core import PackCore, agreed_core
from longweave.errors import InputError, did_you_mean, shown
from longweave.models.loss import GatherSame, check_output_layer, chunked_sum, nll, weighted_sum
from longweave.models.packing import PackedTokens, pack_tokens, unshift
from longweave.models.running import KEY, model_tokens, with_placeholder
from longweave.pack import Pack
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import check_int, check_number
from longweave.plan.schedule import OPTIONS
from longweave.tensors import FLOATS, check_device, check_fill, check_tensor, kind_of, why_unusual


class Batch:
    """This rank's part of a batch. Make it with `lw.shard_batch`.

    pack: documents, layout, mask and group, see `lw.Pack`: what `lw.attention` and its siblings take.
    inputs: keyword arguments for the model: input_ids or inputs_embeds and position_ids, (1, tokens, …),
        use_cache=False and the pack that the layers look for; where labels were given without weights also labels,
        shift_labels and num_items_in_batch, with which Hugging Face models compute the same loss as `loss` themselves.
    input_ids, position_ids: (tokens,) of this rank; inputs_embeds: (tokens, D). Those that were not given are None.
    targets: (tokens,) what each token should predict, `ignore_index` where nothing. weights: (tokens,) or None.
    num_valid: the number of targets that count, on all ranks together.

    A rank without tokens has a placeholder token in `inputs`; it counts nowhere.
    """

    def __init__(self, packed: PackedTokens, pack: Pack, ignore_index: int) -> None:
        if not isinstance(packed, PackedTokens) or not isinstance(pack, Pack):
            raise InputError("a Batch is made by lw.shard_batch(input_ids, cu_seqlens, group), not by itself")
        self.pack, self.ignore_index = pack, ignore_index
        valid = packed.targets[packed.targets != ignore_index]
        self.num_valid = len(valid)
        self._largest = int(valid.max()) if self.num_valid else -1  # of the targets of all ranks
        self.input_ids = None if packed.ids is None else pack.shard(packed.ids)
        self.inputs_embeds = None if packed.embeds is None else pack.shard(packed.embeds)
        self.targets = pack.shard(packed.targets)
        self.weights = None if packed.weights is None else pack.shard(packed.weights)
        given = packed.positions
        positions = pack.positions.clone().to(packed.targets.device)  # the batch's own: a model may change them
        self.position_ids = positions if given is None else pack.shard(given)
        self._moved_labels, self._rows = packed.moved_labels, packed.rows
        self._has_targets = packed.ids is not None or packed.has_labels
        self.inputs: dict[str, Any] = {
            "position_ids": with_placeholder(self.position_ids, pack)[None],
            "use_cache": False,
            KEY: pack,
        }
        if packed.ids is not None and self.input_ids is not None:
            self.inputs["input_ids"] = (self.input_ids if pack.tokens else packed.ids[:1])[None]
        if self.inputs_embeds is not None:
            self.inputs["inputs_embeds"] = with_placeholder(self.inputs_embeds, pack)[None]
        if packed.has_labels and packed.weights is None:
            targets = self._model_targets()[None]
            self.inputs |= {
                "labels": targets,
                "shift_labels": targets,
                "num_items_in_batch": max(self.num_valid, 1),
            }
            if ignore_index != -100:
                self.inputs["ignore_index"] = ignore_index

    # -- loss --------------------------------------------------------------------------------------

    def loss(self, logits: Tensor, num_items: float | None = None) -> Tensor:
        """This rank's part of the mean loss over the batch: the SUM over ranks is the mean, in at least float32.

        logits: (1, tokens, vocabulary) or (tokens, vocabulary), as the model returns them.
        num_items: what to divide by in the place of `num_valid`, such as the valid tokens of several accumulated
            batches, or of all data-parallel replicas (`lw.reduce_sum`).
        """
        flat = self._logits(logits)
        self._warn_if_unused()
        total = weighted_sum(flat, self._model_targets(), self._model_weights(), self.ignore_index)
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
        flat, targets = self._flat(hidden, "hidden"), self._model_targets()
        chunk = check_int("chunk", chunk, "give the number of tokens whose logits may exist at once, at least 1", 1)
        check_output_layer(flat, weight, bias)
        self._check_vocabulary(weight.shape[0], "weight")
        self._warn_if_unused()
        total = chunked_sum(flat, weight, bias, targets, self._model_weights(), self.ignore_index, chunk)
        return total / self._items(num_items)

    def reduce_loss(self, loss: Tensor) -> Tensor:
        """The SUM over ranks of a loss, to be logged: the loss of the whole batch on every rank, without gradient."""
        core = self.pack.core
        kind = ("reduce_loss of", kind_of(loss, per_token=False))
        with core.enter(kind, lambda: check_tensor("loss", loss, floating=True)).forward():
            return next(all_reduce_sum([loss], core.comm))

    # -- tokens ------------------------------------------------------------------------------------

    def logprobs(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        """log p of every token given those before it in its document: (total,), in token order, on every rank.

        Entry i belongs to token i (with `shift_labels`: to shift_labels[i]); it is 0 for the first token of a document
        and for ignored labels. Differentiable, for a loss that every rank computes alike from the result: each rank's
        parameter gradient is then the part of its own tokens, and the SUM over ranks the full gradient. So do not
        divide such a loss by the number of ranks, and do not sum it for logging.
        """
        core = self.pack.core

        def check() -> None:
            self._logits(logits)
            _check_positive("temperature", temperature)

        with core.enter(("logprobs of", getattr(logits, "dtype", None)), check).forward():
            local = self.local_logprobs(logits, temperature)
            full: Tensor = GatherSame.apply(local, core.shards)  # type: ignore[no-untyped-call]
        return unshift(full, core.cu_seqlens) if self._moved_labels else full

    def local_logprobs(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        """log p of this rank's `targets`: (tokens,), 0 where ignored. No communication."""
        temperature = _check_positive("temperature", temperature)
        flat = self._logits(logits)
        if temperature != 1.0:
            flat = flat / temperature
        return -nll(flat, self._model_targets(), self.ignore_index)[: self.pack.tokens]

    def unshard(self, x: Tensor) -> Tensor:
        """What a model returned, (1, tokens, …), from all ranks: (1, total, …) in token order, on every rank.

        The placeholder of a rank without tokens is removed. Backward adds up the gradients of all ranks, see
        `lw.unshard`. For tensors without the batch dimension there is `batch.pack.unshard(x, dim)`.
        """
        core, n = self.pack.core, model_tokens(self.pack)

        def check() -> None:
            check_tensor("x", x)
            if tuple(x.shape[:2]) != (1, n):
                raise InputError(
                    f"x has the shape {tuple(x.shape)}; give what the model returned for this batch, (1, {n}, …), or "
                    "call batch.pack.unshard(x, dim) for a tensor whose dimension dim has this rank's tokens"
                )

        shape = None if not isinstance(x, Tensor) or why_unusual(x) else (x.shape[:2] == (1, n), *x.shape[2:])
        with core.enter(("unshard of a model's", getattr(x, "dtype", None), shape), check).forward():
            return core.shards.unshard(x[:, : core.tokens], 1)

    def to_rows(self, x: Tensor, fill: float = 0) -> Tensor:
        """(total, …) or (1, total, …) → (batch, seq, …), for a batch that was given in rows; `fill` for padding."""
        rows, total = self._rows, self.pack.layout.total
        if rows is None:
            raise InputError("the batch was not given as (batch, seq) rows; its documents lie at batch.pack.cu_seqlens")
        check_tensor("x", x)
        if x.ndim > 1 and x.shape[:2] == (1, total):
            x = x[0]
        if x.shape[:1] != (total,):
            raise InputError(
                f"x has the shape {tuple(x.shape)}; give (total, …) with the {total} tokens: batch.unshard(x) makes it "
                "of what the model returned"
            )
        small = x.is_floating_point() and x.dtype not in FLOATS
        if small or x.dtype in (torch.uint16, torch.uint32, torch.uint64):
            raise InputError(f"x is {x.dtype}, which torch cannot index; cast it")
        out = x.new_full((rows.batch * rows.seq, *x.shape[1:]), check_fill(fill, x.dtype))
        return out.index_copy(0, rows.places.to(x.device), x).view(rows.batch, rows.seq, *x.shape[1:])

    # ----------------------------------------------------------------------------------------------

    def _warn_if_unused(self) -> None:
        """A model that is not parallel takes the inputs too, and its tokens then see only those of their own rank."""
        if self.pack.world_size > 1 and not self.pack.core.was_used:
            warnings.warn(
                "no operator across ranks was called on this batch: if the model mixes tokens, those of each rank saw "
                "only each other. Call lw.parallelize(model, group), or lw.attention and its siblings with batch.pack",
                stacklevel=3,
            )

    def _model_targets(self) -> Tensor:
        return with_placeholder(self.targets, self.pack, self.ignore_index)

    def _model_weights(self) -> Tensor | None:
        return None if self.weights is None else with_placeholder(self.weights, self.pack)

    def _items(self, given: float | None) -> float:
        if given is None:
            return max(self.num_valid, 1)
        return _check_positive("num_items", given)

    def _flat(self, x: Tensor, name: str) -> Tensor:
        if not self._has_targets:
            raise InputError(
                "the batch was made from inputs_embeds without labels, so no token counts; give "
                "lw.shard_batch(inputs_embeds=..., labels=labels)"
            )
        check_tensor(name, x, floating=True)
        check_device(name, x, "the batch", self.targets)
        n = model_tokens(self.pack)
        if x.ndim == 3 and x.shape[0] == 1:
            x = x[0]
        if x.ndim != 2 or x.shape[0] != n:
            raise InputError(
                f"{name} has the shape {tuple(x.shape)} but this rank has {n} tokens; "
                "give what the model returned for this batch's inputs"
            )
        return x

    def _logits(self, logits: Tensor) -> Tensor:
        flat = self._flat(logits, "logits")
        self._check_vocabulary(flat.shape[1], "logits")
        return flat

    def _check_vocabulary(self, size: int, name: str) -> None:
        """Alike on every rank, because it asks for the largest target of all."""
        if size <= self._largest:
            raise InputError(
                f"{name} has {size} entries of a vocabulary, but the labels go up to {self._largest}; give labels that "
                "belong to this model"
            )

    def __repr__(self) -> str:
        return f"<Batch of {self.pack.layout.total} tokens, {self.num_valid} valid; {self.pack!r}>"


def _check_positive(name: str, value: Any) -> float:
    """A number, or a tensor with one: then it stays a tensor."""
    remedy = "give a positive number"
    if not isinstance(value, Tensor):
        number = check_number(name, value, remedy, 0, sys.float_info.max)
        if number:
            return number
    elif why_unusual(value) is None and value.numel() == 1 and not value.is_complex() and 0 < value.item() < inf:
        return cast("float", value)
    raise InputError(f"{name} is {shown(value)}; {remedy}")


def shard_batch(
    input_ids: Any = None,
    cu_seqlens: object = None,
    group: Group = None,
    labels: Any = None,
    layout: str | Layout = "auto",
    strategy: str = "auto",
    *,
    mask: str | Mask = "causal",
    window: int | None = None,
    inputs_embeds: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    shift_labels: Any = None,
    loss_weights: Any = None,
    ignore_index: int = -100,
    method: str = "auto",
    backend: str = "auto",
    **options: int,
) -> Batch:
    """Divide a batch over the ranks of a group. Every rank gives the same full batch, which is checked each time.

    input_ids: (tokens,) or (1, tokens), packed; or (batch, seq), each row a document, its padding named by
        `attention_mask` (1 for tokens, 0 left or right of them).
    inputs_embeds: embeddings in their place, with one more dimension. Gradients flow back into the full tensor, each
        rank's part; the SUM over ranks is the full one. Of these only shape, dtype and whether they need a gradient are
        compared between ranks, not their bits. Without labels nothing is predicted.
    cu_seqlens: where documents begin and end. Without it, packed tokens have the documents of a `Mask`, else those of
        packed `position_ids`, which start anew with each document; else they are one document.
    mask, window: who sees whom in the model's softmax attention, see `lw.Pack`: "causal", "full" or a Mask. Positions
        follow the mask; linear layers refuse masks that cross documents.
    labels: one per token, not shifted, `ignore_index` for tokens that do not count; None: the tokens themselves. They
        are moved one place forward here, never across documents. `shift_labels` in their place are taken as they are.
    loss_weights: one per token, where the labels are: each token's loss is multiplied by its weight. The loss is still
        divided by the number of labels that count.
    position_ids: positions to use, where they are not simply counted from the start of each document.
    layout: "auto" (zigzag for one document, balanced for several), "zigzag", "contiguous", "balanced" or a Layout.
    strategy, backend, options such as `stages`: of every attention layer, see `lw.attention`; method: of linear layers,
        see `lw.gated_delta_rule`.

    Raises, on every rank and before anything else is sent, `InputError` for arguments that do not fit each other and
    `GroupError` for a batch that differs between ranks, or where another rank found an error.

        batch = lw.shard_batch(input_ids, cu_seqlens, mesh["cp"])
        loss = batch.loss(model(**batch.inputs).logits)
        loss.backward()
    """
    packed: PackedTokens | None = None

    def make(comm: Comm) -> tuple[PackCore, Fact]:
        nonlocal packed
        _check_names(options)
        packed = pack_tokens(
            input_ids,
            cu_seqlens,
            labels,
            shift_labels,
            loss_weights,
            attention_mask,
            position_ids,
            ignore_index,
            inputs_embeds,
            mask,
        )
        ways: dict[str, Any] = {"strategy": strategy, "method": method, "backend": backend, "options": options}
        core = PackCore(comm, packed.cu_seqlens, layout, mask=mask, window=window, **ways)
        return core, Fact(
            f"{packed.fingerprint()} {ignore_index}",
            "holds",
            "another batch than the rest",
            "give every rank of the group the same full batch (seed the loader by the data-parallel rank only)",
        )

    core = agreed_core(group, make)
    assert packed is not None
    return Batch(packed, Pack.around(core), ignore_index)


def _check_names(options: dict[str, int]) -> None:
    known = [name for names in OPTIONS.values() for name in names]
    arguments = [*shard_batch.__annotations__, *known]
    for name in options:
        if name not in known:
            hint = did_you_mean(name, arguments) or f"; options of attention are {', '.join(dict.fromkeys(known))}"
            raise InputError(f"shard_batch has no argument {name!r}{hint}")
