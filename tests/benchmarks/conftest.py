"""The workshop's benchmarks, for tests of their pure parts: they are not installed, and the checkout is no path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def _make_importable() -> None:
    """``import benchmarks`` finds the checkout's, while ``import tierkv`` still finds the one that is installed."""
    place = {"submodule_search_locations": [str(FOLDER)]}
    spec = importlib.util.spec_from_file_location("benchmarks", FOLDER / "__init__.py", **place)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{FOLDER} is no package")
    package = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = package
    spec.loader.exec_module(package)


_make_importable()
