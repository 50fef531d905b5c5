"""Who may still write how much into a pool, so that all together keep its capacity. No I/O.

Every member says how much it has written since it came, and how much it wants to; one of them, who
sweeps, grants. With what was counted by the last whole count of the pool's files::

    counted + granted since that count began - evicted since it was over  <=  capacity

A byte that was granted counts as written from then on, so nobody has to be asked before it is;
what a member that is gone was granted counts until a count that began after that is over. One that
leaves says so, and then what it did not write counts no more.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

__all__ = ["Member", "Quota"]


@dataclass(frozen=True, slots=True)
class Member:
    """What a member says of itself.

    Attributes:
        written_bytes: since it came.
        wanted_bytes: up to which it would write, counted in the same way.
        num_refused: writes since it came that the file system had no room for.
        capacity_bytes: what it takes for the capacity of all together.
        has_left: it writes nothing any more.
    """

    written_bytes: int
    wanted_bytes: int
    num_refused: int = 0
    capacity_bytes: int = 0
    has_left: bool = False


@dataclass(slots=True)
class Quota:
    """The books of whoever sweeps.

    Attributes:
        capacity_bytes: of all together.
        counted_bytes: by the last whole count; None before the first.
        evicted_bytes: since that count was over.
        departed_bytes: granted since that count to members that are gone.
        granted: to each member, since it came.
        base: of that, what the count is sure to have seen.
    """

    capacity_bytes: int
    counted_bytes: int | None = None
    evicted_bytes: int = 0
    departed_bytes: int = 0
    granted: dict[str, int] = field(default_factory=dict)
    base: dict[str, int] = field(default_factory=dict)
    _begun: dict[str, int] = field(default_factory=dict, init=False, compare=False)
    _departed_before: int = field(default=0, init=False, compare=False)

    @property
    def used_bytes(self) -> int:
        """The most that there can be."""
        since = sum(self.granted.values()) - sum(self.base.values()) + self.departed_bytes
        return (self.counted_bytes or 0) + since - self.evicted_bytes

    @property
    def room_bytes(self) -> int:
        """What may be granted."""
        return 0 if self.counted_bytes is None else self.capacity_bytes - self.used_bytes

    def welcome(self, members: Mapping[str, Member]) -> None:
        """Take in members that are new; what they wrote before is in a count, or will be."""
        for name, member in members.items():
            if name in self.granted and member.written_bytes < self.base[name]:
                self.leave(name)  # another of the same name
            if name not in self.granted:
                self.granted[name] = self.base[name] = member.written_bytes
            self.granted[name] = max(self.granted[name], member.written_bytes)
            if member.has_left:  # what it did not use is anybody's again
                self.granted[name] = max(self.base[name], member.written_bytes)

    def unused_bytes(self, members: Mapping[str, Member], silent: Collection[str]) -> int:
        """What is charged and is probably not there: grants of members that were killed.

        Until they are sure to be gone, and there was a count, it is granted to nobody else.

        Args:
            members: all that are there, and were welcomed.
            silent: those of them that have not been heard of for some time.
        """
        unused_bytes = self.departed_bytes
        for name, granted_bytes in self.granted.items():
            known_bytes = self.base[name]
            if name in members:
                if name not in silent:
                    continue
                known_bytes = max(known_bytes, members[name].written_bytes)
            unused_bytes += granted_bytes - known_bytes
        return unused_bytes

    def leave(self, name: str) -> None:
        """A member is gone; it may have written all that it was granted, or nothing."""
        self.departed_bytes += self.granted.pop(name) - self.base.pop(name)
        self._begun.pop(name, None)

    def grant(self, members: Mapping[str, Member], room_bytes: int) -> bool:
        """Share what room there is among those who want some; returns whether anything changed.

        Args:
            members: all that are there, and were welcomed.
            room_bytes: at most; the file system may have less than `room_bytes` of this object.
        """
        left_bytes = min(room_bytes, self.room_bytes)
        wants = {
            name: member.wanted_bytes - self.granted[name]
            for name, member in members.items()
            if member.wanted_bytes > self.granted[name]
        }
        changed = False
        for idx, (name, want_bytes) in enumerate(sorted(wants.items(), key=lambda each: each[1])):
            # Those who want least first, so that what they leave is for the others.
            give_bytes = min(want_bytes, left_bytes // (len(wants) - idx))
            if give_bytes > 0:
                self.granted[name] += give_bytes
                left_bytes -= give_bytes
                changed = True
        return changed

    def wanted_bytes(self, members: Mapping[str, Member]) -> int:
        """What would have to be granted for nobody to want any more."""
        return sum(
            max(0, member.wanted_bytes - self.granted.get(name, member.wanted_bytes))
            for name, member in members.items()
        )

    def begin_count(self, members: Mapping[str, Member]) -> None:
        """A count begins now: it is sure to see what members say they have written.

        Args:
            members: as they were read before its first folder is.
        """
        self._begun = {
            name: member.written_bytes for name, member in members.items() if name in self.granted
        }
        self._departed_before = self.departed_bytes

    def end_count(self, counted_bytes: int) -> None:
        """The count that was begun last is over.

        Of what was evicted meanwhile some was counted and some not: all of it counts as there.
        """
        self.counted_bytes = counted_bytes
        self.evicted_bytes = 0
        self.departed_bytes -= self._departed_before
        # Whoever came while it was counted has written nothing that it is sure to have seen.
        self.base = {name: self._begun.get(name, self.base[name]) for name in self.granted}
