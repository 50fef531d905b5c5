"""The pipeline: reads, writes, promotions and demotions through real tiers, and what may go wrong.

The stories of other caches that hang when something is larger than what it passes through are
told again here, with an end.
"""

import contextlib
import dataclasses
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from stepwell import pipeline
from stepwell import store as store_module
from stepwell.clock import ManualClock
from stepwell.core.keys import Key, fingerprint
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
from stepwell.manager import Manager, Promotion, WriteMode
from stepwell.policy.admission import Admission, SecondDemotion
from stepwell.policy.breaker import Breaker, State
from stepwell.settings import Settings
from stepwell.store import Prefix, Store
from stepwell.testing import Driver, FaultyTier, buffer_of, key_of, payload_of
from stepwell.testing.stalling import stalled_calls
from stepwell.tiers import blockio, host, jobs
from stepwell.tiers.base import Tier, TierContext
from stepwell.tiers.disk import DiskTier, slot_cost_bytes
from stepwell.tiers.guarded import GuardedTier
from stepwell.tiers.host import HostTier

SIZE = 4096
DONE = ChunkResult(Outcome.DONE)
EXISTS = ChunkResult(Outcome.DONE, Reason.EXISTS)
ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)
UNASKED = ChunkResult(Outcome.MISS, Reason.BREAKER)
BAD = ChunkResult(Outcome.MISS, Reason.CHECKSUM)
BROKEN = ChunkResult(Outcome.FAILED, Reason.IO_ERROR)
LATE = ChunkResult(Outcome.MISS, Reason.DEADLINE)
FULL_QUEUE = ChunkResult(Outcome.FULL, Reason.QUEUE_FULL)
KEYS = [key_of(f"c{idx}") for idx in range(16)]
WAIT_S = 30.0

Faults = Callable[[int], ChunkResult | None]


