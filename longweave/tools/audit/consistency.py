"""Before anything is computed: do the ranks hold the same batch and weights, is the step repeatable, is every token
there?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from longweave.comm.exchange import is_sharded
from longweave.errors import named
from longweave.tools.audit.probes import only_labels
from longweave.tools.audit.report import AuditFinding, faulty, right, skipped
from longweave.tools.audit.steps import IGNORE, Inputs, plain_name
from longweave.tools.audit.trial import Trial, differences, largest, listed, magnitude, row_errors


def same_batch(trial: Trial) -> Iterator[AuditFinding]:
    """Every rank was given the same full batch."""
    digests = trial.everyone({name: _digest(value) for name, value in sorted(trial.inputs.items())})
    differing = _differing(digests)
    if not differing:
        yield right("batch", f"the same on {len(digests)} ranks")
        return
    yield faulty(
        "batch",
        "batch",
        f"{listed([*differing])} differ between ranks",
        _odd_ranks(differing),
        "the loader or sampler is seeded by the global rank; ranks that share a sequence must read the same batch: "
        "seed by the data-parallel rank only. The audit goes on with rank 0's batch",
    )


def same_weights(trial: Trial) -> Iterator[AuditFinding]:
    """Parameters and buffers are equal bit by bit."""
    model = trial.step.model
    if model is None:
        yield skipped("weights", "no model was given: lw.audit(…, model=model)")
        return
    digests = trial.everyone(_weights(model))
    differing = _differing(digests)
    if not differing:
        yield right("weights", f"{len(digests[0])} parameters and buffers are the same on {len(digests)} ranks")
        return
    yield faulty(
        "weights",
        "weights",
        f"{len(differing)} of {len(digests[0])} parameters and buffers differ between ranks",
        f"{listed([*differing])}; {_odd_ranks(differing)}",
        "each rank initialised, loaded or updated the model by itself: seed all alike before it is made, load the same "
        "checkpoint, broadcast the weights (DDP does), and reduce gradients before every update",
    )


def _weights(model: nn.Module) -> dict[str, str]:
    """By name; not of what is sharded, which has no copies that could differ."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {plain_name(name): _digest(x) for name, x in tensors if not is_sharded(x)}


def _digest(value: Any) -> str:
    """Of all its bytes: `repr` leaves out the middle of an array."""
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
        value = data.dtype, tuple(data.shape), _digest(raw)
    elif isinstance(value, np.ndarray):
        value = value.dtype, value.shape, _digest(value.tolist() if value.dtype.hasobject else value.tobytes())
    elif isinstance(value, Mapping):
        value = [(repr(key), _digest(entry)) for key, entry in value.items()]
    elif isinstance(value, list | tuple):
        value = type(value), [_digest(entry) for entry in value]
    raw = value if isinstance(value, bytes) else repr(value).encode()
    return blake2b(raw, digest_size=16).hexdigest()


