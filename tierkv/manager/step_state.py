"""State of the current engine step that the parts of a manager share."""

from __future__ import annotations


class StepState:
    """Time of the step and version of all answers. One per manager, held by every part that needs it."""

    __slots__ = ("now", "version")

    def __init__(self) -> None:
        self.now = 0.0
        """Time in seconds on the stack's clock. Constant from one ``begin_step`` to the next."""
        self.version = 0
        """Grows whenever an answer that was "not known yet" may have become known."""
