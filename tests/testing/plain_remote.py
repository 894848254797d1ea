"""A real remote backend for testing the kit: the one that ``tierkv new-plugin --kind remote`` writes, and its server.

Its broken variants are in :mod:`broken_remotes`.
"""

from __future__ import annotations

import atexit
import functools
import sys
import tempfile
from pathlib import Path

from tierkv.cli.new_plugin.command import write_files


def _written() -> Path:
    kept = tempfile.TemporaryDirectory(prefix="tierkv-plain-remote-")
    atexit.register(kept.cleanup)
    folder = Path(kept.name) / "tierkv-plainremote"
    write_files(folder, "plainremote", "remote")
    return folder


FOLDER = _written()
sys.path += [str(FOLDER / "src"), str(FOLDER / "tests")]

import tierkv_plainremote  # noqa: E402  # it has just been written
from tierkv_plainremote.backend import PlainremoteBackend  # noqa: E402  # as above
from tierkv_plainremote.options import PlainremoteOptions  # noqa: E402  # as above
from tierkv_plainremote_server import Server  # noqa: E402  # as above

PLUGIN = tierkv_plainremote.PLUGIN


@functools.cache
def one_server() -> Server:
    """One server for all tests of this process."""
    server = Server()
    atexit.register(server.stop)
    return server


__all__ = ["FOLDER", "PLUGIN", "PlainremoteBackend", "PlainremoteOptions", "Server", "one_server"]
