"""Small things that every tier says the same way: results, and how they are counted."""

import errno
from collections import Counter
from collections.abc import Sequence

from stepwell.core.record import Header, verify
from stepwell.core.types import Chunk, ChunkResult, Direction, Outcome, Reason
from stepwell.errors import DataError
from stepwell.metrics import Metrics
from stepwell.tiers.errnos import NO_ROOM_LEFT

__all__ = [
    "ALREADY_THERE",
    "DONE",
    "FAILED",
    "NO_ROOM",
    "count_results",
    "read_failure",
    "verdict",
    "write_refusal",
]

DONE = ChunkResult(Outcome.DONE)
ALREADY_THERE = ChunkResult(Outcome.DONE, Reason.EXISTS)
FAILED = ChunkResult(Outcome.FAILED, Reason.IO_ERROR)
NO_ROOM = ChunkResult(Outcome.FULL, Reason.CAPACITY)


def count_results(
    metrics: Metrics,
    tier: str,
    direction: Direction,
    found: Sequence[tuple[int, ChunkResult]],
) -> None:
    """Count chunks' results, each with the chunk's bytes; a TOUCH moves nothing, and is not
    counted.
    """
    if direction is Direction.TOUCH:
        return
    chunks = Counter((result.outcome, result.reason) for _, result in found)
    for (outcome, reason), count in chunks.items():
        metrics.add(f"{direction}_chunks", (tier, outcome, reason), count)
    num_bytes = sum(size_bytes for size_bytes, result in found if result == DONE)
    if num_bytes:
        metrics.add(f"{direction}_bytes", (tier,), num_bytes)


def verdict(page: memoryview | bytes | None, chunk: Chunk, now_us: int) -> ChunkResult:
    """Whether a record that was read is the chunk's: its header's page, and what has arrived.

    Args:
        page: None where the record was cut.
        chunk: whose buffer has the payload.
        now_us: microseconds since the epoch.
    """
    if page is None:
        return ChunkResult(Outcome.MISS, Reason.TRUNCATED)
    try:
        header = Header.unpack(page)
        verify(header, chunk.buffer, chunk.key, now_us)
    except DataError as error:
        return ChunkResult(Outcome.MISS, Reason(error.reason))
    if header.expires_at_us:
        return ChunkResult(Outcome.DONE, Reason.NONE, header.expires_at_us / 1e6)
    return DONE


def read_failure(error: OSError) -> ChunkResult:
    """What a failed read means: no memory, or a medium that failed."""
    if error.errno == errno.ENOMEM:
        return ChunkResult(Outcome.FAILED, Reason.INTERNAL)
    return FAILED


def write_refusal(error: OSError) -> ChunkResult:
    """What a failed write means: no room on the medium, no memory, or a medium that failed."""
    if error.errno in NO_ROOM_LEFT:
        return ChunkResult(Outcome.FULL, Reason.NO_SPACE)
    return read_failure(error)
