"""A tier behind a breaker: transparent while all is well, and asked no more when it is not."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepwell.clock import ManualClock
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
from stepwell.policy.breaker import Breaker, State
from stepwell.testing import BoundedTierContract, key_of, tier_machine
from stepwell.testing.stalling import stalled_calls
from stepwell.tiers import blockio, host
from stepwell.tiers.base import TierContext
from stepwell.tiers.disk import DiskTier, slot_cost_bytes
from stepwell.tiers.guarded import GuardedTier
from stepwell.tiers.host import HostTier

LIMIT_S = 2.0
OPEN_S = 5.0
DONE = ChunkResult(Outcome.DONE)
ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)
BROKEN = ChunkResult(Outcome.FAILED, Reason.IO_ERROR)
LATE = ChunkResult(Outcome.MISS, Reason.DEADLINE)
KEYS = [key_of(idx) for idx in range(8)]


# Transparent while all is well.


def patient() -> Breaker:
    """One for which the suite's stalls are nothing unusual."""
    return Breaker(latency_limit_s=1e6)


class TestGuardedDisk(BoundedTierContract):
    """Around the tier that it is made for."""

    persistent = True

    def make_tier(
        self, context: TierContext, capacity_bytes: int, *, inflight_writes_bytes: int = 1 << 30
    ) -> GuardedTier:
        disk = DiskTier(
            self.place / "kv", capacity_bytes, context, inflight_writes_bytes=inflight_writes_bytes
        )
        return GuardedTier(disk, patient(), context)

    def used_bytes(self, tier: GuardedTier) -> int:
        return tier.tier.used_bytes  # type: ignore[attr-defined, no-any-return]

    def size_of(self, payload_bytes: int) -> int:
        return slot_cost_bytes(payload_bytes)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        with stalled_calls(blockio, "write_run", "read_run"):
            yield


class TestGuardedHost(BoundedTierContract):
    """Around a tier of another kind."""

    def make_tier(
        self, context: TierContext, capacity_bytes: int, *, inflight_writes_bytes: int = 1 << 30
    ) -> GuardedTier:
        tier = HostTier(capacity_bytes, context, inflight_writes_bytes=inflight_writes_bytes)
        return GuardedTier(tier, patient(), context)

    def used_bytes(self, tier: GuardedTier) -> int:
        return tier.tier.used_bytes  # type: ignore[attr-defined, no-any-return]

    def size_of(self, payload_bytes: int) -> int:
        return payload_bytes

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        with stalled_calls(host, "payload_checksum"):
            yield


TestGuardedMachine = tier_machine(
    lambda context, place: GuardedTier(HostTier(12 * 5000, context), Breaker(), context),
    max_examples=10,
).TestCase


# A drive that does what a test says.


class Drive:
    """A tier that has every chunk and ends a job when it is told to, with the results it is told.

    Jobs wait in ``waiting``; those in ``running`` have begun, each with some operations.
    """

    name = "drive"

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.jobs: dict[int, Job] = {}
        self.running: dict[int, list[float]] = {}
        self.ended: list[JobResult] = []
        self.lookups = 0
        self.deleted: list[Key] = []
        self.refuses: BaseException | None = None

    @property
    def under_way(self) -> list[tuple[int, float]]:
        return [(job_id, begun) for job_id, begins in self.running.items() for begun in begins]

    def contains(self, keys: Sequence[Key]) -> list[Lookup]:
        self.lookups += 1
        return [Lookup.HIT] * len(keys)

    def submit(self, job: Job) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.jobs[job.job_id] = job

    def begin(self, job_id: int, operations: int = 1, in_s: float = 0.0) -> None:
        begun = [self.clock.monotonic() + in_s] * operations
        self.running.setdefault(job_id, []).extend(begun)

    def end(self, job_id: int, *results: ChunkResult, slowest_s: float = 0.01) -> None:
        job = self.jobs.pop(job_id)
        self.running.pop(job_id, None)
        given = results or (DONE,) * len(job.chunks)
        moved_bytes = sum(
            len(chunk.buffer)
            for chunk, result in zip(job.chunks, given, strict=True)
            if result == DONE
        )
        tiers = tuple("drive" if result == DONE else "" for result in given)
        elapsed_s = 1000.0  # what it waited for its turn is no fault of the drive
        self.ended.append(
            JobResult(job_id, job.direction, given, moved_bytes, elapsed_s, tiers, slowest_s)
        )

    def poll(self) -> list[JobResult]:
        ended, self.ended = self.ended, []
        return ended

    def delete(self, keys: Sequence[Key]) -> int:
        self.deleted += keys
        return len(keys)

    def close(self) -> None:
        self.refuses = ClosedError("the tier is closed: tier=drive")


