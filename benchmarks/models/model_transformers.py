"""A real model in transformers with tierkv (``--model FOLDER``): computed, loaded from memory, loaded from disk.

Time to the first token of ``generate``, text by text: without tierkv, of a prompt that is new, of the same one again,
and of the same one in the next process. Answers are compared with those of ``model.generate`` without tierkv.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.measure import Settings
from benchmarks.models.first_tokens import Processes, row
from benchmarks.rows import Row


def run(settings: Settings) -> Iterator[Row]:
    """Measure a process that starts empty, and the next one."""
    if settings.model is None:
        _say("no model was given (--model FOLDER), so nothing is measured")
        return
    if importlib.util.find_spec("transformers") is None:
        _say("transformers is not installed here, so nothing is measured")
        return
    programs = Processes("benchmarks.models.model_generate", settings.model, settings, {"HF_HUB_OFFLINE": "1"})
    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="model-transformers-") as place:
        _say("a process that begins with nothing")
        first = programs.run(place=place, passes=["alone", "computed", "memory"])
        _say("the next process")
        second = programs.run(place=place, passes=["disk"])
    same = {"those without tierkv": first["alone"]}
    yield row("computed: TieredPrefixCache", first["computed"], "generate without tierkv", first["alone"], same)
    for name, found in (("from memory", first["memory"]), ("from disk, after a restart", second["disk"])):
        yield row(f"{name}: TieredPrefixCache", found, "computed", first["computed"], same)


def _say(what: str) -> None:
    sys.stderr.write(f"model_transformers: {what}\n")
    sys.stderr.flush()
