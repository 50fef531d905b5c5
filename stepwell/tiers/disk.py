"""The disk tier: one file per record in a directory that one process owns.

Bounded by a capacity and by a floor of free space; every read is verified; a record appears
whole, by rename, or not at all; everything is found again after a restart.
"""

import contextlib
import errno
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from stepwell.core.keys import Key, Root, root_of
from stepwell.core.record import Header, payload_checksum, record_bytes, verify
from stepwell.core.types import (
    Chunk,
    ChunkResult,
    Lookup,
    Outcome,
    Reason,
)
from stepwell.errors import ConfigError, DataError
from stepwell.settings import format_bytes
from stepwell.tiers.base import TierContext
from stepwell.tiers.blockio import probe_direct, read_record, write_record
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.files import remove_tree, tree_bytes
from stepwell.tiers.index import ChunkIndex, Reserve
from stepwell.tiers.outcomes import (
    ALREADY_THERE,
    DONE,
    NO_ROOM,
    write_refusal,
)
from stepwell.tiers.threaded import ThreadedTier

__all__ = ["DiskTier"]

logger = logging.getLogger(__name__)

# A record's file time is its place in the order of use after a restart. Renewing it at every
# read would cost a metadata write each; once a minute is as much order as a restart needs.
_TOUCH_EVERY_S = 60.0

_NOT_A_FILE = frozenset({errno.EISDIR, errno.ELOOP, errno.ESPIPE, errno.ENXIO})


