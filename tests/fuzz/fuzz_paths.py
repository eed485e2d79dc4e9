"""Imported first by the scripts of this folder: tests import each other by name, from the folders that pytest knows."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["pythonpath"]
sys.path += [str(path) for path in (ROOT, *(ROOT / folder for folder in _folders)) if str(path) not in sys.path]
