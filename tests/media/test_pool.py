"""What may become of a shared directory while it is used: full, away, replaced, hanging."""

import contextlib
import errno
import itertools
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.core.keys import root_of
from stepwell.core.types import ChunkResult, Outcome, Reason
from stepwell.errors import ConfigError, TierError
from stepwell.testing import Driver, buffer_of, key_of
from stepwell.tiers.base import TierContext
from stepwell.tiers.media import marker, movers, pool, sweep
from stepwell.tiers.media.base import Record, Wanted
from stepwell.tiers.media.fs import FsMedium, open_medium
from stepwell.tiers.media.poolfiles import PoolFiles
from stepwell.tiers.media.quota import Member
from stepwell.tiers.media.records import name_of
from stepwell.tiers.media.sweep import PoolLimits, Sweeper
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import ALREADY_THERE, DONE, NO_ROOM
from stepwell.tiers.shared import SharedTier

from .mounts import mount_memory, unmount
from .pool_member import LEAST
from .sites import FsSite
from .test_fs import (
    LONG_S,
    Members,
    Watch,
    bytes_in,
    medium_at,
    sweeper_among,
    sweeper_at,
    until,
)

KIB, MIB = 1 << 10, 1 << 20
NO_SPACE = ChunkResult(Outcome.FULL, Reason.NO_SPACE)
SOON_S = 2.0  # of a pool that may have no room


def record_of(name: object, size_bytes: int = 60 * KIB) -> Record:
    return Record(key_of(name), bytes(4096), buffer_of(size_bytes), 0.0)


@pytest.fixture
def close() -> Iterator[Callable[[FsMedium], FsMedium]]:
    """Has a medium closed when the test is over."""
    with contextlib.ExitStack() as stack:

        def later(medium: FsMedium) -> FsMedium:
            stack.callback(medium.close)
            return medium

        yield later


Close = Callable[[FsMedium], FsMedium]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epoch of each step that a sweeper here has begun."""
    real = Sweeper.step
    begun: list[int] = []

    def step(self: Sweeper, *args: Any, **kwargs: Any) -> bool:
        begun.append(self.epoch)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Sweeper, "step", step)
    return begun


def until_stepped(steps: list[int], number: int) -> None:
    """Until so many more have begun."""
    enough = len(steps) + number
    until(lambda: len(steps) >= enough)


# Full.


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Path]:
    """A small file system that can be filled to the last byte."""
    path = tmp_path / "drive"
    path.mkdir()
    mount_memory(path, 8 * MIB)
    yield path
    unmount(path)


def fill(path: Path, leave_bytes: int = 0) -> Path:
    """Somebody else takes what room there is."""
    ballast = path / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(64 * KIB))
    status = os.statvfs(path)
    missing = leave_bytes - status.f_bavail * status.f_frsize
    if missing > 0:
        os.truncate(ballast, ballast.stat().st_size - missing)
    return ballast


def test_a_file_system_that_is_full_below_capacity(drive: Path, close: Close) -> None:
    """Old records make way for new ones all the same; a pool must not freeze as it is."""
    medium = close(medium_at(drive / "pool", "7MiB", min_free="4KiB"))
    results = [medium.write([record_of(idx)], LONG_S)[0] for idx in range(50)]
    assert set(results) == {DONE}
    fill(drive, 256 * KIB)
    late: list[ChunkResult] = []

    def again() -> bool:
        late.append(medium.write([record_of(f"late{len(late)}")], SOON_S)[0])
        return late[-20:] == [DONE] * 20

    until(again)
    assert set(late) <= {DONE, NO_SPACE, NO_ROOM}


def test_a_file_system_without_inodes(tmp_path: Path, close: Close) -> None:
    """Records made way, and not the folders, which hold inodes: in the end none was kept."""
    path = tmp_path / "drive"
    path.mkdir()
    mount_memory(path, 64 * MIB, inodes=140)
    try:
        medium = close(medium_at(path / "pool", "32MiB"))
        kept = []
        for number in range(120):
            kept += medium.write([record_of(number)], LONG_S)
            time.sleep(0.02)
        assert kept[-40:].count(DONE) > 10
    finally:
        unmount(path)


def test_a_quota_that_nobody_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system says there is room, and refuses: that of this user is used up."""
    medium = medium_at(tmp_path / "pool", "8MiB")
    assert medium.write([record_of("first")], LONG_S) == [DONE]
    real = movers.write_run

    def refuse(fd: int, *more: Any) -> None:
        if bytes_in(tmp_path / "pool/chunks/..") > 4 * MIB:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        real(fd, *more)

    monkeypatch.setattr(movers, "write_run", refuse)
    results: list[ChunkResult] = []

    def again() -> bool:
        results.append(medium.write([record_of(len(results))], SOON_S)[0])
        return len(results) > 150 and results[-3:] == [DONE] * 3

    until(again)
    medium.close()
    assert NO_SPACE in results
    assert results.count(DONE) > 80


