"""Running a tier's jobs on threads of its own, first come first served, reads before writes."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stepwell.clock import Clock
from stepwell.core.types import (
    Chunk,
    ChunkResult,
    Direction,
    Job,
    JobResult,
    Outcome,
    Reason,
)
from stepwell.errors import ClosedError
from stepwell.tiers.outcomes import DONE

__all__ = ["JobRunner"]

logger = logging.getLogger(__name__)

_GIVEN_UP = {
    Direction.READ: Outcome.MISS,
    Direction.WRITE: Outcome.FULL,
    Direction.TOUCH: Outcome.MISS,
}


@dataclass(slots=True)
class _Running:
    job: Job
    submitted_s: float
    results: list[ChunkResult | None]
    remaining: int
    moved_bytes: int = 0
    size_bytes: int = field(default=0)


class JobRunner:
    """A queue of chunks and the threads that take them.

    The chunks of a job are taken in order and jobs in the order of their submission: of a burst
    of reads the first is complete while the last still waits, rather than all being half done.
    Every fourth thread, or the last of two or three, looks at writes first, so that neither
    direction starves the other.

    Args:
        name: of the threads.
        num_threads: >= 1.
        run_chunk: does the work of one chunk of a READ or WRITE; called on the runner's threads.
        touch: does the work of a whole TOUCH job.
        on_result: told of every chunk's result, on the runner's threads.
        on_end: told of every READ or WRITE job that ended, before `poll` reports it.
        tier: the tier's name, for results.
        clock: for deadlines.
        inflight_writes_bytes: writes that would go beyond this are refused (QUEUE_FULL).

    Threading: `submit`, `poll`, `drain` and `close` from the owner's thread.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        run_chunk: Callable[[Direction, Chunk], ChunkResult],
        touch: Callable[[Sequence[Chunk]], list[ChunkResult]],
        on_result: Callable[[Direction, Chunk, ChunkResult], None],
        on_end: Callable[[Job, Sequence[ChunkResult]], None],
        tier: str,
        clock: Clock,
        inflight_writes_bytes: int,
    ) -> None:
        self._run_chunk = run_chunk
        self._touch = touch
        self._on_result = on_result
        self._on_end = on_end
        self._tier = tier
        self._clock = clock
        self._inflight_writes_limit_bytes = inflight_writes_bytes
        self._inflight_writes_bytes = 0
        self._changed = threading.Condition()
        self._reads: deque[tuple[_Running, int]] = deque()
        self._writes: deque[tuple[_Running, int]] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self._finished: deque[JobResult] = deque()
        self._unfinished = 0
        self._closed = False
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(num_threads > 1 and idx % 4 == min(3, num_threads - 1),),
                name=f"{name}-{idx}",
                daemon=True,
            )
            for idx in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def unfinished(self) -> int:
        """Jobs that were submitted and have not ended."""
        return self._unfinished

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            ClosedError: after `close`.
            ValueError: no chunks.
        """
        if not job.chunks:
            raise ValueError(f"a job has at least one chunk: job_id={job.job_id}")
        size_bytes = sum(len(chunk.buffer) for chunk in job.chunks)
        running = _Running(
            job, self._clock.monotonic(), [None] * len(job.chunks), len(job.chunks),
            size_bytes=size_bytes,
        )  # fmt: skip
        with self._changed:
            if self._closed:
                raise ClosedError(f"the tier is closed: tier={self._tier}")
            self._unfinished += 1
            if job.direction is Direction.WRITE:
                limit_bytes = self._inflight_writes_limit_bytes
                if self._inflight_writes_bytes + size_bytes > limit_bytes:
                    self._give_up(running, Reason.QUEUE_FULL)
                    return
                self._inflight_writes_bytes += size_bytes
                self._writes.extend((running, idx) for idx in range(len(job.chunks)))
            elif job.direction is Direction.TOUCH:
                self._reads.append((running, 0))
            else:
                self._reads.extend((running, idx) for idx in range(len(job.chunks)))
            self._changed.notify(len(job.chunks))

    def run_soon(self, errand: Callable[[], None]) -> None:
        """Run ``errand`` on a thread of the runner, before jobs; on this one once closed.

        It reports nothing and must not raise. `drain` waits for it.
        """
        with self._changed:
            if not self._closed:
                self._errands.append(errand)
                self._unfinished += 1
                self._changed.notify()
                return
        errand()

    def poll(self) -> list[JobResult]:
        """The jobs that ended since the last call; never waits."""
        finished = []
        while self._finished:
            finished.append(self._finished.popleft())
        return finished

    def drain(self, timeout_s: float) -> bool:
        """Wait until every submitted job has ended; False if that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished == 0, timeout_s)

    def close(self) -> None:
        """Give up what has not begun, wait for what has, stop the threads."""
        with self._changed:
            self._closed = True
            waiting = [*self._reads, *self._writes]
            self._reads.clear()
            self._writes.clear()
            self._changed.notify_all()
        for running, idx in waiting:
            result = self._given_up(running, Reason.CLOSED)
            for chunk_idx in self._indices(running, idx):
                self._end_chunk(running, chunk_idx, result)
        for thread in self._threads:
            thread.join()

    def _work(self, writes_first: bool) -> None:
        while (taken := self._take(writes_first)) is not None:
            if not isinstance(taken, tuple):
                taken()
                with self._changed:
                    self._unfinished -= 1
                    self._changed.notify_all()
                continue
            running, idx = taken
            job = running.job
            results: Sequence[ChunkResult]
            if self._clock.monotonic() - running.submitted_s > job.deadline_s:
                results = [self._given_up(running, Reason.DEADLINE)] * len(
                    self._indices(running, idx)
                )
            else:
                results = self._run(job, idx)
            for chunk_idx, result in zip(self._indices(running, idx), results, strict=True):
                self._end_chunk(running, chunk_idx, result)

    def _run(self, job: Job, idx: int) -> Sequence[ChunkResult]:
        try:
            if job.direction is Direction.TOUCH:
                return self._touch(job.chunks)
            return [self._run_chunk(job.direction, job.chunks[idx])]
        except Exception:  # counted: the result's reason is INTERNAL
            logger.exception("a job failed in an unforeseen way: tier=%s", self._tier)
            failed = ChunkResult(Outcome.FAILED, Reason.INTERNAL)
            return [failed] * (len(job.chunks) if job.direction is Direction.TOUCH else 1)

    def _take(self, writes_first: bool) -> tuple[_Running, int] | Callable[[], None] | None:
        first, second = (self._writes, self._reads) if writes_first else (self._reads, self._writes)
        with self._changed:
            while True:
                if self._errands:
                    return self._errands.popleft()
                if first:
                    return first.popleft()
                if second:
                    return second.popleft()
                if self._closed:
                    return None
                self._changed.wait()

    @staticmethod
    def _indices(running: _Running, idx: int) -> Sequence[int]:
        # A TOUCH is one unit of work, the other jobs are one unit per chunk.
        if running.job.direction is Direction.TOUCH:
            return range(len(running.job.chunks))
        return (idx,)

    @staticmethod
    def _given_up(running: _Running, reason: Reason) -> ChunkResult:
        return ChunkResult(_GIVEN_UP[running.job.direction], reason)

    def _give_up(self, running: _Running, reason: Reason) -> None:
        result = self._given_up(running, reason)
        running.size_bytes = 0
        for idx in range(len(running.job.chunks)):
            self._end_chunk(running, idx, result)

    def _end_chunk(self, running: _Running, idx: int, result: ChunkResult) -> None:
        chunk = running.job.chunks[idx]
        self._on_result(running.job.direction, chunk, result)
        with self._changed:
            running.results[idx] = result
            running.moved_bytes += len(chunk.buffer) if result == DONE else 0
            running.remaining -= 1
            ended = running.remaining == 0
        if ended:
            self._end_job(running)

    def _end_job(self, running: _Running) -> None:
        job = running.job
        results = tuple(result for result in running.results if result is not None)
        if job.direction is not Direction.TOUCH:
            self._on_end(job, results)
        with self._changed:
            if job.direction is Direction.WRITE:
                self._inflight_writes_bytes -= running.size_bytes
            self._finished.append(
                JobResult(
                    job.job_id, job.direction, results, running.moved_bytes,
                    self._clock.monotonic() - running.submitted_s,
                    tuple(self._tier if r.outcome is Outcome.DONE else "" for r in results),
                )
            )  # fmt: skip
            self._unfinished -= 1
            self._changed.notify_all()
