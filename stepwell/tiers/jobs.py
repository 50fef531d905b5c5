"""Running a tier's jobs on threads of its own, first come first served, reads before writes."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stepwell.core.keys import Key
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
from stepwell.tiers.base import TierContext
from stepwell.tiers.outcomes import DONE, count_result

__all__ = ["JobRunner", "Work"]

logger = logging.getLogger(__name__)

_GIVEN_UP = {
    Direction.READ: Outcome.MISS,
    Direction.WRITE: Outcome.FULL,
    Direction.TOUCH: Outcome.MISS,
}


class Work(Protocol):
    """What a tier does; all of it is called on the runner's threads."""

    @property
    def name(self) -> str:
        """The tier's name, for threads, results and metrics."""
        ...

    def run_chunk(self, direction: Direction, chunk: Chunk) -> ChunkResult:
        """Read or write one chunk."""
        ...

    def use(self, prefix: Sequence[Key]) -> Sequence[bool]:
        """Make chunks recent, the first the most; says which are there. Called before the job
        that used them is reported, so it does no I/O."""
        ...


@dataclass(slots=True)
class _Running:
    job: Job
    submitted_s: float
    results: list[ChunkResult | None]
    remaining: int
    moved_bytes: int = 0


class JobRunner:
    """A queue of chunks and the threads that take them.

    The chunks of a job are taken in order and jobs in the order of their submission: of a burst
    of reads the first is complete while the last still waits, rather than all being half done.
    Every fourth thread, or the last of two or three, looks at writes first, so that neither
    direction starves the other.

    Args:
        work: what to do with a chunk.
        num_threads: >= 1.
        context: clock and metrics.
        inflight_writes_bytes: chunks of writes beyond this are refused (QUEUE_FULL), the last
            ones of a job first.

    Threading: `submit`, `poll`, `drain` and `close` from the owner's thread.
    """

    def __init__(
        self, work: Work, num_threads: int, context: TierContext, inflight_writes_bytes: int
    ) -> None:
        self._work = work
        self._clock = context.clock
        self._metrics = context.metrics
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
                target=self._run_queue,
                args=(num_threads > 1 and idx % 4 == min(3, num_threads - 1),),
                name=f"stepwell-{work.name}-{idx}",
                daemon=True,
            )
            for idx in range(num_threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            # No more threads to be had: leave none behind, or they would wait for ever.
            self.close()
            raise

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
        num_chunks = len(job.chunks)
        running = _Running(job, self._clock.monotonic(), [None] * num_chunks, num_chunks)
        refused: Sequence[int] = ()
        with self._changed:
            if self._closed:
                raise ClosedError(f"the tier is closed: tier={self._work.name}")
            self._unfinished += 1
            if job.direction is Direction.TOUCH:
                self._reads.append((running, 0))
            elif job.direction is Direction.READ:
                self._reads.extend((running, idx) for idx in range(num_chunks))
            else:
                admitted = self._admit(job.chunks)
                self._writes.extend((running, idx) for idx in range(admitted))
                refused = range(admitted, num_chunks)
            self._changed.notify(num_chunks)
        for idx in refused:
            self._end_chunk(running, idx, ChunkResult(Outcome.FULL, Reason.QUEUE_FULL))

    def _admit(self, chunks: Sequence[Chunk]) -> int:
        # The beginning of a prefix is of use without its end, so the end is what is refused.
        for idx, chunk in enumerate(chunks):
            inflight_bytes = self._inflight_writes_bytes + len(chunk.buffer)
            if inflight_bytes > self._inflight_writes_limit_bytes:
                return idx
            self._inflight_writes_bytes = inflight_bytes
        return len(chunks)

    def run_soon(self, errand: Callable[[], None]) -> None:
        """Run ``errand`` soon on a thread of the runner; on this one once closed.

        It reports nothing. `drain` waits for it.
        """
        with self._changed:
            if not self._closed:
                self._errands.append(errand)
                self._unfinished += 1
                self._changed.notify()
                return
        self._run_errand(errand)

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
            if thread.ident is not None:
                thread.join()

    def _run_queue(self, writes_first: bool) -> None:
        while (taken := self._take(writes_first)) is not None:
            if not isinstance(taken, tuple):
                self._run_errand(taken)
                with self._changed:
                    self._unfinished -= 1
                    self._changed.notify_all()
                continue
            running, idx = taken
            indices = self._indices(running, idx)
            if self._clock.monotonic() - running.submitted_s > running.job.deadline_s:
                results = [self._given_up(running, Reason.DEADLINE)] * len(indices)
            else:
                results = self._run(running.job, indices)
            for chunk_idx, result in zip(indices, results, strict=True):
                self._end_chunk(running, chunk_idx, result)

    def _run(self, job: Job, indices: Sequence[int]) -> list[ChunkResult]:
        try:
            if job.direction is not Direction.TOUCH:
                return [self._work.run_chunk(job.direction, job.chunks[idx]) for idx in indices]
            found = self._work.use([chunk.key for chunk in job.chunks])
            absent = ChunkResult(Outcome.MISS, Reason.ABSENT)
            return [DONE if here else absent for here in found]
        except Exception:  # counted: the result's reason is INTERNAL
            logger.exception("a job failed in an unforeseen way: tier=%s", self._work.name)
            return [ChunkResult(Outcome.FAILED, Reason.INTERNAL)] * len(indices)

    def _run_errand(self, errand: Callable[[], None]) -> None:
        try:
            errand()
        except Exception:  # counted as internal_errors
            self._count_internal_error("errand")

    def _count_internal_error(self, where: str) -> None:
        logger.exception("an unforeseen error: tier=%s where=%s", self._work.name, where)
        self._metrics.add("internal_errors", (where,))

    def _take(self, writes_first: bool) -> tuple[_Running, int] | Callable[[], None] | None:
        # Errands go after reads, which somebody waits for; but never behind an endless stream
        # of them, so the threads that look at writes first, or the only thread, take them first.
        errands_first = writes_first or len(self._threads) == 1
        first, second = (self._writes, self._reads) if writes_first else (self._reads, self._writes)
        with self._changed:
            while True:
                if self._errands and (errands_first or not first):
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

    def _end_chunk(self, running: _Running, idx: int, result: ChunkResult) -> None:
        job, chunk = running.job, running.job.chunks[idx]
        count_result(self._metrics, self._work.name, job.direction, chunk, result)
        with self._changed:
            running.results[idx] = result
            running.moved_bytes += len(chunk.buffer) if result == DONE else 0
            if job.direction is Direction.WRITE and result.reason is not Reason.QUEUE_FULL:
                self._inflight_writes_bytes -= len(chunk.buffer)
            running.remaining -= 1
            ended = running.remaining == 0
        if ended:
            self._end_job(running)

    def _end_job(self, running: _Running) -> None:
        job = running.job
        results = tuple(result for result in running.results if result is not None)
        if job.direction is not Direction.TOUCH:
            # Only the whole job knows the order of the prefix: its chunks end in any order.
            done = zip(job.chunks, results, strict=True)
            try:
                self._work.use([chunk.key for chunk, r in done if r.outcome is Outcome.DONE])
            except Exception:  # counted as internal_errors
                self._count_internal_error("use")
        name = self._work.name
        tiers = tuple(name if r.outcome is Outcome.DONE else "" for r in results)
        elapsed_s = self._clock.monotonic() - running.submitted_s
        ended = JobResult(job.job_id, job.direction, results, running.moved_bytes, elapsed_s, tiers)
        with self._changed:
            self._finished.append(ended)
            self._unfinished -= 1
            self._changed.notify_all()
