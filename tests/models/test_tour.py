"""examples/tour.ipynb runs from top to bottom, and shows what it then says and draws.

python tests/models/test_tour.py        # runs it and stores what it shows
"""

import base64
import json
import re
from contextlib import redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import matplotlib
import pytest

PAGE = Path(__file__).parents[2] / "examples" / "tour.ipynb"
FIGURE = re.compile(r"\d\.\de-\d+|\d+\.\d+e-\d+")  # rounding, which machines may do in another way
WITHOUT_RANKS = 7  # cells


def run(cells: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The notebook, or its first cells, with the outputs of this run, and the names that it leaves."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    notebook, names, count = json.loads(PAGE.read_text()), {"__name__": "tour"}, 0
    notebook["cells"] = notebook["cells"][:cells]
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        said, pictures = StringIO(), []

        def show() -> None:
            for number in pyplot.get_fignums():
                drawn = BytesIO()
                pyplot.figure(number).savefig(drawn, dpi=70, format="png", metadata={"Software": None})
                pictures.append(base64.b64encode(drawn.getvalue()).decode())  # noqa: B023
            pyplot.close("all")

        with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
            patch.setattr(pyplot, "show", show)
            exec(compile("".join(cell["source"]), f"{PAGE.name}, cell {count}", "exec"), names)
        cell["execution_count"] = count
        cell["outputs"] = [
            {"data": {"image/png": picture}, "metadata": {}, "output_type": "display_data"} for picture in pictures
        ]
        if said.getvalue():
            lines = said.getvalue().splitlines(keepends=True)
            cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": lines})
    return notebook, names


def texts(notebook: dict[str, Any]) -> list[str]:
    """What each cell shows: words as they are, a picture as one."""
    found = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            found.append(FIGURE.sub("#", "".join(output.get("text", ["picture"]))))
    return found


def test_what_needs_no_ranks() -> None:
    """Masks, layouts, plans and the first picture: in every run. The rest starts ranks of its own."""
    shown = texts(run(WITHOUT_RANKS)[0])
    assert shown == texts(json.loads(PAGE.read_text()))[: len(shown)], "store anew: python tests/models/test_tour.py"
    assert len(shown) == 3


def test_it_runs_and_shows_what_is_stored() -> None:
    notebook, names = run()
    assert texts(notebook) == texts(json.loads(PAGE.read_text())), "store anew: python tests/models/test_tour.py"
    assert texts(notebook).count("picture") == 2
    assert names["worst"] < 1e-4
    assert names["curves"][1][-1] < names["curves"][1][0] - 0.5, "something was learned"


if __name__ == "__main__":
    PAGE.write_text(json.dumps(run()[0], ensure_ascii=False, indent=1) + "\n")
