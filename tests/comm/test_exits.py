"""Short runs end with exit code 0: nothing that lives to the end of the process keeps threads of the group alive."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNS = 15 if os.environ.get("LONGWEAVE_FULL") else 2


@pytest.mark.parametrize("how", ["destroys", "forgets"])
@pytest.mark.parametrize("run", range(RUNS))
def test_a_short_run_ends_well(how: str, run: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("exits.py")
    commands = [[sys.executable, str(script), str(rank), "2", str(tmp_path / "store"), how] for rank in range(2)]
    running = [subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for one in commands]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "done\n"), err[-2000:]
