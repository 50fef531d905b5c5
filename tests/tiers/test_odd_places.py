"""Odd things in a store's directory: no hang, no crash, no lock or thread left behind.

Each of these hung the start for ever, ended it with a traceback, or kept the lock so that the
next try was refused by the process itself; in the format before this one, or in this one.
"""

import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepwell.core.keys import Key
from stepwell.core.types import Direction, Lookup
from stepwell.errors import ConfigError
from stepwell.testing import Driver, key_of, payload_of
from stepwell.testing.stalling import stalled_calls
from stepwell.tiers import blockio, journal
from stepwell.tiers.base import TierContext
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.disk import DiskTier
from stepwell.tiers.journal import Journal

from .conftest import DiskPlace, remove_at_once

KEYS = [key_of(idx) for idx in range(8)]


def deep(path: Path, levels: int = 1500) -> None:
    start = os.getcwd()
    path.mkdir()
    os.chdir(path)
    try:
        for _ in range(levels):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(start)


def remove_deep(path: Path) -> None:
    os.system(f"rm -rf '{path}'")


def open_tier(path: Path) -> DiskTier:
    return DiskTier(path, 64 << 20, TierContext(), num_threads=2)


def filled(path: Path) -> None:
    """A store of two records, closed."""
    tier = open_tier(path)
    Driver(tier).write(KEYS[:2])
    tier.close()


OPENER = """
import sys
from pathlib import Path
from stepwell.tiers.base import TierContext
from stepwell.tiers.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), 64 << 20, TierContext(), num_threads=2)
print(len(tier))
tier.close()
"""


def opened_elsewhere(path: Path) -> str:
    """What a process says that opens the store, with little memory and not for ever."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    done = subprocess.run(
        [sys.executable, "-c", OPENER, str(path)], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, preexec_fn=limit, check=False,
    )  # fmt: skip
    return (done.stdout or done.stderr.splitlines()[-1]).strip()


def bound_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's address is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def full_directory(path: Path) -> None:
    path.mkdir()
    (path / "notes").write_text("mine")


ODD_THINGS: list[tuple[str, Callable[[Path], object]]] = [
    ("a pipe", os.mkfifo),
    ("a link to endless zeros", lambda path: path.symlink_to("/dev/zero")),
    ("a link to itself", lambda path: path.symlink_to(path)),
    ("a dangling link", lambda path: path.symlink_to("/nowhere/at/all")),
    ("a socket", bound_socket),
    ("a directory", lambda path: path.mkdir()),
    ("a full directory", full_directory),
]
odd_things = pytest.mark.parametrize(
    "odd", [each[1] for each in ODD_THINGS], ids=[each[0] for each in ODD_THINGS]
)

DESCRIPTIONS: list[tuple[str, Callable[[Path], object]]] = [
    (
        "not a number",
        lambda p: p.write_text('{"identity_version":1,"fields":{"a":NaN},"labels":{}}'),
    ),
    ("nested", lambda p: p.write_text("[" * 200_000)),
    ("huge", lambda p: p.write_bytes(b" " * (2 << 20))),
    *ODD_THINGS,
]


@pytest.mark.parametrize("odd", [d[1] for d in DESCRIPTIONS], ids=[d[0] for d in DESCRIPTIONS])
def test_an_odd_description(odd: Callable[[Path], object], tmp_path: Path) -> None:
    filled(tmp_path / "kv")
    odd(tmp_path / "kv/roots" / f"{'01' * 32}.json")
    assert StoreDirectory(tmp_path / "kv").identities()[b"\x01" * 32] is None  # type: ignore[index]
    assert opened_elsewhere(tmp_path / "kv") == "2"


@odd_things
def test_something_odd_in_the_journals_place(odd: Callable[[Path], object], tmp_path: Path) -> None:
    """A pipe was waited for, and a link to endless zeros read until memory was used up."""
    filled(tmp_path / "kv")
    (tmp_path / "kv/journal").unlink()
    odd(tmp_path / "kv/journal")
    assert opened_elsewhere(tmp_path / "kv") == "2", "the headers say what there is"
    assert opened_elsewhere(tmp_path / "kv") == "2"


def test_a_journal_that_is_a_directory_does_not_wear_out_the_drive(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not be replaced, so that with every piece of work a whole one was written for
    nothing."""
    driver = place.open(64)
    driver.write(KEYS)
    place.close()
    place.journal.unlink()
    full_directory(place.journal)
    driver = place.open(64)
    assert driver.present(KEYS) == [True] * 8
    written: list[int] = []
    real = os.write
    monkeypatch.setattr(
        journal.os, "write", lambda fd, data: written.append(len(data)) or real(fd, data)
    )
    for _ in range(100):
        driver.read(KEYS[:1])
    assert sum(written) < 100 * 200, "a whole one each time"
    monkeypatch.undo()
    assert place.open(64).present(KEYS) == [True] * 8