class DiskTier(ThreadedTier):
    """Records in a directory of a local file system.

    Threading, Ownership, Errors, Cost: as `stepwell.tiers.base.Tier` states. Opening scans the
    directory by names and blocks meanwhile.

    Crash: nothing is synced, on purpose: a record that a power cut tore fails its checksum and
    is a miss. A SIGKILL loses what was in flight.

    Args:
        path: absolute; created if missing; owned by one process at a time.
        capacity_bytes: what records and quarantine may take together.
        min_free_bytes: free space that is left on the file system, whoever uses it up.
        context: shared by the store's tiers.
        num_threads: that read and write.
        inflight_writes_bytes: writes beyond this are refused.

    Raises:
        ConfigError: the path cannot be used, or the capacity does not fit the file system.
    """

    name: ClassVar[str] = "disk"

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        context: TierContext,
        *,
        min_free_bytes: int = 0,
        num_threads: int = 8,
        inflight_writes_bytes: int = 4 << 30,
    ) -> None:
        self._context = context
        self._min_free_bytes = min_free_bytes
        self._check_size(path, capacity_bytes, min_free_bytes)  # before anything is created
        self._directory = StoreDirectory(path)
        self._directory.open()
        started = False
        try:
            self._start(context, capacity_bytes, num_threads, inflight_writes_bytes)
            started = True
        except OSError as error:
            raise ConfigError(f"path cannot be written ({error.strerror}): path={path}") from error
        finally:
            if not started:
                self._directory.close()  # or the next try would be refused by this process
        if not self._direct:
            logger.warning(
                "O_DIRECT does not work here, going through the page cache: path=%s", path
            )

    def _start(
        self,
        context: TierContext,
        capacity_bytes: int,
        num_threads: int,
        inflight_writes_bytes: int,
    ) -> None:
        self._direct = probe_direct(self._directory.partial)
        self._admit_lock = threading.Lock()  # held while a write asks for room
        self._room_lock = threading.Lock()  # held for the sum of index and quarantine; no I/O
        self._quarantine: deque[tuple[str, int]] = deque()
        self._quarantine_bytes = 0
        self._stuck: deque[Key] = deque()  # leaving, but the file could not be removed yet
        self._used_at_s: dict[Key, float] = {}
        self._described: set[Root] = set()
        index = self._index = ChunkIndex(capacity_bytes)
        self._adopt()
        super().__init__(index, context, num_threads, inflight_writes_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of records and of what is set aside."""
        with self._room_lock:
            return self._index.used_bytes + self._quarantine_bytes

    @property
    def direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        return self._direct

    def __len__(self) -> int:
        return len(self._index)

    def close(self) -> None:
        """See `stepwell.tiers.base.Tier.close`."""
        super().close()
        self._directory.close()

    # Start-up.

    def _check_size(self, path: Path, capacity_bytes: int, min_free_bytes: int) -> None:
        try:
            existing = next(folder for folder in (path, *path.parents) if folder.exists())
            status = os.statvfs(existing)
        except OSError:
            return  # opening will say what is wrong
        total_bytes = status.f_blocks * status.f_frsize
        # /proc and the like have no size; opening will say what is wrong with those.
        if 0 < total_bytes < capacity_bytes + min_free_bytes:
            raise ConfigError(
                f"capacity and min_free together are larger than the file system "
                f"({format_bytes(total_bytes)}): path={path} "
                f"capacity={format_bytes(capacity_bytes)} min_free={format_bytes(min_free_bytes)}"
            )

    def _adopt(self) -> None:
        roots = set()
        for found in sorted(self._directory.scan(), key=lambda record: record.used_at_s):
            if found.path != self._directory.record_path(found.key):
                self._directory.set_aside(found.path, Reason.IDENTITY)  # moved by hand
                continue
            self._index.adopt(found.key, found.size_bytes)
            self._used_at_s[found.key] = found.used_at_s
            roots.add(root_of(found.key))
        for root in self._directory.identities().keys() - roots:
            self._directory.prune(root)
        for path, size_bytes, _ in self._directory.quarantined():
            self._quarantine.append((path, size_bytes))
            self._quarantine_bytes += size_bytes
        # The capacity may have been lowered since.
        while self.used_bytes > self._index.capacity_bytes:
            if self._free_something() is None:
                break

    # Jobs; on the runner's threads.

    def use(self, prefix: Sequence[Key]) -> Sequence[bool]:
        """See `stepwell.tiers.jobs.Work.use`. The files' times follow behind the report."""
        found = self._index.touch(prefix)
        now_s = self._context.clock.wall()
        # A microsecond apart, so that after a restart too the end leaves first.
        times = [
            (key, now_s - depth * 1e-6)
            for depth, (key, here) in enumerate(zip(prefix, found, strict=True))
            if here and not 0 <= now_s - self._used_at_s.get(key, 0.0) < _TOUCH_EVERY_S
        ]
        if times:
            self._used_at_s.update(times)
            self._runner.run_soon(lambda: self._renew(times))
        return found

    def _read(self, chunk: Chunk) -> ChunkResult:
        if self._index.states([chunk.key])[0] is not Lookup.HIT:
            return ChunkResult(Outcome.MISS, Reason.ABSENT)
        path = self._directory.record_path(chunk.key)
        try:
            page = read_record(path, chunk.buffer, direct=self._direct)
            now_us = int(self._context.clock.wall() * 1e6)
            verify(Header.unpack(page), chunk.buffer, chunk.key, now_us)
        except DataError as error:
            reason = Reason(error.reason)
            if reason is Reason.EXPIRED:
                if self._index.remove(chunk.key):
                    self._discard(chunk.key)
            else:
                self._set_aside(chunk.key, path, reason, str(error))
            return ChunkResult(Outcome.MISS, reason)
        except OSError as error:
            return self._read_failed(chunk.key, path, error)
        return DONE

    def _read_failed(self, key: Key, path: str, error: OSError) -> ChunkResult:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            if self._index.remove(key):
                self._discard(key)  # a write may have brought it back meanwhile
            return ChunkResult(Outcome.MISS, Reason.VANISHED)
        if error.errno in _NOT_A_FILE or _is_something_else(path):
            self._set_aside(key, path, Reason.NOT_A_FILE, str(error))
            return ChunkResult(Outcome.MISS, Reason.NOT_A_FILE)
        logger.warning("a read failed: path=%s error=%s", path, error)
        return ChunkResult(Outcome.FAILED, Reason.IO_ERROR)

    def _write(self, chunk: Chunk) -> ChunkResult:
        refusal = self._make_room(chunk.key, record_bytes(len(chunk.buffer)))
        if refusal is not None:
            return refusal
        path = self._directory.record_path(chunk.key)
        partial = self._directory.partial_path()
        stored = False
        try:
            header = Header(
                chunk.key,
                len(chunk.buffer),
                payload_checksum(chunk.buffer),
                int(self._context.clock.wall() * 1e6),
                0,
                chunk.end_token,
            ).pack()
            self._write_file(partial, path, header, chunk)
            stored = True
        except OSError as error:
            refusal = write_refusal(error)
            if refusal.outcome is Outcome.FAILED:
                logger.warning("a write failed: path=%s error=%s", path, error)
            return refusal
        finally:
            if not stored:
                self._index.abort(chunk.key)
            elif not self._index.commit(chunk.key):
                self._discard(chunk.key)  # deleted while it was being written
        return DONE

    def _write_file(self, partial: str, path: str, header: bytes, chunk: Chunk) -> None:
        try:
            root = root_of(chunk.key)
            # Once per root and process, since its description may be gone; and whenever LOCK is
            # no longer the one we hold, since another process may own the store now.
            if root not in self._described or not self._directory.owned():
                self._directory.make_parents(path, self._context.registry.get(root))
                self._described.add(root)
            try:
                write_record(partial, header, chunk.buffer, direct=self._direct)
                os.replace(partial, path)
            except (FileNotFoundError, IsADirectoryError):
                # The first record of its directory, a directory that somebody removed, or
                # something in the record's place that the index does not know of.
                if os.path.isdir(path):
                    self._keep(self._directory.set_aside(path, Reason.NOT_A_FILE))
                self._directory.make_parents(path, self._context.registry.get(root))
                if not os.path.exists(partial):
                    write_record(partial, header, chunk.buffer, direct=self._direct)
                os.replace(partial, path)
        except OSError:
            if not self._remove(partial):
                self._keep(partial)
            raise

    # Room.

    def _make_room(self, key: Key, size_bytes: int) -> ChunkResult | None:
        """Reserve room, evicting if need be; None if reserved, else the chunk's result."""
        if self._index.states([key])[0] is not Lookup.MISS:
            return ALREADY_THERE
        self._retry_stuck()
        freed_bytes, wanted_bytes = 0, 0
        while True:
            with self._admit_lock:
                # In one step, or several threads would each take the same free space.
                missing_bytes = self._missing_free_bytes(size_bytes)
                short_of_free = missing_bytes > 0
                answer = Reserve.NO_ROOM if short_of_free else self._reserve(key, size_bytes)
            wanted_bytes = max(wanted_bytes, missing_bytes)
            if short_of_free and (missing_bytes > self.used_bytes or freed_bytes > wanted_bytes):
                # Evicting must help, or the cache would be emptied for nothing: everything must
                # suffice, and what was evicted show. Some file systems free space later.
                return ChunkResult(Outcome.FULL, Reason.MIN_FREE)
            match answer:
                case Reserve.RESERVED:
                    return None
                case Reserve.EXISTS:
                    return ALREADY_THERE
                case Reserve.NEVER | Reserve.LEAVING:
                    return NO_ROOM
                case Reserve.NO_ROOM:
                    freed = self._free_something()
                    if freed is None:
                        reason = Reason.MIN_FREE if short_of_free else Reason.CAPACITY
                        return ChunkResult(Outcome.FULL, reason)
                    # What leaves for the capacity's sake says nothing about free space.
                    freed_bytes += freed if short_of_free else 0

    def _reserve(self, key: Key, size_bytes: int) -> Reserve:
        # The quarantine counts as well: it is the first to go.
        with self._room_lock:
            used_bytes = self._index.used_bytes + self._quarantine_bytes
            if self._quarantine_bytes and used_bytes + size_bytes > self._index.capacity_bytes:
                return Reserve.NO_ROOM
            return self._index.reserve(key, size_bytes)

    def _missing_free_bytes(self, size_bytes: int) -> int:
        """Bytes that must become free before a record may be written; none if <= 0."""
        try:
            status = os.statvfs(self._directory.path)
        except OSError:
            return 0  # the write itself will say what is wrong
        # What is being written may not have reached the file system yet.
        wanted_bytes = self._min_free_bytes + self._index.writing_bytes + size_bytes
        return wanted_bytes - status.f_bavail * status.f_frsize

    def _free_something(self) -> int | None:
        """Remove the next thing to go; returns its bytes, None if nothing can go."""
        with self._room_lock:
            aside = self._quarantine.popleft() if self._quarantine else None
        if aside is not None:
            removed = self._remove(aside[0])
            with self._room_lock:
                if removed:
                    self._quarantine_bytes -= aside[1]
                else:
                    self._quarantine.append(aside)
            if removed:
                return aside[1]
        victim = self._index.take_victim(self._context.leases.held)
        if victim is None:
            return None
        if not self._remove(self._directory.record_path(victim)):
            self._index.restore(victim)  # still there, still good, still counted
            return None
        size_bytes = self._gone(victim)
        self._context.metrics.add("evicted_chunks", (self.name,))
        return size_bytes

    def _remove(self, path: str) -> bool:
        try:
            remove_tree(path)
        except OSError as error:
            logger.warning("cannot remove: path=%s error=%s", path, error)
            return False
        return True

    def _discard(self, leaving: Key) -> bool:
        if self._remove(self._directory.record_path(leaving)):
            self._gone(leaving)
            return True
        self._stuck.append(leaving)  # its bytes count until a later try succeeds
        return False

    def _retry_stuck(self) -> None:
        with contextlib.suppress(IndexError):  # the last one is gone
            while self._discard(self._stuck.popleft()):
                pass

    def _gone(self, key: Key) -> int:
        self._used_at_s.pop(key, None)
        return self._index.freed(key)

    def _set_aside(self, key: Key, path: str, reason: Reason, error: str) -> None:
        if not self._index.remove(key):
            return  # somebody else saw it first
        logger.warning(
            "a record is wrong and was set aside: reason=%s path=%s error=%s", reason, path, error
        )
        self._context.metrics.add("quarantined_chunks", (self.name, reason))
        target = self._directory.set_aside(path, reason)
        if target is None:
            self._discard(key)
        else:
            self._keep(target, instead_of=key)

    def _keep(self, path: str | None, instead_of: Key | None = None) -> None:
        if path is None:
            return
        size_bytes = tree_bytes(path)
        with self._room_lock:
            self._quarantine.append((path, size_bytes))
            self._quarantine_bytes += size_bytes
            if instead_of is not None:
                self._gone(instead_of)  # in one step, so that nothing is counted twice

    def _renew(self, times: Sequence[tuple[Key, float]]) -> None:
        for key, used_at_s in times:
            if self._used_at_s.get(key) != used_at_s:
                continue  # used again since, or gone
            # If it fails, the order after a restart is a little older, nothing else.
            with contextlib.suppress(OSError):
                os.utime(self._directory.record_path(key), (used_at_s, used_at_s))
            if self._index.states([key])[0] is Lookup.MISS:
                self._used_at_s.pop(key, None)  # it left meanwhile


def _is_something_else(path: str) -> bool:
    """Whether what lies at ``path`` is there and is no regular file."""
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False
