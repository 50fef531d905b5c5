"""The host tier: chunks in DRAM, checked like everything below the primary."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepwell.core.keys import Key
from stepwell.core.record import payload_checksum
from stepwell.core.types import (
    Chunk,
    ChunkResult,
    Direction,
    Job,
    JobResult,
    Lookup,
    Outcome,
    Reason,
)
from stepwell.tiers.base import TierContext
from stepwell.tiers.index import ChunkIndex, Reserve
from stepwell.tiers.jobs import JobRunner
from stepwell.tiers.outcomes import ALREADY_THERE, DONE, NO_ROOM, count_result

__all__ = ["HostTier"]


@dataclass(frozen=True, slots=True)
class _Stored:
    payload: npt.NDArray[np.uint8]
    checksum: bytes


class HostTier:
    """Chunks in DRAM, at most ``capacity_bytes`` of payload.

    Threading, Ownership, Errors, Cost: as `stepwell.tiers.base.Tier` states. Payloads are
    copied and hashed on the tier's own threads.

    Args:
        capacity_bytes: > 0.
        context: shared by the store's tiers.
        num_threads: that copy.
        inflight_writes_bytes: writes beyond this are refused.
    """

    name = "host"

    def __init__(
        self,
        capacity_bytes: int,
        context: TierContext,
        *,
        num_threads: int = 2,
        inflight_writes_bytes: int = 1 << 30,
    ) -> None:
        self._index = ChunkIndex(capacity_bytes)
        self._context = context
        self._lock = threading.Lock()
        self._stored: dict[Key, _Stored] = {}
        self._runner = JobRunner(
            "stepwell-host",
            num_threads,
            self._run_chunk,
            self._touch,
            self._count,
            self._on_end,
            self.name,
            context.clock,
            inflight_writes_bytes,
        )

    @property
    def used_bytes(self) -> int:
        """Bytes that the tier takes."""
        return self._index.used_bytes

    def contains(self, keys: Sequence[Key]) -> list[Lookup]:
        """See `stepwell.tiers.base.Tier.contains`."""
        return self._index.states(keys)

    def submit(self, job: Job) -> None:
        """See `stepwell.tiers.base.Tier.submit`."""
        self._runner.submit(job)

    def poll(self) -> list[JobResult]:
        """See `stepwell.tiers.base.Tier.poll`."""
        return self._runner.poll()

    def delete(self, keys: Sequence[Key]) -> int:
        """See `stepwell.tiers.base.Tier.delete`."""
        return sum(self._drop(key) for key in keys)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is running; False if that took longer than ``timeout_s``."""
        return self._runner.drain(timeout_s)

    def close(self) -> None:
        """See `stepwell.tiers.base.Tier.close`."""
        self._runner.close()
        with self._lock:
            self._stored.clear()

    def _run_chunk(self, direction: Direction, chunk: Chunk) -> ChunkResult:
        return self._read(chunk) if direction is Direction.READ else self._write(chunk)

    def _touch(self, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        found = self._index.touch([chunk.key for chunk in chunks])
        return [DONE if here else ChunkResult(Outcome.MISS, Reason.ABSENT) for here in found]

    def _on_end(self, job: Job, results: Sequence[ChunkResult]) -> None:
        # Only the whole job knows the order of the prefix: its chunks end in any order.
        done = zip(job.chunks, results, strict=True)
        self._index.touch([chunk.key for chunk, r in done if r.outcome is Outcome.DONE])

    def _read(self, chunk: Chunk) -> ChunkResult:
        with self._lock:
            stored = self._stored.get(chunk.key)
        if stored is None:
            return ChunkResult(Outcome.MISS, Reason.ABSENT)
        if len(stored.payload) != len(chunk.buffer):
            return ChunkResult(Outcome.MISS, Reason.LAYOUT)
        np.copyto(np.frombuffer(chunk.buffer, np.uint8), stored.payload)
        # The destination is hashed, not the source, so that the copy is covered as well.
        if payload_checksum(chunk.buffer) != stored.checksum:
            self._drop(chunk.key)
            self._context.metrics.add("quarantined_chunks", (self.name, Reason.CHECKSUM))
            return ChunkResult(Outcome.MISS, Reason.CHECKSUM)
        return DONE

    def _write(self, chunk: Chunk) -> ChunkResult:
        while (answer := self._index.reserve(chunk.key, len(chunk.buffer))) is Reserve.NO_ROOM:
            victim = self._index.take_victim(self._context.leases.held)
            if victim is None:
                return NO_ROOM
            self._forget(victim)
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
            if stored:
                self._index.commit(chunk.key)
            else:
                self._index.abort(chunk.key)
        return DONE

    def _forget(self, key: Key) -> None:
        with self._lock:
            self._stored.pop(key, None)
        self._index.freed(key)

    def _drop(self, key: Key) -> bool:
        if not self._index.remove(key):
            return False
        self._forget(key)
        return True

    def _count(self, direction: Direction, chunk: Chunk, result: ChunkResult) -> None:
        count_result(self._context.metrics, self.name, direction, chunk, result)
