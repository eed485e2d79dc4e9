"""Which extra brings a package that is not installed."""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "typer": "cli",
    "rich": "cli",
    "matplotlib": "plot",
    "transformers": "hf",
    "accelerate": "trainers",
    "trl": "trainers",
    "peft": "trainers",
    "triton": "triton",
}


def extra_of(package: str | None) -> str | None:
    """`longweave[…]` that brings a package or a module in it; None for one that no extra brings."""
    extra = EXTRAS.get((package or "").partition(".")[0])
    return None if extra is None else f"longweave[{extra}]"


def require(*packages: str) -> None:
    """Raise `ModuleNotFoundError` now, not after minutes of work, if one of the packages is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(
                f"{package} is not installed: pip install '{extra_of(package) or package}'", name=package
            )
