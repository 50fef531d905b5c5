"""Several drives as one tier: the contract, and what becomes of the others when one fails."""

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stepwell.clock import ManualClock
from stepwell.core.keys import Key
from stepwell.core.types import Chunk, ChunkResult, Direction, Job, Lookup, Outcome, Reason
from stepwell.errors import ConfigError
from stepwell.policy.breaker import Breaker, State
from stepwell.settings import Settings
from stepwell.store import Store
from stepwell.testing import (
    BoundedTierContract,
    Driver,
    FaultyTier,
    buffer_of,
    key_of,
    payload_of,
    tier_machine,
)
from stepwell.testing.stalling import stalled_calls
from stepwell.tiers import blockio, drive, host, jobs
from stepwell.tiers.base import Tier, TierContext
from stepwell.tiers.disk import DiskTier, slot_cost_bytes
from stepwell.tiers.guarded import GuardedTier
from stepwell.tiers.host import HostTier
from stepwell.tiers.striped import StripedTier

SIZE = 4096
DONE = ChunkResult(Outcome.DONE)
EXISTS = ChunkResult(Outcome.DONE, Reason.EXISTS)
ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)
BROKEN = ChunkResult(Outcome.FAILED, Reason.IO_ERROR)
NOWHERE = ChunkResult(Outcome.FULL, Reason.BREAKER)
KEYS = [key_of(idx) for idx in range(12)]


# The contract.


class TestOneDrive(BoundedTierContract):
    """A stripe of one drive is that drive, exactly."""

    persistent = True
    num_drives = 1

    def make_tier(
        self, context: TierContext, capacity_bytes: int, *, inflight_writes_bytes: int = 1 << 30
    ) -> StripedTier:
        drives = [
            DiskTier(
                self.place / f"kv{idx}",
                capacity_bytes // self.num_drives,
                context,
                inflight_writes_bytes=inflight_writes_bytes // self.num_drives,
                name=f"disk{idx}" if self.num_drives > 1 else "disk",
            )
            for idx in range(self.num_drives)
        ]
        return StripedTier(drives, context)

    def used_bytes(self, tier: StripedTier) -> int:
        return sum(drive.used_bytes for drive in tier.drives)  # type: ignore[attr-defined]

    def size_of(self, payload_bytes: int) -> int:
        return slot_cost_bytes(payload_bytes)

    def counted_as(self, tier: Tier) -> Sequence[str]:
        # What no drive has is asked of none, so the stripe counts it itself.
        drives = tier.drives if isinstance(tier, StripedTier) else ()
        return sorted({tier.name, *(drive.name for drive in drives)})

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        with stalled_calls(blockio, "write_run", "read_run"):
            yield


class TestTwoDrives(TestOneDrive):
    """Whatever holds for a chunk of a drive holds for two that were written together."""

    num_drives = granularity = 2


