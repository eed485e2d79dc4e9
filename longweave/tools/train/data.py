"""Documents that every machine has: the top-level definitions of Python's own standard library, as bytes.

Real text with heavy-tailed lengths. Everything is drawn from a seed, so any rank can make any pack without talking.
"""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

VOCABULARY = 256
_BORDER = re.compile(rb"^(?=(?:def|class|async def|@)\b)", re.MULTILINE)


@lru_cache(maxsize=1)
def documents() -> tuple[bytes, ...]:
    """Every module of the standard library, cut where a definition begins at the left margin."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found: list[bytes] = []
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            found += [part for part in _BORDER.split(path.read_bytes()) if len(part) >= 32]
    return tuple(found)


@dataclass(frozen=True)
class Pack:
    """Packed tokens and the borders of their documents."""

    input_ids: npt.NDArray[np.int64]
    cu_seqlens: tuple[int, ...]

    @property
    def targets(self) -> int:
        """Tokens that have a next token in their document: what the loss is a mean over."""
        lengths = np.diff(self.cu_seqlens)
        return int((lengths - (lengths > 0)).sum())


def draw_pack(tokens: int, *key: int) -> Pack:
    """`tokens` bytes of randomly drawn documents, the last one cut to fit. The same key gives the same pack."""
    rng = np.random.default_rng(key)
    pool = documents()
    parts: list[bytes] = []
    missing = tokens
    while missing > 0:
        part = pool[int(rng.integers(len(pool)))][:missing]
        parts.append(part)
        missing -= len(part)
    borders = (0, *np.cumsum([len(part) for part in parts]).tolist())
    return Pack(np.frombuffer(b"".join(parts), dtype=np.uint8).astype(np.int64), borders)
