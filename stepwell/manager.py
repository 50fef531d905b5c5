"""The table of chunks that something is to be done about, and the plans for them. No I/O.

The pipeline does what is planned here. Where chunks lie is known by the tiers; this table has
what no single tier can know: which chunks have no copy below yet, and which were served lately.

The life of a chunk under write-back::

    planned for the uppermost tier --> WRITING
    WRITING --written--> DIRTY: that is the only copy, and it is not evicted
    WRITING --not written--> nothing is known
    DIRTY --plan_demotions--> DEMOTING: being copied to the tiers below
    DIRTY --not admitted below--> CLEAN: may be evicted, and is gone then
    DEMOTING --demoted--> CLEAN: may be evicted, a copy lies below (or could not be made)
    DIRTY, DEMOTING --forget--> nothing is known: it was deleted

Under write-through a chunk is CLEAN from the start: it was offered to every tier at once.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from stepwell.core.keys import Key, fingerprint
from stepwell.core.types import Chunk, Lookup, Reason
from stepwell.policy.admission import Admission

__all__ = ["Demotion", "Manager", "Promotion", "WriteMode", "WritePlan"]

# As a share of the uppermost tier: more than this is not left without a copy below. The other
# half can be evicted at once, so that a write never waits for a demotion.
_DIRTY_SHARE = 0.5
_SEEN_TAGS = 1 << 16
_THERE = (Lookup.HIT, Lookup.PENDING)


class WriteMode(StrEnum):
    """When the lower tiers get what is written."""

    THROUGH = "through"
    """At once: a restart loses nothing that was reported as written."""
    BACK = "back"
    """When the uppermost tier needs the room: chunks that die young never reach the drive. What
    was not demoted yet is lost when the process is killed."""


class Promotion(StrEnum):
    """When a chunk that a lower tier served is copied up."""

    ALWAYS = "always"
    SECOND_HIT = "second-hit"
    """When it was served from below twice; of the last 65,536 chunks that were."""
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Where the chunks of a write go.

    Attributes:
        targets: tier -> which chunks, in order.
        refused: tier -> which chunks its admission refused.
    """

    targets: dict[int, list[int]]
    refused: dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class Demotion:
    """A chunk to be copied from the uppermost tier to lower ones.

    Attributes:
        number: tells it from an earlier or later life of the same chunk.
        key, size_bytes, end_token: the chunk.
        targets: the tiers that are to have it; none if it is to be let go.
        reason: why it is to be let go.
    """

    number: int
    key: Key
    size_bytes: int
    end_token: int
    targets: tuple[int, ...]
    reason: Reason = Reason.NONE


class _State(Enum):
    WRITING = "writing"
    DIRTY = "dirty"
    DEMOTING = "demoting"


@dataclass(slots=True)
class _Entry:
    number: int
    key: Key
    size_bytes: int
    end_token: int
    state: "_State"
    num_writes: int = 1  # under way, while WRITING


