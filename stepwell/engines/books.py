"""The books of one request: what it asked for, what it got and why it did not get the rest."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stepwell.core.leases import Lease
from stepwell.core.types import Lookup, Reason
from stepwell.metrics import Metrics

__all__ = ["RequestBooks"]

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class RequestBooks(Generic[K]):
    """What became of the chunks of one request, by the engine's own keys.

    Every chunk that was asked for is in exactly one of the three: served, missed, unread.

    Attributes:
        misses: why a chunk was not served. ABSENT may still change, any other reason stays: a
            chunk whose read failed is not tried again for the same request.
        unread: chunks that were there and have not been read (yet).
        served: chunks that were read, and the tier that served them.
        leases: on what is being read and written.
        positions: of all chunks of the prompt, as the engine knows them.
        worth_tokens: position in the prompt up to which reading is worth it; None if undecided.
        waits_since_s: when a tier was first found not to know yet, monotonic seconds; None: never.
        group: index of the KV group by which tokens are counted and worth is decided; None
            before anything was asked.
    """

    misses: dict[K, Reason] = field(default_factory=dict)
    unread: set[K] = field(default_factory=set)
    served: dict[K, str] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    positions: Mapping[K, int] = field(default_factory=dict)
    worth_tokens: float | None = None
    waits_since_s: float | None = None
    group: int | None = None

    def may_ask(self, key: K) -> bool:
        """Whether asking again may have another answer than a miss."""
        return self.misses.get(key, Reason.ABSENT) is Reason.ABSENT

    def may_wait(self, now_s: float, patience_s: float) -> bool:
        """Whether the request may wait still for tiers to find out what they have."""
        return self.waits_since_s is None or now_s - self.waits_since_s < patience_s

    def unknown(self, key: K, now_s: float, patience_s: float) -> Lookup:
        """What to make of a chunk that a tier is finding out about.

        The request waits, but once, and not for long. What was known of a chunk before goes on
        to hold for it: a request that heads a long queue would ask again and again.

        Returns:
            HIT or MISS as before; UNKNOWN while it may wait; then MISS, for the deadline.
        """
        if key in self.unread:
            return Lookup.HIT
        if key in self.misses:
            return Lookup.MISS
        if self.waits_since_s is None:
            self.waits_since_s = now_s
        if self.may_wait(now_s, patience_s):
            return Lookup.UNKNOWN
        self.miss(key, Reason.DEADLINE)
        return Lookup.MISS

    def miss(self, key: K, reason: Reason) -> None:
        """Note that a chunk is not to be had."""
        self.unread.discard(key)
        if key not in self.served and self.may_ask(key):
            self.misses[key] = reason

    def hit(self, key: K) -> None:
        """Note that a chunk is there, unless it has been found not to be had."""
        if not self.may_ask(key):
            return
        self.misses.pop(key, None)
        if key not in self.served:
            self.unread.add(key)

    def serve(self, key: K, tier: str) -> None:
        """Note that a tier has read a chunk; too late if it was given up and computed."""
        if not self.may_ask(key):
            return
        self.unread.discard(key)
        self.misses.pop(key, None)
        self.served[key] = tier

    def give_back_leases(self) -> None:
        """Nothing of this request needs to stay any more."""
        for lease in self.leases:
            lease.release()
        self.leases.clear()

    def _answers(self) -> Iterator[tuple[K, str, str]]:
        for key, tier in self.served.items():
            yield key, tier, ""
        for key in self.unread:
            yield key, "", Reason.UNREAD
        for key, reason in self.misses.items():
            yield key, "", reason

    def count(self, metrics: Metrics, chunk_tokens: dict[K, int]) -> None:
        """Add the request to the counters.

        Args:
            metrics: where.
            chunk_tokens: how many tokens each chunk stands for; 0 for one that stands for tokens
                which another chunk counts already.
        """
        chunks: Counter[tuple[str, str]] = Counter()
        served: Counter[str] = Counter()
        missed: Counter[str] = Counter()
        for key, tier, reason in self._answers():
            chunks[(Lookup.HIT.value if tier else Lookup.MISS.value, reason)] += 1
            tokens = chunk_tokens.get(key, 0)
            if tier:
                served[tier] += tokens
            else:
                missed[reason] += tokens
        for labels, amount in chunks.items():
            metrics.add("lookups", labels, amount)
        asked = sum(served.values()) + sum(missed.values())
        if asked:
            metrics.add("asked_tokens", (), asked)
        for tier, amount in served.items():
            if amount:
                metrics.add("served_tokens", (tier,), amount)
        for reason, amount in missed.items():
            if amount:
                metrics.add("missed_tokens", (reason,), amount)
