"""What a user installs: the wheel and the source distribution, and the command in an environment without extras.

Built here without isolation and installed without an index: nothing is downloaded.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import longweave as lw
from longweave.extras import EXTRAS, extra_of, require

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SKIPPED = shutil.ignore_patterns(".*", "out", "build", "dist", "site", "*.egg-info", "__pycache__")
BUILD = "import sys, setuptools.build_meta as b; out = sys.argv[1]; b.build_wheel(out); b.build_sdist(out)"

pytestmark = pytest.mark.skipif(not (ROOT / "MANIFEST.in").exists(), reason="not in the repository")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, made from a copy: the repository stays clean."""
    source, out = tmp_path_factory.mktemp("source") / "longweave", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, source, ignore=SKIPPED)
    done = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def sources() -> set[str]:
    """All of the package that is not made by running it: modules, the page's assets, the mark of its types."""
    files = [path for path in (ROOT / "longweave").rglob("*") if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    wheel = only(built, "*.whl")
    assert wheel.name == f"longweave-{lw.__version__}-py3-none-any.whl"
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    package = {name for name in names if ".dist-info/" not in name}
    assert package == sources()
    about = {name.partition(".dist-info/")[2] for name in names - package}
    assert about == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}


def test_the_source_distribution_can_build_and_test_itself(built: Path) -> None:
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sources() <= names
    asked = {"Makefile", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "pyproject.toml", "MANIFEST.in"}
    for folder in ("tests", "docs", "examples"):
        asked |= {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
    assert asked <= names
    assert not [name for name in names if name.endswith(".pyc") or name.startswith((".venv", "out", "site", "build"))]


def test_versions_agree_and_every_extra_exists() -> None:
    assert PROJECT["version"] == lw.__version__
    declared = PROJECT["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert any(line.startswith(package) for line in declared[extra]), f"{extra} does not bring {package}"
    assert {line.partition(">")[0] for line in PROJECT["dependencies"]} == {"torch", "numpy"}


def test_require() -> None:
    require("numpy", "torch")
    assert extra_of("matplotlib.pyplot") == "longweave[plot]"
    assert extra_of(None) is extra_of("no_such_package") is None
    with pytest.raises(ModuleNotFoundError, match="pip install 'no_such_package'") as caught:
        require("numpy", "no_such_package")
    assert caught.value.name == "no_such_package"


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and with numpy as its only dependency: torch is large, and no extra is there."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home / "env", symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "env" / "bin" / "python"), "install", "-q"]
    wheel = str(only(built, "*.whl"))
    subprocess.run([*pip, "--no-deps", "--no-index", "--disable-pip-version-check", wheel], check=True)
    site = only(home / "env" / "lib", "python*/site-packages")
    numpy = find_spec("numpy")
    assert numpy is not None
    assert numpy.origin is not None
    for folder in Path(numpy.origin).parents[1].glob("numpy*"):
        (site / folder.name).symlink_to(folder)
    return home


def run(bare: Path, *args: str) -> subprocess.CompletedProcess[str]:
    binaries = bare / "env" / "bin"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(binaries / args[0]), *args[1:]]
    return subprocess.run(command, cwd=bare, env=kept, capture_output=True, text=True)


@pytest.mark.parametrize("command", [("longweave",), ("python", "-m", "longweave")], ids=" ".join)
def test_without_extras_the_command_names_the_one_it_needs(bare: Path, command: tuple[str, ...]) -> None:
    version = run(bare, *command, "--version")
    assert (version.returncode, version.stdout) == (0, f"longweave {lw.__version__}\n"), version.stderr
    told = run(bare, *command, "--help")
    assert told.returncode == 1
    assert told.stderr == "this command needs typer, which is not installed: pip install 'longweave[cli]'\n"


def test_plans_need_no_torch(bare: Path) -> None:
    code = "import longweave as lw; print(sum(lw.Layout.zigzag([0, 9], 2).counts))"
    done = run(bare, "python", "-c", code)
    assert (done.returncode, done.stdout) == (0, "9\n"), done.stderr


def test_with_extras_it_helps() -> None:
    command = [sys.executable, "-m", "longweave"]
    told = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=ROOT)
    assert told.returncode == 0, told.stderr
    assert all(name in told.stdout for name in ("plan", "doctor", "audit", "bench", "train", "--version"))
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, cwd=ROOT)
    assert version.stdout == f"longweave {lw.__version__}\n"
