"""The store: several tiers, upper ones first, behind one facade.

Writes go to every tier (write-through). A read asks the uppermost tier that has the chunk and,
where that turns out to be a miss, the next one that has it; what a lower tier served is copied
up before the read is reported.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stepwell.core.identity import Identity
from stepwell.core.keys import Key, Root
from stepwell.core.leases import Lease
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
from stepwell.settings import Settings
from stepwell.tiers.base import Tier, TierContext
from stepwell.tiers.disk import DiskTier
from stepwell.tiers.host import HostTier

__all__ = ["Store"]

logger = logging.getLogger(__name__)

_ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)


@dataclass(slots=True)
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


@dataclass(frozen=True, slots=True)
class _TierJob:
    """Which of a request's chunks a tier job carries; ``promotion`` copies up what was read."""

    request: _Request
    chunk_idxs: Sequence[int]
    promotion: bool = field(default=False)


class Store:
    """Tiers in order, the uppermost first.

    Threading: one thread calls; no method but `drain` and `close` waits.
    Ownership: as for a tier: a job's buffers belong to the store until `poll` reports it.
    Errors: outcomes are values; ClosedError after `close`.
    Cost: `lookup` one look-up per chunk and tier; `poll` O(ended jobs).

    Args:
        tiers: at least one, uppermost first.
        context: the one that the tiers were built with.
    """

    def __init__(self, tiers: Sequence[Tier], context: TierContext) -> None:
        if not tiers:
            raise ValueError("a store has at least one tier")
        self.tiers = tuple(tiers)
        self.context = context
        self._next_id = 0
        self._tier_jobs: list[dict[int, _TierJob]] = [{} for _ in tiers]
        self._ended: list[JobResult] = []
        self._unfinished = 0
        self._closed = False

    @classmethod
    def open(cls, settings: Settings, context: TierContext | None = None) -> "Store":
        """A store as the settings say: host tier if it has a capacity, then the disk tier.

        Raises:
            ConfigError: the disk tier cannot be opened; nothing is left running.
        """
        context = context or TierContext()
        disk = DiskTier(
            settings.path,
            settings.capacity_bytes,
            context,
            min_free_bytes=settings.min_free_bytes,
            num_threads=settings.io_threads,
            inflight_writes_bytes=settings.inflight_writes_bytes,
        )
        if not settings.host_capacity_bytes:
            return cls([disk], context)
        try:
            host = HostTier(
                settings.host_capacity_bytes,
                context,
                inflight_writes_bytes=settings.inflight_writes_bytes,
            )
        except RuntimeError:
            disk.close()
            raise
        return cls([host, disk], context)

    @property
    def unfinished(self) -> int:
        """Jobs that were begun and not yet reported by `poll`."""
        return self._unfinished

    def use_root(self, identity: Identity) -> Root:
        """Make an identity known, so that its description is stored beside its records."""
        return self.context.registry.add(identity)

    def lookup(self, keys: Sequence[Key]) -> list[Lookup]:
        """The best answer of any tier for each key; asks and changes nothing."""
        answers = self.tiers[0].contains(keys)
        for tier in self.tiers[1:]:
            lower = tier.contains(keys)
            answers = [
                Lookup.HIT if Lookup.HIT in pair
                else Lookup.PENDING if Lookup.PENDING in pair
                else Lookup.MISS
                for pair in zip(answers, lower, strict=True)
            ]  # fmt: skip
        return answers

    def acquire(self, keys: Iterable[Key], ttl_s: float) -> Lease:
        """Keep chunks from being evicted for ``ttl_s`` seconds, or until the lease is released."""
        return self.context.leases.acquire(keys, ttl_s)

    def read(self, chunks: Sequence[Chunk], deadline_s: float = 10.0) -> int:
        """Begin to fill the chunks' buffers; returns the id that `poll` will report."""
        request = self._new(Direction.READ, chunks, deadline_s)
        self._read_from(request, range(len(chunks)), 0)
        self._end_if_idle(request)
        return request.job_id

    def write(self, chunks: Sequence[Chunk], deadline_s: float = 30.0) -> int:
        """Begin to take chunks down into every tier; returns the id that `poll` will report."""
        return self._to_every_tier(self._new(Direction.WRITE, chunks, deadline_s))

    def touch(self, prefix: Sequence[Key], deadline_s: float = 10.0) -> int:
        """Make chunks recent, the first of the prefix the most; returns an id for `poll`."""
        chunks = [Chunk(key, memoryview(b"")) for key in prefix]
        return self._to_every_tier(self._new(Direction.TOUCH, chunks, deadline_s))

    def poll(self) -> list[JobResult]:
        """The jobs that ended since the last call, each exactly once."""
        for tier_idx, tier in enumerate(self.tiers):
            for result in tier.poll():
                self._on_tier_result(tier_idx, result)
        ended, self._ended = self._ended, []
        self._unfinished -= len(ended)
        return ended

    def delete(self, keys: Sequence[Key]) -> int:
        """Invalidate chunks in every tier; returns how many copies that were."""
        return sum(tier.delete(keys) for tier in self.tiers)

    def drain(self, timeout_s: float) -> list[JobResult]:
        """Wait until every begun job has ended or the time is over; returns what `poll` would."""
        give_up_s = time.monotonic() + timeout_s
        ended = self.poll()
        while self._unfinished and time.monotonic() < give_up_s:
            time.sleep(0.001)
            ended += self.poll()
        return ended

    def close(self) -> None:
        """Stop every tier; may be called twice. `poll` still reports what was given up."""
        if not self._closed:
            self._closed = True
            for tier in self.tiers:
                tier.close()

    def _new(self, direction: Direction, chunks: Sequence[Chunk], deadline_s: float) -> _Request:
        if self._closed:
            raise ClosedError("the store is closed")
        if not chunks:
            raise ValueError("a job has at least one chunk")
        request = _Request(
            self._next_id,
            direction,
            chunks,
            deadline_s,
            self.context.clock.monotonic(),
            [_ABSENT] * len(chunks),
            [""] * len(chunks),
        )
        self._next_id += 1
        self._unfinished += 1
        return request

    def _submit(
        self,
        tier_idx: int,
        request: _Request,
        direction: Direction,
        chunk_idxs: Sequence[int],
        *,
        promotion: bool = False,
    ) -> None:
        job_id = self._next_id
        self._next_id += 1
        request.waiting += 1
        self._tier_jobs[tier_idx][job_id] = _TierJob(request, chunk_idxs, promotion)
        chunks = [request.chunks[idx] for idx in chunk_idxs]
        # One deadline for all that a request does, one tier after the other.
        spent_s = self.context.clock.monotonic() - request.submitted_s
        try:
            self.tiers[tier_idx].submit(
                Job(job_id, direction, chunks, request.deadline_s - spent_s)
            )
        except ClosedError:
            # A tier closed between a read's first and second try: what is left is a miss.
            self._not_begun(tier_idx, job_id)
        except Exception:  # counted as internal_errors
            # Raised on, the caller would take its buffers back while other tiers still fill them.
            logger.exception("a tier refused a job: tier=%s", self.tiers[tier_idx].name)
            self.context.metrics.add("internal_errors", ("tier_submit",))
            self._not_begun(tier_idx, job_id)

    def _not_begun(self, tier_idx: int, job_id: int) -> None:
        self._tier_jobs[tier_idx].pop(job_id).request.waiting -= 1

    def _to_every_tier(self, request: _Request) -> int:
        for tier_idx in range(len(self.tiers)):
            self._submit(tier_idx, request, request.direction, range(len(request.chunks)))
        self._end_if_idle(request)
        return request.job_id

    def _read_from(self, request: _Request, chunk_idxs: Sequence[int], tier_idx: int) -> None:
        """Ask for each chunk the uppermost tier from ``tier_idx`` on that has it."""
        left = list(chunk_idxs)
        for idx in range(tier_idx, len(self.tiers)):
            if not left:
                return
            answers = self.tiers[idx].contains([request.chunks[i].key for i in left])
            here = [i for i, answer in zip(left, answers, strict=True) if answer is Lookup.HIT]
            if here:
                self._submit(idx, request, Direction.READ, here)
                left = [i for i in left if i not in set(here)]

    def _on_tier_result(self, tier_idx: int, result: JobResult) -> None:
        tier_job = self._tier_jobs[tier_idx].pop(result.job_id)
        request = tier_job.request
        request.waiting -= 1
        if not tier_job.promotion:
            request.moved_bytes += result.moved_bytes
            self._merge(tier_idx, tier_job, result)
        self._end_if_idle(request)

    def _merge(self, tier_idx: int, tier_job: _TierJob, result: JobResult) -> None:
        request = tier_job.request
        served, missed = [], []
        for chunk_idx, chunk_result in zip(tier_job.chunk_idxs, result.results, strict=True):
            if chunk_result.outcome is Outcome.DONE:
                request.results[chunk_idx] = chunk_result
                request.tiers[chunk_idx] = self.tiers[tier_idx].name
                served.append(chunk_idx)
            elif request.results[chunk_idx].outcome is not Outcome.DONE:
                request.results[chunk_idx] = chunk_result
                missed.append(chunk_idx)
        if request.direction is not Direction.READ:
            return
        if missed:
            self._read_from(request, missed, tier_idx + 1)
        if served and tier_idx > 0:
            self._submit(0, request, Direction.WRITE, served, promotion=True)

    def _end_if_idle(self, request: _Request) -> None:
        if request.waiting:
            return
        self._ended.append(
            JobResult(
                request.job_id,
                request.direction,
                tuple(request.results),
                request.moved_bytes,
                self.context.clock.monotonic() - request.submitted_s,
                tuple(request.tiers),
            )
        )
