"""The code in docs/linear.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import longweave as lw

PAGE = Path(__file__).parents[2] / "docs" / "linear.md"


def test_the_code_runs() -> None:
    Hk, Hv, K, V, tokens = 1, 2, 4, 3, 10
    names = {"lw": lw, "group": None, "cu_seqlens": [0, 7, 10], "Hk": Hk, "Hv": Hv, "K": K, "V": V}
    names |= {name: torch.randn(tokens, size) for name, size in (("q", Hk * K), ("k", Hk * K), ("v", Hv * V))}
    names |= {name: torch.randn(size, 4) for name, size in (("wq", Hk * K), ("wk", Hk * K), ("wv", Hv * V))}
    names |= {"g": -torch.rand(tokens, Hv), "beta": torch.rand(tokens, Hv)}
    names |= {"input_ids": torch.arange(tokens), "hidden": torch.randn(tokens, 5)}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    assert names["out"].shape == (tokens, Hv, V)
    assert names["labels"].tolist() == [1, 2, 3, 4, 5, 6, -100, 8, 9, -100]
    assert names["scores"].shape == (2, 5)


def test_every_operator_is_named() -> None:
    text = PAGE.read_text()
    for name in ("gated_delta_rule", "kimi_delta_attention", "gated_linear_attention", "ssd", "lightning_attention"):
        assert f"`lw.{name}(" in text
        assert callable(getattr(lw, name))