class Rig:
    """A guard, the drive behind it, and jobs by number."""

    def __init__(self, **breaker: float) -> None:
        self.clock = ManualClock()
        self.context = TierContext(clock=self.clock)
        self.drive = Drive(self.clock)
        values: dict[str, float] = {"latency_limit_s": LIMIT_S, "open_s": OPEN_S} | breaker
        self.breaker = Breaker(**values)  # type: ignore[arg-type]
        self.guard = GuardedTier(self.drive, self.breaker, self.context)
        self.next_id = 0

    @property
    def state(self) -> State:
        return self.breaker.state

    def submit(self, direction: Direction = Direction.READ, chunks: int = 1) -> int:
        self.next_id += 1
        length = 0 if direction is Direction.TOUCH else 100
        each = [Chunk(key, memoryview(bytearray(length))) for key in KEYS[:chunks]]
        self.guard.submit(Job(self.next_id, direction, each))
        return self.next_id

    def run(self, *results: ChunkResult, **changes: float) -> None:
        """One read from its beginning to its report."""
        job_id = self.submit(chunks=len(results) or 1)
        self.drive.begin(job_id)
        self.drive.end(job_id, *results, **changes)
        assert [result.job_id for result in self.guard.poll()] == [job_id]

    def open(self) -> None:
        for _ in range(3):
            self.run(BROKEN)
        assert self.state is State.OPEN
        self.drive.lookups = 0

    def probe(self) -> int:
        """The window is over, and the first who comes is the probe."""
        self.clock.advance(OPEN_S)
        job_id = self.submit()
        assert job_id in self.drive.jobs
        assert self.state is State.HALF_OPEN
        return job_id


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_it_is_called_what_the_tier_is_called(rig: Rig) -> None:
    assert rig.guard.name == "drive"
    assert rig.guard.available


# While it is open.


def test_a_few_failures_and_the_tier_is_asked_no_more(rig: Rig) -> None:
    rig.run(BROKEN)
    rig.run(DONE)
    rig.run(BROKEN)
    rig.run(BROKEN)
    assert rig.guard.contains(KEYS[:2]) == [Lookup.HIT] * 2
    rig.run(BROKEN)
    lookups = rig.drive.lookups
    assert not rig.guard.available
    assert rig.guard.contains(KEYS[:2]) == [Lookup.MISS] * 2
    assert rig.drive.lookups == lookups, "not even asked what it has"


@pytest.mark.parametrize(
    ("direction", "refusal"),
    [
        (Direction.READ, ChunkResult(Outcome.MISS, Reason.BREAKER)),
        (Direction.WRITE, ChunkResult(Outcome.FULL, Reason.BREAKER)),
        (Direction.TOUCH, ChunkResult(Outcome.MISS, Reason.BREAKER)),
    ],
)
def test_jobs_are_refused_at_once_and_counted(
    rig: Rig, direction: Direction, refusal: ChunkResult
) -> None:
    rig.open()
    job_id = rig.submit(direction, 3)
    assert rig.drive.jobs == {}
    (result,) = rig.guard.poll()
    assert (result.job_id, result.direction, result.results) == (job_id, direction, (refusal,) * 3)
    assert (result.moved_bytes, result.tiers) == (0, ("",) * 3)
    assert rig.guard.poll() == [], "reported once"
    counted = {
        each: rig.context.metrics.value(f"{each}_chunks", tier="drive", reason="breaker")
        for each in ("read", "write")
    }
    expected = {"read": 0, "write": 0}
    if direction is not Direction.TOUCH:
        expected[direction] = 3
    assert counted == expected


def test_what_was_begun_before_is_reported_when_it_ends(rig: Rig) -> None:
    old = rig.submit()
    rig.open()
    assert rig.guard.poll() == []
    rig.drive.end(old)
    (result,) = rig.guard.poll()
    assert (result.job_id, result.results) == (old, (DONE,))
    assert rig.state is State.OPEN, "it says nothing about the present"


