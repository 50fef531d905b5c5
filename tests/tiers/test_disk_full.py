"""Room: a file system that is really full, or really read-only; and the capacity, at every instant.

The small file systems are made for these tests, where that is allowed.
"""

import contextlib
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepwell.core.types import Chunk, Direction, Outcome, Reason
from stepwell.errors import ConfigError
from stepwell.testing import Driver, buffer_of, key_of, payload_of
from stepwell.tiers.disk import slot_cost_bytes

from .conftest import DiskPlace

MIB = 1 << 20
FS_BYTES = 64 * MIB
PAYLOAD_BYTES = 256 * 1024
COST_BYTES = slot_cost_bytes(PAYLOAD_BYTES)
KEYS = [key_of(f"c{idx}") for idx in range(8)]


class SmallFileSystem:
    """A mounted file system of 64 MiB."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path

    def free_bytes(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def fill(self, leave_bytes: int) -> Path:
        """Somebody else's file that takes all space but ``leave_bytes``."""
        ballast = self.path / "ballast"
        with open(ballast, "ab") as file, contextlib.suppress(OSError):
            while self.free_bytes() > leave_bytes:
                os.write(file.fileno(), bytes(min(MIB, self.free_bytes() - leave_bytes + 4096)))
        return ballast


def run(*command: str) -> str:
    """Empty if it went well, else what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else f"{command[0]}: {done.stderr.strip()[:200]}"


@contextlib.contextmanager
def mounted(kind: str, image: Path, target: Path) -> Iterator[str]:
    """Mount a fresh small file system; gives what went wrong, or an empty text."""
    target.mkdir()
    if kind == "tmpfs":
        problem = run("mount", "-t", "tmpfs", "-o", f"size={FS_BYTES}", "none", str(target))
    else:
        with open(image, "wb") as file:
            file.truncate(FS_BYTES)
        problem = run(f"mkfs.{kind}", "-q", "-F", "-m", "0", "-N", "512", str(image)) or run(
            "mount", "-o", "loop", str(image), str(target)
        )
    try:
        yield problem
    finally:
        if not problem and run("umount", str(target)):
            run("umount", "-l", str(target))


@contextlib.contextmanager
def small_place(kind: str, tmp_path: Path) -> Iterator[tuple[SmallFileSystem, DiskPlace]]:
    with mounted(kind, tmp_path / "image", tmp_path / "small") as problem:
        if problem:
            pytest.skip(f"no small {kind} can be mounted here ({problem})")
        place = DiskPlace(tmp_path / "small" / "kv")
        try:
            yield SmallFileSystem(kind, tmp_path / "small"), place
        finally:
            place.close()


@pytest.fixture(params=["ext4", "tmpfs"])
def both(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[SmallFileSystem, DiskPlace]]:
    with small_place(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def small(both: tuple[SmallFileSystem, DiskPlace]) -> SmallFileSystem:
    return both[0]


@pytest.fixture
def full_place(both: tuple[SmallFileSystem, DiskPlace]) -> DiskPlace:
    return both[1]


def open_large(place: DiskPlace, **settings: int) -> Driver:
    return place.open(capacity_bytes=40 * MIB, payload_bytes=PAYLOAD_BYTES, **settings)


@contextlib.contextmanager
def watched(look: Callable[[], int]) -> Iterator[list[int]]:
    """What another thread sees meanwhile, again and again."""
    seen: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append(look())
            stop.wait(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        stop.set()
        watcher.join()


# A full drive.


def test_on_a_full_disk_writes_are_refused_and_hits_go_on(
    small: SmallFileSystem, full_place: DiskPlace
) -> None:
    """Others took all space: refused and counted, nothing hangs, nothing is left; room again,
    and it goes on."""
    driver = open_large(full_place, num_threads=8)
    driver.write(KEYS)
    lease = full_place.context.leases.acquire(KEYS, 60.0)
    ballast = small.fill(0)
    more = [key_of(f"more{idx}") for idx in range(80)]
    results = driver.write(more)
    refused = [result for result in results if result.outcome is not Outcome.DONE]
    assert refused
    assert {r.outcome for r in refused} == {Outcome.FULL}
    assert {r.reason for r in refused} <= {Reason.MIN_FREE, Reason.NO_SPACE}
    assert full_place.context.metrics.value("write_chunks", outcome="full") == len(refused)
    result, contents = driver.read(KEYS)
    assert result.done
    assert contents == [payload_of(key, PAYLOAD_BYTES) for key in KEYS]
    full_place.check_books()
    ballast.unlink()
    full_place.clock.advance(5.0)
    assert {r.outcome for r in driver.write(more)} == {Outcome.DONE}
    assert driver.read([*KEYS, *more])[0].done
    full_place.check_books()
    lease.release()


def test_on_a_full_disk_what_is_there_is_written_over(
    small: SmallFileSystem, full_place: DiskPlace
) -> None:
    """What the tier has it keeps: new chunks take the place of old ones."""
    driver = open_large(full_place)
    driver.write([key_of(f"w{idx}") for idx in range(40)])
    assert full_place.tier is not None
    allocated_bytes = full_place.tier.allocated_bytes
    small.fill(0)
    for begin in range(0, 80, 8):
        keys = [key_of(f"new{begin + idx}") for idx in range(8)]
        assert {r.outcome for r in driver.write(keys)} == {Outcome.DONE}
        assert driver.read(keys)[0].done
    assert full_place.tier.allocated_bytes == allocated_bytes
    assert len(full_place.tier) == allocated_bytes // COST_BYTES
    full_place.check_books()


def test_a_full_disk_is_opened_and_served(small: SmallFileSystem, full_place: DiskPlace) -> None:
    """A restart on a disk without a single free byte failed to open: the probe for O_DIRECT and
    the owner's process id could not be written. What lies there can be read all the same."""
    open_large(full_place).write(KEYS)
    for lost in (False, True):
        full_place.close()
        if lost:
            full_place.journal.unlink()
        small.fill(0)
        driver = open_large(full_place)
        assert driver.read(KEYS)[0].done
        assert driver.write([key_of("x")])[0].outcome is not Outcome.FAILED
        driver.write(KEYS)
        full_place.check_books()


