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
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Answer until stdin ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    lines = iter(sys.stdin)

    def answer(act: Callable[[], Any]) -> Any:
        try:
            value = act()
            text = json.dumps({"result": None if hasattr(value, "serve") else value})
        except Exception:  # noqa: BLE001  whatever it is, the test that asked says it
            value, text = None, json.dumps({"error": traceback.format_exc()})
        print(text, file=answers, flush=True)
        return value

    def start() -> Any:
        from vllm_served import ServedEngine  # noqa: PLC0415  the first import of vLLM may fail, and is answered, too

        return ServedEngine(json.loads(next(lines)))

    served = answer(start)
    if served is None:
        return
    for line in lines:
        call = json.loads(line)
        module, _, name = call["function"].partition(":")
        answer(lambda: getattr(importlib.import_module(module), name)(served, **call["arguments"]))  # noqa: B023
    served.close()


if __name__ == "__main__":
    main()
