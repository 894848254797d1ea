"""A vLLM whose version is unknown to tierkv, in real engines: used with a warning, or refused with a list."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from vllm_process import EngineError, StartEngine
from vllm_setups import EngineSetup, Seam, cached_of, prompts, tokens_of

MEMORY = {"host": {"capacity": "16MiB"}, "lookup": {"recompute": "off"}}
UNKNOWN = "import tierkv.integrations.vllm.versions as versions\nversions.SUPPORTED = ('0.1',)\n"
RENAMED = """
from tierkv.integrations.vllm import signatures
signatures.READ = {**signatures.READ, "vllm.v1.request:Request": ("request_id", "renamed")}
"""


def environment(folder: Path, code: str) -> dict[str, str]:
    """Environment of an engine that runs ``code`` at the start of Python."""
    (folder / "sitecustomize.py").write_text(code, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def test_one_that_fits_serves_and_one_line_warns(seam: Seam, start_engine: StartEngine, tmp_path: Path) -> None:
    """An upgrade of vLLM is no outage, and the log says what was not tested."""
    asked = prompts("unknown version", 3)
    with start_engine(EngineSetup(seam, MEMORY), environment(tmp_path, UNKNOWN)) as engine:
        first = engine.call("vllm_scenarios:serve", prompts=asked)
        second = engine.call("vllm_scenarios:serve_again", prompts=asked)
        log = engine.log.read_text(encoding="utf-8")
    assert cached_of(second) == [192] * 3
    assert tokens_of(second) == tokens_of(first)
    assert log.count("is unknown to this version of tierkv, which was tested with 0.1.x") == 1


@pytest.mark.parametrize(
    ("code", "options", "words"),
    [
        pytest.param(UNKNOWN, {"tierkv_strict": True}, ["tierkv_strict = true", "supports 0.1.x"], id="strict"),
        pytest.param(UNKNOWN + RENAMED, {}, ["vllm.v1.request:Request has no attribute 'renamed'"], id="misfit"),
    ],
)
def test_one_that_does_not_fit_is_refused(
    seam: Seam, start_engine: StartEngine, tmp_path: Path, code: str, options: dict[str, bool], words: list[str]
) -> None:
    """Before the model is served, and with the reason."""
    with pytest.raises(EngineError) as caught:
        start_engine(EngineSetup(seam, MEMORY, options=options), environment(tmp_path, code))
    assert all(word in str(caught.value) for word in words)
