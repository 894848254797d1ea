"""Small models, engines in processes of their own, vLLM without tierkv to compare with, and a bucket.

Nothing here imports vLLM: engines live in other processes. ``nox -s vllm`` runs this folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode does not see siblings

from fsspec_support import S3Server
from vllm_process import ENVIRONMENT, EngineProcess, PlainTokens, StartEngine, Tokens
from vllm_setups import ARGUMENTS, SEAMS, EngineSetup, Seam

FOLDER = Path(__file__).parent
MODELS_TIMEOUT_S = 300.0
TEST_TIMEOUT_S = 1200
"""Of a test with the engines that it starts. Each start and each call has a shorter one of its own, which says more."""

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIATIERKVTESTS00001",
    "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "NO_PROXY": "127.0.0.1",
}
"""Environment without credentials: no profile, no proxy, no instance metadata. Engines inherit it."""


def pytest_configure(config: pytest.Config) -> None:
    """VLLM and what it imports warn at import; these warnings are not ours to end a test."""
    config.addinivalue_line("filterwarnings", "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder time to start engines on a machine that does other things, too."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder for each small model."""
    folder = tmp_path_factory.mktemp("models")
    maker = Path(__file__).with_name("vllm_models.py")
    done = subprocess.run(
        [sys.executable, str(maker), str(folder)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=MODELS_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return folder


@pytest.fixture(scope="session")
def start_engine(models: Path, tmp_path_factory: pytest.TempPathFactory) -> StartEngine:
    """Start engines by their setups, each with a log of its own."""

    def start(setup: EngineSetup, environment: Mapping[str, str] | None = None) -> EngineProcess:
        log = tmp_path_factory.mktemp("engine") / "log"
        return EngineProcess(setup.engine_arguments(models), log, environment)

    return start


@pytest.fixture(scope="session")
def plain_tokens(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainTokens]:
    """Answers of vLLM without tierkv, with room for everything. One engine per model, for the whole session."""
    engines: dict[str, EngineProcess] = {}
    with ExitStack() as stack:

        def answer(model: str, prompts: Tokens, tokens: int) -> Tokens:
            if model not in engines:
                arguments = {**ARGUMENTS, "model": str(models / model), "num_gpu_blocks_override": 1000}
                log = tmp_path_factory.mktemp("plain") / "log"
                engines[model] = stack.enter_context(EngineProcess(arguments, log))
            # One by one: the answer to a prompt does not depend on who else is served.
            answers = [
                engines[model].call("vllm_scenarios:serve", prompts=[prompt], tokens=tokens)[0] for prompt in prompts
            ]
            return [answer["tokens"] for answer in answers]

        yield answer


@pytest.fixture(scope="module", params=SEAMS)
def seam(request: pytest.FixtureRequest) -> Seam:
    """Each of the two ways into vLLM."""
    seam: Seam = request.param
    return seam


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A real S3 server on the loopback interface; each test makes a bucket of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        server = S3Server()
        yield server
        server.stop()