def test_taking_over_needs_no_room(drive: Path, close: Close) -> None:
    """Whoever swept has died on a file system that is full to the last byte."""
    medium_at(drive / "pool", "7MiB", min_free="1MiB").close()
    medium = close(medium_at(drive / "pool", "7MiB", min_free="1MiB"))
    for idx in range(50):
        assert medium.write([record_of(idx)], LONG_S) == [DONE]
    medium.close()
    fill(drive)
    with pytest.raises(OSError, match="No space"):
        (drive / "another").write_bytes(bytes(4096))
    before = bytes_in(drive / "pool")
    epoch = PoolFiles(drive / "pool").highest_epoch()
    close(medium_at(drive / "pool", "7MiB", min_free="1MiB"))
    until(lambda: bytes_in(drive / "pool") <= before - 900 * KIB)
    assert PoolFiles(drive / "pool").highest_epoch() == epoch + 1


def test_free_space_is_kept_whoever_uses_it_up(drive: Path, close: Close) -> None:
    medium = close(medium_at(drive / "pool", "7MiB", min_free="2MiB"))
    assert medium.write([record_of("first")], LONG_S) == [DONE]
    for idx in range(150):
        medium.write([record_of(idx)], SOON_S)
        status = os.statvfs(drive)
        assert status.f_bavail * status.f_frsize >= 2 * MIB - 128 * KIB
    (drive / "other").write_bytes(bytes(3 * MIB // 2))

    def is_free() -> bool:
        status = os.statvfs(drive)
        return status.f_bavail * status.f_frsize >= 2 * MIB

    until(is_free)
    assert bytes_in(drive / "pool") > MIB, "and no more has left than was needed"


def test_a_record_that_can_never_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close: Close, steps: list[int]
) -> None:
    """It is refused without waiting for room, and nothing leaves for it."""
    monkeypatch.setattr(pool, "_WAIT_FOR_GRANT_S", 600.0)
    medium = close(medium_at(tmp_path / "pool", "2MiB"))
    for idx in range(8):
        assert medium.write([record_of(idx)], LONG_S) == [DONE]
    began_s = time.monotonic()
    assert medium.write([record_of("large", 3 * MIB)], 120.0) == [NO_ROOM]
    assert time.monotonic() - began_s < 60.0
    until_stepped(steps, 4)
    assert medium.exist([key_of(idx) for idx in range(8)], LONG_S) == [True] * 8


def test_what_was_reserved_is_given_back_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close: Close
) -> None:
    medium = close(medium_at(tmp_path / "pool", "1MiB"))

    def fail(*_: object) -> None:
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(movers, "write_run", fail)
        for idx in range(30):
            with pytest.raises(MemoryError):
                medium.write([record_of(idx, 200 * KIB)], LONG_S)
    assert medium.write([record_of("after", 200 * KIB)], LONG_S) == [DONE]


# Away, or another one.


def test_where_it_is_not_mounted_any_more_nothing_is_made(tmp_path: Path, close: Close) -> None:
    """Below a mount point there is an empty folder, on the drive that the system is on."""
    path = tmp_path / "pool"
    medium = close(medium_at(path))
    assert medium.write([record_of(1)], LONG_S) == [DONE]
    path.rename(tmp_path / "away")
    path.mkdir()
    results: list[ChunkResult] = []
    ends_s = time.monotonic() + 4.0
    while time.monotonic() < ends_s:
        with contextlib.suppress(TierError):
            results += medium.write([record_of(time.monotonic_ns())], 1.0)
        medium.exist([key_of(1)], LONG_S)
        medium.touch([key_of(1)], LONG_S)
        medium.remove([key_of(1)], LONG_S)
        time.sleep(0.05)
    assert list(path.iterdir()) == []
    assert DONE not in results
    path.rmdir()
    (tmp_path / "away").rename(path)
    until(lambda: _writes(medium))
    assert medium.exist([key_of(1)], LONG_S) == [True]


def _writes(medium: FsMedium) -> bool:
    try:
        return medium.write([record_of(time.monotonic_ns())], 10.0) == [DONE]
    except TierError:
        return False