class TestThreeGuardedTiers(BoundedTierContract):
    """Behind breakers, as a store has them, and of another kind."""

    granularity = 3

    def make_tier(
        self, context: TierContext, capacity_bytes: int, *, inflight_writes_bytes: int = 1 << 30
    ) -> StripedTier:
        parts = [
            HostTier(capacity_bytes // 3, context, inflight_writes_bytes=inflight_writes_bytes // 3)
            for _ in range(3)
        ]
        # For which the suite's stalls are nothing unusual.
        guarded = [GuardedTier(part, Breaker(latency_limit_s=1e6), context) for part in parts]
        return StripedTier(guarded, context, "hosts")

    def used_bytes(self, tier: StripedTier) -> int:
        return sum(drive.tier.used_bytes for drive in tier.drives)  # type: ignore[attr-defined]

    def size_of(self, payload_bytes: int) -> int:
        return payload_bytes

    def counted_as(self, tier: Tier) -> Sequence[str]:
        return ["host", "hosts"]

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        with stalled_calls(host, "payload_checksum"):
            yield


TestStripedMachine = tier_machine(
    lambda context, place: StripedTier(
        [
            DiskTier(place / f"kv{idx}", 24 * slot_cost_bytes(5000), context, num_threads=2)
            for idx in range(3)
        ],
        context,
    ),
    persistent=True,
    max_examples=15,
).TestCase


# Where chunks lie.


class Array:
    """Three drives that can be made to fail, each behind a breaker, and a stripe over them."""

    def __init__(self, path: Path, num_drives: int = 3, num_chunks: int = 64) -> None:
        self.path = path
        self.clock = ManualClock()
        self.context = TierContext(clock=self.clock)
        self.failing: set[int] = set()
        self.disks = [
            DiskTier(
                path / f"kv{idx}",
                num_chunks * slot_cost_bytes(SIZE),
                self.context,
                num_threads=2,
                name=f"disk{idx}",
            )
            for idx in range(num_drives)
        ]
        self.drives = [
            FaultyTier(each, read_faults=self.fault_of(idx), write_faults=self.fault_of(idx))
            for idx, each in enumerate(self.disks)
        ]
        self.guards = [GuardedTier(each, Breaker(), self.context) for each in self.drives]
        self.tier = StripedTier(self.guards, self.context)
        self.driver = Driver(self.tier, SIZE)

    def fault_of(self, drive_idx: int) -> Callable[[int], ChunkResult | None]:
        return lambda _: BROKEN if drive_idx in self.failing else None

    def where(self, keys: Sequence[Key]) -> list[list[int]]:
        """For each key the drives that it lies on."""
        answers = [each.contains(keys) for each in self.disks]
        return [
            [idx for idx, answer in enumerate(column) if answer is Lookup.HIT]
            for column in zip(*answers, strict=True)
        ]

    def of(self, drive_idx: int, keys: Sequence[Key] = KEYS) -> list[Key]:
        """Those of the keys that lie on a drive."""
        return [
            key for key, drives in zip(keys, self.where(keys), strict=True) if drive_idx in drives
        ]

    def give_up(self, drive_idx: int) -> None:
        """Make a drive fail until nobody asks it any more."""
        self.failing.add(drive_idx)
        for _ in range(3):
            self.driver.read(self.of(drive_idx)[:1])
        assert self.guards[drive_idx].breaker.state is State.OPEN

    def pass_time(self, seconds: float, hanging: int = -1) -> None:
        """Time passes, once all other drives have ended what they were at, and that one began."""
        others = [each for idx, each in enumerate(self.disks) if idx != hanging]
        if hanging >= 0:
            stuck = self.disks[hanging]
            self.driver.wait_until(lambda: bool(stuck.under_way), "something that hangs")
        self.driver.wait_until(lambda: not any(each.under_way for each in others), "their rest")
        self.clock.advance(seconds)
        self.driver.collect()

    def path_of(self, drive_idx: int) -> Path:
        return self.path / f"kv{drive_idx}"


@pytest.fixture
def array(tmp_path: Path) -> Iterator[Array]:
    array = Array(tmp_path)
    yield array
    array.tier.close()


@contextlib.contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Within it, no read or write below a directory comes back."""
    released = threading.Event()

    def waiting(real: Any) -> Any:
        def call(fd: int, *args: Any) -> Any:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{path}/"):
                released.wait(30)
            return real(fd, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("read_run", "write_run"):
            patch.setattr(blockio, name, waiting(getattr(blockio, name)))
        try:
            yield
        finally:
            released.set()


def test_a_stripe_needs_a_drive() -> None:
    with pytest.raises(ValueError, match="at least one drive"):
        StripedTier([], TierContext())


def test_a_prefix_is_spread_evenly(array: Array) -> None:
    """So that all drives read it back at once; the next prefix goes on where it ended."""
    array.driver.write(KEYS[:7])
    assert array.where(KEYS[:7]) == [[idx % 3] for idx in range(7)]
    array.driver.write(KEYS[7:])
    assert array.where(KEYS) == [[idx % 3] for idx in range(12)]


def test_single_chunks_are_spread_as_well(array: Array) -> None:
    for key in KEYS:
        array.driver.write([key])
    assert Counter(drives[0] for drives in array.where(KEYS)) == {0: 4, 1: 4, 2: 4}


def test_what_was_there_does_not_disturb_the_turns(array: Array) -> None:
    array.driver.write(KEYS[1:3])
    array.driver.write(KEYS)
    assert Counter(drives[0] for drives in array.where(KEYS)) == {0: 4, 1: 4, 2: 4}


def test_what_is_written_again_stays_where_it_is(array: Array) -> None:
    array.driver.write(KEYS[:5])
    before = array.where(KEYS[:5])
    assert array.driver.write(KEYS[4::-1]) == (EXISTS,) * 5
    assert array.where(KEYS[:5]) == before
    assert sum(len(each) for each in array.disks) == 5


def test_a_key_twice_in_one_job_lies_on_one_drive(array: Array) -> None:
    chunks = [Chunk(key, buffer_of(SIZE, payload_of(key, SIZE))) for key in KEYS[:2] * 3]
    assert array.driver.wait(array.driver.submit(Direction.WRITE, chunks)).done
    assert array.where(KEYS[:2]) == [[0], [1]]


def test_a_key_in_two_jobs_at_once_lies_on_one_drive(array: Array) -> None:
    """Two requests wrote the same chunk. When the second was placed the first had not begun, so
    no drive knew of it, and the chunk was written to two of them."""
    jobs = []
    with stalled_calls(blockio, "write_run"):
        for _ in range(3):
            for keys in (KEYS[:5], KEYS[4:0:-1]):
                data = {key: payload_of(key, SIZE) for key in keys}
                jobs.append(array.driver.submit(Direction.WRITE, array.driver.write_chunks(data)))
    assert all(array.driver.wait(job_id).done for job_id in jobs)
    assert array.where(KEYS[:5]) == [[idx % 3] for idx in range(5)]


def test_a_delete_reaches_the_right_drive(array: Array) -> None:
    array.driver.write(KEYS)
    assert array.tier.delete([KEYS[1], KEYS[5], key_of("unknown")]) == 2
    assert [idx for idx, drives in enumerate(array.where(KEYS)) if not drives] == [1, 5]
    assert array.tier.delete(KEYS[1:2]) == 0


def test_a_touch_reaches_the_right_drives(tmp_path: Path) -> None:
    array = Array(tmp_path, num_chunks=4)
    array.driver.write(KEYS)
    assert array.driver.touch([*KEYS[:3], key_of("unknown")]) == (DONE, DONE, DONE, ABSENT)
    array.driver.write([key_of(f"new {idx}") for idx in range(9)])
    assert array.driver.present(KEYS) == [True] * 3 + [False] * 9
    array.tier.close()


def test_results_come_from_the_drives_and_stand_in_the_jobs_order(array: Array) -> None:
    array.driver.write(KEYS[::2])
    array.failing.add(2)
    on_two = set(array.of(2))
    result, contents = array.driver.read(KEYS)
    for idx, key in enumerate(KEYS):
        expected = ABSENT if idx % 2 else BROKEN if key in on_two else DONE
        assert result.results[idx] == expected
        assert result.tiers[idx] == ("disk" if expected == DONE else "")
        if expected == DONE:
            assert contents[idx] == payload_of(key, SIZE)
    assert result.moved_bytes == SIZE * result.results.count(DONE)


def test_the_slowest_drive_is_the_slowest_operation(array: Array) -> None:
    """What a breaker above would judge."""
    for idx, faulty in enumerate(array.drives):
        real = faulty.poll

        def slower(real: Callable[[], list[Any]] = real, idx: int = idx) -> list[Any]:
            return [
                type(each)(
                    each.job_id, each.direction, each.results, each.moved_bytes, each.elapsed_s,
                    each.tiers, idx / 10,
                )
                for each in real()
            ]  # fmt: skip

        faulty.poll = slower  # type: ignore[method-assign]
    array.driver.write(KEYS)
    assert array.driver.read(KEYS)[0].slowest_s == 0.2
    assert array.driver.read(array.of(1))[0].slowest_s == 0.1


def test_what_no_drive_has_is_counted_once(array: Array) -> None:
    """No drive was asked for it, so nobody counted it, and a tier's misses did not add up."""
    array.driver.write(KEYS[:4])
    array.driver.read(KEYS)
    metrics = array.context.metrics
    assert metrics.value("read_chunks") == 12
    assert metrics.value("read_chunks", tier="disk", outcome="miss", reason="absent") == 8
    assert metrics.value("read_bytes") == 4 * SIZE


# A drive that fails.


def test_a_drive_that_fails_takes_its_own_chunks_along_and_no_others(array: Array) -> None:
    array.driver.write(KEYS)
    lost = array.of(1)
    array.give_up(1)
    assert array.driver.present(KEYS) == [key not in lost for key in KEYS]
    result, contents = array.driver.read(KEYS)
    assert result.results == tuple(ABSENT if key in lost else DONE for key in KEYS)
    for key, content in zip(KEYS, contents, strict=True):
        assert key in lost or content == payload_of(key, SIZE)


def test_new_chunks_avoid_a_drive_that_fails(array: Array) -> None:
    array.driver.write(KEYS)
    array.give_up(1)
    new = [key_of(f"new {idx}") for idx in range(8)]
    assert array.driver.write(new) == (DONE,) * 8
    assert Counter(drives[0] for drives in array.where(new)) == {0: 4, 2: 4}


def test_a_drive_that_is_back_gives_its_chunks_back(array: Array) -> None:
    """And takes new ones again."""
    array.driver.write(KEYS)
    lost = array.of(1)
    array.give_up(1)
    array.failing.clear()
    assert all(disk.drain(30) for disk in array.disks)
    array.pass_time(6.0)
    assert array.driver.read(lost[:1])[0].done
    assert array.guards[1].breaker.state is State.CLOSED
    assert array.driver.read(KEYS)[0].done
    new = [key_of(f"new {idx}") for idx in range(6)]
    array.driver.write(new)
    assert len(array.of(1, new)) == 2


def test_a_chunk_that_was_written_anew_while_its_drive_was_away(array: Array) -> None:
    """It lies on two drives when the first is back: read from either, deleted on both."""
    array.driver.write(KEYS[:3])
    (moved,) = array.of(1)
    array.give_up(1)
    assert array.driver.write([moved]) == (DONE,)
    array.failing.clear()
    array.pass_time(6.0)
    array.driver.read([moved])
    assert len(array.where([moved])[0]) == 2
    for drive_idx in array.where([moved])[0]:
        array.failing = {drive_idx}
        result, contents = array.driver.read([moved])
        assert result.results[0] == BROKEN or contents == [payload_of(moved, SIZE)]
    array.failing.clear()
    assert array.driver.write([moved]) == (EXISTS,)
    assert array.tier.delete([moved]) == 2
    assert array.driver.present([moved]) == [False]


def test_all_drives_are_gone(array: Array) -> None:
    array.driver.write(KEYS)
    for drive_idx in range(3):
        array.give_up(drive_idx)
    assert not array.tier.available
    assert array.driver.present(KEYS) == [False] * 12
    assert array.driver.read(KEYS)[0].results == (ABSENT,) * 12
    assert array.driver.write([key_of("new")]) == (NOWHERE,)
    assert array.driver.touch(KEYS[:1]) == (ABSENT,)
    assert array.context.metrics.value("write_chunks", outcome="full", reason="breaker") == 1
    assert array.tier.delete(KEYS) == 12, "what is invalid must not come back with them"


@pytest.mark.parametrize("direction", [Direction.READ, Direction.WRITE])
def test_a_drive_that_hangs_does_not_hold_up_the_others(array: Array, direction: Direction) -> None:
    array.driver.write(KEYS)
    keys = KEYS if direction is Direction.READ else [key_of(f"n{idx}") for idx in range(12)]
    chunks = [Chunk(key, buffer_of(SIZE, payload_of(key, SIZE))) for key in keys]
    with hanging(array.path_of(1)):
        begun = [array.driver.submit(direction, [chunk]) for chunk in chunks]
        stuck = begun[1::3]
        for job_id in set(begun) - set(stuck):
            assert array.driver.wait(job_id).done
        for _ in range(3):
            array.pass_time(1.5, hanging=1)
        assert array.guards[1].breaker.state is State.OPEN
        assert array.tier.why_missed(KEYS[1]) is Reason.BREAKER
        assert array.tier.why_missed(key_of("nowhere")) is Reason.ABSENT
        assert array.driver.present(KEYS) == [idx % 3 != 1 for idx in range(12)]
        assert array.driver.read(KEYS[::3])[0].done
        new = [key_of(f"new {idx}") for idx in range(4)]
        assert array.driver.write(new) == (DONE,) * 4
        assert array.driver.outstanding == 4
    assert all(array.driver.wait(job_id).done for job_id in stuck), "late, but reported"


def test_a_job_over_a_drive_that_hangs_ends_when_that_drive_does(array: Array) -> None:
    """Its buffers are in use until then."""
    array.driver.write(KEYS)
    with hanging(array.path_of(2)):
        chunks = [Chunk(key, buffer_of(SIZE)) for key in KEYS]
        job_id = array.driver.submit(Direction.READ, chunks)
        array.driver.wait_until(lambda: len(array.disks[0].under_way) == 0, "the others' end")
        array.driver.collect()
        assert array.driver.outstanding == 1
    assert array.driver.wait(job_id).done
    assert [bytes(chunk.buffer) for chunk in chunks] == [payload_of(key, SIZE) for key in KEYS]


def test_a_drive_that_refuses_a_job_does_not_lose_the_others(
    array: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception went to the caller, who took buffers back that other drives still filled."""
    array.driver.write(KEYS)

    def refuse(job: Job) -> None:
        raise MemoryError("no room for a job")

    with monkeypatch.context() as patch:
        patch.setattr(array.disks[1], "submit", refuse)
        result, contents = array.driver.read(KEYS[:6])
        failed = ChunkResult(Outcome.FAILED, Reason.INTERNAL)
        assert result.results == (DONE, failed, DONE) * 2
        assert contents[::3] == [payload_of(key, SIZE) for key in KEYS[:6:3]]
        new = [key_of(f"new {idx}") for idx in range(6)]
        assert array.driver.write(new).count(DONE) == 4
    assert array.context.metrics.value("internal_errors") == 2
    assert array.driver.read(KEYS)[0].done
    assert set(array.driver.write(new)) == {DONE, EXISTS}, "nothing is taken to be on its way"


def test_a_drive_that_was_closed_below(array: Array) -> None:
    array.driver.write(KEYS)
    array.disks[0].close()
    result, _ = array.driver.read(KEYS[:3])
    assert result.results == (ChunkResult(Outcome.MISS, Reason.CLOSED), DONE, DONE)
    assert array.driver.touch(KEYS[:3])[1:] == (DONE, DONE)
    written = array.driver.write([key_of(f"new {idx}") for idx in range(3)])
    assert sorted(each.outcome for each in written) == [Outcome.DONE, Outcome.DONE, Outcome.FULL]


# The end.


def test_drives_are_closed_at_once(array: Array) -> None:
    """One after the other, three drives that hang took three times as long as one."""
    together = threading.Barrier(3)
    closed: list[int] = []
    for each in array.disks:
        real = each.close

        def close(real: Callable[[], None] = real) -> None:
            together.wait(20)
            time.sleep(0.05)
            real()
            closed.append(1)

        each.close = close  # type: ignore[method-assign]
    array.tier.close()
    assert not together.broken
    assert len(closed) == 3, "and waited for"


def test_closing_when_no_more_threads_are_to_be_had(
    array: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drives are closed all the same, one after the other."""

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    array.driver.write(KEYS)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", NoThread)
        array.tier.close()
    again = DiskTier(array.path_of(2), 1 << 20, array.context)
    assert len(again) == 4
    again.close()


def test_closing_with_a_drive_that_hangs(array: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs is left behind; everything else is reported."""
    monkeypatch.setattr(jobs, "_CLOSE_WAIT_S", 0.1)
    array.driver.write(KEYS)
    array.pass_time(0.0)
    with hanging(array.path_of(1)):
        chunks = [Chunk(key, buffer_of(SIZE)) for key in KEYS]
        reads = [array.driver.submit(Direction.READ, chunks[idx::3]) for idx in range(3)]
        array.driver.wait_until(lambda: bool(array.disks[1].under_way), "the read that hangs")
        array.tier.close()
        for job_id in (reads[0], reads[2]):
            outcomes = {each.outcome for each in array.driver.wait(job_id).results}
            assert outcomes <= {Outcome.DONE, Outcome.MISS}
        assert array.driver.outstanding == 1
    assert array.driver.wait(reads[1]).done


def missing_of(store: Store, keys: Sequence[Key]) -> list[Reason]:
    """Why each chunk was a miss; checks that it was one."""
    assert store.lookup(keys) == [Lookup.MISS] * len(keys)
    return [store.why_missed(key) for key in keys]


def test_why_a_chunk_was_missed_while_one_drive_is_not_asked(array: Array) -> None:
    """Every miss was put down to the breaker as long as any drive was not asked, those of chunks
    that no drive ever had as well."""
    array.driver.write(KEYS)
    store = Store([array.tier], array.context)
    new = [key_of("new a"), key_of("new b")]
    theirs = array.of(1)
    others = [key for key in KEYS if key not in theirs]
    assert missing_of(store, new) == [Reason.ABSENT] * 2
    array.give_up(1)
    assert store.degraded
    assert missing_of(store, [*new, *theirs]) == [Reason.ABSENT] * 2 + [Reason.BREAKER] * 4
    assert store.lookup(others) == [Lookup.HIT] * 8
    array.disks[1].delete(theirs[:1])
    assert missing_of(store, theirs) == [Reason.ABSENT] + [Reason.BREAKER] * 3
    array.disks[0].delete(others)
    array.disks[2].delete(others)
    assert missing_of(store, others) == [Reason.ABSENT] * 8
    array.failing.clear()
    array.pass_time(5.5)
    assert store.lookup(theirs[1:]) == [Lookup.HIT] * 3, "somebody has to be the probe"
    assert missing_of(store, [*new, theirs[0]]) == [Reason.ABSENT] * 3
    assert array.driver.read(theirs[1:])[0].done
    assert not store.degraded


def test_why_a_chunk_was_missed_that_only_a_host_tier_has(array: Array) -> None:
    above = HostTier(1 << 20, array.context)
    store = Store([above, array.tier], array.context)
    array.driver.write(KEYS)
    theirs = array.of(1)
    array.give_up(1)
    assert missing_of(store, theirs) == [Reason.BREAKER] * 4
    Driver(above, SIZE).write(theirs[:2])
    assert store.lookup(theirs) == [Lookup.HIT] * 2 + [Lookup.MISS] * 2
    above.delete(theirs)
    assert missing_of(store, [*theirs, key_of("new")]) == [Reason.BREAKER] * 4 + [Reason.ABSENT]
    above.close()


def test_what_the_store_copies_for_itself_is_so_for_every_drive(array: Array) -> None:
    """The drives were told that it was used, and had the order in which it was demoted."""
    seen: list[tuple[int, bool]] = []
    with pytest.MonkeyPatch.context() as patch:
        for idx, disk in enumerate(array.disks):
            real = disk.submit
            patch.setattr(
                disk, "submit",
                lambda job, idx=idx, real=real: (seen.append((idx, job.copying)), real(job)),
            )  # fmt: skip
        for job_id, copying in ((-1, True), (-2, False)):
            chunks = array.driver.write_chunks({key: payload_of(key, SIZE) for key in KEYS[:6]})
            array.tier.submit(Job(job_id, Direction.WRITE, chunks, 10.0, copying))
            while not (ended := array.tier.poll()):
                time.sleep(0.001)
            assert [result.job_id for result in ended] == [job_id]
    assert sorted(seen) == [(0, False), (0, True), (1, False), (1, True), (2, False), (2, True)]


# Starting.


@pytest.fixture
def broken_paths(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes drives at paths fail when they are opened."""

    def breaks(*paths: Path, error: int = errno.EIO) -> None:
        real = drive.probe_direct

        def probe(directory: str) -> bool:
            if any(directory.startswith(f"{path}/") for path in paths):
                raise OSError(error, os.strerror(error), directory)
            return real(directory)

        monkeypatch.setattr(drive, "probe_direct", probe)

    return breaks


def settings_of(*paths: Path) -> Settings:
    return Settings(paths, len(paths) << 20, min_free_bytes=0, io_threads=1)


def test_a_store_over_several_drives(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for _ in range(2):
        store = Store.open(settings_of(*paths))
        assert [tier.name for tier in store.tiers] == ["disk"]
        assert [drive.name for drive in store.drives] == ["disk0", "disk1", "disk2"]
        driver = Driver(store.tiers[0], SIZE)
        driver.write(KEYS)
        assert driver.read(KEYS)[0].done
        assert [len(drive) for drive in store.drives] == [4, 4, 4]
        assert store.num_chunks == 12
        store.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.ENODEV])
def test_a_store_starts_without_a_drive_that_fails(
    tmp_path: Path, broken_paths: Callable[..., None], error: int
) -> None:
    """A machine with a broken drive comes up all the same; names stay those of the places."""
    paths = [tmp_path / name for name in "abc"]
    broken_paths(paths[1], error=error)
    store = Store.open(settings_of(*paths))
    assert [drive.name for drive in store.drives] == ["disk0", "disk2"]
    driver = Driver(store.tiers[0], SIZE)
    assert set(driver.write(KEYS)) == {DONE}
    assert [len(drive) for drive in store.drives] == [6, 6]
    store.close()


def test_of_two_drives_one_fails(tmp_path: Path, broken_paths: Callable[..., None]) -> None:
    """The tier is called what it was before, in metrics as well."""
    broken_paths(tmp_path / "a")
    store = Store.open(settings_of(tmp_path / "a", tmp_path / "b"))
    assert [tier.name for tier in store.tiers] == ["disk"]
    assert [drive.name for drive in store.drives] == ["disk1"]
    store.close()


def test_what_a_drive_had_is_there_when_it_is_back(
    tmp_path: Path, broken_paths: Callable[..., None]
) -> None:
    paths = [tmp_path / name for name in "ab"]
    store = Store.open(settings_of(*paths))
    Driver(store.tiers[0], SIZE).write(KEYS)
    store.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drive, "probe_direct", drive.probe_direct)
        broken_paths(paths[0])
        store = Store.open(settings_of(*paths))
        driver = Driver(store.tiers[0], SIZE)
        assert sum(driver.present(KEYS)) == 6
        store.close()
    broken_paths()
    store = Store.open(settings_of(*paths))
    driver = Driver(store.tiers[0], SIZE)
    assert driver.present(KEYS).count(True) >= 6
    store.close()


@pytest.mark.parametrize("wrong", ["file", "no permission", "another store's"])
def test_a_wrong_path_is_no_broken_drive(
    tmp_path: Path, broken_paths: Callable[..., None], wrong: str
) -> None:
    """Somebody has to mend the settings; and nothing is left open of the other drives."""
    paths = [tmp_path / name for name in "abc"]
    other = None
    if wrong == "file":
        paths[2].write_text("mine")
    elif wrong == "no permission":
        broken_paths(paths[2], error=errno.EACCES)
    else:
        other = DiskTier(paths[2], 1 << 20, TierContext(), num_threads=1)
    threads = threading.active_count()
    with pytest.raises(ConfigError, match=str(paths[2])):
        Store.open(settings_of(*paths))
    assert threading.active_count() == threads
    if other is not None:
        other.close()
    Store.open(settings_of(*paths[:2])).close()


def test_no_drive_is_left(tmp_path: Path, broken_paths: Callable[..., None]) -> None:
    paths = [tmp_path / name for name in "ab"]
    broken_paths(*paths)
    with pytest.raises(ConfigError, match="no drive can be used"):
        Store.open(settings_of(*paths))
    with pytest.raises(ConfigError, match="Input/output error"):
        Store.open(settings_of(paths[0]))


def test_a_drive_that_was_left_out_shows(tmp_path: Path, broken_paths: Callable[..., None]) -> None:
    """Nobody who looked at the numbers could tell that a drive was missing since the start."""
    paths = [tmp_path / name for name in "abc"]
    names = ["disk0", "disk1", "disk2"]
    store = Store.open(settings_of(*paths))
    Driver(store.tiers[0], SIZE).write(KEYS)
    assert not store.degraded
    assert [store.gauges()["breaker_open", name] for name in names] == [0.0] * 3
    store.close()
    broken_paths(paths[1])
    store = Store.open(settings_of(*paths))
    assert store.degraded
    gauges = store.gauges()
    assert [gauges["breaker_open", name] for name in names] == [0.0, 1.0, 0.0]
    assert {name for gauge, name in gauges if gauge == "used_bytes"} == {"disk0", "disk2"}
    missed = [key for key in KEYS if store.lookup([key]) == [Lookup.MISS]]
    assert len(missed) == 4
    assert missing_of(store, missed) == [Reason.ABSENT] * 4, "nobody knows what it has"
    assert store.degraded, "for as long as the store lives"
    store.close()


# Any history.


class Removable(FaultyTier):
    """A drive that can be away: it has nothing then, and is not to be written to."""

    available = True

    def contains(self, keys: Sequence[Key]) -> list[Lookup]:
        return super().contains(keys) if self.available else [Lookup.MISS] * len(keys)


class ArrayMachine(RuleBasedStateMachine):
    """Three drives that come, go and fail, against a dictionary: key -> drives that have it."""

    keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True)
    drive = st.integers(0, 2)

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[Key, set[int]] = {key: set() for key in KEYS}
        self.failing: set[int] = set()

    @initialize()
    def start(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="array-machine-"))
        context = TierContext(clock=ManualClock())
        self.disks = [
            DiskTier(self.place / str(idx), 40 * slot_cost_bytes(SIZE), context, num_threads=1)
            for idx in range(3)
        ]
        self.drives = [
            Removable(each, read_faults=self.fault_of(idx), write_faults=self.fault_of(idx))
            for idx, each in enumerate(self.disks)
        ]
        self.driver = Driver(StripedTier(self.drives, context), SIZE)

    def fault_of(self, drive_idx: int) -> Callable[[int], ChunkResult | None]:
        return lambda _: BROKEN if drive_idx in self.failing else None

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.tier.close()
            shutil.rmtree(self.place, ignore_errors=True)

    @property
    def here(self) -> set[int]:
        return {idx for idx, each in enumerate(self.drives) if each.available}

    @rule(keys=keys)
    def write(self, keys: list[Key]) -> None:
        before = [
            [key in self.model and idx in self.model[key] for idx in range(3)] for key in keys
        ]
        results = self.driver.write(keys)
        for key, had, result in zip(keys, before, results, strict=True):
            reachable = self.model[key] & self.here
            after = {
                idx for idx, each in enumerate(self.disks) if each.contains([key])[0] is Lookup.HIT
            }
            added = after - {idx for idx in range(3) if had[idx]}
            if reachable:
                assert not added, "on a second drive"
                assert result in (EXISTS, BROKEN)
            elif not self.here:
                assert (result, added) == (NOWHERE, set())
            elif result == BROKEN:
                assert not added
                assert self.failing & self.here
            else:
                assert result == DONE
                assert len(added) == 1
                assert added <= self.here - self.failing
            self.model[key] = after

    @rule(keys=keys)
    def read(self, keys: list[Key]) -> None:
        result, contents = self.driver.read(keys)
        for key, outcome, content in zip(keys, result.results, contents, strict=True):
            reachable = self.model[key] & self.here
            if not reachable:
                assert outcome == ABSENT
            elif reachable & self.failing:
                assert outcome in (DONE, BROKEN)
            else:
                assert outcome == DONE
            assert outcome != DONE or content == payload_of(key, SIZE)

    @rule(keys=keys)
    def touch(self, keys: list[Key]) -> None:
        found = [result == DONE for result in self.driver.touch(keys)]
        assert found == [bool(self.model[key] & self.here) for key in keys]

    @rule(keys=keys)
    def delete(self, keys: list[Key]) -> None:
        assert self.driver.tier.delete(keys) == sum(len(self.model[key]) for key in keys)
        for key in keys:
            self.model[key] = set()

    @rule(drive=drive)
    def go_or_come(self, drive: int) -> None:
        self.drives[drive].available ^= True

    @rule(drive=drive)
    def fail_or_mend(self, drive: int) -> None:
        self.failing ^= {drive}

    @invariant()
    def lookups_agree(self) -> None:
        if hasattr(self, "driver"):
            assert self.driver.present(KEYS) == [bool(self.model[key] & self.here) for key in KEYS]


TestArrayMachine = ArrayMachine.TestCase
TestArrayMachine.settings = hypothesis_settings(max_examples=20, stateful_step_count=30)
