"""`longweave …` and `python -m longweave …`: the command line, or a line that says which extra it needs."""

from __future__ import annotations

import sys
from errno import EDQUOT, ENOSPC

from longweave import __version__
from longweave.extras import extra_of


def main() -> None:
    """Run the command line. `--version` needs no extra; what needs one that is missing says so and exits with 1.

    So does a machine that has no room left, on its disk or in its memory.
    """
    if sys.argv[1:] == ["--version"]:
        print(f"longweave {__version__}")
        return
    try:
        from longweave.cli import app

        app(prog_name="longweave")
    except ModuleNotFoundError as error:
        extra = extra_of(error.name)
        if extra is None:
            raise
        raise SystemExit(f"this command needs {error.name}, which is not installed: pip install '{extra}'") from None
    except MemoryError:
        raise SystemExit("this machine has not enough memory for that") from None
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT):
            raise
        sys.stdout = None  # what is left in its buffer would fail again on the way out
        raise SystemExit(f"cannot write: {error.strerror}") from None


if __name__ == "__main__":
    main()
