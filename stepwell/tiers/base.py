"""The tier interface, and what every tier is handed at construction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stepwell.clock import Clock, SystemClock
from stepwell.core.keys import Key
from stepwell.core.leases import LeaseTable
from stepwell.core.registry import RootRegistry
from stepwell.core.types import Job, JobResult, Lookup, Reason
from stepwell.metrics import Metrics

__all__ = ["Tier", "TierContext", "believed", "why_missed"]

_LAST_S = float(0xFFFFFFFF)


@dataclass(frozen=True)
class TierContext:
    """What the tiers of one store share."""

    clock: Clock = field(default_factory=SystemClock)
    metrics: Metrics = field(default_factory=Metrics)
    registry: RootRegistry = field(default_factory=RootRegistry)
    leases: LeaseTable = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "leases", LeaseTable(self.clock.monotonic))

    def wall_s(self) -> float:
        """Seconds since 1970, as far as records and journals can hold them: 0 to the year 2106."""
        return min(max(self.clock.wall(), 0.0), _LAST_S)


class Tier(Protocol):
    """A place where chunks are kept. `stepwell.testing.TierContract` is the full contract.

    A tier may have more to tell, and is asked for it by name: ``used_bytes``; ``capacity_bytes``;
    ``available``, whether it would take a job at present, taken for True where it is missing;
    ``under_way``, the operations that are running now as (job id or -1, monotonic seconds of its
    begin), which lets a breaker see a medium that stands still; ``troubles``, a deque of when
    operations began that failed and were no job's; ``finds_out``, whether a miss is the medium's
    own answer; ``believes``, see `believed`; ``why_missed``, the reason of a MISS that `contains`
    has just said.

    Threading: one thread calls; a tier's own threads do the work. No method but `close` waits
        for I/O, hashes a payload or touches a directory.
    Ownership: from `submit` until `poll` reports the job, its buffers belong to the tier. After
        the report the tier never touches them again.
    Errors: after construction no method raises for what a medium does; outcomes are values.
        `submit` raises ClosedError after `close`.
    Cost: `contains` and `submit` O(chunks), `poll` O(finished jobs).
    """

    @property
    def name(self) -> str:
        """A short word for metrics and reports: "host", "disk"."""
        ...

    def contains(self, keys: Sequence[Key]) -> list[Lookup]:
        """HIT, PENDING (being written), UNKNOWN or MISS for each key. Changes no chunk.

        A HIT is a hint: the read may still be a miss. UNKNOWN is said by a tier that has to find
        out, and goes on to do so.
        """
        ...

    def submit(self, job: Job) -> None:
        """Begin a job. READ and WRITE move bytes; TOUCH makes chunks recent.

        Every job is reported by `poll` exactly once, whatever happens.
        """
        ...

    def poll(self) -> list[JobResult]:
        """The jobs that ended since the last call."""
        ...

    def delete(self, keys: Sequence[Key]) -> int:
        """Invalidate chunks: at once `contains` says MISS, the space follows. Returns how many."""
        ...

    def close(self) -> None:
        """Stop. Waits for what has begun, gives up the rest; `poll` still reports all of it."""
        ...


def believed(tier: Tier, keys: Sequence[Key]) -> list[Lookup]:
    """What a tier says of keys without going on to find out what it does not know."""
    believes: Callable[[Sequence[Key]], list[Lookup]] = getattr(tier, "believes", tier.contains)
    return believes(keys)


def why_missed(tiers: Sequence[Tier], key: Key) -> Reason:
    """Why no tier has a chunk: ABSENT, or the first other reason that one of them gives."""
    for tier in tiers:
        reason: Reason = getattr(tier, "why_missed", lambda key: Reason.ABSENT)(key)
        if reason is not Reason.ABSENT:
            return reason
    return Reason.ABSENT
