"""A disk tier that is opened again: from its journal, and from the headers where that is lost."""

import errno
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from stepwell.core.identity import Identity
from stepwell.core.keys import Key, fingerprint, make_key
from stepwell.core.types import ChunkResult, Direction, Outcome, Reason
from stepwell.testing import Driver, key_of, payload_of
from stepwell.tiers import blockio
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.disk import slot_cost_bytes
from stepwell.tiers.frames import replay
from stepwell.tiers.slots import BOOKKEEPING_BYTES

from .conftest import DiskPlace

DONE = ChunkResult(Outcome.DONE)
ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)
KEYS = [key_of(idx) for idx in range(12)]
LENGTHS = (5000, 8192, 20_000)


def length_of(key: Key) -> int:
    return LENGTHS[key[-1] % len(LENGTHS)]


@dataclass
class Life:
    """What a random life of a store without evictions leaves behind."""

    there: set[Key] = field(default_factory=set)
    gone: set[Key] = field(default_factory=set)

    def live(self, driver: Driver, seed: int, steps: int = 60) -> None:
        """Write, delete, read and touch; prefixes of several roots and lengths."""
        rng = random.Random(seed)
        for _ in range(steps):
            root, begin = f"root {rng.randrange(3)}", rng.randrange(30)
            prefix = [key_of(begin + idx, root) for idx in range(rng.randrange(1, 6))]
            action = rng.random()
            if action < 0.6:
                for key in prefix:
                    assert driver.write([key], length_of(key))[0].outcome is Outcome.DONE
                    self.there.add(key)
                    self.gone.discard(key)
            elif action < 0.8:
                driver.tier.delete(prefix)
                self.gone |= self.there & set(prefix)
                self.there -= set(prefix)
            else:
                self.check_reads(driver, prefix)
                driver.touch(prefix)

    def check_reads(self, driver: Driver, keys: list[Key], *, all_there: bool = True) -> None:
        """Whatever is served has the right bytes, and what is there is served."""
        for key in keys:
            result, (content,) = driver.read([key], length_of(key))
            if result.done:
                assert content == payload_of(key, length_of(key))
                assert key in self.there | self.gone
            if all_there:
                assert result.done == (key in self.there), result


def keep(_: Path) -> None:
    """The journal is as it was."""


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def add_zeros(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(bytes(8192))


def cut_in_the_head(path: Path) -> None:
    os.truncate(path, 10)


LOST: list[Callable[[Path], object]] = [
    Path.unlink, garbage, flip_a_bit, add_zeros, cut_in_the_head, lambda p: os.truncate(p, 0)
]  # fmt: skip
LOST_IDS = ["removed", "garbage", "a flipped bit", "zeros behind it", "cut in its head", "empty"]

every_start = pytest.mark.parametrize("start", [keep, *LOST], ids=["kept", *LOST_IDS])
with_and_without = pytest.mark.parametrize("start", [keep, Path.unlink], ids=["journal", "headers"])


def reopen(
    place: DiskPlace, start: Callable[[Path], object], *args: Any, **settings: Any
) -> Driver:
    """Close, do something to the journal, and open."""
    place.close()
    start(place.journal)
    return place.open(*args, **settings)


@every_start
def test_a_restart_finds_what_was_there_and_nothing_else(
    place: DiskPlace, start: Callable[[Path], object]
) -> None:
    """Deleted chunks stay deleted, whatever tells what there is."""
    life = Life()
    for seed in range(3):
        driver = reopen(place, start if seed else keep_or_nothing, capacity_bytes=8 << 20)
        assert place.tier is not None
        assert len(place.tier) == len(life.there)
        keys = sorted(life.there | life.gone)
        assert driver.present(keys) == [key in life.there for key in keys]
        life.check_reads(driver, keys)
        assert place.context.metrics.value("quarantined_chunks") == 0
        life.live(driver, seed)
        place.check_books()
    assert len(life.there) > 20
    assert len(life.gone) > 10


def keep_or_nothing(_: Path) -> None:
    """At the first start there is no journal."""


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 0.999])
def test_a_journal_that_was_cut_off(place: DiskPlace, share: float) -> None:
    """What it still says is found, and what it says wrongly is a miss; all of it heals."""
    life = Life()
    driver = place.open(capacity_bytes=8 << 20)
    life.live(driver, 5)
    place.close()
    os.truncate(place.journal, 16 + int(share * (place.journal.stat().st_size - 16)))
    driver = place.open(capacity_bytes=8 << 20)
    keys = sorted(life.there | life.gone)
    life.check_reads(driver, keys, all_there=False)
    place.check_books()
    for key in keys:
        driver.write([key], length_of(key))
    life.there, life.gone = set(keys), set()
    life.check_reads(driver, keys)
    driver = place.open(capacity_bytes=8 << 20)
    life.check_reads(driver, keys)
    place.check_books()


