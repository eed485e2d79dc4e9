"""Document lengths from the command line or from a file: text, JSON, CSV or numpy."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from longweave.errors import InputError, shown
from longweave.plan.ranges import MOST_TOKENS, as_ints

REMEDY = "give the number of tokens of each document, such as 137 2041 89"
COLUMNS = ("length", "lengths", "tokens", "num_tokens", "n_tokens")  # by which a CSV file may call them
MOST_DIGITS = 18


def parse_lengths(words: Sequence[str], where: str = "length {}") -> list[int]:
    """Lengths that were typed; `where` names the i-th in errors."""
    found = []
    for i, word in enumerate(words):
        if not re.fullmatch(r"[+-]?[0-9]+", word, re.ASCII):
            raise InputError(f"{where.format(i)} is {shown(word)}, which is not a valid integer; {REMEDY}")
        if len(word) > MOST_DIGITS:
            raise InputError(f"{where.format(i)} is {shown(word)}; {REMEDY}, {MOST_TOKENS} together at most")
        found.append(int(word))
    return check_lengths(found)


def check_lengths(lengths: object) -> list[int]:
    """Lengths, really ints, none negative, that make a pack."""
    array = as_ints(lengths, "lengths", REMEDY)
    if not array.size:
        raise InputError(f"there are no lengths; {REMEDY}")
    if array.ndim != 1:
        raise InputError(f"lengths has shape {array.shape}; {REMEDY}")
    found: list[int] = array.tolist()
    for i, length in enumerate(found):
        if length < 0:
            raise InputError(f"length {i} is {length}; lengths are 0 or more: {REMEDY}")
    if sum(found) > MOST_TOKENS:
        raise InputError(f"the lengths add up to {sum(found)} tokens; a packed sequence has at most {MOST_TOKENS}")
    return found


def cu_seqlens_of(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def read_lengths(path: Path) -> list[int]:
    """The lengths of a file: `.txt` (ints between spaces, commas or line ends; # comments), `.json` (a list, or an
    object with "lengths"), `.csv` (one column, or one that is named like lengths), `.npy` (a row of ints); "-" is text
    from standard input.
    """
    if str(path) == "-":
        return parse_lengths(_words(sys.stdin.read()))
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"the lengths file is {shown(str(path))}; give one that ends in {', '.join(READERS)}")
    try:
        if path.is_file() and not path.stat().st_size:
            raise InputError(f"it is empty; {REMEDY}")
        found = reader(path)
    except OSError as error:
        raise InputError(f"the lengths file {path} cannot be read: {error.strerror or error}") from error
    except InputError as error:
        raise InputError(f"the lengths file {path}: {error}") from error
    except (ValueError, csv.Error, EOFError, RecursionError, MemoryError) as error:
        raise InputError(f"the lengths file {path} is not a {path.suffix[1:]} file of ints ({error})") from error
    return found


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig")


def _words(text: str) -> list[str]:
    lines = [line.split("#")[0] for line in text.splitlines()]
    return [word for line in lines for word in line.replace(",", " ").split()]


def _from_txt(path: Path) -> list[int]:
    return parse_lengths(_words(_text(path)))


def _from_json(path: Path) -> list[int]:
    found = json.loads(_text(path))
    if isinstance(found, dict):
        if "lengths" not in found:
            raise InputError(
                f'it holds an object with {shown(sorted(found))}; give a list, or an object with "lengths"'
            )
        found = found["lengths"]
    if not isinstance(found, list):
        raise InputError(f'it holds {shown(found)}; give a list of ints, or an object with "lengths"')
    return check_lengths(found)


def _from_csv(path: Path) -> list[int]:
    rows = [row for row in csv.reader(_text(path).splitlines()) if any(cell.strip() for cell in row)]
    if not rows:
        raise InputError(f"it has no rows; {REMEDY}")
    names = [name.strip().lower() for name in rows[0]]
    # A lone name begins with a letter; 5.0 and 1_000 are lengths that are refused, not a name to be left out.
    column, has_names = 0, len(names) > 1 or names[0][:1].isalpha()
    if has_names:
        known = [i for i, name in enumerate(names) if name in COLUMNS]
        if len(known) > 1:
            raise InputError(f"its columns {shown([names[i] for i in known])} could all be lengths; keep one of them")
        if not known and len(names) > 1:
            raise InputError(f"its columns are {shown(names)}; name one of them {' or '.join(COLUMNS)}")
        column = known[0] if known else 0
    cells = rows[1:] if has_names else rows
    for i, row in enumerate(cells):
        if len(row) <= column:
            raise InputError(f"row {i} has {len(row)} cells and no length; {REMEDY}")
    return parse_lengths([row[column].strip() for row in cells])


def _from_npy(path: Path) -> list[int]:
    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:  # whose texts speak of pickles
        raise InputError("it is no array of ints; write one with np.save") from error
    return check_lengths(found)


READERS: dict[str, Callable[[Path], list[int]]] = {
    ".txt": _from_txt,
    ".json": _from_json,
    ".csv": _from_csv,
    ".npy": _from_npy,
}