def test_another_pool_in_its_place_is_left_alone(
    tmp_path: Path, close: Close, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one that was made there by mistake, while nothing was mounted."""
    path = tmp_path / "pool"
    medium = close(medium_at(path))
    assert medium.write([record_of(1)], LONG_S) == [DONE]
    path.rename(tmp_path / "away")
    other = close(medium_at(path))
    assert other.write([record_of("its own")], LONG_S) == [DONE]
    with caplog.at_level(logging.WARNING):
        until(lambda: "another pool lies there" in caplog.text)
    assert "start the engine again" in caplog.text
    assert "Is the right file system mounted?" in caplog.text
    for idx in range(20):
        with contextlib.suppress(TierError):
            assert medium.write([record_of(f"m{idx}")], 0.1) == [NO_ROOM]
    assert sum(1 for found in (path / "chunks").rglob("*") if found.is_file()) == 1


@pytest.mark.parametrize("text", ['{"format": 2, "pool": "ab"}', "nothing sensible", ""])
def test_a_marker_that_says_something_else_ends_the_writing(
    tmp_path: Path, close: Close, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """A pool of a later version was written to for as long as the last grant was good."""
    medium = close(medium_at(tmp_path / "pool"))
    assert medium.write([record_of(1)], LONG_S) == [DONE]
    (tmp_path / "pool/stepwell-pool.json").write_text(text)
    until(lambda: "the pool fails" in caplog.text)
    for _ in range(5):
        with pytest.raises(TierError, match="the pool fails"):
            medium.write([record_of(2)], 0.1)


@pytest.mark.skipif(os.geteuid() != 0, reason="root may write anywhere, and is asked to")
def test_another_users_pool_is_not_joined(tmp_path: Path) -> None:
    """One visit left folders that nobody but the visitor could remove, and no more was granted."""
    medium_at(tmp_path / "pool").close()
    marker = tmp_path / "pool/stepwell-pool.json"
    os.chown(marker, 65534, -1)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"belongs to another user; .* owner=65534 ours=0"):
        medium_at(tmp_path / "pool")
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "pool/temp").rmdir()
    with pytest.raises(ConfigError, match="another user"):
        medium_at(tmp_path / "pool")
    assert not (tmp_path / "pool/temp").exists()


def test_folders_that_somebody_removed_are_made_again(tmp_path: Path, close: Close) -> None:
    path = tmp_path / "pool"
    medium = close(medium_at(path))
    assert medium.write([record_of(1)], LONG_S) == [DONE]
    for name in ("pool", "temp", "chunks"):
        os.rename(path / name, tmp_path / f"old-{name}")
    until(lambda: _writes(medium))
    assert medium.stats(10.0).used_bytes is not None


def test_a_pool_is_not_made_where_it_cannot_be_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine came up without its mount. What is made now would fill the system's drive."""
    empty = tmp_path / "mnt"
    empty.mkdir()
    with pytest.raises(ConfigError, match="is it mounted"):
        medium_at(empty / "pool", "1000000TiB")
    assert list(empty.iterdir()) == []
    real = os.stat
    root = real("/")

    def same(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        return root if str(path) == str(empty) else real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", same)
    with pytest.raises(ConfigError, match="is the file system mounted"):
        medium_at(empty)
    assert list(empty.iterdir()) == []


def test_a_pool_that_another_makes_just_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not there a moment ago, and is no empty directory of somebody else's."""
    real = marker.is_there
    asked: list[str] = []

    def is_there(path: Any) -> bool:
        found = real(path)
        asked.append(str(path))
        if len(asked) == 1:
            marker.make_pool(tmp_path / "pool", MIB)
        return found

    monkeypatch.setattr(marker, "is_there", is_there)
    marker.make_pool(tmp_path / "pool", MIB)
    assert len(asked) > 2
    assert len(marker.read_pool_id(tmp_path / "pool")) == 32
    assert os.listdir(tmp_path) == ["pool"]


def test_two_that_make_a_pool_without_hard_links(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are refused the link; whoever had read its own marker by then had lost its pool."""
    first: list[str] = []

    def refuse(*_: object) -> None:
        if not first:
            first.append("")
            marker.make_pool(drive, 4 * MIB)
            first[0] = marker.read_pool_id(drive)
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    marker.make_pool(drive, 4 * MIB)
    assert [marker.read_pool_id(drive)] == first
    assert os.listdir(drive) == ["stepwell-pool.json"]


def test_a_marker_whose_text_is_still_being_written(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is for a moment without hard links."""
    monkeypatch.setattr(marker, "_WAIT_FOR_TEXT_S", 60.0)
    path = drive / "stepwell-pool.json"
    path.touch()
    text = json.dumps({"format": 1, "pool": "ab" * 16})
    writing = threading.Timer(0.5, lambda: path.write_text(text))
    writing.start()
    marker.make_pool(drive, 4 * MIB)
    assert marker.read_pool_id(drive) == "ab" * 16
    writing.join()


@pytest.mark.parametrize(("name", "num_synced"), [("pool", 0), ("", 0), ("", 1)])
def test_a_marker_that_cannot_be_written_is_not_left_half_made(
    drive: Path, name: str, num_synced: int
) -> None:
    """It is on the drive before it is a marker; or at least, without hard links, soon after."""
    synced: list[int] = []

    def fail(fd: int) -> None:
        synced.append(fd)
        if len(synced) > num_synced:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        patch.setattr(os, "link", refuse)
        with pytest.raises(ConfigError, match="there is no room"):
            medium_at(drive / name, "4MiB")
    assert os.listdir(drive) == []
    medium_at(drive / name, "4MiB").close()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "run as one user"),
        (errno.EROFS, "can be written to"),
        (errno.ENOSPC, "no room on its file system"),
        (errno.ENOENT, "is its file system mounted"),
        (errno.EBUSY, "cannot be used (Device or resource busy): path="),
    ],
)
def test_what_the_system_refuses_is_said_with_what_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "pool"))

    monkeypatch.setattr(PoolFiles, "make_folders", fail)
    with pytest.raises(ConfigError) as refused:
        medium_at(tmp_path / "pool")
    assert words in str(refused.value)
    assert os.strerror(number) in str(refused.value)
    assert ("as one user" in str(refused.value)) == (number == errno.EACCES)


