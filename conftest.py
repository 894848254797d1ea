"""Fixtures of all tests: the seed, the torch marker, the helper modules, the root."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import secrets
import sys
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent

# Test modules of a plugin may share helpers beside them. Their names are unique (a test in tests/house checks it), and
# they are last on the path, so they hide no other module. The folders of the core are listed in pyproject.toml.
sys.path += [str(path) for path in sorted(ROOT.glob("plugins/*/tests"))]

# Before anything imports torch: tests share their cores with other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Machines check their invariants after every transition.
os.environ.setdefault("TIERKV_VALIDATE", "1")

# Tests do not judge wall time, so there is no deadline; a failing example prints the line that repeats it.
hypothesis.settings.register_profile("tierkv", deadline=None, print_blob=True)
# Twenty times as many examples, for a machine that has the night: --hypothesis-profile nightly
hypothesis.settings.register_profile("nightly", parent=hypothesis.settings.get_profile("tierkv"), max_examples=2000)
# The same examples in every run, for a CI that names its seed.
hypothesis.settings.register_profile("fixed", parent=hypothesis.settings.get_profile("tierkv"), derandomize=True)

FIXED_SEED = os.environ.get("TIERKV_TEST_SEED", "")
"""Seed of every run, from the environment: in place of a new one for each."""

hypothesis.settings.load_profile("fixed" if FIXED_SEED else "tierkv")

HAS_TORCH = importlib.util.find_spec("torch") is not None
# Folders of which no test means anything without torch. Single tests elsewhere have the mark `needs_torch`.
collect_ignore = [] if HAS_TORCH else ["tests/reference", "tests/stack", "tests/worker"]
if importlib.util.find_spec("vllm") is None:  # `nox -s vllm` has it
    collect_ignore.append("tests/integrations/vllm")
if importlib.util.find_spec("sglang") is None:  # `nox -s sglang` has it
    collect_ignore.append("tests/integrations/sglang")
if not HAS_TORCH or importlib.util.find_spec("transformers") is None:
    collect_ignore.append("tests/integrations/transformers")

SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Accept the seed that a failure printed."""
    parser.addoption("--seed", type=int, default=None, help="repeat a run: the seed of the fixture `rng`")


def pytest_configure(config: pytest.Config) -> None:
    """Choose one seed for the whole run."""
    given = config.getoption("--seed")
    chosen = int(FIXED_SEED) if FIXED_SEED else secrets.randbits(32)
    config.stash[SEED] = chosen if given is None else given


def pytest_collection_finish() -> None:
    """Keep collected modules out of garbage collection: full collections between tests took a third of the time."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    """Say the seed where every log begins."""
    return f"tierkv: --seed {config.stash[SEED]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print with a failure of a random test what repeats it."""
    report = yield
    if report.failed and "rng" in getattr(item, "fixturenames", ()):
        report.sections.append(("Repeat it", f"--seed {item.config.stash[SEED]} {item.nodeid!r}"))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the kit on plugins, and skip what is marked ``needs_torch`` where torch is not installed."""
    for item in items:
        if "plugins" in item.path.parts and getattr(getattr(item, "cls", None), "is_conformance_kit", False):
            item.add_marker(pytest.mark.kit)
    if not HAS_TORCH:
        for item in items:
            if item.get_closest_marker("needs_torch"):
                item.add_marker(pytest.mark.skip(reason="torch is not installed"))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Randomness of this test alone: the same for the same ``--seed``, whichever other tests run."""
    return random.Random(f"{request.config.stash[SEED]} {request.node.nodeid}")


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the checkout."""
    return ROOT