def test_a_journal_for_which_there_is_no_space(
    small: SmallFileSystem, full_place: DiskPlace
) -> None:
    """Nothing that was reported is lost by that, with a restart in between and without."""
    driver = open_large(full_place, num_threads=1)
    keys = [key_of(f"w{idx}") for idx in range(60)]
    driver.write(keys)
    small.fill(0)
    for number in range(300):
        driver.touch(keys)
        driver.write([key_of(f"n{number}")])
    present = [key for key in keys if driver.present([key])[0]]
    present += [key_of(f"n{n}") for n in range(300) if driver.present([key_of(f"n{n}")])[0]]
    driver = open_large(full_place, num_threads=1)
    assert driver.present(present) == [True] * len(present)
    assert driver.read(present)[0].done
    full_place.check_books()


def test_no_room_for_another_file(small: SmallFileSystem, full_place: DiskPlace) -> None:
    """Bytes are left but no inodes: the system says ENOSPC, the tier goes on with what it has."""
    driver = open_large(full_place)
    driver.write(KEYS)
    lease = full_place.context.leases.acquire(KEYS, 60.0)
    if small.kind == "tmpfs":
        assert run("mount", "-o", "remount,nr_inodes=60", str(small.path)) == ""
    (small.path / "others").mkdir()
    with contextlib.suppress(OSError):
        for idx in range(1000):
            (small.path / "others" / str(idx)).touch()
    results = driver.write([key_of(f"w{idx}") for idx in range(60)])
    refused = {(r.outcome, r.reason) for r in results if r.outcome is not Outcome.DONE}
    assert refused == {(Outcome.FULL, Reason.NO_SPACE)}
    assert driver.read(KEYS)[0].done
    full_place.check_books()
    shutil.rmtree(small.path / "others")
    full_place.clock.advance(5.0)
    assert {r.outcome for r in driver.write([key_of(f"w{idx}") for idx in range(60)])} == {"done"}
    lease.release()


@pytest.mark.parametrize("kind", ["ext2", "ext3"])
def test_a_file_system_that_cannot_preallocate(kind: str, tmp_path: Path) -> None:
    """The C library then writes a byte to every block, which a file that was opened with O_DIRECT
    refuses: nothing could ever be written there."""
    with small_place(kind, tmp_path) as (_, place):
        driver = open_large(place)
        keys = [key_of(idx) for idx in range(40)]
        assert {r.outcome for r in driver.write(keys)} == {Outcome.DONE}
        assert driver.read(keys)[1] == [payload_of(key, PAYLOAD_BYTES) for key in keys]
        for extent in place.extents():
            assert os.stat(extent.path).st_blocks * 512 >= extent.size_bytes, "a hole"
        place.check_books()
        assert open_large(place).present(keys) == [True] * 40


