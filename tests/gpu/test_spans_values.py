"""The package's own Triton kernels give the right numbers: the tests are in the files named here."""

from collections.abc import Callable


def test_in_the_interpreter(interpreted: Callable[..., None]) -> None:
    interpreted("interpreted_spans.py", "interpreted_fused.py", "interpreted_conv.py", "interpreted_ranks.py")
