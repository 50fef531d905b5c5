"""Who empties a pool: the one member that sweeps, and what it does.

The sweeper of the highest epoch is the one. A member that finds its lease over begins the next
epoch, which the file system lets one alone do, and then ends the earlier ones
(`PoolFiles.fence`). All that a sweeper does to others it does through its own folder: it evicts a
record by moving it there, and grants by telling its books there. So one that was stopped in the
middle, at whatever point, and wakes up, evicts nothing and grants nothing.

Ages of files are by the file system's clock, as it stamps files. Whether somebody is there is by
what changes while this process watches; no two hosts' clocks are compared.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from stepwell.errors import ConfigError
from stepwell.tiers.errnos import GONE, NO_ROOM_LEFT, VANISHED
from stepwell.tiers.media.books import Books
from stepwell.tiers.media.census import (
    Oldest,
    prune,
    record_folders,
    records,
    roots,
    used_ns,
)
from stepwell.tiers.media.census import (
    files as files_in,
)
from stepwell.tiers.media.poolfiles import PoolFiles
from stepwell.tiers.media.quota import Member, Quota

__all__ = ["GONE_AFTER_S", "LEASE_S", "LeaseWatch", "PoolLimits", "Sweeper", "elect"]

logger = logging.getLogger(__name__)

LEASE_S = 8.0
"""The sweeper's lease: one not heard of for so long is replaced, with the next beat of another."""

GONE_AFTER_S = 60.0
"""So is a member that has not been heard of taken for gone, and what it was granted is lost."""

# One that has not been heard of for so long may have been killed.
_SILENT_AFTER_S = 10.0
_SLICE_S = 0.1
_MAX_CANDIDATES = 1 << 16
_COUNT_EVERY_S = 600.0
_COUNT_AGAIN_S = 5.0
_COUNT_SHARE = 20  # so many times as long as a count took nothing is counted, unless it must
_TELL_EVERY_S = 1.0
_LOG_EVERY_S = 60.0
_PRUNE_AFTER_S = 3600.0
_YIELD_EVERY = 256
# So many candidates that somebody else has removed, and the books are no good.
_MOST_MISSING = 64
# Room is made when less than this share of the capacity is left, until twice as much is.
_LOW_SHARE, _MOST_LOW_BYTES = 32, 16 << 30


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What all that use a pool keep together.

    Attributes:
        capacity_bytes: of all records.
        min_free_bytes: that is left on the file system, whoever uses it up.
        ttl_s: after which a record leaves, by when it was written; 0 for never.
    """

    capacity_bytes: int
    min_free_bytes: int
    ttl_s: float

    def __post_init__(self) -> None:
        if self.capacity_bytes < 1 << 20:
            raise ConfigError(f"capacity is at least 1MiB: capacity={self.capacity_bytes}B")

    @property
    def low_bytes(self) -> int:
        """What is to be free at least, so that a burst of writes finds room."""
        return min(self.capacity_bytes // _LOW_SHARE, _MOST_LOW_BYTES)


class LeaseWatch:
    """Whether the lease of a pool's sweeper is over, as one member sees it."""

    def __init__(self) -> None:
        self._seen = (-1, -1)
        self._since_s = 0.0

    def is_over(self, epoch: int, lease_ns: int, now_ns: int) -> bool:
        """Whether somebody else has to sweep.

        Args:
            epoch: the highest; 0 for none.
            lease_ns: when its sweeper was heard of last.
            now_ns: both by the file system's clock.
        """
        now_s = time.monotonic()
        if self._seen != (epoch, lease_ns):
            self._seen, self._since_s = (epoch, lease_ns), now_s
        # The second where the file system's clock was set back, and the lease lies in the future.
        return epoch == 0 or now_ns - lease_ns >= LEASE_S * 1e9 or now_s - self._since_s >= LEASE_S


def elect(
    files: PoolFiles, member_id: str, limits: PoolLimits, watch: LeaseWatch, now_ns: int
) -> "Sweeper | None":
    """Begin to sweep if nobody does.

    Raises:
        OSError: from the system; then nobody has begun, or its lease will be over.
    """
    epoch = files.highest_epoch()
    if epoch and not watch.is_over(epoch, files.lease_ns(epoch), now_ns):
        return None
    if not files.begin(member_id, epoch + 1):
        return None
    return Sweeper(files, member_id, limits, epoch + 1)


