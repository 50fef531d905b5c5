"""Whatever is wrong with a store, the check finds it and says what it is; fixing sets it aside."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import xxhash

from ops.stores import (
    DAMAGES,
    PAYLOAD_BYTES,
    identity,
    keys_of,
    open_store,
    payload_of,
    read_store,
    record_path,
    snapshot,
    write_store,
)
from stepwell.core.keys import make_key
from stepwell.core.record import Header
from stepwell.core.types import Chunk, Outcome
from stepwell.errors import ConfigError
from stepwell.ops.check import UNREADABLE, Action, CheckReport, check_store
from stepwell.tiers.directory import StoreDirectory


def check(path: Path, *, fix: bool = False) -> CheckReport:
    return check_store(path, now_s=time.time(), fix=fix)


def test_a_good_store_is_good_and_stays_as_it_is(tmp_path: Path) -> None:
    write_store(tmp_path / "kv")
    before = snapshot(tmp_path)
    sizes: list[int] = []
    report = check_store(
        tmp_path / "kv", now_s=time.time(), on_start=sizes.append, on_record=sizes.append
    )
    assert report.ok
    assert (report.num_roots, report.num_records) == (1, 3)
    assert sizes == [report.size_bytes, *[4096 + 8192] * 3]
    assert not report.undescribed
    assert not report.num_leftovers
    assert snapshot(tmp_path) == before


def test_an_empty_store_is_good(tmp_path: Path) -> None:
    write_store(tmp_path / "kv", count=1)
    for record in (tmp_path / "kv").rglob("*.kv"):
        record.unlink()
    assert check(tmp_path / "kv").ok


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_fixed(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    do, reason, num_bad = DAMAGES[damage]
    do(record_path(path, keys[0]), keys[0])
    before = snapshot(path)

    report = check(path)
    assert [each.reason for each in report.bad] == [reason] * num_bad
    assert {each.action for each in report.bad} == {Action.NONE}
    assert not report.ok
    assert snapshot(path) == before

    fixed = check(path, fix=True)
    assert [each.path for each in fixed.bad] == [each.path for each in report.bad]
    assert {each.action for each in fixed.bad} == {Action.QUARANTINED}
    names = [entry.name for entry in (path / "quarantine").iterdir()]
    assert len(names) == num_bad
    assert all(f".{reason}." in name for name in names)
    assert check(path).ok


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_the_check_leaves_is_what_the_store_serves(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    DAMAGES[damage][0](record_path(path, keys[0]), keys[0])
    check(path, fix=True)
    present = [key for key in keys if record_path(path, key).is_file()]
    assert [outcome for outcome, _ in read_store(path, present)] == [Outcome.DONE] * len(present)
    # And what was set aside can be stored again.
    write_store(path)
    assert [outcome for outcome, _ in read_store(path, keys)] == [Outcome.DONE] * len(keys)
    assert check(path).ok


@pytest.mark.parametrize(
    "damage",
    [name for name, (_, reason, num_bad) in DAMAGES.items()
     if reason in ("checksum", "header", "not_a_file")
     or name in ("an empty file", "a page is missing", "swapped with another record")],
)  # fmt: skip
def test_the_store_gives_the_same_reason(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    do, reason, _ = DAMAGES[damage]
    do(record_path(path, keys[0]), keys[0])
    assert read_store(path, keys)[0] == (Outcome.MISS, reason)


def test_everything_at_once(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keys = write_store(path, count=12)
    for key, damage in zip(
        keys, ("an empty file", "a flipped bit in the payload", "a directory"), strict=False
    ):
        DAMAGES[damage][0](record_path(path, key), key)
    report = check(path)
    assert sorted(each.reason for each in report.bad) == ["checksum", "not_a_file", "truncated"]
    assert report.num_records == 12


def test_leftovers_of_a_killed_engine_are_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write_store(path)
    (path / "partial" / "0123").write_bytes(b"x" * 100)
    report = check(path)
    assert report.ok
    assert (report.num_leftovers, report.leftover_bytes) == (1, 100)
    assert (path / "partial" / "0123").exists()
    assert check(path, fix=True).num_leftovers == 1
    assert not list((path / "partial").iterdir())
    assert check(path).num_leftovers == 0


def test_a_missing_description_is_said_and_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    (record_path(path, keys[0]).parents[1] / "root.json").unlink()
    report = check(path)
    assert report.ok
    assert report.undescribed == (keys[0][:32],)


def test_expired_records_are_counted_and_good(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    key = write_store(path)[0]
    record = record_path(path, key)
    old = Header.unpack(record.read_bytes())
    expired = Header(key, old.payload_bytes, old.checksum, old.stored_at_us, expires_at_us=1)
    record.write_bytes(expired.pack() + record.read_bytes()[4096:])
    report = check(path)
    assert report.ok
    assert report.num_expired == 1


def test_two_roots(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write_store(path)
    other = write_store(path, identity(tp=2))
    DAMAGES["an empty file"][0](record_path(path, other[1]), other[1])
    report = check(path)
    assert (report.num_roots, report.num_records, len(report.bad)) == (2, 6, 1)


def test_fixing_needs_ownership(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write_store(path)
    owner = StoreDirectory(path)
    owner.open()
    try:
        with pytest.raises(ConfigError, match=f"an engine uses this store.*pid={os.getpid()}"):
            check(path, fix=True)
        report = check(path)
        assert report.ok
        assert report.owner_pid == os.getpid()
    finally:
        owner.close()
    assert check(path, fix=True).ok


def test_what_may_not_be_read_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    forbidden = str(record_path(path, keys[0]))
    really_open = os.open

    def refuse(name, *args, **kwargs):
        if name == forbidden:
            raise PermissionError(13, "Permission denied", name)
        return really_open(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    (bad,) = check(path, fix=True).bad
    assert (bad.reason, bad.action) == (UNREADABLE, Action.FAILED)
    assert os.path.exists(forbidden)


def test_a_record_that_leaves_meanwhile_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keys = write_store(path, count=3)

    def evict(total_bytes: int) -> None:
        record_path(path, keys[1]).unlink()

    report = check_store(path, now_s=time.time(), on_start=evict)
    assert report.ok
    assert report.num_records == 2


def test_an_interrupt_does_not_wait_for_large_records(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    for key in write_store(path, identity(chunk_bytes=64 << 30)):
        record = record_path(path, key)
        record.write_bytes(Header(key, 64 << 30, bytes(16), 1).pack())
        os.truncate(record, 4096 + (64 << 30))  # a hole, yet half a minute of reading

    main = threading.main_thread().ident
    assert main is not None
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
    began_s = time.monotonic()
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            check(path)
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, handler)
    assert time.monotonic() - began_s < 10


# VmHWM, not getrusage: its peak is that of the process that started this one, if that was larger.
RUN = """
import re, sys, time
from pathlib import Path
from stepwell.ops.check import check_store
report = check_store(Path(sys.argv[1]), now_s=time.time())
peak_kib = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)
print(report.ok, report.size_bytes, peak_kib)
"""


def test_large_records_take_no_more_memory(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write_store(path, count=1)
    length = 256 << 20
    whose = identity(chunk_bytes=length)
    root = path / "roots" / whose.root.hex()
    for key in keys_of(whose.root, 2):
        record = record_path(path, key)
        record.parent.mkdir(parents=True, exist_ok=True)
        digest = xxhash.xxh3_128_digest(bytes(length))
        header = Header(key, length, digest, 1)
        record.write_bytes(header.pack())
        os.truncate(record, 4096 + length)  # the payload is a hole
    (root / "root.json").write_text(whose.to_json())
    done = subprocess.run(
        [sys.executable, "-c", RUN, path], capture_output=True, text=True, check=True
    )
    ok, size_bytes, max_rss_kib = done.stdout.split()
    assert ok == "True"
    assert int(size_bytes) > 2 * length
    assert int(max_rss_kib) < 100 * 1024


def test_record_names_are_any_key(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    root = identity().root
    store = open_store(path)
    keys = [make_key(root, b"\x01" * length) for length in (1, 36, 64)]
    store.use_root(identity())
    store.write([Chunk(key, memoryview(payload_of(key, PAYLOAD_BYTES))) for key in keys])
    store.drain(10.0)
    store.close()
    report = check(path)
    assert report.ok
    assert report.num_records == 3
