"""A tier under load, asked as an engine asks: jobs of consecutive chunks, so many in flight."""

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from stepwell.bench.payloads import Payloads
from stepwell.bench.rawio import Stopwatch
from stepwell.bench.storage_options import Shape
from stepwell.bench.storage_results import TIER, Section
from stepwell.core.keys import Key, Root, make_key
from stepwell.core.types import Chunk, ChunkResult, Direction, Job, JobResult, Outcome
from stepwell.errors import TierError
from stepwell.tiers.base import Tier

__all__ = ["JobTier", "TierLoad", "chunk_key"]

_POLL_S = 0.01  # an engine polls once per step, which is 10 ms and more
_DEADLINE_S = 24 * 3600.0  # a job may wait for a slow drive
_STUCK_S = 600.0  # no job reported for so long


class JobTier(Tier, Protocol):
    """What is used of a tier beyond the interface of all tiers."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is running; False if that took longer than ``timeout_s``."""
        ...


class TierLoad:
    """Writes and reads all the chunks of one generation.

    Args:
        tier: not closed here.
        root: of the chunks.
        payloads: the buffers.
        shape: how they make jobs.
        jobs: in flight.
        deadline_s: of each job.
        folders: of its files, if it has any here.
    """

    name: ClassVar[str] = TIER

    def __init__(
        self,
        tier: JobTier,
        root: Root,
        payloads: Payloads,
        shape: Shape,
        *,
        jobs: int,
        deadline_s: float = _DEADLINE_S,
        folders: tuple[Path, ...] = (),
    ) -> None:
        self.folders = folders
        self._tier = tier
        self._root = root
        self._payloads = payloads
        self._in_flight = jobs
        self._deadline_s = deadline_s
        self._chunks_per_job = shape.chunks_per_job
        self._next_id = 0

    def prepare(self) -> None:
        """Nothing: of a drive the former chunks are evicted while the new ones are written."""

    def write(self, generation: int) -> Section:
        """Write all chunks under the keys of a generation.

        Raises:
            TierError: the tier did not take one, or hangs.
        """
        return self._run(Direction.WRITE, generation)

    def read(self, generation: int) -> Section:
        """Read all chunks of a generation.

        Raises:
            TierError: the tier did not have one, or hangs.
        """
        return self._run(Direction.READ, generation)

    def _jobs(self, direction: Direction, generation: int) -> Iterator[Job]:
        for start in range(0, self._payloads.num_chunks, self._chunks_per_job):
            chunks = [
                Chunk(chunk_key(self._root, generation, idx), self._payloads.chunk(idx))
                for idx in range(start, start + self._chunks_per_job)
            ]
            yield Job(self._next_id, direction, chunks, self._deadline_s)
            self._next_id += 1

    def _run(self, direction: Direction, generation: int) -> Section:
        waiting = deque(self._jobs(direction, generation))
        submitted_s: dict[int, float] = {}
        results: list[JobResult] = []
        latencies_s: list[float] = []
        last_s = first_job_s = 0.0
        watch = Stopwatch()
        while waiting or submitted_s:
            while waiting and len(submitted_s) < self._in_flight:
                job = waiting.popleft()
                submitted_s[job.job_id] = watch.elapsed_s()
                self._tier.submit(job)
            finished = self._tier.poll()
            now_s = watch.elapsed_s()
            if finished:
                first_job_s = first_job_s or now_s
                last_s = now_s
                latencies_s += [now_s - submitted_s.pop(result.job_id) for result in finished]
                results += finished
            elif now_s - last_s > _STUCK_S:
                raise TierError(f"the tier reports nothing: op={direction} seconds={_STUCK_S}")
            else:
                time.sleep(_POLL_S)
        watch.stop()
        # What the tier does behind its reports is its CPU time too, and nobody else's.
        if not self._tier.drain(_STUCK_S):
            raise TierError(f"the tier does not come to rest: op={direction}")
        _check_results(results)
        return watch.section(direction, self._payloads.num_bytes, latencies_s, first_job_s)


def chunk_key(root: Root, generation: int, idx: int) -> Key:
    """The key of a chunk of a generation."""
    return make_key(root, hashlib.sha256(f"{generation}:{idx}".encode()).digest())


def _check_results(results: Sequence[JobResult]) -> None:
    """Only DONE counts, and not DONE because a chunk was there already."""
    for result in results:
        for chunk in result.results:
            if chunk != ChunkResult(Outcome.DONE):
                raise TierError(
                    f"the tier did not {result.direction} a chunk, so there is nothing to "
                    f"measure: outcome={chunk.outcome} reason={chunk.reason}"
                )
