"""Exception of compiled code that has panicked."""

from __future__ import annotations


class Panic(BaseException):
    """No ``Exception``, as in extensions in Rust."""