@odd_things
def test_something_odd_in_an_extents_place(odd: Callable[[Path], object], place: DiskPlace) -> None:
    """Its records are gone; whatever lies there now is left alone, and nobody stumbles over it."""
    driver = place.open(8, num_threads=1)
    driver.write(KEYS)
    place.close()
    extents = place.extents()
    odd_path = Path(extents[-1].path)
    odd_path.unlink()
    odd(odd_path)
    assert opened_elsewhere(place.path) == str(8 - extents[-1].size_bytes // extents[-1].slot_bytes)
    driver = place.open(8, num_threads=1)
    assert 0 < sum(driver.present(KEYS)) < 8
    for _ in range(3):
        assert {r.outcome for r in driver.write(KEYS)} == {"done"}
        assert driver.read(KEYS)[0].done
    place.check_books()
    assert place.open(8, num_threads=1).present(KEYS) == [True] * 8
    place.check_books()


@pytest.mark.parametrize(
    "name",
    [
        "99999999-12288.kv", "9999999999-12288.kv", "2147483648-12288.kv", "4294967295-12288.kv",
        "0000000001-12288.kv", "00000001-12289.kv", "00000001-0.kv", "00000001-04096.kv",
        "1-12288.kv", "00000001-12288.KV", "00000001-12288.kv.bak", "00000001.kv", "-1-4096.kv",
        "00000001-999999999999999.kv", "notes",
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [0, 5000, 24_576])
def test_files_with_odd_names_among_the_extents(place: DiskPlace, name: str, size: int) -> None:
    """What is no extent of ours is neither counted nor stumbled over, and new extents get numbers
    under which they are found again."""
    driver = place.open(8)
    driver.write(KEYS[:2])
    place.close()
    (place.path / "extents" / name).write_bytes(bytes(size))
    driver = place.open(8)
    assert driver.present(KEYS[:2]) == [True, True]
    for _ in range(2):
        assert {r.outcome for r in driver.write(KEYS)} == {"done"}
        assert driver.read(KEYS)[0].done
        driver = place.open(8)
        assert sum(driver.present(KEYS)) >= 5, "what was written is found again"
    assert place.tier is not None
    assert place.tier.used_bytes <= place.tier.allocated_bytes <= place.capacity_bytes


def test_two_extents_of_one_number(place: DiskPlace) -> None:
    """A file shorter than a slot was not entered, its number was given to a new extent of another
    slot size, and after the next start the records of one were looked for in the other."""
    driver = place.open(8, num_threads=1)
    driver.write(KEYS)
    place.close()
    for extent in place.extents():
        os.truncate(extent.path, 1000)
    driver = place.open(8, num_threads=1)
    assert driver.present(KEYS) == [False] * 8
    assert {r.outcome for r in driver.write(KEYS[:2], 20_000)} == {"done"}
    driver = place.open(8, num_threads=1)
    assert driver.present(KEYS[:2]) == [True, True]
    assert driver.read(KEYS[:2], 20_000)[0].done
    place.check_books()


def test_the_number_of_an_extent_is_not_given_again(place: DiskPlace) -> None:
    """An extent was removed by hand while the store was closed. The journal that still named its
    records went on; the next extent had the same number, and at the start after that the old
    records were back in it, as hits of nothing."""
    driver = place.open(8, num_threads=1)
    driver.write(KEYS)
    place.close()
    for extent in place.extents():
        os.unlink(extent.path)
    driver = place.open(8, num_threads=1)
    assert driver.present(KEYS) == [False] * 8
    driver.write([key_of("new")])
    driver = place.open(8, num_threads=1)
    assert driver.present([*KEYS, key_of("new")]) == [False] * 8 + [True]
    place.check_books()


@pytest.mark.parametrize("name", ["stepwell.json", "LOCK"])
def test_a_pipe_in_the_place_of_a_file_of_ours(name: str, tmp_path: Path) -> None:
    open_tier(tmp_path / "kv").close()
    (tmp_path / "kv" / name).unlink()
    os.mkfifo(tmp_path / "kv" / name)
    StoreDirectory(tmp_path / "kv").owner()
    if name == "stepwell.json":
        with pytest.raises(ConfigError):
            open_tier(tmp_path / "kv")


@pytest.mark.parametrize("folder", ["partial", "extents", "roots"])
def test_a_deep_directory(folder: str, tmp_path: Path) -> None:
    open_tier(tmp_path / "kv").close()
    place = tmp_path / "kv" / folder / "deep"
    deep(place)
    try:
        open_tier(tmp_path / "kv").close()
        assert place.exists() is (folder != "partial"), "which is emptied, however deep"
    finally:
        remove_deep(place)
    open_tier(tmp_path / "kv").close()


def test_a_deep_directory_in_a_descriptions_place(tmp_path: Path) -> None:
    filled(tmp_path / "kv")
    place = tmp_path / "kv/roots" / f"{'01' * 32}.json"
    deep(place)
    try:
        open_tier(tmp_path / "kv").close()
    finally:
        remove_deep(place)


def test_a_start_without_enough_threads_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock, the extents and the journal stayed open, so that the next try was refused."""
    filled(tmp_path / "kv")
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    real, started = threading.Thread.start, []

    def start(self: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(self)
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError):
            DiskTier(tmp_path / "kv", 64 << 20, TierContext(), num_threads=8)
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == files
    open_tier(tmp_path / "kv").close()


# A store that is taken away while it is open.


def test_a_lock_that_was_removed_makes_no_second_owner(tmp_path: Path) -> None:
    first = open_tier(tmp_path / "kv")
    driver = Driver(first)
    remove_at_once(tmp_path / "kv")
    assert all(result.outcome == "done" for result in driver.write([key_of("a")]))
    with pytest.raises(ConfigError, match="another process"):
        open_tier(tmp_path / "kv")
    first.close()


def test_whoever_lost_the_store_writes_no_more(tmp_path: Path) -> None:
    first = open_tier(tmp_path / "kv")
    remove_at_once(tmp_path / "kv")
    second = open_tier(tmp_path / "kv")
    assert [r.outcome for r in Driver(first).write([key_of("a")])] == ["failed"]
    assert [r.outcome for r in Driver(second).write([key_of("a")])] == ["done"]
    first.close()
    second.close()


def test_a_removed_lock_is_taken_again_or_the_store_is_lost(tmp_path: Path) -> None:
    """Only LOCK was removed: both owners wrote on, each up to the whole capacity."""
    first = open_tier(tmp_path / "kv")
    driver = Driver(first)
    driver.write([key_of("a")])
    (tmp_path / "kv/LOCK").unlink()
    assert [r.outcome for r in driver.write([key_of("b")])] == ["done"]
    with pytest.raises(ConfigError, match="another process"):
        open_tier(tmp_path / "kv")
    (tmp_path / "kv/LOCK").unlink()
    second = open_tier(tmp_path / "kv")
    assert [r.outcome for r in driver.write([key_of("c")])] == ["failed"]
    assert driver.read([key_of("b")])[0].done, "what is there may still be read"
    first.close()
    second.close()


def test_whoever_lost_the_store_leaves_the_new_owners_files_alone(place: DiskPlace) -> None:
    """Only LOCK was removed, and another process opened the store. The former owner noticed at
    its next write, and began anew by removing all extents: the new owner's. It also went on
    writing to the journal, and wiped what it deleted, in slots that were no longer its own."""
    driver = place.open(16)
    driver.write(KEYS[:4])
    assert place.tier is not None
    first = place.tier
    (place.path / "LOCK").unlink()
    place.tier = None
    theirs = place.open(16)
    assert theirs.present(KEYS[:4]) == [True] * 4
    theirs.write(KEYS[4:])
    assert {r.outcome for r in driver.write([key_of("lost")])} == {"failed"}
    driver.read(KEYS[:4])
    driver.touch(KEYS[:4])
    first.delete(KEYS[:2])
    assert first.drain(30)
    first.close()
    place.check_books()
    assert theirs.read(KEYS)[0].done
    theirs = place.open(16)
    assert theirs.present(KEYS) == [True] * 8
    assert theirs.read(KEYS)[0].done
    place.check_books()


@pytest.mark.parametrize("how", ["owned in between", "a backup", "a link"])
def test_what_another_store_left_is_not_touched(place: DiskPlace, how: str) -> None:
    """The former owner took the store back when nobody owned it, and began anew by removing every
    extent that lay there: those of another process, of a backup, or of another store."""
    driver = place.open(16)
    driver.write(KEYS)
    assert place.tier is not None
    first, place.tier = place.tier, None
    if how == "owned in between":
        (place.path / "LOCK").unlink()
    else:
        place.path.rename(place.path.with_name("away"))
        if how == "a link":
            place.path.with_name("other").mkdir()
            place.path.symlink_to(place.path.with_name("other"))
    theirs = [key_of(f"theirs {idx}") for idx in range(12)]
    place.open(16).write(theirs)
    place.open(16).write([key_of("large")], 20_000)
    there = place.open(16).present(theirs)
    assert any(there)
    place.close()
    for idx in range(3):
        place.clock.advance(2.0)
        assert {r.outcome for r in driver.write([key_of(f"new {idx}")])} == {"failed"}
    first.close()
    assert place.open(16).present([*theirs, key_of("large")]) == [*there, True]
    assert place.tier is not None
    place.check_books()


def test_a_store_removed_just_when_an_extent_is_made(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders were made again, but for the marker, without which nobody takes a directory for
    a store: every write failed from then on, and so did the next start."""
    driver = place.open(16, num_threads=1)
    driver.write(KEYS[:4])
    real, removed = StoreDirectory.make_folders, []

    def remove_and_make(directory: StoreDirectory) -> None:
        if not removed:
            removed.append(True)
            remove_at_once(place.path)
        real(directory)

    monkeypatch.setattr(StoreDirectory, "make_folders", remove_and_make)
    driver.write(KEYS[4:])
    assert removed
    assert {r.outcome for r in driver.write([key_of("a")])} == {"done"}
    place.check_books()
    driver = place.open(16, num_threads=1)
    assert driver.present([key_of("a")]) == [True]


def test_a_store_removed_while_writes_are_in_flight(place: DiskPlace) -> None:
    """Their extents were never dropped: their part of the capacity was lost until a restart."""
    driver = place.open(16, num_threads=4)
    driver.write(KEYS[:4])
    payload_bytes = driver.payload_bytes
    with stalled_calls(blockio, "write_run"):
        chunks = driver.write_chunks({key: payload_of(key, payload_bytes) for key in KEYS[4:6]})
        first = driver.submit(Direction.WRITE, chunks)
        driver.wait_until(
            lambda: driver.tier.contains(KEYS[4:6]) == [Lookup.PENDING] * 2, "a write under way"
        )
        remove_at_once(place.path)
        chunks = driver.write_chunks({key: payload_of(key, payload_bytes) for key in KEYS[6:]})
        second = driver.submit(Direction.WRITE, chunks)
        driver.wait_until((place.path / "LOCK").exists, "a new beginning")
    assert driver.wait(second).done
    driver.wait(first)
    driver.tier.delete(KEYS[4:6])
    new = [key_of(f"new {idx}") for idx in range(16)]
    # Space follows a little later.
    driver.wait_until(
        lambda: {r.outcome for r in driver.write(new)} == {"done"} and all(driver.present(new)),
        "the whole capacity",
    )
    place.check_books()


# What is removed or replaced while the store is in use: nothing of anybody else's is touched.


REAL_WRITE_NEW = Journal._write_new


def present_after_a_kill(place: DiskPlace, keys: Sequence[Key]) -> list[bool]:
    """What a start finds that comes upon the store as it is just now."""
    copy = DiskPlace(place.path.with_name("killed"))
    assert place.tier is not None
    assert place.tier.drain(30), "or what is renamed meanwhile could not be copied"
    shutil.copytree(place.path, copy.path)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "_write_new", REAL_WRITE_NEW)  # it may have no room here
            return copy.open(16).present(keys)
    finally:
        copy.close()
        shutil.rmtree(copy.path)


def test_a_link_in_the_extents_place_leads_to_nobodys_files(
    place: DiskPlace, tmp_path: Path
) -> None:
    """The extents were missed, and removed by name: through the link, somebody else's."""
    driver = place.open(16)
    driver.write(KEYS)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for extent in place.extents():
        (theirs / Path(extent.path).name).write_text("somebody else's")
    before = sorted(os.listdir(theirs))
    shutil.rmtree(place.path / "extents")
    (place.path / "extents").symlink_to(theirs)
    for idx in range(3):
        place.clock.advance(2.0)
        assert {r.outcome for r in driver.write([key_of(f"new {idx}")])} == {"failed"}
    assert sorted(os.listdir(theirs)) == before
    assert {path.read_text() for path in theirs.iterdir()} == {"somebody else's"}
    (place.path / "extents").unlink()
    place.clock.advance(2.0)
    assert {r.outcome for r in driver.write([key_of("well again")])} == {"done"}
    place.check_books()


def test_a_copy_that_took_an_extents_place_is_gone_on_with(place: DiskPlace) -> None:
    """As `rsync` and defragmenters do it. It was lost, and what lay under its name by then was
    removed; or, left there, it came on top of the capacity."""
    driver = place.open(16)
    keys = [key_of(idx) for idx in range(16)]
    driver.write(keys)
    for turn in range(3):
        for extent in place.extents():
            copy = Path(extent.path).read_bytes()
            os.unlink(extent.path)
            Path(extent.path).write_bytes(copy)
        place.clock.advance(2.0)
        new = key_of(f"new {turn}")
        assert {r.outcome for r in driver.write([new])} == {"done"}
        assert sum(driver.present(keys)) == 15 - turn
        assert driver.read([new])[0].done
        assert place.lying_bytes() <= place.capacity_bytes + 4096, "and what is no extent"
        place.check_books()
    assert sum(place.open(16).present(keys)) == 13


def test_another_file_in_an_extents_place_is_moved_and_not_removed(place: DiskPlace) -> None:
    driver = place.open(16)
    driver.write(KEYS[:2])
    (extent,) = place.extents()
    os.unlink(extent.path)
    Path(extent.path).write_text("somebody's")
    place.clock.advance(2.0)
    assert {r.outcome for r in driver.write([key_of("new")])} == {"done"}
    assert driver.present([*KEYS[:2], key_of("new")]) == [False, False, True]
    place.check_books()
    assert [path.read_text() for path in (place.path / "strays").iterdir()] == ["somebody's"]


def test_a_journal_that_was_replaced_is_made_anew(place: DiskPlace) -> None:
    """By an older copy of itself: what was written from then on was absent after a restart."""
    driver = place.open(16)
    driver.write(KEYS[:2])
    older = place.journal.read_bytes()
    driver.write(KEYS[2:4])
    place.journal.unlink()
    place.journal.write_bytes(older)
    place.clock.advance(2.0)
    assert {r.outcome for r in driver.write(KEYS[4:])} == {"done"}
    assert present_after_a_kill(place, KEYS) == [True] * 8


def test_an_extent_that_was_moved_away_is_lost(place: DiskPlace, tmp_path: Path) -> None:
    """It has a name still, only not here: what was written to it was absent after a restart."""
    driver = place.open(16)
    driver.write(KEYS[:2])
    (extent,) = place.extents()
    os.rename(extent.path, tmp_path / "moved")
    place.clock.advance(2.0)
    assert {r.outcome for r in driver.write([key_of("new")])} == {"done"}
    place.check_books()
    assert place.open(16).present([*KEYS[:2], key_of("new")]) == [False] * 2 + [True]


def test_what_is_being_written_when_its_extent_is_lost_does_not_stay(
    place: DiskPlace, caplog: pytest.LogCaptureFixture
) -> None:
    """It was there until the end of the process and absent afterwards; its extent stayed open, the
    capacity taken, and that extents were removed was said every second."""
    driver = place.open(16, num_threads=2)
    driver.write(KEYS[:2])
    real, reached, goes_on = blockio.write_run, threading.Event(), threading.Event()

    def write_run(*args: Any) -> None:
        if not reached.is_set():
            reached.set()
            assert goes_on.wait(30)
        real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockio, "write_run", write_run)
        payload = payload_of(KEYS[2], driver.payload_bytes)
        job_id = driver.submit(Direction.WRITE, driver.write_chunks({KEYS[2]: payload}))
        assert reached.wait(30)
        for extent in place.extents():
            os.unlink(extent.path)
        place.clock.advance(2.0)
        assert {r.outcome for r in driver.write([key_of("other")])} == {"done"}
        goes_on.set()
        driver.wait(job_id)
    for idx in range(3):
        place.clock.advance(2.0)
        driver.write([key_of(f"later {idx}")])
    assert driver.present([KEYS[2], key_of("other")]) == [False, True]
    place.check_books()
    assert len([each for each in caplog.records if "were removed" in each.message]) == 1
    assert {r.outcome for r in driver.write([key_of(f"all {n}") for n in range(16)])} == {"done"}


