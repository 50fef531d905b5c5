"""The books of a drive: who gets which slot, who leaves, and what the journal is told."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepwell.core.keys import Key, Root, fingerprint
from stepwell.core.record import Header
from stepwell.core.types import Lookup, Reason
from stepwell.policy.endurance import EnduranceState
from stepwell.policy.eviction import make_policy
from stepwell.testing import key_of
from stepwell.tiers.frames import ENTRY, Image, replay
from stepwell.tiers.journal import Journal
from stepwell.tiers.ledger import Drop, Evicted, Full, Got, Grow, Ledger
from stepwell.tiers.outcomes import ALREADY_THERE
from stepwell.tiers.slots import BOOKKEEPING_BYTES, Extent, SlotSpace, place_of, slot_of

from .conftest import check_slots

SMALL, LARGE = 8192, 5 * 4096
ENOUGH = 1 << 40
WEAR = EnduranceState(0, 0.0, 0.0, 0.0)


def keys_of(count: int, prefix: str = "k", root: str = "root") -> list[Key]:
    return [key_of(f"{prefix}{idx}", root) for idx in range(count)]


def header_of(key: Key, stored_at_us: int, expires_at_us: int = 0, end_token: int = 0) -> Header:
    return Header(key, 100, bytes(16), stored_at_us, expires_at_us, end_token)


def key_at(headers: dict[int, Header], place: int) -> Key | None:
    header = headers.get(place)
    return None if header is None else header.key


class Books:
    """A ledger whose steps are carried out on a drive that is a dictionary, and its journal."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self.folder = folder
        self.held: set[int] = set()
        self.evicted: list[tuple[Evicted, int]] = []
        self.now_s = 1000.0
        self.lies: dict[int, Header] = {}
        """What a look at every slot would find."""
        self.journal = Journal(str(folder / "journal"), str(folder / "partial"))
        self.ledger = Ledger(
            capacity_bytes,
            make_policy(),
            self.held.__contains__,
            self.journal,
            lambda why, tag: self.evicted.append((why, tag)),
        )

    def renew(self) -> None:
        assert self.journal.renew(self.ledger.lock, lambda: self.ledger.snapshot(WEAR))

    def image(self) -> Image:
        """What a start would read."""
        self.journal.flush()
        return replay((self.folder / "journal").read_bytes())

    def restarted(self, capacity_bytes: int | None = None, *, journal: bool = True) -> "Books":
        """Books of a new process over the same drive, which may have lost the journal."""
        self.settle()
        image = self.image()
        self.journal.close()
        new = Books(self.folder, capacity_bytes or self.ledger.capacity_bytes)
        new.now_s, new.lies = self.now_s, self.lies
        new.held.update(self.held)
        for extent in self.extents():
            new.ledger.adopt_extent(extent.extent_id, extent.slot_bytes, extent.num_slots)
        if not journal:
            image = Ledger.image_of(self.lies.items(), self.now_s)
        complete = new.ledger.load(image, -1)
        if not (journal and complete and new.journal.resume(image)):
            new.renew()
        return new

    # Writing.

    def room(self, slot_bytes: int, count: int, grow_bytes: int = ENOUGH) -> Got | Full:
        for _ in range(1000):
            step = self.ledger.allot(slot_bytes, count, grow_bytes)
            assert self.ledger.allocated_bytes <= self.ledger.capacity_bytes
            if isinstance(step, Grow):
                self.ledger.grown(step.extent, made=True)
            elif isinstance(step, Drop):
                self.drop(step.extent)
            else:
                return step
        raise AssertionError("no end of steps")

    def drop(self, extent: Extent) -> None:
        assert extent.empty
        self.lies = {p: h for p, h in self.lies.items() if slot_of(p)[0] != extent.extent_id}
        self.ledger.dropped(extent, gone=True)

    def begin(self, keys: Sequence[Key], slot_bytes: int = SMALL) -> list[int]:
        """Enter those of a prefix that are absent and that there is room for; their rows."""
        absent = self.ledger.missing(keys, self.now_s)
        wanted = [key for key, missing in zip(keys, absent, strict=True) if missing]
        if not wanted:
            return []
        places = self.ledger.free_slots(slot_bytes, len(wanted))
        places = places or self.room(slot_bytes, len(wanted)).places
        rows = [self.ledger.begin(k, place) for k, place in zip(wanted, places, strict=False)]
        return [row for row in rows if isinstance(row, int)]

    def end(self, rows: Sequence[int], keys: Sequence[Key], ttl_s: float = 0.0) -> list[int]:
        """Writes end well; those that were removed meanwhile are discarded, and returned."""
        for row, key in zip(rows, keys, strict=True):
            self.lies[self.ledger.place(row)] = self.header(key, ttl_s)
        expires_at_s = [self.now_s + ttl_s] * len(rows) if ttl_s else []
        doomed = self.ledger.commit(rows, self.now_s, expires_at_s)
        for row in doomed:
            self.discard(row)
        return doomed

    def header(self, key: Key, ttl_s: float) -> Header:
        expires_at_us = int((self.now_s + ttl_s) * 1e6) if ttl_s else 0
        return header_of(key, int(self.now_s * 1e6), expires_at_us)

    def fail(self, rows: Sequence[int], keys: Sequence[Key], *, bad: bool = False) -> None:
        """Writes fail, the latter half of them before anything was written."""
        for row, key in zip(rows[: len(rows) // 2], keys, strict=False):
            self.lies[self.ledger.place(row)] = self.header(key, 0.0)
        self.ledger.abort(rows, bad=bad)

    def write(self, keys: Sequence[Key], slot_bytes: int = SMALL, ttl_s: float = 0.0) -> list[int]:
        """Write a prefix; the places of what was written."""
        absent = self.ledger.missing(keys, self.now_s)
        wanted = [key for key, missing in zip(keys, absent, strict=True) if missing]
        rows = self.begin(keys, slot_bytes)
        places = [self.ledger.place(row) for row in rows]
        self.end(rows, wanted[: len(rows)], ttl_s)
        self.settle()
        return places

    def settle(self) -> None:
        """As a tier does after every piece of work."""
        stale = self.ledger.take_stale()
        for place in stale:
            self.lies.pop(place, None)
        self.ledger.give_back(stale)
        for extent in self.ledger.take_unused():
            self.drop(extent)

    def delete(self, keys: Sequence[Key]) -> int:
        count, rows = self.ledger.remove(keys)
        for row in rows:
            self.discard(row)
        return count

    def discard(self, row: int) -> None:
        self.lies.pop(self.ledger.place(row), None)
        self.ledger.note_gone([row])
        self.ledger.discarded(row)

    def read(self, keys: Sequence[Key], reason: Reason = Reason.NONE) -> list[Reason]:
        """Read, and find this wrong with every record that is there."""
        found = self.ledger.begin_reads(keys, self.now_s)
        rows = [each[0] for each in found if not isinstance(each, Reason)]
        discard, _ = self.ledger.end_reads([(row, reason) for row in rows])
        for row in discard:
            self.discard(row)
        self.settle()
        return [each if isinstance(each, Reason) else Reason.NONE for each in found]

    # Asking.

    def present(self, keys: Sequence[Key]) -> list[bool]:
        return [each is Lookup.HIT for each in self.ledger.contains(keys, self.now_s)]

    def extents(self) -> list[Extent]:
        return list(self.ledger._space.extents.values())

    def check(self, *, settled: bool = True) -> None:
        check_slots(self.ledger, settled=settled)
        assert self.ledger.allocated_bytes <= self.ledger.capacity_bytes

    def shrink(self, allocated_bytes: int, why: Evicted = Evicted.MIN_FREE) -> None:
        """As a tier gives space back."""
        for clear in (False, True):
            for _ in range(1000):
                step = self.ledger.shrink(allocated_bytes, why, clear=clear)
                if isinstance(step, Drop):
                    self.drop(step.extent)
                elif not step:
                    break
            else:
                raise AssertionError("no end of steps")
            while cut := self.ledger.trim(allocated_bytes):
                extent, count = cut
                assert count > 0
                end = place_of(extent.extent_id, extent.num_slots)
                for place in range(end, end + count):
                    self.lies.pop(place, None)


@pytest.fixture
def books(tmp_path: Path) -> Books:
    """With room for 16 small slots, in four extents of four."""
    return books_of(tmp_path, 16)


def books_of(folder: Path, num_slots: int) -> Books:
    made = Books(folder, num_slots * SlotSpace.cost_of(SMALL))
    made.renew()
    return made


def test_the_life_of_a_chunk(books: Books) -> None:
    (key,) = keys_of(1)
    rows = books.begin([key])
    assert books.ledger.contains([key], 0.0) == [Lookup.PENDING]
    assert books.ledger.missing([key], 0.0) == [False]
    assert books.ledger.used_bytes == SMALL + BOOKKEEPING_BYTES
    assert books.ledger.commit(rows, 1.0, []) == []
    assert books.present([key]) == [True]
    assert len(books.ledger) == 1
    assert books.delete([key]) == 1
    assert books.present([key]) == [False]
    assert (len(books.ledger), books.ledger.used_bytes) == (0, 0)
    assert books.delete([key]) == 0
    books.check()


def test_extents_are_made_as_they_are_needed(books: Books) -> None:
    assert books.ledger.num_slots == 0
    books.write(keys_of(3))
    assert [extent.num_slots for extent in books.extents()] == [4]
    books.write(keys_of(16))
    assert [extent.num_slots for extent in books.extents()] == [4] * 4
    assert books.ledger.allocated_bytes == books.ledger.capacity_bytes
    assert books.ledger.used_bytes == books.ledger.capacity_bytes
    assert books.evicted == []
    books.check()


def test_the_chunks_of_a_job_are_neighbours(books: Books) -> None:
    books.write(keys_of(16, "old"))
    for idx in range(4):
        places = books.write(keys_of(4, f"new{idx}"))
        assert places == list(range(places[0], places[0] + 4))


def test_the_end_of_what_was_not_used_for_longest_leaves(books: Books) -> None:
    first, second, third = (keys_of(n, p) for n, p in ((6, "a"), (6, "b"), (4, "c")))
    for prefix in (first, second, third):
        books.write(prefix)
    books.ledger.touch(first, 5.0)
    books.write(keys_of(2, "new"))
    assert books.present(second) == [True] * 4 + [False] * 2
    assert books.present([*first, *third]) == [True] * 10
    left = [(Evicted.CAPACITY, fingerprint(key)) for key in second[:3:-1]]
    assert books.evicted == left, "no more than was needed, and whoever listens is told which"
    books.check()


@pytest.mark.parametrize("why", ["lease", "reading", "writing"])
def test_what_is_in_use_stays(books: Books, why: str) -> None:
    """And where nothing else is left, a write gets what can be had, its beginning."""
    old = keys_of(14, "old")
    books.write(old[:10])
    rows = books.begin(old[10:])
    if why != "writing":
        books.ledger.commit(rows, books.now_s, [])
    if why == "lease":
        books.held.update(fingerprint(key) for key in old)
    else:
        books.ledger.begin_reads(old[:10] if why == "writing" else old, books.now_s)
    step = books.room(SMALL, 5)
    assert isinstance(step, Full)
    assert len(step.places) == 2
    assert books.evicted == []
    assert books.present(old) == [True] * 10 + [why != "writing"] * 4
    books.ledger.give_back(step.places)
    books.check(settled=False)


def test_a_chunk_that_could_never_be_had(books: Books) -> None:
    assert books.ledger.fits(books.ledger.capacity_bytes - BOOKKEEPING_BYTES)
    assert not books.ledger.fits(books.ledger.capacity_bytes - BOOKKEEPING_BYTES + 1)


def test_a_drive_without_free_space_is_written_over(books: Books) -> None:
    """The capacity would allow another extent, the drive does not: the oldest leave instead."""
    books.write(keys_of(4))
    step = books.room(SMALL, 2, grow_bytes=100)
    assert isinstance(step, Got)
    assert len(books.evicted) == 2
    assert len(books.extents()) == 1
    assert books.room(LARGE, 1, grow_bytes=100) == Full([])


def test_who_comes_second_gets_no_slot(books: Books) -> None:
    (key,) = keys_of(1)
    books.write(keys_of(2, "other"))
    places = books.ledger.free_slots(SMALL, 2)
    row = books.ledger.begin(key, places[0])
    assert isinstance(row, int)
    assert books.ledger.begin(key, places[1]) == ALREADY_THERE
    books.ledger.commit([row], 1.0, [])
    books.check()


def test_slots_that_are_not_all_there_are_not_taken(books: Books) -> None:
    books.write(keys_of(3))
    assert books.ledger.free_slots(SMALL, 2) == []
    assert len(books.ledger.free_slots(SMALL, 1)) == 1


def test_an_aborted_write_leaves_nothing(books: Books) -> None:
    rows = books.begin(keys_of(3))
    books.ledger.remove(keys_of(1))
    books.ledger.abort(rows)
    assert books.ledger.used_bytes == 0
    assert books.ledger.contains(keys_of(3), 0.0) == [Lookup.MISS] * 3
    books.check()
    assert len(books.image().rows) == 0


def test_slots_that_the_drive_could_not_write_are_the_last_to_be_used_again(books: Books) -> None:
    """One bad sector: its slot was free again and the first to be taken, so that every later
    write failed."""
    books.write(keys_of(12))
    rows = books.begin(keys_of(4, "bad"))
    places = {books.ledger.place(row) for row in rows}
    books.fail(rows, keys_of(4, "bad"), bad=True)
    for idx in range(20):
        assert not set(books.write(keys_of(3, f"n{idx}"))) & places
    books.check()
    assert set(books.write(keys_of(16, "all"))) > places, "rather than none at all"
    books.check()


def test_what_was_deleted_while_it_was_written_is_discarded(books: Books) -> None:
    keys = keys_of(3)
    rows = books.begin(keys)
    assert books.ledger.remove([keys[1]]) == (1, [])
    again = books.begin([keys[1]])
    assert books.ledger.commit(rows, 1.0, []) == [rows[1]]
    assert books.ledger.used_bytes == 4 * SlotSpace.cost_of(SMALL)
    books.discard(rows[1])
    assert books.ledger.contains(keys, 0.0) == [Lookup.HIT, Lookup.PENDING, Lookup.HIT]
    books.ledger.commit(again, 1.0, [])
    books.check()


def test_a_slot_that_is_read_is_not_given_away(books: Books) -> None:
    """Neither by a delete nor by time running out; what was deleted is absent all the same."""
    keys = keys_of(2)
    places = [*books.write(keys[:1]), *books.write(keys[1:], ttl_s=5.0)]
    (first, _), (second, _) = books.ledger.begin_reads(keys, books.now_s)
    books.ledger.begin_reads(keys[:1], books.now_s)
    assert books.ledger.remove(keys[:1]) == (1, []), "it is being read"
    books.now_s += 10.0
    assert books.ledger.missing(keys, books.now_s) == [True, True]
    assert not set(books.write(keys_of(16, "x"))) & set(places)
    assert not set(books.write(keys)) & set(places)
    assert books.ledger.end_reads([(first, Reason.NONE), (second, Reason.NONE)]) == ([second], [])
    assert books.ledger.end_reads([(first, Reason.NONE)]) == ([first], [])
    books.discard(first)
    books.discard(second)
    books.check()


def test_time_runs_out(books: Books) -> None:
    keys = keys_of(3)
    books.write(keys[:2], ttl_s=5.0)
    books.write(keys[2:])
    books.now_s += 6.0
    assert books.present(keys) == [False, False, True]
    assert books.read(keys[:1]) == [Reason.EXPIRED]
    assert books.ledger.missing(keys, books.now_s) == [True, True, False]
    assert books.ledger.used_bytes == SlotSpace.cost_of(SMALL)
    books.check()
    assert len(books.image().rows) == 1


# What is wrong.


def test_a_wrong_record_is_absent_and_kept_for_a_look(books: Books) -> None:
    keys = keys_of(4)
    places = books.write(keys)
    books.read(keys[1:2], Reason.CHECKSUM)
    assert books.present(keys) == [True, False, True, True]
    assert books.ledger.num_aside == 1
    assert books.ledger.used_bytes == 4 * SlotSpace.cost_of(SMALL)
    assert books.image().aside == {places[1]: 1}
    assert books.write(keys)[0] != places[1], "as long as there is other room"
    books.check()


def test_what_was_set_aside_is_the_first_to_go(books: Books) -> None:
    keys = keys_of(16)
    places = books.write(keys)
    books.read(keys[3:5], Reason.HEADER)
    assert sorted(books.write(keys_of(2, "new"))) == places[3:5]
    assert books.evicted == []
    assert books.ledger.num_aside == 0
    assert books.image().aside == {}
    books.check()


def test_expired_records_are_not_kept(books: Books) -> None:
    """What a header says to have expired, although the table did not know."""
    books.write(keys_of(2))
    books.read(keys_of(1), Reason.EXPIRED)
    assert books.ledger.num_aside == 0
    assert books.present(keys_of(2)) == [False, True]
    books.check()


def test_two_readers_of_a_wrong_record(books: Books) -> None:
    """One of them finds it wrong first; it is counted once, and the slot of one owner."""
    keys = keys_of(1)
    books.write(keys)
    ((row, _),) = books.ledger.begin_reads(keys, 0.0)
    books.ledger.begin_reads(keys, 0.0)
    assert books.ledger.end_reads([(row, Reason.CHECKSUM)]) == ([], [row])
    assert books.present(keys) == [False]
    assert books.ledger.end_reads([(row, Reason.CHECKSUM)]) == ([], [])
    assert books.ledger.num_aside == 1
    books.check()


def test_what_was_set_aside_is_known_after_a_restart(books: Books) -> None:
    keys = keys_of(16)
    places = books.write(keys)
    books.read(keys[3:5], Reason.TRUNCATED)
    books = books.restarted()
    assert books.ledger.num_aside == 2
    assert books.present(keys) == [idx not in (3, 4) for idx in range(16)]
    books.check()
    assert sorted(books.write(keys_of(2, "new"))) == places[3:5]
    assert books.evicted == []
    books = books.restarted()
    assert books.ledger.num_aside == 0
    books.check()


# Sizes.


def test_space_moves_from_one_slot_size_to_another(books: Books) -> None:
    """As when another model is served: the old one's extents make way one by one."""
    old = keys_of(16, "old")
    books.write(old)
    new = keys_of(2, "new")
    books.write(new[:1], LARGE)
    assert books.present(new) == [True, False]
    assert sum(books.present(old)) == 12, "one extent of four made way"
    assert {why for why, _ in books.evicted} == {Evicted.CAPACITY, Evicted.SLOT_SIZE}
    assert len(books.evicted) == 4
    books.check()
    for _ in range(3):
        books.write(keys_of(30, "new"), LARGE)
    assert {extent.slot_bytes for extent in books.extents()} == {LARGE}
    assert sum(books.present(keys_of(30, "new"))) >= 5
    books.check()
    books.write(old)
    books.write(old)
    assert sum(books.present(old)) >= 12
    books.check()


def test_an_empty_extent_of_another_size_goes_before_anybody_is_evicted(books: Books) -> None:
    keys = keys_of(16)
    books.write(keys)
    books.delete(keys[4:8])
    books.write(keys_of(1, "large"), LARGE)
    assert books.evicted == []
    assert sum(books.present(keys)) == 12
    books.check()


def test_nothing_is_evicted_for_a_size_that_cannot_be_had(books: Books) -> None:
    """Every extent holds one chunk that is leased, so that none can make way: all chunks of the
    other size were evicted, one after the other, and the write was refused all the same."""
    keys = keys_of(16)
    books.write(keys)
    books.held.update(fingerprint(key) for key in keys[::4])
    for _ in range(4):
        assert books.room(LARGE, 1) == Full([])
    assert books.evicted == []
    assert books.present(keys) == [True] * 16


def test_an_extent_that_is_written_to_does_not_make_way_for_another_size(books: Books) -> None:
    """Its records were evicted, although a write in flight kept its file from being dropped."""
    keys = keys_of(13)
    books.write(keys[:12])
    (row,) = books.begin(keys[12:])
    emptiest = slot_of(books.ledger.place(row))[0]
    step = books.room(LARGE, 1)
    assert isinstance(step, Got)
    assert emptiest in {extent.extent_id for extent in books.extents()}
    assert len(books.evicted) <= 4 + 1, "one extent, and whoever would have left first"
    books.ledger.give_back(step.places)
    books.ledger.commit([row], 1.0, [])
    books.check()


# Giving space back.


def test_space_is_given_back_from_what_leaves_first(books: Books) -> None:
    first, second = keys_of(8, "a"), keys_of(8, "b")
    books.write(first)
    books.write(second)
    cost_bytes = SlotSpace.cost_of(SMALL)
    books.shrink(10 * cost_bytes)
    assert books.ledger.allocated_bytes <= 10 * cost_bytes
    assert sum(books.present(second)) == 8
    assert sum(books.present(first)) == 2, "no more than was needed"
    assert {why for why, _ in books.evicted} == {Evicted.MIN_FREE}
    books.check()


def test_free_slots_are_given_back_before_any_record(books: Books) -> None:
    keys = keys_of(16)
    books.write(keys)
    books.delete(keys[6:12])
    books.shrink(10 * SlotSpace.cost_of(SMALL))
    assert books.ledger.allocated_bytes <= 10 * SlotSpace.cost_of(SMALL)
    assert sum(books.present(keys)) >= 8
    books.check()


def test_set_aside_slots_are_given_back_before_any_record(books: Books) -> None:
    keys = keys_of(16)
    books.write(keys)
    books.read(keys[8:], Reason.CHECKSUM)
    books.shrink(8 * SlotSpace.cost_of(SMALL))
    assert books.present(keys) == [True] * 8 + [False] * 8
    assert books.ledger.allocated_bytes == 8 * SlotSpace.cost_of(SMALL)
    assert books.evicted == []
    books.check()


def test_all_of_it_can_be_given_back(books: Books) -> None:
    books.write(keys_of(13))
    books.shrink(0)
    assert (books.ledger.allocated_bytes, books.ledger.used_bytes, len(books.ledger)) == (0, 0, 0)
    books.check()
    books.write(keys_of(16))
    books.check()


def test_leased_chunks_keep_their_space(books: Books) -> None:
    keys = keys_of(16)
    books.write(keys)
    books.held.update(fingerprint(key) for key in (keys[0], keys[9]))
    books.shrink(0)
    assert [key for key, here in zip(keys, books.present(keys), strict=True) if here] == [
        keys[0], keys[9]
    ]  # fmt: skip
    assert books.ledger.allocated_bytes <= 4 * SlotSpace.cost_of(SMALL)
    books.check()


@pytest.mark.parametrize("busy", ["written", "read and deleted", "allotted"])
def test_giving_back_ends_while_a_slot_is_in_use(books: Books, busy: str) -> None:
    """An extent without records but with a write in flight was 'cleared' again and again, for as
    long as that write took; with a drive that stands still for ever."""
    keys = keys_of(4)
    if busy == "written":
        books.begin(keys[:1])
    elif busy == "allotted":
        books.room(SMALL, 1)
    else:
        books.write(keys[:1])
        books.ledger.begin_reads(keys[:1], 0.0)
        books.ledger.remove(keys[:1])
    books.shrink(0)
    assert books.ledger.allocated_bytes >= SlotSpace.cost_of(SMALL)
    books.check(settled=False) if busy != "allotted" else None


def test_everything_is_forgotten(books: Books) -> None:
    """Somebody removed the files. What is in flight ends, and its extent then goes."""
    keys = keys_of(12)
    places = books.write(keys)
    books.read(keys[11:], Reason.CHECKSUM)
    extent_of_first = slot_of(places[0])[0]
    ((row, _),) = books.ledger.begin_reads(keys[:1], 0.0)
    books.ledger.forget()
    books.settle()
    assert [extent.extent_id for extent in books.extents()] == [extent_of_first]
    assert books.present(keys) == [False] * 12
    assert books.ledger.num_aside == 0
    assert not set(books.write(keys_of(12, "new"))) & set(places), "old slots are not used again"
    discard, _ = books.ledger.end_reads([(row, Reason.NONE)])
    for row in discard:
        books.discard(row)
    books.settle()
    assert extent_of_first not in {extent.extent_id for extent in books.extents()}
    books.check()


@pytest.mark.parametrize("end", ["commit", "abort", "evict", "expire"])
def test_an_extent_out_of_use_goes_with_its_last_record(books: Books, end: str) -> None:
    """A write that was in flight when the files were removed ended in an extent that nobody used
    any more; however its chunk left, the extent's part of the capacity was never given back."""
    keys = keys_of(1)
    rows = books.begin(keys)
    books.ledger.forget()
    books.settle()
    if end == "abort":
        books.fail(rows, keys)
    else:
        books.end(rows, keys, 5.0 if end == "expire" else 0.0)
    if end == "commit":
        books.delete(keys)
    books.now_s += 10.0
    books.write(keys_of(32, "new"))
    books.read(keys)
    books.write(keys_of(32, "newer"))
    assert sum(books.present(keys_of(32, "newer"))) == 16, "the whole capacity is of use again"
    books.check()


# Starting.


def entries(*rows: tuple[Key, int, int]) -> np.ndarray:
    made = np.zeros(len(rows), ENTRY)
    for idx, (key, place, root) in enumerate(rows):
        made[idx] = (fingerprint(key), place, root, 0, 0, 0, 0)
    return made


def test_a_restart_finds_what_there_was(books: Books) -> None:
    first, second, third = (keys_of(4, prefix) for prefix in "abc")
    for prefix in (first, second, third):
        books.write(prefix)
    books.ledger.touch(first, 5.0)
    books.delete(second[:1])
    before = [books.ledger.begin_reads([key], 0.0)[0] for key in (*first, *second[1:], *third)]
    books = books.restarted()
    after = [books.ledger.begin_reads([key], 0.0)[0] for key in (*first, *second[1:], *third)]
    assert [each[1] for each in before if not isinstance(each, Reason)] == [
        each[1] for each in after if not isinstance(each, Reason)
    ]
    assert books.present(second) == [False, True, True, True]
    books.ledger.end_reads([(e[0], Reason.NONE) for e in after if not isinstance(e, Reason)])
    books.check()
    books.write(keys_of(9, "new"))
    assert books.present(second) == [False] * 4
    assert books.present(third) == [True] * 3 + [False]
    assert books.present(first) == [True] * 4


def test_of_two_entries_of_one_chunk_the_more_recent_stays(books: Books, tmp_path: Path) -> None:
    a, b, c = keys_of(3)
    image = Image(
        entries((a, 2, 0), (b, 0, 0), (a, 1, 0), (c, 3, 0)), {0: a[:32]}, valid_bytes=16
    )  # fmt: skip
    books.ledger.adopt_extent(0, SMALL, 5)
    assert not books.ledger.load(image, -1), "a journal that says so must be made anew"
    assert len(books.ledger) == 3
    ((row, place),) = books.ledger.begin_reads([a], 0.0)
    assert place == 1
    books.ledger.end_reads([(row, Reason.NONE)])
    books.check()
    assert sorted(books.ledger.free_slots(SMALL, 2)) == [2, 4], "the other's slot is free"


def test_entries_that_cannot_be_are_passed_over(books: Books) -> None:
    """Of an extent that is gone, of a slot beyond its extent's end, of a root without a name."""
    a, b, c, d, e = keys_of(5)
    rows = entries(
        (a, place_of(7, 0), 0), (b, 5, 0), (c, 0, 9), (d, 1, 0), (e, (1 << 63) + 5, 0)
    )  # fmt: skip
    image = Image(rows, {0: a[:32]}, aside={2: 1, place_of(7, 1): 1, 99: 2, 3: 12345})
    books.ledger.adopt_extent(0, SMALL, 5)
    assert not books.ledger.load(image, -1)
    assert books.ledger.roots() == {a[:32]}
    assert books.present([a, b, c, d, e]) == [False, False, False, True, False]
    assert books.ledger.num_aside == 2
    books.check()


def test_roots_that_are_in_use(books: Books) -> None:
    """Numbers in the journal are those of this journal, whatever other roots there were."""
    for name in ("one", "two", "three"):
        books.write(keys_of(2, "k", name))
    books.delete(keys_of(2, "k", "two"))
    image = books.image()
    assert len(image.roots) == 3
    books = books.restarted()
    roots = {key_of("k0", name)[:32] for name in ("one", "three")}
    assert set(image.roots.values()) > roots
    books.write(keys_of(2, "k", "four"))
    books.renew()
    found = books.image()
    names = [found.roots[int(number)] for number in found.rows["root"]]
    assert set(names) == roots | {key_of("k0", "four")[:32]}
    assert sorted(map(bytes, found.roots.values())) == sorted(map(bytes, set(names)))


def test_roots_without_records_are_forgotten_while_the_store_is_open(books: Books) -> None:
    """Thousands of roots one after the other, a tenant each: a journal with every root's name
    outgrew the room that it has, and was written anew with every batch."""
    for number in range(300):
        books.write([key_of("k", f"root {number}")])
    books.renew()
    assert books.journal.size_bytes <= books.ledger.num_slots * BOOKKEEPING_BYTES * 3 // 4
    assert not books.journal.long(len(books.ledger))
    assert len(books.image().roots) <= 16 + 1


def test_more_roots_than_there_are_numbers(books: Books) -> None:
    """Numbers were only ever counted up: after number 65535 each new root lost a row and a slot."""
    old = keys_of(1)
    image = Image(entries((old[0], 0, 65_535)), {65_535: Root(old[0][:32])}, valid_bytes=16)
    books.ledger.adopt_extent(0, SMALL, 5)
    assert books.ledger.load(image, -1)
    for name in range(20):
        books.write(keys_of(2, "k", f"root {name}"))
    assert books.present(keys_of(2, "k", "root 19")) == [True, True]
    books.check()
    books.renew()
    books = books.restarted()
    assert books.present(keys_of(2, "k", "root 19")) == [True, True]
    books.check()


def test_what_failed_is_wiped_although_its_slots_were_looked_at(books: Books) -> None:
    """A write failed after some of its records lay there; before they were wiped another write
    took their slots, found too few and gave them back, and they were no longer known to hold
    anything. Deleted and without a journal, the chunk was back."""
    keys = keys_of(4)
    books.write(keys_of(4, "other"))
    books.fail(books.begin(keys), keys)
    assert len(books.lies) == 6
    assert books.ledger.free_slots(SMALL, 16) == []
    assert isinstance(books.ledger.allot(SMALL, 16, ENOUGH), Grow)
    books.settle()
    assert {header.key for header in books.lies.values()} == set(keys_of(4, "other"))


def test_what_left_to_give_space_back_is_wiped(books: Books) -> None:
    """Chunks left, but their slots could not be cut off, since a leased one lay behind them; an
    extent of chunks that were used later went instead. Their records still lay there."""
    prefixes = [keys_of(4, prefix) for prefix in "abcd"]
    for prefix in prefixes:
        books.write(prefix)
    books.held.add(fingerprint(prefixes[0][3]))
    books.shrink(13 * SlotSpace.cost_of(SMALL))
    assert books.present(prefixes[0]) == [False, False, False, True]
    assert sum(header.key in prefixes[0] for header in books.lies.values()) == 4
    books.settle()
    assert [h.key for h in books.lies.values() if h.key in prefixes[0]] == [prefixes[0][3]]
    books.check()


def test_a_bad_slot_is_not_used_again_while_it_is_wiped(books: Books) -> None:
    """A slot that had failed was wiped just when there was nothing else left to write to. It was
    given away, the new record's header was wiped, and then the slot was given back although it
    was in use: two chunks got it."""
    keys = keys_of(4)
    books.write(keys_of(12, "held"))
    books.held.update(fingerprint(key) for key in keys_of(12, "held"))
    books.fail(books.begin(keys), keys, bad=True)
    wiping = books.ledger.take_stale()
    books.write(keys)
    for place in wiping:
        books.lies.pop(place, None)
    books.ledger.give_back(wiping)
    for key, here in zip(keys, books.present(keys), strict=True):
        if here:
            ((_, place),) = books.ledger.begin_reads([key], 0.0)
            assert key_at(books.lies, place) == key
    books.check(settled=False)
    others = books.write(keys_of(4, "other"))
    assert len(others) == 4 - sum(books.present(keys))
    books.check(settled=False)


def test_a_lost_extent_takes_only_its_own_bad_slots_along(books: Books) -> None:
    """All of them were tried again, also those of extents that are there, which are still bad."""
    books.write(keys_of(4, "first"))
    books.write(keys_of(4, "second"))
    bad = books.begin(keys_of(2))
    place = books.ledger.place(bad[0])
    books.fail(bad, keys_of(2), bad=True)
    other = next(e for e in books.extents() if e.extent_id != slot_of(place)[0])
    assert books.ledger.forget([other.extent_id]) == [other.extent_id]
    assert books.ledger.forget([other.extent_id]) == [], "that is known"
    for extent in books.ledger.take_unused():
        books.drop(extent)
    books.settle()
    books.write(keys_of(12, "new"))
    assert place not in books.lies, "the last to be used again"
    books.check()


def test_what_is_deleted_while_it_is_found_wrong_is_wiped(books: Books) -> None:
    """It was set aside as it was, and found again by its header when the journal was lost."""
    (key,) = keys_of(1)
    books.write([key])
    ((row, _),) = books.ledger.begin_reads([key], books.now_s)
    assert books.ledger.remove([key]) == (1, []), "somebody reads it"
    assert books.ledger.end_reads([(row, Reason.CHECKSUM)]) == ([row], [])
    assert books.ledger.num_aside == 0


def test_what_two_readers_find_wrong_is_set_aside_once(books: Books) -> None:
    (key,) = keys_of(1)
    books.write([key])
    ((row, _),) = books.ledger.begin_reads([key], books.now_s)
    books.ledger.begin_reads([key], books.now_s)
    assert books.ledger.end_reads([(row, Reason.CHECKSUM)]) == ([], [row])
    assert books.ledger.end_reads([(row, Reason.NONE)]) == ([], []), "and this one was lucky"
    assert books.ledger.num_aside == 1
    books.check()


def test_what_is_to_be_wiped_does_not_wait_for_what_is_gone(books: Books) -> None:
    """The slots of an extent that had made way were still remembered as to be wiped, before all
    others and for ever, so that those others were never wiped."""
    books.write(keys_of(16))
    for idx in range(3):
        books.write(keys_of(2, f"large {idx}"), LARGE)
    keys = keys_of(4)
    books.fail(books.begin(keys), keys)
    failed = set(keys) & {header.key for header in books.lies.values()}
    assert failed
    for _ in range(20):
        books.settle()
    left = {h.key for h in books.lies.values()} - {k for k in keys_of(16) if books.present([k])[0]}
    assert not failed & left


def test_headers_say_what_a_journal_would_have(books: Books) -> None:
    """Who was written first leaves first, of a prefix the end; expired ones are passed over."""
    a, b, c, d, other = *keys_of(4), key_of("x", "other")
    seconds = 1_000_000
    headers = [
        (3, header_of(c, 9 * seconds, end_token=16)),
        (0, header_of(a, 5 * seconds, end_token=16)),
        (1, header_of(b, 5 * seconds, end_token=32)),
        (2, header_of(d, 7 * seconds, expires_at_us=20 * seconds)),
        (4, header_of(other, 8 * seconds, expires_at_us=99 * seconds)),
    ]
    image = Ledger.image_of(headers, 50.0)
    tags = [int(tag) for tag in image.rows["tag"]]
    assert tags == [fingerprint(key) for key in (b, a, other, c)]
    assert image.rows["place"].tolist() == [1, 0, 4, 3]
    assert image.rows["used_at_s"].tolist() == [5, 5, 8, 9]
    assert image.rows["expires_at_s"].tolist() == [0, 0, 99, 0]
    roots = [image.roots[int(number)] for number in image.rows["root"]]
    assert roots == [a[:32], a[:32], other[:32], a[:32]]
    books.ledger.adopt_extent(0, SMALL, 5)
    assert books.ledger.load(image, -1)
    assert books.ledger.roots() == {a[:32], other[:32]}
    assert books.ledger.contains([a, b, c, d, other], 50.0) == [
        Lookup.HIT, Lookup.HIT, Lookup.HIT, Lookup.MISS, Lookup.HIT
    ]  # fmt: skip
    books.check()


def test_a_lower_capacity_after_a_restart(books: Books) -> None:
    first, second = keys_of(8, "a"), keys_of(8, "b")
    books.write(first)
    books.write(second)
    books = books.restarted(5 * SlotSpace.cost_of(SMALL))
    assert books.ledger.allocated_bytes > books.ledger.capacity_bytes
    books.shrink(books.ledger.capacity_bytes, Evicted.CAPACITY)
    books.check()
    assert books.present(first) == [False] * 8
    assert sum(books.present(second)) >= 4
    books.write(keys_of(3, "new"))
    books.check()


def test_the_journal_is_told_everything(books: Books) -> None:
    """A snapshot says what the frames since the last one said."""
    for number in range(30):
        books.write(keys_of(5, f"{number}."))
        books.ledger.touch(keys_of(2, f"{number - 1}."), number)
        books.read([key_of(f"{number - 1}.1")], Reason.CHECKSUM if number % 4 == 0 else Reason.NONE)
        books.delete([key_of(f"{number - 2}.0")])
        image = books.image()
        told = (image.rows.tolist(), image.aside)
        books.renew()
        image = books.image()
        assert (image.rows.tolist(), image.aside) == told


class LedgerMachine(RuleBasedStateMachine):
    """Anything a tier may do, with I/O in flight and restarts, and a journal that may be lost.

    A chunk that was written is there until it leaves for a reason that the model knows of, what
    lies at its place is the chunk, and nothing that was deleted comes back.
    """

    KEYS = tuple(keys_of(10))
    keys = st.sampled_from(KEYS)
    prefixes = st.lists(keys, min_size=1, max_size=5, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="ledger-machine-")
        self.books = Books(Path(self.folder.name), 7 * SlotSpace.cost_of(SMALL))
        self.books.renew()
        self.there: set[Key] = set()
        self.deleted: set[Key] = set()
        self.expires_s: dict[Key, float] = {}
        self.named: dict[Key, Key] = {}  # what was deleted while it was written -> its name
        self.writes: list[tuple[list[int], list[Key]]] = []
        self.reads: list[tuple[int, int, Key]] = []
        self.wiping: list[int] = []

    def teardown(self) -> None:
        self.books.journal.close()
        self.folder.cleanup()

    @staticmethod
    def slot_bytes(key: Key) -> int:
        return LARGE if key[-1] % 3 == 0 else SMALL

    def note_evicted(self) -> None:
        names = {fingerprint(key): key for key in self.KEYS}
        for _, tag in self.books.evicted:
            self.there.remove(names[tag])
        self.books.evicted.clear()

    def in_flight(self) -> set[Key]:
        return {key for _, keys in self.writes for key in keys}

    def place_of(self, key: Key) -> int | None:
        row = self.books.ledger._table.find(fingerprint(key))
        return None if row is None else self.books.ledger.place(row)

    @rule(prefix=prefixes, ttl_s=st.sampled_from([0.0, 0.0, 20.0]), waits=st.booleans())
    def write(self, prefix: list[Key], ttl_s: float, waits: bool) -> None:
        for slot_bytes in (SMALL, LARGE):
            keys = [key for key in prefix if self.slot_bytes(key) == slot_bytes]
            absent = self.books.ledger.missing(keys, self.books.now_s)
            assert absent == [key not in self.there | self.in_flight() for key in keys]
            wanted = [key for key, missing in zip(keys, absent, strict=True) if missing]
            rows = self.books.begin(keys, slot_bytes)
            self.note_evicted()
            if rows:
                self.writes.append((rows, wanted[: len(rows)]))
                if not waits:
                    self.end_write(True, ttl_s)

    @precondition(lambda self: self.writes)
    @rule(good=st.sampled_from([True, True, False]), ttl_s=st.sampled_from([0.0, 20.0]))
    def end_write(self, good: bool, ttl_s: float, bad: bool = False) -> None:
        rows, keys = self.writes.pop()
        if not good:
            self.books.fail(rows, [self.named.get(key, key) for key in keys], bad=bad)
        else:
            doomed = self.books.end(rows, keys, ttl_s)
            for row, key in zip(rows, keys, strict=True):
                assert (row in doomed) == (key not in self.KEYS)
                if row not in doomed:
                    self.there.add(key)
                    self.deleted.discard(key)
                    self.expires_s[key] = int(self.books.now_s + ttl_s) if ttl_s else 0.0

    @rule()
    def settle(self) -> None:
        self.books.settle()

    @precondition(lambda self: self.writes)
    @rule()
    def fail_badly(self) -> None:
        self.end_write(False, 0.0, bad=True)

    @rule(prefix=prefixes)
    def begin_read(self, prefix: list[Key]) -> None:
        found = self.books.ledger.begin_reads(prefix, self.books.now_s)
        for key, each in zip(prefix, found, strict=True):
            assert isinstance(each, Reason) == (key not in self.there)
            if not isinstance(each, Reason):
                self.reads.append((*each, key))

    @precondition(lambda self: self.reads)
    @rule(
        reason=st.sampled_from([Reason.NONE, Reason.NONE, Reason.CHECKSUM, Reason.EXPIRED]),
        idx=st.integers(0, 100),
    )
    def end_read(self, reason: Reason, idx: int) -> None:
        row, place, key = self.reads.pop(idx % len(self.reads))
        assert self.books.ledger.place(row) == place, "the slot changed while it was read"
        assert self.books.lies[place].key == key, "it was written over while it was read"
        if reason and self.place_of(key) == place:
            self.there.discard(key)
        discard, _ = self.books.ledger.end_reads([(row, reason)])
        for each in discard:
            self.books.discard(each)
        if reason is Reason.CHECKSUM and place not in {p for _, p, _ in self.reads}:
            self.books.lies.pop(place, None)  # nothing that a look at the headers would find

    @rule(prefix=prefixes)
    def delete(self, prefix: list[Key]) -> None:
        known = self.there | self.in_flight()
        assert self.books.delete(prefix) == len(known & set(prefix))
        self.there -= set(prefix)
        self.deleted |= set(prefix)
        for idx, (rows, keys) in enumerate(self.writes):
            # What was deleted while it is written has no name any more.
            gone = {key: key_of(f"doomed {key.hex()}") for key in keys if key in prefix}
            self.named.update((doomed, key) for key, doomed in gone.items())
            self.writes[idx] = (rows, [gone.get(key, key) for key in keys])

    @rule(prefix=prefixes)
    def touch(self, prefix: list[Key]) -> None:
        found = self.books.ledger.touch(prefix, self.books.now_s)
        assert found == [key in self.there for key in prefix]

    @rule(held=st.sets(keys, max_size=3))
    def lease(self, held: set[Key]) -> None:
        self.books.held.clear()
        self.books.held.update(fingerprint(key) for key in held)

    @rule(num_slots=st.integers(0, 7))
    def shrink(self, num_slots: int) -> None:
        self.books.shrink(num_slots * SlotSpace.cost_of(SMALL))
        self.note_evicted()

    @precondition(lambda self: not self.wiping)
    @rule()
    def begin_to_wipe(self) -> None:
        self.wiping = self.books.ledger.take_stale()

    @precondition(lambda self: self.wiping)
    @rule()
    def end_wiping(self) -> None:
        for place in self.wiping:
            self.books.lies.pop(place, None)
        self.books.ledger.give_back(self.wiping)
        self.wiping = []

    @rule(seconds=st.floats(0.5, 9.0))
    def time_goes_on(self, seconds: float) -> None:
        self.books.now_s += seconds
        # Whoever meets what has expired removes it.
        self.books.ledger.missing(self.KEYS, self.books.now_s)
        self.there -= {k for k, at_s in self.expires_s.items() if 0 < at_s <= self.books.now_s}

    @rule()
    def renew(self) -> None:
        self.books.renew()

    @rule()
    def flush(self) -> None:
        self.books.journal.flush()

    @precondition(lambda self: not self.writes and not self.reads and not self.wiping)
    @rule()
    def restart(self) -> None:
        num_aside = self.books.ledger.num_aside
        self.books = self.books.restarted()
        assert self.books.ledger.num_aside == num_aside

    @precondition(lambda self: not self.writes and not self.reads and not self.wiping)
    @rule()
    def restart_without_a_journal(self) -> None:
        """What failed or was evicted may be found again, what was deleted never."""
        self.books = self.books.restarted(journal=False)
        found = {
            k for k, here in zip(self.KEYS, self.books.present(self.KEYS), strict=True) if here
        }
        assert found >= self.there
        assert not found & self.deleted, "a deleted chunk is back"
        for key in found - self.there:
            self.expires_s[key] = 0.0
        for header in self.books.lies.values():
            if header.key in found - self.there:
                self.expires_s[header.key] = header.expires_at_us // 1_000_000
        self.there = found

    @invariant()
    def what_is_there_is_found(self) -> None:
        assert self.books.present(self.KEYS) == [key in self.there for key in self.KEYS]
        for key in self.there:
            place = self.place_of(key)
            assert place is not None
            assert key_at(self.books.lies, place) == key

    @invariant()
    def books_agree(self) -> None:
        self.books.check(settled=not self.writes and not self.reads and not self.wiping)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=80, stateful_step_count=40)
