"""Running a tier's jobs on threads of its own: order, deadlines, bounds, one read per chunk."""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stepwell.core.keys import Key
from stepwell.core.record import payload_checksum
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
from stepwell.tiers.outcomes import DONE, count_results

__all__ = ["JobRunner", "Work"]

logger = logging.getLogger(__name__)

_GIVEN_UP = {
    Direction.READ: Outcome.MISS,
    Direction.WRITE: Outcome.FULL,
    Direction.TOUCH: Outcome.MISS,
}

_NO_JOB = -1
_BATCH_BYTES = 16 << 20
_BATCH_CHUNKS = 256
# Once a read has waited so long, every other turn goes to the one that has waited longest.
_PATIENCE_S = 1.0
# A thread that does not come back within this is left behind: its drive does not answer.
_CLOSE_WAIT_S = 10.0


class Work(Protocol):
    """What a tier does; all of it is called on the runner's threads."""

    @property
    def name(self) -> str:
        """The tier's name, for threads, results and metrics."""
        ...

    def run_batch(
        self, direction: Direction, chunks: Sequence[Chunk], within_s: float
    ) -> Sequence[ChunkResult]:
        """Read or write consecutive chunks of one job; one result each.

        ``within_s`` is what is left of the job's time, above zero or not: whoever can stop an
        operation that takes longer does so.
        """
        ...

    def use(self, prefix: Sequence[Key]) -> Sequence[bool]:
        """Make chunks recent, the first the most; says which are there. Does no I/O. As a rule
        it has been called when the job that used them is reported."""
        ...

    def settle(self) -> None:
        """What is left to do after a piece of work, I/O included."""
        ...


@dataclass(slots=True, eq=False)
class _Running:
    """A job that has not ended.

    Attributes:
        sizes: bytes of each chunk's buffer, which may be released by whoever owns it: what is kept
            of a job must not depend on that.
        results: per chunk; None until it is known.
        taken: per chunk, whether a thread has it or its result is known.
        next_idx: no chunk before this waits any more.
        waiting_bytes: of chunks that no thread has taken.
        remaining: chunks without a result.
    """

    job: Job
    submitted_s: float
    sizes: Sequence[int]
    results: list[ChunkResult | None]
    taken: bytearray
    waiting_bytes: int
    remaining: int
    next_idx: int = 0
    moved_bytes: int = 0
    slowest_s: float = 0.0

    def overdue(self, now_s: float) -> bool:
        """Whether what has not begun is given up."""
        return now_s - self.submitted_s > self.job.deadline_s

    @property
    def waiting(self) -> bool:
        """Whether any chunk waits for a thread."""
        return self.next_idx < len(self.taken)

    def take(self, idx: int) -> None:
        """A thread has the chunk, or its result is known."""
        self.taken[idx] = 1
        self.waiting_bytes -= self.sizes[idx]
        while self.next_idx < len(self.taken) and self.taken[self.next_idx]:
            self.next_idx += 1


_Ended = tuple[int, ChunkResult]  # index of a chunk in its job, and what became of it
_Seat = tuple[_Running, int]  # a chunk of a job: where a read's bytes are wanted


