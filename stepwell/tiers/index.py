"""Which chunks a tier holds, how many bytes they take, and who leaves next.

The life of a chunk in a tier::

    absent --reserve--> writing --commit--> present --take_victim, remove--> leaving
    writing --abort--> absent
    writing --remove, commit--> leaving
    leaving --freed--> absent
    leaving --restore--> present

Bytes are counted from `reserve` on and until `freed`/`abort`, so the sum never exceeds the
capacity while anything of a chunk is still on the medium.
"""

import threading
from collections.abc import Callable, Sequence
from enum import Enum

from stepwell.core.keys import Key
from stepwell.core.types import Lookup
from stepwell.policy.eviction import LeafFirstLru

__all__ = ["ChunkIndex", "Reserve"]


class Reserve(Enum):
    """The answer to a wish for room."""

    RESERVED = "reserved"
    EXISTS = "exists"
    """Present or being written already: nothing to do."""
    NO_ROOM = "no_room"
    """Free something and ask again."""
    LEAVING = "leaving"
    """Still on its way out: its name on the medium is not free yet."""
    NEVER = "never"
    """Larger than the whole tier."""


class ChunkIndex:
    """The table of one tier.

    Args:
        capacity_bytes: what the tier may take.

    Threading: any thread; every method holds one lock for a short time.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._present: dict[Key, int] = {}
        self._writing: dict[Key, int] = {}
        self._leaving: dict[Key, int] = {}
        self._doomed: set[Key] = set()  # removed while being written
        self._used_bytes = 0
        self._policy = LeafFirstLru()

    @property
    def used_bytes(self) -> int:
        """Bytes that count: present, being written and leaving."""
        return self._used_bytes

    @property
    def writing_bytes(self) -> int:
        """Bytes reserved by writes that have not ended."""
        with self._lock:
            return sum(self._writing.values())

    def __len__(self) -> int:
        return len(self._present)

    def states(self, keys: Sequence[Key]) -> list[Lookup]:
        """HIT if present, PENDING if being written, else MISS."""
        with self._lock:
            return [
                Lookup.HIT if key in self._present
                else Lookup.PENDING if key in self._writing and key not in self._doomed
                else Lookup.MISS
                for key in keys
            ]  # fmt: skip

    def adopt(self, key: Key, size_bytes: int) -> None:
        """Enter a chunk found at start-up, as the most recent; may exceed the capacity."""
        with self._lock:
            self._present[key] = size_bytes
            self._used_bytes += size_bytes
            self._policy.touch([key])

    def reserve(self, key: Key, size_bytes: int) -> Reserve:
        """Ask for room for a chunk that will be written."""
        with self._lock:
            doomed = key in self._doomed
            if key in self._present or (key in self._writing and not doomed):
                return Reserve.EXISTS
            if size_bytes > self.capacity_bytes:
                return Reserve.NEVER
            if doomed or key in self._leaving:
                return Reserve.LEAVING
            if self._used_bytes + size_bytes > self.capacity_bytes:
                return Reserve.NO_ROOM
            self._writing[key] = size_bytes
            self._used_bytes += size_bytes
            return Reserve.RESERVED

    def commit(self, key: Key) -> bool:
        """A write ended well: the chunk is present; False if it was removed meanwhile.

        A chunk that was removed is leaving now, and the caller discards it.
        """
        with self._lock:
            self._present[key] = self._writing.pop(key)
            self._policy.touch([key])
            if key not in self._doomed:
                return True
            self._doomed.discard(key)
            self._leave(key)
            return False

    def abort(self, key: Key) -> None:
        """A write failed and left nothing."""
        with self._lock:
            self._used_bytes -= self._writing.pop(key)
            self._doomed.discard(key)

    def take_victim(self, held: Callable[[Key], bool]) -> Key | None:
        """Make the next chunk to go leave; None if every chunk is held or there is none."""
        with self._lock:
            victim = next((key for key in self._policy.victims() if not held(key)), None)
            if victim is not None:
                self._leave(victim)
            return victim

    def remove(self, key: Key) -> bool:
        """Make a present chunk leave; False if it is not present.

        One that is being written leaves when its write ends (see `commit`).
        """
        with self._lock:
            if key in self._writing:
                self._doomed.add(key)
            if key not in self._present:
                return False
            self._leave(key)
            return True

    def freed(self, key: Key) -> int:
        """A leaving chunk is gone from the medium; returns the bytes that it gave back."""
        with self._lock:
            size_bytes = self._leaving.pop(key)
            self._used_bytes -= size_bytes
            return size_bytes

    def restore(self, key: Key) -> None:
        """A leaving chunk turned out to stay: it is present again, as the most recent."""
        with self._lock:
            self._present[key] = self._leaving.pop(key)
            self._policy.touch([key])

    def touch(self, prefix: Sequence[Key]) -> list[bool]:
        """Make the present ones of these keys recent; says which were present."""
        with self._lock:
            found = [key in self._present for key in prefix]
            self._policy.touch([key for key, here in zip(prefix, found, strict=True) if here])
            return found

    def _leave(self, key: Key) -> None:
        self._leaving[key] = self._present.pop(key)
        self._policy.remove(key)