def test_a_pool_at_the_top_of_a_file_system(drive: Path, close: Close) -> None:
    """What a file system puts there by itself is nobody's."""
    (drive / "lost+found").mkdir()
    medium = close(medium_at(drive, "4MiB"))
    assert medium.write([record_of(1)], LONG_S) == [DONE]
    close(medium_at(drive, "4MiB"))


@pytest.mark.parametrize("name", ["chunks", "temp", "pool", "pool/members", "pool/sweeps"])
def test_a_link_in_the_place_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    medium_at(tmp_path / "pool").close()
    (tmp_path / "pool" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "pool" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="a link"):
        medium_at(tmp_path / "pool")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "pool": "../x"}'])
def test_a_damaged_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """It is said how to go on with what was stored, and that does it."""
    monkeypatch.setattr(marker, "_WAIT_FOR_TEXT_S", 0.1)
    medium = medium_at(tmp_path / "pool")
    assert medium.write([record_of(1)], LONG_S) == [DONE]
    medium.close()
    path = tmp_path / "pool/stepwell-pool.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="damaged") as refused:
        medium_at(tmp_path / "pool")
    for part in ("remove the whole directory", "write this into the marker", str(path)):
        assert part in str(refused.value)
    found = re.search(r"{.*}", str(refused.value))
    assert found is not None
    path.write_text(found[0].replace("<any 32 hexadecimal digits>", "0a" * 16))
    medium = medium_at(tmp_path / "pool")
    assert medium.exist([key_of(1)], LONG_S) == [True]
    medium.close()


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("name", ["mnt", "mnt/stepwell-pool.json"])
def test_what_is_not_known_is_not_taken_for_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """A mount point that fails looked like nothing, and a new pool was renamed to its place."""
    (tmp_path / "mnt").mkdir()
    real = os.lstat

    def fail(path: Any, **kwargs: Any) -> os.stat_result:
        if str(path) == str(tmp_path / name):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "lstat", fail)
        with pytest.raises(OSError, match=re.escape(os.strerror(number))):
            marker.make_pool(tmp_path / "mnt", MIB)
        with pytest.raises(ConfigError if number == errno.EACCES else TierError):
            medium_at(tmp_path / "mnt")
    assert os.listdir(tmp_path) == ["mnt"]
    assert os.listdir(tmp_path / "mnt") == []


def test_chunks_that_are_a_link(tmp_path: Path, close: Close) -> None:
    """Below it lay what somebody else has, and a record of that name went with a removal."""
    medium = close(medium_at(tmp_path / "pool"))
    assert medium.write([record_of(1)], LONG_S) == [DONE]
    outside = tmp_path / "outside"
    (tmp_path / "pool/chunks").rename(outside)
    (tmp_path / "pool/chunks").symlink_to(outside)
    for number in range(2, 5):
        with contextlib.suppress(TierError):
            assert medium.write([record_of(number)], 0.5)[0].outcome is not Outcome.DONE
    medium.remove([key_of(1)], 10.0)
    assert sum(path.is_file() for path in outside.rglob("*")) == 1


def test_a_record_below_a_link_is_neither_written_nor_removed(tmp_path: Path, close: Close) -> None:
    medium = close(medium_at(tmp_path / "pool"))
    assert medium.write([record_of(1)], LONG_S) == [DONE]
    (found,) = (path for path in (tmp_path / "pool/chunks").rglob("*") if path.is_file())
    outside = tmp_path / "outside"
    found.parent.rename(outside)
    found.parent.symlink_to(outside)
    before = {path.name for path in outside.iterdir()}
    medium.remove([key_of(1)], LONG_S)
    assert medium.erase(root_of(key_of(1))) == 0
    (outside / found.name).rename(outside / "other")
    assert medium.write([record_of(1)], LONG_S)[0].outcome is Outcome.FAILED
    assert {path.name for path in outside.iterdir()} == {"other"}
    assert len(before) == 1


# Hanging.


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FsSite]:
    site = FsSite(tmp_path)
    try:
        site.start()
        yield site
    finally:
        site.close()


def test_opening_on_a_file_system_that_hangs(site: FsSite, close: Close) -> None:
    """It is given up in time, and done once the file system is back."""
    close(open_medium(MediumUrl.parse(site.url), LONG_S)).check()
    site.pause()
    medium = open_medium(MediumUrl.parse(site.url), 0.5)
    began_s = time.monotonic()
    for _ in range(3):
        with pytest.raises(TierError, match="does not answer"):
            medium.check()
        with pytest.raises(TierError, match="does not answer"):  # and nobody reads there meanwhile
            medium.read([Wanted(key_of(1), buffer_of(4096))], LONG_S)
    assert time.monotonic() - began_s < LONG_S
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("stepwell-pool-open") == 1, "one waits for all"
    site.resume()
    until(lambda: _writes(medium))
    medium.close()