@pytest.mark.parametrize("whose", ["of an earlier time", "of another store"])
def test_a_journal_that_does_not_belong_to_the_extents(
    place: DiskPlace, tmp_path: Path, whose: str
) -> None:
    """As after a part of a backup was restored: it is a hint, and the records are the truth."""
    life = Life()
    driver = place.open(capacity_bytes=8 << 20)
    life.live(driver, 7)
    place.close()
    if whose == "of another store":
        other = DiskPlace(tmp_path / "other")
        Life().live(other.open(capacity_bytes=8 << 20), 8)
        other.close()
        foreign = other.journal
    else:
        foreign = tmp_path / "copy"
        shutil.copy(place.journal, foreign)
        driver = place.open(capacity_bytes=8 << 20)
        driver.tier.delete(sorted(life.there)[::2])
        life.gone |= set(sorted(life.there)[::2])
        life.there -= life.gone
        life.live(driver, 9)
        place.close()
    shutil.copy(foreign, place.journal)
    driver = place.open(capacity_bytes=8 << 20)
    keys = sorted({key_of(idx, f"root {root}") for idx in range(36) for root in range(3)})
    for key in keys:
        result, (content,) = driver.read([key], length_of(key))
        assert not result.done or content == payload_of(key, length_of(key))
        assert not result.done or key in life.there, "a deleted chunk is back"
    place.check_books()
    for key in keys:
        assert driver.write([key], length_of(key))[0].outcome is Outcome.DONE
    for key in keys:
        assert driver.read([key], length_of(key))[1] == [payload_of(key, length_of(key))]
    place.check_books()


def test_who_leaves_first_is_remembered(place: DiskPlace) -> None:
    """In the order of use, of a prefix the end first."""
    driver = place.open(12)
    first, second, third = KEYS[:4], KEYS[4:8], KEYS[8:]
    for prefix in (first, second, third):
        driver.write(prefix)
        place.clock.advance(10.0)
    driver.read(first)
    driver.touch([second[0]])
    for _ in range(2):
        driver = place.open(12)
    driver.write([key_of(f"new {idx}") for idx in range(5)])
    assert driver.present(second) == [True, False, False, False]
    assert driver.present(third) == [True, True, False, False]
    assert driver.present(first) == [True] * 4


def test_who_leaves_first_by_the_headers(place: DiskPlace) -> None:
    """Uses are not known, but when each was written, and where it stood in its prefix."""
    driver = place.open(12)
    for prefix in (KEYS[:4], KEYS[4:8], KEYS[8:]):
        chunks = driver.write_chunks({key: payload_of(key, 8192) for key in prefix})
        numbered = [replace(c, end_token=16 * (idx + 1)) for idx, c in enumerate(chunks)]
        driver.wait(driver.submit(Direction.WRITE, numbered))
        place.clock.advance(10.0)
    driver.read(KEYS[:4])
    driver = reopen(place, Path.unlink, 12)
    driver.write([key_of(f"new {idx}") for idx in range(6)])
    assert driver.present(KEYS[:4]) == [False] * 4
    assert driver.present(KEYS[4:8]) == [True, True, False, False]
    assert driver.present(KEYS[8:]) == [True] * 4


