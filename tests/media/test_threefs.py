"""3FS as a medium: on a directory as FUSE gives it, and on a stand-in for USRBIO's library."""

import errno
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.core.keys import Key
from stepwell.core.record import HEADER_BYTES
from stepwell.core.types import ChunkResult, Outcome, Reason
from stepwell.errors import ConfigError, TierError
from stepwell.ops.tiers import tiers_json, tiers_text
from stepwell.testing import buffer_of, key_of, payload_of
from stepwell.tiers.media import threefs
from stepwell.tiers.media.base import Record, Wanted
from stepwell.tiers.media.fs import FsMedium
from stepwell.tiers.media.kinds import open_medium
from stepwell.tiers.media.records import ABSENT, TRUNCATED
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import ALREADY_THERE, DONE

from . import test_fs

SIZE = 4096
LONG_S = 30.0
FAILED = ChunkResult(Outcome.FAILED, Reason.IO_ERROR)


def url_of(path: Path, **more: str) -> MediumUrl:
    return MediumUrl.parse(
        f"3fs://{path}?capacity=64MiB&min_free=1MiB"
        + "".join(f"&{name}={value}" for name, value in more.items())
    )


def medium_at(path: Path, **more: str) -> FsMedium:
    medium = open_medium(url_of(path, **more), LONG_S)
    assert isinstance(medium, FsMedium)
    medium.check()
    return medium


@pytest.fixture
def usrbio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The stand-in, and the tests' directory as a mount of 3FS."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins"))
    importlib.invalidate_caches()
    (tmp_path / "3fs-virt/iovs").mkdir(parents=True)
    library = importlib.import_module("hf3fs_fuse.io")
    library.reset()
    yield library
    assert library.complaints == []
    assert library.registered == set()
    library.reset()
    for name in ("hf3fs_fuse.io", "hf3fs_fuse"):
        del sys.modules[name]


class TestByFuse(test_fs.TestFs):
    """No library: system calls on what is mounted."""

    def make_medium(self) -> FsMedium:
        self.place.mkdir(exist_ok=True)
        return medium_at(self.place / "pool")


class TestByUsrbio(test_fs.TestFs):
    """Results in any order."""

    @pytest.fixture(autouse=True)
    def _usrbio(self, usrbio: Any, tmp_path: Path) -> None:
        self.usrbio = usrbio

    def make_medium(self) -> FsMedium:
        (self.place / "3fs-virt/iovs").mkdir(parents=True, exist_ok=True)
        medium = medium_at(self.place / "pool", api="usrbio")
        assert self.usrbio.num_operations >= 2, "the record that was tried"
        return medium


# What is special to USRBIO.


@pytest.fixture
def medium(usrbio: Any, tmp_path: Path) -> Iterator[FsMedium]:
    medium = medium_at(tmp_path / "pool", api="usrbio")
    usrbio.num_operations = 0
    yield medium
    usrbio.faults.released.set()
    medium.close()


def records_of(keys: list[Key]) -> list[Record]:
    return [
        Record(key, bytes([idx + 1]) * HEADER_BYTES, memoryview(payload_of(key, SIZE)), 0.0)
        for idx, key in enumerate(keys)
    ]


def wanted_of(keys: list[Key]) -> list[Wanted]:
    return [Wanted(key, buffer_of(SIZE)) for key in keys]


def check_read(found: list[Any], wanted: list[Wanted], idxs: list[int]) -> None:
    """Those and no others were served, each with its own bytes."""
    for idx, (page, each) in enumerate(zip(found, wanted, strict=True)):
        if idx in idxs:
            assert page == bytes([idx + 1]) * HEADER_BYTES
            assert bytes(each.payload) == payload_of(each.key, SIZE)
        else:
            assert isinstance(page, ChunkResult)


KEYS = [key_of(idx) for idx in range(6)]


def path_of(medium: FsMedium, key: Key) -> Path:
    (found,) = medium.path.rglob(key[32:].hex())
    return found


