"""Bad arguments to commands: an exit code, a line that says what and why, no traceback, and nothing was started."""

import pytest
from typer.testing import CliRunner

from longweave.cli import app

BAD = {
    "plan": "Missing argument",
    "plan x": "a valid integer",
    "plan -- -5": "length 0 is -5; lengths are 0 or more",
    "plan 7 -5": "length 1 is -5; lengths are 0 or more",
    "plan 7 --rank 3": "there is no option --rank",
    "plan 7 --lengths-file x.txt": "give one of them",
    "plan --lengths-file /no/such/file.txt": "No such file",
    "plan --lengths-file /no/such/file.parquet": "ends in .txt, .json, .csv, .npy",
    "plan 5 --mask q": "mask is 'q'",
    "plan 5 --window 0": "window is 0",
    "plan 5 9 --mask full --window 3": "see ahead",
    "plan 5 --node-size 0": "node_size is 0",
    "plan 5 --picture /proc/x.png": "cannot be written",
    "plan 5 --picture p.xyz": "ends in one of",
    "plan 5 --html /proc/x.html": "cannot be written",
    "plan 5 --ranks 500 --html p.html": "at most 256 ranks",
    "plan 4294967296": "has 4294967296 keys; give documents of at most 3000000000 tokens",
    "plan 3000000000 3000000000": "pairs of query and key, which cannot be counted in 64 bits; give fewer",
    "plan 99999999999999999999999": "length 0 is '99999999999999999999999'",
    "plan 999999999999999999 5": "the lengths add up to",
    "plan 5 --ranks 0": "ranks is 0",
    "plan 5 --ranks 99999999999": "ranks is 99999999999",
    "plan 5 --layout q": "layout is 'q'",
    "plan 5 --strategy q": "strategy is 'q'",
    "plan 5 --heads 0": "heads is 0",
    "plan 5 --heads 99999999999999999999": "heads is 99999999999999999999",
    "plan 5 --kv-heads 3": "multiple of K/V heads",
    "plan 5 --head-dim -1": "head_dim is -1",
    "plan 5 --png /proc/x.png": "cannot be written",
    "train --ranks 0": "--ranks",
    "train --ranks 99999": "--ranks",
    "train --model q": "model is 'q'",
    "train --steps -1": "steps is -1",
    "train --tokens 0": "tokens is 0",
    "train --layers 0": "layers is 0",
    "train --lr nan": "lr is nan",
    "train --lr -1": "lr is -1",
    "train --clip inf": "clip is inf",
    "train --dp 0": "dp is 0",
    "train --dp 3": "give a divisor",
    "train --accumulate 0": "accumulate is 0",
    "train --layout q": "layout is 'q'",
    "train --strategy q": "strategy is 'q'",
    "train --save-every -1": "save_every is -1",
    "train --resume /no/such/folder": "does not exist",
    "doctor --device q": "device is 'q'",
    "doctor --ranks 0": "--ranks",
    "doctor --model q": "model is 'q'",
    "doctor --json /proc/x": "cannot be written",
    "bench attention 0": "TOKENS",
    "bench packed 0": "TOKENS",
    "bench compare 0": "TOKENS",
    "bench compare 64 --ranks 0": "--ranks",
    "bench compare 64 --picture p.xyz": "ends in one of",
    "bench pool --picture /proc/x.png": "cannot be written",
    "bench host --rounds 0": "--rounds",
    "bench linear 0": "TOKENS",
    "bench pool --ranks 1": "--ranks",
    "bench pool --rows 0": "--rows",
    "bench nonsense": "No such command",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_arguments_are_named(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr("longweave.launch.Ranks._start", lambda *_: pytest.fail("a rank was started"))
    result = CliRunner().invoke(app, line.split(), env={"COLUMNS": "300"})
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert BAD[line].lower() in " ".join(result.output.split()).lower()
