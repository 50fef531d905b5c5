"""Odd things in a store's directory: no hang, no crash, no lock or thread left behind.

Each of these once hung the start for ever, ended it with a traceback, or kept the lock so that
the next try was refused by the process itself.
"""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.errors import ConfigError
from stepwell.testing import Driver, key_of
from stepwell.tiers import jobs
from stepwell.tiers.base import TierContext
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.disk import DiskTier


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


DESCRIPTIONS: list[tuple[str, Callable[[Path], object]]] = [
    (
        "not a number",
        lambda p: p.write_text('{"identity_version":1,"fields":{"a":NaN},"labels":{}}'),
    ),
    ("nested", lambda p: p.write_text("[" * 200_000)),
    ("a pipe", os.mkfifo),
    ("a link to a device", lambda p: p.symlink_to("/dev/zero")),
    ("a directory", lambda p: p.mkdir()),
    ("huge", lambda p: p.write_bytes(b" " * (2 << 20))),
]


@pytest.mark.parametrize("place", [d[1] for d in DESCRIPTIONS], ids=[d[0] for d in DESCRIPTIONS])
def test_an_odd_description(place: Callable[[Path], object], tmp_path: Path) -> None:
    open_tier(tmp_path / "kv").close()
    root = tmp_path / "kv/roots" / ("01" * 32)
    root.mkdir()
    place(root / "root.json")
    assert list(StoreDirectory(tmp_path / "kv").identities().values()) == [None]
    open_tier(tmp_path / "kv").close()


@pytest.mark.parametrize("name", ["stepwell.json", "LOCK"])
def test_a_pipe_in_the_place_of_a_file_of_ours(name: str, tmp_path: Path) -> None:
    open_tier(tmp_path / "kv").close()
    (tmp_path / "kv" / name).unlink()
    os.mkfifo(tmp_path / "kv" / name)
    StoreDirectory(tmp_path / "kv").owner()
    if name == "stepwell.json":
        with pytest.raises(ConfigError):
            open_tier(tmp_path / "kv")


@pytest.mark.parametrize("folder", ["partial", "quarantine"])
def test_a_deep_directory(folder: str, tmp_path: Path) -> None:
    open_tier(tmp_path / "kv").close()
    place = tmp_path / "kv" / folder / "deep"
    deep(place)
    try:
        if folder == "partial":
            with pytest.raises(ConfigError, match="too deep"):
                open_tier(tmp_path / "kv")
        else:
            open_tier(tmp_path / "kv").close()
    finally:
        remove_deep(place)
    open_tier(tmp_path / "kv").close()


def test_a_deep_directory_in_a_records_place(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "kv")
    driver = Driver(tier)
    driver.write([key_of("a"), key_of("b")])
    record = next((tmp_path / "kv/roots").glob("*/*/*.kv"))
    record.unlink()
    deep(record)
    tier.delete([key_of("a"), key_of("b")])
    assert tier.drain(30), "the errand's failure ended its thread"
    assert driver.write([key_of("c")])
    tier.close()
    remove_deep(record)


def test_a_start_without_enough_threads_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    real, started = threading.Thread.start, []

    def start(self: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(self)
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(jobs.threading.Thread, "start", start)
        with pytest.raises(RuntimeError):
            DiskTier(tmp_path / "kv", 64 << 20, TierContext(), num_threads=8)
    assert set(threading.enumerate()) == before
    open_tier(tmp_path / "kv").close()


def test_a_lock_that_was_removed_makes_no_second_owner(tmp_path: Path) -> None:
    first = open_tier(tmp_path / "kv")
    driver = Driver(first)
    shutil.rmtree(tmp_path / "kv")
    assert all(result.outcome == "done" for result in driver.write([key_of("a")]))
    with pytest.raises(ConfigError, match="another process"):
        open_tier(tmp_path / "kv")
    first.close()


def test_whoever_lost_the_store_writes_no_more(tmp_path: Path) -> None:
    first = open_tier(tmp_path / "kv")
    shutil.rmtree(tmp_path / "kv")
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
    assert driver.read([key_of("a")])[0].done, "what is there may still be read"
    first.close()
    second.close()
