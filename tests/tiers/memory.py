"""A medium in this process's memory, real in every way but that nothing survives it."""

import threading
from collections.abc import Callable, Iterator, Sequence

from stepwell.core.keys import Key, Root, root_of
from stepwell.core.types import ChunkResult
from stepwell.errors import TierError
from stepwell.tiers.media.base import Page, Record, Stats, Wanted
from stepwell.tiers.media.records import ABSENT, joined, split
from stepwell.tiers.outcomes import ALREADY_THERE, DONE


class MemoryMedium:
    """Records in a dictionary that several media may share.

    Attributes:
        stored: the records.
        calls: what was called, with the keys.
        within_s: how long each call was given.
        broken: raises TierError for a call where it says so.
    """

    def __init__(self, stored: dict[Key, bytes] | None = None) -> None:
        self.stored = {} if stored is None else stored
        self.calls: list[tuple[str, tuple[Key, ...]]] = []
        self.within_s: list[float] = []
        self.broken: Callable[[str], bool] = lambda call: False
        self.closed = False
        self._lock = threading.Lock()

    def check(self) -> None:
        self._called("check", (), 0.0)

    def exist(self, keys: Sequence[Key], within_s: float) -> list[bool]:
        self._called("exist", keys, within_s)
        return [key in self.stored for key in keys]

    def read(self, wanted: Sequence[Wanted], within_s: float) -> list[Page | ChunkResult]:
        self._called("read", [each.key for each in wanted], within_s)
        return [
            split(self.stored[each.key], each.payload) if each.key in self.stored else ABSENT
            for each in wanted
        ]

    def write(self, records: Sequence[Record], within_s: float) -> list[ChunkResult]:
        self._called("write", [record.key for record in records], within_s)
        results = []
        with self._lock:
            for record in records:
                results.append(ALREADY_THERE if record.key in self.stored else DONE)
                self.stored.setdefault(record.key, joined(record))
        return results

    def remove(self, keys: Sequence[Key], within_s: float) -> None:
        self._called("remove", keys, within_s)
        for key in keys:
            self.stored.pop(key, None)

    def touch(self, keys: Sequence[Key], within_s: float) -> None:
        self._called("touch", keys, within_s)

    def erase(self, root: Root) -> int:
        keys = [key for key in self.stored if root_of(key) == root]
        self.remove(keys, 1.0)
        return len(keys)

    def keys(self, root: Root) -> Iterator[Key]:
        self._called("keys", (), 0.0)
        return iter([key for key in self.stored if root_of(key) == root])

    def stats(self, within_s: float) -> Stats:
        return Stats(len(self.stored), sum(map(len, self.stored.values())))

    def close(self) -> None:
        self.closed = True

    def of(self, call: str) -> list[tuple[Key, ...]]:
        """The keys of all calls of one kind."""
        return [keys for name, keys in self.calls if name == call]

    def _called(self, call: str, keys: Sequence[Key], within_s: float) -> None:
        self.calls.append((call, tuple(keys)))
        self.within_s.append(within_s)
        if self.broken(call):
            raise TierError(f"broken: call={call}")