@with_and_without
def test_a_lower_capacity(place: DiskPlace, start: Callable[[Path], object]) -> None:
    """The new bound holds from the start, for files too; what was used last stays, but for what
    lay in an extent that was partly to go. Extents have eight slots here."""
    driver = place.open(32)
    for idx in range(0, 32, 4):
        driver.write([key_of(n) for n in range(idx, idx + 4)])
        place.clock.advance(5.0)
    for capacity in (20, 7, 1):
        driver = reopen(place, start, capacity)
        place.check_books()
        assert place.tier is not None
        assert place.tier.allocated_bytes <= capacity * slot_cost_bytes(8192)
        present = driver.present([key_of(idx) for idx in range(32)])
        assert not any(present[: 32 - capacity - 3]), "who leaves first, but for ends of prefixes"
        assert capacity // 8 * 8 <= sum(present) <= capacity
        for key in [key_of(idx) for idx, here in enumerate(present) if here]:
            assert driver.read([key])[1] == [payload_of(key, 8192)]
    driver = reopen(place, start, 32)
    assert {r.outcome for r in driver.write([key_of(f"n{idx}") for idx in range(31)])} == {"done"}
    assert place.context.metrics.value("evicted_chunks") == 0, "and a higher one as well"
    place.check_books()


@with_and_without
def test_a_capacity_for_no_slot_at_all(place: DiskPlace, start: Callable[[Path], object]) -> None:
    place.open(4).write(KEYS[:4])
    driver = reopen(place, start, capacity_bytes=100)
    assert driver.present(KEYS[:4]) == [False] * 4
    assert driver.write(KEYS[:1]) == (ChunkResult(Outcome.FULL, Reason.CAPACITY),)
    assert place.extents() == []


@with_and_without
def test_time_runs_out_across_a_restart(place: DiskPlace, start: Callable[[Path], object]) -> None:
    """Also while nobody runs; and a chunk of a tier without such a time stays for ever."""
    driver = place.open(16)
    driver.write(KEYS[:2])
    driver = reopen(place, start, 16, ttl_s=100.0)
    driver.write(KEYS[2:4])
    place.clock.advance(60.0)
    driver = reopen(place, start, 16, ttl_s=100.0)
    assert driver.present(KEYS[:6]) == [True] * 4 + [False] * 2
    driver.write(KEYS[4:6])
    place.close()
    place.clock.advance(60.0)
    driver = reopen(place, start, 16)
    assert driver.present(KEYS[:6]) == [True, True, False, False, True, True]
    assert driver.read(KEYS[:6])[0].results[2].outcome is Outcome.MISS
    place.clock.advance(60.0)
    assert driver.present(KEYS[:6]) == [True, True, False, False, False, False]
    driver.read(KEYS[:6])
    assert driver.write(KEYS[2:4])[0].outcome is Outcome.DONE
    place.clock.advance(1e6)
    assert driver.present(KEYS[:4]) == [True] * 4
    assert place.context.metrics.value("quarantined_chunks") == 0
    place.check_books()
    place.close()


def test_a_time_to_live_of_centuries(place: DiskPlace) -> None:
    driver = place.open(4, ttl_s=300 * 365 * 86400.0)
    assert {r.outcome for r in driver.write(KEYS[:4])} == {Outcome.DONE}
    for start in (keep, Path.unlink):
        driver = reopen(place, start, 4)
        assert driver.present(KEYS[:4]) == [True] * 4
        assert driver.read(KEYS[:4])[0].done
    place.check_books()


def test_the_wear_is_counted_across_restarts(place: DiskPlace) -> None:
    """From the first byte on; the journal's own bytes count as well."""
    driver = place.open(16)
    assert place.tier is not None
    begun_s = place.clock.wall()
    driver.write(KEYS)
    place.clock.advance(1000.0)
    seen = place.tier.wear.written_bytes
    assert seen > 12 * 12_288
    for _ in range(3):
        driver = place.open(16)
        assert place.tier is not None
        wear = place.tier.wear
        assert seen <= wear.written_bytes <= seen + 8192
        assert wear.first_s == begun_s
        driver.write([key_of(f"{seen}")])
        assert place.tier.wear.written_bytes >= wear.written_bytes + 12_288
        seen = place.tier.wear.written_bytes


