"""A file system that is really full, or really read-only: a small one made for these tests."""

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.core.types import Outcome, Reason
from stepwell.testing import key_of, payload_of

from .conftest import DiskPlace

MIB = 1 << 20
FS_BYTES = 64 * MIB
PAYLOAD_BYTES = 256 * 1024
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
    if kind == "ext4":
        with open(image, "wb") as file:
            file.truncate(FS_BYTES)
        problem = run("mkfs.ext4", "-q", "-F", "-m", "0", "-N", "512", str(image)) or run(
            "mount", "-o", "loop", str(image), str(target)
        )
    else:
        problem = run("mount", "-t", "tmpfs", "-o", f"size={FS_BYTES}", "none", str(target))
    try:
        yield problem
    finally:
        if not problem and run("umount", str(target)):
            run("umount", "-l", str(target))


@pytest.fixture(params=["ext4", "tmpfs"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallFileSystem]:
    with mounted(request.param, tmp_path / "image", tmp_path / "small") as problem:
        if problem:
            pytest.skip(f"no small {request.param} can be mounted here ({problem})")
        yield SmallFileSystem(request.param, tmp_path / "small")


@pytest.fixture
def place(small: SmallFileSystem) -> Iterator[DiskPlace]:
    place = DiskPlace(small.path / "kv")
    yield place
    place.close()


def check_nothing_half_written(place: DiskPlace) -> None:
    place.check_books()
    assert all(path.stat().st_size > PAYLOAD_BYTES for path in place.files("roots"))


def test_on_a_full_disk_writes_are_refused_and_hits_go_on(
    small: SmallFileSystem, place: DiskPlace
) -> None:
    """Others took all space: refused and counted, nothing hangs, nothing is left; room again,
    and it goes on."""
    driver = place.open(capacity_bytes=40 * MIB, payload_bytes=PAYLOAD_BYTES, num_threads=8)
    driver.write(KEYS)
    lease = place.context.leases.acquire(KEYS, 60.0)
    ballast = small.fill(0)
    more = [key_of(f"more{idx}") for idx in range(40)]
    results = driver.write(more)
    assert {r.outcome for r in results} == {Outcome.FULL}
    assert {r.reason for r in results} <= {Reason.MIN_FREE, Reason.NO_SPACE}
    assert place.context.metrics.value("write_chunks", outcome="full") == 40
    result, contents = driver.read(KEYS)
    assert result.done
    assert contents == [payload_of(key, PAYLOAD_BYTES) for key in KEYS]
    check_nothing_half_written(place)
    ballast.unlink()
    assert {r.outcome for r in driver.write(more)} == {Outcome.DONE}
    assert driver.read([*KEYS, *more])[0].done
    lease.release()


def test_a_full_disk_is_opened_and_served(small: SmallFileSystem, place: DiskPlace) -> None:
    """A restart on a disk without a single free byte failed to open: the probe for O_DIRECT and
    the owner's process id could not be written. What lies there can be read all the same."""
    place.open(capacity_bytes=40 * MIB, payload_bytes=PAYLOAD_BYTES).write(KEYS)
    place.close()
    small.fill(0)
    driver = place.open(capacity_bytes=40 * MIB, payload_bytes=PAYLOAD_BYTES)
    assert driver.read(KEYS)[0].done
    assert driver.write([key_of("x")])[0].outcome is not Outcome.FAILED
    check_nothing_half_written(place)


def test_min_free_is_kept_at_every_moment(small: SmallFileSystem, place: DiskPlace) -> None:
    """Three times as much as fits is written by eight threads, and watched."""
    min_free_bytes = 20 * MIB
    driver = place.open(
        capacity_bytes=36 * MIB, min_free_bytes=min_free_bytes, num_threads=8,
        payload_bytes=PAYLOAD_BYTES,
    )  # fmt: skip
    seen: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append(small.free_bytes())
            stop.wait(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for begin in range(0, 400, 20):
            driver.write([key_of(f"w{idx}") for idx in range(begin, begin + 20)])
    finally:
        stop.set()
        watcher.join()
    # Directories take some of it, which no tier can know before.
    assert min(seen) >= min_free_bytes - MIB
    assert driver.tier.used_bytes > 15 * MIB
    check_nothing_half_written(place)


def test_what_others_take_is_given_back_by_eviction(
    small: SmallFileSystem, place: DiskPlace
) -> None:
    """The free space that must be left is made at the next write, whoever used it up."""
    driver = place.open(
        capacity_bytes=40 * MIB, min_free_bytes=8 * MIB, payload_bytes=PAYLOAD_BYTES
    )
    driver.write([key_of(f"w{idx}") for idx in range(100)])
    before = driver.tier.used_bytes
    ballast = small.fill(4 * MIB)
    assert driver.write([key_of("new")])[0].outcome is Outcome.DONE
    assert small.free_bytes() >= 8 * MIB - 64 * 1024
    assert before - driver.tier.used_bytes < 8 * MIB, "no more than needed"
    ballast.unlink()
    # If emptying the whole tier would not help, nothing is evicted.
    used_bytes = driver.tier.used_bytes
    with open(small.path / "ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, small.free_bytes() - MIB)
    driver.tier.delete([key_of(f"w{idx}") for idx in range(100)])
    driver.tier.drain(30)
    with open(small.path / "ballast2", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(small.free_bytes() - MIB, 1))
    used_bytes = driver.tier.used_bytes
    (result,) = driver.write([key_of("newer")])
    assert (result.outcome, result.reason) == (Outcome.FULL, Reason.MIN_FREE)
    assert driver.tier.used_bytes == used_bytes > 0
    assert driver.read([key_of("new")])[0].done


def test_no_room_for_another_file(small: SmallFileSystem, place: DiskPlace) -> None:
    """Bytes are left but no inodes: the system says ENOSPC, the tier goes on with what it has."""
    driver = place.open(capacity_bytes=40 * MIB, payload_bytes=PAYLOAD_BYTES)
    driver.write(KEYS)
    if small.kind == "tmpfs":
        assert run("mount", "-o", "remount,nr_inodes=60", str(small.path)) == ""
    (small.path / "others").mkdir()
    with contextlib.suppress(OSError):
        for idx in range(1000):
            (small.path / "others" / str(idx)).touch()
    results = driver.write([key_of(f"w{idx}") for idx in range(8)])
    assert {(r.outcome, r.reason) for r in results} == {(Outcome.FULL, Reason.NO_SPACE)}
    assert driver.read(KEYS)[0].done
    check_nothing_half_written(place)
    shutil.rmtree(small.path / "others")
    assert driver.write([key_of("w0")])[0].outcome is Outcome.DONE


def test_a_capacity_that_does_not_fit(place: DiskPlace) -> None:
    from stepwell.errors import ConfigError

    with pytest.raises(ConfigError, match="larger than the file system"):
        place.open(capacity_bytes=FS_BYTES + 1)


def test_a_disk_that_becomes_read_only(small: SmallFileSystem, place: DiskPlace) -> None:
    """As after an error of the drive: reads go on, writes fail and are counted, nothing is
    forgotten; opening it says what is wrong."""
    from stepwell.errors import ConfigError

    driver = place.open(16, payload_bytes=PAYLOAD_BYTES)
    driver.write(KEYS)
    # Files are open for writing, so that only an error makes it read-only; tmpfs knows none.
    options = "remount,abort" if small.kind == "ext4" else "remount,ro"
    if small.kind == "tmpfs":
        place.close()
        assert run("mount", "-o", options, str(small.path)) == ""
    else:
        assert run("mount", "-o", options, str(small.path)) == ""
        (result,) = driver.write([key_of("x")])
        assert (result.outcome, result.reason) == (Outcome.FAILED, Reason.IO_ERROR)
        assert place.context.metrics.value("write_chunks", reason="io_error") == 1
        assert {r.outcome for r in driver.write([key_of("x"), key_of("y")])} == {Outcome.FAILED}
        result, contents = driver.read(KEYS)
        assert result.done
        assert contents == [payload_of(key, PAYLOAD_BYTES) for key in KEYS]
        assert driver.tier.used_bytes == place.lying_bytes()
        place.close()
    with pytest.raises(ConfigError, match="Read-only file system") as caught:
        place.open(8, payload_bytes=PAYLOAD_BYTES)
    assert "\n" not in str(caught.value)
