"""Runs what the manager plans: reads, writes, promotions and demotions, as jobs of the tiers."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from stepwell.core.keys import ENGINE_KEY_MAX_BYTES, ROOT_BYTES, Key
from stepwell.core.memory import aligned_memory
from stepwell.core.types import (
    Chunk,
    ChunkResult,
    Direction,
    Job,
    JobResult,
    Lookup,
    Outcome,
    Reason,
)
from stepwell.errors import ClosedError
from stepwell.manager import Demotion, Manager, WritePlan
from stepwell.policy.worth import TierEstimate, TierSpeed
from stepwell.tiers.base import Tier, TierContext, believed, why_missed
from stepwell.tiers.outcomes import count_results

__all__ = ["Pipeline"]

logger = logging.getLogger(__name__)

_MAY_READ = (Lookup.HIT, Lookup.UNKNOWN)
_ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)
_NOT_ADMITTED = ChunkResult(Outcome.FULL, Reason.NOT_ADMITTED)
_CLOSED = {
    Direction.READ: ChunkResult(Outcome.MISS, Reason.CLOSED),
    Direction.WRITE: ChunkResult(Outcome.FULL, Reason.CLOSED),
    Direction.TOUCH: ChunkResult(Outcome.MISS, Reason.CLOSED),
}

# What demotions may hold in memory on their way down; one chunk is always allowed.
_STAGING_BYTES = 64 << 20
_DEMOTION_DEADLINE_S = 30.0
_MOST_DEADLINE_S = 1e9
_MOST = 1 << 40  # what a record's header holds, by far
# What began before a job's deadline may end well after it; what takes longer hangs.
_GRACE_S = 1.0


@dataclass(slots=True, eq=False)
class _Request:
    """One read, write or touch of the store, and the tier jobs that it still waits for."""

    job_id: int
    direction: Direction
    chunks: Sequence[Chunk]
    deadline_s: float
    submitted_s: float
    results: list[ChunkResult]
    tiers: list[str]
    waiting: int = 0
    moved_bytes: int = 0
    demotion: Demotion | None = None
    deleted: set[Key] = field(default_factory=set)
    copies: bool = False


@dataclass(frozen=True, slots=True)
class _TierJob:
    """Which of a request's chunks a tier job carries.

    Attributes:
        request: whose.
        chunk_idxs: which chunks of it.
        promotion: whether it copies up what was read; its result is nobody's.
        queued_bytes: of reads that the tier had to do before.
    """

    request: _Request
    chunk_idxs: Sequence[int]
    promotion: bool = False
    queued_bytes: int = 0


@dataclass(slots=True)
class _Meter:
    """How fast a tier reads, and what it has been asked to read.

    Attributes:
        speed: as learned.
        queued_bytes: of reads that have not ended.
        promised_bytes: of reads that were decided on since the last `poll` and have not begun.
    """

    speed: TierSpeed = field(default_factory=TierSpeed)
    queued_bytes: int = 0
    promised_bytes: int = 0


class Pipeline:
    """Jobs of the store as jobs of its tiers.

    A read asks for each chunk the uppermost tier that has it and, where that turns out to be a
    miss, the next one that does; what a lower tier served is copied up, if the manager wants it,
    before the read is reported. Writes go where the manager says. Demotions pass through a
    bounded staging memory and are nobody's job.

    Threading: one thread calls; nothing waits. Errors: outcomes are values.

    Args:
        tiers: at least one, the uppermost first.
        context: the one that the tiers were built with.
        manager: decides.
        departed: where tiers note what they evicted, as (tier, fingerprint of the key).
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        context: TierContext,
        manager: Manager,
        departed: deque[tuple[int, int]],
    ) -> None:
        self.tiers = tuple(tiers)
        self.departed = departed
        self.unfinished = 0
        """Jobs that were begun and not yet reported by `poll`."""
        self._context = context
        self._manager = manager
        self._next_id = 0
        self._tier_jobs: list[dict[int, _TierJob]] = [{} for _ in tiers]
        self._meters = [_Meter() for _ in tiers]
        self._requests: dict[int, _Request] = {}
        self._ended: list[JobResult] = []
        self._staged_bytes = 0

    # What the store asks for.

    def read(self, chunks: Sequence[Chunk], deadline_s: float) -> int:
        """Begin to fill the chunks' buffers; returns the id that `poll` will report."""
        request = self._new(Direction.READ, chunks, deadline_s)
        self._read_from(request, range(len(chunks)), 0)
        return self._begun(request)

    def write(self, chunks: Sequence[Chunk], deadline_s: float) -> int:
        """Begin to take chunks down; returns the id that `poll` will report."""
        request = self._new(Direction.WRITE, chunks, deadline_s)
        keys = [chunk.key for chunk in chunks]
        for other in self._requests.values():
            other.deleted.difference_update(keys)  # it is valid again, and stays
        answers = [believed(tier, keys) for tier in self.tiers]
        plan = self._manager.plan_write(chunks, answers, request.submitted_s)
        self._run_plan(request, plan)
        return self._begun(request)

    def touch(self, prefix: Sequence[Key], deadline_s: float) -> int:
        """Make chunks recent, the first of the prefix the most; returns an id for `poll`."""
        chunks = [Chunk(key, memoryview(b"")) for key in prefix]
        request = self._new(Direction.TOUCH, chunks, deadline_s)
        self._manager.on_touched([chunk.key for chunk in chunks])
        for tier_idx in range(len(self.tiers)):
            self._submit(tier_idx, request, Direction.TOUCH, range(len(chunks)))
        return self._begun(request)

    def delete(self, keys: Sequence[Key]) -> int:
        """Invalidate chunks in every tier; returns how many copies that were.

        What is being copied between tiers meanwhile is deleted once more when it has arrived.
        """
        gone = set(keys)
        self._manager.forget(keys)
        for request in self._requests.values():
            if request.direction is not Direction.TOUCH:
                request.deleted |= gone.intersection(chunk.key for chunk in request.chunks)
        return sum(tier.delete(keys) for tier in self.tiers)

    def poll(self) -> list[JobResult]:
        """The jobs that ended since the last call, each exactly once."""
        self.work()
        ended, self._ended = self._ended, []
        self.unfinished -= len(ended)
        return ended

    def work(self) -> None:
        """Look what the tiers have done, and begin what is next; what ended waits for `poll`."""
        for meter in self._meters:
            meter.promised_bytes = 0
        for tier_idx, tier in enumerate(self.tiers):
            for result in tier.poll():
                self._on_tier_result(tier_idx, result)
        while self.departed:
            tier_idx, tag = self.departed.popleft()
            self._manager.on_evicted(tier_idx, tag, self._context.clock.monotonic())
        self._demote()

    def overdue(self) -> list[int]:
        """Jobs whose deadline has been over for a second and that still cannot be reported.

        A tier's system call does not return, and may yet write to their buffers.
        """
        now_s = self._context.clock.monotonic()
        return [
            request.job_id
            for request in self._requests.values()
            if request.demotion is None
            and now_s - request.submitted_s > request.deadline_s + _GRACE_S
        ]

    def estimates(self) -> list[TierEstimate | None]:
        """Per tier what reading from it is expected to take at present; None if unknown."""
        now_s = self._context.clock.monotonic()
        return [
            meter.speed.estimate(meter.queued_bytes + meter.promised_bytes, now_s)
            for meter in self._meters
        ]

    def promise(self, tier_idx: int, num_bytes: int) -> None:
        """So much is about to be read from a tier: whoever asks next comes behind it.

        Of many prompts that are looked up in one step none has begun to read when the last one
        is decided on. What has not begun by the next `poll` is forgotten.
        """
        self._meters[tier_idx].promised_bytes += num_bytes

    # Beginning.

    def _new(self, direction: Direction, chunks: Sequence[Chunk], deadline_s: float) -> _Request:
        _check(direction, chunks, deadline_s)
        request = _Request(
            self._take_id(),
            direction,
            chunks,
            deadline_s,
            self._context.clock.monotonic(),
            [_ABSENT] * len(chunks),
            [""] * len(chunks),
        )
        self._requests[request.job_id] = request
        return request

    def _begun(self, request: _Request) -> int:
        self.unfinished += 1
        self._end_if_idle(request)
        return request.job_id

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _submit(
        self,
        tier_idx: int,
        request: _Request,
        direction: Direction,
        chunk_idxs: Sequence[int],
        *,
        promotion: bool = False,
    ) -> None:
        job_id = self._take_id()
        now_s = self._context.clock.monotonic()
        chunks = [request.chunks[idx] for idx in chunk_idxs]
        if promotion:
            chunks = [_copied(request.chunks[idx], request.results[idx]) for idx in chunk_idxs]
        meter = self._meters[tier_idx]
        copying = request.demotion is not None
        tier_job = _TierJob(request, chunk_idxs, promotion, meter.queued_bytes)
        self._tier_jobs[tier_idx][job_id] = tier_job
        request.waiting += 1
        if direction is Direction.READ:
            num_bytes = sum(len(chunk.buffer) for chunk in chunks)
            meter.queued_bytes += num_bytes
            if not copying:
                meter.promised_bytes = max(0, meter.promised_bytes - num_bytes)
                meter.speed.on_submitted(now_s)
        # One deadline for all that a request does, one tier after the other.
        left_s = request.deadline_s - (now_s - request.submitted_s)
        try:
            self.tiers[tier_idx].submit(Job(job_id, direction, chunks, left_s, copying))
        except ClosedError:
            # A tier closed between a read's first and second try: what is left is a miss.
            self._not_begun(tier_idx, job_id, direction, _CLOSED[direction])
        except Exception:  # counted as internal_errors
            # Raised on, the caller would take its buffers back while other tiers still fill them.
            logger.exception("a tier refused a job: tier=%s", self.tiers[tier_idx].name)
            self._context.metrics.add("internal_errors", ("tier_submit",))
            failed = ChunkResult(Outcome.FAILED, Reason.INTERNAL)
            self._not_begun(tier_idx, job_id, direction, failed)

    def _not_begun(
        self, tier_idx: int, job_id: int, direction: Direction, result: ChunkResult
    ) -> None:
        tier_job = self._tier_jobs[tier_idx].pop(job_id)
        request = tier_job.request
        request.waiting -= 1
        self._unqueue(tier_idx, tier_job, direction)
        if not tier_job.promotion:
            for idx in tier_job.chunk_idxs:
                if request.results[idx].outcome is not Outcome.DONE:  # by another tier
                    request.results[idx] = result
        copies = tier_job.promotion or request.demotion is not None
        if direction is Direction.WRITE and tier_idx == 0 and not copies:
            for idx in tier_job.chunk_idxs:
                self._manager.on_not_written(request.chunks[idx].key)

    def _unqueue(self, tier_idx: int, tier_job: _TierJob, direction: Direction) -> None:
        if direction is Direction.READ:
            chunks = tier_job.request.chunks
            self._meters[tier_idx].queued_bytes -= sum(
                len(chunks[idx].buffer) for idx in tier_job.chunk_idxs
            )

    def _run_plan(self, request: _Request, plan: WritePlan) -> None:
        for tier_idx, idxs in plan.refused.items():
            for idx in idxs:
                if request.results[idx].outcome is not Outcome.DONE:
                    request.results[idx] = _NOT_ADMITTED
            count_results(
                self._context.metrics,
                self.tiers[tier_idx].name,
                Direction.WRITE,
                [(len(request.chunks[idx].buffer), _NOT_ADMITTED) for idx in idxs],
            )
        for tier_idx, idxs in plan.targets.items():
            self._submit(tier_idx, request, Direction.WRITE, idxs)

    def _read_from(self, request: _Request, chunk_idxs: Sequence[int], tier_idx: int) -> None:
        """Ask for each chunk the uppermost tier from ``tier_idx`` on that has it."""
        left = list(chunk_idxs)
        for idx in range(tier_idx, len(self.tiers)):
            if not left:
                return
            answers = believed(self.tiers[idx], [request.chunks[i].key for i in left])
            # Reading is the way to find out.
            here = [i for i, answer in zip(left, answers, strict=True) if answer in _MAY_READ]
            if here:
                self._submit(idx, request, Direction.READ, here)
                gone = set(here)
                left = [i for i in left if i not in gone]
        for i in left:  # nobody has it, or whoever has it is not asked
            if request.results[i] == _ABSENT:
                reason = why_missed(self.tiers, request.chunks[i].key)
                request.results[i] = ChunkResult(Outcome.MISS, reason)

    # Ending.

    def _on_tier_result(self, tier_idx: int, result: JobResult) -> None:
        tier_job = self._tier_jobs[tier_idx].pop(result.job_id)
        request = tier_job.request
        request.waiting -= 1
        self._unqueue(tier_idx, tier_job, result.direction)
        now_s = self._context.clock.monotonic()
        if result.direction is Direction.READ and request.demotion is None:
            self._meters[tier_idx].speed.on_finished(
                result.moved_bytes, result.elapsed_s, tier_job.queued_bytes, now_s
            )
        if not tier_job.promotion:
            request.moved_bytes += result.moved_bytes
            missed, served = self._merge(tier_idx, tier_job, result)
            if result.direction is Direction.READ:
                self._after_read(tier_idx, request, missed, served)
            elif result.direction is Direction.WRITE:
                self._after_write(tier_idx, request, missed, tier_job)
        self._end_if_idle(request)

    def _merge(
        self, tier_idx: int, tier_job: _TierJob, result: JobResult
    ) -> tuple[list[int], list[int]]:
        """Note a tier's results; returns the chunks that it missed and those that it served."""
        request = tier_job.request
        missed, served = [], []
        for chunk_idx, chunk_result in zip(tier_job.chunk_idxs, result.results, strict=True):
            if chunk_result.outcome is Outcome.DONE:
                request.results[chunk_idx] = chunk_result
                request.tiers[chunk_idx] = self.tiers[tier_idx].name
                served.append(chunk_idx)
            else:
                missed.append(chunk_idx)
                if request.results[chunk_idx].outcome is not Outcome.DONE:
                    request.results[chunk_idx] = chunk_result
        return missed, served

    def _after_read(
        self, tier_idx: int, request: _Request, missed: list[int], served: list[int]
    ) -> None:
        if request.demotion is not None:
            return  # it is of what the uppermost tier has
        left = [idx for idx in missed if request.results[idx].outcome is not Outcome.DONE]
        if left:
            self._read_from(request, left, tier_idx + 1)
        if not served:
            return
        keys = [request.chunks[idx].key for idx in served]
        self._manager.on_served(tier_idx, keys, self._context.clock.monotonic())
        if tier_idx > 0:
            wanted = self._manager.plan_promotion(
                [request.chunks[idx] for idx in served], self._context.clock.monotonic()
            )
            up = [
                idx
                for idx, wants in zip(served, wanted, strict=True)
                if wants and request.chunks[idx].key not in request.deleted
            ]
            if up:
                request.copies = True
                self._submit(0, request, Direction.WRITE, up, promotion=True)

    def _after_write(
        self, tier_idx: int, request: _Request, missed: list[int], tier_job: _TierJob
    ) -> None:
        if request.demotion is not None:
            return
        if tier_idx == 0:
            missing = set(missed)
            for idx in tier_job.chunk_idxs:
                if idx not in missing:
                    self._manager.on_written(request.chunks[idx].key)
                else:
                    self._manager.on_not_written(request.chunks[idx].key)
        full = [idx for idx in missed if request.results[idx].outcome is not Outcome.DONE]
        if full:
            now_s = self._context.clock.monotonic()
            below: list[Lookup] = []
            if tier_idx + 1 < len(self.tiers):
                below = believed(self.tiers[tier_idx + 1], [request.chunks[i].key for i in full])
            plan = self._manager.plan_overflow(request.chunks, tier_idx, full, below, now_s)
            self._run_plan(request, plan)

    def _end_if_idle(self, request: _Request) -> None:
        if request.waiting:
            return
        del self._requests[request.job_id]
        if request.deleted and (request.copies or request.direction is Direction.WRITE):
            for tier in self.tiers:
                tier.delete(list(request.deleted))
        if request.demotion is not None:
            self._end_demotion(request, request.demotion)
            return
        self._ended.append(
            JobResult(
                request.job_id,
                request.direction,
                tuple(request.results),
                request.moved_bytes,
                self._context.clock.monotonic() - request.submitted_s,
                tuple(request.tiers),
            )
        )

    # Demoting.

    def _demote(self) -> None:
        budget_bytes = _STAGING_BYTES - self._staged_bytes
        now_s = self._context.clock.monotonic()
        available = [getattr(tier, "available", True) for tier in self.tiers]
        for demotion in self._manager.plan_demotions(budget_bytes, available, now_s):
            if not demotion.targets:
                self._drop_demotion(demotion, ChunkResult(Outcome.FULL, demotion.reason))
                continue
            try:
                staging = aligned_memory(demotion.size_bytes)
            except (OSError, ValueError):
                self._drop_demotion(demotion, ChunkResult(Outcome.FAILED, Reason.INTERNAL))
                continue
            self._staged_bytes += demotion.size_bytes
            chunk = Chunk(demotion.key, staging, demotion.end_token)
            request = self._new(Direction.READ, [chunk], _DEMOTION_DEADLINE_S)
            request.demotion = demotion
            self._submit(0, request, Direction.READ, [0])
            self._end_if_idle(request)

    def _end_demotion(self, request: _Request, demotion: Demotion) -> None:
        """The next step of a demotion: write what was read, or be done."""
        done = request.results[0].outcome is Outcome.DONE and not request.deleted
        if request.direction is Direction.READ and done:
            chunks = [_copied(request.chunks[0], request.results[0])]
            down = self._new(Direction.WRITE, chunks, _DEMOTION_DEADLINE_S)
            down.demotion, down.deleted = demotion, request.deleted
            for tier_idx in demotion.targets:
                self._submit(tier_idx, down, Direction.WRITE, [0])
            self._end_if_idle(down)
            return
        self._staged_bytes -= demotion.size_bytes
        self._drop_demotion(demotion, _ABSENT if request.deleted else request.results[0])

    def _drop_demotion(self, demotion: Demotion, result: ChunkResult) -> None:
        self._manager.on_demoted(demotion)
        self._context.metrics.add("demoted_chunks", (result.outcome, result.reason))


