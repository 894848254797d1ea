"""Public names of an adapter, loaded on first use, so that importing the package loads no engine and no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping


def load(package: str, modules: Mapping[str, str], name: str) -> object:
    """Return a public name of a package, after a check of the engine's version. For ``__getattr__`` (PEP 562).

    Args:
        package: name of the adapter's package. Its module ``versions`` has a function ``check_installed``.
        modules: public names, and the modules of the package that define them.
        name: the requested name.

    Raises:
        AttributeError: the package has no such name.
        EngineVersionError: the adapter does not support the engine's version.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(modules))}")
    importlib.import_module(f"{package}.versions").check_installed()
    found: object = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
    return found
