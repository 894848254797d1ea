"""Time that a caller gives to a wait."""

from __future__ import annotations

import math

from tierkv.errors import wrong_value

WAIT_MAX_S = 7 * 86_400.0
"""Longest wait. Waits of the system count milliseconds, and end after some weeks."""


def bounded_seconds(call: str, timeout_s: object) -> float:
    """Return the time of a wait, at most :data:`WAIT_MAX_S`.

    Args:
        call: name of the call, for the message.
        timeout_s: seconds, as they were given.

    Raises:
        EngineProtocolError: it is no number of seconds. Without end is none: a tier, or a copy, may hang for ever.
    """
    if isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool) and -math.inf < timeout_s < math.inf:
        return min(timeout_s, WAIT_MAX_S)
    rule = "give a finite number of seconds, such as 3600; what is waited for may hang for ever"
    raise wrong_value(call, "timeout_s", timeout_s, rule)
