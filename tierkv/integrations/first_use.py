"""Public names of an adapter, loaded on first use: importing its package loads neither the engine nor torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping


def load(package: str, homes: Mapping[str, str], name: str) -> object:
    """For a package's ``__getattr__`` (PEP 562): what stands under a public name, after a look at the engine's version.

    Args:
        package: of the adapter; its module ``versions`` has a function ``check_installed``.
        homes: public names, and the modules of the package that have them.
        name: what is asked for.

    Raises:
        AttributeError: there is no such name.
        EngineVersionError: the engine's version is not served.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
    importlib.import_module(f"{package}.versions").check_installed()
    found: object = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
    return found
