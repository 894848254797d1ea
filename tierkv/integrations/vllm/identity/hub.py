"""Commits of models on the Hugging Face hub: the name of a model stays the same when its branch moves."""

from __future__ import annotations

import importlib
from typing import Any


def commit_of(revision: object) -> str:
    """Commit that vLLM found for a revision before it fetched the model; empty where it found none.

    vLLM keeps the hub's ``ResolvedRevision``: text as the user named it, such as "main", with the commit beside it.
    """
    return str(getattr(revision, "resolved", None) or "")


def fetched_commit(name: str) -> str:
    """Commit of the main branch of a model that was fetched to the hub's cache; empty where none was."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        return commit_of(hub.HfApi().resolve_revision(name, local_files_only=True))
    except Exception:  # noqa: BLE001 - the hub's client is optional, and refuses what is no name
        return ""
