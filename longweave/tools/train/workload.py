"""What is trained, and on what: small models of the families that users train, and documents that every machine has.

The models have random weights and come from their Hugging Face configurations. The documents are the top-level
definitions of Python's own standard library, as bytes: real text with heavy-tailed lengths. They are drawn from a seed,
so any rank can draw any of them without talking.
"""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from longweave.errors import InputError

VOCABULARY = 256
_BORDER = re.compile(rb"^(?=(?:def|class|async def|@)\b)", re.MULTILINE)


# -- documents -----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)  # the sources of this Python, for the life of the process
def documents() -> tuple[bytes, ...]:
    """Every module of the standard library, cut where a definition begins at the left margin."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found: list[bytes] = []
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            found += [part for part in _BORDER.split(path.read_bytes()) if len(part) >= 32]
    return tuple(found)


@lru_cache(maxsize=1)  # of what `documents` keeps
def documents_digest() -> str:
    """Another Python has another library, from which the same seed draws other documents."""
    found = sha256()
    for document in documents():
        found.update(len(document).to_bytes(8) + document)
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class DrawnDocuments:
    """The tokens of some documents, one after the other, and their borders: what a batch is made from."""

    input_ids: npt.NDArray[np.int64]
    cu_seqlens: tuple[int, ...]

    @property
    def targets(self) -> int:
        """Tokens that have a next token in their document: what the loss is a mean over."""
        lengths = np.diff(self.cu_seqlens)
        return int((lengths - (lengths > 0)).sum())


def draw_documents(tokens: int, *key: int) -> DrawnDocuments:
    """`tokens` bytes of randomly drawn documents, the last one cut to fit. The same key draws the same."""
    rng = np.random.default_rng(key)
    pool = documents()
    parts: list[bytes] = []
    missing = tokens
    while missing > 0:
        part = pool[int(rng.integers(len(pool)))][:missing]
        parts.append(part)
        missing -= len(part)
    borders = (0, *np.cumsum([len(part) for part in parts]).tolist())
    return DrawnDocuments(np.frombuffer(b"".join(parts), dtype=np.uint8).astype(np.int64), borders)


# -- models --------------------------------------------------------------------------------------------


def build_model(family: str, hidden: int, layers: int, **changes: object) -> nn.Module:
    """A random model of a family; `hidden` is a multiple of 32. `changes` go into its configuration."""
    from transformers import AutoModelForCausalLM

    if family not in FAMILIES:
        raise InputError(f"model is {family!r}; choose one of {', '.join(FAMILIES)}")
    if hidden % 32 or hidden < 32:
        raise InputError(f"hidden is {hidden}; give a multiple of 32")
    model: nn.Module = AutoModelForCausalLM.from_config(_model_config(family, hidden, layers, **changes))  # type: ignore[no-untyped-call]
    return model


def _model_config(family: str, hidden: int, layers: int, **changes: object) -> Any:
    from transformers import AutoConfig

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
        "use_cache": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    name, extra = FAMILIES[family]
    return AutoConfig.for_model(name, **{**common, **extra(hidden, layers), **changes})


def _hybrid(hidden: int, layers: int) -> dict[str, Any]:
    """Three layers of GatedDeltaNet to one of softmax attention, as in Qwen3.5."""
    kinds = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)]
    return {
        "layer_types": kinds,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": hidden // 4,
        "linear_value_head_dim": hidden // 4,
        "linear_conv_kernel_dim": 4,
    }


def _experts(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "shared_expert_intermediate_size": hidden,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
    }


FAMILIES: dict[str, tuple[str, Any]] = {
    "qwen3_5": ("qwen3_5_text", _hybrid),
    "qwen3_next": ("qwen3_next", lambda h, n: _hybrid(h, n) | _experts(h, n)),
    "llama": ("llama", lambda h, n: {}),
    "qwen3": ("qwen3", lambda h, n: {}),
    "qwen3_moe": ("qwen3_moe", _experts),
    "mistral": ("mistral", lambda h, n: {"sliding_window": 128}),
}
