"""Groups of an engine that makes the keys of its chunks itself."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.errors import EngineProtocolError, wrong_value
from tierkv.types.keys import GROUP_BYTES, Key


class KeyGroups:
    """Groups by the number at the end of a key.

    Args:
        group_ids: the number of each group.
    """

    def __init__(self, group_ids: Sequence[int]) -> None:
        self._groups = {number.to_bytes(GROUP_BYTES, "big"): i for i, number in enumerate(group_ids)}

    def group_of(self, key: Key) -> int:
        """Return the group of a chunk.

        Raises:
            EngineProtocolError: the key is not bytes, has an empty hash, or belongs to no group of the engine.
        """
        groups = self._groups
        try:
            suffix = key[-GROUP_BYTES:]
            if suffix in groups and key not in groups:  # the latter: nothing is before the number of the group
                return groups[suffix]
            shown = key.hex()
        except (AttributeError, TypeError, LookupError) as error:
            raise EngineProtocolError(f"chunk {key!r:.80}: give a key, which is bytes") from error
        raise EngineProtocolError(f"chunk {shown} has an empty hash, or belongs to no group of this engine", key=key)

    def groups_of(self, call: str, chunks: Sequence[tuple[Key, int]]) -> dict[Key, int]:
        """Return the groups of chunks that are given with the token at their end.

        Raises:
            EngineProtocolError: they are no such pairs, or :meth:`group_of` refuses a key.
        """
        try:
            for _, end_token in chunks:
                if end_token.__class__ is not int and not hasattr(end_token, "__index__"):  # usual: no call
                    raise wrong_value(call, "chunks", chunks, _PAIRS)
            return {key: self.group_of(key) for key, _ in chunks}
        except (TypeError, ValueError) as error:
            raise wrong_value(call, "chunks", chunks, _PAIRS) from error


_PAIRS = "give pairs of a key and the number of tokens up to the end of the chunk"
