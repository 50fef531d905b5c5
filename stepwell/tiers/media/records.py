"""What media have in common: names of records, and records as one piece of bytes."""

from stepwell.core.keys import Key, Root, engine_key_of, root_of
from stepwell.core.record import HEADER_BYTES, Header
from stepwell.core.types import ChunkResult, Outcome, Reason
from stepwell.errors import DataError
from stepwell.tiers.media.base import Page, Record

__all__ = [
    "ABSENT",
    "LAYOUT",
    "TRUNCATED",
    "joined",
    "name_of",
    "other_length",
    "root_name",
    "split",
]

ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)
TRUNCATED = ChunkResult(Outcome.MISS, Reason.TRUNCATED)
LAYOUT = ChunkResult(Outcome.MISS, Reason.LAYOUT)


def root_name(root: Root) -> str:
    """A root in the names of its records: 64 hexadecimal digits."""
    return root.hex()


def name_of(key: Key) -> tuple[str, str]:
    """A chunk's name in two parts: its root, and its engine key, both hexadecimal."""
    return root_name(root_of(key)), engine_key_of(key).hex()


def joined(record: Record) -> bytes:
    """Header and payload, one behind the other and without padding."""
    return b"".join((record.header, record.payload))


def split(content: bytes | memoryview, payload: memoryview) -> Page | ChunkResult:
    """Copy the payload out of what `joined` made, and return the header's page, not verified."""
    view = memoryview(content)
    if len(view) < HEADER_BYTES:
        return TRUNCATED
    if len(view) != HEADER_BYTES + len(payload):
        return other_length(view, len(view), len(payload))
    payload.cast("B")[:] = view[HEADER_BYTES:]
    return view[:HEADER_BYTES]


def other_length(head: memoryview, size_bytes: int, payload_bytes: int) -> ChunkResult:
    """What a record is that has not the length that was asked for.

    Args:
        head: its first 4096 bytes, or more.
        size_bytes: that there are of it.
        payload_bytes: that were asked for.
    """
    try:
        header = Header.unpack(head)
    except DataError as error:
        return ChunkResult(Outcome.MISS, Reason(error.reason))
    whole = size_bytes >= HEADER_BYTES + header.payload_bytes
    return LAYOUT if whole or header.payload_bytes != payload_bytes else TRUNCATED