def test_a_delete_always_gets_through(rig: Rig) -> None:
    """What is invalid must not be back when the drive is."""
    rig.open()
    assert rig.guard.delete(KEYS[:2]) == 2
    assert rig.drive.deleted == KEYS[:2]


def test_a_closed_tier_takes_nothing_open_or_not(rig: Rig) -> None:
    """While it was open jobs were refused, and reported, after `close` as before."""
    rig.open()
    rig.guard.close()
    for direction in Direction:
        with pytest.raises(ClosedError):
            rig.submit(direction)
    assert rig.guard.poll() == []


def test_a_job_needs_a_chunk_open_or_not(rig: Rig) -> None:
    rig.open()
    with pytest.raises(ValueError, match="at least one chunk"):
        rig.submit(chunks=0)
    assert rig.guard.poll() == []


# Probes.


def test_after_a_while_one_probe_gets_through(rig: Rig) -> None:
    rig.open()
    rig.clock.advance(OPEN_S - 0.1)
    assert not rig.guard.available
    rig.clock.advance(0.1)
    assert rig.guard.available
    assert rig.guard.contains(KEYS[:1]) == [Lookup.HIT], "or nobody would come and be the probe"
    assert rig.state is State.OPEN, "a lookup is no probe"
    probe = rig.submit()
    others = [rig.submit(), rig.submit(Direction.WRITE)]
    assert list(rig.drive.jobs) == [probe]
    assert {result.job_id for result in rig.guard.poll()} == set(others)
    assert not rig.guard.available
    assert rig.guard.contains(KEYS[:1]) == [Lookup.MISS]


def test_a_good_probe_closes(rig: Rig) -> None:
    rig.open()
    rig.drive.end(rig.probe())
    rig.guard.poll()
    assert rig.state is State.CLOSED
    assert rig.guard.contains(KEYS[:1]) == [Lookup.HIT]
    assert rig.submit() in rig.drive.jobs


@pytest.mark.parametrize("bad", ["failed", "slow", "overdue"])
def test_a_bad_probe_opens_for_twice_as_long(rig: Rig, bad: str) -> None:
    rig.open()
    probe = rig.probe()
    rig.drive.begin(probe)
    if bad == "overdue":
        rig.clock.advance(LIMIT_S + 0.1)
    elif bad == "slow":
        rig.drive.end(probe, slowest_s=LIMIT_S + 0.1)
    else:
        rig.drive.end(probe, BROKEN)
    rig.guard.poll()
    assert rig.state is State.OPEN
    rig.clock.advance(2 * OPEN_S - 0.1)
    assert not rig.guard.available
    rig.clock.advance(0.1)
    assert rig.guard.available


def test_a_touch_is_never_the_probe(rig: Rig) -> None:
    """It moves nothing, so it tells nothing."""
    rig.open()
    rig.clock.advance(OPEN_S)
    rig.submit(Direction.TOUCH)
    assert rig.drive.jobs == {}
    assert rig.state is State.OPEN
    assert rig.submit() in rig.drive.jobs


@pytest.mark.parametrize(
    "result",
    [
        ABSENT,
        ChunkResult(Outcome.DONE, Reason.EXISTS),
        ChunkResult(Outcome.FULL, Reason.CAPACITY),
        ChunkResult(Outcome.FULL, Reason.QUEUE_FULL),
        ChunkResult(Outcome.MISS, Reason.LAYOUT),
        ChunkResult(Outcome.MISS, Reason.EXPIRED),
        ChunkResult(Outcome.MISS, Reason.CLOSED),
        LATE,
    ],
)
def test_a_probe_for_which_the_drive_was_not_asked_says_nothing(
    rig: Rig, result: ChunkResult
) -> None:
    """The table said that the chunk is not there, or there already. That took a few microseconds,
    so it passed for a quick answer of a drive that in truth hung, and closed the breaker."""
    rig.open()
    probe = rig.probe()
    rig.drive.end(probe, result, slowest_s=0.00001)
    rig.guard.poll()
    assert rig.state is State.OPEN
    assert rig.guard.available, "the next one may be the probe at once"
    again = rig.submit()
    rig.drive.end(again)
    rig.guard.poll()
    assert rig.state is State.CLOSED


