"""The kit accepts a correct backend, blocking or async, over real files."""

from __future__ import annotations

from pathlib import Path

import broken_at_rest
import plain_files

from tierkv.abc import BackendContext
from tierkv.testing import BackendConformance


class TestPlainFiles(BackendConformance):
    plugin = plain_files.PLUGIN
    not_installed = "the backend is a page for these tests"
    raw_live = True

    def make_options(self, place: Path) -> plain_files.PlainOptions:
        return plain_files.PlainOptions(str(place))

    def raw(self, place: Path, context: BackendContext) -> plain_files.PlainRaw:
        return plain_files.PlainRaw(place, context)


class TestAsyncPlainFiles(TestPlainFiles):
    plugin = plain_files.ASYNC_PLUGIN


class TestSharedPlainFiles(TestPlainFiles):
    plugin = plain_files.SHARED_PLUGIN


class TestReadOnlyPlainFiles(TestPlainFiles):
    plugin = plain_files.READ_ONLY_PLUGIN


class TestDescribedFiles(TestPlainFiles):
    plugin = broken_at_rest.AT_REST_PLUGIN
