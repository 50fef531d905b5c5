"""The books of one drive: which chunks lie in which slots. Decides under one lock, does no I/O.

`stepwell.tiers.drive` does what is decided here. Everything that changes is noted for the journal
in the same breath, so that the journal has it in the order in which it happened.
"""

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from stepwell.core.keys import Key, Root, fingerprint, root_of
from stepwell.core.record import Header
from stepwell.core.types import ChunkResult, Lookup, Reason
from stepwell.policy.endurance import EnduranceState
from stepwell.policy.eviction import EvictionPolicy
from stepwell.tiers import frames
from stepwell.tiers.frames import ENTRY, Image
from stepwell.tiers.journal import Journal
from stepwell.tiers.outcomes import ALREADY_THERE, NO_ROOM
from stepwell.tiers.slots import Extent, SlotSpace, place_of, slot_of
from stepwell.tiers.table import ChunkTable, State

__all__ = ["Drop", "Evicted", "Full", "Got", "Grow", "Ledger", "Step"]

_MAX_ROOTS = 1 << 16
_WIPE_AT_ONCE = 8
_LOOK_AT_ONCE = 4096


class Evicted(StrEnum):
    """Why a good chunk left. The values are metric labels and stay stable."""

    CAPACITY = "capacity"
    MIN_FREE = "min_free"
    """Space was given back to the file system."""
    SLOT_SIZE = "slot_size"
    """Its extent made way for one of another slot size."""


@dataclass(frozen=True, slots=True)
class Got:
    """Slots to write to."""

    places: list[int]


@dataclass(frozen=True, slots=True)
class Grow:
    """Make this extent, then say `Ledger.grown`, and ask again."""

    extent: Extent


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove this extent's file, then say `Ledger.dropped`, and ask again."""

    extent: Extent


@dataclass(frozen=True, slots=True)
class Full:
    """There is no room and none can be made; ``places`` are what could be had."""

    places: list[int]


Step = Got | Grow | Drop | Full


