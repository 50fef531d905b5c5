"""What left, remembered by tag and without an object per tag."""

from array import array

from stepwell.policy.linked import LinkedLists

__all__ = ["Ghosts"]


class Ghosts:
    """First-in-first-out lists of tags, and a hash table that says which list a tag is in.

    The table chains slots and grows by one bucket per slot (linear hashing, Litwin, VLDB 1980), so
    that no single call pays for moving everything. A Python dictionary in order of entry would
    take about five times the memory.

    Threading: none; the owner locks. Cost: O(1) per call on average, one to two microseconds.
    Memory: 25 bytes per tag for the most tags there ever were at once, and up to a tenth more for
    growing ahead; never given back.

    Args:
        num_lists: 1 to 255. Lists are named 0, 1, ...
    """

    def __init__(self, num_lists: int = 1) -> None:
        self._lists = LinkedLists(num_lists)  # of slots
        self._tags = array("q")  # of each slot
        self._chain = array("i")  # of each slot: the next one in its bucket, or that is free; or -1
        self._buckets = array("i", [-1])  # the first slot of each
        self._mask = 1  # one less than the smallest power of two above the number of buckets
        self._free = -1

    def __len__(self) -> int:
        """Tags in all lists."""
        return len(self._lists)

    def length(self, which: int) -> int:
        """Tags in one list."""
        return self._lists.length(which)

    def add(self, tag: int, which: int = 0) -> None:
        """Make tag (0 <= tag < 2**60) the newest of a list, wherever it was."""
        self.take(tag)
        slot = self._free
        if slot < 0:
            slot = self._new_slot()
        else:
            self._free = self._chain[slot]
        bucket = self._bucket(tag)
        self._tags[slot] = tag
        self._chain[slot] = self._buckets[bucket]
        self._buckets[bucket] = slot
        self._lists.push(slot, which)

    def take(self, tag: int) -> int:
        """Forget tag; returns the list it was in, -1 if it was in none."""
        bucket = self._bucket(tag)
        before, slot = -1, self._buckets[bucket]
        while slot >= 0 and self._tags[slot] != tag:
            before, slot = slot, self._chain[slot]
        if slot < 0:
            return -1
        if before < 0:
            self._buckets[bucket] = self._chain[slot]
        else:
            self._chain[before] = self._chain[slot]
        self._chain[slot] = self._free
        self._free = slot
        which = self._lists.home(slot)
        self._lists.remove(slot)
        return which

    def drop_oldest(self, which: int = 0) -> None:
        """Forget the tag that has been in a list for the longest time; the list is not empty."""
        self.take(self._tags[self._lists.oldest(which)])

    def _bucket(self, tag: int) -> int:
        # Of an int alone the hash is the int; of a tuple it is mixed, so tags may be mere numbers.
        spread = hash((tag,)) & self._mask
        # A bucket that is not there yet is still part of the one half its range below.
        return spread if spread < len(self._buckets) else spread & (self._mask >> 1)

    def _new_slot(self) -> int:
        slot = len(self._tags)
        self._tags.append(0)
        self._chain.append(-1)
        if slot > 0:  # the first slot has its bucket
            self._split()
        return slot

    def _split(self) -> None:
        """Add one bucket, and move there what belongs there."""
        new = len(self._buckets)
        old = new & (self._mask >> 1)
        slot = self._buckets[old]
        self._buckets[old] = -1
        self._buckets.append(-1)
        while slot >= 0:
            following = self._chain[slot]
            bucket = self._bucket(self._tags[slot])
            self._chain[slot] = self._buckets[bucket]
            self._buckets[bucket] = slot
            slot = following
        if len(self._buckets) > self._mask:
            self._mask = self._mask * 2 + 1