def test_one_that_was_away_at_the_start_is_never_made_later(
    site: FsSite, tmp_path: Path, close: Close
) -> None:
    """What is below the mount is no place for it; and the pool is used once it is there."""
    close(open_medium(MediumUrl.parse(site.url), LONG_S)).check()
    site.kill()
    medium = close(open_medium(MediumUrl.parse(site.url), LONG_S))
    with pytest.raises(TierError, match="the directory fails"):
        medium.check()
    unmount(tmp_path / "mounted")
    for _ in range(3):
        with pytest.raises(TierError):
            medium.write([record_of(1)], 1.0)
    assert list((tmp_path / "mounted").iterdir()) == []
    site.start()
    until(lambda: _writes(medium))


def test_a_pool_that_is_a_mount_point_whose_file_system_is_away(
    site: FsSite, tmp_path: Path, close: Close
) -> None:
    """The engine starts without it, makes nothing in its place, and uses it once it is back."""
    url = MediumUrl.parse(f"fs://{tmp_path}/mounted?capacity=64MiB&min_free=1MiB")
    before = sorted(os.listdir(tmp_path))
    close(open_medium(url, LONG_S)).check()
    site.kill()
    medium = close(open_medium(url, LONG_S))
    with pytest.raises(TierError, match="the directory fails"):
        medium.check()
    assert sorted(os.listdir(tmp_path)) == before
    unmount(tmp_path / "mounted")
    with pytest.raises(TierError, match="no pool lies there"):
        medium.write([record_of(1)], LONG_S)
    assert list((tmp_path / "mounted").iterdir()) == []
    site.start()
    until(lambda: _writes(medium))


def test_closing_on_a_file_system_that_hangs(site: FsSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_CLOSE_WAIT_S", 0.5)
    medium = open_medium(MediumUrl.parse(site.url), LONG_S)
    real, paused = Sweeper.step, threading.Event()

    def step(self: Sweeper, *args: Any, **kwargs: Any) -> bool:
        site.pause()
        paused.set()
        return real(self, *args, **kwargs)

    medium.check()
    monkeypatch.setattr(Sweeper, "step", step)
    assert paused.wait(LONG_S)  # it is in the middle of something
    began_s = time.monotonic()
    medium.close()
    assert time.monotonic() - began_s < LONG_S
    site.resume()
    until(lambda: "stepwell-pool" not in [thread.name for thread in threading.enumerate()])


def test_closed_while_it_is_being_opened(site: FsSite) -> None:
    medium = open_medium(MediumUrl.parse(site.url), 0.3)
    site.pause()
    with pytest.raises(TierError):
        medium.check()
    medium.close()
    site.resume()
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("stepwell-pool")])


# Clients that cache.


def test_two_hosts_that_believe_what_they_saw_a_second_ago(tmp_path: Path) -> None:
    """As clients of network file systems do, each with a cache of its own."""
    sites = [FsSite(tmp_path, name, cached_s=1.0) for name in ("one", "other")]
    behind = tmp_path / "behind/pool"
    hosts = []
    try:
        for site, name in zip(sites, ("one", "other"), strict=True):
            site.start()
            hosts.append(Members(tmp_path / name / "pool", "16MiB", 5.0))
        writers = [(hosts[idx], hosts[idx].start("write")) for idx in (0, 0, 1)]
        readers = [(host, host.start("read")) for host in hosts]
        watch = Watch(behind, hosts[0].lease_s)
        watch.on(4.0)
        assert watch.early == []
        epoch = PoolFiles(behind).highest_epoch()
        killed = sweeper_among(behind, [process for host in hosts for process in host.processes])
        killed.kill()
        watch.on(0.0, lambda: PoolFiles(behind).highest_epoch() > epoch)
        watch.on(4.0)
        assert watch.early == [], "nobody is taken for dead"
        assert watch.most_bytes <= 16 * MIB + 5 * 4 * 260 * KIB
        wrote = [host.end(each)["written"] for host, each in writers if each is not killed]
        read = [host.end(each) for host, each in readers if each is not killed]
        print(f"with caches: {wrote} written, {[each['read'] for each in read]} read, "
              f"at most {watch.most_bytes / MIB:.1f} MiB of 16")  # fmt: skip
        assert min(wrote) >= LEAST
        assert [(each["wrong"], each["bad"]) for each in read] == [(0, [])] * len(read)
    finally:
        for host in hosts:
            host.close()
        for site in sites:
            site.close()


# Members.


def test_threads_end_with_the_medium(tmp_path: Path) -> None:
    before = threading.active_count()
    mediums = [medium_at(tmp_path / "pool") for _ in range(3)]
    assert threading.active_count() >= before + 3
    for medium in mediums:
        medium.close()
    until(lambda: threading.active_count() <= before)
    members = PoolFiles(tmp_path / "pool").read_members()
    assert [member.has_left for member, _ in members.values()] == [True] * 3
    assert not [n for n in os.listdir(tmp_path / "pool/pool/sweeps") if n.startswith("next")]


