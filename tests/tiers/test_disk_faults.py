"""Fail the N-th call to the operating system, for every N.

Whatever fails, and once or for good: every job is reported, no wrong byte is served, and what
the tier counts is what lies on the medium.
"""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.core.record import record_bytes
from stepwell.core.types import Chunk, Direction, Lookup, Outcome
from stepwell.errors import ConfigError
from stepwell.testing import Driver, buffer_of, key_of, payload_of
from stepwell.tiers import blockio, directory, disk, files

from .conftest import DiskPlace
from .stalling import stalled_calls

CALLS = ("open preadv pwritev pread pwrite replace rename unlink makedirs rmdir statvfs listdir "
         "scandir utime ftruncate").split()  # fmt: skip
KEYS = [key_of(idx) for idx in range(10)]
SIZE = 5000
NEED_SPACE = tuple("open pwritev pwrite replace rename makedirs utime".split())


class FaultyOs:
    """The module `os`, whose N-th call (and, if it is to last, every later one) fails.

    Args:
        failing: number of the call, from 1; 0 for none.
        error: errno.
        lasting: whether the calls after it fail as well, until `heal`.
        only: names of the calls that are counted and fail.
    """

    def __init__(
        self, failing: int, error: int, lasting: bool, only: tuple[str, ...] = tuple(CALLS)
    ) -> None:
        self.calls: list[str] = []
        self.healed = False
        self._failing = failing
        self._error = error
        self._lasting = lasting
        self._only = only
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self._only:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.calls.append(name)
                number = len(self.calls)
            hit = number >= self._failing if self._lasting else number == self._failing
            if self._failing and hit and not self.healed:
                raise OSError(self._error, os.strerror(self._error))
            return real(*args, **kwargs)

        return call

    def heal(self) -> None:
        self.healed = True

    def put_in(self, patch: pytest.MonkeyPatch) -> None:
        for module in (blockio, directory, disk, files):
            patch.setattr(module, "os", self)


def spoil(path: Path) -> None:
    """A flipped byte in the payload, if the record is there."""
    if path.exists():
        content = bytearray(path.read_bytes())
        content[4096] ^= 0xFF
        path.write_bytes(content)


def live(driver: Driver, place: DiskPlace) -> set[bytes]:
    """A short life with every kind of operation; returns the keys that must not be served."""
    deleted = set()
    driver.write(KEYS[:4])
    check_reads(driver, KEYS[:5])
    driver.write(KEYS[4:7])  # evicts
    if place.record(KEYS[5]).exists():
        spoil(place.record(KEYS[5]))
        check_reads(driver, [KEYS[5], KEYS[4]], spoiled=KEYS[5])  # sets aside
    driver.write([KEYS[5]])
    if driver.tier.delete([KEYS[4]]):
        deleted.add(KEYS[4])
    assert driver.tier.contains([KEYS[4]]) == [Lookup.MISS]
    gone = place.record(KEYS[6])
    if gone.exists():
        gone.unlink()
    check_reads(driver, [KEYS[6]])  # vanished
    driver.touch(KEYS)
    driver.write(KEYS[7:])
    return deleted


def check_reads(driver: Driver, keys: list[bytes], spoiled: bytes = b"") -> None:
    result, contents = driver.read(keys)
    for key, chunk_result, content in zip(keys, result.results, contents, strict=True):
        if chunk_result.outcome is Outcome.DONE:
            assert key != spoiled
            assert content == payload_of(key, SIZE)


