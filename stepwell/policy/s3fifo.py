"""S3-FIFO: a small queue in front of a main one, so that what is used once leaves soon."""

from array import array
from collections.abc import Callable, Sequence
from typing import ClassVar

from stepwell.policy.ghosts import Ghosts
from stepwell.policy.linked import LinkedLists

__all__ = ["S3Fifo"]

_SMALL, _MAIN = 0, 1

# Yang et al., SOSP'23, section 4.1 and algorithm 1: a small queue of a tenth of the capacity, a
# ghost queue as long as the main one, and a counter of two bits.
_SMALL_SHARE = 10
_MAX_USES = 3
_USES_TO_STAY = 2


class S3Fifo:
    """S3-FIFO (Yang et al., FIFO queues are all you need for cache eviction, SOSP'23).

    New items enter a small queue. At its end those touched twice or more go on to the main queue,
    their uses forgotten; the others leave, and their tags are remembered. What comes back while
    its tag is remembered enters the main queue. At the end of the main queue an item that was
    touched goes round again, once per use (at most 3). A touch moves nothing: it counts.

    The variant is algorithm 1 of the paper with its parameters: the small queue gives up an item
    when it has a tenth of all items or more, otherwise the main queue does. Since there is no
    capacity but the number of items when `evict` is called, the small queue may take all until the
    first eviction. (libCacheSim has since filled the main queue first; that is worse in large
    caches on traffic where most comes once, and is here, for comparison, with ``main_first``.)
    The tags of the last n - n // 10 items
    that left the small queue are remembered, n being the number of items at the last eviction.

    What the paper does not say: items of one prefix enter end first, so that the end leaves first.
    A held item at the end of its queue goes to the start of the same queue, its uses unchanged.

    Frequency outlives its reason here: what an agent's session used often stays long after the
    session ended. Not a default.

    Threading: none; the owner locks. Cost: a quarter of a microsecond per item touched, one to two
    per item inserted, about six per item evicted; `evict` is O(1) amortised over touches and held
    items met, at worst five times around all items. Memory: 19 bytes per row and 26 per tag
    remembered: about 42 per item.

    Args:
        main_first: new items enter the main queue until the first eviction.
    """

    name: ClassVar[str] = "s3-fifo"

    counts_uses: ClassVar[bool] = True

    def __init__(self, *, main_first: bool = False) -> None:
        self._main_first = main_first  # until the first eviction
        self._queues = LinkedLists(2)
        self._uses = bytearray()  # of each row
        self._tags = array("q")  # of each row
        self._ghosts = Ghosts()

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, item: int) -> bool:
        return item in self._queues

    def insert(self, prefix: Sequence[int], tags: Sequence[int]) -> None:
        """Enter items, the last of the prefix first; those whose tag is remembered as proven."""
        if len(prefix) != len(tags):
            raise ValueError(f"one tag per item: items={len(prefix)} tags={len(tags)}")
        for item, tag in zip(reversed(prefix), reversed(tags), strict=True):
            known = self._ghosts.take(tag) >= 0 or self._main_first
            self._queues.push(item, _MAIN if known else _SMALL)
            if item >= len(self._tags):
                self._grow(item)
            self._uses[item] = 0
            self._tags[item] = tag

    def touch(self, prefix: Sequence[int]) -> None:
        """Count one use of each known item."""
        uses = self._uses
        for item in prefix:
            if item in self._queues and uses[item] < _MAX_USES:
                uses[item] += 1

    def remove(self, item: int) -> None:
        """Forget an item, its tag included; harmless if unknown."""
        self._queues.remove(item)

    def evict(self, held: Callable[[int], bool]) -> int | None:
        """Choose by the rules above among items that are not held; None if there is none."""
        num_items = len(self)
        self._main_first = False
        victim = None
        if self._queues.length(_SMALL) * _SMALL_SHARE < num_items:
            victim = self._evict_main(held)
        if victim is None:
            victim = self._evict_small(held)
        if victim is None:
            victim = self._evict_main(held)
        while self._ghosts.length(0) > num_items - num_items // _SMALL_SHARE:
            self._ghosts.drop_oldest()
        return victim

    def in_order(self) -> list[int]:
        """The small queue, then the main one, each by age: about the order of leaving.

        Uses are not looked at. Entered into a new policy, all are in the small queue.
        """
        return self._queues.rows(_SMALL) + self._queues.rows(_MAIN)

    def _evict_small(self, held: Callable[[int], bool]) -> int | None:
        for _ in range(self._queues.length(_SMALL)):
            item = self._queues.oldest(_SMALL)
            if self._uses[item] >= _USES_TO_STAY:
                self._uses[item] = 0
                self._queues.push(item, _MAIN)
            elif held(item):
                self._queues.push(item, _SMALL)
            else:
                self._queues.remove(item)
                self._ghosts.add(self._tags[item])
                return item
        return None

    def _evict_main(self, held: Callable[[int], bool]) -> int | None:
        num_held = 0  # in a row; a whole round of them means that nothing is left to count down
        while num_held < self._queues.length(_MAIN):
            item = self._queues.oldest(_MAIN)
            if self._uses[item]:
                self._uses[item] -= 1
                num_held = 0
            elif held(item):
                num_held += 1
            else:
                self._queues.remove(item)
                return item
            self._queues.push(item, _MAIN)
        return None

    def _grow(self, row: int) -> None:
        # A little ahead, as in LinkedLists.
        missing = max(row + 1 - len(self._uses), len(self._uses) >> 6)
        self._uses.extend(bytes(missing))
        self._tags.frombytes(bytes(self._tags.itemsize * missing))
