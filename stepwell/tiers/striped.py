"""Several drives as one tier: chunks lie on one of them each, in turns."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stepwell.core.keys import Key
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
from stepwell.tiers.base import Tier, TierContext, why_missed
from stepwell.tiers.outcomes import count_results

__all__ = ["StripedTier", "best_answers", "best_tiers"]

logger = logging.getLogger(__name__)

# What is unknown may turn out to be there; an engine takes what is being written for a miss.
_ORDER = {Lookup.HIT: 0, Lookup.UNKNOWN: 1, Lookup.PENDING: 2, Lookup.MISS: 3}
_ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)
_GONE = {
    Direction.READ: ChunkResult(Outcome.MISS, Reason.CLOSED),
    Direction.WRITE: ChunkResult(Outcome.FULL, Reason.BREAKER),
    Direction.TOUCH: ChunkResult(Outcome.MISS, Reason.CLOSED),
}


def best_answers(tiers: Sequence[Tier], keys: Sequence[Key]) -> list[Lookup]:
    """The best answer of any tier for each key: HIT, UNKNOWN, PENDING, MISS in this order."""
    return [answer for answer, _ in best_tiers(tiers, keys)]


def best_tiers(tiers: Sequence[Tier], keys: Sequence[Key]) -> list[tuple[Lookup, int]]:
    """The same, each with the index of the first tier that gave it; HIT is asked of no other."""
    best = [(answer, 0) for answer in tiers[0].contains(keys)]
    for tier_idx, tier in enumerate(tiers[1:], 1):
        left = [idx for idx, (answer, _) in enumerate(best) if answer is not Lookup.HIT]
        if not left:
            break
        answers = tier.contains([keys[idx] for idx in left])
        for idx, answer in zip(left, answers, strict=True):
            if _ORDER[answer] < _ORDER[best[idx][0]]:
                best[idx] = (answer, tier_idx)
    return best


@dataclass(slots=True)
class _Whole:
    """A job, and what its parts on the drives have answered so far."""

    job: Job
    begun_s: float
    results: list[ChunkResult]
    tiers: list[str]
    placed: set[int] = field(default_factory=set)
    waiting: int = 0
    moved_bytes: int = 0
    slowest_s: float = 0.0


class StripedTier:
    """One tier made of several, each on a drive of its own.

    A job's new chunks go to the drives in turns, so that a prefix is written and read back by all
    of them at once; on each its chunks are neighbours. Where a chunk lies is known by asking the
    drives, so nothing has to be agreed on: a drive that fails takes its own chunks along and no
    others, and while it is not available it is left out when new chunks are placed.

    Each drive evicts by its own policy; since prefixes are spread evenly, that comes to the same
    as one policy over all.

    Threading, Ownership, Errors, Cost: as `stepwell.tiers.base.Tier` states; a lookup costs one
    look-up per chunk and drive.

    Args:
        drives: at least one; the names need not be this tier's.
        context: the one that they were built with.
        name: for metrics and reports.
    """

    def __init__(self, drives: Sequence[Tier], context: TierContext, name: str = "disk") -> None:
        if not drives:
            raise ValueError("a striped tier has at least one drive")
        self.name = name
        self.drives = tuple(drives)
        self._clock = context.clock
        self._next_id = 0
        self._next_drive = 0
        self._parts: list[dict[int, tuple[_Whole, Sequence[int]]]] = [{} for _ in drives]
        self._placed: dict[Key, tuple[int, int]] = {}  # being written: drive, number of writes
        self._ended: list[JobResult] = []
        self._metrics = context.metrics
        self._closed = False

    @property
    def available(self) -> bool:
        """Whether any drive would take a job now."""
        return any(getattr(drive, "available", True) for drive in self.drives)

    def contains(self, keys: Sequence[Key]) -> list[Lookup]:
        """See `stepwell.tiers.base.Tier.contains`."""
        return best_answers(self.drives, keys)

    def why_missed(self, key: Key) -> Reason:
        """Why `contains` has just said MISS: for one of the drives, if for more than absence."""
        return why_missed(self.drives, key)

    def submit(self, job: Job) -> None:
        """See `stepwell.tiers.base.Tier.submit`."""
        if self._closed:
            raise ClosedError(f"the tier is closed: tier={self.name}")
        if not job.chunks:
            raise ValueError(f"a job has at least one chunk: job_id={job.job_id}")
        num_chunks = len(job.chunks)
        whole = _Whole(job, self._clock.monotonic(), [_ABSENT] * num_chunks, [""] * num_chunks)
        for drive_idx, idxs in enumerate(self._place(job, whole)):
            if idxs:
                self._submit_part(drive_idx, whole, idxs)
        if not whole.waiting:
            self._end(whole)

    def poll(self) -> list[JobResult]:
        """See `stepwell.tiers.base.Tier.poll`."""
        for drive, parts in zip(self.drives, self._parts, strict=True):
            for result in drive.poll():
                whole, idxs = parts.pop(result.job_id)
                self._unplace(whole, idxs)
                for idx, chunk_result in zip(idxs, result.results, strict=True):
                    whole.results[idx] = chunk_result
                    if chunk_result.outcome is Outcome.DONE:
                        whole.tiers[idx] = self.name
                whole.moved_bytes += result.moved_bytes
                whole.slowest_s = max(whole.slowest_s, result.slowest_s)
                whole.waiting -= 1
                if not whole.waiting:
                    self._end(whole)
        ended, self._ended = self._ended, []
        return ended

    def delete(self, keys: Sequence[Key]) -> int:
        """See `stepwell.tiers.base.Tier.delete`."""
        return sum(drive.delete(keys) for drive in self.drives)

    def close(self) -> None:
        """See `stepwell.tiers.base.Tier.close`."""
        self._closed = True
        # At once, since one that hangs takes its time, and the others stop meanwhile.
        threads = []
        for drive in self.drives:
            thread = threading.Thread(target=drive.close)
            try:
                thread.start()
            except RuntimeError:  # no more threads to be had
                drive.close()
            else:
                threads.append(thread)
        for thread in threads:
            thread.join()

    def _place(self, job: Job, whole: _Whole) -> list[list[int]]:
        """For each drive the chunks of the job that are its part."""
        keys = [chunk.key for chunk in job.chunks]
        parts: list[list[int]] = [[] for _ in self.drives]
        left = list(range(len(keys)))
        for drive, part in zip(self.drives, parts, strict=True):
            answers = drive.contains([keys[idx] for idx in left])
            wanted = (Lookup.HIT, Lookup.PENDING)[: 2 if job.direction is Direction.WRITE else 1]
            part += [idx for idx, answer in zip(left, answers, strict=True) if answer in wanted]
            here = set(part)
            left = [idx for idx in left if idx not in here]
        if job.direction is Direction.WRITE:
            self._spread(left, parts, whole)
        for part in parts:
            part.sort()  # in prefix order, whether a chunk is new or was there
        # What no drive will count.
        nowhere = [
            (len(job.chunks[idx].buffer), whole.results[idx])
            for idx in left
            if idx not in whole.placed
        ]
        count_results(self._metrics, self.name, job.direction, nowhere)
        return parts

    def _spread(self, idxs: Sequence[int], parts: list[list[int]], whole: _Whole) -> None:
        usable = [i for i, drive in enumerate(self.drives) if getattr(drive, "available", True)]
        for idx in idxs:
            key = whole.job.chunks[idx].key
            drive_idx, num_writes = self._placed.get(key, (-1, 0))
            if drive_idx < 0 and usable:
                drive_idx = usable[self._next_drive % len(usable)]
                self._next_drive += 1
            if drive_idx < 0:
                whole.results[idx] = _GONE[Direction.WRITE]
                continue
            # A key that is on its way twice must not come to lie on two drives.
            self._placed[key] = (drive_idx, num_writes + 1)
            whole.placed.add(idx)
            parts[drive_idx].append(idx)

    def _unplace(self, whole: _Whole, idxs: Sequence[int]) -> None:
        for idx in whole.placed.intersection(idxs):
            key = whole.job.chunks[idx].key
            drive_idx, num_writes = self._placed.pop(key)
            if num_writes > 1:
                self._placed[key] = (drive_idx, num_writes - 1)

    def _submit_part(self, drive_idx: int, whole: _Whole, idxs: Sequence[int]) -> None:
        job_id = self._next_id
        self._next_id += 1
        job = whole.job
        chunks: list[Chunk] = [job.chunks[idx] for idx in idxs]
        self._parts[drive_idx][job_id] = (whole, idxs)
        whole.waiting += 1
        try:
            self.drives[drive_idx].submit(replace(job, job_id=job_id, chunks=chunks))
        except ClosedError:
            self._not_begun(drive_idx, job_id, _GONE[job.direction])
        except Exception:  # counted as internal_errors
            # Raised on, the caller would take its buffers back while other drives fill them.
            logger.exception("a drive refused a job: tier=%s", self.drives[drive_idx].name)
            self._metrics.add("internal_errors", ("drive_submit",))
            failed = ChunkResult(Outcome.FAILED, Reason.INTERNAL)
            self._not_begun(drive_idx, job_id, failed)

    def _not_begun(self, drive_idx: int, job_id: int, result: ChunkResult) -> None:
        whole, idxs = self._parts[drive_idx].pop(job_id)
        whole.waiting -= 1
        self._unplace(whole, idxs)
        for idx in idxs:
            whole.results[idx] = result

    def _end(self, whole: _Whole) -> None:
        self._ended.append(
            JobResult(
                whole.job.job_id,
                whole.job.direction,
                tuple(whole.results),
                whole.moved_bytes,
                self._clock.monotonic() - whole.begun_s,
                tuple(whole.tiers),
                whole.slowest_s,
            )
        )