def test_holes_in_a_batch_shift_nothing(medium: FsMedium) -> None:
    """A client of 3FS gave out the pages behind a hole in place of others."""
    assert medium.write(records_of(KEYS), LONG_S) == [DONE] * 6
    path_of(medium, KEYS[1]).unlink()
    short = path_of(medium, KEYS[3])
    os.truncate(short, 4096)
    wanted = wanted_of(KEYS)
    found = medium.read(wanted, LONG_S)
    assert (found[1], found[3]) == (ABSENT, TRUNCATED)
    check_read(found, wanted, [0, 2, 4, 5])
    assert bytes(wanted[1].payload) == bytes(wanted[3].payload) == bytes(SIZE)


@pytest.mark.parametrize("numbers", [{0}, {2, 3}, {5}, {0, 1, 2, 3, 4, 5}])
def test_results_that_are_short_or_errors(medium: FsMedium, usrbio: Any, numbers: set[int]) -> None:
    medium.write(records_of(KEYS), LONG_S)
    rest = [idx for idx in range(6) if idx not in numbers]
    for count, expected in ((4096, TRUNCATED), (0, TRUNCATED), (-errno.EIO, FAILED),
                            (-errno.ENOENT, ABSENT)):  # fmt: skip
        usrbio.num_operations = 0
        usrbio.faults.result = lambda n, whole, count=count: count if n in numbers else whole
        wanted = wanted_of(KEYS)
        found = medium.read(wanted, LONG_S)
        check_read(found, wanted, rest)
        assert [found[idx] for idx in numbers] == [expected] * len(numbers)


@pytest.mark.parametrize("count", [4096, 0, -errno.EIO])
def test_a_write_that_is_not_whole_is_not_published(
    medium: FsMedium, usrbio: Any, count: int
) -> None:
    usrbio.faults.result = lambda n, whole: count if n == 2 else whole
    written = medium.write(records_of(KEYS), LONG_S)
    assert written == [DONE, DONE, FAILED, DONE, DONE, DONE]
    assert medium.exist(KEYS, LONG_S) == [True, True, False, True, True, True]
    assert list((medium.path / "temp").iterdir()) == []
    usrbio.faults.result = lambda n, whole: whole
    assert medium.write(records_of(KEYS)[2:3], LONG_S) == [DONE]


def test_a_full_3fs(medium: FsMedium, usrbio: Any) -> None:
    usrbio.faults.result = lambda n, whole: -errno.ENOSPC
    written = medium.write(records_of(KEYS[:1]), LONG_S)
    assert written == [ChunkResult(Outcome.FULL, Reason.NO_SPACE)]


def test_a_length_that_3fs_was_not_told(medium: FsMedium, usrbio: Any) -> None:
    """Others would take the record for a short one, and remove it."""
    usrbio.faults.fsync = [0, errno.EIO]
    assert medium.write(records_of(KEYS[:3]), LONG_S) == [DONE, FAILED, DONE]
    assert medium.exist(KEYS[:3], LONG_S) == [True, False, True]


def test_what_cannot_be_prepared_fails_alone(medium: FsMedium, usrbio: Any) -> None:
    medium.write(records_of(KEYS), LONG_S)
    usrbio.faults.prepare = [0, errno.EAGAIN, 0, errno.EIO]
    wanted = wanted_of(KEYS)
    found = medium.read(wanted, LONG_S)
    check_read(found, wanted, [0, 2, 4, 5])
    assert found[1] == found[3] == FAILED


def test_a_ring_that_fails_is_asked_again(medium: FsMedium, usrbio: Any) -> None:
    """What was prepared may be done at any time, so it has to be waited for."""
    medium.write(records_of(KEYS), LONG_S)
    usrbio.faults.submit = [errno.EIO, 0]
    usrbio.faults.wait = [errno.ETIMEDOUT, errno.EIO, errno.EINTR]
    wanted = wanted_of(KEYS)
    check_read(medium.read(wanted, LONG_S), wanted, list(range(6)))
    assert usrbio.faults.submit == usrbio.faults.wait == []


