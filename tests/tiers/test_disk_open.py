"""Opening a disk tier: what is refused, in one clear line, and with nothing half-started."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stepwell.core.types import ChunkResult, Outcome
from stepwell.errors import ConfigError
from stepwell.testing import key_of, payload_of
from stepwell.tiers import drive
from stepwell.tiers.directory import FORMAT, StoreDirectory

from .conftest import DiskPlace

DONE = ChunkResult(Outcome.DONE)

HOLDER = """
import sys, time
from pathlib import Path
from stepwell.tiers.base import TierContext
from stepwell.tiers.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), 1 << 20, TierContext(), num_threads=1)
print("open", flush=True)
time.sleep(60)
"""


def refused(place: DiskPlace, **settings: object) -> str:
    """The message of the refusal: one line that ends in the path; no thread or file is left."""
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError) as caught:
        place.open(**settings)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files
    message = str(caught.value)
    assert "\n" not in message
    assert f"path={place.path}" in message
    return message


def test_a_new_directory_is_made_with_its_parents(place: DiskPlace) -> None:
    place.path = place.path / "a" / "b"
    place.open().write([key_of("x")])
    assert json.loads((place.path / "stepwell.json").read_text()) == {"format": FORMAT}
    assert sorted(os.listdir(place.path)) == [
        "LOCK", "extents", "journal", "partial", "roots", "stepwell.json"
    ]  # fmt: skip


def test_an_empty_directory_is_adopted(place: DiskPlace) -> None:
    """Also a fresh file system, and what a process left that was killed while it began."""
    (place.path / "lost+found").mkdir(parents=True)
    (place.path / "stepwell.json.1234abcd").write_text('{"for')
    assert place.open().write([key_of("x")]) == (DONE,)


def test_a_path_that_is_a_file(place: DiskPlace) -> None:
    place.path.write_text("mine")
    assert "path is a file" in refused(place)
    assert place.path.read_text() == "mine"


def test_a_path_through_a_file(place: DiskPlace) -> None:
    place.path.write_text("mine")
    place.path = place.path / "below"
    assert "leads through one" in refused(place)


def test_a_directory_of_somebody_else(place: DiskPlace) -> None:
    """Nothing is added to it."""
    place.path.mkdir()
    (place.path / "thesis.tex").write_text("mine")
    assert "found=thesis.tex" in refused(place)
    assert os.listdir(place.path) == ["thesis.tex"]


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ("", "damaged"),
        ("{", "damaged"),
        ("\0" * 14, "damaged"),
        ("[]", "damaged"),
        ('"format"', "damaged"),
        ("{}", "damaged"),
        (f'{{"format": {FORMAT + 1}}}', f"format={FORMAT + 1}"),
        (f'{{"format": "{FORMAT}"}}', "damaged"),
    ],
)
def test_a_marker_that_is_not_ours(place: DiskPlace, marker: str, words: str) -> None:
    """Refused, records untouched; with the marker mended everything is there."""
    place.open().write([key_of("x")])
    place.close()
    (place.path / "stepwell.json").write_text(marker)
    assert words in refused(place)
    with pytest.raises(ConfigError):
        StoreDirectory(place.path).open_to_read()
    (place.path / "stepwell.json").write_text(f'{{"format": {FORMAT}}}')
    assert place.open().present([key_of("x")]) == [True]


def test_a_store_of_the_first_format(place: DiskPlace) -> None:
    """A file per record, as written by 0.1: refused with both numbers, and left as it is."""
    record = place.path / "roots" / ("01" * 32) / "a0" / f"{'a0' * 32}.kv"
    record.parent.mkdir(parents=True)
    record.write_bytes(b"a record")
    (place.path / "stepwell.json").write_text('{"format": 1}\n')
    message = refused(place)
    assert "format=1" in message
    assert f"known_format={FORMAT}" in message
    assert record.read_bytes() == b"a record"
    assert sorted(os.listdir(place.path)) == ["roots", "stepwell.json"]


def test_a_marker_in_another_encoding(place: DiskPlace) -> None:
    place.open()
    place.close()
    (place.path / "stepwell.json").write_bytes(b"\xff\xfe{")
    assert "damaged" in refused(place)


def test_a_marker_that_is_a_directory(place: DiskPlace) -> None:
    (place.path / "stepwell.json").mkdir(parents=True)
    refused(place)


def test_a_store_without_its_marker_is_refused(place: DiskPlace) -> None:
    """It might be anything; the records stay."""
    place.open().write([key_of("x")])
    place.close()
    (place.path / "stepwell.json").unlink()
    assert "no Stepwell store" in refused(place)
    assert place.slot_of(key_of("x")).read()


@pytest.mark.parametrize("name", ["LOCK", "roots", "partial", "extents"])
def test_something_in_the_way_of_what_is_ours(place: DiskPlace, name: str) -> None:
    place.open()
    place.close()
    ours = place.path / name
    ours.unlink() if ours.is_file() else ours.rmdir()
    ours.mkdir() if name == "LOCK" else ours.write_text("in the way")
    assert "cannot be written" in refused(place)
    ours.rmdir() if name == "LOCK" else ours.unlink()
    place.open()


def test_a_capacity_larger_than_the_file_system(place: DiskPlace) -> None:
    status = os.statvfs(place.path.parent)
    total_bytes = status.f_blocks * status.f_frsize
    assert "larger than the file system" in refused(place, capacity_bytes=total_bytes + 1)
    place.open(capacity_bytes=total_bytes)
    place.close()
    assert "capacity=" in refused(place, capacity_bytes=total_bytes - 100, min_free_bytes=101)
    place.open(capacity_bytes=total_bytes - 100, min_free_bytes=100)


def test_an_unknown_policy(place: DiskPlace) -> None:
    with pytest.raises(ConfigError, match="no such eviction policy"):
        place.open(policy="belady")
    place.open()


def test_a_store_that_another_process_holds(place: DiskPlace) -> None:
    """Refused with the owner's process id; free again when the owner was killed."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place.path)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        assert f"pid={holder.pid}" in refused(place)
        assert StoreDirectory(place.path).owner() == holder.pid
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert StoreDirectory(place.path).owner() is None
    assert place.open().write([key_of("x")]) == (DONE,)
    assert StoreDirectory(place.path).owner() == os.getpid()
    for odd in ("\N{SUPERSCRIPT TWO}", "-1", "", "1 2"):
        (place.path / "LOCK").write_text(f"{odd}\n")
        assert StoreDirectory(place.path).owner() == 0, "somebody"
    place.close()
    assert StoreDirectory(place.path).owner() is None


