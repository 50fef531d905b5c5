"""Where records lie: extents of equal slots, and which slots are free. Decides, does no I/O.

An extent is a file of ``num_slots`` slots of one size, and a slot takes one record, so space
is never fragmented below a slot. Neighbouring free slots are kept as runs, and a job is given
the longest runs there are, so that a prefix is written and read back in a few large calls.

Slots of another size need another extent. When the capacity is used up, an extent without
records may be dropped to make room for one of another slot size; that is how space moves from
one model to another.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["BOOKKEEPING_BYTES", "LAST_EXTENT_ID", "Extent", "SlotSpace", "place_of", "slot_of"]

BOOKKEEPING_BYTES = 512
"""What a slot adds to its tier's used capacity beyond itself: room for its journal entries."""
LAST_EXTENT_ID = (1 << 31) - 2
"""So that a place has 63 bits."""

_TARGET_MAX_BYTES = 64 << 20
_TARGET_SHARE = 64
_TARGET_SHARE_SMALL = 4
_SLOT_BITS = 32


def place_of(extent_id: int, slot_idx: int) -> int:
    """One number for a slot."""
    return extent_id << _SLOT_BITS | slot_idx


def slot_of(place: int) -> tuple[int, int]:
    """Extent id and slot index of a place."""
    return place >> _SLOT_BITS, place & ((1 << _SLOT_BITS) - 1)


@dataclass(slots=True)
class Extent:
    """One file of equal slots, and its runs of free slots.

    Attributes:
        extent_id: unique in its directory, for ever.
        slot_bytes: a multiple of 4096.
        num_slots: >= 1.
        num_free: slots without a record.
        ready: whether its slots may be given to anybody.
        out_of_use: whether it is to be dropped when its last record has left.
    """

    extent_id: int
    slot_bytes: int
    num_slots: int
    num_free: int = 0
    ready: bool = False
    out_of_use: bool = False
    _length_of: dict[int, int] = field(default_factory=dict)  # first slot of a free run -> length
    _start_of: dict[int, int] = field(default_factory=dict)  # last slot of a free run -> first
    # Length -> first slots of free runs of it. There are few lengths, however many runs.
    _firsts: dict[int, dict[int, None]] = field(default_factory=dict)

    @property
    def cost_bytes(self) -> int:
        """What it takes of the capacity."""
        return self.num_slots * (self.slot_bytes + BOOKKEEPING_BYTES)

    @property
    def empty(self) -> bool:
        """Whether no record lies in it."""
        return self.num_free == self.num_slots

    def free_runs(self) -> Iterator[tuple[int, int]]:
        """Its free runs as (first slot, length)."""
        return iter(self._length_of.items())

    def longest_run(self) -> int:
        """Length of its longest free run."""
        return max(self._firsts, default=0)

    def tail_run(self) -> int:
        """Length of the free run at its end."""
        first = self._start_of.get(self.num_slots - 1)
        return 0 if first is None else self.num_slots - first

    def cut(self, count: int) -> None:
        """Remove ``count`` slots of the free run at its end."""
        first = self._start_of[self.num_slots - 1]
        length = self._remove_run(first) - count
        self.num_slots -= count
        self.num_free -= count
        if length:
            self._add_run(first, length)

    def occupy(self, slot_idxs: Sequence[int]) -> None:
        """Say which slots hold records, in any order; all others are free."""
        self._length_of.clear()
        self._start_of.clear()
        self._firsts.clear()
        self.num_free = begin = 0
        for idx in [*sorted(slot_idxs), self.num_slots]:
            if idx > begin:
                self._add_run(begin, idx - begin)
                self.num_free += idx - begin
            begin = idx + 1

    def release(self, first: int, length: int) -> None:
        """Make a run of slots free; joins its neighbours."""
        self.num_free += length
        before = self._start_of.get(first - 1)
        if before is not None:
            length += self._remove_run(before)
            first = before
        if first + length in self._length_of:
            length += self._remove_run(first + length)
        self._add_run(first, length)

    def _add_run(self, first: int, length: int) -> None:
        self._length_of[first] = length
        self._start_of[first + length - 1] = first
        self._firsts.setdefault(length, {})[first] = None

    def _remove_run(self, first: int) -> int:
        length = self._length_of.pop(first)
        del self._start_of[first + length - 1]
        firsts = self._firsts[length]
        del firsts[first]
        if not firsts:
            del self._firsts[length]
        return length

    def take_at(self, slot_idx: int) -> bool:
        """Take one slot; False if it is not free."""
        for first, length in self._length_of.items():
            if first <= slot_idx < first + length:
                self._remove_run(first)
                self.num_free -= length
                if slot_idx > first:
                    self.release(first, slot_idx - first)
                if slot_idx < first + length - 1:
                    self.release(slot_idx + 1, first + length - 1 - slot_idx)
                return True
        return False

    def take(self, most: int) -> tuple[int, int]:
        """Take up to ``most`` neighbouring slots; (first, length).

        The shortest run that is long enough, or else the longest; at least one slot must be free.
        """
        longest = self.longest_run()
        length = min((each for each in self._firsts if each >= most), default=longest)
        first = next(iter(self._firsts[length]))
        taken = min(length, most)
        self._remove_run(first)
        if taken < length:
            self._add_run(first + taken, length - taken)
        self.num_free -= taken
        return first, taken