def test_a_folder_that_was_removed_does_not_let_the_journal_grow(place: DiskPlace) -> None:
    """A new journal is made in `partial`; without it every renewal failed, and the old one grew
    beyond the capacity."""
    driver = place.open(16, num_threads=1)
    driver.write([key_of(idx) for idx in range(16)])
    (place.path / "partial").rmdir()
    for idx in range(400):
        place.clock.advance(0.1)
        driver.write([key_of(f"new {idx}")])
        assert place.lying_bytes() <= place.capacity_bytes + 4096, "and what is no extent"
    place.check_books()


@pytest.mark.parametrize("when", ["always", "within a second"])
def test_a_journal_that_can_not_be_renewed_leaves_none_behind(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It was said that a chunk is written, and written over what was evicted for it, while the
    journal that lay there said neither."""
    driver = place.open(16, num_threads=1)
    driver.write([key_of(idx) for idx in range(16)])
    monkeypatch.setattr(Journal, "_write_new", failing_write)
    written = []
    for idx in range(300):
        place.clock.advance(2.0 if when == "always" else 0.001)
        assert {r.outcome for r in driver.write([key_of(f"new {idx}")])} == {"done"}
        written.append(key_of(f"new {idx}"))
        assert place.lying_bytes() <= place.capacity_bytes + 4096, "and what is no extent"
        if idx % 50 == 49:
            assert all(present_after_a_kill(place, written[-16:]))
    monkeypatch.undo()
    place.clock.advance(2.0)
    driver.write([key_of("well again")])
    place.check_books()
    assert place.journal.exists()


def failing_write(self: Journal, head: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_start_that_cannot_renew_the_journal_removes_the_old_one(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named less than there was from then on, and was believed by the start after a kill."""
    place.open(16).write([key_of("a"), *KEYS])
    place.close()
    os.unlink(place.extents()[0].path)
    monkeypatch.setattr(Journal, "_write_new", failing_write)
    driver = place.open(16)
    assert {r.outcome for r in driver.write(KEYS[:2])} == {"done"}
    monkeypatch.undo()
    assert present_after_a_kill(place, KEYS[:2]) == [True] * 2


def test_a_new_beginning_that_cannot_write_its_journal_leaves_no_other(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lay there was another owner's, and ours went on in a file without a name."""
    driver = place.open(16)
    driver.write(KEYS[:4])
    assert place.tier is not None
    first, place.tier = place.tier, None
    remove_at_once(place.path)
    place.open(16)
    place.close()
    place.tier = first
    monkeypatch.setattr(Journal, "_write_new", failing_write)
    assert {r.outcome for r in driver.write([key_of("new")])} == {"done"}
    monkeypatch.undo()
    assert present_after_a_kill(place, [key_of("new")]) == [True]
    place.clock.advance(2.0)
    assert {r.outcome for r in driver.write([key_of("newer")])} == {"done"}
    place.check_books()
    assert place.journal.exists()


def test_whoever_lost_the_store_leaves_the_new_owners_journal_alone(place: DiskPlace) -> None:
    """Writing what it had already, it looked at nothing, and put a journal of its own in the
    other's place: what that one had written was absent from then on."""
    driver = place.open(16)
    driver.write(KEYS[:4])
    assert place.tier is not None
    first, place.tier = place.tier, None
    remove_at_once(place.path)
    theirs = place.open(16)
    theirs.write(KEYS[4:])
    for _ in range(120):
        driver.read(KEYS[:4])
    assert {r.reason for r in driver.write(KEYS[:4])} == {"exists"}
    assert first.drain(30)
    theirs.write([key_of("more")])
    place.close()
    theirs = place.open(16)
    assert theirs.present([*KEYS[4:], key_of("more")]) == [True] * 5
    assert theirs.present(KEYS[:4]) == [False] * 4
    first.close()
    place.check_books()


def test_a_file_too_short_for_an_extent_is_moved_and_not_removed(place: DiskPlace) -> None:
    """`check --fix` moves it, and says that it never deletes anything; a start deleted it."""
    place.open(16).write(KEYS)
    place.close()
    (place.path / "extents/00000007-1048576.kv").write_text("somebody's")
    assert place.open(16).present(KEYS) == [True] * 8
    place.check_books()
    assert [path.read_text() for path in (place.path / "strays").iterdir()] == ["somebody's"]


@pytest.mark.parametrize("number", ["2147483646", "2147483647", "4294967295", "9999999999"])
def test_an_extent_of_the_last_number_stops_nothing(place: DiskPlace, number: str) -> None:
    """New extents got numbers that no place can hold: every write that needed room failed."""
    place.open(64).write(KEYS[:2])
    place.close()
    (place.path / f"extents/{number}-8192.kv").write_bytes(bytes(8192))
    driver = place.open(64)
    new = [key_of(idx) for idx in range(40)]
    assert {r.outcome for r in driver.write(new)} == {"done"}
    assert driver.read([*KEYS[:2], *new])[0].done
    assert place.open(64).read([*KEYS[:2], *new])[0].done


def test_a_file_that_has_a_new_extents_name_is_not_replaced(place: DiskPlace) -> None:
    """Somebody put it there while the engine ran."""
    driver = place.open(16)
    driver.write(KEYS[:1])
    (first,) = place.extents()
    taken = Path(first.path.replace("00000000-", "00000001-"))
    taken.write_text("somebody's")
    driver.write(KEYS)
    place.clock.advance(2.0)
    assert {r.outcome for r in driver.write([key_of("new")])} == {"done"}
    assert taken.read_text() == "somebody's"


@pytest.mark.parametrize("wall_s", [-1e9, 5e9, 1e30])
def test_a_clock_that_is_far_off_does_no_harm(place: DiskPlace, wall_s: float) -> None:
    """Beyond what a column holds the books were left half changed: slots were given away twice,
    and good records set aside."""
    driver = place.open(16)
    driver.write(KEYS[:4])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place.clock, "wall", lambda: wall_s)
        assert {r.outcome for r in driver.write(KEYS[4:])} == {"done"}
        assert driver.read(KEYS)[0].done
        driver.touch(KEYS)
        place.check_books()
    assert driver.read(KEYS)[0].done
    place.check_books()
    assert place.open(16).read(KEYS)[0].done