def _differing(by_rank: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Names whose digests are not all the same, with those of every rank."""
    names = dict.fromkeys(name for theirs in by_rank for name in theirs)
    columns = {name: [theirs.get(name, "") for theirs in by_rank] for name in names}
    return {name: column for name, column in columns.items() if len(set(column)) > 1}


def _odd_ranks(differing: Mapping[str, Sequence[str]]) -> str:
    """Who differs from most others; with two ranks nobody can tell."""
    odd: set[int] = set()
    for column in differing.values():
        common, votes = Counter(column).most_common(1)[0]
        if votes * 2 <= len(column):
            return "no two thirds of the ranks agree" if len(column) > 2 else "the two ranks differ from each other"
        odd |= {rank for rank, digest in enumerate(column) if digest != common}
    return f"{named(sorted(odd))} differ{'s' if len(odd) == 1 else ''} from the rest"


def rank_0s(trial: Trial) -> Inputs:
    """The batch of rank 0, where this rank keeps its own."""
    given = trial.everyone(on_cpu(trial.inputs) if trial.comm.rank == 0 else None)[0]
    return trial.inputs if given is None else as_mine(given, trial.inputs)


def on_cpu(inputs: Inputs) -> Inputs:
    """A tensor on a GPU would arrive on the sender's GPU, by its number, on every rank."""
    copied: Inputs = tree_map_only(Tensor, lambda x: x.detach().cpu(), inputs)
    return copied


def as_mine(given: Inputs, mine: Inputs) -> Inputs:
    """Every tensor on the device of this rank's own of that name, or else on that of its tokens."""

    def placed(name: str, value: Any) -> Any:
        own = mine.get(name)
        device = own.device if isinstance(own, Tensor) else mine["input_ids"].device
        return tree_map_only(Tensor, lambda x: x.to(device), value)

    return {name: placed(name, value) for name, value in given.items()}


# -- the same twice ------------------------------------------------------------------------------------


def repeatable(trial: Trial) -> Iterator[AuditFinding]:
    """Two runs on the same batch give the same loss, outputs and gradients."""
    first, again = trial.base, trial.run(trial.inputs)
    errors = {"loss": trial.off(again.loss, first.loss)}
    here, then = first.here, again.here
    if trial.has_outputs and here.outputs is not None and then.outputs is not None and here.tokens is not None:
        same_tokens = then.tokens is not None and torch.equal(here.tokens, then.tokens)
        rows = torch.arange(len(here.outputs))
        errors["outputs"] = largest(row_errors(then.outputs, here.outputs, rows)) if same_tokens else np.inf
    grads, grads_again = here.gradients or {}, then.gradients or {}
    errors |= {name: _apart(g, grads_again.get(name)) for name, g in grads.items()}
    # Of all ranks: an expert may have a gradient on one of them only.
    name, error = max((entry for theirs in trial.everyone(errors) for entry in theirs.items()), key=lambda e: e[1])
    # Sums in another order round in another way; dropout and samplers are far beyond.
    if error <= 10 * trial.limit:
        yield right("same twice", "two runs agree" + ("" if error else ", bit by bit"))
        return
    yield faulty(
        "same twice",
        "randomness",
        f"two runs on the same batch differ by {error:.1e}",
        name,
        "dropout is active, gradients of an earlier step are still there, or the step changes weights or data as it "
        "runs: audit with dropout 0 (model.eval() before, or config.attention_dropout = 0), from zero gradients, "
        "without the optimizer's update",
    )


def _apart(g: Tensor | None, g_again: Tensor | None) -> float:
    """How far two gradients of one parameter are from each other."""
    if g is None or g_again is None or g.shape != g_again.shape:
        return 0.0 if g is g_again else np.inf
    return largest(differences(g_again, g)) / max(magnitude(g), 1e-12)


# -- labels --------------------------------------------------------------------------------------------


def labels_are_used(trial: Trial) -> Iterator[AuditFinding]:
    """Other labels give another loss. Nothing is said where they do."""
    labels = trial.inputs["labels"]
    counting = np.flatnonzero(labels.cpu().numpy() != IGNORE)
    keep = np.zeros(len(labels), dtype=bool)
    keep[counting[: len(counting) // 2]] = True
    if trial.run(only_labels(trial.inputs, keep)).loss == trial.base.loss:
        yield faulty(
            "labels used",
            "labels not used",
            "the loss is the same, bit by bit, without half of the labels",
            'batch["labels"]',
            'the step makes labels of its own: give it those of the batch, lw.shard_batch(…, labels=batch["labels"]); '
            "the audit changes tokens and labels apart from each other",
        )


# -- every token ---------------------------------------------------------------------------------------


def every_token(trial: Trial) -> Iterator[AuditFinding]:
    """Each token of the batch is computed on one rank."""
    shards = trial.shards
    if shards is None:
        yield skipped("tokens", "the step does not return which tokens each rank computes")
        return
    total = trial.cu[-1]
    if any(len(tokens) and (tokens.min() < 0 or tokens.max() >= total) for tokens in shards):
        yield faulty(
            "tokens", "tokens", f"tokens outside 0 … {total - 1} are named", "the step's `tokens`", "they are local"
            " indices, or those of a padded batch: give those of the batch that the step was given",
        )  # fmt: skip
        return
    held = np.bincount(np.concatenate(shards), minlength=total)
    missing = np.flatnonzero(held == 0)
    several = int((held > 1).sum())
    if not len(missing):
        note = f"; {several} are computed on several ranks" if several else ""
        yield right("tokens", f"all {total} are computed, {listed([len(x) for x in shards], 8)} on the ranks{note}")
        return
    yield faulty(
        "tokens",
        "tokens",
        f"{len(missing)} of {total} tokens are computed nowhere",
        f"tokens {listed(missing.tolist())}",
        "the sequence was cut to a multiple of the number of ranks (or of 2 × that): pad it and give the padding the "
        "label −100, or use a layout that takes any length",
    )