# Free space that is to be left.


def test_min_free_is_kept_at_every_moment(small: SmallFileSystem, full_place: DiskPlace) -> None:
    """Three times as much as fits is written by eight threads, and watched."""
    min_free_bytes = 20 * MIB
    driver = full_place.open(
        capacity_bytes=36 * MIB, min_free_bytes=min_free_bytes, num_threads=8,
        payload_bytes=PAYLOAD_BYTES,
    )  # fmt: skip
    with watched(small.free_bytes) as seen:
        for begin in range(0, 400, 20):
            driver.write([key_of(f"w{idx}") for idx in range(begin, begin + 20)])
    # The file system's own bookkeeping takes some of it, which no tier can know before.
    assert min(seen) >= min_free_bytes - MIB
    assert driver.tier.used_bytes > 15 * MIB
    full_place.check_books()


def test_what_others_take_is_given_back(small: SmallFileSystem, full_place: DiskPlace) -> None:
    """The free space that must be left is made at the next write, whoever used it up."""
    driver = open_large(full_place, min_free_bytes=8 * MIB, num_threads=1)
    driver.write([key_of(f"w{idx}") for idx in range(160)])
    assert full_place.tier is not None
    before_bytes = full_place.tier.allocated_bytes
    assert before_bytes > 39 * MIB
    ballast = small.fill(4 * MIB)
    full_place.clock.advance(5.0)
    assert driver.write([key_of("new")])[0].outcome is Outcome.DONE
    assert small.free_bytes() >= 8 * MIB - 64 * 1024
    # Space is given back in whole extents, a quarter of so small a capacity each.
    assert before_bytes - full_place.tier.allocated_bytes <= 10 * MIB + MIB
    assert full_place.context.metrics.value("evicted_chunks", reason="min_free") > 0
    full_place.check_books()
    ballast.unlink()
    full_place.clock.advance(5.0)
    driver.write([key_of(f"more{idx}") for idx in range(40)])
    assert full_place.tier.allocated_bytes > before_bytes - 2 * MIB, "and taken again"
    full_place.check_books()


def test_nothing_is_emptied_for_nothing(small: SmallFileSystem, full_place: DiskPlace) -> None:
    """If giving back all of it would not help, none of it is."""
    driver = full_place.open(
        capacity_bytes=10 * MIB, min_free_bytes=40 * MIB, payload_bytes=PAYLOAD_BYTES
    )
    driver.write([key_of(f"w{idx}") for idx in range(60)])
    assert full_place.tier is not None
    before = (full_place.tier.allocated_bytes, len(full_place.tier))
    assert before[1] == before[0] // COST_BYTES > 20
    small.fill(20 * MIB)
    for idx in range(5):
        full_place.clock.advance(5.0)
        assert driver.write([key_of(f"new{idx}")])[0].outcome is Outcome.DONE, (
            "what it has it keeps"
        )
    assert (full_place.tier.allocated_bytes, len(full_place.tier)) == before
    assert full_place.context.metrics.value("evicted_chunks", reason="min_free") == 0
    full_place.check_books()


def test_space_is_given_back_while_it_is_in_use(
    small: SmallFileSystem, full_place: DiskPlace
) -> None:
    """Reads and writes of eight threads go on while others fill and empty the disk."""
    driver = open_large(full_place, min_free_bytes=6 * MIB, num_threads=8)
    rng = random.Random(2)
    jobs = []
    for step in range(60):
        keys = [key_of(f"w{rng.randrange(200)}") for _ in range(4)]
        data = {key: payload_of(key, PAYLOAD_BYTES) for key in keys}
        jobs.append(driver.submit(Direction.WRITE, driver.write_chunks(data)))
        reads = [Chunk(key, buffer_of(PAYLOAD_BYTES)) for key in keys]
        jobs.append(driver.submit(Direction.READ, reads))
        if step % 10 == 4:
            small.fill(2 * MIB)
        if step % 10 == 9:
            (small.path / "ballast").unlink(missing_ok=True)
        full_place.clock.advance(2.0)
        while len(jobs) > 4:
            result = driver.wait(jobs.pop(0))
            assert {r.outcome for r in result.results} <= {"done", "miss", "full"}
    for job in jobs:
        driver.wait(job)
    full_place.check_books()
    assert full_place.context.metrics.value("quarantined_chunks") == 0
    assert full_place.context.metrics.value("internal_errors") == 0


