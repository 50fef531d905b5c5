"""ARC: recency and frequency share the room, and what comes back says how."""

from array import array
from collections.abc import Callable, Sequence
from typing import ClassVar

from stepwell.policy.ghosts import Ghosts
from stepwell.policy.linked import LinkedLists

__all__ = ["Arc"]

# T1 and T2 of the paper; the ghosts B1 and B2 have the same numbers.
_ONCE, _AGAIN = 0, 1


class Arc:
    """ARC (Megiddo & Modha, ARC: a self-tuning, low overhead replacement cache, FAST'03).

    Items used once and items used again are two lists by recency. Which of the two gives up an
    item depends on a target for the length of the first. The tags of what left each list are
    remembered: the target grows when something comes back that left the first list, and shrinks
    when it left the second. There is no parameter.

    What differs, since the owner evicts before it inserts and a policy knows no capacity:

    - The capacity c is the number of items when `evict` is called; afterwards that number or the
      number of items now, whichever is larger.
    - The target changes at the insertion, after the eviction for it, so it counts from the next
      eviction on; and the paper's tie (target met exactly, and the newcomer left the second list)
      is decided as for all other newcomers.
    - Of one prefix the first item becomes the most recent, as in `LeafFirst`.
    - A held item at the end of its list becomes the most recent of the same list. If all items of
      the list to shorten are held, the other one gives up an item.

    As in the paper, at most c tags are remembered once the cache is full again (c + 1 between an
    eviction and the insertion it was for), and the first list and its ghosts are c entries at most.

    Threading: none; the owner locks. Cost: less than a microsecond per item touched, two to three
    per item inserted, about five per item evicted; `evict` is O(1) amortised over held items met,
    at worst once around all items. Memory: 18 bytes per row and 26 per tag remembered: at most
    45 per item.
    """

    name: ClassVar[str] = "arc"
    counts_uses: ClassVar[bool] = True

    def __init__(self) -> None:
        self._lists = LinkedLists(2)
        self._tags = array("q")  # of each row
        self._ghosts = Ghosts(2)
        self._capacity = 0  # items when evict was called last
        self._target = 0.0  # p of the paper

    def __len__(self) -> int:
        return len(self._lists)

    def __contains__(self, item: int) -> bool:
        return item in self._lists

    def insert(self, prefix: Sequence[int], tags: Sequence[int]) -> None:
        """Enter items, the last of the prefix first; what is remembered counts as used again."""
        if len(prefix) != len(tags):
            raise ValueError(f"one tag per item: items={len(prefix)} tags={len(tags)}")
        for item, tag in zip(reversed(prefix), reversed(tags), strict=True):
            self._lists.push(item, _AGAIN if self._came_back(tag) else _ONCE)
            if item >= len(self._tags):
                self._grow(item)
            self._tags[item] = tag
            self._trim_ghosts(max(self._capacity, len(self._lists)))

    def touch(self, prefix: Sequence[int]) -> None:
        """Make the known ones the most recent of those used again, prefix ends first to leave."""
        for item in reversed(prefix):
            if item in self._lists:
                self._lists.push(item, _AGAIN)

    def remove(self, item: int) -> None:
        """Forget an item, its tag included; harmless if unknown."""
        self._lists.remove(item)

    def evict(self, held: Callable[[int], bool]) -> int | None:
        """Choose by the rules above among items that are not held; None if there is none."""
        self._capacity = len(self._lists)
        first = _ONCE if self._lists.length(_ONCE) > self._target else _AGAIN
        for which in (first, 1 - first):
            for _ in range(self._lists.length(which)):
                item = self._lists.oldest(which)
                if not held(item):
                    self._lists.remove(item)
                    self._ghosts.add(self._tags[item], which)
                    self._trim_ghosts(self._capacity)
                    return item
                self._lists.push(item, which)
        return None

    def in_order(self) -> list[int]:
        """Those used once, then those used again, each by recency: about the order of leaving.

        Entered into a new policy, all count as used once.
        """
        return self._lists.rows(_ONCE) + self._lists.rows(_AGAIN)

    def _came_back(self, tag: int) -> bool:
        """Whether tag was remembered; moves the target if so."""
        once, again = self._ghosts.length(_ONCE), self._ghosts.length(_AGAIN)
        left = self._ghosts.take(tag)
        if left == _ONCE:
            capacity = max(self._capacity, len(self._lists))
            self._target = min(self._target + max(1.0, again / once), capacity)
        elif left == _AGAIN:
            self._target = max(self._target - max(1.0, once / again), 0.0)
        return left >= 0

    def _trim_ghosts(self, capacity: int) -> None:
        """Keep the paper's bounds: c for the first list and its ghosts, 2 c for everything."""
        lists, ghosts = self._lists, self._ghosts
        while ghosts.length(_ONCE) and lists.length(_ONCE) + ghosts.length(_ONCE) > capacity:
            ghosts.drop_oldest(_ONCE)
        while ghosts.length(_AGAIN) and len(lists) + len(ghosts) > 2 * capacity:
            ghosts.drop_oldest(_AGAIN)

    def _grow(self, row: int) -> None:
        # A little ahead, as in LinkedLists.
        missing = max(row + 1 - len(self._tags), len(self._tags) >> 6)
        self._tags.frombytes(bytes(self._tags.itemsize * missing))
