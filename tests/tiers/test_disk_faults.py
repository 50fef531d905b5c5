"""Fail the N-th call to the operating system, for every N.

Whatever fails, and once or for good: every job is reported, no wrong byte is served, and what
the tier counts is what lies on the drive.
"""

import errno
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.core.keys import Key
from stepwell.core.types import Chunk, ChunkResult, Direction, Lookup, Outcome, Reason
from stepwell.errors import ConfigError
from stepwell.testing import Driver, buffer_of, key_of, payload_of
from stepwell.testing.stalling import stalled_calls
from stepwell.tiers import blockio, drive, frames, jobs
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.disk import slot_cost_bytes

from .conftest import DiskPlace, Slot
from .faulty_os import CALLS, NEED_SPACE, FaultyOs

KEYS = [key_of(idx) for idx in range(12)]
BIG = [key_of(f"big {idx}") for idx in range(3)]
SIZE, BIG_SIZE = 5000, 20_000
CAPACITY = 8 * slot_cost_bytes(SIZE)


def length_of(key: Key) -> int:
    return BIG_SIZE if key in BIG else SIZE


class Short:
    """A short life with every kind of operation, on a drive that may fail."""

    def __init__(self, place: DiskPlace, failing_call: str = "", *, lasting: bool = False) -> None:
        self.place = place
        self.failing_call = failing_call
        self.lasting = lasting
        self.spoilt: set[Key] = set()
        self.deleted: set[Key] = set()
        self.num_errors = 0

    def open(self, **settings: Any) -> Driver:
        return self.place.open(
            capacity_bytes=CAPACITY, payload_bytes=SIZE, num_threads=1, **settings
        )

    def live(self) -> None:
        driver = self.open(min_free_bytes=1 << 20)
        self.write(driver, KEYS[:4])
        self.read(driver, KEYS[:5])
        self.write(driver, KEYS[4:10])  # evicts
        self.spoil(driver, KEYS[9])
        self.read(driver, [KEYS[9], KEYS[8]])  # sets aside
        self.write(driver, [KEYS[9]])
        self.delete(driver, [KEYS[8]])
        driver.touch(KEYS)
        self.write(driver, BIG)  # another slot size
        self.read(driver, BIG)
        self.write(driver, KEYS[:3])
        self.squeeze(driver)
        driver = self.open()
        self.write(driver, KEYS[10:])
        self.read(driver, [*KEYS, *BIG])
        self.place.close()
        self.place.journal.unlink(missing_ok=True)
        if self.failing_call == "pwritev":
            self.deleted.clear()  # neither wiped nor known to a journal
        driver = self.open()
        self.read(driver, [*KEYS, *BIG])
        self.write(driver, KEYS[:4])

    def write(self, driver: Driver, keys: list[Key]) -> None:
        for key, result in zip(keys, driver.write(keys, length_of(keys[0])), strict=True):
            assert result.reason is not Reason.INTERNAL, "an error that nobody had foreseen"
            self.num_errors += result.outcome is Outcome.FAILED
            if result.outcome is Outcome.DONE:
                self.deleted.discard(key)
                self.spoilt -= {key} if result.reason is Reason.NONE else set()

    def read(self, driver: Driver, keys: list[Key]) -> None:
        for length in (SIZE, BIG_SIZE):
            wanted = [key for key in keys if length_of(key) == length]
            if not wanted:
                continue
            result, contents = driver.read(wanted, length)
            for key, answer, content in zip(wanted, result.results, contents, strict=True):
                assert answer.reason is not Reason.INTERNAL, "an error that nobody had foreseen"
                if answer.outcome is Outcome.DONE:
                    assert content == payload_of(key, length)
                    assert key not in self.spoilt
                    assert key not in self.deleted, "a deleted chunk is back"

    def spoil(self, driver: Driver, key: Key) -> None:
        """A flipped byte in the payload, if the record is there."""
        for slot, header in self.place.slots():
            if header.key == key:
                slot.flip(4096)
                self.spoilt.add(key)

    def delete(self, driver: Driver, keys: list[Key]) -> None:
        driver.tier.delete(keys)
        # On a drive that takes nothing any more that cannot outlive the process.
        self.deleted |= set() if self.lasting else set(keys)
        assert driver.tier.contains(keys) == [Lookup.MISS] * len(keys)

    def squeeze(self, driver: Driver) -> None:
        """Others use up the drive, so that space is given back."""
        tier = self.place.tier
        assert tier is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                tier._drive.files, "free_bytes", lambda: (1 << 20) - slot_cost_bytes(SIZE)
            )
            self.place.clock.advance(5.0)
            self.write(driver, [KEYS[3]])


