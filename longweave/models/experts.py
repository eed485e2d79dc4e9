"""The load-balancing loss of mixtures of experts, over tokens that are spread over ranks.

    aux = E · Σ_e f_e · P_e      f_e: how often expert e was chosen, P_e: its mean probability, both over all tokens

It is a product of means, so means over the tokens of one rank give another loss. The counts f carry no gradient: with
the global f, each rank's part E · Σ_e f_e · (its share of P_e) adds up, and so do the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longweave.comm.groups import resolve
from longweave.comm.reduce import all_reduce_sum
from longweave.errors import InputError
from longweave.models.step import Step


def balancing_loss(router_logits: Sequence[Tensor], num_experts: int, top_k: int, step: Step) -> Tensor:
    """This rank's part of the loss; the SUM over ranks is that of one process.

    router_logits: for each layer (tokens, num_experts), as Hugging Face models return them.
    """
    if not router_logits:
        raise InputError("router_logits is empty; call the model with output_router_logits=True")
    chosen = torch.zeros(num_experts, device=router_logits[0].device)
    likely = chosen.to(torch.promote_types(router_logits[0].dtype, torch.float32))
    for logits in router_logits:
        if logits.shape != (max(step.tokens, 1), num_experts):
            raise InputError(
                f"router logits have the shape {tuple(logits.shape)} but this rank has {step.tokens} tokens and "
                f"{num_experts} experts; give those of this batch"
            )
        weights = torch.softmax(logits[: step.tokens].to(likely.device), dim=-1)
        picks = torch.topk(weights, top_k, dim=-1).indices
        chosen = chosen + torch.bincount(picks.reshape(-1), minlength=num_experts)
        likely = likely + weights.to(likely.dtype).sum(0)
        likely = likely + logits[step.tokens :].sum() * 0  # a placeholder token must take part in backward
    rows = step.layout.total * len(router_logits)
    (chosen,) = all_reduce_sum([chosen.to(likely.dtype)], resolve(step.group))
    return num_experts * torch.sum(chosen / rows * (likely / rows))