class JobRunner:
    """Queues of jobs and the threads that take batches of chunks from them.

    Reads: the job with the least left to read goes first, so that of a burst one after the other
    is complete, rather than all being half done; but once one has waited for a second, every
    other turn is the oldest one's, so that none starves. Several reads that wait for the same
    chunk are served by one. Writes go in order, and one that finds its chunk being written by
    another job ends with that. Every fourth thread, or the last of two or three, looks at writes
    first, so that neither direction starves the other.

    Args:
        work: what to do with a batch.
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
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # there may be work
        self._rested = threading.Condition(lock)  # something has ended
        self._reads: list[_Running] = []
        self._writes: list[_Running] = []
        self._touches: deque[_Running] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self._seats: dict[Key, list[_Seat]] = {}  # chunks that wait to be read, or are being read
        self._writing: dict[Key, list[_Seat]] = {}  # chunks under way, and who writes them as well
        self._under_way: dict[int, tuple[int, float]] = {}  # thread -> job, begun
        self._first_deadline_s = math.inf  # of what waits; may be early, never late
        self._finished: deque[JobResult] = deque()
        self._unfinished = 0
        self._oldest_next = False
        self._closed = False
        self._threads = [
            threading.Thread(
                target=self._run_queues,
                args=(idx, num_threads > 1 and idx % 4 == min(3, num_threads - 1)),
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

    # The owner's side.

    @property
    def unfinished(self) -> int:
        """Jobs that were submitted and have not ended."""
        return self._unfinished

    @property
    def queued_read_bytes(self) -> int:
        """Bytes of reads that no thread has taken yet."""
        with self._changed:
            return sum(running.waiting_bytes for running in self._reads)

    @property
    def under_way(self) -> list[tuple[int, float]]:
        """The operations that are running now: of which job, -1 for none, and since when."""
        with self._changed:
            return list(self._under_way.values())

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            ClosedError: after `close`.
            ValueError: no chunks.
        """
        if not job.chunks:
            raise ValueError(f"a job has at least one chunk: job_id={job.job_id}")
        num_chunks = len(job.chunks)
        sizes = [len(chunk.buffer) for chunk in job.chunks]
        running = _Running(
            job,
            self._clock.monotonic(),
            sizes,
            [None] * num_chunks,
            bytearray(num_chunks),
            sum(sizes),
            num_chunks,
        )
        refused: Sequence[int] = ()
        with self._changed:
            if self._closed:
                raise ClosedError(f"the tier is closed: tier={self._work.name}")
            self._unfinished += 1
            deadline_s = running.submitted_s + job.deadline_s
            self._first_deadline_s = min(self._first_deadline_s, deadline_s)
            if job.direction is Direction.TOUCH:
                self._touches.append(running)
            elif job.direction is Direction.READ:
                self._take_seats(running)
            else:
                refused = range(self._admit(job.chunks), num_chunks)
                for idx in refused:
                    running.take(idx)
                if running.waiting:
                    self._writes.append(running)
            self._changed.notify(num_chunks)
        result = ChunkResult(Outcome.FULL, Reason.QUEUE_FULL)
        self._end_chunks(running, [(idx, result) for idx in refused], use_later=True)

    def _take_seats(self, running: _Running) -> None:
        for idx, chunk in enumerate(running.job.chunks):
            seats = self._seats.setdefault(chunk.key, [])
            if seats and seats[0][0].taken[seats[0][1]]:
                running.take(idx)  # it is being read just now
            seats.append((running, idx))
        if running.waiting:
            self._reads.append(running)

    def _admit(self, chunks: Sequence[Chunk]) -> int:
        # The beginning of a prefix is of use without its end, so the end is what is refused.
        for idx, chunk in enumerate(chunks):
            inflight_bytes = self._inflight_writes_bytes + len(chunk.buffer)
            # One chunk is always taken, or a bound that is too small would refuse all there are.
            if self._inflight_writes_bytes and inflight_bytes > self._inflight_writes_limit_bytes:
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
        self._give_up_late(self._clock.monotonic())
        finished = []
        while self._finished:
            finished.append(self._finished.popleft())
        return finished

    def drain(self, timeout_s: float) -> bool:
        """Wait until every submitted job has ended, and what follows it; False if that took
        longer.
        """
        with self._rested:
            return self._rested.wait_for(
                lambda: not self._unfinished and not self._under_way, timeout_s
            )

    def close(self) -> bool:
        """Give up what has not begun, wait for what has, stop the threads.

        Returns:
            Whether all threads have stopped. One whose system call does not return is left
            behind after ten seconds; its job is never reported, since its buffers are in use.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._give_up(Reason.CLOSED, None)
        give_up_s = self._clock.monotonic() + _CLOSE_WAIT_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.01, give_up_s - self._clock.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _give_up_late(self, now_s: float) -> None:
        if now_s > self._first_deadline_s:
            self._give_up(Reason.DEADLINE, now_s)

    def _give_up(self, reason: Reason, now_s: float | None) -> None:
        """Give up what no thread has taken: of every job, or of those overdue at ``now_s``."""
        given_up: list[_Seat] = []
        with self._changed:
            for queue in (self._reads, self._writes, self._touches):
                late = [run for run in queue if now_s is None or run.overdue(now_s)]
                for running in late:
                    queue.remove(running)
                    for idx in range(running.next_idx, len(running.taken)):
                        if not running.taken[idx]:
                            given_up.append((running, idx))
                            self._leave_seat(running, idx)
                            running.take(idx)
            joined = self._leave_hung(now_s)
            given_up += joined
            waiting = [*self._reads, *self._writes, *self._touches]
            waiting += [seat[0] for seats in self._seats.values() for seat in seats[1:]]
            waiting += [seat[0] for joined in self._writing.values() for seat in joined]
            self._first_deadline_s = min(
                (running.submitted_s + running.job.deadline_s for running in waiting),
                default=math.inf,
            )
        for running, idx in given_up:
            result = ChunkResult(_GIVEN_UP[running.job.direction], reason)
            self._end_chunks(running, [(idx, result)], use_later=True)

    def _leave_hung(self, now_s: float | None) -> list[_Seat]:
        """Chunks that wait for what another job has under way: nobody has their buffers."""
        left: list[_Seat] = []
        for joined in self._writing.values():
            late = [seat for seat in joined if now_s is None or seat[0].overdue(now_s)]
            left += late
            joined[:] = [seat for seat in joined if seat not in late]
        for seats in self._seats.values():
            if len(seats) > 1 and seats[0][0].taken[seats[0][1]]:
                late = [seat for seat in seats[1:] if now_s is None or seat[0].overdue(now_s)]
                left += late
                seats[1:] = [seat for seat in seats[1:] if seat not in late]
        return left

    def _leave_seat(self, running: _Running, idx: int) -> None:
        if running.job.direction is Direction.READ:
            key = running.job.chunks[idx].key
            seats = self._seats[key]
            seats.remove((running, idx))
            if not seats:
                del self._seats[key]

    # The threads' side.

    def _run_queues(self, thread_idx: int, writes_first: bool) -> None:
        while (taken := self._take(thread_idx, writes_first)) is not None:
            if isinstance(taken, tuple):
                running, idxs = taken
                results = self._run(running, idxs)
                self._serve(thread_idx, running, list(zip(idxs, results, strict=True)))
                self._run_aside(thread_idx, self._work.settle)
            else:
                self._run_aside(thread_idx, taken)
                with self._changed:
                    self._unfinished -= 1
                    self._rested.notify_all()

    def _serve(self, thread_idx: int, running: _Running, ended: Sequence[_Ended]) -> None:
        """Give results to their job, and to others that wait for the same chunks."""
        job = running.job
        keys = [job.chunks[idx].key for idx, _ in ended]
        joined: Sequence[Sequence[_Seat]] = ()
        with self._changed:
            begun = self._under_way.get(thread_idx)
            if begun is not None:
                running.slowest_s = max(running.slowest_s, self._clock.monotonic() - begun[1])
            if job.direction is Direction.READ:
                joined = [self._seats.pop(key)[1:] for key in keys]
        # Others first: once it is reported, the buffer that they copy from is its owner's again.
        for (idx, result), others in zip(ended, joined, strict=False):
            for other, other_idx in others:
                found = self._joined(job.chunks[idx], result, other.job, other_idx)
                self._end_chunks(other, [(other_idx, found)])
        self._end_chunks(running, ended)
        if job.direction is Direction.WRITE:
            for key, (_, result) in zip(keys, ended, strict=True):
                self._end_joined_writes(thread_idx, key, result)

    def _end_joined_writes(self, thread_idx: int, key: Key, result: ChunkResult) -> None:
        """Others wanted the same chunk written: it is there, unless it was deleted meanwhile."""
        while True:
            with self._changed:
                joined = self._writing[key]
                if not joined:
                    del self._writing[key]
                    return
                self._writing[key] = []
                self._under_way[thread_idx] = (joined[0][0].job.job_id, self._clock.monotonic())
            if result.outcome is Outcome.DONE:
                other, idx = joined[0]
                (result,) = self._run(other, [idx])
            for other, idx in joined:
                self._end_chunks(other, [(idx, result)])

    def _joined(self, chunk: Chunk, result: ChunkResult, job: Job, idx: int) -> ChunkResult:
        """The result of a read that waited for another job's chunk."""
        try:
            copied = self._copy(chunk, job.chunks[idx], result)
        except (ValueError, BufferError):  # a buffer that cannot be written to
            self._count_internal_error("copy")
            return ChunkResult(Outcome.FAILED, Reason.INTERNAL)
        if copied == DONE:
            self._metrics.add("joined_reads", (self._work.name,))
        return copied

    @staticmethod
    def _copy(source: Chunk, target: Chunk, result: ChunkResult) -> ChunkResult:
        if len(source.buffer) != len(target.buffer):
            return ChunkResult(Outcome.MISS, Reason.LAYOUT)
        if result != DONE:
            return result
        np.copyto(np.frombuffer(target.buffer, np.uint8), np.frombuffer(source.buffer, np.uint8))
        # As for any read: what counts is what has arrived at the destination.
        if payload_checksum(target.buffer) != payload_checksum(source.buffer):
            return ChunkResult(Outcome.MISS, Reason.CHECKSUM)
        return result

    def _run(self, running: _Running, idxs: Sequence[int]) -> Sequence[ChunkResult]:
        job = running.job
        try:
            if job.direction is not Direction.TOUCH:
                left_s = running.submitted_s + job.deadline_s - self._clock.monotonic()
                chunks = [job.chunks[idx] for idx in idxs]
                return self._work.run_batch(job.direction, chunks, left_s)
            found = self._work.use([chunk.key for chunk in job.chunks])
            absent = ChunkResult(Outcome.MISS, Reason.ABSENT)
            return [DONE if here else absent for here in found]
        except Exception:  # counted: the result's reason is INTERNAL
            logger.exception("a job failed in an unforeseen way: tier=%s", self._work.name)
            return [ChunkResult(Outcome.FAILED, Reason.INTERNAL)] * len(idxs)

    def _run_aside(self, thread_idx: int, errand: Callable[[], None]) -> None:
        """What is nobody's job may hang as well, and holds up those that come."""
        with self._changed:
            self._under_way[thread_idx] = (_NO_JOB, self._clock.monotonic())
        self._run_errand(errand)
        with self._changed:
            self._under_way.pop(thread_idx, None)
            self._rested.notify_all()

    def _run_errand(self, errand: Callable[[], None]) -> None:
        try:
            errand()
        except Exception:  # counted as internal_errors
            self._count_internal_error("errand")

    def _count_internal_error(self, where: str) -> None:
        logger.exception("an unforeseen error: tier=%s where=%s", self._work.name, where)
        self._metrics.add("internal_errors", (where,))

    def _take(
        self, thread_idx: int, writes_first: bool
    ) -> tuple[_Running, Sequence[int]] | Callable[[], None] | None:
        # Errands go after reads, which somebody waits for; but never behind an endless stream
        # of them, so the threads that look at writes first, or the only thread, take them first.
        errands_first = writes_first or len(self._threads) == 1
        while True:
            self._give_up_late(self._clock.monotonic())
            with self._changed:
                if self._touches:
                    running = self._touches.popleft()
                    return running, range(len(running.job.chunks))
                queues = (
                    (self._writes, self._reads) if writes_first else (self._reads, self._writes)
                )
                if self._errands and (errands_first or not queues[0]):
                    return self._errands.popleft()
                now_s = self._clock.monotonic()
                for queue in queues:
                    while queue:
                        running = self._next(queue, now_s)
                        idxs = self._take_batch(queue, running)
                        if idxs:  # else others do all of it already
                            self._under_way[thread_idx] = (running.job.job_id, now_s)
                            return running, idxs
                if self._closed:
                    return None
                self._changed.wait()

    def _next(self, queue: list[_Running], now_s: float) -> _Running:
        if queue is self._writes:
            return queue[0]
        if now_s - queue[0].submitted_s > _PATIENCE_S:
            self._oldest_next = not self._oldest_next
            if self._oldest_next:
                return queue[0]
        return min(queue, key=lambda running: running.waiting_bytes)

    def _take_batch(self, queue: list[_Running], running: _Running) -> list[int]:
        idxs: list[int] = []
        batch_bytes = 0
        chunks = running.job.chunks
        while running.waiting and len(idxs) < _BATCH_CHUNKS:
            idx = running.next_idx
            batch_bytes += running.sizes[idx]
            if idxs and batch_bytes > _BATCH_BYTES:
                break
            if queue is self._reads:
                idxs.append(idx)
                self._take_with_others(running, idx)
                continue
            running.take(idx)
            key = chunks[idx].key
            if key in self._writing:  # somebody is at it: what becomes of that, becomes of this
                self._writing[key].append((running, idx))
            else:
                self._writing[key] = []
                idxs.append(idx)
        if not running.waiting:
            queue.remove(running)
        return idxs

    def _take_with_others(self, running: _Running, idx: int) -> None:
        seats = self._seats[running.job.chunks[idx].key]
        seats.remove((running, idx))
        seats.insert(0, (running, idx))  # the first seat reads, the others are served from it
        for other, other_idx in seats:
            other.take(other_idx)
            if not other.waiting and other is not running and other in self._reads:
                self._reads.remove(other)

    def _end_chunks(
        self, running: _Running, ended: Sequence[_Ended], *, use_later: bool = False
    ) -> None:
        job = running.job
        found = [(running.sizes[idx], result) for idx, result in ended]
        count_results(self._metrics, self._work.name, job.direction, found)
        with self._changed:
            for idx, result in ended:
                running.results[idx] = result
                running.moved_bytes += running.sizes[idx] if result == DONE else 0
                if job.direction is Direction.WRITE and result.reason is not Reason.QUEUE_FULL:
                    self._inflight_writes_bytes -= running.sizes[idx]
            running.remaining -= len(ended)
            over = bool(ended) and not running.remaining
        if over:
            self._end_job(running, use_later=use_later)

    def _end_job(self, running: _Running, *, use_later: bool) -> None:
        job = running.job
        results = tuple(result for result in running.results if result is not None)
        if job.direction is not Direction.TOUCH and not job.copying:
            # Only the whole job knows the order of the prefix: its chunks end in any order.
            done = [
                chunk.key
                for chunk, result in zip(job.chunks, results, strict=True)
                if result.outcome is Outcome.DONE
            ]
            if done and use_later:  # on the owner's thread, which does not wait for a tier's lock
                self.run_soon(lambda: self._use(done))
            elif done:
                self._use(done)
        name = self._work.name
        tiers = tuple(name if r.outcome is Outcome.DONE else "" for r in results)
        elapsed_s = self._clock.monotonic() - running.submitted_s
        ended = JobResult(
            job.job_id, job.direction, results, running.moved_bytes, elapsed_s, tiers,
            running.slowest_s,
        )  # fmt: skip
        with self._changed:
            self._finished.append(ended)
            self._unfinished -= 1
            self._rested.notify_all()

    def _use(self, prefix: Sequence[Key]) -> None:
        try:
            self._work.use(prefix)
        except Exception:  # counted as internal_errors
            self._count_internal_error("use")