def test_who_leaves_lets_another_sweep_whatever_else_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    medium = medium_at(tmp_path / "pool")
    files = PoolFiles(tmp_path / "pool")
    until(lambda: files.highest_epoch() == 1 and files.lease_ns(1) > 0)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(PoolFiles, "remove_prepared", fail)
    monkeypatch.setattr(PoolFiles, "write_member", fail)
    medium.close()
    assert files.lease_ns(1) == 0


def test_a_thread_goes_on_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool whose sweeper had ended silently would be full for ever."""
    monkeypatch.setattr(sweep, "LEASE_S", 1.0)
    real = Sweeper.step
    calls = []

    def step(self: Sweeper, *args: Any, **kwargs: Any) -> bool:
        calls.append(self.epoch)
        if len(calls) in (2, 3):
            raise RuntimeError("never thought of")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Sweeper, "step", step)
    medium = medium_at(tmp_path / "pool")
    with caplog.at_level(logging.WARNING):
        until(lambda: len(set(calls)) >= 3 and _writes(medium))
    medium.close()
    assert "never thought of" in caplog.text


def test_who_has_not_heard_for_long_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close: Close
) -> None:
    """It may have been taken for gone, and what it was granted is another's."""
    medium = close(medium_at(tmp_path / "pool"))
    assert medium.write([record_of(1)], LONG_S) == [DONE]
    real = time.clock_gettime

    def later(clock: int) -> float:
        return real(clock) + sweep.GONE_AFTER_S / 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PoolFiles, "read_books", lambda *_: None)
        patch.setattr(time, "clock_gettime", later)
        with pytest.raises(TierError, match="nobody grants anything"):
            medium.write([record_of(2)], 0.3)
    until(lambda: _writes(medium))


def test_a_member_that_sleeps_until_it_is_taken_for_gone(tmp_path: Path) -> None:
    """It wakes up with a grant that it has not used, and others have had the room since."""
    members = Members(tmp_path / "pool", "8MiB", 1.0, gone_s=3.0)
    try:
        members.start("write")
        until(lambda: PoolFiles(members.path).highest_epoch() == 1)
        sleeper = members.start("write")
        sleeper_id = f"-{sleeper.pid}-"

        def has_written() -> bool:
            found = PoolFiles(members.path).read_members().items()
            return any(sleeper_id in name and says.written_bytes for name, (says, _) in found)

        until(has_written)
        sleeper.send_signal(signal.SIGSTOP)
        folder = Path(PoolFiles(members.path).members)
        until(lambda: not [name for name in os.listdir(folder) if sleeper_id in name])
        sleeper.send_signal(signal.SIGCONT)
        seen = []
        ends_s = time.monotonic() + 4.0
        while time.monotonic() < ends_s:
            seen.append(bytes_in(members.path))
        assert max(seen) <= 8 * MIB + 2 * 4 * 260 * KIB
        assert members.end(sleeper)["written"] > 0, "it is a member again"
    finally:
        members.close()


def test_what_others_take_for_the_capacity_is_said(
    tmp_path: Path, close: Close, caplog: pytest.LogCaptureFixture
) -> None:
    close(medium_at(tmp_path / "pool", "8MiB"))
    until(lambda: PoolFiles(tmp_path / "pool").highest_epoch() == 1)
    with caplog.at_level(logging.WARNING):
        close(medium_at(tmp_path / "pool", "16MiB"))
        until(lambda: "another capacity" in caplog.text)


def test_a_host_whose_clock_is_set_while_it_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close: Close, steps: list[int]
) -> None:
    """Nobody is taken for gone, and nothing is taken for old."""
    medium = close(medium_at(tmp_path / "pool", ttl="1h"))
    other = close(medium_at(tmp_path / "pool", ttl="1h"))
    assert medium.write([record_of(1)], LONG_S) == [DONE]
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 10 * 3600 * 10**9)
    monkeypatch.setattr(sweep, "_COUNT_EVERY_S", 0.0)
    until_stepped(steps, 15)
    assert other.exist([key_of(1)], LONG_S) == [True]
    assert len(PoolFiles(tmp_path / "pool").read_members()) == 2
    medium.touch([key_of(1)], LONG_S)
    (found,) = (path for path in (tmp_path / "pool/chunks").rglob("*") if path.is_file())
    assert abs(found.stat().st_atime_ns - real()) < 60e9


# Records.


def test_a_link_that_was_made_before_it_was_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close: Close
) -> None:
    """NFS: the answer was lost, and the second time the server says that there is one."""
    medium = close(medium_at(tmp_path / "pool"))
    real = os.link

    def twice(*args: Any) -> None:
        real(*args)
        real(*args)

    monkeypatch.setattr(os, "link", twice)
    assert medium.write([record_of(1)], LONG_S) == [DONE]
    assert medium.write([record_of(1)], LONG_S) == [ALREADY_THERE]


