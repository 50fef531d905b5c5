"""The host tier: chunks in DRAM, checked like everything below the primary."""

import threading
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from stepwell.core.keys import Key
from stepwell.core.record import payload_checksum
from stepwell.core.types import (
    Chunk,
    ChunkResult,
    Lookup,
    Outcome,
    Reason,
)
from stepwell.tiers.base import TierContext
from stepwell.tiers.index import ChunkIndex, Reserve
from stepwell.tiers.outcomes import ALREADY_THERE, DONE, NO_ROOM
from stepwell.tiers.threaded import ThreadedTier

__all__ = ["HostTier"]


@dataclass(frozen=True, slots=True)
class _Stored:
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
    """

    name: ClassVar[str] = "host"

    def __init__(
        self,
        capacity_bytes: int,
        context: TierContext,
        *,
        num_threads: int = 2,
        inflight_writes_bytes: int = 4 << 30,
    ) -> None:
        self._lock = threading.Lock()
        self._stored: dict[Key, _Stored] = {}
        super().__init__(ChunkIndex(capacity_bytes), context, num_threads, inflight_writes_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes that the tier takes."""
        return self._index.used_bytes

    def close(self) -> None:
        """See `stepwell.tiers.base.Tier.close`."""
        super().close()
        with self._lock:
            self._stored.clear()

    def _read(self, chunk: Chunk) -> ChunkResult:
        with self._lock:
            stored = self._stored.get(chunk.key)
        if stored is None or self._index.states([chunk.key])[0] is not Lookup.HIT:
            return ChunkResult(Outcome.MISS, Reason.ABSENT)
        if len(stored.payload) != len(chunk.buffer):
            return ChunkResult(Outcome.MISS, Reason.LAYOUT)
        np.copyto(np.frombuffer(chunk.buffer, np.uint8), stored.payload)
        # The destination is hashed, not the source, so that the copy is covered as well.
        if payload_checksum(chunk.buffer) != stored.checksum:
            if self._index.remove(chunk.key):
                self._discard(chunk.key)
            self._context.metrics.add("quarantined_chunks", (self.name, Reason.CHECKSUM))
            return ChunkResult(Outcome.MISS, Reason.CHECKSUM)
        return DONE

    def _write(self, chunk: Chunk) -> ChunkResult:
        while (answer := self._index.reserve(chunk.key, len(chunk.buffer))) is Reserve.NO_ROOM:
            victim = self._index.take_victim(self._context.leases.held)
            if victim is None:
                return NO_ROOM
            self._discard(victim)
            self._context.metrics.add("evicted_chunks", (self.name,))
        if answer is Reserve.EXISTS:
            return ALREADY_THERE
        if answer is not Reserve.RESERVED:
            return NO_ROOM
        stored = False
        try:
            # The source is hashed, not the copy, so that the copy is covered as well.
            checksum = payload_checksum(chunk.buffer)
            payload = np.empty(len(chunk.buffer), np.uint8)
            np.copyto(payload, np.frombuffer(chunk.buffer, np.uint8))
            with self._lock:
                self._stored[chunk.key] = _Stored(payload, checksum)
            stored = True
        finally:
            if not stored:
                self._index.abort(chunk.key)
            elif not self._index.commit(chunk.key):
                self._discard(chunk.key)
        return DONE

    def _discard(self, leaving: Key) -> bool:
        with self._lock:
            self._stored.pop(leaving, None)
        self._index.freed(leaving)
        return True
