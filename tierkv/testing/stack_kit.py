"""What the suites share that put the backend into a stack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tierkv.testing.hand_engine import Prompt
from tierkv.testing.kit import MIB, KitBase
from tierkv.testing.small_stack import SmallStack

A, B, C = Prompt(1), Prompt(2), Prompt(3)
"""Three texts of four chunks."""


class StackKit(KitBase):
    """How a stack is opened over the backend."""

    def stack(self, place: Path, *, capacity_bytes: int | None = None, **options: Any) -> SmallStack:  # noqa: ANN401  # SmallStack's own keywords
        """A small stack over the backend at ``place``; see :class:`SmallStack` for the options."""
        self.need()
        capacity = capacity_bytes or self.capacity_bytes or 64 * MIB
        return SmallStack(
            self.plugin,
            self.make_options,
            place,
            capacity_bytes=None if self.capabilities.shared else capacity,
            **options,
        )

    @pytest.fixture
    def opened(self, place: Path) -> Iterator[SmallStack]:
        """A stack over an empty place."""
        with self.stack(place) as stack:
            yield stack