def _check(direction: Direction, chunks: Sequence[Chunk], deadline_s: object) -> None:
    """Raise for what is the caller's mistake, before it looks like a drive's."""
    if not chunks:
        raise ValueError("a job has at least one chunk")
    if not isinstance(deadline_s, int | float) or not 0 < deadline_s <= _MOST_DEADLINE_S:
        raise ValueError(
            f"a deadline is above zero and at most {_MOST_DEADLINE_S:g}: "
            f"deadline_s={deadline_s!s:.40}"
        )
    for chunk in chunks:
        if not isinstance(chunk.key, bytes):
            raise TypeError(f"a key is bytes: key={type(chunk.key).__name__}")
        if not 0 <= chunk.end_token <= _MOST or not 0 <= chunk.expires_at_s <= _MOST:
            raise ValueError(
                f"a position and a time are 0 and more: end_token={chunk.end_token} "
                f"expires_at_s={chunk.expires_at_s}"
            )
        if not ROOT_BYTES < len(chunk.key) <= ROOT_BYTES + ENGINE_KEY_MAX_BYTES:
            raise ValueError(
                f"a key has {ROOT_BYTES + 1} to {ROOT_BYTES + ENGINE_KEY_MAX_BYTES} bytes; see "
                f"stepwell.core.keys.make_key: key_bytes={len(chunk.key)}"
            )
        if direction is not Direction.TOUCH:
            _check_buffer(direction, chunk.buffer)


def _check_buffer(direction: Direction, buffer: memoryview) -> None:
    if buffer.format != "B" or buffer.ndim != 1 or not buffer.contiguous or not len(buffer):
        raise ValueError(
            f'a buffer is at least one contiguous byte, a memoryview that was cast to "B": '
            f"format={buffer.format} ndim={buffer.ndim} contiguous={buffer.contiguous} "
            f"bytes={buffer.nbytes}"
        )
    if direction is Direction.READ and buffer.readonly:
        raise ValueError("a read needs a buffer that can be written to: readonly=True")


def _copied(chunk: Chunk, read: ChunkResult) -> Chunk:
    """A chunk that was read, to be written elsewhere: a copy expires with the original."""
    return Chunk(chunk.key, chunk.buffer, chunk.end_token, read.expires_at_s)