class Watched(FaultyTier):
    """A tier whose jobs are remembered in ``jobs`` and counted in ``outstanding``."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.jobs: list[Job] = []
        self.outstanding = 0

    def submit(self, job: Job) -> None:
        super().submit(job)
        self.jobs.append(job)
        self.outstanding += 1

    def poll(self) -> list[JobResult]:
        reported = super().poll()
        self.outstanding -= len(reported)
        return reported

    def slow_down(self, clock: ManualClock, seconds: float) -> None:
        """Let time pass; what is kept back took as much longer."""
        clock.advance(seconds)
        self._ended = [
            dataclasses.replace(each, elapsed_s=each.elapsed_s + seconds) for each in self._ended
        ]

    def set_faults(self, direction: Direction, faults: Faults) -> None:
        """From now on; chunks go on being counted from the first ever."""
        self._faults[direction] = faults

    def asked(self, direction: Direction) -> list[Key]:
        """What jobs of a kind carried, in order."""
        return [c.key for job in self.jobs if job.direction is direction for c in job.chunks]


class Rig:
    """A host tier over one or two disk tiers, each wrapped for faults, and the store on top."""

    def __init__(
        self,
        path: Path,
        host_chunks: int = 64,
        lower: Sequence[str] = ("near", "far"),
        *,
        mode: WriteMode = WriteMode.THROUGH,
        promotion: Promotion = Promotion.ALWAYS,
        admission: Admission | None = None,
        disk_chunks: int = 64,
        num_threads: int = 2,
        inflight_chunks: int = 1 << 16,
        ttl_s: float = 0.0,
        guarded: bool = False,
    ) -> None:
        self.path = path
        self.clock = ManualClock()
        self.context = TierContext(clock=self.clock)
        self.departed: deque[tuple[int, int]] = deque()
        self.manager = Manager(
            [None, *[admission] * len(lower)],
            write_mode=mode,
            promotion=promotion,
            top_capacity_bytes=host_chunks * SIZE,
        )
        self.host = Watched(
            HostTier(
                host_chunks * SIZE,
                self.context,
                inflight_writes_bytes=inflight_chunks * SIZE,
                ttl_s=ttl_s,
                keeps=self.manager.keeps,
                on_evicted=lambda tag: self.departed.append((0, tag)),
            )
        )
        self.disks = [
            DiskTier(
                path / name,
                disk_chunks * slot_cost_bytes(SIZE),
                self.context,
                num_threads=num_threads,
                inflight_writes_bytes=inflight_chunks * SIZE,
                ttl_s=ttl_s,
                name=name,
                on_evicted=lambda tag, idx=idx: self.departed.append((idx, tag)),  # type: ignore[misc]
            )
            for idx, name in enumerate(lower, 1)
        ]
        self.lower = [Watched(disk) for disk in self.disks]
        self.guards = [GuardedTier(tier, Breaker(), self.context) for tier in self.lower]
        below: Sequence[Tier] = self.guards if guarded else self.lower
        self.store = Store(
            [self.host, *below],
            self.context,
            self.manager,
            departed=self.departed,
            drives=self.disks,
        )

    @property
    def disk(self) -> Watched:
        return self.lower[0]

    @property
    def tiers(self) -> list[Watched]:
        return [self.host, *self.lower]

    def put(self, tier: Watched, keys: Sequence[Key]) -> None:
        """Write chunks past the store."""
        driver = Driver(tier.tier, SIZE)
        for key in keys:
            assert driver.write([key])[0].outcome is Outcome.DONE
        wait_until(lambda: not tier.under_way, "its rest")

    def taken(self, tier: Watched, keys: Sequence[Key]) -> list[bytes]:
        """What a tier really has, read past the store."""
        result, contents = Driver(tier.tier, SIZE).read(keys)
        return [c if r == DONE else b"" for r, c in zip(result.results, contents, strict=True)]

    def settle(self) -> None:
        """Poll until nothing is under way any more, demotions included."""
        give_up_s = time.monotonic() + WAIT_S
        while True:
            before = sum(len(tier.jobs) for tier in self.tiers)
            assert self.store.poll() == []
            after = sum(len(tier.jobs) for tier in self.tiers)
            if before == after and not any(tier.outstanding for tier in self.tiers):
                return
            assert time.monotonic() < give_up_s, "something never ends"
            time.sleep(0.0002)

    def wait(self, job_id: int) -> JobResult:
        ended = self.store.drain(WAIT_S)
        assert [result.job_id for result in ended] == [job_id]
        return ended[0]

    def write(self, keys: Sequence[Key]) -> JobResult:
        return self.wait(self.store.write(chunks_of(keys)))

    def read(self, keys: Sequence[Key], deadline_s: float = 10.0) -> JobResult:
        """Read; whatever is DONE must be the right bytes, all of them read just now."""
        chunks = [Chunk(key, buffer_of(SIZE, b"\xee" * SIZE)) for key in keys]
        result = self.wait(self.store.read(chunks, deadline_s))
        check(chunks, result)
        return result

    def pass_time(self, seconds: float) -> None:
        """Time passes, once the disks have ended what they were at."""
        wait_until(lambda: not any(each.under_way for each in self.disks), "their rest")
        self.clock.advance(seconds)

    def demotions(self, **labels: str) -> int:
        return self.context.metrics.value("demoted_chunks", **labels)

    def kept(self, keys: Sequence[Key]) -> list[bool]:
        return [self.manager.keeps(fingerprint(key)) for key in keys]


def check(chunks: Sequence[Chunk], result: JobResult) -> None:
    for chunk, chunk_result in zip(chunks, result.results, strict=True):
        if chunk_result.outcome is Outcome.DONE:
            assert bytes(chunk.buffer) == payload_of(chunk.key, SIZE)


def chunks_of(keys: Sequence[Key]) -> list[Chunk]:
    return [Chunk(key, buffer_of(SIZE, payload_of(key, SIZE))) for key in keys]


def present(tier: Tier | Store, keys: Sequence[Key]) -> list[bool]:
    answers = tier.lookup(keys) if isinstance(tier, Store) else tier.contains(keys)
    return [answer is Lookup.HIT for answer in answers]


@contextlib.contextmanager
def holding(tier: Watched, direction: Direction, only: int | None = None) -> Iterator[list[int]]:
    """Within it, ended jobs of a kind are kept back; gives the ids of those that there are.

    Args:
        tier: whose.
        direction: which kind.
        only: just the one that is submitted so many jobs of any kind after this.
    """
    reached: list[int] = []
    first = len(tier.jobs)

    def hold(result: JobResult) -> bool:
        held = result.direction is direction and (
            only is None or result.job_id == tier.jobs[first + only].job_id
        )
        if held:
            reached.append(result.job_id)
        return held

    tier.hold = hold
    try:
        yield reached
    finally:
        tier.hold = lambda result: False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_s, f"never came: {what}"
        time.sleep(0.0005)


Make = Callable[..., Rig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Rig] = []

    def factory(*args: object, **settings: object) -> Rig:
        made.append(Rig(tmp_path / str(len(made)), *args, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield factory
    for rig in made:
        rig.store.close()


@pytest.fixture
def back(make: Make) -> Callable[..., Rig]:
    """A rig under write-back: a host tier of eight chunks over one disk."""

    def factory(host_chunks: int = 8, **settings: object) -> Rig:
        return make(host_chunks, settings.pop("lower", ("disk",)), mode=WriteMode.BACK, **settings)

    return factory


# Three tiers.


def test_writes_go_through_to_every_tier(make: Make) -> None:
    rig = make()
    assert rig.write(KEYS[:4]).results == (DONE,) * 4
    for tier in rig.tiers:
        assert rig.taken(tier, KEYS[:4]) == [payload_of(key, SIZE) for key in KEYS[:4]]


def test_each_chunk_is_read_from_the_uppermost_tier_that_has_it(make: Make) -> None:
    """And copied up to the uppermost, not to those between."""
    rig = make()
    rig.put(rig.host, KEYS[0:2])
    rig.put(rig.lower[0], KEYS[1:4])
    rig.put(rig.lower[1], [*KEYS[3:6], KEYS[0]])
    result = rig.read(KEYS[:7])
    assert result.tiers == ("host", "host", "near", "near", "far", "far", "")
    assert result.results == (DONE,) * 6 + (ABSENT,)
    assert result.moved_bytes == 6 * SIZE
    assert present(rig.host, KEYS[:7]) == [True] * 6 + [False]
    assert present(rig.lower[0], KEYS[:7]) == [False, True, True, True, False, False, False]
    assert rig.read(KEYS[:6]).tiers == ("host",) * 6


@pytest.mark.parametrize("fault", [BAD, BROKEN, LATE])
def test_a_miss_falls_through_to_the_last_tier(make: Make, fault: ChunkResult) -> None:
    rig = make()
    rig.write(KEYS[:3])
    rig.host.set_faults(Direction.READ, lambda number: fault if number > 1 else None)
    rig.lower[0].set_faults(Direction.READ, lambda number: fault if number == 2 else None)
    result = rig.read(KEYS[:3])
    assert result.results == (DONE,) * 3
    assert result.tiers == ("host", "near", "far")


def test_a_tier_that_has_not_what_is_missing_is_passed_over(make: Make) -> None:
    rig = make()
    rig.put(rig.host, KEYS[:1])
    rig.put(rig.lower[1], KEYS[:1])
    rig.host.set_faults(Direction.READ, lambda _: BAD)
    assert rig.read(KEYS[:1]).tiers == ("far",)
    assert rig.lower[0].jobs == []


def test_the_last_tiers_answer_is_the_reason(make: Make) -> None:
    rig = make()
    rig.write(KEYS[:2])
    rig.host.set_faults(Direction.READ, lambda _: BAD)
    rig.lower[0].set_faults(Direction.READ, lambda _: LATE)
    rig.lower[1].set_faults(Direction.READ, lambda _: BROKEN)
    result = rig.read(KEYS[:2])
    assert result.results == (BROKEN, BROKEN)
    assert result.tiers == ("", "")
    assert result.moved_bytes == 0


def test_every_tier_is_asked_once(make: Make) -> None:
    rig = make()
    rig.write(KEYS[:2])
    for tier in rig.tiers:
        tier.set_faults(Direction.READ, lambda _: BAD)
    rig.read(KEYS[:2])
    assert [tier.asked(Direction.READ) for tier in rig.tiers] == [KEYS[:2]] * 3


@pytest.mark.parametrize(
    ("promotion", "tiers"),
    [
        (Promotion.ALWAYS, ["far", "host", "host"]),
        (Promotion.SECOND_HIT, ["far", "far", "host"]),
        (Promotion.NEVER, ["far", "far", "far"]),
    ],
)
def test_when_chunks_are_copied_up(make: Make, promotion: Promotion, tiers: list[str]) -> None:
    rig = make(promotion=promotion)
    rig.put(rig.lower[1], KEYS[:3])
    assert [rig.read(KEYS[:3]).tiers for _ in range(3)] == [(tier,) * 3 for tier in tiers]


def look_ahead(rig: Rig, keys: Sequence[Key], rate: float | None = None, floor: int = 0) -> Prefix:
    return rig.store.look_ahead(
        keys,
        chunk_bytes=SIZE,
        chunk_tokens=16,
        prefill_tokens_per_s=rate,
        floor_tokens=floor,
    )


def test_look_ahead_counts_what_any_tier_has_up_to_the_first_gap(make: Make) -> None:
    rig = make()
    rig.put(rig.host, KEYS[:2])
    rig.put(rig.lower[1], [*KEYS[1:5], KEYS[6]])
    assert look_ahead(rig, KEYS[:8]) == Prefix(5, 5)
    assert look_ahead(rig, KEYS[:8], floor=80) == Prefix(5, 5)
    assert look_ahead(rig, KEYS[:8], floor=81) == Prefix(5, 0), "too little to be worth a read"
    assert look_ahead(rig, KEYS[8:], 1.0) == Prefix(0, 0)
    assert all(tier.jobs == [] for tier in rig.tiers), "it asks and changes nothing"


def test_look_ahead_goes_by_the_tier_that_would_serve(make: Make) -> None:
    """One read of the far tier took ten seconds; the engine computes a chunk in 16 ms."""
    rig = make(promotion=Promotion.NEVER)
    rig.put(rig.host, KEYS[:2])
    rig.put(rig.lower[1], KEYS)
    with holding(rig.lower[1], Direction.READ) as reached:
        job_id = rig.store.read([Chunk(KEYS[8], buffer_of(SIZE))], 100.0)
        wait_until(lambda: not rig.store.poll() and bool(reached), "the read")
        rig.lower[1].slow_down(rig.clock, 10.0)
    rig.wait(job_id)
    assert look_ahead(rig, KEYS[:2], 1000.0) == Prefix(2, 2), "both are above as well"
    assert look_ahead(rig, KEYS[4:8], 1000.0) == Prefix(4, 0)
    assert look_ahead(rig, KEYS[:8], 1000.0) == Prefix(8, 2)
    assert look_ahead(rig, KEYS[:8], 1.0) == Prefix(8, 8), "computing would take longer"
    assert look_ahead(rig, KEYS[:8]) == Prefix(8, 8), "nobody knows how long computing takes"


def test_an_admission_hears_what_leaves_its_tier(make: Make) -> None:
    """What tiers note before the store exists counts as well; what came after was noted in one
    list and read from another."""
    left: list[int] = []

    class Listening(SecondDemotion):
        def on_evicted(self, tag: int, now_s: float) -> None:
            left.append(tag)

    rig = make(admission=Listening(), lower=("disk",), disk_chunks=2)
    for _ in range(2):
        for key in KEYS[:3]:
            rig.write([key])
    rig.settle()
    assert left == [fingerprint(KEYS[0])]


def test_a_store_as_the_settings_say_hears_it_too(tmp_path: Path) -> None:
    settings = Settings(
        (tmp_path / "kv",), 1 << 20, min_free_bytes=0, io_threads=1, admission="reuse-probability"
    )
    heard: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manager, "on_evicted", lambda _, idx, tag, now_s: heard.append((idx, tag)))
        store = Store.open(settings)
        keys = [key_of(idx) for idx in range(200)]
        for key in keys:
            store.write(chunks_of([key]))
            assert store.drain(WAIT_S)
        store.poll()
        kept = sum(present(store, keys))
        store.close()
    assert 0 < kept < 200
    assert sorted(heard) == sorted((0, fingerprint(key)) for key in keys[: 200 - kept])


# Back-pressure: nothing waits for room that does not come.


def test_a_write_larger_than_everything_ends(back: Callable[..., Rig]) -> None:
    """Sixteen chunks into a host tier of two over a disk of three. LMCache 0.5.6 waits for ever
    when a batch is larger than its staging pool (docs/SOURCES.md S8)."""
    rig = back(2, disk_chunks=3)
    result = rig.write(KEYS)
    assert {r.outcome for r in result.results} <= {Outcome.DONE, Outcome.FULL}
    rig.settle()
    stored = [key for key, r in zip(KEYS, result.results, strict=True) if r.outcome is Outcome.DONE]
    assert len(stored) >= 2
    assert rig.read(KEYS[:1]).results[0].outcome in (Outcome.DONE, Outcome.MISS)
    for _ in range(5):
        assert {r.outcome for r in rig.write(KEYS).results} <= {Outcome.DONE, Outcome.FULL}


@pytest.mark.parametrize("mode", list(WriteMode))
def test_a_write_larger_than_what_may_be_in_flight_ends(make: Make, mode: WriteMode) -> None:
    rig = make(4, ("disk",), mode=mode, inflight_chunks=3)
    result = rig.write(KEYS)
    assert {r.outcome for r in result.results} <= {Outcome.DONE, Outcome.FULL}
    assert result.results[0].outcome is Outcome.DONE, "its beginning is of use"
    rig.settle()
    assert rig.write(KEYS[:2]).done


def test_a_read_larger_than_the_tier_above_ends(make: Make) -> None:
    """Everything is served, and as much as fits is copied up (experiment F2)."""
    rig = make(3, ("disk",))
    rig.put(rig.disk, KEYS)
    for _ in range(3):
        result = rig.read(KEYS)
        assert result.results == (DONE,) * 16
        assert sum(present(rig.host, KEYS)) == 3


def test_single_reads_of_more_than_fits_above(make: Make) -> None:
    """Twelve reads one by one, with room for ten above. LMCache 0.5.6 hangs at the eleventh, since
    what it copied up can never be evicted (experiment F)."""
    rig = make(10, ("disk",))
    rig.put(rig.disk, KEYS[:12])
    for key in KEYS[:12]:
        assert rig.read([key]).done
    assert sum(present(rig.host, KEYS)) == 10


def test_reads_while_nothing_above_may_leave(make: Make) -> None:
    """The tier above is full of leased chunks: served from below, and nothing waits."""
    rig = make(4, ("disk",))
    rig.write(KEYS[:4])
    rig.put(rig.disk, KEYS[4:])
    with rig.store.acquire(KEYS[:4], 60.0):
        for key in KEYS[4:]:
            assert rig.read([key]).tiers == ("disk",)
        assert rig.read(KEYS).tiers == ("host",) * 4 + ("disk",) * 12


def test_a_batch_that_is_served_in_part_tells_which(make: Make) -> None:
    """With its staging exhausted LMCache 0.5.6 returned seven chunks that had never been read,
    and hung at the next call (experiment D). Here what is DONE was read, just now."""
    rig = make(2, ("disk",), inflight_chunks=1)
    rig.put(rig.disk, KEYS[:8])
    rig.disk.set_faults(Direction.READ, lambda number: LATE if number % 3 == 0 else None)
    result = rig.read(KEYS)
    assert result.results.count(DONE) == 6
    assert result.results.count(LATE) == 2
    assert result.results.count(ABSENT) == 8
    rig.disk.set_faults(Direction.READ, lambda _: None)
    assert rig.read(KEYS[:8]).done


def test_many_large_jobs_at_once(back: Callable[..., Rig]) -> None:
    rig = back(4, disk_chunks=8, inflight_chunks=6)
    begun = []
    reads: list[list[Chunk]] = []
    for round_idx in range(10):
        keys = [key_of(f"{round_idx}.{idx}") for idx in range(16)]
        begun.append(rig.store.write(chunks_of(keys)))
        reads.append([Chunk(key, buffer_of(SIZE)) for key in keys])
        begun.append(rig.store.read(reads[-1]))
    ended = {result.job_id: result for result in rig.store.drain(WAIT_S)}
    assert sorted(ended) == sorted(begun)
    for chunks, job_id in zip(reads, begun[1::2], strict=True):
        check(chunks, ended[job_id])


# Writing back.


def test_nothing_is_on_the_drive_until_the_host_needs_the_room(back: Callable[..., Rig]) -> None:
    """Half of the host tier may be without a copy below."""
    rig = back()
    assert rig.write(KEYS[:4]).tiers == ("host",) * 4
    rig.settle()
    assert rig.disk.jobs == []
    assert rig.kept(KEYS[:5]) == [True] * 4 + [False]
    rig.write([KEYS[4]])
    rig.settle()
    assert present(rig.disk, KEYS[:5]) == [False, False, False, True, False], "the end of the first"
    assert rig.demotions(outcome="done", reason="") == 1
    assert rig.kept(KEYS[:5]) == [True, True, True, False, True]
    assert rig.taken(rig.disk, [KEYS[3]]) == [payload_of(KEYS[3], SIZE)]
    assert present(rig.host, KEYS[:5]) == [True] * 5, "it was copied, not moved"


def test_all_lower_tiers_get_what_is_demoted(back: Callable[..., Rig]) -> None:
    rig = back(2, lower=("near", "far"))
    rig.write(KEYS[:1])
    rig.write(KEYS[1:2])
    rig.settle()
    for tier in rig.lower:
        assert rig.taken(tier, KEYS[:1]) == [payload_of(KEYS[0], SIZE)]
        assert present(tier, KEYS[1:2]) == [False]


def test_the_least_recently_used_is_demoted_first(back: Callable[..., Rig]) -> None:
    rig = back()
    for key in KEYS[:4]:
        rig.write([key])
    rig.read(KEYS[:1])
    rig.wait(rig.store.touch(KEYS[1:2]))
    for key in KEYS[4:7]:
        rig.write([key])
        rig.settle()
    assert rig.disk.asked(Direction.WRITE) == [KEYS[2], KEYS[3], KEYS[0]]


def test_what_has_no_copy_below_is_not_evicted(back: Callable[..., Rig]) -> None:
    """While the drive takes nothing, all that was written stays; what is new goes elsewhere."""
    rig = back(4)
    rig.disk.hold = lambda result: True
    rig.write(KEYS[:4])
    assert present(rig.host, KEYS[:4]) == [True] * 4
    job_id = rig.store.write(chunks_of(KEYS[4:6]))
    wait_until(lambda: not rig.store.poll() and KEYS[5] in rig.disk.asked(Direction.WRITE), "room")
    assert present(rig.host, KEYS[:6]) == [True] * 4 + [False] * 2
    rig.disk.hold = lambda result: False
    result = rig.wait(job_id)
    assert result.results == (DONE, DONE)
    assert result.tiers == ("disk", "disk"), "there was no room above"
    rig.settle()
    rig.write(KEYS[6:8])
    rig.settle()
    assert present(rig.store, KEYS[:8]) == [True] * 8


def test_what_was_demoted_may_be_evicted_and_is_read_from_below(back: Callable[..., Rig]) -> None:
    rig = back(4)
    for key in KEYS:
        rig.write([key])
        rig.settle()
    assert sum(present(rig.host, KEYS)) == 4
    assert present(rig.store, KEYS) == [True] * 16, "not one is lost"
    assert rig.read(KEYS).results == (DONE,) * 16


def test_what_lies_below_is_not_demoted_again(back: Callable[..., Rig]) -> None:
    """A chunk that the drive had was computed and written anew. It was taken for the only copy."""
    rig = back(4)
    rig.put(rig.disk, KEYS[:6])
    rig.write(KEYS[:4])
    rig.settle()
    assert rig.kept(KEYS[:4]) == [False] * 4
    rig.write(KEYS[4:6])
    rig.settle()
    assert rig.disk.asked(Direction.WRITE) == []


def test_close_copies_down_what_has_no_copy(back: Callable[..., Rig]) -> None:
    rig = back(32)
    rig.write(KEYS)
    rig.settle()
    assert present(rig.disk, KEYS) == [False] * 16
    rig.store.close()
    with_disk = DiskTier(rig.path / "disk", 1 << 20, TierContext())
    _, contents = Driver(with_disk, SIZE).read(KEYS)
    with_disk.close()
    assert contents == [payload_of(key, SIZE) for key in KEYS]


def test_a_kill_loses_what_was_not_demoted_and_no_more(back: Callable[..., Rig]) -> None:
    rig = back(8)
    for key in KEYS:
        rig.write([key])
        rig.settle()
    kept = rig.kept(KEYS)
    assert kept == [False] * 12 + [True] * 4
    # What a kill would leave: the files as they are now.
    shutil.copytree(rig.path / "disk", rig.path / "left")
    after = DiskTier(rig.path / "left", 1 << 20, TierContext())
    driver = Driver(after, SIZE)
    assert driver.present(KEYS) == [not each for each in kept]
    _, contents = driver.read(KEYS[:12])
    after.close()
    assert contents == [payload_of(key, SIZE) for key in KEYS[:12]]


def test_staging_memory_is_bounded(
    back: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much is to be copied down, and however slow the drive is."""
    monkeypatch.setattr(pipeline, "_STAGING_BYTES", 3 * SIZE)
    rig = back(32)
    rig.disk.hold = lambda result: True
    for key in KEYS:
        rig.write([key])
    rig.manager.plan_flush()
    wait_until(lambda: not rig.store.poll() and rig.disk.outstanding == 3, "three on their way")
    for _ in range(50):
        rig.store.poll()
        assert rig.disk.outstanding + rig.host.outstanding == 3
    rig.disk.hold = lambda result: False
    rig.settle()
    assert present(rig.disk, KEYS) == [True] * 16


