"""Leases: time-bounded rights to use chunks. A leased chunk is not evicted.

There are no reference counts: a lease that is never released runs out by itself.
"""

import heapq
import threading
from collections.abc import Callable, Iterable
from types import TracebackType

from stepwell.core.keys import Key, fingerprint

__all__ = ["Lease", "LeaseTable"]


class LeaseTable:
    """Which keys are leased until when.

    Args:
        now: monotonic seconds.

    Threading: any thread. Cost: one lock per call; `held` is a dictionary look-up.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._leases: dict[int, dict[int, float]] = {}  # by fingerprint
        self._tags: dict[int, tuple[int, ...]] = {}
        self._expiries: list[tuple[float, int]] = []
        self._next_id = 0

    def acquire(self, keys: Iterable[Key], ttl_s: float) -> "Lease":
        """Lease keys for ``ttl_s`` seconds (> 0), whether or not any tier holds them."""
        if ttl_s <= 0:
            raise ValueError(f"a lease lasts for some time: ttl_s={ttl_s}")
        names = tuple(keys)
        tags = tuple(fingerprint(key) for key in names)
        with self._lock:
            lease_id = self._next_id
            self._next_id += 1
            self._forget_expired()
            expires_s = self._now() + ttl_s
            self._tags[lease_id] = tags
            heapq.heappush(self._expiries, (expires_s, lease_id))
            for tag in tags:
                self._leases.setdefault(tag, {})[lease_id] = expires_s
        return Lease(self, lease_id, names, expires_s)

    def release(self, lease_id: int) -> None:
        """Give a lease back before it runs out; harmless if it has."""
        with self._lock:
            self._drop(lease_id)

    def held(self, key: Key) -> bool:
        """Whether any lease on ``key`` is running."""
        return self.held_tag(fingerprint(key))

    def held_tag(self, tag: int) -> bool:
        """The same for the fingerprint of a key (`stepwell.core.keys.fingerprint`)."""
        with self._lock:
            holders = self._leases.get(tag)
            if holders is None:
                return False
            now_s = self._now()
            return any(expires_s > now_s for expires_s in holders.values())

    def _forget_expired(self) -> None:
        # Every acquire cleans up after those that ran out, so that the table stays bounded by
        # the leases of one time-to-live even if nobody ever releases one.
        now_s = self._now()
        while self._expiries and self._expiries[0][0] <= now_s:
            self._drop(heapq.heappop(self._expiries)[1])
        if len(self._expiries) > 64 + 2 * len(self._tags):
            # Mostly of leases that were given back.
            self._expiries = [entry for entry in self._expiries if entry[1] in self._tags]
            heapq.heapify(self._expiries)

    def _drop(self, lease_id: int) -> None:
        for tag in self._tags.pop(lease_id, ()):
            holders = self._leases.get(tag)
            if holders is not None and holders.pop(lease_id, None) is not None and not holders:
                del self._leases[tag]


class Lease:
    """A running lease; a context manager that gives it back at the end.

    Attributes:
        keys: what is leased.
        expires_s: on the table's clock.
    """

    def __init__(
        self, table: LeaseTable, lease_id: int, keys: tuple[Key, ...], expires_s: float
    ) -> None:
        self._table = table
        self._lease_id = lease_id
        self.keys = keys
        self.expires_s = expires_s

    def release(self) -> None:
        """Give it back; may be called twice."""
        self._table.release(self._lease_id)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