def test_a_record_that_may_have_been_published_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A soft mount of NFS: the server did it, and its answer came too late."""
    medium = medium_at(tmp_path / "pool", "1MiB", min_free="4KiB")
    assert medium.write([record_of("first")], LONG_S) == [DONE]
    real = os.link

    def late(*args: Any) -> None:
        real(*args)
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "link", late)
            for idx in range(64):
                medium.write([record_of(idx)], 1.0)
                # Books and the like are less than a record.
                assert bytes_in(tmp_path / "pool") < MIB + 64 * KIB
    finally:
        medium.close()


FAILED = ChunkResult(Outcome.FAILED, Reason.IO_ERROR)


@pytest.mark.parametrize(
    ("number", "result", "charged"),
    [
        (errno.ETIMEDOUT, FAILED, True),
        (errno.EIO, FAILED, True),
        (errno.ENOSPC, NO_SPACE, False),
        (errno.EDQUOT, NO_SPACE, False),
        (errno.EEXIST, ALREADY_THERE, False),
        (0, DONE, True),
    ],
)
@pytest.mark.parametrize("with_links", [True, False])
def test_what_is_charged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    close: Close,
    with_links: bool,
    number: int,
    result: ChunkResult,
    charged: bool,
) -> None:
    """What may be there; not what is refused, or was there before."""
    medium = close(medium_at(tmp_path / "pool"))
    assert medium.write([record_of(1)], LONG_S) == [DONE]
    settled: list[bool] = []
    real_settle, real_link, real_rename = pool.Pool.settle, os.link, os.rename

    def settle(self: Any, num_bytes: int, *, written: bool, refused: bool = False) -> None:
        settled.append(written)
        real_settle(self, num_bytes, written=written, refused=refused)

    def name_it(real: Callable[[str, str], None], source: str, target: str) -> None:
        if number not in (0, errno.EEXIST):
            raise OSError(number, os.strerror(number))
        real(source, target)

    def link(source: str, target: str) -> None:
        if not with_links:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        name_it(real_link, source, target)

    def rename(source: str, target: str) -> None:
        if "/chunks/" in target:
            name_it(real_rename, source, target)
        else:
            real_rename(source, target)

    monkeypatch.setattr(pool.Pool, "settle", settle)
    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "rename", rename)
    record = record_of(1 if number == errno.EEXIST else 2)
    assert medium.write([record], LONG_S) == [result]
    assert settled == [charged]


def test_what_cannot_be_published_is_not_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close: Close
) -> None:
    """Somebody's file in the place of a folder: to charge it would evict records for nothing."""
    medium = close(medium_at(tmp_path / "pool"))
    assert medium.write([record_of(1)], LONG_S) == [DONE]
    (found,) = (path for path in (tmp_path / "pool/chunks").rglob("*") if path.is_file())
    root = found.parent.parent.parent
    root.rename(tmp_path / "away")
    root.touch()
    settled: list[bool] = []
    monkeypatch.setattr(
        pool.Pool, "settle", lambda self, num_bytes, *, written, refused: settled.append(written)
    )
    assert medium.write([record_of(2)], LONG_S) == [FAILED]
    assert settled == [False]


def test_what_a_mover_leaves_that_raises_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close: Close
) -> None:
    medium = close(medium_at(tmp_path / "pool"))
    real = movers.write_run

    def fail(*args: Any) -> None:
        real(*args)
        raise MemoryError

    monkeypatch.setattr(movers, "write_run", fail)
    with pytest.raises(MemoryError):
        medium.write([record_of(1), record_of(2)], LONG_S)
    assert os.listdir(tmp_path / "pool/temp") == []


def test_a_call_that_is_slow_is_said_with_the_path(tmp_path: Path, close: Close) -> None:
    medium = close(medium_at(tmp_path / "pool"))
    assert medium.write([record_of(1)], LONG_S) == [DONE]
    wanted = [Wanted(key_of(1), buffer_of(60 * KIB))]
    for call in (lambda: medium.exist([key_of(1)], -1.0), lambda: medium.read(wanted, -1.0)):
        with pytest.raises(TierError, match=f"is slow: path={tmp_path}/pool"):
            call()


def test_a_record_of_another_user_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close: Close
) -> None:
    """Only its owner may set a file's times; that is no fault of the storage."""
    medium = close(medium_at(tmp_path / "pool"))
    assert medium.write([record_of(1)], LONG_S) == [DONE]

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "utime", refuse)
        medium.touch([key_of(1)], LONG_S)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a link": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_in_the_place_of_a_record(tmp_path: Path, close: Close, kind: str) -> None:
    medium = close(medium_at(tmp_path / "pool"))
    driver = Driver(SharedTier(medium, TierContext(), name="fs"))
    key = key_of(1)
    driver.write([key])
    (found,) = (tmp_path / "pool/chunks").rglob(name_of(key)[1])
    found.unlink()
    NO_FILES[kind](found)
    result, _ = driver.read([key])
    assert result.results == (ChunkResult(Outcome.MISS, Reason.NOT_A_FILE),)
    assert driver.tier.drain(10.0)  # type: ignore[attr-defined]
    assert medium.exist([key], LONG_S) == [False]
    assert os.path.lexists(found) == (kind == "a folder")
    if kind != "a folder":
        driver.write([key])
        assert driver.read([key])[0].done
    driver.tier.close()


