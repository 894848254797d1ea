"""Recognition of frames by their first page, for backends that lost their index."""

from __future__ import annotations

from tierkv.errors import CorruptFrameError
from tierkv.frames.frame import HEADER_BYTES, MAGIC, NO_CODEC, pad, parse_header
from tierkv.types.keys import Key


def recognise_frame(namespace: bytes, alignment: int, page: memoryview) -> tuple[Key, int] | None:
    """Return key and length of the frame that begins with ``page``.

    With the first two arguments bound, this is a :data:`tierkv.abc.FrameRecogniser`.

    Args:
        namespace: fingerprint of the namespace that the frame must belong to.
        alignment: alignment of the tier: the length of an encoded frame is a multiple of it.
        page: the first 4096 bytes, or more.

    Returns:
        Key and length of the frame as the tier wrote it. Only the header is verified, not the payload or its presence.
        None: no frame begins here, its header is damaged, or it belongs to another namespace.
    """
    # Nearly every page is part of a payload: raising an exception for each would take longer than reading it.
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
