"""`longweave plan` without a browser: lengths, requests, the picture, and the data of the page."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import longweave as lw
from longweave.cli import app
from longweave.plan.stages import exchange_matrix, plan_stages
from longweave.tools.draw import draw_layout
from longweave.tools.planning import NAMED_LAYOUTS, PlanRequest
from longweave.tools.planning.lengths import parse_lengths, read_lengths
from longweave.tools.planning.page import AFFINE, SCRIPTS, STRATEGIES, as_script_data, make_page, page_data
from longweave.tools.planning.picture import owner_of_pairs

LENGTHS = (41, 0, 137, 9)
GOOD = {
    "a.txt": "41 0\n137, 9  # the last one\n",
    "spaces.TXT": "\ufeff41\t0 137\r\n9",
    "a.json": "[41, 0, 137, 9]",
    "object.json": '{"name": "x", "lengths": [41, 0, 137, 9]}',
    "a.csv": "41\n0\n137\n9\n",
    "named.csv": "id,tokens,text\n1,41,a\n2,0,b\n\n3,137,\n4, 9 ,c\n",
    "one.csv": "anything\n41\n0\n137\n9\n",
}
BAD = {
    "word.txt": ("41 x", "length 1 is 'x', which is not a valid integer"),
    "float.txt": ("41 2.5", "length 1 is '2.5'"),
    "minus.txt": ("41 -2", "length 1 is -2; lengths are 0 or more"),
    "empty.txt": ("# nothing", "there are no lengths"),
    "long.txt": ("9" * 5000, "length 0 is"),
    "float.json": ("[1, 2.5]", "lengths holds floats, not ints"),
    "bool.json": ("[1, true]", "lengths holds bools, not ints"),
    "nested.json": ("[[1, 2]]", "lengths has shape (1, 2)"),
    "other.json": ('{"cu": [1]}', "give a list"),
    "text.json": ('"5"', "give a list of ints"),
    "broken.json": ("[1, ", "is not a json file of ints"),
    "deep.json": ("[" * 100_000, "is not a json file of ints"),
    "huge.json": ("[" + "9" * 5000 + "]", "is not a json file of ints"),
    "two.csv": ("a,b\n1,2\n", "name one of them length"),
    "short.csv": ("id,length\n1\n", "row 0 has 1 cells"),
    "twice.csv": ("length,tokens\n1,2\n", "could all be lengths; keep one"),
    "float.csv": ("5.0\n3\n", "length 0 is '5.0', which is not a valid integer"),
    "power.csv": ("1e3\n3\n", "length 0 is '1e3'"),
    "grouped.csv": ("1_000\n3\n", "length 0 is '1_000'"),
    "quoted.csv": ('"1,000"\n3\n', "length 0 is '1,000'"),
    "no_name.csv": ("-\n3\n", "length 0 is '-'"),
    "no_rows.csv": ("\n\n", "no rows"),
    "no_bytes.csv": ("", "it is empty"),
    "no_bytes.npy": ("", "it is empty"),
    "binary.txt": (b"\xff\xfe\x00", "is not a txt file of ints"),
    "not.npy": ("hello", "it is no array of ints; write one with np.save"),
}


@pytest.mark.parametrize("name", GOOD)
def test_lengths_are_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(GOOD[name])
    assert tuple(read_lengths(tmp_path / name)) == LENGTHS


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_lengths_are_read_from_numpy(dtype: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array(LENGTHS, dtype=dtype))
    assert tuple(read_lengths(tmp_path / "a.npy")) == LENGTHS


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(lw.LongweaveError) as error:
        read_lengths(tmp_path / name)
    assert message in str(error.value)
    assert name in str(error.value)


class Trap:
    """Unpickling one would make a folder."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.mkdir, ("trapped",)


@pytest.mark.parametrize("array", [np.array([Trap()], dtype=object), np.array([1.5, 2.0]), np.array([[1, 2]])])
def test_numpy_files_execute_nothing(array: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", array, allow_pickle=True)
    with pytest.raises(lw.LongweaveError, match=r"a\.npy"):
        read_lengths(Path("a.npy"))
    assert not Path("trapped").exists()


def test_typed_lengths() -> None:
    assert parse_lengths(["7", "+3", "0"]) == [7, 3, 0]
    for words, message in ((["7", "-3"], "length 1 is -3"), (["1_0"], "'1_0'"), (["٣"], "not a valid integer")):
        with pytest.raises(lw.LongweaveError, match=message):
            parse_lengths(words)


def test_masks_and_windows_reach_the_plan() -> None:
    windowed = PlanRequest(LENGTHS, 2, window=5)
    assert windowed.mask == lw.Mask.sliding_window([0, 41, 41, 178, 187], 5)
    assert PlanRequest(LENGTHS, 2, "full").mask == lw.Mask.full([0, 41, 41, 178, 187])
    assert PlanRequest(LENGTHS, 2, "shared-prefix").mask == lw.Mask.shared_prefix(41, [0, 137, 9])
    assert PlanRequest((0, 64), 2).layout_name == "zigzag"  # one document, as in a pack
    assert PlanRequest(LENGTHS, 2).layout_name == "balanced"


def test_the_command_says_the_same_of_lengths_and_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(LENGTHS))
    more = ["--ranks", "3", "--window", "30", "--node-size", "2", "--strategy", "groupcast"]
    typed = CliRunner().invoke(app, ["plan", *map(str, LENGTHS), *more])
    read = CliRunner().invoke(app, ["plan", "--lengths-file", str(tmp_path / "a.json"), *more])
    assert typed.exit_code == 0, typed.output
    assert typed.output == read.output
    asked = PlanRequest(LENGTHS, 3, window=30, strategy="groupcast", node_size=2)
    assert str(asked.plan.report()) in typed.output
    assert "between nodes of 2 ranks" in typed.output


