"""What media have in common: names of records, and records as one piece of bytes."""

import errno
from collections.abc import Sequence

import numpy as np

from stepwell.core.keys import Key, Root, engine_key_of, root_of
from stepwell.core.record import HEADER_BYTES, Header
from stepwell.core.types import ChunkResult, Outcome, Reason
from stepwell.errors import DataError
from stepwell.tiers.errnos import GONE
from stepwell.tiers.media.base import Page, Record
from stepwell.tiers.outcomes import read_failure

__all__ = [
    "ABSENT",
    "LAYOUT",
    "TRUNCATED",
    "arrived",
    "joined",
    "lay_out",
    "name_of",
    "not_read",
    "offsets_of",
    "other_length",
    "root_name",
    "split",
]

ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)
TRUNCATED = ChunkResult(Outcome.MISS, Reason.TRUNCATED)
LAYOUT = ChunkResult(Outcome.MISS, Reason.LAYOUT)
_NOT_A_FILE = ChunkResult(Outcome.MISS, Reason.NOT_A_FILE)


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


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Where each begins if they lie one behind the other."""
    offsets, offset = [], 0
    for size in sizes:
        offsets.append(offset)
        offset += size
    return offsets


def arrived(memory: memoryview, count: int, payload: memoryview) -> Page | ChunkResult:
    """What became of a record that was read.

    Args:
        memory: where it was read to, as long as it should be.
        count: bytes that came, or an errno, negative.
        payload: where the payload is copied, without the interpreter's lock. To be called by the
            thread that the buffer belongs to, so that nothing comes later.
    """
    if count < 0:
        return not_read(-count)
    if count < len(memory):
        return TRUNCATED
    content = np.frombuffer(memory, np.uint8)[HEADER_BYTES : HEADER_BYTES + len(payload)]
    np.copyto(np.frombuffer(payload, np.uint8), content)
    return bytes(memory[:HEADER_BYTES])


def not_read(number: int) -> ChunkResult:
    """What an errno says of a record that was to be read; EISDIR of whatever is no file."""
    if number in GONE:
        return ABSENT
    return _NOT_A_FILE if number == errno.EISDIR else read_failure(OSError(number, ""))


def lay_out(memory: memoryview, record: Record) -> None:
    """Copy a record to where it is written from, zeros behind it."""
    target = np.frombuffer(memory, np.uint8)
    end = HEADER_BYTES + len(record.payload)
    target[:HEADER_BYTES] = np.frombuffer(record.header, np.uint8)
    np.copyto(target[HEADER_BYTES:end], np.frombuffer(record.payload, np.uint8))
    target[end:] = 0
