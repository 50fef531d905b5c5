"""The host tier: chunks in DRAM, checked like everything below the primary."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepwell.core.keys import Key, fingerprint
from stepwell.core.record import payload_checksum
from stepwell.core.types import (
    Chunk,
    ChunkResult,
    Direction,
    Lookup,
    Outcome,
    Reason,
)
from stepwell.policy.eviction import make_policy
from stepwell.tiers.base import TierContext
from stepwell.tiers.jobs import JobRunner
from stepwell.tiers.outcomes import ALREADY_THERE, DONE, NO_ROOM
from stepwell.tiers.table import ChunkTable, State
from stepwell.tiers.threaded import ThreadedTier

__all__ = ["HostTier"]

_ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)


@dataclass(frozen=True, slots=True)
class _Stored:
    key: Key
    payload: npt.NDArray[np.uint8]
    checksum: bytes


class HostTier(ThreadedTier):
    """Chunks in DRAM, at most ``capacity_bytes`` of payload.

    Threading, Ownership, Errors, Cost: as `stepwell.tiers.base.Tier` states. Payloads are
    copied and hashed on the tier's own threads.

    Args:
        capacity_bytes: > 0.
        context: shared by the store's tiers.
        num_threads: that copy.
        inflight_writes_bytes: writes beyond this are refused.
        policy: name of the eviction policy.
        ttl_s: how long a chunk stays valid after it was written; 0 for ever.
        keeps: whether a chunk, by its fingerprint, must not be evicted, leases apart.
        on_evicted: told the fingerprint of every chunk that left to make room; on any thread, so
            it does next to nothing.
    """

    name = "host"

    def __init__(
        self,
        capacity_bytes: int,
        context: TierContext,
        *,
        num_threads: int = 2,
        inflight_writes_bytes: int = 4 << 30,
        policy: str = "leaf-first-lru",
        ttl_s: float = 0.0,
        keeps: Callable[[int], bool] = lambda tag: False,
        on_evicted: Callable[[int], object] = lambda tag: None,
    ) -> None:
        self._on_evicted = on_evicted
        self.capacity_bytes = capacity_bytes
        self._context = context
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._table = ChunkTable(
            make_policy(policy), lambda tag: keeps(tag) or context.leases.held_tag(tag)
        )
        self._stored: dict[int, _Stored] = {}  # by row
        # Memory of chunks that left, by length: taken again rather than faulted in anew.
        self._spare: dict[int, list[npt.NDArray[np.uint8]]] = {}
        self._spare_bytes = 0
        self._runner = JobRunner(self, num_threads, context, inflight_writes_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes that the chunks take."""
        return self._table.used_bytes

    def __len__(self) -> int:
        return len(self._table)

    def contains(self, keys: Sequence[Key]) -> list[Lookup]:
        """See `stepwell.tiers.base.Tier.contains`."""
        return self._table.states(keys, self._context.wall_s())

    def delete(self, keys: Sequence[Key]) -> int:
        """See `stepwell.tiers.base.Tier.delete`."""
        count = 0
        with self._lock:
            for key in keys:
                row = self._table.find(fingerprint(key))
                if row is not None:
                    count += 1
                    self._remove(row)
        return count

    def close(self) -> None:
        """See `stepwell.tiers.base.Tier.close`."""
        self._runner.close()
        with self._lock:
            self._stored.clear()
            self._spare.clear()

    def run_batch(
        self, direction: Direction, chunks: Sequence[Chunk], within_s: float
    ) -> Sequence[ChunkResult]:
        """See `stepwell.tiers.jobs.Work.run_batch`; what has begun is not stopped."""
        one = self._read if direction is Direction.READ else self._write
        return [one(chunk) for chunk in chunks]

    def use(self, prefix: Sequence[Key]) -> Sequence[bool]:
        """See `stepwell.tiers.jobs.Work.use`."""
        with self._lock:
            rows = [self._table.find(fingerprint(key)) for key in prefix]
            present = [
                row for row in rows if row is not None and self._table.state(row) is State.PRESENT
            ]
            self._table.touch(present, self._context.wall_s())
            here = set(present)
            return [row in here for row in rows]

    def settle(self) -> None:
        """See `stepwell.tiers.jobs.Work.settle`."""

    def _read(self, chunk: Chunk) -> ChunkResult:
        with self._lock:
            row = self._table.find(fingerprint(chunk.key))
            if row is None or self._table.state(row) is not State.PRESENT:
                return _ABSENT
            if self._table.expired(row, self._context.wall_s()):
                self._remove(row)
                return ChunkResult(Outcome.MISS, Reason.EXPIRED)
            self._table.begin_read(row)
            stored = self._stored[row]
            expires_at_s = self._table.expires_at_s(row)
        result = ChunkResult(Outcome.DONE, Reason.NONE, expires_at_s)
        try:
            if stored.key != chunk.key:
                result = ChunkResult(Outcome.MISS, Reason.IDENTITY)
            elif len(stored.payload) != len(chunk.buffer):
                result = ChunkResult(Outcome.MISS, Reason.LAYOUT)
            else:
                np.copyto(np.frombuffer(chunk.buffer, np.uint8), stored.payload)
                # The destination is hashed, not the source, so that the copy is covered as well.
                if payload_checksum(chunk.buffer) != stored.checksum:
                    result = ChunkResult(Outcome.MISS, Reason.CHECKSUM)
        finally:
            with self._lock:
                wrong = result.reason is Reason.CHECKSUM
                if wrong and self._table.state(row) is State.PRESENT:
                    self._table.remove(row)
                    self._context.metrics.add("quarantined_chunks", (self.name, result.reason))
                if self._table.end_read(row):
                    self._freed(row)
        return result

    def _write(self, chunk: Chunk) -> ChunkResult:
        row = self._begin(chunk)
        if isinstance(row, ChunkResult):
            return row
        stored = None
        try:
            payload = self._memory(len(chunk.buffer))
            # The source is hashed, not the copy, so that the copy is covered as well.
            checksum = payload_checksum(chunk.buffer)
            np.copyto(payload, np.frombuffer(chunk.buffer, np.uint8))
            stored = _Stored(chunk.key, payload, checksum)
        finally:
            with self._lock:
                if stored is None:
                    self._table.abort(row)
                else:
                    self._stored[row] = stored
                    now_s = self._context.wall_s()
                    expires_at_s = chunk.expires_at_s or (self._ttl_s and now_s + self._ttl_s)
                    if self._table.commit([row], now_s, [expires_at_s]) == [False]:
                        self._freed(row)  # deleted while it was being written
        return DONE

    def _begin(self, chunk: Chunk) -> int | ChunkResult:
        size_bytes = len(chunk.buffer)
        tag = fingerprint(chunk.key)
        if size_bytes > self.capacity_bytes:
            return NO_ROOM
        with self._lock:
            row = self._table.find(tag)
            if row is not None and self._table.expired(row, self._context.wall_s()):
                self._remove(row)
                row = self._table.find(tag)
            if row is not None:
                return ALREADY_THERE
            while self._table.used_bytes + size_bytes > self.capacity_bytes:
                victim = self._table.take_victim()
                if victim is None:
                    return NO_ROOM
                self._on_evicted(self._table.tag(victim))
                self._freed(victim)
                self._context.metrics.add("evicted_chunks", (self.name, "capacity"))
            return self._table.begin(tag, size_bytes, 0)

    def _memory(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        with self._lock:
            spare = self._spare.get(size_bytes)
            if spare:
                self._spare_bytes -= size_bytes
                return spare.pop()
            # What is kept beside the chunks must not take more than the capacity allows.
            while self._spare and self._table.used_bytes + self._spare_bytes > self.capacity_bytes:
                other_bytes, others = next(iter(self._spare.items()))
                if others:
                    others.pop()
                    self._spare_bytes -= other_bytes
                if not others:
                    del self._spare[other_bytes]
        return np.empty(size_bytes, np.uint8)

    def _remove(self, row: int) -> None:
        if self._table.remove(row):
            self._freed(row)

    def _freed(self, row: int) -> None:
        stored = self._stored.pop(row, None)
        self._table.freed(row)
        if stored is not None:
            self._spare.setdefault(len(stored.payload), []).append(stored.payload)
            self._spare_bytes += len(stored.payload)
