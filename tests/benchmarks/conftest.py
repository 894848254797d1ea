"""The package ``benchmarks``, of the checkout; everything it imports of tierkv is what is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _offer_benchmarks() -> None:
    """Not by way of ``sys.path``: the checkout's root would shadow the installed tierkv."""
    folder = Path(__file__).parents[2] / "benchmarks"
    spec = importlib.util.spec_from_file_location(
        "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


_offer_benchmarks()
