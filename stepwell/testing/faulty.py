"""A real tier around another that fails, misses or delays on chosen chunks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from stepwell.core.keys import Key
from stepwell.core.types import Chunk, ChunkResult, Direction, Job, JobResult, Lookup
from stepwell.tiers.base import Tier

__all__ = ["FaultyTier"]


class FaultyTier:
    """Passes everything on to ``tier``, except for the faults it was told of.

    The chunks of READ and WRITE jobs are counted from 1 in the order of their submission, per
    direction. A chunk with a fault never reaches the inner tier; what a failed read leaves in
    the buffer is garbage, as the contract allows.

    Args:
        tier: does the work.
        name: takes the place of the inner tier's.
        read_faults: number of a chunk among the reads -> the result that it gets.
        write_faults: the same for writes.
        hold: asked at every `poll` for each ended job; True keeps the job for a later poll.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        name: str = "",
        read_faults: Callable[[int], ChunkResult | None] = lambda _: None,
        write_faults: Callable[[int], ChunkResult | None] = lambda _: None,
        hold: Callable[[JobResult], bool] = lambda _: False,
    ) -> None:
        self.tier = tier
        self.name = name or tier.name
        self.hold = hold
        self._faults = {Direction.READ: read_faults, Direction.WRITE: write_faults}
        self._counts = {Direction.READ: 0, Direction.WRITE: 0}
        self._jobs: dict[int, tuple[Job, list[ChunkResult | None]]] = {}
        self._ended: list[JobResult] = []

    @property
    def under_way(self) -> list[tuple[int, float]]:
        """What the inner tier says of it; nothing if it does not."""
        return list(getattr(self.tier, "under_way", ()))

    def contains(self, keys: Sequence[Key]) -> list[Lookup]:
        """See `stepwell.tiers.base.Tier.contains`."""
        return self.tier.contains(keys)

    def submit(self, job: Job) -> None:
        """See `stepwell.tiers.base.Tier.submit`."""
        faults = [self._fault(job.direction, chunk) for chunk in job.chunks]
        left = [chunk for chunk, fault in zip(job.chunks, faults, strict=True) if fault is None]
        if left or not job.chunks:
            self.tier.submit(replace(job, chunks=left))
            self._jobs[job.job_id] = (job, faults)
        else:
            results = tuple(fault for fault in faults if fault is not None)
            self._ended.append(
                JobResult(job.job_id, job.direction, results, 0, 0.0, ("",) * len(results))
            )

    def poll(self) -> list[JobResult]:
        """See `stepwell.tiers.base.Tier.poll`."""
        self._ended += [self._whole(result) for result in self.tier.poll()]
        reported = [result for result in self._ended if not self.hold(result)]
        self._ended = [result for result in self._ended if result not in reported]
        return reported

    def delete(self, keys: Sequence[Key]) -> int:
        """See `stepwell.tiers.base.Tier.delete`."""
        return self.tier.delete(keys)

    def close(self) -> None:
        """See `stepwell.tiers.base.Tier.close`."""
        self.tier.close()

    def _fault(self, direction: Direction, chunk: Chunk) -> ChunkResult | None:
        if direction is Direction.TOUCH:
            return None
        self._counts[direction] += 1
        fault = self._faults[direction](self._counts[direction])
        if fault is not None and direction is Direction.READ:
            chunk.buffer[:] = b"\xee" * len(chunk.buffer)
        return fault

    def _whole(self, result: JobResult) -> JobResult:
        job, faults = self._jobs.pop(result.job_id)
        inner = zip(result.results, result.tiers, strict=True)
        pairs = [(fault, "") if fault is not None else next(inner) for fault in faults]
        return JobResult(
            job.job_id, job.direction, tuple(r for r, _ in pairs), result.moved_bytes,
            result.elapsed_s, tuple(self.name if name else "" for _, name in pairs),
            result.slowest_s,
        )  # fmt: skip