class Sweeper:
    """Whoever sweeps, as long as nobody has begun a higher epoch.

    Threading: one thread.

    Args:
        files: of the pool.
        member_id: that sweeps.
        limits: of all together.
        epoch: which it has just begun.

    Raises:
        OSError: from the system; the epoch before is not ended for sure, so nobody sweeps.
    """

    def __init__(self, files: PoolFiles, member_id: str, limits: PoolLimits, epoch: int) -> None:
        self.epoch = epoch
        self.quota = Quota(limits.capacity_bytes)
        self.num_evicted = self.evicted_bytes = 0
        self._files = files
        self._member_id = member_id
        self._limits = limits
        self._folder = files.sweep_folder(epoch)
        self._num_counted: int | None = None
        self._seen: dict[str, tuple[int, float]] = {}  # of a member: its pulse, and since when
        self._refused: dict[str, int] = {}
        self._members: dict[str, Member] = {}
        self._alive: dict[str, Member] = {}  # of those whoever has been heard of just now
        self._count: Iterator[None] | None = None
        self._count_due_s = self._no_count_before_s = 0.0
        self._count_asked_ns = 0
        self._candidates: list[tuple[int, int, str]] = []  # as of `Oldest.take`
        self._few_candidates = 0
        self._num_missing = self._num_stuck = 0
        self._evicting = False
        self._short_until_bytes = 0
        self._renewed_s = self._told_s = -LEASE_S
        self._logged_s = -_LOG_EVERY_S
        self._differs: set[str] = set()
        self._told: Quota | None = None
        self._num_told = 0
        self._has_inherited = True
        self._is_untold = False
        before = files.fence(epoch)
        if before is not None:
            self.quota = before.quota
            self.quota.capacity_bytes = limits.capacity_bytes
            self._num_counted = before.num_counted
            self._seen = {name: (-1, time.monotonic()) for name in self.quota.granted}
        self._tell()
        logger.info("sweeping the pool: path=%s epoch=%d", files.path, epoch)

    @property
    def busy(self) -> bool:
        """Whether there is more to do at once."""
        return self._evicting or self.quota.counted_bytes is None

    @property
    def num_members(self) -> int:
        """As of the last step."""
        return len(self._members)

    @property
    def candidates(self) -> list[str]:
        """Who leaves next, the last first."""
        return [path for _, _, path in self._candidates]

    def step(self, now_ns: int, *, is_full: bool = False) -> bool:
        """A piece of work.

        Args:
            now_ns: by the file system's clock.
            is_full: this member could not write a small file just now.

        Returns:
            False if another has taken over.

        Raises:
            OSError: from the system; another step may do better.
        """
        try:
            if not self._is_mine():
                return self._lost()
            self._renew()
            self._meet_members(now_ns, is_full=is_full)
            self._work(now_ns)
            self.quota.grant(self._alive, self._room_bytes(self._free_bytes()))
            if self._tell_is_due():
                self._tell()
        except OSError as error:
            # What vanishes in our own folder went with it.
            if error.errno in GONE and not self._is_mine():
                return self._lost()
            raise
        return True

    def resign(self) -> None:
        """Let another take over at once."""
        with contextlib.suppress(OSError):
            if self._is_mine():
                self._files.resign(self._member_id, self.epoch)

    def _is_mine(self) -> bool:
        return self._files.is_sweeping(self._member_id, self.epoch)

    def _lost(self) -> bool:
        path = self._files.path
        logger.warning("another sweeps the pool: path=%s epoch=%d", path, self.epoch)
        return False

    def _renew(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._renewed_s + LEASE_S / 10:
            self._files.renew(self._member_id, self.epoch)
            self._renewed_s = now_s

    # Members.

    def _meet_members(self, now_ns: int, *, is_full: bool) -> None:
        now_s = time.monotonic()
        found = self._files.read_members()
        for name, (_, pulse_ns) in found.items():
            if name not in self._seen or self._seen[name][0] != pulse_ns:
                self._seen[name] = (pulse_ns, now_s)
        for name, (_, since_s) in list(self._seen.items()):
            if now_s - since_s > GONE_AFTER_S and name != self._member_id:
                # Those that only listing has not shown for a moment are kept.
                found.pop(name, None)
                self._forget(name)
        self._members = {name: member for name, (member, _) in found.items()}
        self.quota.welcome(self._members)
        self._alive = {
            name: member
            for name, (member, pulse_ns) in found.items()
            if not member.has_left and now_ns - pulse_ns < _SILENT_AFTER_S * 1e9
        }
        for name, member in list(self._members.items()):
            # All that it wrote is in the last count.
            if member.has_left and self.quota.granted[name] == self.quota.base[name]:
                del self._members[name]
                self._forget(name)
        refused = is_full
        for name, member in self._members.items():
            refused |= member.num_refused > self._refused.get(name, member.num_refused)
            self._refused[name] = member.num_refused
            if member.capacity_bytes != self._limits.capacity_bytes and name not in self._differs:
                self._differs.add(name)
                logger.warning(
                    "a member has another capacity, and ours is kept: member=%s capacity=%dB "
                    "ours=%dB", name, member.capacity_bytes, self._limits.capacity_bytes,
                )  # fmt: skip
        if refused and self.evicted_bytes >= self._short_until_bytes:
            logger.warning("the file system is full below capacity: path=%s", self._files.path)
            self._short_until_bytes = self.evicted_bytes + 2 * self._limits.low_bytes

    def _forget(self, name: str) -> None:
        del self._seen[name]
        self._refused.pop(name, None)
        self._differs.discard(name)
        if name in self.quota.granted:
            self.quota.leave(name)
        self._files.remove_member(name)

    # Making room.

    def _work(self, now_ns: int) -> None:
        low_bytes = self._limits.low_bytes
        # One that wants more than can ever be there has no say.
        wanted_bytes = min(self.quota.wanted_bytes(self._alive), self._limits.capacity_bytes // 4)
        silent = self._members.keys() - self._alive.keys()
        # For what is charged and not there few records leave, however many members are killed one
        # after the other; a count may show that it is not.
        unused_bytes = max(0, self.quota.unused_bytes(self._members, silent) - low_bytes)
        free_bytes = self._free_bytes()
        room_bytes = self._room_bytes(free_bytes, unused_bytes)
        is_charged = self._room_bytes(free_bytes) < max(low_bytes, wanted_bytes) <= room_bytes
        is_short = self.evicted_bytes < self._short_until_bytes
        if room_bytes < max(low_bytes, wanted_bytes) or is_short:
            self._evicting = self.quota.counted_bytes is not None
        elif room_bytes >= max(2 * low_bytes, wanted_bytes):
            self._evicting = False
        if self._evicting:
            until_bytes = max(2 * low_bytes, wanted_bytes)
            self._evict(until_bytes - room_bytes, time.monotonic() + _SLICE_S)
        ends_s = time.monotonic() + _SLICE_S
        if is_charged and self.quota.departed_bytes:
            self._count_due_s = min(self._count_due_s, time.monotonic())
        if self._count is None and self._is_count_due():
            self._count = self._counting(now_ns)
        while self._count is not None and time.monotonic() < ends_s:
            try:
                if next(self._count, "over") == "over":
                    self._count = None
            except OSError:
                self._count = None
                self._no_count_before_s = time.monotonic() + _COUNT_AGAIN_S
                raise

    def _is_count_due(self) -> bool:
        now_s = time.monotonic()
        return now_s >= self._no_count_before_s and (
            now_s >= self._count_due_s
            or (self._evicting and not self._candidates)
            or len(self._candidates) < self._few_candidates
            or self._files.count_asked_ns() != self._count_asked_ns
        )

    def _free_bytes(self) -> int:
        """What the file system has, beyond what is left free."""
        status = os.statvfs(self._files.sweeps)
        return status.f_bavail * status.f_frsize - self._limits.min_free_bytes

    def _room_bytes(self, free_bytes: int, unused_bytes: int = 0) -> int:
        """What may be granted; or what there is if so much of what was is not used."""
        outstanding_bytes = sum(
            max(0, self.quota.granted.get(name, 0) - member.written_bytes)
            for name, member in self._members.items()
        )
        free_bytes -= max(0, outstanding_bytes - unused_bytes)
        return min(self.quota.room_bytes + unused_bytes, free_bytes)

    def _evict(self, needed_bytes: int, ends_s: float) -> None:
        """Evict the oldest candidates until there is so much more room, or for a while."""
        until_bytes = max(self.evicted_bytes + needed_bytes, self._short_until_bytes)
        while (
            self._candidates
            and self.evicted_bytes < until_bytes
            and self._num_missing < _MOST_MISSING
            and time.monotonic() < ends_s
        ):
            used, size_bytes, path = self._candidates.pop()
            try:
                is_older = used_ns(os.lstat(path)) <= used
                if is_older and self._files.is_inside(path):
                    self._evict_one(path)
                    if self.evicted_bytes < self._short_until_bytes:
                        prune(os.path.dirname(path), 1 << 63)  # it may be short of inodes
                    self.quota.evicted_bytes += size_bytes
                    self.evicted_bytes += size_bytes
            except OSError as error:
                if error.errno in GONE and not self._is_mine():
                    raise
                self._num_missing += error.errno in GONE
                if error.errno not in GONE:
                    self._note_stuck(path, error)
        if self._num_missing >= _MOST_MISSING:
            # Others have removed a lot. What else would leave now may well stay.
            self._candidates.clear()

    def _note_stuck(self, path: str, error: OSError) -> None:
        if not self._num_stuck:
            logger.warning("cannot evict: path=%s error=%s", path, error.strerror)
        self._num_stuck += 1

    def _evict_one(self, path: str) -> None:
        """The fence: it fails once another has taken over."""
        self.num_evicted += 1
        target = f"{self._folder}/{self.num_evicted}"
        os.rename(path, target)
        # Fenced in between it is removed with the folder.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)

    def _expire(self, path: str) -> bool:
        """Evict what is over; False if it stays."""
        try:
            self._evict_one(path)
        except OSError as error:
            if error.errno not in VANISHED:
                self._note_stuck(path, error)
                return False
        return True

    # Counting.

    def _counting(self, now_ns: int) -> Iterator[None]:
        """Count every record, a folder at a time, and find the oldest."""
        began_s = time.monotonic()
        self._count_asked_ns = self._files.count_asked_ns()
        self.quota.begin_count(self._members)
        num_records = total_bytes = 0
        oldest = Oldest(_MAX_CANDIDATES)
        written_before_ns = now_ns - int(self._limits.ttl_s * 1e9) if self._limits.ttl_s else None
        for folder in self._folders():
            is_empty = True
            for seen in records(folder):
                is_empty = False
                is_over = written_before_ns is not None and seen.written_ns < written_before_ns
                if is_over and self._expire(seen.path):
                    continue
                num_records += 1
                total_bytes += seen.size_bytes
                oldest.add(seen)
                if num_records % _YIELD_EVERY == 0:
                    yield
            if is_empty:
                is_short = self.evicted_bytes < self._short_until_bytes
                prune(folder, 1 << 63 if is_short else now_ns - int(_PRUNE_AFTER_S * 1e9))
            yield
        self.quota.end_count(total_bytes)
        self._num_counted = num_records
        # Half of what can be known beforehand is enough to begin another count in time.
        self._few_candidates = _MAX_CANDIDATES // 4 if num_records > _MAX_CANDIDATES else 0
        self._candidates = oldest.take()
        self._num_missing = self._num_stuck = 0
        took_s = time.monotonic() - began_s
        self._count_due_s = time.monotonic() + max(_COUNT_EVERY_S, _COUNT_SHARE * took_s)
        # Where nothing can be evicted, and much has to be, it is not counted all the time.
        self._no_count_before_s = time.monotonic() + took_s
        if not self._candidates:
            self._short_until_bytes = self.evicted_bytes
        self._clean(now_ns)

    def _folders(self) -> Iterator[str]:
        chunks = self._files.chunks
        for root in roots(chunks):
            yield from record_folders(f"{chunks}/{root}")

    def _clean(self, now_ns: int) -> None:
        """Remove what members that are gone were writing, and what could not be removed here."""
        before_ns = now_ns - int(GONE_AFTER_S * 1e9)
        for folder in (self._files.temp, self._files.sweeps):  # <member>-<number>, part-<member>
            for seen in files_in(folder):
                name = os.path.basename(seen.path).removeprefix("part-")
                is_known = name in self._seen or name.rpartition("-")[0] in self._seen
                if seen.written_ns < before_ns and not is_known:
                    _unlink(seen.path)
        for name in os.listdir(self._folder):
            if name.isdecimal():
                _unlink(f"{self._folder}/{name}")

    # Telling.

    def _tell_is_due(self) -> bool:
        """What members wait for at once, the rest once in a while; without room that as well."""
        if self.quota == self._told:
            return False
        is_waited_for = self._told is None or self.quota.granted != self._told.granted
        at_once = is_waited_for and not self._is_untold
        return at_once or time.monotonic() >= self._told_s + _TELL_EVERY_S

    def _tell(self) -> None:
        """Tell the books, and then forget those that were taken over; without room neither."""
        self._told_s = time.monotonic()
        self._num_told += 1
        books = Books(self.epoch, self._member_id, self.quota, self._num_counted, self._num_told)
        try:
            self._files.write_books(books)
        except OSError as error:
            if error.errno not in NO_ROOM_LEFT:
                raise
            # Nobody hears of new grants until there is room; that it is made matters more.
            self._is_untold = True
            if self._told_s >= self._logged_s + _LOG_EVERY_S:
                self._logged_s = self._told_s
                path = self._files.path
                logger.warning("no room to tell what was granted, tried again: path=%s", path)
            return
        self._is_untold = False
        self._told = replace(
            self.quota, granted=dict(self.quota.granted), base=dict(self.quota.base)
        )
        if self._has_inherited:
            self._files.forget_inherited(self.epoch)
            self._has_inherited = False


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