def test_a_store_that_this_process_holds(place: DiskPlace) -> None:
    place.open()
    other = DiskPlace(place.path)
    assert f"pid={os.getpid()}" in refused(other)


def test_a_refused_second_owner_harms_nothing(place: DiskPlace) -> None:
    """The first goes on, and what it wrote is there."""
    driver = place.open()
    keys = [key_of(idx) for idx in range(4)]
    driver.write(keys[:2])
    before = sorted(path.relative_to(place.path) for path in place.files())
    refused(DiskPlace(place.path))
    assert sorted(path.relative_to(place.path) for path in place.files()) == before
    driver.write(keys[2:])
    assert driver.read(keys)[0].done
    assert place.open().present(keys) == [True] * 4


def test_asking_for_the_owner_is_not_owning(place: DiskPlace) -> None:
    """The question takes the lock for a moment; a store that was opened just then was refused."""
    place.open()
    place.close()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            StoreDirectory(place.path).owner()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(20):
            place.open(num_threads=1)
            place.close()
    finally:
        stop.set()
        asking.join()


def test_a_refusal_gives_the_store_back(place: DiskPlace) -> None:
    """After a refused size the next try is not told that somebody uses the store."""
    assert "larger" in refused(place, capacity_bytes=1 << 62)
    place.open()


def test_what_a_killed_writer_left_is_removed(place: DiskPlace) -> None:
    place.open()
    place.close()
    (place.path / "partial" / "0123").write_bytes(bytes(5000))
    (place.path / "partial" / "dir").mkdir()
    place.open()
    assert os.listdir(place.path / "partial") == []


def test_reading_a_store_needs_one(place: DiskPlace) -> None:
    directory = StoreDirectory(place.path)
    with pytest.raises(ConfigError, match="does not exist"):
        directory.open_to_read()
    place.path.write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        directory.open_to_read()
    place.path.unlink()
    place.path.mkdir()
    with pytest.raises(ConfigError, match="no Stepwell store here"):
        directory.open_to_read()
    assert os.listdir(place.path) == []
    place.open()
    directory.open_to_read()  # also while somebody owns it


def test_without_direct_io_a_warning_says_so(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drive, "probe_direct", lambda _: False)
    driver = place.open()
    assert f"O_DIRECT does not work here, going through the page cache: path={place.path}" in (
        caplog.text
    )
    assert place.tier is not None
    assert not place.tier.direct
    driver.write([key_of("x")])
    assert driver.read([key_of("x")])[1] == [payload_of(key_of("x"), driver.payload_bytes)]


def test_a_file_that_cannot_be_opened_leaves_no_other_open(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many extents one could not be opened: the start failed, and the others, and the journal,
    stayed open for as long as the process lived."""
    place.open(64).write([key_of(idx) for idx in range(64)])
    place.close()
    names = [Path(extent.path).name for extent in place.extents()]
    assert len(names) > 2
    real = os.open

    def fail(path: str, *args: int, **kwargs: int) -> int:
        if path == names[-1]:
            raise OSError(5, "Input/output error")
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert "Input/output error" in refused(place)
    assert sum(place.open().present([key_of(idx) for idx in range(64)])) == 64


def test_closing_leaves_no_file_open_and_no_thread(place: DiskPlace) -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for capacity in (64, 8, 64):
        driver = place.open(capacity)
        driver.write([key_of(idx) for idx in range(64)])
        driver.write([key_of("other size")], 50_000)
        driver.tier.delete([key_of(1)])
        place.close()
        place.close()
        assert len(os.listdir("/proc/self/fd")) == files
        assert threading.active_count() == threads


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written(place: DiskPlace) -> None:
    place.path.mkdir()
    Path(place.path).chmod(0o555)
    try:
        assert "cannot be written (Permission denied)" in refused(place)
    finally:
        Path(place.path).chmod(0o755)
