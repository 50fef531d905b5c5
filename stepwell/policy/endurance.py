"""How much may be written to a drive, and how long it will last at that.

A drive is rated in drive writes per day (DWPD): so many times its capacity may be written per day,
for the length of its warranty. A KV cache that writes all that is computed exceeds this on many
workloads (docs/SOURCES.md S5: 749 TB a day where 15 TB are allowed), so what may be written
is a budget, and admission becomes stricter as it is used up.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "EnduranceGovernor",
    "EnduranceState",
    "LifeProjection",
    "Observation",
    "project_life",
]

DAY_S = 86_400.0
YEAR_DAYS = 365.0

WARRANTY_YEARS = 5.0
"""What data sheets of enterprise drives rate their drive writes per day for."""

EASE_SHARE = 0.5
"""Pressure begins when less than this part of the burst is left. With half a day's budget in
hand nothing needs to be refused; the other half is long enough for admission to become stricter
little by little instead of all at once."""

_NO_DEBT_BYTES = float(1 << 62)


@dataclass(frozen=True, slots=True)
class EnduranceState:
    """What outlives a restart.

    Attributes:
        written_bytes: all that was ever written, >= 0.
        first_s: since when that is counted, seconds since the epoch.
        level_bytes: what may be written at ``as_of_s``; negative if more was written already.
        as_of_s: when this was taken, seconds since the epoch.
    """

    written_bytes: int
    first_s: float
    level_bytes: float
    as_of_s: float


class EnduranceGovernor:
    """A bucket of bytes that fills at the budget's rate and is emptied by what is written.

    It refuses nothing itself: it says how scarce writing has become, and admission decides. What
    was admitted before the bucket was empty is still written, so the level may become negative;
    it then has to fill up to 0 before anything else is admitted. Over any t days at most
    ``(t + burst_days)`` days' budgets are written, and what was in flight.

    The bucket holds one day's budget at most. The rating is a sum over years, so to write a day's
    worth within an hour harms nothing, and busy hours can live on what quiet ones left; while
    a mistake, or a load that came to stay, costs one day of the drive's life and not more. A new
    bucket is full: at one drive write per day that is exactly the first fill of the drive.

    Args:
        capacity_bytes: of the drive, > 0.
        drive_writes_per_day: the budget in capacities per day; None or 0: no limit.
        now_s: the present.
        state: what a former process saved; None: nothing was written before.
        burst_days: what the bucket holds, above 0 and at most 1.

    Threading: none; the owner locks. Cost: O(1) per call.

    Time is wall time, seconds since the epoch, because the budget goes on while no process runs.
    If it is set back, nothing accrues for that; if it is set forward, a full bucket at most.
    """

    def __init__(
        self,
        capacity_bytes: int,
        drive_writes_per_day: float | None,
        now_s: float,
        *,
        state: EnduranceState | None = None,
        burst_days: float = 1.0,
    ) -> None:
        writes_per_day = drive_writes_per_day or 0.0
        if capacity_bytes <= 0:
            raise ValueError(f"a drive has a capacity: capacity_bytes={capacity_bytes}")
        if not 0 <= writes_per_day < math.inf:
            raise ValueError(f"0 or more: drive_writes_per_day={drive_writes_per_day}")
        if not 0 < burst_days <= 1:
            raise ValueError(f"a bucket of at most one day: burst_days={burst_days}")
        self._day_bytes = writes_per_day * capacity_bytes
        self._burst_bytes = self._day_bytes * burst_days
        if state is None:
            state = EnduranceState(0, now_s, self._burst_bytes, now_s)
        self._written_bytes = state.written_bytes
        self._first_s = state.first_s
        # The budget may have been changed since: a smaller bucket holds less, a debt remains. Where
        # there is no budget there is no debt, should there be one later.
        self._level_bytes = _NO_DEBT_BYTES
        if self._day_bytes:
            self._level_bytes = min(state.level_bytes, self._burst_bytes)
        self._as_of_s = state.as_of_s

    @property
    def written_bytes(self) -> int:
        """All that was ever written, former processes included."""
        return self._written_bytes

    def on_written(self, num_bytes: int, now_s: float) -> None:
        """Take what was written out of the bucket; call it for every write, however it ended."""
        self._accrue(now_s)
        self._written_bytes += num_bytes
        if self._day_bytes:
            self._level_bytes -= num_bytes

    def level_bytes(self, now_s: float) -> float:
        """What may be written now; negative if too much was. Infinite without a limit."""
        if not self._day_bytes:
            return math.inf
        self._accrue(now_s)
        return self._level_bytes

    def pressure(self, now_s: float) -> float:
        """How scarce writing is: 0 while half the bucket is left, then in proportion up to 1.

        1 means that the budget is spent, and nothing should be admitted.
        """
        if not self._day_bytes:
            return 0.0
        left = self.level_bytes(now_s) / (EASE_SHARE * self._burst_bytes)
        return min(1.0, max(0.0, 1.0 - left))

    def state(self, now_s: float) -> EnduranceState:
        """What to save, and to hand to the next governor."""
        self._accrue(now_s)
        return EnduranceState(self._written_bytes, self._first_s, self._level_bytes, self._as_of_s)

    def _accrue(self, now_s: float) -> None:
        # A clock that was set back starts a new count; else a wrong date in the future would
        # stop the budget until that date.
        passed_s = max(0.0, now_s - self._as_of_s)
        self._as_of_s = now_s
        if self._day_bytes:
            gained_bytes = self._day_bytes * passed_s / DAY_S
            self._level_bytes = min(self._burst_bytes, self._level_bytes + gained_bytes)


class Observation(StrEnum):
    """How far a projection can be trusted, by how long was observed."""

    TOO_SHORT = "too_short"
    """Less than a day: a first fill or one busy hour says nothing about years."""
    ROUGH = "rough"
    """Less than a week: no whole week was seen, and the first fill weighs much."""
    FAIR = "fair"


@dataclass(frozen=True, slots=True)
class LifeProjection:
    """How long a drive lasts if it goes on being written to as it was.

    Attributes:
        rated_bytes: what may be written in the drive's whole life.
        used_share: what part of that has been written; above 1 if the rating is exceeded.
        drive_writes_per_day: as observed; None if the observation is too short.
        years: a new drive's life at this rate, infinite if nothing was written; None if the
            observation is too short. Beyond the warranty other things end a drive's life.
        observation: how far to trust the last two.
    """

    rated_bytes: float
    used_share: float
    drive_writes_per_day: float | None
    years: float | None
    observation: Observation


def project_life(
    written_bytes: int,
    observed_s: float,
    capacity_bytes: int,
    rated_drive_writes_per_day: float,
    warranty_years: float = WARRANTY_YEARS,
) -> LifeProjection:
    """How long a drive lasts.

    Rated are bytes as the host writes them, with the write amplification of the workload that the
    vendor tested with: TBW = DWPD x capacity x 365 x 5 (the data sheets' convention, after JEDEC
    JESD218 and JESD219; docs/SOURCES.md S4: 1 DWPD for read-intensive drives, 3 for mixed use,
    0.3 to 0.6 for large QLC). Large records that are overwritten as a whole amplify
    less than the tested random writes, so the projection errs on the safe side.

    Args:
        written_bytes: by this store; what others write to the drive is not known here.
        observed_s: how long that took. If less than a day nothing is projected.
        capacity_bytes: the drive's size, > 0.
        rated_drive_writes_per_day: from the data sheet, > 0.
        warranty_years: what the rating is for, > 0.

    Raises:
        ValueError: a value is out of range.
    """
    if min(capacity_bytes, rated_drive_writes_per_day, warranty_years) <= 0:
        raise ValueError(
            f"all are above 0: capacity_bytes={capacity_bytes} "
            f"rated_drive_writes_per_day={rated_drive_writes_per_day} "
            f"warranty_years={warranty_years}"
        )
    if written_bytes < 0:
        raise ValueError(f"at least 0 bytes were written: written_bytes={written_bytes}")
    rated_bytes = rated_drive_writes_per_day * capacity_bytes * YEAR_DAYS * warranty_years
    used_share = written_bytes / rated_bytes
    observed_days = observed_s / DAY_S
    if observed_days < 1:
        return LifeProjection(rated_bytes, used_share, None, None, Observation.TOO_SHORT)
    return LifeProjection(
        rated_bytes,
        used_share,
        drive_writes_per_day=written_bytes / observed_days / capacity_bytes,
        years=observed_days / YEAR_DAYS / used_share if written_bytes else math.inf,
        observation=Observation.ROUGH if observed_days < 7 else Observation.FAIR,
    )
