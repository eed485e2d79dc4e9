"""Values that a function is not made for, and the question whether it says so.

    Row("lw.shift", lw.shift, {"x_local": x, "pack": pack}, by=(SCALARS, "-1 0 2**40"))
         name        function  arguments that are right      argument = (bad values, those of them that are right here)

Every other value must raise a `LongweaveError` with a text that says something; nothing else may come out, neither an
error of torch, numpy or Python, nor a result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import longweave as lw

Table = Mapping[str, Any]

NAN, INF = float("nan"), float("inf")

SCALARS: Table = {
    "None": None,
    "str": "x",
    "bytes": b"x",
    "-1": -1,
    "0": 0,
    "2**40": 2**40,
    "2**70": 2**70,
    "-2**70": -(2**70),
    "10**400": 10**400,
    "nan": NAN,
    "inf": INF,
    "1.5": 1.5,
    "1e30": 1e30,
    "1j": 1j,
    "True": True,
    "object": object(),
    "[]": [],
    "[[1, 2], [3]]": [[1, 2], [3]],
    "[None]": [None],
    "['a']": ["a"],
    "[2**70]": [2**70],
    "[nan]": [NAN],
    "{}": {},
    "{1}": {1},
    "float64": np.float64(2),
    "int64": np.int64(2),
    "tensor(2)": torch.tensor(2),
    "tensor(2.)": torch.tensor(2.0),
    "meta ()": torch.empty((), device="meta"),
    "zeros(3)": torch.zeros(3),
    "type": int,
}

INTS: Table = {  # where several ints are wanted, such as cu_seqlens
    **SCALARS,
    "[0, 'a']": [0, "a"],
    "[0, 1.5]": [0, 1.5],
    "[0, 8j]": [0, 8j],
    "[0, None]": [0, None],
    "[0, True]": [0, True],
    "[[0, True]]": [[0, True]],
    "[1, 2]": [1, 2],
    "[0, 5, 2]": [0, 5, 2],
    "[0, -1]": [0, -1],
    "[0, 2**33]": [0, 2**33],
    "[0, 2**62]": [0, 2**62],
    "[0, 2**63 - 1]": [0, 2**63 - 1],
    "[0, 2**70]": [0, 2**70],
    "uint64": np.array([0, 2**64 - 1], dtype=np.uint64),
    "[[0, 0], [0, 0]]": torch.zeros(2, 2, dtype=torch.int64),
    "meta": torch.empty(3, dtype=torch.int64, device="meta"),
    "sparse": torch.tensor([0, 3, 8]).to_sparse(),
    "floats": torch.tensor([0.0, 3.0, 8.0]),
    "bools": torch.tensor([False, True]),
    "strings": np.array(["0", "8"]),
    "objects": np.array([0, object()], dtype=object),
    "seconds": np.array([0, 8], dtype="m8[s]"),
}


def tensors(*shape: int) -> Table:
    """Instead of a floating tensor of this shape."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about the unusual ones
        return _tensors(*shape)


def _tensors(*shape: int) -> Table:
    x = torch.randn(shape)
    table = {
        "None": None,
        "str": "x",
        "bytes": b"x",
        "3": 3,
        "1.5": 1.5,
        "[]": [],
        "[1., 2.]": [1.0, 2.0],
        "[[1], [2, 3]]": [[1], [2, 3]],
        "object": object(),
        "numpy": np.zeros(shape, np.float32),
        "0-dim": torch.tensor(1.0),
        "empty": torch.zeros(0),
        "meta": torch.empty(shape, device="meta"),
        "int64": torch.ones(shape, dtype=torch.int64),
        "int8": torch.ones(shape, dtype=torch.int8),
        "uint16": torch.ones(shape, dtype=torch.uint16),
        "bool": torch.ones(shape, dtype=torch.bool),
        "complex": torch.ones(shape, dtype=torch.complex64),
        "float64": x.double(),
        "float16": x.half(),
        "bfloat16": x.bfloat16(),
        "float8": x.to(torch.float8_e4m3fn),
        "quantized": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "sparse": x.to_sparse(),
        "nested": torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)]),
        "one dim more": x[None],
        "one token more": torch.randn(shape[0] + 1, *shape[1:]),
        "no channels": torch.zeros(*shape[:-1], 0),
    }
    if x.ndim > 1:
        table["one dim less"] = x[..., 0]
        table["flat"] = x.reshape(-1)
    if x.ndim == 2:
        table["sparse csr"] = x.to_sparse_csr()
    return table


def integers(*shape: int) -> Table:
    """Instead of an integer tensor of this shape."""
    x = torch.ones(shape, dtype=torch.int64)
    return {
        **tensors(*shape),
        "int16": x.short(),
        "negative": -x,
        "uint64": x.to(torch.uint64),
        "beyond int64": torch.full(shape, 2**63 + 5, dtype=torch.uint64),
        "whole floats": x.double(),
        "nan": torch.full(shape, NAN),
        "sparse ints": x.to_sparse(),
        "meta ints": x.to("meta"),
        "strings": np.full(shape, "a"),
        "objects": np.full(shape, None, dtype=object),
        "[2**70]": [2**70] * shape[0],
        "[None]": [None] * shape[0],
        "[True]": [True] * shape[0],
        "{}": {},
    }


class Row:
    """A function with arguments that are right, and for some of them tables of bad values."""

    def __init__(self, name: str, call: Callable[..., Any], good: Mapping[str, Any], **bad: tuple[Table, str]) -> None:
        self.name, self.call, self.good, self.bad = name, call, dict(good), bad


@dataclass
class Question:
    row: Row
    argument: str

    def ask(self) -> None:
        """Fail with all values that were not refused as they should be, and with right ones that were."""
        table, right = self.row.bad[self.argument]
        fine = set(right.split(" | ")) - {""}
        assert fine <= set(table), f"{fine - set(table)} is no value of the table"
        wrong = [f"{name}: {said}" for name, value in table.items() if (said := self._said(value, name in fine))]
        assert not wrong, f"{self.row.name}({self.argument}=…)\n  " + "\n  ".join(wrong)
        if self.argument in self.row.good:
            self.row.call(**self.row.good)

    def _said(self, value: Any, is_fine: bool) -> str | None:
        """What was wrong about the answer, if anything."""
        try:
            self.row.call(**{**self.row.good, self.argument: value})
        except lw.LongweaveError as error:
            if is_fine:
                return f"was refused: {error}"
            return None if len(str(error)) > 20 else f"was refused without words: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        return None if is_fine else "was taken"


def ask_all(rows: list[Row]) -> Any:
    """Parametrize a test by every row and argument."""
    questions = [Question(row, argument) for row in rows for argument in row.bad]
    names = [f"{question.row.name}-{question.argument}" for question in questions]
    return pytest.mark.parametrize("question", questions, ids=names)