class SlotSpace:
    """The extents of one drive.

    Args:
        capacity_bytes: what extents and their bookkeeping may take.

    Threading: none; the owner locks. Cost: `take` O(extents x lengths of their free runs), of
    which there are few: n slots cannot have free runs of more than about sqrt(2 n) lengths.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = 0
        """What the extents take, those that are being made included."""
        self.num_slots = 0
        """Of all extents."""
        self.extents: dict[int, Extent] = {}
        self._of_size: dict[int, list[Extent]] = {}
        self._next_id = 0

    @staticmethod
    def cost_of(slot_bytes: int) -> int:
        """What one slot takes of the capacity."""
        return slot_bytes + BOOKKEEPING_BYTES

    def adopt(self, extent_id: int, slot_bytes: int, num_slots: int) -> Extent:
        """Enter an extent found at start-up, all of its slots free; may exceed the capacity."""
        extent = Extent(extent_id, slot_bytes, num_slots, ready=True)
        extent.release(0, num_slots)
        self._enter(extent)
        return extent

    def occupy(self, extent_id: int, slot_idxs: Sequence[int]) -> None:
        """Say which slots of an extent just adopted hold records; in any order."""
        self.extents[extent_id].occupy(slot_idxs)

    def take(self, slot_bytes: int, count: int) -> list[int]:
        """Up to ``count`` free slots of a size as places, neighbours beside each other."""
        places: list[int] = []
        while len(places) < count:
            missing = count - len(places)
            usable = [e for e in self._of_size.get(slot_bytes, ()) if e.ready and e.num_free]
            if not usable:
                break
            extent = max(usable, key=lambda e: min(e.longest_run(), missing))
            first, length = extent.take(missing)
            places += range(
                place_of(extent.extent_id, first), place_of(extent.extent_id, first + length)
            )
        return places

    def give_back(self, place: int) -> None:
        """A slot is free again."""
        extent_id, slot_idx = slot_of(place)
        self.extents[extent_id].release(slot_idx, 1)

    def has(self, place: int) -> bool:
        """Whether there is such a slot, in an extent that is in use."""
        extent_id, slot_idx = slot_of(place)
        extent = self.extents.get(extent_id)
        return extent is not None and not extent.out_of_use and slot_idx < extent.num_slots

    def take_at(self, place: int) -> bool:
        """Take the slot at a place; False if it is not free, or its extent is not in use."""
        extent_id, slot_idx = slot_of(place)
        extent = self.extents.get(extent_id)
        return extent is not None and extent.ready and extent.take_at(slot_idx)

    def size_at(self, place: int) -> int:
        """Bytes of the slot at a place."""
        return self.extents[slot_of(place)[0]].slot_bytes

    def fits(self, slot_bytes: int) -> bool:
        """Whether a slot of this size could ever be had."""
        return self.cost_of(slot_bytes) <= self.capacity_bytes

    def plan_extent(self, slot_bytes: int, limit_bytes: int) -> Extent | None:
        """Reserve capacity for a new extent, to be made `ready` or dropped; None if there is none.

        It takes ``limit_bytes`` at most, and a 64th of the capacity, or 64 MiB where that is more
        and a quarter of the capacity allows it: few enough files to be kept open, and small
        enough to be moved between slot sizes.
        """
        cost_bytes = self.cost_of(slot_bytes)
        room = min(self.capacity_bytes - self.allocated_bytes, limit_bytes) // cost_bytes
        if room < 1:
            return None
        target_bytes = max(
            self.capacity_bytes // _TARGET_SHARE,
            min(_TARGET_MAX_BYTES, self.capacity_bytes // _TARGET_SHARE_SMALL),
        )
        num_slots = min(room, max(1, target_bytes // cost_bytes), 1 << (_SLOT_BITS - 1))
        extent = Extent(self._free_id(), slot_bytes, num_slots)
        self._enter(extent)
        return extent

    def made(self, extent: Extent) -> None:
        """A planned extent's file is there."""
        extent.ready = True
        extent.release(0, extent.num_slots)

    def drop(self, extent: Extent) -> None:
        """An extent's file is gone, or never came."""
        del self.extents[extent.extent_id]
        of_size = self._of_size[extent.slot_bytes]
        of_size.remove(extent)
        if not of_size:
            del self._of_size[extent.slot_bytes]
        self.allocated_bytes -= extent.cost_bytes
        self.num_slots -= extent.num_slots

    def trim(self, excess_bytes: int) -> tuple[Extent, int] | None:
        """Take free slots off the end of an extent; it and how many those are, or None."""
        for extent in self.extents.values():
            tail = extent.tail_run() if extent.ready else 0
            cut = min(tail, -(-excess_bytes // self.cost_of(extent.slot_bytes)))
            if cut:
                extent.cut(cut)
                self.num_slots -= cut
                self.allocated_bytes -= cut * self.cost_of(extent.slot_bytes)
                return extent, cut
        return None

    def untrim(self, extent: Extent, count: int) -> None:
        """Slots could not be taken off after all."""
        first = extent.num_slots
        extent.num_slots += count
        self.num_slots += count
        extent.release(first, count)
        self.allocated_bytes += count * self.cost_of(extent.slot_bytes)

    def empty_extent(self, except_slot_bytes: int = 0) -> Extent | None:
        """An extent without records, of another slot size; None if there is none."""
        if self.only(except_slot_bytes):
            return None
        return next(
            (
                extent
                for extent in self.extents.values()
                if extent.ready and extent.empty and extent.slot_bytes != except_slot_bytes
            ),
            None,
        )

    def only(self, slot_bytes: int) -> bool:
        """Whether no extent has slots of another size."""
        return self._of_size.keys() <= {slot_bytes}

    def emptiest_first(self, slot_bytes: int) -> list[Extent]:
        """The extents of a slot size, the one with the fewest records first."""
        ready = [extent for extent in self._of_size.get(slot_bytes, ()) if extent.ready]
        return sorted(ready, key=lambda extent: extent.num_slots - extent.num_free)

    def _free_id(self) -> int:
        # The next number; after the last one whichever is not in use.
        if self._next_id <= LAST_EXTENT_ID:
            return self._next_id
        return next(each for each in itertools.count() if each not in self.extents)

    def _enter(self, extent: Extent) -> None:
        self.extents[extent.extent_id] = extent
        self._of_size.setdefault(extent.slot_bytes, []).append(extent)
        self.allocated_bytes += extent.cost_bytes
        self.num_slots += extent.num_slots
        self.avoid_id(extent.extent_id)

    def avoid_id(self, extent_id: int) -> None:
        """Never give this number to a new extent."""
        self._next_id = max(self._next_id, extent_id + 1)