def calls_of(path: Path, only: tuple[str, ...]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        system = FaultyOs(0, 0, False, only)
        system.put_in(patch)
        place = DiskPlace(path)
        Short(place).live()
        place.check_books()
        place.close()
    assert set(only) - {"rmdir", "pread", "read", "lseek", "listdir"} <= set(system.calls)
    return system.calls


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize(
    ("error", "only"), [(errno.EIO, CALLS), (errno.ENOSPC, NEED_SPACE)], ids=["EIO", "ENOSPC"]
)
def test_any_call_may_fail(
    memory_path: Path, error: int, only: tuple[str, ...], lasting: bool
) -> None:
    """Open, write, read, evict, set aside, delete, touch, move to another slot size, give space
    back, restart with a journal and without: the N-th call fails, for every N."""
    calls = calls_of(memory_path / "counted", only)
    assert len(calls) > 50
    for failing in range(1, len(calls) + 1):
        place = DiskPlace(memory_path / f"fail{failing}")
        short = Short(place, calls[failing - 1], lasting=lasting)
        system = FaultyOs(failing, error, lasting, only)
        try:
            with pytest.MonkeyPatch.context() as patch:
                system.put_in(patch)
                try:
                    short.live()
                except ConfigError:
                    assert place.tier is None
                system.heal()
                check_after(place, short)
        except BaseException:
            print(f"failing={failing} call={system.calls[failing - 1]}")  # what to look at
            raise
        finally:
            place.close()
        shutil.rmtree(place.path, ignore_errors=True)


def check_after(place: DiskPlace, short: Short) -> None:
    """The drive is well again: nothing is stuck, nothing is lost track of, nothing is wrong."""
    if place.tier is None:
        driver = short.open()  # the lock was given back
    else:
        driver = Driver(place.tier, SIZE)
    place.clock.advance(5.0)  # what is tried again only after a while is tried again
    short.read(driver, [*KEYS, *BIG])
    # More chunks than there is room for go through it, of both sizes.
    for key in [*KEYS[:6], *BIG, *KEYS[6:]]:
        (result,) = driver.write([key], length_of(key))
        assert result.outcome is Outcome.DONE, result
        short.spoilt.discard(key)
        short.deleted.discard(key)
    assert driver.write([key_of("last")])[0].outcome is Outcome.DONE
    short.read(driver, [*KEYS, *BIG])
    assert driver.read([key_of("last")])[0].done
    check_books(place)
    place.tier.delete([key_of("last")])  # type: ignore[union-attr]
    present = driver.present([*KEYS, *BIG])
    driver = short.open()
    assert driver.present([*KEYS, *BIG, key_of("last")]) == [*present, False]
    short.read(driver, [*KEYS, *BIG])
    check_books(place)
    assert place.context.metrics.value("internal_errors") == 0


def check_books(place: DiskPlace) -> None:
    """Also: what lies there is not more than the capacity, whatever could not be removed."""
    for path in (place.path / "partial").iterdir():
        path.unlink(missing_ok=True)  # a failed write may leave one until the next start
    place.check_books()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Break named calls from now on: ``system = broken(errno.EIO, "unlink")``; mend: `heal`."""

    def break_calls(error: int, *names: str) -> FaultyOs:
        system = FaultyOs(1, error, True, names)
        system.put_in(monkeypatch)
        return system

    return break_calls  # type: ignore[return-value]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("error", [errno.EROFS, errno.EIO, errno.EPERM])
def test_extents_that_cannot_be_removed_stay_counted(
    place: DiskPlace, broken: Any, error: int
) -> None:
    """The tier asked for the same extent to be removed for ever, and every write waited for that;
    in the format before this, a stubborn file let a store grow beyond its capacity."""
    driver = place.open(8, num_threads=2)
    driver.write(KEYS[:8])
    driver.tier.delete(KEYS[:8])
    assert place.tier is not None
    assert place.tier.drain(30)
    system = broken(error, "unlink")
    (result,) = driver.write([key_of("large")], BIG_SIZE)
    assert result.outcome in (Outcome.FULL, Outcome.FAILED)
    assert place.tier.allocated_bytes == 8 * slot_cost_bytes(8192)
    place.check_books()
    assert driver.write(KEYS[:4])[0].outcome is Outcome.DONE, "what lies there is used on"
    system.heal()
    assert driver.write([key_of("large")], BIG_SIZE)[0].outcome is Outcome.DONE
    place.check_books()


def test_an_extent_that_cannot_be_cut_stays_counted(
    place: DiskPlace, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space was given back in the books and not on the drive: the store then grew beyond its
    capacity."""
    driver = place.open(16, num_threads=1, min_free_bytes=1 << 20)
    assert place.tier is not None
    driver.write(KEYS[:3])
    system = broken(errno.EIO, "ftruncate")
    with monkeypatch.context() as patch:
        patch.setattr(place.tier._drive.files, "free_bytes", lambda: (1 << 20) - 100)
        place.clock.advance(5.0)
        driver.write([KEYS[3]])
    place.check_books()
    system.heal()
    driver.write([key_of(f"n{idx}") for idx in range(16)])
    place.check_books()


@pytest.mark.parametrize("call", ["posix_fallocate", "rename", "open", "makedirs"])
@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.EMFILE])
def test_a_drive_that_makes_no_extent(place: DiskPlace, broken: Any, call: str, error: int) -> None:
    """That is a failure of the drive, and no bug of ours: it was logged as one that nobody had
    foreseen, and took along what else was written with it."""
    driver = place.open(16, num_threads=1)
    driver.write(KEYS[:4])
    system = broken(error, call)
    (result,) = driver.write([key_of("large")], BIG_SIZE)
    assert (result.outcome, result.reason) == (Outcome.FAILED, Reason.IO_ERROR)
    assert driver.read(KEYS[:4])[0].done
    place.check_books()
    system.heal()
    place.clock.advance(5.0)
    assert driver.write([key_of("large")], BIG_SIZE)[0].outcome is Outcome.DONE
    place.check_books()
    assert place.context.metrics.value("internal_errors") == 0