@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_ring_that_goes_on_failing_does_not_fill_the_log(
    medium: FsMedium, usrbio: Any, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    medium.write(records_of(KEYS), LONG_S)
    usrbio.faults.wait = [errno.EIO] * number
    usrbio.faults.submit = [errno.EIO] * number
    for _ in range(2):
        wanted = wanted_of(KEYS)
        check_read(medium.read(wanted, LONG_S), wanted, list(range(6)))
    assert usrbio.faults.wait == usrbio.faults.submit == []
    assert caplog.text.count("a ring fails") == (number > 0)


def mapped() -> int:
    """How much shared memory without a name this process has, in pieces."""
    return Path("/proc/self/maps").read_text().count("/dev/shm/psm_")


@pytest.mark.parametrize("call", ["prepare", "submit", "wait"])
def test_a_library_that_fails_oddly(
    medium: FsMedium, usrbio: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """What was prepared may be done at any time: its memory is nobody else's any more."""
    medium.write(records_of(KEYS), LONG_S)
    num_rings, num_mapped = usrbio.num_rings, mapped()
    do = getattr(usrbio.ioring, call)
    calls = 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if call == "prepare" and calls % 6:
            return do(*args, **kwargs)
        raise RuntimeError("odd")

    for count in range(1, 17):
        with monkeypatch.context() as patch:
            patch.setattr(usrbio.ioring, call, fail)
            with pytest.raises(TierError, match=r"library of 3FS fails.*odd"):
                medium.read(wanted_of(KEYS), LONG_S)
        if count in (1, 2, 15):
            wanted = wanted_of(KEYS)
            check_read(medium.read(wanted, LONG_S), wanted, list(range(6)))
            assert usrbio.num_rings == num_rings + 2 * count
            assert mapped() == num_mapped + count
            assert len(os.listdir(tmp_path / "3fs-virt/iovs")) == 1 + count, "3FS has them too"
    with pytest.raises(TierError, match="failed 16 times"):
        medium.read(wanted_of(KEYS), LONG_S)
    assert mapped() == num_mapped + 15
    medium.close()
    assert mapped() == num_mapped + 15


def test_more_records_than_a_ring_has_entries(
    usrbio: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threefs, "_ENTRIES", 7)
    medium = medium_at(tmp_path / "pool", api="usrbio")
    keys = [key_of(f"many {idx}") for idx in range(100)]
    records = [Record(key, bytes(HEADER_BYTES), buffer_of(64, key[:64]), 0.0) for key in keys]
    assert medium.write(records, LONG_S) == [DONE] * 100
    wanted = [Wanted(key, buffer_of(64)) for key in keys]
    assert medium.read(wanted, LONG_S) == [bytes(HEADER_BYTES)] * 100
    assert [bytes(each.payload) for each in wanted] == [key[:64] for key in keys]
    medium.close()


def test_a_read_that_never_ends_is_left_alone(medium: FsMedium, usrbio: Any) -> None:
    """Its ring and memory are nobody else's until it is over; late bytes come to nobody."""
    medium.write(records_of(KEYS), LONG_S)
    num_rings = usrbio.num_rings
    usrbio.num_operations = 0
    usrbio.faults.result = lambda n, whole: None if n == 1 else whole
    late = wanted_of(KEYS[:3])
    began_s = time.monotonic()
    with pytest.raises(TierError, match="in time"):
        medium.read(late, 2.0)
    assert time.monotonic() - began_s < LONG_S
    assert [bytes(each.payload) for each in late] == [bytes(SIZE)] * 3
    for _ in range(3):
        wanted = wanted_of(KEYS)
        check_read(medium.read(wanted, LONG_S), wanted, list(range(6)))
    assert usrbio.num_rings == num_rings + 2, "one more pair, and it is used again"
    assert len(usrbio.registered) == 3, "its files are open"
    usrbio.faults.released.set()
    until(lambda: not usrbio.registered)
    assert [bytes(each.payload) for each in late] == [bytes(SIZE)] * 3
    read: list[tuple[list[Any], list[Wanted]]] = []

    def read_all() -> None:
        wanted = wanted_of(KEYS)
        read.append((medium.read(wanted, LONG_S), wanted))

    together = [threading.Thread(target=read_all) for _ in range(2)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    assert len(read) == 2
    for found, wanted in read:
        check_read(found, wanted, list(range(6)))
    assert usrbio.num_rings <= num_rings + 4


def until(condition: Callable[[], bool]) -> None:
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < LONG_S
        time.sleep(0.01)


def test_a_write_that_never_ends(medium: FsMedium, usrbio: Any) -> None:
    usrbio.faults.result = lambda n, whole: None if n == 0 else whole
    with pytest.raises(TierError, match="in time"):
        medium.write(records_of(KEYS[:2]), 2.0)
    assert medium.exist(KEYS[:2], LONG_S) == [False, False]
    assert medium.write(records_of(KEYS[:2]), LONG_S) == [DONE, DONE]
    assert medium.write(records_of(KEYS[:2]), LONG_S) == [ALREADY_THERE] * 2
    usrbio.faults.released.set()
    until(lambda: not usrbio.registered)
    until(lambda: not list((medium.path / "temp").iterdir()))
    wanted = wanted_of(KEYS[:2])
    check_read(medium.read(wanted, LONG_S), wanted, [0, 1])


def test_when_all_rings_wait_no_more_are_made(medium: FsMedium, usrbio: Any) -> None:
    medium.write(records_of(KEYS), LONG_S)
    num_rings = usrbio.num_rings
    usrbio.faults.result = lambda n, whole: None
    began_s = time.monotonic()
    while len(usrbio.registered) < 32:
        assert time.monotonic() - began_s < LONG_S
        with pytest.raises(TierError):
            medium.read(wanted_of(KEYS[:1]), 0.02)
    assert usrbio.num_rings == num_rings + 62
    with pytest.raises(TierError, match="all calls wait"):
        medium.read(wanted_of(KEYS[:1]), 0.02)
    usrbio.faults.released.set()
    wanted = wanted_of(KEYS)
    check_read(medium.read(wanted, LONG_S), wanted, list(range(6)))


def test_checks_that_hang_leave_no_more_and_more_behind(
    usrbio: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each left a thread, its memory, its rings and a file."""
    monkeypatch.setattr("stepwell.tiers.media.movers._CHECK_WITHIN_S", 0.2)
    monkeypatch.setattr("stepwell.tiers.media.transfer_engines._CLOSE_WITHIN_S", 0.1)
    monkeypatch.setattr("stepwell.tiers.media.transfer_engines._LANES", 3)
    usrbio.faults.result = lambda n, whole: None
    num_threads = threading.active_count()
    medium = open_medium(url_of(tmp_path / "pool"), LONG_S)
    for _ in range(8):
        with pytest.raises(TierError):
            medium.check()
    assert threading.active_count() <= num_threads + 3
    assert usrbio.num_rings <= 6
    assert len(usrbio.registered) <= 3
    usrbio.faults.released.set()
    until(lambda: not usrbio.registered)
    monkeypatch.setattr("stepwell.tiers.media.movers._CHECK_WITHIN_S", LONG_S)
    medium.check()
    assert medium.write(records_of(KEYS), LONG_S) == [DONE] * 6
    medium.close()


def test_no_shared_memory(usrbio: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told as a directory that is not mounted, or not writable."""
    monkeypatch.setattr("stepwell.tiers.media.transfer_engines._UNIT_BYTES", 1 << 44)
    medium = open_medium(url_of(tmp_path / "pool"), LONG_S)
    with pytest.raises(TierError, match=f"memory of {1 << 44} bytes: No space.*/dev/shm"):
        medium.check()
    medium.close()


def test_nothing_is_left_in_shared_memory(usrbio: Any, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    medium = medium_at(tmp_path / "pool")
    medium.write(records_of(KEYS), LONG_S)
    assert {name for name in os.listdir("/dev/shm") if name.startswith("psm_")} <= before
    assert list((tmp_path / "3fs-virt/iovs").iterdir()) != []
    medium.close()
    assert list((tmp_path / "3fs-virt/iovs").iterdir()) == []


# Which of the two ways.


def test_the_log_says_which_way_is_used(
    usrbio: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    medium_at(tmp_path / "pool").close()
    assert "3FS through USRBIO" in caplog.text
    caplog.clear()
    medium_at(tmp_path / "pool", api="posix").close()
    assert "3FS through FUSE" in caplog.text
    assert "USRBIO" not in caplog.text


def test_without_the_library_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    medium = medium_at(tmp_path / "pool")
    assert "3FS through FUSE" in caplog.text
    assert medium.write(records_of(KEYS), LONG_S) == [DONE] * 6
    medium.close()
    with pytest.raises(ConfigError, match="hf3fs_fuse"):
        medium_at(tmp_path / "pool", api="usrbio")


def test_a_directory_that_is_not_on_3fs(
    usrbio: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "3fs-virt/iovs").rmdir()
    (tmp_path / "3fs-virt").rmdir()
    medium_at(tmp_path / "pool").close()
    assert "no directory of 3FS" in caplog.text
    with pytest.raises(ConfigError, match="no directory of 3FS"):
        medium_at(tmp_path / "pool", api="usrbio")


def test_a_library_that_gives_back_something_else(usrbio: Any, tmp_path: Path) -> None:
    """It is found out before an engine relies on it."""
    usrbio.faults.result = lambda n, whole: whole - 4096 if n % 2 else whole
    medium = open_medium(url_of(tmp_path / "pool"), LONG_S)
    with pytest.raises(TierError, match="moves nothing"):
        medium.check()
    medium.close()


def test_an_unknown_way(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api is one of usrbio,posix"):
        medium_at(tmp_path / "pool", api="rdma")


def test_tiers_says_which_way_there_is(request: pytest.FixtureRequest) -> None:
    def way() -> object:
        kinds: Any = tiers_json()["kinds"]
        (kind,) = [kind for kind in kinds if kind["name"] == "3fs"]
        return kind["way"]

    assert way() == "by FUSE"
    assert "3fs://  (ready, by FUSE)" in tiers_text()
    request.getfixturevalue("usrbio")
    assert way() == "by USRBIO"
    assert "3fs://  (ready, by USRBIO)" in tiers_text()


@pytest.mark.parametrize("writer", ["fs", "3fs"])
def test_a_pool_is_the_same_as_with_fs(usrbio: Any, tmp_path: Path, writer: str) -> None:
    schemes = {"fs": "3fs", "3fs": "fs"}
    media = {}
    for scheme in (writer, schemes[writer]):
        url = MediumUrl.parse(f"{scheme}://{tmp_path}/pool?capacity=64MiB&min_free=1MiB")
        media[scheme] = open_medium(url, LONG_S)
        media[scheme].check()
    assert media[writer].write(records_of(KEYS), LONG_S) == [DONE] * 6
    wanted = wanted_of(KEYS)
    check_read(media[schemes[writer]].read(wanted, LONG_S), wanted, list(range(6)))
    assert media[schemes[writer]].write(records_of(KEYS), LONG_S) == [ALREADY_THERE] * 6
    for medium in media.values():
        medium.close()


@pytest.mark.parametrize("library", [True, False])
def test_what_is_there_can_be_read_without_a_check(
    request: pytest.FixtureRequest, tmp_path: Path, library: bool
) -> None:
    """As by a tool, which joins no pool."""
    if library:
        request.getfixturevalue("usrbio")
    writer = medium_at(tmp_path / "pool")
    assert writer.write(records_of(KEYS), LONG_S) == [DONE] * 6
    writer.close()
    medium = open_medium(url_of(tmp_path / "pool"), 10.0)
    wanted = wanted_of(KEYS)
    check_read(medium.read(wanted, LONG_S), wanted, list(range(6)))
    medium.close()


def test_closing_gives_back_what_is_not_late(
    medium: FsMedium, usrbio: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ring that never came back kept all of them, and their memory."""
    monkeypatch.setattr("stepwell.tiers.media.transfer_engines._CLOSE_WITHIN_S", 0.1)
    closed: list[object] = []
    real = threefs._Rings.close

    def close(rings: threefs._Rings) -> None:
        closed.append(rings)
        real(rings)

    monkeypatch.setattr(threefs._Rings, "close", close)
    release = threading.Event()
    lanes = medium._mover._mover._engines  # type: ignore[attr-defined]

    with lanes.taken(1, LONG_S) as taken:
        taken._give_up_s = 0.0
        with pytest.raises(TierError):
            taken.run(release.wait)
    wanted = wanted_of(KEYS)
    medium.read(wanted, LONG_S)  # on another lane
    medium.close()
    assert len(closed) == 1
    release.set()
