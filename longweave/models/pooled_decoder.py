"""The decoder of a pooled model: what its forward does in a call, and when it runs alone.

generate, a KV cache          alone on this rank, with the attention that the model had before
rows                          meet the other ranks, run the layers on the pack of all, bring the results home
rows that met in the head     (`longweave.models.pooled_head`) run the layers, leave hidden states where they are
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from longweave.errors import InputError
from longweave.models.adapters import NAME, NO_DROPOUT
from longweave.models.changes import bind_checkpoints
from longweave.models.decoder_work import work_of_call
from longweave.models.packing import is_integer
from longweave.models.pooled import Pooled, Pooling, gather_rows, warn_of_rows_alone
from longweave.models.rows import ROW_ARGUMENTS, HomeRows
from longweave.models.running import KEY, Alone, current, running
from longweave.models.weights import sample
from longweave.tensors import eager, on_host, why_unusual

SAMPLES = 8  # weights that are compared between ranks in every call

POOLING, ALONE = "_longweave_pooling", "_longweave_alone"  # attributes of modules

# Arguments of a decoder that say where its documents are, or that a pooled one answers for.
_READ = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "cu_seq_lens_q", "seq_idx", KEY}
_READ |= {"cu_seq_lens_k", "max_length_q", "max_length_k", "cache_position", "past_key_values", "use_cache"}
_READ |= {"return_dict", "labels", "shift_labels"}


@dataclass(frozen=True)
class HiddenStates:
    """In the place of a call's tokens: what the decoder is to return at once. So a head runs on given hidden states."""

    output: Any


def decoder_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward in the place of `original`, which is the unbound forward of a decoder's class."""

    @wraps(original)
    @eager
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        asked = arguments(original, args, kwargs)
        bind_checkpoints(self)
        if runs_alone(asked):
            if torch.is_grad_enabled() and not isinstance(current(), Alone):
                warn_of_rows_alone(vars(self)[POOLING])
            with running(vars(self)[ALONE]):
                return original(self, *args, **kwargs)
        given = asked.get(KEY)
        if isinstance(given, HiddenStates):
            return given.output
        if given is None:
            _warn_of_head(vars(self)[POOLING])
            given = gather(self, asked)
        pooled = _from_head(given, asked)
        out = _run(original, self, pooled, asked)
        _bring_home(out, pooled, stays=("last_hidden_state",) if pooled.targets is not None else ())
        return out if _wants_dict(self, asked) else out.to_tuple()

    return forward


def generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `generate` in the place of the model's own: on this rank, without talking."""

    @wraps(original)
    def alone(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with running(vars(self)[ALONE]):
            return original(self, *args, **kwargs)

    return alone


def arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without the module itself."""
    named = [p.name for p in signature(function).parameters.values() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    return {**dict(zip(named[1:], args, strict=False)), **kwargs}


def runs_alone(asked: Mapping[str, Any]) -> bool:
    """Does the call concern this rank only? Where gradients are recorded, `use_cache` is only a config's default."""
    wants_cache = bool(asked.get("use_cache")) and not torch.is_grad_enabled()
    return isinstance(current(), Alone) or wants_cache or asked.get("past_key_values") is not None


def gather(
    decoder: nn.Module,
    asked: Mapping[str, Any],
    head: str = "home",
    targets_of: Callable[[HomeRows, Mapping[str, Any]], Any] | None = None,
) -> Pooled:
    """The rows of all ranks as one pack; see `gather_rows`."""

    pooling: Pooling = vars(decoder)[POOLING]
    pooling = replace(pooling, work=work_of_call(decoder, pooling.work, with_head=head == "pooled"))

    def read() -> dict[str, Any]:
        return on_host(_to_read(decoder, asked))

    def targets(rows: HomeRows, host: Mapping[str, Any]) -> Tensor | None:
        _check_call(decoder, asked, rows, host)
        return None if targets_of is None else targets_of(rows, host)

    return gather_rows(pooling, asked, read, _kind(decoder, asked, head), partial(_weights, decoder), targets)


def _to_read(decoder: nn.Module, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Whatever of a call, and of the weights, decisions of the host need."""
    name = "labels" if asked.get("shift_labels") is None else "shift_labels"
    found = {argument: asked.get(argument) for argument in ROW_ARGUMENTS}
    found["ids"] = _range(asked.get("input_ids"))
    found["labels"] = _range(asked.get(name), ignore_index(asked))
    found["weights"] = sample(decoder, SAMPLES, 1)
    return found


def ignore_index(asked: Mapping[str, Any]) -> int:
    return int(asked.get("ignore_index", -100))


def _range(x: Any, ignored: int | None = None) -> Tensor | None:
    """(2,): the smallest and the largest integer, with 0 in the place of ignored ones."""
    if not isinstance(x, Tensor) or why_unusual(x) is not None or not x.numel() or not is_integer(x):
        return None
    return torch.stack((x if ignored is None else x.masked_fill(x == ignored, 0)).aminmax())


def _kind(decoder: nn.Module, asked: Mapping[str, Any], head: str) -> str:
    """What must be the same on every rank: else some would wait for messages that others never send."""
    embeds = asked.get("inputs_embeds")
    tokens = f"embeddings {embeds.dtype} {tuple(embeds.shape[2:])}" if isinstance(embeds, Tensor) else "ids"
    device = next((p.device.type for p in decoder.parameters()), "cpu")
    modes = {
        "gradients": torch.is_grad_enabled(),
        "training": decoder.training,
        "trainable parameters": sum(p.requires_grad for p in decoder.parameters()),
        "gradient of the embeddings": isinstance(embeds, Tensor) and embeds.requires_grad,
        "checkpointing": getattr(decoder, "gradient_checkpointing", False),
        "autocast": torch.is_autocast_enabled(device) and str(torch.get_autocast_dtype(device)),
        "head": head,
        "planes of position_ids": _planes(asked.get("position_ids")),
    }
    options = {name: value for name, value in sorted(asked.items()) if isinstance(value, bool | str)}
    shown = ", ".join(f"{name} {value}" for name, value in {**modes, **options}.items())
    config = getattr(decoder, "config", None)
    layers, width = (getattr(config, name, "?") for name in ("num_hidden_layers", "hidden_size"))
    return f"{type(decoder).__name__} of {layers} layers of {width}, on {tokens}, with {shown}"


def _weights(decoder: nn.Module, host: Mapping[str, Any]) -> str:
    """What tells other weights: a few values, and of all of them dtype and whether they are trained.

    The tokens of a rank are computed with the weights of all ranks.
    """
    kinds = "".join(f"{p.dtype} {p.requires_grad}," for p in decoder.parameters())
    values = host["weights"]
    return f"{kinds} {[] if values is None else values.tolist()}"


def _planes(position_ids: Any) -> int:
    return math.prod(position_ids.shape[:-2]) if isinstance(position_ids, Tensor) else 1


def _warn_of_head(pooling: Pooling) -> None:
    if pooling.head == "pooled":
        warnings.warn(
            'head="pooled", but the decoder was called by itself: its hidden states come home, and what follows runs '
            "there. If the trainer puts LoRA on the model, put it on before: model = peft.get_peft_model(model, ...), "
            'lw.pool(model, head="pooled")',
            stacklevel=4,
        )


def _from_head(given: Any, asked: Mapping[str, Any]) -> Pooled:
    """What the head has gathered, if it is what the decoder is called with."""
    if not isinstance(given, Pooled):
        raise InputError(
            f"the argument {KEY!r} is a {type(given).__name__}; a pooled model takes rows, not the inputs of "
            "lw.shard_batch"
        )
    if (asked.get("inputs_embeds") is not None) != (given.embeds is not None):
        raise InputError(
            'something between the head and the decoder has put embeddings in the place of ids, which head="pooled" '
            'had sent already; pool the model with head="home"'
        )
    return given


def _check_call(decoder: Any, asked: Mapping[str, Any], rows: HomeRows, host: Mapping[str, Any]) -> None:
    config = getattr(decoder, "config", None)
    implementation = getattr(config, "_attn_implementation", NAME)
    if implementation != NAME:
        raise InputError(
            f"the attention implementation of the pooled model was changed to {implementation!r} in the meantime, "
            "which knows nothing of other ranks; call lw.restore(model), set it, and lw.pool(model) again"
        )
    if asked.get("output_attentions") or getattr(config, "output_attentions", False):
        raise InputError("a pooled model never holds attention weights; call it without output_attentions")
    if asked.get("output_entropy") and vars(decoder)[POOLING].head == "home":
        raise InputError(
            'output_entropy goes with lw.pool(model, head="pooled"), which has no logits to compute it from'
        )
    if decoder.training:
        _check_dropout(decoder)
    ids = asked.get("input_ids")
    embedding = decoder.get_input_embeddings() if hasattr(decoder, "get_input_embeddings") else None
    if getattr(embedding, "neftune_noise_alpha", None) and decoder.training:
        raise InputError(
            "NEFTune (neftune_noise_alpha) scales its noise by the length of a row, and a pooled decoder has no rows; "
            "train without it"
        )
    if ids is not None and isinstance(embedding, nn.Embedding):
        check_range("input_ids", host["ids"], embedding.num_embeddings)
    for name, value in asked.items():
        if name not in _READ and isinstance(value, Tensor) and value.shape[:2] == (rows.batch, rows.seq):
            raise InputError(
                f"the argument {name} has a value for every token, of shape {tuple(value.shape)}; a pooled decoder "
                "takes input_ids or inputs_embeds, attention_mask, position_ids, cu_seq_lens_q and seq_idx"
            )


def _check_dropout(decoder: nn.Module) -> None:
    for name, module in decoder.named_modules():
        share = vars(module).get("attention_dropout")
        if isinstance(share, float) and share > 0:
            raise InputError(
                f"{name} asks for attention dropout {share} in training, which no layer across ranks has; {NO_DROPOUT}"
            )


def check_range(name: str, lowest_and_highest: Tensor | None, count: int) -> None:
    """Here, since else it would be found by whichever rank computes the token, while the others wait for it."""
    if lowest_and_highest is None:
        return
    low, high = lowest_and_highest.tolist()
    if low < 0 or high >= count:
        raise InputError(f"{name} holds {low if low < 0 else high}; the model knows 0 to {count - 1}")


def _run(original: Callable[..., Any], decoder: nn.Module, pooled: Pooled, asked: Mapping[str, Any]) -> Any:
    """The layers on this rank's tokens of the pack."""
    rest = {name: value for name, value in asked.items() if name not in _READ}
    tokens = {"input_ids": pooled.ids} if pooled.ids is not None else {"inputs_embeds": pooled.embeds}
    with running(pooled.pack):
        out = original(
            decoder,
            **tokens,
            position_ids=pooled.positions,
            use_cache=False,
            return_dict=True,
            **{**rest, KEY: pooled.pack},
        )
    if not isinstance(out, dict):
        raise InputError(
            f"{type(decoder).__name__} returned a {type(out).__name__}; a decoder that can be pooled returns "
            "transformers' ModelOutput with last_hidden_state"
        )
    return out


def _bring_home(out: Any, pooled: Pooled, stays: tuple[str, ...]) -> None:
    """What the decoder returned for this rank's tokens becomes what it returns for this rank's rows."""
    moved: dict[int, Tensor] = {}

    def home(x: Tensor, name: str) -> Tensor:
        if id(x) not in moved:
            # Router logits have tokens first, and want (batch · seq, experts) in the end.
            moved[id(x)] = pooled.home(x[None]).flatten(0, 1) if name == "router_logits" else pooled.home(x)
        return moved[id(x)]

    for name in [name for name in out if name not in stays]:
        value = out[name]
        if isinstance(value, Tensor):
            out[name] = home(value, name)
        elif isinstance(value, tuple) and all(isinstance(x, Tensor) for x in value):
            out[name] = tuple(home(x, name) for x in value)


def _wants_dict(decoder: Any, asked: Mapping[str, Any]) -> bool:
    asked_for = asked.get("return_dict")
    return bool(getattr(getattr(decoder, "config", None), "return_dict", True) if asked_for is None else asked_for)
