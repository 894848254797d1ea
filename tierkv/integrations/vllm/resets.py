"""Resets asked through vLLM, for both adapters. Does not import vLLM."""

from __future__ import annotations

import logging
import secrets

from tierkv.manager.contract import ResetScope
from tierkv.stack.stack import Stack
from tierkv.stack.staged import StagedStack

_log = logging.getLogger(__name__)


def reset_stack(stack: Stack | StagedStack, scope: ResetScope) -> None:
    """Empty the host tier, or make every previous chunk of every tier unreachable. Engine's thread, between steps.

    With "all", a tier that is shared or read-only is taken out of service until vLLM restarts: its chunks are not ours
    to delete, and new weights must not fill it under the name of the old ones.

    Raises:
        EngineProtocolError: called inside a step. The host tier is unchanged.
    """
    if scope == "all":
        detached = stack.tiers.detach_not_ours()
        if detached:
            _log.warning(
                "vLLM reset its cache, and tierkv must not empty tier %s (shared or read-only): it is out of service "
                'until vLLM restarts. Set tierkv_reset_scope = "host" if weights never change in a running server',
                " and ".join(map(repr, detached)),
            )
    stack.reset_cache(scope)


def weights_since_reset() -> str:
    """Text that names the weights in memory after a reset, for the keys of chunks.

    They may be other weights than those of the folder, which the namespace names. So no other process, and no later
    reset, has an equal text: an engine that starts with the weights of the folder must not find these chunks.
    """
    return secrets.token_hex(8)
