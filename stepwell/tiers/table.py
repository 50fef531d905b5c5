"""Which chunks a tier holds, how many bytes they take, and who leaves next.

A chunk is a row of numbers, not an object, so that a million of them fit into memory. The life
of a row::

    FREE --begin--> WRITING --commit--> PRESENT --take_victim, remove--> LEAVING --freed--> FREE
                    WRITING --abort--> FREE
                    WRITING --remove--> DOOMED --commit--> LEAVING
                                        DOOMED --abort--> FREE

Bytes are counted from `begin` until `freed` or `abort`. A row that is being read is not taken as
a victim; if it is removed meanwhile, it stays LEAVING until its last reader has ended.
"""

from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from stepwell.core.keys import Key, fingerprint
from stepwell.core.types import Lookup
from stepwell.policy.eviction import EvictionPolicy, refill

__all__ = ["ChunkTable", "State"]


class State(IntEnum):
    """Where a row is in its life."""

    FREE = 0
    WRITING = 1
    DOOMED = 2
    """Removed while it is being written."""
    PRESENT = 3
    LEAVING = 4


_ANSWERS = (Lookup.MISS, Lookup.PENDING, Lookup.MISS, Lookup.HIT, Lookup.MISS)
# What is written, read and mentioned at the end of its request within this time was used once: the
# correlated reference period of LRU-K (O'Neil et al., SIGMOD'93), for policies that count.
_ONE_USE_S = 10.0
_NEVER = 0
_LAST_S = 0xFFFFFFFF  # what a column holds; in the year 2106


