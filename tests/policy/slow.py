"""The eviction policies once more, from the papers' pseudo code: slow, and plainly right.

Lists and ordered dictionaries, what leaves next in front. Nothing of `stepwell.policy` is used.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from fractions import Fraction

Held = Callable[[int], bool]


class SlowOneList:
    """LRU with prefix ends first, LRU, or FIFO."""

    def __init__(self, *, ends_first: bool, moves_when_touched: bool) -> None:
        self.ends_first = ends_first
        self.moves_when_touched = moves_when_touched
        self.items: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __contains__(self, item: int) -> bool:
        return item in self.items

    def insert(self, prefix: Sequence[int], tags: Sequence[int]) -> None:
        for item in reversed(prefix) if self.ends_first else prefix:
            self.remove(item)
            self.items.append(item)

    def touch(self, prefix: Sequence[int]) -> None:
        if self.moves_when_touched:
            for item in reversed(prefix) if self.ends_first else prefix:
                if item in self.items:
                    self.items.remove(item)
                    self.items.append(item)

    def remove(self, item: int) -> None:
        if item in self.items:
            self.items.remove(item)

    def evict(self, held: Held) -> int | None:
        free = [item for item in self.items if not held(item)]
        if not free:
            return None
        position = self.items.index(free[0])
        self.items = self.items[position + 1 :] + self.items[:position]
        return free[0]

    def in_order(self) -> list[int]:
        return list(self.items)


class SlowS3Fifo:
    """Algorithm 1 of Yang et al., SOSP'23: READ is touch or insert, EVICT is evict.

    Args:
        fills_main: what libCacheSim's S3-FIFO does and the paper's does not, for comparison. With
            this capacity, what comes before the first eviction and finds the small queue at a tenth
            of it enters the main queue.
    """

    def __init__(self, fills_main: int | None = None) -> None:
        self.small: OrderedDict[int, None] = OrderedDict()
        self.main: OrderedDict[int, None] = OrderedDict()
        self.ghosts: OrderedDict[int, None] = OrderedDict()
        self.freq: dict[int, int] = {}
        self.tag_of: dict[int, int] = {}
        self.fills_main = fills_main

    def __len__(self) -> int:
        return len(self.small) + len(self.main)

    def __contains__(self, item: int) -> bool:
        return item in self.small or item in self.main

    def insert(self, prefix: Sequence[int], tags: Sequence[int]) -> None:
        for item, tag in reversed(list(zip(prefix, tags, strict=True))):
            self.remove(item)
            if tag in self.ghosts:
                del self.ghosts[tag]
                self.main[item] = None
            elif self.fills_main is not None and len(self.small) >= self.fills_main // 10:
                self.main[item] = None
            else:
                self.small[item] = None
            self.freq[item] = 0
            self.tag_of[item] = tag

    def touch(self, prefix: Sequence[int]) -> None:
        for item in prefix:
            if item in self:
                self.freq[item] = min(self.freq[item] + 1, 3)

    def remove(self, item: int) -> None:
        self.small.pop(item, None)
        self.main.pop(item, None)

    def evict(self, held: Held) -> int | None:
        self.fills_main = None
        size = len(self)
        if len(self.small) >= Fraction(size, 10):
            queues = [self.evict_small, self.evict_main]
        else:
            queues = [self.evict_main, self.evict_small, self.evict_main]
        victim = None
        for evict in queues:
            victim = evict(held)
            if victim is not None:
                break
        while len(self.ghosts) > size - size // 10:
            self.ghosts.popitem(last=False)
        return victim

    def evict_small(self, held: Held) -> int | None:
        for _ in range(len(self.small)):
            tail = next(iter(self.small))
            if self.freq[tail] > 1:
                del self.small[tail]
                self.main[tail] = None
                self.freq[tail] = 0
            elif held(tail):
                self.small.move_to_end(tail)
            else:
                del self.small[tail]
                self.ghosts.pop(self.tag_of[tail], None)
                self.ghosts[self.tag_of[tail]] = None
                return tail
        return None

    def evict_main(self, held: Held) -> int | None:
        while not all(self.freq[item] == 0 and held(item) for item in self.main):
            tail = next(iter(self.main))
            if self.freq[tail] > 0:
                self.freq[tail] -= 1
                self.main.move_to_end(tail)
            elif held(tail):
                self.main.move_to_end(tail)
            else:
                del self.main[tail]
                return tail
        return None

    def in_order(self) -> list[int]:
        return [*self.small, *self.main]


class SlowArc:
    """ARC(c) of Megiddo & Modha, FAST'03, cut in two: REPLACE is evict, the cases are insert."""

    def __init__(self) -> None:
        self.t1: OrderedDict[int, int] = OrderedDict()  # item: tag
        self.t2: OrderedDict[int, int] = OrderedDict()
        self.b1: OrderedDict[int, None] = OrderedDict()
        self.b2: OrderedDict[int, None] = OrderedDict()
        self.p: float = 0
        self.full = 0

    def __len__(self) -> int:
        return len(self.t1) + len(self.t2)

    def __contains__(self, item: int) -> bool:
        return item in self.t1 or item in self.t2

    def insert(self, prefix: Sequence[int], tags: Sequence[int]) -> None:
        for item, tag in reversed(list(zip(prefix, tags, strict=True))):
            c = max(self.full, len(self))
            if tag in self.b1:  # case II
                self.p = min(c, self.p + max(1, len(self.b2) / len(self.b1)))
                del self.b1[tag]
                self.remove(item)
                self.t2[item] = tag
            elif tag in self.b2:  # case III
                self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
                del self.b2[tag]
                self.remove(item)
                self.t2[item] = tag
            else:  # case IV
                self.remove(item)
                self.t1[item] = tag
            self.forget(max(self.full, len(self)))

    def forget(self, c: int) -> None:
        while self.b1 and len(self.t1) + len(self.b1) > c:  # case IV A
            self.b1.popitem(last=False)
        while self.b2 and len(self) + len(self.b1) + len(self.b2) > 2 * c:  # case IV B
            self.b2.popitem(last=False)

    def touch(self, prefix: Sequence[int]) -> None:
        for item in reversed(prefix):  # case I
            if item in self:
                tag = self.t1[item] if item in self.t1 else self.t2[item]
                self.remove(item)
                self.t2[item] = tag

    def remove(self, item: int) -> None:
        self.t1.pop(item, None)
        self.t2.pop(item, None)

    def evict(self, held: Held) -> int | None:
        self.full = len(self)
        parts = [(self.t1, self.b1), (self.t2, self.b2)]
        if not len(self.t1) > self.p:
            parts.reverse()
        for cached, ghosts in parts:
            for _ in range(len(cached)):
                item = next(iter(cached))
                if held(item):
                    cached.move_to_end(item)
                    continue
                tag = cached.pop(item)
                self.b1.pop(tag, None)
                self.b2.pop(tag, None)
                ghosts[tag] = None
                self.forget(self.full)
                return item
        return None

    def in_order(self) -> list[int]:
        return [*self.t1, *self.t2]


SlowPolicy = SlowOneList | SlowS3Fifo | SlowArc


def make_slow(name: str) -> SlowPolicy:
    """The slow policy of that name."""
    if name == "s3-fifo":
        return SlowS3Fifo()
    if name == "arc":
        return SlowArc()
    return {
        "leaf-first-lru": SlowOneList(ends_first=True, moves_when_touched=True),
        "lru": SlowOneList(ends_first=False, moves_when_touched=True),
        "fifo": SlowOneList(ends_first=False, moves_when_touched=False),
    }[name]
