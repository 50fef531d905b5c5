"""The disk tier: records to and from the slots of one drive.

Bounded by a capacity and by a floor of free space; every read is verified; everything is found
again after a restart. `stepwell.tiers.drive` is the drive.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stepwell.core.keys import Key, root_of
from stepwell.core.record import Header, payload_checksum, record_bytes
from stepwell.core.types import (
    Chunk,
    ChunkResult,
    Direction,
    Lookup,
    Outcome,
    Reason,
)
from stepwell.policy.endurance import EnduranceState
from stepwell.tiers.base import TierContext
from stepwell.tiers.blockio import MAX_RUN
from stepwell.tiers.drive import Drive
from stepwell.tiers.jobs import JobRunner
from stepwell.tiers.ledger import Evicted
from stepwell.tiers.outcomes import (
    ALREADY_THERE,
    DONE,
    FAILED,
    read_failure,
    verdict,
    write_refusal,
)
from stepwell.tiers.slots import BOOKKEEPING_BYTES
from stepwell.tiers.threaded import ThreadedTier

__all__ = ["DiskTier", "slot_cost_bytes"]

logger = logging.getLogger(__name__)

# Neighbouring slots to read or write: place, row, index of the chunk.
_Entry = tuple[int, int, int]

_MAX_FAILED_PLACES = 4096
# So many in a row that cannot be read: it is the drive, and not some sectors of it.
_FAILURES_TO_STOP = 3
_NOT_TRIED = ChunkResult(Outcome.FAILED, Reason.IO_ERROR)  # behind those: looks like them outside


def slot_cost_bytes(payload_bytes: int) -> int:
    """Bytes of the capacity that a chunk takes: its record, and room for its journal entries."""
    return record_bytes(payload_bytes) + BOOKKEEPING_BYTES


class DiskTier(ThreadedTier):
    """Records in slots of preallocated extents, in a directory of a local file system.

    Threading, Ownership, Errors, Cost: as `stepwell.tiers.base.Tier` states. Opening reads the
    journal, or where that is lost every record's header, and blocks meanwhile.

    Crash: nothing is synced, on purpose: a record that a power cut tore fails its checksum and
    is a miss. A SIGKILL loses what was in flight.

    Args:
        path: absolute; created if missing; owned by one process at a time.
        capacity_bytes: what extents and journal may take together.
        context: shared by the store's tiers.
        min_free_bytes: free space that is left on the file system, whoever uses it up.
        num_threads: that read and write.
        inflight_writes_bytes: writes beyond this are refused.
        policy: name of the eviction policy.
        ttl_s: how long a chunk stays valid after it was written; 0 for ever.
        drive_writes_per_day: what may be written per day, in sizes of the drive; 0: no limit.
        name: for metrics and reports.
        on_evicted: told the fingerprint of every chunk that left to make room; on any thread, so
            it does next to nothing.

    Raises:
        ConfigError: the path cannot be used, or the capacity does not fit the file system.
    """

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        context: TierContext,
        *,
        min_free_bytes: int = 0,
        num_threads: int = 8,
        inflight_writes_bytes: int = 4 << 30,
        policy: str = "leaf-first-lru",
        ttl_s: float = 0.0,
        drive_writes_per_day: float = 0.0,
        name: str = "disk",
        on_evicted: Callable[[int], object] = lambda tag: None,
    ) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._context = context
        self._ttl_s = ttl_s
        self._on_evicted = on_evicted
        self._closed = False
        self._num_served = 0
        self._failed_at: dict[int, int] = {}  # unreadable place -> number served by then
        self._drive = Drive(
            path,
            capacity_bytes,
            context,
            min_free_bytes=min_free_bytes,
            policy=policy,
            drive_writes_per_day=drive_writes_per_day,
            on_evicted=self._note_evicted,
        )
        self._ledger = self._drive.ledger
        self._files = self._drive.files
        try:
            self._runner = JobRunner(self, num_threads, context, inflight_writes_bytes)
        except RuntimeError:
            self._drive.close()
            raise

    # The tier.

    def contains(self, keys: Sequence[Key]) -> list[Lookup]:
        """See `stepwell.tiers.base.Tier.contains`."""
        return self._ledger.contains(keys, self._context.wall_s())

    def delete(self, keys: Sequence[Key]) -> int:
        """See `stepwell.tiers.base.Tier.delete`."""
        count, discard = self._ledger.remove(keys)
        if discard:
            self._runner.run_soon(lambda: self._drive.discard(discard))
        return count

    def close(self) -> None:
        """See `stepwell.tiers.base.Tier.close`.

        Waits ten seconds for a drive that does not answer; then it leaves the files open and the
        directory owned, since what was begun may still reach them.
        """
        if self._closed:
            return
        if self._runner.close():
            self._closed = True
            self._drive.close()
        else:
            logger.warning("a drive does not answer and is left: path=%s", self._drive.path)

    # Numbers.

    @property
    def used_bytes(self) -> int:
        """What records take of the capacity, those set aside included."""
        return self._ledger.used_bytes

    @property
    def allocated_bytes(self) -> int:
        """What extents and journal take of the capacity, whether or not records lie in them."""
        return self._ledger.allocated_bytes

    @property
    def wear(self) -> EnduranceState:
        """See `stepwell.tiers.drive.Drive.wear`."""
        return self._drive.wear

    @property
    def pressure(self) -> float:
        """See `stepwell.tiers.drive.Drive.pressure`."""
        return self._drive.pressure

    @property
    def direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        return self._drive.direct

    def note_metrics(self, target: str) -> None:
        """See `stepwell.tiers.drive.Drive.note_metrics`."""
        self._drive.note_metrics(target)

    def __len__(self) -> int:
        return len(self._ledger)

    # Jobs; on the runner's threads.

    def run_batch(
        self, direction: Direction, chunks: Sequence[Chunk], within_s: float
    ) -> Sequence[ChunkResult]:
        """See `stepwell.tiers.jobs.Work.run_batch`; what has begun is not stopped."""
        return self._read(chunks) if direction is Direction.READ else self._write(chunks)

    def use(self, prefix: Sequence[Key]) -> Sequence[bool]:
        """See `stepwell.tiers.jobs.Work.use`."""
        return self._ledger.touch(prefix, self._context.wall_s())

    def settle(self) -> None:
        """See `stepwell.tiers.jobs.Work.settle`."""
        self._drive.settle()

    def _read(self, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        now_s = self._context.wall_s()
        found = self._ledger.begin_reads([chunk.key for chunk in chunks], now_s)
        results = [
            ChunkResult(Outcome.MISS, each) if isinstance(each, Reason) else DONE for each in found
        ]
        begun = sorted(
            (each[1], each[0], idx)
            for idx, each in enumerate(found)
            if not isinstance(each, Reason)
        )
        ended: list[tuple[int, Reason]] = []
        try:
            for run in _runs(begun):
                for idx, result in self._read_run(run, chunks, now_s):
                    results[idx] = result
        finally:
            for place, row, idx in begun:
                ended.append((row, self._what_is_wrong(place, results[idx])))
            discard, wrong_rows = self._ledger.end_reads(ended)
            if discard:
                self._drive.discard(discard)
        for (_, row, idx), (_, reason) in zip(begun, ended, strict=True):
            if reason and reason is not Reason.EXPIRED and row in wrong_rows:
                self._context.metrics.add("quarantined_chunks", (self.name, reason))
                logger.warning(
                    "a record is wrong and was set aside: reason=%s path=%s key=%s",
                    reason, self._drive.path, chunks[idx].key.hex(),
                )  # fmt: skip
        return results

    def _read_run(
        self, run: Sequence[_Entry], chunks: Sequence[Chunk], now_s: float
    ) -> list[tuple[int, ChunkResult]]:
        """Read neighbouring slots, given as (place, row, index of the chunk)."""
        slot_bytes = self._ledger.size_at(run[0][0])
        fitting = [
            entry for entry in run if record_bytes(len(chunks[entry[2]].buffer)) == slot_bytes
        ]
        if len(fitting) < len(run):
            # Another length than the record's: whoever asks or whoever wrote is wrong.
            results = [
                (entry[2], ChunkResult(Outcome.MISS, Reason.LAYOUT))
                for entry in run
                if entry not in fitting
            ]
            for part in _runs(fitting):
                results += self._read_run(part, chunks, now_s)
            return results
        wanted = [chunks[idx] for _, _, idx in run]
        try:
            pages = self._files.read(run[0][0], slot_bytes, [chunk.buffer for chunk in wanted])
        except OSError as error:
            if len(run) > 1:
                return self._read_singly(run, chunks, now_s)
            logger.warning("a read failed: path=%s error=%s", self._drive.path, error)
            return [(idx, read_failure(error)) for _, _, idx in run]
        return [
            (idx, verdict(page, chunk, int(now_s * 1e6)))
            for (_, _, idx), page, chunk in zip(run, pages, wanted, strict=True)
        ]

    def _read_singly(
        self, run: Sequence[_Entry], chunks: Sequence[Chunk], now_s: float
    ) -> list[tuple[int, ChunkResult]]:
        """One bad sector must not take its neighbours along."""
        results: list[tuple[int, ChunkResult]] = []
        failed_in_a_row = 0
        for entry in run:
            if failed_in_a_row == _FAILURES_TO_STOP:
                results.append((entry[2], _NOT_TRIED))
                continue
            ((idx, result),) = self._read_run([entry], chunks, now_s)
            failed_in_a_row = failed_in_a_row + 1 if result == FAILED else 0
            results.append((idx, result))
        return results

    def _what_is_wrong(self, place: int, result: ChunkResult) -> Reason:
        """Why a record is to be set aside; NONE if it is not."""
        if result.outcome is Outcome.DONE:
            self._num_served += 1
            if self._failed_at:
                self._failed_at.pop(place, None)
            return Reason.NONE
        if result.outcome is Outcome.MISS:
            return result.reason
        if result is _NOT_TRIED or result != FAILED:
            return Reason.NONE
        if len(self._failed_at) >= _MAX_FAILED_PLACES:
            self._failed_at.clear()
        if self._num_served > self._failed_at.setdefault(place, self._num_served):
            # Again, and meanwhile others could be read: it is this sector, and not the drive.
            self._failed_at.pop(place, None)
            return Reason.IO_ERROR
        return Reason.NONE

    def _forget_failures(self, run: Sequence[_Entry]) -> None:
        """What could not be read there is written over."""
        if self._failed_at:
            for place, _, _ in run:
                self._failed_at.pop(place, None)

    def _write(self, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        now_s = self._context.wall_s()
        results: list[ChunkResult] = [ALREADY_THERE] * len(chunks)
        absent = self._ledger.missing([chunk.key for chunk in chunks], now_s)
        by_size: dict[int, list[int]] = {}
        seen: set[Key] = set()
        for idx, (chunk, wanted) in enumerate(zip(chunks, absent, strict=True)):
            if wanted and chunk.key not in seen:
                seen.add(chunk.key)
                by_size.setdefault(record_bytes(len(chunk.buffer)), []).append(idx)
        if by_size:
            roots = {root_of(chunks[idx].key) for idxs in by_size.values() for idx in idxs}
            refusal = self._drive.mind_before_write(roots)
            if refusal is not None:
                return [refusal] * len(chunks)
        for slot_bytes, idxs in by_size.items():
            for idx, result in self._write_equal(slot_bytes, idxs, chunks, now_s):
                results[idx] = result
        self._drive.flush_journal()  # what is reported as done survives a kill
        return results

    def _write_equal(
        self,
        slot_bytes: int,
        idxs: Sequence[int],
        chunks: Sequence[Chunk],
        now_s: float,
    ) -> list[tuple[int, ChunkResult]]:
        """Write chunks of one record size."""
        places, refusal = self._drive.find_room(slot_bytes, len(idxs))
        results = [(idx, refusal) for idx in idxs[len(places) :]]
        begun = []
        for idx, place in zip(idxs, places, strict=False):
            row = self._ledger.begin(chunks[idx].key, place)
            if isinstance(row, ChunkResult):
                results.append((idx, row))
            else:
                begun.append((place, row, idx))
        ended: set[int] = set()
        try:
            # That a slot's former record is gone must be known before the slot is written over.
            self._drive.flush_journal()
            for run in _runs(begun):
                rows = [row for _, row, _ in run]
                result = self._write_run(run, slot_bytes, chunks, now_s)
                if result == DONE:
                    self._forget_failures(run)
                    expires_at_s = [self._expires_at_s(chunks[idx], now_s) for _, _, idx in run]
                    self._drive.discard(self._ledger.commit(rows, now_s, expires_at_s))
                else:
                    self._ledger.abort(rows, bad=result == FAILED)
                ended.update(rows)
                results += [(idx, result) for _, _, idx in run]
        finally:
            self._ledger.abort([row for _, row, _ in begun if row not in ended])
        return results

    def _write_run(
        self,
        run: Sequence[_Entry],
        slot_bytes: int,
        chunks: Sequence[Chunk],
        now_s: float,
    ) -> ChunkResult:
        """Write neighbouring slots, given as (place, row, index of the chunk)."""
        taken = [chunks[idx] for _, _, idx in run]
        headers = [
            Header(
                chunk.key,
                len(chunk.buffer),
                payload_checksum(chunk.buffer),
                int(now_s * 1e6),
                int(self._expires_at_s(chunk, now_s) * 1e6),
                chunk.end_token,
            ).pack()
            for chunk in taken
        ]
        try:
            self._files.write(run[0][0], slot_bytes, headers, [chunk.buffer for chunk in taken])
        except OSError as error:
            refusal = write_refusal(error)
            if refusal.outcome is Outcome.FAILED:
                logger.warning("a write failed: path=%s error=%s", self._drive.path, error)
            return refusal
        return DONE

    def _expires_at_s(self, chunk: Chunk, now_s: float) -> float:
        # A copy lives as long as what it was copied from.
        return chunk.expires_at_s or (now_s + self._ttl_s if self._ttl_s else 0.0)

    def _note_evicted(self, why: Evicted, tag: int) -> None:
        self._context.metrics.add("evicted_chunks", (self.name, why))
        self._on_evicted(tag)


def _runs(
    entries: Sequence[_Entry],
) -> Iterator[Sequence[_Entry]]:
    """Split entries, which begin with a place, where places are not neighbours."""
    begin = 0
    for idx in range(1, len(entries) + 1):
        if (
            idx == len(entries)
            or entries[idx][0] != entries[idx - 1][0] + 1
            or idx - begin == MAX_RUN
        ):
            yield entries[begin:idx]
            begin = idx
