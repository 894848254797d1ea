"""Imports of SGLang on a CPU. ``nox -s sglang`` runs this folder."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch

TORCHVISION_OPERATORS = ("torchvision::nms", "torchvision::qnms")
"""Operators for which torchvision registers shapes while it is imported, whether its library was loaded or not."""


def pytest_configure(config: pytest.Config) -> None:
    """SGLang and what it imports warn at import; these warnings are not ours to end a test."""
    config.addinivalue_line("filterwarnings", "default")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        import_torchvision()


def import_torchvision() -> None:
    """Import torchvision, which SGLang's configurations import, also where it was built for another torch than this.

    The registry's torchvision is built for GPUs. Beside a torch for CPUs its library is not loaded, and its import then
    fails at operators that nothing here calls: their names are enough.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in TORCHVISION_OPERATORS:
            torch.library.define(name, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