class Manager:
    """Decides for a hierarchy of tiers, the uppermost first.

    Args:
        admissions: per tier, None where everything may enter.
        write_mode: see `WriteMode`; with a single tier there is no difference.
        promotion: see `Promotion`.
        top_capacity_bytes: of the uppermost tier, for write-back.
        pressure: how scarce writing to a tier is, 0 to 1.

    Threading: one thread plans; `keeps` may be called from any. Cost: O(chunks) per call.
    """

    def __init__(
        self,
        admissions: Sequence[Admission | None],
        *,
        write_mode: WriteMode = WriteMode.THROUGH,
        promotion: Promotion = Promotion.ALWAYS,
        top_capacity_bytes: int = 0,
        pressure: Callable[[int], float] = lambda tier_idx: 0.0,
    ) -> None:
        self._admissions = tuple(admissions)
        self._write_mode = write_mode if len(self._admissions) > 1 else WriteMode.THROUGH
        self._promotion = promotion
        self._dirty_limit_bytes = int(top_capacity_bytes * _DIRTY_SHARE)
        self._pressure = pressure
        self._dirty: OrderedDict[int, _Entry] = OrderedDict()
        self._dirty_bytes = 0
        self._next_number = 0
        self._seen: OrderedDict[int, None] = OrderedDict()

    @property
    def dirty_bytes(self) -> int:
        """Bytes without a copy below for which none is being made."""
        return self._dirty_bytes

    @property
    def has_dirty(self) -> bool:
        """Whether any chunk has no copy below yet."""
        return bool(self._dirty)

    def keeps(self, tag: int) -> bool:
        """Whether the uppermost tier has the only copy of a chunk, by its fingerprint."""
        return tag in self._dirty

    # Writing.

    def plan_write(
        self, chunks: Sequence[Chunk], answers: Sequence[Sequence[Lookup]], now_s: float
    ) -> WritePlan:
        """Where to write chunks.

        Args:
            chunks: in prefix order.
            answers: per tier what it says about each chunk; what it has is not offered again.
            now_s: monotonic seconds.
        """
        back = self._write_mode is WriteMode.BACK
        tiers = range(1) if back else range(len(self._admissions))
        targets: dict[int, list[int]] = {}
        refused: dict[int, list[int]] = {}
        for tier_idx in tiers:
            for idx, chunk in enumerate(chunks):
                known = answers[tier_idx][idx] in _THERE
                admitted = known or self._admits(tier_idx, chunk.key, chunk.end_token, now_s)
                (targets if admitted else refused).setdefault(tier_idx, []).append(idx)
        if back:
            # From now on, or it might be evicted before anybody looked; the first of the prefix
            # as the latest, so that it is demoted last.
            for idx in reversed(targets.get(0, ())):
                below = any(answer[idx] is Lookup.HIT for answer in answers[1:])
                if answers[0][idx] is Lookup.MISS and not below:
                    self._enter(chunks[idx])
        return WritePlan(targets, refused)

    def _enter(self, chunk: Chunk) -> None:
        known = self._dirty.get(fingerprint(chunk.key))
        if known is not None and known.state is _State.WRITING:
            known.num_writes += 1
            return
        self.forget([chunk.key])  # an earlier copy that the tier has lost since
        self._next_number += 1
        self._dirty[fingerprint(chunk.key)] = _Entry(
            self._next_number, chunk.key, len(chunk.buffer), chunk.end_token, _State.WRITING
        )

    def plan_overflow(
        self,
        chunks: Sequence[Chunk],
        tier_idx: int,
        full: Sequence[int],
        answers: Sequence[Lookup],
        now_s: float,
    ) -> WritePlan:
        """Where to write what a tier had no room for, under write-back: below it.

        Args:
            chunks: of the write.
            tier_idx: the tier that was full.
            full: which chunks it refused.
            answers: what the tier below says about each of those.
            now_s: monotonic seconds.
        """
        if self._write_mode is not WriteMode.BACK or tier_idx + 1 >= len(self._admissions):
            return WritePlan({}, {})
        below = tier_idx + 1
        targets: dict[int, list[int]] = {}
        refused: dict[int, list[int]] = {}
        for idx, answer in zip(full, answers, strict=True):
            admitted = answer in _THERE or self._admits(
                below, chunks[idx].key, chunks[idx].end_token, now_s
            )
            (targets if admitted else refused).setdefault(below, []).append(idx)
        return WritePlan(targets, refused)

    def on_written(self, key: Key) -> None:
        """The uppermost tier has taken a chunk."""
        entry = self._dirty.get(fingerprint(key))
        if entry is not None and entry.state is _State.WRITING:
            entry.state = _State.DIRTY
            self._dirty_bytes += entry.size_bytes

    def on_not_written(self, key: Key) -> None:
        """The uppermost tier did not take a chunk; one that it had before stays as it is."""
        entry = self._dirty.get(fingerprint(key))
        if entry is not None and entry.state is _State.WRITING:
            entry.num_writes -= 1
            if not entry.num_writes:
                del self._dirty[fingerprint(key)]

    def _admits(self, tier_idx: int, key: Key, end_token: int, now_s: float) -> bool:
        admission = self._admissions[tier_idx]
        if admission is None:
            return True
        return admission.admit(fingerprint(key), end_token, self._pressure(tier_idx), now_s)

    # Demoting.

    def plan_demotions(
        self, budget_bytes: int, available: Sequence[bool], now_s: float
    ) -> list[Demotion]:
        """What to copy down now, the least recently used first.

        What would have to be copied and cannot, because no tier below is available, may be
        evicted: a tier that hangs must not fill the one above it with what nobody can move.

        Args:
            budget_bytes: what may be under way besides what is; one chunk is always allowed to
                a budget above zero.
            available: per tier whether it can be written to at present.
            now_s: monotonic seconds.
        """
        plans: list[Demotion] = []
        below = [tier_idx for tier_idx in range(1, len(self._admissions)) if available[tier_idx]]
        if self._dirty_bytes <= self._dirty_limit_bytes or (below and budget_bytes <= 0):
            return plans
        for entry in self._dirty.values():
            if self._dirty_bytes <= self._dirty_limit_bytes or (below and budget_bytes <= 0):
                break
            if entry.state is not _State.DIRTY:
                continue
            self._dirty_bytes -= entry.size_bytes
            targets = tuple(
                tier_idx
                for tier_idx in below
                if self._admits(tier_idx, entry.key, entry.end_token, now_s)
            )
            entry.state = _State.DEMOTING
            budget_bytes -= entry.size_bytes if targets else 0
            why = Reason.NONE
            if not targets:
                why = Reason.NOT_ADMITTED if below else Reason.BREAKER
            plans.append(
                Demotion(entry.number, entry.key, entry.size_bytes, entry.end_token, targets, why)
            )
        return plans

    def plan_flush(self) -> None:
        """From now on demote all there is: the store is about to be closed."""
        self._dirty_limit_bytes = -1

    def on_demoted(self, demotion: Demotion) -> None:
        """A demotion ended, well or not: nothing more will be tried for this chunk."""
        entry = self._dirty.get(fingerprint(demotion.key))
        if entry is not None and entry.number == demotion.number:
            del self._dirty[fingerprint(demotion.key)]

    # Using and losing.

    def plan_promotion(self, chunks: Sequence[Chunk], now_s: float) -> list[bool]:
        """Which of the chunks that a lower tier has just served are to be copied up.

        Where the uppermost tier wears out, its admission decides as well.
        """
        wanted = self._promotes([chunk.key for chunk in chunks])
        return [
            wants and self._admits(0, chunk.key, chunk.end_token, now_s)
            for wants, chunk in zip(wanted, chunks, strict=True)
        ]

    def _promotes(self, keys: Sequence[Key]) -> list[bool]:
        if self._promotion is not Promotion.SECOND_HIT:
            return [self._promotion is Promotion.ALWAYS] * len(keys)
        wanted = []
        for key in keys:
            tag = fingerprint(key)
            wanted.append(tag in self._seen)
            self._seen[tag] = None
            self._seen.move_to_end(tag)
            if len(self._seen) > _SEEN_TAGS:
                self._seen.popitem(last=False)
        return wanted

    def on_served(self, tier_idx: int, keys: Sequence[Key], now_s: float) -> None:
        """A tier served chunks."""
        admission = self._admissions[tier_idx]
        for key in reversed(keys):  # the first of the prefix is to be demoted last
            tag = fingerprint(key)
            if admission is not None:
                admission.on_read(tag, now_s)
            if tag in self._dirty:
                self._dirty.move_to_end(tag)

    def on_touched(self, prefix: Sequence[Key]) -> None:
        """Chunks were used without being read; in prefix order."""
        for key in reversed(prefix):
            tag = fingerprint(key)
            if tag in self._dirty:
                self._dirty.move_to_end(tag)

    def on_evicted(self, tier_idx: int, tag: int, now_s: float) -> None:
        """A chunk, by its fingerprint, left a tier to make room."""
        admission = self._admissions[tier_idx]
        if admission is not None:
            admission.on_evicted(tag, now_s)

    def forget(self, keys: Sequence[Key]) -> None:
        """Chunks were invalidated."""
        for key in keys:
            entry = self._dirty.pop(fingerprint(key), None)
            if entry is not None and entry.state is _State.DIRTY:
                self._dirty_bytes -= entry.size_bytes
