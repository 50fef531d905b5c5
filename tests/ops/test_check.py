"""Whatever is wrong with a store, the check finds it and says what it is; fixing sets it right."""

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from ops.stores import (
    CAPACITY_BYTES,
    OTHER_DAMAGES,
    PAYLOAD_BYTES,
    RECORD_DAMAGES,
    SLOT_BYTES,
    STALE,
    damage,
    description,
    earlier_format,
    identity,
    keys_of,
    opened,
    payload_of,
    read_keys,
    read_store,
    snapshot,
    where,
    write_keys,
    write_store,
)
from stepwell.clock import ManualClock
from stepwell.core.keys import Key, fingerprint, make_key
from stepwell.core.record import Header, record_bytes
from stepwell.core.types import Outcome
from stepwell.errors import ConfigError
from stepwell.ops.check import check_store
from stepwell.ops.contents import JournalState
from stepwell.ops.findings import BLOCKED, MISSING, UNREADABLE, CheckReport, Remedy
from stepwell.ops.records import Examiner
from stepwell.tiers import frames
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.slots import BOOKKEEPING_BYTES, place_of

COST_BYTES = SLOT_BYTES + BOOKKEEPING_BYTES
DONE = (Outcome.DONE, "")
ABSENT = (Outcome.MISS, "absent")


def check(path: Path, *, fix: bool = False) -> CheckReport:
    return check_store(path, now_s=time.time(), fix=fix)


def reasons(report: CheckReport) -> list[str]:
    return sorted(each.reason for each in report.bad)


def image_of(path: Path) -> frames.Image:
    return frames.replay((path / "journal").read_bytes())


def append(path: Path, more: bytes) -> None:
    """Append to a journal that nobody has open."""
    with open(path / "journal", "ab") as file:
        file.write(more)


def entries_of(number: int, places: dict[Key, int]) -> npt.NDArray[np.void]:
    """Rows of a root's chunks, for a journal."""
    rows = np.zeros(len(places), frames.ENTRY)
    rows["tag"] = [fingerprint(key) for key in places]
    rows["place"] = list(places.values())
    rows["root"] = number
    return rows


def test_a_good_store_is_good_and_stays_as_it_is(tmp_path: Path) -> None:
    write_store(tmp_path / "kv")
    before = snapshot(tmp_path)
    sizes: list[int] = []
    report = check_store(
        tmp_path / "kv", now_s=time.time(), on_start=sizes.append, on_record=sizes.append
    )
    assert report.ok
    assert report.journal is JournalState.USED
    assert (report.num_roots, report.num_records) == (1, 3)
    assert sizes == [report.size_bytes, *[SLOT_BYTES] * 3]
    assert not report.undescribed
    assert not report.leftovers.num_files
    assert snapshot(tmp_path) == before


def test_an_empty_store_is_good(tmp_path: Path) -> None:
    with opened(tmp_path / "kv"):
        pass
    report = check(tmp_path / "kv")
    assert report.ok
    assert report.num_records == 0
    assert check(tmp_path / "kv", fix=True).ok


# Records


@pytest.mark.parametrize("name", RECORD_DAMAGES)
def test_a_bad_record_is_found_and_set_aside(tmp_path: Path, name: str) -> None:
    path = tmp_path / "kv"
    keys = write_store(path, count=4)
    lying = {key: where(path, key) for key in keys}
    _, reason, num_bad = RECORD_DAMAGES[name]
    damage(path, keys[1], name)
    before, content = snapshot(path), lying[keys[1]].read()

    report = check(path)
    assert reasons(report) == [reason] * num_bad
    assert {each.remedy for each in report.bad} == {Remedy.SET_ASIDE}
    assert not any(each.fixed for each in report.bad)
    found = {(each.path, each.slot_idx) for each in report.bad}
    bad_keys = [key for key, at in lying.items() if (str(at.path), at.slot_idx) in found]
    assert keys[1] in bad_keys
    assert len(bad_keys) == num_bad
    assert report.num_records == 4
    assert snapshot(path) == before

    fixed = check(path, fix=True)
    assert reasons(fixed) == reasons(report)
    assert all(each.fixed for each in fixed.bad)
    assert lying[keys[1]].read() == content  # kept for a look
    again = check(path)
    assert again.ok
    assert (again.num_records, again.num_aside) == (4 - num_bad, num_bad)

    with opened(path) as tier:  # it is not served, it counts, and it can be stored again
        assert tier.used_bytes == 4 * COST_BYTES
        assert read_keys(tier, keys) == [ABSENT if key in bad_keys else DONE for key in keys]
        write_keys(tier, identity(), bad_keys)
        assert tier.used_bytes == (4 + num_bad) * COST_BYTES
        assert read_keys(tier, keys) == [DONE] * 4
    assert check(path).ok


