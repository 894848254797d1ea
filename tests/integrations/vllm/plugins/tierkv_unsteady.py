"""A tier for tests that hangs or raises when a file says so: rows of SQLite behind :class:`FaultyBackend`.

It says that others may write to it, so every lookup has to ask it, and waits for the answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.abc import BackendContext, BackendPlugin, Capabilities
from tierkv.hookspecs import hookimpl
from tierkv.testing.faults import Fault, FaultyBackend, Inner, VerbName
from tierkv_example import ExampleBackend, ExampleOptions

TIERKV_SPI = 1
VERBS: tuple[VerbName, ...] = ("contains", "read_into", "write", "delete")
PATIENCE_S = 0.01


@dataclass(frozen=True, slots=True)
class UnsteadyOptions:
    """Path: a directory for the data. orders: a JSON file, verb -> ``"hang"`` or ``"raise"``, read at every call."""

    path: str
    orders: str


def obey(orders: Path, verb: VerbName) -> Fault:
    """Do what the file says about that verb now; what hangs goes on when the file says otherwise."""

    def order() -> object:
        return json.loads(orders.read_text(encoding="utf-8")).get(verb)

    def fault(batch: Sequence[Any], inner: Inner) -> object:
        while order() == "hang":
            time.sleep(PATIENCE_S)
        if order() == "raise":
            raise OSError(f"{verb}: as ordered")
        return inner(batch)

    return fault


def open_backend(context: BackendContext, options: UnsteadyOptions) -> FaultyBackend:
    """A steady backend, and the rules that spoil it."""
    backend = FaultyBackend(ExampleBackend(context, ExampleOptions(options.path)))
    for verb in VERBS:
        backend.add(verb, obey(Path(options.orders), verb))
    return backend


CAPABILITIES = Capabilities(durable=True, shared=True, bounded=False)
PLUGIN = BackendPlugin("unsteady", "hangs and raises as ordered", UnsteadyOptions, CAPABILITIES, open_backend)


@hookimpl
def tierkv_backends() -> list[BackendPlugin]:
    """Register the backend."""
    return [PLUGIN]