def test_a_slot_that_cannot_be_written_costs_no_other(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad sector: writes there fail, all others go on, and the books stay right."""
    driver = place.open(8, num_threads=1)
    driver.write(KEYS[:4])
    bad_offset = place.slot_of(KEYS[1]).offset
    real = os.pwritev

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= bad_offset < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(blockio.os, "pwritev", write)
    outcomes = [driver.write([key_of(f"n{idx}")])[0].outcome for idx in range(60)]
    assert set(outcomes) == {Outcome.DONE, Outcome.FAILED}
    assert outcomes.count(Outcome.DONE) > 20
    place.check_books()
    assert place.tier is not None
    assert driver.tier.delete([key_of(f"n{idx}") for idx in range(60)]) > 0
    place.check_books()


def test_an_unreadable_slot_is_neither_lost_nor_set_aside(place: DiskPlace, broken: Any) -> None:
    """EIO of the drive says nothing about the record: it is a failure, and tried again later."""
    driver = place.open(4)
    driver.write(KEYS[:4])
    system = broken(errno.EIO, "preadv")
    result, _ = driver.read(KEYS[:4])
    assert {(r.outcome, r.reason) for r in result.results} == {(Outcome.FAILED, "io_error")}
    system.heal()
    assert driver.read(KEYS[:4])[0].done
    assert place.context.metrics.value("quarantined_chunks") == 0
    assert place.reason("read_chunks", "io_error") == 4
    place.check_books()


def test_what_cannot_be_wiped_is_deleted_all_the_same(place: DiskPlace, broken: Any) -> None:
    """The journal knows it, if not the header."""
    driver = place.open(4)
    driver.write(KEYS[:4])
    system = broken(errno.EIO, "pwritev")
    assert driver.tier.delete(KEYS[:2]) == 2
    place.check_books()
    system.heal()
    driver = place.open(4)
    assert driver.present(KEYS[:4]) == [False, False, True, True]
    place.check_books()


def test_a_file_system_that_does_not_say_how_full_it_is(place: DiskPlace, broken: Any) -> None:
    """What there is is used; more is asked for when it says so again."""
    driver = place.open(16, min_free_bytes=1 << 20)
    driver.write(KEYS[:2])
    system = broken(errno.EIO, "statvfs")
    assert driver.write(KEYS[2:4])[0].outcome is Outcome.DONE
    for key in KEYS[4:]:
        assert driver.write([key])[0].outcome is Outcome.DONE
    assert driver.write([key_of("large")], BIG_SIZE)[0].outcome is Outcome.FULL
    place.check_books()
    system.heal()
    assert driver.write([key_of("large")], BIG_SIZE)[0].outcome is Outcome.DONE
    place.check_books()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_is_a_refusal_and_hits_go_on(place: DiskPlace, broken: Any, error: int) -> None:
    driver = place.open(8)
    driver.write(KEYS[:4])
    system = broken(error, "pwritev")
    results = driver.write(KEYS[4:8])
    assert {(r.outcome, r.reason) for r in results} == {(Outcome.FULL, "no_space")}
    assert place.reason("write_chunks", "no_space") == 4
    assert driver.read(KEYS[:4])[0].done
    assert driver.present(KEYS[4:8]) == [False] * 4
    place.check_books()
    system.heal()
    assert all(r.outcome is Outcome.DONE for r in driver.write(KEYS[4:8]))


def test_no_space_for_another_extent(place: DiskPlace, broken: Any) -> None:
    """The drive would not give more: what there is is written over, and later it is asked again."""
    driver = place.open(16, num_threads=1)
    driver.write(KEYS[:4])
    system = broken(errno.ENOSPC, "posix_fallocate")
    for key in KEYS[4:]:
        assert driver.write([key])[0].outcome is Outcome.DONE
    assert driver.present(KEYS) == [False] * 8 + [True] * 4
    (result,) = driver.write([key_of("large")], BIG_SIZE)
    assert (result.outcome, result.reason) == (Outcome.FULL, Reason.NO_SPACE)
    assert system.calls.count("posix_fallocate") == 1, "it is not asked for every chunk"
    place.check_books()
    system.heal()
    place.clock.advance(5.0)
    driver.write(KEYS)
    assert driver.present(KEYS) == [True] * 12
    place.check_books()


def test_free_space_is_not_promised_twice(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight threads that ask at once, with room for three above what must be left free: each saw
    the free space before any of them had used it, and all of them took it."""
    cost = slot_cost_bytes(SIZE)
    min_free_bytes = 1 << 20
    driver = place.open(
        64, payload_bytes=SIZE, min_free_bytes=min_free_bytes, num_threads=8
    )  # fmt: skip
    assert place.tier is not None
    files = place.tier._drive.files

    asked = Counter[int]()

    def almost_full() -> int:
        free = min_free_bytes + 3 * cost + cost // 2 - lying_in(place)
        thread = threading.get_ident()
        asked[thread] += 1
        if asked[thread] > 1:  # the first time is only to see whether space is to be given back
            time.sleep(0.05)  # others ask meanwhile
        return free

    monkeypatch.setattr(files, "free_bytes", almost_full)
    with stalled_calls(blockio, "write_run"):
        write_jobs = [
            driver.submit(Direction.WRITE, driver.write_chunks({key: payload_of(key, SIZE)}))
            for key in KEYS[:8]
        ]
        driver.wait_until(
            lambda: driver.collect() or driver.outstanding == 3, "all but three refused"
        )
    results = [driver.wait(job).results[0] for job in write_jobs]
    assert [r.outcome for r in results].count(Outcome.DONE) == 3
    assert place.reason("write_chunks", "min_free") == 5
    assert lying_in(place) <= 3 * cost
    place.check_books()


def lying_in(place: DiskPlace) -> int:
    return sum(extent.size_bytes for extent in place.extents())


def test_short_writes_and_reads_go_on(place: DiskPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may move less than asked; the rest follows, in whole pages."""

    def one_page(real: Any) -> Any:
        def call(fd: int, buffers: list[memoryview], offset: int) -> int:
            first = next(buffer for buffer in buffers if len(buffer))
            moved: int = real(fd, [first[:4096]], offset)
            return moved

        return call

    monkeypatch.setattr(blockio.os, "preadv", one_page(os.preadv))
    monkeypatch.setattr(blockio.os, "pwritev", one_page(os.pwritev))
    for direct in (True, False):
        monkeypatch.setattr(drive, "probe_direct", lambda _, direct=direct: direct)
        for length in (8192, 5000, 70_000):
            driver = place.open(4, payload_bytes=length)
            keys = [key_of(f"{direct}{length}{idx}") for idx in range(4)]
            assert all(result.outcome is Outcome.DONE for result in driver.write(keys))
            assert driver.read(keys)[1] == [payload_of(key, length) for key in keys]


def test_jobs_that_fail_in_an_unforeseen_way_are_reported(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours: the chunk is FAILED/INTERNAL, its room is given back, the rest goes on."""

    def bug(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    driver = place.open(8)
    driver.write(KEYS[:1])
    with monkeypatch.context() as patch:
        patch.setattr(blockio, "write_run", bug)
        patch.setattr(blockio, "read_run", bug)
        for _ in range(3):
            assert driver.write(KEYS[1:3])[0].reason == "internal"
            assert driver.read(KEYS[:1])[0].results[0].outcome is Outcome.FAILED
    place.check_books()
    assert driver.write(KEYS[1:4])[2].outcome is Outcome.DONE
    target = buffer_of(driver.payload_bytes)
    assert driver.wait(driver.submit(Direction.READ, [Chunk(KEYS[0], target)])).done


def test_a_drive_that_stands_still_is_left_behind(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing waits for so long and no longer, and the directory stays owned: what was begun may
    still reach the drive."""
    monkeypatch.setattr(jobs, "_CLOSE_WAIT_S", 0.2)
    driver = place.open(4, num_threads=1)
    driver.write(KEYS[:2])
    assert place.tier is not None
    with stalled_calls(blockio, "read_run"):
        job = driver.submit(Direction.READ, [Chunk(KEYS[0], buffer_of(8192))])
        driver.wait_until(
            lambda: [job_id for job_id, _ in place.tier.under_way] == [job], "a read that hangs"
        )
        place.tier.close()
        assert driver.tier.poll() == []
        assert StoreDirectory(place.path).owner() == os.getpid()
    monkeypatch.setattr(jobs, "_CLOSE_WAIT_S", 60.0)
    assert driver.wait(job).done
    driver.wait_until(lambda: place.tier.drain(0.1), "the thread's rest")
    place.tier.close()
    assert StoreDirectory(place.path).owner() is None
    assert place.open(4).present(KEYS[:2]) == [True, True]


def test_a_key_twice_in_one_write(place: DiskPlace) -> None:
    """A chunk was evicted for the second one, for which nothing was written."""
    driver = place.open(4, num_threads=1)
    driver.write(KEYS[:4])
    chunk = driver.write_chunks({KEYS[5]: payload_of(KEYS[5], 8192)})[0]
    result = driver.wait(driver.submit(Direction.WRITE, [chunk, chunk, chunk]))
    assert {r.outcome for r in result.results} == {Outcome.DONE}
    assert driver.present(KEYS[:4]) == [True] * 3 + [False]
    place.check_books()


def test_who_is_told_that_a_chunk_is_there_can_read_it(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs wrote the same chunk. The second was told that it was there while the first had
    not written it yet, and then the first failed."""
    driver = place.open(4, num_threads=2)
    begun, go_on = threading.Event(), threading.Event()

    def fail_late(*_: Any) -> None:
        begun.set()
        go_on.wait(30)
        raise OSError(errno.EIO, "broken")

    chunks = driver.write_chunks({KEYS[0]: payload_of(KEYS[0], 8192)})
    with monkeypatch.context() as patch:
        patch.setattr(blockio, "write_run", fail_late)
        first = driver.submit(Direction.WRITE, chunks)
        assert begun.wait(30)
        second = driver.submit(Direction.WRITE, chunks)
        give_up_s = time.monotonic() + 0.5  # it may have to wait for the first
        while driver.outstanding == 2 and time.monotonic() < give_up_s:
            driver.collect()
        go_on.set()
        assert driver.wait(first).results[0].outcome is Outcome.FAILED
        told = driver.wait(second).results[0]
    assert told.outcome is not Outcome.DONE or driver.read(KEYS[:1])[0].done


# Sectors that cannot be read, and drives that cannot.


class Sectors:
    """Reads from the drive: those of a ``bad`` slot fail, or all of them, and they are counted."""

    def __init__(self) -> None:
        self.bad: list[Slot] = []
        self.outage = False
        self.error = errno.EIO
        self.num_reads = 0

    def read(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self.num_reads += 1
        end = offset + sum(map(len, buffers))
        if self.outage or any(self.covers(fd, offset, end, slot) for slot in self.bad):
            raise OSError(self.error, os.strerror(self.error))
        return REAL_PREADV(fd, buffers, offset)

    @staticmethod
    def covers(fd: int, begin: int, end: int, slot: Slot) -> bool:
        here = begin < slot.offset + slot.slot_bytes and slot.offset < end
        return here and os.path.samestat(os.fstat(fd), slot.path.stat())


REAL_PREADV = os.preadv
UNREADABLE = ChunkResult(Outcome.FAILED, Reason.IO_ERROR)
MANY = [key_of(f"many {idx}") for idx in range(256)]
"""As many as one call reads."""


@pytest.fixture
def sectors(monkeypatch: pytest.MonkeyPatch) -> Sectors:
    sectors = Sectors()
    monkeypatch.setattr(blockio.os, "preadv", sectors.read)
    return sectors


def with_many(place: DiskPlace) -> Driver:
    """A tier that has `MANY` beside each other."""
    driver = place.open(4 * len(MANY), payload_bytes=4096, num_threads=1)
    assert {r.outcome for r in driver.write(MANY)} == {Outcome.DONE}
    assert len(place.extents()) == 1
    return driver


def served(driver: Driver, keys: list[Key]) -> list[bool]:
    """Read in one job: which were served, and those rightly; the others could not be read."""
    result, contents = driver.read(keys)
    done = [each.outcome is Outcome.DONE for each in result.results]
    for key, each, content in zip(keys, result.results, contents, strict=True):
        assert each.outcome is Outcome.DONE or each == UNREADABLE
        assert each == UNREADABLE or content == payload_of(key, driver.payload_bytes)
    return done


@pytest.mark.parametrize("at", [0, 100, 255])
def test_an_unreadable_sector_fails_its_own_chunk_alone(
    place: DiskPlace, sectors: Sectors, at: int
) -> None:
    """Neighbouring records are read in one call, and all of those failed for one bad sector."""
    driver = with_many(place)
    sectors.bad = [place.slot_of(MANY[at])]
    assert served(driver, MANY) == [idx != at for idx in range(256)]
    assert place.reason("read_chunks", "io_error") == 1
    assert driver.present(MANY) == [True] * 256, "once is not enough to give it up"
    assert place.context.metrics.value("quarantined_chunks") == 0
    place.check_books()


def test_a_sector_that_is_unreadable_again_is_set_aside(place: DiskPlace, sectors: Sectors) -> None:
    """It was tried again and again for ever, and the chunk was never stored anew."""
    driver = with_many(place)
    lost, bad = [MANY[100]], place.slot_of(MANY[100])
    sectors.bad = [bad]
    served(driver, MANY)
    assert place.tier is not None
    used_bytes = place.tier.used_bytes
    assert served(driver, lost) == [False]
    assert place.reason("quarantined_chunks", "io_error") == 1
    assert driver.present(MANY) == [idx != 100 for idx in range(256)]
    assert driver.read(lost)[0].results == (ChunkResult(Outcome.MISS, Reason.ABSENT),)
    assert place.tier._ledger.num_aside == 1
    assert place.tier.used_bytes == used_bytes, "it is kept for a look"
    place.check_books()
    assert driver.write(lost) == (ChunkResult(Outcome.DONE),)
    assert served(driver, MANY) == [True] * 256, "it lies elsewhere now"
    place.check_books()
    reasons = [frames.ASIDE_REASONS[n] for n in replayed(place).aside.values()]
    assert reasons == ["io_error"]
    driver = place.open(4 * len(MANY), payload_bytes=4096, num_threads=1)
    assert place.tier._ledger.num_aside == 1
    assert place.tier.used_bytes == used_bytes + slot_cost_bytes(4096)
    assert served(driver, MANY) == [True] * 256
    place.check_books()
    reasons = [frames.ASIDE_REASONS[n] for n in replayed(place).aside.values()]
    assert reasons == ["io_error"], "and after another start"


def test_a_record_is_not_blamed_for_the_one_before_it(place: DiskPlace, sectors: Sectors) -> None:
    """What was written over a place that could not be read was set aside at its first failure."""
    driver = with_many(place)
    slot = place.slot_of(MANY[100])
    sectors.bad = [slot]
    assert served(driver, [MANY[100]]) == [False]
    sectors.bad = []
    assert place.tier is not None
    place.tier.delete([MANY[100]])
    assert place.tier.drain(30)
    new = key_of("new")
    driver.write([new])
    assert place.slot_of(new) == slot
    assert served(driver, MANY[:8]) == [True] * 8
    sectors.bad = [slot]
    assert served(driver, [new]) == [False]
    assert driver.present([new]) == [True]
    place.check_books()


def test_a_lack_of_memory_is_nobodys_bad_sector(place: DiskPlace, sectors: Sectors) -> None:
    driver = with_many(place)
    sectors.bad, sectors.error = [place.slot_of(MANY[100])], errno.ENOMEM
    for _ in range(3):
        assert driver.read([MANY[100]])[0].results == (
            ChunkResult(Outcome.FAILED, Reason.INTERNAL),
        )
        assert served(driver, MANY[:8]) == [True] * 8
    assert driver.present([MANY[100]]) == [True]
    place.check_books()


def replayed(place: DiskPlace) -> frames.Image:
    """What the next start would be told."""
    assert place.tier is not None
    assert place.tier.drain(30)
    return frames.replay(place.journal.read_bytes())


def test_a_failed_read_again_with_nothing_served_meanwhile(
    place: DiskPlace, sectors: Sectors
) -> None:
    """Then it may be the drive: nothing is given up for that."""
    driver = with_many(place)
    sectors.bad = [place.slot_of(MANY[0])]
    for _ in range(4):
        assert served(driver, MANY[:1]) == [False]
    assert driver.present(MANY[:1]) == [True]
    assert served(driver, MANY[1:2]) == [True]
    assert served(driver, MANY[:1]) == [False]
    assert driver.present(MANY[:1]) == [False], "others can be read, so it is the sector"


def test_an_outage_of_the_whole_drive_sets_nothing_aside(
    place: DiskPlace, sectors: Sectors
) -> None:
    """Every chunk that was asked for meanwhile would be lost; and a drive that fails is not
    asked for each of them."""
    driver = with_many(place)
    served(driver, MANY)
    sectors.outage = True
    for _ in range(4):
        sectors.num_reads = 0
        assert served(driver, MANY) == [False] * 256
        assert sectors.num_reads <= 8, "each one singly"
        assert served(driver, MANY[7:8]) == [False]
    assert driver.present(MANY) == [True] * 256
    sectors.outage = False
    assert served(driver, MANY) == [True] * 256
    assert place.context.metrics.value("quarantined_chunks") == 0
    place.check_books()


def test_a_sector_that_was_read_well_since_is_as_good_as_any(
    place: DiskPlace, sectors: Sectors
) -> None:
    """What failed once, long ago, was set aside at the next hiccup."""
    driver = with_many(place)
    bad = [place.slot_of(MANY[100])]
    for _ in range(3):
        sectors.bad = bad
        assert served(driver, MANY) == [idx != 100 for idx in range(256)]
        sectors.bad = []
        assert served(driver, MANY) == [True] * 256
    assert place.context.metrics.value("quarantined_chunks") == 0
    sectors.bad = bad
    served(driver, MANY)
    served(driver, MANY)
    assert place.context.metrics.value("quarantined_chunks") == 1


def test_three_unreadable_sectors_beside_each_other_cost_no_more_than_those(
    place: DiskPlace, sectors: Sectors
) -> None:
    """What lay behind them in the same call was not even tried, and yet counted as unreadable: at
    the second time 153 good chunks were set aside."""
    driver = with_many(place)
    sectors.bad = [place.slot_of(key) for key in MANY[100:103]]
    served(driver, MANY)
    served(driver, MANY)
    bad = [100 <= idx < 103 for idx in range(256)]
    lost = [not here for here in driver.present(MANY)]
    assert sum(lost) <= 3
    assert all(unreadable for unreadable, gone in zip(bad, lost, strict=True) if gone)
    assert place.reason("quarantined_chunks", "io_error") <= 3


def test_a_second_outage_costs_no_chunk_that_was_not_even_asked_for(
    place: DiskPlace, sectors: Sectors
) -> None:
    """A drive that fails now and then: what a call had not come to counted as unreadable. After
    two outages with one good read between them all of a prompt was set aside."""
    driver = with_many(place)
    driver.write([key_of("another")])
    for outage in (True, False, True):
        sectors.outage = outage
        assert served(driver, [key_of("another")] if not outage else MANY)[0] is not outage
    sectors.outage = False
    assert sum(driver.present(MANY)) >= 250
    assert place.context.metrics.value("quarantined_chunks") <= 6
