"""What tests of the CUDA side share: Triton's interpreter in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def triton_installed() -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed; `make` installs it, pip does with longweave[triton]")


@pytest.fixture
def interpreted(triton_installed: None) -> Callable[..., None]:
    """Runs files of tests with Triton's interpreter.

    Kernels are interpreted if the variable is there when they are defined. In this process they are compiled ones.
    """

    def run(*files: str) -> None:
        paths = [str(HERE / file) for file in files]
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=5", *paths]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parent.parent)
        print(done.stdout, done.stderr)
        assert done.returncode == 0, "tests failed in the interpreter: see above"
        assert " passed" in done.stdout
        assert " skipped" not in done.stdout

    return run
