"""Identity of adapters (LoRA): digests of their files, where vLLM finds them. Does not import vLLM."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from tierkv.errors import EngineProtocolError
from tierkv.integrations.vllm.identity.files import files_of, folder_digest

_log = logging.getLogger(__name__)

_Stamps = tuple[tuple[str, int, int], ...]


class Adapters:
    """Identities of adapters, as vLLM has loaded them. Scheduler's thread; reads the files of each adapter once."""

    def __init__(self) -> None:
        self._fetched: set[tuple[int, str]] = set()
        """Number and path of adapters from a hub that have served a request."""
        self._known: dict[tuple[int, str], tuple[_Stamps, str | None]] = {}
        self._first: dict[tuple[str, str], str] = {}
        """First digest by name and path, which is all that vLLM's hashes have of an adapter."""
        self._replaced: set[tuple[str, str]] = set()

    def digest_of(self, lora_request: Any) -> str | None:  # noqa: ANN401 - (the same)
        """Digest of the adapter's files; empty where it has none here. None: they are not those that vLLM loaded.

        vLLM loads an adapter once for each number, and says nothing when it loads it again. So after a change its KV
        has an unknown meaning, unless the request itself loads the adapter (``load_inplace``). An adapter from a hub is
        fetched at its first request, perhaps with files that are newer than those on this machine.
        """
        name = _name_of(lora_request)
        loads = getattr(lora_request, "load_inplace", False)
        try:
            place = local_place(name[1])
            if place is None or (_is_from_hub(name[1]) and (loads or name not in self._fetched)):
                return None
            stamps = _stamps_of(place)
            known = self._known.get(name)
            if known is None or (loads and (known[0] != stamps or known[1] is None)):
                known = self._known[name] = (stamps, self._read(lora_request, place))
        except OSError as error:
            _log.warning("adapter %r cannot be read, and is served without tierkv: %s", name[1], error)
            return None
        if known[0] != stamps and known[1] is not None:
            _log.warning(
                "adapter %r has changed since it was loaded, and is served without tierkv: load it under another "
                "lora_int_id, or restart vLLM",
                name[1],
            )
            known = self._known[name] = (stamps, None)
        return known[1]

    def note_served(self, lora_request: Any) -> None:  # noqa: ANN401 - (the same)
        """Note that a request with the adapter has computed tokens, so vLLM has loaded the adapter."""
        name = _name_of(lora_request)
        if name not in self._fetched and _is_from_hub(name[1]):
            self._fetched.add(name)
            if local_place(name[1]) is None:
                _log.warning(
                    "adapter %r is in no folder of this machine, and is served without tierkv: download it, and give "
                    "vLLM the path of its folder",
                    name[1],
                )

    def _read(self, lora_request: Any, place: str) -> str:  # noqa: ANN401 - (the same)
        digest, hashed = folder_digest(place), _hashed(lora_request)
        if self._first.setdefault(hashed, digest) != digest:
            self._replaced.add(hashed)
        return digest

    def check_own_hit(self, lora_request: Any) -> None:  # noqa: ANN401 - (the same)
        """Check the adapter of a request for which vLLM's own cache had a part of the prompt.

        Raises:
            EngineProtocolError: another adapter had its name and path before. vLLM's hashes of both are equal, so that
                part may be KV of the previous one, and must not be stored as that of this one.
        """
        if lora_request is not None and _hashed(lora_request) in self._replaced:
            raise EngineProtocolError(
                f"adapter {lora_request.lora_name!r} replaced another one under the same path, and vLLM's own cache "
                "has KV for this prompt, which may be of the previous one: reset vLLM's prefix cache after such a "
                "change, or load each adapter from a path of its own"
            )


def _name_of(lora_request: Any) -> tuple[int, str]:  # noqa: ANN401 - (the same)
    """Number and path of an adapter."""
    return int(lora_request.lora_int_id), str(getattr(lora_request, "lora_path", "") or "")


def local_place(path: str) -> str | None:
    """Folder of an adapter as vLLM finds it; None: it must be fetched, or was fetched from an unknown hub.

    A path may begin with the user's home (``~``). A relative path that does not exist is the name of an adapter on the
    Hugging Face hub, whose newest files on this machine are in the hub's cache.
    """
    if not _is_from_hub(path):
        return os.path.expanduser(path)  # noqa: PTH111 - as vLLM does it
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        found = hub.try_to_load_from_cache(path, "adapter_config.json")
    except Exception:  # noqa: BLE001 - the hub's client is optional, and refuses what is no name
        return None
    return os.path.dirname(found) if isinstance(found, str) else None  # noqa: PTH120 - (the same)


def _is_from_hub(path: str) -> bool:
    return bool(path) and not path.startswith("~") and not os.path.isabs(path) and not os.path.exists(path)  # noqa: PTH110, PTH117 - (the same)


def _hashed(lora_request: Any) -> tuple[str, str]:  # noqa: ANN401 - (the same)
    """Name and path of an adapter: all that vLLM's hashes of blocks have of it."""
    return str(lora_request.lora_name), str(getattr(lora_request, "lora_path", "") or "")


def _stamps_of(place: str) -> _Stamps:
    """Names, sizes and times of change of an adapter's files."""
    found = ((file.name, file.stat()) for file in files_of(place))
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)