def count_calls(place: DiskPlace, only: tuple[str, ...]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        system = FaultyOs(0, 0, False, only)
        system.put_in(patch)
        driver = place.open(5, payload_bytes=SIZE, num_threads=1)
        live(driver, place)
        place.check_books()
        place.close()
    assert set(only) - {"rmdir", "pread"} <= set(system.calls)
    return len(system.calls)


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize(
    ("error", "only"),
    [(errno.EIO, tuple(CALLS)), (errno.ENOSPC, NEED_SPACE)],
    ids=["EIO", "ENOSPC"],
)
def test_any_call_may_fail(
    memory_path: Path, error: int, only: tuple[str, ...], lasting: bool
) -> None:
    """Open, write, read, evict, set aside, delete, touch: the N-th call fails, for every N."""
    number_of_calls = count_calls(DiskPlace(memory_path / "counted"), only)
    assert number_of_calls > 50
    for failing in range(1, number_of_calls + 1):
        place = DiskPlace(memory_path / f"fail{failing}")
        with pytest.MonkeyPatch.context() as patch:
            system = FaultyOs(failing, error, lasting, only)
            system.put_in(patch)
            deleted: set[bytes] = set()
            try:
                driver = place.open(5, payload_bytes=SIZE, num_threads=1)
                deleted = live(driver, place)
            except ConfigError:
                assert place.tier is None
            system.heal()
            try:
                check_after(place, deleted, lasting=lasting)
            except BaseException:
                print(f"failing={failing} call={system.calls[failing - 1]}")
                raise
            finally:
                place.close()


def check_after(place: DiskPlace, deleted: set[bytes], *, lasting: bool) -> None:
    """The medium is well again."""
    if place.tier is None:
        driver = place.open(5, payload_bytes=SIZE, num_threads=1)  # the lock was given back
    else:
        driver = Driver(place.tier, SIZE)
        # Notices that its file is gone, and frees what could not be freed before.
        check_reads(driver, KEYS[6:7])
        driver.write([key_of("another")])
        assert place.tier.drain(30)
        assert place.tier.used_bytes == place.lying_bytes()
        assert place.tier.used_bytes <= 5 * (4096 + 8192)
        assert [p for p in place.files("roots", "quarantine") if p.lstat().st_size == 0] == []
        assert lasting or place.files("partial") == []
    assert not any(driver.present(deleted))
    # Nothing is stuck: ten chunks go through a tier for five.
    for key in KEYS * 2:
        (result,) = driver.write([key])
        assert result.outcome is not Outcome.FAILED
    assert driver.write([key_of("last")])[0].outcome is Outcome.DONE
    check_reads(driver, KEYS)
    assert driver.read([key_of("last")])[0].done
    place.tier.drain(30)
    assert place.tier.used_bytes == place.lying_bytes() <= 5 * (4096 + 8192)
    driver = place.open(5, payload_bytes=SIZE, num_threads=1)
    place.check_books()
    check_reads(driver, KEYS)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Break named calls from now on: ``system = broken(errno.EIO, "unlink")``; mend: `heal`."""

    def break_calls(error: int, *names: str) -> FaultyOs:
        system = FaultyOs(1, error, True, names)
        system.put_in(monkeypatch)
        return system

    return break_calls  # type: ignore[return-value]


def test_files_that_cannot_be_removed_stay_counted(place: DiskPlace, broken: Any) -> None:
    """A failed unlink gave its bytes back to the books but not to the medium: a tier on a file
    system that had become read-only forgot, write by write, everything that it could still read,
    and one with a single stubborn file grew beyond its capacity."""
    driver = place.open(4)
    driver.write(KEYS[:4])
    system = broken(errno.EROFS, "unlink")
    for key in KEYS[4:]:
        assert driver.write([key])[0].outcome is Outcome.FULL
    assert driver.present(KEYS[:4]) == [True] * 4
    assert driver.read(KEYS[:4])[0].done
    assert place.context.metrics.value("evicted_chunks") == 0
    assert driver.tier.delete(KEYS[:1]) == 1
    place.check_books()
    assert driver.present(KEYS[:1]) == [False], "deleted, although its bytes still count"
    assert driver.write([KEYS[4]])[0].outcome is Outcome.FULL
    system.heal()
    assert driver.write([KEYS[4]])[0].outcome is Outcome.DONE
    assert driver.present(KEYS[:5]) == [False, True, True, True, True]
    place.check_books()


def test_a_partial_file_that_cannot_be_removed_is_counted_and_goes_later(
    place: DiskPlace, broken: Any
) -> None:
    driver = place.open(4)
    driver.write(KEYS[:3])
    system = broken(errno.EIO, "replace", "unlink")
    assert driver.write([KEYS[3]])[0].outcome is Outcome.FAILED
    assert len(place.files("partial")) == 1
    assert driver.tier.used_bytes == place.lying_bytes()
    system.heal()
    assert driver.write([KEYS[3]])[0].outcome is Outcome.DONE
    assert driver.present(KEYS[:4]) == [True] * 4
    place.check_books()


def test_an_unreadable_file_is_neither_lost_nor_set_aside(place: DiskPlace, broken: Any) -> None:
    """EIO of the medium says nothing about the record: it is a failure, and tried again later."""
    driver = place.open(4)
    driver.write(KEYS[:4])
    for calls in (("preadv",), ("open",), ("open", "lstat")):
        system = broken(errno.EIO, *calls)
        result, _ = driver.read(KEYS[:4])
        assert {(r.outcome, r.reason) for r in result.results} == {(Outcome.FAILED, "io_error")}
        system.heal()
        assert driver.read(KEYS[:4])[0].done
    assert place.files("quarantine") == []
    assert place.reason("read_chunks", "io_error") == 12


def test_a_record_that_came_back_after_it_was_found_missing(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a read that found no file and its report, an eviction and a new write of the same
    chunk had ended: the new record was forgotten and lay there uncounted for ever."""

    def find_nothing(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "gone")

    driver = place.open(4)
    driver.write(KEYS[:2])
    with monkeypatch.context() as patch:
        patch.setattr(disk, "read_record", find_nothing)
        assert driver.read(KEYS[:1])[0].results[0].reason == "vanished"
    place.check_books()
    assert driver.write(KEYS[:1])[0].outcome is Outcome.DONE
    place.check_books()


def test_what_cannot_be_set_aside_is_removed(place: DiskPlace, broken: Any) -> None:
    driver = place.open(4)
    driver.write(KEYS[:2])
    spoil(place.record(KEYS[0]))
    broken(errno.EIO, "rename")
    assert driver.read(KEYS[:2])[0].results[0].reason == "checksum"
    assert not place.record(KEYS[0]).exists()
    place.check_books()
    assert driver.write(KEYS[:1])[0].outcome is Outcome.DONE


def test_a_file_system_that_does_not_say_how_full_it_is(place: DiskPlace, broken: Any) -> None:
    """The write itself then shows whether there is room."""
    driver = place.open(4, min_free_bytes=1 << 20)
    broken(errno.EIO, "statvfs")
    assert driver.write(KEYS[:2]) == driver.write(KEYS[2:4])


def test_free_space_is_not_promised_twice(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight threads that ask at once, with room for three above what must be left free: each saw
    the free space before any of them had used it, and all of them took it."""
    size = record_bytes(SIZE)
    min_free_bytes = 1 << 20

    class AlmostFull:
        f_frsize = 1
        f_blocks = 1 << 40

        @property
        def f_bavail(self) -> int:
            time.sleep(0.01)  # others ask meanwhile
            return min_free_bytes + 3 * size + size // 2

    class AlmostFullOs(FaultyOs):
        def __getattr__(self, name: str) -> Any:
            return (lambda _: AlmostFull()) if name == "statvfs" else getattr(os, name)

    AlmostFullOs(0, 0, False).put_in(monkeypatch)
    driver = place.open(64, payload_bytes=SIZE, min_free_bytes=min_free_bytes, num_threads=8)
    with stalled_calls(disk, "write_record"):
        for key in KEYS[:8]:
            chunks = driver.write_chunks({key: payload_of(key, SIZE)})
            driver.submit(Direction.WRITE, chunks)
        give_up_s = time.monotonic() + 5
        while driver.outstanding > 3 and time.monotonic() < give_up_s:
            driver.collect()
        assert driver.outstanding == 3
    place.tier.drain(30)
    assert place.reason("write_chunks", "min_free") == 5
    assert len(place.files("roots")) == 3


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


def test_short_writes_and_reads_go_on(place: DiskPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may move less than asked; the rest follows, in whole pages."""

    class ShortOs(FaultyOs):
        def __getattr__(self, name: str) -> Any:
            real = getattr(os, name)
            if name not in ("preadv", "pwritev"):
                return real

            def one_page(fd: int, buffers: list[memoryview], offset: int) -> int:
                first = next(buffer for buffer in buffers if len(buffer))
                moved: int = real(fd, [first[:4096]], offset)
                return moved

            return one_page

    for direct in (True, False):
        ShortOs(0, 0, False).put_in(monkeypatch)
        monkeypatch.setattr(disk, "probe_direct", lambda _, direct=direct: direct)
        for length in (8192, 5000, 70_000):
            driver = place.open(4, payload_bytes=length)
            key = key_of(f"{direct}{length}")
            assert driver.write([key])[0].outcome is Outcome.DONE
            assert driver.read([key])[1] == [payload_of(key, length)]


def test_jobs_that_fail_in_an_unforeseen_way_are_reported(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours: the chunk is FAILED/INTERNAL, its room is given back, the rest goes on."""

    def bug(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    driver = place.open(4)
    driver.write(KEYS[:1])
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_record", bug)
        patch.setattr(disk, "read_record", bug)
        for _ in range(3):
            assert driver.write(KEYS[1:3])[0].reason == "internal"
            assert driver.read(KEYS[:1])[0].results[0].outcome is Outcome.FAILED
    place.check_books()
    assert driver.write(KEYS[1:4])[2].outcome is Outcome.DONE
    target = buffer_of(driver.payload_bytes)
    assert driver.wait(driver.submit(Direction.READ, [Chunk(KEYS[0], target)])).done
