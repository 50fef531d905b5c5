"""Who leaves when room is needed."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from stepwell.core.keys import Key

__all__ = ["LeafFirstLru"]


class LeafFirstLru:
    """Least recently used, and of what was used together the end of the prefix first.

    A chunk is worth nothing without the chunks before it, so a prefix is shortened from its
    end: `touch` makes the first key it is given the most recent and the last key the least.

    Threading: none; the owner locks. Cost: O(1) per key.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def touch(self, prefix: Sequence[Key]) -> None:
        """Make keys the most recent ones, entering those that are new.

        Args:
            prefix: in prefix order; the first will be the last to leave.
        """
        for key in reversed(prefix):
            self._order[key] = None
            self._order.move_to_end(key)

    def remove(self, key: Key) -> None:
        """Forget a key; harmless if unknown."""
        self._order.pop(key, None)

    def victims(self) -> Iterator[Key]:
        """Keys in the order in which they should leave; do not change the policy meanwhile."""
        return iter(self._order)