def test_a_chunk_larger_than_the_staging_memory(
    back: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is copied down alone."""
    monkeypatch.setattr(pipeline, "_STAGING_BYTES", SIZE // 2)
    rig = back(2)
    for key in KEYS[:6]:
        rig.write([key])
        assert rig.host.outstanding + rig.disk.outstanding <= 1
    rig.settle()
    assert sum(present(rig.disk, KEYS[:6])) == 5


def test_no_staging_memory_is_to_be_had(
    back: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception came out of `poll`, and everything behind it was being demoted for ever."""
    rig = back(2)
    rig.write(KEYS[:1])
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise OSError(12, "Cannot allocate memory")

        patch.setattr(pipeline, "aligned_memory", fail)
        rig.store.write([Chunk(KEYS[1], memoryview(payload_of(KEYS[1], SIZE)))])
        assert [result.done for result in rig.store.drain(WAIT_S)] == [True]
        rig.settle()
    assert rig.demotions(outcome="failed") == 1
    rig.write(KEYS[2:3])
    rig.settle()
    assert rig.demotions(outcome="done") == 1


@pytest.mark.parametrize("fault", [BROKEN, ChunkResult(Outcome.FULL, Reason.NO_SPACE), FULL_QUEUE])
def test_a_demotion_that_fails(back: Callable[..., Rig], fault: ChunkResult) -> None:
    """It is counted and not tried again; the chunk is served until it is evicted."""
    rig = back(4)
    rig.disk.set_faults(Direction.WRITE, lambda _: fault)
    for key in KEYS[:4]:
        rig.write([key])
    rig.settle()
    assert rig.demotions() == rig.demotions(outcome=fault.outcome, reason=fault.reason) == 2
    assert rig.kept(KEYS[:4]) == [False, False, True, True]
    assert rig.read(KEYS[:4]).tiers == ("host",) * 4
    for key in KEYS[4:8]:
        rig.write([key])
        rig.settle()
    assert present(rig.store, KEYS[:2]) == [False, False]


def test_one_of_two_lower_tiers_fails(back: Callable[..., Rig]) -> None:
    rig = back(2, lower=("near", "far"))
    rig.lower[0].set_faults(Direction.WRITE, lambda _: BROKEN)
    rig.write(KEYS[:1])
    rig.write(KEYS[1:2])
    rig.settle()
    assert rig.demotions(outcome="done") == 1
    assert present(rig.lower[1], KEYS[:1]) == [True]


@pytest.mark.parametrize("how", ["vanished", "damaged", "failed"])
def test_a_chunk_that_is_gone_when_it_is_to_be_demoted(back: Callable[..., Rig], how: str) -> None:
    """Nothing is written below, nothing is staged for ever, and the next one is demoted."""
    rig = back(2)
    rig.write(KEYS[:1])
    if how == "vanished":
        rig.host.tier.delete(KEYS[:1])
    else:
        fault = BAD if how == "damaged" else BROKEN
        rig.host.set_faults(Direction.READ, lambda number: fault if number == 1 else None)
    rig.write(KEYS[1:2])
    rig.settle()
    assert rig.demotions(outcome="done") == 0
    assert rig.demotions() == 1
    assert rig.disk.jobs == []
    assert rig.kept(KEYS[:2]) == [False, True]
    rig.write(KEYS[2:3])
    rig.settle()
    assert rig.taken(rig.disk, KEYS[1:2]) == [payload_of(KEYS[1], SIZE)]


def test_a_demotion_reads_the_uppermost_tier_alone(back: Callable[..., Rig]) -> None:
    """A chunk had left it before it was demoted, and was read from the drive into the staging
    memory, to be written to the drive."""
    rig = back(2)
    rig.write(KEYS[:1])
    rig.put(rig.disk, KEYS[:1])
    rig.host.tier.delete(KEYS[:1])
    rig.write(KEYS[1:2])
    rig.settle()
    assert rig.disk.jobs == []
    assert rig.demotions(outcome="miss", reason="absent") == 1


def test_a_second_write_that_is_refused_takes_nothing_away(back: Callable[..., Rig]) -> None:
    """The chunk had no copy below. It was written again, and refused since the queue was full:
    from then on nobody kept it, and it was evicted, and lost."""
    rig = back(4)
    rig.write(KEYS[:1])
    rig.host.set_faults(Direction.WRITE, lambda _: FULL_QUEUE)
    rig.write(KEYS[:1])
    rig.host.set_faults(Direction.WRITE, lambda _: None)
    rig.disk.tier.delete(KEYS[:1])  # where the refused write went
    assert rig.kept(KEYS[:1]) == [True]
    rig.disk.hold = lambda result: True
    for key in KEYS[1:4]:
        rig.write([key])
    rig.store.write(chunks_of(KEYS[4:5]))
    wait_until(lambda: not rig.store.poll() and KEYS[4] in rig.disk.asked(Direction.WRITE), "room")
    assert present(rig.host, KEYS[:1]) == [True]
    rig.disk.hold = lambda result: False
    rig.store.drain(WAIT_S)


def test_a_host_tier_that_refuses_jobs_keeps_nothing(
    back: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that did not even begin was being written for ever: nothing was written below, the
    store waited for it when it was closed, and a later copy could never be evicted."""
    rig = back(4)

    def refuse(job: Job) -> None:
        raise MemoryError("no room for a job")

    with monkeypatch.context() as patch:
        patch.setattr(rig.host, "submit", refuse)
        rig.write(KEYS[:2])
    assert rig.context.metrics.value("internal_errors") == 1
    assert not rig.manager.has_dirty
    assert rig.write(KEYS[:2]).done


# Admission.


def test_a_chunk_is_demoted_when_it_is_offered_a_second_time(back: Callable[..., Rig]) -> None:
    """Chunks that are written once and never again never reach the drive."""
    rig = back(4, admission=SecondDemotion())
    for key in KEYS[:8]:
        rig.write([key])
        rig.settle()
    assert present(rig.disk, KEYS[:8]) == [False] * 8
    assert rig.demotions(outcome="full", reason="not_admitted") == 6
    assert present(rig.host, KEYS[:8]) == [False] * 4 + [True] * 4
    for key in KEYS[:2]:
        rig.write([key])
        rig.settle()
    for key in KEYS[8:12]:
        rig.write([key])
        rig.settle()
    assert [key for key in KEYS if present(rig.disk, [key]) == [True]] == KEYS[:2]
    assert rig.taken(rig.disk, KEYS[:2]) == [payload_of(key, SIZE) for key in KEYS[:2]]


def test_what_is_not_admitted_is_counted(make: Make) -> None:
    rig = make(lower=("disk",), admission=SecondDemotion())
    assert rig.write(KEYS[:3]).tiers == ("host",) * 3
    metrics = rig.context.metrics
    assert metrics.value("write_chunks", tier="disk", outcome="full", reason="not_admitted") == 3
    assert metrics.value("write_chunks", tier="host", outcome="done") == 3
    rig.write(KEYS[:3])
    assert metrics.value("write_chunks", tier="disk", outcome="done") == 3
    rig.write(KEYS[:3])
    assert metrics.value("write_chunks", tier="disk", reason="exists") == 3


def test_what_overflows_is_offered_as_well(back: Callable[..., Rig]) -> None:
    rig = back(2, admission=SecondDemotion())
    not_admitted = ChunkResult(Outcome.FULL, Reason.NOT_ADMITTED)
    rig.host.set_faults(Direction.WRITE, lambda _: ChunkResult(Outcome.FULL, Reason.CAPACITY))
    assert rig.write(KEYS[:2]).results == (not_admitted,) * 2
    result = rig.write(KEYS[:2])
    assert (result.results, result.tiers) == ((DONE, DONE), ("disk", "disk"))


# Deleting what is on its way.


@pytest.mark.parametrize("stage", [Direction.READ, Direction.WRITE])
def test_a_chunk_that_is_deleted_while_it_is_demoted_stays_deleted(
    back: Callable[..., Rig], stage: Direction
) -> None:
    """The copy arrived below after the delete, and the chunk was back."""
    rig = back(2)
    rig.write(KEYS[:1])
    with holding(rig.host if stage is Direction.READ else rig.disk, stage) as reached:
        rig.write(KEYS[1:2])
        wait_until(lambda: not rig.store.poll() and bool(reached), "the demotion")
        rig.store.delete(KEYS[:1])
    rig.settle()
    assert present(rig.store, KEYS[:2]) == [False, True]
    assert rig.kept(KEYS[:2]) == [False, True]
    assert rig.write(KEYS[:1]).done
    assert present(rig.store, KEYS[:1]) == [True]


def test_a_chunk_that_is_deleted_while_its_copy_waits_below_stays_deleted(
    back: Callable[..., Rig],
) -> None:
    """The same; the lower tier did not know of the chunk yet."""
    rig = back(4, num_threads=1)
    with stalled_calls(blockio, "write_run"):
        for key in KEYS[:4]:
            rig.write([key])
        wait_until(lambda: not rig.store.poll() and rig.disk.outstanding == 2, "two demotions")
        wait_until(lambda: bool(rig.disk.under_way), "the first of them")
        rig.store.delete(KEYS[1:2])
    rig.settle()
    assert present(rig.store, KEYS[:4]) == [True, False, True, True]


@pytest.mark.parametrize("stage", [Direction.READ, Direction.WRITE])
def test_a_chunk_that_is_deleted_while_it_is_promoted_stays_deleted(
    make: Make, stage: Direction
) -> None:
    """It was read from below, deleted everywhere, and then copied up."""
    rig = make(lower=("disk",))
    rig.put(rig.disk, KEYS[:2])
    chunks = [Chunk(key, buffer_of(SIZE)) for key in KEYS[:2]]
    with holding(rig.disk if stage is Direction.READ else rig.host, stage) as reached:
        job_id = rig.store.read(chunks)
        wait_until(lambda: not rig.store.poll() and bool(reached), "the copy")
        rig.store.delete(KEYS[:1])
    check(chunks, rig.wait(job_id))
    assert present(rig.store, KEYS[:2]) == [False, True]
    assert present(rig.host, KEYS[:2]) == [False, True]


@pytest.mark.parametrize("direction", [Direction.READ, Direction.WRITE])
def test_a_chunk_that_is_deleted_while_it_waits_above_stays_deleted(
    make: Make, direction: Direction
) -> None:
    """To be copied up, or to be written at all; the upper tier did not know of it yet."""
    rig = make(lower=("disk",))
    if direction is Direction.READ:
        rig.put(rig.disk, KEYS[:2])
    with stalled_calls(host, "payload_checksum"):
        begun = {rig.store.write(chunks_of([key])) for key in KEYS[2:4]}
        wait_until(lambda: len(rig.host.under_way) == 2, "two threads that are busy")
        chunks = chunks_of(KEYS[:2])
        begin = rig.store.read if direction is Direction.READ else rig.store.write
        begun.add(begin(chunks))
        wait_until(lambda: not rig.store.poll() and not rig.disk.outstanding, "the disk's part")
        assert rig.host.outstanding == 3
        rig.store.delete(KEYS[:1])
    assert {result.job_id for result in rig.store.drain(WAIT_S)} == begun
    assert present(rig.host, KEYS[:4]) == [False, True, True, True]
    assert present(rig.store, KEYS[:4]) == [False, True, True, True]


def test_what_was_deleted_is_not_even_begun_to_be_copied(make: Make) -> None:
    """It was copied up, and deleted when that was seen to have ended: until then it was a hit."""
    rig = make(lower=("disk",))
    rig.put(rig.disk, KEYS[:1])
    with holding(rig.disk, Direction.READ):
        job_id = rig.store.read([Chunk(KEYS[0], buffer_of(SIZE))])
        rig.store.delete(KEYS[:1])
    rig.wait(job_id)
    assert rig.host.asked(Direction.WRITE) == []


@pytest.mark.parametrize("direction", list(Direction))
def test_what_is_written_after_it_was_deleted_stays(make: Make, direction: Direction) -> None:
    """A job of before the delete was still under way, and when it ended the chunk was deleted once
    more, although it had been written anew meanwhile."""
    rig = make(lower=("disk",))
    rig.put(rig.disk, KEYS[:1])
    begin = {
        Direction.READ: lambda: rig.store.read([Chunk(KEYS[0], buffer_of(SIZE))]),
        Direction.WRITE: lambda: rig.store.write(chunks_of(KEYS[:1])),
        Direction.TOUCH: lambda: rig.store.touch(KEYS[:1]),
    }
    with holding(rig.disk, direction, only=0):
        old = begin[direction]()
        rig.store.delete(KEYS[:1])
        new = rig.store.write(chunks_of(KEYS[:1]))
        ended: list[JobResult] = []
        wait_until(lambda: bool(ended.extend(rig.store.poll()) or ended), "the new write")
        assert [result.job_id for result in ended] == [new]
        assert ended[0].done
    rig.wait(old)
    assert present(rig.store, KEYS[:1]) == [True]


# Time to live.


def test_a_copy_does_not_live_longer(back: Callable[..., Rig]) -> None:
    """Copied down and up again, a chunk began a new life each time, and never expired."""
    rig = back(2, ttl_s=100.0)
    rig.write(KEYS[:1])
    rig.clock.advance(60.0)
    rig.write(KEYS[1:2])
    rig.settle()
    assert present(rig.disk, KEYS[:1]) == [True]
    rig.host.tier.delete(KEYS[:1])
    assert rig.read(KEYS[:1]).tiers == ("disk",)
    assert present(rig.host, KEYS[:1]) == [True]
    rig.clock.advance(39.0)
    assert rig.read(KEYS[:1]).tiers == ("host",)
    rig.clock.advance(2.0)
    assert present(rig.store, KEYS[:2]) == [False, True]
    assert rig.read(KEYS[:1]).results[0].outcome is Outcome.MISS
    rig.clock.advance(60.0)
    assert present(rig.store, KEYS[:2]) == [False, False]


def test_a_dirty_chunk_that_expires(back: Callable[..., Rig]) -> None:
    rig = back(2, ttl_s=100.0)
    rig.write(KEYS[:1])
    rig.clock.advance(101.0)
    rig.write(KEYS[1:3])
    rig.settle()
    assert present(rig.store, KEYS[:3]) == [False, True, True]
    assert rig.demotions(outcome="miss") == 1
    rig.write(KEYS[:1])
    rig.settle()
    assert present(rig.store, KEYS[:3]) == [True] * 3
    assert rig.manager.dirty_bytes <= SIZE


# A tier that stands still.


@pytest.fixture
def hung(make: Make) -> Callable[..., Rig]:
    """A rig with a disk behind a breaker that has KEYS; for use within `stalled_calls`."""

    def factory(**settings: object) -> Rig:
        rig = make(lower=("disk",), guarded=True, promotion=Promotion.NEVER, **settings)
        rig.put(rig.disk, KEYS)
        return rig

    return factory


def stuck_reads(rig: Rig, keys: Sequence[Key], deadline_s: float = 10.0) -> dict[int, list[Chunk]]:
    """Begin a read per key; two of them begin (the disk has two threads), the others wait."""
    chunks = {key: [Chunk(key, buffer_of(SIZE))] for key in keys}
    begun = {rig.store.read(each, deadline_s): each for each in chunks.values()}
    threads = min(len(keys), 2)
    wait_until(lambda: len(rig.disk.under_way) == threads, "reads that stand still")
    return begun


def test_nothing_waits_for_a_tier_that_stands_still(hung: Callable[..., Rig]) -> None:
    """Lookups, reads, writes, touches, deletes and polls return; other tiers' chunks are served."""
    rig = hung()
    rig.put(rig.host, KEYS[12:])
    started_s = time.monotonic()
    with stalled_calls(blockio, "read_run", "write_run"):
        begun = set(stuck_reads(rig, KEYS[:4]))
        new = [key_of("new")]
        begun.add(rig.store.write(chunks_of(new)))
        rig.store.delete(KEYS[11:12])
        assert rig.store.poll() == []
        assert present(rig.store, KEYS) == [True] * 11 + [False] + [True] * 4
        served = rig.store.read([Chunk(key, buffer_of(SIZE)) for key in KEYS[12:]])
        ended: list[JobResult] = []
        wait_until(lambda: bool(ended.extend(rig.store.poll()) or ended), "the host's chunks")
        assert [(r.job_id, r.tiers) for r in ended] == [(served, ("host",) * 4)]
        assert rig.store.unfinished == len(begun)
        assert time.monotonic() - started_s < 20, "something waited until the tier was let go"
    assert {result.job_id for result in rig.store.drain(WAIT_S)} == begun


def test_a_deadline_gives_up_what_has_not_begun(hung: Callable[..., Rig]) -> None:
    """What has begun is named, since its buffers are in use; later it is reported, once."""
    rig = hung()
    with stalled_calls(blockio, "read_run"):
        reads = stuck_reads(rig, KEYS[:5], deadline_s=5.0)
        patient = rig.store.read([Chunk(KEYS[5], buffer_of(SIZE))], 50.0)
        assert rig.store.overdue() == []
        rig.clock.advance(5.5)
        ended = rig.store.poll()
        assert len(ended) == 3
        assert {r for result in ended for r in result.results} == {LATE}
        assert rig.store.overdue() == [], (
            "a read that has begun may end a moment after its deadline"
        )
        rig.clock.advance(1.0)
        late = rig.store.overdue()
        assert set(late) == set(reads) - {result.job_id for result in ended}
        assert patient not in late
        assert rig.store.poll() == []
        assert rig.store.overdue() == late, "still"
    ended = rig.store.drain(WAIT_S)
    assert sorted(result.job_id for result in ended) == sorted([*late, patient])
    for result in ended:
        assert result.done
        if result.job_id != patient:
            check(reads[result.job_id], result)
    assert rig.store.overdue() == []
    assert rig.store.poll() == []


def test_what_a_tier_did_before_it_stood_still_is_not_lost(make: Make) -> None:
    """A read of two tiers ends when the last of them does."""
    rig = make(lower=("disk",), promotion=Promotion.NEVER)
    rig.put(rig.host, KEYS[:2])
    rig.put(rig.disk, KEYS[2:4])
    chunks = [Chunk(key, buffer_of(SIZE)) for key in KEYS[:4]]
    with stalled_calls(blockio, "read_run"):
        job_id = rig.store.read(chunks, 5.0)
        wait_until(lambda: not rig.store.poll() and not rig.host.outstanding, "the host's part")
        wait_until(lambda: bool(rig.disk.under_way), "the disk's part")
        rig.clock.advance(6.5)
        assert rig.store.poll() == []
        assert rig.store.overdue() == [job_id]
    result = rig.wait(job_id)
    assert result.tiers == ("host", "host", "disk", "disk")
    check(chunks, result)


def open_breaker(rig: Rig) -> None:
    """Let time pass until the breaker has seen enough: three operations' time at the most."""
    for _ in range(3):
        if not rig.store.degraded:
            rig.clock.advance(2.5)
            rig.store.poll()
    assert rig.guards[0].breaker.state is State.OPEN


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_the_breaker_opens_and_later_lookups_are_misses_at_once(
    hung: Callable[..., Rig], num_chunks: int
) -> None:
    """With one read that hangs, as with several; whoever comes later does not wait at all."""
    rig = hung()
    with stalled_calls(blockio, "read_run", "write_run"):
        reads = stuck_reads(rig, KEYS[:num_chunks], deadline_s=100.0)
        rig.clock.advance(1.9)
        rig.store.poll()
        assert not rig.store.degraded
        assert rig.store.gauges()["breaker_open", "disk"] == 0
        open_breaker(rig)
        assert rig.store.gauges()["breaker_open", "disk"] == 1
        assert present(rig.store, KEYS) == [False] * 16
        assert rig.store.look_ahead(
            KEYS, chunk_bytes=SIZE, chunk_tokens=16, prefill_tokens_per_s=None
        ) == Prefix(0, 0)
        begun = [rig.store.read([Chunk(KEYS[9], buffer_of(SIZE))]), rig.store.touch(KEYS[9:])]
        written = rig.store.write(chunks_of([key_of("new")]))
        ended: dict[int, JobResult] = {}
        wait_until(
            lambda: bool(ended.update({r.job_id: r for r in rig.store.poll()})) or len(ended) == 3,
            "what needs no drive",
        )
        assert ended[begun[0]].results == (UNASKED,)
        assert not ended[begun[1]].done
        assert ended[written].tiers == ("host",), "what is above goes on"
    assert {result.job_id for result in rig.store.drain(WAIT_S)} == set(reads)


def test_one_probe_per_window_and_recovery(hung: Callable[..., Rig]) -> None:
    rig = hung()
    with stalled_calls(blockio, "read_run"):
        reads = stuck_reads(rig, KEYS[:2], deadline_s=5.0)
        open_breaker(rig)
        rig.clock.advance(5.5)
        assert present(rig.store, KEYS) == [True] * 16, "somebody has to be the probe"
        probe = rig.store.read([Chunk(KEYS[2], buffer_of(SIZE))], 5.0)
        assert present(rig.store, KEYS) == [False] * 16
        other = rig.store.read([Chunk(KEYS[3], buffer_of(SIZE))], 5.0)
        assert [result.job_id for result in rig.store.poll()] == [other]
        # Both threads hang, so the probe never begins. That is an answer, too.
        rig.clock.advance(5.5)
        (result,) = rig.store.poll()
        assert (result.job_id, result.results) == (probe, (LATE,))
        assert present(rig.store, KEYS) == [False] * 16, "the next one would wait as long"
        rig.clock.advance(5.5)
        assert present(rig.store, KEYS) == [False] * 16, "the window is twice as long now"
    ended = {result.job_id: result for result in rig.store.drain(WAIT_S)}
    assert set(ended) == set(reads)
    assert all(result.done for result in ended.values())
    assert rig.store.degraded, "late ends prove nothing"
    rig.pass_time(10.0)
    assert rig.read(KEYS[4:5]).done
    assert not rig.store.degraded
    assert rig.read(KEYS).done


@pytest.mark.parametrize("how", ["settle", "delete"])
def test_housekeeping_that_hangs_opens_the_breaker_as_well(
    hung: Callable[..., Rig], how: str
) -> None:
    """The drive hung while its journal was written between two reads, and when a slot was wiped.
    No read was under way then, so none was overdue; none ever began again, each one was
    given up at its deadline and told nothing: every request waited that long, for ever."""
    rig = hung()
    stalled = (DiskTier, "settle") if how == "settle" else (blockio, "write_page")
    with stalled_calls(*stalled):
        if how == "settle":
            for key in KEYS[:2]:
                assert rig.read([key]).done
        else:
            for key in KEYS[:2]:
                rig.store.delete([key])
        wait_until(lambda: len(rig.disk.under_way) == 2, "both threads")
        for key in KEYS[2:6]:
            if rig.store.degraded:
                break
            job_id = rig.store.read([Chunk(key, buffer_of(SIZE))], 5.0)
            rig.store.poll()
            rig.clock.advance(5.5)
            assert [result.job_id for result in rig.store.poll()] == [job_id]
        assert rig.store.degraded
        assert present(rig.store, KEYS[6:]) == [False] * 10
    rig.pass_time(20.0)
    assert rig.read(KEYS[6:7]).done
    assert not rig.store.degraded


def test_a_drive_that_fails_is_left_alone_and_found_again(hung: Callable[..., Rig]) -> None:
    rig = hung()
    rig.disk.set_faults(Direction.READ, lambda _: BROKEN)
    for key in KEYS[:3]:
        assert rig.read([key]).results == (BROKEN,)
    assert rig.store.degraded
    assert rig.read(KEYS).results == (UNASKED,) * 16
    rig.pass_time(5.5)
    assert rig.read(KEYS[:1]).results == (BROKEN,)
    assert present(rig.store, KEYS[:1]) == [False]
    rig.disk.set_faults(Direction.READ, lambda _: None)
    rig.pass_time(10.5)
    assert rig.read(KEYS[:1]).done
    assert rig.read(KEYS).done


def test_a_drive_that_hangs_does_not_close_the_host_tier(
    back: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that could be staged stood before the drive. Nothing else was demoted any more, what
    was dirty stayed so, and the host tier filled with it and refused everything that was new,
    although the breaker had long opened."""
    monkeypatch.setattr(pipeline, "_STAGING_BYTES", SIZE)
    rig = back(4, guarded=True, num_threads=1)
    with stalled_calls(blockio, "write_run"):
        for key in KEYS[:3]:
            rig.write([key])
        wait_until(lambda: not rig.store.poll() and bool(rig.disk.under_way), "the demotion")
        open_breaker(rig)
        for key in KEYS[3:12]:
            assert rig.write([key]).tiers == ("host",)
            assert rig.read([key]).tiers == ("host",)
        assert rig.demotions(reason="breaker") > 0
    rig.settle()


@pytest.mark.parametrize("direction", [Direction.READ, Direction.WRITE])
def test_closing_while_a_tier_stands_still(
    back: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    """It takes its bounds and no longer; what hangs is reported when it ends, if it ever does."""
    monkeypatch.setattr(jobs, "_CLOSE_WAIT_S", 0.1)
    monkeypatch.setattr(store_module, "_FLUSH_S", 0.1)
    rig = back(8, guarded=True)
    rig.put(rig.disk, KEYS[8:])
    started_s = time.monotonic()
    with stalled_calls(blockio, "read_run", "write_run"):
        if direction is Direction.READ:
            begun = [rig.store.read([Chunk(key, buffer_of(SIZE))]) for key in KEYS[8:12]]
        else:
            begun = [rig.store.write(chunks_of(KEYS[:6]))]
        wait_until(lambda: bool(rig.store.poll()) or bool(rig.disk.under_way), "what hangs")
        rig.store.close()
        assert time.monotonic() - started_s < 20, "it waited until the tier was let go"
        rig.store.close()  # harmless
        early = rig.store.poll()
    wait_until(lambda: not rig.disk.under_way, "the end of what hung")
    late = rig.store.drain(WAIT_S) if direction is Direction.READ else rig.store.poll()
    ids = [result.job_id for result in [*early, *late]]
    assert len(ids) == len(set(ids))
    if direction is Direction.READ:
        assert sorted(ids) == sorted(begun)


def test_closing_with_a_drive_that_failed_does_not_wait(back: Callable[..., Rig]) -> None:
    """Nothing could be copied down any more, and it is not waited for."""
    rig = back(32, guarded=True)
    rig.disk.set_faults(Direction.READ, lambda _: BROKEN)
    rig.put(rig.disk, KEYS[10:13])
    for key in KEYS[10:13]:
        rig.read([key])
    assert rig.store.degraded
    rig.write(KEYS[:8])
    rig.store.close()
    assert not rig.manager.has_dirty
    assert rig.demotions(outcome="full", reason="breaker") == 8


def test_a_host_tier_that_stands_still(make: Make) -> None:
    """A read below waits for its copy up, and says so; after its deadline it is overdue."""
    rig = make(lower=("disk",))
    rig.put(rig.disk, KEYS[:2])
    with stalled_calls(host, "payload_checksum"):
        job_id = rig.store.read([Chunk(KEYS[0], buffer_of(SIZE))], 5.0)
        wait_until(lambda: not rig.store.poll() and bool(rig.host.under_way), "the copy up")
        assert rig.store.poll() == []
        rig.clock.advance(6.5)
        assert rig.store.poll() == []
        assert rig.store.overdue() == [job_id]
    assert rig.wait(job_id).tiers == ("disk",)


def test_late_results_from_many_threads_are_reported_once(hung: Callable[..., Rig]) -> None:
    """Everything hangs, is overdue, and comes back while new jobs are begun."""
    rig = hung(num_threads=8)
    seen: list[int] = []
    with stalled_calls(blockio, "read_run"):
        reads = [
            (rig.store.read(chunks, 5.0), chunks)
            for chunks in ([Chunk(key, buffer_of(SIZE))] for key in KEYS)
        ]
        wait_until(lambda: len(rig.disk.under_way) == 8, "eight that hang")
        rig.clock.advance(6.5)
        seen += [result.job_id for result in rig.store.poll()]
        assert len(seen) == len(rig.store.overdue()) == 8
    stop = threading.Event()
    begun = [job_id for job_id, _ in reads]
    while not stop.is_set():
        seen += [result.job_id for result in rig.store.poll()]
        if len(begun) < 40:
            begun.append(rig.store.read([Chunk(KEYS[0], buffer_of(SIZE))]))
        elif not rig.store.unfinished:
            stop.set()
    assert sorted(seen) == sorted(begun)


# Many prompts in one step.


@pytest.fixture
def slow(make: Make) -> Rig:
    """A rig whose disk has KEYS and takes 5 s for a read and 5 s more for each chunk of it or
    before it."""
    rig = make(lower=("disk",), promotion=Promotion.NEVER)
    rig.put(rig.disk, KEYS)
    with holding(rig.disk, Direction.READ) as reached:
        job_id = rig.store.read([Chunk(KEYS[15], buffer_of(SIZE))], 100.0)
        wait_until(lambda: not rig.store.poll() and bool(reached), "the read")
        rig.disk.slow_down(rig.clock, 10.0)
    assert rig.wait(job_id).done
    return rig


def worth(rig: Rig, keys: Sequence[Key], chunk_s: float) -> int:
    """How much of a prompt to read where computing takes so long per chunk."""
    found = look_ahead(rig, keys, 16 / chunk_s)
    assert found.num_hits == len(keys)
    return found.num_worth


def test_of_many_prompts_of_one_step_the_first_few_are_read(slow: Rig) -> None:
    """Each was decided on as if it were alone, since none had begun to be read: all of them were
    read from a tier that had time for three."""
    assert [worth(slow, [key], 22.0) for key in KEYS[:8]] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert worth(slow, KEYS[8:10], 22.0) == 2, "who has more to compute may wait longer"
    assert worth(slow, [KEYS[10]], 32.0) == 0, "and comes before whoever is asked next"
    assert worth(slow, [KEYS[10]], 37.0) == 1
    slow.store.poll()
    assert [worth(slow, [key], 22.0) for key in KEYS[:8]] == [1, 1, 1, 0, 0, 0, 0, 0], (
        "what did not begin is forgotten"
    )


def test_only_what_is_worth_reading_is_promised(slow: Rig) -> None:
    assert [worth(slow, KEYS[:4], 1.0) for _ in range(5)] == [0] * 5
    assert worth(slow, KEYS[:1], 11.0) == 1
    assert worth(slow, KEYS[1:2], 11.0) == 0
    slow.store.poll()
    assert look_ahead(slow, KEYS[:4]) == Prefix(4, 4), "nobody knows how long computing takes"
    assert worth(slow, KEYS[4:5], 26.0) == 0
    assert worth(slow, KEYS[4:5], 31.0) == 1, "behind four of those"


def test_a_promise_is_to_the_tier_that_would_serve(slow: Rig) -> None:
    slow.put(slow.host, KEYS[:4])
    for _ in range(5):
        assert worth(slow, KEYS[:4], 11.0) == 4
    assert worth(slow, KEYS[4:5], 11.0) == 1


def test_a_read_that_begins_takes_its_promise_away(slow: Rig) -> None:
    """What is being read was waited for twice."""
    assert worth(slow, KEYS[:1], 17.0) == 1
    with holding(slow.disk, Direction.READ):
        job_id = slow.store.read([Chunk(KEYS[0], buffer_of(SIZE))])
        assert worth(slow, KEYS[1:2], 17.0) == 1, "one chunk is before it"
        assert worth(slow, KEYS[2:3], 17.0) == 0, "two are"
        slow.store.poll()
        assert worth(slow, KEYS[3:4], 17.0) == 1, "the one that is being read is not forgotten"
    assert slow.wait(job_id).done


def test_a_read_that_nobody_promised_is_waited_for_as_well(slow: Rig) -> None:
    """A promise that was never made was taken back, and the tier seemed to be idle."""
    with holding(slow.disk, Direction.READ):
        job_id = slow.store.read([Chunk(key, buffer_of(SIZE)) for key in KEYS[:2]])
        assert worth(slow, KEYS[2:3], 19.0) == 0
        assert worth(slow, KEYS[2:3], 21.0) == 1
    assert slow.wait(job_id).done


@pytest.fixture
def slow_host(back: Callable[..., Rig]) -> Rig:
    """A rig whose host tier has the first of KEYS, and took 10 s to read it; the next chunk that
    is written has it demoted."""
    rig = back(2)
    rig.write(KEYS[:1])
    with holding(rig.host, Direction.READ) as reached:
        job_id = rig.store.read([Chunk(KEYS[0], buffer_of(SIZE))], 100.0)
        wait_until(lambda: not rig.store.poll() and bool(reached), "the read")
        rig.host.slow_down(rig.clock, 10.0)
    rig.wait(job_id)
    return rig


def test_a_read_waits_for_the_demotion_before_it(slow_host: Rig) -> None:
    rig = slow_host
    with holding(rig.host, Direction.READ):
        rig.store.write(chunks_of(KEYS[1:2]))
        ended: list[JobResult] = []
        wait_until(lambda: bool(ended.extend(rig.store.poll()) or ended), "the write")
        wait_until(lambda: rig.host.jobs[-1].copying or rig.store.poll() != [], "the demotion")
        assert worth(rig, KEYS[1:2], 14.0) == 0
        assert worth(rig, KEYS[1:2], 16.0) == 1
    rig.settle()


def test_a_demotion_is_no_probe(slow_host: Rig) -> None:
    """A tier that was judged too slow was not tried again as long as anything was demoted from
    it, which teaches nothing."""
    rig = slow_host
    assert worth(rig, KEYS[:1], 0.001) == 0
    rig.clock.advance(31.0)
    rig.write(KEYS[1:2])
    rig.settle()
    assert rig.demotions(outcome="done") == 1
    assert worth(rig, KEYS[:2], 0.001) == 2


def test_what_is_ahead_is_never_less_than_nothing(make: Make) -> None:
    rig = make(lower=("disk",))
    rig.put(rig.disk, KEYS)
    subject = pipeline.Pipeline([rig.disk], rig.context, Manager([None]), deque())

    def ahead_bytes() -> int:
        (estimate,) = subject.estimates()
        assert estimate is not None
        assert estimate.queued_bytes >= 0
        return estimate.queued_bytes

    def begin() -> None:
        subject.read([Chunk(KEYS[0], buffer_of(SIZE))], 10.0)

    def end() -> None:
        wait_until(lambda: bool(subject.poll()) or not subject.unfinished, "the read")

    assert subject.estimates() == [None]
    begin()
    end()
    assert ahead_bytes() == 0
    subject.promise(0, 100)
    assert ahead_bytes() == 100
    begin()
    assert ahead_bytes() == SIZE, "more than was promised"
    end()
    assert ahead_bytes() == 0
    subject.promise(0, 3 * SIZE)
    begin()
    assert ahead_bytes() == 3 * SIZE, "as much as before, a part of it under way"
    begin()
    begin()
    assert ahead_bytes() == 3 * SIZE
    begin()
    assert ahead_bytes() == 4 * SIZE
    while subject.unfinished:
        end()
    assert ahead_bytes() == 0


# What demotions leave as it was.


def test_a_demotion_does_not_make_its_chunk_recent(back: Callable[..., Rig]) -> None:
    """It was read to be copied down, and so it was the last to be evicted, although nobody had
    used it: what was in use had to leave instead."""
    rig = back(4)
    rig.put(rig.disk, KEYS[9:10])
    rig.write(KEYS[:1])
    rig.write(KEYS[1:2])
    assert rig.read(KEYS[9:10]).tiers == ("disk",)
    rig.write(KEYS[2:3])
    rig.settle()
    assert present(rig.disk, KEYS[:3]) == [True, False, False], "the first was demoted"
    asked = [*KEYS[:3], KEYS[9]]
    assert present(rig.host, asked) == [True] * 4
    rig.write(KEYS[3:4])
    rig.settle()
    assert present(rig.host, asked) == [False, True, True, True], "and is the oldest all the same"


def test_what_is_demoted_is_copied_and_what_is_asked_for_is_used(back: Callable[..., Rig]) -> None:
    rig = back(2)
    rig.write(KEYS[:1])
    rig.write(KEYS[1:2])
    rig.settle()
    rig.read(KEYS[:1])
    below = [job.copying for job in rig.disk.jobs]
    assert (rig.disk.asked(Direction.WRITE), below) == (KEYS[:1], [True])
    kinds = [(job.direction, job.copying) for job in rig.host.jobs]
    assert kinds == [
        (Direction.WRITE, False), (Direction.WRITE, False), (Direction.READ, True),
        (Direction.READ, False),
    ]  # fmt: skip


def test_a_demotion_teaches_nothing_of_a_tiers_speed(back: Callable[..., Rig]) -> None:
    """One that waited behind others made the host tier look slow, and nothing was read from it."""
    rig = back(2)
    rig.write(KEYS[:1])
    with holding(rig.host, Direction.READ) as reached:
        rig.store.write(chunks_of(KEYS[1:2]))
        wait_until(lambda: bool(rig.store.poll() or reached), "the write")
        wait_until(lambda: not rig.store.poll() and bool(reached), "the demotion")
        rig.host.slow_down(rig.clock, 10.0)
    wait_until(lambda: bool(rig.store.poll() or not rig.host.outstanding), "its end")
    wait_until(lambda: not rig.store.poll() and not rig.disk.outstanding, "all of it")
    assert rig.demotions(outcome="done") == 1
    assert worth(rig, KEYS[:2], 0.001) == 2, "nobody has read from it yet, so it may be fast"
    assert rig.read(KEYS[:2]).tiers == ("host",) * 2
    assert worth(rig, KEYS[:2], 0.001) == 2