# The capacity.


def test_a_capacity_that_does_not_fit(full_place: DiskPlace) -> None:
    with pytest.raises(ConfigError, match="larger than the file system"):
        full_place.open(capacity_bytes=FS_BYTES + 1)


def test_the_capacity_is_kept_at_every_instant(place: DiskPlace) -> None:
    """All files below the directory together, the journal and what is being made included; in a
    seeded random history of several slot sizes and roots, with restarts, watched from another
    thread."""
    rng = random.Random(11)
    sizes = (1, 5000, 20_000, 70_000)
    capacity_bytes = 12 * slot_cost_bytes(20_000)
    with watched(lambda: lying_below(place.path)) as seen:
        for restart in range(3):
            driver = place.open(capacity_bytes=capacity_bytes, num_threads=4)
            jobs = []
            for step in range(120):
                root = f"root {rng.randrange(4) + restart}"
                keys = [key_of(rng.randrange(60), root) for _ in range(rng.randrange(1, 8))]
                size = sizes[(step // 15) % 4] if rng.random() < 0.9 else rng.choice(sizes)
                data = {key: payload_of(key, size) for key in keys}
                jobs.append(driver.submit(Direction.WRITE, driver.write_chunks(data)))
                if rng.random() < 0.3:
                    driver.tier.delete(keys[:1])
                reads = [Chunk(key, buffer_of(size)) for key in keys]
                jobs.append(driver.submit(Direction.READ, reads))
                while len(jobs) > 6:
                    driver.wait(jobs.pop(0))
            for job in jobs:
                driver.wait(job)
            place.check_books()
    assert len(seen) > 30
    assert capacity_bytes // 2 < max(seen) <= capacity_bytes


def lying_below(path: Path) -> int:
    """Bytes of all files but the few that a store has whatever its size.

    Looked at until two looks agree: one that takes a while would count an extent that was dropped
    meanwhile and the one that was made in its place.
    """
    before = None
    while (now := files_below(path)) != before:
        before = now
    return sum(now.values())


def files_below(path: Path) -> dict[str, int]:
    found = {}
    for base, _, names in os.walk(path):
        for name in names:
            if name not in ("LOCK", "stepwell.json"):
                with contextlib.suppress(OSError):
                    found[os.path.join(base, name)] = os.lstat(os.path.join(base, name)).st_size
    return found


def test_many_small_records(place: DiskPlace) -> None:
    """A journal of many rows, made anew beside the old one, within the capacity as well."""
    count = 3000
    capacity_bytes = count * slot_cost_bytes(1)
    driver = place.open(capacity_bytes=capacity_bytes, num_threads=2)
    with watched(lambda: lying_below(place.path)) as seen:
        for begin in range(0, 3 * count, 250):
            driver.write([key_of(begin + idx) for idx in range(250)], 1)
            driver.touch([key_of(begin + idx) for idx in range(250)])
    assert max(seen) <= capacity_bytes
    assert place.tier is not None
    assert len(place.tier) == count
    place.check_books()
    driver = place.open(capacity_bytes=capacity_bytes)
    assert sum(driver.present([key_of(idx) for idx in range(2 * count, 3 * count)])) == count


def test_whoever_waits_for_room_does_not_hold_up_reads(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive that takes long to make an extent: hits are read meanwhile."""
    driver = place.open(16, num_threads=4)
    driver.write(KEYS[:2])
    assert place.tier is not None
    making = threading.Event()
    go_on = threading.Event()
    real = os.posix_fallocate

    def slow(fd: int, offset: int, length: int) -> None:
        making.set()
        go_on.wait(30)
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    keys = [key_of(f"n{idx}") for idx in range(8)]
    data = {key: payload_of(key, 8192) for key in keys}
    job = driver.submit(Direction.WRITE, driver.write_chunks(data))
    assert making.wait(30)
    begun_s = time.monotonic()
    assert driver.read(KEYS[:2])[0].done
    assert driver.present(KEYS[:2]) == [True, True]
    assert time.monotonic() - begun_s < 25
    go_on.set()
    assert driver.wait(job).done


def test_a_disk_that_becomes_read_only(small: SmallFileSystem, full_place: DiskPlace) -> None:
    """As after an error of the drive: reads go on, writes fail and are counted; opening it says
    what is wrong. A tier on such a drive forgot, write by write, what it could still read."""
    place = full_place
    driver = place.open(16, payload_bytes=PAYLOAD_BYTES)
    driver.write(KEYS)
    # Files are open for writing, so that only an error makes it read-only; tmpfs knows none.
    if small.kind == "tmpfs":
        place.close()
        assert run("mount", "-o", "remount,ro", str(small.path)) == ""
    else:
        assert run("mount", "-o", "remount,abort", str(small.path)) == ""
        (result,) = driver.write([key_of("x")])
        assert (result.outcome, result.reason) == (Outcome.FAILED, Reason.IO_ERROR)
        assert place.context.metrics.value("write_chunks", reason="io_error") == 1
        assert {r.outcome for r in driver.write([key_of("x"), key_of("y")])} == {Outcome.FAILED}
        for _ in range(3):
            result, contents = driver.read(KEYS)
            assert result.done
            assert contents == [payload_of(key, PAYLOAD_BYTES) for key in KEYS]
        assert place.context.metrics.value("internal_errors") == 0
        assert place.context.metrics.value("evicted_chunks") == 0
        place.close()
    with pytest.raises(ConfigError, match="Read-only file system") as caught:
        place.open(8, payload_bytes=PAYLOAD_BYTES)
    assert "\n" not in str(caught.value)


# The budget of writes.


def test_pressure_rises_as_the_budget_is_written_and_falls_as_days_pass(place: DiskPlace) -> None:
    """The tier itself refuses nothing: it says how scarce writing is."""
    day_bytes = 1 << 20
    status = os.statvfs(place.path.parent)
    budget = day_bytes / (status.f_blocks * status.f_frsize)

    def reopen() -> Driver:
        return place.open(16, drive_writes_per_day=budget, num_threads=1)

    driver = reopen()
    assert place.tier is not None
    begun_s = place.clock.wall()
    assert place.tier.pressure == 0.0
    pressures = []
    for number in range(230):
        assert driver.write([key_of(number)])[0].outcome is Outcome.DONE
        written_bytes = place.tier.wear.written_bytes
        left = (day_bytes - written_bytes) / (day_bytes / 2)
        pressures.append(place.tier.pressure)
        assert pressures[-1] == pytest.approx(min(1.0, max(0.0, 1.0 - left)), abs=0.02)
    assert pressures == sorted(pressures)
    assert (pressures[0], pressures[-1]) == (0.0, 1.0)
    assert place.tier.drain(30)
    debt_bytes = place.tier.wear.level_bytes
    assert debt_bytes < -(1 << 20)
    for _ in range(3):
        driver = reopen()
        wear = place.tier.wear
        assert place.tier.pressure == 1.0
        assert debt_bytes - (48 << 10) <= wear.level_bytes <= debt_bytes
        assert wear.first_s == begun_s
        assert written_bytes <= wear.written_bytes <= written_bytes + (64 << 10)
    place.clock.advance(86_400.0)
    assert place.tier.wear.level_bytes == pytest.approx(debt_bytes + day_bytes, abs=64 << 10)
    assert place.tier.pressure == 1.0, "a day's writing was too much, and that is remembered"
    place.close()
    place.clock.advance(86_400.0)
    driver = reopen()
    assert 0.0 < place.tier.pressure < 1.0
    place.clock.advance(86_400.0)
    assert place.tier.pressure == 0.0
    driver.write([key_of(f"more {number}") for number in range(16)])
    assert place.tier.pressure == 0.0
    place.check_books()


def test_a_budget_that_is_set_later_begins_without_debt(place: DiskPlace) -> None:
    """What was written while there was none was owed when there was one: nothing was admitted for
    as many days as that had been."""
    driver = place.open(16, num_threads=1)
    assert place.tier is not None
    for number in range(200):
        driver.write([key_of(number)])
    assert place.tier.pressure == 0.0
    written_bytes = place.tier.wear.written_bytes
    status = os.statvfs(place.path.parent)
    budget = (1 << 20) / (status.f_blocks * status.f_frsize)
    driver = place.open(16, drive_writes_per_day=budget, num_threads=1)
    assert place.tier.wear.written_bytes >= written_bytes
    assert place.tier.pressure == 0.0
    for number in range(100):
        driver.write([key_of(f"n{number}")])
    assert place.tier.pressure == 1.0
    place.open(16, num_threads=1)
    assert place.tier.pressure == 0.0
