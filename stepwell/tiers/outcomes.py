"""Small things that every tier says the same way: results, and how they are counted."""

import errno

from stepwell.core.types import Chunk, ChunkResult, Direction, Outcome, Reason
from stepwell.metrics import Metrics

__all__ = ["ALREADY_THERE", "DONE", "NO_ROOM", "count_result", "write_refusal"]

DONE = ChunkResult(Outcome.DONE)
ALREADY_THERE = ChunkResult(Outcome.DONE, Reason.EXISTS)
NO_ROOM = ChunkResult(Outcome.FULL, Reason.CAPACITY)


def count_result(
    metrics: Metrics, tier: str, direction: Direction, chunk: Chunk, result: ChunkResult
) -> None:
    """Count one chunk's result; a TOUCH moves nothing and is not counted."""
    if direction is Direction.TOUCH:
        return
    metrics.add(f"{direction}_chunks", (tier, result.outcome, result.reason))
    if result == DONE:
        metrics.add(f"{direction}_bytes", (tier,), len(chunk.buffer))


def write_refusal(error: OSError) -> ChunkResult:
    """What a failed write means: no room on the medium, or a medium that failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ChunkResult(Outcome.FULL, Reason.NO_SPACE)
    return ChunkResult(Outcome.FAILED, Reason.IO_ERROR)
