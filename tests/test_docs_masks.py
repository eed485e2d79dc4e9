"""The pictures in docs/masks.md are what the code beside them makes; what its text says about them is so."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import longweave as lw

PAGE = Path(__file__).parents[1] / "docs" / "masks.md"
EXAMPLE = re.compile(r"```python\nmask = (lw\.Mask\..*)\n```\n\n```\n([■· \n]+)\n```")


def picture(mask: lw.Mask) -> str:
    return "\n".join(" ".join("■" if seen else "·" for seen in row) for row in mask.dense())


def examples() -> list[tuple[str, str]]:
    return EXAMPLE.findall(PAGE.read_text())


@pytest.mark.parametrize(("code", "drawn"), examples(), ids=lambda text: text.partition("(")[0][8:])
def test_pictures(code: str, drawn: str) -> None:
    assert drawn == picture(eval(code)), "draw it anew: python tests/test_docs_masks.py"


def test_every_constructor_has_its_picture() -> None:
    made = [name for name, value in vars(lw.Mask).items() if isinstance(value, classmethod) and name[0] != "_"]
    assert [code.removeprefix("lw.Mask.").partition("(")[0] for code, _ in examples()] == made
    assert PAGE.read_text().count("```\n■") == len(made), "and there is no other picture"


def test_where_a_mask_can_be_given() -> None:
    """The lines of the page; models have tests of their own."""
    (block,) = re.findall(r"## Where to give it\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"lw": lw, "mask": lw.Mask.shared_prefix(4, [3, 2]), "group": None}
    names |= dict.fromkeys("qkv", torch.randn(9, 2, 8))
    for line in block.splitlines():
        if "shard_batch" not in line:
            exec(line, names)
    assert names["pack"].mask == names["mask"]
    assert len(names["pack"].plans) == 2, "the pack's own mask, and that of the second call"


def test_positions_and_windows_of_a_shared_prefix() -> None:
    mask = lw.Mask.shared_prefix(4, [3, 2])
    assert lw.Pack(mask.cu_seqlens, mask=mask, layout="contiguous").positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 5]
    with pytest.raises(lw.InputError, match=r"give cu_seqlens=mask\.cu_seqlens"):
        lw.Pack([0, 9], mask=mask)
    seen = mask.windowed(3).dense()
    assert seen[4:, :4].sum(1).tolist() == [2, 1, 0, 2, 1], "less of the prompt the further an answer gets"
    assert not np.any(seen[7:, 4:7])


def test_windows_of_masks_that_look_ahead() -> None:
    for mask in (lw.Mask.full([0, 5, 9]), lw.Mask.prefix_causal([0, 6, 9], [3, 2])):
        with pytest.raises(lw.InputError, match="a mask that lets tokens see ahead"):
            lw.Pack(mask.cu_seqlens, mask=mask, window=2)
        assert lw.Pack(mask.cu_seqlens, mask=mask, window=9).mask == mask, "a window that cuts nothing"


if __name__ == "__main__":
    PAGE.write_text(EXAMPLE.sub(lambda found: found[0].replace(found[2], picture(eval(found[1]))), PAGE.read_text()))
