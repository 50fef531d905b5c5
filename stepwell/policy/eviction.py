"""Who leaves when room is needed: the interface, and the policies by name."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from stepwell.errors import ConfigError
from stepwell.policy.arc import Arc
from stepwell.policy.one_list import Fifo, LeafFirst, Lru
from stepwell.policy.s3fifo import S3Fifo

__all__ = ["EvictionPolicy", "POLICY_NAMES", "make_policy", "refill"]


class EvictionPolicy(Protocol):
    """Who leaves when room is needed.

    Items are small non-negative integers: rows of the owner's table, handed out again after their
    chunk left. A tag (0 <= tag < 2**60) names a chunk's content for ever, so that a policy can
    remember what left.

    A policy is told no capacity. When `evict` is called the cache is full, and the capacity is the
    number of items, for those policies that divide it. Sizes are in items throughout.

    Duties of the owner: tell every use, and tell it once, since some policies count; of one prefix,
    insert what is new before touching what was there, so that the head is the most recent; remove
    what leaves for other reasons than `evict`; enter an item that left under its new tag.

    Duties of an implementer: no I/O, no clock, no randomness, so that the same calls always end
    the same way; nothing of an item outlives its leaving but what is known by its tag; and not
    noticeably more tags are remembered than there were items when `evict` was called last.

    Threading: none; the owner locks, and ``held`` calls no method of the policy.
    Cost: below ten microseconds per item, but for `in_order` and for walks over held items.
    """

    name: ClassVar[str]
    counts_uses: ClassVar[bool]
    """Whether touching an item twice says more than touching it once."""

    def __len__(self) -> int:
        """Number of items."""
        ...

    def __contains__(self, item: int) -> bool:
        """Whether an item was entered and has not left since."""
        ...

    def insert(self, prefix: Sequence[int], tags: Sequence[int]) -> None:
        """Enter new items that belong together.

        An item that is there already takes its new tag and its new place, and what was known of it
        is forgotten.

        Args:
            prefix: in prefix order, the first chunk of the prefix first.
            tags: one per item.

        Raises:
            ValueError: not one tag per item (nothing was entered), or a negative item (some were).
        """
        ...

    def touch(self, prefix: Sequence[int]) -> None:
        """Items were used together.

        Args:
            prefix: in prefix order; unknown items are ignored.
        """
        ...

    def remove(self, item: int) -> None:
        """Forget an item that was invalidated or expired; harmless if unknown.

        Its tag is not remembered as having left.
        """
        ...

    def evict(self, held: Callable[[int], bool]) -> int | None:
        """Choose the next item to go and forget it; a policy with ghosts remembers its tag.

        Held items are passed over. They count as in use, so those met on the way may move to the
        end that leaves last; the walk for the next victim does not begin with them again.

        Args:
            held: whether an item must stay, for the moment.

        Returns:
            The item, or None if every item is held or there is none.
        """
        ...

    def in_order(self) -> list[int]:
        """All items, about in the order in which they would leave, first to leave first.

        For checkpoints, see `refill`. O(n).
        """
        ...


_POLICIES: tuple[type[EvictionPolicy], ...] = (LeafFirst, Lru, Fifo, S3Fifo, Arc)

POLICY_NAMES: tuple[str, ...] = tuple(policy.name for policy in _POLICIES)
"""What `make_policy` knows; the first one is the default."""


def make_policy(name: str = POLICY_NAMES[0]) -> EvictionPolicy:
    """A new policy without items.

    Raises:
        ConfigError: there is no policy of that name.
    """
    for policy in _POLICIES:
        if policy.name == name:
            return policy()
    known = ", ".join(POLICY_NAMES)
    raise ConfigError(f"no such eviction policy; known are {known}: policy={name!r}")


def refill(policy: EvictionPolicy, order: Sequence[int], tags: Sequence[int]) -> None:
    """Enter into a new policy what another one had, in the order that it had.

    One item at a time, since policies differ in what the order within one prefix means to them. The
    policies that are one list then have exactly the order of before; the others have all items
    as new ones, in that order.

    Args:
        policy: without items.
        order: as `EvictionPolicy.in_order` gave it, or what is left of it.
        tags: one per item.

    Raises:
        ValueError: not one tag per item.
    """
    for item, tag in zip(order, tags, strict=True):
        policy.insert((item,), (tag,))
