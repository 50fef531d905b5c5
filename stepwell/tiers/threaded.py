"""What the tiers with threads of their own have in common: an index and a runner of jobs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from stepwell.core.keys import Key
from stepwell.core.types import Chunk, ChunkResult, Direction, Job, JobResult, Lookup
from stepwell.tiers.base import TierContext
from stepwell.tiers.index import ChunkIndex
from stepwell.tiers.jobs import JobRunner

__all__ = ["ThreadedTier"]


class ThreadedTier(ABC):
    """The part of a tier that does not depend on its medium.

    Threading, Ownership, Errors, Cost: as `stepwell.tiers.base.Tier` states; reading, writing
    and hashing happen on the tier's own threads.

    Args:
        index: what the tier holds.
        context: shared by the store's tiers.
        num_threads: >= 1.
        inflight_writes_bytes: chunks of writes beyond this are refused.
    """

    name: ClassVar[str]

    def __init__(
        self, index: ChunkIndex, context: TierContext, num_threads: int, inflight_writes_bytes: int
    ) -> None:
        self._index = index
        self._context = context
        self._runner = JobRunner(self, num_threads, context, inflight_writes_bytes)

    def contains(self, keys: Sequence[Key]) -> list[Lookup]:
        """See `stepwell.tiers.base.Tier.contains`."""
        return self._index.states(keys)

    def submit(self, job: Job) -> None:
        """See `stepwell.tiers.base.Tier.submit`."""
        self._runner.submit(job)

    def poll(self) -> list[JobResult]:
        """See `stepwell.tiers.base.Tier.poll`."""
        return self._runner.poll()

    def delete(self, keys: Sequence[Key]) -> int:
        """See `stepwell.tiers.base.Tier.delete`."""
        held = [key for key in keys if self._index.states([key])[0] is not Lookup.MISS]
        leaving = [key for key in held if self._index.remove(key)]
        if leaving:
            self._runner.run_soon(lambda: self._discard_all(leaving))
        return len(held)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is running; False if that took longer than ``timeout_s``."""
        return self._runner.drain(timeout_s)

    def close(self) -> None:
        """See `stepwell.tiers.base.Tier.close`."""
        self._runner.close()

    def run_chunk(self, direction: Direction, chunk: Chunk) -> ChunkResult:
        """See `stepwell.tiers.jobs.Work.run_chunk`."""
        return self._read(chunk) if direction is Direction.READ else self._write(chunk)

    def use(self, prefix: Sequence[Key]) -> Sequence[bool]:
        """See `stepwell.tiers.jobs.Work.use`."""
        return self._index.touch(prefix)

    def _discard_all(self, leaving: Sequence[Key]) -> None:
        for key in leaving:
            self._discard(key)

    @abstractmethod
    def _read(self, chunk: Chunk) -> ChunkResult: ...

    @abstractmethod
    def _write(self, chunk: Chunk) -> ChunkResult: ...

    @abstractmethod
    def _discard(self, leaving: Key) -> bool:
        """Remove a leaving chunk from the medium and give its bytes back."""