def test_traffic_between_nodes() -> None:
    """A ring of 4 ranks in nodes of 2: two of its four links lie between nodes."""
    asked = PlanRequest((64,), 4, strategy="ring", node_size=2)
    assert asked.across_nodes().endswith("50.0 % of all")
    assert PlanRequest((64,), 4, strategy="ring", node_size=4).across_nodes().startswith("0.00 MB")


def test_owners_of_pairs_are_those_of_the_dense_mask() -> None:
    request = PlanRequest((20, 13), 3)
    dense, layout = request.mask.dense(), request.plan.layout
    owners = np.asarray(layout.owner(np.arange(33)))[:, None]
    assert (owner_of_pairs(request.mask, layout, 33) == np.where(dense, owners, -1)).all()


@pytest.mark.parametrize("lengths", [LENGTHS, (0,), tuple(range(200))])
def test_pictures_are_written(lengths: tuple[int, ...], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", *map(str, lengths), "--picture", str(tmp_path / "deep" / "p.png")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "deep" / "p.png").read_bytes().startswith(b"\x89PNG")


REPORTED = {
    "tokens": "tokens",
    "work": "area",
    "tokensReceived": "tokens_received",
    "tokensSent": "tokens_sent",
    "bytesReceived": "bytes_received",
    "bytesSent": "bytes_sent",
    "tasks": "kernel_tasks",
}


# -- the page ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["causal", "full", "shared-prefix"])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_page_has_every_report(mask: str, ranks: int) -> None:
    request = PlanRequest(LENGTHS, ranks, mask)
    data = json.loads(json.dumps(page_data(request)))
    ways = STRATEGIES if mask == "shared-prefix" else (*STRATEGIES, AFFINE)  # linear mixers refuse such a mask
    assert set(data["views"]) == {f"{layout}/{way}" for layout in NAMED_LAYOUTS for way in ways}
    assert (data["examples"][0]["left"], data["examples"][0]["right"]) == ("contiguous/ring", "zigzag/ring")
    for layout in NAMED_LAYOUTS:
        for strategy in STRATEGIES:
            plan = request.make_plan(request.make_layout(layout), strategy)
            report, view = plan.report(), data["views"][f"{layout}/{strategy}"]
            for key, name in REPORTED.items():
                assert view["perRank"][key] == [getattr(rank, name) for rank in report.ranks]
            assert (view["imbalance"], view["work"]) == (report.imbalance, report.total_area)
            stages = plan_stages(plan)
            assert (unpacked(view["matrix"], ranks) == exchange_matrix(stages)).all()
            for stored, stage in zip(view["stages"], stages, strict=True):
                assert stored["work"] == stage.work.tolist()
                assert (unpacked(stored["messages"], ranks) == stage.messages).all()


def unpacked(stored: dict[str, list[int]] | None, ranks: int) -> np.ndarray:
    matrix = np.zeros((ranks, ranks), dtype=np.int64)
    if stored and "all" in stored:
        return np.array(stored["all"]).reshape(ranks, ranks)
    if stored and "each" in stored:
        matrix[:] = np.array(stored["each"])[:, None]
        np.fill_diagonal(matrix, 0)
    for i in range(0, len((stored or {}).get("some", [])), 3):
        source, target, count = stored["some"][i : i + 3]
        matrix[source, target] = count
    return matrix


class Outside(HTMLParser):
    """Everything that a page would load, and its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]


def test_the_page_needs_nothing_else() -> None:
    text = make_page(PlanRequest(LENGTHS, 2))
    page = Outside()
    page.feed(text)
    assert page.loads == ["data:,"]
    assert page.scripts == 2
    assert not re.findall(r"https?:|//[a-z]+\.|url\(|@import|fetch\(|XMLHttpRequest|innerHTML", text)
    assert "@@" not in text
    assert "default-src 'none'" in text


def test_data_cannot_leave_its_script() -> None:
    nasty = {"text": "</script><script>alert(1)</script><!-- & \u2028"}
    text = as_script_data(nasty)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == nasty


def test_assets_are_packaged() -> None:
    declared = (Path(lw.__file__).parents[1] / "pyproject.toml").read_text()
    assert '"longweave.tools.planning" = ["assets/*"]' in declared
    assets = {item.name for item in (files("longweave.tools.planning") / "assets").iterdir()}
    assert assets == {"page.html", "page.css", *SCRIPTS}


def test_pages_that_a_browser_cannot_count_are_refused() -> None:
    for lengths, ranks, message in (((200_000_000,), 2, "counts exactly"), ((64,), 257, "at most 256 ranks")):
        with pytest.raises(lw.LongweaveError, match=message):
            make_page(PlanRequest(lengths, ranks, layout="contiguous", strategy="ulysses"))


def test_layouts_with_too_many_spans_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longweave.tools.planning.page.MOST_PAGE_SPANS", 20)
    data = page_data(PlanRequest((5,) * 30, 4))
    spans = len(PlanRequest((5,) * 30, 4).make_layout("zigzag").starts)
    assert data["leftOut"] == [f"zigzag ({spans} spans)"]
    assert "zigzag" not in data["layouts"]
    assert data["examples"]
    with pytest.raises(lw.LongweaveError, match=f"layout zigzag has {spans} spans"):
        page_data(PlanRequest((5,) * 30, 4, layout="zigzag"))


# -- the layout as text --------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 7, 80])
@pytest.mark.parametrize("lengths", [(41, 0, 137, 9), (1,), (3, 1, 1, 500, 2)])
def test_the_layout_as_text_counted_token_by_token(lengths: tuple[int, ...], width: int) -> None:
    cu = np.cumsum([0, *lengths])
    for layout in (lw.Layout.zigzag(cu, 3), lw.Layout.balanced(lw.Mask.causal(cu), 4), lw.Layout.contiguous(cu[-1], 2)):
        columns = min(width, layout.total)
        column = np.searchsorted(np.arange(1, columns + 1) * layout.total // columns, np.arange(layout.total), "right")
        for rank, line in enumerate(draw_layout(layout, cu, width).splitlines()[1:]):
            held = np.bincount(column[layout.indices(rank)], minlength=columns) / np.bincount(column)
            assert line.split()[2] == "".join("█" if share >= 0.5 else "░" if share else "·" for share in held)


def test_billions_of_tokens_are_drawn_at_once() -> None:
    length = 2_999_999_999
    assert len(draw_layout(lw.Layout.zigzag([0, length], 64), [0, length]).splitlines()) == 65


def test_errors_go_to_stderr_and_before_any_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanRequest, "make_plan", lambda *_: pytest.fail("it has planned"))
    (tmp_path / "file").touch()
    for args, said in (
        (["abc"], "length 0 is 'abc'"),
        (["5", "--html", "--ranks", "2"], "--html is followed by --ranks"),
        (["5", "--picture", str(tmp_path / "p.doc")], "give a file that ends in one of"),
        (["5", "--picture", str(tmp_path / "file" / "p.png")], "cannot be written"),
        (["5", "--html", str(tmp_path)], "cannot be written: Is a directory; give another file"),
        (["5", "--html", str(tmp_path / "p.html"), "--ranks", "257"], "at most 256 ranks, not 257"),
    ):
        result = CliRunner().invoke(app, ["plan", *args])
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr


def test_lengths_from_stdin() -> None:
    piped = CliRunner().invoke(app, ["plan", "--lengths-file", "-", "--ranks", "2"], input="41 0\n137, 9\n")
    assert piped.exit_code == 0, piped.output
    assert piped.stdout == CliRunner().invoke(app, ["plan", "41", "0", "137", "9", "--ranks", "2"]).stdout


def test_of_very_many_ranks_the_first_are_shown() -> None:
    said = CliRunner().invoke(app, ["plan", "5000", "--ranks", "2000"]).stdout.splitlines()
    assert len(said) < 300
    assert [line.strip() for line in said if "more ranks" in line] == ["… 1872 more ranks"] * 2


def test_no_tokens_are_drawn_as_such() -> None:
    assert CliRunner().invoke(app, ["plan", "0"]).stdout.splitlines()[0].split(maxsplit=1) == ["documents", "no tokens"]


def test_a_narrow_terminal_has_a_narrow_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longweave.cli.console.width", 60)
    drawn = CliRunner().invoke(app, ["plan", "70000", "70000"]).stdout.split("\n\n")[0]
    assert max(map(len, drawn.splitlines())) <= 60


def test_nodes_that_ranks_do_not_fill_are_named() -> None:
    assert "between nodes of 3 ranks (the last has 1)" in PlanRequest(LENGTHS, 4, node_size=3).across_nodes()


@pytest.mark.parametrize(("option", "name"), [("--html", "p.html"), ("--picture", "p.png")])
def test_a_file_on_a_full_disk_is_named(tmp_path: Path, option: str, name: str) -> None:
    path = tmp_path / name
    path.symlink_to("/dev/full")
    ended = CliRunner().invoke(app, ["plan", "41", "137", option, str(path)])
    assert ended.exit_code == 2
    assert f"{option} {path} cannot be written: No space left on device" in ended.stderr.replace("\n", "")


def test_a_full_disk_is_said_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "longweave", "plan", "41", "137"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "cannot write: No space left on device\n")
