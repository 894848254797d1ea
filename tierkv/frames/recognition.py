"""Knowing a frame by its first page, for backends that lost track of what lies where."""

from __future__ import annotations

from tierkv.errors import CorruptFrameError
from tierkv.frames.frame import HEADER_BYTES, MAGIC, NO_CODEC, pad, parse_header
from tierkv.types.keys import Key


def recognise_frame(namespace: bytes, alignment: int, page: memoryview) -> tuple[Key, int] | None:
    """Key and length of the frame that begins here. With the first two arguments: a :data:`tierkv.abc.FrameRecogniser`.

    Args:
        namespace: fingerprint of the namespace that the frame must belong to.
        alignment: of the tier: frames of its codec have a length that is a multiple of it.
        page: the first 4,096 bytes, or more.

    Returns:
        None: no frame begins here, or one with a damaged header, or one of another namespace. The length is what the
        tier wrote; whether so much is there, and undamaged, is not looked at.
    """
    # Nearly every page is somewhere in a payload: an exception for each would take longer than reading it.
    if bytes(page[: len(MAGIC)]) != MAGIC:
        return None
    try:
        header = parse_header(page)
    except CorruptFrameError:
        return None
    if header.namespace != namespace:
        return None
    end = HEADER_BYTES + header.stored_bytes
    return Key(header.key), pad(end, HEADER_BYTES if header.codec == NO_CODEC else alignment)