@pytest.mark.parametrize("reason", [Reason.CHECKSUM, Reason.HEADER, Reason.TRUNCATED])
def test_a_probe_that_finds_a_damaged_record_closes(rig: Rig, reason: Reason) -> None:
    """The drive answered, if with the wrong bytes."""
    rig.open()
    rig.drive.end(rig.probe(), ChunkResult(Outcome.MISS, reason))
    rig.guard.poll()
    assert rig.state is State.CLOSED


def test_a_clock_that_does_not_move_is_no_reason_not_to_close(rig: Rig) -> None:
    """On a virtual clock a read takes no time at all, which passed for not having been one."""
    rig.open()
    rig.drive.end(rig.probe(), slowest_s=0.0)
    rig.guard.poll()
    assert rig.state is State.CLOSED


def test_a_probe_that_cannot_be_submitted(rig: Rig) -> None:
    """It was never reported, so the tier was lost for as long as an unheard-of probe is waited
    for: five minutes."""
    rig.open()
    rig.clock.advance(OPEN_S)
    rig.drive.refuses = MemoryError()
    with pytest.raises(MemoryError):
        rig.submit()
    assert rig.state is State.OPEN
    rig.drive.refuses = None
    rig.drive.end(rig.submit())
    rig.guard.poll()
    assert rig.state is State.CLOSED


# What counts as bad.


def test_one_failed_chunk_makes_a_bad_job(rig: Rig) -> None:
    for _ in range(3):
        rig.run(DONE, BROKEN, DONE)
    assert rig.state is State.OPEN


def test_misses_and_refusals_are_not_bad(rig: Rig) -> None:
    for _ in range(30):
        rig.run(ABSENT, ChunkResult(Outcome.MISS, Reason.CHECKSUM))
        rig.run(ChunkResult(Outcome.FULL, Reason.NO_SPACE))
    assert rig.state is State.CLOSED


def test_a_slow_operation_is_bad_and_waiting_for_a_turn_is_not(rig: Rig) -> None:
    """All of these jobs took a thousand seconds from submission to end."""
    for _ in range(30):
        rig.run(DONE, slowest_s=LIMIT_S)
    assert rig.state is State.CLOSED
    for _ in range(3):
        rig.run(DONE, slowest_s=LIMIT_S + 0.1)
    assert rig.state is State.OPEN


def test_slow_touches_are_not_the_drives_fault(rig: Rig) -> None:
    for _ in range(5):
        job_id = rig.submit(Direction.TOUCH)
        rig.drive.end(job_id, slowest_s=100.0)
        rig.guard.poll()
    assert rig.state is State.CLOSED


# A drive that stands still.


def test_operations_that_do_not_come_back_open_it_while_they_last(rig: Rig) -> None:
    jobs = [rig.submit() for _ in range(3)]
    for job_id in jobs:
        rig.drive.begin(job_id)
    rig.clock.advance(LIMIT_S - 0.1)
    rig.guard.poll()
    assert rig.state is State.CLOSED
    rig.clock.advance(0.2)
    assert rig.guard.poll() == []
    assert rig.state is State.OPEN
    assert rig.guard.contains(KEYS[:1]) == [Lookup.MISS]


def test_one_job_on_all_threads_opens_it(rig: Rig) -> None:
    """A long prompt was read by all of the drive's threads when the drive hung. That was one
    job, so it was one bad result; nothing else ever began, so there was never another, and every
    request waited for its whole deadline, for ever."""
    job_id = rig.submit(chunks=8)
    rig.drive.begin(job_id, operations=8)
    rig.clock.advance(LIMIT_S + 0.1)
    rig.guard.poll()
    assert rig.state is State.OPEN


def test_an_only_operation_opens_it_in_the_end(rig: Rig) -> None:
    """With one thread no more than one operation ever hangs; it counts again each time as long."""
    rig.drive.begin(rig.submit())
    for state in (State.CLOSED, State.CLOSED, State.OPEN):
        rig.clock.advance(LIMIT_S + 0.1)
        rig.guard.poll()
        rig.guard.poll()
        assert rig.state is state


