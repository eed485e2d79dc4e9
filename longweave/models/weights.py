"""Do all ranks train the same weights? A checksum of a sample of them rides on the comparison of the next pack.

    pack          1    2    3    4    …    8    …    16   …    32   …    64   …    128   …
    checksum           ✓         ✓         ✓         ✓         ✓         ✓          ✓        then every 64 packs

A step without `lw.reduce_gradients`, another checkpoint or another seed on one rank moves the ranks apart, and no loss
shows it. Parameters that are sharded (FSDP, tensor parallel) differ by nature and are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longweave.comm.exchange import is_sharded
from longweave.comm.ledger import Ledger
from longweave.tensors import faking

PARAMETERS, VALUES = 64, 16  # that are looked at, and of each of them
RARELY = 64  # packs


def note_weights(model: nn.Module, ledger: Ledger) -> None:
    """If it is time to, leave a checksum of the model's weights for the next pack to compare."""
    if torch.compiler.is_compiling() or faking():
        return
    if ledger.weights is None and _is_due(ledger.packs):
        ledger.weights = checksum(model)


def _is_due(packs: int) -> bool:
    """At the first few powers of two, then now and then."""
    return packs > 1 and (packs % RARELY == 0 or (packs < RARELY and packs & (packs - 1) == 0))


def checksum(model: nn.Module) -> Tensor | None:
    """A weighted sum of the sizes of some values: () float64, on the device of the first one."""
    values = sample(model, PARAMETERS, VALUES)
    if values is None:
        return None
    values = values.abs() * (1 + 0.5 * values.sign())  # nothing cancels out, and signs count
    return values @ torch.linspace(1, 2, len(values), dtype=torch.float64, device=values.device)


def sample(model: nn.Module, parameters: int, values: int) -> Tensor | None:
    """So many values of so many weights that all ranks hold alike: (n,) float64, on the device of the first one."""
    if is_flattened(model):
        return None
    alike = (p.detach() for p in model.parameters() if not is_sharded(p))
    held = [p for p in alike if p.numel() and not p.is_meta and p.is_floating_point()]
    held = held[:: max(len(held) // parameters, 1)]
    if not held:
        return None
    samples = [p.reshape(-1)[p.numel() // (values + 1) :: max(p.numel() // values, 1)][:values] for p in held]
    return torch.cat([x.to(held[0].device, torch.float64) for x in samples])


def is_flattened(model: nn.Module) -> bool:
    """Is it, or a part of it, in FSDP1 (`FullyShardedDataParallel`)? Its parameters are then views of shards."""
    wrapped = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    return wrapped or any(getattr(p, "_is_flat_param", False) for p in model.parameters())
