"""The endurance budget against small steps of an integration, and what a drive's life comes to."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.policy.endurance import (
    EnduranceGovernor,
    Observation,
    project_life,
)

DAY_S = 86_400
# At one drive write per day, ten bytes per second: every level is a whole number.
CAPACITY_BYTES = 10 * DAY_S
TB = 10**12
START_S = 1_800_000_000


def governor(writes_per_day: float | None = 1.0, **more: object) -> EnduranceGovernor:
    return EnduranceGovernor(CAPACITY_BYTES, writes_per_day, START_S, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("no_limit", [None, 0, 0.0])
def test_without_a_limit_there_is_no_pressure_but_it_is_counted(no_limit: float | None) -> None:
    subject = governor(no_limit)
    subject.on_written(10**18, START_S)
    assert subject.pressure(START_S) == 0.0
    assert subject.level_bytes(START_S) == math.inf
    assert subject.written_bytes == 10**18
    assert subject.state(START_S + 5).written_bytes == 10**18


@pytest.mark.parametrize(
    ("written_share", "pressure"),
    [(0.0, 0.0), (0.25, 0.0), (0.5, 0.0), (0.75, 0.5), (0.875, 0.75), (1.0, 1.0), (3.0, 1.0)],
)
def test_pressure_begins_at_half_a_day_and_ends_when_it_is_spent(
    written_share: float, pressure: float
) -> None:
    subject = governor()
    subject.on_written(int(written_share * CAPACITY_BYTES), START_S)
    assert subject.pressure(START_S) == pressure
    assert subject.level_bytes(START_S) == (1 - written_share) * CAPACITY_BYTES


def test_a_debt_is_paid_before_anything_is_admitted() -> None:
    subject = governor()
    subject.on_written(2 * CAPACITY_BYTES, START_S)
    assert subject.pressure(START_S + DAY_S) == 1.0
    assert subject.pressure(START_S + DAY_S + 1) < 1.0
    assert subject.pressure(START_S + DAY_S + DAY_S // 4) == 0.5
    assert subject.pressure(START_S + DAY_S + DAY_S // 2) == 0.0


def test_a_quiet_week_leaves_one_day_and_not_seven() -> None:
    subject = governor()
    assert subject.level_bytes(START_S + 7 * DAY_S) == CAPACITY_BYTES
    half = governor(burst_days=0.5)
    assert half.level_bytes(START_S + 7 * DAY_S) == CAPACITY_BYTES / 2


steps = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 7, 600, 3600, 43_200, DAY_S]),
        st.sampled_from([0, 1, 100, CAPACITY_BYTES // 3, CAPACITY_BYTES]),
    ),
    max_size=12,
)


class SecondBySecond:
    """A bucket into which ten bytes drip every second; what does not fit runs over."""

    def __init__(self) -> None:
        self.level_bytes = CAPACITY_BYTES

    def advance(self, seconds: int) -> None:
        for _ in range(seconds):
            self.level_bytes = min(CAPACITY_BYTES, self.level_bytes + 10)
            if self.level_bytes == CAPACITY_BYTES:
                return  # it stays full

    def pressure(self) -> float:
        return min(1.0, max(0.0, 1 - self.level_bytes / (CAPACITY_BYTES / 2)))


@given(history=steps)
def test_it_is_a_bucket_that_drips(history: list[tuple[int, int]]) -> None:
    subject, plain, now_s = governor(), SecondBySecond(), START_S
    for seconds, num_bytes in history:
        now_s += seconds
        plain.advance(seconds)
        subject.on_written(num_bytes, now_s)
        plain.level_bytes -= num_bytes
        assert subject.level_bytes(now_s) == plain.level_bytes
        assert subject.pressure(now_s) == plain.pressure()
    assert subject.written_bytes == sum(num_bytes for _, num_bytes in history)


@given(history=steps, looks=st.integers(1, 5))
def test_looking_more_often_changes_nothing(history: list[tuple[int, int]], looks: int) -> None:
    one, other, now_s = governor(), governor(), START_S
    for seconds, num_bytes in history:
        for look in range(looks):
            other.pressure(now_s + seconds * look // looks)
        now_s += seconds
        one.on_written(num_bytes, now_s)
        other.on_written(num_bytes, now_s)
    assert one.level_bytes(now_s) == other.level_bytes(now_s)


@given(history=steps, restarts=st.sets(st.integers(0, 11)))
def test_restarts_change_nothing(history: list[tuple[int, int]], restarts: set[int]) -> None:
    one, other, now_s = governor(), governor(), START_S
    for idx, (seconds, num_bytes) in enumerate(history):
        if idx in restarts:
            saved = other.state(now_s)
            other = EnduranceGovernor(CAPACITY_BYTES, 1.0, now_s + seconds, state=saved)
        now_s += seconds
        one.on_written(num_bytes, now_s)
        other.on_written(num_bytes, now_s)
    assert one.state(now_s) == other.state(now_s)
    assert one.state(now_s).first_s == START_S


def test_the_budget_goes_on_while_nothing_runs() -> None:
    subject = governor()
    subject.on_written(CAPACITY_BYTES, START_S)
    restored = EnduranceGovernor(
        CAPACITY_BYTES, 1.0, START_S + DAY_S // 4, state=subject.state(START_S)
    )
    assert restored.pressure(START_S + DAY_S // 4) == 0.5


def test_a_smaller_budget_after_a_restart_keeps_neither_the_old_burst_nor_forgets_a_debt() -> None:
    full = governor().state(START_S)
    smaller = EnduranceGovernor(CAPACITY_BYTES, 0.5, START_S, state=full)
    assert smaller.level_bytes(START_S) == CAPACITY_BYTES / 2
    indebted = governor()
    indebted.on_written(3 * CAPACITY_BYTES, START_S)
    larger = EnduranceGovernor(CAPACITY_BYTES, 2.0, START_S, state=indebted.state(START_S))
    assert larger.level_bytes(START_S) == -2 * CAPACITY_BYTES


def test_a_clock_that_is_set_back_gives_nothing_and_takes_nothing() -> None:
    subject = governor()
    subject.on_written(CAPACITY_BYTES, START_S)
    assert subject.level_bytes(START_S - 10 * DAY_S) == 0
    # It counts on from there, rather than not until the old date.
    assert subject.level_bytes(START_S - 10 * DAY_S + 60) == 600
    assert subject.level_bytes(START_S + 1000 * DAY_S) == CAPACITY_BYTES


@pytest.mark.parametrize("seed", range(5))
def test_a_month_keeps_the_budget_whatever_is_offered(seed: int) -> None:
    """A writer that stops at pressure 1 stays within (days + 1) budgets, and uses them up."""
    rng = random.Random(seed)
    subject, now_s, largest = governor(), float(START_S), CAPACITY_BYTES // 50
    while now_s < START_S + 30 * DAY_S:
        now_s += rng.expovariate(1 / 300)
        if subject.pressure(now_s) < 1:
            subject.on_written(rng.randrange(largest), now_s)
        days = (now_s - START_S) / DAY_S
        assert subject.written_bytes <= (days + 1) * CAPACITY_BYTES + largest
        assert subject.level_bytes(now_s) > -largest
    assert subject.written_bytes > 30 * CAPACITY_BYTES


@pytest.mark.parametrize(
    ("capacity_bytes", "writes_per_day", "burst_days", "named"),
    [
        (0, 1.0, 1.0, "capacity_bytes"),
        (1, -0.1, 1.0, "drive_writes_per_day"),
        (1, math.inf, 1.0, "drive_writes_per_day"),
        (1, math.nan, 1.0, "drive_writes_per_day"),
        (1, 1.0, 0.0, "burst_days"),
        (1, 1.0, 1.5, "burst_days"),
    ],
)
def test_values_out_of_range_are_refused(
    capacity_bytes: int, writes_per_day: float, burst_days: float, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        EnduranceGovernor(capacity_bytes, writes_per_day, 0.0, burst_days=burst_days)


@pytest.mark.parametrize(
    ("written_bytes", "days", "capacity_bytes", "rated", "years", "observation"),
    [
        # As much as it is rated for: as long as its warranty.
        (10 * 15.36 * TB, 10, 15.36 * TB, 1.0, 5.0, Observation.FAIR),
        # Mixed-use drive at a third of its rating.
        (30 * 3.2 * TB, 30, 3.2 * TB, 3.0, 15.0, Observation.FAIR),
        # docs/SOURCES.md S5: all new KV of the conversation trace (Llama-70B), 749 TB a day,
        # needs 49 drives; one lasts 5 years / 48.8, which is five weeks.
        (7 * 749 * TB, 7, 15.36 * TB, 1.0, 0.1025, Observation.FAIR),
        # The agents' 11 TB a day: 0.7 drives.
        (7 * 11 * TB, 7, 15.36 * TB, 1.0, 6.98, Observation.FAIR),
        (2 * TB, 2, 1 * TB, 1.0, 5.0, Observation.ROUGH),
        (6.99 * TB, 6.99, 1 * TB, 1.0, 5.0, Observation.ROUGH),
        (0, 8, 1 * TB, 1.0, math.inf, Observation.FAIR),
    ],
)
def test_a_drives_life(
    written_bytes: float,
    days: float,
    capacity_bytes: float,
    rated: float,
    years: float,
    observation: Observation,
) -> None:
    life = project_life(int(written_bytes), days * DAY_S, int(capacity_bytes), rated)
    assert life.years == pytest.approx(years, rel=1e-3)
    assert life.observation is observation
    assert life.drive_writes_per_day == pytest.approx(written_bytes / days / capacity_bytes)
    # TBW = DWPD x capacity x 365 x 5.
    assert life.rated_bytes == pytest.approx(rated * capacity_bytes * 1825)
    assert life.used_share == pytest.approx(written_bytes / life.rated_bytes)


@pytest.mark.parametrize("observed_s", [-5.0, 0.0, 1.0, DAY_S - 1.0])
def test_an_observation_of_less_than_a_day_projects_nothing(observed_s: float) -> None:
    life = project_life(TB, observed_s, TB, 1.0)
    assert (life.years, life.drive_writes_per_day) == (None, None)
    assert life.observation is Observation.TOO_SHORT
    assert life.used_share == pytest.approx(1 / 1825)


def test_another_warranty_is_another_rating() -> None:
    assert project_life(3 * TB, 3 * DAY_S, TB, 1.0, 3.0).years == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("written_bytes", "capacity_bytes", "rated", "warranty_years"),
    [(-1, 1, 1.0, 5.0), (1, 0, 1.0, 5.0), (1, 1, 0.0, 5.0), (1, 1, 1.0, 0.0)],
)
def test_a_projection_checks_its_values(
    written_bytes: int, capacity_bytes: int, rated: float, warranty_years: float
) -> None:
    with pytest.raises(ValueError, match="="):
        project_life(written_bytes, DAY_S, capacity_bytes, rated, warranty_years)