class ChunkTable:
    """The rows of one tier.

    Rows are found by the fingerprint of a chunk's key (`stepwell.core.keys.fingerprint`), called
    tag here. ``place`` and ``root`` mean something to the owner alone.

    Args:
        policy: decides who leaves; it sees rows and tags.
        held: whether a tag must stay, leases for example.

    Threading: the owner locks, except for `states` and `len`, which any thread may call at any
        time. Cost: O(1) a row; about 140 to 170 bytes a row, the policy's included.
    """

    def __init__(self, policy: EvictionPolicy, held: Callable[[int], bool]) -> None:
        self.used_bytes = 0
        """Bytes that count: present, being written and leaving."""
        self.writing_bytes = 0
        """Bytes of rows whose write has not ended."""
        self._policy = policy
        self._held_tag = held
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []
        self._num_present = 0
        self._readers: dict[int, int] = {}
        self._may_expire = False
        self._state = bytearray()
        self._tag = array("Q")
        self._size_bytes = array("q")
        self._place = array("q")
        self._root = array("H")
        self._used_at_s = array("I")
        self._expires_at_s = array("I")

    def __len__(self) -> int:
        return self._num_present

    # Asking.

    def states(self, keys: Sequence[Key], now_s: float) -> list[Lookup]:
        """HIT if present and not expired, PENDING if being written, else MISS.

        Takes no lock, so that nobody who asks waits for anybody. A row may change between two
        steps; the answer is a hint anyway, since the read checks the record's own name.
        """
        row_of, state = self._row_of.get, self._state
        rows = [row_of(fingerprint(key), -1) for key in keys]
        if self._may_expire:
            expires = self._expires_at_s
            return [
                Lookup.MISS if row < 0 or _NEVER < expires[row] <= now_s else _ANSWERS[state[row]]
                for row in rows
            ]
        return [Lookup.MISS if row < 0 else _ANSWERS[state[row]] for row in rows]

    def find(self, tag: int) -> int | None:
        """The row that has this tag: writing or present."""
        return self._row_of.get(tag)

    def state(self, row: int) -> State:
        """Where the row is in its life."""
        return State(self._state[row])

    def tag(self, row: int) -> int:
        """The fingerprint of the row's key."""
        return self._tag[row]

    def place(self, row: int) -> int:
        """As given to `begin`."""
        return self._place[row]

    def root(self, row: int) -> int:
        """As given to `begin`."""
        return self._root[row]

    def size_bytes(self, row: int) -> int:
        """What the row counts."""
        return self._size_bytes[row]

    def expires_at_s(self, row: int) -> int:
        """When the row's time runs out, seconds since the epoch; 0 for never."""
        return self._expires_at_s[row]

    def expired(self, row: int, now_s: float) -> bool:
        """Whether the row's time has run out."""
        return _NEVER < self._expires_at_s[row] <= now_s

    # Writing.

    def begin(self, tag: int, size_bytes: int, place: int, root: int = 0) -> int:
        """Enter a chunk that is about to be written; the tag must not be there. Returns its row."""
        row = self._free.pop() if self._free else self._grow()
        self._state[row] = State.WRITING
        self._tag[row] = tag
        self._size_bytes[row] = size_bytes
        self._place[row] = place
        self._root[row] = root
        self._expires_at_s[row] = _NEVER
        self._row_of[tag] = row
        self.used_bytes += size_bytes
        self.writing_bytes += size_bytes
        return row

    def commit(
        self, prefix: Sequence[int], now_s: float, expires_at_s: Sequence[float] = ()
    ) -> list[bool]:
        """Writes ended well: the rows are present, unless they were removed meanwhile.

        Args:
            prefix: rows in prefix order.
            now_s: seconds since the epoch.
            expires_at_s: when each expires, seconds since the epoch, 0 for never; empty for
                none ever.

        Returns:
            Whether each is present; where not it is LEAVING, and the caller discards it.
        """
        self._may_expire |= any(expires_at_s)
        present = []
        for idx, row in enumerate(prefix):
            self.writing_bytes -= self._size_bytes[row]
            doomed = self._state[row] == State.DOOMED
            self._state[row] = State.LEAVING if doomed else State.PRESENT
            if not doomed:
                self._used_at_s[row] = int(now_s)
                if expires_at_s:
                    self._expires_at_s[row] = min(int(expires_at_s[idx]), _LAST_S)
                present.append(row)
        self._num_present += len(present)
        self._policy.insert(present, [self._tag[row] for row in present])
        return [self._state[row] == State.PRESENT for row in prefix]

    def abort(self, row: int) -> None:
        """A write failed and left nothing."""
        self.writing_bytes -= self._size_bytes[row]
        if self._state[row] == State.WRITING:
            del self._row_of[self._tag[row]]
        self._release(row)

    # Reading.

    def begin_read(self, row: int) -> None:
        """From now on until `end_read` the row is not given to anybody else."""
        self._readers[row] = self._readers.get(row, 0) + 1

    def end_read(self, row: int) -> bool:
        """A reader ended; True if the row was removed meanwhile and this was its last reader.

        The caller then discards the row.
        """
        readers = self._readers[row] - 1
        if readers:
            self._readers[row] = readers
            return False
        del self._readers[row]
        return self._state[row] == State.LEAVING

    def touch(self, prefix: Sequence[int], now_s: float) -> None:
        """Make present rows recent; in prefix order."""
        used_at_s = self._used_at_s
        if self._policy.counts_uses:
            used = [row for row in prefix if now_s - used_at_s[row] >= _ONE_USE_S]
        else:
            used = list(prefix)
        for row in prefix:
            used_at_s[row] = int(now_s)
        self._policy.touch(used)

    # Leaving.

    def take_victim(self, stays: Callable[[int], bool] | None = None) -> int | None:
        """Make the next row to go leave; None if every one is held or there is none.

        Args:
            stays: which rows are not to be taken besides those that are held; None for none.
        """
        held = self._held
        if stays is not None:
            held = lambda row: self._held(row) or stays(row)  # noqa: E731
        row = self._policy.evict(held)
        if row is not None:
            self._leave(row)
        return row

    def remove(self, row: int) -> bool:
        """Make a row leave; True if the caller is to discard it now.

        A row that is being written or read leaves when that has ended: see `commit`, `end_read`.
        """
        if self._state[row] == State.WRITING:
            self._state[row] = State.DOOMED
            del self._row_of[self._tag[row]]
            return False
        if self._state[row] != State.PRESENT:
            return False
        self._policy.remove(row)
        self._leave(row)
        return row not in self._readers

    def freed(self, row: int, *, still_counts: bool = False) -> None:
        """A leaving row is gone from the medium.

        Args:
            row: is free again.
            still_counts: its bytes go on counting, until the owner takes them off `used_bytes`.
        """
        if still_counts:
            self.used_bytes += self._size_bytes[row]
        self._release(row)

    def _held(self, row: int) -> bool:
        return row in self._readers or self._held_tag(self._tag[row])

    def _leave(self, row: int) -> None:
        del self._row_of[self._tag[row]]
        self._state[row] = State.LEAVING
        self._num_present -= 1

    def _release(self, row: int) -> None:
        self.used_bytes -= self._size_bytes[row]
        self._state[row] = State.FREE
        self._free.append(row)

    def _grow(self) -> int:
        self._state.append(State.FREE)
        for column in (self._tag, self._size_bytes, self._place):
            column.append(0)
        for column in (self._root, self._used_at_s, self._expires_at_s):
            column.append(0)
        return len(self._state) - 1

    def busy(self, row: int) -> bool:
        """Whether a row must stay for the moment: it is being read, or is leased."""
        return self._held(row)

    # All at once.

    def rows_between(self, first_place: int, end_place: int, *, writing: bool = False) -> list[int]:
        """The present rows with a place in a range, and if asked for those being written."""
        state = np.frombuffer(self._state, np.uint8)
        place = np.frombuffer(self._place, np.int64)
        wanted = state == State.PRESENT
        if writing:
            wanted |= state == State.WRITING
        here = wanted & (place >= first_place) & (place < end_place)
        rows: list[int] = np.flatnonzero(here).tolist()
        return rows

    def load(
        self,
        tags: npt.NDArray[np.uint64],
        sizes_bytes: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        roots: npt.NDArray[np.uint16],
        used_at_s: npt.NDArray[np.uint32],
        expires_at_s: npt.NDArray[np.uint32],
    ) -> None:
        """Fill an empty table with present rows, the first to leave first; tags are unique."""
        count = len(tags)
        self._state = bytearray([State.PRESENT]) * count
        self._tag = array("Q", tags.astype(np.uint64).tobytes())
        self._size_bytes = array("q", sizes_bytes.astype(np.int64).tobytes())
        self._place = array("q", places.astype(np.int64).tobytes())
        self._root = array("H", roots.astype(np.uint16).tobytes())
        self._used_at_s = array("I", used_at_s.astype(np.uint32).tobytes())
        self._expires_at_s = array("I", expires_at_s.astype(np.uint32).tobytes())
        self._row_of = dict(zip(self._tag, range(count), strict=True))
        refill(self._policy, range(count), self._tag)
        self._num_present = count
        self.used_bytes = int(sizes_bytes.sum())
        self._may_expire = bool(expires_at_s.any())

    def in_order(self) -> npt.NDArray[np.int64]:
        """The present rows, about in the order in which they would leave."""
        return np.array(self._policy.in_order(), np.int64)

    def roots_in_use(self) -> set[int]:
        """What rows were given as ``root``, whatever their state."""
        state = np.frombuffer(self._state, np.uint8)
        roots = np.frombuffer(self._root, np.uint16)
        return set(np.unique(roots[state != State.FREE]).tolist())

    def columns(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.generic], ...]:
        """Copies of tag, place, root, used at and expires at of some rows."""
        return tuple(
            np.frombuffer(column, dtype)[rows] if len(column) else np.empty(0, dtype)
            for column, dtype in (
                (self._tag, np.uint64),
                (self._place, np.int64),
                (self._root, np.uint16),
                (self._used_at_s, np.uint32),
                (self._expires_at_s, np.uint32),
            )
        )