def test_erasing_while_others_write(tmp_path: Path, close: Close) -> None:
    """Folders vanish under the writers, who make them again; nothing fails."""
    medium = close(medium_at(tmp_path / "pool", "64MiB"))
    other = close(medium_at(tmp_path / "pool", "64MiB"))
    results: list[ChunkResult] = []
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            results.extend(other.write([record_of(number, 4096)], LONG_S))
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        erased = sum(medium.erase(root_of(key_of(0))) for _ in range(8))
        until(lambda: len(results) > 50)
        erased += sum(medium.erase(root_of(key_of(0))) for _ in range(8))
    finally:
        stop.set()
        thread.join()
    assert erased > 10
    assert {result.outcome for result in results} == {Outcome.DONE}


def test_erasing_what_cannot_be_removed_is_said(tmp_path: Path, close: Close) -> None:
    medium = close(medium_at(tmp_path / "pool"))
    assert medium.write([record_of(1)], LONG_S) == [DONE]

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(TierError, match="erase failed"):
            medium.erase(root_of(key_of(1)))


def test_what_was_erased_is_not_charged_any_more(tmp_path: Path, close: Close) -> None:
    """It was until the next count, ten minutes later; in a full pool others' records made way."""
    medium = close(medium_at(tmp_path / "pool", "64MiB"))
    records = [record_of(idx) for idx in range(40)]
    assert medium.write(records, LONG_S) == [DONE] * 40
    until(lambda: (medium.stats(1.0).used_bytes or 0) > 2 * MIB)
    eraser = close(open_medium(MediumUrl.parse(f"fs://{tmp_path}/pool?capacity=64MiB"), LONG_S))
    assert eraser.erase(root_of(records[0].key)) == 40
    # What this member was granted and has not written stays charged.
    until(lambda: (medium.stats(1.0).used_bytes or 0) < 2 * MIB)


def test_without_threads_it_fails_as_a_tier(
    tmp_path: Path, close: Close, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is to start all the same, and to try again."""
    real = threading.Thread.start
    refused = ["stepwell-pool-open", "stepwell-pool"]

    def start(thread: threading.Thread) -> None:
        if thread.name in refused:
            refused.remove(thread.name)
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    medium = close(open_medium(MediumUrl.parse(f"fs://{tmp_path}/pool?capacity=8MiB"), LONG_S))
    for _ in range(2):
        with pytest.raises(TierError, match="thread"):
            medium.check()
    medium.check()
    assert medium.write([record_of(1)], LONG_S) == [DONE]


def test_who_leaves_takes_nothing_along(tmp_path: Path, close: Close) -> None:
    """What it had written was charged a second time, and whoever swept next made room for that."""
    first = medium_at(tmp_path / "pool", "16MiB")
    records = [record_of(idx) for idx in range(160)]
    assert set(first.write(records, 30.0)) == {DONE}
    first.close()
    second = close(medium_at(tmp_path / "pool", "16MiB"))
    files = PoolFiles(tmp_path / "pool")

    def is_counted() -> bool:
        books = files.read_books(files.highest_epoch())
        return books is not None and list(books.granted) == [second._ready(0.0).member_id]

    until(is_counted)
    assert second.exist([record.key for record in records], LONG_S) == [True] * 160
    assert second.stats(10.0).used_bytes == 160 * 64 * KIB


def test_one_after_the_other_that_erases_what_it_wrote(tmp_path: Path) -> None:
    """As a benchmark does: after the first there was no room any more, with nothing in it."""
    for _ in range(4):
        medium = medium_at(tmp_path / "pool", "8MiB")
        results: set[ChunkResult] = set()
        for number in range(60):
            results.update(medium.write([record_of(number)], 30.0))
        assert results == {DONE}
        assert medium.erase(root_of(key_of(0))) == 60
        medium.close()


def test_members_that_are_killed_one_after_the_other_cost_few_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may have written all that it was granted; forty of them cost all that there was."""
    medium = medium_at(tmp_path / "pool", "64MiB")
    records = [record_of(idx, MIB) for idx in range(32)]
    assert set(medium.write(records, 30.0)) == {DONE}
    until(lambda: PoolFiles(tmp_path / "pool").highest_epoch() > 0)
    medium.close()
    files = PoolFiles(tmp_path / "pool")
    sweeper = sweeper_at(tmp_path / "pool", PoolLimits(64 * MIB, MIB, 0.0))
    begun_s = time.monotonic()
    number = itertools.count()
    passed_s = 0
    monkeypatch.setattr(time, "monotonic", lambda: begun_s + passed_s)
    for passed_s in range(0, 300, 3):
        killed = f"killed-{next(number)}-ab"
        files.write_member(killed, Member(0, 2 * MIB, 0, 64 * MIB))
        now_ns = time.time_ns() + passed_s * 10**9
        os.utime(f"{files.members}/{killed}.json", ns=(now_ns, now_ns))
        for _ in range(3):
            assert sweeper.step(now_ns + 1)
        assert sweeper.quota.used_bytes <= 64 * MIB
    left = [path for path in (tmp_path / "pool/chunks").rglob("*") if path.is_file()]
    assert len(left) >= 28
    assert len(sweeper.quota.granted) < 40, "others are given up in the end"