def test_nobody_looked_for_long(rig: Rig) -> None:
    rig.drive.begin(rig.submit())
    rig.clock.advance(100 * LIMIT_S)
    rig.guard.poll()
    assert rig.state is State.OPEN


def test_an_operation_that_ended_and_was_not_looked_at_is_not_overdue(rig: Rig) -> None:
    """An engine's step took long, not the drive."""
    for _ in range(5):
        job_id = rig.submit()
        rig.drive.begin(job_id)
        rig.drive.end(job_id)
        rig.clock.advance(10 * LIMIT_S)
        rig.guard.poll()
    assert rig.state is State.CLOSED


def test_a_late_end_is_reported_once_and_not_counted_again(rig: Rig) -> None:
    rig.run(BROKEN)
    job_id = rig.submit()
    rig.drive.begin(job_id)
    rig.clock.advance(LIMIT_S + 0.1)
    rig.guard.poll()
    rig.drive.end(job_id, slowest_s=LIMIT_S + 0.2)
    assert [result.job_id for result in rig.guard.poll()] == [job_id]
    assert rig.state is State.CLOSED, "one failed and one was late: two bad ones, not three"
    rig.run(BROKEN)
    assert rig.state is State.OPEN


def test_late_ends_do_not_close_it(rig: Rig) -> None:
    jobs = [rig.submit() for _ in range(3)]
    for job_id in jobs:
        rig.drive.begin(job_id)
    rig.clock.advance(LIMIT_S + 0.1)
    rig.guard.poll()
    for job_id in jobs:
        rig.drive.end(job_id, slowest_s=0.1)
    assert len(rig.guard.poll()) == 3
    assert rig.state is State.OPEN


def test_what_never_began_behind_a_drive_that_stands_still_is_bad(rig: Rig) -> None:
    """It waited its whole deadline because nothing came back."""
    rig = Rig(num_in_a_row=4)
    stuck, *waiting = [rig.submit() for _ in range(4)]
    rig.drive.begin(stuck)
    rig.clock.advance(LIMIT_S + 0.1)
    for job_id in waiting:
        rig.drive.end(job_id, LATE, slowest_s=0.0)
    rig.guard.poll()
    assert rig.state is State.OPEN


def test_what_never_began_behind_a_queue_is_not_bad(rig: Rig) -> None:
    """The drive is busy, not broken: more was asked of it than it can do in time."""
    busy, *waiting = [rig.submit() for _ in range(10)]
    rig.clock.advance(9.0)
    rig.drive.begin(busy)
    rig.clock.advance(LIMIT_S - 0.1)
    for job_id in waiting:
        rig.drive.end(job_id, LATE, slowest_s=0.0)
    rig.guard.poll()
    assert rig.state is State.CLOSED


def test_a_probe_that_never_begins_is_the_last_for_this_window(rig: Rig) -> None:
    """All threads hung. Each probe waited its deadline in the queue, was given up, and therefore
    told nothing: the next request was the next probe, and so each one waited its deadline."""
    stuck = rig.submit(chunks=8)
    rig.drive.begin(stuck, operations=8)
    rig.clock.advance(LIMIT_S + 0.1)
    rig.guard.poll()
    probe = rig.probe()
    rig.clock.advance(10.0)
    rig.drive.end(probe, LATE, slowest_s=0.0)
    rig.guard.poll()
    assert rig.state is State.OPEN
    assert not rig.guard.available
    assert rig.guard.contains(KEYS[:1]) == [Lookup.MISS]
    rig.clock.advance(2 * OPEN_S - 0.1)
    assert not rig.guard.available
    rig.clock.advance(0.2)
    assert rig.guard.available


def test_a_probe_that_is_never_heard_of_is_not_waited_for_for_ever(rig: Rig) -> None:
    """It waits in the drive's queue, and has hours to do so. The breaker allowed another after
    five minutes, but nobody came: lookups were misses, and a stripe avoided the drive."""
    rig.open()
    rig.probe()
    rig.clock.advance(299.0)
    rig.guard.poll()
    assert not rig.guard.available
    rig.clock.advance(1.0)
    rig.guard.poll()
    assert rig.guard.available
    assert rig.guard.contains(KEYS[:1]) == [Lookup.HIT]
    rig.drive.end(rig.submit())
    rig.guard.poll()
    assert rig.state is State.CLOSED


