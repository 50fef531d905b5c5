"""A tier behind a breaker: one that fails or stands still is not asked for a while."""

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass

from stepwell.core.keys import Key
from stepwell.core.types import ChunkResult, Direction, Job, JobResult, Lookup, Outcome, Reason
from stepwell.errors import ClosedError
from stepwell.policy.breaker import Breaker, State
from stepwell.tiers.base import Tier, TierContext, believed, why_missed
from stepwell.tiers.outcomes import count_results

__all__ = ["GuardedTier"]

_REFUSED = {
    Direction.READ: ChunkResult(Outcome.MISS, Reason.BREAKER),
    Direction.WRITE: ChunkResult(Outcome.FULL, Reason.BREAKER),
    Direction.TOUCH: ChunkResult(Outcome.MISS, Reason.BREAKER),
}

# Misses for which the medium was read, and answered.
_ANSWERED = frozenset({Reason.ABSENT, Reason.EXISTS, Reason.EXPIRED})
_READ_AND_WRONG = frozenset({Reason.CHECKSUM, Reason.HEADER, Reason.IDENTITY, Reason.TRUNCATED})


_NO_TROUBLES: deque[float] = deque()


@dataclass(frozen=True, slots=True)
class _Begun:
    direction: Direction
    at_s: float


class GuardedTier:
    """Passes everything on to ``tier`` while its breaker allows it.

    While the breaker is open a lookup is a miss without the tier being asked, and jobs are
    refused at once. What was begun before goes on and is reported when it ends.

    Threading, Ownership, Errors: as the tier's. Cost: while open, one comparison.

    Args:
        tier: does the work.
        breaker: of this tier alone.
        context: clock and metrics.
    """

    def __init__(self, tier: Tier, breaker: Breaker, context: TierContext) -> None:
        self.tier = tier
        self.breaker = breaker
        self.name = tier.name
        self._clock = context.clock
        self._metrics = context.metrics
        self._begun: dict[int, _Begun] = {}
        self._refused: list[JobResult] = []
        # Operations that take too long, and how often the breaker has heard of each.
        self._overdue: dict[tuple[int, float], int] = {}
        self._late_jobs: set[int] = set()
        self._closed = False
        self._finds_out: bool = getattr(tier, "finds_out", False)

    @property
    def available(self) -> bool:
        """Whether a job would be passed on now, if only as a probe."""
        return self.breaker.state is State.CLOSED or self.breaker.would_allow(
            self._clock.monotonic()
        )

    def contains(self, keys: Sequence[Key]) -> list[Lookup]:
        """See `stepwell.tiers.base.Tier.contains`."""
        if not self.available:
            return [Lookup.MISS] * len(keys)
        if self._finds_out and self.breaker.state is not State.CLOSED:
            # Whether it is well again a job will tell, which is one probe and not any number.
            believes = believed(self.tier, keys)
            return [Lookup.MISS if each is Lookup.UNKNOWN else each for each in believes]
        return self.tier.contains(keys)

    def believes(self, keys: Sequence[Key]) -> list[Lookup]:
        """See `stepwell.tiers.base.believed`."""
        return believed(self.tier, keys) if self.available else [Lookup.MISS] * len(keys)

    def why_missed(self, key: Key) -> Reason:
        """Why `contains` has just said MISS."""
        reason = why_missed([self.tier], key)
        if self.breaker.state is State.CLOSED or reason is not Reason.ABSENT:
            return reason if self.available else Reason.BREAKER
        answer = believed(self.tier, [key])[0]
        may_be_there = answer is Lookup.UNKNOWN or (answer is Lookup.HIT and not self.available)
        return Reason.BREAKER if may_be_there else Reason.ABSENT

    def submit(self, job: Job) -> None:
        """See `stepwell.tiers.base.Tier.submit`."""
        if self._closed:
            raise ClosedError(f"the tier is closed: tier={self.name}")
        if not job.chunks:
            raise ValueError(f"a job has at least one chunk: job_id={job.job_id}")
        now_s = self._clock.monotonic()
        # A touch moves nothing, so it tells nothing: it is never the probe.
        if job.direction is Direction.TOUCH and self.breaker.state is not State.CLOSED:
            self._refuse(job)
            return
        if not self.breaker.allow(now_s):
            self._refuse(job)
            return
        self._begun[job.job_id] = _Begun(job.direction, now_s)
        try:
            self.tier.submit(job)
        except BaseException:  # counted by whoever called: it is raised on
            del self._begun[job.job_id]
            self.breaker.on_given_up(now_s)
            raise

    def poll(self) -> list[JobResult]:
        """See `stepwell.tiers.base.Tier.poll`."""
        now_s = self._clock.monotonic()
        results = self.tier.poll()
        for result in results:
            begun = self._begun.pop(result.job_id)
            if result.job_id in self._late_jobs:
                self._late_jobs.discard(result.job_id)  # the breaker has heard of it
            else:
                self._judge(result, begun, now_s)
        self._hear_of_troubles(now_s)
        self._look_for_overdue(now_s)
        refused, self._refused = self._refused, []
        return results + refused

    def delete(self, keys: Sequence[Key]) -> int:
        """See `stepwell.tiers.base.Tier.delete`; done even while the breaker is open."""
        return self.tier.delete(keys)

    def close(self) -> None:
        """See `stepwell.tiers.base.Tier.close`."""
        self._closed = True
        self.tier.close()

    def _refuse(self, job: Job) -> None:
        result = _REFUSED[job.direction]
        refused = [(len(chunk.buffer), result) for chunk in job.chunks]
        count_results(self._metrics, self.name, job.direction, refused)
        num_chunks = len(job.chunks)
        self._refused.append(
            JobResult(job.job_id, job.direction, (result,) * num_chunks, 0, 0.0, ("",) * num_chunks)
        )

    def _judge(self, result: JobResult, begun: _Begun, now_s: float) -> None:
        reasons = {chunk.reason for chunk in result.results}
        if any(chunk.outcome is Outcome.FAILED for chunk in result.results):
            self.breaker.on_error(begun.at_s, now_s)
        elif result.moved_bytes or reasons & _READ_AND_WRONG or self._was_answered(reasons):
            self.breaker.on_done(begun.at_s, result.slowest_s, now_s)
        elif Reason.DEADLINE in reasons and self._stands_still(now_s):
            # It never began, because nothing that did has come back.
            self.breaker.on_overdue(begun.at_s, now_s)
        else:
            self.breaker.on_given_up(begun.at_s)  # the medium was not asked: absent, refused

    def _was_answered(self, reasons: Set[Reason]) -> bool:
        """Whether a job that moved nothing has had an answer: of a tier that has to find out."""
        return self._finds_out and bool(reasons & _ANSWERED)

    def _hear_of_troubles(self, now_s: float) -> None:
        """Of what failed and was no job's, such as asking what is there."""
        troubles: deque[float] = getattr(self.tier, "troubles", _NO_TROUBLES)
        while troubles:
            self.breaker.on_error(troubles.popleft(), now_s)

    def _stands_still(self, now_s: float) -> bool:
        limit_s = self.breaker.latency_limit_s
        return any(now_s - began_s > limit_s for _, began_s in self._under_way())

    def _under_way(self) -> Sequence[tuple[int, float]]:
        found: Sequence[tuple[int, float]] = getattr(self.tier, "under_way", ())
        return found

    def _look_for_overdue(self, now_s: float) -> None:
        """Tell the breaker of every operation that takes too long, and again each time as long.

        So a medium that stands still opens it even if no more than one operation fits in.
        """
        overdue: dict[tuple[int, float], int] = {}
        for job_id, began_s in self._under_way():
            times = int((now_s - began_s) / self.breaker.latency_limit_s)
            if times <= 0:
                continue
            overdue[job_id, began_s] = times
            begun = self._begun.get(job_id)
            if begun is not None:
                self._late_jobs.add(job_id)
            for _ in range(times - self._overdue.get((job_id, began_s), 0)):
                self.breaker.on_overdue(began_s if begun is None else begun.at_s, now_s)
        self._overdue = overdue
