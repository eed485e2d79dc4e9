"""What a model with a pooled head returns, in transformers' own kind of output. Imported where such a model runs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.utils.generic import ModelOutput


@dataclass
class PooledHeadOutput(ModelOutput):
    """In the place of a causal language model's output where labels were given: no logits exist as a whole.

    loss: what the model itself would have returned.
    log_probs: log p of each next token, 0 where the label is ignored: (batch, seq − 1), or (batch, seq) where
        `shift_labels` were given. entropy: of each next token, likewise, if called with `output_entropy=True`.
    """

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    aux_loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None

    @property
    def logits(self) -> Tensor:
        raise AttributeError(
            'with head="pooled", a call with labels has log_probs and no logits; call the model without labels, or '
            'lw.pool it with head="home"'
        )
