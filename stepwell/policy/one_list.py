"""The policies that are one list: least recently used with prefix ends first, plain, and FIFO."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from stepwell.policy.linked import LinkedLists

__all__ = ["Fifo", "LeafFirst", "Lru"]


class _OneList:
    """What the policies of this module share: the oldest leaves first, unless it is held.

    A held item that is met on the way becomes the newest: it is in use, and the next walk does not
    meet it again.

    Threading: none; the owner locks. Cost: O(1) per item; `evict` amortised over held items met,
    and O(n) when all are held. Memory: 9 to 10 bytes per row.
    """

    def __init__(self) -> None:
        self._list = LinkedLists()

    def __len__(self) -> int:
        return len(self._list)

    def __contains__(self, item: int) -> bool:
        return item in self._list

    def remove(self, item: int) -> None:
        """Forget an item; harmless if unknown."""
        self._list.remove(item)

    def evict(self, held: Callable[[int], bool]) -> int | None:
        """The item that is not held and the oldest, forgotten; None if there is none."""
        for _ in range(len(self._list)):
            item = self._list.oldest()
            if not held(item):
                self._list.remove(item)
                return item
            self._list.push(item)
        return None

    def in_order(self) -> list[int]:
        """All items, exactly in the order in which they leave if none is held."""
        return self._list.rows()


class LeafFirst(_OneList):
    """Least recently used, and of what was used together the end of the prefix first.

    A chunk is worth nothing without the chunks before it, so a prefix is shortened from its end:
    the first item of a prefix becomes the most recent, the last item the least of them. On agentic
    traffic that is worth some points of hit ratio when room is short; elsewhere it equals `Lru`.

    Threading, cost, held items: as for `_OneList`. `insert` and `touch` take less than one
    microsecond per item.
    """

    name: ClassVar[str] = "leaf-first-lru"
    counts_uses: ClassVar[bool] = False

    def insert(self, prefix: Sequence[int], tags: Sequence[int]) -> None:
        """Enter items as the most recent ones, the first of the prefix the last to leave."""
        _check_tags(prefix, tags)
        for item in reversed(prefix):
            self._list.push(item)

    def touch(self, prefix: Sequence[int]) -> None:
        """Make the known ones the most recent, the first of the prefix the last to leave."""
        for item in reversed(prefix):
            if item in self._list:
                self._list.push(item)


class Lru(_OneList):
    """Least recently used, item by item from head to tail: for comparison.

    The last item of a prefix is the most recent, so a prefix loses its head first and with it the
    use of all the rest. `LeafFirst` is the same without that fault.

    Threading, cost, held items: as for `_OneList`.
    """

    name: ClassVar[str] = "lru"
    counts_uses: ClassVar[bool] = False

    def insert(self, prefix: Sequence[int], tags: Sequence[int]) -> None:
        """Enter items as the most recent ones, the last of the prefix the last to leave."""
        _check_tags(prefix, tags)
        for item in prefix:
            self._list.push(item)

    def touch(self, prefix: Sequence[int]) -> None:
        """Make the known ones the most recent, the last of the prefix the last to leave."""
        for item in prefix:
            if item in self._list:
                self._list.push(item)


class Fifo(_OneList):
    """First in, first out; use does not matter: for comparison.

    A held item that is met by `evict` counts as entered anew.

    Threading, cost, held items: as for `_OneList`.
    """

    name: ClassVar[str] = "fifo"
    counts_uses: ClassVar[bool] = False

    def insert(self, prefix: Sequence[int], tags: Sequence[int]) -> None:
        """Enter items as the newest ones, the last of the prefix the last to leave."""
        _check_tags(prefix, tags)
        for item in prefix:
            self._list.push(item)

    def touch(self, prefix: Sequence[int]) -> None:
        """Nothing changes."""


def _check_tags(prefix: Sequence[int], tags: Sequence[int]) -> None:
    if len(prefix) != len(tags):
        raise ValueError(f"one tag per item: items={len(prefix)} tags={len(tags)}")
