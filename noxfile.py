"""Sessions of tierkv: tests, checks, documentation, releases.

``python -m nox -l`` lists the sessions, ``python -m nox -s NAME`` runs one, and what follows ``--`` goes to the tool in
it: ``python -m nox -s tests -- -k manager``. Every session installs what it needs; nothing has to be set up first.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).resolve().parent / "tests"))

from sessions.debian import fetch_program
from sessions.engines import GEMMA, LMCACHE, ROUTER, SGLANG, install_vllm, lay_over_vllm, measure_gemma
from sessions.installing import (
    CONSTRAINTS,
    LOCK,
    PLUGINS,
    PYTHONS,
    ROOT,
    everything,
    install,
    local,
    put_real_pythons_first,
    versions_file,
)

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", "types", "layers", "tests", "docs"]

AZURITE = "azurite@3"
VLLM_AB = "vllm_ab"
SGLANG_BENCHMARK = "sglang"
ENGINES_ALONE = "not long and not router"
"""Tests that start one engine at a time."""
TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")
"""Requirements of torch for a CPU."""
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]

put_real_pythons_first()


def pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest on what is installed, never on the checkout: ``-I`` keeps the current folder out of ``sys.path``."""
    session.run("python", "-I", "-m", "pytest", *arguments, *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Every test of the core and of all plugins, torch included, but for the kit's (-- PYTEST ARGUMENTS)."""
    install(session, "torch")
    core = everything("torch", "testing", "encryption", "otel", "transformers")
    install(session, *core, *GROUPS["tests"], *GROUPS["adapters"])
    # A process per core; torch must not take all of them in each. Files stay whole: some share a server.
    session.env["OMP_NUM_THREADS"] = "1"
    # The kit on each plugin is a session of its own, `conformance`.
    pytest(session, "-n", "auto", "--dist", "loadfile", "-m", "not kit")


@nox.session(python=PYTHONS)
def pythons(session: nox.Session) -> None:
    """Every test that needs no torch, on each Python that is installed (-- PYTEST ARGUMENTS)."""
    install(session, *everything("testing", "encryption", "otel"), *GROUPS["tests"])
    pytest(session)


@nox.session
@nox.parametrize("plugin", [nox.param(path, id=path.name.removeprefix("tierkv-")) for path in PLUGINS])
def conformance(session: nox.Session, plugin: Path) -> None:
    """One plugin alone with the core: the conformance kit, and its row in docs (-- PYTEST ARGUMENTS)."""
    install(session, local(ROOT, "testing"), local(plugin, "testing"), *GROUPS["tests"])
    report = ROOT / "build" / "conformance" / f"{plugin.name}.json"
    # A process per core; the tests of a suite stay together, as its report does.
    options = ["--conformance-only", "--conformance-report", str(report), "-n", "auto", "--dist", "loadscope"]
    pytest(session, str(plugin / "tests"), *options)
    if not session.posargs:  # with arguments it may have been a part of it
        session.run("python", "-E", "-s", "docs/_generate/conformance.py", plugin.name, str(report))
        pages = ["capabilities.md", f"backends/{plugin.name.removeprefix('tierkv-')}.md"]
        session.run("python", "-E", "-s", "docs/_generate/pages.py", *pages)


def object_server(session: nox.Session, program: str, folder: Path) -> None:
    """Run the tests of servers of objects while ``program`` runs one."""
    plugin = ROOT / "plugins/tierkv-fsspec"
    install(session, local(ROOT, "testing"), local(plugin, "testing"), *GROUPS["tests"])
    tests = plugin / "tests"
    command = ["python", "-I", "-m", "pytest", str(tests / "test_servers.py"), *session.posargs]
    session.run("python", str(tests / "servers" / program), str(folder), *command)


@nox.session(name="object-radosgw")
def object_radosgw(session: nox.Session) -> None:
    """Tierkv-fsspec on Ceph's S3: Debian's radosgw, fetched, not installed, and run for this (-- PYTEST ARGUMENTS)."""
    object_server(session, "radosgw.py", Path(session.cache_dir) / "ceph")


@nox.session(name="object-azurite")
def object_azurite(session: nox.Session) -> None:
    """Tierkv-fsspec on Azure's emulator, fetched by npm, telemetry off; also through adlfs (-- PYTEST ARGUMENTS)."""
    folder = Path(session.cache_dir) / "azurite"
    npm = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--omit=optional", AZURITE]
    session.run(*npm, external=True, silent=True)
    session.install(*CONSTRAINTS, "adlfs", "azure-storage-blob")
    object_server(session, "azurite.py", folder)


@nox.session
def valkey(session: nox.Session) -> None:
    """Tierkv-valkey on Debian's server, fetched, not installed: kit, outages, cluster, TLS (-- PYTEST ARGUMENTS)."""
    plugin = ROOT / "plugins/tierkv-valkey"
    install(session, local(ROOT, "testing"), local(plugin, "testing"), *GROUPS["tests"])
    packages, names = ("valkey-server", "redis-server"), ("valkey-server", "redis-server")
    program = fetch_program(Path(session.cache_dir) / "valkey", packages, names)
    session.env["TIERKV_TEST_VALKEY_SERVER"] = str(program)
    pytest(session, str(plugin / "tests"), "-n", "auto", "--dist", "loadscope")


@nox.session
def vllm(session: nox.Session) -> None:
    """Both seams inside real vLLM on a CPU, one engine at a time; 2.7 GB of disk (-- PYTEST ARGUMENTS)."""
    install_vllm(session)
    session.install(*CONSTRAINTS, *everything("torch", "testing", "encryption"), *GROUPS["tests"])
    if session.posargs[:1] == [VLLM_AB]:
        session.run("python", "-m", "benchmarks", *session.posargs)
    elif session.posargs[:1] == [GEMMA]:
        measure_gemma(session, *session.posargs[1:])
    elif session.posargs[:1] == [ROUTER]:
        session.install(*CONSTRAINTS, ROUTER)
        tests = ["tests/integrations/vllm/test_router.py", *session.posargs[1:]]
        session.run("python", "-I", "-m", "pytest", "-m", "router", *tests)
    else:
        pytest(session, "tests/integrations/vllm", "-m", ENGINES_ALONE)


@nox.session(name="vllm-long", venv_backend="none")
def vllm_long(session: nox.Session) -> None:
    """The rest in the same environment: processes, restarts, servers, a shared bucket (-- PYTEST ARGUMENTS)."""
    session.notify("vllm", ["-m", "long", *session.posargs])


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Tests and copies on a GPU, in nox's own environment: its torch has CUDA (-- PYTEST ARGUMENTS)."""
    session.run(sys.executable, "-m", "pytest", "-m", "gpu", "tests/worker", "tests/stack", *session.posargs)
    session.run(sys.executable, "-m", "benchmarks", "gpu_copies")


@nox.session(name="vllm-033")
def vllm_033(session: nox.Session) -> None:
    """The next vLLM's Python over this one's CPU libraries: a check, no supported build (-- PYTEST ARGUMENTS)."""
    install_vllm(session)
    session.install(*CONSTRAINTS, *everything("torch", "testing", "encryption"), *GROUPS["tests"])
    lay_over_vllm(session)
    session.env["VLLM_TARGET_DEVICE"] = "cpu"  # the wheel is one for GPUs, and says so
    pytest(session, "tests/integrations/vllm", "-m", ENGINES_ALONE)


@nox.session(venv_backend="none")
def router(session: nox.Session) -> None:
    """In that environment: vllm-router over two servers; each tier's events steer it (-- PYTEST ARGUMENTS)."""
    session.notify("vllm", [ROUTER, *session.posargs])


@nox.session(venv_backend="none")
def gemma(session: nox.Session) -> None:
    """In that environment: a real model in vLLM, transformers, codecs; Gemma's terms apply (-- BENCHMARK OPTIONS)."""
    session.notify("vllm", [GEMMA, *session.posargs])


@nox.session(name="vllm-ab", venv_backend="none")
def vllm_ab(session: nox.Session) -> None:
    """In that environment: both seams and the tiering of vLLM itself; ten minutes (-- BENCHMARK ARGUMENTS)."""
    session.notify("vllm", [VLLM_AB, *session.posargs])


@nox.session
def sglang(session: nox.Session) -> None:
    """The storage backend under SGLang's own pools and controller, on a CPU; 2.8 GB (-- PYTEST ARGUMENTS or sglang)."""
    tests = "tests/integrations/sglang"
    session.install(*CONSTRAINTS, "torch")
    session.install(*CONSTRAINTS, "-r", f"{tests}/requirements.txt")
    session.install("--no-deps", SGLANG)
    session.install(*CONSTRAINTS, *everything("torch", "testing"), *GROUPS["tests"])
    if session.posargs[:1] == [SGLANG_BENCHMARK]:
        session.run("python", "-m", "benchmarks", *session.posargs)
    else:
        pytest(session, tests)


@nox.session
def lmcache(session: nox.Session) -> None:
    """The disk tier beside LMCache's file client, measured in one run; 1 GB of disk (-- BENCHMARK OPTIONS)."""
    session.install(*CONSTRAINTS, "torch")
    session.install("--no-deps", LMCACHE)  # its requirements are for GPUs; its file client needs torch only
    session.install(*CONSTRAINTS, *everything("torch"))
    session.run("python", "-m", "benchmarks", "lmcache", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: every rule, minus the list with reasons in pyproject.toml, and the formatting (-- RUFF CHECK ARGUMENTS)."""
    install(session, *GROUPS["lint"])
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@nox.session(name="format")
def format_(session: nox.Session) -> None:
    """Rewrite the code: what ruff can fix by itself, then the formatting."""
    install(session, *GROUPS["lint"])
    session.run("ruff", "check", "--fix-only", *session.posargs)
    session.run("ruff", "format")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, on the core, the plugins, the public API as users type it, and this file (-- MYPY ARGUMENTS)."""
    install(session, "torch")
    install(session, *everything("torch", "testing", "encryption"), *GROUPS["types"], f"nox{nox.needs_version}")
    session.run("mypy", *session.posargs)


@nox.session
def layers(session: nox.Session) -> None:
    """Import-linter: the layers, and which packages may import threads, torch and terminals (-- ITS ARGUMENTS)."""
    install(session, *GROUPS["layers"])
    session.run("lint-imports", "--no-logo", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation site into build/docs; a warning is an error (-- SPHINX-BUILD ARGUMENTS)."""
    install(session, *GROUPS["docs"])
    session.run("sphinx-build", "-W", "--keep-going", "-E", "-q", "-b", "html", "docs", "build/docs", *session.posargs)


@nox.session
def generate(session: nox.Session) -> None:
    """Rewrite the reference pages that are made from the code; the tests say when this is due."""
    install(session, "torch")  # `tierkv demo --help` is one of the pages
    install(session, local(ROOT, "torch"))
    session.run("python", "-E", "-s", "docs/_generate/pages.py", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """The main job on this machine: a model's KV cache outlives the GPU and the process (-- TIERKV DEMO ARGUMENTS)."""
    install(session, "torch")
    install(session, local(ROOT, "torch"), *map(str, PLUGINS))
    session.run("tierkv", "demo", *session.posargs)


@nox.session
def board(session: nox.Session) -> None:
    """The board and the alerts in Debian's Prometheus, over a stack that fails and heals; 3 minutes (-- --picture)."""
    install(session, "torch")
    install(session, *everything("torch", "testing"), *GROUPS["tests"])
    command = ["python", "-I", "-m", "pytest", "--timeout", "900", "tests/board"]
    answers = Path(session.create_tmp()) / "board.json"
    session.env["TIERKV_BOARD_RESULTS"] = str(answers)
    session.run("python", "tests/board/prometheus.py", str(Path(session.cache_dir) / "prometheus"), *command)
    if "--picture" in session.posargs:
        session.run("python", "docs/_generate/board_picture.py", str(answers))


@nox.session
def nightly(session: nox.Session) -> None:
    """Every property test with twenty times as many cases, parsers too, at night (-- PYTEST ARGUMENTS)."""
    install(session, "torch")
    install(session, *everything("torch", "testing", "encryption"), *GROUPS["tests"])
    folders = [f"tests/{name}" for name in ("scheduler", "manager", "policies", "codecs", "frames", "structures")]
    parsers = [*ROOT.glob("tests/**/test_any_input.py"), *ROOT.glob("plugins/*/tests/test_any_input.py")]
    paths = [*folders, *sorted(str(path.relative_to(ROOT)) for path in parsers)]
    session.env["OMP_NUM_THREADS"] = "1"
    pytest(session, "--hypothesis-profile", "nightly", "--timeout", "3600", "-n", "auto", *paths)


@nox.session
def simulate(session: nox.Session) -> None:
    """Days of faults under simulated time, 200 seeds of them, every byte checked (-- --seeds N --seed S, or --help)."""
    play(session, "simulation")


@nox.session
def crash(session: nox.Session) -> None:
    """Kill writers, fail calls, cut the power: nothing acknowledged is lost (-- --count N --seed S, or --help)."""
    play(session, "harness", "crash")


@nox.session
def exhaust(session: nox.Session) -> None:
    """Take space, descriptors or the device away for a while: tiers heal and say so (-- --count N, or --help)."""
    play(session, "harness", "exhaust")


@nox.session
def soak(session: nox.Session) -> None:
    """Ten minutes of traffic and faults over a stack: nothing grows (-- --minutes N --seed S, or --help)."""
    play(session, "harness", "soak")


def play(session: nox.Session, *program: str) -> None:
    """Run a program of tests/ that is not part of the wheel, on the installed packages."""
    install(session, *everything("testing"))
    session.chdir("tests")
    session.run("python", "-m", *program, *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Change stored files of each local backend, 500 times each, and use each copy (-- --count N, or --help)."""
    install(session, *everything("testing"))
    for program in sorted(ROOT.glob("plugins/*/tests/[!t]*_damage.py")):
        session.run("python", str(program), *(session.posargs or ("--count", "500")))


@nox.session
def build(session: nox.Session) -> None:
    """Sdist and wheel of every distribution into dist/, checked, each installed into an empty environment and used."""
    install(session, *GROUPS["build"])
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for folder in (ROOT, *PLUGINS):
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(dist), str(folder), silent=True)
    session.run("twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
    session.run("python", "-I", "tests/support/wheel_files.py", *map(str, sorted(dist.glob("*.whl"))))
    versions = ["--constraints", str(versions_file(session)), "--lock", str(ROOT / LOCK)]
    session.chdir("tests")
    session.run("python", "-m", "packages", str(dist), *versions)


@nox.session
def oldest(session: nox.Session) -> None:
    """Every distribution in the oldest versions that it accepts of what it requires; no lock names these versions."""
    session.install("uv>=0.9")
    wanted = [local(ROOT, "encryption", "otel"), *(local(plugin, "obstore") for plugin in PLUGINS)]
    place = f"--python={session.virtualenv.location}"
    session.run("uv", "pip", "install", "--quiet", "--resolution", "lowest-direct", "--reinstall", place, *wanted)
    session.run("python", "-I", "tests/packages/smoke.py", "tierkv", *(plugin.name for plugin in PLUGINS))


@nox.session
def changelog(session: nox.Session) -> None:
    """The notes of the next release, from the fragments in changes/ (-- TOWNCRIER BUILD ARGUMENTS)."""
    install(session, *GROUPS["changelog"])
    session.run("towncrier", "build", *(session.posargs or ("--draft", "--version", "next")))


@nox.session
def lock(session: nox.Session) -> None:
    """Rewrite requirements.lock: newer versions, with their hashes (-- UV PIP COMPILE ARGUMENTS)."""
    session.install("uv>=0.9")
    # The constraints have torch: its builds for CPU and GPU come from two indexes. In an index, others have our names.
    # No session installs the extra for vLLM, which pins a torch of its own.
    place = Path(session.virtualenv.location)
    excludes, torch_needs = place / "excludes.txt", place / "torch-needs.txt"
    excludes.write_text("\n".join(["torch", "vllm", "tierkv", *(path.name for path in PLUGINS)]), encoding="utf-8")
    torch_needs.write_text("\n".join((*TORCH_NEEDS, f"nox{nox.needs_version}")), encoding="utf-8")
    wanted = [str(torch_needs), "pyproject.toml", *(str(path.relative_to(ROOT) / "pyproject.toml") for path in PLUGINS)]
    groups = [option for group in GROUPS for option in ("--group", f"pyproject.toml:{group}")]
    options = ["--universal", "--python-version=3.11", "--generate-hashes", "--all-extras", "--no-annotate", "--quiet"]
    command = ["--custom-compile-command", "python -m nox -s lock", "--excludes", str(excludes), "--output-file", LOCK]
    session.run("uv", "pip", "compile", *wanted, *groups, *options, *command, *session.posargs)


@nox.session
def audit(session: nox.Session) -> None:
    """Known vulnerabilities of the locked versions, or a word that no database answers (-- PIP-AUDIT ARGUMENTS)."""
    session.install("pip-audit>=2.9")
    report = Path(session.create_tmp()) / "audit.json"
    command = ["pip-audit", "--requirement", LOCK, "--disable-pip", "--format", "json", "--output", str(report)]
    session.run(*command, *session.posargs, success_codes=[0, 1])
    session.run("python", "-I", "tests/support/audit_report.py", str(report))