class Ledger:
    """What lies where on one drive.

    Args:
        capacity_bytes: for slots and their bookkeeping.
        policy: decides who leaves.
        held: whether a chunk, by its fingerprint, must stay.
        journal: is told of every change.
        on_evicted: told why, and by its fingerprint, a chunk left to make room; called under
            the lock.

    Threading: any thread; what changes something holds one lock for a short time. `snapshot` wants
    it held; `load` is for starting, before there are other threads.
    """

    def __init__(
        self,
        capacity_bytes: int,
        policy: EvictionPolicy,
        held: Callable[[int], bool],
        journal: Journal,
        on_evicted: Callable[[Evicted, int], object],
    ) -> None:
        self.lock = threading.Lock()
        self.journal = journal
        self._on_evicted = on_evicted
        self._table = ChunkTable(policy, held)
        self._space = SlotSpace(capacity_bytes)
        self._held = held
        self._aside: deque[tuple[int, Reason]] = deque()
        self._roots: dict[Root, int] = {}
        self._stale: set[int] = set()  # places of records that left and were not written over
        self._out_of_use: list[Extent] = []
        self._freed: list[int] = []  # places that the journal is to hear of
        # Found wrong, while others still read them; and why.
        self._wrong: dict[int, Reason] = {}
        self._bad: list[int] = []  # places where the drive failed a write
        self._bad_wiping: set[int] = set()

    @contextlib.contextmanager
    def _books(self) -> Iterator[None]:
        with self.lock:
            try:
                yield
            finally:
                self._note_freed()

    # Asking.

    @property
    def used_bytes(self) -> int:
        """What records take of the capacity: present, being written, leaving, and set aside.

        One number that the table keeps, so it is right without the lock.
        """
        return self._table.used_bytes

    @property
    def allocated_bytes(self) -> int:
        """What the extents take of the capacity, whether or not records lie in them."""
        return self._space.allocated_bytes

    @property
    def capacity_bytes(self) -> int:
        """For slots and their bookkeeping."""
        return self._space.capacity_bytes

    @property
    def num_slots(self) -> int:
        """Of all extents."""
        return self._space.num_slots

    @property
    def num_aside(self) -> int:
        """Slots whose content was wrong and is kept for a look."""
        return len(self._aside)

    def __len__(self) -> int:
        return len(self._table)

    def contains(self, keys: Sequence[Key], now_s: float) -> list[Lookup]:
        """See `stepwell.tiers.base.Tier.contains`; takes no lock."""
        return self._table.states(keys, now_s)

    # Starting.

    def adopt_extent(self, extent_id: int, slot_bytes: int, num_slots: int) -> Extent:
        """Enter an extent that lies there."""
        return self._space.adopt(extent_id, slot_bytes, num_slots)

    def load(self, image: Image, last_extent_id: int) -> bool:
        """Take over what a journal says, or what headers said.

        Entries that cannot be so are passed over: of an extent that is gone, of a slot beyond an
        extent's end, of a root that is not named. Of two entries for one chunk the more recent
        one stays.

        Returns:
            Whether all of it was taken over. If not, a journal that says so must be renewed.
        """
        self._space.avoid_id(last_extent_id)
        num_rows, num_aside = len(image.rows), len(image.aside)
        rows = image.rows[self._plausible(image.rows["place"])]
        known = np.isin(rows["root"], np.fromiter(image.roots, np.int64, len(image.roots)))
        rows = rows[known][::-1]
        _, first = np.unique(rows["tag"], return_index=True)
        rows = rows[np.sort(first)][::-1]
        extent_ids = (rows["place"] >> 32).astype(np.int64)
        slot_bytes = np.zeros(len(rows), np.int64)
        for extent in self._space.extents.values():
            here = extent_ids == extent.extent_id
            slot_bytes[here] = extent.slot_bytes
            aside = [slot_of(p)[1] for p in image.aside if slot_of(p)[0] == extent.extent_id]
            aside = [idx for idx in aside if idx < extent.num_slots]
            taken = (rows["place"][here] & 0xFFFFFFFF).astype(np.int64).tolist()
            self._space.occupy(extent.extent_id, [*taken, *aside])
        in_use = set(rows["root"].tolist())
        self._roots = {root: number for number, root in image.roots.items() if number in in_use}
        self._table.load(
            rows["tag"],
            slot_bytes + self._space.cost_of(0),
            rows["place"].astype(np.int64),
            rows["root"],
            rows["used_at_s"],
            rows["expires_at_s"],
        )
        for place, number in image.aside.items():
            holder = self._space.extents.get(slot_of(place)[0])
            if holder is not None and slot_of(place)[1] < holder.num_slots:
                named = 0 < number < len(frames.ASIDE_REASONS)
                reason = Reason(frames.ASIDE_REASONS[number]) if named else Reason.NONE
                self._aside.append((place, reason))
                self._table.used_bytes += self._space.cost_of(holder.slot_bytes)
        return len(self._table) == num_rows and len(self._aside) == num_aside

    def roots(self) -> set[Root]:
        """Whose chunks lie here."""
        return set(self._roots)

    def _plausible(self, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        plausible = np.zeros(len(places), np.bool_)
        extent_ids, slot_idxs = places >> 32, places & 0xFFFFFFFF
        for extent in self._space.extents.values():
            plausible |= (extent_ids == extent.extent_id) & (slot_idxs < extent.num_slots)
        return plausible

    @staticmethod
    def image_of(headers: Iterable[tuple[int, Header]], now_s: float) -> Image:
        """What headers say, as a journal would have; the one written last leaves last."""
        numbers: dict[Root, int] = {}
        found = []
        for place, header in headers:
            expires_at_s = header.expires_at_us // 1_000_000
            if 0 < expires_at_s <= now_s:
                continue
            number = numbers.setdefault(root_of(header.key), len(numbers))
            stored_at_s = min(header.stored_at_us // 1_000_000, 0xFFFFFFFF)
            found.append(
                (header.stored_at_us, -header.end_token, fingerprint(header.key), place, number,
                 stored_at_s, min(expires_at_s, 0xFFFFFFFF))
            )  # fmt: skip
        found.sort()
        rows = np.zeros(len(found), ENTRY)
        for idx, (_, _, tag, place, number, used_at_s, expires_at_s) in enumerate(found):
            rows[idx] = (tag, place, number, 0, used_at_s, expires_at_s, 0)
        return Image(rows, {number: root for root, number in numbers.items()})

    # Writing.

    def missing(self, keys: Sequence[Key], now_s: float) -> list[bool]:
        """Which keys are neither there nor being written; what has expired makes way at once."""
        with self._books():
            answers = []
            for key in keys:
                row = self._table.find(fingerprint(key))
                if row is not None and self._table.expired(row, now_s):
                    self._remove(row)
                    row = self._table.find(fingerprint(key))
                answers.append(row is None)
            return answers

    def fits(self, slot_bytes: int) -> bool:
        """Whether a slot of this size could ever be had."""
        return self._space.fits(slot_bytes)

    def free_slots(self, slot_bytes: int, count: int) -> list[int]:
        """``count`` slots if so many are free, else none."""
        with self.lock:
            places = self._space.take(slot_bytes, count)
            if len(places) < count:
                for place in places:
                    self._free(place)
                return []
            return places

    def allot(self, slot_bytes: int, count: int, grow_bytes: int) -> Step:
        """The next step towards ``count`` slots.

        Args:
            slot_bytes: of each.
            count: how many.
            grow_bytes: what a new extent may take at most, by the drive's free space.
        """
        with self._books():
            places = self._space.take(slot_bytes, count)
            while len(places) < count:
                step = self._make_room(slot_bytes, count - len(places), grow_bytes)
                if step is None:
                    return Full(places)
                if isinstance(step, Grow | Drop):
                    for place in places:
                        self._space.give_back(place)
                    return step
                places += self._space.take(slot_bytes, count - len(places))
            return Got(places)

    def _make_room(
        self, slot_bytes: int, missing: int, grow_bytes: int
    ) -> Grow | Drop | bool | None:
        """One step: True if slots may be free now, None if there is nothing left to do."""
        extent = self._space.plan_extent(slot_bytes, grow_bytes)
        if extent is not None:
            return Grow(extent)
        if self._aside:
            self._drop_aside()
            return True
        empty = self._space.empty_extent(slot_bytes)
        if empty is not None:
            empty.ready = False
            return Drop(empty)
        in_vain = self._in_vain(slot_bytes)  # until something of another size has left
        for num_evicted in range(missing):
            victim = self._table.take_victim(in_vain)
            if victim is None:
                return True if num_evicted or self._retry_bad() else None
            size_bytes = self._space.size_at(self._table.place(victim))
            self._evict(victim, Evicted.CAPACITY)
            if size_bytes != slot_bytes:
                self._clear_extent(size_bytes, Evicted.SLOT_SIZE)
                break
        return True

    def _retry_bad(self) -> bool:
        bad, self._bad = self._bad, []
        for place in bad:
            self._free(place)
        return bool(bad)

    def _in_vain(self, slot_bytes: int) -> Callable[[int], bool] | None:
        """Which rows would leave without helping a wish for slots of a size: those of other
        sizes, where none of the extents of their size can be cleared.
        """
        if self._space.only(slot_bytes):
            return None
        clearable = {slot_bytes: True}

        def stays(row: int) -> bool:
            size_bytes = self._space.size_at(self._table.place(row))
            if size_bytes not in clearable:
                clearable[size_bytes] = bool(self._clearable_rows(size_bytes))
            return not clearable[size_bytes]

        return stays

    def grown(self, extent: Extent, *, made: bool) -> None:
        """A planned extent was made, or could not be."""
        with self.lock:
            if made:
                self._space.made(extent)
            else:
                self._space.drop(extent)

    def dropped(self, extent: Extent, *, gone: bool) -> None:
        """An extent's file was removed, or could not be and is used again."""
        with self.lock:
            if gone:
                self._space.drop(extent)
            else:
                extent.ready = True

    def begin(self, key: Key, place: int) -> int | ChunkResult:
        """Enter a chunk that will be written to a place; returns its row, or why not.

        The place is then free again.
        """
        with self.lock:
            tag = fingerprint(key)
            number = self._number(root_of(key))
            there = self._table.find(tag) is not None
            if there or number is None or not self._space.has(place):  # lost just now
                self._free(place)
                return ALREADY_THERE if there else NO_ROOM
            cost_bytes = self._space.cost_of(self._space.size_at(place))
            return self._table.begin(tag, cost_bytes, place, number)

    def _number(self, root: Root) -> int | None:
        number = self._roots.get(root)
        if number is None:
            if len(self._roots) == _MAX_ROOTS:
                return None
            taken = set(self._roots.values())
            number = next(each for each in range(_MAX_ROOTS) if each not in taken)
            self._roots[root] = number
            self.journal.note(frames.encode_root(number, root), 1)
        return number

    def give_back(self, places: Sequence[int]) -> None:
        """Slots that were got and not used, or that were to be wiped."""
        with self.lock:
            for place in places:
                bad = place in self._bad_wiping
                self._bad_wiping.discard(place)
                self._give(place, bad=bad)

    def commit(
        self, prefix: Sequence[int], now_s: float, expires_at_s: Sequence[float]
    ) -> list[int]:
        """Rows were written; returns those that were removed meanwhile, to be discarded."""
        with self.lock:
            present = self._table.commit(prefix, now_s, expires_at_s)
            self._stale.difference_update(self._table.place(row) for row in prefix)
            stay = [row for row, here in zip(prefix, present, strict=True) if here]
            if stay:
                body = self._entries(np.array(stay, np.int64))
                self.journal.note(frames.encode_rows(frames.Kind.PUT, body), len(stay))
            return [row for row, here in zip(prefix, present, strict=True) if not here]

    def abort(self, rows: Sequence[int], *, bad: bool = False) -> None:
        """Rows could not be written.

        Args:
            rows: to be given up.
            bad: whether the drive failed there: their slots are then the last to be used again,
                or one bad sector would fail every write that comes.
        """
        with self.lock:
            for row in rows:
                place = self._table.place(row)
                self._table.abort(row)
                self._stale.add(place)  # what was evicted for it, or a part of what was written
                self._give(place, bad=bad)

    def _give(self, place: int, *, bad: bool) -> None:
        # In an extent that is out of use nothing may stay taken, or it would stay for ever.
        if bad and self._space.has(place):
            self._bad.append(place)
        else:
            self._free(place)

    # Reading.

    def begin_reads(self, keys: Sequence[Key], now_s: float) -> list[tuple[int, int] | Reason]:
        """For each chunk (row, place), which stay as they are until `end_reads`, or why not."""
        with self._books():
            found: list[tuple[int, int] | Reason] = []
            for key in keys:
                row = self._table.find(fingerprint(key))
                if row is None or self._table.state(row) is not State.PRESENT:
                    found.append(Reason.ABSENT)
                elif self._table.expired(row, now_s):
                    self._remove(row)
                    found.append(Reason.EXPIRED)
                else:
                    self._table.begin_read(row)
                    found.append((row, self._table.place(row)))
            return found

    def end_reads(self, ended: Sequence[tuple[int, Reason]]) -> tuple[list[int], list[int]]:
        """Reads ended.

        Args:
            ended: rows, each with what is wrong with its record, Reason.NONE if nothing is. A
                wrong one is absent from now on; its slot stays as it is until room is needed.

        Returns:
            Rows that are to be discarded now, and those that were found wrong first by this.
        """
        with self.lock:
            discard, wrong = [], []
            for row, reason in ended:
                if reason and self._table.state(row) is State.PRESENT:
                    self._table.remove(row)
                    self._wrong[row] = reason
                    wrong.append(row)
                if not self._table.end_read(row):
                    continue  # it stays, or somebody else still reads it
                # What was deleted meanwhile is wiped, however wrong it is.
                found = self._wrong.pop(row, Reason.NONE)
                if found and found is not Reason.EXPIRED:
                    self._keep_aside(row, found)
                else:
                    discard.append(row)
            return discard, wrong

    def _keep_aside(self, row: int, reason: Reason) -> None:
        place = self._table.place(row)
        self._table.freed(row, still_counts=True)
        self._aside.append((place, reason))
        self.journal.note(frames.encode_aside(place, frames.aside_number(reason)), 1)

    def size_at(self, place: int) -> int:
        """Bytes of the slot at a place."""
        return self._space.size_at(place)

    def touch(self, prefix: Sequence[Key], now_s: float) -> list[bool]:
        """Make present chunks recent; says which were present."""
        with self.lock:
            rows = [self._present(key) for key in prefix]
            present = [row for row in rows if row is not None]
            if present:
                self._table.touch(present, now_s)
                places = [self._table.place(row) for row in present]
                self.journal.note(frames.encode_touch(places, now_s), len(places))
            return [row is not None for row in rows]

    def _present(self, key: Key) -> int | None:
        row = self._table.find(fingerprint(key))
        return row if row is not None and self._table.state(row) is State.PRESENT else None

    # Leaving.

    def remove(self, keys: Sequence[Key]) -> tuple[int, list[int]]:
        """Invalidate; returns how many were there, and rows to be discarded now."""
        with self.lock:
            count, discard = 0, []
            for key in keys:
                row = self._table.find(fingerprint(key))
                if row is not None:
                    count += 1
                    if self._table.remove(row):
                        discard.append(row)
            return count, discard

    def place(self, row: int) -> int:
        """Where a row's record lies."""
        return self._table.place(row)

    def discarded(self, row: int) -> None:
        """A leaving row's record will not be found again: its slot is free."""
        with self.lock:
            place = self._table.place(row)
            self._table.freed(row)
            self._free(place)

    def note_gone(self, rows: Sequence[int]) -> None:
        """Tell the journal that leaving rows are gone, before anything is done about them."""
        with self.lock:
            places = [self._table.place(row) for row in rows]
            self.journal.note(frames.encode_free(places), len(places))

    @property
    def loose_ends(self) -> bool:
        """Whether there may be something for `take_stale` or `take_unused`."""
        return bool(self._stale or self._out_of_use)

    def take_stale(self) -> list[int]:
        """Free slots that still hold a record which left, to be wiped and given back.

        Usually a slot is written over at once. Where it is not, what lies there must not be found
        again should the journal be lost: the chunk may have been invalidated meanwhile.
        """
        if not self._stale:
            return []
        with self.lock:
            places: list[int] = []
            for place in list(itertools.islice(self._stale, _LOOK_AT_ONCE)):
                if not self._space.has(place):
                    self._stale.discard(place)  # its extent has gone, and it with it
                elif place in self._bad:
                    # Nobody's meanwhile, or it would be wiped after it was written to again.
                    self._bad.remove(place)
                    self._bad_wiping.add(place)
                    places.append(place)
                # Those that are being written to stay marked until that has ended well.
                elif self._space.take_at(place):
                    places.append(place)
                # A few at a time, since meanwhile nobody else finds them free.
                if len(places) == _WIPE_AT_ONCE:
                    break
            self._stale.difference_update(places)
            return places

    def take_unused(self) -> list[Extent]:
        """Extents out of use whose last record has left, to be dropped."""
        if not self._out_of_use:
            return []
        with self.lock:
            empty = [extent for extent in self._out_of_use if extent.empty]
            self._out_of_use = [extent for extent in self._out_of_use if not extent.empty]
            return empty

    def _discard(self, row: int) -> None:
        place = self._table.place(row)
        self._table.freed(row)
        self._free(place)
        self._freed.append(place)

    def _note_freed(self) -> None:
        """One frame for all that left in a call; before the lock is given back."""
        if self._freed:
            self.journal.note(frames.encode_free(self._freed), len(self._freed))
            self._freed = []

    def _remove(self, row: int) -> None:
        # Expired: its header says so, so that nothing has to be wiped.
        if self._table.remove(row):
            self._discard(row)

    def _evict(self, row: int, why: Evicted) -> None:
        self._on_evicted(why, self._table.tag(row))
        self._stale.add(self._table.place(row))
        self._discard(row)

    def _drop_aside(self) -> None:
        place, _ = self._aside.popleft()
        self._table.used_bytes -= self._space.cost_of(self._space.size_at(place))
        self._free(place)
        self._freed.append(place)

    def _free(self, place: int) -> None:
        self._space.give_back(place)

    def _clear_extent(self, slot_bytes: int, why: Evicted) -> bool:
        """Evict what lies in the emptiest extent of a slot size in which nothing has to stay."""
        rows = self._clearable_rows(slot_bytes)
        for row in rows:
            self._table.remove(row)
            self._evict(row, why)
        return bool(rows)

    def _clearable_rows(self, slot_bytes: int) -> list[int]:
        """All rows of the emptiest extent of a slot size in which nothing has to stay."""
        for extent in self._space.emptiest_first(slot_bytes):
            begin = place_of(extent.extent_id, 0)
            rows = self._table.rows_between(begin, begin + extent.num_slots)
            # Slots may also be written to, read from, leaving or set aside.
            idle = len(rows) == extent.num_slots - extent.num_free
            if rows and idle and not any(self._table.busy(row) for row in rows):
                return rows
        return []

    # Giving space back.

    def shrink(self, allocated_bytes: int, why: Evicted, *, clear: bool) -> Drop | bool:
        """One step towards extents that take no more than ``allocated_bytes``.

        Args:
            allocated_bytes: the aim.
            why: what evictions are counted as.
            clear: evict what lies in whole extents, rather than only what leaves first.

        Returns:
            An extent to drop; True to be asked again; False if that is all that can be done.
        """
        with self._books():
            if self._space.allocated_bytes <= allocated_bytes:
                return False
            empty = self._space.empty_extent()
            if empty is not None:
                empty.ready = False
                return Drop(empty)
            if self._aside:
                self._drop_aside()
                return True
            self._retry_bad()
            if self._table.used_bytes > allocated_bytes:
                victim = self._table.take_victim()
                if victim is not None:
                    self._evict(victim, why)
                    return True
            if not clear:
                return False
            sizes = {extent.slot_bytes for extent in self._space.extents.values()}
            return any(self._clear_extent(size_bytes, why) for size_bytes in sorted(sizes))

    def trim(self, allocated_bytes: int) -> tuple[Extent, int] | None:
        """Take free slots off an extent's end, towards ``allocated_bytes``.

        Returns:
            The extent and how many slots those are, to cut its file; None if that is all.
        """
        with self.lock:
            excess_bytes = self._space.allocated_bytes - allocated_bytes
            return self._space.trim(excess_bytes) if excess_bytes > 0 else None

    def untrim(self, extent: Extent, count: int) -> None:
        """Slots could not be taken off after all."""
        with self.lock:
            self._space.untrim(extent, count)

    def forget(self, extent_ids: Collection[int] | None = None) -> list[int]:
        """Somebody removed files: what lay in them is absent from now on.

        The extents are out of use; those in which nothing is read or written can be taken with
        `take_unused` at once.

        Args:
            extent_ids: which; None for all.

        Returns:
            Those that were in use until now.
        """
        forgotten: list[int] = []
        with self._books():
            for _ in range(len(self._aside)):
                place, _ = self._aside[0]
                if extent_ids is None or slot_of(place)[0] in extent_ids:
                    self._drop_aside()
                else:
                    self._aside.rotate(-1)
            for extent in self._space.extents.values():
                wanted = extent_ids is None or extent.extent_id in extent_ids
                if not wanted or not extent.ready or extent.out_of_use:
                    continue
                begin = place_of(extent.extent_id, 0)
                end = begin + extent.num_slots
                # What is being written leaves when that has ended.
                for row in self._table.rows_between(begin, end, writing=True):
                    if self._table.remove(row):
                        self._discard(row)
                for place in [each for each in self._bad if begin <= each < end]:
                    self._bad.remove(place)
                    self._free(place)
                extent.ready, extent.out_of_use = False, True
                self._out_of_use.append(extent)
                forgotten.append(extent.extent_id)
        return forgotten

    # The journal.

    def snapshot(self, wear: EnduranceState) -> bytes:
        """Frames of everything that is so now; the lock is held by the caller."""
        rows = self._table.in_order()
        # Only here may a number be given up, since here begins a file that does not know it.
        in_use = self._table.roots_in_use()
        self._roots = {root: number for root, number in self._roots.items() if number in in_use}
        parts = [frames.encode_root(number, root) for root, number in self._roots.items()]
        parts.append(frames.encode_wear(wear))
        parts.append(frames.encode_rows(frames.Kind.SNAPSHOT, self._entries(rows)))
        for place, reason in self._aside:
            parts.append(frames.encode_aside(place, frames.aside_number(reason)))
        return b"".join(parts)

    def _entries(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        entries = np.zeros(len(rows), ENTRY)
        names = ("tag", "place", "root", "used_at_s", "expires_at_s")
        for name, column in zip(names, self._table.columns(rows), strict=True):
            entries[name] = column
        return entries
