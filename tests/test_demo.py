"""What `make demo` shows."""

import pytest

from longweave.tools import demo


def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    demo.main()
    said = capsys.readouterr().out
    assert said.count("tokens bit-exact: True, gradient bit-exact: True") == 4
    assert said.count("rank 3") == 3