@pytest.mark.parametrize("name", RECORD_DAMAGES)
def test_the_store_gives_the_same_reason(tmp_path: Path, name: str) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    damage(path, keys[1], name)
    _, reason, _ = RECORD_DAMAGES[name]
    # An engine does not look at what follows the payload.
    assert read_store(path, keys)[1] == (DONE if reason == "padding" else (Outcome.MISS, reason))


def test_what_was_set_aside_is_used_again_first(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    capacity_bytes = 8 * COST_BYTES
    keys = keys_of(identity().root, 8)
    with opened(path, capacity_bytes) as tier:
        write_keys(tier, identity(), keys)
    damage(path, keys[3], "a flipped bit in the payload")
    check(path, fix=True)
    with opened(path, capacity_bytes) as tier:
        assert tier.used_bytes == capacity_bytes
        write_keys(tier, identity(), [keys[3]])
        assert tier.used_bytes == capacity_bytes
        assert read_keys(tier, keys) == [DONE] * 8
    report = check(path)
    assert report.ok
    assert report.num_aside == 0


def test_everything_at_once(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keys = write_store(path, count=12)
    for key, name in zip(
        keys, ("a blank slot", "a flipped bit in the payload", "a flipped bit in the padding"),
        strict=False,
    ):  # fmt: skip
        damage(path, key, name)
    damage(path, keys[5], "a file among the extents")
    damage(path, keys[5], "a damaged description")
    report = check(path)
    assert reasons(report) == ["checksum", "description", "header", "padding", "stray"]
    assert report.num_records == 12
    assert all(each.fixed for each in check(path, fix=True).bad)
    assert check(path).ok
    assert read_store(path, keys) == [ABSENT] * 3 + [DONE] * 9


def test_fixing_keeps_what_the_journal_had_to_say(tmp_path: Path) -> None:
    """Which chunk leaves first, when each was used, and what was written to the drive."""
    path, clock = tmp_path / "kv", ManualClock()
    with opened(path, clock=clock) as tier:
        for whose in (identity(), identity(tp=2)):
            write_keys(tier, whose, keys_of(whose.root, 5))
            clock.advance(1000)
        tier.contains(keys_of(identity().root, 2))
    before = image_of(path)
    key = keys_of(identity().root, 5)[2]
    damage(path, key, "a flipped bit in the payload")
    check(path, fix=True)
    after = image_of(path)
    kept = before.rows[before.rows["tag"] != fingerprint(key)]
    names = ["tag", "place", "used_at_s", "expires_at_s"]
    assert after.rows[names].tolist() == kept[names].tolist()
    assert [after.roots[number] for number in after.rows["root"].tolist()] == [
        before.roots[number] for number in kept["root"].tolist()
    ]
    assert after.wear == before.wear is not None
    assert len(after.aside) == 1
    damage(path, keys_of(identity(tp=2).root, 5)[3], "a flipped bit in the payload")
    check(path, fix=True)  # and what is set aside stays so
    assert len(image_of(path).aside) == 2
    assert image_of(path).aside.items() > after.aside.items()


def test_two_roots(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write_store(path)
    other = write_store(path, identity(tp=2))
    damage(path, other[1], "a flipped bit in the payload")
    report = check(path)
    assert (report.num_roots, report.num_records, len(report.bad)) == (2, 6, 1)


def test_what_a_roots_chunks_measure_is_known(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write_store(path, identity(chunk_bytes=4096))  # and not what was written
    assert reasons(check(path)) == ["layout"] * 3


def test_keys_of_any_length(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keys = [make_key(identity().root, b"\x01" * length) for length in (1, 36, 64)]
    with opened(path) as tier:
        write_keys(tier, identity(), keys)
    report = check(path)
    assert report.ok
    assert report.num_records == 3


@pytest.mark.parametrize("length", [1, 4096, 5000, (4 << 20) - 4096, 4 << 20, (9 << 20) + 1])
def test_records_of_any_size(tmp_path: Path, length: int) -> None:
    """Smaller than what is read at once, as large, and larger; bad at either end."""
    path = tmp_path / "kv"
    whose = identity(chunk_bytes=length)
    keys = keys_of(whose.root, 5)
    with opened(path, 5 * (record_bytes(length) + BOOKKEEPING_BYTES)) as tier:
        write_keys(tier, whose, keys, length)
    report = check(path)
    assert report.ok
    assert (report.num_records, report.size_bytes) == (5, 5 * record_bytes(length))
    where(path, keys[1]).flip(4096)
    where(path, keys[2]).flip(4096 + length - 1)
    if length % 4096:
        where(path, keys[3]).flip(record_bytes(length) - 1)
    assert reasons(check(path)) == ["checksum", "checksum", *["padding"] * bool(length % 4096)]


def test_expired_records_are_counted_and_good(tmp_path: Path) -> None:
    path, clock = tmp_path / "kv", ManualClock()
    with opened(path, clock=clock, ttl_s=60.0) as tier:
        write_keys(tier, identity(), keys_of(identity().root))
    for now_s, num_expired in ((clock.wall() + 59, 0), (clock.wall() + 61, 3)):
        for journal_is_there in (True, False):
            if not journal_is_there:
                (path / "journal").rename(path / "partial" / "journal")
            report = check_store(path, now_s=now_s)
            assert report.ok
            assert (report.num_records, report.num_expired) == (3, num_expired)
            if not journal_is_there:
                (path / "partial" / "journal").rename(path / "journal")


# Around the records


@pytest.mark.parametrize("name", OTHER_DAMAGES)
def test_other_damage_is_found_and_fixed(tmp_path: Path, name: str) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    expected = OTHER_DAMAGES[name][1]
    damage(path, keys[1], name)
    before = snapshot(path)
    theirs = {each: stat for each, stat in snapshot(tmp_path).items() if each not in before}
    del theirs[str(path)]
    if BLOCKED in expected:  # the check says what an engine says
        with pytest.raises(ConfigError) as caught, opened(path):
            pass
        (bad,) = check(path).bad
        assert f"{os.path.basename(bad.path)} {bad.detail}; `stepwell check" in str(caught.value)
        assert f"at={bad.path}" in str(caught.value)

    report = check(path)
    assert reasons(report) == sorted(expected)
    assert snapshot(path) == before

    fixed = check(path, fix=True)
    assert reasons(fixed) == sorted(expected)
    assert all(each.fixed for each in fixed.bad)
    again = check(path)
    assert again.ok
    assert again.journal is JournalState.USED
    assert theirs == {each: stat for each, stat in snapshot(tmp_path).items() if each in theirs}

    with opened(path) as tier:  # what the check read is what is served, and nothing else counts
        assert tier.used_bytes == again.num_records * COST_BYTES
        served = [each for each in read_keys(tier, keys) if each == DONE]
        assert len(served) == again.num_records
        write_keys(tier, identity(), keys)
        assert read_keys(tier, keys) == [DONE] * 3
    assert check(path).ok


@pytest.mark.parametrize("name", STALE)
def test_what_a_killed_engine_left_in_its_journal(tmp_path: Path, name: str) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    damage(path, keys[1], name)
    num_stale = STALE[name][1]
    before = snapshot(path)
    report = check(path)
    assert report.ok
    assert (report.num_records, report.num_stale) == (3 - num_stale, num_stale)
    assert snapshot(path) == before
    assert check(path, fix=True).ok
    again = check(path)
    assert again.ok
    assert (again.num_records, again.num_stale) == (3 - num_stale, 0)
    with opened(path) as tier:
        assert tier.used_bytes == again.num_records * COST_BYTES
        outcomes = read_keys(tier, keys)
        assert (outcomes.count(DONE), outcomes.count(ABSENT)) == (3 - num_stale, num_stale)


def test_extents_that_somebody_removed(tmp_path: Path) -> None:
    """It was said that a killed engine leaves it so, and nothing was wrong; but one notes first
    that what lies in an extent has left."""
    path = tmp_path / "kv"
    keys = write_store(path)
    damage(path, keys[0], "an extent is gone")
    (bad,) = check(path).bad
    assert (bad.path, bad.reason, bad.remedy) == (str(path / "extents"), MISSING, Remedy.RENEW)
    assert bad.detail.endswith("records=3 extents=1")
    with opened(path):  # which knows nothing of it by now: what is gone left meanwhile
        pass
    assert check(path).ok
    write_store(path)
    with opened(path):
        damage(path, keys[0], "an extent ends early")
        report = check(path)
    assert report.ok
    assert (report.num_records, report.num_gone) == (1, 2)


def test_strays_are_moved_and_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write_store(path)
    for folder in ("extents", "roots"):
        (path / folder / "notes").write_text(folder)
    (path / "extents" / "more").mkdir()
    (path / "extents" / "more" / "notes").write_text("more")
    report = check(path, fix=True)
    assert [each.remedy for each in report.bad] == [Remedy.MOVE] * 3
    assert report.strays.num_files == 0
    moved = [each for each in (path / "strays").rglob("*") if each.is_file()]
    assert sorted(each.read_text() for each in moved) == ["extents", "more", "roots"]
    again = check(path)
    assert again.ok
    assert (again.strays.num_files, again.strays.size_bytes) == (3, 16)


def test_a_damaged_journal_is_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    damage(path, keys[0], "a damaged journal")
    damage(path, keys[1], "a flipped bit in the payload")
    report = check(path)
    assert report.journal is JournalState.DAMAGED
    assert report.num_records == 3
    assert reasons(report) == ["checksum", "journal"]
    check(path, fix=True)
    again = check(path)
    assert again.ok
    assert (again.num_records, again.num_aside) == (2, 1)
    assert read_store(path, keys) == [DONE, ABSENT, DONE]


def test_a_missing_journal_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    (path / "journal").unlink()
    report = check(path)
    assert report.ok
    assert (report.journal, report.num_records) == (JournalState.MISSING, 3)
    assert check(path, fix=True).ok
    assert read_store(path, keys) == [DONE] * 3


def test_a_torn_end_of_the_journal_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write_store(path)
    append(path, frames.encode_free(list(range(9)))[:-3])
    report = check(path)
    assert report.ok
    assert (report.num_records, report.cut_bytes) == (3, 12 + 9 * 8 - 3)


def test_entries_of_a_root_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    rows = entries_of(7, {make_key(identity().root, b"x"): place_of(0, 20)})
    append(path, frames.encode_rows(frames.Kind.PUT, rows))
    report = check(path)
    assert reasons(report) == ["journal"]
    assert report.num_records == 3
    check(path, fix=True)
    assert check(path).ok
    assert read_store(path, keys) == [DONE] * 3


def test_an_entry_with_the_number_of_another_root(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    stranger = frames.encode_root(7, identity(tp=2).root)
    rows = entries_of(7, {keys[1]: place_of(0, where(path, keys[1]).slot_idx)})
    append(path, stranger + frames.encode_rows(frames.Kind.PUT, rows))
    report = check(path)
    assert reasons(report) == ["identity"]
    assert report.num_roots == 2


def test_leftovers_of_a_killed_engine_are_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write_store(path)
    (path / "partial" / "0123").write_bytes(b"x" * 100)
    report = check(path)
    assert report.ok
    assert (report.leftovers.num_files, report.leftovers.size_bytes) == (1, 100)
    assert (path / "partial" / "0123").exists()
    assert check(path, fix=True).leftovers.num_files == 1
    assert not list((path / "partial").iterdir())
    assert check(path).leftovers.num_files == 0


def test_a_missing_description_is_said_and_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    description(path, keys[0]).unlink()
    report = check(path)
    assert report.ok
    assert report.undescribed == (keys[0][:32],)


def test_an_earlier_format_is_refused_by_name(tmp_path: Path) -> None:
    path = earlier_format(tmp_path / "kv")
    before = snapshot(path)
    for fix in (False, True):
        with pytest.raises(ConfigError, match=r"an earlier version of Stepwell.*another path"):
            check(path, fix=fix)
    assert snapshot(path) == before


# What cannot be done


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
    forbidden = str(where(path, write_store(path)[0]).path)
    really_open = os.open

    def refuse(name, *args, **kwargs):
        if name == os.path.basename(forbidden):
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return really_open(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    report = check(path, fix=True)
    (bad,) = report.bad
    assert (bad.path, bad.reason, bad.fixed) == (forbidden, UNREADABLE, False)
    assert report.num_records == 0
    # A new journal, made from the headers that can be read, would not know these any more.
    damaged = (path / "journal").read_bytes()[:-1] + b"x"
    (path / "journal").write_bytes(damaged)
    assert [each.fixed for each in check(path, fix=True).bad] == [False, False]
    assert (path / "journal").read_bytes() == damaged
    monkeypatch.undo()
    report = check(path)
    assert reasons(report) == ["journal"]
    assert report.num_records == 3


@pytest.mark.parametrize("fix", [False, True])
def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fix: bool
) -> None:
    path = tmp_path / "kv"
    write_store(path)
    forbidden = [str(path / "extents")]

    really_open = os.open

    def refuse(name: object, *args: int, **kwargs: int) -> int:
        if name in forbidden:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return really_open(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError if fix else PermissionError, match=f"{path}/extents"):
        check(path, fix=fix)
    forbidden[:] = [str(path / "roots")]
    report = check(path, fix=fix)
    assert reasons(report) == [UNREADABLE]
    assert report.num_records == 3
    monkeypatch.undo()
    assert check(path).ok
    assert check(path).num_records == 3


def test_a_bad_sector_is_the_fault_of_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    keys = write_store(path, count=20)
    lying = where(path, keys[7])
    really_read = os.preadv
    lengths = []

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        length = sum(map(len, buffers))
        if os.readlink(f"/proc/self/fd/{fd}") == str(lying.path):
            lengths.append(length)
            if offset <= lying.offset + 5000 < offset + length:
                raise OSError(errno.EIO, "Input/output error")
        return really_read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    report = check(path, fix=True)
    (bad,) = report.bad
    assert (bad.reason, bad.slot_idx, bad.fixed) == ("io_error", lying.slot_idx, True)
    assert max(lengths) == 20 * SLOT_BYTES  # neighbours are read together
    monkeypatch.undo()
    assert check(path).num_records == 19


def test_a_full_drive_is_no_place_for_a_new_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    damage(path, keys[1], "a flipped bit in the payload")
    before = (path / "journal").read_bytes()

    def replace(*names: object, **folders: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    (bad,) = check(path, fix=True).bad
    assert not bad.fixed
    monkeypatch.undo()
    assert (path / "journal").read_bytes() == before
    assert list((path / "partial").iterdir()) == []


# Beside an engine


def test_a_bad_record_beside_an_engine(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with opened(path) as tier:
        keys = keys_of(identity().root)
        write_keys(tier, identity(), keys)
        damage(path, keys[1], "a flipped bit in the payload")
        for journal_is_there in (True, False):
            if not journal_is_there:
                (path / "journal").unlink()
            report = check(path)
            assert reasons(report) == ["checksum"]
            assert (report.owner_pid, report.num_records) == (os.getpid(), 3)
            assert report.num_gone == 0


@pytest.mark.parametrize("journal_is_there", [True, False])
def test_records_that_are_written_over_meanwhile_are_no_fault(
    tmp_path: Path, journal_is_there: bool
) -> None:
    path = tmp_path / "kv"
    with opened(path, 8 * COST_BYTES) as tier:
        write_keys(tier, identity(), keys_of(identity().root, 8))
        if not journal_is_there:
            (path / "journal").unlink()

        def evict(total_bytes: int) -> None:
            write_keys(tier, identity(), keys_of(identity().root, 6, begin=100))

        report = check_store(path, now_s=time.time(), on_start=evict)
        assert report.ok
        assert (report.num_records, report.num_gone) == (2, 6)


def test_records_that_are_invalidated_meanwhile_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with opened(path) as tier:
        keys = keys_of(identity().root)
        write_keys(tier, identity(), keys)

        def invalidate(total_bytes: int) -> None:
            assert tier.delete(keys[:2]) == 2
            assert tier.drain(10.0)

        report = check_store(path, now_s=time.time(), on_start=invalidate)
        assert report.ok
        assert (report.num_records, report.num_gone) == (1, 2)


def test_a_wiped_slot_beside_an_engine_is_no_fault(tmp_path: Path) -> None:
    """An engine wipes what was invalidated, and only then its journal has it."""
    path = tmp_path / "kv"
    with opened(path) as tier:
        keys = keys_of(identity().root)
        write_keys(tier, identity(), keys)
        damage(path, keys[1], "a wiped slot")
        report = check(path)
        assert report.ok
        assert (report.num_records, report.num_gone) == (2, 1)


def test_what_is_right_at_a_second_look_is_no_fault(tmp_path: Path) -> None:
    """The first look came while it was being written, and it is the same chunk again."""
    path = tmp_path / "kv"
    with opened(path) as tier:
        keys = keys_of(identity().root)
        write_keys(tier, identity(), keys)
        lying = where(path, keys[1])
        content = lying.read()
        lying.flip(6000)
        report = check_store(
            path, now_s=time.time(), on_record=lambda size_bytes: lying.write(content)
        )
        assert report.ok
        assert (report.num_records, report.num_gone) == (2, 1)


def test_what_leaves_during_the_second_look_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    with opened(path) as tier:
        keys = keys_of(identity().root)
        write_keys(tier, identity(), keys)
        where(path, keys[1]).flip(6000)
        really_look = Examiner.look_at
        looks = []

        def look_at(self, extent, stretch):
            verdicts = really_look(self, extent, stretch)
            looks.append(len(stretch))
            if len(looks) == 2:
                tier.delete([keys[1]])
                tier.drain(10.0)
            return verdicts

        monkeypatch.setattr(Examiner, "look_at", look_at)
        report = check(path)
        assert looks == [3, 1]
        assert report.ok
        assert report.num_gone == 1


def test_an_extent_that_is_made_meanwhile_is_no_stray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was one where it came between the list of extents and that of all there is."""
    path = tmp_path / "kv"
    write_store(path)
    really_find = StoreDirectory.find_extents
    numbers = itertools.count(1)

    def find_extents(self):
        found = really_find(self)
        name = f"{next(numbers):08d}-{SLOT_BYTES}.kv"
        (path / "extents" / name).write_bytes(bytes(SLOT_BYTES))
        return found

    monkeypatch.setattr(StoreDirectory, "find_extents", find_extents)
    assert check(path).bad == ()
    assert next(numbers) > 2


def test_beside_an_engine_that_never_rests(tmp_path: Path) -> None:
    """It writes, evicts and invalidates, and drops extents of one size to make those of another."""
    path = tmp_path / "kv"
    large = identity(chunk_bytes=100_000)
    stop = threading.Event()
    with opened(path, CAPACITY_BYTES) as tier:

        def churn() -> None:
            for begin in itertools.count(0, 90):
                keys = keys_of(identity().root, 100, begin)
                write_keys(tier, identity(), keys)
                tier.delete(keys[::7])
                write_keys(tier, large, keys_of(large.root, 9, begin), 100_000)
                if stop.is_set():
                    return

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            reports = [check(path) for _ in range(25)]
        finally:
            stop.set()
            thread.join()
    assert [report.bad for report in reports] == [()] * 25
    assert any(report.num_gone for report in reports)
    assert check(path).ok


# Limits


def large_store(path: Path, length: int, digest: bytes) -> None:
    """Adds two records whose payloads are holes in an extent."""
    whose = identity(chunk_bytes=length)
    slot_bytes = record_bytes(length)
    keys = keys_of(whose.root, 2)
    extent = path / "extents" / f"00000001-{slot_bytes}.kv"
    extent.touch()
    for idx, key in enumerate(keys):
        with open(extent, "r+b") as file:
            file.seek(idx * slot_bytes)
            file.write(Header(key, length, digest, 1).pack())
    os.truncate(extent, 2 * slot_bytes)
    places = {key: place_of(1, idx) for idx, key in enumerate(keys)}
    rows = entries_of(1, places)
    append(
        path,
        frames.encode_root(1, whose.root) + frames.encode_rows(frames.Kind.PUT, rows),
    )
    (path / "roots" / f"{whose.root.hex()}.json").write_text(whose.to_json())


def test_an_interrupt_does_not_wait_for_large_records(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write_store(path)
    large_store(path, 64 << 30, bytes(16))  # half a minute of reading each
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
    write_store(path)
    length = 256 << 20
    large_store(path, length, xxhash.xxh3_128_digest(bytes(length)))
    done = subprocess.run(
        [sys.executable, "-c", RUN, path], capture_output=True, text=True, check=True
    )
    ok, size_bytes, max_rss_kib = done.stdout.split()
    assert ok == "True"
    assert int(size_bytes) > 2 * length
    assert int(max_rss_kib) < 120 * 1024


def test_payloads_are_what_the_tests_say(tmp_path: Path) -> None:
    """Or a check that reads nothing would pass them all."""
    path = tmp_path / "kv"
    keys = write_store(path)
    assert where(path, keys[2]).read()[4096:][:PAYLOAD_BYTES] == payload_of(keys[2])