def test_a_drive_that_goes_on_is_found_out(rig: Rig) -> None:
    stuck = rig.submit(chunks=8)
    rig.drive.begin(stuck, operations=8)
    rig.clock.advance(LIMIT_S + 0.1)
    rig.guard.poll()
    rig.drive.end(stuck)
    assert len(rig.guard.poll()) == 1
    rig.drive.end(rig.probe())
    rig.guard.poll()
    assert rig.state is State.CLOSED
    rig.run(BROKEN)
    rig.run(BROKEN)
    assert rig.state is State.CLOSED, "what was before is forgotten"


def test_an_operation_that_began_after_the_clock_was_read(rig: Rig) -> None:
    """A thread begins one while `poll` is at it. Its end was taken for one that the breaker had
    heard of before."""
    for _ in range(3):
        job_id = rig.submit()
        rig.drive.begin(job_id, in_s=3 * LIMIT_S)
        rig.guard.poll()
        rig.drive.end(job_id, BROKEN)
        rig.guard.poll()
    assert rig.state is State.OPEN


# Any history.


class GuardMachine(RuleBasedStateMachine):
    """Jobs of all kinds that end well, badly, late or not at all: each is reported once, and
    while the breaker is open nothing reaches the drive but one probe at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.unreported: set[int] = set()
        self.probes: set[int] = set()

    @rule(direction=st.sampled_from(Direction), chunks=st.integers(1, 3))
    def submit(self, direction: Direction, chunks: int) -> None:
        rig = self.rig
        was_closed, may_probe = rig.state is State.CLOSED, rig.guard.available
        job_id = rig.submit(direction, chunks)
        self.unreported.add(job_id)
        passed = job_id in rig.drive.jobs
        assert passed == (was_closed or (may_probe and direction is not Direction.TOUCH))
        if passed and not was_closed:
            assert not self.probes & set(rig.drive.jobs) or rig.state is State.HALF_OPEN
            self.probes = {job_id}

    @precondition(lambda self: self.rig.drive.jobs)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.rig.drive.jobs)))
        self.rig.drive.begin(job_id, data.draw(st.integers(1, 3)))

    @precondition(lambda self: self.rig.drive.jobs)
    @rule(
        data=st.data(),
        result=st.sampled_from([DONE, DONE, DONE, ABSENT, BROKEN, LATE]),
        slowest_s=st.sampled_from([0.0, 0.1, 3.0]),
    )
    def end(self, data: st.DataObject, result: ChunkResult, slowest_s: float) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.rig.drive.jobs)))
        num_chunks = len(self.rig.drive.jobs[job_id].chunks)
        self.rig.drive.end(job_id, *[result] * num_chunks, slowest_s=slowest_s)

    @rule(seconds=st.sampled_from([0.1, LIMIT_S, OPEN_S, 60.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)

    @rule()
    def poll(self) -> None:
        for result in self.rig.guard.poll():
            assert result.job_id in self.unreported, "reported twice, or never begun"
            self.unreported.discard(result.job_id)
        waiting = set(self.rig.drive.jobs)
        assert self.unreported == waiting, "every job that is not in the drive is reported"

    @invariant()
    def lookups_follow_the_state(self) -> None:
        guard = self.rig.guard
        assert (guard.contains(KEYS[:1]) == [Lookup.HIT]) == guard.available
        assert guard.available or self.rig.state is not State.CLOSED


TestGuardMachine = GuardMachine.TestCase
TestGuardMachine.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_long_life_leaves_nothing(rig: Rig) -> None:
    """Of jobs that ended: no memory, and no memory of their lateness either."""
    for round_idx in range(300):
        job_id = rig.submit(chunks=2)
        rig.drive.begin(job_id, operations=2)
        if round_idx % 10 == 0:
            rig.clock.advance(LIMIT_S + 0.1)
            rig.guard.poll()
        rig.drive.end(job_id)
        rig.guard.poll()
        if rig.state is not State.CLOSED:
            rig.drive.end(rig.probe())
            rig.guard.poll()
    left = {
        name: len(value)
        for name, value in vars(rig.guard).items()
        if isinstance(value, dict | list | set) and value
    }
    assert left == {}