@with_and_without
def test_descriptions_stay_as_long_as_there_are_records(
    place: DiskPlace, start: Callable[[Path], object]
) -> None:
    here, there = Identity({"model": "here"}), Identity({"model": "there"})
    driver = place.open(8)
    for identity in (here, there):
        place.context.registry.add(identity)
        driver.write([make_key(identity.root, b"k")])
    driver = reopen(place, start, 8)
    assert StoreDirectory(place.path).identities() == {i.root: i for i in (here, there)}
    driver.tier.delete([make_key(there.root, b"k")])
    driver = reopen(place, start, 8)
    assert StoreDirectory(place.path).identities() == {here.root: here}
    assert driver.present([make_key(here.root, b"k")]) == [True]


# What must not come back.


def failing_writes(patch: pytest.MonkeyPatch, after: int) -> None:
    """Writes of records fail after so many of their pages."""
    real = os.pwritev

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        if sum(map(len, buffers)) <= 4096:
            return real(fd, buffers, offset)
        if after:
            views = [buffer for buffer in buffers if len(buffer)]
            pages = [view[at : at + 4096] for view in views for at in range(0, len(view), 4096)]
            real(fd, pages[:after], offset)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    patch.setattr(blockio.os, "pwritev", write)


@pytest.mark.parametrize("after", [0, 1, 3, 4, 7])
def test_a_deleted_chunk_does_not_come_back_from_a_slot_it_had_before(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Two chunks were evicted for a write that failed, so their records still lay there. Both
    were written again, elsewhere, and then deleted: only the new records were wiped. The journal
    was lost, and the old ones were found."""
    driver = place.open(8, num_threads=1)
    driver.write(KEYS[:8])
    with monkeypatch.context() as patch:
        failing_writes(patch, after)
        failed = driver.write([key_of(f"x{idx}") for idx in range(2)])
        assert {r.outcome for r in failed} == {Outcome.FAILED}
    evicted = [key for key, here in zip(KEYS, driver.present(KEYS[:8]), strict=False) if not here]
    assert len(evicted) == 2
    for key in evicted[::-1]:
        assert driver.write([key]) == (DONE,)
    driver.tier.delete(evicted)
    place.check_books()
    driver = reopen(place, Path.unlink, 8, num_threads=1)
    assert driver.present(evicted) == [False, False]
    driver.read([key_of("x0"), key_of("x1")])  # what failed may be there, whole or not
    place.check_books()


def test_what_left_for_free_space_does_not_come_back_after_its_deletion(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that left to give space back lie in slots that are not cut off at once."""
    driver = place.open(16, num_threads=1, min_free_bytes=1 << 20)
    assert place.tier is not None
    driver.write([key_of(idx) for idx in range(16)])
    with monkeypatch.context() as patch:
        patch.setattr(place.tier._drive.files, "free_bytes", lambda: (1 << 20) - 13_000)
        driver.write([key_of("x")])
    evicted = [key_of(idx) for idx in range(16) if not driver.present([key_of(idx)])[0]]
    assert evicted
    for key in evicted:
        driver.write([key])
    driver.tier.delete(evicted)
    place.check_books()
    driver = reopen(place, Path.unlink, 16, num_threads=1)
    assert driver.present(evicted) == [False] * len(evicted)


# What a SIGKILL finds: the journal as it is at each moment.


def named_by_the_journal(place: DiskPlace) -> set[Key]:
    """Of KEYS those that a start would find there now."""
    tags = {int(tag) for tag in replay(place.journal.read_bytes()).rows["tag"]}
    return {key for key in KEYS if fingerprint(key) in tags}


def test_what_was_reported_is_in_the_journal(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is reported, and not when its thread comes round to settle."""
    driver = place.open(16, num_threads=1)
    assert place.tier is not None
    monkeypatch.setattr(place.tier, "settle", lambda: None)
    for key in KEYS:
        driver.write([key])
        assert key in named_by_the_journal(place)


def test_what_is_written_over_is_no_longer_in_the_journal(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a chunk would be looked for where another one's record lies."""
    driver = place.open(4, num_threads=1)
    seen: list[set[Key]] = []
    real = blockio.write_run

    def look_and_write(*args: Any) -> None:
        seen.append(named_by_the_journal(place))
        real(*args)

    monkeypatch.setattr(blockio, "write_run", look_and_write)
    for idx, key in enumerate(KEYS):
        driver.write([key])
        assert seen[-1] == set(KEYS[max(idx - 3, 0) : idx])


def test_what_is_wiped_is_no_longer_in_the_journal(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a deleted chunk would be a hit, and its slot set aside as damaged."""
    driver = place.open(16, num_threads=1)
    driver.write(KEYS)
    seen: list[set[Key]] = []
    real = blockio.write_page

    def look_and_write(*args: Any) -> None:
        seen.append(named_by_the_journal(place))
        real(*args)

    monkeypatch.setattr(blockio, "write_page", look_and_write)
    driver.tier.delete(KEYS[:3])
    place.check_books()
    assert seen == [set(KEYS[3:])] * 3


# The journal's size.


def test_the_journal_keeps_within_its_room(place: DiskPlace) -> None:
    """Through thousands of uses of a small store, and many roots; and it is right at the end."""
    driver = place.open(32, num_threads=1)
    rng = random.Random(4)
    largest = 0
    for step in range(1500):
        root = f"root {step // 3}"
        key = key_of(rng.randrange(40), root)
        driver.write([key])
        driver.touch([key_of(rng.randrange(40), root) for _ in range(8)])
        largest = max(largest, place.journal.stat().st_size)
    assert place.tier is not None
    budget_bytes = place.tier._ledger.num_slots * BOOKKEEPING_BYTES
    assert largest <= budget_bytes * 3 // 4 + 8192
    every = [key_of(idx, f"root {n}") for n in range(480, 500) for idx in range(40)]
    here = [key for key, is_here in zip(every, driver.present(every), strict=True) if is_here]
    assert len(here) >= 20
    driver = place.open(32, num_threads=1)
    assert driver.present(here) == [True] * len(here)
    assert driver.read(here)[0].done
    place.check_books()


def test_an_empty_store_does_not_write_its_journal_again_and_again(place: DiskPlace) -> None:
    """Without extents the journal's room is nothing, so it always seemed to be too long: every
    read of an empty store wrote a new one."""
    driver = place.open(32)
    assert place.tier is not None
    before = place.tier.wear.written_bytes
    for _ in range(50):
        driver.read(KEYS)
    assert place.tier.wear.written_bytes == before


def test_an_unreadable_header_hides_no_other(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are looked at many at once; with one bad sector among them all of those were lost."""
    driver = place.open(64, num_threads=1)
    keys = [key_of(idx) for idx in range(64)]
    driver.write(keys)
    bad = place.slot_of(keys[20])
    place.close()
    place.journal.unlink()
    real = os.preadv

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        end = offset + sum(map(len, buffers))
        if offset <= bad.offset < end and os.path.samestat(os.fstat(fd), bad.path.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(blockio.os, "preadv", read)
        driver = place.open(64, num_threads=1)
        assert driver.present(keys) == [idx != 20 for idx in range(64)]
    driver.write(keys)
    assert driver.read(keys)[0].done
    place.check_books()


def test_headers_of_many_slots_are_found_quickly(
    place: DiskPlace, capsys: pytest.CaptureFixture[str]
) -> None:
    """The times are printed and nothing depends on them."""
    keys = [key_of(idx) for idx in range(4000)]
    driver = place.open(4000, payload_bytes=4096, num_threads=4)
    for begin in range(0, 4000, 200):
        driver.write(keys[begin : begin + 200])
    for start, word in ((keep, "journal"), (Path.unlink, "headers")):
        place.close()
        start(place.journal)
        begun_s = time.perf_counter()
        driver = place.open(4000, payload_bytes=4096, num_threads=4)
        with capsys.disabled():
            print(f"\nopened 4000 chunks by the {word} in {time.perf_counter() - begun_s:.2f} s")
        assert sum(driver.present(keys)) == 4000
