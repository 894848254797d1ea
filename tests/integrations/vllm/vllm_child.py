"""The process that an engine lives in: ``python vllm_child.py FD``. See :mod:`vllm_process` for its other end.

Lines of JSON come in on stdin: first the arguments of the engine, then calls of scenarios. Each is answered by a line
on the descriptor, ``{"result": ...}`` or ``{"error": "what was raised, and where"}``. stdout belongs to vLLM's log.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from functools import partial
from itertools import chain, repeat
from typing import Any


def main() -> None:
    """Answer until stdin ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    lines = iter(sys.stdin)
    engines: list[Any] = []
    for act in chain([partial(start, engines)], repeat(partial(call, engines))):
        line = next(lines, None)
        if line is None:
            break
        try:
            answer = {"result": act(**json.loads(line))}
        except Exception:  # noqa: BLE001  whatever it is, the test that asked says it
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers)
    for engine in engines:
        engine.close()


def start(engines: list[Any], **arguments: Any) -> None:
    """Make the engine."""
    from vllm_served import ServedEngine  # noqa: PLC0415  an import of vLLM that fails is an answer, too

    engines.append(ServedEngine(arguments))


def call(engines: list[Any], function: str, arguments: dict[str, Any]) -> Any:
    """Run a scenario with it; what it returns."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*engines, **arguments)


if __name__ == "__main__":
    main()
