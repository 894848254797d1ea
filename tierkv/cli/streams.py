"""Standard streams of the program: opened where they are closed; a failed write is named, or lost with its message."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

HAS_JSON = "tierkv.cli: standard output has a JSON object"
"""Key of the context's ``meta``: true once the command has printed its object. An error adds no second one."""


class NamedOutput(io.TextIOWrapper):
    """Standard output whose errors have its name, as those of a file have a path."""

    def write(self, text: str, /) -> int:
        """Write as a text stream does.

        Raises:
            OSError: nothing can be written; its file name is ``standard output``.
        """
        try:
            return super().write(text)
        except OSError as error:
            raise _named(error) from error

    def flush(self) -> None:
        """Flush as a text stream does. Raises as :meth:`write`."""
        try:
            super().flush()
        except OSError as error:
            raise _named(error) from error


class LossyOutput(io.TextIOWrapper):
    """Standard error, which loses what cannot be written: the exit code stays that of the command."""

    def write(self, text: str, /) -> int:
        """Write as a text stream does, or write nothing."""
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Flush as a text stream does, as far as possible."""
        with suppress(OSError):
            super().flush()


def prepare_streams() -> None:
    """Prepare the standard streams of this process for the program."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        encoding, buffers_lines = sys.stdout.encoding, sys.stdout.line_buffering
        sys.stdout = NamedOutput(sys.stdout.detach(), encoding, line_buffering=buffers_lines)
    if isinstance(sys.stderr, io.TextIOWrapper):
        encoding = sys.stderr.encoding
        sys.stderr = LossyOutput(sys.stderr.detach(), encoding, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding lacks ends no command


def _open_closed_streams() -> None:
    """Open the null device where the program got no standard stream: a file would get its number, and our output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 - until the end


def _named(error: OSError) -> OSError:
    return OSError(error.errno, f"{error.strerror}; what was printed is incomplete", "standard output")
